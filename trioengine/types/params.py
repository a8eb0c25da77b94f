"""How tokens are chosen and when a request ends: `SamplingParams`, with vLLM's names and defaults.

Rules that need no model are checked by `validate`; those that need the vocabulary or the context length are
`frontend.input_processor`'s.
"""

import enum
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin

import attrs

from trioengine.errors import RequestError
from trioengine.types.repetition import RepetitionDetectionParams
from trioengine.types.structured import StructuredOutputsParams

T = TypeVar("T")

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 4096
MAX_TOP_K = 2**31 - 1
MAX_N = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LOGITS_PROCESSORS = 16
MAX_LOGITS_PROCESSOR_CHARS = 64 * 1024
"""Of one processor's arguments, as JSON."""
MAX_EXTRA_ARGS = 64
MAX_EXTRA_ARGS_CHARS = 64 * 1024
"""Of all names and values together, as JSON."""

UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "prompt_logprob_token_ids": "prompt_logprobs=-1 has all tokens",
    "prompt_logprob_start": "prompt_logprobs begin with the prompt",
    "trace_decode_token_ids": "prompt_logprobs score tokens that are known",
    "routed_experts_prompt_start": "it does not tell which experts computed a token",
}
"""Fields of vLLM's that must ask for nothing -> why: null, no ids, or 0."""


class RequestOutputKind(enum.IntEnum):
    """What one output of a stream holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """Everything, once, at the end."""


def _stop_tuple(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else _tuple(stop)


def _tuple(values: Iterable[T] | None) -> tuple[T, ...]:
    return () if values is None else _optional_tuple(values)  # pyright: ignore[reportReturnType]


def _optional_tuple(values: Iterable[T] | None) -> tuple[T, ...] | None:
    """What is no list is left to `validate`."""
    return tuple(values) if isinstance(values, Iterable) else values


def _token_ids(values: Iterable[int] | None) -> tuple[int, ...] | None:
    """No ids ask for nothing."""
    return _optional_tuple(values) or None


def _seed(seed: int | None) -> int | None:
    return None if seed == -1 and type(seed) is int else seed


def _processor_arguments(processors: Mapping[str, str | Mapping[str, object]] | None) -> Mapping[str, str] | None:
    """Arguments as JSON; what is no JSON is left to `validate`."""
    if not isinstance(processors, Mapping):
        return processors
    return {name: _json(value) for name, value in processors.items()}


def _json(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return value


def _extra_arguments(arguments: Mapping[str, object] | None) -> Mapping[str, str] | None:
    """Values as JSON; what has no words in JSON is left to `validate`."""
    if not isinstance(arguments, Mapping):
        return arguments
    return {name: _json_of_any(value) for name, value in arguments.items()}


def _json_of_any(value: Any) -> str:
    if isinstance(value, str) and _is_json(value):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return value


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _thinking_budget(budget: int | None) -> int | None:
    return None if budget == -1 and type(budget) is int else budget


@attrs.frozen
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends."""

    temperature: float = 1.0
    """0 takes the most likely token; larger is more random."""
    top_p: float = 1.0
    """Only the most likely tokens whose probabilities sum to this; 0 is greedy, 1 is off."""
    top_k: int = 0
    """Only this many most likely tokens; 0 and -1 are off."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one; 0 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that the output has, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the output has it, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides (or, below zero, multiplies) the logit of each token that prompt or output has; 1 is off."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, -100 to 100."""
    seed: int | None = attrs.field(default=None, converter=_seed)
    """The same seed gives the same tokens, alone and in any batch. None and -1 draw one."""
    max_tokens: int | None = 16
    """The most tokens to generate. None is what the context leaves; 0, only with `prompt_logprobs`, is none."""
    min_tokens: int = 0
    """No end-of-text token, stop token or stop string ends the output before this many tokens."""
    stop: tuple[str, ...] = attrs.field(default=(), converter=_stop_tuple)
    """Strings that end the output; it is cut before them."""
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_tuple)
    """Tokens that end the output."""
    ignore_eos: bool = False
    """Goes on after the model's end-of-text token."""
    include_stop_str_in_output: bool = False
    """Cuts the output after the stop string instead of before it, and shows an end token's text."""
    skip_special_tokens: bool = True
    """Leaves control tokens out of the text."""
    detokenize: bool = True
    """False leaves `text` empty; stop strings then have no effect and are refused."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What one output of the stream holds."""
    allowed_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_optional_tuple)
    """Only these tokens are ever sampled; None is all. Not with `structured_outputs`."""
    bad_words: tuple[str, ...] = attrs.field(default=(), converter=_stop_tuple)
    """Texts that the answer must not have, in any tokenization and also inside words: a token that would complete one
    is not sampled."""
    logprobs: int | None = None
    """For each token of the answer its log probability and those of this many most likely ones; 0 is its own only, -1
    the whole vocabulary's, None none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the answer; None is free."""
    logits_processors: Mapping[str, str] | None = attrs.field(default=None, converter=_processor_arguments)
    """Custom rules by the name of their entry point, each with its arguments: a mapping, kept as JSON."""
    n: int = 1
    """How many answers, each with its own random numbers: a seed counts up from one to the next."""
    thinking_token_budget: int | None = attrs.field(default=None, converter=_thinking_budget)
    """After so many tokens of reasoning the model is made to end it, where the engine has a reasoning parser. None and
    -1 are no limit."""
    skip_reading_prefix_cache: bool | None = None
    """True computes the whole prompt, whatever is cached."""
    spaces_between_special_tokens: bool = True
    """Accepted for vLLM's sake: tokenizers of this engine put no spaces anywhere."""
    extra_args: Mapping[str, str] | None = attrs.field(default=None, converter=_extra_arguments)
    """Further arguments, for custom rules: a mapping from names to values that JSON has words for, each kept as JSON.
    A text that is JSON already stays as it is."""
    stream_interval: int | None = None
    """An output of a stream has at least so many new tokens, the first and the last excepted; None is 1."""
    flat_logprobs: bool = False
    """Accepted for vLLM's sake: log probabilities have one form here, a sequence of mappings."""
    skip_clone: bool = False
    """Accepted for vLLM's sake: parameters are values, which nobody copies."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends an answer that repeats itself, once `min_tokens` are there, with `FinishReason.REPETITION`; None never
    does."""
    logprob_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_token_ids)
    """`logprobs` tells those of these tokens, in their order, in place of the most likely ones'; its None is 0 then."""
    prompt_logprob_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_token_ids)
    """This and the next ones are vLLM's, and accepted only where they ask for nothing (`UNSUPPORTED_FIELDS`)."""
    prompt_logprob_start: int | None = None
    trace_decode_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_token_ids)
    routed_experts_prompt_start: int = 0

    def __attrs_post_init__(self) -> None:
        if self.logprob_token_ids is not None and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_p == 0

    def validate(self) -> None:
        """Check every rule that needs no model.

        Raises:
            RequestError: naming the first field at fault. Nothing has been sent then.
        """
        self._validate_types()
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if not -1 <= self.top_k <= MAX_TOP_K:
            raise RequestError(f"top_k must be 0 to {MAX_TOP_K}, or -1 for off, not {self.top_k}.", param="top_k")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError("seed must be a 64-bit integer.", param="seed")
        self._validate_n()
        self._validate_max_tokens()
        for name, minimum in (("thinking_token_budget", 0), ("stream_interval", 1)):
            value = getattr(self, name)
            if value is not None and not minimum <= value < 2**31:
                raise RequestError(f"{name} must be at least {minimum}, not {value}.", param=name)
        if self.min_tokens < 0:
            raise RequestError(f"min_tokens must be at least 0, not {self.min_tokens}.", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) < -1:
                raise RequestError(f"{name} must be at least 0, or -1 for the whole vocabulary.", param=name)
        self._validate_stops()
        self._validate_bad_words()
        self._validate_logits_processors()
        self._validate_extra_args()
        if self.structured_outputs is not None:
            self.structured_outputs.validate()
        if self.repetition_detection is not None:
            self.repetition_detection.validate()
        for name, reason in UNSUPPORTED_FIELDS.items():
            if getattr(self, name):
                raise RequestError(f"{name} is not supported by this engine: {reason}.", param=name)
        for token_id, bias in (self.logit_bias or {}).items():
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    def _validate_types(self) -> None:
        """What is of the wrong type here would be refused by the core, where no one could be told."""
        for name, kinds, expected in _SCALARS:
            value = getattr(self, name)
            if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):
                raise RequestError(f"{name} must be {expected}, not {type(value).__name__}.", param=name)
        for name in _LISTS:
            value = getattr(self, name)
            if not isinstance(value, tuple) and not (value is None and name == "allowed_token_ids"):
                raise RequestError(f"{name} must be a list, not {type(value).__name__}.", param=name)
        for position, token_id in enumerate(self.stop_token_ids):
            _check_integer(f"stop_token_ids[{position}]", token_id)
        if self.logprob_token_ids is not None:
            if not isinstance(self.logprob_token_ids, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError("logprob_token_ids must be a list of token ids.", param="logprob_token_ids")
            for position, token_id in enumerate(self.logprob_token_ids):
                _check_integer(f"logprob_token_ids[{position}]", token_id)
        self._validate_allowed_token_ids()
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("structured_outputs must be a StructuredOutputsParams.", param="structured_outputs")
        if self.repetition_detection is not None and not isinstance(  # pyright: ignore[reportUnnecessaryIsInstance]
            self.repetition_detection, RepetitionDetectionParams
        ):
            raise RequestError(
                "repetition_detection must be a RepetitionDetectionParams.", param="repetition_detection"
            )
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("logit_bias must be a mapping from token ids to numbers.", param="logit_bias")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_integer(f"logit_bias[{token_id!r}]", token_id)
            if type(bias) is bool or not isinstance(bias, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError(f"logit_bias[{token_id}] must be a number.", param=f"logit_bias[{token_id}]")

    def _validate_n(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise RequestError(f"n must be 1 to {MAX_N}, not {self.n}.", param="n")
        if self.n > 1 and self.is_greedy:
            raise RequestError(f"n must be 1 where temperature or top_p is 0: all {self.n} would be equal.", param="n")

    def _validate_max_tokens(self) -> None:
        if (
            self.max_tokens is None
            or self.max_tokens > 0
            or (self.max_tokens == 0 and self.prompt_logprobs is not None)
        ):
            return
        what_is_0 = ", or 0 with prompt_logprobs" if self.max_tokens == 0 else ""
        raise RequestError(f"max_tokens must be at least 1{what_is_0}, not {self.max_tokens}.", param="max_tokens")

    def _validate_allowed_token_ids(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is None:
            return
        if not allowed:
            raise RequestError("allowed_token_ids is empty, so nothing could be sampled.", param="allowed_token_ids")
        for position, token_id in enumerate(allowed):
            _check_integer(f"allowed_token_ids[{position}]", token_id)
        if self.structured_outputs is not None:
            raise RequestError(
                "allowed_token_ids cannot be used with structured_outputs: no token may be left that both allow.",
                param="allowed_token_ids",
            )

    def _validate_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(f"bad_words has {len(self.bad_words)}; the limit is {MAX_BAD_WORDS}.", param="bad_words")
        for position, word in enumerate(self.bad_words):
            param = f"bad_words[{position}]"
            check_text(word, param)
            if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
                raise RequestError(f"{param} must have 1 to {MAX_BAD_WORD_CHARS} characters.", param=param)

    def _validate_logits_processors(self) -> None:
        processors = self.logits_processors
        if processors is None:
            return
        if not isinstance(processors, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(
                "logits_processors must be a mapping from names to arguments.", param="logits_processors"
            )
        if len(processors) > MAX_LOGITS_PROCESSORS:
            raise RequestError(
                f"logits_processors has {len(processors)}; the limit is {MAX_LOGITS_PROCESSORS}.",
                param="logits_processors",
            )
        for name, arguments in processors.items():
            check_text(name, "logits_processors")
            _check_arguments(f"logits_processors[{name[:100]}]", arguments)

    def _validate_extra_args(self) -> None:
        arguments = self.extra_args
        if arguments is None:
            return
        if not isinstance(arguments, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("extra_args must be a mapping from names to values.", param="extra_args")
        num_chars = 0
        for name, value in arguments.items():
            check_text(name, "extra_args")
            param = f"extra_args[{name[:100]}]"
            if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError(f"{param} must be a value that JSON has words for.", param=param)
            check_text(value, param)
            num_chars += len(name) + len(value)
        if len(arguments) > MAX_EXTRA_ARGS or num_chars > MAX_EXTRA_ARGS_CHARS:
            raise RequestError(
                f"extra_args may have {MAX_EXTRA_ARGS} values, and {MAX_EXTRA_ARGS_CHARS} characters as JSON.",
                param="extra_args",
            )

    def _validate_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings; the limit is {MAX_STOP_STRINGS}.", param="stop")
        for position, text in enumerate(self.stop):
            param = f"stop[{position}]"
            check_text(text, param)
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(f"{param} must have 1 to {MAX_STOP_STRING_CHARS} characters.", param=param)
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize, as it looks for text.", param="stop")


def check_text(text: str, param: str) -> None:
    """Return when this is a text that can be sent.

    Raises:
        RequestError: it is no text, or has a lone surrogate, which is no character.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"{param} must be a string, not {type(text).__name__}.", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} has a lone surrogate at character {error.start}.", param=param) from None


def _check_arguments(param: str, arguments: object) -> None:
    """Return when these are the JSON of an object, of a size that may be sent."""
    if not isinstance(arguments, str):
        raise RequestError(f"{param} must be a mapping that JSON has words for.", param=param)
    check_text(arguments, param)
    if len(arguments) > MAX_LOGITS_PROCESSOR_CHARS:
        raise RequestError(f"{param} has more than {MAX_LOGITS_PROCESSOR_CHARS} characters as JSON.", param=param)
    try:
        value = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is no JSON: {str(error)[:200]}.", param=param) from None
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be a mapping.", param=param)


def _scalar(field: "attrs.Attribute[Any]") -> "tuple[str, tuple[type, ...], str] | None":
    """Name, classes and description of a field that holds one value; None for the others."""
    kinds: tuple[Any, ...] = get_args(field.type) or (field.type,)
    if get_origin(field.type) is tuple or kinds[0] not in _DESCRIPTIONS:
        return None
    return field.name, (*kinds, int) if float in kinds else kinds, _DESCRIPTIONS[kinds[0]]


_DESCRIPTIONS: Mapping[Any, str] = {
    float: "a number",
    int: "an integer",
    bool: "True or False",
    RequestOutputKind: "a RequestOutputKind",
}
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
_SCALARS = tuple(scalar for field in attrs.fields(SamplingParams) if (scalar := _scalar(field)) is not None)


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or type(value) is bool:
        raise RequestError(f"{name} must be an integer, not {type(value).__name__}.", param=name)


def _check_range(name: str, value: float, minimum: float, maximum: float) -> None:
    # `not (a <= x <= b)` also refuses NaN.
    if not (minimum <= value <= maximum) or math.isinf(value):
        raise RequestError(f"{name} must be between {minimum:g} and {maximum:g}, not {value}.", param=name)
