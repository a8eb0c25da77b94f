"""Queries, bodies and replies of the routes that operate a server. Names are vLLM's."""

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import attrs

from trioengine.errors import RequestError
from trioengine.openai.protocol import make_request_converter, parse_fields, register_object, structure_body
from trioengine.types.messages import PauseMode

Q = TypeVar("Q", bound=attrs.AttrsInstance)


@attrs.frozen
class SleepQuery:
    """The query of `POST /sleep`."""

    level: int = attrs.field(default=1, metadata={"schema": {"enum": [1, 2]}})
    """1 gives back the KV cache's memory, 2 that of the weights too."""
    mode: PauseMode = PauseMode.ABORT
    """What becomes of the requests that are there."""


@attrs.frozen
class WakeUpQuery:
    """The query of `POST /wake_up`."""

    tags: tuple[str, ...] = attrs.field(
        default=(), metadata={"schema": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}}
    )
    """What memory to take again; none is all."""


@attrs.frozen
class PauseQuery:
    """The query of `POST /pause`."""

    mode: PauseMode = PauseMode.ABORT
    """What becomes of the requests that are there."""
    clear_cache: bool = True
    """Forget what was computed, as new weights need."""


@attrs.frozen
class ProfileQuery:
    """The query of `POST /start_profile`."""

    prefix: str | None = None
    """The trace's name begins with it."""


@attrs.frozen
class DebugQuery:
    """The query of `GET /debug/tasks`."""

    format: str = attrs.field(default="json", metadata={"schema": {"enum": ["json", "text"]}})


@attrs.frozen(kw_only=True)
class CollectiveRPCRequest:
    """The body of `POST /collective_rpc`."""

    method: str
    """One that workers have marked for it."""
    args: tuple[object, ...] = attrs.field(default=(), metadata={"schema": {"type": "array", "maxItems": 0}})
    """Must be empty: arguments have names here."""
    kwargs: Mapping[str, object] = attrs.field(factory=dict[str, object])
    timeout: float | None = attrs.field(default=None, metadata={"schema": {"exclusiveMinimum": 0}})
    """Seconds to wait for the replies."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the body that nobody here knows, and that had no effect."""


@attrs.frozen
class CollectiveRPCReply:
    """The reply of `POST /collective_rpc`."""

    results: tuple[object, ...]
    """What each worker has returned, rank by rank."""


@attrs.frozen
class StatusReply:
    """The reply of a route that has nothing else to tell."""

    status: str


@attrs.frozen
class IsSleepingReply:
    """The reply of `GET /is_sleeping`."""

    is_sleeping: bool


@attrs.frozen
class IsPausedReply:
    """The reply of `GET /is_paused`."""

    is_paused: bool


@attrs.frozen
class ResetPrefixCacheReply:
    """The reply of `POST /reset_prefix_cache`."""

    was_reset: bool
    """False where requests hold blocks; nothing is forgotten then."""


@attrs.frozen
class ProfileReply:
    """The reply of `POST /stop_profile`."""

    path: str
    """Of the trace, on the engine's machine."""


@attrs.frozen
class VersionReply:
    """The reply of `GET /version`."""

    version: str


def parse_query(values: Mapping[str, Sequence[str]], query_class: type[Q]) -> Q:
    """The query of a URL: each parameter once, but lists.

    Raises:
        RequestError: naming the parameter at fault, also where there is none of this name.
    """
    known = {field.name: field for field in attrs.fields(query_class)}
    fields: dict[str, object] = {}
    for name, texts in values.items():
        if name not in known:
            raise RequestError(f"{name[:100]} is no parameter of this address.", param=name)
        type_ = known[name].type
        if type_ == tuple[str, ...]:
            fields[name] = tuple(texts)
        elif len(texts) != 1:
            raise RequestError(f"{name} is there {len(texts)} times.", param=name)
        else:
            fields[name] = _value(name, texts[0], type_)
    return query_class(**fields)


def parse_collective_rpc_request(body: bytes) -> CollectiveRPCRequest:
    """What to run.

    Raises:
        RequestError: `param` is the path of the field at fault.
    """
    request = structure_body(_CONVERTER, parse_fields(body, {}), CollectiveRPCRequest)
    if request.args:
        raise RequestError("args must be empty: give the arguments their names, in kwargs.", param="args")
    return request


def _value(name: str, text: str, type_: object) -> object:
    if type_ in (int, int | None):
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
        raise RequestError(f"{name} must be a number.", param=name)
    if type_ is bool:
        if text.lower() in ("true", "1", "false", "0"):
            return text.lower() in ("true", "1")
        raise RequestError(f"{name} must be true or false.", param=name)
    if type_ is PauseMode:
        if text in tuple(PauseMode):
            return PauseMode(text)
        raise RequestError(f"{name} must be one of {', '.join(PauseMode)}.", param=name)
    return cast(object, text)


_CONVERTER = make_request_converter()
register_object(_CONVERTER, CollectiveRPCRequest)
