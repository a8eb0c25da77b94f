"""`wrk` and `h2load` load the server for a few seconds: every request is answered, and nothing is left behind."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trioengine.testing.served_process import ServedProcess

BODY = str(Path(__file__).with_name("completion.json"))
MEMORY_GROWTH_KB = 30_000
TIME_LIMIT_S = 30.0


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def check_settles(served: ServedProcess, is_so: Callable[[], bool]) -> None:
    """It is so within a time in which a server has long noticed who has left."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        with pytest.raises(subprocess.TimeoutExpired):
            served.process.wait(0.02)


def resident_kb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


@pytest.fixture(autouse=True)
def tools() -> None:
    for name in ("wrk", "h2load"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="module")
def tls_server(open_fake_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """HTTP/2 over TLS, with an engine that answers at once."""
    path = str(tmp_path_factory.mktemp("certificate") / "both.pem")
    run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-keyout", path, "-out", path + ".crt", "-subj", "/CN=localhost")  # fmt: skip
    Path(path).write_text(Path(path).read_text() + Path(path + ".crt").read_text())
    with open_fake_server(path) as served:
        yield served


def wrk_script(folder: Path, body: dict[str, Any], api_key: str) -> str:
    script = folder / "post.lua"
    script.write_text(
        'wrk.method = "POST"\n'
        'wrk.headers["Content-Type"] = "application/json"\n'
        f'wrk.headers["Authorization"] = "Bearer {api_key}"\n'
        f"wrk.body = [=[{json.dumps(body)}]=]\n"
    )
    return str(script)


@pytest.mark.parametrize("stream", [False, True])
def test_wrk_on_the_real_model(server: Any, tmp_path: Path, stream: bool) -> None:
    """At the end `wrk` leaves in the middle of requests."""
    body = {"model": server.model, "prompt": "Once", "max_tokens": 4, "stream": stream}
    command = ["wrk", "-t1", "-c16", "--timeout", "20s", "-s", wrk_script(tmp_path, body, server.api_key)]
    url = f"{server.base_url}/completions"
    run(*command, "-d1s", url)
    server.wait_until_idle()
    pids = [server.process.pid, *server.core_pids()]
    before = {pid: (num_descriptors(pid), resident_kb(pid)) for pid in pids}
    num_tasks = len(open_tasks(server))
    report = run(*command, "-d3s", url)
    assert int(re.search(r"(\d+) requests in", report)[1]) > 16  # pyright: ignore[reportOptionalSubscript]
    assert "Non-2xx" not in report
    assert "Socket errors" not in report
    server.wait_until_idle()
    server.wait_until(lambda: len(open_tasks(server)) <= num_tasks)
    for pid, (descriptors, memory_kb) in before.items():
        server.wait_until(lambda: num_descriptors(pid) <= descriptors)  # noqa: B023
        assert resident_kb(pid) < memory_kb + MEMORY_GROWTH_KB


def open_tasks(server: Any) -> list[str]:
    text: str = server.get_text("/debug/tasks?format=text")
    return text.splitlines()


def test_h2load_over_http2(tls_server: ServedProcess) -> None:
    pid = tls_server.process.pid
    command = ["h2load", "-c8", "-m10", "-d", BODY, "-H", "content-type: application/json"]
    url = f"{tls_server.url}/v1/completions"
    num_idle = num_descriptors(pid)
    run(*command, "-n400", url)
    check_settles(tls_server, lambda: num_descriptors(pid) <= num_idle)
    before_kb = resident_kb(pid)
    report = run(*command, "-n2000", url)
    assert "2000 done, 2000 succeeded, 0 failed, 0 errored, 0 timeout" in report
    assert "status codes: 2000 2xx" in report
    assert "Application protocol: h2" in report
    check_settles(tls_server, lambda: num_descriptors(pid) <= num_idle)
    assert resident_kb(pid) < before_kb + MEMORY_GROWTH_KB


def test_h2load_over_http1(fake_server: ServedProcess) -> None:
    report = run(
        "h2load", "--h1", "-c8", "-n2000", "-d", BODY, "-H", "content-type: application/json",
        f"{fake_server.url}/v1/completions",
    )  # fmt: skip
    assert "2000 done, 2000 succeeded, 0 failed, 0 errored, 0 timeout" in report
