# pyright: basic
"""What the planes of a quantized matrix stand for, and products with it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from trioengine_kernels.quantized_linear.weight import GROUP_SIZE, QuantizedWeight, WeightKind


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix's numbers, computed in float32 and rounded once.

    Args:
        weight: the matrix.
        dtype: of the result.

    Returns:
        [num_rows, num_columns], a new tensor.
    """
    codes = weight.codes
    if weight.kind is WeightKind.INT4:
        groups = codes.unflatten(1, (-1, GROUP_SIZE // 2))
        codes = torch.cat((groups & 15, groups >> 4), dim=2).flatten(1)
    values = codes.float() * _for_each_column(weight.scales, weight)
    if weight.minimums is not None:
        values += _for_each_column(weight.minimums, weight)
    return values.to(dtype)


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weightᵀ + bias`.

    The numbers that the matrix stands for are rounded to the type of `x`; products are summed in float32, with the
    bias, and rounded once. Activations are not quantized, whatever the matrix is.

    Args:
        x: [num_tokens, num_columns], float32, float16 or bfloat16.
        weight: the matrix.
        bias: [num_rows], float32.

    Returns:
        [num_tokens, num_rows], like `x`.
    """
    bias = None if bias is None else bias.float()
    return F.linear(x.float(), dequantize(weight, x.dtype).float(), bias).to(x.dtype)


def _for_each_column(values: Tensor, weight: QuantizedWeight) -> Tensor:
    """[num_rows, num_groups] to [num_rows, num_columns], float32."""
    return values.float().repeat_interleave(weight.group_size, dim=1)[:, : weight.num_columns]
