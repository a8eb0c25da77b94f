# pyright: basic
"""Places the buffers of a program in memory: two may share it when no operation needs both.

While operations are recorded, a buffer has a stand-in for an address; which operations touch it, and thus how long it
must live, is read from their pointers when all are recorded.
"""

import bisect
import ctypes
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

_STAND_IN = 1 << 62
"""Above every address that a process has."""
_OFFSET_BITS = 38
_ALIGNMENT = 64


@attrs.frozen(eq=False)
class Area:
    """Memory of all buffers of a program."""

    memory: NDArray[np.uint8]
    offsets: Mapping[int, int]
    """By the number of a buffer."""

    def offset_of(self, address: int) -> int:
        """Where in `memory` the place behind a stand-in address lies."""
        number, offset = _split(address)
        return self.offsets[number] + offset


class BufferPlan:
    """Sizes of the buffers that a program uses."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def add(self, num_bytes: int) -> int:
        """Return a stand-in for the address of a new buffer; addresses inside of it are counted from there.

        Raises:
            MemoryError: the buffer is larger than 256 GiB.
        """
        if num_bytes >= 1 << _OFFSET_BITS:
            raise MemoryError(f"A buffer of {num_bytes} bytes is too large.")
        self._sizes.append(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        return _STAND_IN | (len(self._sizes) - 1) << _OFFSET_BITS

    def place(self, ops: Sequence[ctypes.Structure], kept: Sequence[int]) -> Area:
        """Replace the stand-ins in `ops` by addresses. The buffers `kept` are not shared after they were first written.

        Pages of the memory that no step touches are never made.
        """
        first_use: dict[int, int] = {}
        last_use: dict[int, int] = {}
        for index, op in enumerate(ops):
            for number in {_split(value)[0] for _, _, value in _stand_ins(op)}:
                first_use.setdefault(number, index)
                last_use[number] = index
        last_use.update({_split(address)[0]: len(ops) for address in kept})
        offsets, size = self._offsets(first_use, last_use)
        memory = np.zeros(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        area = Area(memory[start : start + size], offsets)
        base = area.memory.ctypes.data
        for op in ops:
            for structure, name, value in list(_stand_ins(op)):
                setattr(structure, name, base + area.offset_of(value))
        return area

    def _offsets(self, first_use: Mapping[int, int], last_use: Mapping[int, int]) -> tuple[dict[int, int], int]:
        """Give each buffer the lowest place that is free while it lives; large ones first."""
        offsets: dict[int, int] = {}
        size = 0
        for number in sorted(first_use, key=lambda n: self._sizes[n], reverse=True):
            taken: list[tuple[int, int]] = []
            for other, offset in offsets.items():
                if first_use[other] <= last_use[number] and first_use[number] <= last_use[other]:
                    bisect.insort(taken, (offset, offset + self._sizes[other]))
            place = 0
            for start, end in taken:
                if start - place >= self._sizes[number]:
                    break
                place = max(place, end)
            offsets[number] = place
            size = max(size, place + self._sizes[number])
        return offsets, size


def _split(address: int) -> tuple[int, int]:
    return (address ^ _STAND_IN) >> _OFFSET_BITS, address & ((1 << _OFFSET_BITS) - 1)


def _stand_ins(op: ctypes.Structure) -> Iterator[tuple[ctypes.Structure, str, int]]:
    """Where in an operation stand-ins are: structure, field, value. Only the used member of its union is looked at."""
    body = op.parameters()  # type: ignore[attr-defined]
    for name, _ in body._fields_:
        value = getattr(body, name)
        if isinstance(value, int) and value & _STAND_IN and value > 0:
            yield body, name, value
