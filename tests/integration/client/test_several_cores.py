"""One engine over several cores, several clients of the same cores, and cores that connect over TCP. Real processes."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from trioengine.client.cores import Attachment, Cores, start_cores
from trioengine.client.engine import Engine, attach_engine, open_engine
from trioengine.config.engine import EngineConfig
from trioengine.errors import ConfigError, EngineDeadError, EngineStartError, RequestError, UnavailableError
from trioengine.testing.fake_core import MODULE
from trioengine.testing.fake_executor import generate_alone
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.transport import address
from trioengine.transport.topology import bind_blocking_router
from trioengine.types.messages import CheckIntegrity, CoreLoad, GetKVCacheEvents, GetLoad
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

TIMEOUT_S = 60
OPTIONS = {"pace_s": "0.001"}
ENDLESS = SamplingParams(max_tokens=100_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fake_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test, however it ends: no process."""
    yield
    assert psutil.Process().children(recursive=True) == []


@asynccontextmanager
async def open_several(model: str, num_cores: int = 2, **config: Any) -> AsyncGenerator[Engine, None]:
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(
            EngineConfig(model=model, data_parallel_size=num_cores, **config), core_module=MODULE, core_options=OPTIONS
        ) as engine:
            yield engine


async def tokens_of(
    engine: Engine, prompt: list[int], *, seed: int = 1, num_tokens: int = 5, rank: int | None = None
) -> tuple[int, ...]:
    sampling = SamplingParams(
        seed=seed, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    request = GenerateRequest(prompt, sampling, data_parallel_rank=rank)
    async with engine.generate(request) as stream:
        return (await anext(stream)).outputs[0].token_ids


def right_tokens(prompt: list[int], *, seed: int = 1, num_tokens: int = 5) -> tuple[int, ...]:
    return tuple(generate_alone(prompt, num_tokens=num_tokens, seed=seed, vocab_size=257))


async def loads(engine: Engine) -> list[CoreLoad]:
    """What each core has to do."""
    return [await _load(engine, core) for core in range(engine._frontend.num_cores)]


async def _load(engine: Engine, core: int) -> CoreLoad:
    from trioengine.frontend.frontend import PendingCall

    replies: list[CoreLoad] = []
    event = trio.Event()

    def take(load: CoreLoad) -> None:
        replies.append(load)
        event.set()

    def fail(error: Exception) -> None:
        raise error

    engine._link.send(core, engine._frontend.add_call(GetLoad(), PendingCall(GetLoad, take, fail), core))
    await event.wait()
    return replies[0]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (nobody tells)
        await trio.sleep(0.005)


async def until_idle(engine: Engine) -> None:
    while (load := await engine.call(GetLoad())).running or load.waiting:  # noqa: ASYNC110 (nobody tells)
        await trio.sleep(0.005)


async def use_lora(engine: Engine, name: str, rank: int) -> None:
    request = GenerateRequest([1], SamplingParams(max_tokens=1), lora=name, data_parallel_rank=rank)
    async with engine.generate(request) as stream:
        assert (await anext(stream)).finished


# Several cores


async def test_each_core_has_kv_cache_events_of_its_own(model: str) -> None:
    """Whoever follows what is cached asks for each, with the number of that one's last event."""
    async with open_several(model, enable_kv_cache_events=True) as engine:
        await tokens_of(engine, [1] * 9, rank=1)
        events = [await engine.call(GetKVCacheEvents(0, data_parallel_rank=rank)) for rank in (None, 0, 1)]
        assert [len(each.events) > 0 for each in events] == [False, False, True]
        assert events[2].last > 0
        with pytest.raises(RequestError, match="data_parallel_rank must be 0 to 1"):
            await engine.call(GetKVCacheEvents(0, data_parallel_rank=2))


async def test_what_one_core_forgets_of_adapters_all_forget(model: str) -> None:
    """Each makes room by its own use, but a request may go to any."""
    async with open_several(model) as engine:
        for name in ("a", "b"):
            await engine.add_lora(name, f"/{name}")
        await use_lora(engine, "b", 0)
        await use_lora(engine, "a", 1)
        await engine.add_lora("c", "/c")
        assert [info.name for info in await engine.list_loras()] == ["c"]
        for name in ("a", "b"):
            for rank in range(2):
                with pytest.raises(RequestError, match="no adapter"):
                    await use_lora(engine, name, rank)
        await engine.add_lora("a", "/a")
        for name in ("a", "c"):
            for rank in range(2):
                await use_lora(engine, name, rank)


async def test_an_adapter_is_added_to_all_cores_or_to_none(model: str) -> None:
    """One that cannot be added to one of them, as it has no room, is not left in the others."""
    async with open_several(model) as engine:
        for name in ("a", "b"):
            await engine.add_lora(name, f"/{name}")
        streams = [
            engine.generate(GenerateRequest([1], ENDLESS, lora=name, data_parallel_rank=1)) for name in ("a", "b")
        ]
        for stream in streams:
            await stream.__aenter__()
            await anext(stream)
        with pytest.raises(UnavailableError, match="no room"):
            await engine.add_lora("c", "/c")
        for stream in streams:
            await stream.__aexit__(None, None, None)
        await until_idle(engine)
        names = [info.name for info in await engine.list_loras()]
        assert len(names) == 1
        await engine.add_lora("c", "/c")
        for rank in range(2):
            await use_lora(engine, "c", rank)


async def test_requests_are_balanced_and_operations_run_on_all_cores(model: str) -> None:
    async with open_several(model, 3) as engine:
        cores = psutil.Process().children()
        assert len(cores) == 3
        streams = [engine.generate(GenerateRequest([1, 2, 3], ENDLESS)) for _ in range(6)]
        for stream in streams:
            await stream.__aenter__()
        assert [load.running + load.waiting for load in await loads(engine)] == [2, 2, 2]
        total = await engine.call(GetLoad())
        assert total.running + total.waiting == 6
        for stream in streams:
            await stream.__aexit__(None, None, None)
        await until_idle(engine)
        assert await tokens_of(engine, [1, 2, 3], rank=2) == right_tokens([1, 2, 3])
        assert await engine.collective_rpc("echo", x=1) == ({"x": 1},) * 3
        await engine.sleep()
        assert await engine.is_sleeping()
        await engine.wake_up()
        await engine.call(CheckIntegrity())


async def test_a_session_stays_on_its_core_and_a_named_rank_is_kept(model: str) -> None:
    async with open_several(model, 2) as engine:
        async with (
            engine.generate(GenerateRequest([1], ENDLESS, data_parallel_rank=1)),
            engine.generate(GenerateRequest([1], ENDLESS, data_parallel_rank=1)),
        ):
            assert [load.running + load.waiting for load in await loads(engine)] == [0, 2]
        await until_idle(engine)
        async with engine.generate(GenerateRequest([1], ENDLESS, session_id="s")) as first:
            await anext(first)
            (home,) = [core for core, load in enumerate(await loads(engine)) if load.running]
            async with engine.generate(GenerateRequest([1], ENDLESS, session_id="s")) as second:
                await anext(second)
                assert (await loads(engine))[home].running == 2


async def test_the_death_of_one_core_is_the_engines_with_its_cause(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What runs on the other core fails too, and so does a call that waits for both (case 11, vllm 56416)."""
    async with open_several(model, 2) as engine:
        errors: list[EngineDeadError] = []

        async def read(rank: int, started: trio.Event) -> None:
            try:
                async with engine.generate(GenerateRequest([1], ENDLESS, data_parallel_rank=rank)) as stream:
                    async for _ in stream:
                        started.set()
            except EngineDeadError as error:
                errors.append(error)

        async def sleep() -> None:
            try:
                await engine.sleep(mode="wait")
            except EngineDeadError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for rank in range(2):
                started = trio.Event()
                nursery.start_soon(read, rank, started)
                await started.wait()
            nursery.start_soon(sleep)
            await engine.call(GetLoad())
            handle: Any = engine._link._cores[1]
            os.kill(handle.pid, signal.SIGKILL)
        assert len(errors) == 3
        assert all("SIGKILL" in str(error) for error in errors)
        assert (engine.is_running, engine.is_stopped, engine.errored) == (False, True, True)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            await engine.is_sleeping()
    assert "SIGKILL" in caplog.text


async def test_one_stopped_core_fails_the_health_of_all(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it goes on. Case 10 with two cores."""
    monkeypatch.setattr("trioengine.runtime.status_page.MAX_TICK_AGE_S", 0.7)
    async with open_several(model, 2) as engine:
        handle: Any = engine._link._cores[1]
        os.kill(handle.pid, signal.SIGSTOP)
        while _is_healthy(engine):  # noqa: ASYNC110 (nobody tells)
            await trio.sleep(0.01)
        assert engine.is_running
        os.kill(handle.pid, signal.SIGCONT)
        while not _is_healthy(engine):  # noqa: ASYNC110 (nobody tells)
            await trio.sleep(0.01)
        assert await tokens_of(engine, [1, 2], rank=1) == right_tokens([1, 2])


def _is_healthy(engine: Engine) -> bool:
    try:
        engine.check_health()
    except EngineDeadError:
        return False
    return True


async def test_an_engine_of_one_rank_starts_that_core_alone(model: str) -> None:
    """Something outside balances between such engines."""
    async with open_several(model, 4, data_parallel_rank=2) as engine:
        assert len(psutil.Process().children()) == 1
        assert await tokens_of(engine, [4, 5]) == right_tokens([4, 5])
        assert await tokens_of(engine, [4, 5], rank=2) == right_tokens([4, 5])
        with pytest.raises(RequestError, match="must be 2") as caught:
            await tokens_of(engine, [4, 5], rank=0)
        assert caught.value.param == "data_parallel_rank"


async def test_two_cores_with_a_real_model_give_the_same_answers() -> None:
    """Each has loaded it, in a process of its own."""
    config = EngineConfig(data_parallel_size=2, max_model_len=256, max_num_seqs=4, cpu_threads=1)
    sampling = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY)
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(config) as engine:
            answers: list[str] = []
            for rank in range(2):
                request = GenerateRequest("Once upon a time", sampling, data_parallel_rank=rank)
                async with engine.generate(request) as stream:
                    answers.append((await anext(stream)).outputs[0].text)
            assert answers[0]
            assert answers[0] == answers[1]
            assert [load.running for load in await loads(engine)] == [0, 0]
            assert await engine.reset_prefix_cache()
            await engine.call(CheckIntegrity())


# Several clients


@asynccontextmanager
async def open_cores(model: str, num_clients: int, num_cores: int = 1) -> AsyncGenerator[Cores, None]:
    config = EngineConfig(model=model, data_parallel_size=num_cores)
    with trio.fail_after(TIMEOUT_S):
        async with start_cores(config, num_clients=num_clients, core_module=MODULE, core_options=OPTIONS) as cores:
            yield cores


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_clients_of_the_same_cores_see_their_own_tokens_only(
    model: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of two clients have the same numbers; what the core says of one is never taken for the other's."""
    if transport == "tcp":
        monkeypatch.setattr(address, "_create_private_directory", lambda _: None)
    async with open_cores(model, 2, num_cores=2) as cores:
        first_attachment, second_attachment = (
            Attachment.from_bytes(attachment.to_bytes()) for attachment in cores.attachments
        )
        async with attach_engine(first_attachment) as first, attach_engine(second_attachment) as second:
            await cores.wait_ready()

            async def ask(engine: Engine, number: int) -> None:
                prompt = [number % 200, number // 200 + 1, 3]
                answers.append(await tokens_of(engine, prompt, seed=number) == right_tokens(prompt, seed=number))

            answers: list[bool] = []
            async with trio.open_nursery() as nursery:
                for number in range(40):
                    nursery.start_soon(ask, first if number % 2 else second, number)
            assert answers == [True] * 40
            first.check_health()
            cores.check_health()
            # An abort by one client's name is that client's.
            async with second.generate(GenerateRequest([1], ENDLESS, request_id="same")) as stream:
                await anext(stream)
                first.abort("same")
                assert await tokens_of(first, [9]) == right_tokens([9])
                assert not (await anext(stream)).finished


async def test_a_client_that_leaves_ends_its_own_requests_and_nothing_else(model: str) -> None:
    async with open_cores(model, 2) as cores, attach_engine(cores.attachments[1]) as staying:
        async with staying.generate(GenerateRequest([1], ENDLESS)) as stream:
            async with attach_engine(cores.attachments[0]) as leaving:
                other = leaving.generate(GenerateRequest([2], ENDLESS))
                await other.__aenter__()
                await anext(other)
                assert (await staying.call(GetLoad())).running == 2
            await anext(stream)
            while (await staying.call(GetLoad())).running != 1:  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(0.005)
            await anext(stream)
        cores.check_health()


async def test_the_requests_of_a_client_process_that_vanishes_are_aborted(model: str, tmp_path: Path) -> None:
    """kill -9 of one API server of several: its requests go, the cores and the others' stay."""
    script = tmp_path / "client.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import trio
            from trioengine.client.cores import Attachment
            from trioengine.client.engine import attach_engine
            from trioengine.types.params import SamplingParams
            from trioengine.types.request import GenerateRequest

            async def main():
                attachment = Attachment.from_bytes(sys.stdin.buffer.read())
                async with attach_engine(attachment) as engine:
                    request = GenerateRequest([1, 2], SamplingParams(max_tokens=100_000, ignore_eos=True))
                    async with engine.generate(request) as stream:
                        print("started", flush=True)
                        await trio.sleep_forever()

            trio.run(main)
            """
        )
    )
    async with open_cores(model, 2) as cores, attach_engine(cores.attachments[1]) as engine:
        attachment = cores.attachments[0]
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=attachment.fds,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with process.stdin, process.stdout:
                await process.stdin.send_all(attachment.to_bytes())
                await process.stdin.aclose()
                said = b""
                while not said.endswith(b"\n"):
                    received = await process.stdout.receive_some()
                    assert received, "it ended"
                    said += received
                assert said == b"started\n"
                while not (await engine.call(GetLoad())).running:  # noqa: ASYNC110 (nobody tells)
                    await trio.sleep(0.005)
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
        await until_idle(engine)
        assert await tokens_of(engine, [7]) == right_tokens([7])
        cores.check_health()


async def test_attached_clients_feel_the_death_of_the_cores_and_their_end(model: str) -> None:
    async with open_cores(model, 1) as cores, attach_engine(cores.attachments[0]) as engine:
        async with engine.generate(GenerateRequest([1], ENDLESS)) as stream:
            await anext(stream)
            (core,) = psutil.Process().children()
            core.kill()
            with pytest.raises(EngineDeadError, match="has exited"):
                _ = [output async for output in stream]
        assert engine.errored
        await until(lambda: cores.dead_error is not None)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            cores.check_health()


async def test_a_core_that_cannot_start_is_an_error_of_owner_and_clients(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path / "model")
    with trio.fail_after(TIMEOUT_S):
        async with start_cores(
            EngineConfig(model=str(folder)),
            num_clients=1,
            core_module="trioengine.testing.scripted_core",
            core_options={"start_error": "out of paper"},
        ) as cores:
            with pytest.raises(EngineStartError, match="out of paper"):
                async with attach_engine(cores.attachments[0]):
                    pytest.fail("opened")
            with pytest.raises(EngineStartError, match="out of paper"):
                await cores.wait_ready()


async def test_clients_do_not_draw_the_same_seeds(model: str) -> None:
    """Or the same prompt would get the same answer from all of them."""
    config = EngineConfig(model=model, seed=2**63 - 1)
    async with start_cores(config, num_clients=2, core_module=MODULE, core_options=OPTIONS) as cores:
        assert len({attachment.config.seed for attachment in cores.attachments}) == 2


async def test_attachments_hold_no_secret_in_their_text(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_create_private_directory", lambda _: None)
    async with open_cores(model, 1) as cores:
        (attachment,) = cores.attachments
        assert attachment.endpoint.curve is not None
        secret = attachment.endpoint.curve.secret_key
        assert secret
        assert secret not in repr(attachment)
        assert secret.encode() in attachment.to_bytes()
        await cores.wait_ready()


# Cores on other machines


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def start_remote_core(port: int, key_file: Path, *, rank: int) -> "subprocess.Popen[bytes]":
    """`trioengine core`, with a core whose executor is a fake."""
    code = (
        "import trioengine.cli.core as core, trioengine.testing.fake_core as fake, trioengine.cli.main as main\n"
        "core._build = lambda: fake.build_fake_core\n"
        "raise SystemExit(main.main())"
    )
    arguments = ["core", str(key_file.parent / "model"), "--connect", f"tcp://127.0.0.1:{port}"]
    arguments += ["--key-file", str(key_file), "--data-parallel-rank", str(rank)]
    return subprocess.Popen([sys.executable, "-P", "-c", code, *arguments], stderr=subprocess.PIPE)


async def test_cores_elsewhere_connect_with_the_keys_and_end_with_the_engine(tmp_path: Path) -> None:
    """One core here, one that was started before the engine and connects over TCP."""
    write_fake_model(tmp_path / "model")
    port, key_file = free_port(), tmp_path / "keys"
    config = EngineConfig(
        model=str(tmp_path / "model"),
        data_parallel_size=2,
        data_parallel_size_local=1,
        data_parallel_listen=f"tcp://0.0.0.0:{port}",
        data_parallel_key_file=str(key_file),
    )
    address.read_or_make_keys(str(key_file))
    remote = start_remote_core(port, key_file, rank=1)
    try:
        with trio.fail_after(TIMEOUT_S):
            async with open_engine(config, core_module=MODULE, core_options=OPTIONS) as engine:
                assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
                for rank in range(2):
                    assert await tokens_of(engine, [1, 2], rank=rank) == right_tokens([1, 2])
                assert await engine.collective_rpc("echo") == ({}, {})
                engine.check_health()
            assert await trio.to_thread.run_sync(remote.wait) == 0
    finally:
        remote.kill()
        remote.communicate()


def test_a_core_elsewhere_with_another_key_says_so_and_fails(tmp_path: Path) -> None:
    write_fake_model(tmp_path / "model")
    keys = address.read_or_make_keys(str(tmp_path / "engine's keys"))
    address.read_or_make_keys(str(tmp_path / "other keys"))
    router, endpoint = bind_blocking_router(address.create_network_endpoint(f"tcp://127.0.0.1:{free_port()}", keys))
    remote = start_remote_core(int(endpoint.address.rpartition(":")[2]), tmp_path / "other keys", rank=0)
    try:
        _, log = remote.communicate(timeout=TIMEOUT_S)
    finally:
        remote.kill()
        remote.communicate()
        router.close()
    assert remote.returncode == 1
    assert b"refused" in log
    assert b"key file" in log


async def test_a_core_elsewhere_that_vanishes_is_the_death_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a heartbeat: the connection is gone."""
    monkeypatch.setattr("trioengine.client.link.HEARTBEAT_INTERVAL_S", 0.05)
    write_fake_model(tmp_path / "model")
    port, key_file = free_port(), tmp_path / "keys"
    config = EngineConfig(
        model=str(tmp_path / "model"),
        data_parallel_size=1,
        data_parallel_size_local=0,
        data_parallel_listen=f"tcp://127.0.0.1:{port}",
        data_parallel_key_file=str(key_file),
    )
    address.read_or_make_keys(str(key_file))
    remote = start_remote_core(port, key_file, rank=0)
    try:
        with trio.fail_after(TIMEOUT_S):
            async with open_engine(config) as engine, engine.generate(GenerateRequest([1], ENDLESS)) as stream:
                await anext(stream)
                remote.kill()
                with pytest.raises(EngineDeadError, match="no longer connected"):
                    _ = [output async for output in stream]
    finally:
        remote.kill()
        remote.communicate()


def test_a_key_file_is_made_once_and_must_be_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = address.read_or_make_keys(str(path))
    assert address.read_or_make_keys(str(path)) == keys == address.read_keys(str(path))
    assert keys.secret_key
    assert keys.secret_key not in repr(keys)
    for content in ("", "{}", "[]", json.dumps({"public_key": "x", "secret_key": "y"})):
        path.write_text(content)
        with pytest.raises(ConfigError, match="no key file"):
            address.read_keys(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        address.read_keys(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="cannot be made"):
        address.read_or_make_keys(str(tmp_path / "nowhere" / "keys"))
    for text in ("tcp://host", "host:1", "ipc:///x:1", "tcp://:1", "tcp://host:*", "tcp://host:0", "tcp://host:65536"):
        with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
            address.create_network_endpoint(text, keys)


def test_options_of_cores_elsewhere_belong_together() -> None:
    listen = {"data_parallel_listen": "tcp://h:1", "data_parallel_key_file": "k"}
    for options in (
        {"data_parallel_size_local": 3, "data_parallel_size": 2},
        {"data_parallel_size_local": 1, "data_parallel_size": 2},
        {"data_parallel_size_local": 1, "data_parallel_size": 2, "data_parallel_listen": "tcp://h:1"},
        {"data_parallel_size": 2, **listen},
        {"data_parallel_size_local": 1, "data_parallel_size": 2, "data_parallel_rank": 1, **listen},
    ):
        with pytest.raises(ConfigError):
            EngineConfig(**options)  # pyright: ignore[reportArgumentType]
    config = EngineConfig(data_parallel_size=3, data_parallel_size_local=1, **listen)
    assert (config.local_ranks, config.remote_ranks) == ((0,), (1, 2))
