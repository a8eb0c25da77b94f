"""`quantized_linear`: products with quantized matrices; `dequantize`: their numbers."""

from trioengine_kernels.quantized_linear.reference import dequantize, quantized_linear
from trioengine_kernels.quantized_linear.weight import GROUP_SIZE, QuantizedWeight, WeightKind

__all__ = ["GROUP_SIZE", "QuantizedWeight", "WeightKind", "dequantize", "quantized_linear"]
