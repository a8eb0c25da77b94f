"""What a process of ours may do to itself, and an embedded engine may not: the collector, signals."""

import gc
import signal
from collections.abc import Callable

import trio

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def tune_garbage_collector() -> None:
    """Make cyclic collection rare, once what lives for good is there.

    It is half the cost of the output path otherwise: thousands of small objects per second live for a moment, none of
    them in a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


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
