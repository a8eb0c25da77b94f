# pyright: basic
"""Adapters of one product, by slots: what `ProgramBuilder.lora` computes with."""

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trioengine_kernels.native import structures as c

RANK_STEP = 16

Floats = NDArray[np.float32]


class LoraTable:
    """For each slot, 1 to `num_slots`, what an adapter adds to parts of the product's outputs. All are empty at first.

    Not to be changed while a step runs.
    """

    def __init__(self, num_slots: int, num_columns: int, parts: Sequence[tuple[int, int]]) -> None:
        """`parts`: of the outputs the first row and the number of rows that one pair of matrices makes."""
        if num_slots < 1 or not parts or any(first < 0 or num_rows < 1 for first, num_rows in parts):
            raise ValueError("A table has slots, and parts with rows.")
        self.num_slots = num_slots
        self.num_columns = num_columns
        self.num_parts = len(parts)
        self.num_rows = max(first + num_rows for first, num_rows in parts)
        self._parts = tuple(parts)
        self._table = (c.LoraPart * ((num_slots + 1) * len(parts)))()
        self._kept: dict[int, Sequence[Floats]] = {}

    @property
    def address(self) -> int:
        """Of the `TeLoraPart`s."""
        return ctypes.addressof(self._table)

    def set(self, slot: int, matrices: Sequence[tuple[Floats, Floats] | None]) -> None:
        """Put an adapter into a slot, in place of what is there.

        Args:
            slot: 1 or above.
            matrices: for each part A, [rank, columns], and B, [rows, rank], float32; None adds nothing.
        """
        if not 1 <= slot <= self.num_slots or len(matrices) != self.num_parts:
            raise ValueError(f"There is no slot {slot}, or there are {self.num_parts} parts.")
        entries: list[c.LoraPart] = []
        kept: list[Floats] = []
        for pair, (first_row, num_rows) in zip(matrices, self._parts, strict=True):
            if pair is None:
                entries.append(c.LoraPart())
                continue
            a, b = pair
            rank = len(a)
            if not rank or a.shape != (rank, self.num_columns) or b.shape != (num_rows, rank):
                raise ValueError(f"Matrices of {a.shape} and {b.shape} do not fit.")
            columns = np.zeros((self.num_columns, -(-rank // RANK_STEP) * RANK_STEP), np.float32)
            columns[:, :rank] = a.T
            rows = np.ascontiguousarray(b.T, np.float32)
            kept += (columns, rows)
            entries.append(c.LoraPart(columns.ctypes.data, rows.ctypes.data, rank, first_row, num_rows))
        for number, entry in enumerate(entries):
            self._table[slot * self.num_parts + number] = entry
        self._kept[slot] = kept
