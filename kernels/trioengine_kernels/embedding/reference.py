# pyright: basic
"""Rows of an embedding table, which may be quantized."""

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from trioengine_kernels.quantized_linear.reference import dequantize
from trioengine_kernels.quantized_linear.weight import QuantizedWeight


def embedding(token_ids: Tensor, table: Tensor | QuantizedWeight, multiplier: float, dtype: torch.dtype) -> Tensor:
    """The rows of these tokens times the multiplier, computed in float32.

    Args:
        token_ids: [num_tokens], int32.
        table: a row of `num_columns` numbers for each token of the vocabulary.
        multiplier: of all numbers.
        dtype: of the result.

    Returns:
        [num_tokens, num_columns].
    """
    if isinstance(table, Tensor):
        rows = F.embedding(token_ids, table).float()
    else:
        rows = dequantize(_select_rows(table, token_ids))
    return (rows * multiplier).to(dtype)


def _select_rows(table: QuantizedWeight, ids: Tensor) -> QuantizedWeight:
    # torch does not index all kinds of numbers by rows, but bytes it does.
    codes = table.codes.view(torch.uint8).index_select(0, ids).view(table.codes.dtype)
    minimums = None if table.minimums is None else table.minimums.index_select(0, ids)
    return attrs.evolve(
        table, codes=codes, scales=table.scales.index_select(0, ids), minimums=minimums, num_rows=len(ids)
    )
