"""What a command may do to its process, and an embedded engine may not: take signals."""

import signal
from collections.abc import Callable

import trio

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def watch_stop_signals(
    on_first: Callable[[], None],
    on_second: Callable[[], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call `on_first` at the first SIGTERM, SIGHUP or Ctrl-C and `on_second` at each later one, until cancelled.

    SIGHUP is never a second one: a terminal that is closed sends several. Below `nohup` it is nothing at all.
    """
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with trio.open_signal_receiver(*(STOP_SIGNALS[:-1] if ignores_hangup else STOP_SIGNALS)) as signals:
        task_status.started()
        is_first = True
        async for received in signals:
            if is_first:
                on_first()
            elif received != signal.SIGHUP:
                on_second()
            is_first = False


def leave_signals_to_parent() -> None:
    """Ignore what stops a command: this process ends when its parent says so."""
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
