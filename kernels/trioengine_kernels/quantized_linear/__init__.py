"""`quantized_linear`: products with quantized matrices."""

from trioengine_kernels.quantized_linear.weight import GROUP_SIZE, QuantizedWeight, WeightKind

__all__ = ["GROUP_SIZE", "QuantizedWeight", "WeightKind"]
