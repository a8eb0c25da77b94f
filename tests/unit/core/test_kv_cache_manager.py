"""A sequence has exactly the blocks that its tokens need."""

import pytest

from trioengine.core.kv_cache_manager import KVCacheManager


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_block_begun_is_a_block(num_tokens: int, num_blocks: int) -> None:
    """Blocks are counted whole."""
    assert KVCacheManager(num_blocks=8, block_size=4).num_blocks_for(num_tokens) == num_blocks


def test_allocate_returns_only_what_is_new() -> None:
    """The caller appends it to the table it knows."""
    kv_cache = KVCacheManager(num_blocks=8, block_size=4)
    assert kv_cache.allocate(7, 5) == [0, 1]
    assert kv_cache.allocate(7, 8) == []
    assert kv_cache.allocate(7, 9) == [2]
    assert kv_cache.allocate(7, 1) == []
    assert kv_cache.block_table(7) == [0, 1, 2]
    assert kv_cache.num_free_blocks == 5


def test_a_no_changes_nothing() -> None:
    """A sequence without room is not known, and one that had blocks keeps them."""
    kv_cache = KVCacheManager(num_blocks=2, block_size=4)
    assert kv_cache.allocate(1, 4) == [0]
    assert kv_cache.allocate(2, 8) is None
    assert kv_cache.allocate(1, 12) is None
    assert kv_cache.sequence_ids == {1}
    assert kv_cache.num_free_blocks == 1
    kv_cache.check_integrity()


def test_the_end_of_a_freed_sequence_is_used_again_first() -> None:
    """Beginnings live longest."""
    kv_cache = KVCacheManager(num_blocks=3, block_size=4)
    kv_cache.allocate(1, 12)
    kv_cache.free(1)
    assert kv_cache.allocate(2, 12) == [2, 1, 0]


def test_check_integrity_finds_a_block_in_two_tables() -> None:
    """A block that two tables name must be held twice."""
    kv_cache = KVCacheManager(num_blocks=3, block_size=4)
    kv_cache.allocate(1, 4)
    kv_cache.allocate(2, 4)
    kv_cache.check_integrity()
    kv_cache._block_tables[2].append(0)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match=r"\[0\]"):
        kv_cache.check_integrity()
