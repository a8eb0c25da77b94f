import gguf
import numpy as np
import pytest

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.gguf import GGMLType, GGUFTensor
from trioengine.errors import CheckpointError

OURS = [
    GGMLType.Q4_0,
    GGMLType.Q4_1,
    GGMLType.Q5_0,
    GGMLType.Q5_1,
    GGMLType.Q8_0,
    GGMLType.Q4_K,
    GGMLType.Q5_K,
    GGMLType.Q6_K,
]


def make_tensor(kind: GGMLType, raw: np.ndarray, shape: tuple[int, ...]) -> GGUFTensor:
    return GGUFTensor("x", kind, shape, raw.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)
def test_blocks_equal_the_gguf_packages_bit_for_bit(kind: GGMLType) -> None:
    """Random bytes are every quantized value, and scales that are infinite, NaN and denormal too."""
    rows, blocks = 3, 1100  # more than one slice
    raw = np.random.default_rng(int(kind)).integers(0, 256, (rows, blocks * kind.block_bytes), dtype=np.uint8)
    ours = dequantize(make_tensor(kind, raw, (rows, blocks * kind.block_size)))
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType(int(kind)))
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    assert np.array_equal(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("kind", [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0])
def test_quantized_numbers_come_back_nearly(kind: GGMLType) -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 64), np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType(int(kind)))
    restored = dequantize(make_tensor(kind, raw, values.shape))
    assert restored.shape == values.shape
    assert np.abs(restored - values).max() < 0.3


@pytest.mark.parametrize("kind", [GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.IQ4_NL], ids=lambda kind: kind.name)
def test_rarer_types_go_through_the_gguf_package(kind: GGMLType) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (2, 3 * kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours = dequantize(make_tensor(kind, raw, (2, 3 * kind.block_size)))
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType(int(kind)))
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_without_the_gguf_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioengine.checkpoint.dequantize._gguf_package", lambda: None)
    with pytest.raises(CheckpointError, match="Q2_K, which needs the gguf package: pip install gguf"):
        dequantize(make_tensor(GGMLType.Q2_K, np.zeros(84, np.uint8), (256,)))


def test_a_type_that_nobody_reads_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="Q8_K, which cannot be read"):
        dequantize(make_tensor(GGMLType.Q8_K, np.zeros(292, np.uint8), (256,)))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(GGMLType.F32, "<f4"), (GGMLType.F16, "<f2"), (GGMLType.F64, "<f8"), (GGMLType.I8, "i1"), (GGMLType.I32, "<i4")],
)
def test_plain_numbers_are_converted(kind: GGMLType, dtype: str) -> None:
    values = np.array([[1, -2], [3, 4]], dtype)
    result = dequantize(make_tensor(kind, values, (2, 2)))
    assert result.tolist() == [[1.0, -2.0], [3.0, 4.0]]
    assert result.flags.writeable
    result[0, 0] = 9
    assert values[0, 0] == 1


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    values = np.array([1.0, -0.15625, 3.0e38], np.float32)
    upper = (values.view(np.uint32) >> 16).astype("<u2")
    expected = (upper.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(dequantize(make_tensor(GGMLType.BF16, upper, (3,))), expected)
    assert dequantize(make_tensor(GGMLType.BF16, upper, (3,)))[1] == -0.15625
