"""What a command may do to its process, and an embedded engine may not: take signals."""

import signal
from collections.abc import Callable

import trio

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def watch_stop_signals(
    on_first: Callable[[], None],
    on_second: Callable[[], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call `on_first` at the first SIGTERM or Ctrl-C and `on_second` at each later one, until cancelled."""
    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        task_status.started()
        is_first = True
        async for _ in signals:
            (on_first if is_first else on_second)()
            is_first = False


def leave_signals_to_parent() -> None:
    """Ignore what stops a command: this process ends when its parent says so."""
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
