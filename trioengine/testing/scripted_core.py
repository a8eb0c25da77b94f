"""An engine core without a model: it speaks the whole protocol and "generates" each request's own prompt, in a loop.

For benchmarks of everything but the model, and for tests of the client: the output is known in advance and costs next
to nothing. `python -P -m trioengine.testing.scripted_core FD` is a real core process around it; in tests under a mock
clock it runs in memory.
"""

import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import attrs

from trioengine.errors import DeadlineExceededError
from trioengine.runtime.core_process import BuiltCore, ReportProgress, main
from trioengine.runtime.launch import CoreLaunch
from trioengine.types.codec import encode_reply, error_to_data
from trioengine.types.messages import (
    AbortRequests,
    CallRequest,
    CheckIntegrity,
    CoreLoad,
    EncodeCoreRequest,
    EngineCoreRequest,
    Finished,
    GetLoad,
    LogprobColumns,
    ModelFacts,
    Ready,
    Reply,
    SchedulerStats,
    StartWave,
    StepOutput,
    Stop,
    ToCore,
    unpack_int32,
)
from trioengine.types.output import FinishReason

MAX_MODEL_LEN = 1 << 20
VOCAB_SIZE = 49152
TOTAL_BLOCKS = 1 << 16


@attrs.frozen(kw_only=True)
class Script:
    """How a scripted core behaves."""

    pace_s: float = 0.0
    """Time from one step to the next; 0 is as fast as the front end takes them."""
    start_error: str | None = None
    """The core fails to start, saying this."""
    fatal_token: int | None = None
    """A prompt with this token is the core's death in the next step."""
    hang_token: int | None = None
    """A step with this token never ends."""
    max_num_seqs: int = 1 << 31
    """Requests that run at once; others wait."""
    exit_status: int | None = None
    """The process exits with this while it loads, without a word."""
    load_s: float = 0.0
    """How long the core loads."""
    ignores_terminate: bool = False
    """SIGTERM does not end the process."""
    clock_tokens: tuple[int, ...] = ()
    """Every token of a step is the one of these that tells when the step ended: the next one each `clock_tick_s`, in a
    circle. A reader who knows them knows how long a token was on its way."""
    clock_tick_s: float = 0.001
    num_cached_tokens: int = 0
    """Tokens of each prompt, but never all of it, that are said to have been cached."""

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> "Script":
        """From `CoreLaunch.options`, which are strings."""
        fatal_token, hang_token = options.get("fatal_token"), options.get("hang_token")
        exit_status = options.get("exit_status")
        clock_tokens = options.get("clock_tokens")
        return cls(
            pace_s=float(options.get("pace_s", "0")),
            start_error=options.get("start_error"),
            fatal_token=None if fatal_token is None else int(fatal_token),
            hang_token=None if hang_token is None else int(hang_token),
            max_num_seqs=int(options.get("max_num_seqs", 1 << 31)),
            exit_status=None if exit_status is None else int(exit_status),
            load_s=float(options.get("load_s", "0")),
            ignores_terminate="ignores_terminate" in options,
            clock_tokens=tuple(map(int, clock_tokens.split(","))) if clock_tokens else (),
            clock_tick_s=float(options.get("clock_tick_s", "0.001")),
            num_cached_tokens=int(options.get("num_cached_tokens", "0")),
        )


@attrs.define
class _Sequence:
    prompt: memoryview
    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    arrived_s: float
    queue_timeout_s: float | None
    num_generated: int = 0
    is_started: bool = False


@attrs.define
class _Client:
    sequences: dict[int, _Sequence] = attrs.field(factory=dict[int, _Sequence])
    finished: list[Finished] = attrs.field(factory=list[Finished])
    output: StepOutput | None = None
    num_outputs: int = 0


class _LogprobColumns:
    """Grows entry by entry. The token is said to be the likeliest; the likeliest are ids from 0 on, itself left out."""

    def __init__(self) -> None:
        self._slots, self._counts, self._ranks, self._token_ids = (array("i") for _ in range(4))
        self._logprobs = array("f")

    def add(self, slot: int, token_id: int, num_wanted: int) -> None:
        num_wanted = VOCAB_SIZE if num_wanted == -1 else num_wanted
        others = [other for other in range(num_wanted) if other != token_id]
        top = [token_id, *others][:num_wanted]
        self._slots.append(slot)
        self._counts.append(1 + num_wanted)
        self._ranks.append(1)
        self._token_ids.extend([token_id, *top])
        self._logprobs.extend([-1.0, *(-1.0 - place for place in range(num_wanted))])

    def take(self) -> LogprobColumns | None:
        if not self._slots:
            return None
        columns = (self._slots, self._counts, self._ranks, self._token_ids, self._logprobs)
        return LogprobColumns(*(column.tobytes() for column in columns))


class ScriptedCore:
    """One token for each request in each step, taken from its prompt in order and from the start again.

    It does not run ahead of its front ends: while an output waits to be taken there is no work for that one, so that a
    slow front end is measured by its speed and not by how much is merged.
    """

    def __init__(
        self,
        script: Script,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._script = script
        self._clock = clock
        self._sleep = sleep
        self._clients: dict[int, _Client] = {}
        self._num_steps = 0
        self._next_step_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` would generate something."""
        return any(state.sequences and state.output is None for state in self._clients.values())

    def handle(self, client: int, message: ToCore) -> Reply | None:
        """Take in a client's message; the reply, to a `CallRequest`."""
        state = self._clients.setdefault(client, _Client())
        match message:
            case EngineCoreRequest():
                prompt = unpack_int32(message.prompt_token_ids)
                assert message.slot not in state.sequences, "the front end gave a slot twice"
                sampling = message.sampling
                assert sampling.max_tokens is not None, "the front end sets it"
                state.sequences[message.slot] = _Sequence(
                    prompt,
                    sampling.max_tokens,
                    sampling.logprobs,
                    sampling.prompt_logprobs,
                    self._clock(),
                    message.queue_timeout_s,
                )
            case EncodeCoreRequest(slot):
                error = error_to_data(NotImplementedError("a script has no vectors"))
                state.finished.append(Finished(slot, FinishReason.ABORT, error=error))
            case AbortRequests(slots):
                for slot in slots:
                    if state.sequences.pop(slot, None) is not None:
                        state.finished.append(Finished(slot, FinishReason.ABORT))
            case CallRequest(call_id, GetLoad()):
                stats = self._stats()
                load = CoreLoad(stats.running, stats.waiting, TOTAL_BLOCKS - stats.running, TOTAL_BLOCKS)
                return Reply(call_id, encode_reply(GetLoad, load))
            case CallRequest(call_id, CheckIntegrity()):
                return Reply(call_id, encode_reply(CheckIntegrity, None))
            case CallRequest(call_id, call):
                return Reply(call_id, error=error_to_data(NotImplementedError(type(call).__name__)))
            case StartWave():
                raise TypeError("This core has said that it needs none.")
            case Stop():
                raise TypeError("Stop ends the loop around the core.")
        return None

    def step(self) -> None:
        """Generate one token for each request of clients without a waiting output, after waiting until it is time."""
        if self._script.pace_s:
            now = self._clock()
            if now < self._next_step_s:
                self._sleep(self._next_step_s - now)
            self._next_step_s = max(now, self._next_step_s) + self._script.pace_s
        self._drop_overdue()
        self._num_steps += 1
        num_left = self._script.max_num_seqs
        for state in self._clients.values():
            num_running = min(num_left, len(state.sequences))
            num_left -= num_running
            if state.sequences and state.output is None:
                self._step_of(state, num_running)

    def _step_of(self, state: _Client, num_running: int) -> None:
        rows, tokens, scheduled = array("i"), array("i"), array("i")
        ended: list[int] = []
        logprobs, prompt_logprobs, cached_tokens = _LogprobColumns(), _LogprobColumns(), array("i")
        for slot in islice(state.sequences, num_running):
            sequence = state.sequences[slot]
            token = sequence.prompt[sequence.num_generated % len(sequence.prompt)]
            if token == self._script.fatal_token:
                raise RuntimeError("The script says that this token is the end.")
            while token == self._script.hang_token:
                self._sleep(1.0)
            if not sequence.is_started:
                sequence.is_started = True
                scheduled.extend((slot, round((self._clock() - sequence.arrived_s) * 1e6)))
                self._say_of_prompt(slot, sequence, prompt_logprobs, cached_tokens)
            if sequence.max_tokens:
                rows.append(slot)
                tokens.append(token)
                sequence.num_generated += 1
                if sequence.logprobs is not None:
                    logprobs.add(slot, token, sequence.logprobs)
            if sequence.num_generated == sequence.max_tokens:
                ended.append(slot)
        if self._script.clock_tokens:
            tokens = array("i", [self._token_of_now()]) * len(tokens)
        for slot in ended:
            del state.sequences[slot]
            state.finished.append(Finished(slot, FinishReason.LENGTH))
        self._set_output(
            state,
            slots=rows.tobytes(),
            tokens=tokens.tobytes(),
            logprobs=logprobs.take(),
            prompt_logprobs=prompt_logprobs.take(),
            cached_tokens=cached_tokens.tobytes(),
            scheduled=scheduled.tobytes(),
        )

    def _drop_overdue(self) -> None:
        if self._num_sequences <= self._script.max_num_seqs:
            return
        now = self._clock()
        for state in self._clients.values():
            for slot, sequence in list(state.sequences.items()):
                timeout_s = sequence.queue_timeout_s
                if timeout_s is not None and not sequence.is_started and now - sequence.arrived_s >= timeout_s:
                    del state.sequences[slot]
                    error = error_to_data(DeadlineExceededError("The script has not begun it in time."))
                    state.finished.append(Finished(slot, FinishReason.ABORT, error=error))

    @property
    def _num_sequences(self) -> int:
        return sum(len(state.sequences) for state in self._clients.values())

    def _stats(self) -> SchedulerStats:
        running = min(self._num_sequences, self._script.max_num_seqs)
        return SchedulerStats(
            running=running,
            waiting=self._num_sequences - running,
            kv_cache_usage=running / TOTAL_BLOCKS,
            num_steps=self._num_steps,
            num_preemptions=0,
            num_prefix_cache_queries=0,
            num_prefix_cache_hits=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
        )

    def _say_of_prompt(
        self, slot: int, sequence: _Sequence, logprobs: _LogprobColumns, cached_tokens: "array[int]"
    ) -> None:
        if sequence.prompt_logprobs is not None:
            for token in sequence.prompt[1:]:
                logprobs.add(slot, token, sequence.prompt_logprobs)
        num_cached_tokens = min(self._script.num_cached_tokens, len(sequence.prompt) - 1)
        if num_cached_tokens:
            cached_tokens.extend((slot, num_cached_tokens))

    def poll(self) -> None:
        """Nothing becomes ready elsewhere."""

    def idle_timeout_s(self) -> float | None:
        """For ever: whoever waits, waits for a step."""
        return None

    def drop_client(self, client: int) -> None:
        """A client is gone, with its requests."""
        self._clients.pop(client, None)

    def take_replies(self, client: int) -> Sequence[Reply]:
        """None: all come at once."""
        return ()

    def take_output(self, client: int) -> StepOutput | None:
        """The client's output that waits, if one does."""
        state = self._clients.get(client)
        if state is None:
            return None
        if state.output is None and state.finished:
            self._set_output(state)
        elif state.output is not None and state.finished:
            # Nothing may be left behind: without work the loop waits for messages.
            finished, state.finished = (*state.output.finished, *state.finished), []
            state.output = attrs.evolve(state.output, finished=finished, stats=self._stats())
        output, state.output = state.output, None
        return output

    def take_stats(self, client: int) -> StepOutput | None:
        """None: its numbers come with outputs."""
        return None

    def _token_of_now(self) -> int:
        clock_tokens = self._script.clock_tokens
        return clock_tokens[int(self._clock() / self._script.clock_tick_s) % len(clock_tokens)]

    def _set_output(
        self,
        state: _Client,
        slots: bytes = b"",
        tokens: bytes = b"",
        logprobs: LogprobColumns | None = None,
        prompt_logprobs: LogprobColumns | None = None,
        cached_tokens: bytes = b"",
        scheduled: bytes = b"",
    ) -> None:
        finished, state.finished = tuple(state.finished), []
        state.output = StepOutput(
            state.num_outputs,
            self._num_steps,
            self._clock(),
            slots=slots,
            tokens=tokens,
            finished=finished,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached_tokens,
            scheduled=scheduled,
            stats=self._stats(),
        )
        state.num_outputs += 1


def scripted_ready() -> Ready:
    """What a scripted core says when it is ready: no end tokens, so that every request has its full length."""
    return Ready(ModelFacts(MAX_MODEL_LEN, VOCAB_SIZE, ()), TOTAL_BLOCKS, 16, {})


def build_scripted_core(launch: CoreLaunch, progress: ReportProgress) -> BuiltCore:
    """A scripted core for `runtime.core_process.main`."""
    script = Script.from_options(launch.options)
    progress("pretending", 0.5)
    time.sleep(script.load_s)
    if script.ignores_terminate:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.exit_status is not None:
        os._exit(script.exit_status)
    if script.start_error is not None:
        raise RuntimeError(script.start_error)
    return BuiltCore(ScriptedCore(script), scripted_ready(), close=lambda: None)


if __name__ == "__main__":
    sys.exit(main(build_scripted_core))
