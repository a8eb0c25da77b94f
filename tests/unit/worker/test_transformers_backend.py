"""What only transformers can build is computed as transformers computes it, or refused, as the docs' table says."""

import importlib.util
import json
import logging
import re
from pathlib import Path

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from trioengine.checkpoint.gguf import GGMLType, GGUFTensor  # noqa: E402
from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config.engine import EngineConfig  # noqa: E402
from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.errors import CheckpointError, ConfigError  # noqa: E402
from trioengine.runtime.build import build_engine_core  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker import loading, transformers_model  # noqa: E402
from trioengine.worker.loading import open_model  # noqa: E402
from trioengine.worker.transformers_checkpoint import open_transformers_checkpoint  # noqa: E402
from trioengine.worker.transformers_model import (  # noqa: E402
    TransformersModel,
    check_against_transformers,
    load_transformers_model,
    paged_logits,
    relative_error,
)

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
TOLERANCE = 1e-5
VOCAB_SIZE = 131
WINDOW = 7
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""By their names in transformers' configurations, where they have them."""
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
"""Multi-head latent attention: `head_dim` is what is rotated."""
MIXED_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 2}
CHANGES = {
    "axk1": LATENT,
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "glm4_moe_lite": LATENT,
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 8},
    "laguna": MIXED_WINDOWS,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mellum": MIXED_WINDOWS,
    "minicpm3": LATENT,
    "sarvam_mla": LATENT,
    "youtu": LATENT,
}
TEXT_LENGTHS = (40, 13)
STEPS = ((30, 12), (9, 0), (1, 1))
"""A prompt in two parts, a whole one, and decodes."""
GREEDY = SamplingParams(temperature=0)


def write_tiny(folder: Path, kind: str, **changes) -> ModelLocation:
    """A small model with random weights of this model type."""
    known = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name)} | CHANGES.get(kind, {}) | changes
    config = AutoConfig.for_model(kind, **{name: value for name, value in sizes.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.25
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
            if weight.dim() == 1 and name.endswith("weight"):
                weight += 1
    model.save_pretrained(folder)
    return ModelLocation(ModelKind.FOLDER, folder, kind)


def change_config(location: ModelLocation, **changes) -> None:
    path = location.path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(location: ModelLocation) -> TransformersModel:
    return load_transformers_model(open_transformers_checkpoint(location))


def random_texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in TEXT_LENGTHS]


@torch.inference_mode()
def error_of(model: TransformersModel) -> float:
    """Of steps over the paged cache against transformers' own attention."""
    texts = random_texts()
    return relative_error(paged_logits(model, texts, STEPS), torch.cat([model.plain_logits(text) for text in texts]))


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("gpt2", [(None, 4, 16)]),
        ("cohere2", [(WINDOW, 2, 16), (None, 2, 16)]),
        ("gpt_oss", [(WINDOW, 2, 16), (None, 2, 16)]),
        ("mimo_v2_flash", [(None, 2, 16), (WINDOW, 4, 16)]),
        ("deepseek_v3", [(None, 4, 24)]),
        ("olmoe", [(None, 2, 16)]),
        ("gemma2", [(WINDOW, 2, 16), (None, 2, 16)]),
    ],
)
def test_it_computes_what_transformers_computes(kind: str, groups: list[tuple], tmp_path: Path) -> None:
    """Positions that are learned, windows, sinks, layers of different heads, latent attention, experts, soft caps."""
    model = load(write_tiny(tmp_path, kind))
    assert [(group.window, group.num_kv_heads, group.head_dim) for group in model.config.kv_groups] == groups
    assert error_of(model) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("bloom", "code of its own"),
        ("mamba", "keeps a state"),
        ("bert", "not causal"),
        ("llama4_text", "sees other tokens than a causal window's"),
        ("falcon", "code of its own"),
        ("lfm2", "4 layers attend 2 times"),
    ],
)
def test_what_it_cannot_run_is_refused_before_weights_are_read(kind: str, why: str, tmp_path: Path) -> None:
    location = write_tiny(tmp_path, kind)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=re.escape(why)) as caught:
        open_transformers_checkpoint(location)
    assert caught.value.path == str(tmp_path)


@pytest.mark.parametrize(
    ("kind", "keyword"),
    [("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("gemma2", "scaling"), ("cohere2", "sliding_window")],
)
def test_the_check_at_load_finds_what_would_be_silently_wrong(
    kind: str, keyword: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of attention that nothing computes."""
    changes = {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 3} if kind == "gemma2" else {}
    model = load(write_tiny(tmp_path, kind, **changes))
    if keyword == "sliding_window":
        calls = tuple(attrs.evolve(call, window=None) for call in model.config.attention_calls)
        model = TransformersModel(attrs.evolve(model.config, attention_calls=calls), model._module)
    else:
        attend = transformers_model._PagedStep.attend
        monkeypatch.setattr(
            transformers_model._PagedStep,
            "attend",
            lambda *args: attend(*args[:-1], {**args[-1], keyword: None}),
        )
    with pytest.raises(CheckpointError, match="differs from transformers' own results"):
        check_against_transformers(tmp_path, model)


def greedy_tokens(executor, prompt: list[int], count: int) -> list[int]:
    """In chunks of at most 5 tokens. The blocks of both groups begin at 3."""
    tokens: list[int] = []
    new = [NewSequence(7, prompt, len(prompt), GREEDY, seed=0)]
    groups = len(executor.kv_cache_groups)
    first = 0
    for step in range(100):
        num_tokens = min(5, len(prompt) + len(tokens) - first)
        blocks = [3 + number for number in range(2) for _ in range(groups)] if step == 0 else []
        executor.submit(StepPlan(step, [ScheduledSequence(7, first, num_tokens, blocks)], new))
        new = []
        first += num_tokens
        token = executor.result().tokens[0]
        if first == len(prompt) + len(tokens):
            tokens.append(token)
        if len(tokens) == count:
            break
    return tokens


def test_an_engine_generates_and_sleeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its tokens are those of transformers, and the log says what computes."""
    location = write_tiny(tmp_path, "cohere2")
    prompt = random_texts()[1].tolist()
    model = load(location)
    expected = list(prompt)
    with torch.inference_mode():
        for _ in range(4):
            expected.append(int(model.plain_logits(torch.tensor(expected))[-1].argmax()))
    with caplog.at_level(logging.WARNING, logger=loading.__name__):
        built = build_engine_core(EngineConfig(cpu_threads=1), location)
    (record,) = caplog.records
    assert "Cohere2ForCausalLM" in record.getMessage()
    executor = built.core.executor
    assert [group.window for group in executor.kv_cache_groups] == [WINDOW, None]
    assert prompt + greedy_tokens(executor, prompt, 4) == expected
    facts = built.ready.model
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (VOCAB_SIZE, 128, (2,))
    built.close()


def test_weights_are_loaded_again_unless_the_files_have_changed(tmp_path: Path) -> None:
    from trioengine.config.resolve import ResolvedConfig
    from trioengine.worker.transformers_backend import load_transformers_backend

    location = write_tiny(tmp_path, "gpt2")
    config = ResolvedConfig(
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        max_num_logit_rows=64,
        block_size=16,
        num_kv_blocks=(8,),
        num_offload_blocks=0,
        cpu_threads=1,
        reasons={},
    )
    fractions: list[float] = []
    backend = load_transformers_backend(open_transformers_checkpoint(location), config, fractions.append)
    assert fractions == [1.0]
    assert backend.kv_block(0, 7).shape == (4, 2, 16, 4, 16)
    backend.drop_weights()
    backend.drop_kv_cache()
    backend.load_weights()
    backend.make_kv_cache()
    assert not backend.kv_block(0, 7).any()
    backend.drop_weights()
    change_config(location, changed=True)
    with pytest.raises(CheckpointError, match="not what it was"):
        backend.load_weights()


def test_new_weights_make_the_model_that_a_folder_with_them_is(tmp_path: Path) -> None:
    location = write_tiny(tmp_path, "gpt2")
    checkpoint = open_transformers_checkpoint(location)
    path = location.path / "model.safetensors"
    old = load_file(path)
    name = "transformer.h.1.mlp.c_fc.weight"
    changed = {name: old[name] + torch.randn(old[name].shape, generator=torch.Generator().manual_seed(1))}
    tensor = GGUFTensor(name, GGMLType.F32, tuple(old[name].shape), changed[name].numpy().reshape(-1).view(np.uint8))
    text = torch.arange(11)
    model = load_transformers_model(checkpoint, {name: tensor})
    before = load_transformers_model(checkpoint).plain_logits(text)
    save_file(old | changed, path, {"format": "pt"})
    after = load_transformers_model(open_transformers_checkpoint(location)).plain_logits(text)
    assert torch.equal(model.plain_logits(text), after)
    assert not torch.equal(before, after)


def test_our_own_decoder_comes_first(tmp_path: Path) -> None:
    location = write_tiny(tmp_path, "llama")
    assert open_model(location).config.architecture == "llama"


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = write_tiny(tmp_path, "gpt2")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "transformers" else find_spec(name, *args)
    )
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel.*pip install 'trioengine\[transformers\]'"):
        open_model(location)


@pytest.mark.parametrize("option", ["quantization", "enable_lora"])
def test_options_that_it_cannot_have_are_refused(option: str, tmp_path: Path) -> None:
    config = EngineConfig(quantization="int8") if option == "quantization" else EngineConfig(enable_lora=True)
    with pytest.raises(ConfigError, match=option) as caught:
        build_engine_core(config, write_tiny(tmp_path, "gpt2"))
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "no_such_model"}, "knows the model type 'no_such_model'"),
        (
            {"model_type": "new", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
            "knows the model type 'new'",
        ),
        ({"architectures": ["GPTNeoXForSequenceClassification"]}, "only GPTNeoXForCausalLM can be run"),
        (
            {"model_type": "mpnet", "architectures": ["MPNetModel"]},
            "are MPNetModel; of its model type none can be run. Vectors and labels are given by BertModel, ",
        ),
        ({"model_type": "electra", "architectures": ["ElectraModel"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "weights are packed"),
        ({"hidden_size": -3}, "transformers cannot"),
        ({"hidden_size": "64"}, "transformers cannot read"),
        ({"eos_token_id": "</s>"}, "."),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope scaling is dynamic"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_folder_says_is_not_trusted(changes: dict[str, object], why: str, tmp_path: Path) -> None:
    location = write_tiny(tmp_path, "gpt_neox")
    (tmp_path / "code.py").write_text("raise SystemExit('code of a model was run')")
    change_config(location, **changes)
    with pytest.raises(CheckpointError, match=re.escape(why)):
        open_transformers_checkpoint(location)


@pytest.mark.parametrize("damage", ["missing", "unexpected", "truncated", "gone"])
def test_damaged_weights_are_an_error(damage: str, tmp_path: Path) -> None:
    """transformers would take random numbers for what is missing."""
    location = write_tiny(tmp_path, "gpt_neox")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    match damage:
        case "missing":
            del tensors["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
            save_file(tensors, path, metadata={"format": "pt"})
        case "unexpected":
            save_file({**tensors, "gpt_neox.layers.1.more": torch.zeros(3)}, path, metadata={"format": "pt"})
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1000])
        case _:
            path.unlink()
    with pytest.raises(CheckpointError, match=damage if damage in ("missing", "unexpected") else "cannot load"):
        load(location)


def test_too_little_memory_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **kwargs: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: ...")

    checkpoint = open_transformers_checkpoint(write_tiny(tmp_path, "gpt_neox"))
    monkeypatch.setattr(transformers_model.AutoModelForCausalLM, "from_pretrained", no_memory)
    with pytest.raises(MemoryError):
        load_transformers_model(checkpoint)


def test_halves_become_floats(tmp_path: Path) -> None:
    location = write_tiny(tmp_path, "gpt_neox")
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    model = load(location)
    assert model.plain_logits(torch.tensor([5])).dtype == torch.float32
    assert error_of(model) < TOLERANCE


def test_longer_texts_than_the_first_frequencies_are_for_are_not_offered(tmp_path: Path) -> None:
    """Beyond them, longrope's frequencies are those of the longest sequence of a step."""
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 32,
    }
    location = write_tiny(tmp_path, "seed_oss", rope_parameters=parameters)
    assert open_transformers_checkpoint(location).config.max_position_embeddings == 32


def test_yarn_that_a_user_adds_makes_the_context_longer(tmp_path: Path) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
    location = write_tiny(tmp_path, "seed_oss", rope_parameters=parameters)
    assert open_transformers_checkpoint(location).config.max_position_embeddings == 256


def table() -> list[tuple[str, str]]:
    """The docs' rows: model type and result."""
    section = DOCS.read_text().partition("## Other architectures")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| ((?:runs|refused)[^|]*?) \|$", section, re.MULTILINE)


def test_the_table_has_rows() -> None:
    rows = dict(table())
    assert len(rows) == len(table()) > 80
    assert sum(result.startswith("runs") for result in rows.values()) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "result"), table())
def test_the_table_is_true(kind: str, result: str, tmp_path: Path) -> None:
    location = write_tiny(tmp_path, kind)
    if result.startswith("runs"):
        assert error_of(load(location)) < TOLERANCE
        return
    with pytest.raises(CheckpointError) as caught:
        load(location)
    assert result.removeprefix("refused: ") in caught.value.message
