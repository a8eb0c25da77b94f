"""Whatever a scheduler does, and whatever fails, nobody computes with keys and values of other tokens.

The machine is scheduler and executor at once. It applies plans to a store that says, for every place in every block,
of which prefix its keys and values are; a naive model, a set of prefixes made from the events, says what must be found.
"""

from array import array
from typing import cast

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trioengine.core.executor import BlockCopy, KVCacheGroup
from trioengine.core.kv_cache_manager import KVCacheManager
from trioengine.core.prefix_cache import cache_namespace, root_hash
from trioengine.types.messages import AllBlocksCleared, BlockRemoved, BlockStored

NAMESPACES = (b"", cache_namespace("salt"), cache_namespace(None, "salt"))
WINDOWS = st.none() | st.integers(2, 7)
MAX_NUM_TOKENS = 14

Prefix = tuple[bytes, tuple[int, ...]]
"""A namespace, and tokens."""
Entry = tuple[int, Prefix]
"""Whose keys and values these are: the number of resets before the sequence began, and all tokens up to this one."""
WRONG: Entry = (-1, (b"wrong", ()))
"""Computed by a step that failed, or from such."""


@attrs.define(eq=False)
class Live:
    """A sequence that has blocks."""

    token_ids: "array[int]"
    namespace: bytes
    tables: list[list[int]]
    num_computed: int
    num_committed_blocks: int
    num_resets: int
    """Before it was admitted."""
    can_commit: bool = True
    """Whether others may find what it has."""

    def prefix(self, position: int) -> Prefix:
        """What its tokens up to this one are found as."""
        return self.namespace, tuple(self.token_ids[: position + 1])

    def entry(self, position: int) -> Entry:
        """What the cache should hold for a token."""
        return self.num_resets, self.prefix(position)


@attrs.frozen
class Failed:
    """Something that went wrong in a step and is not told yet."""

    sequence_id: int = -1
    num_computed: int = 0
    copy: BlockCopy | None = None


class KVCacheMachine(RuleBasedStateMachine):
    """Pools that are always too small, all kinds of groups, and a check after every rule."""

    @initialize(
        block_size=st.integers(1, 3),
        groups=st.lists(st.tuples(st.integers(2, 10), WINDOWS), min_size=1, max_size=2),
        num_offload_blocks=st.sampled_from([0, 1, 2, 4, 20]),
        num_steps_late=st.integers(0, 1),
    )
    def start(
        self, block_size: int, groups: list[tuple[int, int | None]], num_offload_blocks: int, num_steps_late: int
    ) -> None:
        """A cache of these groups; what a step did is known so many steps later."""
        self.block_size = block_size
        self.groups = [KVCacheGroup(num_blocks, window) for num_blocks, window in groups]
        self.num_offload_blocks = num_offload_blocks
        self.num_steps_late = num_steps_late
        self.kv_cache = KVCacheManager(
            self.groups,
            block_size,
            enable_prefix_caching=True,
            num_offload_blocks=num_offload_blocks,
            record_events=True,
        )
        self.live: dict[int, Live] = {}
        self.preempted: dict[int, Live] = {}
        self.num_sequences = 0
        self.scheduled: dict[int, tuple[int, int]] = {}  # First and last token + 1, in this step.
        self.store: dict[tuple[int, int, int], Entry] = {}  # By group, block and place in it.
        self.offloaded: dict[tuple[int, int], list[Entry | None]] = {}  # By group and slot.
        self.failed: list[list[Failed]] = [[] for _ in range(num_steps_late)]  # The oldest step's last.
        self.prefixes: dict[bytes, Prefix] = {root_hash(namespace): (namespace, ()) for namespace in NAMESPACES}
        self.findable: list[set[Prefix]] = [set() for _ in groups]
        self.last_event = 0
        self.forgotten: list[set[Prefix]] = [set() for _ in groups]
        self.has_orphans = False  # Content whose beginning was forgotten alone.
        self.num_resets = 0

    # What a scheduler does

    @rule(
        data=st.data(),
        is_cached=st.sampled_from([True, True, True, False]),
        can_commit=st.sampled_from([True, True, True, False]),
        is_whole=st.booleans(),
    )
    def admit(self, data: st.DataObject, is_cached: bool, can_commit: bool, is_whole: bool) -> None:
        """Start a sequence, often with tokens that others have too."""
        namespace = data.draw(st.sampled_from(NAMESPACES))
        tokens = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_NUM_TOKENS)
        others = [list(live.token_ids) for live in self.live.values()]
        others += [list(prefix) for prefixes in self.findable for _, prefix in sorted(prefixes)]
        start = data.draw(st.sampled_from(others)) if others and data.draw(st.sampled_from([True, True, False])) else []
        token_ids = array("i", (start + data.draw(tokens))[:MAX_NUM_TOKENS])
        max_new_tokens = None if is_whole else data.draw(st.integers(1, 4))
        self._admit(self.num_sequences, token_ids, namespace, max_new_tokens, is_cached, can_commit)
        self.num_sequences += 1

    @precondition(lambda self: self.preempted)
    @rule(data=st.data(), is_whole=st.booleans())
    def admit_again(self, data: st.DataObject, is_whole: bool) -> None:
        """A preempted sequence comes back, perhaps in the same step."""
        sequence_id = data.draw(st.sampled_from(sorted(self.preempted)))
        live = self.preempted.pop(sequence_id)
        max_new_tokens = None if is_whole else data.draw(st.integers(1, 4))
        self._admit(sequence_id, live.token_ids, live.namespace, max_new_tokens, can_commit=live.can_commit)

    @precondition(lambda self: self.live.keys() > self.scheduled.keys())
    @rule(data=st.data(), num_tokens=st.integers(1, 4), num_drafts=st.integers(0, 2))
    def go_on(self, data: st.DataObject, num_tokens: int, num_drafts: int) -> None:
        """Schedule a running sequence; one whose tokens are all computed has got another."""
        sequence_id = data.draw(st.sampled_from(sorted(set(self.live) - set(self.scheduled))))
        live = self.live[sequence_id]
        if live.num_computed == len(live.token_ids):
            live.token_ids.append(data.draw(st.integers(0, 1)))
        end = min(live.num_computed + num_tokens, len(live.token_ids))
        num_behind = [self._num_behind(number, live.num_computed) for number in range(len(self.groups))]
        new = self.kv_cache.allocate(sequence_id, end + num_drafts, live.num_computed)
        for table, num in zip(live.tables, num_behind, strict=True):
            table[:num] = [-1] * min(num, len(table))
        self._read_events(may_evict=True)
        if new is None:
            self._assert_too_few(live, end + num_drafts)
            self._free(sequence_id)
            return
        self._append(live, new)
        assert len(live.tables[0]) >= -(-(end + num_drafts) // self.block_size)
        self._schedule(sequence_id, end)

    @precondition(lambda self: self.scheduled)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """Take a sequence out of the step again, and those that wanted to use what it computes."""
        sequence_id = data.draw(st.sampled_from(sorted(self.scheduled)))
        begin, _ = self.scheduled.pop(sequence_id)
        order = list(self.live)
        affected = self.kv_cache.free_withdrawn(sequence_id, begin)
        self.preempted[sequence_id] = self.live.pop(sequence_id)
        for other in affected:
            assert order.index(other) > order.index(sequence_id), "it was admitted before"
            del self.scheduled[other]
            self.preempted[other] = self.live.pop(other)
            self.kv_cache.free(other)
        self._read_events(may_forget=True)

    @precondition(lambda self: self.live.keys() > self.scheduled.keys())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A sequence ends, is aborted or preempted."""
        self._free(data.draw(st.sampled_from(sorted(set(self.live) - set(self.scheduled)))))
        self._read_events()

    @precondition(lambda self: not self.scheduled)
    @rule(is_time=st.sampled_from([False, False, False, True]))
    def reset(self, is_time: bool) -> None:
        """Nothing that was computed until now is found any more, nor what is computed from it. It is not often time."""
        if not is_time:
            return
        self.kv_cache.reset_prefix_cache()
        self.num_resets += 1
        self._read_events(may_forget=True)
        assert not any(self.findable)

    # What an executor does

    @precondition(lambda self: self.live or any(self.failed))
    @rule(data=st.data(), may_fail=st.sampled_from([False, False, True]))
    def end_step(self, data: st.DataObject, may_fail: bool) -> None:
        """Compute what is scheduled, and hear what became of an earlier step, or of this one."""
        failed: list[Failed] = []
        saves, loads = self.kv_cache.take_copies()
        self._check_copies(saves, loads)
        for copy in saves:
            self.offloaded[copy.group, copy.offload_slot] = [
                self.store.get((copy.group, copy.block_id, place)) for place in range(self.block_size)
            ]
        for copy in loads:
            is_lost = may_fail and data.draw(st.booleans())
            if is_lost:
                failed.append(Failed(copy=copy))
            for place, entry in enumerate(self.offloaded[copy.group, copy.offload_slot]):
                assert entry is not None, f"{copy} brings what was never there"
                self.store[copy.group, copy.block_id, place] = WRONG if is_lost else entry
        for sequence_id in list(self.scheduled):
            has_failed = may_fail and data.draw(st.booleans())
            if has_failed:
                failed.append(Failed(sequence_id, num_computed=self.scheduled[sequence_id][0]))
            self._compute(sequence_id, has_failed)
        self.scheduled = {}
        self.failed.insert(0, failed)
        self._hear(self.failed.pop())

    @invariant()
    def check(self) -> None:
        """The books are right, and what can be found is what it is found as."""
        if not hasattr(self, "kv_cache"):
            return
        self.kv_cache.check_integrity()
        assert self.kv_cache.sequence_ids == self.live.keys()
        num_free = sum(self._num_free(number) for number in range(len(self.groups)))
        assert self.kv_cache.num_free_blocks == num_free
        for sequence_id, live in self.live.items():
            assert self.kv_cache.block_tables(sequence_id) == live.tables
            self._check_live(sequence_id, live)

    def teardown(self) -> None:
        """Everything ends, and every block is free."""
        if hasattr(self, "kv_cache"):
            self.kv_cache.take_copies()
            for sequence_id in list(self.live):
                self.kv_cache.free(sequence_id)
            self.kv_cache.check_integrity()
            assert self.kv_cache.num_free_blocks == self.kv_cache.num_blocks
            assert self.kv_cache.usage == 0

    def _admit(
        self,
        sequence_id: int,
        token_ids: "array[int]",
        namespace: bytes,
        max_new_tokens: int | None,
        is_cached: bool = True,
        can_commit: bool = True,
    ) -> None:
        expected = self._longest_prefix(namespace, token_ids) if is_cached else 0
        before = self._books()
        admission = self.kv_cache.admit(
            sequence_id,
            token_ids,
            max_new_tokens=max_new_tokens,
            namespace=namespace,
            use_cached=is_cached,
            can_commit=can_commit,
        )
        live = Live(
            token_ids,
            namespace,
            [[] for _ in self.groups],
            expected,
            expected // self.block_size,
            self.num_resets,
            can_commit,
        )
        if admission is None:
            self.preempted[sequence_id] = live  # To ask again.
            assert self._books() == before
            # What is needed at most: no cached block is held by another.
            room = len(token_ids) if max_new_tokens is None else min(len(token_ids), expected + max_new_tokens)
            num_needed = -(-room // self.block_size)
            assert any(self._num_free(number) < num_needed for number in range(len(self.groups)))
            return
        assert admission.num_cached_tokens == expected
        self.live[sequence_id] = live
        self._append(live, admission.new_block_ids)
        num_room = len(live.tables[0]) * self.block_size
        self._read_events(may_evict=True)
        self._schedule(sequence_id, min(len(token_ids), num_room))

    def _schedule(self, sequence_id: int, end: int) -> None:
        live = self.live[sequence_id]
        self.scheduled[sequence_id] = (live.num_computed, end)
        self.kv_cache.commit(sequence_id, live.token_ids, end)
        if live.can_commit:
            live.num_committed_blocks = max(live.num_committed_blocks, end // self.block_size)
            self._read_events()
        else:
            assert self.kv_cache.events_after(self.last_event).events == ()

    def _free(self, sequence_id: int) -> None:
        self.preempted[sequence_id] = self.live.pop(sequence_id)
        self.kv_cache.free(sequence_id)

    def _append(self, live: Live, new_block_ids: object) -> None:
        """As an executor understands a step's new blocks."""
        new = cast("list[int]", new_block_ids)
        num_groups = len(self.groups)
        assert len(new) % num_groups == 0
        for number, table in enumerate(live.tables):
            table += new[number::num_groups]

    def _compute(self, sequence_id: int, has_failed: bool) -> None:
        live = self.live[sequence_id]
        begin, end = self.scheduled[sequence_id]
        for position in range(begin, end):
            for number, table in enumerate(live.tables):
                assert table[position // self.block_size] >= 0
                self.store[self._place(number, table, position)] = WRONG if has_failed else live.entry(position)
        for position in range(begin, end):
            if WRONG in self._seen(live, position):
                for number, table in enumerate(live.tables):
                    self.store[self._place(number, table, position)] = WRONG
        live.num_computed = end

    def _seen(self, live: Live, position: int) -> set[Entry]:
        """What a token's computation reads: what it should, or wrong things that are not told yet, and nothing else."""
        seen: set[Entry] = set()
        for number, (group, table) in enumerate(zip(self.groups, live.tables, strict=True)):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for other in range(first, position + 1):
                assert table[other // self.block_size] >= 0, "it sees a block that was behind the window"
                entry = self.store.get(self._place(number, table, other))
                assert entry in (live.entry(other), WRONG), f"token {position} sees {entry} at {other}"
                seen.add(entry)
        return seen

    def _hear(self, failed: list[Failed]) -> None:
        affected: set[int] = set()
        for failure in failed:
            if failure.copy:
                affected |= self.kv_cache.drop_loaded([failure.copy])
            else:
                self.has_orphans = True
                affected |= self.kv_cache.free_failed(failure.sequence_id, failure.num_computed)
                affected.discard(failure.sequence_id)
                self.live.pop(failure.sequence_id, None)
                self.preempted.pop(failure.sequence_id, None)
        for sequence_id in affected:
            self._free(sequence_id)
        self._read_events(may_forget=True)
        if not any(self.failed):
            # Whoever goes on sees nothing wrong, and nothing wrong can be found.
            for live in self.live.values():
                for position in range(live.num_computed):
                    if all(position >= self._first_seen(number, live) for number in range(len(self.groups))):
                        places = [self._place(number, table, position) for number, table in enumerate(live.tables)]
                        assert WRONG not in [self.store.get(place) for place in places]
            for number, group in enumerate(self.kv_cache._groups):  # pyright: ignore[reportPrivateUsage]
                for block_hash, _ in group.pool.findable():
                    block_id = cast("int", group.pool.find(block_hash))
                    namespace, prefix = self.prefixes[block_hash]
                    for place in range(self.block_size):
                        length = len(prefix) - self.block_size + place + 1
                        assert self.store[number, block_id, place] == (self.num_resets, (namespace, prefix[:length]))

    def _first_seen(self, number: int, live: Live) -> int:
        window = self.groups[number].window
        return 0 if window is None else max(0, live.num_computed - window + 1)

    def _place(self, number: int, table: list[int], position: int) -> tuple[int, int, int]:
        return number, table[position // self.block_size], position % self.block_size

    def _check_copies(self, saves: object, loads: object) -> None:
        """No copy of a step depends on the order in which its saves, or its loads, are made."""
        saves, loads = list(cast("list[BlockCopy]", saves)), list(cast("list[BlockCopy]", loads))
        for copies in (saves, loads):
            assert len({(copy.group, copy.block_id) for copy in copies}) == len(copies)
            assert all(0 <= copy.offload_slot < self.num_offload_blocks for copy in copies)
        assert len({(copy.group, copy.offload_slot) for copy in saves}) == len(saves)

    def _check_live(self, sequence_id: int, live: Live) -> None:
        """What a sequence has committed can be found, as long as it has it."""
        if live.num_resets < self.num_resets:
            return
        for number, table in enumerate(live.tables):
            for i in range(live.num_committed_blocks):
                if table[i] >= 0:
                    prefix = live.prefix((i + 1) * self.block_size - 1)
                    found = self.findable[number] | self.forgotten[number]
                    assert prefix in found, f"block {i} of sequence {sequence_id} is not found"

    def _num_behind(self, number: int, num_computed: int) -> int:
        window = self.groups[number].window
        return 0 if window is None else max(0, num_computed - window + 1) // self.block_size

    def _num_free(self, number: int) -> int:
        held = {block_id for live in self.live.values() for block_id in live.tables[number] if block_id >= 0}
        return self.groups[number].num_blocks - len(held)

    def _assert_too_few(self, live: Live, num_tokens: int) -> None:
        num_new = -(-num_tokens // self.block_size) - len(live.tables[0])
        assert any(self._num_free(number) < num_new for number in range(len(self.groups)))

    def _books(self) -> object:
        tables = {
            sequence_id: [list(table) for table in self.kv_cache.block_tables(sequence_id)] for sequence_id in self.live
        }
        return tables, self.kv_cache.statistics, self.kv_cache.events_after(self.last_event), self.kv_cache.sequence_ids

    def _longest_prefix(self, namespace: bytes, token_ids: "array[int]") -> int:
        """By trying all, longest first."""
        for num_blocks in range((len(token_ids) - 1) // self.block_size, 0, -1):
            num_tokens = num_blocks * self.block_size
            if all(
                (namespace, tuple(token_ids[: (i + 1) * self.block_size])) in self.findable[number]
                for number in range(len(self.groups))
                for i in range(self._num_behind(number, num_tokens), num_blocks)
            ):
                return num_tokens
        return 0

    def _read_events(self, *, may_evict: bool = False, may_forget: bool = False) -> None:
        """Keep the model: which prefixes can be found in which group."""
        events = self.kv_cache.events_after(self.last_event)
        assert events.num_lost == 0
        assert events.last == self.last_event + len(events.events)
        self.last_event = events.last
        for event in events.events:
            match event:
                case BlockStored():
                    namespace, prefix = self.prefixes[event.parent_hash]
                    prefix = (namespace, (*prefix, *array("i", event.token_ids)))
                    assert self.prefixes.setdefault(event.block_hash, prefix) == prefix
                    assert prefix not in self.findable[event.group]
                    self.findable[event.group].add(prefix)
                    self.forgotten[event.group].discard(prefix)
                case BlockRemoved():
                    assert may_evict or may_forget
                    namespace, prefix = self.prefixes[event.removed_hash]
                    self.findable[event.group].remove((namespace, prefix))
                    if may_forget:
                        self.forgotten[event.group].add((namespace, prefix))
                    elif not self.has_orphans and not self.groups[event.group].window:
                        longer = [
                            other
                            for of, other in self.findable[event.group]
                            if of == namespace and other[: len(prefix)] == prefix
                        ]
                        assert self.num_offload_blocks or not longer, "the end of a prefix is evicted first"
                case AllBlocksCleared():
                    self.findable = [set() for _ in self.groups]


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
