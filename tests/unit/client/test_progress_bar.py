"""The bar of blocking calls: which one, and what it shows."""

import sys
import threading
from typing import Any

import pytest

from trioengine.client import progress_bar
from trioengine.client.progress_bar import PlainBar, PromptProgress


class Bar:
    """What tqdm would be called with."""

    def __init__(self, **options: Any) -> None:
        self.total, self.desc, self.postfix = options["total"], options["desc"], options["postfix"]
        self.num_done = 0
        self.is_closed = False

    def update(self, n: int) -> None:
        self.num_done += n

    def close(self) -> None:
        self.is_closed = True


def test_a_callable_is_used_as_tqdm_is() -> None:
    bars: list[Bar] = []

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    with PromptProgress(make, 2) as progress:
        progress.finish_one(10, 5)
        progress.finish_one(10, 5)
    (bar,) = bars
    assert (bar.total, bar.num_done, bar.desc, bar.is_closed) == (2, 2, "Processed prompts", True)
    assert bar.postfix.startswith("est. speed input: ")
    assert "toks/s, output: " in bar.postfix


def test_nobody_is_shown_anything_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    for use_tqdm in (False, True):
        with PromptProgress(use_tqdm, 1) as progress:
            progress.finish_one(1, 1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_tqdm_without_its_thread(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    num_threads = threading.active_count()
    with PromptProgress(True, 1) as progress:
        progress.finish_one(1, 1)
    assert threading.active_count() == num_threads
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "toks/s" in shown


def test_without_tqdm_there_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_default_bar", lambda: PlainBar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with PromptProgress(True, 2) as progress:
        progress.finish_one(1, 1)
    lines = capsys.readouterr().err.split("\r")
    assert lines[1].startswith("Processed prompts: 0/2")
    assert lines[2].startswith("Processed prompts: 1/2")
    assert lines[2].endswith("\n")
