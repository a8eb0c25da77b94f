"""`open_session`: a request whose prompt grows. Each input is appended, and an answer to all so far is generated.

Built over `generate` of any `EngineClient`: the prefix cache keeps what was computed before, so that an input costs
little more than its own tokens.
"""

import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from trioengine.client.interface import EngineClient, OutputStream
from trioengine.errors import RequestError
from trioengine.types.output import RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import ChatPrompt, GenerateRequest, Prompt, TextPrompt, TokensPrompt, prompt_of


def _input_prompt(value: Prompt | str | Sequence[int]) -> TextPrompt | TokensPrompt:
    prompt = prompt_of(value)
    if isinstance(prompt, ChatPrompt):
        raise RequestError("What is appended to a session is a text or token ids, no messages.", param="prompt")
    return prompt


@attrs.frozen
class StreamingInput:
    """More of a prompt. A string is a `TextPrompt`, a list of integers a `TokensPrompt`; none goes on where it is.

    Raises:
        RequestError: it is a chat.
    """

    prompt: TextPrompt | TokensPrompt = attrs.field(default=TokensPrompt(()), converter=_input_prompt)
    sampling: SamplingParams | None = None
    """For the answer to this input; None is as the session's request says."""


class InputSession:
    """Inputs go in by `send`, outputs come by `async for`, from the same task or two.

    Answers come one after the other, in the order of their inputs, each with `finished` in its last output. An output's
    `prompt_token_ids` are all tokens before its answer: prompt, earlier inputs and answers.
    """

    def __init__(self, engine: EngineClient, request: GenerateRequest) -> None:
        self._engine = engine
        # One name, so that `abort` finds each answer, and one core, whose cache has what came before.
        name = request.request_id or f"session-{secrets.token_hex(8)}"
        self._request = attrs.evolve(request, request_id=name, session_id=request.session_id or name[:256])
        self._before: tuple[int, ...] | None = None
        """All tokens before the answer that came last; None before the first input."""
        self._answer: list[int] = []
        self._is_delta = False
        self._inputs: deque[StreamingInput] = deque()
        self._stream: OutputStream | None = None
        self._is_starting = False
        self._is_finished = False
        self._changed = trio.Event()

    @property
    def request_id(self) -> str:
        """The name of every answer."""
        assert self._request.request_id is not None
        return self._request.request_id

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far: of prompt, inputs and answers as far as they were read."""
        return (*(self._before or ()), *self._answer)

    async def send(self, new_input: StreamingInput) -> None:
        """Append to the prompt and ask for an answer. While another answer is under way, it waits for its end.

        Raises:
            RequestError, UnavailableError, EngineDeadError: as entering `generate`, where the answer can start at once;
                otherwise reading raises it. The input is dropped; the session goes on.
            RuntimeError: after `finish`.

        Cancelled, it has sent nothing.
        """
        if self._is_finished:
            raise RuntimeError("The session was finished; open another one.")
        if self._stream is not None or self._is_starting or self._inputs:
            await trio.lowlevel.checkpoint()
            self._inputs.append(new_input)
        else:
            await self._start(new_input)
        self._changed.set()

    def finish(self) -> None:
        """No input follows. Reading ends after the answers to what was sent."""
        self._is_finished = True
        self._changed.set()

    def __aiter__(self) -> "InputSession":
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. One task reads.

        Raises:
            EngineGenerateError, DeadlineExceededError: this answer failed; another input may follow.
            EngineDeadError: the engine died.
        """
        while self._stream is None:
            if self._is_starting or (not self._inputs and not self._is_finished):
                await self._changed.wait()
                self._changed = trio.Event()
            elif self._inputs:
                new_input = self._inputs.popleft()
                try:
                    await self._start(new_input)
                except trio.Cancelled:
                    self._inputs.appendleft(new_input)
                    raise
            else:
                raise StopAsyncIteration
        stream = self._stream
        try:
            output = await anext(stream)
        except Exception:
            await self.leave()
            raise
        self._before = output.prompt_token_ids
        if not self._is_delta:
            self._answer.clear()
        self._answer.extend(output.outputs[0].token_ids)
        if output.finished:
            await self.leave()
        return output

    async def leave(self) -> None:
        """End the answer that is under way. Does not wait; `open_session` calls it."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.__aexit__(None, None, None)

    async def _start(self, new_input: StreamingInput) -> None:
        """Begin the answer to an input."""
        self._is_starting = True
        try:
            token_ids = await self._tokens_with(new_input.prompt)
            sampling = self._request.sampling if new_input.sampling is None else new_input.sampling
            if sampling.n != 1:
                raise RequestError("A session goes on after one answer, so n must be 1.", param="n")
            request = attrs.evolve(self._request, prompt=TokensPrompt(token_ids), sampling=sampling)
            stream = self._engine.generate(request)
            await stream.__aenter__()
        finally:
            self._is_starting = False
            self._changed.set()
        # Nothing awaits from where the stream was entered to here, so it is either kept or was never there.
        self._stream = stream
        self._before, self._answer = token_ids, []
        self._is_delta = sampling.output_kind is RequestOutputKind.DELTA

    async def _tokens_with(self, prompt: TextPrompt | TokensPrompt) -> tuple[int, ...]:
        """All tokens so far and those of this input."""
        before = self.token_ids
        if self._before is None:
            before = await self._tokens_of(self._request.prompt, is_first=True)
        return (*before, *await self._tokens_of(prompt, is_first=not before))

    async def _tokens_of(self, prompt: Prompt, *, is_first: bool) -> tuple[int, ...]:
        """What a text gets in front (BOS) stands at the beginning only."""
        kwargs: dict[str, object] = {"add_special_tokens": False}
        if is_first:
            # What cuts a prompt is for all tokens together, and left to `generate`.
            given = (self._request.tokenization_kwargs or {}).get("add_special_tokens")
            kwargs = {"add_special_tokens": given}
        if isinstance(prompt, TokensPrompt):
            return tuple(prompt.token_ids)
        if isinstance(prompt, TextPrompt) and not prompt.text:
            return ()
        render = self._engine.renderer.render
        if self._engine.input_processor.is_long(GenerateRequest(prompt)):
            return tuple((await trio.to_thread.run_sync(render, prompt, kwargs, abandon_on_cancel=True)).token_ids)
        return tuple(render(prompt, kwargs).token_ids)


@asynccontextmanager
async def open_session(engine: EngineClient, request: GenerateRequest) -> AsyncGenerator[InputSession, None]:
    """A session for the length of the block. Leaving it aborts what is unfinished, without awaiting.

    Args:
        request: its prompt stands before all inputs; nothing is computed before the first. Its other fields are those
            of every answer, of which its deadlines count each for itself.
    """
    session = InputSession(engine, request)
    try:
        yield session
    finally:
        await session.leave()
