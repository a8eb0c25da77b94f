"""The real core, built: the options of an engine reach it."""

from pathlib import Path

import attrs
import pytest

pytest.importorskip("torch")

from trioengine.config.engine import EngineConfig, SchedulingPolicy, SpeculationConfig, SpeculationMethod
from trioengine.core.config import CoreConfig
from trioengine.core.engine_core import EngineCore
from trioengine.runtime.build import build_engine_core, build_launched_core
from trioengine.runtime.launch import CoreLaunch
from trioengine.testing.native import native_library
from trioengine.testing.tiny_model import folder_tensors, tiny_model, write_folder
from trioengine.worker import loading

OPTIONS = {
    "max_num_seqs": 5,
    "max_num_batched_tokens": 48,
    "max_model_len": 96,
    "block_size": 32,
    "scheduling_policy": SchedulingPolicy.PRIORITY,
    "enable_prefix_caching": False,
    "max_num_partial_prefills": 3,
    "max_long_partial_prefills": 2,
    "long_prefill_token_threshold": 40,
    "async_scheduling": True,
    "enable_kv_cache_events": True,
}


def test_options_of_the_engine_are_those_of_its_core(tmp_path: Path) -> None:
    native_library()
    model = tiny_model()
    location = write_folder(tmp_path, model, folder_tensors(model))
    speculation = SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=3)
    built = build_engine_core(EngineConfig(**OPTIONS, speculative_config=speculation), location)  # type: ignore[arg-type]
    try:
        assert isinstance(built.core, EngineCore)
        config = built.core._config
    finally:
        built.close()
    # Nothing that has the same name in both is left out here.
    shared = {field.name for field in attrs.fields(CoreConfig)} & {field.name for field in attrs.fields(EngineConfig)}
    assert {name for name in shared if "lora" not in name} == set(OPTIONS)
    assert {name: getattr(config, name) for name in OPTIONS} == OPTIONS
    assert config.speculation == speculation
    assert config.vocab_size == model.config.vocab_size
    assert config.max_num_logit_rows >= config.max_num_seqs


@pytest.mark.parametrize(
    ("rank", "options", "gpu_index"),
    [
        (0, {}, 0),
        (2, {"data_parallel_size": 3}, 2),
        (2, {"data_parallel_size": 3, "data_parallel_rank": 2}, 0),
    ],
)
def test_cores_of_a_machine_have_a_gpu_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, options: dict[str, int], gpu_index: int
) -> None:
    """A core that is started by itself has the first that it sees."""

    class ChosenError(Exception):
        pass

    def choose(config: object, checkpoint: object, index: int) -> None:
        raise ChosenError(index)

    monkeypatch.setattr(loading, "choose_computer", choose)
    model = tiny_model()
    location = write_folder(tmp_path, model, folder_tensors(model))
    config = EngineConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ChosenError) as caught:
        build_launched_core(CoreLaunch((), rank, -1, config, location), lambda *stage: None)
    assert caught.value.args == (gpu_index,)
