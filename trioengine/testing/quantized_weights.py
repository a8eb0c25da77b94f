# pyright: basic
"""Quantized matrices with random codes."""

import torch
from trioengine_kernels.quantized_linear import GROUP_SIZE, QuantizedWeight, WeightKind


def random_quantized_weight(
    kind: WeightKind, num_rows: int, num_columns: int, *, seed: int = 0, fp8_group_size: int = 64
) -> QuantizedWeight:
    """A matrix on the CPU whose products are about as large as what it is multiplied with. `num_columns` is a multiple
    of 32."""
    generator = torch.Generator().manual_seed(seed)
    group_size = fp8_group_size if kind is WeightKind.FP8 else GROUP_SIZE
    num_groups = -(-num_columns // group_size)
    size = num_columns**-0.5
    if kind is WeightKind.INT4:
        codes = torch.randint(0, 256, (num_rows, num_columns // 2), generator=generator, dtype=torch.uint8)
        largest = 8
    elif kind is WeightKind.FP8:
        codes = torch.randn(num_rows, num_columns, generator=generator).to(torch.float8_e4m3fn)
        largest = 1
    else:
        codes = torch.randint(-128, 128, (num_rows, num_columns), generator=generator, dtype=torch.int8)
        largest = 64
    scales = (torch.rand(num_rows, num_groups, generator=generator) + 0.5) * size / largest
    minimums = None
    if kind in (WeightKind.INT4, WeightKind.INT8_AFFINE):
        minimums = (torch.randn(num_rows, num_groups, generator=generator) * size).half()
    scales = scales if kind is WeightKind.FP8 else scales.half()
    return QuantizedWeight(kind, codes, scales, minimums, num_rows, num_columns, group_size)
