# pyright: basic
"""The frequencies of rotary position embeddings, with their scalings for longer contexts."""

import math

import torch
from torch import Tensor

from trioengine.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of elements, [head_dim / 2], float32.

    Llama 3's scaling: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor=factor):
            return frequencies / factor
        case Llama3RopeScaling() as scaling:
            waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            share_kept = ((waves - low) / (high - low)).clamp(0, 1)
            return frequencies * (share_kept + (1 - share_kept) / scaling.factor)
