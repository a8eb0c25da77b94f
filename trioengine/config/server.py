"""`ServerConfig`: what a user may decide about the HTTP server."""

import attrs

from trioengine.config.options import documented, flag, integer, number, text


@attrs.frozen(kw_only=True)
class ServerConfig:
    """The options of one HTTP server, checked one by one.

    Raises:
        ConfigError: a value cannot work. `option` is its name.
    """

    host: str = attrs.field(
        default="127.0.0.1",
        validator=text(),
        metadata=documented("The address to listen on. Anything but a loopback address opens the engine to others."),
    )
    port: int = attrs.field(
        default=8000,
        validator=integer(0, 65535),
        metadata=documented("The TCP port to listen on. 0 takes a free one, and the log says which."),
    )
    max_body_bytes: int = attrs.field(
        default=32 * 1024 * 1024,
        validator=integer(1),
        metadata=documented("The largest request body. A larger one is answered with 413."),
    )
    max_connections: int = attrs.field(
        default=4096,
        validator=integer(1),
        metadata=documented("The most connections at once. Others wait in the kernel's queue."),
    )
    max_header_bytes: int = attrs.field(
        default=64 * 1024,
        validator=integer(1024),
        metadata=documented("The largest head of a request. A larger one is answered with 431."),
    )
    keep_alive_timeout_s: float = attrs.field(
        default=75.0,
        validator=number(0.001),
        metadata=documented("Seconds after which a connection without a request is closed."),
    )
    header_timeout_s: float = attrs.field(
        default=20.0,
        validator=number(0.001),
        metadata=documented("Seconds that a client has to send the head of a request it has begun."),
    )
    write_timeout_s: float = attrs.field(
        default=60.0,
        validator=number(0.001),
        metadata=documented("Seconds after which a client that does not read is disconnected."),
    )
    shutdown_timeout_s: float = attrs.field(
        default=30.0,
        validator=number(0.0),
        metadata=documented("Seconds that running requests get to finish after a stop signal."),
    )
    strict: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented(
            "Refuse max_tokens above what the context leaves with 400, instead of lowering it with a warning header."
        ),
    )
