"""Blocks are free or held, never both, never twice."""

import pytest

from trioengine.core.block_pool import BlockPool


def test_allocate_gives_all_or_nothing() -> None:
    """A pool that cannot give everything gives nothing, and is unchanged."""
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free_blocks == 1
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [3]


def test_what_became_free_last_is_used_again_first() -> None:
    """Of several freed together, in their order."""
    pool = BlockPool(4)
    pool.allocate(4)
    pool.free([3])
    pool.free([2, 0])
    assert pool.allocate(3) == [2, 0, 3]


def test_no_more_blocks_are_touched_than_were_held_at_once() -> None:
    """A light load on a large cache takes little memory, however long it goes on."""
    pool = BlockPool(1000)
    touched: set[int] = set()
    for _ in range(100):
        several = [pool.allocate(3) or [] for _ in range(4)]
        touched.update(block for blocks in several for block in blocks)
        for blocks in several:
            pool.free(blocks)
    assert len(touched) == 12


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    """Two holders free it twice; only the second makes it free."""
    pool = BlockPool(2)
    blocks = [0]
    assert pool.allocate(1) == blocks
    pool.hold(blocks)
    pool.free(blocks)
    assert (pool.num_holders(0), pool.num_free_blocks) == (1, 1)
    pool.free(blocks)
    assert (pool.num_holders(0), pool.num_free_blocks) == (0, 2)
    pool.check_integrity()


def test_freeing_twice_is_a_bug() -> None:
    """Neither a free block nor one of no holder can be freed or held."""
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="free already"):
        pool.free([0])
    with pytest.raises(AssertionError, match="is free"):
        pool.hold([0])


def test_check_integrity_finds_a_block_that_is_free_and_held() -> None:
    """The check sees what it is for."""
    pool = BlockPool(3)
    pool.allocate(2)
    pool.check_integrity()
    pool._free.append(0)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match=r"neither: \[0\]"):
        pool.check_integrity()
    pool._free.append(0)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity()
