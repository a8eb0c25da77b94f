"""One request from entering its block to leaving it, over a core in memory: cancelled at every await."""

import inspect
from contextlib import AsyncExitStack
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.client.stream import RequestStream
from trioengine.errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    RequestError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.frontend.admission import AdmissionLimits, AdmissionQueue
from trioengine.frontend.input_processor import LONG_PROMPT_CHARS
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import ScriptedEngine, open_scripted_engine
from trioengine.types.codec import encode, error_to_data
from trioengine.types.messages import (
    AbortRequests,
    CheckIntegrity,
    EngineCoreRequest,
    Finished,
    GetLoad,
    Reply,
    StepOutput,
    pack_int32,
)
from trioengine.types.output import FinishReason, RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import Deadlines, GenerateRequest

PACED = Script(pace_s=1.0)
ENDLESS = 100_000


def request(prompt: str = "abc", request_id: str | None = None, **sampling: Any) -> GenerateRequest:
    sampling = {"max_tokens": 6, "output_kind": RequestOutputKind.DELTA} | sampling
    return GenerateRequest(prompt, SamplingParams(**sampling), request_id=request_id)


async def read_all(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs)


async def assert_idle(scripted: ScriptedEngine) -> None:
    """Neither side knows of a request, and each abort told of one that the core had been sent."""
    load = await scripted.engine.call(GetLoad())
    assert (load.running, load.waiting) == (0, 0)
    await scripted.engine.call(CheckIntegrity())
    await wait_all_tasks_blocked()
    assert scripted.frontend.num_open_requests == scripted.frontend.num_reserved_slots == 0
    assert not scripted.frontend.has_aborts


async def test_tokens_come_one_by_one_to_a_reader_that_keeps_up(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted, scripted.engine.generate(request()) as stream:
        outputs = await read_all(stream)
        assert [output.outputs[0].text for output in outputs] == list("abcabc")
        assert [output.num_generated_tokens for output in outputs] == [1, 2, 3, 4, 5, 6]
        assert outputs[-1].outputs[0].finish_reason is FinishReason.LENGTH
        await assert_idle(scripted)


async def test_a_slow_reader_gets_larger_outputs_and_no_fewer_tokens(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        async with scripted.engine.generate(request(max_tokens=30)) as stream:
            outputs: list[RequestOutput] = []
            async for output in stream:
                outputs.append(output)
                await trio.sleep(10.5)
            assert text_of(outputs) == "abc" * 10
            assert len(outputs) <= 5
            assert outputs[-1].finished
        await assert_idle(scripted)


@pytest.mark.parametrize("stop", [(), ("cab",)])
async def test_the_kinds_of_output_are_equal_for_any_reader(stop: tuple[str, ...], autojump_clock: MockClock) -> None:
    """Whether it keeps up or not: joined deltas, cumulative and final."""
    async with open_scripted_engine(PACED) as scripted:
        for pause_s in (0.0, 2.5, 1000.0):
            answers: list[tuple[Any, ...]] = []
            for kind in RequestOutputKind:
                async with scripted.engine.generate(request(output_kind=kind, stop=stop, max_tokens=9)) as stream:
                    outputs: list[RequestOutput] = []
                    async for output in stream:
                        outputs.append(output)
                        await trio.sleep(pause_s)
                last = outputs[-1].outputs[0]
                if kind is RequestOutputKind.DELTA:
                    tokens = sum((output.outputs[0].token_ids for output in outputs), ())
                    answers.append((text_of(outputs), tokens, last.finish_reason, last.stop_reason))
                else:
                    answers.append((last.text, last.token_ids, last.finish_reason, last.stop_reason))
                assert outputs[-1].num_generated_tokens == len(answers[-1][1])
                assert kind is not RequestOutputKind.FINAL_ONLY or len(outputs) == 1
            assert answers[0] == answers[1] == answers[2]
            assert answers[0][0] == ("ab" if stop else "abc" * 3)
        await assert_idle(scripted)


async def test_a_stop_string_ends_the_request_in_the_core_too(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        async with scripted.engine.generate(request(stop="ca", max_tokens=ENDLESS)) as stream:
            outputs = await read_all(stream)
            assert text_of(outputs) == "ab"
            assert outputs[-1].outputs[0].stop_reason == "ca"
            assert outputs[-1].num_generated_tokens == 4
            await trio.sleep(2)
            assert AbortRequests((0,)) in scripted.received
        await assert_idle(scripted)


# Leaving


async def test_a_thousand_requests_cancelled_while_they_are_sent_never_reach_the_core(
    autojump_clock: MockClock,
) -> None:
    """Case 1 (vllm 57061): entering either sends and registers, or neither."""
    async with open_scripted_engine(PACED) as scripted:
        entered = 0
        for _ in range(1000):
            with trio.CancelScope() as scope:
                scope.cancel()
                async with scripted.engine.generate(request(max_tokens=ENDLESS)):
                    entered += 1
        assert entered == 0
        assert scripted.num_adds == 0
        await assert_idle(scripted)


async def test_a_request_is_forgotten_wherever_its_task_is_cancelled(autojump_clock: MockClock) -> None:
    """At its first checkpoint, its second, and so on, through entering and reading."""
    async with open_scripted_engine(Script()) as scripted:
        is_complete = False
        num_checkpoints = 0
        while not is_complete:
            num_checkpoints += 1
            scope = trio.CancelScope()

            async def cancel_later(num: int, scope: trio.CancelScope) -> None:
                for _ in range(num):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_later, num_checkpoints, scope)
                with scope:
                    async with scripted.engine.generate(request(max_tokens=3)) as stream:
                        await read_all(stream)
                    is_complete = True
                nursery.cancel_scope.cancel()
            await assert_idle(scripted)
        assert num_checkpoints > 3


async def test_many_requests_that_start_and_are_cancelled_leave_nothing(autojump_clock: MockClock) -> None:
    """Case 1 (vllm 57061): a thousand at once, each cancelled after a number of checkpoints of its own."""
    async with open_scripted_engine(PACED) as scripted:

        async def run_and_cancel(num_checkpoints: int) -> None:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read_forever)
                    for _ in range(num_checkpoints):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

        async def read_forever() -> None:
            async with scripted.engine.generate(request(max_tokens=ENDLESS)) as stream:
                await read_all(stream)

        async with trio.open_nursery() as nursery:
            for index in range(1000):
                nursery.start_soon(run_and_cancel, index % 7)
        await trio.sleep(2)
        await assert_idle(scripted)
        # None sent after its reader had left; every abort is of a request that was sent.
        aborted = [
            slot for message in scripted.received if isinstance(message, AbortRequests) for slot in message.slots
        ]
        assert len(aborted) == scripted.num_adds


async def test_a_cancelled_queued_request_leaves_a_running_one_untouched(autojump_clock: MockClock) -> None:
    """Case 5 (ik_llama.cpp 1929)."""
    async with open_scripted_engine(Script(pace_s=1.0, max_num_seqs=1)) as scripted:
        async with scripted.engine.generate(request(max_tokens=10)) as running:
            await anext(running)
            with trio.move_on_after(2.5) as scope:
                async with scripted.engine.generate(request(max_tokens=10)) as queued:
                    load = await scripted.engine.call(GetLoad())
                    assert (load.running, load.waiting) == (1, 1)
                    await read_all(queued)
            assert scope.cancelled_caught
            outputs = await read_all(running)
            assert text_of(outputs) == ("abc" * 4)[1:10]
            assert outputs[-1].outputs[0].finish_reason is FinishReason.LENGTH
        await assert_idle(scripted)


async def test_the_core_hears_of_leaving_before_anything_that_follows(autojump_clock: MockClock) -> None:
    """A call that is made right afterwards finds the request gone."""
    async with open_scripted_engine(PACED) as scripted:
        stream = await scripted.engine.generate(request(max_tokens=ENDLESS)).__aenter__()
        await anext(stream)
        await stream.__aexit__(None, None, None)
        load = await scripted.engine.call(GetLoad())  # It has been sent before anything else can run.
        assert (load.running, load.waiting) == (0, 0)


async def test_leaving_is_told_without_waiting_for_a_step(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        async with scripted.engine.generate(request(max_tokens=ENDLESS)) as stream:
            await anext(stream)
            await trio.sleep(0.5)
        await trio.sleep(1)
        assert AbortRequests((0,)) in scripted.received  # Taken in with the step that was under way.


async def test_leaving_twice_aborts_once(autojump_clock: MockClock) -> None:
    """Cancelled by two scopes, aborted by name and left: one abort."""
    async with open_scripted_engine(PACED) as scripted:
        with trio.CancelScope() as outer, trio.CancelScope() as inner:
            async with scripted.engine.generate(request(max_tokens=ENDLESS, request_id="x")) as stream:
                await anext(stream)
                scripted.engine.abort("x")
                inner.cancel()
                outer.cancel()
                await trio.lowlevel.checkpoint()
        await trio.sleep(2)
        await stream.__aexit__(None, None, None)
        await trio.sleep(2)
        assert [message for message in scripted.received if isinstance(message, AbortRequests)] == [AbortRequests((0,))]
        await assert_idle(scripted)


async def test_a_request_that_has_finished_is_not_aborted(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        async with scripted.engine.generate(request(request_id="x")) as stream:
            await read_all(stream)
            scripted.engine.abort("x")
        await assert_idle(scripted)
        assert not any(isinstance(message, AbortRequests) for message in scripted.received)


async def test_a_deadline_is_a_cancel_scope(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        outputs: list[RequestOutput] = []
        with trio.move_on_after(3.5) as scope:
            async with scripted.engine.generate(request(max_tokens=ENDLESS)) as stream:
                async for output in stream:
                    outputs.append(output)
        assert scope.cancelled_caught
        assert 3 <= len(outputs) <= 4
        await trio.sleep(2)
        await assert_idle(scripted)


async def test_leaving_is_felt_by_a_reader_in_another_task(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        stream = scripted.engine.generate(request(max_tokens=ENDLESS))
        errors: list[TrioEngineError] = []

        async def read() -> None:
            try:
                await read_all(stream)
            except EngineClosedError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery, stream:
            nursery.start_soon(read)
            await trio.sleep(2.5)
        assert len(errors) == 1


async def test_leaving_awaits_nothing(autojump_clock: MockClock) -> None:
    """In a cancelled scope an await would raise; in a generator's cleanup it would be an error."""
    async with open_scripted_engine(PACED) as scripted:
        stream = scripted.engine.generate(request())
        await stream.__aenter__()
        leaving = stream.__aexit__(None, None, None)
        assert inspect.iscoroutine(leaving)
        with pytest.raises(StopIteration):
            leaving.send(None)


# Entering


async def test_a_stream_is_entered_once_and_read_inside(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        stream = scripted.engine.generate(request())
        with pytest.raises(RuntimeError, match="async with"):
            await anext(stream)
        with pytest.raises(RuntimeError, match="async with"):
            _ = stream.num_prompt_tokens
        async with stream:
            assert stream.num_prompt_tokens == 3
            with pytest.raises(RuntimeError, match="once"):
                await stream.__aenter__()
            await wait_all_tasks_blocked()
        assert scripted.num_adds == 1


async def test_what_cannot_be_sent_is_refused_before_it_is(autojump_clock: MockClock) -> None:
    """Also what only the wire would have refused."""
    bad = [
        request("a\ud800"),
        request(stop="\ud800"),
        request(request_id="\ud800"),
        request(max_tokens=4.0),
        request(top_k=2**70),
        request(stop_token_ids=(1 << 20,)),
        GenerateRequest([1, -1]),
    ]
    async with open_scripted_engine(PACED) as scripted:
        for each in bad:
            with pytest.raises(RequestError):
                await scripted.engine.generate(each).__aenter__()
        assert scripted.num_adds == 0
        await assert_idle(scripted)


async def test_warnings_are_known_inside(autojump_clock: MockClock) -> None:
    wanted = request(max_tokens=1 << 21)
    async with open_scripted_engine(PACED) as scripted, scripted.engine.generate(wanted) as stream:
        assert len(stream.warnings) == 1
        assert "max_tokens" in stream.warnings[0]


async def test_a_long_prompt_is_tokenized_in_a_thread_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real time: threads and a jumping clock do not go together."""
    threads: list[bool] = []
    run_sync = trio.to_thread.run_sync

    async def note(*args: Any, **kwargs: Any) -> Any:
        threads.append(kwargs["abandon_on_cancel"])
        return await run_sync(*args, **kwargs)

    monkeypatch.setattr(trio.to_thread, "run_sync", note)
    long = "x" * (LONG_PROMPT_CHARS + 1)
    with trio.fail_after(10):
        async with open_scripted_engine() as scripted:
            async with scripted.engine.generate(request(long)) as stream:
                assert stream.num_prompt_tokens == len(long)
                assert text_of(await read_all(stream)) == "x" * 6
            with trio.CancelScope() as scope:
                scope.cancel()
                await scripted.engine.generate(request(long)).__aenter__()
            assert scope.cancelled_caught
            assert threads == [True, True]
            assert scripted.num_adds == 1
            await assert_idle(scripted)


# Two of one name


async def test_two_live_requests_of_one_name_have_their_own_text(autojump_clock: MockClock) -> None:
    """Case 2, also in the step in which the name's first request is aborted and used again."""
    async with open_scripted_engine(PACED) as scripted:
        engine = scripted.engine
        async with (
            engine.generate(request("abc", "same")) as first,
            engine.generate(request("xyz", "same")) as second,
        ):
            assert text_of(await read_all(first)) == "abcabc"
            assert text_of(await read_all(second)) == "xyzxyz"
        async with engine.generate(request("abc", "same", max_tokens=ENDLESS)) as old:
            await anext(old)
            engine.abort("same")
            async with engine.generate(request("xyz", "same")) as new:
                assert text_of(await read_all(new)) == "xyzxyz"
            assert [output.outputs[0].finish_reason for output in await read_all(old)] == [FinishReason.ABORT]
        await assert_idle(scripted)


# Failing


async def test_one_requests_failure_is_its_own(autojump_clock: MockClock) -> None:
    """Its reader gets the tokens before it, then the error, and the error again; the others go on."""
    async with open_scripted_engine(PACED) as scripted:
        engine = scripted.engine
        async with engine.generate(request(max_tokens=ENDLESS)) as bad, engine.generate(request()) as good:
            await anext(good)
            error = error_to_data(EngineGenerateError("broken"))
            sequence = scripted.frontend._ranks[0].next_sequence
            scripted.send(
                StepOutput(
                    sequence,
                    0,
                    0.0,
                    slots=pack_int32([0]),
                    tokens=b"!\0\0\0",
                    finished=(Finished(0, FinishReason.ABORT, error=error),),
                )
            )
            await wait_all_tasks_blocked()
            scripted.frontend._ranks[0].next_sequence = sequence  # What the test said does not count.
            output = await anext(bad)
            assert output.outputs[0].text.endswith("!")
            assert not output.finished
            for _ in range(2):
                with pytest.raises(EngineGenerateError, match="broken"):
                    await anext(bad)
            assert len(await read_all(good)) == 5


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_death_comes_after_the_tokens(kind: RequestOutputKind, autojump_clock: MockClock) -> None:
    """Each reader gets what was generated, then the cause; later requests and calls fail at once; the block goes on."""
    async with open_scripted_engine(PACED) as scripted:
        engine = scripted.engine
        async with engine.generate(request(max_tokens=ENDLESS, output_kind=kind)) as stream:
            await trio.sleep(3.5)
            scripted.kill()
            await trio.sleep(5)
            with pytest.raises(EngineDeadError):
                engine.check_health()
            output = await anext(stream)
            assert output.outputs[0].text.startswith("abc")
            assert not output.finished
            for _ in range(2):
                with pytest.raises(EngineDeadError, match="exited"):
                    await anext(stream)
        with pytest.raises(EngineDeadError):
            await engine.generate(request()).__aenter__()
        with pytest.raises(EngineDeadError):
            await engine.call(GetLoad())
        engine.abort("x")
        engine.abort_all()


async def test_the_cores_own_words_are_the_cause(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(Script(pace_s=1.0, fatal_token=ord("!"))) as scripted:
        async with scripted.engine.generate(request("ab!", max_tokens=5)) as stream:
            with pytest.raises(EngineDeadError, match="this token is the end"):
                await read_all(stream)
        with pytest.raises(EngineDeadError, match="this token is the end"):
            scripted.engine.check_health()


async def test_a_pending_call_learns_of_the_death(autojump_clock: MockClock) -> None:
    """Case 11."""
    async with open_scripted_engine(PACED) as scripted:
        errors: list[EngineDeadError] = []

        async def call() -> None:
            try:
                await scripted.engine.call(GetLoad())
            except EngineDeadError as error:
                errors.append(error)

        scripted.kill()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
        assert len(errors) == 1


async def test_a_call_that_is_cancelled_stops_waiting(autojump_clock: MockClock) -> None:
    """Its reply is for nobody."""
    async with open_scripted_engine(PACED) as scripted:
        with trio.CancelScope() as scope:
            scope.cancel()
            await scripted.engine.call(GetLoad())
        assert scope.cancelled_caught
        load = await scripted.engine.call(GetLoad())
        assert load.running == 0


async def test_a_core_that_hangs_is_unhealthy_and_takes_no_requests_until_it_goes_on(
    autojump_clock: MockClock,
) -> None:
    """Case 10 (vllm 39863); streams that wait go on waiting, as it may go on."""
    async with open_scripted_engine(PACED) as scripted, scripted.engine.generate(request()) as stream:
        scripted.handle.scripted_trouble = EngineDeadError("hangs")
        with pytest.raises(EngineDeadError, match="hangs"):
            scripted.engine.check_health()
        with pytest.raises(EngineDeadError, match="hangs"):
            await scripted.engine.generate(request()).__aenter__()
        scripted.handle.scripted_trouble = None
        scripted.engine.check_health()
        assert text_of(await read_all(stream)) == "abcabc"


async def test_a_closed_engine_says_so(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        stream = await scripted.engine.generate(request()).__aenter__()
    with pytest.raises(EngineClosedError):
        await read_all(stream)
    await stream.__aexit__(None, None, None)
    with pytest.raises(EngineClosedError):
        scripted.engine.check_health()
    with pytest.raises(EngineClosedError):
        await scripted.engine.generate(request()).__aenter__()
    with pytest.raises(EngineClosedError):
        await scripted.engine.call(GetLoad())


# Garbage


async def test_what_is_no_message_for_a_front_end_is_ignored(autojump_clock: MockClock) -> None:
    """Garbage, messages that go the other way, replies that nobody waits for, strangers."""
    async with open_scripted_engine(PACED) as scripted:
        router: Any = scripted.engine._link._socket
        async with scripted.engine.generate(request()) as stream:
            router.deliver([b"stranger", b"garbage"])
            router.deliver([b"stranger"])
            router.deliver([b"stranger", encode(StepOutput(7, 0, 0.0, slots=b"\0\0\0\0", tokens=b"!\0\0\0"))])
            for data in (b"", b"garbage", b"\xc1"):
                router.deliver([scripted.engine._link._identities[0], data])
            router.deliver([scripted.engine._link._identities[0]])
            scripted.send(Reply(99))
            scripted.send(AbortRequests((0,)))  # type: ignore[arg-type]
            assert text_of(await read_all(stream)) == "abcabc"
        scripted.engine.check_health()


async def test_lost_outputs_are_the_engines_death(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        async with scripted.engine.generate(request(max_tokens=ENDLESS)) as stream:
            await anext(stream)
            scripted.send(StepOutput(7, 0, 0.0))
            with pytest.raises(EngineDeadError, match="lost"):
                await read_all(stream)
        with pytest.raises(EngineDeadError, match="lost"):
            scripted.engine.check_health()
        assert any(isinstance(message, EngineCoreRequest) for message in scripted.received)


# Several answers


@pytest.mark.parametrize("pause_s", [0.0, 2.5, 1000.0])
async def test_several_answers_are_equal_in_all_kinds(pause_s: float, autojump_clock: MockClock) -> None:
    """Case 44 (vllm 8625): three answers, counted together, whoever reads them and how."""
    async with open_scripted_engine(PACED) as scripted:
        answers: list[list[tuple[str, int]]] = []
        for kind in RequestOutputKind:
            outputs: list[RequestOutput] = []
            async with scripted.engine.generate(request(n=3, output_kind=kind, max_tokens=5)) as stream:
                async for output in stream:
                    outputs.append(output)
                    await trio.sleep(pause_s)
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].num_generated_tokens == 15
            parts = {index: [each for o in outputs for each in o.outputs if each.index == index] for index in range(3)}
            if kind is RequestOutputKind.DELTA:
                assert [sum(each.finish_reason is not None for each in parts[i]) for i in range(3)] == [1, 1, 1]
                texts = [("".join(e.text for e in parts[i]), sum(len(e.token_ids) for e in parts[i])) for i in range(3)]
            else:
                texts = [(parts[i][-1].text, len(parts[i][-1].token_ids)) for i in range(3)]
            assert kind is not RequestOutputKind.FINAL_ONLY or len(outputs) == 1
            answers.append(texts)
        assert answers[0] == answers[1] == answers[2] == [("abcab", 5)] * 3
        assert scripted.num_adds == 9
        await assert_idle(scripted)


async def test_leaving_ends_all_answers_with_one_message(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        async with scripted.engine.generate(request(n=5, max_tokens=ENDLESS)) as stream:
            await anext(stream)
        await trio.sleep(2)
        aborts = [message for message in scripted.received if isinstance(message, AbortRequests)]
        assert [sorted(message.slots) for message in aborts] == [[0, 1, 2, 3, 4]]
        await assert_idle(scripted)


async def test_aborting_a_request_of_several_answers_ends_each_once(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        async with scripted.engine.generate(request(n=3, max_tokens=ENDLESS, request_id="x")) as stream:
            await anext(stream)
            scripted.engine.abort("x")
            outputs = await read_all(stream)
        reasons = [each.finish_reason for output in outputs for each in output.outputs if each.finish_reason]
        assert reasons == [FinishReason.ABORT] * 3
        assert outputs[-1].finished
        await trio.sleep(2)
        await assert_idle(scripted)


async def test_an_interval_makes_fewer_and_larger_outputs(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
            wanted = request(stream_interval=4, max_tokens=10, output_kind=kind)
            async with scripted.engine.generate(wanted) as stream:
                outputs = await read_all(stream)
            assert [output.num_generated_tokens for output in outputs] == [1, 5, 9, 10]
        assert outputs[-1].outputs[0].text == "abcabcabca"


# Deadlines and admission


@pytest.mark.parametrize(
    ("deadlines", "num_tokens"),
    [
        (Deadlines(total_s=3.5), 3),
        (Deadlines(first_token_s=0.5), 0),
        (Deadlines(inter_token_s=0.5), 1),
        (Deadlines(inter_token_s=1.5, total_s=5.5), 5),
    ],
)
async def test_a_request_ends_when_its_time_is_over(
    deadlines: Deadlines, num_tokens: int, autojump_clock: MockClock
) -> None:
    """Its tokens come first, its neighbour goes on, and the core is told."""
    async with open_scripted_engine(PACED) as scripted:
        limited = attrs.evolve(request(max_tokens=ENDLESS), deadlines=deadlines)
        async with scripted.engine.generate(request(max_tokens=10)) as other:
            outputs: list[RequestOutput] = []
            async with scripted.engine.generate(limited) as stream:
                for _ in range(num_tokens):
                    outputs.append(await anext(stream))
                with pytest.raises(DeadlineExceededError):
                    await anext(stream)
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == num_tokens
            assert text_of(await read_all(other)) == "abcabcabca"
        await assert_idle(scripted)


async def test_an_engine_that_is_full_refuses_before_any_work(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Case 20 (vllm 2901): never a hang; nothing is tokenized for what is refused."""
    async with open_scripted_engine(Script(pace_s=1.0, max_num_seqs=1)) as scripted:
        scripted.frontend._queue = AdmissionQueue(AdmissionLimits(max_num_queued_reqs=3))
        tokenized: list[str] = []
        encode = scripted.engine.tokenizer.encode

        def note(text: str, **kwargs: Any) -> list[int]:
            tokenized.append(text)
            return encode(text, **kwargs)

        monkeypatch.setattr(scripted.engine.tokenizer, "encode", note)
        async with AsyncExitStack() as stack:
            for number in range(30):
                try:
                    await stack.enter_async_context(scripted.engine.generate(request(str(number), n=3)))
                except UnavailableError:
                    continue
            assert tokenized == ["0"]
            with pytest.raises(RequestError, match="n must be"):  # Coming again would not help.
                await stack.enter_async_context(scripted.engine.generate(request("0", n=10**6)))
            await trio.sleep(100)  # Its answers have had their turns.
            await stack.enter_async_context(scripted.engine.generate(request("new")))
        await assert_idle(scripted)


async def test_outputs_say_whose_weights_computed_them(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACED) as scripted:
        frontend = scripted.frontend
        async with scripted.engine.generate(request(max_tokens=ENDLESS)) as stream:
            first = await anext(stream)
            sequence = frontend._ranks[0].next_sequence
            list(frontend.receive(0, StepOutput(sequence, 0, 0.0, weight_version="2")))
            frontend._ranks[0].next_sequence = sequence  # The scripted core knows nothing of it.
            second = await anext(stream)
            async with scripted.engine.generate(request(max_tokens=2, n=2)) as later:
                outputs = await read_all(later)
        assert (first.weight_version, second.weight_version) == (None, "2")
        assert {output.weight_version for output in outputs} == {"2"}
