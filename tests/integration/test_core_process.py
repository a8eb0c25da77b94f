"""The end of a core process, without the process."""

import os
import threading
from pathlib import Path

import pytest

from trioengine.checkpoint.locate import resolve_model
from trioengine.config.engine import EngineConfig
from trioengine.runtime.core_process import run_core
from trioengine.runtime.launch import CoreLaunch
from trioengine.runtime.status_page import StatusPage
from trioengine.testing.fake_core import build_fake_core
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.transport.address import create_endpoint
from trioengine.transport.topology import bind_blocking_router, core_identity
from trioengine.types.codec import decode, encode
from trioengine.types.messages import Ready, Stop


@pytest.fixture(autouse=True)
def collector_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be tuned for this process."""
    monkeypatch.setattr("trioengine.runtime.core_process.tune_garbage_collector", lambda: None)


def run_until_ready_and(last: Stop | None, folder: Path, model: str) -> int:
    """A core whose owner closes its socket once it is ready, after a last word; its exit status."""
    endpoint = create_endpoint({"XDG_RUNTIME_DIR": str(folder)})
    router, endpoint = bind_blocking_router(endpoint)
    config = EngineConfig(model=model)
    launch = CoreLaunch((endpoint.for_core(),), 0, -1, config, resolve_model(model, cache_dir=folder))
    page, statuses = StatusPage.create(), list[int]()
    core = threading.Thread(target=lambda: statuses.append(run_core(build_fake_core, launch, page)))
    core.start()
    while not any(isinstance(decode(parts[-1]), Ready) for parts in router.drain()):
        router.zmq_socket.poll(1000)
    if last is not None:
        router.send((core_identity(0), encode(last)))
        core.join()
    router.close()
    core.join()
    page.close()
    return statuses[0]


def test_a_core_cleans_up_for_an_owner_that_is_gone(tmp_path: Path) -> None:
    """It hears so from the socket, mostly before its watch hears it from the pipe."""
    (folder := tmp_path / "run").mkdir()
    model = str(write_fake_model(tmp_path))
    assert run_until_ready_and(None, folder, model) == 1
    assert os.listdir(folder) == []


def test_a_core_that_is_told_to_stop_leaves_that_to_its_owner(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    model = str(write_fake_model(tmp_path))
    assert run_until_ready_and(Stop(), folder, model) == 0
    assert len(os.listdir(folder)) == 1
