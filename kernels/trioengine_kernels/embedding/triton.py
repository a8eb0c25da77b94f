# pyright: basic
# pyright: reportCallIssue=false
"""Rows of an embedding table, which may be quantized, on a GPU: only the rows that are asked for are expanded."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.fp8 import decode_fp8
from trioengine_kernels.quantized_linear.weight import GROUP_SIZE, QuantizedWeight, WeightKind
from trioengine_kernels.variants import Variant

_BLOCK = 1024
"""Columns of a program."""
_NUM_WARPS = 4


def embedding(token_ids: Tensor, table: Tensor | QuantizedWeight, multiplier: float, dtype: torch.dtype) -> Tensor:
    """As the reference's."""
    if isinstance(table, Tensor):
        num_columns, kind, codes, scales, minimums = table.shape[1], "dense", table, None, None
        group_size, num_groups = num_columns, 1
    else:
        num_columns, kind, codes = table.num_columns, table.kind.value, table.codes
        scales, minimums, group_size, num_groups = table.scales, table.minimums, table.group_size, table.scales.shape[1]
        if table.kind is WeightKind.FP8:
            codes = codes.view(torch.uint8)
    out = torch.empty((token_ids.shape[0], num_columns), dtype=dtype, device=token_ids.device)
    if out.shape[0]:
        grid = (out.shape[0], triton.cdiv(num_columns, _BLOCK))
        _embedding_kernel[grid](
            token_ids,
            codes,
            scales,
            minimums,
            out,
            codes.stride(0),
            float(multiplier),
            KIND=kind,
            NUM_COLUMNS=num_columns,
            GROUP_SIZE=group_size,
            NUM_GROUPS=num_groups,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return out


def variants() -> list[Variant]:
    """All kinds of tables."""
    num_columns = 4096
    cases = [
        ("dense", "bf16", None, None, num_columns),
        ("dense", "fp16", None, None, num_columns),
        ("int4", "u8", "fp16", "fp16", GROUP_SIZE),
        ("int8", "i8", "fp16", None, GROUP_SIZE),
        ("int8_affine", "i8", "fp16", "fp16", GROUP_SIZE),
        ("fp8", "u8", "fp32", None, num_columns),
    ]
    return [
        Variant(
            name=f"embedding[{kind if kind != 'dense' else codes}]",
            kernel=_embedding_kernel,
            signature={
                "token_ids": "*i32",
                "codes": f"*{codes}",
                "scales": f"*{scales}",
                "minimums": f"*{minimums}",
                "out": "*fp16" if codes == "fp16" else "*bf16",
                "codes_stride": "i32:16",
                "multiplier": "fp32",
            },
            constants={name: None for name, given in (("scales", scales), ("minimums", minimums)) if given is None}
            | {
                "KIND": kind,
                "NUM_COLUMNS": num_columns,
                "GROUP_SIZE": group_size,
                "NUM_GROUPS": triton.cdiv(num_columns, group_size),
                "BLOCK": _BLOCK,
            },
            num_warps=_NUM_WARPS,
        )
        for kind, codes, scales, minimums, group_size in cases
    ]


@triton.jit
def _embedding_kernel(
    token_ids,
    codes,
    scales,
    minimums,
    out,
    codes_stride,
    multiplier,
    KIND: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + place).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < NUM_COLUMNS
    codes += row * codes_stride
    if KIND == "int4":
        # Byte `16 * g + i` has column `32 * g + i` in its low and column `32 * g + 16 + i` in its high four bits.
        byte = tl.load(codes + columns // 32 * 16 + columns % 16, mask=is_column, other=0)
        values = ((byte >> (columns % 32 // 16 * 4).to(tl.uint8)) & 0xF).to(tl.float32)
    elif KIND == "fp8":
        values = decode_fp8(tl.load(codes + columns, mask=is_column, other=0))
    else:
        values = tl.load(codes + columns, mask=is_column, other=0).to(tl.float32)
    groups = row * NUM_GROUPS + columns // GROUP_SIZE
    if scales is not None:
        values *= tl.load(scales + groups, mask=is_column, other=0.0).to(tl.float32)
    if minimums is not None:
        values += tl.load(minimums + groups, mask=is_column, other=0.0).to(tl.float32)
    values *= multiplier
    tl.store(out + place * NUM_COLUMNS + columns, values.to(out.dtype.element_ty), mask=is_column)
