"""The frequencies of rotary position embeddings, with their scalings for longer contexts."""

import math

import numpy as np
from numpy.typing import NDArray

from trioengine.models.config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    Rope,
    RopeFactors,
    YarnRopeScaling,
)


def inverse_frequencies(rope: Rope, head_dim: int, max_length: int) -> NDArray[np.float32]:
    """Angle per position of each pair of elements, [rotary_dim / 2], float32.

    Llama 3's scaling: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py

    Args:
        rope: what is known of it.
        head_dim: elements of a head.
        max_length: tokens of the longest sequence that will be computed. All sequences get the same frequencies, so
            that what a token's key is does not depend on what comes after it.
    """
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # A damaged file's numbers are its own.
        return _scaled(1.0 / rope.theta**exponents, rope, rotary_dim, max_length).astype(np.float32)


def attention_factor(rope: Rope) -> float:
    """Multiplies what is rotated."""
    match rope.scaling:
        case YarnRopeScaling(attention_factor=factor) | LongRopeScaling(attention_factor=factor):
            return factor
        case _:
            return 1.0


def _scaled(frequencies: NDArray[np.float64], rope: Rope, rotary_dim: int, max_length: int) -> NDArray[np.float64]:
    match rope.scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor=factor):
            return frequencies / factor
        case RopeFactors(factors=factors):
            return frequencies / np.array(factors)
        case LongRopeScaling() as scaling:
            is_long = max_length > scaling.original_max_position_embeddings
            return frequencies / np.array(scaling.long_factors if is_long else scaling.short_factors)
        case Llama3RopeScaling() as scaling:
            waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            share_kept = ((waves - low) / (high - low)).clip(0, 1)
            return frequencies * (share_kept + (1 - share_kept) / scaling.factor)
        case YarnRopeScaling() as scaling:
            share_kept = 1 - _yarn_ramp(scaling, rope.theta, rotary_dim)
            return frequencies * (share_kept + (1 - share_kept) / scaling.factor)


def _yarn_ramp(scaling: YarnRopeScaling, theta: float, rotary_dim: int) -> NDArray[np.float64]:
    """0 for frequencies that turn often, 1 for those that turn rarely."""

    def place(num_turns: float) -> float:
        """The number, not whole, of the frequency that turns so often within the original context."""
        context = scaling.original_max_position_embeddings
        return rotary_dim * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    # As in the paper's code: a ramp of no length is a step.
    return ((np.arange(rotary_dim // 2) - low) / (high - low or 0.001)).clip(0, 1)
