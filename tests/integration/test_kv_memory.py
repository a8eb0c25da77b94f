"""The core and a real model share little memory: windows, the offload store and sleep change no token."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest

pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool

from trioengine.core.config import CoreConfig
from trioengine.core.engine_core import EngineCore
from trioengine.models.torch_ops import TorchModel
from trioengine.testing.core_driver import Answer, CoreDriver, make_core_request
from trioengine.testing.native import native_library
from trioengine.testing.tiny_model import native_copy, random_model, tiny_config
from trioengine.types.messages import GetStats, Sleep, WakeUp
from trioengine.types.params import SamplingParams
from trioengine.worker.backend import Backend
from trioengine.worker.executor import LocalExecutor
from trioengine.worker.kv_offload import DiskOffloadStore, MemoryOffloadStore, OffloadStore
from trioengine.worker.native_backend import NativeBackend
from trioengine.worker.torch_backend import TorchBackend

BLOCK_SIZE = 16
MAX_TOKENS = 48
MAX_LEN = 320
FULL = random_model(tiny_config())
MIXED = random_model(attrs.evolve(tiny_config(), num_layers=3, layer_windows=(None, 40, 40)))
WINDOWS_ONLY = random_model(attrs.evolve(tiny_config(), layer_windows=(40, 40)))


def make_driver(
    model: TorchModel,
    num_blocks: Sequence[int],
    *,
    backend: str = "native",
    make_store: Callable[[Backend], OffloadStore] | None = None,
    enable_prefix_caching: bool = True,
    async_scheduling: bool = False,
) -> CoreDriver:
    driver = CoreDriver(
        CoreConfig(
            max_num_seqs=4,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_logit_rows=MAX_TOKENS,
            max_model_len=MAX_LEN,
            block_size=BLOCK_SIZE,
            vocab_size=model.config.vocab_size,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
        )
    )
    made = torch_backend(model, num_blocks) if backend == "torch" else native_backend(model, num_blocks)
    store = None if make_store is None else make_store(made)
    executor = LocalExecutor(made, offload_store=store, is_asynchronous=async_scheduling)
    driver.core = EngineCore(driver.config, executor)
    return driver


def torch_backend(model: TorchModel, num_blocks: Sequence[int]) -> Backend:
    return TorchBackend(model, reload=lambda _: model, num_blocks=num_blocks, block_size=BLOCK_SIZE)


def native_backend(model: TorchModel, num_blocks: Sequence[int]) -> Backend:
    library = native_library()
    return NativeBackend(
        native_copy(model),
        library,
        ThreadPool(library, 2),
        reload=lambda _: native_copy(model),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_tokens=MAX_TOKENS,
        max_logit_rows=MAX_TOKENS,
    )


def prompt_of(length: int, start: int) -> list[int]:
    return [(start * 37 + place * 29 + place * place * 5 + 3) % FULL.config.vocab_size for place in range(length)]


def generate(driver: CoreDriver, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """Greedy answers, all at once."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    answers = [driver.add(make_core_request(slot, prompt, sampling=sampling)) for slot, prompt in enumerate(prompts)]
    driver.run()
    assert all(len(answer.tokens) == max_tokens for answer in answers)
    return answers


def close(*drivers: CoreDriver) -> None:
    for driver in drivers:
        driver.core.executor.close()


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("model", "few"), [(MIXED, [45, 14]), (WINDOWS_ONLY, [14])], ids=["some layers", "all layers"])
def test_few_blocks_are_enough_for_windows(
    model: TorchModel, few: Sequence[int], backend: str, async_scheduling: bool
) -> None:
    """Sequences far longer than the blocks of their windows hold give the tokens that they give with plenty."""
    prompts = [prompt_of(length, start) for start, length in enumerate((150, 3, 90, 70))]
    plenty = make_driver(model, [200] * len(few), backend=backend)
    expected = [answer.tokens for answer in generate(plenty, prompts, 120)]
    driver = make_driver(model, few, backend=backend, async_scheduling=async_scheduling)
    assert [answer.tokens for answer in generate(driver, prompts, 120)] == expected
    # Again, with what is cached.
    assert [answer.tokens for answer in generate(driver, prompts, 120)] == expected
    close(plenty, driver)


def slot_bytes(backend: Backend) -> list[int]:
    return [backend.kv_block(group, 0).nbytes for group in range(len(backend.kv_cache_groups))]


def files_in(folder: Path) -> list[int]:
    """Descriptors of the files that this process has open in a folder."""
    links = {int(name): f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")}
    return [number for number, link in links.items() if os.path.islink(link) and str(folder) in os.readlink(link)]


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("model", [FULL, MIXED], ids=["one group", "two groups"])
def test_evicted_prefixes_come_back_from_the_offload_store(model: TorchModel, store: str, tmp_path: Path) -> None:
    """Found as if they had never left; where the disk lost or changed them, they are computed again."""

    def make_store(backend: Backend) -> OffloadStore:
        if store == "memory":
            return MemoryOffloadStore(100, slot_bytes(backend))
        return DiskOffloadStore(100, slot_bytes(backend), tmp_path)

    num_groups = len(model.config.kv_groups)
    prompts = [prompt_of(200, start) for start in range(4)]
    plain = make_driver(model, [100] * num_groups, enable_prefix_caching=False)
    expected = [generate(plain, [prompt], 8)[0].tokens for prompt in prompts]
    driver = make_driver(model, [20] * num_groups, make_store=make_store)
    for _ in range(2):
        for prompt, tokens in zip(prompts, expected, strict=True):
            (answer,) = generate(driver, [prompt], 8)
            assert answer.tokens == tokens
    assert answer.num_cached_tokens == 192
    assert driver.call(GetStats()).num_loaded_blocks > 0
    if store == "disk":
        for descriptor in files_in(tmp_path):
            os.pwrite(descriptor, os.urandom(os.fstat(descriptor).st_size), 0)
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert generate(driver, [prompt], 8)[0].tokens == tokens
    close(plain, driver)


@pytest.mark.parametrize("level", [1, 2])
def test_generation_is_the_same_after_sleep(level: int, tmp_path: Path) -> None:
    """Whatever was cached or offloaded is computed again."""

    def make_store(backend: Backend) -> OffloadStore:
        return MemoryOffloadStore(100, slot_bytes(backend))

    prompts = [prompt_of(200, start) for start in range(3)]
    driver = make_driver(MIXED, [20, 20], make_store=make_store)
    expected = [generate(driver, [prompt], 8)[0].tokens for prompt in prompts]
    driver.call(Sleep(level))
    for tags in (("kv_cache",), ("weights",)):
        driver.call(WakeUp(tags))
    answers = [generate(driver, [prompt], 8)[0] for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    assert [answer.num_cached_tokens for answer in answers] == [0, 0, 0]
    close(driver)
