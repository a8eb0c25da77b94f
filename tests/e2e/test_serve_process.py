"""The server process as a user meets it: started, disturbed, stopped."""

import json
import os
import random
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import trio

from trioengine.testing.raw_http import open_raw_http, request_bytes
from trioengine.testing.served_process import ServedProcess, served_process, trioengine_command

LONG_ANSWER = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def chat_body(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hello"}], **fields}).encode()


def post_request(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return request_bytes("POST", path, headers=[("content-type", "application/json")], body=data)


def get(url: str) -> tuple[int, dict[str, int]]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def is_healthy(url: str) -> bool:
    try:
        return get(f"{url}/health")[0] == 200
    except urllib.error.URLError:
        return False  # It has stopped already.


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def until(condition: Callable[[], object], *, seconds: float) -> None:
    """Wait for a condition of another process, which sends no event, looking often."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


async def test_200_clients_that_vanish_leave_nothing(server: ServedProcess) -> None:
    """Case 3 (vllm 9428, llama.cpp 13262): before, while or after their answer streams, half of them with a reset."""
    rng = random.Random(7)
    total = get(f"{server.url}/load")[1]["total_blocks"]

    async def visit() -> None:
        path = rng.choice(["/v1/completions", "/v1/completions", "/v1/chat/completions"])
        body: dict[str, object] = {**LONG_ANSWER, "stream": rng.random() < 0.7}
        if path.startswith("/v1/chat"):
            body = {**body, "messages": [{"role": "user", "content": "Tell me a story"}]}
            del body["prompt"]
        async with open_raw_http(server.url) as client:
            await client.send(post_request(path, body))
            with trio.move_on_after(rng.random() * 2):
                await client.read_head()
                await client.read_chunk()
            if rng.random() < 0.5:
                client.reset()

    with trio.fail_after(120):
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                for _ in range(40):
                    nursery.start_soon(visit)

    def is_idle() -> bool:
        load = get(f"{server.url}/load")[1]
        return load["running"] == load["waiting"] == 0 and load["free_blocks"] == total

    await until(is_idle, seconds=1)
    assert is_idle()


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_an_idle_server_and_its_core(stop_signal: signal.Signals) -> None:
    with served_process() as served:
        core_pids = served.core_pids()
        assert served.stop(stop_signal) == 0

    assert core_pids
    assert not [pid for pid in core_pids if is_running(pid)]


async def test_a_signal_drains_and_a_second_one_stops_now() -> None:
    """Case 15 (vllm 24885): the stream that runs goes on after the first signal; the second ends it."""
    with served_process() as served:
        core_pids = served.core_pids()
        async with open_raw_http(served.url) as client:
            with trio.fail_after(60):
                await client.send(post_request("/v1/completions", LONG_ANSWER))
                assert (await client.read_head()).status == 200
                await client.read_chunk()
                served.process.send_signal(signal.SIGINT)
                await until(lambda: "second signal" in served.log_text(), seconds=10)
                assert await client.read_chunk()
                assert served.process.poll() is None
                served.process.send_signal(signal.SIGINT)
                await until(lambda: served.process.poll() is not None, seconds=10)
        assert not [pid for pid in core_pids if is_running(pid)]


async def test_a_log_that_nobody_reads_any_more_does_not_cut_the_drain_short() -> None:
    """As behind `| tee`, which Ctrl-C ends at once."""
    command = [*trioengine_command(), "serve", "--port", "0"]
    process = await trio.to_thread.run_sync(partial(subprocess.Popen[str], command, stderr=subprocess.PIPE, text=True))
    with process:
        try:
            assert process.stderr is not None
            with process.stderr as log:
                url = next(line.split(" on ")[1].strip() for line in log if line.startswith("Serving"))
            async with open_raw_http(url) as client:
                with trio.fail_after(60):
                    await client.send(post_request("/v1/completions", {**LONG_ANSWER, "max_tokens": 100}))
                    await client.read_head()
                    await client.read_chunk()
                    process.send_signal(signal.SIGINT)
                    assert b"[DONE]" in await client.read_to_end()
            assert process.wait(60) == 0
        finally:
            process.kill()


async def test_a_killed_core_is_an_unhealthy_server_whose_streams_end_with_an_error() -> None:
    """Case 9 (vllm 19881): health fails at once, a waiting stream gets an error event, the server ends with 1."""
    with served_process() as served:
        async with open_raw_http(served.url) as client:
            with trio.fail_after(60):
                await client.send(post_request("/v1/completions", LONG_ANSWER))
                await client.read_head()
                await client.read_chunk()
                os.kill(served.core_pids()[0], signal.SIGKILL)
                await until(lambda: not is_healthy(served.url), seconds=1)
                rest = await client.read_to_end()
                await until(lambda: served.process.poll() is not None, seconds=20)
        assert b'data: {"error"' in rest
        assert b"[DONE]" not in rest
        assert served.process.returncode == 1


async def test_a_killed_server_leaves_no_core() -> None:
    """Case 12 (vllm 55510): the core finds out by itself, also in the middle of a step."""
    with served_process() as served:
        core_pids = served.core_pids()
        async with open_raw_http(served.url) as client:
            with trio.fail_after(30):
                await client.send(post_request("/v1/completions", LONG_ANSWER))
                await client.read_head()
            served.process.kill()
            await until(lambda: not [pid for pid in core_pids if is_running(pid)], seconds=5)

    assert core_pids
    assert not [pid for pid in core_pids if is_running(pid)]


def test_a_model_that_cannot_be_loaded_is_one_message_and_no_process(tmp_path: Path) -> None:
    """Case 16 (vllm 25568)."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 100)
    done = subprocess.run(
        [*trioengine_command(), "serve", str(broken), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(broken) in str(process.info["cmdline"])]


@pytest.mark.parametrize("num_bytes", [10**5, 10**13, 10**15])
def test_too_little_memory_is_one_message_and_no_process(num_bytes: int) -> None:
    """Case 16 (vllm 25568). One line, without a traceback, naming the option."""
    done = subprocess.run(
        [*trioengine_command(), "serve", "--port", "0", "--kv-cache-memory-bytes", str(num_bytes)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert "kv_cache_memory_bytes" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--device", "cuda"],
        ["--kv-cache-dtype", "fp8"],
        ["--block-size", "8", "--deterministic"],
    ],
    ids=lambda options: options[-2],
)
def test_what_needs_a_gpu_is_one_message_where_there_is_none(options: list[str]) -> None:
    """The core, which looks for one, has each option; one line, without a traceback, names it."""
    done = subprocess.run(
        [*trioengine_command(), "serve", "--port", "0", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )

    assert done.returncode == 1
    name = next(option for option in reversed(options) if option.startswith("--"))
    assert done.stderr.splitlines()[-1].startswith(f"trioengine: {name[2:].replace('-', '_')} ")
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_one_message(server: ServedProcess) -> None:
    """Said before a model is loaded."""
    port = server.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [*trioengine_command(), "serve", "--port", port], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 1
    [message] = done.stderr.splitlines()
    assert f"port {port}" in message


def test_wrong_bodies_leave_the_server_alive(server: ServedProcess) -> None:
    """Case 42 (OpenViking 4238): each is a 400 with an error object, and the next request is served."""
    bodies = [
        b"",
        b"{",
        b"[]",
        b'{"messages": "\\ud800"}',
        chat_body(stream="false"),
        json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "a\u0000b"}]}).encode(),
        chat_body(stream=True, n=0),
        chat_body(temperature=float("nan")),
    ]
    for body in bodies:
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        with caught.value as answer:
            assert answer.code == 400, body
            error = json.load(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert get(f"{server.url}/health")[0] == 200


def test_start_is_reported_and_health_answers_after_it() -> None:
    started = time.monotonic()
    with served_process() as served:
        assert get(f"{served.url}/health")[0] == 200
        assert time.monotonic() - started < 60  # A bound for a hang, not a measurement.
        assert get(f"{served.url}/version")[1]


def test_the_engines_options_stand_on_the_command_line(tmp_path: Path) -> None:
    """All that change how the core works, at once: the answer is the one that it gives without."""
    words = [
        "--max-model-len=512",
        "--scheduling-policy=priority",
        "--async-scheduling",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 3}',
        "--kv-offload-bytes=50000000",
        f"--kv-offload-path={tmp_path}",
        "--reasoning-parser=qwen3",
        "--enable-kv-cache-events",
        "--max-num-partial-prefills=4",
        "--long-prefill-token-threshold=64",
    ]
    with served_process(*words) as served:
        request = urllib.request.Request(
            f"{served.url}/v1/chat/completions",
            chat_body(messages=[{"role": "user", "content": "What is the capital of Japan?"}], temperature=0),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            message = json.load(response)["choices"][0]["message"]
        # As content or as reasoning: this model never says that its thinking has ended.
        assert "Tokyo" in json.dumps(message)
        (core_pid,) = served.core_pids()
        offload_files = [path for path in Path(f"/proc/{core_pid}/fd").iterdir() if str(tmp_path) in os.readlink(path)]
        assert offload_files
        assert served.stop() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (['--speculative-config={"method": "magic", "num_speculative_tokens": 3}'], "speculative"),
        (["--kv-offload-path=/tmp"], "kv_offload_bytes"),
        (["--scheduling-policy=lottery"], "lottery"),
        (["--reasoning-parser=nobody"], "nobody"),
        (["--chat-template=/nowhere/chat.jinja"], "No such file"),
        (["--ssl-certfile=/nowhere/chain.pem"], "chain.pem"),
        (["--http2"], "ssl_certfile"),
        (["--lora-modules=polite=/adapters/polite"], "enable_lora"),
        (["--fd=99999999999999"], "fd"),
        (["--kv-cache-memory-bytes=99999999999999999999"], "kv_cache_memory_bytes"),
        (["--max-num-batched-tokens=99999999999999"], "max_num_batched_tokens"),
    ],
)
def test_an_option_that_cannot_work_is_one_message(words: list[str], message: str) -> None:
    done = subprocess.run(
        [*trioengine_command(), "serve", "--port", "0", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "loading" not in done.stderr
