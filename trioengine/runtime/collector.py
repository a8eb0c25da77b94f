"""The garbage collector in processes that are ours: core processes and commands. Never in a host application."""

import gc


def tune_garbage_collector() -> None:
    """Make cyclic collection rare, once what lives for good is there.

    It is half the cost of the output path otherwise: thousands of small objects per second live for a moment, none of
    them in a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
