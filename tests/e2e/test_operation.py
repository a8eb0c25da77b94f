"""The server as a service: started by systemd, with a key from its environment, and with no engine any more."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from trioengine.testing.raw_http import open_raw_http, request_bytes
from trioengine.testing.served_process import ServedProcess, served_process, trioengine_command

KEY = "the-key"
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""
"""The variable must name the process, and the descriptor be the third."""


@pytest.fixture(scope="module")
def activated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedProcess, socket.socket]]:
    """A server on a socket that this process has bound, and what hears of its state: a test in systemd's place."""
    path = tmp_path_factory.mktemp("systemd") / "notify"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
        socket.create_server(("127.0.0.1", 0)) as listener,
        tempfile.NamedTemporaryFile(suffix=".log") as log,
    ):
        notified.bind(str(path))
        notified.settimeout(60)
        fd = os.dup(listener.fileno())
        environment = {
            **os.environ,
            "LISTEN_FDS": "1",
            "NOTIFY_SOCKET": str(path),
            "WATCHDOG_USEC": "500000",
            "TRIOENGINE_API_KEY": f"another,{KEY}",
        }
        command = [*trioengine_command(), "serve", "--keep-alive-on-engine-death"]
        process = subprocess.Popen(
            [sys.executable, "-c", ACTIVATE, str(fd), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[fd],
            env=environment,
        )
        os.close(fd)
        try:
            served = ServedProcess(process, log)
            assert served.url == f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield served, notified
        finally:
            process.kill()
            process.wait()


def status_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def until(condition: Callable[[], object], *, seconds: float) -> None:
    """Wait for a condition of another process, which sends no event, looking often."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


def test_systemd_hears_that_it_is_ready_and_lives(activated: tuple[ServedProcess, socket.socket]) -> None:
    _, notified = activated
    heard = {notified.recv(100) for _ in range(3)}
    assert heard == {b"READY=1", b"WATCHDOG=1"}


def test_the_environments_keys_are_needed(activated: tuple[ServedProcess, socket.socket]) -> None:
    served, _ = activated
    assert status_of(f"{served.url}/health") == 200
    assert status_of(f"{served.url}/v1/models") == 401
    for key in (KEY, "another"):
        assert status_of(f"{served.url}/v1/models", Authorization=f"Bearer {key}") == 200
    assert KEY not in Path(f"/proc/{served.process.pid}/cmdline").read_text()
    [core_pid] = served.core_pids()
    assert b"NOTIFY_SOCKET" not in Path(f"/proc/{core_pid}/environ").read_bytes()


async def test_without_its_engine_it_answers_503_until_it_is_stopped(
    activated: tuple[ServedProcess, socket.socket],
) -> None:
    """Case 9 (vllm 19881), with `--keep-alive-on-engine-death`."""
    served, notified = activated
    os.kill(served.core_pids()[0], signal.SIGKILL)
    await until(lambda: "goes on without it" in served.log_text(), seconds=10)
    assert status_of(f"{served.url}/health") == 503
    async with open_raw_http(served.url) as client:
        body = json.dumps({"prompt": "Hi"}).encode()
        headers = [("content-type", "application/json"), ("authorization", f"Bearer {KEY}")]
        response = await client.request("POST", "/v1/completions", headers=headers, body=body)
        assert response.status == 503
    assert served.process.poll() is None
    assert served.stop() == 0
    notified.setblocking(False)
    heard = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            heard = notified.recv(100)
    assert heard == b"STOPPING=1"


async def test_a_stopped_core_fails_health_and_takes_no_requests_until_it_goes_on() -> None:
    """Case 10 (vllm 39863)."""
    with served_process() as served:
        [core_pid] = served.core_pids()
        body = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
        request = request_bytes("POST", "/v1/completions", headers=[("content-type", "application/json")], body=body)
        os.kill(core_pid, signal.SIGSTOP)
        try:
            await until(lambda: status_of(f"{served.url}/health") == 503, seconds=20)
            async with open_raw_http(served.url) as client:
                await client.send(request)
                with trio.fail_after(10):
                    assert (await client.read_response()).status == 503
        finally:
            os.kill(core_pid, signal.SIGCONT)
        await until(lambda: status_of(f"{served.url}/health") == 200, seconds=20)
        async with open_raw_http(served.url) as client:
            await client.send(request)
            with trio.fail_after(30):
                assert (await client.read_response()).status == 200
