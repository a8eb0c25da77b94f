"""What is known of rotary position embeddings: which frequencies, and how they are changed for longer contexts."""

import math
from typing import TypeAlias

import attrs


@attrs.frozen
class LinearRopeScaling:
    """Positions are divided by `factor` (Chen et al., 2023)."""

    factor: float


@attrs.frozen
class Llama3RopeScaling:
    """Frequencies with long waves are divided by `factor`, short waves kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@attrs.frozen(kw_only=True)
class YarnRopeScaling:
    """Frequencies that turn rarely within the original context are divided by `factor`, the others kept, and a ramp
    over the frequencies' numbers is between them (Peng et al., 2023)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Multiplies rotated queries and keys."""
    beta_fast: float = 32.0
    """The ramp begins with the frequency that turns so often within the original context..."""
    beta_slow: float = 1.0
    """...and ends with this one."""
    is_truncated: bool = True
    """Begin and end of the ramp are whole numbers."""


@attrs.frozen(kw_only=True)
class LongRopeScaling:
    """Each frequency is divided by a factor of its own: a short one where no sequence is longer than the original
    context, else a long one (Ding et al., 2024)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    """Multiplies rotated queries and keys."""


@attrs.frozen
class RopeFactors:
    """Each frequency is divided by a factor of its own. GGUF files tell Llama 3's scaling so."""

    factors: tuple[float, ...]


RopeScaling: TypeAlias = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling | RopeFactors


@attrs.frozen
class Rope:
    """Rotary position embeddings of a layer."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """The first elements of a head, which are rotated; None is all."""


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """What the paper recommends for a context that is longer by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def long_rope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    """What the paper recommends for a context that is longer by `factor`."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))
