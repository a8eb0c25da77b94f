"""The programs of docs/engine-client.md run as they are, with a core whose model is a fake."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trioengine
import trioengine.aio
import trioengine.client
from trioengine.client.engine import open_engine
from trioengine.config.engine import EngineConfig
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import open_scripted_engine

PAGE = Path(__file__).parents[3] / "docs" / "engine-client.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PROMPT = "The sky is"
"""The scripted core answers each prompt with itself."""


def block_with(text: str) -> str:
    """The one program that has this text."""
    [block] = [block for block in BLOCKS if text in block]
    return block


def functions_of(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(block_with(text), names)
    return names


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines, and cores, are those of a scripted core in a process of its own."""
    config = EngineConfig(model=str(write_fake_model(tmp_path / "model")))
    options: dict[str, Any] = {"core_module": "trioengine.testing.scripted_core", "core_options": {"pace_s": "0.001"}}
    monkeypatch.setattr(trioengine, "open_engine", partial(open_engine, config, **options), raising=False)
    monkeypatch.setattr(trioengine.aio, "open_engine", partial(trioengine.aio.open_engine, config, **options))
    monkeypatch.setattr(trioengine, "EngineConfig", lambda: config, raising=False)
    monkeypatch.setattr(trioengine.client, "start_cores", partial(trioengine.client.start_cores, **options))


def test_every_program_is_run_here() -> None:
    assert len(BLOCKS) == 7


@pytest.mark.parametrize("program", [BLOCKS[0], block_with("asyncio.run(main())")], ids=["trio", "asyncio"])
def test_programs_with_an_engine(program: str, scripted: None, capsys: pytest.CaptureFixture[str]) -> None:
    exec(program, {"__name__": "__main__"})
    assert PROMPT in capsys.readouterr().out


async def test_functions_of_an_engine() -> None:
    async with open_scripted_engine(Script()) as scripted:
        engine = scripted.engine
        ideas = await functions_of("three_ideas")["three_ideas"](engine)
        assert len(ideas) == 3
        assert all(ideas)
        assert (await functions_of("soon_or_not_at_all")["soon_or_not_at_all"](engine, "abc")).startswith("abc")
        answers = await functions_of("open_session(engine")["converse"](engine, ["one", "two"])
        assert len(answers) == 2
        assert all(answers)


def test_a_process_attaches_to_the_cores_of_another(
    tmp_path: Path, scripted: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "child.py").write_text(block_with("attach_engine(attachment)"))
    monkeypatch.chdir(tmp_path)
    exec(block_with("start_cores(EngineConfig(), num_clients=1)"), {"__name__": "__main__"})
    assert PROMPT in capfd.readouterr().out
