"""The prefix cache: content of KV cache blocks under hashes of all that it depends on.

The keys and values of a token depend on this token and all before it, and on nothing else but the model and its
adapter. So a block's hash is made of its tokens and of the hash of the block before it, and whoever has the same hash
has the same prefix. The hash is collision-resistant: nobody can make a prompt that finds another's blocks.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain

import attrs

from trioengine.core.block_pool import BlockPool
from trioengine.core.executor import BlockCopy, KVCacheGroup
from trioengine.core.kv_cache_events import KVCacheEventLog
from trioengine.core.offload_index import OffloadIndex
from trioengine.types.messages import BlockRemoved, BlockStored

DIGEST_BYTES = 32
NO_BLOCK = -1
"""In a block table: behind the group's window."""


def cache_namespace(cache_salt: str | None = None, lora_name: str | None = None) -> bytes:
    """What keeps prefixes apart that have the same tokens. No two pairs of arguments have the same."""
    parts = (b"-" if part is None else b"+" + part.encode() for part in (cache_salt, lora_name))
    # With its length before it, a part cannot pass for another, or for two.
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def root_hash(namespace: bytes) -> bytes:
    """The parent of a sequence's first block."""
    return blake2b(namespace, digest_size=DIGEST_BYTES, person=b"namespace").digest()


def extend_hashes(hashes: list[bytes], token_ids: "array[int]", block_size: int, num_blocks: int) -> None:
    """Append to a chain, which begins with its root, the hashes that it lacks of the first `num_blocks` blocks."""
    for start in range((len(hashes) - 1) * block_size, num_blocks * block_size, block_size):
        # A parent always has the same length.
        block = hashes[-1] + token_ids[start : start + block_size].tobytes()
        hashes.append(blake2b(block, digest_size=DIGEST_BYTES).digest())


@attrs.frozen
class BlockNeed:
    """What a group needs for a sequence that begins with cached blocks."""

    num_behind: int
    """Blocks that are behind the window from the start."""
    found: Sequence[int | None]
    """The cached ones after these; None has to be loaded."""
    num_new: int
    """Blocks to allocate, those to load included."""
    num_free: int
    """Free blocks that this takes: the new ones, and the cached ones that nobody holds."""


class GroupCache:
    """The blocks of one group of layers, and what can be found in them or in the group's offload store.

    A chain of hashes begins with its root; so block i has the hash `hashes[i + 1]` and the parent `hashes[i]`.
    """

    def __init__(
        self, number: int, group: KVCacheGroup, block_size: int, num_offload_blocks: int, events: KVCacheEventLog | None
    ) -> None:
        self.pool = BlockPool(group.num_blocks, self._on_evict)
        self.window = group.window
        self.num_evicted_blocks = 0
        self._number = number
        self._block_size = block_size
        self._events = events
        self._offload = OffloadIndex(number, num_offload_blocks) if num_offload_blocks else None

    def num_behind(self, num_computed_tokens: int) -> int:
        """Blocks that no token from this position on sees."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // self._block_size

    def max_num_held(self, num_blocks: int, max_new_tokens: int) -> int:
        """The most blocks that a sequence of so many blocks holds at once, when a step computes so many tokens."""
        if self.window is None:
            return num_blocks
        num_seen = self.window - 1 + max_new_tokens  # By the tokens of one step, themselves included.
        return min(num_blocks, (num_seen + self._block_size - 2) // self._block_size + 1)

    def has(self, block_hash: bytes) -> bool:
        """Whether this content can be had without computing it."""
        return self.pool.find(block_hash) is not None or (self._offload is not None and block_hash in self._offload)

    def end_of_found(self, hashes: Sequence[bytes], begin: int, end: int) -> int:
        """The first of the blocks `begin` to `end - 1` that cannot be had; `end` when all can."""
        for i in range(begin, end):
            if not self.has(hashes[i + 1]):
                return i
        return end

    def num_servable(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """The longest prefix of at most so many blocks of which this group has all that a next token sees."""
        block = num_blocks - 1
        while block >= self.num_behind(num_blocks * self._block_size):
            if not self.has(hashes[block + 1]):
                num_blocks = block
            block -= 1
        return num_blocks

    def need(self, hashes: Sequence[bytes], num_cached_blocks: int, num_blocks: int) -> BlockNeed:
        """What it takes to give a sequence so many blocks, the cached ones first."""
        pool = self.pool
        num_behind = self.num_behind(num_cached_blocks * self._block_size)
        found = [pool.find(block_hash) for block_hash in hashes[num_behind + 1 : num_cached_blocks + 1]]
        held_or_kept = [block_id for block_id in found if block_id is not None]
        num_new = num_blocks - num_behind - len(held_or_kept)
        num_kept = sum(not pool.num_holders(block_id) for block_id in held_or_kept)
        return BlockNeed(num_behind, found, num_new, num_free=num_new + num_kept)

    def take(self, hashes: Sequence[bytes], need: BlockNeed) -> list[int]:
        """The block table of a sequence that needs this. Loads are planned."""
        pool = self.pool
        pool.hold(block_id for block_id in need.found if block_id is not None)
        to_load = [i for i, block_id in enumerate(need.found, need.num_behind) if block_id is None]
        if self._offload:
            # Before blocks are evicted: what these save must not overwrite it.
            self._offload.pin(hashes[i + 1] for i in to_load)
        new = pool.allocate(need.num_new)
        assert new is not None, "less is free than was counted"
        table = [NO_BLOCK] * need.num_behind
        if not to_load:
            return [*table, *(block_id for block_id in need.found if block_id is not None), *new]
        assert self._offload is not None
        rest = iter(new)
        for i, block_id in enumerate(need.found, need.num_behind):
            if block_id is None:
                block_id = next(rest)
                pool.make_findable(block_id, hashes[i + 1], hashes[i])
                self._offload.load(hashes[i + 1], block_id)
            table.append(block_id)
        return [*table, *rest]

    def commit(
        self, table: Sequence[int], hashes: Sequence[bytes], begin: int, end: int, token_ids: "array[int]"
    ) -> None:
        """Let the blocks `begin` to `end - 1` of a sequence be found."""
        for i in range(begin, end):
            if table[i] == NO_BLOCK:
                continue
            if self._events and not self.has(hashes[i + 1]):
                block_token_ids = token_ids[i * self._block_size : (i + 1) * self._block_size].tobytes()
                self._events.append(BlockStored(self._number, hashes[i + 1], hashes[i], block_token_ids))
            self.pool.make_findable(table[i], hashes[i + 1], hashes[i])

    def forget(self, block_hash: bytes) -> None:
        """Let this content not be found any more, wherever it is."""
        was_found = self.pool.forget(block_hash)
        if self._offload and self._offload.forget(block_hash):
            was_found = True
        if was_found:
            self._record_removed(block_hash)

    def forget_all(self) -> None:
        """Let nothing be found any more."""
        self.pool.forget_all()
        if self._offload:
            self._offload.forget_all()

    def findable(self) -> Iterator[tuple[bytes, bytes]]:
        """The hash of each content that can be found, and its parent. Some come twice."""
        return chain(self.pool.findable(), self._offload.stored() if self._offload else ())

    def take_copies(self) -> tuple[list[BlockCopy], dict[BlockCopy, bytes]]:
        """As `OffloadIndex.take_copies`."""
        return self._offload.take_copies() if self._offload else ([], {})

    def check_integrity(self) -> None:
        """Return when the group's books are right. AssertionError: saying what is wrong."""
        self.pool.check_integrity()
        if self._offload:
            self._offload.check_integrity()

    def _on_evict(self, block_id: int, block_hash: bytes, parent_hash: bytes) -> None:
        self.num_evicted_blocks += 1
        lost = self._offload.save(block_id, block_hash, parent_hash) if self._offload else block_hash
        if lost is not None and self.pool.find(lost) is None:
            self._record_removed(lost)

    def _record_removed(self, block_hash: bytes) -> None:
        if self._events:
            self._events.append(BlockRemoved(self._number, block_hash))


def descendants(groups: Sequence[GroupCache], block_hashes: Iterable[bytes]) -> set[bytes]:
    """These hashes, and those of all content to be found that was computed from them. Takes as long as there is
    content."""
    children: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for group in groups:
        for block_hash, parent_hash in group.findable():
            children[parent_hash].append(block_hash)
    found: set[bytes] = set()
    waiting = list(block_hashes)
    while waiting:
        block_hash = waiting.pop()
        if block_hash not in found:
            found.add(block_hash)
            waiting += children.get(block_hash, ())
    return found
