"""`LLM`: the engine as a blocking object in this process, for scripts and notebooks. No event loop is involved."""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, cast

import attrs

from trioengine.checkpoint.locate import resolve_model
from trioengine.config import env
from trioengine.config.engine import EngineConfig
from trioengine.errors import TrioEngineError
from trioengine.frontend.frontend import Frontend
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.pending_output import new_pending_output, output_builder
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.transport.zmq_blocking import poll
from trioengine.types.messages import ToCore
from trioengine.types.output import RequestOutput
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import EncodePrompt, EncodeRequest, PoolingOutput, PoolingParams, PoolingTask
from trioengine.types.request import ChatMessage, ChatPrompt, GenerateRequest, Prompt

_CLIENT = 0


class LLM:
    """A model in this process. It holds the model's memory until `close`, or the end of its `with` block.

    Args:
        model: as `EngineConfig.model`; the default model when None.
        options: the other fields of `EngineConfig`.

    Raises:
        ConfigError, CheckpointError, EngineStartError: the engine cannot start.
    """

    def __init__(self, model: str | None = None, **options: object) -> None:
        from trioengine.runtime.build import build_engine_core  # Imports torch.

        config = EngineConfig(model=model, **cast(dict[str, Any], options))
        location = resolve_model(config.model, cache_dir=env.cache_dir())
        self._tokenizer = load_tokenizer(location)
        draft_location = (
            None if config.draft_model is None else resolve_model(config.draft_model, cache_dir=env.cache_dir())
        )
        self._built = build_engine_core(config, location, draft_location=draft_location)
        self._frontend = Frontend()
        self._input_processor = InputProcessor(self._tokenizer, self._built.ready.model)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | str | Sequence[Prompt | str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The finished outputs for one prompt or many, in their order, computed together.

        Args:
            prompts: texts, lists of token ids, or `Prompt`s.
            sampling_params: one for all, or one for each.

        Raises:
            RequestError: a prompt or a parameter cannot work. Nothing was run.
            EngineGenerateError: a request failed. The others are dropped.
            KeyboardInterrupt: and all requests are dropped; the next call starts afresh.
        """
        several = cast(list[Prompt | str], list(cast(Any, prompts)) if _is_several(prompts) else [prompts])
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(several)
        else:
            params = list(sampling_params)
        requests = [GenerateRequest(prompt, each) for prompt, each in zip(several, params, strict=True)]
        return self._run(requests)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation or many; otherwise as `generate`."""
        is_one = not messages or not isinstance(messages[0], (list, tuple))
        conversations = [messages] if is_one else messages
        prompts = [ChatPrompt(cast(Sequence[ChatMessage], conversation)) for conversation in conversations]
        return self.generate(prompts, sampling_params)

    def encode(
        self,
        prompts: EncodePrompt | str | Sequence[EncodePrompt | str | Sequence[int]],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingOutput]:
        """The vectors of one prompt or many, in their order, computed together.

        Args:
            prompts: texts, pairs of texts, lists of token ids, or `Prompt`s.
            pooling_params: which vectors; None is the task that the model was made for.
            truncate_prompt_tokens: as `EncodeRequest.truncate_prompt_tokens`.

        Raises:
            RequestError: a prompt or a parameter cannot work. Nothing was run.
            EngineGenerateError: a request failed. The others are dropped.
            KeyboardInterrupt: and all requests are dropped; the next call starts afresh.
        """
        several = cast(list[EncodePrompt | str], list(cast(Any, prompts)) if _is_several(prompts) else [prompts])
        facts = self._built.ready.model.pooling
        if pooling_params is None:
            pooling_params = PoolingParams() if facts is None else PoolingParams(task=facts.tasks[0])
        process = self._input_processor.process_encode
        processed = [
            process(EncodeRequest(each, pooling_params, truncate_prompt_tokens=truncate_prompt_tokens))
            for each in several
        ]
        places = [_PoolingPlace() for _ in processed]
        pairs = zip(processed, places, strict=True)
        self._run_core(lambda: [each for pair in pairs for each in self._frontend.add_encode(*pair).messages], places)
        return [cast(PoolingOutput, place.output) for place in places]

    def embed(
        self,
        prompts: Prompt | str | Sequence[Prompt | str | Sequence[int]],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingOutput]:
        """The embedding of one prompt or many; otherwise as `encode`."""
        params = PoolingParams(task=PoolingTask.EMBED, dimensions=dimensions)
        return self.encode(cast(Any, prompts), params, truncate_prompt_tokens=truncate_prompt_tokens)

    def close(self) -> None:
        """Give the model's memory back. May be called again."""
        self._built.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
        processed = [self._input_processor.process(request) for request in requests]
        pending = [new_pending_output(each.sampling.n) for each in processed]
        pairs = zip(processed, pending, strict=True)
        self._run_core(lambda: [each for pair in pairs for each in self._frontend.add(*pair).messages], pending)
        return [
            output_builder(each, is_cumulative=False).build(sink) for each, sink in zip(processed, pending, strict=True)
        ]

    def _run_core(self, register: Callable[[], Iterable[ToCore]], sinks: Sequence["_Sink"]) -> None:
        """Let the core compute what `register` asks of it, until all is done or one of the sinks has an error."""
        core, frontend = self._built.core, self._frontend
        try:
            for message in register():
                core.handle(_CLIENT, message)
            while frontend.num_open_requests:
                core.poll()
                if core.has_work:
                    core.step()
                self._deliver()
                if not core.has_work and frontend.num_open_requests:  # All that is left waits for its grammar.
                    poll((), waker=self._built.waker, timeout_s=core.idle_timeout_s())
                for sink in sinks:
                    if sink.error is not None:
                        raise attrs.evolve(sink.error)
        finally:
            frontend.abort_all()
            self._deliver()

    def _deliver(self) -> None:
        """Carry the core's output to the front end and the front end's aborts to the core until there is neither."""
        core, frontend = self._built.core, self._frontend
        while True:
            for _, aborts in frontend.take_aborts():
                core.handle(_CLIENT, aborts)
            output = core.take_output(_CLIENT)
            if output is None:
                return
            for _ in frontend.receive(0, output):
                pass


class _Sink(Protocol):
    error: TrioEngineError | None


@attrs.define(eq=False)
class _PoolingPlace:
    """Where the vectors of one request arrive."""

    output: PoolingOutput | None = None
    error: TrioEngineError | None = None

    def put(self, output: PoolingOutput) -> None:
        self.output = output

    def fail(self, error: TrioEngineError) -> None:
        # The first is why there is no output; what follows is that all others are dropped.
        self.error = self.error or error


def _is_several(prompts: object) -> bool:
    """Whether these are several prompts: a list of anything but token ids."""
    if not isinstance(prompts, (list, tuple)):
        return False
    return not prompts or not isinstance(prompts[0], int)
