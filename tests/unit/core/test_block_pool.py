"""Blocks are free, kept or held, never two of them; what can be found is never handed out while others are free."""

import pytest

from trioengine.core.block_pool import BlockPool

ROOT = b"root"


def held_and_findable(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Blocks with these contents, each the parent of the next."""
    block_ids = pool.allocate(len(hashes))
    assert block_ids is not None
    for block_id, block_hash, parent_hash in zip(block_ids, hashes, (ROOT, *hashes), strict=False):
        assert pool.make_findable(block_id, block_hash, parent_hash)
    return block_ids


def test_allocate_gives_all_or_nothing() -> None:
    """A pool that cannot give everything gives nothing, and is unchanged."""
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free_blocks == 1
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [3]


def test_what_became_free_last_is_used_again_first() -> None:
    """Of blocks that nobody can find."""
    pool = BlockPool(4)
    pool.allocate(4)
    pool.free([3])
    pool.free([0, 2])
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
    """Neither a free block nor one of no holder can be freed, held or found."""
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="free already"):
        pool.free([0])
    with pytest.raises(AssertionError, match="is free"):
        pool.hold([0])
    with pytest.raises(AssertionError, match="is not held"):
        pool.make_findable(0, b"a", ROOT)


def test_a_block_that_nobody_holds_is_found_until_it_is_evicted() -> None:
    """It counts as free all the time, and can be held again."""
    evicted: list[tuple[int, bytes, bytes]] = []

    def on_evict(block_id: int, block_hash: bytes, parent_hash: bytes) -> None:
        evicted.append((block_id, block_hash, parent_hash))

    pool = BlockPool(2, on_evict)
    [block] = held_and_findable(pool, b"a")
    pool.free([block])
    assert pool.num_free_blocks == 2
    assert pool.find(b"a") == block
    pool.hold([block])
    assert pool.num_free_blocks == 1
    assert pool.allocate(2) is None
    pool.free([block])
    assert pool.allocate(2) == [1, block]
    assert pool.find(b"a") is None
    assert evicted == [(block, b"a", ROOT)]
    pool.check_integrity()


def test_free_blocks_are_handed_out_before_kept_ones() -> None:
    """However long ago the kept ones were used."""
    pool = BlockPool(3)
    kept = held_and_findable(pool, b"a", b"b")
    pool.free(kept)
    for _ in range(5):
        assert pool.allocate(1) == [2]
        pool.free([2])
    assert pool.find(b"a") is not None
    assert pool.find(b"b") is not None


def test_the_block_let_go_first_is_evicted_first() -> None:
    """Holding one again makes it young again."""
    pool = BlockPool(3)
    a, b, c = held_and_findable(pool, b"a", b"b", b"c")
    pool.free([c, b, a])
    pool.hold([c])
    pool.free([c])
    assert [pool.allocate(1) for _ in range(3)] == [[b], [a], [c]]


def test_of_two_blocks_with_one_content_one_is_found() -> None:
    """The other is free as soon as nobody holds it."""
    pool = BlockPool(3)
    [first] = held_and_findable(pool, b"a")
    [second] = pool.allocate(1) or []
    assert not pool.make_findable(second, b"a", ROOT)
    pool.check_integrity()
    assert pool.find(b"a") == first
    pool.free([second])
    pool.check_integrity()
    assert pool.find(b"a") == first
    assert pool.allocate(2) == [second, 2]


def test_the_copy_that_lives_longer_is_found() -> None:
    """So a prefix stays whole as long as someone has it: no kept block makes room while a holder has the content."""
    pool = BlockPool(3)
    [first] = held_and_findable(pool, b"a")
    second, third = pool.allocate(2) or []
    pool.make_findable(second, b"a", ROOT)
    pool.make_findable(third, b"a", ROOT)
    pool.free([first])
    pool.check_integrity()
    assert pool.find(b"a") in (second, third)
    assert pool.allocate(1) == [first]
    pool.free([second])
    assert pool.find(b"a") == third
    pool.free([third])
    pool.check_integrity()
    assert pool.find(b"a") == third


def test_a_held_copy_takes_the_place_of_a_kept_block() -> None:
    """The kept one is free again at once."""
    pool = BlockPool(2)
    pool.free(held_and_findable(pool, b"a"))
    assert pool.allocate(1) == [1]
    assert not pool.make_findable(1, b"a", ROOT)
    pool.check_integrity()
    assert pool.find(b"a") == 1
    assert pool.allocate(1) == [0]


def test_what_is_forgotten_is_not_found_in_any_block() -> None:
    """Kept blocks are free then; held ones when their holders let go."""
    pool = BlockPool(3)
    kept, held = held_and_findable(pool, b"a", b"b")
    [copy] = pool.allocate(1) or []
    pool.make_findable(copy, b"b", ROOT)
    pool.free([kept])
    assert pool.forget(b"a")
    assert pool.forget(b"b")
    assert not pool.forget(b"b")
    pool.check_integrity()
    assert [pool.find(b"a"), pool.find(b"b")] == [None, None]
    pool.free([held, copy])
    assert pool.allocate(3) == [copy, held, kept]


def test_forget_all_forgets_what_is_kept_and_what_is_held() -> None:
    """Holders go on holding."""
    pool = BlockPool(3)
    a, b = held_and_findable(pool, b"a", b"b")
    pool.free([a])
    pool.forget_all()
    pool.check_integrity()
    assert [pool.find(b"a"), pool.find(b"b")] == [None, None]
    assert pool.num_free_blocks == 2
    pool.free([b])
    assert pool.num_free_blocks == 3


def test_check_integrity_finds_a_block_that_is_free_and_held() -> None:
    """The check sees what it is for."""
    pool = BlockPool(3)
    pool.allocate(2)
    pool.check_integrity()
    pool._free.append(0)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match=r"or in none: \[0\]"):
        pool.check_integrity()
    pool._free.append(0)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity()


def test_check_integrity_finds_a_hash_of_a_block_that_is_free() -> None:
    """What can be found must be held or kept."""
    pool = BlockPool(2)
    held_and_findable(pool, b"a")
    pool._block_ids[b"b"] = 1  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="do not fit"):
        pool.check_integrity()
    pool._hashes[1] = b"b"  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="not the right ones"):
        pool.check_integrity()
