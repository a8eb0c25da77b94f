"""`BlockPool`: the KV cache blocks of one group of layers: how often each is held, and which content can be found.

It knows block ids and hashes only; who holds a block is `kv_cache_manager`'s business, what a hash stands for
`prefix_cache`'s.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator


class BlockPool:
    """The ids 0 to `num_blocks - 1`. Each is held, or free, or kept: held by nobody, but with content to be found.

    Free blocks are handed out first, the one that became free last before all others. So no more blocks are ever
    touched than were held or kept at once, which matters where memory is given when it is first written: a light load
    on a large cache takes little. Kept blocks are handed out when no other is left, the one that was let go first
    before all others: `on_evict` is then called with the block, the hash of its content and that hash's parent.

    Two blocks may have the same content, computed at the same time. Only one of them is found, and the other is never
    kept: while there is another, the one that is found is held.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes, bytes], None] | None = None) -> None:
        self._num_holders = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict
        # Of blocks with content to be found, copies included. Where there is no hash, the parent means nothing.
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes] = [b""] * num_blocks
        self._block_ids: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}  # Blocks with a hash that another block is found by.

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._num_holders)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can give: free or kept."""
        return len(self._free) + len(self._kept)

    def num_holders(self, block_id: int) -> int:
        """How often a block is held."""
        return self._num_holders[block_id]

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content."""
        return self._block_ids.get(block_hash)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """This many blocks, each now held once; None, and nothing changed, when there are fewer."""
        free = self._free
        if num_blocks > len(free) and num_blocks > len(free) + len(self._kept):
            return None
        block_ids = [free.pop() if free else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_holders[block_id] = 1
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one holder to blocks that are held or kept."""
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                assert block_id in self._kept, f"block {block_id} is free"
                del self._kept[block_id]
            self._num_holders[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Take one holder from each. One without holders is kept if its content can be found, and free otherwise.

        Kept blocks are evicted in the order of this call.
        """
        num_holders = self._num_holders
        for block_id in block_ids:
            assert num_holders[block_id] > 0, f"block {block_id} is free already"
            num_holders[block_id] -= 1
            if num_holders[block_id]:
                continue
            block_hash = self._hashes[block_id]
            if block_hash is None:
                self._free.append(block_id)
            elif block_hash in self._copies:
                self._release_copy(block_id, block_hash)
            else:
                self._kept[block_id] = None

    def make_findable(self, block_id: int, block_hash: bytes, parent_hash: bytes) -> bool:
        """Let a held block be found by its content. False when another block was found by it already."""
        assert self._num_holders[block_id] > 0, f"block {block_id} is not held"
        self._hashes[block_id] = block_hash
        self._parents[block_id] = parent_hash
        found = self._block_ids.setdefault(block_hash, block_id)
        if found == block_id:
            return True
        if self._num_holders[found]:
            self._copies.setdefault(block_hash, []).append(block_id)
        else:
            del self._kept[found]
            self._hashes[found] = None
            self._free.append(found)
            self._block_ids[block_hash] = block_id
        return False

    def forget(self, block_hash: bytes) -> bool:
        """Let no block be found by this content any more; False when none was."""
        found = self._block_ids.pop(block_hash, None)
        if found is None:
            return False
        for block_id in (found, *self._copies.pop(block_hash, ())):
            self._hashes[block_id] = None
        if found in self._kept:
            del self._kept[found]
            self._free.append(found)
        return True

    def forget_all(self) -> None:
        """Let nothing be found any more. Kept blocks are then free."""
        self._free.extend(reversed(self._kept))
        self._kept.clear()
        self._hashes = [None] * self.num_blocks
        self._block_ids.clear()
        self._copies.clear()

    def findable(self) -> Iterator[tuple[bytes, bytes]]:
        """The hash of each content that can be found, and its parent."""
        return ((block_hash, self._parents[block_id]) for block_hash, block_id in self._block_ids.items())

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash of a block's content, where it was made findable."""
        return self._hashes[block_id]

    def check_integrity(self) -> None:
        """Return when every block is held, kept or free, once, and what can be found is what should be.

        Raises:
            AssertionError: naming the blocks that are not as they should be.
        """
        free, kept = set(self._free), set(self._kept)
        if len(free) != len(self._free):
            raise AssertionError(f"Blocks are free twice: {sorted(self._free)}")
        unheld = {block_id for block_id, num_holders in enumerate(self._num_holders) if num_holders == 0}
        if free & kept or free | kept != unheld:
            raise AssertionError(
                f"Blocks are in two states, or in none: {sorted((free & kept) | (free | kept) ^ unheld)}"
            )
        findable = {block_id: block_hash for block_hash, block_id in self._block_ids.items()}
        copies = {block_id: block_hash for block_hash, ids in self._copies.items() for block_id in ids}
        hashed = {block_id: block_hash for block_id, block_hash in enumerate(self._hashes) if block_hash is not None}
        if findable | copies != hashed or findable.keys() & copies.keys():
            raise AssertionError(f"Blocks and hashes do not fit: {hashed}, found are {findable}, copies {copies}")
        if unheld & hashed.keys() != kept or copies.keys() & unheld:
            raise AssertionError(
                f"Of the blocks with content, {hashed}, those kept are not the right ones: {self._kept}"
            )
        held = {findable_hash for block_id, findable_hash in findable.items() if block_id not in unheld}
        if not self._copies.keys() <= held or not all(self._copies.values()):
            raise AssertionError(f"Blocks are copies of what is not held: {self._copies}")

    def _evict(self) -> int:
        block_id, _ = self._kept.popitem(last=False)
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        self._hashes[block_id] = None
        del self._block_ids[block_hash]
        if self._on_evict:
            self._on_evict(block_id, block_hash, self._parents[block_id])
        return block_id

    def _release_copy(self, block_id: int, block_hash: bytes) -> None:
        copies = self._copies[block_hash]
        if self._block_ids[block_hash] == block_id:
            self._block_ids[block_hash] = copies.pop()
        else:
            copies.remove(block_id)
        if not copies:
            del self._copies[block_hash]
        self._hashes[block_id] = None
        self._free.append(block_id)
