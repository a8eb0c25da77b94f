# pyright: basic
"""Rows of logits and sampling parameters for the tests of samplers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import SamplingArrays


def make_arrays(
    num_rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, position=None, **rules
) -> SamplingArrays:
    """Parameters of rows, and their rules. Single values stand for all rows; without a position each has its own."""

    def column(value: Any, dtype: Any) -> Any:
        return np.broadcast_to(np.asarray(value, dtype), (num_rows,)).copy()

    return SamplingArrays(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        seed=column(seed, np.uint64),
        position=column(np.arange(num_rows) if position is None else position, np.int64),
        **rules,
    )


def random_logits(rng: np.random.Generator, kind: str, num_rows: int, vocab_size: int) -> NDArray[np.float32]:
    """[num_rows, vocab_size], of a kind that is hard on a sampler in its own way."""
    x = rng.standard_normal((num_rows, vocab_size)).astype(np.float32)
    match kind:
        case "wide":
            return x * 3
        case "one large":
            x[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] += 12
        case "like language":
            x = x * 0.3 - 1.6 * np.log1p(np.stack([rng.permutation(vocab_size) for _ in range(num_rows)]))
        case "flat":
            x[:] = x[:, :1]
        case "many equals":
            x = np.round(x * 2)
        case "nearly equal":
            x = 20 + x * 3e-6
        case "many forbidden":
            x[rng.random(x.shape) < 0.9] = -np.inf
            x[:, rng.integers(0, vocab_size)] = 0.5
        case "huge":
            x = np.clip(x, -3, 3) * np.float32(1e38)
        case "denormal":
            x *= np.float32(1e-44)
        case "sorted":
            x = np.sort(x * 3, axis=-1)
        case "far below":
            x[:, vocab_size // 3 :] -= 90
        case _:
            raise ValueError(f"There are no such logits: {kind}.")
    return np.ascontiguousarray(x, np.float32)
