"""Packed matrices of untrusted folders: what cannot be read is refused, named, with what can be done."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trioengine.checkpoint.quantized import (
    PackedTensors,
    QuantizedMatrix,
    ScaledMatrix,
    WeightFormat,
    check_not_packed,
    open_packed,
    read_weight_format,
)
from trioengine.checkpoint.safetensors import TensorDType, TensorView
from trioengine.errors import CheckpointError
from trioengine.testing import packed_weights

DTYPES = {
    "float16": TensorDType.F16,
    "float32": TensorDType.F32,
    "float64": TensorDType.F64,
    "int8": TensorDType.I8,
    "int32": TensorDType.I32,
    "int64": TensorDType.I64,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS}},
}


def write_config(folder: Path, quantization: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def read(folder: Path, quantization: Any) -> WeightFormat | None:
    return read_weight_format(write_config(folder, quantization))


def test_a_folder_without_quantization_has_no_format(tmp_path: Path) -> None:
    assert read(tmp_path, None) is None


@pytest.mark.parametrize(
    ("quantization", "description"),
    [
        (GPTQ, "GPTQ, 4 bits"),
        (GPTQ | {"bits": 8, "dynamic": {"-:.*down.*": {}}}, "GPTQ, 8 bits"),
        (AWQ, "AWQ, 4 bits"),
        (COMPRESSED, "compressed-tensors, 4 bits"),
        ({"quant_method": "fp8"}, "FP8"),
    ],
)
def test_formats_are_told(tmp_path: Path, quantization: Mapping[str, Any], description: str) -> None:
    found = read(tmp_path, quantization)
    assert found is not None
    assert found.description == description


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' cannot be read"),
        ({"load_in_8bit": True}, "'an unnamed method' cannot be read"),
        ({"quant_method": "aqlm"}, "'aqlm' cannot be read"),
        ({"quant_method": 7}, "quant_method is not a string"),
        ([1], "is not an object"),
        (GPTQ | {"bits": 3}, "bits must be 4 or 8, not 3"),
        (GPTQ | {"bits": True}, "bits must be 4 or 8, not True"),
        (GPTQ | {"bits": None}, "bits must be 4 or 8, not None"),
        (GPTQ | {"group_size": 0}, "group_size must be -1 or above 0, not 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin' cannot be read, only gptq and gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "only gptq and gptq_v2"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "'gemv' cannot be read, only gemm"),
        (AWQ | {"bits": 8}, "bits must be 4, not 8"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' cannot be read"),
        (COMPRESSED | {"config_groups": {}}, "config_groups is not an object of objects"),
        (COMPRESSED | {"config_groups": {"a": {"weights": WEIGHTS | {"num_bits": 3}}}}, "int with 3 bits"),
        (COMPRESSED | {"config_groups": {"a": {"weights": WEIGHTS | {"type": "float"}}}}, "float with 4 bits"),
        (COMPRESSED | {"config_groups": {"a": {"weights": 1}}}, "no object 'weights'"),
        (COMPRESSED | {"config_groups": {"a": {"weights": WEIGHTS, "format": "mxfp4"}}}, "'mxfp4' cannot be read"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (COMPRESSED | {"sparsity_config": "2:4"}, "sparse"),
        (COMPRESSED | {"transform_config": {"config_groups": {}}}, "rotated"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is not two sizes"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, quantization: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        read(tmp_path, quantization)
    assert caught.value.path == str(tmp_path / "config.json")


def test_a_refusal_says_what_can_be_done(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"original weights.*quantization option.*GGUF.*GPTQ, AWQ"):
        read(tmp_path, {"quant_method": "bitsandbytes"})


def view(name: str, values: np.ndarray) -> TensorView:
    data = np.ascontiguousarray(values)
    return TensorView(name, DTYPES[values.dtype.name], values.shape, data.reshape(-1).view(np.uint8))


def views(module: str, tensors: Mapping[str, Any]) -> dict[str, TensorView]:
    return {f"{module}.{part}": view(f"{module}.{part}", np.asarray(values)) for part, values in tensors.items()}


def opened(folder: Path, quantization: Mapping[str, Any], tensors: Mapping[str, Any]) -> PackedTensors:
    weight_format = read(folder, quantization)
    assert weight_format is not None
    return open_packed(folder, weight_format, views("a.b", tensors))


CODES = np.random.default_rng(0).integers(0, 16, (48, 64))
SCALES = np.full((48, 2), 0.5, np.float16)
ZEROS = np.full((48, 2), 8)
GPTQ_TENSORS = packed_weights.gptq(CODES, SCALES, ZEROS, bits=4, version=1)
AWQ_TENSORS = packed_weights.awq(CODES, SCALES, ZEROS)
PACKED_TENSORS = packed_weights.compressed_packed(CODES, SCALES, ZEROS, bits=4)
BYTES_TENSORS = packed_weights.compressed_bytes(CODES, SCALES, ZEROS)


@pytest.mark.parametrize(
    ("quantization", "tensors"),
    [(GPTQ, GPTQ_TENSORS), (AWQ, AWQ_TENSORS), (COMPRESSED, PACKED_TENSORS), (COMPRESSED, BYTES_TENSORS)],
)
def test_any_rows_can_be_read_alone(
    tmp_path: Path, quantization: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    found = opened(tmp_path, quantization, tensors)
    assert not found.others
    matrix = found.matrices["a.b.weight"]
    assert isinstance(matrix, QuantizedMatrix)
    assert np.array_equal(matrix.codes(), CODES)
    assert np.array_equal(matrix.codes(16, 48), CODES[16:48])
    for rows in ((0, 48), (16, 32), (32, 48)):
        part = slice(*rows)
        assert np.array_equal(matrix.floats(*rows), (CODES[part] - ZEROS[part].repeat(32, axis=1)) * np.float32(0.5))


def test_a_scale_for_the_whole_tensor_counts_for_all_rows(tmp_path: Path) -> None:
    tensors = packed_weights.compressed_bytes(CODES, np.float32([0.25]), None)
    matrix = opened(tmp_path, COMPRESSED, tensors).matrices["a.b.weight"]
    assert np.array_equal(matrix.floats(), (CODES - 128) * np.float32(0.25))


def test_all_floats_of_8_bits_are_those_of_their_standard(tmp_path: Path) -> None:
    """As torch, which knows both kinds."""
    torch = pytest.importorskip("torch")
    weight_format = read(tmp_path, {"quant_method": "fp8"})
    assert weight_format is not None
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    for dtype, torch_dtype in (
        (TensorDType.F8_E4M3, torch.float8_e4m3fn),
        (TensorDType.F8_E5M2, torch.float8_e5m2),
    ):
        tensors = views("x", {"weight_scale": np.float32(2)})
        tensors["x.weight"] = TensorView("x.weight", dtype, codes.shape, codes.reshape(-1))
        matrix = open_packed(tmp_path, weight_format, tensors).matrices["x.weight"]
        assert isinstance(matrix, ScaledMatrix)
        expected = torch.from_numpy(codes).view(torch_dtype).float().numpy() * 2
        assert np.array_equal(matrix.floats(), expected, equal_nan=True)


def test_tensors_for_activations_and_biases_of_zeros_make_no_difference(tmp_path: Path) -> None:
    zeros, ones = np.zeros(48, np.float16), np.ones(48, np.float16)
    extra = {"input_scale": np.float32([1]), "bias": zeros}
    assert opened(tmp_path, GPTQ, {**GPTQ_TENSORS, **extra}).optional == {"a.b.input_scale", "a.b.bias"}
    assert opened(tmp_path, GPTQ, {**GPTQ_TENSORS, "bias": ones}).optional == set()
    assert opened(tmp_path, AWQ, {**AWQ_TENSORS, "bias": zeros}).optional == set()


def without(tensors: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {name: values for name, values in tensors.items() if name != part}


@pytest.mark.parametrize(
    ("quantization", "tensors", "words"),
    [
        (GPTQ, without(GPTQ_TENSORS, "scales"), "no tensor 'scales'"),
        (GPTQ, without(GPTQ_TENSORS, "qzeros"), "no tensor 'qzeros'"),
        (GPTQ, {**GPTQ_TENSORS, "qweight": np.zeros((8, 48), np.float32)}, "type F32, not I32"),
        (GPTQ, {**GPTQ_TENSORS, "qweight": np.zeros(8, np.int32)}, "which is no matrix's"),
        (GPTQ, {**GPTQ_TENSORS, "qweight": np.zeros((0, 48), np.int32)}, "which is no matrix's"),
        (GPTQ, {**GPTQ_TENSORS, "scales": SCALES}, "but it has 48 rows"),
        (GPTQ, {**GPTQ_TENSORS, "scales": np.ones((2, 48), np.int8)}, "type I8, not F16 or BF16 or F32"),
        (GPTQ, {**GPTQ_TENSORS, "qzeros": np.zeros((2, 7), np.int32)}, r"shape \[2, 7\], not \[2, 6\]"),
        (GPTQ | {"group_size": 64}, GPTQ_TENSORS, "scales for 2 groups, but 64 columns in groups of 64"),
        (GPTQ, {**GPTQ_TENSORS, "g_idx": np.zeros(63, np.int32)}, r"shape \[63\], not \[64\]"),
        (GPTQ, {**GPTQ_TENSORS, "g_idx": np.full(64, 2, np.int32)}, "not among its 2"),
        (GPTQ, {**GPTQ_TENSORS, "g_idx": np.full(64, -1, np.int32)}, "not among its 2"),
        (GPTQ, {**GPTQ_TENSORS, "weight": np.zeros((48, 64), np.float32)}, "twice"),
        (AWQ, {**AWQ_TENSORS, "qzeros": np.zeros((1, 6), np.int32)}, r"shape \[1, 6\], not \[2, 6\]"),
        (AWQ, {**AWQ_TENSORS, "scales": np.ones((2, 8), np.float16)}, "but it has 48 rows"),
        (COMPRESSED, without(PACKED_TENSORS, "weight_shape"), "neither 'weight_packed' with 'weight_shape'"),
        (COMPRESSED, without(PACKED_TENSORS, "weight_scale"), "no tensor 'weight_scale'"),
        (COMPRESSED, {**PACKED_TENSORS, "weight_shape": np.array([48, 80])}, "do not hold 80 numbers"),
        (COMPRESSED, {**PACKED_TENSORS, "weight_shape": np.array([2**62, 64])}, "but it has 48 rows"),
        (COMPRESSED, {**PACKED_TENSORS, "weight_shape": np.array([48, -64])}, "but it has 48 rows"),
        (COMPRESSED, {**PACKED_TENSORS, "weight_shape": np.array([48])}, r"shape \[1\], not \[2\]"),
        (COMPRESSED, {**PACKED_TENSORS, "weight_scale": SCALES[:7]}, "but it has 48 rows"),
        (COMPRESSED, {**PACKED_TENSORS, "weight_scale": np.ones((48, 3), np.float16)}, "into 3 groups"),
        (COMPRESSED, {**PACKED_TENSORS, "weight_zero_point": np.zeros((5, 2), np.int32)}, "zero points"),
        (COMPRESSED, {**BYTES_TENSORS, "weight_zero_point": np.zeros((48, 1), np.int8)}, "zero points"),
        (COMPRESSED, {**BYTES_TENSORS, "weight": np.zeros(64, np.int8)}, "no matrix's"),
        (COMPRESSED, {**BYTES_TENSORS, "weight": np.zeros((48, 64), np.float16)}, "type F16, not I8"),
        ({"quant_method": "fp8"}, {"weight_scale": np.float32(1)}, "no tensor 'weight'"),
    ],
)
def test_a_damaged_module_is_named(
    tmp_path: Path, quantization: Mapping[str, Any], tensors: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        opened(tmp_path, quantization, tensors)
    assert "a.b" in str(caught.value)
    assert caught.value.path == str(tmp_path)


def test_packed_tensors_without_a_word_about_them_are_refused(tmp_path: Path) -> None:
    check_not_packed(tmp_path, views("a.b", {"weight": np.zeros((2, 2), np.float32)}))
    for tensors in (GPTQ_TENSORS, PACKED_TENSORS):
        with pytest.raises(CheckpointError, match=r"'a\.b\..* is packed, but config\.json has no quantization_config"):
            check_not_packed(tmp_path, views("a.b", tensors))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_no_numbers_are_an_error(tmp_path: Path, bad: float) -> None:
    scales = SCALES.copy()
    scales[40, 1] = bad
    matrix = opened(tmp_path, GPTQ, packed_weights.gptq(CODES, scales, ZEROS, bits=4, version=1)).matrices["a.b.weight"]
    with pytest.raises(CheckpointError, match=r"scales of 'a\.b\.weight' are damaged"):
        matrix.floats()


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (np.ones((3, 2), np.float32), "its scales have the shape"),
        (np.ones((2, 2, 2), np.float32), "its scales have the shape"),
        (np.float32([[np.nan]]), "not a number"),
    ],
)
def test_scales_of_floats_must_fit(tmp_path: Path, scales: np.ndarray, words: str) -> None:
    weight_format = read(tmp_path, {"quant_method": "fp8"})
    assert weight_format is not None
    tensors = views("x", {"weight_scale_inv": scales})
    tensors["x.weight"] = TensorView("x.weight", TensorDType.F8_E4M3, (160, 256), np.zeros(160 * 256, np.uint8))
    with pytest.raises(CheckpointError, match=words):
        open_packed(tmp_path, weight_format, tensors)
