"""Readers hear every event once, or how many they missed."""

from trioengine.core.kv_cache_events import KVCacheEventLog
from trioengine.types.messages import AllBlocksCleared, BlockRemoved, KVCacheEvents


def test_a_reader_gets_what_is_new() -> None:
    """And asks again with the number of the newest."""
    log = KVCacheEventLog()
    assert log.after(0) == KVCacheEvents(last=0, num_lost=0, events=())
    events = [BlockRemoved(0, b"a"), BlockRemoved(0, b"b"), AllBlocksCleared()]
    for event in events:
        log.append(event)
    assert log.after(0) == KVCacheEvents(last=3, num_lost=0, events=tuple(events))
    assert log.after(2) == KVCacheEvents(last=3, num_lost=0, events=(events[2],))
    assert log.after(3) == KVCacheEvents(last=3, num_lost=0, events=())


def test_a_slow_reader_is_told_what_it_lost() -> None:
    """Memory is bounded, however long nobody asks."""
    log = KVCacheEventLog(max_num_events=2)
    for name in (b"a", b"b", b"c", b"d"):
        log.append(BlockRemoved(0, name))
    newest = (BlockRemoved(0, b"c"), BlockRemoved(0, b"d"))
    assert log.after(0) == KVCacheEvents(last=4, num_lost=2, events=newest)
    assert log.after(1) == KVCacheEvents(last=4, num_lost=1, events=newest)
    assert log.after(2) == KVCacheEvents(last=4, num_lost=0, events=newest)


def test_a_number_that_is_none_is_no_error() -> None:
    """From before the first, or from another core's life."""
    log = KVCacheEventLog()
    log.append(AllBlocksCleared())
    assert log.after(-5) == log.after(0)
    assert log.after(99) == KVCacheEvents(last=1, num_lost=0, events=())
