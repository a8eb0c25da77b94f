# pyright: basic
"""The matrices of a layer's experts where they are, and where that is, for a kernel that chooses among them."""

from collections.abc import Sequence
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from trioengine_kernels.quantized_linear.weight import QuantizedWeight

Matrix: TypeAlias = Tensor | QuantizedWeight

_ALIGNMENT = 16
"""Bytes. A kernel that loads an address cannot see how it is aligned, and is told that it is."""


@attrs.frozen(eq=False)
class ExpertMatrices:
    """One matrix of each expert, all of one shape and type. Nothing is copied: the tensors must stay where they are."""

    matrices: Sequence[Matrix]
    codes: Tensor
    """[num_experts], int64: addresses of the matrices, or of the codes of quantized ones."""
    scales: Tensor | None
    """The same of their scales; None where they are not quantized."""
    minimums: Tensor | None
    """The same of their minimums; None where they have none."""
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, matrices: Sequence[Matrix]) -> "ExpertMatrices":
        """These matrices, on one device.

        Raises:
            ValueError: there are none, or they are not alike, not contiguous, or begin between multiples of 16 bytes,
                which kernels read at once.
        """
        if len({_type_of(matrix) for matrix in matrices}) != 1:
            raise ValueError("The matrices of a layer's experts have one shape and one type.")
        dense = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
        if dense:
            return cls(matrices, _addresses(dense), None, None, *dense[0].shape)
        planes = [matrix for matrix in matrices if isinstance(matrix, QuantizedWeight)]
        return cls(
            matrices,
            _addresses([each.codes for each in planes]),
            _addresses([each.scales for each in planes]),
            None if planes[0].minimums is None else _addresses([each.minimums for each in planes]),
            planes[0].num_rows,
            planes[0].num_columns,
        )


@attrs.frozen(eq=False)
class ExpertWeights:
    """The experts of a layer: `down @ (activation(gate @ x) * (up @ x))` each."""

    gate_up: ExpertMatrices
    """Of [2 * size, hidden_size]: gates, values."""
    down: ExpertMatrices
    """Of [hidden_size, size]."""

    @classmethod
    def of(cls, gate_up: Sequence[Matrix], down: Sequence[Matrix]) -> "ExpertWeights":
        """Both matrices of each expert. To be made anew when tensors have moved.

        Raises:
            ValueError: they do not fit together.
        """
        made = cls(ExpertMatrices.of(gate_up), ExpertMatrices.of(down))
        if len(gate_up) != len(down) or made.gate_up.num_rows != 2 * made.down.num_columns:
            raise ValueError("Each expert has one matrix for gates and values, and one for what comes of them.")
        return made

    @property
    def num_experts(self) -> int:
        """How many there are."""
        return len(self.gate_up.matrices)


def _type_of(matrix: Matrix) -> object:
    if isinstance(matrix, Tensor):
        return matrix.dtype, matrix.shape, matrix.device
    return matrix.kind, matrix.group_size, matrix.num_rows, matrix.num_columns, matrix.codes.device


def _addresses(tensors: Sequence[Tensor | None]) -> Tensor:
    addresses: list[int] = []
    for tensor in tensors:
        if tensor is None or not tensor.is_contiguous():
            raise ValueError("The matrices of experts are contiguous, and their planes complete.")
        if tensor.data_ptr() % _ALIGNMENT:
            raise ValueError(f"The matrices of experts, and their planes, begin at multiples of {_ALIGNMENT} bytes.")
        addresses.append(tensor.data_ptr())
    assert tensors[0] is not None
    return torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)
