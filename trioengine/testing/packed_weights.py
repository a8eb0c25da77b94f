# pyright: basic
"""Writes matrices as the packed formats have them, from those formats' own descriptions: the loader's oracle.

Each writer takes codes [rows, columns], scales and zero points [rows, groups], and returns a module's tensors.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Tensors: TypeAlias = Mapping[str, NDArray[np.generic]]
Numbers: TypeAlias = NDArray[np.integer]


def _words(values: Numbers, bits: int, axis: int) -> NDArray[np.int32]:
    """Numbers side by side in 32 bits, the first in the lowest; the last word is filled up with zeros."""
    values = np.moveaxis(values, axis, -1).astype(np.uint64)
    per_word = 32 // bits
    padding = -values.shape[-1] % per_word
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)])
    values = values.reshape(*values.shape[:-1], -1, per_word)
    words = sum(values[..., i] << np.uint64(bits * i) for i in range(per_word))
    return np.ascontiguousarray(np.moveaxis(np.asarray(words).astype(np.uint32), -1, axis)).view(np.int32)


def gptq(
    codes: Numbers,
    scales: NDArray[np.floating],
    zeros: Numbers,
    *,
    bits: int,
    version: int,
    column_groups: Numbers | None = None,
) -> Tensors:
    """AutoGPTQ's layout: input channels are the first dimension, and packed. Version 1 stores zero points less 1."""
    tensors = {
        "qweight": _words(codes.T, bits, 0),
        "qzeros": _words((zeros.T - (version == 1)) % (1 << bits), bits, 1),
        "scales": np.ascontiguousarray(scales.T),
    }
    if column_groups is not None:
        tensors["g_idx"] = column_groups.astype(np.int32)
    return tensors


def awq(codes: Numbers, scales: NDArray[np.floating], zeros: Numbers) -> Tensors:
    """AutoAWQ's gemm layout: output channels are packed, the even ones of eight before the odd ones."""

    def words(values: Numbers) -> NDArray[np.int32]:
        eights = values.reshape(len(values), -1, 8)
        return _words(eights[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape), 4, 1)

    return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": np.ascontiguousarray(scales.T)}


def compressed_packed(
    codes: Numbers,
    scales: NDArray[np.floating],
    zeros: Numbers | None,
    *,
    bits: int,
    column_groups: Numbers | None = None,
) -> Tensors:
    """compressed-tensors' pack-quantized: signed numbers plus half their range. Zero points None: symmetric."""
    tensors: dict[str, NDArray[np.generic]] = {
        "weight_packed": _words(codes, bits, 1),
        "weight_shape": np.array(codes.shape, np.int64),
        "weight_scale": scales,
    }
    if zeros is not None:
        tensors["weight_zero_point"] = _words(zeros, bits, 0)
    if column_groups is not None:
        tensors["weight_g_idx"] = column_groups.astype(np.int32)
    return tensors


def compressed_bytes(codes: Numbers, scales: NDArray[np.floating], zeros: Numbers | None) -> Tensors:
    """compressed-tensors' int-quantized and naive-quantized: signed bytes."""
    tensors = {"weight": (codes.astype(np.int32) - 128).astype(np.int8), "weight_scale": scales}
    if zeros is not None:
        tensors["weight_zero_point"] = (zeros.astype(np.int32) - 128).astype(np.int8)
    return tensors
