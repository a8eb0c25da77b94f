"""`Drafting`: the drafts and the token masks of a step.

Drafts come from the grammar of an answer where it leaves one choice only, else from speculation. They take what is left
of a step's limits and of the free blocks when every request has its own tokens: nobody waits or gives way for a guess.
"""

from collections.abc import Sequence

from trioengine.core.config import CoreConfig
from trioengine.core.executor import ScheduledSequence, TokenMasks
from trioengine.core.kv_cache_manager import KVCacheManager
from trioengine.core.request import Request
from trioengine.core.speculation import Speculator
from trioengine.core.step import Step
from trioengine.core.structured_output import MaskEntry, StructuredOutputs


class Drafting:
    """Completes planned steps. Knows neither queues nor how requests end."""

    def __init__(
        self, config: CoreConfig, kv_cache: KVCacheManager, structured_outputs: StructuredOutputs | None
    ) -> None:
        self.speculator = Speculator(config.speculation) if config.speculation else None
        self._structured_outputs = structured_outputs
        self._kv_cache = kv_cache
        self._has_draft_model = self.speculator is not None and self.speculator.drafts_with_model
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._drafted: list[ScheduledSequence] = []  # Entries whose drafts the next step does not have.
        self._speculates = False
        self._is_asked = False  # Whether the draft model was asked for drafts, which come with the step's result.

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the drafts of the next step depend on what the step in flight samples."""
        return self._speculates or self._is_asked

    def forget_drafts(self) -> None:
        """Take the step before's drafts out of the entries, for the next one."""
        for work in self._drafted:
            work.draft_token_ids, work.max_new_drafts = (), 0
        self._drafted.clear()
        self._is_asked = False

    def add_drafts(self, step: Step, *, has_grammars: bool) -> None:
        """Give the step its drafts."""
        speculator = self.speculator
        if speculator is not None:
            num_tokens = sum(work.num_tokens for work in step.scheduled)
            self._speculates = speculator.begin_step(num_tokens, len(step.requests) - len(step.incomplete))
        if not (has_grammars or self._speculates or self._has_draft_model):
            return
        for index, request in enumerate(step.requests):
            if index not in step.incomplete:
                self._add_drafts_of(step, index, request)
        if speculator is not None:
            speculator.end_planning(sum(work.num_tokens for work in step.scheduled))

    def masks(self, step: Step) -> TokenMasks | None:
        """What the grammars of the step's requests allow."""
        assert self._structured_outputs is not None
        entries = [
            MaskEntry(index, request.grammar, step.scheduled[index].draft_token_ids)
            for index, request in enumerate(step.requests)
            if request.grammar is not None and index not in step.incomplete
        ]
        return self._structured_outputs.masks(entries) if entries else None

    def _add_drafts_of(self, step: Step, index: int, request: Request) -> None:
        work = request.work
        end = work.num_computed_tokens + work.num_tokens
        known = len(request.token_ids)
        # The token after the last draft is sampled too, so that one place of the answer stays for it.
        limit = min(step.num_tokens_left, step.num_extra_rows, request.max_total_tokens - known - 1)
        drafts: Sequence[int] = ()
        if end == known and limit > 0:
            drafts = self._drafts(step, index, request, limit)
        if drafts:
            num_drafts = self._make_room(request, end, len(drafts))
            work.draft_token_ids = drafts[:num_drafts]
            work.num_tokens += num_drafts
            step.num_tokens_left -= num_drafts
            step.num_extra_rows -= num_drafts
        if self._has_draft_model and request.speculation is not None and self.speculator is not None:
            wanted = self.speculator.num_drafts_wanted(request.speculation)
            end += len(work.draft_token_ids)
            work.max_new_drafts = self._make_room(request, end, min(wanted, self._max_model_len - end))
        if work.draft_token_ids or work.max_new_drafts:
            step.is_plain = False
            self._is_asked |= work.max_new_drafts > 0
            self._drafted.append(work)

    def _drafts(self, step: Step, index: int, request: Request, limit: int) -> Sequence[int]:
        grammar = request.grammar
        if grammar is not None:
            forced = grammar.forced_tokens(limit)
            if forced:
                return forced
        work = request.work
        if request.speculation is None or self.speculator is None or not self._speculates or work.num_tokens != 1:
            return ()
        drafts = self.speculator.propose(request.speculation, request.token_ids, limit)
        if grammar is not None and drafts:
            drafts = drafts[: grammar.num_allowed(drafts)]
        if drafts:
            step.proposed.add(index)
        return drafts

    def _make_room(self, request: Request, end: int, num_tokens: int) -> int:
        """How many of these tokens behind `end` have room: in the request's blocks, or in free ones, which it gets."""
        if num_tokens <= 0:
            return 0
        if end + num_tokens > request.num_slots:
            work = request.work
            new_block_ids = self._kv_cache.allocate(request.sequence_id, end + num_tokens, work.num_computed_tokens)
            if new_block_ids is None:
                return max(0, request.num_slots - end)
            work.new_block_ids = [*work.new_block_ids, *new_block_ids]
            request.num_slots = end + num_tokens + -(end + num_tokens) % self._block_size
        return num_tokens
