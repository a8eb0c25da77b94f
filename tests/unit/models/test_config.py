"""A model's facts from GGUF metadata and config.json; what is wrong or not supported is a `CheckpointError`."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import attrs
import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.checkpoint.gguf import GGMLType, GGUFFile, GGUFTensor, open_gguf
from trioengine.errors import CheckpointError
from trioengine.models.config import (
    FAMILIES,
    Activation,
    Architecture,
    Experts,
    KVGroup,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    NormPlacement,
    QueryKeyNorm,
    Rope,
    RopeFactors,
    YarnRopeScaling,
    config_from_folder,
    config_from_gguf,
)
from trioengine.models.rope import inverse_frequencies

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF_METADATA = {
    "general.architecture": "llama",
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
}


def from_folder(folder: Path, changes: dict[str, object], generation: dict[str, object] | None = None):
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return config_from_folder(folder)


def from_gguf(changes: dict[str, object], tensor_names: tuple[str, ...] = ()):
    data = np.zeros(0, np.uint8)
    tensors = {name: GGUFTensor(name, GGMLType.F32, (48,), data) for name in tensor_names}
    tensors["token_embd.weight"] = GGUFTensor("token_embd.weight", GGMLType.F32, (100, 48), data)
    return config_from_gguf(GGUFFile(Path("tiny.gguf"), GGUF_METADATA | changes, tensors))


def test_both_forms_of_one_model_give_the_same_facts(tmp_path: Path) -> None:
    folder = from_folder(tmp_path, {"bos_token_id": None})
    assert from_gguf({}, ("output.weight",)) == folder
    assert (folder.head_dim, folder.num_kv_heads, folder.vocab_size) == (8, 2, 100)
    assert folder.has_tied_embeddings is False
    assert folder.eos_token_ids == (2,)


def test_a_gguf_file_without_an_output_tensor_ties_its_embeddings() -> None:
    assert from_gguf({}).has_tied_embeddings is True


def test_end_tokens_come_from_every_place_once(tmp_path: Path) -> None:
    """Chat models name the end of a turn in generation_config.json, or as "eot" in GGUF files."""
    assert from_folder(tmp_path, {}, {"eos_token_id": [5, 2, 7]}).eos_token_ids == (2, 5, 7)
    assert from_gguf({"tokenizer.ggml.eot_token_id": 9}).eos_token_ids == (2, 9)


def test_biases_are_qwen2s_and_where_the_files_have_them(tmp_path: Path) -> None:
    qwen2 = from_folder(tmp_path, {"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.architecture, qwen2.has_qkv_bias, qwen2.has_output_bias) == (Architecture.QWEN2, True, False)
    biased = from_folder(tmp_path, {"attention_bias": True})
    assert (biased.has_qkv_bias, biased.has_output_bias) == (True, True)
    from_file = from_gguf({}, ("blk.0.attn_q.bias",))
    assert (from_file.has_qkv_bias, from_file.has_output_bias) == (True, False)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5000}, 5000.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}, 7000.0, None),
        ({"rope_scaling": None}, 10000.0, None),
        ({"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 9.0, LinearRopeScaling(2.0)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 32,
                }
            },
            10000.0,
            Llama3RopeScaling(8.0, 1.0, 4.0, 32),
        ),
    ],
)
def test_rope_is_read_from_old_and_new_keys(tmp_path: Path, changes, theta, scaling) -> None:
    config = from_folder(tmp_path, changes)
    assert config.layer_ropes == (Rope(theta, scaling),) * 2


def test_a_window_is_read_where_the_architecture_uses_it(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 32}
    assert from_folder(tmp_path, mistral).layer_windows == (32, 32)
    assert from_folder(tmp_path, mistral | {"sliding_window": None}).layer_windows == (None, None)
    assert from_folder(tmp_path, {"sliding_window": 32}).layer_windows == (None, None)
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": False}
    assert from_folder(tmp_path, qwen2).layer_windows == (None, None)
    qwen2 |= {"use_sliding_window": True, "max_window_layers": 1}
    assert from_folder(tmp_path, qwen2).layer_windows == (None, 32)
    assert from_folder(tmp_path, qwen2 | {"max_window_layers": 0}).layer_windows == (32, 32)
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    assert from_folder(tmp_path, qwen2 | types).layer_windows == (32, None)


def family(tmp_path: Path, name: str, **changes: object):
    return from_folder(tmp_path, {"architectures": [name], **changes})


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", None])
def test_gemma_means_the_approximation_with_tanh_whatever_its_files_say(tmp_path: Path, activation: object) -> None:
    config = family(tmp_path, "GemmaForCausalLM", hidden_act=activation)
    assert (config.activation, config.norm_placement) == (Activation.GELU_TANH, NormPlacement.BEFORE)
    assert (config.head_dim, config.embedding_multiplier, config.has_tied_embeddings) == (256, 48**0.5, True)


def test_switches_of_gemma_2(tmp_path: Path) -> None:
    """What its files leave out is as transformers has it; null is nothing."""
    config = family(tmp_path, "Gemma2ForCausalLM", num_hidden_layers=3, query_pre_attn_scalar=144)
    assert config.norm_placement is NormPlacement.BOTH
    assert config.activation is Activation.GELU_TANH
    assert config.layer_windows == (4096, None, 4096)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert (config.attention_scale, config.embedding_multiplier) == (144**-0.5, 48**0.5)
    assert (config.head_dim, config.has_tied_embeddings) == (256, True)
    uncapped = family(tmp_path, "Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_soft_cap, uncapped.logit_soft_cap) == (None, None)


def test_gemma_3_has_two_ropes_in_old_and_new_files(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_scaling": scaling, "rope_local_base_freq": 10000, "sliding_window_pattern": 2, "sliding_window": 512}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, **scaling},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 512,
    }
    for changes in (old, new):
        config = family(tmp_path, "Gemma3ForCausalLM", **changes)
        assert config.layer_ropes == (Rope(1e4), Rope(1e6, LinearRopeScaling(8.0)))
        assert config.layer_windows == (512, None)
        assert config.query_key_norm is QueryKeyNorm.HEAD
        assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)


def test_of_a_gemma_3_that_sees_the_text_model_is_read(tmp_path: Path) -> None:
    """From a file that leaves most of it to transformers, as those of the 4b model do."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    facts = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    config = config_from_folder(tmp_path)
    assert (config.architecture, config.hidden_size, config.eos_token_ids) == (Architecture.GEMMA3, 2560, (1, 106))
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.layer_windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)


def test_layers_of_smollm3_without_rope(tmp_path: Path) -> None:
    rope = Rope(2e6)
    assert family(tmp_path, "SmolLM3ForCausalLM", num_hidden_layers=5).layer_ropes == (rope, rope, rope, None, rope)
    told = family(tmp_path, "SmolLM3ForCausalLM", no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=9)
    assert (told.layer_ropes, told.layer_windows) == ((None, rope), (9, None))
    with pytest.raises(CheckpointError, match="no_rope_layers must be true or false for each of 2 layers"):
        family(tmp_path, "SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1])


def test_multipliers_of_granite(tmp_path: Path) -> None:
    multipliers = {
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    }
    config = family(tmp_path, "GraniteForCausalLM", **multipliers)
    assert (config.attention_scale, config.embedding_multiplier) == (0.015625, 12.0)
    assert (config.residual_multiplier, config.logit_multiplier) == (0.22, 0.125)


def test_experts_of_mixtral_and_qwen3(tmp_path: Path) -> None:
    mixtral = family(tmp_path, "MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2)
    assert mixtral.experts == Experts(
        num_experts=8, num_experts_per_token=2, intermediate_size=96, has_normalized_weights=True
    )
    qwen3 = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    config = family(tmp_path, "Qwen3MoeForCausalLM", **qwen3, norm_topk_prob=True, mlp_only_layers=[])
    assert config.experts == Experts(
        num_experts=128, num_experts_per_token=8, intermediate_size=16, has_normalized_weights=True
    )
    # A token goes through 8 of the experts: what steps take is reckoned by this.
    assert config.num_active_parameters == 48 * (2 * ((6 + 2) * 2 * 8 + 8 * 3 * 16 + 128) + 2 * 100)


def test_phi_3_has_longrope_under_many_names(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 3.0, 4.0]}
    for kind in ("su", "yarn", "longrope"):
        config = family(
            tmp_path,
            "Phi3ForCausalLM",
            partial_rotary_factor=0.75,
            original_max_position_embeddings=16,
            rope_scaling={"type": kind, **factors},
        )
        attention_factor = (1 + np.log(4) / np.log(16)) ** 0.5
        scaling = LongRopeScaling(
            short_factors=(1.0, 1.1, 1.2),
            long_factors=(2.0, 3.0, 4.0),
            original_max_position_embeddings=16,
            attention_factor=pytest.approx(attention_factor),
        )
        assert config.layer_ropes[0] == Rope(10000.0, scaling, rotary_dim=6)


def test_yarn_of_a_file_that_says_little(tmp_path: Path) -> None:
    """As Qwen's models have it."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    expected = YarnRopeScaling(
        factor=4.0, original_max_position_embeddings=32, attention_factor=pytest.approx(0.1 * np.log(4) + 1)
    )
    assert family(tmp_path, "Qwen2ForCausalLM", rope_scaling=scaling).layer_ropes[0].scaling == expected
    metadata = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    from_file = from_gguf({f"llama.{key}": value for key, value in metadata.items()})
    assert from_file.layer_ropes[0].scaling == expected


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_kind_is_linear(key: str) -> None:
    """As llama.cpp has it: its first files with linear scaling said no more."""
    assert from_gguf({f"llama.{key}": 4.0}).layer_ropes[0].scaling == LinearRopeScaling(4.0)
    assert [from_gguf({f"llama.{key}": factor}).layer_ropes[0].scaling for factor in (1.0, 0.0)] == [None, None]
    assert from_gguf({f"llama.{key}": 4.0, "llama.rope.scaling.type": "none"}).layer_ropes[0].scaling is None


@pytest.mark.parametrize(("trained", "expected"), [(32, 128), (100, 128), (500, 500)])
def test_yarn_that_a_user_adds_makes_the_context_longer(tmp_path: Path, trained: int, expected: int) -> None:
    """Qwen's model cards say to add it, and leave max_position_embeddings."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = family(tmp_path, "Qwen2ForCausalLM", rope_scaling=scaling, max_position_embeddings=trained)
    assert config.max_position_embeddings == expected
    linear = {"type": "linear", "factor": 4.0}  # Of some models that is in max_position_embeddings already.
    config = family(tmp_path, "Qwen2ForCausalLM", rope_scaling=linear, max_position_embeddings=trained)
    assert config.max_position_embeddings == trained
    assert (
        from_gguf(
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.context_length": trained,
            }
        ).max_position_embeddings
        == expected
    )


def test_layers_of_one_window_are_a_group(tmp_path: Path) -> None:
    config = attrs.evolve(from_folder(tmp_path, {"num_hidden_layers": 5}), layer_windows=(8, None, 8, None, 4))
    assert config.kv_groups == [KVGroup(8, (0, 2)), KVGroup(None, (1, 3)), KVGroup(4, (4,))]
    assert from_folder(tmp_path, {}).kv_groups == [KVGroup(None, (0, 1))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported; supported are LlamaForCausalLM, Mistral"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"vocab_size": 2**40}, "vocab_size must be"),
        ({"num_key_value_heads": 4}, "cannot share"),
        ({"head_dim": 7}, "odd"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be"),
        ({"rope_theta": float("nan")}, "rope_theta must be"),
        ({"eos_token_id": 100}, "end token 100"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"rope_scaling": [1]}, "rope_scaling is not an object"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}, "sliding_window"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}, "max_window_layers"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["full_attention"],
            },
            "layer_types",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "layer_types",
        ),
        ({"num_hidden_layers": 5000}, "num_hidden_layers"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be"),
        # What other families know, and what changes results here, where nothing computes it.
        ({"residual_multiplier": 0.22}, "residual_multiplier is 0.22, which is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2', which is not supported; silu, gelu_pytorch_tanh are"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, r"hidden_size is missing"),
        ({"architectures": ["MixtralForCausalLM"]}, "num_experts is missing"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3},
            "3 experts for a token are more than 2",
        ),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "mlp_only_layers": [0],
            },
            r"mlp_only_layers is \[0\]",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_theta": 1.0}, "above 1 for yarn"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor must be 4 numbers",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "low_freq_factor must be below",
        ),
    ],
)
def test_wrong_facts_of_a_folder_are_named(tmp_path: Path, changes, message) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        from_folder(tmp_path, changes)
    assert caught.value.path == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, r"'mamba' is not supported; supported are llama, qwen2, qwen3.*, bert\."),
        ({"general.architecture": 7}, "general.architecture is not a string"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.head_count_kv": (2, 2)}, "head_count_kv must be an integer"),
        ({"llama.expert_count": 8}, r"llama\.expert_used_count is missing"),
        ({"llama.rope.dimension_count": 9}, "rope cannot rotate|odd"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.factor is missing"),
        ({"llama.rope.scaling.type": "dynamic"}, "'dynamic' is not supported"),
        ({"tokenizer.ggml.eos_token_id": 100}, "end token 100"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, r"llama\.rope\.scaling\.yarn_log_multiplier is 0\.1"),
        (
            {"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_shared_count": 1},
            "expert_shared_count",
        ),
        ({"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_gating_func": 2}, "expert_gating_func"),
        ({"llama.attention.sliding_window_pattern": (True,)}, "sliding_window_pattern must be true or false for each"),
    ],
)
def test_wrong_facts_of_a_gguf_file_are_named(changes, message) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        from_gguf(changes)
    assert caught.value.path == "tiny.gguf"


def test_rope_factors_of_a_gguf_file_are_facts() -> None:
    data = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    embedding = GGUFTensor("token_embd.weight", GGMLType.F32, (100, 48), np.zeros(0, np.uint8))

    def config(changes: dict[str, object]):
        factors = GGUFTensor("rope_freqs.weight", GGMLType.F32, data.shape, data.view(np.uint8))
        tensors = {"token_embd.weight": embedding, "rope_freqs.weight": factors}
        return config_from_gguf(GGUFFile(Path("tiny.gguf"), GGUF_METADATA | changes, tensors))

    assert config({}).layer_ropes[0] == Rope(10000.0, RopeFactors((1.0, 2.0, 4.0, 8.0)))
    with pytest.raises(CheckpointError, match="both rope_freqs"):
        config({"llama.rope.scaling.type": "linear"})
    data[1] = np.nan
    with pytest.raises(CheckpointError, match="must be numbers above 0"):
        config({})


def test_windows_of_a_gguf_file(tmp_path: Path) -> None:
    """A pattern is a period, whose last layer has no window, or tells each layer."""
    key, window = "llama.attention.sliding_window_pattern", {"llama.attention.sliding_window": 7}
    assert from_gguf(window).layer_windows == (7, 7)
    assert from_gguf({"llama.attention.sliding_window": 0}).layer_windows == (None, None)
    assert from_gguf(window | {key: 2}).layer_windows == (7, None)
    assert from_gguf(window | {key: (False, True)}).layer_windows == (None, 7)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '"x"', "\ud800".encode("utf-8", "surrogatepass")])
def test_a_config_that_is_no_json_object_is_a_checkpoint_error(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        config_from_folder(tmp_path)


def test_a_missing_config_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        config_from_folder(tmp_path)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


KEYS = [
    *LLAMA,
    "rope_parameters",
    "rope_scaling",
    "head_dim",
    "attention_bias",
    "layer_types",
    "sliding_window",
    "no_rope_layers",
    "partial_rotary_factor",
    "text_config",
    "num_experts",
    "num_experts_per_tok",
    "residual_multiplier",
]


@given(
    name=st.sampled_from([family.class_name for family in FAMILIES.values()] + ["Gemma3ForConditionalGeneration"]),
    changes=st.dictionaries(st.sampled_from(KEYS), ANYTHING, min_size=1, max_size=3),
)
def test_any_value_of_any_key_is_taken_or_refused(tmp_path_factory, name: str, changes: dict[str, object]) -> None:
    """Never another exception than `CheckpointError`."""
    folder = tmp_path_factory.mktemp("model")
    try:
        outcome = str(from_folder(folder, {"architectures": [name]} | changes).architecture)
    except CheckpointError as error:
        outcome = error.message
    assert outcome in list(Architecture) or str(folder) in outcome


GGUF_KEYS = [
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.key_length",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "expert_used_count",
    "residual_scale",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
]
GGUF_VALUES = (
    st.booleans()
    | st.integers(-1, 2**64 - 1)
    | st.integers(0, 40)
    | st.floats()
    | st.sampled_from(["", "none", "linear", "yarn", "longrope"])
    | st.lists(st.booleans(), max_size=3).map(tuple)
    | st.lists(st.integers(0, 9), max_size=3).map(tuple)
)


@given(
    name=st.sampled_from(sorted({family.gguf_name for family in FAMILIES.values()})),
    changes=st.dictionaries(st.sampled_from(GGUF_KEYS), GGUF_VALUES, min_size=1, max_size=4),
)
def test_any_metadata_are_taken_or_refused(name: str, changes: dict[str, object]) -> None:
    """Never another exception than `CheckpointError`; and what is taken has frequencies."""
    facts = {f"{name}.{key.removeprefix('llama.')}": value for key, value in GGUF_METADATA.items() if "llama." in key}
    metadata = facts | {"general.architecture": name} | {f"{name}.{key}": value for key, value in changes.items()}
    config = None
    with contextlib.suppress(CheckpointError):
        config = from_gguf(metadata)
    ropes = [] if config is None else [rope for rope in config.layer_ropes if rope is not None]
    assert all(len(inverse_frequencies(rope, config.head_dim, 64)) <= config.head_dim // 2 for rope in ropes)


def test_reading_facts_needs_no_torch() -> None:
    code = "import sys, trioengine.models.config; assert 'torch' not in sys.modules; print('fine')"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "fine\n"


def test_a_file_that_the_gguf_package_wrote_is_read(tmp_path: Path) -> None:
    """Types of metadata values are those that llama.cpp's converter chooses."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(64)
    writer.add_embedding_length(48)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)
    writer.add_sliding_window(32)
    writer.add_tensor("token_embd.weight", np.zeros((100, 48), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = config_from_gguf(open_gguf(path))
    assert (config.architecture, {*config.layer_windows}) == (Architecture.QWEN2, {32})
    assert {*config.layer_ropes} == {Rope(1e6, LinearRopeScaling(4.0))}
    assert config.rms_norm_epsilon == pytest.approx(1e-5)
