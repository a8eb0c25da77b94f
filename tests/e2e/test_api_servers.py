"""Several API-server processes over one core: one service to its users, whoever of its processes is disturbed."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import attrs
import psutil
import pytest
import trio

from trioengine.testing.raw_http import RawHttpClient, open_raw_http, request_bytes
from trioengine.testing.served_process import ServedProcess, served_process, trioengine_command

COUNT = 2


@attrs.frozen
class Group:
    served: ServedProcess
    api_servers: list[psutil.Process]
    cores: list[psutil.Process]

    def is_gone(self) -> bool:
        return not any(
            process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            for process in (*self.api_servers, *self.cores)
        )


@contextmanager
def served_group(*words: str) -> Generator[Group]:
    with served_process("--api-server-count", str(COUNT), *words) as served:
        processes = [psutil.Process(pid) for pid in served.core_pids()]
        api_servers = [process for process in processes if "api_server_process" in " ".join(process.cmdline())]
        assert len(api_servers) == COUNT
        yield Group(served, api_servers, [process for process in processes if process not in api_servers])


async def until(condition: Callable[[], object], *, seconds: float) -> None:
    """Wait for a condition of another process, which sends no event, looking often."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


def num_files(folder: Path) -> int:
    return len(list(folder.iterdir()))


async def begin_stream(client: RawHttpClient, num_tokens: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    await client.send(
        request_bytes("POST", "/v1/completions", headers=[("content-type", "application/json")], body=data)
    )
    assert (await client.read_head()).status == 200
    await client.read_chunk()


async def test_each_takes_requests_and_a_signal_drains_all() -> None:
    with served_group() as group:
        url = group.served.url
        with trio.fail_after(60):
            num_requests = 0
            # The kernel gives a connection to whoever asks first.
            while not all(
                f"[{process.pid}] trioengine.access" in group.served.log_text() for process in group.api_servers
            ):
                assert num_requests < 500
                async with open_raw_http(url) as client:
                    assert (await client.request("GET", "/health")).status == 200
                num_requests += 1
            async with open_raw_http(url) as client:
                await begin_stream(client, 100)
                group.served.process.send_signal(signal.SIGTERM)
                rest = await client.read_to_end()
            assert b"data: [DONE]" in rest
            await until(lambda: group.served.process.poll() is not None, seconds=20)
        assert group.served.process.returncode == 0
        assert group.is_gone()


async def test_one_that_ends_unasked_ends_all_with_a_message() -> None:
    with served_group() as group:
        victim = group.api_servers[1]
        victim.kill()
        with trio.fail_after(20):
            await until(lambda: group.served.process.poll() is not None, seconds=20)
        assert group.served.process.returncode == 1
        assert f"API server 1 (pid {victim.pid}) was killed by SIGKILL" in group.served.log_text().splitlines()[-1]
        assert group.is_gone()


async def test_a_killed_supervisor_leaves_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Case 12 (vllm 55510): also in the middle of an answer. No sockets and no folders either."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served_group() as group:
        assert num_files(tmp_path) == 2 + COUNT
        async with open_raw_http(group.served.url) as client:
            with trio.fail_after(30):
                await begin_stream(client, 1000)
            group.served.process.kill()
            await until(group.is_gone, seconds=5)
        assert group.is_gone()
        assert num_files(tmp_path) == 0


async def test_a_killed_core_ends_all_after_their_clients_have_heard_of_it() -> None:
    """Case 9 (vllm 19881)."""
    with served_group() as group:
        async with open_raw_http(group.served.url) as client:
            with trio.fail_after(60):
                await begin_stream(client, 1000)
                os.kill(group.cores[0].pid, signal.SIGKILL)
                rest = await client.read_to_end()
                await until(lambda: group.served.process.poll() is not None, seconds=20)
        assert b'data: {"error"' in rest
        assert group.served.process.returncode == 1
        assert "engine core" in group.served.log_text().splitlines()[-1]
        assert group.is_gone()


def test_a_model_that_cannot_be_loaded_is_one_message(tmp_path: Path) -> None:
    """Case 16 (vllm 25568)."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 100)
    done = subprocess.run(
        [*trioengine_command(), "serve", str(broken), "--port", "0", "--api-server-count", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("broken.gguf") == 1
    assert "Traceback" not in done.stderr


async def test_a_second_signal_stops_all_now() -> None:
    """Case 15 (vllm 24885): as with one process."""
    with served_group() as group:
        async with open_raw_http(group.served.url) as client:
            with trio.fail_after(60):
                await begin_stream(client, 1000)
                group.served.process.send_signal(signal.SIGINT)
                await until(lambda: "second signal" in group.served.log_text(), seconds=10)
                assert await client.read_chunk()
                group.served.process.send_signal(signal.SIGINT)
                await until(lambda: group.served.process.poll() is not None, seconds=10)
        assert group.served.process.returncode == 130
        assert group.is_gone()


@pytest.mark.slow
async def test_one_that_hangs_does_not_hold_up_the_end() -> None:
    with served_group("--shutdown-timeout-s", "0") as group:
        group.api_servers[0].suspend()
        group.served.process.send_signal(signal.SIGTERM)
        await until(lambda: group.served.process.poll() is not None, seconds=30)
        assert group.served.process.returncode == 1
        assert "were killed" in group.served.log_text().splitlines()[-1]
        assert group.is_gone()
