"""Who may use the server: API keys, the origins of web pages, the names that it is called by. Policy without I/O.

Nothing is open by default but what tells whether the server lives and the static page. A web page of another origin
may use it only when it is allowed to; whoever serves on a loopback address is called by a loopback name, or a page
could make its own name point there (DNS rebinding).
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from trioengine.config.server import ServerConfig
from trioengine.errors import AuthenticationError, ForbiddenError, RequestError

if TYPE_CHECKING:
    from hypercorn.typing import HTTPScope, WebsocketScope

PREFLIGHT_MAX_AGE_S = 600
EXPOSED_HEADERS = b"x-request-id, retry-after, x-trioengine-warning"
_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})
_OPEN_PREFIX = "/static/"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

Header = tuple[bytes, bytes]


@attrs.frozen
class Caller:
    """What a request says about where it comes from. Of a header that is there twice, the last."""

    authorization: bytes | None = None
    origin: str | None = None
    host: str | None = None
    asked_method: bytes | None = None
    """Of a preflight: the method of the request that is to follow."""
    asked_headers: bytes | None = None
    asks_for_private_network: bool = False

    @property
    def is_from_foreign_page(self) -> bool:
        """Whether a browser sends this for a page that is not the server's own.

        Compared without the scheme: in front of us a proxy may have ended TLS.
        """
        return self.origin is not None and self.origin.partition("://")[2] != self.host


def caller_of(headers: Iterable[Header]) -> Caller:
    """The caller in an ASGI scope's headers."""
    found = {name: value for name, value in headers if name in _CALLER_HEADERS}
    return Caller(
        authorization=found.get(b"authorization"),
        origin=_text(found.get(b"origin")),
        host=_text(found.get(b"host")),
        asked_method=found.get(b"access-control-request-method"),
        asked_headers=found.get(b"access-control-request-headers"),
        asks_for_private_network=found.get(b"access-control-request-private-network") == b"true",
    )


_CALLER_HEADERS = frozenset(
    {
        b"authorization",
        b"origin",
        b"host",
        b"access-control-request-method",
        b"access-control-request-headers",
        b"access-control-request-private-network",
    }
)


class AccessRules:
    """The rules of one server."""

    def __init__(self, config: ServerConfig, *, is_loopback: bool) -> None:
        """`is_loopback`: nobody but this machine can connect, over TCP."""
        self._key_digests = [_digest(key.encode()) for key in config.api_key]
        self._origins = frozenset(config.allowed_origins)
        self._allows_any_origin = "*" in self._origins
        self._allows_credentials = config.allow_credentials
        self._methods = ", ".join(config.allowed_methods).encode()
        self._headers = ", ".join(config.allowed_headers).encode()
        names = (*config.allowed_hosts, *((*_LOOPBACK_NAMES, config.host) if is_loopback else ()))
        self._checks_host = bool(names) and "*" not in names
        self._hosts = frozenset(name.lower() for name in names if not name.startswith("*."))
        self._host_endings = tuple(name[1:].lower() for name in names if name.startswith("*."))

    @property
    def needs_key(self) -> bool:
        """Whether there are keys at all."""
        return bool(self._key_digests)

    def check_caller(self, scope: "HTTPScope | WebsocketScope", caller: Caller) -> RequestError | None:
        """What is wrong with where the request comes from, whatever its key is."""
        if self._checks_host and caller.host is not None and not self._is_ours(caller.host):
            return ForbiddenError("This server does not go by the name in the Host header (see --allowed-hosts).")
        changes_something = scope["type"] == "websocket" or scope["method"] not in _READING_METHODS
        if changes_something and caller.is_from_foreign_page and not self._allows(caller.origin):
            return ForbiddenError("Web pages of this origin may not use this server (see --allowed-origins).")
        return None

    def check_key(self, scope: "HTTPScope", path: str, caller: Caller) -> RequestError | None:
        """What is wrong with the request's key, if it needs one. `path` is the one below the root path."""
        if not self._key_digests or self.is_key(caller.authorization):
            return None
        if scope["method"] in ("GET", "HEAD") and (path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX)):
            return None
        if caller.authorization is None:
            return AuthenticationError("An API key is needed, as Authorization: Bearer.")
        return AuthenticationError("The API key is not one of this server's.")

    def is_key(self, authorization: bytes | None) -> bool:
        """Whether an `Authorization` header holds a key. Takes as long whichever key it is, or none."""
        scheme, _, token = (authorization or b"").partition(b" ")
        digest = _digest(token.strip())
        is_known = False
        for known in self._key_digests:
            is_known |= hmac.compare_digest(digest, known)
        return is_known and scheme.lower() == b"bearer"

    def is_preflight(self, scope: "HTTPScope", caller: Caller) -> bool:
        """Whether a browser asks what a page may do, which carries no key and is answered here."""
        return scope["method"] == "OPTIONS" and caller.origin is not None and caller.asked_method is not None

    def preflight_headers(self, caller: Caller) -> Sequence[Header] | None:
        """Of the answer to a preflight, besides what every response carries; None when the page may do nothing."""
        if caller.is_from_foreign_page and not self._allows(caller.origin):
            return None
        methods = (caller.asked_method or b"") if self._methods == b"*" else self._methods
        headers = (caller.asked_headers or b"") if self._headers == b"*" else self._headers
        answer = [
            (b"access-control-allow-methods", methods),
            (b"access-control-max-age", b"%d" % PREFLIGHT_MAX_AGE_S),
        ]
        if headers:
            answer.append((b"access-control-allow-headers", headers))
        if caller.asks_for_private_network:
            answer.append((b"access-control-allow-private-network", b"true"))
        return answer

    def response_headers(self, caller: Caller) -> Sequence[Header]:
        """What every response to this caller carries, so that a page that is allowed to can read it, errors too."""
        if not self._origins:
            return ()
        if self._allows_any_origin:
            return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED_HEADERS))
        vary = (b"vary", b"Origin")
        if caller.origin is None or not self._allows(caller.origin):
            return (vary,)
        headers = [
            vary,
            (b"access-control-allow-origin", caller.origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED_HEADERS),
        ]
        if self._allows_credentials:
            headers.append((b"access-control-allow-credentials", b"true"))
        return headers

    def _allows(self, origin: str | None) -> bool:
        return self._allows_any_origin or origin in self._origins

    def _is_ours(self, host: str) -> bool:
        # The port is left out: a forwarded one may differ, and a page cannot choose the name but by its own.
        name, _, port = host.lower().rpartition(":")
        if not name or not port.isdigit():
            name = host.lower()
        name = name.rstrip(".")
        return name in self._hosts or name.endswith(self._host_endings)


def _digest(key: bytes) -> bytes:
    # Of one length, so that a comparison tells nothing about it.
    return hashlib.sha256(key).digest()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
