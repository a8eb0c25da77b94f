"""The chat page in a real Chromium, over a scripted server. Both are processes of their own."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Generator
from urllib.parse import urlsplit

import attrs
from playwright.sync_api import Browser, Page, sync_playwright

EXECUTABLE = shutil.which("chromium")
"""Debian's; nothing is downloaded."""


@contextlib.contextmanager
def open_browser() -> Generator[Browser]:
    """A running Chromium."""
    with sync_playwright() as playwright:
        # No sandbox: tests may run as root, and load nothing but our own page.
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@attrs.frozen
class ScriptedServer:
    """A running server process."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port


@contextlib.contextmanager
def scripted_server(**options: object) -> Generator[ScriptedServer]:
    """A server with these options of `ServerConfig`; killed at the end if it still runs."""
    words = [f"{name}={json.dumps(value)}" for name, value in ({"access_log": False} | options).items()]
    command = [sys.executable, "-P", "-m", "trioengine.testing.page_server", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "the server ended"
            yield ScriptedServer(url, process)
        finally:
            process.kill()


@attrs.define(eq=False)
class Watched:
    """A page, and what went wrong in it."""

    page: Page
    faults: list[str] = attrs.field(factory=list[str])
    """Errors and warnings on the console (a violation of the page's policy is one), exceptions, foreign requests."""
    sockets: list[str] = attrs.field(factory=list[str])
    """The addresses of its WebSockets."""

    def open(self, url: str) -> None:
        """Load the page and wait until it has begun."""
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]")

    def ask(self, text: str) -> None:
        """Send a message and wait for the whole answer."""
        self.send(text)
        self.page.wait_for_selector("article.assistant:last-of-type[data-status]:not([data-status=running])")

    def send(self, text: str) -> None:
        """Send a message, and wait until it is on the page."""
        count = self.page.locator("article.user").count()
        self.page.fill("#prompt", text)
        self.page.click("#send")
        self.page.locator("article.user").nth(count).wait_for()

    @property
    def answer(self) -> str:
        """The text of the last answer."""
        return self.page.inner_text("article.assistant:last-of-type .content")


def watch(page: Page) -> Watched:
    """Write down what goes wrong in a page from now on."""
    watched = Watched(page)
    page.on("pageerror", lambda error: watched.faults.append(f"exception: {error}"))
    page.on(
        "console",
        lambda message: watched.faults.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("websocket", lambda socket: watched.sockets.append(socket.url))
    page.on("request", lambda request: _note_foreign(watched, request.url))
    return watched


def _note_foreign(watched: Watched, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
        watched.faults.append(f"request: {url}")
