"""Adapters as PEFT saves them: what is read, and what is refused with a name."""

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioengine.errors import CheckpointError, RequestError
from trioengine.models.config import Architecture, Experts, ModelConfig
from trioengine.models.lora import CONFIG_NAME, WEIGHTS_NAME, LoRA, LoRAMatrix, lora_places, read_lora
from trioengine.testing.lora import lora_tensors, write_lora

pytest.importorskip("safetensors")

CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_epsilon=1e-5,
    has_tied_embeddings=True,
    eos_token_ids=(1,),
)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
Key = tuple[int, LoRAMatrix, int]


def read(folder: Path, config: ModelConfig = CONFIG, max_rank: int = 16) -> LoRA:
    return read_lora(str(folder), config, max_rank)


def products(lora: LoRA) -> dict[Key, np.ndarray[Any, Any]]:
    """What is added to the weights, by layer, matrix and number of the module."""
    return {
        (layer, matrix, number): part.b @ part.a
        for (layer, matrix), parts in lora.parts.items()
        for number, part in parts.items()
    }


def product_of(tensors: dict[str, np.ndarray[Any, Any]], module: str) -> np.ndarray[Any, Any]:
    name = f"base_model.model.{module}"
    return tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]


def test_every_module_is_a_part_of_its_matrix(tmp_path: Path) -> None:
    lora = read(write_lora(tmp_path, CONFIG))
    tensors = lora_tensors(CONFIG)
    found = products(lora)
    assert len(found) == 3 * 7
    for layer in range(3):
        for number, name in enumerate(("q", "k", "v")):
            wanted = product_of(tensors, f"model.layers.{layer}.self_attn.{name}_proj")
            np.testing.assert_allclose(found[layer, LoRAMatrix.QKV, number], wanted, rtol=1e-4, atol=1e-6)
        for number, name in enumerate(("gate", "up")):
            wanted = product_of(tensors, f"model.layers.{layer}.mlp.{name}_proj")
            np.testing.assert_allclose(found[layer, LoRAMatrix.GATE_UP, number], wanted, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            found[layer, LoRAMatrix.DOWN, 0],
            product_of(tensors, f"model.layers.{layer}.mlp.down_proj"),
            rtol=1e-4,
            atol=1e-6,
        )
    firsts = [part.first_row for part in lora.parts[0, LoRAMatrix.QKV].values()]
    assert sorted(firsts) == [0, 24, 32]
    assert sorted(part.first_row for part in lora.parts[0, LoRAMatrix.GATE_UP].values()) == [0, 40]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 1}, 0.25),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": None}, 2.0),
        ({"lora_alpha": -4}, -1.0),
    ],
)
def test_the_scale_is_alpha_by_the_rank(tmp_path: Path, values: dict[str, Any], scale: float) -> None:
    """By its root with rslora; alpha is PEFT's default of 8 where none is given."""
    plain = products(read(write_lora(tmp_path / "plain", CONFIG)))
    scaled = products(read(write_lora(tmp_path / "scaled", CONFIG, settings=values)))
    for key, values_ in plain.items():
        np.testing.assert_allclose(scaled[key], values_ * scale, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (["q_proj", "v_proj"], 6),
        (["self_attn.q_proj"], 3),
        (["model.layers.1.mlp.down_proj"], 1),
        (r".*\.(q|v)_proj", 6),
        (r"model\.layers\.[02]\.self_attn\.o_proj", 2),
        ("all-linear", 21),
        (["q_proj", "query_key_value", "w1"], 3),
    ],
)
def test_target_modules(tmp_path: Path, targets: list[str] | str, count: int) -> None:
    """A list of names or their ends, a regular expression, or all."""
    names = [place.module for place in lora_places(CONFIG)]
    if isinstance(targets, list):
        wanted = [name for name in names if name.endswith(tuple(targets))]
    elif targets == "all-linear":
        wanted = names
    else:
        import re

        wanted = [name for name in names if re.fullmatch(targets, name)]
    lora = read(write_lora(tmp_path, CONFIG, wanted, settings={"target_modules": targets}))
    assert len(products(lora)) == count == len(wanted)


def test_layers_to_transform(tmp_path: Path) -> None:
    wanted = ["layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj"]
    values = {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]}
    lora = read(write_lora(tmp_path, CONFIG, wanted, settings=values))
    assert {layer for layer, _ in lora.parts} == {0, 2}


def test_patterns_give_modules_their_rank_and_alpha(tmp_path: Path) -> None:
    tensors = lora_tensors(CONFIG, ["q_proj"], rank=4) | lora_tensors(CONFIG, ["down_proj"], rank=7)
    values = {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 7},
        "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 12, "^model.layers.2.self_attn.q_proj": 20, "^q_proj": 99},
    }
    found = products(read(write_lora(tmp_path, CONFIG, settings=values, tensors=tensors)))
    for layer, scale in ((0, 1.0), (1, 3.0), (2, 5.0)):
        wanted = product_of(tensors, f"model.layers.{layer}.self_attn.q_proj") * scale
        np.testing.assert_allclose(found[layer, LoRAMatrix.QKV, 0], wanted, rtol=1e-4, atol=1e-6)
    wanted = product_of(tensors, "model.layers.0.mlp.down_proj") * 4 / 7
    np.testing.assert_allclose(found[0, LoRAMatrix.DOWN, 0], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_halves_are_read(tmp_path: Path, dtype: Any) -> None:
    tensors = {name: values.astype(dtype) for name, values in lora_tensors(CONFIG).items()}
    found = products(read(write_lora(tmp_path, CONFIG, tensors=tensors)))
    floats = {name: values.astype(np.float32) for name, values in tensors.items()}
    wanted = product_of(floats, "model.layers.0.self_attn.q_proj")
    np.testing.assert_allclose(found[0, LoRAMatrix.QKV, 0], wanted, rtol=1e-4, atol=1e-6)


def test_modules_that_a_family_has_fused_are_one_part(tmp_path: Path) -> None:
    config = attrs.evolve(CONFIG, architecture=Architecture.PHI3)
    lora = read(write_lora(tmp_path, config, ["qkv_proj", "gate_up_proj"]), config)
    assert lora.parts[0, LoRAMatrix.QKV][0].b.shape == (40, 4)
    assert lora.parts[0, LoRAMatrix.GATE_UP][0].b.shape == (80, 4)


def test_a_model_of_experts_takes_adapters_of_its_attention(tmp_path: Path) -> None:
    config = attrs.evolve(
        CONFIG,
        architecture=Architecture.MIXTRAL,
        experts=Experts(num_experts=4, num_experts_per_token=2, intermediate_size=16, has_normalized_weights=True),
    )
    assert len(products(read(write_lora(tmp_path / "a", config, ATTENTION), config))) == 12
    error = refusal(write_lora(tmp_path / "b", config, settings={"target_modules": ["w1"]}), config)
    assert "'w1'" in error.message


def test_names_of_the_text_part_of_a_model_that_sees(tmp_path: Path) -> None:
    tensors = {
        name.replace("model.model.", "model.model.language_model."): values
        for name, values in lora_tensors(CONFIG, ["q_proj"]).items()
    }
    lora = read(write_lora(tmp_path, CONFIG, ["q_proj"], tensors=tensors))
    assert len(products(lora)) == 3


# Refusals


def refusal(folder: Path, config: ModelConfig = CONFIG) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(folder, config)
    assert caught.value.path is not None
    assert str(folder) in caught.value.message
    assert len(caught.value.message) < 1000 + len(str(folder))
    return caught.value


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": 5}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"r": 0}, "r must"),
        ({"r": "8"}, "r must"),
        ({"r": True}, "r must"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": 1e30}, "lora_alpha"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": 5}, "target_modules"),
        ({"target_modules": [5]}, "target_modules"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "'embed_tokens'"),
        ({"target_modules": "nothing"}, "'nothing'"),
        ({"target_modules": ["w1", "w2"]}, "'w1', 'w2'"),
        ({"target_modules": "("}, "target_modules"),
        ({"target_modules": "(((a+)+)+)+b"}, "for ever"),
        ({"target_modules": ".*.*.*.*.*.*.*q"}, "for ever"),
        ({"target_modules": "a" * 10_000}, "for ever"),
        ({"target_modules": ["q_proj"]}, "target_modules does not name"),
        ({"layers_to_transform": "1"}, "layers_to_transform"),
        ({"layers_to_transform": [0]}, "target_modules does not name"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": {"(a*)*b": 1}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 5}}, "shape"),
        ({"r": 5}, "shape"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(tmp_path: Path, values: dict[str, Any], named: str) -> None:
    assert named in refusal(write_lora(tmp_path, CONFIG, settings=values)).message


def test_a_rank_above_the_limit_is_the_requests_fault(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, CONFIG, rank=17)
    with pytest.raises(RequestError, match=r"rank 17, but max_lora_rank is 16") as caught:
        read(folder)
    assert caught.value.param == "path"
    assert read(folder, max_rank=17).parts


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{Q}.lora_A.weight": None}, "only one of"),
        ({f"{Q}.lora_A.weight": None, f"{Q}.lora_B.weight": None}, "has no tensors of"),
        ({f"{Q}.lora_A.weight": np.zeros((4, 23), np.float32)}, "[4, 23]"),
        ({f"{Q}.lora_B.weight": np.zeros((25, 4), np.float32)}, "[25, 4]"),
        ({f"{Q}.lora_B.weight": np.zeros(96, np.float32)}, "[96]"),
        ({f"{Q}.lora_B.weight": np.zeros((24, 4), np.int32)}, "I32"),
        ({f"{Q}.lora_B.weight": np.full((24, 4), np.nan, np.float32)}, "not finite"),
        ({f"{Q}.lora_B.weight": np.full((24, 4), np.inf, np.float16)}, "not finite"),
        ({f"{Q}.lora_magnitude_vector": np.zeros(24, np.float32)}, "lora_magnitude_vector"),
        ({"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}, "lm_head"),
        ({"base_model.model.lm_head.lora_A.weight": np.zeros((4, 24), np.float32)}, "lm_head"),
        ({f"{Q.replace('.0.', '.7.')}.lora_A.weight": np.zeros((4, 24), np.float32)}, "layers.7"),
        ({f"{Q}.lora_A.default.weight": np.zeros((4, 24), np.float32)}, "twice"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, changes: dict[str, np.ndarray[Any, Any] | None], named: str
) -> None:
    tensors = {name: values for name, values in (lora_tensors(CONFIG) | changes).items() if values is not None}
    assert named in refusal(write_lora(tmp_path, CONFIG, tensors=tensors)).message


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    assert CONFIG_NAME in refusal(tmp_path / "nowhere").message
    folder = write_lora(tmp_path / "a", CONFIG)
    (folder / WEIGHTS_NAME).unlink()
    (folder / "model.safetensors").write_bytes(b"")
    assert WEIGHTS_NAME in refusal(folder).message
    with pytest.raises(CheckpointError):
        read_lora("a\0b", CONFIG, 16)
    with pytest.raises(CheckpointError, match="too long"):
        read_lora("a" * 3000, CONFIG, 16)


def test_other_files_of_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, CONFIG)
    (folder / "model.safetensors").write_bytes(b"something else")
    (folder / "optimizer.safetensors").write_bytes(b"something else")
    assert len(products(read(folder))) == 21


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 100_000, '{"r": NaN}', "\xff", " " * (17 << 20)])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_lora(tmp_path, CONFIG)
    (folder / CONFIG_NAME).write_bytes(text.encode("latin-1"))
    refusal(folder)


def is_read_or_refused(folder: Path) -> bool:
    """Any other error would be a bug."""
    try:
        return bool(read(folder).parts)
    except (CheckpointError, RequestError) as error:
        return bool(error.message)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damaged_files_are_clear_errors(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes are lost or changed."""
    folder = write_lora(tmp_path, CONFIG, ["q_proj"])
    path = folder / data.draw(st.sampled_from([CONFIG_NAME, WEIGHTS_NAME]))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, min(len(content), 800) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] = data.draw(st.integers(0, 255))
    path.unlink()
    path.write_bytes(content)
    assert is_read_or_refused(folder)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(key=st.sampled_from(["r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "layers_to_transform",
                            "use_rslora", "peft_type", "bias", "use_dora"]),
       value=st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
                          lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                                      max_size=3)))  # fmt: skip
def test_any_value_of_a_key_is_taken_or_refused(tmp_path: Path, key: str, value: object) -> None:
    folder = write_lora(tmp_path, CONFIG, ["q_proj"])
    raw = json.loads((folder / CONFIG_NAME).read_text()) | {key: value}
    (folder / CONFIG_NAME).write_text(json.dumps(raw))
    assert is_read_or_refused(folder)
