"""How the whole numbers of a packed matrix can be kept: as codes with a scale and a minimum for each 32 columns.

The native kernels' tiles and a device's planes have the same numbers, each in an order of its own.
"""

import enum

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.quantized import QuantizedMatrix

_MIDDLE_OF_8_BITS = 128
"""The code that stands for 0 where there are no zero points."""


class PackedForm(enum.Enum):
    """What becomes of a matrix."""

    INT4 = "int4"
    """Its codes, 0 to 15, with scales and minimums."""
    INT8 = "int8"
    """Its codes less 128, with scales."""
    INT8_AFFINE = "int8_affine"
    """Its codes less 128, with scales and minimums."""
    ROUNDED = "rounded"
    """Its numbers, rounded to 8 bits with a new scale for each 32 columns."""
    FLOATS = "floats"
    """Its numbers."""


@attrs.frozen(eq=False)
class GroupFields:
    """Rows of a matrix, 32 columns a group."""

    codes: NDArray[np.uint8]
    """[rows, groups, 32]: 0 to 15, or 0 to 255, of which 128 is to be taken."""
    scales: NDArray[np.float16]
    """[rows, groups]."""
    minimums: NDArray[np.float16] | None
    """[rows, groups]; None of INT8."""


def packed_form(part: QuantizedMatrix) -> PackedForm:
    """Codes are kept as they are where groups are runs of 32 columns, or several.

    Scales become halves then, and so does the product of scale and zero point unless 8 bits are symmetric; each loses
    up to 2^-11 of itself. Columns in another order are rounded again, which loses up to 1/254 of the largest of 32
    numbers. Scales that halves cannot hold make floats of all.
    """
    largest = float(np.abs(part.scales()).max())
    if largest and not 2.0**-14 <= largest < 2.0**7:
        return PackedForm.FLOATS
    groups = part.column_groups
    if not part.has_groups_in_order or part.num_columns % 32 or np.any(groups[::32] != groups[31::32]):
        return PackedForm.ROUNDED
    if part.bits == 4:
        return PackedForm.INT4
    return PackedForm.INT8 if np.all(part.zeros() == _MIDDLE_OF_8_BITS) else PackedForm.INT8_AFFINE


def group_fields(part: QuantizedMatrix, first: int, end: int, form: PackedForm) -> GroupFields:
    """Rows `first` to `end - 1`, as `QuantizedMatrix.codes` takes them, of a form that keeps codes."""
    groups = part.column_groups[::32]
    codes = part.codes(first, end).reshape(-1, len(groups), 32)
    scales = part.scales(first, end)[:, groups].astype(np.float16)
    if form is PackedForm.INT8:
        return GroupFields(codes, scales, None)
    zeros = part.zeros(first, end)[:, groups]
    zeros = zeros if form is PackedForm.INT4 else zeros - _MIDDLE_OF_8_BITS
    # Of the scale that was rounded: where code and zero point are equal, little remains of its error.
    return GroupFields(codes, scales, (scales.astype(np.float32) * -zeros).astype(np.float16))
