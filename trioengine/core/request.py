"""`Request`: one request as the core sees it, its states as a table, and the checks that keep a bad one out.

It knows neither how requests are scheduled nor how their output leaves.
"""

import enum
from array import array
from collections.abc import Mapping, Sequence

import attrs

from trioengine.config.engine import SchedulingPolicy
from trioengine.core.config import CoreConfig
from trioengine.core.executor import NewSequence, ScheduledSequence, TokenLogprobs
from trioengine.core.lora import NO_SLOT, LoRAAdapter
from trioengine.core.prefix_cache import cache_namespace
from trioengine.core.speculation import RequestSpeculation
from trioengine.core.structured_output import Grammar
from trioengine.errors import PromptTooLongError, RequestError
from trioengine.types.messages import EncodeCoreRequest, EngineCoreRequest, Finished
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingParams
from trioengine.types.request import KVHints


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    """It holds no blocks. The executor does not know it, or is about to forget it."""
    RUNNING = enum.auto()
    """It holds blocks, and steps compute its tokens."""
    FINISHED = enum.auto()
    """Its `finished` is set; nothing more happens to it."""


class RequestEvent(enum.Enum):
    """What happens to a request."""

    ADMITTED = enum.auto()
    """It got its blocks."""
    PREEMPTED = enum.auto()
    """It gave its blocks back to a request that comes before it; what it computed is lost, its tokens are not."""
    STOPPED = enum.auto()
    """A token or a limit ended it."""
    FAILED = enum.auto()
    """Nobody can go on with it: the executor, or the grammar of its answer."""
    ABORTED = enum.auto()
    """Its client wants no more of it."""


TRANSITIONS: Mapping[tuple[RequestStatus, RequestEvent], RequestStatus] = {
    (RequestStatus.WAITING, RequestEvent.ADMITTED): RequestStatus.RUNNING,
    (RequestStatus.WAITING, RequestEvent.ABORTED): RequestStatus.FINISHED,
    # A step that was in flight when the request was preempted may bring its end.
    (RequestStatus.WAITING, RequestEvent.STOPPED): RequestStatus.FINISHED,
    (RequestStatus.WAITING, RequestEvent.FAILED): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, RequestEvent.PREEMPTED): RequestStatus.WAITING,
    (RequestStatus.RUNNING, RequestEvent.STOPPED): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, RequestEvent.FAILED): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, RequestEvent.ABORTED): RequestStatus.FINISHED,
}


@attrs.define(eq=False, kw_only=True)
class Request:
    """One request, from its arrival to its `Finished`."""

    client: int
    slot: int
    """Its name between the core and this client."""
    request_id: str
    sequence_id: int
    """Its name between the core and the executor; counts requests in the order of their arrival."""
    priority: int
    """Lower values come first; 0 where the policy knows no priorities."""
    token_ids: "array[int]"
    """Prompt and answer, as far as known."""
    num_prompt_tokens: int
    max_total_tokens: int
    """It ends when `token_ids` is this long."""
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    """`eos_token_ids` and the sampling's `stop_token_ids`."""
    namespace: bytes
    """Requests share cached prefixes only within one namespace."""
    is_long: bool
    """Whether its prompt has more tokens than `long_prefill_token_threshold`."""
    work: ScheduledSequence
    """Its entry in every plan, changed in place from step to step: a new object for each running request and step
    would be a good part of the cost of a step."""
    pooling: PoolingParams | None = None
    """Vectors are wanted of its prompt, and no answer."""
    second_text_start: int | None = None
    """As `NewSequence.second_text_start`."""
    arrived_s: float = 0.0
    """By the core's clock."""
    status: RequestStatus = RequestStatus.WAITING
    finished: Finished | None = None
    """How it ended."""
    grammar: Grammar | None = None
    """What binds its answer."""
    lora: LoRAAdapter | None = None
    """What changes the model for it."""
    reads_cache: bool = True
    """Whether it wants to begin behind what is cached."""
    may_be_cached: bool = True
    """Whether others may begin behind what it has computed."""
    speculation: RequestSpeculation | None = None
    """What is known about its drafts; None where there is no speculation."""
    num_slots: int = 0
    """Tokens that its blocks have room for."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that the cache had when it was first admitted; None before."""
    preempted_in: int = -1
    """The step that it was last taken out of; it does not come back in the same."""
    num_blocks_given_back: int = 0
    """Blocks that became free when it was last preempted."""
    valid_from: int = 0
    """What earlier steps sampled for it was computed from wrong data, and is dropped."""
    next_prompt_logprob: int = 1
    """The position in the prompt that the next log probability from the executor is of. After a preemption they come
    again from the start."""
    num_prompt_logprobs: int = 1
    """Positions of the prompt up to which log probabilities were sent."""

    @property
    def key(self) -> tuple[int, int]:
        """Its place in every order: by priority, then by arrival."""
        return self.priority, self.sequence_id

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache once all steps in flight are done."""
        return self.work.num_computed_tokens + self.work.num_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_special(self) -> bool:
        """Whether results of its steps may be something else than one token each, or each token must be looked at."""
        return (
            self.grammar is not None
            or self.has_prompt_logprobs
            or self.pooling is not None
            or self.sampling.repetition_detection is not None
        )

    @property
    def waits_for_first_step(self) -> bool:
        """Whether no step was ever planned for it, and one may still be."""
        return self.num_cached_tokens is None and self.status is RequestStatus.WAITING

    @property
    def may_use_cached(self) -> bool:
        """Whether tokens that are cached need not be computed: not where something is wanted of each of them."""
        is_wanted_of_each = self.has_prompt_logprobs or (self.pooling is not None and self.pooling.needs_all_tokens)
        return self.reads_cache and not is_wanted_of_each

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the executor computes log probabilities of its prompt."""
        return self.sampling.prompt_logprobs is not None

    def apply(self, event: RequestEvent) -> None:
        """Go to the status that follows. KeyError: the event cannot happen now, which is a bug of the caller."""
        self.status = TRANSITIONS[self.status, event]

    def new_sequence(self) -> NewSequence:
        """What the executor must know before it computes this request, with all tokens known now."""
        return NewSequence(
            sequence_id=self.sequence_id,
            token_ids=self.token_ids[:],
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            seed=self.seed,
            end_token_ids=tuple(sorted(self.end_token_ids)),
            lora_slot=NO_SLOT if self.lora is None else self.lora.slot,
            pooling=self.pooling,
            second_text_start=self.second_text_start,
        )

    def stop_after(self, token: int) -> Finished | None:
        """How the request ends with this token, its newest; None when it goes on.

        The end-of-text token comes before stop tokens, both before the limits, and those before a repetition. Neither
        token counts unless `min_tokens` tokens came before it: until then the executor does not sample them.
        """
        if self.num_generated_tokens > self.sampling.min_tokens:
            if token in self.eos_token_ids:
                return Finished(self.slot, FinishReason.STOP)
            if token in self.end_token_ids:
                return Finished(self.slot, FinishReason.STOP, stop_token_id=token)
        if len(self.token_ids) >= self.max_total_tokens:
            return Finished(self.slot, FinishReason.LENGTH)
        repetition = self.sampling.repetition_detection
        if repetition is None or self.num_generated_tokens < self.sampling.min_tokens:
            return None
        repeats = repetition.ends(self.token_ids, self.num_prompt_tokens)
        return Finished(self.slot, FinishReason.REPETITION) if repeats else None

    def unsent_prompt_logprobs(self, part: Sequence[TokenLogprobs]) -> Sequence[TokenLogprobs]:
        """Of the next part of the prompt's log probabilities, those that were not sent before a preemption."""
        start = self.next_prompt_logprob
        self.next_prompt_logprob += len(part)
        unsent = part[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, self.next_prompt_logprob)
        return unsent


def make_request(
    client: int,
    message: EngineCoreRequest,
    sequence_id: int,
    config: CoreConfig,
    lora: LoRAAdapter | None = None,
) -> Request:
    """The request that a message asks for, checked, so that it cannot harm the step it will share with others.

    An answer that would pass the end of the context ends there.

    Args:
        client: who asks.
        message: what for.
        sequence_id: its number among all requests.
        config: limits.
        lora: the adapter that the message names.

    Raises:
        PromptTooLongError: the prompt leaves no room for an answer.
        RequestError: naming another field at fault.
    """
    sampling = message.sampling
    sampling.validate()
    # Where only the prompt's log probabilities are asked for, it may fill the context.
    num_answer_tokens = 0 if sampling.max_tokens == 0 else 1
    token_ids = _checked_prompt(
        message.prompt_token_ids, config, config.max_model_len, num_answer_tokens=num_answer_tokens
    )
    eos_token_ids = frozenset(message.eos_token_ids)
    end_token_ids = eos_token_ids.union(sampling.stop_token_ids)
    _check_in_vocabulary("stop_token_ids", end_token_ids, config)
    _check_in_vocabulary("logit_bias", frozenset(sampling.logit_bias or ()), config)
    if not 0 <= message.seed < 2**64:
        raise RequestError("seed must be an unsigned 64-bit integer.", param="seed")
    _check_in_vocabulary("allowed_token_ids", frozenset(sampling.allowed_token_ids or ()), config)
    _check_in_vocabulary("logprob_token_ids", frozenset(sampling.logprob_token_ids or ()), config)
    max_tokens = config.max_model_len if sampling.max_tokens is None else sampling.max_tokens
    has_priorities = config.scheduling_policy is SchedulingPolicy.PRIORITY
    hints = message.kv_hints or KVHints()
    return Request(
        client=client,
        slot=message.slot,
        request_id=message.request_id,
        sequence_id=sequence_id,
        priority=message.priority if has_priorities else 0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_total_tokens=min(len(token_ids) + max_tokens, config.max_model_len),
        sampling=sampling,
        seed=message.seed,
        eos_token_ids=eos_token_ids,
        end_token_ids=end_token_ids,
        namespace=cache_namespace(message.cache_salt, None if lora is None else lora.cache_name),
        lora=lora,
        reads_cache=hints.read_prefix_cache and not sampling.skip_reading_prefix_cache,
        may_be_cached=hints.write_prefix_cache,
        is_long=0 < config.long_prefill_token_threshold < len(token_ids),
        work=ScheduledSequence(sequence_id, num_computed_tokens=0, num_tokens=0),
    )


def make_encode_request(
    client: int,
    message: EncodeCoreRequest,
    sequence_id: int,
    config: CoreConfig,
    lora: LoRAAdapter | None = None,
) -> Request:
    """The request that a message asks for, checked, as `make_request` does.

    Raises:
        PromptTooLongError: the prompt is longer than the context, or than a step where it cannot be split.
        RequestError: naming another field at fault.
    """
    message.pooling.validate()
    max_len = (
        config.max_model_len if config.splits_prompts else min(config.max_model_len, config.max_num_batched_tokens)
    )
    token_ids = _checked_prompt(message.prompt_token_ids, config, max_len, num_answer_tokens=0)
    second_start = message.second_text_start
    if second_start is not None and not 0 <= second_start < len(token_ids):
        raise RequestError(f"second_text_start is {second_start}, behind the prompt.", param="second_text_start")
    threshold = config.long_prefill_token_threshold if config.splits_prompts else 0
    return Request(
        client=client,
        slot=message.slot,
        request_id=message.request_id,
        sequence_id=sequence_id,
        priority=message.priority if config.scheduling_policy is SchedulingPolicy.PRIORITY else 0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_total_tokens=len(token_ids),
        sampling=_NO_ANSWER,
        seed=0,
        eos_token_ids=frozenset(),
        end_token_ids=frozenset(),
        namespace=cache_namespace(message.cache_salt, None if lora is None else lora.cache_name),
        lora=lora,
        is_long=0 < threshold < len(token_ids),
        work=ScheduledSequence(sequence_id, num_computed_tokens=0, num_tokens=0),
        pooling=message.pooling,
        second_text_start=second_start,
    )


_NO_ANSWER = SamplingParams(max_tokens=0)


def _checked_prompt(column: bytes, config: CoreConfig, max_len: int, *, num_answer_tokens: int) -> "array[int]":
    token_ids = array("i")
    if len(column) % token_ids.itemsize:
        raise RequestError(f"The prompt's token ids are not int32: they have {len(column)} bytes.", param="prompt")
    token_ids.frombytes(column)
    if not token_ids:
        raise RequestError("The prompt has no tokens.", param="prompt")
    if len(token_ids) + num_answer_tokens > max_len:
        raise PromptTooLongError(num_prompt_tokens=len(token_ids), max_model_len=max_len)
    _check_in_vocabulary("prompt", token_ids, config)
    return token_ids


def _check_in_vocabulary(param: str, token_ids: "array[int] | frozenset[int]", config: CoreConfig) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < config.vocab_size:
            raise RequestError(
                f"Token id {token_id} is not in the vocabulary of {config.vocab_size} tokens.", param=param
            )
