"""What loggers hear of a real engine client: counts that equal what callers saw, over one client and over two."""

import logging
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from trioengine.client.cores import start_cores
from trioengine.client.engine import Engine, attach_engine, open_engine
from trioengine.config.engine import EngineConfig
from trioengine.observability.prometheus import PrometheusStatLogger
from trioengine.testing.fake_core import MODULE
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.types.messages import GetStats
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest

TIMEOUT_S = 60
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fake_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test, however it ends: no process."""
    yield
    assert psutil.Process().children(recursive=True) == []


async def answer(engine: Engine, request_id: str, n: int = 1) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, n=n)
    async with engine.generate(GenerateRequest([5, 6, 7], sampling, request_id=request_id)) as outputs:
        async for _ in outputs:
            pass


def counts(engine: Engine, name: str) -> dict[str, float]:
    """A metric's values on the engine's page, by what tells its lines apart."""
    (metrics,) = (each for each in engine.stat_loggers if isinstance(each, PrometheusStatLogger))
    families = text_string_to_metric_families(metrics.render().body.decode())
    return {
        sample.labels.get("api_server", "") + sample.labels.get("finished_reason", ""): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "trioengine:" + name
    }


def is_private(folder: str) -> bool:
    return Path(folder).stat().st_mode & 0o777 == 0o700


def is_there(folder: str) -> bool:
    return Path(folder).exists()


async def test_counts_equal_what_callers_saw(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """A request counts once, however many answers it has and however it ends."""
    caplog.set_level(logging.INFO, "trioengine.observability")
    config = EngineConfig(model=model, enable_log_requests=True, data_parallel_size=4, data_parallel_rank=2)
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(config, core_module=MODULE) as engine:
            await answer(engine, "one")
            await answer(engine, "three", n=3)
            async with engine.generate(GenerateRequest([5, 6], SamplingParams(max_tokens=1000))) as outputs:
                await anext(outputs)
            await answer(engine, "last")
            assert counts(engine, "request_success_total") == {"stop": 0, "length": 3, "abort": 1, "error": 0}
            assert counts(engine, "e2e_request_latency_seconds_count") == {"": 4}  # Of the one core, by its rank.
            assert counts(engine, "prompt_tokens_total") == {"": 3 + 3 + 2 + 3}
            assert counts(engine, "generation_tokens_total")[""] >= 5 * NUM_TOKENS + 1
            assert counts(engine, "time_to_first_token_seconds_count") == {"": 4}
            engine.do_log_stats()
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("Request 'three' came: 3 prompt tokens, ") for line in lines) == 1
    assert sum(line.startswith("Request 'three' ended: length, 3 prompt tokens, 24 generated") for line in lines) == 1
    assert any(line.startswith("Engine 2: prompt ") for line in lines)


async def test_two_clients_of_the_same_cores_show_the_counts_of_both(model: str) -> None:
    """Whichever API server a scraper reaches, it gets all; what they share is gone with the cores."""
    config = EngineConfig(model=model)
    with trio.fail_after(TIMEOUT_S):
        async with start_cores(config, num_clients=2, core_module=MODULE) as cores:
            first_attachment, second_attachment = cores.attachments
            folder = first_attachment.metrics_folder
            assert is_private(folder)
            async with (
                attach_engine(first_attachment, api_server=0) as first,
                attach_engine(second_attachment, api_server=1) as second,
            ):
                await answer(first, "a")
                await answer(second, "b")
                await answer(second, "c")
                for engine in (first, second):
                    engine.do_log_stats()
                for engine in (first, second):
                    assert counts(engine, "e2e_request_latency_seconds_count") == {"0": 1, "1": 2}
                    assert counts(engine, "generation_tokens_total") == {"0": NUM_TOKENS, "1": 2 * NUM_TOKENS}
                    assert len(counts(engine, "num_requests_running")) == 1
    assert not is_there(folder)


async def test_two_clients_of_the_same_cores_know_how_these_do(model: str) -> None:
    """Who asks for nothing sees what the other's requests do, and no count falls from one's page to the other's."""
    names = ("num_requests_running", "kv_cache_usage_perc", "engine_steps_total")

    async def until(engine: Engine, *, is_busy: bool) -> list[float]:
        while True:
            values = [sum(counts(engine, name).values()) for name in names]
            if len(counts(engine, names[0])) == 1 and all(value > 0 for value in values[:2]) == is_busy:
                return values
            await trio.sleep(0.01)

    with trio.fail_after(TIMEOUT_S):
        async with start_cores(EngineConfig(model=model), num_clients=2, core_module=MODULE) as cores:
            first_attachment, second_attachment = cores.attachments
            async with (
                attach_engine(first_attachment, api_server=0) as first,
                attach_engine(second_attachment, api_server=1) as second,
            ):
                async with first.generate(GenerateRequest([5], SamplingParams(max_tokens=10_000, ignore_eos=True))):
                    await until(second, is_busy=True)
                await until(first, is_busy=False)
                steps = (await first.call(GetStats())).num_steps
                assert await until(first, is_busy=False) == await until(second, is_busy=False) == [0, 0, steps]


async def test_gauges_are_0_when_all_is_aborted_at_once(model: str) -> None:
    """Case 8 (vllm 29928): what runs and what waits, within a second."""
    endless = SamplingParams(max_tokens=10_000, ignore_eos=True)
    with trio.fail_after(TIMEOUT_S):
        async with (
            open_engine(EngineConfig(model=model), core_module=MODULE) as engine,
            trio.open_nursery() as nursery,
        ):

            async def read(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
                async with engine.generate(GenerateRequest([5, 6], endless)) as outputs:
                    task_status.started()
                    async for _ in outputs:
                        pass

            for _ in range(100):  # 64 run at once.
                await nursery.start(read)
            while not all(gauges(engine)):  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(0.01)
            engine.abort_all()
            with trio.fail_after(1):
                while any(gauges(engine)):  # noqa: ASYNC110 (nobody tells)
                    await trio.sleep(0.01)
            assert gauges(engine) == [0, 0, 0]
            assert counts(engine, "request_success_total")["abort"] == 100


def gauges(engine: Engine) -> list[float]:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [sum(counts(engine, name).values()) for name in names]
