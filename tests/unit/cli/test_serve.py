"""What ends `trioengine serve`."""

import os
import signal

import pytest
import trio
import trio.testing

from trioengine.cli import serve
from trioengine.config import EngineConfig, ServerConfig


async def test_a_second_signal_does_not_cut_short_what_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C pressed twice while the model loads: no handler is gone before the last file is."""
    service = serve._Service(EngineConfig(), ServerConfig())  # pyright: ignore[reportPrivateUsage]
    was_cleaned_up = False

    async def load_for_ever() -> None:
        nonlocal was_cleaned_up
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                os.kill(os.getpid(), signal.SIGTERM)
                await trio.testing.wait_all_tasks_blocked()
            was_cleaned_up = True

    monkeypatch.setattr(service, "_serve", load_for_ever)
    assert await service.run() == 130
    assert was_cleaned_up
