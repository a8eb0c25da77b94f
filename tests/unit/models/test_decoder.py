"""The decoder's logits equal transformers', however the tokens are cut into steps and wherever their blocks lie.

Each case is a tiny random model of a family with switches set; its mutations say which of these would be missed if they
were wrong. The native kernels compute the same, as far as keys and values in halves allow, and so do a device's
operations.
"""

import functools
from collections.abc import Callable, Mapping

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402
from trioengine_kernels.native.tiles import TileKind  # noqa: E402
from trioengine_kernels.paged_attention import plan_attention  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config.engine import Quantization  # noqa: E402
from trioengine.models.config import Activation, Rope  # noqa: E402
from trioengine.models.decoder import Decoder, Rotation  # noqa: E402
from trioengine.models.device_ops import prepared  # noqa: E402
from trioengine.models.device_weights import DeviceWeightMaker  # noqa: E402
from trioengine.models.loader import LoadedModel, load_model, open_checkpoint  # noqa: E402
from trioengine.models.native_ops import NativeWeights  # noqa: E402
from trioengine.models.rope import inverse_frequencies  # noqa: E402
from trioengine.models.torch_ops import (  # noqa: E402
    DecoderInput,
    LayerKVCache,
    TorchOps,
    TorchWeights,
)
from trioengine.testing.logits import HalfCacheOps, device_logits, native_logits, torch_logits  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402

BLOCK_SIZE = 4
TOLERANCE = 1e-5
NATIVE_TOLERANCE = 1e-4
"""A key or value that is computed a little differently may become the next half, which is 5e-4 of it away."""
TINY = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def config(**changes):
    """A mutation that changes the configuration."""
    return lambda c, w: (attrs.evolve(c, **changes), w)


def layers(**changes):
    """A mutation that changes the weights of every layer."""
    return lambda c, w: (c, attrs.evolve(w, layers=[attrs.evolve(layer, **changes) for layer in w.layers]))


def rotations(change):
    """A mutation that changes the rotation of each layer, by its rope."""

    def mutate(c, w):
        changed = [change(rotation, rope, c) for rotation, rope in zip(w.rotations, c.layer_ropes, strict=True)]
        return c, attrs.evolve(w, rotations=changed)

    return mutate


def rotation_of(rope, like, c):
    frequencies = inverse_frequencies(rope, c.head_dim, 128)
    is_torch = isinstance(like.inverse_frequencies, torch.Tensor)
    return Rotation(torch.from_numpy(frequencies) if is_torch else frequencies, like.attention_factor)


UNSCALED = rotations(lambda rotation, rope, c: rotation_of(attrs.evolve(rope, scaling=None), rotation, c))
WITHOUT_FACTOR = rotations(lambda rotation, rope, c: attrs.evolve(rotation, attention_factor=1.0))
ALL_ROTATED = rotations(lambda rotation, rope, c: rotation_of(attrs.evolve(rope, rotary_dim=None), rotation, c))


def experts(**changes):
    return lambda c, w: (attrs.evolve(c, experts=attrs.evolve(c.experts, **changes)), w)


def first_rotation_everywhere(c, w):
    return c, attrs.evolve(w, rotations=[w.rotations[0]] * c.num_layers)


def final_norm(change):
    """A mutation of these weights, in which the multiplier of the logits is, too."""
    return lambda c, w: (c, attrs.evolve(w, final_norm=change(w.final_norm)))


@attrs.frozen
class Case:
    """A model, and changes of ours that must show."""

    config_name: str
    changes: Mapping[str, object]
    mutations: Mapping[str, Callable]
    max_length: int | None = None


def yarn(**changes):
    parameters = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
    return {"rope_parameters": parameters | {"beta_fast": 4.0, "beta_slow": 0.5} | changes}


def long_rope(original_max_position_embeddings):
    """Heads of 8, of which 6 elements are rotated."""
    return {
        "original_max_position_embeddings": original_max_position_embeddings,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": original_max_position_embeddings,
            "short_factor": [1.0, 1.25, 1.5],
            "long_factor": [2.0, 3.0, 7.0],
        },
    }


GEMMA = {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 21, "sliding_window": 7}
WINDOW_WHERE = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
NORMS = {
    "no query norm": layers(query_norm=None, key_norm=None),
}
POST_NORMS = {
    "no attention post norm": layers(attention_post_norm=None),
    "no MLP post norm": layers(mlp_post_norm=None),
}
GEMMA_MUTATIONS = {
    **POST_NORMS,
    "norm without 1": final_norm(lambda weight: weight - 1),
    "SiLU": config(activation=Activation.SILU),
    "no embedding multiplier": config(embedding_multiplier=1.0),
    "scale of the head size": config(attention_scale=8**-0.5),
    "no windows": config(layer_windows=(None, None, None)),
    "other window": config(layer_windows=(8, None, 8)),
}
MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 5}
CASES = {
    "llama": Case("LlamaConfig", {"tie_word_embeddings": True}, {"epsilon": config(rms_norm_epsilon=1e-5)}),
    "llama untied, biased, other head size": Case(
        "LlamaConfig",
        {"attention_bias": True, "head_dim": 12},
        {
            "no output bias": layers(output_bias=None),
            "no qkv bias": layers(qkv_bias=None),
            "tied": lambda c, w: (c, attrs.evolve(w, head=w.embedding)),
        },
    ),
    "llama rope linear": Case(
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        {"no scaling": UNSCALED},
    ),
    "llama rope llama3": Case(
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"no scaling": UNSCALED},
    ),
    "llama rope yarn": Case("LlamaConfig", yarn(), {"no scaling": UNSCALED, "no attention factor": WITHOUT_FACTOR}),
    "llama rope yarn, ramp not truncated": Case(
        "LlamaConfig",
        yarn(truncate=False, mscale=1.5, mscale_all_dim=0.5),
        {
            "truncated": rotations(
                lambda rotation, rope, c: rotation_of(
                    attrs.evolve(rope, scaling=attrs.evolve(rope.scaling, is_truncated=True)), rotation, c
                )
            ),
            "no attention factor": WITHOUT_FACTOR,
        },
    ),
    "llama without groups": Case(
        "LlamaConfig", {"num_key_value_heads": 6, "rms_norm_eps": 1e-3}, {"epsilon": config(rms_norm_epsilon=1e-5)}
    ),
    "mistral with a window": Case(
        "MistralConfig", {"sliding_window": 7}, {"other window": config(layer_windows=(8, 8, 8))}
    ),
    "qwen2": Case(
        "Qwen2Config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        {
            "no qkv bias": layers(qkv_bias=None),
            "other theta": rotations(lambda rotation, rope, c: rotation_of(Rope(10000.0), rotation, c)),
        },
    ),
    "qwen2 with windows in the last layers": Case(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        {"fewer windows": config(layer_windows=(None, None, 7))},
    ),
    "qwen2 with windows where it says": Case(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, **WINDOW_WHERE},
        {"fewer windows": config(layer_windows=(None, 5, None))},
    ),
    "qwen2 tied": Case(
        "Qwen2Config",
        {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 5},
        {"windows": config(layer_windows=(5, 5, 5))},
    ),
    "qwen3": Case(
        "Qwen3Config",
        {"head_dim": 16},
        {**NORMS, "epsilon": config(rms_norm_epsilon=1e-3)},
    ),
    "qwen3 biased, with windows": Case(
        "Qwen3Config",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
        {"no windows": config(layer_windows=(None, None, None)), "no output bias": layers(output_bias=None)},
    ),
    "smollm3": Case(
        "SmolLM3Config",
        {"num_hidden_layers": 4},
        {"rope everywhere": first_rotation_everywhere},
    ),
    "smollm3 with windows": Case(
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 7},
        {"no windows": config(layer_windows=(None, None, None)), "rope everywhere": first_rotation_everywhere},
    ),
    "gemma": Case(
        "GemmaConfig",
        {"head_dim": 8, "hidden_act": "gelu"},
        {
            "norm without 1": final_norm(lambda weight: weight - 1),
            "SiLU": config(activation=Activation.SILU),
            "no embedding multiplier": config(embedding_multiplier=1.0),
        },
    ),
    "gemma2": Case(
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        {
            **GEMMA_MUTATIONS,
            "no attention soft cap": config(attention_soft_cap=None),
            "no logit soft cap": config(logit_soft_cap=None),
        },
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        {
            **GEMMA,
            **WINDOW_WHERE,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        {**GEMMA_MUTATIONS, **NORMS, "local rope everywhere": first_rotation_everywhere},
    ),
    "phi3 with a window": Case(
        "Phi3Config",
        {
            "sliding_window": 9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
        {"no windows": config(layer_windows=(None, None, None)), "all rotated": ALL_ROTATED},
    ),
    "phi3 longrope, long": Case(
        "Phi3Config",
        long_rope(8),
        {"no scaling": UNSCALED, "no attention factor": WITHOUT_FACTOR},
    ),
    "phi3 longrope, short": Case(
        "Phi3Config",
        long_rope(64),
        {
            "no scaling": UNSCALED,
            "long factors": rotations(lambda rotation, rope, c: rotation_of(rope, rotation, c)),
            "no attention factor": WITHOUT_FACTOR,
        },
        max_length=64,
    ),
    "olmo2": Case("Olmo2Config", {"rms_norm_eps": 1e-3}, {**NORMS, **POST_NORMS}),
    "granite": Case(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 7.0,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
        },
        {
            "no embedding multiplier": config(embedding_multiplier=1.0),
            "no residual multiplier": config(residual_multiplier=1.0),
            "scale of the head size": config(attention_scale=8**-0.5),
            "no logit multiplier": final_norm(lambda weight: weight * 7),
            "epsilon": config(rms_norm_epsilon=1e-5),
        },
    ),
    "mixtral": Case(
        "MixtralConfig",
        {**MIXTURE, "sliding_window": 9},
        {
            "one expert": experts(num_experts_per_token=1),
            "weights not normalized": experts(has_normalized_weights=False),
            "no windows": config(layer_windows=(None, None, None)),
        },
    ),
    "qwen3 moe": Case(
        "Qwen3MoeConfig",
        {**MIXTURE, "head_dim": 16, "moe_intermediate_size": 24, "num_experts_per_tok": 3},
        {**NORMS, "one expert": experts(num_experts_per_token=1), "normalized": experts(has_normalized_weights=True)},
    ),
    "qwen3 moe with normalized weights and windows": Case(
        "Qwen3MoeConfig",
        {
            **MIXTURE,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
        {
            "weights not normalized": experts(has_normalized_weights=False),
            "no windows": config(layer_windows=(None, None, None)),
        },
    ),
}


class Models:
    """A random model of transformers, and ours loaded from what it saved: in torch and in tiles of float32."""

    def __init__(self, case, folder):
        self.case = case
        torch.manual_seed(0)
        config = getattr(transformers, case.config_name)(**TINY | case.changes)
        self.theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        norm_mean = 0.0 if "Gemma" in case.config_name else 1.0  # Where 1 is added to it.
        with torch.no_grad():
            for name, parameter in self.theirs.named_parameters():
                # Biases start as 0 and norms as 1: forgetting them would not show.
                parameter.normal_(norm_mean if "norm" in name else 0.0, 0.2)
        self.theirs.save_pretrained(folder)
        self.checkpoint = open_checkpoint(ModelLocation(ModelKind.FOLDER, folder, "tiny"))
        self.torch = self.load(TorchWeights())

    @functools.cached_property
    def native(self):
        library = native_library()
        return self.load(NativeWeights(library, ThreadPool(library, 2)))

    @functools.cached_property
    def device(self):
        return prepared(self.load(DeviceWeightMaker(torch.device("cpu"), torch.float32)))

    def load(self, maker):
        return load_model(self.checkpoint, maker, max_length=self.case.max_length)

    def mutants(self, model):
        for name, mutate in self.case.mutations.items():
            config, weights = mutate(model.config, model.decoder.weights)
            yield name, LoadedModel(config, Decoder(config, weights))


@pytest.fixture(scope="module", params=CASES)
def models(request, tmp_path_factory):
    return Models(CASES[request.param], tmp_path_factory.mktemp("model"))


class Driver:
    """Feeds sequences to a decoder in any pieces and collects the logits of all their tokens.

    Each KV group has blocks of its own. Those behind its window are overwritten with NaN and taken off the block table.
    """

    def __init__(self, model, sequences):
        self.model, self.sequences = model, sequences
        config = model.config
        num_blocks = [-(-len(sequence) // BLOCK_SIZE) for sequence in sequences]
        self.block_tables, self.cache = [], []
        for number, group in enumerate(config.kv_groups):
            generator = torch.Generator().manual_seed(3 + number)
            order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
            table = torch.full((len(sequences), max(num_blocks)), -1, dtype=torch.int32)
            for i, count in enumerate(num_blocks):
                table[i, :count] = torch.tensor([order.pop(0) for _ in range(count)])
            self.block_tables.append(table)
            shape = (sum(num_blocks) + 3, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
            self.cache.append(
                [LayerKVCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in group.layers]
            )
        self.done = [0] * len(sequences)
        self.logits = [[] for _ in sequences]

    def step(self, counts):
        """Compute the next counts[i] tokens of sequence i; 0 leaves it out."""
        members = [i for i, count in enumerate(counts) if count]
        token_ids, positions, owners = [], [], []
        for i in members:
            places = range(self.done[i], self.done[i] + counts[i])
            token_ids += [self.sequences[i][place] for place in places]
            positions += places
            owners += [i] * counts[i]
        positions = torch.tensor(positions)
        self.leave_windows(members)
        for i in members:
            self.done[i] += counts[i]
        plans = [
            plan_attention(
                table[members],
                torch.tensor([0, *(counts[i] for i in members)]).cumsum(0).int(),
                torch.tensor([self.done[i] for i in members]).int(),
                block_size=BLOCK_SIZE,
                window=group.window,
            )
            for table, group in zip(self.block_tables, self.model.config.kv_groups, strict=True)
        ]
        batch = DecoderInput(
            token_ids=torch.tensor(token_ids),
            positions=positions,
            slots=[
                table[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
                for table in self.block_tables
            ],
            attention=plans,
            logit_rows=torch.arange(len(token_ids)),
        )
        logits = self.model.decoder.forward(TorchOps(batch, self.cache))
        for i, rows in zip(members, logits.split([counts[i] for i in members]), strict=True):
            self.logits[i].append(rows)

    def leave_windows(self, members):
        for table, caches, group in zip(self.block_tables, self.cache, self.model.config.kv_groups, strict=True):
            for i in members if group.window is not None else ():
                for column in range(max(0, self.done[i] - group.window + 1) // BLOCK_SIZE):
                    if table[i, column] >= 0:
                        for cache in caches:
                            cache.keys[table[i, column]] = cache.values[table[i, column]] = torch.nan
                    table[i, column] = -1


def worst_error(theirs, ours, schedule, lengths) -> float:
    """Of the sequences' logits, ‖ours - theirs‖ / ‖theirs‖."""
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(TINY["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    errors = []
    with torch.inference_mode():
        driver = Driver(ours, sequences)
        for counts in schedule:
            driver.step(counts)
        assert driver.done == lengths
        for i, sequence in enumerate(sequences):
            expected = theirs(torch.tensor([sequence])).logits[0]
            errors.append(difference(torch.cat(driver.logits[i]).numpy(), expected.numpy()))
    return max(errors)


def difference(actual, expected) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def test_prefill_at_once(models) -> None:
    assert worst_error(models.theirs, models.torch, [[1, 15, 17, 40]], [1, 15, 17, 40]) < TOLERANCE


def test_prefill_in_chunks(models) -> None:
    assert (
        worst_error(models.theirs, models.torch, [[5, 16, 0], [0, 16, 3], [8, 1, 17], [0, 0, 1]], [13, 33, 21])
        < TOLERANCE
    )


def test_decode_beside_prefill(models) -> None:
    """Sequences join while others decode, as in continuous batching."""
    assert (
        worst_error(models.theirs, models.torch, [[9, 0, 0], [1, 20, 0], [1, 1, 11], *[[1, 1, 1]] * 8], [19, 29, 19])
        < TOLERANCE
    )


def test_only_the_wanted_rows_get_logits(models) -> None:
    ours = models.torch
    with torch.inference_mode():
        driver = Driver(ours, [[3, 4, 5]])
        batch = DecoderInput(
            token_ids=torch.tensor([3, 4, 5]),
            positions=torch.arange(3),
            slots=[table[0, 0].item() * BLOCK_SIZE + torch.arange(3) for table in driver.block_tables],
            attention=[
                plan_attention(table, torch.tensor([0, 3]), torch.tensor([3]), block_size=BLOCK_SIZE)
                for table in driver.block_tables
            ],
            logit_rows=torch.tensor([2]),
        )
        assert ours.decoder.forward(TorchOps(batch, driver.cache)).shape == (1, TINY["vocab_size"])


def test_a_switch_that_is_set_wrong_shows(models) -> None:
    """The comparison would notice each of the differences between models: none of them is dead."""
    for name, mutant in models.mutants(models.torch):
        assert worst_error(models.theirs, mutant, [[40]], [40]) > 2 * TOLERANCE, name


def test_the_native_kernels_compute_the_same(models) -> None:
    """Bit for bit however the tokens are cut; each switch is alive there, too."""
    tokens = [(place * 29 + place * place * 5 + 3) % TINY["vocab_size"] for place in range(41)]
    whole = native_logits(models.native, tokens, [41])
    assert np.array_equal(native_logits(models.native, tokens, [3, 16, 1, 21], num_threads=1), whole)
    expected = torch_logits(models.torch, tokens, HalfCacheOps)
    assert difference(whole, expected) < NATIVE_TOLERANCE
    for name, mutant in models.mutants(models.native):
        assert difference(native_logits(mutant, tokens, [41]), expected) > 2 * NATIVE_TOLERANCE, name


def test_a_device_computes_the_same(models) -> None:
    """However the tokens are cut; each switch is alive there, too."""
    tokens = [(place * 29 + place * place * 5 + 3) % TINY["vocab_size"] for place in range(41)]
    expected = torch_logits(models.torch, tokens)
    assert difference(device_logits(models.device, tokens, [3, 16, 1, 21]), expected) < TOLERANCE
    for name, mutant in models.mutants(models.device):
        assert difference(device_logits(mutant, tokens, [41]), expected) > 2 * TOLERANCE, name


def test_of_a_model_that_sees_its_text_is_computed(tmp_path) -> None:
    """As Gemma 3's larger models are saved: without images, they are the text model."""
    case = CASES["gemma3"]
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    theirs = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=TINY | case.changes,
            vision_config={**vision, "image_size": 28, "patch_size": 14},
            image_token_index=198,
        )
    ).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_model(open_checkpoint(ModelLocation(ModelKind.FOLDER, tmp_path, "tiny")), TorchWeights())
    assert worst_error(theirs, ours, [[21]], [21]) < TOLERANCE


def test_a_router_is_not_quantized(tmp_path) -> None:
    """Another expert is another answer; and it is small."""
    models = Models(CASES["qwen3 moe"], tmp_path)
    library = native_library()
    quantized = models.load(NativeWeights(library, ThreadPool(library, 2), Quantization.INT8))
    mlp = quantized.decoder.weights.layers[0].mlp
    assert {tiles.kind for tiles in mlp.router} == {TileKind.F32}
    assert {tiles.kind for expert in mlp.experts for tiles in (*expert.gate_up, *expert.down)} == {TileKind.INT8}
    tokens = list(range(41))
    logits = native_logits(quantized, tokens, [41])
    assert np.array_equal(native_logits(quantized, tokens, [3, 16, 1, 21], num_threads=1), logits)
    assert difference(logits, torch_logits(models.torch, tokens)) < 0.2
