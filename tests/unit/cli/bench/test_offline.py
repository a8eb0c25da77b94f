"""`bench offline` and `bench embed` over an engine that only pretends: every request has room, and one error is one."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from trioengine.cli.bench import embed, offline
from trioengine.cli.bench.embed import EmbedBench
from trioengine.cli.bench.offline import OfflineBench
from trioengine.client import open_engine
from trioengine.config.engine import EngineConfig
from trioengine.errors import PromptTooLongError, RequestError, TrioEngineError
from trioengine.testing.fake_core import MAX_MODEL_LEN, MODULE
from trioengine.testing.fake_tokenizer import write_fake_model


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineConfig]:
    """Of an engine whose queue has room for two."""
    for module in (offline, embed):
        monkeypatch.setattr(module, "open_engine", functools.partial(open_engine, core_module=MODULE))
    yield EngineConfig(model=str(write_fake_model(tmp_path)), max_num_queued_reqs=2)
    assert psutil.Process().children(recursive=True) == []


async def test_more_prompts_than_the_queue_has_room_for_are_taken(config: EngineConfig) -> None:
    bench = OfflineBench(engine=config, num_prompts=5, num_input_tokens=3, num_output_tokens=2)
    assert (await bench.run()).figures()["output_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (functools.partial(OfflineBench, num_output_tokens=2), PromptTooLongError),
        (functools.partial(EmbedBench, num_rounds=1), RequestError),
    ],
)
async def test_what_all_requests_meet_is_one_error(
    config: EngineConfig, make: Callable[..., OfflineBench | EmbedBench], kind: type[TrioEngineError]
) -> None:
    bench = make(engine=config, num_prompts=3, num_input_tokens=MAX_MODEL_LEN + 1)
    with pytest.raises(kind) as caught:
        await bench.run()
    assert not isinstance(caught.value, BaseExceptionGroup)
