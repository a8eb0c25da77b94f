"""`LLM`: the engine as a blocking object in this process, for scripts and notebooks. No event loop is involved."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

import attrs

from trioengine.checkpoint.locate import resolve_model
from trioengine.config import env
from trioengine.config.engine import EngineConfig
from trioengine.frontend.frontend import Frontend
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.pending_output import OutputBuilder, PendingOutput
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.transport.zmq_blocking import poll
from trioengine.types.output import RequestOutput
from trioengine.types.params import SamplingParams
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
        pending = [PendingOutput() for _ in processed]
        core, frontend = self._built.core, self._frontend
        try:
            for each, sink in zip(processed, pending, strict=True):
                core.handle(_CLIENT, frontend.add(each, sink).message)
            while frontend.num_open_requests:
                core.poll()
                if core.has_work:
                    core.step()
                self._deliver()
                if not core.has_work and frontend.num_open_requests:  # All that is left waits for its grammar.
                    poll((), waker=self._built.waker)
                for sink in pending:
                    if sink.error is not None:
                        raise attrs.evolve(sink.error)
        finally:
            frontend.abort_all()
            self._deliver()
        return [
            OutputBuilder(each, is_cumulative=False).build(sink) for each, sink in zip(processed, pending, strict=True)
        ]

    def _deliver(self) -> None:
        """Carry the core's output to the front end and the front end's aborts to the core until there is neither."""
        core, frontend = self._built.core, self._frontend
        while True:
            aborts = frontend.take_aborts()
            if aborts is not None:
                core.handle(_CLIENT, aborts)
            output = core.take_output(_CLIENT)
            if output is None:
                return
            for _ in frontend.receive(output):
                pass


def _is_several(prompts: object) -> bool:
    """Whether these are several prompts: a list of anything but token ids."""
    if not isinstance(prompts, (list, tuple)):
        return False
    return not prompts or not isinstance(prompts[0], int)
