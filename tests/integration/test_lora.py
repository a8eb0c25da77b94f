"""Adapters come and go while serving, through `GenerateRequest`, on a real core process with the bundled model."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

pytest.importorskip("safetensors")

from trioengine.checkpoint.locate import resolve_model
from trioengine.client import open_engine
from trioengine.client.engine import Engine
from trioengine.config import env
from trioengine.config.engine import EngineConfig
from trioengine.errors import CheckpointError, RequestError
from trioengine.models.config import ModelConfig
from trioengine.models.loader import open_checkpoint
from trioengine.testing.lora import write_lora
from trioengine.testing.native import native_library
from trioengine.types.messages import (
    AddLoRA,
    CheckIntegrity,
    ListLoRAs,
    PinLoRA,
    RemoveLoRA,
    ResetPrefixCache,
    Sleep,
    WakeUp,
)
from trioengine.types.output import CompletionOutput
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest

TIMEOUT_S = 120
PROMPT = "The grey book lies open on a table behind glass, and every month somebody turns one page."
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@asynccontextmanager
async def opened(*, max_loras: int = 2, max_cpu_loras: int = 4) -> AsyncGenerator[Engine]:
    native_library()
    config = EngineConfig(max_model_len=512, enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(config) as engine:
            yield engine
            await engine.call(CheckIntegrity())


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return open_checkpoint(resolve_model(None, cache_dir=env.cache_dir())).config


async def answer(
    engine: Engine,
    lora: str | None,
    sampling: SamplingParams = GREEDY,
    started: trio.Event | None = None,
    cache_salt: str | None = None,
) -> tuple[CompletionOutput, int]:
    """The completion, and how many tokens of the prompt were found in the cache."""
    completion: CompletionOutput | None = None
    num_cached_tokens = 0
    async with engine.generate(GenerateRequest(PROMPT, sampling, lora=lora, cache_salt=cache_salt)) as outputs:
        async for output in outputs:
            (completion,) = output.outputs
            num_cached_tokens = output.num_cached_tokens
            if started is not None:
                started.set()
    assert completion is not None
    return completion, num_cached_tokens


async def tokens(engine: Engine, lora: str | None, sampling: SamplingParams = GREEDY) -> tuple[int, ...]:
    return tuple((await answer(engine, lora, sampling))[0].token_ids)


async def test_adapters_come_and_go_while_others_are_served(tmp_path: Path, config: ModelConfig) -> None:
    """Base, two adapters of different ranks in one batch, a third that waits for a slot; removed ones end in peace."""
    paths = {
        name: str(write_lora(tmp_path / name, config, targets, rank=rank, seed=rank))
        for name, targets, rank in (("a", ["q_proj", "v_proj"], 3), ("b", None, 16), ("c", ["down_proj"], 8))
    }
    async with opened() as engine:
        base = await tokens(engine, None, LONG)
        found: dict[str, tuple[int, ...]] = {}

        async def ask(name: str, lora: str | None, started: trio.Event | None = None) -> None:
            found[name] = tuple((await answer(engine, lora, LONG, started))[0].token_ids)

        started = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "base", None, started)
            await started.wait()
            for name, path in paths.items():
                await engine.call(AddLoRA(name, path))
            assert "base" not in found
        alone = {name: await tokens(engine, name, LONG) for name in paths}
        assert found["base"] == base
        assert len({base, *alone.values()}) == 4

        async with trio.open_nursery() as nursery:
            for lora in (None, "a", "b", "c"):
                nursery.start_soon(ask, str(lora), lora)
        assert found["None"] == base
        assert {name: found[name] for name in paths} == alone

        started = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "leaving", "b", started)
            await started.wait()
            await engine.call(RemoveLoRA("b"))
            with pytest.raises(RequestError) as caught:
                await tokens(engine, "b")
            assert caught.value.param == "lora"
            await engine.call(AddLoRA("b", paths["c"]))
            assert "leaving" not in found
        assert found["leaving"] == alone["b"]
        assert await tokens(engine, "b", LONG) == alone["c"]
        assert [info.name for info in await engine.call(ListLoRAs())] == ["a", "c", "b"]


async def test_what_cannot_be_loaded_is_a_clear_error_and_the_engine_goes_on(
    tmp_path: Path, config: ModelConfig
) -> None:
    good = write_lora(tmp_path / "good", config, ["q_proj"])
    dora = write_lora(tmp_path / "dora", config, ["q_proj"], settings={"use_dora": True})
    async with opened(max_loras=1) as engine:
        base = await tokens(engine, None)
        with pytest.raises(CheckpointError, match="adapter_config"):
            await engine.call(AddLoRA("nowhere", str(tmp_path / "nowhere")))
        with pytest.raises(CheckpointError, match="use_dora"):
            await engine.call(AddLoRA("dora", str(dora)))
        with pytest.raises(RequestError, match="max_lora_rank"):
            await engine.call(AddLoRA("large", str(write_lora(tmp_path / "large", config, ["q_proj"], rank=17))))
        with pytest.raises(RequestError) as caught:
            await tokens(engine, "dora")
        assert caught.value.param == "lora"
        await engine.call(AddLoRA("good", str(good)))
        with pytest.raises(RequestError, match="max_loras"):
            await engine.call(PinLoRA("good"))
        assert await tokens(engine, None) == base
        assert await tokens(engine, "good") != base


async def test_case_47_and_sleep(tmp_path: Path, config: ModelConfig) -> None:
    """Case 47 (vllm 44701): an adapter called like a salt hits nothing of the salt's; after sleep all is as before."""
    folder = write_lora(tmp_path / "x", config, rank=4)
    async with opened() as engine:
        await engine.call(AddLoRA("x", str(folder)))
        await engine.call(ResetPrefixCache())
        pairs = [(None, "x"), ("x", None), ("x", "x"), (None, None)]
        hits = [(await answer(engine, lora, GREEDY, None, salt))[1] > 0 for salt, lora in pairs * 2]
        assert hits == [False] * 4 + [True] * 4
        expected = [await tokens(engine, lora) for lora in (None, "x")]
        assert expected[0] != expected[1]
        for level in (1, 2):
            await engine.call(Sleep(level))
            await engine.call(WakeUp())
            assert [await tokens(engine, lora) for lora in (None, "x")] == expected


async def test_without_the_option_adapters_are_refused() -> None:
    native_library()
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(EngineConfig(max_model_len=512)) as engine:
            with pytest.raises(RequestError, match="enable_lora"):
                await engine.call(AddLoRA("a", "/nowhere"))
            with pytest.raises(RequestError, match="enable_lora"):
                await tokens(engine, "a")
            assert len(await tokens(engine, None)) == 12
