"""Steps on a real, tiny model: right tokens, sampling rules, and failures that stay with their sequence."""

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402

from trioengine.config.engine import LogprobsMode  # noqa: E402
from trioengine.core.executor import (  # noqa: E402
    NO_TOKEN,
    NewSequence,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenMasks,
)
from trioengine.models.decoder import Decoder  # noqa: E402
from trioengine.models.loader import LoadedModel  # noqa: E402
from trioengine.models.torch_ops import TorchModel  # noqa: E402
from trioengine.testing.device_backend import device_backend  # noqa: E402
from trioengine.testing.fake_device import FakeDevice  # noqa: E402
from trioengine.testing.logits import torch_logits  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import native_copy, tiny_model  # noqa: E402
from trioengine.tokenizer.bad_words import BadWordsRules  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.backend import Backend  # noqa: E402
from trioengine.worker.model_runner import ModelRunner  # noqa: E402
from trioengine.worker.native_backend import NativeBackend  # noqa: E402
from trioengine.worker.torch_backend import TorchBackend  # noqa: E402

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=1.0, seed=1)
NUM_BLOCKS = 400
MODEL = tiny_model()


def torch_backend(model: TorchModel) -> Backend:
    return TorchBackend(model, reload=lambda _: model, num_blocks=[NUM_BLOCKS], block_size=BLOCK_SIZE)


def native_backend(model: TorchModel) -> Backend:
    """The same weights, unquantized."""
    library = native_library()
    pool = ThreadPool(library, 2)
    return NativeBackend(
        native_copy(model),
        library,
        pool,
        reload=lambda _: native_copy(model),
        num_blocks=[NUM_BLOCKS],
        block_size=BLOCK_SIZE,
        max_tokens=512,
        max_logit_rows=256,
    )


def asynchronous_backend(model: TorchModel) -> Backend:
    """A GPU's, on a device that is always late. Without graphs, which take time to be recorded for each test."""
    return device_backend(model, FakeDevice(), num_blocks=NUM_BLOCKS, max_num_seqs=128, graph_sizes=())


make_backend = torch_backend


@pytest.fixture(params=[torch_backend, native_backend, asynchronous_backend], autouse=True)
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this module runs with each backend."""
    monkeypatch.setitem(globals(), "make_backend", request.param)


def token_byte_table(_: bool) -> Sequence[bytes]:
    """Token 7 is written "<7>"."""
    return [f"<{token_id}>".encode() for token_id in range(MODEL.config.vocab_size)]


def make_runner(model: TorchModel = MODEL) -> ModelRunner:
    return ModelRunner(make_backend(model), bad_words_rules=BadWordsRules(token_byte_table, model.config.vocab_size))


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in tokens)


class Session:
    """Schedules all sequences whole in every step, each in its own blocks."""

    def __init__(self, model: TorchModel = MODEL) -> None:
        self.runner = make_runner(model)
        self.step = 0
        self.computed: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.new: list[NewSequence] = []

    def add(self, sequence_id: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **fields) -> None:
        fields = {"num_prompt_tokens": len(prompt), "seed": sequence_id} | fields
        self.new.append(NewSequence(sequence_id, prompt, sampling=sampling, **fields))
        self.computed[sequence_id] = 0
        self.known[sequence_id] = len(prompt)
        self.tokens[sequence_id] = []

    def run(self, num_steps: int = 1) -> StepResult:
        for _ in range(num_steps):
            scheduled = []
            for sequence_id, known in self.known.items():
                computed = self.computed[sequence_id]
                num_held, num_needed = -(-computed // BLOCK_SIZE), -(-known // BLOCK_SIZE)
                blocks = [sequence_id * 10 + number for number in range(num_held, num_needed)]
                scheduled.append(ScheduledSequence(sequence_id, computed, known - computed, blocks))
            result = self.runner.run(StepPlan(self.step, scheduled, self.new))
            assert result.step == self.step
            self.step, self.new = self.step + 1, []
            for work, token in zip(scheduled, result.tokens, strict=True):
                if token != NO_TOKEN:
                    self.computed[work.sequence_id] = self.known[work.sequence_id]
                    self.known[work.sequence_id] += 1
                    self.tokens[work.sequence_id].append(token)
        return result


def generate(prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY, **fields) -> list[int]:
    session = Session()
    session.add(0, prompt, sampling, **fields)
    session.run(num_tokens)
    return session.tokens[0]


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start * 17 + place * 29 + place * place * 5 + 3) % MODEL.config.vocab_size for place in range(length)]


def test_greedy_tokens_are_the_largest_logits_of_the_whole_text() -> None:
    """Each token equals what a first step over everything before it gives."""
    prompt = prompt_of(9)
    tokens = generate(prompt, 8)
    for i, token in enumerate(tokens):
        assert generate(prompt + tokens[:i], 1) == [token]


def test_thirty_two_sequences_give_the_tokens_that_each_gives_alone() -> None:
    session = Session()
    prompts = {i: prompt_of(1 + (i * 7) % 23, start=i) for i in range(32)}
    for i, prompt in prompts.items():
        session.add(i, prompt, RANDOM if i % 2 else GREEDY)
    session.run(10)
    for i, prompt in prompts.items():
        assert session.tokens[i] == generate(prompt, 10, RANDOM if i % 2 else GREEDY, seed=i)


@pytest.mark.parametrize(
    ("prompt", "sampling", "fields", "what"),
    [
        ([1, MODEL.config.vocab_size], GREEDY, {}, "prompt"),
        ([1, -1], GREEDY, {}, "prompt"),
        ([1, 2**70], GREEDY, {}, "prompt"),
        ([1, 2], GREEDY, {"end_token_ids": (5, 9999)}, "stop_token_ids"),
        ([1, 2], SamplingParams(logit_bias={3: 1.0, 9999: 2.0}), {}, "logit_bias"),
        ([1, 2], SamplingParams(allowed_token_ids=(3, -1)), {}, "allowed_token_ids"),
        ([1, 2], SamplingParams(allowed_token_ids=()), {}, "allowed_token_ids"),
    ],
)
def test_a_token_out_of_the_vocabulary_fails_its_sequence_only(prompt, sampling, fields, what) -> None:
    """Case 34 (vllm 16529): the neighbours' tokens are those that they would have been."""
    session = Session()
    session.add(0, prompt_of(5))
    session.add(1, prompt, sampling, **fields)
    session.add(2, prompt_of(6, start=2))
    result = session.run()
    assert [failure.sequence_id for failure in result.failures] == [1]
    assert what in result.failures[0].message
    assert result.tokens[1] == NO_TOKEN
    session.run(3)
    assert session.tokens[0] == generate(prompt_of(5), 4)
    assert session.tokens[2] == generate(prompt_of(6, start=2), 4)


def test_a_step_of_failures_only_is_a_step() -> None:
    session = Session()
    session.add(0, [999])
    result = session.run()
    assert [failure.sequence_id for failure in result.failures] == [0]
    assert result.tokens == [NO_TOKEN]


def broken_model() -> TorchModel:
    """Logits after token 7 are no numbers."""
    weights = MODEL.decoder.weights
    embedding = weights.embedding.clone()
    embedding[7] = math.nan
    return LoadedModel(MODEL.config, Decoder(MODEL.config, attrs.evolve(weights, embedding=embedding)))


def test_logits_that_are_no_numbers_fail_their_sequence_and_leave_nothing_behind() -> None:
    """Not even in the blocks, when another sequence gets them and fills them in part."""
    broken = broken_model()
    for sampling in (GREEDY, RANDOM, SamplingParams(top_k=5), SamplingParams(top_p=0.5, min_p=0.1)):
        runner = make_runner(broken)
        new = [
            NewSequence(0, [7] * 40, 40, sampling, seed=0),
            NewSequence(1, prompt_of(40), 40, GREEDY, seed=0),
        ]
        result = runner.run(
            StepPlan(0, [ScheduledSequence(0, 0, 40, [0, 1, 2]), ScheduledSequence(1, 0, 40, [3, 4, 5])], new)
        )
        assert [failure.sequence_id for failure in result.failures] == [0]
        expected = generate(prompt_of(40), 2)
        assert result.tokens == [NO_TOKEN, expected[0]]
        second = prompt_of(2, start=5)
        result = runner.run(
            StepPlan(
                1,
                [ScheduledSequence(1, 40, 1), ScheduledSequence(2, 0, 2, [2])],
                [NewSequence(2, second, 2, GREEDY, seed=0)],
                removed=[0],
            )
        )
        assert result.tokens[0] == expected[1]
        result = runner.run(StepPlan(2, [ScheduledSequence(1, 41, 1), ScheduledSequence(2, 2, 1)]))
        assert not result.failures
        assert result.tokens[1] == generate(second, 2)[1]


def test_logit_bias_moves_the_choice() -> None:
    assert generate(prompt_of(4), 3, SamplingParams(temperature=0, logit_bias={42: 100.0})) == [42] * 3
    banned = generate(prompt_of(4), 1)[0]
    assert generate(prompt_of(4), 1, SamplingParams(temperature=0, logit_bias={banned: -100.0})) != [banned]


def test_rules_of_one_sequence_do_not_touch_its_neighbours() -> None:
    session = Session()
    session.add(0, prompt_of(5))
    session.add(1, prompt_of(5), SamplingParams(temperature=0, logit_bias={42: 100.0}, repetition_penalty=2.0))
    session.run(3)
    assert session.tokens == {0: generate(prompt_of(5), 3), 1: [42, 42, 42]}


def test_penalties_count_what_was_generated() -> None:
    """A token that a bias forces is dropped once the frequency penalty outweighs the bias."""
    forced = SamplingParams(temperature=0, logit_bias={42: 100.0}, frequency_penalty=2.0)
    tokens = generate(prompt_of(4), 80, forced)
    assert tokens[:30] == [42] * 30
    assert tokens[30:] != [42] * 50
    # Tokens that came before a preemption count on.
    again = generate(prompt_of(4) + tokens[:60], 20, forced, num_prompt_tokens=4)
    assert again == tokens[60:]


def test_presence_and_repetition_penalties_forbid_repeats_when_strong() -> None:
    strong = SamplingParams(temperature=0, repetition_penalty=100.0, presence_penalty=2.0)
    tokens = generate(prompt_of(6), 30, strong)
    assert len({*tokens}) == 30


def test_top_p_zero_is_greedy() -> None:
    assert generate(prompt_of(5), 4, SamplingParams(top_p=0.0)) == generate(prompt_of(5), 4)


def test_top_k_minus_one_and_zero_are_off() -> None:
    draws = [generate(prompt_of(5), 12, SamplingParams(temperature=2.0, top_k=k), seed=9) for k in (-1, 0, 211)]
    assert draws[0] == draws[1] == draws[2]


def test_seeds_of_64_bits_differ() -> None:
    draws = {tuple(generate(prompt_of(5), 8, RANDOM, seed=seed)) for seed in (0, 1, 2**32, 2**63, 2**64 - 1)}
    assert len(draws) == 5


def test_bad_words_are_not_written_and_neighbours_do_not_notice() -> None:
    """Words of one token, of several, and of parts of tokens. The prompt takes no part."""
    prompt = prompt_of(6)
    for sampling in (GREEDY, RANDOM):
        free = generate(prompt, 8, sampling)
        for word in (f"<{free[0]}>", f"{free[1]}><{free[2]}", f"{text_of(free[2:6])}"):
            assert word in text_of(free)
            session = Session()
            session.add(0, prompt, sampling)
            session.add(1, prompt, attrs.evolve(sampling, bad_words=(word,)), seed=0)
            session.run(8)
            assert session.tokens[0] == free
            assert word not in text_of(session.tokens[1])
        word = f"<{prompt[-1]}><{free[0]}>"
        assert generate(prompt, 8, attrs.evolve(sampling, bad_words=(word,))) == free


def test_bad_words_are_not_written_after_a_preemption() -> None:
    """What was generated before it counts as the answer."""
    prompt = prompt_of(6)
    free = generate(prompt, 4)
    sampling = attrs.evolve(GREEDY, bad_words=(text_of(free[1:3]),))
    whole = generate(prompt, 4, sampling)
    assert whole[:2] == free[:2]
    assert whole[2] != free[2]
    assert generate(prompt + free[:2], 2, sampling, num_prompt_tokens=len(prompt)) == whole[2:]


def test_without_a_tokenizer_a_sequence_with_bad_words_fails_alone() -> None:
    session = Session()
    session.runner = ModelRunner(make_backend(MODEL))
    session.add(0, prompt_of(4))
    session.add(1, prompt_of(4), attrs.evolve(GREEDY, bad_words=("x",)))
    result = session.run()
    assert [failure.sequence_id for failure in result.failures] == [1]
    assert result.tokens[0] != NO_TOKEN


def test_a_place_behind_an_accepted_draft_fails_in_the_next_step() -> None:
    """So that what was accepted counts as it does without drafts, with its log probabilities."""
    forced = SamplingParams(temperature=0, logit_bias={7: 100.0}, logprobs=1)
    new = [NewSequence(0, prompt_of(5), 5, forced, seed=0)]
    bits = np.zeros((2, -(-MODEL.config.vocab_size // 32)), np.int32)
    bits[0] = -1
    runner = make_runner()
    result = runner.run(
        StepPlan(0, [ScheduledSequence(0, 0, 6, [0], draft_token_ids=[7])], new, masks=TokenMasks({0: 0}, bits))
    )
    assert (result.tokens, result.failures, result.num_accepted) == ([7], [], {})
    assert [entry.token_ids[0] for entry in result.logprobs[0]] == [7]
    result = runner.run(StepPlan(1, [ScheduledSequence(0, 5, 1)], masks=TokenMasks({0: 1}, bits)))
    assert result.tokens == [NO_TOKEN]
    assert [failure.sequence_id for failure in result.failures] == [0]
    assert not result.logprobs


def test_a_prompt_whose_log_probabilities_are_no_numbers_fails() -> None:
    new = [NewSequence(0, [3, 7, 3, 4], 4, SamplingParams(max_tokens=0, prompt_logprobs=1), seed=0)]
    result = make_runner(broken_model()).run(StepPlan(0, [ScheduledSequence(0, 0, 4, [0])], new))
    assert [failure.sequence_id for failure in result.failures] == [0]


LIMITS = {
    "temperature": SamplingParams(temperature=4.0, top_k=10, logprobs=0),
    "top_p": SamplingParams(temperature=2.0, top_p=0.4, logprobs=0),
    "min_p": SamplingParams(temperature=2.0, min_p=0.2, logprobs=0),
}
NUM_DRAWS = 800


def probabilities(token_ids: Sequence[int], sampling: SamplingParams) -> dict[int, float]:
    """Of each token that may come next, by the definition of the limits, in float64."""
    logits = torch_logits(MODEL, token_ids)[-1].astype(np.float64) / sampling.temperature
    weights = np.exp(logits - logits.max())
    weights[weights < sampling.min_p] = 0
    order = np.argsort(-weights)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= sampling.top_p]] = 0
    weights /= weights.sum()
    return {int(token): float(weights[token]) for token in np.flatnonzero(weights)}


def assert_follows(tokens: Sequence[int], expected: Mapping[int, float]) -> None:
    """Chi-square with a limit that chance passes once in ten thousand; the draws are always the same."""
    assert set(tokens) <= set(expected)
    # Rare tokens together, as the statistic wants some of each kind.
    common = [token for token, probability in expected.items() if probability * len(tokens) >= 5]
    counts = [tokens.count(token) for token in common]
    wanted = [expected[token] * len(tokens) for token in common]
    counts.append(len(tokens) - sum(counts))
    wanted.append(len(tokens) - sum(wanted))
    statistic = sum((count - want) ** 2 / want for count, want in zip(counts, wanted, strict=True) if want >= 1)
    degrees = len(common)
    # Wilson and Hilferty's approximation; 3.72 standard deviations.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


def draw(
    prompt: Sequence[int], sampling: SamplingParams, drafts: Mapping[int, int], mode: LogprobsMode
) -> dict[int, StepResult]:
    """The step behind a prompt for NUM_DRAWS seeds, those in `drafts` with a draft: each one's result, alone."""
    runner = ModelRunner(make_backend(MODEL), logprobs_mode=mode)
    results: dict[int, StepResult] = {}
    per_step = 100
    for step, start in enumerate(range(0, NUM_DRAWS, per_step)):
        seeds = range(start, start + per_step)
        new = [NewSequence(seed, prompt, len(prompt), sampling, seed=seed) for seed in seeds]
        work = [
            ScheduledSequence(seed, 0, len(prompt) + len(own), [seed - start], own)
            for seed in seeds
            for own in [[drafts[seed]] if seed in drafts else []]
        ]
        result = runner.run(StepPlan(step, work, new, removed=range(start - per_step, start) if step else ()))
        assert not result.failures
        for index, seed in enumerate(seeds):
            num_accepted = {0: result.num_accepted[index]} if index in result.num_accepted else {}
            logprobs = {0: result.logprobs[index]}
            results[seed] = StepResult(step, [result.tokens[index]], (), num_accepted, logprobs)
    return results


@pytest.mark.parametrize("sampling", LIMITS.values(), ids=LIMITS)
def test_tokens_follow_the_distribution_with_and_without_drafts(sampling: SamplingParams) -> None:
    """Of many seeds at one place. Drafts that are right half of the time change no token, and what comes after an
    accepted one follows the distribution behind it. Processed log probabilities are of that distribution."""
    prompt = prompt_of(3)
    mode = LogprobsMode.PROCESSED_LOGPROBS
    without = {seed: result.tokens[0] for seed, result in draw(prompt, sampling, {}, mode).items()}
    expected = probabilities(prompt, sampling)
    assert 3 <= len(expected) <= 60
    assert_follows(list(without.values()), expected)
    kinds = sorted(expected)
    drafts = {
        seed: token if seed % 2 else kinds[(kinds.index(token) + 1 + seed // 2 % (len(kinds) - 1)) % len(kinds)]
        for seed, token in without.items()
    }
    second: dict[int, list[int]] = {}
    first: list[int] = []
    for seed, result in draw(prompt, sampling, drafts, mode).items():
        assert result.num_accepted == ({0: 1} if seed % 2 else {})
        first.append(drafts[seed] if seed % 2 else result.tokens[0])
        assert first[-1] == without[seed]
        logprob = result.logprobs[0][0].logprobs[0]
        assert math.exp(logprob) == pytest.approx(expected[first[-1]], rel=1e-3)
        if seed % 2:
            second.setdefault(drafts[seed], []).append(result.tokens[0])
    assert_follows(first, expected)
    token, following = max(second.items(), key=lambda item: len(item[1]))
    assert_follows(following, probabilities([*prompt, token], sampling))
