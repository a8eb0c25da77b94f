"""Messages in, output out: every request ends exactly once, and only its own fault ends it."""

from array import array

import attrs
import pytest

from trioengine.core.engine_core import MAX_SLOT, STATS_INTERVAL_S
from trioengine.core.executor import TokenLogprobs
from trioengine.core.operations import HANDLERS
from trioengine.core.request import Request
from trioengine.errors import RequestError
from trioengine.testing.core_driver import (
    Answer,
    CoreDriver,
    make_core_config,
    make_core_request,
    make_encode_request,
)
from trioengine.testing.fake_executor import Fail, generate_alone, logprobs_alone
from trioengine.types.codec import decode_reply
from trioengine.types.messages import (
    CALLS,
    AbortRequests,
    Call,
    CallRequest,
    CheckIntegrity,
    CoreLoad,
    Finished,
    GetLoad,
    GetStats,
    PauseGeneration,
    PauseMode,
    Reply,
    ResumeGeneration,
    SchedulerStats,
    Stop,
    unpack_int32,
)
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.repetition import RepetitionDetectionParams
from trioengine.types.request import KVHints
from trioengine.types.structured import StructuredOutputsParams


def load(driver: CoreDriver) -> CoreLoad:
    reply = driver.core.handle(0, CallRequest(0, GetLoad()))
    assert isinstance(reply, Reply)
    return decode_reply(GetLoad, reply.value)


def test_a_request_generates_until_max_tokens() -> None:
    """Its tokens are what the executor gives it, the last one included."""
    driver = CoreDriver()
    answer = driver.add(make_core_request(5, (1, 2, 3), max_tokens=6, seed=9))
    driver.run()
    assert answer.tokens == generate_alone((1, 2, 3), 6, vocab_size=1000, seed=9)
    assert answer.finished == Finished(5, FinishReason.LENGTH)
    assert load(driver) == CoreLoad(running=0, waiting=0, free_blocks=64, total_blocks=64)
    assert driver.executor.sequence_ids == set()


@pytest.mark.parametrize(("end", "stop_token_id"), [(9, None), (8, 8)])
def test_a_request_ends_at_end_of_text_or_a_stop_token(end: int, stop_token_id: int | None) -> None:
    """The token that ends it is part of its tokens; no step comes after it."""
    driver = CoreDriver(scripts={(1, 2): (5, 6, end, 7)})
    sampling = SamplingParams(max_tokens=16, stop_token_ids=(8,))
    answer = driver.add(make_core_request(0, (1, 2), sampling=sampling, eos_token_ids=(9,)))
    driver.run()
    assert answer.tokens == [5, 6, end]
    assert answer.finished == Finished(0, FinishReason.STOP, stop_token_id=stop_token_id)
    assert len([plan for plan in driver.plans if plan.scheduled]) == 3


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_that_repeats_itself_ends_and_its_neighbour_goes_on(async_scheduling: bool) -> None:
    """The last token of the repetition is part of its tokens; one with the same tokens that did not ask goes on."""
    tokens = (5, 6, 7, 6, 7, 6, 7, 8)
    config = attrs.evolve(make_core_config(), async_scheduling=async_scheduling)
    driver = CoreDriver(config, scripts={(1, 2): tokens, (1, 3): tokens})
    repetition = RepetitionDetectionParams(max_pattern_size=3, min_count=3)
    sampling = SamplingParams(max_tokens=8, repetition_detection=repetition)
    answer = driver.add(make_core_request(0, (1, 2), sampling=sampling))
    neighbour = driver.add(make_core_request(1, (1, 3), max_tokens=8))
    driver.run()
    assert answer.tokens == [5, 6, 7, 6, 7, 6, 7]
    assert answer.finished == Finished(0, FinishReason.REPETITION)
    assert neighbour.tokens == [*tokens]
    assert neighbour.finished == Finished(1, FinishReason.LENGTH)


def test_min_tokens_reach_the_executor() -> None:
    """End tokens are held back there until min_tokens tokens are generated."""
    driver = CoreDriver()
    free = generate_alone((1, 2), 3, vocab_size=1000)
    sampling = SamplingParams(max_tokens=8, min_tokens=3, stop_token_ids=tuple(free))
    answer = driver.add(make_core_request(0, (1, 2), sampling=sampling))
    driver.run()
    expected = generate_alone((1, 2), 8, vocab_size=1000, min_tokens=3, end_token_ids=sorted(free))
    assert answer.tokens == expected
    assert answer.tokens[0] == free[0] + 1


def test_an_answer_ends_with_the_context() -> None:
    """Reason "length", at max_model_len tokens in all."""
    driver = CoreDriver(make_core_config(max_model_len=10))
    answer = driver.add(make_core_request(0, [1] * 7, max_tokens=100))
    driver.run()
    assert len(answer.tokens) == 3
    assert answer.finished == Finished(0, FinishReason.LENGTH)


def test_an_invalid_request_ends_with_its_error_and_harms_nobody() -> None:
    """The answer is there without a step, and the executor never hears of the request."""
    driver = CoreDriver()
    good = driver.add(make_core_request(0))
    bad = [
        driver.add(attrs.evolve(make_core_request(1), prompt_token_ids=b"\x00" * 5)),
        driver.add(make_core_request(2, [5000])),
        driver.add(make_core_request(3, [1] * 64)),
    ]
    driver.take()
    names = [answer.finished.error.name for answer in bad if answer.finished and answer.finished.error]
    assert names == ["RequestError", "RequestError", "PromptTooLongError"]
    driver.run()
    assert len(good.tokens) == 4
    assert {new.sequence_id for plan in driver.plans for new in plan.new} == {0}


def test_a_request_that_the_checks_cannot_even_read_harms_nobody() -> None:
    """A value of a type that no check expects is that request's error, not the core's end."""
    driver = CoreDriver()
    answer = driver.add(attrs.evolve(make_core_request(0), seed="seven"))
    driver.run()
    assert answer.finished is not None
    assert answer.finished.error is not None


def test_a_failure_in_the_executor_ends_that_request_only() -> None:
    """What was generated before it is delivered first, with the error."""
    driver = CoreDriver(scripts={(1, 2): (5, 6, Fail("no such state"))})
    failing, good = driver.add(make_core_request(0, (1, 2))), driver.add(make_core_request(1, (3, 4)))
    driver.run()
    assert failing.tokens == [5, 6]
    assert failing.finished is not None
    assert failing.finished.error is not None
    assert failing.finished.error.fields["message"] == "no such state"
    assert good.tokens == generate_alone((3, 4), 4, vocab_size=1000)
    assert driver.executor.sequence_ids == set()


def test_an_exception_from_the_executor_leaves_the_step() -> None:
    """It is the end of this core, and nobody hides it."""
    driver = CoreDriver()
    driver.core.handle(0, make_core_request(0, (1, 2)))
    driver.executor.close()
    with pytest.raises(AssertionError, match="close"):
        driver.core.step()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_request_gets_its_end_and_no_row_after_it(num_steps: int) -> None:
    """Queued, in its prompt or decoding: one Finished, and the executor forgets it although nothing else is to do."""
    driver = CoreDriver(make_core_config(max_num_batched_tokens=2))
    answer = driver.add(make_core_request(0, (1, 2, 3), max_tokens=20))
    for _ in range(num_steps):
        driver.step()
    driver.abort(0)
    driver.take_all()
    assert answer.finished == Finished(0, FinishReason.ABORT)
    driver.run()
    assert driver.take() is None
    assert driver.executor.sequence_ids == set()
    assert load(driver) == CoreLoad(0, 0, 64, 64)


def test_nothing_ends_twice() -> None:
    """Case 4 (vllm 46240): abort twice, abort after the end, abort of what never was."""
    driver = CoreDriver()
    aborted, finished = driver.add(make_core_request(0, max_tokens=9)), driver.add(make_core_request(1, max_tokens=1))
    driver.step()  # The second one has finished; nobody has been told.
    driver.abort(0, 0, 1, 77)
    driver.abort(0, client=5)
    driver.run()
    assert aborted.finished == Finished(0, FinishReason.ABORT)
    assert finished.finished == Finished(1, FinishReason.LENGTH)
    assert sum(len(output.finished) for output in driver.outputs) == 2
    assert load(driver) == CoreLoad(0, 0, 64, 64)


def test_two_requests_with_one_id_both_finish() -> None:
    """Case 2 (vllm 10583): the core tells requests apart by client and slot."""
    driver = CoreDriver()
    first, second = (
        driver.add(attrs.evolve(make_core_request(slot, (slot + 1, 2)), request_id="same")) for slot in (0, 1)
    )
    driver.run()
    assert first.tokens == generate_alone((1, 2), 4, vocab_size=1000)
    assert second.tokens == generate_alone((2, 2), 4, vocab_size=1000)


def test_a_slot_can_be_used_again_once_its_end_was_taken() -> None:
    """The new request gets nothing of the old one's."""
    driver = CoreDriver()
    driver.add(make_core_request(0, (1, 2), max_tokens=9))
    driver.step()
    driver.abort(0)
    driver.take()
    again = driver.add(make_core_request(0, (3, 4)))
    driver.run()
    assert again.tokens == generate_alone((3, 4), 4, vocab_size=1000)


@pytest.mark.parametrize("slot", [0, -1, MAX_SLOT + 1])
def test_a_request_for_a_slot_that_is_not_free_is_ignored(slot: int, caplog: pytest.LogCaptureFixture) -> None:
    """A breach of the protocol: it is logged, and the request that has the slot goes on."""
    driver = CoreDriver()
    answer = driver.add(make_core_request(0, (1, 2)))
    driver.core.handle(0, make_core_request(slot, (3, 4)))
    driver.run()
    assert answer.tokens == generate_alone((1, 2), 4, vocab_size=1000)
    assert "is not free" in caplog.text


def test_clients_do_not_see_each_other() -> None:
    """The same slot of two clients is two requests, each client's messages have their own numbers."""
    driver = CoreDriver()
    answers = [driver.add(make_core_request(0, (client + 1,)), client) for client in range(2)]
    driver.step()
    assert list(driver.core.clients_with_output()) == [0, 1]
    driver.take(0)
    assert list(driver.core.clients_with_output()) == [1]
    driver.abort(0, client=0)
    driver.run()
    assert len(answers[0].tokens) == 1
    assert answers[1].tokens == generate_alone((2,), 4, vocab_size=1000)


def test_output_that_is_not_taken_is_merged() -> None:
    """A client whose transport is full loses no token and gets one message for all steps."""
    driver = CoreDriver()
    answer = driver.add(make_core_request(0, (1, 2)))
    for _ in range(4):
        driver.step()
    output = driver.take()
    assert output is not None
    assert list(unpack_int32(output.counts)) == [4]
    assert answer.tokens == generate_alone((1, 2), 4, vocab_size=1000)
    assert answer.finished == Finished(0, FinishReason.LENGTH)


def test_a_dropped_client_is_forgotten_whole() -> None:
    """Its requests end without a word, its blocks are free, and others go on; a second drop does nothing."""
    driver = CoreDriver(make_core_config(max_num_seqs=2))
    for slot in range(3):
        driver.add(make_core_request(slot), client=1)
    other = driver.add(make_core_request(0, (7,)), client=2)
    driver.step()
    driver.drop_client(1)
    driver.drop_client(1)
    assert driver.core.take_output(1) is None
    driver.run()
    assert other.tokens == generate_alone((7,), 4, vocab_size=1000)
    assert load(driver) == CoreLoad(0, 0, 64, 64)
    assert driver.executor.sequence_ids == set()


def test_everything_aborted_at_once_leaves_nothing() -> None:
    """Case 8: one message aborts what runs and what waits."""
    driver = CoreDriver(make_core_config(max_num_seqs=4))
    answers = [driver.add(make_core_request(slot, max_tokens=20)) for slot in range(50)]
    driver.step()
    assert load(driver).waiting == 46
    driver.abort(*reversed(range(50)))
    driver.run(max_steps=1)
    assert load(driver) == CoreLoad(0, 0, 64, 64)
    assert all(answer.finished == Finished(answer.slot, FinishReason.ABORT) for answer in answers)


def test_the_cost_of_an_abort_does_not_depend_on_how_many_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks for the request's place only, by halves: of 128 in one message, none looks at all that run."""
    driver = CoreDriver(make_core_config(max_num_seqs=1024, max_num_batched_tokens=4096), num_blocks=4096)
    for slot in range(1024):
        driver.core.handle(0, make_core_request(slot, max_tokens=8))
    driver.core.step()
    assert driver.core.scheduler.num_running == 1024
    num_looks, key = 0, Request.key.fget
    assert key is not None

    def counting(request: Request) -> tuple[int, int]:
        nonlocal num_looks
        num_looks += 1
        return key(request)

    monkeypatch.setattr(Request, "key", property(counting))
    driver.core.handle(0, AbortRequests(tuple(range(0, 1024, 8))))
    assert driver.core.scheduler.num_running == 1024 - 128
    assert 128 <= num_looks <= 128 * 12


def test_every_operation_has_one_handler() -> None:
    """A new class in CALLS needs a handler, and a handler needs its class there."""
    assert set(HANDLERS) == set(CALLS)


def test_load_counts_what_there_is_to_do() -> None:
    """Running, waiting and blocks."""
    driver = CoreDriver(make_core_config(max_num_seqs=1))
    driver.add(make_core_request(0, [1] * 5))
    driver.add(make_core_request(1, [1] * 5))
    driver.step()
    assert load(driver) == CoreLoad(running=1, waiting=1, free_blocks=62, total_blocks=64)


def test_an_operation_that_fails_is_a_reply() -> None:
    """The caller gets the error; the core goes on."""
    driver = CoreDriver()
    assert driver.core.handle(0, CallRequest(3, CheckIntegrity())) == Reply(3, b"\xc0")
    driver.core.kv_cache.admit(99, array("i", [1]))
    reply = driver.core.handle(0, CallRequest(4, CheckIntegrity()))
    assert isinstance(reply, Reply)
    assert reply.call_id == 4
    assert reply.error is not None
    assert "hold blocks" in str(reply.error.fields["message"])


def test_an_unknown_operation_is_a_reply() -> None:
    """A class without a handler answers with an error."""

    @attrs.frozen
    class Unheard(Call[None]):
        pass

    reply = CoreDriver().core.handle(0, CallRequest(1, Unheard()))
    assert isinstance(reply, Reply)
    assert reply.error is not None


def test_stop_is_not_the_cores_business() -> None:
    """The loop around it handles Stop before."""
    with pytest.raises(TypeError, match="loop"):
        CoreDriver().core.handle(0, Stop())


def test_an_abort_for_a_client_never_seen_makes_no_state() -> None:
    """Nothing is remembered of strangers."""
    driver = CoreDriver()
    driver.core.handle(9, AbortRequests((0, 1)))
    assert list(driver.core.clients_with_output()) == []
    assert driver.core.take_output(9) is None


CACHING = attrs.evolve(make_core_config(), enable_prefix_caching=True)
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_cached_tokens_are_told_once() -> None:
    """With the first row; nothing is told where there were none."""
    driver = CoreDriver(CACHING)
    first = driver.add(make_core_request(0, PROMPT))
    driver.run()
    second = driver.add(make_core_request(1, (*PROMPT[:6], 70, 80, 90)))
    third = driver.add(make_core_request(2, PROMPT))
    driver.step()
    driver.take()
    assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 4, 8)
    driver.run()
    assert sum(bool(output.cached_tokens) for output in driver.outputs) == 1
    assert third.tokens == first.tokens == generate_alone(PROMPT, 4, vocab_size=1000)
    assert second.tokens == generate_alone((*PROMPT[:6], 70, 80, 90), 4, vocab_size=1000)


def test_cached_tokens_of_a_request_that_was_aborted_are_not_told() -> None:
    """Its slot may be another's by then."""
    driver = CoreDriver(attrs.evolve(CACHING, async_scheduling=True))
    driver.add(make_core_request(0, PROMPT))
    driver.run()
    driver.add(make_core_request(0, PROMPT))
    driver.step()  # Planned and submitted.
    driver.abort(0)
    driver.take()
    again = driver.add(make_core_request(0, (50, 60)))
    driver.run()
    assert again.num_cached_tokens == 0
    assert again.tokens == generate_alone((50, 60), 4, vocab_size=1000)


def test_another_salt_finds_nothing() -> None:
    """Case 47 (vllm 44701), of which LoRA is another part: same tokens, other salt, no hit; same salt, hit."""
    driver = CoreDriver(CACHING)
    cached: list[int] = []
    for salt in (None, "a", "b", "a", None, ""):
        answer = driver.add(make_core_request(0, PROMPT, cache_salt=salt))
        driver.run()
        cached.append(answer.num_cached_tokens)
    assert cached == [0, 0, 0, 8, 8, 0]


def test_requests_that_arrive_together_compute_a_common_prefix_once() -> None:
    driver = CoreDriver(CACHING)
    answers = [driver.add(make_core_request(slot, (*PROMPT, slot))) for slot in range(4)]
    driver.step()
    assert driver.plans[0].num_tokens == 10 + 3 * 2
    driver.run()
    for slot, answer in enumerate(answers):
        assert answer.tokens == generate_alone((*PROMPT, slot), 4, vocab_size=1000)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_that_used_what_a_failed_one_was_to_compute_is_computed_again(async_scheduling: bool) -> None:
    """Neither the failed one's prefix nor what was computed from it is found any more; and who has found it before
    anybody knew is computed again too."""
    config = attrs.evolve(CACHING, async_scheduling=async_scheduling)
    driver = CoreDriver(config, fails=lambda new, _: new.seed == 9)
    failing = driver.add(make_core_request(0, PROMPT, seed=9))
    other = driver.add(make_core_request(1, PROMPT))
    driver.step()
    later = driver.add(make_core_request(2, PROMPT))
    driver.step()
    driver.take()
    assert failing.finished is not None
    assert failing.finished.error is not None
    assert not failing.tokens
    driver.run()
    assert later.tokens == generate_alone(PROMPT, 4, vocab_size=1000)
    assert other.tokens == generate_alone(PROMPT, 4, vocab_size=1000)
    third = driver.add(make_core_request(1, PROMPT))
    driver.run()
    assert (third.num_cached_tokens, third.tokens) == (8, other.tokens)


def test_blocks_that_cannot_be_loaded_are_computed() -> None:
    """The offload store lost them after they were evicted."""
    losses: list[str] = []
    driver = CoreDriver(CACHING, num_blocks=4, num_offload_blocks=8, fails_load=lambda _: bool(losses))
    for number in range(3):
        if number == 2:
            losses.append("all")
        for prompt in (PROMPT, [token + 50 for token in PROMPT]):
            answer = driver.add(make_core_request(0, prompt))
            driver.run()
            assert answer.tokens == generate_alone(prompt, 4, vocab_size=1000)
    stats = driver.call(GetStats())
    assert stats.num_offloaded_blocks > 0
    assert stats.num_loaded_blocks > 0


def test_sampling_that_the_executor_refuses_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sampling: SamplingParams) -> None:
        if sampling.logits_processors:
            raise RequestError("There is no such processor.", param="logits_processors")

    driver = CoreDriver()
    monkeypatch.setattr(driver.executor, "check_sampling", refuse)
    good = driver.add(make_core_request(0, (1, 2)))
    bad = driver.add(make_core_request(1, sampling=SamplingParams(logits_processors={"mine": "{}"})))
    driver.run()
    assert bad.finished is not None
    assert bad.finished.error is not None
    assert bad.finished.error.fields["param"] == "logits_processors"
    assert good.tokens == generate_alone((1, 2), 4, vocab_size=1000)


def test_without_structured_outputs_they_are_refused() -> None:
    driver = CoreDriver()
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    answer = driver.add(make_core_request(sampling=sampling))
    driver.run()
    assert answer.finished is not None
    assert answer.finished.error is not None
    assert answer.finished.error.fields["param"] == "structured_outputs"


# Log probabilities


def same(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> bool:
    """Whether these are equal, but for what float32 loses."""

    def rounded(entries: list[TokenLogprobs]) -> list[tuple[list[int], list[float], int]]:
        return [(list(each.token_ids), list(array("f", each.logprobs)), each.rank) for each in entries]

    return rounded(found) == rounded(expected)


def test_log_probabilities_come_for_those_that_ask() -> None:
    """One for each token, also where several steps are taken at once."""
    driver = CoreDriver()
    answers = [
        driver.add(make_core_request(slot, (1, 2), sampling=SamplingParams(max_tokens=5, logprobs=number)))
        for slot, number in enumerate((None, 0, 3))
    ]
    for _ in range(3):
        driver.step()
    driver.run()
    assert answers[0].logprobs == []
    for answer, number in zip(answers[1:], (0, 3), strict=True):
        assert same(answer.logprobs, logprobs_alone((1, 2), answer.tokens, number, vocab_size=1000))


@pytest.mark.parametrize("max_num_batched_tokens", [2, 3, 64])
def test_prompt_log_probabilities_are_the_same_with_and_without_the_cache(max_num_batched_tokens: int) -> None:
    """Case 48 (vllm 8268): twice with the cache on, in parts or at once, and before the first token of the answer."""
    driver = CoreDriver(attrs.evolve(CACHING, max_num_batched_tokens=max_num_batched_tokens))
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=1)
    expected = logprobs_alone(PROMPT[:1], PROMPT[1:], 1, vocab_size=1000)
    for _ in range(2):
        answer = driver.add(make_core_request(0, PROMPT, sampling=sampling))
        while not answer.tokens:
            driver.step()
            driver.take()
        assert same(answer.prompt_logprobs, expected)
        driver.run()
        assert (len(answer.prompt_logprobs), answer.num_cached_tokens) == (8, 0)
    without = driver.add(make_core_request(0, PROMPT))
    driver.run()
    assert without.num_cached_tokens == 8


def test_prompt_log_probabilities_are_told_once_whatever_is_computed_again() -> None:
    """After a preemption in the middle of the prompt or behind it."""
    for num_steps in (2, 5):
        driver = CoreDriver(attrs.evolve(CACHING, max_num_batched_tokens=3))
        answer = driver.add(make_core_request(0, PROMPT, sampling=SamplingParams(max_tokens=6, prompt_logprobs=0)))
        for _ in range(num_steps):
            driver.step()
        driver.core.scheduler.preempt_all()
        driver.run()
        assert same(answer.prompt_logprobs, logprobs_alone(PROMPT[:1], PROMPT[1:], 0, vocab_size=1000))
        assert answer.tokens == generate_alone(PROMPT, 6, vocab_size=1000)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_without_an_answer_the_prompt_is_all(prompt: tuple[int, ...]) -> None:
    """Case 36 (vllm 6521): prompt log probabilities, and no token."""
    driver = CoreDriver(attrs.evolve(CACHING, max_num_batched_tokens=4))
    answer = driver.add(make_core_request(0, prompt, sampling=SamplingParams(max_tokens=0, prompt_logprobs=2)))
    other = driver.add(make_core_request(1, prompt))
    driver.run()
    assert answer.tokens == []
    assert answer.finished == Finished(0, FinishReason.LENGTH)
    assert same(answer.prompt_logprobs, logprobs_alone(prompt[:1], prompt[1:], 2, vocab_size=1000))
    assert other.tokens == generate_alone(prompt, 4, vocab_size=1000)


# What a step says of itself


def test_a_request_is_told_once_how_long_it_waited() -> None:
    """From its arrival until its first step was submitted; also when it has no tokens yet, and not again after a
    preemption."""
    driver = CoreDriver(make_core_config(max_num_seqs=1, max_num_batched_tokens=2))
    first, second = driver.add(make_core_request(0, (1, 2, 3))), driver.add(make_core_request(1, (4, 5)))
    driver.now_s = 0.5
    driver.step()
    output = driver.take()
    assert output is not None
    assert (list(unpack_int32(output.scheduled)), output.slots) == ([0, 500_000], b"")
    driver.core.scheduler.preempt_all()
    driver.run()
    assert (first.waited_us, first.num_preemptions, second.waited_us) == (500_000, 1, 500_000)


def test_a_request_that_never_began_waited_for_nothing() -> None:
    driver = CoreDriver()
    answer = driver.add(make_core_request(0))
    driver.abort(0)
    driver.run()
    assert answer.finished is not None
    assert answer.waited_us is None


def test_preemptions_reach_the_client_and_never_a_slots_next_request() -> None:
    """Of a request that ended since, nothing is said behind its end."""
    driver = CoreDriver(num_blocks=4)
    prompts = ((1, 2, 3, 4), (5, 6, 7, 8))
    answers = [driver.add(make_core_request(slot, prompt, max_tokens=8)) for slot, prompt in enumerate(prompts)]
    driver.run()
    stats = driver.outputs[-1].stats
    assert stats is not None
    assert sum(answer.num_preemptions for answer in answers) == stats.num_preemptions > 0
    old = driver.add(make_core_request(0))
    driver.step()
    driver.take_all()
    driver.core.scheduler.preempt_all()
    driver.abort(0)
    driver.take_all()
    new = driver.add(make_core_request(0))
    driver.run()
    assert (old.num_preemptions, new.num_preemptions) == (0, 0)


def test_every_output_says_how_the_core_does() -> None:
    """After the step, or the abort, that it is of."""
    driver = CoreDriver(make_core_config(max_num_seqs=1), num_blocks=4)
    driver.add(make_core_request(0, max_tokens=3))
    driver.add(make_core_request(1, max_tokens=3))
    driver.step()
    output = driver.take()
    assert output is not None
    assert output.stats == SchedulerStats(1, 1, 0.25, 1, 0, 0, 0, 0, 0)
    driver.run()
    assert driver.outputs[-1].stats == SchedulerStats(0, 0, 0.0, 6, 0, 0, 0, 0, 0)


def test_a_client_without_output_is_told_how_the_core_does() -> None:
    """At once, from time to time while the core works for others, and when it has come to rest; not what it knows."""
    driver = CoreDriver()
    core = driver.core
    assert core.take_stats(1) is None
    driver.add(make_core_request(0, max_tokens=3), client=0)
    driver.step()
    told = [core.take_stats(1)]
    driver.step()
    assert core.take_stats(1) is None
    driver.now_s += STATS_INTERVAL_S
    told += [core.take_stats(1), core.take_stats(1)]
    driver.run()
    told += [core.take_stats(1), core.take_stats(1)]
    seen = [None if each is None or each.stats is None else (each.sequence, each.stats.running) for each in told]
    assert seen == [(0, 1), (1, 1), None, (2, 0), None]


def test_a_pause_is_told_without_output() -> None:
    """Nothing is computed any more, and the front end does not think that requests run."""
    driver = CoreDriver()
    driver.call(PauseGeneration(PauseMode.KEEP))
    driver.add(make_core_request(0))
    output = driver.core.take_stats(0)
    assert output is not None
    assert output.stats is not None
    assert (output.stats.running, output.stats.waiting) == (0, 1)


def test_the_next_message_says_that_everything_is_gone() -> None:
    """Case 8 (vllm 29928): the very next message says that nothing runs and nothing waits."""
    driver = CoreDriver(make_core_config(max_num_seqs=3))
    answers = [driver.add(make_core_request(slot, max_tokens=30)) for slot in range(8)]
    driver.step()
    driver.step()
    driver.take_all()
    driver.abort(*range(8))
    output = driver.take()
    assert output is not None
    assert output.stats is not None
    assert (output.stats.running, output.stats.waiting, output.stats.kv_cache_usage) == (0, 0, 0.0)
    assert {finished.slot for finished in output.finished} == set(range(8))
    assert all(answer.finished == Finished(answer.slot, FinishReason.ABORT) for answer in answers)
    driver.run()
    assert driver.executor.sequence_ids == set()


def test_each_client_hears_of_new_weights_once() -> None:
    """In its first message after they have changed, whenever it has come."""
    driver = CoreDriver()
    driver.add(make_core_request(0, max_tokens=2))
    driver.step()
    output = driver.take()
    assert output is not None
    assert output.weight_version is None
    driver.core.weight_version = "7"
    driver.run()
    driver.add(make_core_request(0, max_tokens=2), client=1)
    driver.run()
    assert [output.weight_version for output in driver.outputs] == [None, "7", "7", None]


# Deadlines of queued requests


def error_of(answer: Answer) -> str | None:
    """The name of the error that a request ended with; None while it has not ended so."""
    return answer.finished.error.name if answer.finished and answer.finished.error else None


def test_a_request_that_is_not_begun_in_time_is_dropped() -> None:
    """Case 20 (vllm 2901): also one for vectors; the one that runs goes on, and no step is planned for those."""
    driver = CoreDriver(make_core_config(max_num_seqs=1))
    running = driver.add(attrs.evolve(make_core_request(0, max_tokens=6), queue_timeout_s=1.0))
    driver.step()
    late = driver.add(attrs.evolve(make_core_request(1), queue_timeout_s=1.0))
    vectors = driver.add(attrs.evolve(make_encode_request(2), queue_timeout_s=2.0))
    patient = driver.add(make_core_request(3))
    assert driver.core.idle_timeout_s() == 1.0
    driver.now_s = 0.99
    driver.step()
    driver.take_all()
    assert late.finished is None
    driver.now_s = 1.0
    driver.core.poll()
    driver.take_all()
    assert (error_of(late), error_of(vectors)) == ("DeadlineExceededError", None)
    assert driver.core.idle_timeout_s() == 1.0
    driver.now_s = 5.0
    driver.run()
    assert error_of(vectors) == "DeadlineExceededError"
    assert (len(running.tokens), len(patient.tokens)) == (6, 4)
    assert driver.core.idle_timeout_s() is None
    assert {new.sequence_id for plan in driver.plans for new in plan.new} == {0, 3}


def test_a_request_that_began_is_not_dropped_when_it_waits_again() -> None:
    driver = CoreDriver(make_core_config(max_num_seqs=1))
    answer = driver.add(attrs.evolve(make_core_request(0), queue_timeout_s=1.0))
    driver.step()
    driver.core.scheduler.preempt_all()
    driver.now_s = 9.0
    driver.run()
    assert (len(answer.tokens), error_of(answer), answer.num_preemptions) == (4, None, 1)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_deadline_passes_during_a_pause(mode: PauseMode) -> None:
    """For whoever comes then: there is no work, and the loop is told when to look again."""
    driver = CoreDriver()
    driver.call(PauseGeneration(mode))
    answer = driver.add(attrs.evolve(make_core_request(0), queue_timeout_s=0.5))
    assert not driver.core.has_work
    assert driver.core.idle_timeout_s() == 0.5
    driver.now_s = 0.5
    driver.core.poll()
    driver.take_all()
    assert error_of(answer) == "DeadlineExceededError"
    assert driver.core.idle_timeout_s() is None
    driver.core.check_integrity()


def test_deadlines_of_requests_that_are_gone_are_not_kept() -> None:
    """However far away they are."""
    driver = CoreDriver()
    for _ in range(1000):
        driver.add(attrs.evolve(make_core_request(0), queue_timeout_s=1e6))
        driver.abort(0)
        driver.take_all()
    assert len(driver.core._queue_deadlines) <= 65
    assert driver.core.idle_timeout_s() is None


# What a request wants of the prefix cache


def caching_driver() -> CoreDriver:
    return CoreDriver(attrs.evolve(make_core_config(), enable_prefix_caching=True))


@pytest.mark.parametrize("is_sampling", [False, True])
def test_a_request_may_refuse_what_is_cached(is_sampling: bool) -> None:
    """It computes its whole prompt, and what it computes is cached."""
    driver = caching_driver()
    driver.add(make_core_request(0, range(1, 14)))
    driver.run()
    request = make_core_request(0, range(1, 14))
    if is_sampling:
        request = attrs.evolve(request, sampling=SamplingParams(max_tokens=4, skip_reading_prefix_cache=True))
    else:
        request = attrs.evolve(request, kv_hints=KVHints(read_prefix_cache=False))
    num_plans = len(driver.plans)
    answer = driver.add(request)
    driver.run()
    assert (answer.num_cached_tokens, driver.plans[num_plans].num_tokens) == (0, 13)
    answer = driver.add(make_core_request(0, range(1, 14)))
    driver.run()
    assert answer.num_cached_tokens == 12


def test_a_request_may_leave_nothing_behind() -> None:
    """Neither its prompt nor its answer is found: by others in its step or later, or by itself after a preemption."""
    driver = caching_driver()
    secret = attrs.evolve(make_core_request(0, range(1, 14), max_tokens=8), kv_hints=KVHints(write_prefix_cache=False))
    driver.add(secret)
    beside = driver.add(make_core_request(1, range(1, 9), max_tokens=1))
    driver.step()
    driver.take_all()
    assert beside.num_cached_tokens == 0
    driver.begin_call(PauseGeneration(PauseMode.KEEP))  # It clears the cache.
    driver.run()
    driver.call(ResumeGeneration())
    driver.run()
    assert driver.add(make_core_request(1, range(1, 14))).num_cached_tokens == 0
    driver.run()
    stats = driver.outputs[-1].stats
    assert stats is not None
    assert (stats.num_preemptions, stats.num_prefix_cache_hits) == (1, 0)
    assert stats.num_prefix_cache_queries > 0


def test_a_request_that_leaves_nothing_behind_finds_what_is_there() -> None:
    driver = caching_driver()
    driver.add(make_core_request(0, range(1, 14)))
    driver.run()
    hints = KVHints(write_prefix_cache=False)
    answer = driver.add(attrs.evolve(make_core_request(0, range(1, 14)), kv_hints=hints))
    driver.run()
    assert answer.num_cached_tokens == 12
