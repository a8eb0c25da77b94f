"""The promises of `EngineClient` that a blocking engine can keep, over a core in this process and over one in another.

Left out is `abort`, whose requests get no last output from `LLMEngine` (as vLLM's do not).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trioengine.client.llm_engine import LLMEngine
from trioengine.config.engine import EngineConfig
from trioengine.testing.blocking_adapter import adapt, build_fake_core_here
from trioengine.testing.engine_conformance import (
    CHECKS,
    OPERATION_CHECKS,
    Check,
    Subject,
    check_abort_ends_all_requests_of_this_name,
    check_leaving_and_abort_end_all_answers,
)
from trioengine.testing.fake_core import MODULE
from trioengine.testing.fake_executor import new_weight
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.types.messages import CheckIntegrity
from trioengine.types.params import SamplingParams

SAMPLING = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
WITH_ABORT = (check_abort_ends_all_requests_of_this_name, check_leaving_and_abort_end_all_answers)
ENDLESS = SamplingParams(seed=1, max_tokens=100_000, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "multiprocess"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    model = str(write_fake_model(tmp_path_factory.mktemp("model")))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("trioengine.runtime.build.build_engine_core", build_fake_core_here)
        monkeypatch.setattr("trioengine.client.llm_engine.HEALTH_INTERVAL_S", 0.01)
        with LLMEngine(EngineConfig(model=model), multiprocess=request.param, core_module=MODULE) as engine:
            yield engine


@pytest.mark.parametrize(
    "check",
    [*(check for check in CHECKS if check not in WITH_ABORT), *OPERATION_CHECKS],
    ids=lambda check: check.__name__,
)
async def test_blocking_engine(check: Check, engine: LLMEngine, tmp_path: Path) -> None:
    async with adapt(engine) as adapter:
        subject = Subject(
            adapter, adapter, SAMPLING, ENDLESS, new_weights=[new_weight(7)], rpc_method="echo", lora_path=str(tmp_path)
        )
        await check(subject)
        await adapter.call(CheckIntegrity())
    assert engine.get_num_unfinished_requests() == 0
