"""Floats become the bytes that the `gguf` package makes of them, and come back."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.gguf import GGMLType, GGUFTensor
from trioengine.checkpoint.quantize import can_quantize, quantize

NUMBERS = st.floats(-60000, 60000, width=32).filter(
    lambda number: number == 0 or abs(number) > 1e-20
) | st.sampled_from([0.0, -0.0, 0.5, -8.0, 127.0])
"""Scales that are subnormal differ with the processor's mode, and are 0 in float16 anyway."""


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@given(values=arrays(np.float32, (2, 64), elements=NUMBERS))
def test_bytes_are_those_of_the_gguf_package(kind: str, values: np.ndarray) -> None:  # type: ignore[type-arg]
    with np.errstate(all="ignore"):
        expected = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    assert quantize(values, GGMLType[kind]).tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_what_can_be_quantized_comes_back(kind: str) -> None:
    """Numbers that the type holds exactly."""
    values = np.tile(np.arange(-8, 8, dtype=np.float32), (3, 4))
    values[:, ::16] = -8  # The largest of each block of Q4_0.
    scale = np.float32(127 / 8 if kind == "Q8_0" else 1)
    data = quantize(np.rint(values * scale), GGMLType[kind])
    back = dequantize(GGUFTensor("x", GGMLType[kind], values.shape, data))
    assert np.array_equal(back, np.rint(values * scale))


def test_long_tensors_are_as_short_ones() -> None:
    """They are worked on in slices."""
    values = np.random.default_rng(0).standard_normal((3, 1 << 16), np.float32)[:, : (1 << 16) - 32]
    assert quantize(values, GGMLType.Q4_1).tobytes() == b"".join(
        quantize(row, GGMLType.Q4_1).tobytes() for row in values
    )


def test_other_types_are_not_known() -> None:
    assert not can_quantize(GGMLType.Q6_K)
    assert not can_quantize(GGMLType.I32)
    assert np.isnan(
        dequantize(GGUFTensor("x", GGMLType.BF16, (1,), quantize(np.array([np.nan], np.float32), GGMLType.BF16)))
    )
