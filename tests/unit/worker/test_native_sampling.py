"""The native sampler, told the rules of sequences, draws the tokens that torch draws for the same sequences."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import Library, ThreadPool  # noqa: E402
from trioengine_kernels.native.sampler import NativeSampler  # noqa: E402

from trioengine.core.executor import NewSequence  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.native_sampling import sampling_arrays  # noqa: E402
from trioengine.worker.sampler import sample_tokens  # noqa: E402
from trioengine.worker.sequences import SequenceState, sequence_state  # noqa: E402

VOCAB_SIZE = 997
PROMPT = [5, 6, 7, 5]
OUTPUT = [8, 9, 8, 8]
RULES = {
    "greedy": SamplingParams(temperature=0),
    "top_p of zero": SamplingParams(top_p=0.0),
    "random": SamplingParams(temperature=1.3),
    "cuts": SamplingParams(top_k=40, top_p=0.9, min_p=0.001),
    "top_k off": SamplingParams(top_k=-1),
    "bias": SamplingParams(temperature=0.7, logit_bias={3: 4.0, 900: -2.0}),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    "one penalty": SamplingParams(temperature=0, frequency_penalty=-1.0),
    "too short to end": SamplingParams(temperature=0.5, min_tokens=20),
}


@pytest.fixture(scope="module")
def library() -> Library:
    return native_library()


def states(seed: int) -> list[SequenceState]:
    new = [
        NewSequence(i, PROMPT + OUTPUT, len(PROMPT), rules, seed=2**64 - 1 - seed * 100 - i, end_token_ids=(1, 8, 500))
        for i, rules in enumerate(RULES.values())
    ]
    return [sequence_state(each, VOCAB_SIZE) for each in new]


def test_all_rules_together_and_alone(library: Library) -> None:
    """The same in one batch and row by row."""
    sampler = NativeSampler(library, ThreadPool(library, 2))
    for seed in range(20):
        sequences = states(seed)
        logits = (np.random.default_rng(seed).standard_normal((len(sequences), VOCAB_SIZE)) * 3).astype(np.float32)
        # Tokens that rules are about must be likely, or a forgotten rule would not show.
        logits[:, [1, 3, 5, 8, 500]] += 6
        expected = sample_tokens(sequences, torch.from_numpy(logits.copy())).tolist()
        together = sampler.sample(logits, sampling_arrays(sequences)).token_ids.tolist()
        alone = [
            int(sampler.sample(logits[i : i + 1], sampling_arrays([sequence])).token_ids[0])
            for i, sequence in enumerate(sequences)
        ]
        assert together == expected
        assert alone == expected


def test_what_nobody_uses_is_left_out() -> None:
    arrays = sampling_arrays(states(0)[:3])
    assert (arrays.logit_bias, arrays.penalties, arrays.forbidden) == (None, None, None)
