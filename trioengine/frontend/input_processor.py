"""From a `GenerateRequest` to token ids and checked parameters: every rule is applied before anything is sent."""

import random
import secrets
from collections.abc import Mapping

import attrs

from trioengine.errors import PromptTooLongError, RequestError
from trioengine.frontend.renderer import Renderer, TokenizationKwargs
from trioengine.frontend.request_checks import check_request, reasoning_ended
from trioengine.tokenizer.pairs import PairTokens, encode_cut, encode_pair
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.messages import ModelFacts
from trioengine.types.params import SamplingParams, check_text
from trioengine.types.pooling import EncodePrompt, EncodeRequest, PoolingParams, PoolingTask, TextPairPrompt
from trioengine.types.request import (
    ChatPrompt,
    Deadlines,
    GenerateRequest,
    KVHints,
    TextPrompt,
    TokensPrompt,
)

LONG_PROMPT_CHARS = 16_384
"""Longer prompts take over 5 ms to tokenize, which an event loop should not wait for."""
MESSAGE_COST_CHARS = 100
"""A message takes a chat template as long as so many characters take the tokenizer."""


@attrs.frozen
class ProcessedRequest:
    """A request that is certain to be accepted by the core."""

    external_id: str
    """The caller's name for the request, or one that was drawn."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """`max_tokens` is set and fits the context."""
    seed: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer = attrs.field(repr=False)
    """Turns its tokens into text."""
    priority: int = 0
    cache_salt: str | None = attrs.field(default=None, repr=False)
    lora: str | None = None
    reasoning_ended: bool | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    trace_headers: Mapping[str, str] | None = None
    kv_hints: KVHints | None = None
    prompt_text: str | None = attrs.field(default=None, repr=False)
    """The text that the tokens are of, where it is known."""
    warnings: tuple[str, ...] = ()
    """What was changed to make the request fit, for the caller to be told."""


@attrs.frozen
class ProcessedEncodeRequest:
    """A request for vectors that is certain to be accepted by the core."""

    external_id: str
    prompt_token_ids: tuple[int, ...]
    pooling: PoolingParams
    """Complete."""
    second_text_start: int | None = None
    """The first token of the second text of a pair, where the model tells the two apart."""
    priority: int = 0
    cache_salt: str | None = attrs.field(default=None, repr=False)
    lora: str | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    trace_headers: Mapping[str, str] | None = None


@attrs.frozen
class InputProcessor:
    """Tokenizes prompts and checks requests against one model. Pure, and safe in any thread."""

    tokenizer: Tokenizer
    model: ModelFacts
    seeds: random.Random = attrs.field(factory=random.Random)
    """Of requests without a seed."""
    renderer: Renderer = attrs.field(
        init=False,
        default=attrs.Factory(
            lambda self: Renderer(self.tokenizer, self.model.vocab_size, self.model.max_model_len), takes_self=True
        ),
    )
    """Makes tokens of prompts, as `process` does."""

    def process(self, request: GenerateRequest) -> ProcessedRequest:
        """The request's tokens and complete parameters.

        Raises:
            RequestError: naming the field at fault.
            PromptTooLongError: the context has no room for one more token.
        """
        if not self.model.can_generate:
            raise RequestError("This model generates no text; it is for embeddings and the like.", param="model")
        check_request(request)
        request.sampling.validate()
        self._check_token_ids(request.sampling)
        self._check_logprobs(request.sampling)
        prompt = self.renderer.tokenize(
            request.prompt, TokenizationKwargs.of(request.tokenization_kwargs), room=self._room(request.sampling)
        )
        prompt_token_ids = tuple(prompt.token_ids)
        if not prompt_token_ids:
            raise RequestError(
                "The prompt is empty: this model needs at least one token to start from.", param="prompt"
            )
        num_left = self.model.max_model_len - len(prompt_token_ids)
        if num_left < (request.sampling.max_tokens != 0):
            raise PromptTooLongError(
                num_prompt_tokens=len(prompt_token_ids), max_model_len=self.model.max_model_len, param=_param(request)
            )
        sampling, warnings = _fit_max_tokens(request.sampling, num_left)
        seed = self.seeds.getrandbits(64) if sampling.seed is None else sampling.seed % 2**64
        return ProcessedRequest(
            external_id=request.request_id or f"request-{secrets.token_hex(8)}",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            seed=seed,
            eos_token_ids=() if sampling.ignore_eos else self._end_token_ids(),
            tokenizer=self.tokenizer,
            priority=request.priority,
            cache_salt=request.cache_salt,
            lora=request.lora,
            reasoning_ended=reasoning_ended(request),
            data_parallel_rank=request.data_parallel_rank,
            session_id=request.session_id,
            deadlines=request.deadlines,
            trace_headers=request.trace_headers,
            kv_hints=request.kv_hints,
            prompt_text=prompt.prompt_text,
            warnings=warnings,
        )

    def process_encode(self, request: EncodeRequest) -> ProcessedEncodeRequest:
        """The tokens of a request for vectors, and its complete parameters.

        Raises:
            RequestError: naming the field at fault.
            PromptTooLongError: the prompt is longer than the context.
        """
        facts = self.model.pooling
        if facts is None:
            raise RequestError("This model gives no vectors.", param="model")
        pooling = facts.complete(request.pooling)
        check_request(request)
        if pooling.task is PoolingTask.SCORE and isinstance(request.prompt, (TextPrompt, ChatPrompt)):
            raise RequestError("A score is of two texts.", param="prompt")
        tokens = self._encode_tokens(request.prompt, self._max_prompt_len(request))
        if not tokens.token_ids:
            raise RequestError("The prompt is empty: this model needs at least one token.", param="prompt")
        if len(tokens.token_ids) > self.model.max_model_len:
            raise PromptTooLongError(
                num_prompt_tokens=len(tokens.token_ids), max_model_len=self.model.max_model_len, param="prompt"
            )
        return ProcessedEncodeRequest(
            external_id=request.request_id or f"request-{secrets.token_hex(8)}",
            prompt_token_ids=tuple(tokens.token_ids),
            pooling=pooling,
            second_text_start=tokens.second_text_start,
            priority=request.priority,
            cache_salt=request.cache_salt,
            lora=request.lora,
            data_parallel_rank=request.data_parallel_rank,
            session_id=request.session_id,
            deadlines=request.deadlines,
            trace_headers=request.trace_headers,
        )

    def is_long(self, request: GenerateRequest | EncodeRequest) -> bool:
        """Whether `process` takes long enough to belong into a thread."""
        match request.prompt:
            case TextPairPrompt(first, second):
                return len(first) + len(second) > LONG_PROMPT_CHARS
            case TextPrompt(text):
                return len(text) > LONG_PROMPT_CHARS
            case TokensPrompt(token_ids):
                return len(token_ids) > 8 * LONG_PROMPT_CHARS
            case ChatPrompt(messages):
                lengths = (len(content) for message in messages if isinstance(content := message.get("content"), str))
                return sum(lengths) + MESSAGE_COST_CHARS * len(messages) > LONG_PROMPT_CHARS

    def _room(self, sampling: SamplingParams) -> int:
        """How many tokens of a prompt leave room for the answer."""
        most = self.model.max_model_len
        num_answer = 1 if sampling.max_tokens is None else sampling.max_tokens
        return most - min(num_answer, most - 1)

    def _end_token_ids(self) -> tuple[int, ...]:
        """Of the model's configuration and of the tokenizer, which may know more (`<|endoftext|>` beside `<|im_end|>`).

        Ids that the model has no row for are left out.
        """
        known = dict.fromkeys((*self.model.eos_token_ids, *self.tokenizer.eos_token_ids))
        return tuple(token_id for token_id in known if token_id < self.model.vocab_size)

    def _max_prompt_len(self, request: EncodeRequest) -> int | None:
        """To how many tokens the prompt is cut, if so."""
        wanted, most = request.truncate_prompt_tokens, self.model.max_model_len
        if wanted is None:
            return None
        if type(wanted) is not int or not (wanted == -1 or 1 <= wanted <= most):
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or 1 to {most}, the model's maximum context length.",
                param="truncate_prompt_tokens",
            )
        return most if wanted == -1 else wanted

    def _encode_tokens(self, prompt: EncodePrompt, max_len: int | None) -> PairTokens:
        match prompt:
            case TextPairPrompt(first, second):
                check_text(first, "prompt.first")
                check_text(second, "prompt.second")
                return encode_pair(self.tokenizer, first, second, max_len)
            case TextPrompt(text) if max_len is not None:
                check_text(text, "prompt")
                return PairTokens(encode_cut(self.tokenizer, text, max_len))
            case _:
                tokens = self.renderer.tokenize(prompt, TokenizationKwargs(), room=self.model.max_model_len)
                return PairTokens(tokens.token_ids[:max_len])

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        for position, token_id in enumerate(sampling.stop_token_ids):
            self._check_in_vocabulary(token_id, f"stop_token_ids[{position}]")
        for position, token_id in enumerate(sampling.allowed_token_ids or ()):
            self._check_in_vocabulary(token_id, f"allowed_token_ids[{position}]")
        for position, token_id in enumerate(sampling.logprob_token_ids or ()):
            self._check_in_vocabulary(token_id, f"logprob_token_ids[{position}]")
        for token_id in sampling.logit_bias or ():
            self._check_in_vocabulary(token_id, f"logit_bias[{token_id}]")

    def _check_in_vocabulary(self, token_id: int, param: str) -> None:
        if not 0 <= token_id < self.model.vocab_size:
            raise RequestError(f"{token_id} is no token id: the last is {self.model.vocab_size - 1}.", param=param)

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        vocab_size, limit = self.model.vocab_size, self.model.max_logprobs
        for name, wanted in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            num_wanted = vocab_size if wanted == -1 else wanted or 0
            if num_wanted > (vocab_size if limit == -1 else limit):
                raise RequestError(
                    f"Requested {name} of {wanted}, which is greater than max allowed: "
                    f"{vocab_size if limit == -1 else limit}.",
                    param=name,
                )
        num_ids = len(sampling.logprob_token_ids or ())
        if limit != -1 and num_ids > limit:
            raise RequestError(
                f"logprob_token_ids has {num_ids}, which is more than max_logprobs allows: {limit}.",
                param="logprob_token_ids",
            )


def _fit_max_tokens(sampling: SamplingParams, num_left: int) -> tuple[SamplingParams, tuple[str, ...]]:
    wanted = sampling.max_tokens
    if wanted is not None and wanted <= num_left:
        return sampling, ()
    if sampling.min_tokens > num_left:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, but the context leaves {num_left} tokens.", param="min_tokens"
        )
    warning = (
        () if wanted is None else (f"max_tokens was lowered from {wanted} to {num_left}, which the context leaves",)
    )
    return attrs.evolve(sampling, max_tokens=num_left), warning


def _param(request: GenerateRequest) -> str:
    return "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
