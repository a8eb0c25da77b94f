"""Every exception TrioEngine raises on purpose: whose fault it is, its code, and the HTTP status a server answers with.

One class per reaction, not per place. A caller that can fix its input catches `RequestError`; one that can try
again later catches `UnavailableError`; `EngineDeadError` means that the engine must be opened anew. Errors cross
process borders as data (`types.codec`) and are raised on the other side as the same class, so every field is plain
data and every subclass is attrs.
"""

from typing import ClassVar

import attrs


@attrs.define(eq=False, str=False)
class TrioEngineError(Exception):
    """Base of all errors. Never raised itself."""

    message: str

    code: ClassVar[str] = "internal_error"
    """Machine-readable, stable, in `error.code` of an HTTP answer."""
    status: ClassVar[int] = 500
    """HTTP status code."""
    error_type: ClassVar[str] = "internal_error"
    """OpenAI's `error.type`."""

    def __attrs_post_init__(self) -> None:
        # Exception.__reduce__ rebuilds from `args`; without this pickling and copying lose the fields.
        self.args = attrs.astuple(self, recurse=False)

    def __str__(self) -> str:
        return self.message


# The request's author is at fault: change the request.


@attrs.define(eq=False, str=False)
class RequestError(TrioEngineError):
    """The request cannot be honoured as it is. Nothing was run. `param` is the path of the field at fault."""

    param: str | None = None

    code: ClassVar[str] = "invalid_value"
    status: ClassVar[int] = 400
    error_type: ClassVar[str] = "invalid_request_error"


@attrs.define(eq=False, str=False, kw_only=True)
class PromptTooLongError(RequestError):
    """The prompt is longer than the context, or leaves no room for an answer.

    Shorten it or use a model with a longer context.
    """

    message: str = attrs.field(init=False)
    param: str | None = "prompt"
    num_prompt_tokens: int
    max_model_len: int

    code: ClassVar[str] = "context_length_exceeded"

    def __attrs_post_init__(self) -> None:
        is_too_much = self.num_prompt_tokens > self.max_model_len
        self.message = (
            f"The prompt has {self.num_prompt_tokens} tokens, which "
            f"{'is too much' if is_too_much else 'leaves no room for an answer'}: "
            f"this model's maximum context length is {self.max_model_len} tokens."
        )
        self.args = (self.message,)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), attrs.asdict(self, filter=lambda attribute, _: attribute.init))


@attrs.define(eq=False, str=False)
class ModelNotFoundError(RequestError):
    """The server does not serve this model. Ask `/v1/models` which it serves."""

    code: ClassVar[str] = "model_not_found"
    status: ClassVar[int] = 404
    error_type: ClassVar[str] = "not_found_error"


@attrs.define(eq=False, str=False)
class NotFoundError(RequestError):
    """There is nothing at this address."""

    code: ClassVar[str] = "not_found"
    status: ClassVar[int] = 404
    error_type: ClassVar[str] = "not_found_error"


@attrs.define(eq=False, str=False)
class MethodNotAllowedError(RequestError):
    """The address exists, the method does not."""

    code: ClassVar[str] = "method_not_allowed"
    status: ClassVar[int] = 405


@attrs.define(eq=False, str=False)
class MediaTypeError(RequestError):
    """The request's body is not declared as what this address takes."""

    code: ClassVar[str] = "unsupported_media_type"
    status: ClassVar[int] = 415


@attrs.define(eq=False, str=False)
class AuthenticationError(RequestError):
    """The request has no API key, or one that this server does not know."""

    code: ClassVar[str] = "invalid_api_key"
    status: ClassVar[int] = 401


@attrs.define(eq=False, str=False)
class ForbiddenError(RequestError):
    """The request comes from where this server takes none from: a foreign web page, or by a name it does not have."""

    code: ClassVar[str] = "forbidden"
    status: ClassVar[int] = 403


@attrs.define(eq=False, str=False)
class SlowRequestError(RequestError):
    """The request's body took longer to arrive than the server waits."""

    code: ClassVar[str] = "request_timeout"
    status: ClassVar[int] = 408


@attrs.define(eq=False, str=False)
class BodyTooLargeError(RequestError):
    """The request's body is over the server's limit."""

    code: ClassVar[str] = "request_too_large"
    status: ClassVar[int] = 413


# Nobody is at fault: try again later.


@attrs.define(eq=False, str=False)
class UnavailableError(TrioEngineError):
    """The engine takes no new work now: it is full, or it is shutting down. Nothing was run; try again later."""

    retry_after_s: float = 1.0

    code: ClassVar[str] = "overloaded"
    status: ClassVar[int] = 503
    error_type: ClassVar[str] = "service_unavailable_error"


@attrs.define(eq=False, str=False)
class DeadlineExceededError(TrioEngineError):
    """A deadline that the request carried has passed; the core has dropped it."""

    code: ClassVar[str] = "deadline_exceeded"
    status: ClassVar[int] = 504
    error_type: ClassVar[str] = "timeout_error"


# The engine is at fault.


@attrs.define(eq=False, str=False)
class EngineGenerateError(TrioEngineError):
    """This one request failed inside the engine. The engine and all other requests go on."""

    code: ClassVar[str] = "generation_failed"


@attrs.define(eq=False, str=False)
class EngineDeadError(TrioEngineError):
    """The engine core has died or hangs. Every waiting and later request gets this; open the engine anew."""

    cause: str | None = None
    """Traceback or exit status of the core, for logs. Never sent to a client of the server."""

    code: ClassVar[str] = "engine_dead"
    status: ClassVar[int] = 503
    error_type: ClassVar[str] = "service_unavailable_error"


@attrs.define(eq=False, str=False)
class EngineClosedError(TrioEngineError):
    """The engine was used outside its `async with open_engine(...)` block. A bug in the calling program."""

    code: ClassVar[str] = "engine_closed"
    status: ClassVar[int] = 503
    error_type: ClassVar[str] = "service_unavailable_error"


@attrs.define(eq=False, str=False)
class ApiServerDiedError(TrioEngineError):
    """One of several API-server processes has ended unasked, or not when asked. The others were ended with it."""

    code: ClassVar[str] = "api_server_died"


# Whoever set the engine up is at fault: change the options or the files.


@attrs.define(eq=False, str=False)
class EngineStartError(TrioEngineError):
    """The engine core could not start. No process is left behind; the message says why."""

    code: ClassVar[str] = "engine_start_failed"


@attrs.define(eq=False, str=False)
class ServerStartError(TrioEngineError):
    """The HTTP server cannot listen, or its application's startup failed. Nothing listens; the message says why."""

    code: ClassVar[str] = "server_start_failed"


@attrs.define(eq=False, str=False)
class ConfigError(TrioEngineError):
    """An option has a value that cannot work. `option` is its name."""

    option: str | None = None

    code: ClassVar[str] = "invalid_config"


@attrs.define(eq=False, str=False)
class CheckpointError(TrioEngineError):
    """A model file is missing, truncated, malformed or of a kind this engine cannot run. `path` says which file."""

    path: str | None = None

    code: ClassVar[str] = "invalid_checkpoint"


@attrs.define(eq=False, str=False)
class CodecError(TrioEngineError):
    """Bytes are not a message of the expected kind. `path` is the place inside the message."""

    path: str | None = None

    code: ClassVar[str] = "invalid_message"


@attrs.define(eq=False, str=False)
class BenchError(TrioEngineError):
    """A benchmark could not be finished, so there are no figures. The message says what the measured side did."""

    code: ClassVar[str] = "benchmark_failed"


def _rebuild(error_class: type[TrioEngineError], fields: dict[str, object]) -> TrioEngineError:
    return error_class(**fields)  # pyright: ignore[reportArgumentType]


@attrs.define(eq=False, str=False)
class PeerUnreachableError(TrioEngineError):
    """The process that a message is for is not connected: it has gone, or has not come yet. Nothing was sent."""

    code: ClassVar[str] = "peer_unreachable"
