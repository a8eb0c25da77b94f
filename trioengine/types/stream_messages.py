"""What a client says on `/v1/stream`, for those who say it and who hear it. `docs/stream-protocol.md` has it all."""

import enum
from typing import TypeAlias

import attrs

from trioengine.types.native_json import JsonObject, dumps

PROTOCOL_VERSION = 1
STREAM_PATH = "/v1/stream"
MAX_ID_CHARS = 128


class Endpoint(enum.StrEnum):
    """What a request asks for, and by which rules."""

    CHAT = "chat"
    """As `/v1/chat/completions`."""
    COMPLETIONS = "completions"
    """As `/v1/completions`."""
    GENERATE = "generate"
    """Native: a `GenerateRequest`."""
    ENCODE = "encode"
    """Native: an `EncodeRequest`."""
    CALL = "call"
    """Native: an operation."""
    DESCRIBE = "describe"
    """Native: what the engine is."""

    @property
    def is_native(self) -> bool:
        """Whether it carries TrioEngine's own objects."""
        return self not in (Endpoint.CHAT, Endpoint.COMPLETIONS)


@attrs.frozen
class Hello:
    """The first message."""

    version: int
    api_key: str | None = attrs.field(default=None, repr=False)


@attrs.frozen
class Create:
    """Start a request."""

    id: str
    endpoint: str
    """An `Endpoint`, or a word that is none."""
    body: JsonObject
    credits: int | None = None
    """Chunks that may be sent before more credit comes; None is any number."""


@attrs.frozen
class Credit:
    """A request may send so many chunks more."""

    id: str
    n: int


@attrs.frozen
class Cancel:
    """End a request."""

    id: str


ClientMessage: TypeAlias = Hello | Create | Credit | Cancel

MESSAGE_TYPES: dict[str, type[ClientMessage]] = {"hello": Hello, "create": Create, "credit": Credit, "cancel": Cancel}

_NAMES = {message_class: name for name, message_class in MESSAGE_TYPES.items()}


def write_message(message: ClientMessage) -> str:
    """The text of a message."""
    fields = attrs.asdict(message, recurse=False, filter=lambda _, value: value is not None)
    return dumps({"type": _NAMES[type(message)], **fields}).decode()


@attrs.frozen(kw_only=True)
class StreamLimits:
    """What one connection may take."""

    max_open_requests: int = 256
    max_message_bytes: int = 32 * 1024 * 1024
    max_model_len: int = 0
    """Of the model, for clients that count."""
