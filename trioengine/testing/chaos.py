"""`Traffic`: everything that users of an engine do, at random and at once, each answer checked token by token.

Requests are read, left, cancelled at any await, aborted, given deadlines, extended; operations run beside them. Tokens
are those of a `FakeExecutor`, which only this request's prompt and seed give, so that a token of another request, a
lost or a doubled one is found. What goes on is drawn from a seed.

`python -P -m trioengine.testing.chaos SEED [ABORTS]` is a client process with such traffic. The first line of its input
is an `Attachment` in base64. It exits when its input ends, with status 0 if everything was right.
"""

import base64
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

import attrs
import trio

from trioengine.client.cores import Attachment
from trioengine.client.engine import Engine, attach_engine
from trioengine.client.session import StreamingInput, open_session
from trioengine.errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    UnavailableError,
)
from trioengine.frontend.frontend import PendingCall
from trioengine.testing.fake_executor import generate_alone, pooled_alone
from trioengine.types.messages import CheckIntegrity, CoreLoad, GetLoad, PauseMode, StepOutput
from trioengine.types.output import FinishReason, RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.pooling import EncodeRequest
from trioengine.types.request import Deadlines, GenerateRequest, KVHints

MODULE = "trioengine.testing.chaos"
VOCAB_SIZE = 257
NUM_WORKERS = 6
REAL_SEED = 7
"""Of requests whose answers are known only as they were computed before."""
MAX_IDLE_LOADS = 20
"""Of a core that nobody wants anything of: how many answers may say that it still has requests."""
_LENGTHS = (1, 2, 5, 20, 60)


class Expected(Protocol):
    """The tokens that a prompt is followed by, with this seed."""

    def __call__(self, prompt: Sequence[int], num_tokens: int, seed: int, /) -> Sequence[int]:
        """So many of them."""
        ...


def fake_tokens(prompt: Sequence[int], num_tokens: int, seed: int) -> Sequence[int]:
    """Those of `testing.fake_core`."""
    return generate_alone(prompt, num_tokens, vocab_size=VOCAB_SIZE, seed=seed)


class Ledger:
    """Counts what a front end sends and what it is told of it: every answer asked for must get one `Finished`."""

    def __init__(self, engine: Engine) -> None:
        """Listen at an engine."""
        self.num_added = 0
        self.num_finished = 0
        frontend: Any = engine._frontend  # pyright: ignore[reportPrivateUsage]
        receive, register = frontend.receive, frontend._register

        def count_register(parent: Any, children: Sequence[Any]) -> Any:
            self.num_added += len(children)
            return register(parent, children)

        def count_receive(rank: int, message: Any) -> Any:
            if isinstance(message, StepOutput):
                self.num_finished += len(message.finished)
            return receive(rank, message)

        frontend._register, frontend.receive = count_register, count_receive


class _Answers:
    """What has been read of one request."""

    def __init__(self, request: GenerateRequest, expected: Expected) -> None:
        prompt: Any = request.prompt
        sampling = request.sampling
        assert sampling.seed is not None
        assert sampling.max_tokens is not None
        self._is_delta = sampling.output_kind is RequestOutputKind.DELTA
        self._length = sampling.max_tokens
        self._right = [expected(prompt.token_ids, self._length, sampling.seed + i) for i in range(sampling.n)]
        self._read: list[list[int]] = [[] for _ in range(sampling.n)]
        self.reasons: dict[int, FinishReason] = {}
        self.is_finished = False

    def take(self, output: RequestOutput) -> None:
        """Check an output."""
        assert not self.is_finished, "an output after the last"
        for answer in output.outputs:
            read, right = self._read[answer.index], self._right[answer.index]
            now = [*(read if self._is_delta else ()), *answer.token_ids]
            assert answer.index not in self.reasons or now == read, "tokens after the end"
            assert now[: len(read)] == read, f"tokens were taken back: {read} became {now}"
            assert now == list(right[: len(now)]), f"another request's tokens: {now}, not {right}"
            read[:] = now
            if answer.finish_reason is not None:
                assert self.reasons.setdefault(answer.index, answer.finish_reason) is answer.finish_reason
        self.is_finished = output.finished

    def check_end(self, *, may_be_aborted: bool) -> None:
        """The stream has ended: there is nothing more to come."""
        assert self.is_finished, "the stream ended without its last output"
        for index, read in enumerate(self._read):
            reason = self.reasons[index]
            if reason is FinishReason.ABORT:
                assert may_be_aborted, f"aborted by nobody after {len(read)} tokens"
            else:
                assert reason is FinishReason.LENGTH
                assert len(read) == self._length, f"{len(read)} of {self._length} tokens"


@attrs.define(eq=False)
class Traffic:
    """Traffic of one client.

    `is_excused` says of an error of the engine whether it had a reason to come; everything else is in `faults`.
    """

    engine: Engine
    seed: str
    expected: Expected = fake_tokens
    prompts: Sequence[Sequence[int]] | None = None
    """Only these, where others' tokens are not known."""
    has_aborts: bool = False
    """Somebody ends all requests now and then."""
    is_excused: Callable[[Exception], bool] = lambda _: False
    is_stopping: bool = False
    faults: list[str] = attrs.field(factory=list[str])
    counts: Counter[str] = attrs.field(factory=Counter[str])
    in_progress: dict[int, str] = attrs.field(factory=dict[int, str])
    ledger: Ledger = attrs.field(init=False)
    _number: int = 0

    def __attrs_post_init__(self) -> None:
        """Listen from the beginning."""
        self.ledger = Ledger(self.engine)

    async def run(self, num_workers: int = NUM_WORKERS) -> None:
        """Until `is_stopping`, and what was begun has ended."""
        async with trio.open_nursery() as nursery:
            for number in range(num_workers):
                nursery.start_soon(self._work, random.Random(f"{self.seed}-{number}"))

    async def flood(self, chance: random.Random, num_requests: int) -> None:
        """So many requests at once. Those that find no place are told so."""
        async with trio.open_nursery() as nursery:
            for _ in range(num_requests):
                nursery.start_soon(self._do, self.read, random.Random(chance.random()))

    async def check_idle(self) -> None:
        """Nobody wants anything of the cores any more, and no pause is on: neither do the books of either side.

        Raises:
            AssertionError: something is left.
        """
        frontend: Any = self.engine._frontend  # pyright: ignore[reportPrivateUsage]
        assert frontend.num_open_requests == 0
        for core in range(frontend.num_cores):
            num_asked = 0
            while (load := await load_of(self.engine, core)).running or load.waiting:
                num_asked += 1
                assert num_asked < MAX_IDLE_LOADS, f"core {core} still has {load}"
        await self.check_books()
        await self.engine.call(CheckIntegrity())

    async def check_books(self) -> None:
        """This client's own tables are empty once the cores have answered."""
        frontend: Any = self.engine._frontend  # pyright: ignore[reportPrivateUsage]
        await self.engine.call(GetLoad())
        assert frontend.num_open_requests == frontend.num_queued_requests == frontend.num_reserved_slots == 0
        assert not frontend._parents_by_external_id
        assert not frontend._calls
        assert not frontend.has_aborts
        assert frontend.next_deadline_s is None
        assert self.ledger.num_added == self.ledger.num_finished, vars(self.ledger)

    async def check_answers(self) -> None:
        """Each core answers, and rightly."""
        for core in range(self.engine._frontend.num_cores):  # pyright: ignore[reportPrivateUsage]
            await self.read(random.Random(core), data_parallel_rank=core)

    # What users do

    async def read(self, chance: random.Random, **changes: Any) -> None:
        """To the end."""
        request = self._request(chance, **changes)
        await self._read(request, chance)

    async def leave(self, chance: random.Random) -> None:
        """Read a few outputs and go."""
        request = self._request(chance)
        answers = _Answers(request, self.expected)
        num_outputs = chance.randrange(4)
        async with self.engine.generate(request) as stream:
            for _ in range(num_outputs):
                async for output in stream:
                    answers.take(output)
                    break

    async def cancel(self, chance: random.Random) -> None:
        """Cancelled at any await, perhaps twice."""
        action = chance.choice((self.read, self.extend, self.leave))
        with trio.CancelScope() as outer, trio.CancelScope() as inner:
            inner.deadline = trio.current_time() + chance.choice((0.0, 0.002, 0.01, 0.04))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_after, chance.choice((outer, inner)), chance.randrange(40))
                await action(chance)
                nursery.cancel_scope.cancel()

    async def abort(self, chance: random.Random) -> None:
        """By the caller's name, of which there may be two; and the name is used again at once."""
        name = f"{self.seed}-{chance.random()}"
        num_checkpoints = chance.randrange(60)
        async with trio.open_nursery() as nursery:
            for _ in range(chance.choice((1, 2))):
                request = self._request(chance, request_id=name)
                nursery.start_soon(self._read, request, random.Random(chance.random()), True)
            for _ in range(num_checkpoints):
                await trio.lowlevel.checkpoint()
            self.engine.abort(name)
            self.engine.abort(name)
            again = self._request(chance, request_id=name)
            await self._read(again, chance)
        self.engine.abort(name)

    async def expire(self, chance: random.Random) -> None:
        """With a deadline that may pass."""
        limit_s = chance.choice((0.001, 0.01, 0.05))
        field = chance.choice(("total_s", "queue_s", "first_token_s", "inter_token_s"))
        request = self._request(chance, deadlines=Deadlines(**{field: limit_s}))
        try:
            await self._read(request, chance)
        except DeadlineExceededError:
            self.counts["expired"] += 1

    async def extend(self, chance: random.Random) -> None:
        """A session whose prompt grows."""
        if self.prompts is not None:
            return await self.read(chance)
        first = self._request(chance, n=1, output_kind=RequestOutputKind.DELTA, max_tokens=5)
        inputs = [[chance.randrange(256) for _ in range(chance.randrange(1, 5))] for _ in range(chance.randrange(1, 4))]
        assert first.sampling.seed is not None
        async with open_session(self.engine, first) as session:
            for new in inputs:
                await session.send(StreamingInput(new))  # pyright: ignore[reportArgumentType]
            session.finish()
            read: list[int] = []
            async for output in session:
                read.extend(output.outputs[0].token_ids)
                right = self.expected(output.prompt_token_ids, 5, first.sampling.seed)
                assert read == list(right[: len(read)]), f"{read}, not {right}, after {output.prompt_token_ids}"
                if output.finished:
                    if output.outputs[0].finish_reason is FinishReason.ABORT:
                        assert self.has_aborts, "aborted by nobody"
                    else:
                        assert len(read) == 5, f"the answer ended after {read}"
                    read = []
        return None

    async def embed(self, chance: random.Random) -> None:
        """Vectors, half of which nobody waits for."""
        if self.prompts is not None or self.engine.model_config.pooling is None:
            return await self.read(chance)
        prompt = [chance.randrange(256) for _ in range(chance.choice((1, 5, 30)))]
        with trio.move_on_after(chance.choice((0.0, 0.005, math.inf))):
            try:
                output = await self.engine.encode(EncodeRequest(prompt))  # pyright: ignore[reportArgumentType]
            except EngineGenerateError:
                assert self.has_aborts, "aborted by nobody"
                return None
            assert output.data.tolist() == pooled_alone(prompt).tolist(), "another request's vector"
        return None

    async def call(self, chance: random.Random) -> None:
        """An operation on all cores."""
        match chance.choice(("load", "integrity", "echo", "reset")):
            case "load":
                await self.engine.call(GetLoad())
            case "integrity":
                await self.engine.call(CheckIntegrity())
            case "echo" if self.prompts is None:
                number = chance.randrange(1000)
                assert set(map(str, await self.engine.collective_rpc("echo", x=number))) == {str({"x": number})}
            case _:
                await self.engine.reset_prefix_cache()

    async def pause(self, chance: random.Random) -> None:
        """All cores, for a moment, with or without what they remember."""
        modes = [PauseMode.KEEP, PauseMode.WAIT]
        if self.has_aborts:
            modes.append(PauseMode.ABORT)
        if chance.random() < 0.3:
            await self.engine.sleep(chance.choice((1, 2)) if self.prompts is None else 1, chance.choice(modes))
            await trio.sleep(chance.choice((0.0, 0.005)))
            await self.engine.wake_up()
        else:
            await self.engine.pause_generation(mode=chance.choice(modes), clear_cache=chance.random() < 0.5)
            await trio.sleep(chance.choice((0.0, 0.005)))
            await self.engine.resume_generation()

    async def resume(self) -> None:
        """End what a client that was cancelled or killed has paused, which is felt by all."""
        await self.engine.resume_generation()
        await self.engine.wake_up()

    # How

    async def _work(self, chance: random.Random) -> None:
        actions = [self.read] * 4 + [self.leave] * 2 + [self.cancel] * 4 + [self.abort] * 2
        actions += [self.expire, self.extend, self.embed, self.embed, self.call, self.pause]
        while not self.is_stopping:
            await self._do(chance.choice(actions), chance)

    async def _do(self, action: Callable[[random.Random], Awaitable[None]], chance: random.Random) -> None:
        self._number += 1
        number, name = self._number, getattr(action, "__name__", "?")
        self.in_progress[number] = name
        try:
            await action(chance)
            self.counts[name] += 1
        except (Exception, ExceptionGroup) as error:  # A border: faults are reported together.
            await self._note(name, error)
        finally:
            del self.in_progress[number]

    async def _note(self, name: str, error: Exception) -> None:
        for leaf in _leaves(error):
            if isinstance(leaf, UnavailableError):
                self.counts["refused"] += 1
            elif self.is_excused(leaf):
                self.counts[f"excused {type(leaf).__name__}"] += 1
            else:
                self.faults.append(f"{self.seed} {name}: {type(leaf).__name__}: {leaf}")
        await trio.sleep(0.002)  # The engine may be gone; nobody hurries then.

    async def _read(self, request: GenerateRequest, chance: random.Random, may_be_aborted: bool = False) -> None:
        answers = _Answers(request, self.expected)
        nap_s = chance.choice((None, None, None, 0.0, 0.01))
        async with self.engine.generate(request) as stream:
            try:
                async for output in stream:
                    answers.take(output)
                    if nap_s is not None:
                        await trio.sleep(nap_s)
            except EngineDeadError as error:
                if "no sign of life" in str(error):
                    raise AssertionError("It failed because a core was stopped for a while.") from error
                raise
        answers.check_end(may_be_aborted=may_be_aborted or self.has_aborts)

    def _request(self, chance: random.Random, **changes: Any) -> GenerateRequest:
        """One whose prompt and seed nobody else has, but whose beginning many share."""
        if self.prompts is not None:
            prompt, seed = list(chance.choice(self.prompts)), REAL_SEED
        else:
            own = [chance.randrange(256) for _ in range(chance.choice((1, 3, 9)))]
            prompt, seed = [*range(chance.choice((0, 4, 12, 40))), *own], chance.randrange(1 << 30)
        kind = chance.choice(list(RequestOutputKind))
        sampling = SamplingParams(
            n=chance.choice((1, 1, 1, 2, 3)) if self.prompts is None else 1,
            seed=seed,
            max_tokens=chance.choice(_LENGTHS),
            ignore_eos=True,
            output_kind=kind,
            stream_interval=None if kind is RequestOutputKind.FINAL_ONLY else chance.choice((None, None, 3)),
        )
        names = {field.name for field in attrs.fields(SamplingParams)}
        of_sampling = {name: value for name, value in changes.items() if name in names}
        others: dict[str, Any] = {
            "cache_salt": chance.choice((None, None, "salt")),
            "priority": chance.randrange(-1, 2),
            "kv_hints": KVHints(chance.random() < 0.8, chance.random() < 0.8),
        } | {name: value for name, value in changes.items() if name not in names}
        return GenerateRequest(prompt, attrs.evolve(sampling, **of_sampling), **others)


async def load_of(engine: Engine, core: int) -> CoreLoad:
    """What one core has to do."""
    link, frontend = engine._link, engine._frontend  # pyright: ignore[reportPrivateUsage]
    loads: list[CoreLoad] = []
    errors: list[Exception] = []
    has_come = trio.Event()

    def take(load: CoreLoad) -> None:
        loads.append(load)
        has_come.set()

    def fail(error: Exception) -> None:
        errors.append(error)
        has_come.set()

    link.send(core, frontend.add_call(GetLoad(), PendingCall(GetLoad, take, fail), core))
    await has_come.wait()
    for error in errors:
        raise error
    return loads[0]


def stall(duration_s: float) -> None:
    """Block this process's event loop."""
    time.sleep(duration_s)


def _leaves(error: Exception) -> Sequence[Exception]:
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [leaf for each in cast("ExceptionGroup[Exception]", error).exceptions for leaf in _leaves(each)]


async def _cancel_after(scope: trio.CancelScope, num_checkpoints: int) -> None:
    for _ in range(num_checkpoints):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def _run_client(seed: str, has_aborts: bool) -> int:
    stdin = trio.lowlevel.FdStream(0)
    data = b""
    while not data.endswith(b"\n"):
        data += await stdin.receive_some()
    attachment = Attachment.from_bytes(base64.b64decode(data))

    def is_excused(error: Exception) -> bool:
        """The cores may be gone, or stopped, before this client is told to end."""
        return isinstance(error, (EngineDeadError, EngineClosedError))

    async with attach_engine(attachment) as engine:
        traffic = Traffic(engine, seed, has_aborts=has_aborts, is_excused=is_excused)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run)
            print("started", flush=True)
            await stdin.receive_some()
            traffic.is_stopping = True
        if engine.is_running:
            await traffic.check_books()
    for fault in traffic.faults:
        print(fault, file=sys.stderr)
    return 1 if traffic.faults else 0


if __name__ == "__main__":
    sys.exit(trio.run(_run_client, sys.argv[1], len(sys.argv) > 2))
