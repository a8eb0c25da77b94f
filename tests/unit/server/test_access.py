"""Who may use a server: keys, origins, hosts. Values in, values out."""

from typing import Any, cast

import pytest
from hypercorn.typing import HTTPScope
from hypothesis import given
from hypothesis import strategies as st

from trioengine.config.server import ServerConfig
from trioengine.errors import AuthenticationError, ConfigError, ForbiddenError
from trioengine.server.access import AccessRules, Header, caller_of

KEYS = ("first-key", "second-key")


def scope(method: str = "POST", path: str = "/v1/models") -> HTTPScope:
    return cast(HTTPScope, {"type": "http", "method": method, "path": path})


def rules(*, is_loopback: bool = False, **options: Any) -> AccessRules:
    return AccessRules(ServerConfig(**options), is_loopback=is_loopback)


def key_error(headers: list[Header], method: str = "POST", path: str = "/v1/models") -> object:
    return rules(api_key=KEYS).check_key(scope(method, path), path, caller_of(headers))


def caller_error(access: AccessRules, headers: dict[str, str], method: str = "POST") -> object:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return access.check_caller(scope(method), caller_of(pairs))


@pytest.mark.parametrize(
    "value", [b"Bearer first-key", b"Bearer second-key", b"bearer  first-key ", b"BEARER first-key"]
)
def test_each_key_opens(value: bytes) -> None:
    assert key_error([(b"authorization", value)]) is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"first-key",
        b"Basic first-key",
        b"Bearer first-ke",
        b"Bearer first-key2",
        b"\xff\xff",
    ],
)
def test_nothing_else_opens(value: bytes) -> None:
    assert isinstance(key_error([(b"authorization", value)]), AuthenticationError)


@given(st.binary(max_size=60))
def test_no_made_up_header_opens(value: bytes) -> None:
    assert not rules(api_key=KEYS).is_key(value)


def test_without_a_header_it_is_closed_and_without_keys_it_is_open() -> None:
    assert isinstance(key_error([]), AuthenticationError)
    assert rules().check_key(scope(), "/v1/models", caller_of([])) is None


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/ping", "/static/page.js"])
def test_what_needs_no_key_is_for_reading(path: str) -> None:
    assert key_error([], "GET", path) is None
    assert key_error([], "HEAD", path) is None
    assert isinstance(key_error([], "POST", path), AuthenticationError)


@pytest.mark.parametrize(
    "path", ["/healthy", "/health/", "//health", "/static", "/statics/x", "/v1/health", "/metrics", ""]
)
def test_paths_that_look_alike_need_one(path: str) -> None:
    assert isinstance(key_error([], "GET", path), AuthenticationError)


def test_a_key_stands_in_no_text() -> None:
    config = ServerConfig(api_key=KEYS, ssl_certfile="x", ssl_keyfile_password="hidden")
    assert "first-key" not in repr(config)
    assert "hidden" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key="a secret with spaces")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("origin", ["https://elsewhere.example", "http://localhost:9999", "null", "http://localhost"])
def test_a_foreign_page_changes_nothing(origin: str) -> None:
    headers = {"host": "localhost:8000", "origin": origin}
    assert isinstance(caller_error(rules(), headers), ForbiddenError)
    assert isinstance(caller_error(rules(), headers, "DELETE"), ForbiddenError)
    assert caller_error(rules(), headers, "GET") is None
    assert caller_error(rules(allowed_origins=[origin]), headers) is None
    assert caller_error(rules(allowed_origins=["*"]), headers) is None


@pytest.mark.parametrize("headers", [{}, {"origin": "http://localhost:8000"}, {"origin": "https://localhost:8000"}])
def test_programs_and_the_servers_own_page_may(headers: dict[str, str]) -> None:
    """A proxy may have ended TLS, so the scheme is not compared."""
    assert caller_error(rules(), {"host": "localhost:8000", **headers}) is None


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000", "localhost.", "127.0.0.2:80"]
)
def test_a_loopback_server_knows_its_own_names(host: str) -> None:
    assert caller_error(rules(is_loopback=True, host="127.0.0.2"), {"host": host}, "GET") is None


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.evil.example"]
)
def test_a_loopback_server_goes_by_no_other_name(host: str) -> None:
    """DNS rebinding: a page's own name points to us, so that its origin looks like ours."""
    headers = {"host": host, "origin": f"http://{host}"}
    assert isinstance(caller_error(rules(is_loopback=True), headers), ForbiddenError)
    assert isinstance(caller_error(rules(is_loopback=True), headers, "GET"), ForbiddenError)
    assert caller_error(rules(is_loopback=True, allowed_hosts=["*"]), headers) is None
    assert caller_error(rules(is_loopback=False), headers) is None


def test_names_may_be_added_one_by_one_or_by_their_ending() -> None:
    access = rules(is_loopback=True, allowed_hosts=["box.lan", "*.home.example"])
    for host in ("box.lan", "box.lan:8000", "a.home.example", "a.b.home.example:1", "localhost"):
        assert caller_error(access, {"host": host}, "GET") is None
    for host in ("home.example", "xhome.example", "other.lan"):
        assert isinstance(caller_error(access, {"host": host}, "GET"), ForbiddenError)
    only = rules(is_loopback=False, allowed_hosts=["box.lan"])
    assert isinstance(caller_error(only, {"host": "192.0.2.1"}, "GET"), ForbiddenError)


def preflight(access: AccessRules, origin: str) -> dict[bytes, bytes] | None:
    caller = caller_of(
        [
            (b"host", b"localhost:8000"),
            (b"origin", origin.encode()),
            (b"access-control-request-method", b"PATCH"),
            (b"access-control-request-headers", b"x-one, x-two"),
            (b"access-control-request-private-network", b"true"),
        ]
    )
    assert access.is_preflight(scope("OPTIONS"), caller)
    headers = access.preflight_headers(caller)
    if headers is None:
        return None
    headers = [*access.response_headers(caller), *headers]
    assert len(dict(headers)) == len(headers)
    return dict(headers)


def test_a_preflight_is_answered_for_allowed_origins_only() -> None:
    access = rules(allowed_origins=["https://one.example"], allow_credentials=True)
    assert preflight(access, "https://two.example") is None
    answer = preflight(access, "https://one.example")
    assert answer is not None
    assert answer[b"access-control-allow-origin"] == b"https://one.example"
    assert answer[b"access-control-allow-methods"] == b"PATCH"
    assert answer[b"access-control-allow-headers"] == b"x-one, x-two"
    assert answer[b"access-control-allow-credentials"] == b"true"
    assert answer[b"access-control-allow-private-network"] == b"true"
    assert answer[b"vary"] == b"Origin"


def test_methods_and_headers_are_the_configured_ones() -> None:
    access = rules(allowed_origins=["*"], allowed_methods=["GET", "POST"], allowed_headers=["Authorization"])
    answer = preflight(access, "https://two.example")
    assert answer is not None
    assert answer[b"access-control-allow-origin"] == b"*"
    assert answer[b"access-control-allow-methods"] == b"GET, POST"
    assert answer[b"access-control-allow-headers"] == b"Authorization"


def test_caches_are_told_that_the_answer_depends_on_the_origin() -> None:
    access = rules(allowed_origins=["https://one.example"])
    for origin in (b"https://two.example", None):
        caller = caller_of([] if origin is None else [(b"origin", origin)])
        assert access.response_headers(caller) == ((b"vary", b"Origin"),)
    assert rules().response_headers(caller_of([(b"origin", b"https://one.example")])) == ()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"allowed_origins": ["one.example"]}, "allowed_origins"),
        ({"allowed_origins": ["https://one.example/path"]}, "allowed_origins"),
        ({"allowed_origins": ["*"], "allow_credentials": True}, "allow_credentials"),
        ({"allowed_hosts": ["a/b"]}, "allowed_hosts"),
        ({"api_key": [""]}, "api_key"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile"),
        ({"ssl_certfile": "cert.pem", "ssl_cert_reqs": 2}, "ssl_cert_reqs"),
        ({"uds": "/tmp/x", "fd": 3}, "fd"),
        ({"root_path": "llm"}, "root_path"),
        ({"uds_mode": "rw"}, "uds_mode"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert caught.value.option == named
