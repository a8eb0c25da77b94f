"""A prompt that grows: each answer is that of one request with all tokens so far, over the real core."""

from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.client.session import InputSession, StreamingInput, open_session
from trioengine.core.engine_core import EngineCore
from trioengine.errors import DeadlineExceededError, EngineDeadError, PromptTooLongError, RequestError
from trioengine.testing.core_driver import make_core_config
from trioengine.testing.fake_executor import FakeExecutor, generate_alone
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import ScriptedEngine, open_scripted_engine
from trioengine.types.messages import AbortRequests, CheckIntegrity, GetLoad, ModelFacts, Ready
from trioengine.types.output import FinishReason, RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import ChatPrompt, Deadlines, GenerateRequest, TextPrompt

VOCAB_SIZE, NUM_BLOCKS, MAX_LEN = 257, 40, 64
READY = Ready(ModelFacts(MAX_LEN, VOCAB_SIZE, ()), NUM_BLOCKS, 4, {})
PACE = Script(pace_s=0.01)


def make_core() -> EngineCore:
    config = make_core_config(
        max_num_seqs=8, max_num_batched_tokens=16, max_model_len=MAX_LEN, block_size=4, vocab_size=VOCAB_SIZE
    )
    config = attrs.evolve(config, enable_prefix_caching=True)
    return EngineCore(
        config, FakeExecutor(num_blocks=NUM_BLOCKS, block_size=4, vocab_size=VOCAB_SIZE), clock=trio.current_time
    )


def request(
    prompt: Any = (5, 6, 7), kind: RequestOutputKind = RequestOutputKind.DELTA, **fields: Any
) -> GenerateRequest:
    sampling = SamplingParams(seed=0, max_tokens=6, ignore_eos=True, output_kind=kind)
    return GenerateRequest(prompt, sampling, **fields)


async def read_answer(session: InputSession) -> tuple[list[RequestOutput], tuple[int, ...]]:
    """Its outputs and its tokens."""
    outputs: list[RequestOutput] = []
    async for output in session:
        outputs.append(output)
        if output.finished:
            break
    parts = [output.outputs[0].token_ids for output in outputs]
    is_delta = session._is_delta
    return outputs, sum(parts, ()) if is_delta else parts[-1]


async def assert_idle(scripted: ScriptedEngine) -> None:
    load = await scripted.engine.call(GetLoad())
    assert (load.running, load.waiting) == (0, 0)
    await scripted.engine.call(CheckIntegrity())
    await wait_all_tasks_blocked()
    assert scripted.frontend.num_open_requests == 0


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_each_answer_follows_all_tokens_so_far(kind: RequestOutputKind, autojump_clock: MockClock) -> None:
    """And what was computed before is found in the prefix cache."""
    async with open_scripted_engine(PACE, make_core(), READY) as scripted:
        async with open_session(scripted.engine, request(kind=kind, request_id="mine")) as session:
            tokens = [5, 6, 7]
            for new in ([8], [9, 10, 11], [], [12]):
                await session.send(StreamingInput(new))
                tokens += new
                outputs, answer = await read_answer(session)
                assert list(answer) == generate_alone(tokens, 6, vocab_size=VOCAB_SIZE)
                assert {output.prompt_token_ids for output in outputs} == {tuple(tokens)}
                assert {output.request_id for output in outputs} == {"mine"}
                # All full blocks of what came before, but for its last token, whose keys and values no one needed.
                num_known = len(tokens) - len(new) - 1 if len(tokens) > 4 else 0
                assert outputs[-1].num_cached_tokens == num_known // 4 * 4
                tokens += answer
                assert list(session.token_ids) == tokens
            session.finish()
            assert [output async for output in session] == []
        await assert_idle(scripted)


async def test_inputs_wait_for_the_answer_before(autojump_clock: MockClock) -> None:
    """They may come from another task, all at once, each with parameters of its own."""
    async with open_scripted_engine(PACE, make_core(), READY) as scripted:
        async with open_session(scripted.engine, request()) as session, trio.open_nursery() as nursery:

            async def send() -> None:
                for number in range(3):
                    sampling = SamplingParams(seed=0, max_tokens=number + 1, ignore_eos=True)
                    await session.send(StreamingInput([20 + number], sampling))
                session.finish()

            nursery.start_soon(send)
            finals = [output async for output in session if output.finished]
        tokens = [5, 6, 7]
        for number, output in enumerate(finals):
            tokens += [20 + number]
            assert list(output.prompt_token_ids) == tokens
            tokens += output.outputs[0].token_ids
            assert len(output.outputs[0].token_ids) == number + 1
        assert len(finals) == 3
        await assert_idle(scripted)


async def test_a_reader_waits_for_inputs(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACE, make_core(), READY) as scripted:
        async with open_session(scripted.engine, request()) as session, trio.open_nursery() as nursery:
            outputs: list[RequestOutput] = []

            async def read() -> None:
                async for output in session:
                    outputs.append(output)

            nursery.start_soon(read)
            for number in range(3):
                await trio.sleep(5)
                assert sum(output.finished for output in outputs) == number
                await session.send(StreamingInput([number]))
            await trio.sleep(5)
            session.finish()
        assert sum(output.finished for output in outputs) == 3


async def test_texts_are_joined_as_tokens(autojump_clock: MockClock) -> None:
    """What stands before a text (BOS) is not repeated; a chat may come first, and only first."""
    async with open_scripted_engine(PACE, make_core(), READY) as scripted:
        chat = ChatPrompt([{"role": "user", "content": "x"}])
        async with open_session(scripted.engine, request(chat)) as session:
            await session.send(StreamingInput("ab"))
            _, answer = await read_answer(session)
            await session.send(StreamingInput(TextPrompt("cd")))
            outputs, _ = await read_answer(session)
        first = scripted.engine.renderer.render(chat).token_ids
        assert outputs[0].prompt_token_ids == (*first, *b"ab", *answer, *b"cd")
        with pytest.raises(RequestError) as caught:
            StreamingInput(chat)
        assert caught.value.param == "prompt"


@pytest.mark.parametrize("num_checkpoints", range(6))
async def test_a_cancelled_read_loses_no_input_and_no_token(num_checkpoints: int, autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACE, make_core(), READY) as scripted:
        async with open_session(scripted.engine, request()) as session:
            await session.send(StreamingInput([8]))
            await session.send(StreamingInput([9]))
            session.finish()
            tokens: list[int] = []
            ends = 0
            while ends < 2:
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:

                        async def cancel(scope: trio.CancelScope = scope) -> None:
                            for _ in range(num_checkpoints):
                                await trio.lowlevel.checkpoint()
                            scope.cancel()

                        nursery.start_soon(cancel)
                        output = await anext(session)
                        tokens += output.outputs[0].token_ids
                        ends += output.finished
                        nursery.cancel_scope.cancel()
                if scope.cancelled_caught:
                    await trio.sleep(0.1)
                    if num_checkpoints == 0:
                        output = await anext(session)
                        tokens += output.outputs[0].token_ids
                        ends += output.finished
        first = generate_alone([5, 6, 7, 8], 6, vocab_size=VOCAB_SIZE)
        assert tokens == first + generate_alone([5, 6, 7, 8, *first, 9], 6, vocab_size=VOCAB_SIZE)


async def test_a_cancelled_send_has_sent_nothing(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACE, make_core(), READY) as scripted:
        async with open_session(scripted.engine, request()) as session:
            with trio.CancelScope() as scope:
                scope.cancel()
                await session.send(StreamingInput([8]))
            assert scope.cancelled_caught
            assert scripted.num_adds == 0
            await session.send(StreamingInput([9]))
            with trio.CancelScope() as scope:
                scope.cancel()
                await session.send(StreamingInput([8]))
            session.finish()
            outputs = [output async for output in session]
        assert sum(output.finished for output in outputs) == 1
        assert outputs[-1].prompt_token_ids == (5, 6, 7, 9)


async def test_leaving_aborts_the_answer(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(PACE, make_core(), READY) as scripted:
        async with open_session(scripted.engine, request()) as session:
            await session.send(StreamingInput())
            await anext(session)
        await trio.sleep(1)
        assert [message for message in scripted.received if isinstance(message, AbortRequests)] == [AbortRequests((0,))]
        await assert_idle(scripted)


async def test_an_abort_by_name_ends_the_answer_and_the_session_goes_on(autojump_clock: MockClock) -> None:
    async with (
        open_scripted_engine(PACE, make_core(), READY) as scripted,
        open_session(scripted.engine, request()) as session,
    ):
        await session.send(StreamingInput([8]))
        first = await anext(session)
        scripted.engine.abort(session.request_id)
        outputs, answer = await read_answer(session)
        assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
        await session.send(StreamingInput([9]))
        output = await anext(session)
        assert output.prompt_token_ids == (5, 6, 7, 8, *first.outputs[0].token_ids, *answer, 9)


async def test_what_cannot_work_is_told_and_the_session_goes_on(autojump_clock: MockClock) -> None:
    """By `send` where the answer can start at once, else by reading."""
    async with (
        open_scripted_engine(PACE, make_core(), READY) as scripted,
        open_session(scripted.engine, request()) as session,
    ):
        with pytest.raises(PromptTooLongError):
            await session.send(StreamingInput([1] * MAX_LEN))
        with pytest.raises(RequestError) as caught:
            await session.send(StreamingInput([1], SamplingParams(n=2)))
        assert caught.value.param == "n"
        await session.send(StreamingInput([8]))
        await session.send(StreamingInput([-1]))
        await session.send(StreamingInput([9]))
        await read_answer(session)
        with pytest.raises(RequestError, match="token id"):
            await anext(session)
        outputs, _ = await read_answer(session)
        assert outputs[0].prompt_token_ids[:4] == (5, 6, 7, 8)
        assert outputs[0].prompt_token_ids[-1] == 9
        session.finish()
        with pytest.raises(RuntimeError, match="finished"):
            await session.send(StreamingInput([9]))


async def test_deadlines_count_for_each_answer(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(Script(pace_s=1.0), make_core(), READY) as scripted:
        limited = request(deadlines=Deadlines(total_s=3.5))
        async with open_session(scripted.engine, limited) as session:
            for _ in range(2):
                await session.send(StreamingInput([8]))
                with pytest.raises(DeadlineExceededError):
                    await read_answer(session)
            scripted.kill()
            await session.send(StreamingInput([9]))
            with pytest.raises(EngineDeadError):
                await read_answer(session)
