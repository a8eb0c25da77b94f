"""The protocol of `/v1/stream`, one connection's server side: messages in, actions and bytes of messages out.

`docs/stream-protocol.md` is the specification, and its two state tables are the tables here. No I/O: the shell carries
messages, does what the actions say, and tells what became of each request. Texts that wait to be sent are kept here, so
that the shell sends several with one write and knows when to stop reading the engine.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import attrs
from cattrs import ClassValidationError

from trioengine.errors import RequestError, UnavailableError
from trioengine.openai.errors import error_fields, error_reply
from trioengine.openai.json_body import parse_object
from trioengine.openai.sse import DONE
from trioengine.types.codec import make_strict_converter
from trioengine.types.native_json import dumps, error_to_json
from trioengine.types.stream_messages import (
    MAX_ID_CHARS,
    MESSAGE_TYPES,
    PROTOCOL_VERSION,
    Cancel,
    ClientMessage,
    Create,
    Credit,
    Endpoint,
    Hello,
    StreamLimits,
)

CONGESTED_BYTES = 256 * 1024
"""While so much waits to be sent, no request is read."""
MAX_WAITING_BYTES = 1024 * 1024
"""Answers to messages are written whether or not the client reads. One that only writes is closed at this."""
MAX_CREDITS = 1 << 53
_MAX_FAULT_CHARS = 300


class CloseCode(enum.IntEnum):
    """Why the server closes, in RFC 6455's numbers."""

    NORMAL = 1000
    GOING_AWAY = 1001
    UNSUPPORTED_DATA = 1003
    POLICY_VIOLATION = 1008
    INTERNAL_ERROR = 1011


@attrs.frozen
class FaultyMessage:
    """A message that is none."""

    error: RequestError
    id: str | None = None
    """Where it had one that could be used."""


# Actions


@attrs.frozen
class StartRequest:
    """Start this request, and tell the session what becomes of it."""

    create: Create
    endpoint: Endpoint


@attrs.frozen
class CancelRequest:
    """Let the engine abort it, and go on to tell: what waits comes, then its end."""

    id: str


@attrs.frozen
class ResumeRequest:
    """It may be read again."""

    id: str


@attrs.frozen
class CloseConnection:
    """Send what waits, then close."""

    code: CloseCode
    reason: str


Action: TypeAlias = StartRequest | CancelRequest | ResumeRequest | CloseConnection


def parse_message(text: str) -> ClientMessage | FaultyMessage:
    """The message in this text."""
    try:
        fields = parse_object(text.encode())
    except RequestError as error:
        fault = attrs.evolve(error, message=error.message.replace("The body of the request", "A message"))
        return FaultyMessage(fault, _id_in(text))
    name = fields.pop("type", None)
    id_ = _usable_id(fields)
    message_class = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    if message_class is None:
        return FaultyMessage(RequestError(f"type must be one of {', '.join(MESSAGE_TYPES)}.", param="type"), id_)
    try:
        message = _CONVERTER.structure(fields, message_class)
    except Exception as error:  # A border: whatever a stranger sends becomes one kind of error.
        return FaultyMessage(_message_error(error, cast(str, name), fields, message_class), id_)
    fault = _fault_of(message)
    return message if fault is None else FaultyMessage(fault, id_)


def _id_in(text: str) -> str | None:
    """The id in a message that has something unusable elsewhere: whoever sent it waits for an answer by this name."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _usable_id(cast("dict[str, object]", fields)) if isinstance(fields, dict) else None


def _usable_id(fields: Mapping[str, object]) -> str | None:
    given = fields.get("id")
    return given if isinstance(given, str) and _is_id(given) else None


class _State(enum.Enum):
    NEW = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class _RequestState(enum.Enum):
    STARTING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()


@attrs.define
class _Request:
    endpoint: Endpoint
    before_data: bytes
    """A chunk up to its data."""
    credits: float
    """Infinite where the client does not count."""
    state: _RequestState = _RequestState.STARTING


class StreamSession:
    """One connection. Every method is told what happened, and none waits."""

    def __init__(self, model_name: str, limits: StreamLimits | None = None) -> None:
        self._model_name = model_name
        self._limits = StreamLimits() if limits is None else limits
        self._state = _State.NEW
        self._requests: dict[str, _Request] = {}
        self._waiting: list[bytes] = []
        self._num_waiting_bytes = 0
        self._is_draining = False

    @property
    def is_new(self) -> bool:
        """Whether the client has not said `hello`."""
        return self._state is _State.NEW

    @property
    def is_closed(self) -> bool:
        """Whether nothing is heard or said any more."""
        return self._state is _State.CLOSED

    @property
    def live_ids(self) -> Sequence[str]:
        """Of the requests that have no end yet."""
        return tuple(self._requests)

    @property
    def is_congested(self) -> bool:
        """Whether so much waits to be sent that no request may be read."""
        return self._num_waiting_bytes >= CONGESTED_BYTES

    @property
    def has_waiting(self) -> bool:
        """Whether there is something to send."""
        return bool(self._waiting)

    def take_waiting(self) -> Sequence[bytes]:
        """All that is to be sent, a text for each message, in order."""
        waiting, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        return waiting

    # What the client does

    def receive(self, message: ClientMessage | FaultyMessage) -> Sequence[Action]:
        """Take a message in. What is to be done; answers wait in `take_waiting`."""
        match self._state, message:
            case _State.CLOSED, _:
                return ()
            case _State.NEW, Hello(version):
                actions = self._greet(version)
            case _State.NEW, _:
                actions = self._violate("The first message must be hello.")
            case _, Hello():
                actions = self._violate("hello is said once.")
            case _, Create():
                actions = self._create(message)
            case _, Credit(id_, n):
                actions = self._give_credit(id_, n)
            case _, Cancel(id_):
                actions = self._cancel(id_)
            case _, FaultyMessage(error, id_):
                # Of a live request it would be the end, which this is not.
                self._say_error(None if id_ in self._requests else id_, error)
                actions = ()
        if self._num_waiting_bytes > MAX_WAITING_BYTES and not self.is_closed:
            return (*actions, *self.close(CloseCode.POLICY_VIOLATION, "The client does not read."))
        return actions

    def receive_bytes(self) -> Sequence[Action]:
        """A binary message came."""
        return self.close(CloseCode.UNSUPPORTED_DATA, "Messages are text.")

    def time_out(self) -> Sequence[Action]:
        """The client has said nothing for too long."""
        return self._violate("hello was waited for too long.") if self.is_new else ()

    def drain(self) -> Sequence[Action]:
        """Take no request more, and close when the last one has ended."""
        self._is_draining = True
        return self._close_if_drained()

    def close(self, code: CloseCode, reason: str) -> Sequence[Action]:
        """End the connection. Its requests are forgotten, and what waits is still to be sent."""
        if self.is_closed:
            return ()
        self._state = _State.CLOSED
        self._requests.clear()
        return (CloseConnection(code, reason),)

    # What becomes of requests

    def may_read(self, id_: str) -> bool:
        """Whether a request's next output may be read."""
        request = self._requests.get(id_)
        if request is None:
            return True  # It will find out by itself that nobody listens.
        has_credit = request.credits > 0 or request.state is _RequestState.ENDING
        return has_credit and self._num_waiting_bytes < CONGESTED_BYTES

    def is_live(self, id_: str) -> bool:
        """Whether a request has no end yet."""
        return id_ in self._requests

    def started(
        self, id_: str, num_prompt_tokens: int, warnings: Sequence[str] = (), more: Mapping[str, object] | None = None
    ) -> None:
        """The engine has a request. `more`: what native forms tell besides."""
        request = self._requests.get(id_)
        if request is None:
            return
        if request.state is _RequestState.STARTING:
            request.state = _RequestState.RUNNING
        fields = {"type": "started", "id": id_, "prompt_tokens": num_prompt_tokens, "warnings": list(warnings)}
        self._say(dumps({**fields, **(more or {})}))

    def chunk(self, id_: str, data: bytes) -> None:
        """Something new of a request: a JSON object."""
        request = self._requests.get(id_)
        if request is None:
            return
        request.credits -= 1
        self._say(request.before_data + data + b"}")

    def done(self, id_: str, finish: Sequence[str] = (), usage: Mapping[str, object] | None = None) -> Sequence[Action]:
        """A request has ended well, or was cancelled."""
        if self._requests.pop(id_, None) is None:
            return ()
        self._say(dumps({"type": "done", "id": id_, "finish": list(finish), "usage": usage}))
        return self._close_if_drained()

    def fail(self, id_: str, error: Exception) -> Sequence[Action]:
        """A request has ended with this."""
        request = self._requests.pop(id_, None)
        if request is None:
            return ()
        self._say_error(id_, error, is_native=request.endpoint.is_native)
        return self._close_if_drained()

    # Transitions

    def _greet(self, version: int) -> Sequence[Action]:
        if version != PROTOCOL_VERSION:
            return self._violate(f"This server speaks version {PROTOCOL_VERSION} of the protocol, not {version}.")
        self._state = _State.OPEN
        limits = attrs.asdict(self._limits)
        self._say(dumps({"type": "hello", "version": PROTOCOL_VERSION, "model": self._model_name, "limits": limits}))
        return ()

    def _create(self, create: Create) -> Sequence[Action]:
        if create.id in self._requests:
            return self._violate(f"The id {create.id!r} is that of a live request.")
        endpoint = next((each for each in Endpoint if each == create.endpoint), None)
        if endpoint is None:
            names = ", ".join(Endpoint)
            self._say_error(create.id, RequestError(f"endpoint must be one of {names}.", param="endpoint"))
            return ()
        refusal: UnavailableError | None = None
        if self._is_draining:
            refusal = UnavailableError("The server is shutting down.", retry_after_s=5.0)
        elif len(self._requests) >= self._limits.max_open_requests:
            limit = self._limits.max_open_requests
            refusal = UnavailableError(f"This connection has {limit} open requests, which is all it may have.")
        if refusal is not None:
            self._say_error(create.id, refusal, is_native=endpoint.is_native)
            return ()
        before_data = b'{"type":"chunk","id":' + json.dumps(create.id).encode() + b',"data":'
        credits = float("inf") if create.credits is None else create.credits
        self._requests[create.id] = _Request(endpoint, before_data, credits)
        return (StartRequest(create, endpoint),)

    def _give_credit(self, id_: str, n: int) -> Sequence[Action]:
        request = self._requests.get(id_)
        if request is None:
            return ()
        was_out = request.credits <= 0
        request.credits += n
        return (ResumeRequest(id_),) if was_out and request.credits > 0 else ()

    def _cancel(self, id_: str) -> Sequence[Action]:
        request = self._requests.get(id_)
        if request is None or request.state is _RequestState.ENDING:
            return ()
        if request.state is _RequestState.STARTING:
            return (CancelRequest(id_), *self.done(id_, ["abort"]))
        request.state = _RequestState.ENDING
        return (CancelRequest(id_), ResumeRequest(id_))

    def _violate(self, problem: str) -> Sequence[Action]:
        self._say_error(None, RequestError(problem))
        return self.close(CloseCode.POLICY_VIOLATION, problem)

    def _close_if_drained(self) -> Sequence[Action]:
        if not self._is_draining or self._requests:
            return ()
        return self.close(CloseCode.GOING_AWAY, "The server is shutting down.")

    # Texts

    def _say_error(self, id_: str | None, error: Exception, *, is_native: bool = False) -> None:
        fields: dict[str, object] = {"type": "error"}
        if id_ is not None:
            fields["id"] = id_
        fields |= {"status": error_reply(error).status, "error": error_fields(error, is_native=is_native)}
        if isinstance(error, UnavailableError):
            fields["retry_after_s"] = error.retry_after_s
        native = error_to_json(error) if is_native else None
        if native is not None:
            fields["native"] = native
        self._say(dumps(fields))

    def _say(self, text: bytes) -> None:
        if not self.is_closed:
            self._waiting.append(text)
            self._num_waiting_bytes += len(text)


# Chunks of the replies that HTTP has too


def event_data(events: bytes) -> Sequence[bytes]:
    """The JSON objects in server-sent events, without the end of the stream."""
    if events.endswith(DONE):
        events = events[: -len(DONE)]
    # Nearly all are one event. JSON in ASCII has no line ends.
    return [event[6:] for event in events[:-2].split(b"\n\n")] if events else ()


class FinishReasons:
    """Why each answer of a reply has ended, from the chunks that say so."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}

    def read(self, chunk: bytes) -> Mapping[str, object] | None:
        """Note what a chunk, or a whole reply, says. Returns its usage, where it has one."""
        fields = json.loads(chunk)
        for choice in fields.get("choices", ()):
            if choice.get("finish_reason") is not None:
                self._reasons[choice["index"]] = choice["finish_reason"]
        return fields.get("usage")

    @property
    def in_order(self) -> Sequence[str]:
        """One for each answer that has ended, in order of index."""
        return [reason for _, reason in sorted(self._reasons.items())]


def _is_id(text: str) -> bool:
    return 0 < len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable() and " " not in text


def _fault_of(message: ClientMessage) -> RequestError | None:
    """What the types of the fields cannot say."""
    if isinstance(message, Hello):
        return None
    if not _is_id(message.id):
        return RequestError(f"id must be 1 to {MAX_ID_CHARS} printable ASCII characters without spaces.", param="id")
    if isinstance(message, Credit) and not 1 <= message.n <= MAX_CREDITS:
        return RequestError("n must be at least 1.", param="n")
    if isinstance(message, Create) and message.credits is not None and not 0 <= message.credits <= MAX_CREDITS:
        return RequestError("credits must not be negative.", param="credits")
    return None


def _message_error(
    error: Exception, name: str, fields: Mapping[str, object], message_class: type[ClientMessage]
) -> RequestError:
    known = [field.name for field in attrs.fields(message_class)]
    unknown = sorted(fields.keys() - set(known))
    if unknown:
        field = unknown[0][:100]
        return RequestError(f"{name} has no field {field!r}.", param=field)
    if isinstance(error, ClassValidationError):
        noted, _ = error.group_exceptions()
        if noted:
            problem, field = noted[0][0], noted[0][1].name
            text = "is required" if isinstance(problem, KeyError) else f"is wrong: {problem}"
            return RequestError(f"{name}: {field} {text}."[:_MAX_FAULT_CHARS], param=field)
    return RequestError(f"This is no {name} message.")


_CONVERTER = make_strict_converter(forbid_extra_keys=True)
_CONVERTER.register_structure_hook_func(lambda type_: type_ is object, lambda value, _: value)
