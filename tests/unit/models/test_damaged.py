"""Damaged and hostile model files: an error of the one kind that is meant for them, or a model; never anything else."""

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from trioengine_kernels.native.library import ThreadPool  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.errors import CheckpointError  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.models.native_ops import load_native_model  # noqa: E402
from trioengine.models.torch_ops import load_torch_model  # noqa: E402
from trioengine.testing import packed_weights  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, random_model, tiny_config, write_folder, write_gguf  # noqa: E402

SMALL = attrs.evolve(
    tiny_config(vocab_size=24),
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    eos_token_ids=(),
)
MAX_BYTES = 128 << 20
"""Where a size in a damaged file is believed before it is compared with what there is, far more would be asked for."""
NUMBERS = (0, 1, 255, 2**24, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def load(location: ModelLocation) -> None:
    """On both backends."""
    checkpoint = open_checkpoint(location)
    load_torch_model(checkpoint)
    library = native_library()
    load_native_model(open_checkpoint(location), library, ThreadPool(library, 1))


def load_or_refuse(location: ModelLocation) -> bool:
    """Whether there was a model."""
    tracemalloc.start()
    try:
        load(location)
    except CheckpointError as error:
        assert str(error)  # noqa: PT017 (either outcome is right)
        return False
    else:
        return True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MAX_BYTES


def damage(data: st.DataObject, content: bytes, end: int) -> bytes:
    """Bytes before `end` changed, or the file cut anywhere."""
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        if not damaged:
            break
        at = data.draw(st.integers(0, min(end, len(damaged)) - 1))
        match data.draw(st.sampled_from(["flip", "flip", "flip", "number", "cut", "insert"])):
            case "flip":
                damaged[at] ^= 1 << data.draw(st.integers(0, 7))
            case "number":
                damaged[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(NUMBERS)))
            case "cut":
                del damaged[data.draw(st.integers(0, len(damaged))) :]
            case _:
                damaged[at:at] = data.draw(st.binary(max_size=9))
    return bytes(damaged)


@pytest.fixture(scope="module")
def gguf_location(tmp_path_factory: pytest.TempPathFactory) -> ModelLocation:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, random_model(SMALL))
    return ModelLocation(ModelKind.GGUF, path, "small")


@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_gguf_file_is_refused_or_a_model(gguf_location: ModelLocation, data: st.DataObject) -> None:
    content = gguf_location.path.read_bytes()
    header_bytes = 3000
    path = gguf_location.path.with_name("damaged.gguf")
    path.write_bytes(damage(data, content, header_bytes))
    load_or_refuse(ModelLocation(ModelKind.GGUF, path, "damaged"))


def packed_module(format_name: str, values: np.ndarray) -> dict[str, Any]:
    rows, columns = values.shape
    rng = np.random.default_rng(rows)
    codes, zeros = rng.integers(0, 16, values.shape), rng.integers(1, 16, (rows, columns // 32))
    scales = np.full(zeros.shape, 0.02, np.float16)
    match format_name:
        case "gptq":
            groups = rng.permutation(np.arange(columns) // 32)
            return dict(packed_weights.gptq(codes, scales, zeros, bits=4, version=1, column_groups=groups))
        case "awq":
            return dict(packed_weights.awq(codes, scales, zeros))
        case _:
            return dict(packed_weights.compressed_packed(codes, scales, zeros, bits=4))


CONFIGS = {
    "plain": None,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    },
}


def write_small_folder(folder: Path, format_name: str) -> ModelLocation:
    model = random_model(SMALL)
    tensors = {}
    for name, values in folder_tensors(model).items():
        if format_name != "plain" and ".layers." in name and values.ndim == 2:
            for part, array in packed_module(format_name, values.numpy()).items():
                tensors[f"{name.removesuffix('weight')}{part}"] = torch.from_numpy(np.array(array))
        else:
            tensors[name] = values
    location = write_folder(folder, model, tensors)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": CONFIGS[format_name]}))
    return location


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, folder in folders.items():
        load(write_small_folder(folder, name))
    return folders


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_folder_is_refused_or_a_model(folders: dict[str, Path], name: str, data: st.DataObject) -> None:
    """Configuration and header of the tensors; numbers themselves may be any."""
    folder = folders[name].with_name(f"{name}-damaged")
    shutil.copytree(folders[name], folder, dirs_exist_ok=True)
    file_name = data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    content = (folders[name] / file_name).read_bytes()
    end = len(content) if file_name == "config.json" else 8 + int.from_bytes(content[:8], "little")
    (folder / file_name).write_bytes(damage(data, content, end))
    load_or_refuse(ModelLocation(ModelKind.FOLDER, folder, name))


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_value_of_a_configuration_is_refused_or_a_model(
    folders: dict[str, Path], name: str, data: st.DataObject
) -> None:
    """Valid JSON with wrong values, which flipped bytes rarely make."""
    folder = folders[name].with_name(f"{name}-configured")
    shutil.copytree(folders[name], folder, dirs_exist_ok=True)
    config = json.loads((folders[name] / "config.json").read_text())
    inner = (
        config if config["quantization_config"] is None or data.draw(st.booleans()) else config["quantization_config"]
    )
    key = data.draw(st.sampled_from(sorted(inner)))
    inner[key] = data.draw(
        st.sampled_from([None, -1, 0, 1, 3, 2**24, 2**63, 1e308, True, "", "x", [], [1], {}, {"a": {}}, [[]]])
    )
    (folder / "config.json").write_text(json.dumps(config))
    load_or_refuse(ModelLocation(ModelKind.FOLDER, folder, name))


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Whatever the index names."""
    location = write_small_folder(tmp_path, "plain")
    names = list(json.loads((tmp_path / "model.safetensors").read_bytes()[8:][: _header_bytes(tmp_path)]))
    index = {"weight_map": dict.fromkeys((name for name in names if name != "__metadata__"), "../secret.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not in a file of this folder"):
        load(location)


def _header_bytes(folder: Path) -> int:
    return int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


@pytest.mark.parametrize("name", ["gptq", "compressed"])
def test_packed_weights_without_a_word_about_them_are_refused(folders: dict[str, Path], name: str) -> None:
    folder = folders[name].with_name(f"{name}-unsaid")
    shutil.copytree(folders[name], folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is packed, but config"):
        load(ModelLocation(ModelKind.FOLDER, folder, name))
