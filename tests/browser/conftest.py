"""A browser for all tests, which takes a second to start, and a fresh profile for each."""

from collections.abc import Generator

import pytest
from playwright.sync_api import Browser, BrowserContext

from trioengine.testing.browser import EXECUTABLE, ScriptedServer, Watched, open_browser, scripted_server, watch

ACTION_TIMEOUT_MS = 15_000


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    if EXECUTABLE is None:
        pytest.skip("needs Debian's package chromium")
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Generator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def context(browser: Browser) -> Generator[BrowserContext]:
    with browser.new_context() as context:
        context.set_default_timeout(ACTION_TIMEOUT_MS)
        yield context


@pytest.fixture
def watched(context: BrowserContext) -> Generator[Watched]:
    """A page in a browser that knows nothing yet. At the end nothing may have gone wrong in it."""
    watched = watch(context.new_page())
    yield watched
    assert watched.faults == []
