"""`ResultReader`: what a step's result means for its requests: new tokens, ends, failures.

It does not know what steps compute next.
"""

from collections.abc import Sequence

from trioengine.core.executor import NO_TOKEN, StepResult
from trioengine.core.kv_cache_manager import KVCacheManager
from trioengine.core.request import Request, RequestEvent, RequestStatus
from trioengine.core.request_table import RequestTable
from trioengine.core.speculation import Speculator
from trioengine.core.step import Step, StepOutcome
from trioengine.errors import EngineGenerateError
from trioengine.types.codec import error_to_data
from trioengine.types.messages import Finished
from trioengine.types.output import FinishReason


class ResultReader:
    """Turns the results of steps into progress of requests."""

    def __init__(self, table: RequestTable, kv_cache: KVCacheManager, speculator: Speculator | None) -> None:
        self._table = table
        self._kv_cache = kv_cache
        self._speculator = speculator

    def take_in(self, step: Step, result: StepResult) -> StepOutcome:
        """Take in the result of a step that is in flight no more.

        Raises:
            RuntimeError: the result does not fit the plan. Nothing can be trusted any more.
        """
        tokens = result.tokens
        if result.step != step.number or len(tokens) != len(step.requests):
            raise RuntimeError(
                f"The executor answered step {step.number} of {len(step.requests)} sequences with step {result.step} "
                f"of {len(tokens)}."
            )
        started = [request for request in step.started if request.status is not RequestStatus.FINISHED]
        is_more_than_tokens = result.failures or result.logprobs or result.failed_loads or NO_TOKEN in tokens
        if step.is_plain and not is_more_than_tokens:
            outcome = self._take_in_plain(step, tokens)
        else:
            outcome = self._take_in_all(step, result)
        outcome.started = started
        if outcome.finished:
            self._table.drop_left()
        return outcome

    def _take_in_plain(self, step: Step, tokens: Sequence[int]) -> StepOutcome:
        """The usual case: one token for each request."""
        outcome = StepOutcome(step.requests, list(tokens))
        for request, token in zip(step.requests, tokens, strict=True):
            token_ids = request.token_ids
            token_ids.append(token)
            if token in request.end_token_ids or len(token_ids) >= request.max_total_tokens:
                end = request.stop_after(token)
                if end is not None:
                    self._stop(request, end, outcome)
        return outcome

    def _take_in_all(self, step: Step, result: StepResult) -> StepOutcome:
        outcome = StepOutcome([], [])
        self._take_in_failures(step, result, outcome)
        for index, request in enumerate(step.requests):
            # Nobody wants it any more, or it is wrong.
            if request.status is RequestStatus.FINISHED or step.number < request.valid_from:
                continue
            part = result.prompt_logprobs.get(index)
            if part and (unsent := request.unsent_prompt_logprobs(part)):
                outcome.prompt_logprobs.append((request, unsent))
            is_incomplete = index in step.incomplete
            if not is_incomplete and request.max_total_tokens == request.num_prompt_tokens:
                # Nothing was asked for but something of its prompt.
                reason = FinishReason.LENGTH
                if request.pooling is not None:
                    reason = FinishReason.STOP
                    if index not in result.pooled:
                        raise RuntimeError(f"The executor has no vector for sequence {request.sequence_id}.")
                    outcome.pooled.append((request, result.pooled[index]))
                self._stop(request, Finished(request.slot, reason), outcome)
                continue
            if is_incomplete is not (result.tokens[index] == NO_TOKEN):
                raise RuntimeError(f"The executor sampled nothing, or too early, for sequence {request.sequence_id}.")
            if not is_incomplete:
                self._take_in_tokens(step, index, result, outcome)
        return outcome

    def _take_in_failures(self, step: Step, result: StepResult, outcome: StepOutcome) -> None:
        """End the requests that failed, and let those be computed again that used what these left behind."""
        table, kv_cache = self._table, self._kv_cache
        messages = {failure.sequence_id: failure.message for failure in result.failures}
        wrong: set[int] = set()
        for request in step.requests if messages else ():
            message = messages.get(request.sequence_id)
            if message is None or step.number < request.valid_from:
                continue
            # Where another step has been planned since, nobody knows any more where this one began.
            start = 0 if table.in_flight else request.work.num_computed_tokens
            wrong |= kv_cache.free_failed(request.sequence_id, start)
            if request.status is not RequestStatus.FINISHED:
                error = error_to_data(EngineGenerateError(message))
                table.finish_failed(request, Finished(request.slot, FinishReason.ABORT, error=error))
                outcome.finished.append(request)
        if result.failed_loads:
            wrong |= kv_cache.drop_loaded(result.failed_loads)
        if wrong:
            for request in table.running:
                if request.status is RequestStatus.RUNNING and request.sequence_id in wrong:
                    table.preempt(request, is_valid=False)
            table.drop_left()

    def _take_in_tokens(self, step: Step, index: int, result: StepResult, outcome: StepOutcome) -> None:
        """Take in a request's tokens, up to the one that ends it."""
        request = step.requests[index]
        work, grammar, speculator = request.work, request.grammar, self._speculator
        drafts = work.draft_token_ids
        num_accepted = result.num_accepted.get(index, 0)
        new_tokens = [*drafts[:num_accepted], result.tokens[index]]
        work.num_tokens -= len(drafts) - num_accepted
        if speculator is not None and request.speculation is not None and index in step.proposed:
            speculator.observe(request.speculation, len(drafts), num_accepted)
        if grammar is not None:
            # What was sampled after the grammar failed means nothing.
            new_tokens = [] if grammar.error is not None else new_tokens[: grammar.accept(new_tokens)]
        num_known = len(request.token_ids)
        end = _append(request, new_tokens)
        num_new = len(request.token_ids) - num_known
        outcome.requests.extend([request] * num_new)
        outcome.tokens.extend(new_tokens[:num_new])
        if num_new and index in result.logprobs:
            outcome.logprobs.append((request, result.logprobs[index][:num_new]))
        if grammar is not None and grammar.is_free:
            self._table.unbind(request)
        if end is not None:
            self._stop(request, end, outcome)
        elif grammar is not None and grammar.error is not None:
            finished = Finished(request.slot, FinishReason.ABORT, error=error_to_data(grammar.error))
            self._table.finish(request, RequestEvent.FAILED, finished)
            outcome.finished.append(request)
        elif speculator is not None and request.speculation is not None and index in result.drafts:
            speculator.offer(request.speculation, request.token_ids, result.drafts[index])

    def _stop(self, request: Request, finished: Finished, outcome: StepOutcome) -> None:
        self._table.finish(request, RequestEvent.STOPPED, finished)
        outcome.finished.append(request)


def _append(request: Request, new_tokens: Sequence[int]) -> Finished | None:
    """Append new tokens up to the one that ends the request, and say how it ends; None when it goes on."""
    for token in new_tokens:
        request.token_ids.append(token)
        end = request.stop_after(token)
        if end is not None:
            return end
    # Nothing but the end can follow what is complete.
    is_complete = request.grammar is not None and request.grammar.is_complete
    return Finished(request.slot, FinishReason.STOP, ends_with_text=True) if is_complete else None
