"""The programs in docs/examples, and those in the README and the tutorial, do what the documents say."""

import functools
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from trioengine.server import serve
from trioengine.testing.fake_engine import FakeEngine
from trioengine.testing.raw_http import open_raw_http
from trioengine.testing.served_process import ServedProcess

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
DEFAULT_URL = "http://127.0.0.1:8000"


def block_with(page: str, text: str) -> str:
    """The one code block of a page that has this text."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if text in block]
    return block


def run(name: str) -> str:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-P", str(EXAMPLES / name)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trio_program_of_15_lines_embeds_the_engine_sets_a_deadline_and_goes_on() -> None:
    lines = [line for line in (EXAMPLES / "embed.py").read_text().splitlines() if line.strip()]
    output = run("embed.py")

    assert len(lines) <= 15
    told, rest = output.split("\n...and the program goes on.")
    assert told
    assert rest.strip() == ""


def test_a_blocking_script_answers() -> None:
    """It has no `__main__` guard, and needs none."""
    assert "Tokyo" in run("blocking.py")


def test_the_readmes_openai_client_answers(server: ServedProcess) -> None:
    program = block_with("README.md", "import openai").replace(DEFAULT_URL, server.url)
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "Tokyo" in done.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_curl_command_streams_tokyo(page: str, server: ServedProcess) -> None:
    """Its URL, header and body, sent by Python."""
    command = block_with(page, "curl -N")
    [url], [(name, value)] = re.findall(r"http://\S+", command), re.findall(r"-H '(\S+): (\S+)'", command)
    body = command[command.index("{") : command.rindex("}") + 1]
    request = urllib.request.Request(url.replace(DEFAULT_URL, server.url), body.encode(), {name: value})
    with urllib.request.urlopen(request, timeout=60) as response:
        events = response.read().decode().split("\n\n")
    assert events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "Tokyo" in "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)


async def test_the_tutorials_application_has_its_own_routes_and_openais() -> None:
    @asynccontextmanager
    async def open_engine() -> AsyncGenerator[FakeEngine]:
        yield FakeEngine()

    program = block_with("docs/tutorial.md", "openai_blueprint(engine)")
    program, start, rest = program.replace("port=8000", "port=0").rpartition("trio.run(main)\n")
    assert (start, rest) == ("trio.run(main)\n", "")
    names: dict[str, Any] = {"__name__": "tutorial"}
    exec(program, names)
    names["open_engine"] = open_engine
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
                names["serve"] = functools.partial(serve, task_status=task_status)
                await names["main"]()

            [url] = await nursery.start(run)
            async with open_raw_http(url) as client:
                assert (await client.request("GET", "/hello")).body == b"hello"
                assert (await client.request("GET", "/v1/models")).status == 200
            nursery.cancel_scope.cancel()
