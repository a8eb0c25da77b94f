"""`KVCacheManager`: the blocks of each sequence, and the prefixes that sequences have in common.

It says whether a number of tokens has room and finds it, or says no. What to do about a no is the scheduler's to
decide; what is in the blocks is the executor's to know.

*When blocks become findable.* A sequence commits tokens in the step that computes them, before the step is submitted.
Others admitted to the same step already use its blocks (`ScheduledSequence` says why they may), so requests that arrive
together compute a common prefix once. The price is that a step which does not happen as planned leaves content that
others have built on: `free_withdrawn`, `free_failed` and `drop_loaded` find all of it.
"""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import attrs

from trioengine.core.executor import BlockCopy, KVCacheGroup
from trioengine.core.kv_cache_events import KVCacheEventLog
from trioengine.core.prefix_cache import NO_BLOCK, GroupCache, descendants, extend_hashes, root_hash
from trioengine.types.messages import AllBlocksCleared, KVCacheEvents

MAX_STEPS_IN_FLIGHT = 8
"""Loads of this many steps are remembered, so that `drop_loaded` knows what they were to bring."""

BLOCKS_AT_ONCE = 32
"""So many blocks of a prefix are looked for before more are hashed."""


@attrs.frozen
class Admission:
    """What a sequence was given to begin with."""

    num_cached_tokens: int
    """Tokens of its beginning that need not be computed: whole blocks, and never all of its tokens."""
    new_block_ids: Sequence[int]
    """Its block table, the cached blocks included, as `ScheduledSequence.new_block_ids` has it."""


@attrs.frozen
class KVCacheStatistics:
    """Counts since the start."""

    num_queried_tokens: int
    """Tokens of sequences whose beginning was looked for when they were admitted, those preempted before included."""
    num_hit_tokens: int
    """Those of them that need not be computed."""
    num_evicted_blocks: int
    """Blocks whose content made room for other content."""
    num_saved_blocks: int
    """Those of them that were copied into the offload store."""
    num_loaded_blocks: int
    """Blocks filled from there."""


@attrs.frozen
class _Filled:
    """A block with certain content."""

    group: int
    block_id: int
    block_hash: bytes


@attrs.define(eq=False)
class _Sequence:
    hashes: list[bytes]
    """The root, then those of its full blocks, as far as they were needed."""
    tables: list[list[int]]
    """By group. All of the same length."""
    num_blocks: int
    num_committed_blocks: int
    """Blocks at its beginning that were found, or can be found."""
    can_commit: bool = True
    """Not after a reset: what it has must not be found, nor what comes from it. Nor where it was not wanted."""

    def hashes_from(self, first: int) -> Sequence[bytes]:
        """Of its committed blocks from the `first`-th on."""
        return self.hashes[first + 1 : self.num_committed_blocks + 1]

    def filled_from(self, first: int) -> set[_Filled]:
        """Its committed blocks from the `first`-th on, as far as it still has them."""
        return {
            _Filled(group, block_id, block_hash)
            for group, table in enumerate(self.tables)
            for block_id, block_hash in zip(table[first:], self.hashes_from(first), strict=False)
            if block_id != NO_BLOCK
        }

    def first_of(self, filled: Collection[_Filled], left_behind: Collection[bytes]) -> int | None:
        """Its first block that is one of `filled`, or is behind a window and was one of `left_behind`."""
        for i, block_hash in enumerate(self.hashes_from(0)):
            block_ids = [table[i] for table in self.tables]
            if NO_BLOCK in block_ids and block_hash in left_behind:
                return i
            if any(_Filled(group, block_id, block_hash) in filled for group, block_id in enumerate(block_ids)):
                return i
        return None


@attrs.frozen(eq=False)
class _Refusal:
    """What is known of the sequence that was refused last. It is likely the next to ask again, step after step."""

    token_ids: "array[int]"
    namespace: bytes
    max_new_tokens: int | None
    hashes: list[bytes]
    num_cached_blocks: int
    num_needed: Sequence[int]
    """Free blocks, by group."""


class KVCacheManager:
    """Gives sequences blocks for their tokens, and takes them back.

    A step is scheduled by any number of calls of `admit`, `allocate`, `commit`, `free` and `free_withdrawn`, and ends
    with `take_copies`. The others come between steps.

    Args:
        groups: of the executor.
        block_size: tokens in a block.
        enable_prefix_caching: False finds nothing, and does none of the work for it.
        num_offload_blocks: slots for evicted blocks of each group; they need prefix caching.
        record_events: whether `events_after` has anything to tell.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        block_size: int,
        *,
        enable_prefix_caching: bool = False,
        num_offload_blocks: int = 0,
        record_events: bool = False,
    ) -> None:
        self._block_size = block_size
        self._is_caching = enable_prefix_caching
        self._is_offloading = num_offload_blocks > 0
        self._events = KVCacheEventLog() if record_events else None
        self._groups = [
            GroupCache(number, group, block_size, num_offload_blocks, self._events)
            for number, group in enumerate(groups)
        ]
        # Their number and kind does not change, and most models have one without a window.
        self._single_pool = self._groups[0].pool if len(groups) == 1 else None
        self._windowed = [(number, group) for number, group in enumerate(self._groups) if group.window is not None]
        self._whole = [group for group in self._groups if group.window is None]
        self._sequences: dict[int, _Sequence] = {}
        self._committed_in_step: set[int] = set()
        # Those freed since the last plan and since the one before it, whose steps may still be computed.
        self._freed: tuple[list[tuple[int, _Sequence]], list[tuple[int, _Sequence]]] = ([], [])
        self._refusal: _Refusal | None = None
        self._loads_in_flight: deque[dict[BlockCopy, bytes]] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._num_saved_blocks = 0
        self._num_loaded_blocks = 0

    @property
    def num_blocks(self) -> int:
        """All blocks of all groups."""
        return sum(group.pool.num_blocks for group in self._groups)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, of all groups. Those that are cached count as free."""
        return sum(group.pool.num_free_blocks for group in self._groups)

    @property
    def usage(self) -> float:
        """The part of its blocks that sequences hold, 0 to 1, of the group where it is largest."""
        return max(1 - group.pool.num_free_blocks / group.pool.num_blocks for group in self._groups)

    @property
    def has_windows(self) -> bool:
        """Whether blocks become free while their sequence goes on."""
        return bool(self._windowed)

    @property
    def sequence_ids(self) -> set[int]:
        """Sequences that hold blocks."""
        return set(self._sequences)

    @property
    def num_queried_tokens(self) -> int:
        """As in `statistics`."""
        return self._num_queried_tokens

    @property
    def num_hit_tokens(self) -> int:
        """As in `statistics`."""
        return self._num_hit_tokens

    @property
    def statistics(self) -> KVCacheStatistics:
        """What has happened so far."""
        return KVCacheStatistics(
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evicted_blocks=sum(group.num_evicted_blocks for group in self._groups),
            num_saved_blocks=self._num_saved_blocks,
            num_loaded_blocks=self._num_loaded_blocks,
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of each group that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self._block_size)

    def fits_alone(self, num_tokens: int, max_new_tokens: int) -> bool:
        """Whether a sequence of so many tokens, at most `max_new_tokens` of them computed in one step, has room when
        it is alone."""
        return all(
            group.max_num_held(self.num_blocks_for(num_tokens), max_new_tokens) <= group.pool.num_blocks
            for group in self._groups
        )

    def block_tables(self, sequence_id: int) -> Sequence[Sequence[int]]:
        """A sequence's blocks in the order of its tokens, by group; -1 is behind the group's window."""
        return self._sequences[sequence_id].tables

    def admit(
        self,
        sequence_id: int,
        token_ids: "array[int]",
        *,
        max_new_tokens: int | None = None,
        namespace: bytes = b"",
        use_cached: bool = True,
        can_commit: bool = True,
    ) -> Admission | None:
        """Give a sequence its first blocks: those that are cached, and others for the rest of its tokens.

        The longest prefix is used that every group has, of which a windowed one needs only what the window still sees.
        At least one token is left to be computed.

        Args:
            sequence_id: not known yet.
            token_ids: all its tokens. Of a sequence that is refused and asks again, the same object.
            max_new_tokens: have room for at most this many more than are cached, at least one. None is no limit. Where
                groups have windows, it is what one step computes: blocks that the window leaves behind need not be had
                all at once.
            namespace: `cache_namespace` of what else its keys and values depend on.
            use_cached: whether cached blocks may be used.
            can_commit: whether `commit` lets others find its blocks; else it does nothing.

        Returns:
            None, and nothing changed, when too few blocks are free.
        """
        assert sequence_id not in self._sequences, f"sequence {sequence_id} is known already"
        refusal = self._refusal
        hashes = [root_hash(namespace)]
        if refusal and refusal.token_ids is token_ids and refusal.namespace == namespace:
            if refusal.max_new_tokens == max_new_tokens and self._must_refuse_again(refusal):
                return None
            hashes = refusal.hashes
        is_query = self._is_caching and use_cached
        num_cached_blocks = self._num_cached_blocks(hashes, token_ids) if is_query else 0
        num_cached_tokens = num_cached_blocks * self._block_size
        num_tokens = len(token_ids)
        if max_new_tokens is not None:
            num_tokens = min(num_tokens, num_cached_tokens + max_new_tokens)
        num_blocks = self.num_blocks_for(num_tokens)
        needs = [group.need(hashes, num_cached_blocks, num_blocks) for group in self._groups]
        num_needed = [need.num_free for need in needs]
        if self._is_too_much(num_needed):
            self._refusal = _Refusal(token_ids, namespace, max_new_tokens, hashes, num_cached_blocks, num_needed)
            return None
        self._refusal = None
        tables = [group.take(hashes, need) for group, need in zip(self._groups, needs, strict=True)]
        self._sequences[sequence_id] = _Sequence(hashes, tables, num_blocks, num_cached_blocks, can_commit)
        if is_query:
            self._num_queried_tokens += len(token_ids)
            self._num_hit_tokens += num_cached_tokens
        return Admission(num_cached_tokens, _by_block(tables))

    def allocate(self, sequence_id: int, num_tokens: int, num_computed_tokens: int = 0) -> Sequence[int] | None:
        """The blocks to append to a sequence's table so that it holds this many tokens.

        Empty when it already does. None, and nothing else changed, when too few blocks are free. Blocks behind windows
        are freed first: those that no token from position `num_computed_tokens` on sees, which is where this step
        begins, or an earlier one where drafts may still be refused.
        """
        sequence = self._sequences[sequence_id]
        if self._windowed:
            self._free_behind_windows(sequence, num_computed_tokens)
        num_new = -(-num_tokens // self._block_size) - sequence.num_blocks
        if num_new <= 0:
            return ()
        if self._single_pool is not None:
            new = self._single_pool.allocate(num_new)
            if new is not None:
                sequence.tables[0] += new
                sequence.num_blocks += num_new
            return new
        for group in self._groups:
            if group.pool.num_free_blocks < num_new:
                return None
        new_by_group: list[list[int]] = []
        for group, table in zip(self._groups, sequence.tables, strict=True):
            new = group.pool.allocate(num_new)
            assert new is not None, "less is free than was counted"
            table += new
            new_by_group.append(new)
        sequence.num_blocks += num_new
        return _by_block(new_by_group)

    def commit(self, sequence_id: int, token_ids: "array[int]", num_tokens: int) -> None:
        """Let the full blocks of a sequence's first `num_tokens` tokens be found by others, from this step on.

        All of these tokens are known, and will be computed when the step that is being scheduled is done.
        """
        sequence = self._sequences[sequence_id]
        begin, end = sequence.num_committed_blocks, num_tokens // self._block_size
        if end <= begin or not (self._is_caching and sequence.can_commit):
            return
        hashes = sequence.hashes
        extend_hashes(hashes, token_ids, self._block_size, end)
        for group, table in zip(self._groups, sequence.tables, strict=True):
            group.commit(table, hashes, begin, end, token_ids)
        sequence.num_committed_blocks = end
        self._committed_in_step.add(sequence_id)

    def free(self, sequence_id: int) -> None:
        """Take a sequence's blocks back. What others may find stays in them until they are used for others.

        The end of a sequence is given up first: its beginning is what others may have in common with it. A sequence
        that has committed in the step being scheduled must go through `free_withdrawn`.
        """
        assert sequence_id not in self._committed_in_step, "what it committed will not be computed: free_withdrawn"
        sequence = self._sequences.pop(sequence_id)
        self._freed[0].append((sequence_id, sequence))
        for group, table in zip(self._groups, sequence.tables, strict=True):
            group.pool.free(block_id for block_id in reversed(table) if block_id != NO_BLOCK)

    def free_withdrawn(self, sequence_id: int, num_computed_tokens: int) -> set[int]:
        """Take back the blocks of a sequence that will not be part of the step being scheduled after all.

        Its tokens from `num_computed_tokens` on will not be computed.

        Returns:
            Other sequences that were given blocks with these tokens, all of them admitted to this step. They must not
            be part of it either; `free` is enough for them.
        """
        affected: set[int] = set()
        if sequence_id in self._committed_in_step:
            affected = self._forget_from([self._sequences[sequence_id]], num_computed_tokens, is_planned=False)
            self._committed_in_step.discard(sequence_id)
        self.free(sequence_id)
        return affected - {sequence_id}

    def free_failed(self, sequence_id: int, num_computed_tokens: int) -> set[int]:
        """Take back the blocks of a sequence that could not be computed.

        Nothing in them can be found any more, also what it found there itself: where one sequence cannot go on, others
        might not either. `num_computed_tokens` is what was computed before the step that failed. When that step is
        fetched late, the sequence may have been freed already, and admitted again: it all holds for both of its lives.

        Returns:
            Other sequences that hold blocks of the failed step, or later ones. What they computed is wrong: their
            tokens since then are to be dropped, and they are to be freed.
        """
        sequence = self._sequences.get(sequence_id)
        lives = [life for freed in self._freed for freed_id, life in freed if freed_id == sequence_id]
        if sequence:
            lives.append(sequence)
        affected = self._forget_from(lives, num_computed_tokens, is_planned=True)
        for life in lives:
            for block_hash in life.hashes_from(0):
                for group in self._groups:
                    group.forget(block_hash)
        if sequence:
            self.free(sequence_id)
        return affected - {sequence_id}

    def drop_loaded(self, failed: Iterable[BlockCopy]) -> set[int]:
        """Forget content that could not be loaded, and what was computed from it.

        Returns:
            The sequences that hold such blocks, as `free_failed` has them.
        """
        wrong = {
            _Filled(copy.group, copy.block_id, loads[copy])
            for copy in failed
            for loads in self._loads_in_flight
            if copy in loads
        }
        return self._forget_derived({block.block_hash for block in wrong}, wrong, is_planned=True)

    def reset_prefix_cache(self) -> None:
        """Let nothing be found any more that was computed until now, nor what is computed from it.

        Sequences go on with their blocks; only they themselves use these, and the blocks they will fill.
        """
        for group in self._groups:
            group.forget_all()
        for sequence in self._sequences.values():
            sequence.can_commit = False
        self._committed_in_step.clear()
        if self._events:
            self._events.append(AllBlocksCleared())

    def take_copies(self) -> tuple[Sequence[BlockCopy], Sequence[BlockCopy]]:
        """The saves and loads of the step that is scheduled, and its end: what was committed in it will be computed."""
        if self._committed_in_step:
            self._committed_in_step = set()
        if self._freed[0] or self._freed[1]:
            self._freed = ([], self._freed[0])
        if not self._is_offloading:
            return (), ()
        saves: list[BlockCopy] = []
        loads: dict[BlockCopy, bytes] = {}
        for group in self._groups:
            group_saves, group_loads = group.take_copies()
            saves += group_saves
            loads |= group_loads
        if loads:
            self._loads_in_flight.append(loads)
        self._num_saved_blocks += len(saves)
        self._num_loaded_blocks += len(loads)
        return saves, tuple(loads)

    def events_after(self, number: int) -> KVCacheEvents:
        """What happened to cached blocks after the event of this number."""
        return self._events.after(number) if self._events else KVCacheEvents(last=0, num_lost=0, events=())

    def check_integrity(self) -> None:
        """Return when every block is free, or held exactly as often as block tables name it, and nothing can be found
        but what was computed.

        Raises:
            AssertionError: saying what is wrong.
        """
        for number, group in enumerate(self._groups):
            group.check_integrity()
            tables = [sequence.tables[number] for sequence in self._sequences.values()]
            named = Counter(block_id for table in tables for block_id in table if block_id != NO_BLOCK)
            pool = group.pool
            wrong = [block_id for block_id in range(pool.num_blocks) if pool.num_holders(block_id) != named[block_id]]
            if wrong:
                raise AssertionError(f"Blocks of group {number} are not held as often as tables name them: {wrong}")
        for sequence_id, sequence in self._sequences.items():
            self._check_sequence(sequence_id, sequence)

    def _check_sequence(self, sequence_id: int, sequence: _Sequence) -> None:
        for group, table in zip(self._groups, sequence.tables, strict=True):
            num_behind = sum(block_id == NO_BLOCK for block_id in table)
            if len(table) != sequence.num_blocks or NO_BLOCK in table[num_behind:] or (num_behind and not group.window):
                raise AssertionError(f"Sequence {sequence_id} with {sequence.num_blocks} blocks has the table {table}")
            for i, block_id in enumerate(table):
                found = None if block_id == NO_BLOCK else group.pool.hash_of(block_id)
                if found is not None and (i >= sequence.num_committed_blocks or found != sequence.hashes[i + 1]):
                    raise AssertionError(f"Block {block_id} of sequence {sequence_id} is not what it is found as")

    def _must_refuse_again(self, refusal: _Refusal) -> bool:
        """Whether there are still fewer blocks than were needed, and none of them has become cached."""
        hashes, next_block = refusal.hashes, refusal.num_cached_blocks
        if len(hashes) > next_block + 1 and self._groups[0].has(hashes[next_block + 1]):
            return False
        return self._is_too_much(refusal.num_needed)

    def _is_too_much(self, num_needed: Sequence[int]) -> bool:
        return any(num > group.pool.num_free_blocks for num, group in zip(num_needed, self._groups, strict=True))

    def _num_cached_blocks(self, hashes: list[bytes], token_ids: "array[int]") -> int:
        """The longest prefix that all groups have."""
        max_num_blocks = (len(token_ids) - 1) // self._block_size
        num_blocks = 0
        # Hashes are made as far as they are found: the rest is not needed before it is computed.
        while num_blocks < max_num_blocks:
            end = min(num_blocks + BLOCKS_AT_ONCE, max_num_blocks)
            extend_hashes(hashes, token_ids, self._block_size, end)
            num_blocks = min((group.end_of_found(hashes, num_blocks, end) for group in self._whole), default=end)
            if num_blocks < end:
                break
        while True:
            before = num_blocks
            for _, group in self._windowed:
                num_blocks = group.num_servable(hashes, num_blocks)
            if num_blocks == before:
                return num_blocks

    def _free_behind_windows(self, sequence: _Sequence, num_computed_tokens: int) -> None:
        for number, group in self._windowed:
            table = sequence.tables[number]
            end = min(group.num_behind(num_computed_tokens), len(table))
            begin = end
            while begin and table[begin - 1] != NO_BLOCK:
                begin -= 1
            if begin < end:
                group.pool.free(table[begin:end])
                table[begin:end] = [NO_BLOCK] * (end - begin)

    def _forget_from(self, lives: Sequence[_Sequence], num_computed_tokens: int, *, is_planned: bool) -> set[int]:
        """Forget what a sequence, in one life or several, committed from a position on; as `_forget_derived`."""
        first = num_computed_tokens // self._block_size
        block_hashes = {block_hash for life in lives for block_hash in life.hashes_from(first)}
        wrong = {block for life in lives for block in life.filled_from(first)}
        return self._forget_derived(block_hashes, wrong, is_planned=is_planned)

    def _forget_derived(self, block_hashes: set[bytes], wrong: set[_Filled], *, is_planned: bool) -> set[int]:
        """Forget content and what was computed from it; the sequences that use it.

        `wrong` are the blocks that have this content. Others that have it too are forgotten with them, which costs time
        only, but who uses those is not affected. Where the step that was to fill them `is_planned`, sequences may have
        used them and be gone, or have left them behind a window, since.
        """
        if not block_hashes:
            return set()
        for block_hash in descendants(self._groups, block_hashes):
            for group in self._groups:
                group.forget(block_hash)
        affected: set[int] = set()
        waiting: list[tuple[int | None, _Sequence]] = [*self._sequences.items()]
        if is_planned:
            waiting += ((None, sequence) for freed in self._freed for _, sequence in freed)
        num_waiting = 0
        while len(waiting) != num_waiting:
            num_waiting = len(waiting)
            others: list[tuple[int | None, _Sequence]] = []
            for sequence_id, sequence in waiting:
                first = sequence.first_of(wrong, block_hashes if is_planned else ())
                if first is None:
                    others.append((sequence_id, sequence))
                    continue
                # What comes behind was computed from it, perhaps by this sequence, and others may have only that.
                wrong |= sequence.filled_from(first)
                if sequence_id is not None:
                    affected.add(sequence_id)
            waiting = others
        self._committed_in_step -= affected
        return affected


def _by_block(tables: Sequence[Sequence[int]]) -> Sequence[int]:
    """Blocks of several groups, block after block. A copy, for tables grow."""
    return list(chain.from_iterable(zip(*tables, strict=True)))
