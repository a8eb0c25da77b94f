"""The chat page as it is served: what a browser may do with it, and what it is not sent twice."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest
from quart import Response

from trioengine.config.server import ServerConfig
from trioengine.server.app import create_app
from trioengine.server.page import CONTENT_SECURITY_POLICY
from trioengine.testing.fake_engine import FakeEngine
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import open_raw_http

WEB = Path(__file__).parents[3] / "web"
FILES = sorted(path.relative_to(WEB).as_posix() for path in WEB.rglob("*") if path.is_file())


async def get(path: str, config: ServerConfig | None = None, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await create_app(FakeEngine(), config).test_client().get(path, headers=named)


class _Page(HTMLParser):
    """The tags of the page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed((WEB / "index.html").read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


async def test_the_page_comes_with_its_policy() -> None:
    response = await get("/")
    assert response.status_code == 200
    assert response.content_type == "text/html; charset=utf-8"
    assert await response.get_data() == (WEB / "index.html").read_bytes()
    assert response.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= {
        *CONTENT_SECURITY_POLICY.split("; ")
    }


@pytest.mark.parametrize("path", [path for path in FILES if path != "index.html"])
async def test_every_file_is_served_as_what_it_is(path: str) -> None:
    response = await get(f"/static/{path}")
    assert response.status_code == 200
    assert await response.get_data() == (WEB / path).read_bytes()
    types = {"js": "text/javascript", "mjs": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert response.mimetype == types.get(path.rpartition(".")[2], "text/plain")
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY


async def test_a_browser_that_has_a_file_is_not_sent_it_again() -> None:
    first = await get("/static/app.js")
    assert first.headers["Cache-Control"] == "no-cache"
    again = await get("/static/app.js", If_None_Match=first.headers["ETag"])
    assert again.status_code == 304
    assert await again.get_data() == b""
    assert again.headers["ETag"] == first.headers["ETag"]
    assert again.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    other = await get("/static/app.js", If_None_Match='"something-else"')
    assert other.status_code == 200


async def test_head_is_answered_without_the_body() -> None:
    async with open_server(create_app(FakeEngine())) as server, open_raw_http(server.url) as client:
        for path in ("/", "/static/app.js"):
            await client.send_request("HEAD", path)
            head = (await client.read_response(is_head=True)).head
            whole = await client.request("GET", path)  # Would begin with the body, were there one.
            assert head.status == whole.status == 200
            assert head.header("content-length") == str(len(whole.body))
            assert head.header("etag") == whole.head.header("etag")


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/none.js",
        "/static/../pyproject.toml",
        "/static/%2e%2e/pyproject.toml",
    ],
)
async def test_only_the_pages_own_files_are_there(path: str) -> None:
    response = await get(path)
    assert response.status_code == 404
    assert (await response.get_json())["error"]["code"] == "not_found"


@pytest.mark.parametrize("root_path", ["/llm", "/a b"])
async def test_below_a_root_path_the_page_is_at_an_address_with_a_slash(root_path: str) -> None:
    config = ServerConfig(port=0, root_path=root_path)
    async with open_server(create_app(FakeEngine(), config), config) as server, open_raw_http(server.url) as client:
        address = quote(root_path)
        redirect = await client.request("GET", address)
        assert (redirect.status, redirect.head.header("location")) == (308, f"{address}/")
        for path in (f"{address}/", "/", f"{address}/static/app.js"):
            assert (await client.request("GET", path)).status == 200


async def test_a_server_may_have_no_page() -> None:
    for path in ("/", "/static/app.js"):
        assert (await get(path, config=ServerConfig(web_page=False))).status_code == 404


def test_the_page_has_no_script_or_style_of_its_own_and_loads_nothing_from_elsewhere() -> None:
    """Everything in it works under the policy, and below any root path."""
    for tag, attributes in _Page().tags:
        assert tag != "style"
        assert not any(name == "style" or name.startswith("on") for name in attributes), (tag, attributes)
        address = attributes.get("src") or (attributes.get("href") if tag == "link" else None)
        assert tag != "script" or address
        if address:
            assert (WEB / address.removeprefix("static/")).is_file(), address
            assert address.startswith("static/")


def test_our_scripts_make_no_html_from_text() -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|setHTML|createContextualFragment"
    )
    found = {path.name: re.findall(forbidden, path.read_text()) for path in WEB.glob("*.js")}
    assert len(found) > 4
    assert not any(found.values()), found


def test_the_page_asks_early_for_every_script() -> None:
    """Or the browser would find them one after the other."""
    preloaded = {
        attributes["href"] for tag, attributes in _Page().tags if tag == "link" and attributes["rel"] == "modulepreload"
    }
    scripts = {f"static/{path}" for path in FILES if path.endswith((".js", ".mjs"))}
    assert preloaded == scripts - {"static/app.js"}
