"""What an operator can set about listening, limits and deadlines. Knows nothing about the application behind it."""

import ssl
from typing import Any

import attrs

from trioengine.errors import ConfigError

MIB = 1024 * 1024


def _positive(_instance: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{attribute.name} must be greater than 0, not {value!r}", option=attribute.name)


def _not_negative(_instance: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    if not value >= 0:
        raise ConfigError(f"{attribute.name} must not be negative, not {value!r}", option=attribute.name)


@attrs.frozen(kw_only=True)
class ServeConfig:
    """Where `serve` listens, and what it allows a client to cost."""

    host: str = "127.0.0.1"
    port: int = attrs.field(default=8000, validator=_not_negative)
    """0 takes a free port; the address that `serve` reports has the real one."""
    tls: ssl.SSLContext | None = None
    """A server-side context with its certificate loaded. `serve` sets its ALPN protocols."""
    http2: bool = False
    """Offer HTTP/2 by ALPN. Needs `tls`: in clear text HTTP/2 is always refused."""

    max_connections: int = attrs.field(default=4096, validator=_positive)
    """Above it new connections wait in the kernel's queue."""
    max_header_bytes: int = attrs.field(default=64 * 1024, validator=_positive)
    max_body_bytes: int = attrs.field(default=32 * MIB, validator=_positive)
    """A longer request body is answered with 413, before the application holds all of it."""

    header_timeout_s: float = attrs.field(default=20.0, validator=_positive)
    """From the first byte of a request to the end of its header; also for a new connection that sends nothing."""
    keep_alive_timeout_s: float = attrs.field(default=75.0, validator=_positive)
    """How long a connection may wait for its next request."""
    write_timeout_s: float = attrs.field(default=60.0, validator=_positive)
    """How long a client may take to accept 64 KiB of a response; then its connection is dropped."""
    shutdown_timeout_s: float = attrs.field(default=30.0, validator=_not_negative)
    """How long requests in flight may go on after `shutdown` was set."""

    def __attrs_post_init__(self) -> None:
        if self.http2 and self.tls is None:
            raise ConfigError("http2 needs tls: HTTP/2 is chosen by ALPN only", option="http2")
