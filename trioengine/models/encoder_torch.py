# pyright: basic
"""The encoder's operations in torch, computed as they are called."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from trioengine.models.encoder import LayerNorm
from trioengine.models.encoder_config import EncoderActivation
from trioengine.models.encoder_loader import LoadedEncoder

TorchEncoder: TypeAlias = LoadedEncoder[Tensor, Tensor]
"""An encoder that `TorchEncoderOps` can compute."""

_ACTIVATIONS: Mapping[EncoderActivation, Callable[[Tensor], Tensor]] = {
    EncoderActivation.GELU: F.gelu,
    EncoderActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    EncoderActivation.RELU: F.relu,
    EncoderActivation.SILU: F.silu,
}


@attrs.frozen(eq=False)
class TorchEncoderOps:
    """The operations of one step. Nothing is overwritten."""

    token_ids: Tensor
    """[num_tokens], int64, and so the next."""
    positions: Tensor
    """Rows of the table of positions."""
    lengths: Sequence[int]
    """Tokens of each text."""
    rows: Tensor
    """The tokens whose hidden states are wanted."""

    def embedding(self, table: Tensor) -> Tensor:
        """The rows of the token ids."""
        return F.embedding(self.token_ids, table)

    def position_embedding(self, table: Tensor) -> Tensor:
        """The rows of the positions."""
        return F.embedding(self.positions, table)

    def add_layer_norm(self, x: Tensor, residual: Tensor, norm: LayerNorm[Tensor], epsilon: float) -> Tensor:
        """The norm of the sum."""
        return F.layer_norm(x + residual, norm.weight.shape, norm.weight, norm.bias, epsilon)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weightᵀ + bias`."""
        return F.linear(x, weight, bias)

    def full_attention(self, query_key: Tensor, value: Tensor, num_heads: int) -> Tensor:
        """Each text by itself."""
        # [3, heads, tokens, head_dim]
        split = torch.cat((query_key, value), dim=1).unflatten(1, (3, num_heads, -1)).permute(1, 2, 0, 3)
        parts = split.split(list(self.lengths), dim=2)
        gathered = [F.scaled_dot_product_attention(part[0], part[1], part[2]) for part in parts]
        return torch.cat(gathered, dim=1).transpose(0, 1).flatten(1)

    def activated_linear(self, x: Tensor, weight: Tensor, bias: Tensor, activation: EncoderActivation) -> Tensor:
        """The activation of each number of `x @ weightᵀ + bias`."""
        return _ACTIVATIONS[activation](F.linear(x, weight, bias))

    def select_rows(self, x: Tensor) -> Tensor:
        """The rows that are wanted."""
        return x.index_select(0, self.rows)
