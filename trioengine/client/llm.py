"""`LLM`: the engine as a blocking object, for scripts and notebooks. No event loop is involved.

Calls are vLLM's: a script for `from vllm import LLM, SamplingParams` runs with `trioengine` in its place.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs

from trioengine.client.llm_engine import LLMEngine
from trioengine.client.llm_inputs import (
    CallerOptions,
    DefaultSamplingParams,
    EngineArgs,
    LoRARequest,
    PromptLike,
    cache_salt_of,
    several,
    to_messages,
    to_prompt,
)
from trioengine.client.llm_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    cosine_score,
)
from trioengine.client.operations import JsonValue
from trioengine.client.progress_bar import PromptProgress, UseTqdm
from trioengine.errors import RequestError, UnavailableError
from trioengine.frontend.input_processor import ProcessedEncodeRequest, ProcessedRequest
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.messages import PauseMode
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.pooling import EncodeRequest, PoolingParams, PoolingTask, TextPairPrompt
from trioengine.types.request import ChatMessage, ChatPrompt, GenerateRequest, Prompt

T = TypeVar("T")
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model for this program. It holds the model's memory until `close`, the end of its `with` block, or until it is
    dropped. Calls of several threads take turns.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        multiprocess: bool | None = None,
        disable_log_stats: bool = True,
        **options: object,
    ) -> None:
        """Load the model.

        Args:
            model: as `EngineConfig.model`; the default model when None.
            multiprocess: as for `LLMEngine`.
            disable_log_stats: as `EngineConfig.disable_log_stats`.
            options: the other fields of `EngineConfig`, `CallerOptions`, and the arguments of vLLM's `LLM`. Those of
                them that change nothing here are named once in the log.

        Raises:
            ConfigError, CheckpointError, EngineStartError: the engine cannot start.
        """
        arguments = EngineArgs(model, disable_log_stats=disable_log_stats, **options)
        self.llm_engine = LLMEngine(arguments.config, multiprocess=multiprocess)
        """The engine, for what is not here."""
        self._caller: CallerOptions = arguments.caller
        self._request_numbers = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The same."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> DefaultSamplingParams:
        """What is used where none are given: what the model's authors recommend, over `SamplingParams`' defaults.

        Fields of this object may be set.
        """
        caller, values = self._caller, dict[str, Any]()
        if caller.generation_config == "auto":
            values = attrs.asdict(self.llm_engine.generation_defaults)
        values = {name: value for name, value in values.items() if value is not None}
        for name, value in caller.override_generation_config.items():
            values["max_tokens" if name == "max_new_tokens" else name] = value
        try:
            return DefaultSamplingParams(**values)
        except TypeError as error:
            raise RequestError(f"override_generation_config: {error}", param="override_generation_config") from None

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """The finished outputs for one prompt or many, in their order, computed together.

        Args:
            prompts: texts, lists of token ids, dictionaries as vLLM takes them, or `Prompt`s.
            sampling_params: one for all, or one for each; None is `get_default_sampling_params`.
            use_tqdm: whether progress is shown; see `UseTqdm`.
            lora_request: the adapter for all, or one for each. It is read when it is first named.
            priority: one for each.
            tokenization_kwargs: as `GenerateRequest`'s.

        Raises:
            RequestError: a prompt or a parameter cannot work; a note tells which prompt's. Nothing was run.
            EngineGenerateError: a request failed. The others are dropped.
            EngineDeadError: the engine has died, and why.
            KeyboardInterrupt: and all requests are dropped; the next call starts afresh.
        """
        all_prompts = several(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _for_each("sampling_params", sampling_params, len(all_prompts))
        priorities = [0] * len(all_prompts) if priority is None else _for_each("priority", priority, len(all_prompts))
        loras = _for_each("lora_request", lora_request, len(all_prompts))
        requests = [
            GenerateRequest(
                cast(Prompt, to_prompt(prompt, f"prompts[{place}]")),
                self._whole(params[place]),
                request_id=str(next(self._request_numbers)),
                priority=priorities[place],
                cache_salt=cache_salt_of(prompt),
                lora=_name(loras[place]),
                tokenization_kwargs=tokenization_kwargs,
            )
            for place, prompt in enumerate(all_prompts)
        ]
        return cast(list[RequestOutput], self._run(requests, loras, use_tqdm))

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation or many; otherwise as `generate`.

        Args:
            messages: conversations. Parts of texts in a message are joined by line breaks.
            sampling_params, use_tqdm, lora_request: as for `generate`.
            chat_template: in place of the model's own.
            chat_template_content_format: "openai" hands lists of parts to the template as they are.
            add_generation_prompt: the prompt ends with the beginning of an answer.
            continue_final_message: it ends with the last message's text, to be gone on with.
            tools: functions that the template tells the model of.
            chat_template_kwargs: what else the template reads.
        """
        is_several = isinstance(messages, (list, tuple)) and messages and not isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[ChatMessage]]", messages if is_several else [messages])
        kwargs = dict(chat_template_kwargs or {})
        if tools:
            kwargs["tools"] = list(tools)
        prompts = [
            ChatPrompt(
                to_messages(conversation, chat_template_content_format),
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                template_kwargs=kwargs,
                continue_final_message=continue_final_message,
                chat_template=chat_template or self._caller.chat_template,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        pooling_task: PoolingTask | str | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[PoolingRequestOutput]:
        """The vectors of one prompt or many, in their order, computed together.

        Args:
            prompts: as for `generate`, and pairs of texts.
            pooling_params: which vectors, for all or for each; None is the task that the model was made for.
            use_tqdm, lora_request: as for `generate`.
            pooling_task: in place of the parameters' own.
            truncate_prompt_tokens: as `EncodeRequest.truncate_prompt_tokens`.
            tokenization_kwargs: `truncate_prompt_tokens` may be in it.

        Raises:
            RequestError, EngineGenerateError, EngineDeadError, KeyboardInterrupt: as `generate`.
        """
        all_prompts = several(prompts)
        if pooling_params is None:
            facts = self.llm_engine.model_config.pooling
            pooling_params = PoolingParams() if facts is None else PoolingParams(task=facts.tasks[0])
        params = _for_each("pooling_params", pooling_params, len(all_prompts))
        if not all(isinstance(each, PoolingParams) for each in params):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("pooling_params must be PoolingParams.", param="pooling_params")
        if pooling_task is not None:
            params = [attrs.evolve(each, task=pooling_task) for each in params]
        loras = _for_each("lora_request", lora_request, len(all_prompts))
        truncate = (tokenization_kwargs or {}).get("truncate_prompt_tokens", truncate_prompt_tokens)
        requests = [
            EncodeRequest(
                to_prompt(prompt, f"prompts[{place}]"),
                params[place],
                request_id=str(next(self._request_numbers)),
                cache_salt=cache_salt_of(prompt),
                lora=_name(loras[place]),
                truncate_prompt_tokens=cast("int | None", truncate),
            )
            for place, prompt in enumerate(all_prompts)
        ]
        return cast(list[PoolingRequestOutput], self._run(requests, loras, use_tqdm))

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequests = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of one prompt or many; otherwise as `encode`. `dimensions` is `PoolingParams.dimensions`."""
        if pooling_params is None:
            pooling_params = PoolingParams(task=PoolingTask.EMBED, dimensions=dimensions)
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=PoolingTask.EMBED,
            truncate_prompt_tokens=truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
        )
        return cast(list[EmbeddingRequestOutput], outputs)

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequests = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """A number for each label of the model, of one prompt or many; otherwise as `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params or PoolingParams(task=PoolingTask.CLASSIFY),
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=PoolingTask.CLASSIFY,
            truncate_prompt_tokens=truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
        )
        return cast(list[ClassificationRequestOutput], outputs)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with each of many, or pair by pair.

        A model that reads two texts at once scores them; one that gives embeddings compares these (cosine).

        Raises:
            RequestError: the lists differ in length and the first is not one text; or as `encode`.
        """
        firsts, seconds = (_texts(name, data) for name, data in (("data_1", data_1), ("data_2", data_2)))
        if len(firsts) == 1:
            firsts *= len(seconds)
        if len(firsts) != len(seconds) or not seconds:
            raise RequestError("data_1 must be one text, or as many as data_2.", param="data_1")
        facts = self.llm_engine.model_config.pooling
        common: dict[str, Any] = {
            "use_tqdm": use_tqdm,
            "lora_request": lora_request,
            "truncate_prompt_tokens": truncate_prompt_tokens,
        }
        if facts is not None and PoolingTask.SCORE not in facts.tasks and PoolingTask.EMBED in facts.tasks:
            outputs = self.embed([*dict.fromkeys((*firsts, *seconds))], pooling_params=pooling_params, **common)
            by_text = dict(zip(dict.fromkeys((*firsts, *seconds)), outputs, strict=True))
            return [cosine_score(by_text[one], by_text[other]) for one, other in zip(firsts, seconds, strict=True)]
        pairs = [TextPairPrompt(one, other) for one, other in zip(firsts, seconds, strict=True)]
        params = pooling_params or PoolingParams(task=PoolingTask.SCORE)
        scores = self.encode(pairs, params, pooling_task=PoolingTask.SCORE, **common)
        return cast(list[ScoringRequestOutput], scores)

    # Operations: as those of `LLMEngine`.

    def sleep(self, level: int = 1, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Give memory back until `wake_up`: level 1 that of the KV cache, 2 that of the weights too."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again: "weights", "kv_cache", or both where none is named."""
        self.llm_engine.wake_up(tags)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes."""
        return self.llm_engine.reset_prefix_cache()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what the cores compute until `stop_profile`."""
        self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> str:
        """End the record. Returns the path of the trace of rank 0."""
        return self.llm_engine.stop_profile()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[JsonValue] = (),
        kwargs: Mapping[str, JsonValue] | None = None,
    ) -> list[JsonValue]:
        """Run a method of every worker that is marked for it; their results, rank by rank."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    # The end

    def close(self) -> None:
        """Give the model's memory back. May be called again."""
        self.llm_engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole(self, params: SamplingParams) -> SamplingParams:
        """With one output at the end."""
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("sampling_params must be SamplingParams.", param="sampling_params")
        if isinstance(params, DefaultSamplingParams):
            params = params.plain()
        return attrs.evolve(params, output_kind=RequestOutputKind.FINAL_ONLY)

    def _run(
        self,
        requests: Sequence[GenerateRequest] | Sequence[EncodeRequest],
        loras: Sequence[LoRARequest | None],
        use_tqdm: UseTqdm,
    ) -> list[RequestOutput | PoolingRequestOutput]:
        """Answer all requests; whatever happens, none of them is left."""
        engine = self.llm_engine
        engine.check_health()
        processed: list[ProcessedRequest | ProcessedEncodeRequest] = []
        for place, each in enumerate(requests):
            try:
                processed.append(engine.process(each))
            except RequestError as error:
                error.add_note(f"prompts[{place}]")
                raise
        if engine.is_paused():
            raise UnavailableError("The engine sleeps or is paused: nothing would be computed. Call wake_up first.")
        outputs: dict[str, RequestOutput | PoolingRequestOutput] = {}
        with engine.interrupts:
            try:
                for adapter in {lora for lora in loras if lora is not None}:
                    engine.load_lora(adapter)
                for each, lora in zip(processed, loras, strict=True):
                    engine.start(each, lora)
                    engine.interrupts.check()
                with PromptProgress(use_tqdm, len(processed)) as progress:
                    while len(outputs) < len(processed):
                        for output in engine.step():
                            if not output.finished:
                                continue  # What there was of a request that has failed: its error comes next.
                            outputs[output.request_id] = output
                            num_generated = output.num_generated_tokens if isinstance(output, RequestOutput) else 0
                            progress.finish_one(len(output.prompt_token_ids), num_generated)
            finally:
                if len(outputs) < len(processed):
                    engine.abort_request(each.external_id for each in processed)
        return [outputs[each.external_id] for each in processed]


def _for_each(name: str, value: "T | Sequence[T]", count: int) -> "Sequence[T]":
    """One for each of so many prompts.

    Raises:
        RequestError: there are more or fewer.
    """
    if not isinstance(value, (list, tuple)):
        return [cast(T, value)] * count
    values = cast("Sequence[T]", value)
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} values for {count} prompts.", param=name)
    return values


def _name(lora: LoRARequest | None) -> str | None:
    return None if lora is None else lora.lora_name


def _texts(name: str, data: str | Sequence[str]) -> list[str]:
    texts = [data] if isinstance(data, str) else list(data)
    if not all(isinstance(text, str) for text in texts):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"{name} must be a text or a list of texts.", param=name)
    return texts
