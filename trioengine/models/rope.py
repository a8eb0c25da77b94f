"""The frequencies of rotary position embeddings, with their scalings for longer contexts."""

import math

import numpy as np
from numpy.typing import NDArray

from trioengine.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """Angle per position of each pair of elements, [head_dim / 2], float32.

    Llama 3's scaling: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    return _scaled(1.0 / config.rope_theta**exponents, config.rope_scaling).astype(np.float32)


def _scaled(frequencies: NDArray[np.float64], scaling: RopeScaling | None) -> NDArray[np.float64]:
    match scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor=factor):
            return frequencies / factor
        case Llama3RopeScaling():
            waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            share_kept = ((waves - low) / (high - low)).clip(0, 1)
            return frequencies * (share_kept + (1 - share_kept) / scaling.factor)
