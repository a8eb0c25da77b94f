"""The decoder's logits equal transformers', however the tokens are cut into steps and wherever their blocks lie."""

import attrs
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trioengine_kernels.paged_attention import plan_attention  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.models.decoder import Decoder  # noqa: E402
from trioengine.models.loader import LoadedModel, open_checkpoint  # noqa: E402
from trioengine.models.rope import inverse_frequencies  # noqa: E402
from trioengine.models.torch_ops import (  # noqa: E402
    DecoderInput,
    LayerKVCache,
    TorchOps,
    load_torch_model,
)

BLOCK_SIZE = 4
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
}
CASES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama untied, biased, other head size": ("LlamaConfig", {"attention_bias": True, "head_dim": 12}),
    "llama rope linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama rope llama3": (
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
    ),
    "llama without groups": ("LlamaConfig", {"num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
    "mistral with a window": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    "qwen2 with windows in the last layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen2 with windows where it says": (
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2 tied": ("Qwen2Config", {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 5}),
}


@pytest.fixture(scope="module", params=CASES)
def models(request, tmp_path_factory):
    """A random model of transformers, and ours loaded from what it saved."""
    config_name, changes = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**TINY | changes)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # Biases start as 0 and norms as 1: forgetting them would not show.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return theirs, load_torch_model(open_checkpoint(ModelLocation(ModelKind.FOLDER, folder, "tiny")))


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


def check(models, schedule, lengths) -> None:
    theirs, ours = models
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(TINY["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    with torch.inference_mode():
        driver = Driver(ours, sequences)
        for counts in schedule:
            driver.step(counts)
        assert driver.done == lengths
        for i, sequence in enumerate(sequences):
            expected = theirs(torch.tensor([sequence])).logits[0]
            error = ((torch.cat(driver.logits[i]) - expected).norm() / expected.norm()).item()
            assert error < 1e-5


def test_prefill_at_once(models) -> None:
    check(models, [[1, 15, 17, 40]], [1, 15, 17, 40])


def test_prefill_in_chunks(models) -> None:
    check(models, [[5, 16, 0], [0, 16, 3], [8, 1, 17], [0, 0, 1]], [13, 33, 21])


def test_decode_beside_prefill(models) -> None:
    """Sequences join while others decode, as in continuous batching."""
    check(models, [[9, 0, 0], [1, 20, 0], [1, 1, 11], *[[1, 1, 1]] * 8], [19, 29, 19])


def test_only_the_wanted_rows_get_logits(models) -> None:
    _, ours = models
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


def without_biases(weights, kind):
    return attrs.evolve(weights, layers=[attrs.evolve(layer, **{kind: None}) for layer in weights.layers])


def without_scaling(config):
    return torch.from_numpy(inverse_frequencies(attrs.evolve(config, rope_scaling=None)))


MUTATIONS = {
    "llama": lambda c, w: (attrs.evolve(c, rms_norm_epsilon=1e-5), w),
    "llama without groups": lambda c, w: (attrs.evolve(c, rms_norm_epsilon=1e-5), w),
    "llama untied, biased, other head size": lambda c, w: (c, without_biases(w, "output_bias")),
    "llama rope linear": lambda c, w: (c, attrs.evolve(w, inverse_frequencies=without_scaling(c))),
    "llama rope llama3": lambda c, w: (c, attrs.evolve(w, inverse_frequencies=without_scaling(c))),
    "mistral with a window": lambda c, w: (attrs.evolve(c, layer_windows=(8, 8, 8)), w),
    "qwen2 with windows in the last layers": lambda c, w: (attrs.evolve(c, layer_windows=(None, None, 7)), w),
    "qwen2 with windows where it says": lambda c, w: (attrs.evolve(c, layer_windows=(None, 5, None)), w),
    "qwen2": lambda c, w: (c, without_biases(w, "qkv_bias")),
    "qwen2 tied": lambda c, w: (c, attrs.evolve(w, head=w.head.flip(0))),
}


def test_a_switch_that_is_set_wrong_shows(request, models) -> None:
    """The comparison would notice each of the differences between models: none of them is dead."""
    theirs, ours = models
    config, weights = MUTATIONS[request.node.callspec.params["models"]](ours.config, ours.decoder.weights)
    with pytest.raises(AssertionError):
        check((theirs, LoadedModel(config, Decoder(config, weights))), [[40]], [40])
