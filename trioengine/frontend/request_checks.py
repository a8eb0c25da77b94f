"""The rules of a request that need neither the model nor its parameters: each violation names its field."""

import math
from collections.abc import Mapping
from types import NoneType

import attrs

from trioengine.errors import RequestError
from trioengine.types.params import check_text
from trioengine.types.pooling import EncodeRequest
from trioengine.types.request import MAX_LORA_NAME_CHARS, Deadlines, GenerateRequest, KVHints

MAX_CACHE_SALT_CHARS = 256
MAX_REQUEST_ID_CHARS = 1024
MAX_SESSION_ID_CHARS = 256
MAX_TRACE_HEADERS = 16
MAX_TRACE_HEADER_CHARS = 8192
"""Of a name or a value."""


def check_request(request: GenerateRequest | EncodeRequest) -> None:
    """Return when everything but prompt and parameters can work.

    Raises:
        RequestError: naming the first field at fault.
    """
    _check_name("request_id", request.request_id, MAX_REQUEST_ID_CHARS, may_be_empty=True)
    if type(request.priority) is not int or not -(2**31) <= request.priority < 2**31:
        raise RequestError("priority must be an integer of 32 bits.", param="priority")
    _check_name("cache_salt", request.cache_salt, MAX_CACHE_SALT_CHARS)
    _check_name("lora", request.lora, MAX_LORA_NAME_CHARS)
    _check_name("session_id", request.session_id, MAX_SESSION_ID_CHARS)
    rank = request.data_parallel_rank
    if rank is not None and (type(rank) is not int or rank < 0):
        raise RequestError("data_parallel_rank must be an integer, 0 or more.", param="data_parallel_rank")
    _check_deadlines(request.deadlines)
    _check_trace_headers(request.trace_headers)
    if isinstance(request, GenerateRequest):
        _check_generate_request(request)


def reasoning_ended(request: GenerateRequest) -> bool | None:
    """What request and parser's arguments together say of the prompt's reasoning; None leaves it to the prompt."""
    kwargs = request.reasoning_parser_kwargs
    if request.reasoning_ended is not None or not kwargs or "enable_thinking" not in kwargs:
        return request.reasoning_ended
    return not kwargs["enable_thinking"]


def _check_generate_request(request: GenerateRequest) -> None:
    if type(request.reasoning_ended) not in (bool, NoneType):
        raise RequestError("reasoning_ended must be True, False or None.", param="reasoning_ended")
    hints = request.kv_hints
    if hints is not None:
        if not isinstance(hints, KVHints):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("kv_hints must be a KVHints.", param="kv_hints")
        for field in attrs.fields(KVHints):
            if type(getattr(hints, field.name)) is not bool:
                raise RequestError(f"kv_hints.{field.name} must be True or False.", param=f"kv_hints.{field.name}")
    _check_reasoning_parser_kwargs(request.reasoning_parser_kwargs)


def _check_reasoning_parser_kwargs(kwargs: object) -> None:
    name = "reasoning_parser_kwargs"
    if kwargs is None:
        return
    if not isinstance(kwargs, Mapping):
        raise RequestError(f"{name} must be a mapping.", param=name)
    for key, value in kwargs.items():  # pyright: ignore[reportUnknownVariableType]
        if key != "enable_thinking":
            raise RequestError(f"{name} has no {str(key)[:50]!r}; it may have enable_thinking.", param=name)  # pyright: ignore[reportUnknownArgumentType]
        if type(value) is not bool:  # pyright: ignore[reportUnknownArgumentType]
            raise RequestError(f"{name}.enable_thinking must be True or False.", param=f"{name}.enable_thinking")


def _check_name(param: str, value: str | None, max_chars: int, *, may_be_empty: bool = False) -> None:
    if value is None:
        return
    check_text(value, param)
    if not (may_be_empty or value) or len(value) > max_chars:
        raise RequestError(f"{param} must have 1 to {max_chars} characters.", param=param)


def _check_deadlines(deadlines: Deadlines) -> None:
    if not isinstance(deadlines, Deadlines):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError("deadlines must be Deadlines.", param="deadlines")
    for field in attrs.fields(Deadlines):
        value: object = getattr(deadlines, field.name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            param = f"deadlines.{field.name}"
            raise RequestError(f"{param} must be a number of seconds above 0.", param=param)


def _check_trace_headers(headers: object) -> None:
    name = "trace_headers"
    if headers is None:
        return
    if not isinstance(headers, Mapping):
        raise RequestError(f"{name} must be a mapping from names to texts.", param=name)
    if len(headers) > MAX_TRACE_HEADERS:  # pyright: ignore[reportUnknownArgumentType]
        raise RequestError(f"{name} has {len(headers)}; the limit is {MAX_TRACE_HEADERS}.", param=name)  # pyright: ignore[reportUnknownArgumentType]
    for key, value in headers.items():  # pyright: ignore[reportUnknownVariableType]
        check_text(key, name)  # pyright: ignore[reportUnknownArgumentType]
        param = f"{name}.{str(key)[:50]}"  # pyright: ignore[reportUnknownArgumentType]
        check_text(value, param)  # pyright: ignore[reportUnknownArgumentType]
        if not 0 < len(key) <= MAX_TRACE_HEADER_CHARS or len(value) > MAX_TRACE_HEADER_CHARS:  # pyright: ignore[reportUnknownArgumentType]
            raise RequestError(f"{param} has more than {MAX_TRACE_HEADER_CHARS} characters, or no name.", param=param)
