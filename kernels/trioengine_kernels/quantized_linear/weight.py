# pyright: basic
"""Quantized matrices as planes of codes, scales and minimums on a device."""

import enum

import attrs
from torch import Tensor

GROUP_SIZE = 32
"""Columns that share a scale, but for FP8."""


class WeightKind(enum.Enum):
    """What a code stands for."""

    INT4 = "int4"
    """`code * scale + minimum`, codes 0 to 15."""
    INT8 = "int8"
    """`code * scale`, codes -128 to 127."""
    INT8_AFFINE = "int8_affine"
    """`code * scale + minimum`."""
    FP8 = "fp8"
    """`code * scale`, codes are float8_e4m3fn, and none of them NaN: products take it for a number."""


@attrs.frozen(eq=False)
class QuantizedWeight:
    """A matrix of `num_rows` outputs and `num_columns` inputs. All planes are contiguous, on one device."""

    kind: WeightKind
    codes: Tensor
    """INT8 and INT8_AFFINE: int8 [num_rows, num_columns]. FP8: float8_e4m3fn of the same shape. INT4: uint8 [num_rows,
    num_columns / 2], as a GGUF block has them: of the group of 32 columns g, byte `16 * g + i` has column `32 * g + i`
    in its low and column `32 * g + 16 + i` in its high four bits."""
    scales: Tensor
    """[num_rows, num_groups]: float16, of FP8 float32."""
    minimums: Tensor | None
    """[num_rows, num_groups], float16. Of INT4 and INT8_AFFINE only."""
    num_rows: int
    num_columns: int
    group_size: int = GROUP_SIZE
    """Columns that share a scale, except that the last group may be shorter. Of FP8 any multiple of 32, or all
    columns."""
