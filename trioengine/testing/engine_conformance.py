"""What every `EngineClient` promises, as checks that run against any of them.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check: Check) -> None:
        async with open_my_engine() as engine:
            await check(Subject(engine, engine, short_prompt, endless_prompt))

No check knows a right text; they compare an engine's answers with each other. Nor does one know how fast an engine is:
they wait for events.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import attrs
import trio

from trioengine.client.interface import EngineClient
from trioengine.client.operations import JsonValue
from trioengine.errors import DeadlineExceededError, EngineClosedError, RequestError
from trioengine.types.messages import CoreLoad, GetLoad, LoRAInfo, WeightTensor
from trioengine.types.output import FinishReason, PositionLogprobs, RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import Deadlines, GenerateRequest

TIMEOUT_S = 20


@attrs.frozen
class Subject:
    """An open engine to check, and what to ask it."""

    engine: EngineClient
    endless_engine: EngineClient
    """The same, or one whose answers do not end by themselves."""
    sampling: SamplingParams = attrs.field(factory=lambda: SamplingParams(temperature=0, max_tokens=4))
    """With `prompt`, gives an answer of 2 to 20 tokens, always the same."""
    endless_sampling: SamplingParams = attrs.field(factory=lambda: SamplingParams(temperature=0, max_tokens=100_000))
    """With `prompt`, gives a first token, and then no end for as long as a check lasts."""
    prompt: str = "abcdefgh"
    new_weights: Sequence[WeightTensor] = ()
    """With them its answers are other ones, where it shows that."""
    rpc_method: str | None = None
    """A method for `collective_rpc` that returns its arguments, where there is one."""
    lora_path: str = "/adapter"
    """Of an adapter that can be read."""

    def request(
        self, kind: RequestOutputKind = RequestOutputKind.DELTA, request_id: str | None = None
    ) -> GenerateRequest:
        """One that is soon answered."""
        return GenerateRequest(self.prompt, attrs.evolve(self.sampling, output_kind=kind), request_id=request_id)

    def endless_request(self, request_id: str | None = None) -> GenerateRequest:
        """One that is answered, but never to the end."""
        sampling = attrs.evolve(self.endless_sampling, output_kind=RequestOutputKind.DELTA)
        return GenerateRequest(self.prompt, sampling, request_id=request_id)

    def several(self, n: int, kind: RequestOutputKind, *, seed: int = 1, is_endless: bool = False) -> GenerateRequest:
        """One of so many answers, each with random numbers of its own."""
        sampling = self.endless_sampling if is_endless else self.sampling
        return GenerateRequest(
            self.prompt, attrs.evolve(sampling, n=n, seed=seed, temperature=1.0, output_kind=kind), request_id="several"
        )

    async def outputs(
        self, kind: RequestOutputKind = RequestOutputKind.DELTA, request_id: str | None = None
    ) -> list[RequestOutput]:
        """A whole answer."""
        async with self.engine.generate(self.request(kind, request_id)) as stream:
            return [output async for output in stream]


Check: TypeAlias = Callable[[Subject], Awaitable[None]]


async def check_the_kinds_of_output_are_equal(subject: Subject) -> None:
    """Joined deltas, the last cumulative output and the final one are the same answer."""
    with trio.fail_after(TIMEOUT_S):
        deltas = [output.outputs[0] for output in await subject.outputs(RequestOutputKind.DELTA)]
        cumulative = [output.outputs[0] for output in await subject.outputs(RequestOutputKind.CUMULATIVE)]
        (final,) = [output.outputs[0] for output in await subject.outputs(RequestOutputKind.FINAL_ONLY)]
    assert len(final.token_ids) >= 2
    assert "".join(delta.text for delta in deltas) == cumulative[-1].text == final.text
    assert sum((delta.token_ids for delta in deltas), ()) == cumulative[-1].token_ids == final.token_ids
    for ending in (deltas[-1], cumulative[-1]):
        assert (ending.finish_reason, ending.stop_reason) == (final.finish_reason, final.stop_reason)
    for earlier, later in pairwise(cumulative):
        assert later.text.startswith(earlier.text)
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids


async def check_the_last_output_and_no_other_is_finished(subject: Subject) -> None:
    """It has the reason, and the tokens so far are counted in each."""
    with trio.fail_after(TIMEOUT_S):
        for kind in RequestOutputKind:
            outputs = await subject.outputs(kind)
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert [output.outputs[0].finish_reason is not None for output in outputs] == [
                output.finished for output in outputs
            ]
            num_tokens = 0
            for output in outputs:
                (choice,) = output.outputs
                assert choice.index == 0
                is_delta = kind is RequestOutputKind.DELTA
                num_tokens = len(choice.token_ids) + (num_tokens if is_delta else 0)
                assert output.num_generated_tokens == num_tokens


async def check_the_end_stays_the_end(subject: Subject) -> None:
    """Reading on after the last output ends the loop again, without waiting."""
    with trio.fail_after(TIMEOUT_S):
        async with subject.engine.generate(subject.request()) as stream:
            assert [output async for output in stream]
            assert [output async for output in stream] == []


async def check_outputs_know_their_request(subject: Subject) -> None:
    """The caller's id, or one that was drawn; the prompt's tokens, counted once the block is entered."""
    with trio.fail_after(TIMEOUT_S):
        for request_id in ("mine", None):
            async with subject.engine.generate(subject.request(request_id=request_id)) as stream:
                assert stream.num_prompt_tokens > 0
                assert stream.warnings == ()
                outputs = [output async for output in stream]
                assert {len(output.prompt_token_ids) for output in outputs} == {stream.num_prompt_tokens}
                (name,) = {output.request_id for output in outputs}
                assert name
                assert request_id is None or name == request_id


async def check_each_token_has_its_log_probabilities(subject: Subject) -> None:
    """Where they were asked for, the same for each kind of output: of the token, and of the most likely ones."""
    for num_wanted in (0, 3):
        sampling = attrs.evolve(subject.sampling, logprobs=num_wanted)
        asking = attrs.evolve(subject, sampling=sampling)
        with trio.fail_after(TIMEOUT_S):
            deltas = [output.outputs[0] for output in await asking.outputs(RequestOutputKind.DELTA)]
            cumulative = [output.outputs[0] for output in await asking.outputs(RequestOutputKind.CUMULATIVE)]
            (final,) = [output.outputs[0] for output in await asking.outputs(RequestOutputKind.FINAL_ONLY)]
        for choice in (*deltas, *cumulative, final):
            assert choice.logprobs is not None
            assert [each.chosen.token_id for each in choice.logprobs] == list(choice.token_ids)
            for position in choice.logprobs:
                _check_position(position, num_wanted)
        joined = tuple(each for delta in deltas for each in delta.logprobs or ())
        assert joined == cumulative[-1].logprobs == final.logprobs
    for output in await subject.outputs():
        assert output.outputs[0].logprobs is None
        assert output.prompt_logprobs is None


async def check_the_prompts_log_probabilities_come_first_and_whole(subject: Subject) -> None:
    """One for each of its tokens, none for the first, in the first output; CUMULATIVE repeats them."""
    asking = attrs.evolve(subject, sampling=attrs.evolve(subject.sampling, prompt_logprobs=2))
    for kind in RequestOutputKind:
        with trio.fail_after(TIMEOUT_S):
            first, *others = await asking.outputs(kind)
        assert first.prompt_logprobs is not None
        no_one, *positions = first.prompt_logprobs
        assert no_one is None
        assert len(positions) == len(first.prompt_token_ids) - 1 > 0
        for token_id, position in zip(first.prompt_token_ids[1:], positions, strict=True):
            assert position is not None
            assert position.chosen.token_id == token_id
            _check_position(position, 2)
        for output in others:
            is_repeated = kind is RequestOutputKind.CUMULATIVE
            assert output.prompt_logprobs == (first.prompt_logprobs if is_repeated else None)


async def check_a_prompt_can_be_scored_without_an_answer(subject: Subject) -> None:
    """Case 36 (vllm 6521): its log probabilities, and 0 tokens."""
    scoring = attrs.evolve(subject, sampling=attrs.evolve(subject.sampling, max_tokens=0, prompt_logprobs=0))
    for kind in RequestOutputKind:
        with trio.fail_after(TIMEOUT_S):
            (output,) = await scoring.outputs(kind)
        assert output.finished
        assert output.num_generated_tokens == 0
        (choice,) = output.outputs
        assert (choice.text, choice.token_ids, choice.finish_reason) == ("", (), FinishReason.LENGTH)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


async def check_cached_tokens_are_counted_in_every_output(subject: Subject) -> None:
    """Never the whole prompt: its last token is always computed."""
    with trio.fail_after(TIMEOUT_S):
        for kind in RequestOutputKind:
            outputs = await subject.outputs(kind)
            (num_cached_tokens,) = {output.num_cached_tokens for output in outputs}
            assert 0 <= num_cached_tokens < len(outputs[0].prompt_token_ids)


async def check_wrong_parameters_are_refused_on_entering(subject: Subject) -> None:
    """With the field's name, before anything runs; the engine goes on."""
    bad = GenerateRequest(subject.prompt, SamplingParams(temperature=float("nan")))
    with trio.fail_after(TIMEOUT_S):
        stream = subject.engine.generate(bad)
        param: str | None = None
        try:
            async with stream:
                raise AssertionError("A request that cannot work was accepted.")
        except RequestError as error:
            param = error.param
        assert param == "temperature"
        assert await subject.outputs()


async def check_leaving_ends_the_request(subject: Subject) -> None:
    """However the block is left, the engine soon knows nothing of it, and the stream cannot be read any more."""
    with trio.fail_after(TIMEOUT_S):
        async with subject.endless_engine.generate(subject.endless_request()) as stream:
            await anext(stream)
        is_closed = False
        try:
            await anext(stream)
        except EngineClosedError:
            is_closed = True
        assert is_closed
        with trio.CancelScope() as scope:
            async with subject.endless_engine.generate(subject.endless_request()):
                scope.cancel()
                await trio.sleep_forever()
        await _until_idle(subject.endless_engine)


async def check_an_exception_leaves_the_block_as_itself(subject: Subject) -> None:
    """Neither wrapped nor replaced."""
    mine = KeyError("mine")
    caught: BaseException | None = None
    with trio.fail_after(TIMEOUT_S):
        try:
            async with subject.endless_engine.generate(subject.endless_request()):
                raise mine
        except KeyError as error:
            caught = error
        await _until_idle(subject.endless_engine)
    assert caught is mine


async def check_abort_ends_all_requests_of_this_name(subject: Subject) -> None:
    """Their readers get the ending, those of other names do not, and a new request of the name runs."""
    engine = subject.endless_engine
    endings: list[RequestOutput] = []

    async def read(request_id: str, started: trio.Event) -> None:
        async with engine.generate(subject.endless_request(request_id)) as stream:
            await anext(stream)
            started.set()
            endings.extend([output async for output in stream][-1:])

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery, engine.generate(subject.endless_request("other")) as other:
            await anext(other)
            for _ in range(2):
                started = trio.Event()
                nursery.start_soon(read, "same", started)
                await started.wait()
            engine.abort("nobody")
            assert endings == []
            engine.abort("same")
            engine.abort("same")
            async with engine.generate(subject.endless_request("same")) as again:
                output = await anext(again)
                assert not output.finished
                assert output.request_id == "same"
        await _until_idle(engine)
    assert [ending.outputs[0].finish_reason for ending in endings] == [FinishReason.ABORT] * 2
    assert all(ending.finished for ending in endings)


async def check_a_cancelled_read_loses_nothing(subject: Subject) -> None:
    """Every read is cancelled once before it is done again; the answer is the same."""
    (whole,) = await subject.outputs(RequestOutputKind.FINAL_ONLY)
    tokens: tuple[int, ...] = ()
    with trio.fail_after(TIMEOUT_S):
        async with subject.engine.generate(subject.request()) as stream:
            is_finished = False
            while not is_finished:
                output: RequestOutput | None = None
                with trio.CancelScope() as scope:
                    scope.cancel()
                    output = await anext(stream)
                output = output or await anext(stream)
                tokens += output.outputs[0].token_ids
                is_finished = output.finished
    assert tokens == whole.outputs[0].token_ids


async def check_kept_outputs_never_change(subject: Subject) -> None:
    """They are values: nothing that comes later is seen in them."""
    with trio.fail_after(TIMEOUT_S):
        for kind in RequestOutputKind:
            async with subject.engine.generate(subject.request(kind)) as stream:
                kept = [(output, attrs.asdict(output)) async for output in stream]
            for output, as_received in kept:
                assert attrs.asdict(output) == as_received


async def check_several_answers_are_equal_in_all_kinds(subject: Subject) -> None:
    """By index: joined deltas, the last cumulative output, the final one, and requests of one answer with seeds that
    count up. Each index ends once, and the prompt counts once.
    """
    n = 3

    async def read(request: GenerateRequest) -> list[RequestOutput]:
        async with subject.engine.generate(request) as stream:
            return [output async for output in stream]

    with trio.fail_after(TIMEOUT_S):
        deltas = await read(subject.several(n, RequestOutputKind.DELTA))
        cumulative = await read(subject.several(n, RequestOutputKind.CUMULATIVE))
        (final,) = await read(subject.several(n, RequestOutputKind.FINAL_ONLY))
        alone = [
            (await read(subject.several(1, RequestOutputKind.FINAL_ONLY, seed=1 + index)))[0] for index in range(n)
        ]
    for outputs in (deltas, cumulative, [final]):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].num_generated_tokens == sum(len(choice.token_ids) for choice in final.outputs)
        for output in outputs:
            indices = [choice.index for choice in output.outputs]
            assert indices == sorted(set(indices))
            assert len(output.prompt_token_ids) == len(alone[0].prompt_token_ids)
    for index in range(n):
        parts = [choice for output in deltas for choice in output.outputs if choice.index == index]
        assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        one, last, only = final.outputs[index], cumulative[-1].outputs[index], alone[index].outputs[0]
        assert "".join(part.text for part in parts) == one.text == last.text == only.text
        assert sum((part.token_ids for part in parts), ()) == one.token_ids == last.token_ids == only.token_ids
        assert parts[-1].finish_reason == one.finish_reason == last.finish_reason == only.finish_reason


async def check_how_many_answers_may_be_asked_for(subject: Subject) -> None:
    """Greedy ones would all be equal."""
    for wrong in ({"n": 0}, {"n": 100_000}, {"n": 2, "temperature": 0.0}):
        sampling = attrs.evolve(subject.sampling, **wrong)
        param: str | None = None
        with trio.fail_after(TIMEOUT_S):
            try:
                async with subject.engine.generate(GenerateRequest(subject.prompt, sampling)):
                    raise AssertionError("A request that cannot work was accepted.")
            except RequestError as error:
                param = error.param
        assert param == "n"


async def check_leaving_and_abort_end_all_answers(subject: Subject) -> None:
    """With one ending for each."""
    engine = subject.endless_engine
    with trio.fail_after(TIMEOUT_S):
        async with engine.generate(subject.several(3, RequestOutputKind.DELTA, is_endless=True)) as stream:
            await anext(stream)
        await _until_idle(engine)
        async with engine.generate(subject.several(3, RequestOutputKind.DELTA, is_endless=True)) as stream:
            outputs = [await anext(stream)]
            engine.abort("several")
            outputs += [output async for output in stream]
        await _until_idle(engine)
    endings = [(each.index, each.finish_reason) for output in outputs for each in output.outputs if each.finish_reason]
    assert sorted(endings) == [(index, FinishReason.ABORT) for index in range(3)]
    assert outputs[-1].finished


async def check_a_deadline_ends_its_request_only(subject: Subject) -> None:
    """With an error of its own, behind what was generated; the engine hears of it."""
    engine = subject.endless_engine
    is_over = False
    with trio.fail_after(TIMEOUT_S):
        async with engine.generate(subject.endless_request()) as other:
            await anext(other)
            limited = attrs.evolve(subject.endless_request(), deadlines=Deadlines(total_s=0.2))
            async with engine.generate(limited) as stream:
                try:
                    async for output in stream:
                        assert not output.finished
                except DeadlineExceededError:
                    is_over = True
            engine.check_health()
        await _until_idle(engine)
    assert is_over


async def check_requests_run_at_once(subject: Subject) -> None:
    """Each of many gets the answer that it gets alone."""
    (alone,) = await subject.outputs(RequestOutputKind.FINAL_ONLY)
    answers: list[RequestOutput] = []

    async def ask() -> None:
        answers.extend(await subject.outputs(RequestOutputKind.FINAL_ONLY))

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
    assert [answer.outputs for answer in answers] == [alone.outputs] * 20


async def check_the_engine_is_healthy_and_tells_its_load(subject: Subject) -> None:
    """A call's reply has its type."""
    with trio.fail_after(TIMEOUT_S):
        for engine in (subject.engine, subject.endless_engine):
            engine.check_health()
            load = await engine.call(GetLoad())
            assert isinstance(load, CoreLoad)
            assert load.free_blocks <= load.total_blocks
            assert engine.model_name
            assert engine.model_config.max_model_len > 0
            assert engine.config is not None
            assert "generate" in engine.get_supported_tasks()
            assert (engine.is_running, engine.is_stopped, engine.errored) == (True, False, False)
            assert engine.dead_error is None
            engine.check_admission()
            engine.check_admission(n=2, num_prompt_tokens=10)
            engine.do_log_stats()


# Operations


async def check_what_sleeps_wakes_up_the_same(subject: Subject) -> None:
    """Requests that come while it sleeps wait; what may sleep and how is checked."""
    engine = subject.engine
    with trio.fail_after(TIMEOUT_S):
        (before,) = await subject.outputs(RequestOutputKind.FINAL_ONLY)
        for level in (1, 2):
            assert not await engine.is_sleeping()
            await engine.sleep(level)
            assert await engine.is_sleeping()
            assert await engine.is_paused()
            engine.check_health()
            await _check_it_waits_for(subject, engine.wake_up)
            assert not await engine.is_sleeping()
            assert not await engine.is_paused()
        await engine.sleep()
        await engine.wake_up(["weights"])
        assert await engine.is_sleeping()
        await engine.wake_up(["kv_cache"])
        assert not await engine.is_sleeping()
        (after,) = await subject.outputs(RequestOutputKind.FINAL_ONLY)
        assert after.outputs == before.outputs
        assert await _param_refused(engine.sleep(3)) == "level"
        assert await _param_refused(engine.sleep(1, mode="quickly")) == "mode"
        assert await _param_refused(engine.pause_generation(mode="quickly")) == "mode"


async def check_new_requests_wait_for_the_end_of_a_pause(subject: Subject) -> None:
    """They are answered as ever then."""
    engine = subject.engine
    with trio.fail_after(TIMEOUT_S):
        assert not await engine.is_paused()
        await engine.pause_generation()
        assert await engine.is_paused()
        assert not await engine.is_sleeping()
        await _check_it_waits_for(subject, engine.resume_generation)
        assert not await engine.is_paused()


async def check_a_pause_ends_or_keeps_what_runs(subject: Subject) -> None:
    """As its mode says: "abort" is the end, and with "keep" a request goes on afterwards."""
    engine = subject.endless_engine
    with trio.fail_after(TIMEOUT_S):
        async with engine.generate(subject.endless_request()) as stream:
            await anext(stream)
            await engine.pause_generation()
            *_, last = [output async for output in stream]
            assert last.outputs[0].finish_reason is FinishReason.ABORT
        await engine.resume_generation()
        async with engine.generate(subject.endless_request()) as stream:
            await anext(stream)
            await engine.pause_generation(mode="keep", clear_cache=False)
            await engine.resume_generation()
            engine.check_health()
            load = await engine.call(GetLoad())
            assert load.running + load.waiting == 1
        await _until_idle(engine)


async def check_caches_can_be_reset(subject: Subject) -> None:
    """While no request holds anything."""
    with trio.fail_after(TIMEOUT_S):
        (before,) = await subject.outputs(RequestOutputKind.FINAL_ONLY)
        await _until_idle(subject.engine)
        assert await subject.engine.reset_prefix_cache() is True
        await subject.engine.reset_mm_cache()
        (after,) = await subject.outputs(RequestOutputKind.FINAL_ONLY)
        assert after.outputs == before.outputs


async def check_adapters_come_and_go(subject: Subject) -> None:
    """They are listed, pinned, and refused once removed."""
    engine = subject.engine
    with trio.fail_after(TIMEOUT_S):
        await engine.add_lora("mine", subject.lora_path)
        assert await engine.list_loras() == (LoRAInfo("mine", subject.lora_path, is_pinned=False),)
        await engine.pin_lora("mine")
        assert await engine.list_loras() == (LoRAInfo("mine", subject.lora_path, is_pinned=True),)
        await engine.remove_lora("mine")
        assert await engine.list_loras() == ()
        await _param_refused(engine.pin_lora("mine"))
        await _param_refused(engine.remove_lora("mine"))


async def check_profiles_begin_and_end(subject: Subject) -> None:
    """One at a time; the end names a file."""
    engine = subject.engine
    with trio.fail_after(TIMEOUT_S):
        await _param_refused(engine.stop_profile())
        await engine.start_profile("mine")
        await _param_refused(engine.start_profile())
        assert await subject.outputs()
        assert await engine.stop_profile()


async def check_methods_that_are_not_marked_cannot_be_called(subject: Subject) -> None:
    """A marked one gets its arguments, and its results are JSON's values."""
    engine = subject.engine
    with trio.fail_after(TIMEOUT_S):
        for method in ("close", "__class__", "no such method"):
            assert await _param_refused(engine.collective_rpc(method)) == "method"
        if subject.rpc_method is not None:
            arguments: dict[str, JsonValue] = {"number": 1, "text": "é", "list": [None, True]}
            for result in await engine.collective_rpc(subject.rpc_method, **arguments):
                assert result == arguments


async def check_new_weights_count_from_the_end_of_their_transfer(subject: Subject) -> None:
    """Not before, and with a version of their own; only once a transfer has begun."""
    engine = subject.engine
    with trio.fail_after(TIMEOUT_S):
        await _param_refused(engine.update_weights(subject.new_weights))
        (before,) = await subject.outputs(RequestOutputKind.FINAL_ONLY)
        await engine.init_weight_transfer()
        await engine.update_weights(subject.new_weights)
        (during,) = await subject.outputs(RequestOutputKind.FINAL_ONLY)
        assert during.outputs == before.outputs
        assert await engine.finish_weight_update("mine") == "mine"
        (after,) = await subject.outputs(RequestOutputKind.FINAL_ONLY)
        if subject.new_weights:
            assert after.outputs != before.outputs
            assert after.weight_version == "mine"


async def _check_it_waits_for(subject: Subject, release: Callable[[], Awaitable[None]]) -> None:
    """A request that is entered now is answered, but not before this."""
    is_released = False
    is_answered_late = False

    async def ask() -> None:
        nonlocal is_answered_late
        async with subject.engine.generate(subject.request()) as stream:
            entered.set()
            assert [output async for output in stream][-1].finished
            is_answered_late = is_released

    async with trio.open_nursery() as nursery:
        entered = trio.Event()
        nursery.start_soon(ask)
        await entered.wait()
        # Had it been computed, its output would be here before the reply.
        await subject.engine.call(GetLoad())
        is_released = True
        await release()
    assert is_answered_late


async def _param_refused(operation: Awaitable[object]) -> str | None:
    """The argument that a `RequestError` names."""
    try:
        result = await operation
    except RequestError as error:
        return error.param
    raise AssertionError(f"It was not refused: {result!r}")


def _check_position(position: PositionLogprobs, num_wanted: int) -> None:
    assert len(position.top) == num_wanted
    for logprob in (position.chosen, *position.top):
        assert math.isfinite(logprob.logprob)
        assert logprob.logprob <= 0
    assert [each.logprob for each in position.top] == sorted((each.logprob for each in position.top), reverse=True)
    for place, each in enumerate(position.top, start=1):
        assert each.rank <= place
        assert (position.chosen.rank < each.rank) == (position.chosen.logprob > each.logprob)
    if position.top and position.chosen.logprob > position.top[-1].logprob:
        assert position.chosen.token_id in [each.token_id for each in position.top]


async def _until_idle(engine: EngineClient) -> None:
    """Until the core has heard of everything that was left."""
    load = await engine.call(GetLoad())
    while load.running or load.waiting:
        await trio.lowlevel.checkpoint()
        load = await engine.call(GetLoad())


CHECKS: tuple[Check, ...] = (
    check_the_kinds_of_output_are_equal,
    check_the_last_output_and_no_other_is_finished,
    check_the_end_stays_the_end,
    check_outputs_know_their_request,
    check_each_token_has_its_log_probabilities,
    check_the_prompts_log_probabilities_come_first_and_whole,
    check_a_prompt_can_be_scored_without_an_answer,
    check_cached_tokens_are_counted_in_every_output,
    check_wrong_parameters_are_refused_on_entering,
    check_leaving_ends_the_request,
    check_an_exception_leaves_the_block_as_itself,
    check_abort_ends_all_requests_of_this_name,
    check_a_cancelled_read_loses_nothing,
    check_kept_outputs_never_change,
    check_several_answers_are_equal_in_all_kinds,
    check_how_many_answers_may_be_asked_for,
    check_leaving_and_abort_end_all_answers,
    check_a_deadline_ends_its_request_only,
    check_requests_run_at_once,
    check_the_engine_is_healthy_and_tells_its_load,
)

OPERATION_CHECKS: tuple[Check, ...] = (
    check_what_sleeps_wakes_up_the_same,
    check_new_requests_wait_for_the_end_of_a_pause,
    check_a_pause_ends_or_keeps_what_runs,
    check_caches_can_be_reset,
    check_adapters_come_and_go,
    check_profiles_begin_and_end,
    check_methods_that_are_not_marked_cannot_be_called,
    check_new_weights_count_from_the_end_of_their_transfer,
)
"""For engines over a core that does more than to answer."""
