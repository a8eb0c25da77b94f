"""`KVCacheManager`: the block table of each sequence.

It says whether a number of tokens has room and finds it, or says no. What to do about a no is the scheduler's to
decide; what is in the blocks is the executor's to know.
"""

from collections import Counter
from collections.abc import Sequence

from trioengine.core.block_pool import BlockPool


class KVCacheManager:
    """Gives sequences blocks for their tokens, and takes them back."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._block_tables: dict[int, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free_blocks

    @property
    def sequence_ids(self) -> set[int]:
        """Sequences that have a block table."""
        return set(self._block_tables)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self._block_size)

    def block_table(self, sequence_id: int) -> Sequence[int]:
        """A sequence's blocks in the order of its tokens."""
        return self._block_tables[sequence_id]

    def allocate(self, sequence_id: int, num_tokens: int) -> Sequence[int] | None:
        """The blocks to append to a sequence's table so that it holds this many tokens.

        Empty when it already does. None, and nothing changed, when too few blocks are free.
        """
        table = self._block_tables.get(sequence_id, ())
        new_block_ids = self._pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(table)))
        if new_block_ids is None:
            return None
        self._block_tables.setdefault(sequence_id, []).extend(new_block_ids)
        return new_block_ids

    def free(self, sequence_id: int) -> None:
        """Take a sequence's blocks back.

        The end of a sequence is freed first and so used again first: its beginning is what others may have in common.
        """
        self._pool.free(self._block_tables.pop(sequence_id)[::-1])

    def check_integrity(self) -> None:
        """Return when every block is free, or held exactly as often as block tables name it.

        Raises:
            AssertionError: naming the blocks that are not.
        """
        self._pool.check_integrity()
        named = Counter(block_id for table in self._block_tables.values() for block_id in table)
        wrong = [block_id for block_id in range(self.num_blocks) if self._pool.num_holders(block_id) != named[block_id]]
        if wrong:
            raise AssertionError(f"Blocks are not held as often as block tables name them: {wrong}")
