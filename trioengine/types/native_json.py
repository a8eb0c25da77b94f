"""TrioEngine's own objects as JSON, for clients that are elsewhere: requests, outputs, operations, errors.

Fields go by their Python names, and those that have their default are left out. Bytes are base64. What is read is
checked as strictly as what comes from the cores. `docs/stream-protocol.md` shows the forms.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii
from types import NoneType
from typing import Any, TypeVar, cast

import numpy as np
from cattrs import Converter, transform_error
from cattrs.gen import make_dict_structure_fn, override

from trioengine.errors import CodecError, DeadlineExceededError, RequestError, TrioEngineError, UnavailableError
from trioengine.types.codec import error_from_data, error_to_data, make_strict_converter, reply_type
from trioengine.types.messages import CALLS, Call, ErrorData
from trioengine.types.output import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestOutput
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import EncodePrompt, PoolingOutput, TextPairPrompt
from trioengine.types.request import ChatPrompt, Prompt, TextPrompt, TokensPrompt

T = TypeVar("T")
R = TypeVar("R")

JsonObject = Mapping[str, object]

_CALLS_BY_NAME = {call_class.__name__: call_class for call_class in CALLS}
_PUBLIC_ERRORS = (RequestError, UnavailableError, DeadlineExceededError)
"""Their fields are the caller's business; those of others are for the logs of the machine that they happened on."""


def to_json(value: object) -> Any:
    """Plain data for `json.dumps`, of an attrs object or what is made of them."""
    return _WRITER.unstructure(value)


def from_json(value: object, type_: type[T]) -> T:
    """The object of this type that plain data stands for.

    Raises:
        RequestError: it stands for none. The message names the place.
    """
    try:
        return _READER.structure(value, type_)
    except RequestError:
        raise
    except Exception as error:  # A border: whatever a stranger sends becomes one kind of error.
        problem, path = _first_problem(error)
        raise RequestError(f"{path}: {problem}" if path else problem, param=path or None) from None


def call_to_json(call: Call[object]) -> JsonObject:
    """The body of `call`."""
    return {"name": type(call).__name__, "fields": to_json(call)}


def call_from_json(body: JsonObject) -> Call[object]:
    """The operation that the body of `call` asks for.

    Raises:
        RequestError: there is none of this name, or it has no such fields.
    """
    name = body.get("name")
    call_class = _CALLS_BY_NAME.get(name) if isinstance(name, str) else None
    if call_class is None:
        raise RequestError(f"There is no operation {str(name)[:100]!r}.", param="name")
    if unknown := body.keys() - {"name", "fields"}:
        raise RequestError(f"{min(unknown)[:100]!r} is no field of a call.", param=min(unknown)[:100])
    return from_json(body.get("fields", {}), call_class)


def reply_to_json(call: Call[object], reply: object) -> Any:
    """The reply to an operation."""
    return _WRITER.unstructure(reply, reply_type(type(call)))


def reply_from_json(call: Call[R], value: object) -> R:
    """The reply to an operation.

    Raises:
        CodecError: it is none.
    """
    try:
        return _READER.structure(value, reply_type(type(call)))
    except Exception as error:  # A border, as in `from_json`.
        raise CodecError(f"Not a reply to {type(call).__name__}: {error!r}"[:500]) from error


def output_to_json(output: RequestOutput, *, with_prompt: bool = False) -> bytes:
    """An output without what all outputs of a request have in common: `request_id` and `prompt_token_ids`.

    `with_prompt` is for the first one: it has the latter.
    """
    if output.prompt_logprobs is None and output.weight_version is None and not with_prompt:
        choices = b",".join([_choice_to_json(choice) for choice in output.outputs])
        cached = b',"num_cached_tokens":%d' % output.num_cached_tokens if output.num_cached_tokens else b""
        finished = b"true" if output.finished else b"false"
        return b'{"outputs":[%b],"finished":%b,"num_generated_tokens":%d%b}' % (
            choices,
            finished,
            output.num_generated_tokens,
            cached,
        )
    fields = to_json(output)
    del fields["request_id"]
    if not with_prompt:
        del fields["prompt_token_ids"]
    return dumps(fields)


def output_from_json(value: Mapping[str, Any], request_id: str, prompt_token_ids: tuple[int, ...]) -> RequestOutput:
    """The output of this request that `output_to_json` was given. Tokens of the prompt in it win.

    Raises:
        CodecError: it is none.
    """
    try:
        choices = tuple([_choice_from_json(choice) for choice in value["outputs"]])
        prompt_logprobs = value.get("prompt_logprobs")
        if prompt_logprobs is not None:
            prompt_logprobs = tuple([None if each is None else _position(each) for each in prompt_logprobs])
        own_prompt = value.get("prompt_token_ids")
        return RequestOutput(
            request_id,
            prompt_token_ids if own_prompt is None else tuple(own_prompt),
            choices,
            value["finished"],
            value["num_generated_tokens"],
            value.get("num_cached_tokens", 0),
            prompt_logprobs,
            value.get("weight_version"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CodecError(f"Not an output: {error!r}"[:500]) from error


def pooling_to_json(output: PoolingOutput) -> bytes:
    """An output of `encode`."""
    data = np.ascontiguousarray(output.data, dtype="<f4")
    return dumps(
        {
            "request_id": output.request_id,
            "prompt_token_ids": output.prompt_token_ids,
            "num_cached_tokens": output.num_cached_tokens,
            "shape": data.shape,
            "data": base64.b64encode(data.tobytes()).decode(),
        }
    )


def pooling_from_json(value: Mapping[str, Any], request_id: str | None = None) -> PoolingOutput:
    """The output that `pooling_to_json` was given; under another id, where one is given.

    Raises:
        CodecError: it is none.
    """
    try:
        data = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype="<f4").reshape(value["shape"])
        return PoolingOutput(
            request_id or value["request_id"], tuple(value["prompt_token_ids"]), data, value["num_cached_tokens"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"Not an output of encode: {error!r}"[:500]) from error


def error_to_json(error: Exception) -> JsonObject | None:
    """An exception for the client whose request it ended. What is not for strangers is left out."""
    if not isinstance(error, TrioEngineError):
        return None
    data = error_to_data(error)
    if isinstance(error, _PUBLIC_ERRORS):
        return {"name": data.name, "fields": data.fields}
    return {"name": data.name, "fields": {}}


def error_from_json(value: object, message: str) -> TrioEngineError | None:
    """The exception that `error_to_json` was given, to be raised. `message` is for where it has none. None: it was no
    such exception.
    """
    if not isinstance(value, dict):
        return None
    named = cast("Mapping[str, Any]", value)
    fields = named.get("fields")
    if not isinstance(named.get("name"), str) or not isinstance(fields, dict):
        return None
    own = cast("dict[str, str | int | float | None]", fields)
    return error_from_data(ErrorData(named["name"], own or {"message": message}))


def dumps(value: object) -> bytes:
    """Compact JSON, ASCII."""
    return _ENCODER.encode(value).encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _choice_to_json(choice: CompletionOutput) -> bytes:
    head = b'{"index":%d,"text":%b,"token_ids":[%b]' % (
        choice.index,
        encode_basestring_ascii(choice.text).encode(),
        ",".join(map(str, choice.token_ids)).encode(),
    )
    if choice.finish_reason is None and choice.logprobs is None:
        # Nearly all are like this one.
        return head + b"}"
    more: dict[str, object] = {}
    if choice.finish_reason is not None:
        more["finish_reason"] = choice.finish_reason
    if choice.stop_reason is not None:
        more["stop_reason"] = choice.stop_reason
    if choice.logprobs is not None:
        more["logprobs"] = to_json(choice.logprobs)
    return head + b"," + dumps(more)[1:]


def _choice_from_json(value: Mapping[str, Any]) -> CompletionOutput:
    reason, logprobs = value.get("finish_reason"), value.get("logprobs")
    return CompletionOutput(
        value["index"],
        value["text"],
        tuple(value["token_ids"]),
        None if reason is None else FinishReason(reason),
        value.get("stop_reason"),
        None if logprobs is None else tuple([_position(each) for each in logprobs]),
    )


def _position_to_json(position: PositionLogprobs) -> JsonObject:
    return {"chosen": _logprob_to_json(position.chosen), "top": [_logprob_to_json(each) for each in position.top]}


def _logprob_to_json(logprob: Logprob) -> JsonObject:
    return {
        "token_id": logprob.token_id,
        "logprob": logprob.logprob,
        "rank": logprob.rank,
        "token_bytes": base64.b64encode(logprob.token_bytes).decode(),
    }


def _position(value: Mapping[str, Any]) -> PositionLogprobs:
    return PositionLogprobs(_logprob(value["chosen"]), tuple([_logprob(each) for each in value["top"]]))


def _logprob(value: Mapping[str, Any]) -> Logprob:
    return Logprob(value["token_id"], value["logprob"], value["rank"], _bytes(value["token_bytes"]))


def _bytes(value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError("expected base64")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"expected base64: {error}") from None


def _first_problem(error: Exception) -> tuple[str, str]:
    """What is wrong, and where."""
    described = transform_error(error, path="")[0]
    problem, _, path = described.rpartition(" @ ")
    return (problem or described)[:500], path.removeprefix(".")[:200]


def _structure_scalar(value: object, _: object) -> str | int | float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int, float))):
        raise TypeError("expected a string or a number")
    return value


def _structure_none(value: object, _: object) -> None:
    if value is not None:
        raise TypeError("expected null")


def _structure_prompt(value: object, _: object) -> EncodePrompt:
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    keys = cast("Mapping[str, object]", value).keys()
    prompts: Sequence[tuple[str, type[EncodePrompt]]] = (
        ("text", TextPrompt),
        ("token_ids", TokensPrompt),
        ("messages", ChatPrompt),
        ("first", TextPairPrompt),
    )
    for name, prompt_class in prompts:
        if name in keys:
            return _READER.structure(value, prompt_class)
    raise ValueError("expected one of text, token_ids, messages")


def _structure_generate_prompt(value: object, type_: object) -> Prompt:
    prompt = _structure_prompt(value, type_)
    if isinstance(prompt, TextPairPrompt):
        raise ValueError("expected one of text, token_ids, messages")
    return prompt


def _structure_logit_bias(value: object, _: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    biases = _READER.structure(cast(object, value), dict[str, float])
    return {int(token_id): bias for token_id, bias in biases.items()}


def _make_reader() -> Converter:
    converter = make_strict_converter(forbid_extra_keys=True)
    converter.register_structure_hook(bytes, lambda value, _: _bytes(value))
    converter.register_structure_hook(NoneType, _structure_none)
    converter.register_structure_hook(str | int | float | None, _structure_scalar)
    converter.register_structure_hook_func(lambda type_: type_ is object, lambda value, _: value)
    converter.register_structure_hook_func(lambda type_: type_ == Prompt, _structure_generate_prompt)
    converter.register_structure_hook_func(lambda type_: type_ == EncodePrompt, _structure_prompt)
    structure_sampling = make_dict_structure_fn(
        SamplingParams, converter, logit_bias=override(struct_hook=_structure_logit_bias)
    )

    def structure_sampling_strictly(value: object, type_: type[SamplingParams]) -> SamplingParams:
        if not isinstance(value, dict):
            raise TypeError("expected an object")
        return structure_sampling(cast("Mapping[str, object]", value), type_)

    converter.register_structure_hook(SamplingParams, structure_sampling_strictly)
    return converter


def _make_writer() -> Converter:
    converter = Converter(omit_if_default=True)
    converter.register_unstructure_hook(bytes, lambda data: base64.b64encode(data).decode())
    # It is a mapping too, which it would be taken for.
    converter.register_unstructure_hook(PositionLogprobs, _position_to_json)
    return converter


_READER = _make_reader()
_WRITER = _make_writer()
