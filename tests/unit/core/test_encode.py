"""Requests for vectors in the core: they end once, beside generation, whatever happens to their steps."""

import attrs
import numpy as np
import pytest

from trioengine.config.engine import SchedulingPolicy
from trioengine.core.executor import NewSequence
from trioengine.testing.core_driver import CoreDriver, make_core_config, make_core_request, make_encode_request
from trioengine.testing.fake_executor import generate_alone, pooled_alone
from trioengine.types.codec import error_from_data
from trioengine.types.messages import EncodeCoreRequest
from trioengine.types.output import FinishReason
from trioengine.types.pooling import PoolingParams, PoolingType

LONG = tuple(range(10, 60))


def test_a_request_ends_with_its_vector() -> None:
    """The vector comes with the end, and nothing else does."""
    driver = CoreDriver()
    answer = driver.add(make_encode_request(prompt=(5, 6, 7)))
    driver.run()

    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.STOP
    assert answer.tokens == []
    assert answer.vectors is not None
    np.testing.assert_array_equal(answer.vectors, pooled_alone((5, 6, 7)))
    assert driver.executor.sequence_ids == set()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("pooling_type", list(PoolingType))
def test_vectors_and_answers_share_steps(async_scheduling: bool, pooling_type: PoolingType) -> None:
    """With few tokens in a step, prompts are computed in parts, beside answers, and everyone gets what it should."""
    config = attrs.evolve(make_core_config(max_num_batched_tokens=7), async_scheduling=async_scheduling)
    driver = CoreDriver(config)
    generated = [driver.add(make_core_request(slot, (slot, 2), max_tokens=9)) for slot in range(3)]
    encoded = [
        driver.add(make_encode_request(slot, (slot, *LONG[:slot]), pooling_type=pooling_type)) for slot in range(3, 30)
    ]
    driver.run()

    for answer in generated:
        assert answer.tokens == generate_alone((answer.slot, 2), 9, vocab_size=1000)
    for answer in encoded:
        assert answer.vectors is not None
        np.testing.assert_array_equal(answer.vectors, pooled_alone((answer.slot, *LONG[: answer.slot])))
    assert max(plan.num_tokens for plan in driver.plans) == 7


def test_preemption_and_a_full_cache_change_no_vector() -> None:
    """A request that lost its blocks in the middle of its prompt starts again."""
    config = make_core_config(max_num_batched_tokens=8)
    config = attrs.evolve(config, scheduling_policy=SchedulingPolicy.PRIORITY, max_num_partial_prefills=4)
    driver = CoreDriver(config, num_blocks=14)
    answer = driver.add(make_encode_request(0, LONG, priority=5, pooling_type=PoolingType.MEAN))
    driver.step()
    driver.step()
    first = driver.add(make_core_request(1, LONG[:20], max_tokens=12, priority=0))
    driver.run()

    assert driver.core.scheduler.num_preemptions == 1
    assert first.tokens == generate_alone(LONG[:20], 12, vocab_size=1000)
    assert answer.vectors is not None
    np.testing.assert_array_equal(answer.vectors, pooled_alone(LONG))


def test_only_the_last_token_may_stand_on_cached_ones() -> None:
    """Of tokens that were found in the cache nobody has hidden states, so where all are needed, all are computed."""
    driver = CoreDriver(attrs.evolve(make_core_config(), enable_prefix_caching=True))
    driver.add(make_core_request(0, LONG, max_tokens=1))
    driver.run()
    last = driver.add(make_encode_request(0, LONG, pooling_type=PoolingType.LAST))
    driver.run()
    mean = driver.add(make_encode_request(0, LONG, pooling_type=PoolingType.MEAN))
    driver.run()
    salted = driver.add(make_encode_request(0, LONG, cache_salt="pepper"))
    driver.run()

    assert (last.num_cached_tokens, mean.num_cached_tokens, salted.num_cached_tokens) == (48, 0, 0)
    for answer in (last, mean, salted):
        assert answer.vectors is not None
        np.testing.assert_array_equal(answer.vectors, pooled_alone(LONG))


def test_what_an_embedding_computed_is_found_by_an_answer() -> None:
    """Embeddings fill the prefix cache as answers do."""
    driver = CoreDriver(attrs.evolve(make_core_config(), enable_prefix_caching=True))
    driver.add(make_encode_request(0, LONG, pooling_type=PoolingType.MEAN))
    driver.run()
    answer = driver.add(make_core_request(0, LONG, max_tokens=3))
    driver.run()

    assert answer.num_cached_tokens == 48
    assert answer.tokens == generate_alone(LONG, 3, vocab_size=1000)


def test_a_prompt_that_cannot_be_split_waits_for_a_step_of_its_own() -> None:
    """Where each token sees those behind it, a step computes whole prompts, as many as it has room for."""
    config = attrs.evolve(make_core_config(max_num_batched_tokens=16), splits_prompts=False)
    driver = CoreDriver(config)
    lengths = (10, 9, 6, 16, 1, 15)
    answers = [driver.add(make_encode_request(slot, LONG[:number])) for slot, number in enumerate(lengths)]
    driver.run()

    assert [[work.num_tokens for work in plan.scheduled] for plan in driver.plans if plan.scheduled] == [
        [10],
        [9, 6],
        [16],
        [1, 15],
    ]
    for answer, number in zip(answers, lengths, strict=True):
        assert answer.vectors is not None
        np.testing.assert_array_equal(answer.vectors, pooled_alone(LONG[:number]))


@pytest.mark.parametrize(
    ("config", "num_tokens", "numbers"),
    [
        (make_core_config(max_model_len=40), 41, ("41", "40")),
        (attrs.evolve(make_core_config(max_num_batched_tokens=16), splits_prompts=False), 17, ("17", "16")),
    ],
)
def test_a_prompt_that_never_fits_is_refused_with_both_numbers(config, num_tokens, numbers) -> None:  # type: ignore[no-untyped-def]
    """Longer than the context, or than a step where it cannot be split. A token less is fine."""
    driver = CoreDriver(config)
    refused = driver.add(make_encode_request(0, LONG[:num_tokens]))
    accepted = driver.add(make_encode_request(1, LONG[: num_tokens - 1]))
    driver.run()

    assert refused.finished is not None
    assert refused.finished.error is not None
    error = error_from_data(refused.finished.error)
    assert (error.code, error.status) == ("context_length_exceeded", 400)
    assert all(number in str(error) for number in numbers)
    assert accepted.vectors is not None


def test_wrong_requests_are_refused_alone() -> None:
    """A front end that does not keep the rules harms only its own request."""
    driver = CoreDriver()
    good = make_encode_request(0)
    wrong = [
        attrs.evolve(good, slot=1, pooling=PoolingParams(dimensions=0)),
        attrs.evolve(good, slot=2, second_text_start=3),
        attrs.evolve(good, slot=3, prompt_token_ids=b""),
        attrs.evolve(good, slot=4, prompt_token_ids=b"\xff\xff\xff\xff"),
    ]
    answers = [driver.add(request) for request in wrong]
    answer = driver.add(good)
    driver.run()

    params = [
        error_from_data(each.finished.error).param  # type: ignore[union-attr]
        for each in answers
        if each.finished is not None and each.finished.error is not None
    ]
    assert params == ["dimensions", "second_text_start", "prompt", "prompt"]
    assert answer.vectors is not None


def test_a_failed_one_fails_alone() -> None:
    """One request's failure ends this request only, with an error and no vector."""

    def fails(sequence: NewSequence, num_generated: int) -> bool:
        del num_generated
        return sequence.token_ids[0] == 666

    driver = CoreDriver(fails=fails)
    answers = [driver.add(make_encode_request(slot, (first, 2, 3))) for slot, first in enumerate((1, 666, 3))]
    driver.run()

    assert [answer.vectors is not None for answer in answers] == [True, False, True]
    finished = answers[1].finished
    assert finished is not None
    assert finished.error is not None
    assert finished.error.name == "EngineGenerateError"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_batch_of_2000_cancelled_half_way_leaves_nothing(async_scheduling: bool) -> None:
    """Case 6 (vllm 25568): every request ends exactly once, and blocks, sequences and slots are free."""
    config = attrs.evolve(make_core_config(), async_scheduling=async_scheduling)
    driver = CoreDriver(config)
    answers = [driver.add(make_encode_request(slot, (slot % 900, 1, 2))) for slot in range(2000)]
    while sum(answer.finished is not None for answer in answers) < 1000:
        driver.step()
        driver.take_all()
    driver.abort(*(answer.slot for answer in answers))
    driver.run()

    reasons = [answer.finished.reason for answer in answers if answer.finished is not None]
    assert len(reasons) == 2000
    num_done = reasons.count(FinishReason.STOP)
    assert num_done == sum(answer.vectors is not None for answer in answers)
    assert 1000 <= num_done < 1100
    assert driver.executor.sequence_ids == set()
    assert driver.core.scheduler.num_running == driver.core.num_waiting == 0
    assert driver.core.kv_cache.num_free_blocks == driver.core.kv_cache.num_blocks
    again: EncodeCoreRequest = make_encode_request(1999)
    answer = driver.add(again)
    driver.run()
    assert answer.vectors is not None
