# pyright: basic
"""The encoder's operations as a program of the native CPU kernels."""

from collections.abc import Mapping
from typing import TypeAlias

import attrs
from trioengine_kernels.native.library import Library
from trioengine_kernels.native.program import Buffer, Program, ProgramBuilder
from trioengine_kernels.native.structures import Activation

from trioengine.models.encoder import LayerNorm
from trioengine.models.encoder_config import EncoderActivation
from trioengine.models.encoder_loader import LoadedEncoder
from trioengine.models.loader import Floats
from trioengine.models.native_ops import NativeMatrix

NativeEncoder: TypeAlias = LoadedEncoder[NativeMatrix, Floats]
"""An encoder that can be recorded."""

_ACTIVATIONS: Mapping[EncoderActivation, Activation] = {
    EncoderActivation.GELU: Activation.GELU,
    EncoderActivation.GELU_TANH: Activation.GELU_TANH,
    EncoderActivation.RELU: Activation.RELU,
    EncoderActivation.SILU: Activation.SILU,
}


@attrs.frozen(eq=False)
class NativeEncoderOps:
    """Records operations."""

    builder: ProgramBuilder
    head_dim: int
    is_quantized: bool
    """Whether some matrices are: products with the others may be rounded to bfloat16, which loses less."""

    def embedding(self, table: NativeMatrix) -> Buffer:
        """As `ProgramBuilder.embedding`."""
        (tiles,) = table
        return self.builder.embedding(tiles)

    def position_embedding(self, table: NativeMatrix) -> Buffer:
        """As `ProgramBuilder.position_embedding`."""
        (tiles,) = table
        return self.builder.position_embedding(tiles)

    def add_layer_norm(self, x: Buffer, residual: Buffer, norm: LayerNorm[Floats], epsilon: float) -> Buffer:
        """As `ProgramBuilder.layer_norm`."""
        return self.builder.layer_norm(x, residual, norm.weight, norm.bias, epsilon)

    def linear(self, x: Buffer, weight: NativeMatrix, bias: Floats | None = None) -> Buffer:
        """As `ProgramBuilder.linear`."""
        return self.builder.linear(x, weight, bias, may_round=self.is_quantized)

    def full_attention(self, query_key: Buffer, value: Buffer, num_heads: int) -> Buffer:
        """As `ProgramBuilder.full_attention`."""
        return self.builder.full_attention(query_key, value, num_heads=num_heads, scale=self.head_dim**-0.5)

    def activated_linear(self, x: Buffer, weight: NativeMatrix, bias: Floats, activation: EncoderActivation) -> Buffer:
        """As `ProgramBuilder.activated_linear`."""
        (tiles,) = weight
        return self.builder.activated_linear(x, tiles, bias, _ACTIVATIONS[activation])

    def select_rows(self, x: Buffer) -> Buffer:
        """As `ProgramBuilder.select_rows`."""
        return self.builder.select_rows(x)


def record_encoder(model: NativeEncoder, library: Library, *, max_tokens: int) -> Program:
    """The program that computes an encoder's steps of up to `max_tokens` tokens.

    Raises:
        MemoryError: its buffers do not fit.
    """
    config = model.config
    head_dim = config.hidden_size // config.num_heads
    builder = ProgramBuilder(
        library,
        max_tokens=max_tokens,
        max_logit_rows=max_tokens,
        num_kv_heads=config.num_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
    )
    is_quantized = any(tiles.kind.is_quantized for layer in model.encoder.weights.layers for tiles in layer.up.weight)
    return builder.build(model.encoder.forward(NativeEncoderOps(builder, head_dim, is_quantized)))
