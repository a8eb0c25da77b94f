"""`RequestTable`: the requests that run and that wait, in their orders, and how they go from one to the other.

Whoever changes a request's status does it here, so that its blocks, the executor and the counts are never forgotten. It
does not know why a request starts, rests or ends.
"""

import bisect
from collections import deque
from operator import attrgetter

from trioengine.core.config import CoreConfig
from trioengine.core.kv_cache_manager import Admission, KVCacheManager
from trioengine.core.lora import LoRAAdapters
from trioengine.core.request import Request, RequestEvent, RequestStatus
from trioengine.core.request_queue import RequestQueue, insert_in_order
from trioengine.core.step import Step
from trioengine.types.messages import Finished

_key = attrgetter("key")


class RequestTable:
    """The state of scheduling."""

    def __init__(self, config: CoreConfig, kv_cache: KVCacheManager, loras: LoRAAdapters) -> None:
        self.running: list[Request] = []
        self.waiting = RequestQueue()
        self.removed: list[int] = []
        """Sequences that the executor still has to forget."""
        self.in_flight: deque[Step] = deque()
        self.next_step = 0
        """The number of the step that is planned next, or now."""
        self.num_bound = 0
        """Running requests with grammars."""
        self.num_special = 0
        """Running requests whose results are not just tokens."""
        self.num_preemptions = 0
        """Since the start."""
        self.preempted: list[Request] = []
        """Whom `num_preemptions` has counted since somebody took this list."""
        self.grown: dict[int, Request] = {}
        """Running requests, by sequence id, whose newest full blocks are not findable yet."""
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_logit_rows)
        self._kv_cache = kv_cache
        self._loras = loras
        self._block_size = config.block_size

    def start(self, request: Request, admission: Admission) -> None:
        """Let a waiting request run that was given its first blocks. Its work begins behind what is cached."""
        self.waiting.remove(request)
        request.apply(RequestEvent.ADMITTED)
        insert_in_order(self.running, request)
        if request.lora is not None:
            self._loras.start(request.lora)
        self.num_bound += request.grammar is not None
        self.num_special += request.is_special
        request.next_prompt_logprob = 1
        request.work.num_computed_tokens = admission.num_cached_tokens
        request.work.new_block_ids = admission.new_block_ids

    def preempt(self, victim: Request, *, is_valid: bool = True) -> None:
        """Let a request wait again that was taken out of the running ones, or will be.

        Where what is in its blocks is not valid, neither is what steps in flight sample for it.
        """
        num_free = self._kv_cache.num_free_blocks
        if is_valid:
            self._give_back(victim)
        else:
            self._kv_cache.free(victim.sequence_id)
            self.leave(victim)
            victim.valid_from = self.next_step
            self._note_dropped()
        victim.num_blocks_given_back = self._kv_cache.num_free_blocks - num_free
        victim.preempted_in = self.next_step
        victim.apply(RequestEvent.PREEMPTED)
        self.waiting.add(victim)
        self.num_preemptions += 1
        self.preempted.append(victim)

    def commit_grown(self) -> None:
        """Let full blocks of `grown` be found."""
        for request in self.grown.values():
            self._commit(request)
        self.grown.clear()

    def finish(self, request: Request, event: RequestEvent, finished: Finished) -> None:
        """End a request, wherever it is. `drop_left` must follow."""
        if request.status is RequestStatus.RUNNING:
            self._give_back(request)
        else:
            self.waiting.remove(request)
        self._end(request, event, finished)

    def take_out(self, request: Request, event: RequestEvent, finished: Finished) -> None:
        """As `finish`, between steps: at once, and whatever the number of those that run."""
        is_running = request.status is RequestStatus.RUNNING
        self.finish(request, event, finished)
        if is_running:
            position = bisect.bisect_left(self.running, request.key, key=_key)
            assert self.running[position] is request
            del self.running[position]

    def finish_failed(self, request: Request, finished: Finished) -> None:
        """End a request whose blocks the cache has taken back already. `drop_left` must follow."""
        if request.status is RequestStatus.RUNNING:
            self.leave(request)
        else:
            self.waiting.remove(request)
        self._end(request, RequestEvent.FAILED, finished)

    def leave(self, request: Request) -> None:
        """Note that a request, whose blocks are free, does not run any more."""
        self.removed.append(request.sequence_id)
        self.grown.pop(request.sequence_id, None)
        if request.lora is not None:
            request.lora.num_running -= 1
        self.num_bound -= request.grammar is not None
        self.num_special -= request.is_special
        work = request.work
        work.num_computed_tokens = work.num_tokens = request.num_slots = 0

    def unbind(self, request: Request) -> None:
        """Let a request go on whose grammar binds nothing any more."""
        is_running = request.status is RequestStatus.RUNNING
        self.num_bound -= is_running
        self.num_special -= is_running and request.is_special
        request.grammar = None
        self.num_special += is_running and request.is_special

    def drop_left(self) -> None:
        """Take requests that do not run any more out of the running ones."""
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def check_integrity(self) -> None:
        """Return when the books are right: order, limits, states and blocks.

        Raises:
            AssertionError: saying what is wrong.
        """
        self._kv_cache.check_integrity()
        for requests in (self.running, list(self.waiting)):
            keys = [request.key for request in requests]
            if keys != sorted(set(keys)):
                raise AssertionError(f"Requests are not in order: {keys}")
        if len(self.running) > self.max_num_seqs:
            raise AssertionError(f"{len(self.running)} requests run; the limit is {self.max_num_seqs}")
        running = {request.sequence_id for request in self.running}
        if running != self._kv_cache.sequence_ids:
            raise AssertionError(f"{sorted(running)} run, but {sorted(self._kv_cache.sequence_ids)} hold blocks")
        counts = sum(request.grammar is not None for request in self.running), sum(map(_is_special, self.running))
        if (self.num_bound, self.num_special) != counts:
            raise AssertionError(f"Counted are {self.num_bound} and {self.num_special} requests, there are {counts}")
        self._loras.check_integrity([request.lora for request in self.running if request.lora is not None])
        for request in self.running:
            self._check_running(request)
        for request in self.waiting:
            if request.status is not RequestStatus.WAITING or request.num_computed_tokens or request.num_slots:
                raise AssertionError(f"A waiting request is not as it should be: {request}")

    def _check_running(self, request: Request) -> None:
        num_room = len(self._kv_cache.block_tables(request.sequence_id)[0]) * self._block_size
        num_computed, num_inputs = request.num_computed_tokens, len(request.token_ids) - 1
        if self.in_flight:  # Then these may be inputs too: the token that is on its way, and drafts.
            num_inputs += 1 + len(request.work.draft_token_ids)
        is_within = num_computed <= request.num_slots <= num_room and num_computed <= num_inputs
        if request.status is not RequestStatus.RUNNING or not is_within:
            raise AssertionError(f"A running request is not as it should be, with room for {num_room}: {request}")

    def _give_back(self, request: Request) -> None:
        """Free a running request's blocks. What is in them stays findable until they are used for something else."""
        num_known = self._commit(request)
        self._kv_cache.free_withdrawn(request.sequence_id, num_known)
        self.leave(request)

    def _commit(self, request: Request) -> int:
        """Let all full blocks of a request be found; how many of its tokens are known and computed."""
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        self._kv_cache.commit(request.sequence_id, request.token_ids, num_known)
        return num_known

    def _end(self, request: Request, event: RequestEvent, finished: Finished) -> None:
        request.apply(event)
        request.finished = finished
        self._note_dropped()

    def _note_dropped(self) -> None:
        """Something that steps in flight sample is of no use any more."""
        for step in self.in_flight:
            step.is_plain = False


def _is_special(request: Request) -> bool:
    return request.is_special
