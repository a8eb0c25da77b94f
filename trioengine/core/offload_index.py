"""`OffloadIndex`: which content of evicted blocks is in which slot of a group's offload store.

It plans what is copied; the executor copies, all saves of a step before its loads, and both before the step.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from trioengine.core.executor import BlockCopy


class OffloadIndex:
    """The slots of one group of layers. Content that was not saved or loaded for the longest time makes room first.

    What is loaded stays in its slot, so that its block can be evicted again without another copy.
    """

    def __init__(self, group: int, num_slots: int) -> None:
        self._group = group
        self._num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._parents: dict[bytes, bytes] = {}
        # Of the step being scheduled. One save for each slot: what was to be saved there before is forgotten by now.
        self._saves: dict[int, int] = {}
        self._loads: dict[int, tuple[BlockCopy, bytes]] = {}
        # Slots that this step loads from. A save must not change them, for it would come before the load.
        self._pinned: set[int] = set()
        self._free_after_step: list[int] = []

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def pin(self, block_hashes: Iterable[bytes]) -> None:
        """Keep these where they are until the step is planned: they will be loaded."""
        for block_hash in block_hashes:
            self._slots.move_to_end(block_hash)
            self._pinned.add(self._slots[block_hash])

    def load(self, block_hash: bytes, block_id: int) -> None:
        """Fill a block with content that is pinned."""
        self._loads[block_id] = BlockCopy(self._group, block_id, self._slots[block_hash]), block_hash

    def save(self, block_id: int, block_hash: bytes, parent_hash: bytes) -> bytes | None:
        """Keep the content of a block that is evicted; the hash of what is lost for it, if that was the last room.

        When everything there is to be loaded, it is the block's own content that is lost.
        """
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            self._loads.pop(block_id, None)  # Where it is evicted before it was filled.
            return None
        lost = None
        if self._free:
            slot = self._free.pop()
        else:
            # What is pinned was moved to the end: when the oldest is, there is next to nothing else.
            lost = next(iter(self._slots), None)
            if lost is None or self._slots[lost] in self._pinned:
                return block_hash
            slot = self._slots.pop(lost)
            del self._parents[lost]
        self._slots[block_hash] = slot
        self._parents[block_hash] = parent_hash
        self._saves[slot] = block_id
        return lost

    def forget(self, block_hash: bytes) -> bool:
        """Let the content's slot be used for others; False when it has none."""
        slot = self._slots.pop(block_hash, None)
        if slot is None:
            return False
        del self._parents[block_hash]
        (self._free_after_step if slot in self._pinned else self._free).append(slot)
        return True

    def forget_all(self) -> None:
        """Forget all content. Loads that are planned are still done."""
        for block_hash in list(self._slots):
            self.forget(block_hash)

    def stored(self) -> Iterator[tuple[bytes, bytes]]:
        """The hash of each content in the store, and its parent."""
        return iter(self._parents.items())

    def take_copies(self) -> tuple[list[BlockCopy], dict[BlockCopy, bytes]]:
        """What the step saves, and what it loads with the content's hash. The next step begins."""
        saves = [BlockCopy(self._group, block_id, slot) for slot, block_id in self._saves.items()]
        loads = dict(self._loads.values())
        self._saves = {}
        self._loads = {}
        self._pinned = set()
        self._free += self._free_after_step
        self._free_after_step = []
        return saves, loads

    def check_integrity(self) -> None:
        """Return when every slot is free or has one content.

        Raises:
            AssertionError: naming the slots that are not as they should be.
        """
        slots = [*self._free, *self._free_after_step, *self._slots.values()]
        if sorted(slots) != list(range(self._num_slots)):
            raise AssertionError(f"Offload slots are used twice, or not at all: {slots}")
        if self._slots.keys() != self._parents.keys():
            raise AssertionError(f"Content without a parent, or a parent without: {self._slots}, {self._parents}")
        if len(self._saves) != len(set(self._saves.values())):
            raise AssertionError(f"A block is saved twice in one step: {self._saves}")
