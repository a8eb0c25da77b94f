"""`BlockPool`: which KV cache blocks are free, and how many sequences hold each of the others.

It knows block ids only; who holds a block is `kv_cache_manager`'s business.
"""

from collections.abc import Sequence


class BlockPool:
    """The ids 0 to `num_blocks - 1`, each free or held.

    The block that became free last is handed out first. So no more blocks are ever touched than were held at once,
    which matters where memory is given when it is first written: a light load on a large cache takes little.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_holders = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_blocks(self) -> int:
        """All blocks, free or held."""
        return len(self._num_holders)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free)

    def num_holders(self, block_id: int) -> int:
        """How often a block is held; 0 when it is free."""
        return self._num_holders[block_id]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """This many free blocks, each now held once; None, and nothing changed, when there are fewer."""
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_holders[block_id] = 1
        return block_ids

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add one holder to blocks that are held already."""
        for block_id in block_ids:
            assert self._num_holders[block_id] > 0, f"block {block_id} is free"
            self._num_holders[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Take one holder from each; a block without one is free again."""
        for block_id in reversed(block_ids):  # So that a sequence's first block is the first to be used again.
            assert self._num_holders[block_id] > 0, f"block {block_id} is free already"
            self._num_holders[block_id] -= 1
            if not self._num_holders[block_id]:
                self._free.append(block_id)

    def check_integrity(self) -> None:
        """Return when every block is either free, once, or held.

        Raises:
            AssertionError: naming the blocks that are not.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError(f"Blocks are free twice: {sorted(self._free)}")
        unheld = {block_id for block_id, num_holders in enumerate(self._num_holders) if num_holders == 0}
        if free != unheld:
            raise AssertionError(f"Blocks are free and held, or neither: {sorted(free ^ unheld)}")
