"""A model's facts from GGUF metadata and config.json; what is wrong or not supported is a `CheckpointError`."""

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
    Architecture,
    KVGroup,
    LinearRopeScaling,
    Llama3RopeScaling,
    Rope,
    config_from_folder,
    config_from_gguf,
)

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
    ],
)
def test_wrong_facts_of_a_folder_are_named(tmp_path: Path, changes, message) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        from_folder(tmp_path, changes)
    assert caught.value.path == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba' is not supported; supported are llama, qwen2, qwen3"),
        ({"general.architecture": 7}, "general.architecture is not a string"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.head_count_kv": (2, 2)}, "head_count_kv must be an integer"),
        ({"llama.expert_count": 8}, r"llama\.expert_used_count is missing"),
        ({"llama.rope.dimension_count": 9}, "rope cannot rotate|odd"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.factor is missing"),
        ({"llama.rope.scaling.type": "dynamic"}, "'dynamic' is not supported"),
        ({"tokenizer.ggml.eos_token_id": 100}, "end token 100"),
    ],
)
def test_wrong_facts_of_a_gguf_file_are_named(changes, message) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        from_gguf(changes)
    assert caught.value.path == "tiny.gguf"


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


@given(key=st.sampled_from([*LLAMA, "rope_parameters", "rope_scaling", "head_dim", "attention_bias"]), value=ANYTHING)
def test_any_value_of_any_key_is_taken_or_refused(tmp_path_factory, key: str, value: object) -> None:
    """Never another exception than `CheckpointError`."""
    folder = tmp_path_factory.mktemp("model")
    try:
        outcome = str(from_folder(folder, {key: value}).architecture)
    except CheckpointError as error:
        outcome = error.message
    assert outcome in ("llama", "mistral", "qwen2") or str(folder) in outcome


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
