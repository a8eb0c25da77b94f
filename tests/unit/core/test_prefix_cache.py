"""A hash stands for all that a block's content depends on, and for nothing else."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.core.executor import KVCacheGroup
from trioengine.core.prefix_cache import GroupCache, cache_namespace, descendants, extend_hashes, root_hash

NAMES = st.none() | st.text(max_size=8)
TOKENS = st.lists(st.integers(0, 2), max_size=12)


def chain(tokens: list[int], block_size: int, namespace: bytes = b"") -> list[bytes]:
    """The root and the hashes of all full blocks."""
    hashes = [root_hash(namespace)]
    extend_hashes(hashes, array("i", tokens), block_size, len(tokens) // block_size)
    return hashes


def group_with(*chains: list[bytes], window: int | None = None, block_size: int = 2) -> GroupCache:
    """A group where all blocks of these chains can be found, in blocks that nobody holds."""
    group = GroupCache(0, KVCacheGroup(50, window), block_size, 0, None)
    for hashes in chains:
        num_blocks = len(hashes) - 1
        table = group.pool.allocate(num_blocks)
        assert table is not None
        group.commit(table, hashes, 0, num_blocks, array("i", [0] * num_blocks * block_size))
        group.pool.free(table)
    return group


@given(NAMES, NAMES, NAMES, NAMES)
def test_no_two_salts_and_adapters_share_a_namespace(
    salt: str | None, lora: str | None, other_salt: str | None, other_lora: str | None
) -> None:
    """Equal exactly when both parts are."""
    is_same = (salt, lora) == (other_salt, other_lora)
    assert (cache_namespace(salt, lora) == cache_namespace(other_salt, other_lora)) == is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("german", None), (None, "german")),
        (("", None), (None, "")),
        (("", None), (None, None)),
        (("ab", "c"), ("a", "bc")),
        (("-", None), (None, None)),
        (("x+y", None), ("x", "y-")),
    ],
)
def test_an_adapter_named_like_a_salt_is_not_the_salt(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> None:
    """Case 47: neither alone, nor by putting the boundary elsewhere."""
    assert root_hash(cache_namespace(*one)) != root_hash(cache_namespace(*other))


@given(TOKENS, TOKENS, st.integers(1, 4), st.sampled_from([b"", b"a"]), st.sampled_from([b"", b"a"]))
def test_a_hash_is_equal_exactly_where_all_before_it_is(
    tokens: list[int], others: list[int], block_size: int, namespace: bytes, other_namespace: bytes
) -> None:
    """Of the blocks of two sequences those of their common beginning are the same, and no others."""
    hashes, other_hashes = chain(tokens, block_size, namespace), chain(others, block_size, other_namespace)
    for i, one in enumerate(hashes):
        for j, other in enumerate(other_hashes):
            is_same = namespace == other_namespace and tokens[: i * block_size] == others[: j * block_size]
            assert (one == other) == (is_same and i == j)


def test_hashes_are_those_of_the_protocol() -> None:
    """Readers of events compute them: 32 bytes of BLAKE2b over the parent and the tokens as int32."""
    hashes = chain([1, 2, 3, 4], 2)
    assert [len(block_hash) for block_hash in hashes] == [32, 32, 32]
    assert len(set(hashes)) == 3
    assert chain([1, 2, 3, 4], 2, cache_namespace("salt"))[0] != hashes[0]


def test_a_chain_is_extended_from_where_it_ends() -> None:
    """What is there is not computed again."""
    tokens = array("i", range(9))
    hashes = [root_hash(b"")]
    for num_blocks in (1, 1, 4, 2):
        extend_hashes(hashes, tokens, 2, num_blocks)
    assert hashes == chain(list(tokens), 2)


@pytest.mark.parametrize(
    ("window", "missing", "num_servable"),
    [
        (None, {3}, 3),  # A whole group needs all.
        (2, {3}, 5),  # The next token, at 10, sees 9 and itself.
        (4, {3}, 3),  # 7 to 9, so blocks 3 and 4; behind three blocks it sees blocks 1 and 2.
        (4, {3, 1}, 1),
        (2, {4}, 4),
        (100, {0}, 0),
    ],
)
def test_a_windowed_group_serves_a_prefix_without_what_is_behind(
    window: int | None, missing: set[int], num_servable: int
) -> None:
    """Blocks of two tokens, five of them cached but for some."""
    hashes = chain(list(range(10)), 2)
    group = group_with(hashes, window=window)
    for block in missing:
        group.forget(hashes[block + 1])
    assert group.num_servable(hashes, 5) == num_servable


@pytest.mark.parametrize(
    ("window", "num_blocks", "max_new_tokens", "num_held"),
    [
        (None, 9, 1, 9),
        (5, 9, 1, 3),  # A token sees itself and four before: at most 3 blocks of 2.
        (4, 9, 1, 3),
        (5, 2, 1, 2),
        (5, 9, 4, 5),
        (3, 9, 100, 9),
    ],
)
def test_a_windowed_group_holds_what_the_tokens_of_a_step_see(
    window: int | None, num_blocks: int, max_new_tokens: int, num_held: int
) -> None:
    """Wherever in a block the step begins."""
    group = GroupCache(0, KVCacheGroup(50, window), 2, 0, None)
    assert group.max_num_held(num_blocks, max_new_tokens) == num_held
    if window:
        begins = range(num_blocks * 2 - max_new_tokens + 1)
        held = [-(-(begin + max_new_tokens) // 2) - group.num_behind(begin) for begin in begins]
        assert max(held, default=num_held) <= num_held


def test_descendants_are_all_that_a_content_is_part_of() -> None:
    """In every group, and through what cannot be found itself any more."""
    common = [1, 2, 3, 4]
    one, other, stranger = chain([*common, 5, 6], 2), chain([*common, 7, 8, 9, 9], 2), chain([5, 6], 2)
    groups = [group_with(one, stranger), group_with(other)]
    assert descendants(groups, [one[2]]) == {one[2], one[3], other[3], other[4]}
    assert descendants(groups, [other[4]]) == {other[4]}
    assert descendants(groups, []) == set()


def test_descendants_may_be_in_the_offload_store() -> None:
    """Blocks that have been evicted since."""
    hashes = chain([1, 2, 3, 4], 2)
    group = GroupCache(0, KVCacheGroup(2), 2, 4, None)
    table = group.pool.allocate(2)
    assert table is not None
    group.commit(table, hashes, 0, 2, array("i", [1, 2, 3, 4]))
    group.pool.free(reversed(table))
    assert group.pool.allocate(1) == [table[1]]
    assert group.pool.find(hashes[2]) is None
    assert descendants([group], [hashes[1]]) == {hashes[1], hashes[2]}
