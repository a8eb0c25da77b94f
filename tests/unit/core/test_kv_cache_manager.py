"""A sequence has exactly the blocks that its tokens need, and computes what no other has computed."""

from array import array
from collections.abc import Iterable, Sequence

import pytest

from trioengine.core.executor import BlockCopy, KVCacheGroup
from trioengine.core.kv_cache_manager import Admission, KVCacheManager, KVCacheStatistics
from trioengine.core.prefix_cache import cache_namespace, extend_hashes, root_hash
from trioengine.types.messages import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK_SIZE = 4


def make_kv_cache(
    num_blocks: int = 8, *others: KVCacheGroup, num_offload_blocks: int = 0, record_events: bool = False
) -> KVCacheManager:
    """A cache with blocks of four tokens that finds prefixes."""
    return KVCacheManager(
        [KVCacheGroup(num_blocks), *others],
        BLOCK_SIZE,
        enable_prefix_caching=True,
        num_offload_blocks=num_offload_blocks,
        record_events=record_events,
    )


def tokens(*parts: Iterable[int]) -> "array[int]":
    """Their tokens, one after the other."""
    return array("i", [token for part in parts for token in part])


def run(kv_cache: KVCacheManager, sequence_id: int, token_ids: "array[int]", namespace: bytes = b"") -> Admission:
    """A sequence that is admitted and computed in one step, and goes on to hold its blocks."""
    admission = kv_cache.admit(sequence_id, token_ids, namespace=namespace)
    assert admission is not None
    kv_cache.commit(sequence_id, token_ids, len(token_ids))
    kv_cache.take_copies()
    kv_cache.check_integrity()
    return admission


def compute(kv_cache: KVCacheManager, sequence_id: int, token_ids: "array[int]", namespace: bytes = b"") -> int:
    """How many tokens of a sequence were cached; it is computed and ends."""
    admission = run(kv_cache, sequence_id, token_ids, namespace)
    kv_cache.free(sequence_id)
    kv_cache.check_integrity()
    return admission.num_cached_tokens


A, B, C, D = ([name] * BLOCK_SIZE for name in range(1, 5))


# Room


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_block_begun_is_a_block(num_tokens: int, num_blocks: int) -> None:
    """Blocks are counted whole."""
    assert make_kv_cache().num_blocks_for(num_tokens) == num_blocks


def test_allocate_returns_only_what_is_new() -> None:
    """The caller appends it to the table it knows."""
    kv_cache = make_kv_cache()
    assert kv_cache.admit(7, tokens(A, [1])) == Admission(0, [0, 1])
    assert list(kv_cache.allocate(7, 8) or ()) == []
    assert kv_cache.allocate(7, 9) == [2]
    assert list(kv_cache.allocate(7, 1) or ()) == []
    assert kv_cache.block_tables(7) == [[0, 1, 2]]
    assert kv_cache.num_free_blocks == 5
    assert kv_cache.usage == 3 / 8


def test_a_no_changes_nothing() -> None:
    """A sequence without room is not known, and one that had blocks keeps them."""
    kv_cache = make_kv_cache(2)
    assert kv_cache.admit(1, tokens(A)) == Admission(0, [0])
    statistics = kv_cache.statistics
    assert kv_cache.admit(2, tokens(B, C)) is None
    assert kv_cache.allocate(1, 12) is None
    assert kv_cache.sequence_ids == {1}
    assert kv_cache.num_free_blocks == 1
    assert kv_cache.statistics == statistics
    kv_cache.check_integrity()


def test_without_caching_nothing_is_found_and_the_last_block_is_used_first() -> None:
    """A light load then walks through no more of the cache than it needs."""
    kv_cache = KVCacheManager([KVCacheGroup(100)], BLOCK_SIZE)
    for sequence_id in range(10):
        admission = run(kv_cache, sequence_id, tokens(A, B, [1]))
        assert admission == Admission(0, [0, 1, 2])
        kv_cache.free(sequence_id)
    assert kv_cache.statistics == KVCacheStatistics(0, 0, 0, 0, 0)


def test_groups_have_their_blocks_side_by_side() -> None:
    """Block after block, as a plan has them; and all of them or none."""
    kv_cache = make_kv_cache(8, KVCacheGroup(4))
    kv_cache.admit(1, tokens([1]))
    kv_cache.allocate(1, 5)
    assert kv_cache.block_tables(1) == [[0, 1], [0, 1]]
    assert kv_cache.admit(2, tokens(A, [1])) == Admission(0, [2, 2, 3, 3])
    assert kv_cache.allocate(1, 9) is None
    assert kv_cache.admit(3, tokens([1])) is None
    assert (kv_cache.num_blocks, kv_cache.num_free_blocks, kv_cache.usage) == (12, 4, 1.0)
    kv_cache.free(2)
    assert kv_cache.allocate(1, 9) == [2, 2]
    kv_cache.check_integrity()


# Prefixes


def test_a_prefix_is_computed_once() -> None:
    """Whole blocks of it, while its first sequence runs and after it has ended."""
    kv_cache = make_kv_cache()
    assert run(kv_cache, 1, tokens(A, B, [1])) == Admission(0, [0, 1, 2])
    assert run(kv_cache, 2, tokens(A, B, [2])) == Admission(8, [0, 1, 3])
    kv_cache.free(1)
    kv_cache.free(2)
    assert compute(kv_cache, 3, tokens(A, B, [3])) == 8
    assert compute(kv_cache, 4, tokens(A, C)) == 4
    assert compute(kv_cache, 5, tokens(B, A)) == 0


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_the_last_token_is_always_computed(num_tokens: int, num_cached: int) -> None:
    """Something must be sampled from."""
    kv_cache = make_kv_cache()
    whole = tokens(A, B, C)
    compute(kv_cache, 1, whole)
    assert compute(kv_cache, 2, whole[:num_tokens]) == num_cached


def test_sequences_that_arrive_together_compute_their_prefix_once() -> None:
    """All in one step: what the first commits, the others use."""
    kv_cache = make_kv_cache(16)
    for sequence_id in range(8):
        token_ids = tokens(A, B, [sequence_id])
        admission = kv_cache.admit(sequence_id, token_ids)
        kv_cache.commit(sequence_id, token_ids, len(token_ids))
        assert admission == Admission(8 if sequence_id else 0, [0, 1, 2 + sequence_id])
    kv_cache.check_integrity()
    assert kv_cache.statistics == KVCacheStatistics(
        num_queried_tokens=72, num_hit_tokens=56, num_evicted_blocks=0, num_saved_blocks=0, num_loaded_blocks=0
    )


def test_only_what_was_committed_is_found() -> None:
    """A long prompt in parts is found as far as it is computed."""
    kv_cache = make_kv_cache()
    token_ids = tokens(A, B, C, [1])
    kv_cache.admit(1, token_ids)
    for num_tokens, num_cached in ((3, 0), (7, 4), (12, 12)):
        kv_cache.commit(1, token_ids, num_tokens)
        admission = kv_cache.admit(2, token_ids)
        assert admission is not None
        assert admission.num_cached_tokens == num_cached
        kv_cache.free(2)


def test_a_sequence_that_must_not_be_found_finds_others_and_leaves_nothing() -> None:
    kv_cache = make_kv_cache(record_events=True)
    compute(kv_cache, 0, tokens(A))
    last = kv_cache.events_after(0).last
    admission = kv_cache.admit(1, tokens(A, B, C), can_commit=False)
    assert admission is not None
    assert admission.num_cached_tokens == 4
    kv_cache.commit(1, tokens(A, B, C), 12)
    kv_cache.take_copies()
    kv_cache.check_integrity()
    kv_cache.free(1)
    assert kv_cache.events_after(last).events == ()
    assert compute(kv_cache, 2, tokens(A, B, C)) == 4


def test_an_answer_is_found_by_the_next_turn() -> None:
    """Generated tokens are cached as those of prompts are."""
    kv_cache = make_kv_cache()
    conversation = tokens(A, [1])
    run(kv_cache, 1, conversation)
    for token in (2, 3, 4, 5, 6):
        conversation.append(token)
        kv_cache.allocate(1, len(conversation), len(conversation) - 1)
        kv_cache.commit(1, conversation, len(conversation))
        kv_cache.take_copies()
    kv_cache.free(1)
    assert compute(kv_cache, 2, tokens(conversation, C)) == 8


@pytest.mark.parametrize(
    ("namespace", "num_cached"),
    [
        (cache_namespace("salt"), 8),
        (cache_namespace("pepper"), 0),
        (cache_namespace(None, "salt"), 0),
        (cache_namespace("salt", "adapter"), 0),
        (cache_namespace(), 0),
    ],
)
def test_salts_and_adapters_keep_prefixes_apart(namespace: bytes, num_cached: int) -> None:
    """Case 47: same tokens and salt, a hit; an adapter with the salt's name, none."""
    kv_cache = make_kv_cache()
    compute(kv_cache, 1, tokens(A, B, [1]), cache_namespace("salt"))
    assert compute(kv_cache, 2, tokens(A, B, [1]), namespace) == num_cached


def test_a_sequence_may_want_to_compute_everything() -> None:
    """For log probabilities of its prompt. Its blocks do not take the place of those that are found."""
    kv_cache = make_kv_cache()
    run(kv_cache, 1, tokens(A, B, [1]))
    statistics = kv_cache.statistics
    token_ids = tokens(A, B, [2])
    assert kv_cache.admit(2, token_ids, use_cached=False) == Admission(0, [3, 4, 5])
    kv_cache.commit(2, token_ids, 9)
    kv_cache.check_integrity()
    assert kv_cache.statistics == statistics
    assert run(kv_cache, 3, tokens(A, B, [3])) == Admission(8, [0, 1, 6])
    kv_cache.free(1)
    kv_cache.free(3)
    kv_cache.free(2)
    kv_cache.check_integrity()
    assert compute(kv_cache, 4, tokens(A, B, [4])) == 8


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    """All of its full ones, if nobody needed them meanwhile."""
    kv_cache = make_kv_cache()
    token_ids = tokens(A, B, [1, 2])
    run(kv_cache, 1, token_ids)
    kv_cache.free(1)
    assert kv_cache.admit(1, token_ids) == Admission(8, [0, 1, 2])


def test_a_refused_sequence_is_admitted_as_it_is_by_then() -> None:
    """What is remembered of it does not go stale: its tokens have grown, or it asks for another namespace."""
    kv_cache = make_kv_cache(6)
    run(kv_cache, 1, tokens(A, B, C, D, [1]))
    token_ids = tokens(A, B, C, [9] * 5)
    assert kv_cache.admit(2, token_ids) is None
    token_ids.append(9)
    kv_cache.free(1)
    assert kv_cache.admit(2, token_ids) == Admission(12, [0, 1, 2, 4, 5])
    kv_cache.free(2)
    run(kv_cache, 3, tokens(A, [3], B))
    assert kv_cache.admit(4, token_ids) is None
    kv_cache.free(3)
    admission = kv_cache.admit(4, token_ids, namespace=cache_namespace("salt"))
    assert admission is not None
    assert admission.num_cached_tokens == 0


def test_a_refused_sequence_is_admitted_when_others_have_computed_its_prefix() -> None:
    """It needs fewer blocks then, though no more are free."""
    kv_cache = make_kv_cache(5)
    other, token_ids = tokens(A, B, [1]), tokens(A, B, [2])
    kv_cache.admit(1, other)
    assert kv_cache.admit(2, token_ids) is None
    assert kv_cache.admit(2, token_ids) is None
    kv_cache.commit(1, other, 4)
    kv_cache.take_copies()
    assert kv_cache.admit(2, token_ids) == Admission(4, [0, 3, 4])


def test_a_refused_sequence_is_admitted_when_it_asks_for_less() -> None:
    """The step that it would be part of has less room, and its window needs fewer blocks at once."""
    kv_cache = KVCacheManager([KVCacheGroup(2, window=5)], BLOCK_SIZE, enable_prefix_caching=True)
    token_ids = tokens(A, B, C)
    assert kv_cache.admit(1, token_ids, max_new_tokens=9) is None
    assert kv_cache.admit(1, token_ids, max_new_tokens=8) == Admission(0, [0, 1])


def test_room_may_be_given_for_one_step() -> None:
    """Beyond what is cached; later steps allocate what they need."""
    kv_cache = make_kv_cache()
    compute(kv_cache, 1, tokens(A, [1]))
    token_ids = tokens(A, B, C)
    admission = kv_cache.admit(2, token_ids, max_new_tokens=2)
    assert admission == Admission(4, [0, 1])
    assert kv_cache.allocate(2, 8, 6) == ()
    assert kv_cache.allocate(2, 10, 8) == [2]


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    """Its beginning is what others may have in common with it."""
    kv_cache = make_kv_cache(4)
    compute(kv_cache, 1, tokens(A, B, C, [1]))
    run(kv_cache, 2, tokens(D, [1]))
    kv_cache.free(2)
    assert kv_cache.statistics.num_evicted_blocks == 1
    assert compute(kv_cache, 3, tokens(A, B, C)) == 8


def test_the_prefix_that_was_not_used_for_the_longest_time_is_evicted() -> None:
    """Using one keeps it."""
    kv_cache = make_kv_cache(4)
    compute(kv_cache, 1, tokens(A, [1]))
    compute(kv_cache, 2, tokens(B, [1]))
    compute(kv_cache, 3, tokens(A, [2]))
    run(kv_cache, 4, tokens(C, D, [1]))
    kv_cache.free(4)
    assert compute(kv_cache, 5, tokens(A, [3])) == 4
    assert compute(kv_cache, 6, tokens(B, [3])) == 0


def test_cached_blocks_are_evicted_only_when_no_other_is_free() -> None:
    """Blocks that nobody can find are used first, again and again."""
    kv_cache = make_kv_cache(4)
    compute(kv_cache, 1, tokens(A, B, [1]))
    for sequence_id in range(2, 9):
        compute(kv_cache, sequence_id, tokens([9, 9]))
    assert kv_cache.statistics.num_evicted_blocks == 0
    assert compute(kv_cache, 9, tokens(A, B, [1])) == 8


def test_a_sequence_does_not_evict_what_it_uses() -> None:
    """Its cached blocks are held before blocks for the rest are looked for."""
    kv_cache = make_kv_cache(4)
    compute(kv_cache, 1, tokens(A, B, [1]))
    assert run(kv_cache, 2, tokens(A, B, C, D)) == Admission(8, [0, 1, 2, 3])
    kv_cache.free(2)
    assert kv_cache.admit(3, tokens(A, B, C, D, [1])) is None
    kv_cache.check_integrity()


# Windows


def windowed(num_whole: int = 20, num_windowed: int = 20, window: int = 5) -> KVCacheManager:
    """A group of all tokens, and one whose tokens see themselves and four others."""
    return make_kv_cache(num_whole, KVCacheGroup(num_windowed, window))


def test_blocks_behind_the_window_are_free() -> None:
    """As the sequence goes on; not one that the next token still sees."""
    kv_cache = windowed()
    assert kv_cache.has_windows
    kv_cache.admit(1, tokens(A, B, C))
    for num_computed, table in ((7, [0, 1, 2]), (8, [-1, 1, 2]), (11, [-1, 1, 2]), (12, [-1, -1, 2])):
        kv_cache.allocate(1, 12, num_computed)  # Token 8 sees 4 to 8, token 11 sees 7, token 12 sees 8.
        assert kv_cache.block_tables(1) == [[0, 1, 2], table]
        kv_cache.check_integrity()
    assert kv_cache.num_free_blocks == 40 - 4


def test_a_long_answer_needs_few_blocks_of_a_windowed_group() -> None:
    """They are used again and again."""
    kv_cache = KVCacheManager([KVCacheGroup(30), KVCacheGroup(3, window=5)], BLOCK_SIZE)
    kv_cache.admit(1, tokens([1]))
    for num_computed in range(1, 100):
        assert kv_cache.allocate(1, num_computed + 1, num_computed) is not None
    kv_cache.check_integrity()
    assert kv_cache.block_tables(1)[1][:23] == [-1] * 23


def test_a_hit_needs_only_what_the_window_still_sees() -> None:
    """The rest of a windowed group's table is behind it from the start."""
    kv_cache = windowed()
    token_ids = tokens(A, B, C, [1])
    kv_cache.admit(1, token_ids, max_new_tokens=4)
    for begin in range(0, 12, 4):
        kv_cache.allocate(1, begin + 5, begin)
        kv_cache.commit(1, token_ids, begin + 4)
        kv_cache.take_copies()
    assert kv_cache.block_tables(1) == [[0, 1, 2, 3], [-1, 1, 2, 3]]
    admission = kv_cache.admit(2, token_ids)
    assert admission == Admission(12, [0, -1, 1, -1, 2, 2, 4, 4])
    kv_cache.check_integrity()


def test_a_prefix_is_found_as_far_as_all_groups_have_it() -> None:
    """Shorter ones may be lost to a windowed group while longer ones are there."""
    kv_cache = windowed(num_windowed=3)
    token_ids = tokens(A, B, C, D, [1])
    kv_cache.admit(1, token_ids, max_new_tokens=4)
    for begin in range(0, 16, 4):
        kv_cache.allocate(1, begin + 5, begin)
        kv_cache.commit(1, token_ids, begin + 4)
        kv_cache.take_copies()
    kv_cache.free(1)
    # Of the windowed group's blocks the first two have been evicted.
    assert kv_cache.statistics.num_evicted_blocks == 2
    assert compute(kv_cache, 2, tokens(A, B, C, D, [2])) == 16
    assert compute(kv_cache, 3, tokens(A, B, C, [3])) == 12
    assert compute(kv_cache, 4, tokens(A, B, [4])) == 0


def test_what_one_window_misses_shortens_what_the_others_need() -> None:
    """Until all agree: of the prefix that is left a group needs other blocks, which it may miss too."""
    groups = [KVCacheGroup(20, window=5), KVCacheGroup(20, window=5)]
    kv_cache = KVCacheManager(groups, BLOCK_SIZE, enable_prefix_caching=True)
    compute(kv_cache, 1, tokens(A, B, C, D, [1]))
    hashes = [root_hash(b"")]
    extend_hashes(hashes, tokens(A, B, C, D), BLOCK_SIZE, 4)
    first, second = kv_cache._groups  # pyright: ignore[reportPrivateUsage]
    first.forget(hashes[3])
    assert compute(kv_cache, 2, tokens(A, B, C, D, [2])) == 16
    second.forget(hashes[4])
    assert compute(kv_cache, 3, tokens(A, B, C, D, [3])) == 8


@pytest.mark.parametrize(
    ("num_tokens", "max_new_tokens", "fits"),
    [(40, 100, True), (41, 1, False), (40, 5, True), (40, 99, False)],
)
def test_what_fits_alone_is_known_before(num_tokens: int, max_new_tokens: int, fits: bool) -> None:
    """A windowed group needs room for what one step's tokens see."""
    kv_cache = windowed(num_whole=10, num_windowed=4 if max_new_tokens < 100 else 10)
    assert kv_cache.fits_alone(num_tokens, max_new_tokens) == fits


def test_a_sequence_that_fits_alone_runs_to_its_end() -> None:
    """With steps of every size."""
    for step in (1, 3, 4, 7):
        kv_cache = windowed(num_whole=10, num_windowed=4)
        assert kv_cache.fits_alone(40, step)
        token_ids = tokens(range(40))
        assert kv_cache.admit(1, token_ids, max_new_tokens=step) is not None
        for begin in range(0, 40, step):
            end = min(40, begin + step)
            assert kv_cache.allocate(1, end, begin) is not None
            kv_cache.commit(1, token_ids, end)
            kv_cache.take_copies()
        kv_cache.check_integrity()


# Steps that do not happen as planned


def admit_in_step(kv_cache: KVCacheManager, sequence_id: int, token_ids: "array[int]") -> int:
    """Admit and commit a sequence without ending the step; how many of its tokens were cached."""
    admission = kv_cache.admit(sequence_id, token_ids)
    assert admission is not None
    kv_cache.commit(sequence_id, token_ids, len(token_ids))
    return admission.num_cached_tokens


def test_a_withdrawn_sequence_takes_back_what_it_committed() -> None:
    """Only that: what it computed before is still found. Who was given it must leave the step too, and nobody else."""
    kv_cache = make_kv_cache(20)
    token_ids = tokens(A, B, C, [1])
    run(kv_cache, 1, token_ids[:5])
    run(kv_cache, 9, tokens(D, [1]))
    kv_cache.allocate(1, 13)
    kv_cache.commit(1, token_ids, 13)
    assert admit_in_step(kv_cache, 2, tokens(A, B, [2])) == 8
    assert admit_in_step(kv_cache, 3, tokens(A, B, C, D, [3])) == 12
    assert admit_in_step(kv_cache, 4, tokens(A, B, C, D, [4])) == 16
    assert admit_in_step(kv_cache, 5, tokens(A, [5])) == 4
    assert kv_cache.free_withdrawn(1, 5) == {2, 3, 4}
    for sequence_id in (2, 3, 4):
        kv_cache.free(sequence_id)
    kv_cache.take_copies()
    kv_cache.check_integrity()
    assert kv_cache.sequence_ids == {5, 9}
    assert compute(kv_cache, 6, tokens(A, B, C, D, [6])) == 4


def test_a_withdrawn_sequence_that_committed_nothing_is_just_freed() -> None:
    """Its earlier content stays."""
    kv_cache = make_kv_cache()
    run(kv_cache, 1, tokens(A, [1]))
    assert kv_cache.free_withdrawn(1, 5) == set()
    assert compute(kv_cache, 2, tokens(A, [2])) == 4


def test_a_sequence_that_has_committed_is_not_just_freed() -> None:
    """Others would compute with what is not there. The step's end makes it true."""
    kv_cache = make_kv_cache()
    admit_in_step(kv_cache, 1, tokens(A, [1]))
    with pytest.raises(AssertionError, match="free_withdrawn"):
        kv_cache.free(1)
    kv_cache.take_copies()
    kv_cache.free(1)
    assert kv_cache.sequence_ids == set()


def test_nothing_of_a_failed_sequence_is_found() -> None:
    """Also what it found itself: whatever is wrong with it might be in there. Others that hold it go on."""
    kv_cache = make_kv_cache(20)
    run(kv_cache, 1, tokens(A, [1]))
    run(kv_cache, 2, tokens(A, B, [2]))
    run(kv_cache, 3, tokens(C, [3]))
    assert kv_cache.free_failed(2, 8) == set()
    kv_cache.check_integrity()
    assert kv_cache.sequence_ids == {1, 3}
    assert compute(kv_cache, 4, tokens(A, B, [4])) == 0
    assert compute(kv_cache, 5, tokens(C, [5])) == 4


def test_who_used_blocks_of_a_failed_step_is_named() -> None:
    """And who used theirs; not who computed the same itself, nor who has only what was computed before."""
    kv_cache = make_kv_cache(30)
    token_ids = tokens(A, B, [1])
    run(kv_cache, 1, tokens(A, [1]))
    run(kv_cache, 2, tokens(A, [2]))
    admit_in_step(kv_cache, 3, token_ids)
    assert kv_cache.admit(4, tokens(A, B, [4]), use_cached=False) is not None
    kv_cache.commit(4, tokens(A, B, [4]), 9)
    assert admit_in_step(kv_cache, 5, tokens(A, B, C, [5])) == 8
    assert admit_in_step(kv_cache, 6, tokens(A, B, C, [6])) == 12
    kv_cache.take_copies()
    assert kv_cache.free_failed(3, 4) == {5, 6}
    kv_cache.free(5)
    kv_cache.free(6)
    kv_cache.check_integrity()
    assert compute(kv_cache, 7, tokens(A, B, C, [7])) == 0


def test_a_failure_that_is_heard_late_finds_what_is_freed() -> None:
    """The failed sequence was aborted while its step ran; another had used it, and a third that one."""
    kv_cache = make_kv_cache(20)
    admit_in_step(kv_cache, 1, tokens(A, [1]))
    admit_in_step(kv_cache, 2, tokens(A, B, [2]))
    kv_cache.take_copies()
    kv_cache.free(1)
    kv_cache.free(2)
    assert admit_in_step(kv_cache, 3, tokens(A, B, [3])) == 8
    kv_cache.take_copies()
    assert kv_cache.free_failed(1, 0) == {3}
    kv_cache.free(3)
    kv_cache.check_integrity()
    assert compute(kv_cache, 4, tokens(A, B, [4])) == 0


def only_windowed() -> KVCacheManager:
    """One group, whose tokens see themselves and four others."""
    return KVCacheManager([KVCacheGroup(30, window=5)], BLOCK_SIZE, enable_prefix_caching=True)


def test_who_has_only_what_was_computed_from_a_failure_is_named() -> None:
    """The failed blocks themselves may be behind its window from the start."""
    kv_cache = only_windowed()
    admit_in_step(kv_cache, 1, tokens(A, [1]))
    admit_in_step(kv_cache, 2, tokens(A, B, C, D, [2]))
    assert admit_in_step(kv_cache, 3, tokens(A, B, C, D, [3])) == 16
    assert kv_cache.block_tables(3)[0][:3] == [-1, -1, -1]
    assert kv_cache.free_withdrawn(1, 0) == {2, 3}


def test_who_has_left_a_failed_block_behind_since_is_named() -> None:
    """When the failure is heard a step late."""
    kv_cache = only_windowed()
    admit_in_step(kv_cache, 1, tokens(A, [1]))
    admit_in_step(kv_cache, 2, tokens(A, B, C, D))
    admit_in_step(kv_cache, 3, tokens(D, B, C))
    kv_cache.take_copies()
    kv_cache.allocate(2, 17, 16)
    kv_cache.take_copies()
    assert kv_cache.block_tables(2)[0][:3] == [-1, -1, -1]
    assert kv_cache.free_failed(1, 0) == {2}


def test_who_used_what_was_computed_from_a_failure_and_freed_is_named() -> None:
    """Though it has a block of its own in the place of the failed one: another had computed the same."""
    kv_cache = make_kv_cache(20)
    admit_in_step(kv_cache, 1, tokens(A))
    kv_cache.admit(2, tokens(A, [2]), use_cached=False)
    kv_cache.commit(2, tokens(A, [2]), 4)
    admit_in_step(kv_cache, 3, tokens(A, B, [3]))
    kv_cache.take_copies()
    [[failed]] = kv_cache.block_tables(1)
    kv_cache.free(1)
    kv_cache.free(3)
    # Whoever has got the failed block for something else since is not affected.
    assert kv_cache.admit(5, tokens(C, [5])) == Admission(0, [failed, 4])
    kv_cache.commit(5, tokens(C, [5]), 4)
    assert admit_in_step(kv_cache, 4, tokens(A, B, [4])) == 8
    assert kv_cache.block_tables(4)[0][0] == kv_cache.block_tables(2)[0][0]
    kv_cache.take_copies()
    assert kv_cache.free_failed(1, 0) == {4}


# Reset


def test_reset_makes_the_next_identical_prompt_miss() -> None:
    """What nobody holds is forgotten."""
    kv_cache = make_kv_cache(num_offload_blocks=4)
    compute(kv_cache, 1, tokens(A, B, [1]))
    kv_cache.reset_prefix_cache()
    kv_cache.check_integrity()
    assert compute(kv_cache, 2, tokens(A, B, [1])) == 0
    assert compute(kv_cache, 3, tokens(A, B, [1])) == 8


def test_what_a_running_sequence_has_is_forgotten_too() -> None:
    """And what it still computes from it; once it starts anew, its blocks are found again."""
    kv_cache = make_kv_cache(20)
    token_ids = tokens(A, B, [1])
    run(kv_cache, 1, token_ids)
    kv_cache.reset_prefix_cache()
    kv_cache.check_integrity()
    assert kv_cache.block_tables(1) == [[0, 1, 2]]
    token_ids.extend(C)
    kv_cache.allocate(1, len(token_ids))
    kv_cache.commit(1, token_ids, len(token_ids))
    kv_cache.check_integrity()
    assert run(kv_cache, 2, tokens(A, [2])) == Admission(0, [4, 5])
    kv_cache.free(1)
    assert compute(kv_cache, 3, tokens(A, B, [1])) == 4
    assert compute(kv_cache, 4, tokens(token_ids, [4])) == 8
    assert compute(kv_cache, 5, tokens(token_ids, [5])) == 12


# Offload


def two_blocks(num_offload_blocks: int = 2) -> KVCacheManager:
    """Room for two blocks, and for some that were evicted."""
    return make_kv_cache(2, num_offload_blocks=num_offload_blocks)


def copies(kv_cache: KVCacheManager) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Block and slot of the step's saves and loads."""
    saves, loads = kv_cache.take_copies()
    kv_cache.check_integrity()

    def pairs(of: Sequence[BlockCopy]) -> list[tuple[int, int]]:
        return [(copy.block_id, copy.offload_slot) for copy in of]

    return pairs(saves), pairs(loads)


def test_an_evicted_block_is_saved_and_loaded_again() -> None:
    """In a step in which another may be saved; it is not saved again when it is evicted again."""
    kv_cache = two_blocks()
    assert compute(kv_cache, 1, tokens(A, [1])) == 0
    assert admit_in_step(kv_cache, 2, tokens(B, [1])) == 0
    assert copies(kv_cache) == ([(0, 0)], [])
    kv_cache.free(2)
    assert admit_in_step(kv_cache, 3, tokens(A, [1])) == 4
    assert copies(kv_cache) == ([(1, 1)], [(0, 0)])
    kv_cache.free(3)
    assert admit_in_step(kv_cache, 4, tokens(B, [1])) == 4
    assert copies(kv_cache) == ([], [(1, 1)])
    assert kv_cache.statistics == KVCacheStatistics(
        num_queried_tokens=20, num_hit_tokens=8, num_evicted_blocks=3, num_saved_blocks=2, num_loaded_blocks=2
    )


def test_a_block_is_saved_and_loaded_in_one_step() -> None:
    """Saves come first, so what is evicted for one sequence is there for the next."""
    kv_cache = make_kv_cache(5, num_offload_blocks=2)
    kv_cache.admit(9, tokens([9] * 5))
    compute(kv_cache, 1, tokens(A, [1]))
    assert admit_in_step(kv_cache, 2, tokens(B, C, [2])) == 0
    kv_cache.free(9)
    assert admit_in_step(kv_cache, 3, tokens(A, [3])) == 4
    [[loaded, _]] = kv_cache.block_tables(3)
    assert copies(kv_cache) == ([(2, 0)], [(loaded, 0)])


def test_a_slot_that_is_loaded_is_not_saved_to() -> None:
    """The save would come first. What has no other room is lost."""
    kv_cache = two_blocks(num_offload_blocks=1)
    compute(kv_cache, 1, tokens(A, [1]))
    compute(kv_cache, 2, tokens(B, [1]))
    assert admit_in_step(kv_cache, 3, tokens(A, [1])) == 4
    saves, loads = copies(kv_cache)
    assert (saves, len(loads)) == ([], 1)
    kv_cache.free(3)
    assert compute(kv_cache, 4, tokens(B, [1])) == 0


def test_what_was_saved_longest_ago_makes_room() -> None:
    """Of what is not about to be loaded."""
    kv_cache = two_blocks(num_offload_blocks=2)
    for sequence_id, block in enumerate((A, B, C, D)):
        assert compute(kv_cache, sequence_id, tokens(block, [1])) == 0
    # D is in the cache, B and C are saved.
    assert compute(kv_cache, 5, tokens(A, [1])) == 0
    assert compute(kv_cache, 6, tokens(B, [1])) == 0
    assert compute(kv_cache, 7, tokens(A, [1])) == 4


def test_the_end_of_a_prefix_is_lost_before_its_beginning() -> None:
    """In the offload store too, also when it was loaded from there."""
    kv_cache = make_kv_cache(3, num_offload_blocks=2)
    compute(kv_cache, 1, tokens(A, B, [1]))
    compute(kv_cache, 2, tokens(C, C, C))
    assert compute(kv_cache, 3, tokens(A, B, [3])) == 8
    compute(kv_cache, 4, tokens(D, D, D))
    compute(kv_cache, 5, tokens(D, D, D))
    assert compute(kv_cache, 6, tokens(A, B, [6])) == 4


def test_a_block_that_could_not_be_loaded_is_not_found_again() -> None:
    """Nor what was computed from it; who has it is named."""
    kv_cache = make_kv_cache(6, num_offload_blocks=6)
    compute(kv_cache, 1, tokens(A, B, [1]))
    compute(kv_cache, 2, tokens(range(20, 42)))
    assert admit_in_step(kv_cache, 3, tokens(A, B, C)) == 8
    assert admit_in_step(kv_cache, 4, tokens(A, B, C, [4])) == 12
    saves, loads = kv_cache.take_copies()
    assert saves
    assert len(loads) == 2
    assert kv_cache.drop_loaded([loads[1]]) == {3, 4}
    kv_cache.check_integrity()
    kv_cache.free(3)
    kv_cache.free(4)
    assert compute(kv_cache, 5, tokens(A, B, C, [5])) == 4


def test_a_load_for_a_sequence_that_left_the_step_is_harmless() -> None:
    """Its block may be evicted again before it was ever filled; the content is still in the store."""
    kv_cache = two_blocks()
    compute(kv_cache, 1, tokens(A, [1]))
    compute(kv_cache, 2, tokens(B, [1]))
    assert kv_cache.admit(3, tokens(A, [1])) is not None
    assert kv_cache.free_withdrawn(3, 4) == set()
    assert admit_in_step(kv_cache, 4, tokens(C, [1])) == 0
    _, loads = copies(kv_cache)
    assert loads == []
    kv_cache.free(4)
    assert compute(kv_cache, 5, tokens(A, [1])) == 4


# What is told


def test_events_say_what_can_be_found() -> None:
    """A block's tokens, its hash and its parent's, when it is stored; its hash when it is evicted."""
    kv_cache = make_kv_cache(2, record_events=True)
    compute(kv_cache, 1, tokens(A, [1]))
    [stored] = kv_cache.events_after(0).events
    assert isinstance(stored, BlockStored)
    assert (stored.group, stored.parent_hash, stored.token_ids) == (0, root_hash(b""), tokens(A).tobytes())
    compute(kv_cache, 2, tokens(A, [2]))
    assert kv_cache.events_after(0).last == 1  # Nothing new.
    compute(kv_cache, 3, tokens(B, [1]))
    removed, second = kv_cache.events_after(1).events
    assert removed == BlockRemoved(0, stored.block_hash)
    assert isinstance(second, BlockStored)
    kv_cache.reset_prefix_cache()
    assert kv_cache.events_after(3).events == (AllBlocksCleared(),)


def test_what_moves_to_the_offload_store_can_still_be_found() -> None:
    """It is removed when it is lost there too."""
    kv_cache = make_kv_cache(2, num_offload_blocks=1, record_events=True)
    compute(kv_cache, 1, tokens(A, [1]))
    compute(kv_cache, 2, tokens(B, [1]))
    first, _ = kv_cache.events_after(0).events
    assert isinstance(first, BlockStored)
    compute(kv_cache, 3, tokens(C, [1]))
    assert kv_cache.events_after(2).events[0] == BlockRemoved(0, first.block_hash)


def test_what_is_still_in_the_cache_is_not_removed_when_the_offload_store_loses_it() -> None:
    """It was loaded from there before."""
    kv_cache = make_kv_cache(3, num_offload_blocks=1, record_events=True)
    compute(kv_cache, 1, tokens(A, [1]))
    compute(kv_cache, 2, tokens(B, C, [2]))
    run(kv_cache, 3, tokens(A, [3]))
    kv_cache.free(3)
    last = kv_cache.events_after(0).last
    assert kv_cache.admit(4, tokens(A, D, [4])) is not None
    kv_cache.take_copies()
    assert kv_cache.statistics.num_saved_blocks == 2
    assert kv_cache.events_after(last).last == last


def test_events_are_recorded_only_when_asked_for() -> None:
    """They cost time and memory."""
    kv_cache = make_kv_cache(2)
    compute(kv_cache, 1, tokens(A, [1]))
    assert kv_cache.events_after(0).last == 0


# The books


def test_check_integrity_finds_a_block_in_two_tables() -> None:
    """A block that two tables name must be held twice."""
    kv_cache = make_kv_cache(3)
    kv_cache.admit(1, tokens(A))
    kv_cache.admit(2, tokens(B))
    kv_cache.check_integrity()
    kv_cache._sequences[2].tables[0][0] = 0  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match=r"\[0, 1\]"):
        kv_cache.check_integrity()


def test_check_integrity_finds_a_block_that_is_found_as_another() -> None:
    """What a table has at a place is what is found under the hash of that place."""
    kv_cache = make_kv_cache(3)
    run(kv_cache, 1, tokens(A, B))
    kv_cache._sequences[1].tables[0].reverse()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="is not what it is found as"):
        kv_cache.check_integrity()
