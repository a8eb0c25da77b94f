"""`Frontend`: routing by slot, one request's fault is its own, and the death of the engine reaches everyone once."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import pytest

from trioengine.errors import (
    CodecError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    RequestError,
    TrioEngineError,
)
from trioengine.frontend.frontend import AddedRequest, Frontend, PendingCall
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.pending_output import ParallelPendingOutput, PendingOutput, new_pending_output
from trioengine.observability.stats import FinishedRequestStats, IterationStats
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.codec import decode, encode, encode_reply, error_to_data
from trioengine.types.messages import (
    AbortRequests,
    AddLoRA,
    Call,
    CheckIntegrity,
    CoreLoad,
    Finished,
    GetLoad,
    LogprobColumns,
    ModelFacts,
    Reply,
    Sleep,
    StepOutput,
    WakeUp,
    pack_int32,
    unpack_int32,
)
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.request import Deadlines, GenerateRequest

TOKENIZER = FakeTokenizer()
PROCESSOR = InputProcessor(TOKENIZER, ModelFacts(1000, TOKENIZER.vocab_size, (TOKENIZER.end_token_id,)))


SLICE_ROWS = 16


class Front:
    """A front end, and the numbering of its core's outputs."""

    def __init__(self, **options: Any) -> None:
        self.frontend = Frontend(chunk_size=SLICE_ROWS, **options)
        self.sequence = 0

    def add(
        self, request_id: str | None = None, prompt: str = "p", **sampling: Any
    ) -> tuple[AddedRequest, PendingOutput]:
        sink = PendingOutput()
        request = GenerateRequest(prompt, SamplingParams(**sampling), request_id=request_id)
        return self.frontend.add(PROCESSOR.process(request), sink), sink

    def step_message(
        self, rows: Sequence[tuple[AddedRequest, str]] = (), finished: Sequence[Finished] = (), **others: Any
    ) -> StepOutput:
        tokens = [TOKENIZER.encode(text) for _, text in rows]
        message = StepOutput(
            self.sequence,
            0,
            0.0,
            slots=pack_int32([added.messages[0].slot for added, _ in rows]),
            tokens=pack_int32([token for row in tokens for token in row]),
            counts=b"" if all(len(row) == 1 for row in tokens) else pack_int32([len(row) for row in tokens]),
            finished=tuple(finished),
            **others,
        )
        self.sequence += 1
        return message

    def step(self, *rows: tuple[AddedRequest, str], finished: Sequence[Finished] = (), **others: Any) -> int:
        """Deliver a step; the number of times that others may run meanwhile."""
        return len(list(self.frontend.receive(0, self.step_message(rows, finished, **others))))

    def aborted_slots(self) -> tuple[int, ...]:
        return tuple(slot for _, aborts in self.frontend.take_aborts() for slot in aborts.slots)


def columns(*tokens: tuple[AddedRequest, str]) -> LogprobColumns:
    """An entry for each character: its log probability is 0, and no other's is told."""
    pairs = [(added.messages[0].slot, token_id) for added, text in tokens for token_id in TOKENIZER.encode(text)]
    ones = pack_int32([1] * len(pairs))
    return LogprobColumns(
        slots=pack_int32([slot for slot, _ in pairs]),
        counts=ones,
        ranks=ones,
        token_ids=pack_int32([token_id for _, token_id in pairs]),
        logprobs=bytes(4 * len(pairs)),
    )


def spelled(entries: Sequence[LogprobEntry] | None) -> str:
    """The tokens that these entries are of."""
    return TOKENIZER.decode([unpack_int32(entry.token_ids)[0] for entry in entries or ()])


def length(added: AddedRequest) -> Finished:
    return Finished(added.messages[0].slot, FinishReason.LENGTH)


@pytest.fixture
def front() -> Front:
    return Front()


def test_a_request_travels_whole(front: Front) -> None:
    sampling = SamplingParams(max_tokens=7, seed=5)
    request = GenerateRequest("abc", sampling, priority=-1, cache_salt="mine", lora="b", reasoning_ended=False)
    added = front.frontend.add(PROCESSOR.process(request), PendingOutput())
    message = decode(encode(added.messages[0]))
    assert message == added.messages[0]
    assert unpack_int32(added.messages[0].prompt_token_ids).tolist() == [97, 98, 99]
    assert added.messages[0].sampling.max_tokens == 7
    assert added.messages[0].seed == 5
    assert added.messages[0].eos_token_ids == (TOKENIZER.end_token_id,)
    assert (added.messages[0].priority, added.messages[0].cache_salt, added.messages[0].reasoning_ended) == (
        -1,
        "mine",
        False,
    )
    assert added.messages[0].lora == "b"


def test_rows_reach_their_requests(front: Front) -> None:
    """One token each, or several as `counts` says."""
    (a, a_sink), (b, b_sink) = front.add(), front.add()
    front.step((b, "1"), (a, "2"))
    front.step((a, "345"), (b, "6"), finished=[length(a)])
    assert "".join(a_sink.texts) == "2345"
    assert "".join(b_sink.texts) == "16"
    assert a_sink.finish_reason is FinishReason.LENGTH
    assert b_sink.finish_reason is None
    assert front.frontend.num_open_requests == 1
    assert front.frontend.num_reserved_slots == 1


def test_two_live_requests_with_one_id_get_their_own_text_and_end_together_when_aborted(front: Front) -> None:
    """Case 2 (vllm 10583)."""
    (a, a_sink), (b, b_sink), (other, other_sink) = front.add("same"), front.add("same"), front.add("other")
    assert a.messages[0].request_id != b.messages[0].request_id
    front.step((a, "a"), (b, "b"))
    assert (a_sink.texts, b_sink.texts) == (["a"], ["b"])
    front.frontend.abort("same")
    assert a_sink.finish_reason is b_sink.finish_reason is FinishReason.ABORT
    assert other_sink.finish_reason is None
    assert sorted(front.aborted_slots()) == [a.messages[0].slot, b.messages[0].slot]
    assert front.frontend.num_open_requests == 1
    front.step((other, "x"), finished=[length(other)])
    assert other_sink.texts == ["x"]


def test_one_of_two_with_one_id_may_finish_before_the_other_is_aborted(front: Front) -> None:
    (a, _), (b, b_sink) = front.add("same"), front.add("same")
    front.step((a, "a"), finished=[length(a)])
    front.frontend.abort("same")
    assert front.aborted_slots() == (b.messages[0].slot,)
    assert b_sink.finish_reason is FinishReason.ABORT


def test_abort_and_the_same_id_at_once(front: Front) -> None:
    """The new one runs, in a slot of its own while the old one's is reserved."""
    old, old_sink = front.add("x")
    front.frontend.abort("x")
    new, new_sink = front.add("x")
    assert new.messages[0].slot != old.messages[0].slot
    front.step((old, "o"), (new, "n"))
    assert old_sink.texts == []
    assert new_sink.texts == ["n"]
    assert front.aborted_slots() == (old.messages[0].slot,)


def test_abort_twice_after_the_end_and_of_strangers_does_nothing(front: Front) -> None:
    """Case 4 (vllm 46240)."""
    added, sink = front.add("x")
    front.frontend.abort("x")
    front.frontend.abort("x")
    front.frontend.abort("stranger")
    assert front.aborted_slots() == (added.messages[0].slot,)
    assert front.aborted_slots() == ()
    front.step((added, "late"), finished=[Finished(added.messages[0].slot, FinishReason.ABORT)])
    front.frontend.abort("x")
    front.frontend.drop(added.state)
    assert front.aborted_slots() == ()
    assert (sink.texts, sink.finish_reason) == ([], FinishReason.ABORT)
    assert front.frontend.num_open_requests == front.frontend.num_reserved_slots == 0


def test_an_abort_that_waits_is_forgotten_when_the_core_has_finished(front: Front) -> None:
    """Sent later, it would end the slot's next request."""
    added, _ = front.add("x")
    front.frontend.abort("x")
    front.step(finished=[length(added)])
    assert not front.frontend.has_aborts
    again, _ = front.add("y")
    assert again.messages[0].slot == added.messages[0].slot
    assert front.aborted_slots() == ()


def test_a_slot_is_reserved_until_the_core_has_finished(front: Front) -> None:
    added, sink = front.add()
    front.frontend.drop(added.state)
    assert front.frontend.num_open_requests == 0
    assert front.frontend.num_reserved_slots == 1
    assert front.add()[0].messages[0].slot != added.messages[0].slot
    front.step((added, "x"), finished=[length(added)])
    assert sink.texts == []
    assert front.add()[0].messages[0].slot == added.messages[0].slot


def test_a_stop_string_ends_the_request_and_the_core_is_told(front: Front) -> None:
    added, sink = front.add("x", stop="b")
    front.step((added, "abc"))
    assert sink.texts == ["a"]
    assert sink.token_ids == list(b"ab")
    assert front.frontend.has_aborts
    assert front.frontend.num_open_requests == 0
    assert front.aborted_slots() == (added.messages[0].slot,)
    front.step((added, "d"))  # The core goes on until it hears of it.
    front.step(finished=[Finished(added.messages[0].slot, FinishReason.ABORT)])
    assert sink.token_ids == list(b"ab")
    assert front.frontend.num_reserved_slots == 0


def test_a_stop_string_in_the_cores_last_row_needs_no_abort(front: Front) -> None:
    added, sink = front.add(stop="b")
    front.step((added, "b"), finished=[length(added)])
    assert (sink.finish_reason, sink.stop_reason) == (FinishReason.STOP, "b")
    assert front.aborted_slots() == ()
    assert front.frontend.num_reserved_slots == 0


def test_a_request_that_fails_in_the_core_fails_alone_after_its_tokens(front: Front) -> None:
    (a, a_sink), (b, b_sink) = front.add(), front.add()
    error = error_to_data(RequestError("bad", param="stop"))
    front.step((a, "a"), (b, "b"), finished=[Finished(a.messages[0].slot, FinishReason.ABORT, error=error)])
    assert (a_sink.texts, a_sink.finish_reason) == (["a"], None)
    assert isinstance(a_sink.error, RequestError)
    assert a_sink.error.param == "stop"
    assert b_sink.texts == ["b"]
    assert b_sink.error is None
    assert front.frontend.num_reserved_slots == 1


class BrokenDetokenizer:
    """Fails as the test says."""

    def __init__(self, *, feeds: int) -> None:
        self.feeds = feeds

    def feed(self, token_id: int) -> str:
        if self.feeds == 0:
            raise ValueError("broken")
        self.feeds -= 1
        return chr(token_id)

    def flush(self) -> str:
        raise ValueError("broken")


@pytest.mark.parametrize("feeds", [0, 1, 2])
def test_a_fault_in_one_requests_text_ends_that_request_only(front: Front, feeds: int) -> None:
    """In any of its rows and at its end; its neighbours in the same step get their text."""
    (a, a_sink), (b, b_sink) = front.add(), front.add()
    a.state.children[0]._detokenizer = BrokenDetokenizer(feeds=feeds)  # type: ignore[assignment]
    front.step((b, "1"), (a, "x"))
    front.step((a, "y"), (b, "2"))
    front.step((b, "3"), finished=[length(a), length(b)])
    assert isinstance(a_sink.error, EngineGenerateError)
    assert "broken" in str(a_sink.error)
    assert a_sink.token_ids == list(b"xy")[:feeds]
    assert "".join(b_sink.texts) == "123"
    assert b_sink.finish_reason is FinishReason.LENGTH
    assert front.frontend.num_open_requests == front.frontend.num_reserved_slots == 0
    assert front.frontend.dead_error is None


def test_a_large_step_is_handled_in_slices(front: Front) -> None:
    """Others run between; a request that leaves meanwhile gets nothing more."""
    requests = [front.add(str(index)) for index in range(SLICE_ROWS * 2)]
    message = front.step_message(
        [(added, "x") for added, _ in requests], finished=[length(added) for added, _ in requests]
    )
    slices = front.frontend.receive(0, message)
    next(slices)
    assert [bool(sink.texts) for _, sink in requests] == [True] * SLICE_ROWS + [False] * SLICE_ROWS
    front.frontend.abort(str(SLICE_ROWS))
    new, new_sink = front.add("new")
    assert new.messages[0].slot == len(requests)
    assert len(list(slices)) == 1
    assert [sink.finish_reason for _, sink in requests].count(FinishReason.ABORT) == 1
    assert all(sink.finish_reason for _, sink in requests)
    assert new_sink.texts == []
    assert front.aborted_slots() == ()
    assert front.frontend.num_reserved_slots == 1


@pytest.mark.parametrize("sequence", [0, 2, 7])
def test_a_gap_in_the_numbering_is_the_engines_death(front: Front, sequence: int) -> None:
    added, sink = front.add()
    front.step((added, "x"))
    list(front.frontend.receive(0, attrs.evolve(front.step_message([(added, "y")]), sequence=sequence)))
    assert sink.texts == ["x"]
    assert isinstance(sink.error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        front.add()


@attrs.define
class Answer:
    """What a call got."""

    values: list[object] = attrs.field(factory=list)
    errors: list[TrioEngineError] = attrs.field(factory=list)

    def pending(self, call: Call[Any]) -> PendingCall:
        return PendingCall(type(call), self.values.append, self.errors.append)


def ask(front: Front, call: Call[Any]) -> tuple[int, Answer]:
    answer = Answer()
    message = front.frontend.add_call(call, answer.pending(call))
    assert message.call == call
    return message.call_id, answer


def receive_reply(front: Front, reply: Reply) -> None:
    decoded = decode(encode(reply))
    assert isinstance(decoded, Reply)
    assert list(front.frontend.receive(0, decoded)) == []


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (Sleep(cast(Any, "deep")), "level"),
        (Sleep(1, cast(Any, "gently")), "mode"),
        (WakeUp(cast(Any, (1,))), "tags"),
        (AddLoRA("name", cast(Any, None)), "path"),
        (cast(Any, GetLoad), None),
        (cast(Any, "GetLoad"), None),
    ],
)
def test_a_call_that_no_core_could_read_is_refused(front: Front, call: Call[Any], param: str | None) -> None:
    """The core would ignore it, and the caller would wait for ever."""
    with pytest.raises(RequestError) as caught:
        ask(front, call)
    assert caught.value.param == param


def test_replies_reach_their_calls_in_any_order(front: Front) -> None:
    (first, first_answer), (second, second_answer) = ask(front, GetLoad()), ask(front, CheckIntegrity())
    assert first != second
    receive_reply(front, Reply(second, encode_reply(CheckIntegrity, None)))
    load = CoreLoad(1, 2, 3, 4)
    receive_reply(front, Reply(first, encode_reply(GetLoad, load)))
    receive_reply(front, Reply(first, encode_reply(GetLoad, load)))  # Nobody waits any more.
    receive_reply(front, Reply(99, b""))
    assert first_answer == Answer([load], [])
    assert second_answer == Answer([None], [])


@pytest.mark.parametrize(
    ("reply", "error_class"),
    [
        (lambda call_id: Reply(call_id, error=error_to_data(AssertionError("leak"))), EngineGenerateError),
        (lambda call_id: Reply(call_id, error=error_to_data(RequestError("no"))), RequestError),
        (lambda call_id: Reply(call_id, b"\xc1"), CodecError),
        (lambda call_id: Reply(call_id, encode_reply(CheckIntegrity, None)), CodecError),
    ],
)
def test_a_call_that_fails_fails_alone(front: Front, reply: Callable[[int], Reply], error_class: type) -> None:
    call_id, answer = ask(front, GetLoad())
    receive_reply(front, reply(call_id))
    assert answer.values == []
    assert [type(error) for error in answer.errors] == [error_class]
    assert front.frontend.dead_error is None


@pytest.mark.parametrize("error", [EngineDeadError("gone", cause="signal"), EngineClosedError("closed")])
def test_the_end_of_the_engine_reaches_everyone_once(front: Front, error: EngineDeadError) -> None:
    """Case 11 among them: calls that wait. Tokens and text held back come first; what follows fails at once."""
    (a, a_sink), (b, b_sink), (c, c_sink) = front.add(stop="xyz"), front.add("b"), front.add()
    call_id, answer = ask(front, GetLoad())
    front.step((a, "axy"), (b, "b"), (c, "c"), finished=[length(c)])
    front.frontend.abort("b")
    front.frontend.fail_all(error)
    front.frontend.fail_all(EngineDeadError("again"))
    assert ("".join(a_sink.texts), a_sink.token_ids, a_sink.error) == ("axy", list(b"axy"), error)
    assert (b_sink.finish_reason, b_sink.error) == (FinishReason.ABORT, None)
    assert (c_sink.finish_reason, c_sink.error) == (FinishReason.LENGTH, None)
    assert answer == Answer([], [error])
    assert front.frontend.num_open_requests == 0
    assert not front.frontend.has_aborts
    front.frontend.drop(a.state)
    front.frontend.abort_all()
    assert front.aborted_slots() == ()
    with pytest.raises(type(error)) as caught:
        front.add()
    assert caught.value is not error  # Each gets its own, so that tracebacks do not pile up.
    assert attrs.asdict(caught.value) == attrs.asdict(error)
    with pytest.raises(type(error)):
        ask(front, GetLoad())
    front.step((a, "late"))
    receive_reply(front, Reply(call_id, encode_reply(GetLoad, CoreLoad(1, 2, 3, 4))))
    assert answer == Answer([], [error])
    assert not front.frontend.has_aborts
    assert a_sink.token_ids == list(b"axy")


@attrs.define(eq=False)
class Log:
    """A `StatLogger` that keeps everything."""

    records: list[IterationStats] = attrs.field(factory=list)

    def record(self, stats: IterationStats) -> None:
        self.records.append(stats)

    def log(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @property
    def finished(self) -> list[FinishedRequestStats]:
        return [finished for record in self.records for finished in record.finished]


def test_ten_thousand_requests_of_two_answers_aborted_by_id_leave_nothing() -> None:
    """Cases 7 (vllm 15597) and 8 (vllm 29928): every table is empty once the core has answered."""
    log = Log()
    front = Front(stat_loggers=[log])
    processed = PROCESSOR.process(GenerateRequest("p", SamplingParams(n=2), request_id="x"))
    sinks = [new_pending_output(2) for _ in range(10_000)]
    for index, sink in enumerate(sinks):
        named = attrs.evolve(processed, external_id=f"id-{index % 100}", deadlines=Deadlines(total_s=1e6))
        front.frontend.add(named, sink)
    for index in range(100):
        front.frontend.abort(f"id-{index}")
    assert front.frontend.num_open_requests == front.frontend.num_queued_requests == 0
    ((rank, aborts),) = front.frontend.take_aborts()
    assert rank == 0
    assert len(aborts.slots) == 20_000
    assert isinstance(decode(encode(aborts)), AbortRequests)
    front.step(finished=[Finished(slot, FinishReason.ABORT) for slot in aborts.slots])
    assert front.frontend.num_reserved_slots == 0
    assert front.frontend.next_deadline_s is None
    assert not front.frontend.has_aborts
    assert front.frontend._parents_by_external_id == {}
    assert front.frontend._queue.num_tokens == 0
    for sink in sinks:
        assert isinstance(sink, ParallelPendingOutput)
        assert [answer.finish_reason for answer in sink.answers.values()] == [FinishReason.ABORT] * 2
    assert [each.finish_reason for each in log.finished] == ["abort"] * 10_000


def test_log_probabilities_reach_their_requests(front: Front) -> None:
    """Beside those of requests that want none."""
    (a, a_sink), (b, b_sink), (c, c_sink) = front.add(logprobs=0), front.add(), front.add(logprobs=0)
    front.step((c, "12"), (b, "34"), (a, "5"), logprobs=columns((c, "1"), (a, "5"), (c, "2")))
    front.step((a, "678"), logprobs=columns((a, "678")), finished=[length(a)])
    assert [spelled(sink.logprobs) for sink in (a_sink, b_sink, c_sink)] == ["5678", "", "12"]
    assert b_sink.token_ids == TOKENIZER.encode("34")


def test_what_comes_of_the_prompt_waits_for_the_first_output(front: Front) -> None:
    """In parts, and before any row."""
    a, a_sink = front.add(prompt="abcd", prompt_logprobs=0)
    b, b_sink = front.add(prompt="xy")
    front.step(prompt_logprobs=columns((a, "b")), cached_tokens=pack_int32([b.messages[0].slot, 1]))
    front.step(
        (a, "1"), (b, "2"), prompt_logprobs=columns((a, "cd")), cached_tokens=pack_int32([a.messages[0].slot, 2])
    )
    assert (spelled(a_sink.prompt_logprobs), a_sink.num_cached_tokens) == ("bcd", 2)
    assert (spelled(b_sink.prompt_logprobs), b_sink.num_cached_tokens) == ("", 1)


def test_log_probabilities_for_slots_that_nobody_waits_at_are_ignored(front: Front) -> None:
    """Aborted, but not yet heard of by the core; and free."""
    (a, a_sink), (b, _), (c, c_sink) = front.add("a", logprobs=0), front.add("b", logprobs=0), front.add(logprobs=0)
    front.step((b, "1"), logprobs=columns((b, "1")), finished=[length(b)])
    front.frontend.abort("a")
    slots = pack_int32([a.messages[0].slot, 7, b.messages[0].slot, 7])
    late = columns((a, "2"), (b, "2"), (c, "3"))
    front.step((a, "2"), (c, "3"), logprobs=late, prompt_logprobs=late, cached_tokens=slots)
    assert (a_sink.logprobs, a_sink.prompt_logprobs, a_sink.num_cached_tokens) == (None, None, 0)
    assert spelled(c_sink.logprobs) == "3"


def test_a_request_whose_log_probabilities_are_missing_fails_alone(front: Front) -> None:
    (a, a_sink), (b, b_sink) = front.add(logprobs=0), front.add()
    front.step((a, "1"), (b, "2"))
    assert isinstance(a_sink.error, EngineGenerateError)
    assert front.aborted_slots() == (a.messages[0].slot,)
    assert b_sink.token_ids == TOKENIZER.encode("2")
    assert b.state.is_open
