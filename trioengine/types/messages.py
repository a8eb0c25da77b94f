"""The wire protocol between front ends and engine cores.

Front end to core: `EngineCoreRequest`, `EncodeCoreRequest`, `AbortRequests`, `CallRequest`, `StartWave`, `Stop`. Core
to front end: `Starting`, `Ready`, `StepOutput`, `Reply`, `EngineDead`. `types.codec` turns each to bytes and back; a
snapshot test holds the format.

A *slot* is a small integer that the front end gives a request, so that routing an output is one list lookup. It stays
reserved until the core's `Finished` for it arrives; every request gets exactly one `Finished`.
"""

import enum
from array import array
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Generic, TypeAlias, TypeVar

import attrs

from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingFacts, PoolingParams
from trioengine.types.request import KVHints

R_co = TypeVar("R_co", covariant=True)


def pack_int32(values: Sequence[int]) -> bytes:
    """Integers as a column of a message: int32 in the machine's byte order (both ends share a machine or an order)."""
    return array("i", values).tobytes()


def unpack_int32(column: bytes) -> memoryview:
    """A column of a message as a sequence of integers, without a copy. Its length is a multiple of four."""
    return memoryview(column).cast("i")


# Errors as data


@attrs.frozen
class ErrorData:
    """An exception on its way to another process. `codec.raise_error` raises it as the same class."""

    name: str
    """The class's name in `trioengine.errors`; another class arrives as `EngineGenerateError`."""
    fields: dict[str, str | int | float | None]


# Front end -> core


@attrs.frozen
class EngineCoreRequest:
    """Start one sequence."""

    slot: int
    request_id: str
    """Unique among all requests of this front end, ever."""
    prompt_token_ids: bytes
    """int32 column; at least one."""
    sampling: SamplingParams
    """Checked. `max_tokens` is set and fits the context."""
    seed: int
    """Unsigned 64 bits: the request's own, or drawn."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end tokens; empty with `ignore_eos`."""
    priority: int = 0
    """Lower values come first, where the core's policy is priority."""
    cache_salt: str | None = None
    """Part of the hash of the prompt's first block."""
    reasoning_ended: bool | None = None
    """As `GenerateRequest.reasoning_ended`."""
    lora: str | None = None
    """As `GenerateRequest.lora`."""
    queue_timeout_s: float | None = None
    """Seconds from its arrival within which it must have been scheduled for the first time. Else it is dropped, with
    `DeadlineExceededError`. By the core's own clock."""
    kv_hints: KVHints | None = None
    """As `GenerateRequest.kv_hints`."""


@attrs.frozen
class EncodeCoreRequest:
    """Compute vectors of one prompt."""

    slot: int
    request_id: str
    """As `EngineCoreRequest.request_id`."""
    prompt_token_ids: bytes
    """int32 column; at least one."""
    pooling: PoolingParams
    """Complete: nothing is left to the model."""
    second_text_start: int | None = None
    """The first token of the second text of a pair, where the model tells the two apart."""
    priority: int = 0
    """As `EngineCoreRequest.priority`."""
    cache_salt: str | None = None
    """As `EngineCoreRequest.cache_salt`."""
    lora: str | None = None
    """As `EngineCoreRequest.lora`."""
    queue_timeout_s: float | None = None
    """As `EngineCoreRequest.queue_timeout_s`."""


@attrs.frozen
class AbortRequests:
    """Forget the requests in these slots. Unknown or finished ones are ignored."""

    slots: tuple[int, ...]


class Call(Generic[R_co]):
    """An operation on the core: one frozen attrs class each, one handler each (`core.operations`).

    `R_co` is the type of the reply: `await engine.call(GetLoad())` is a `CoreLoad`. With several cores each runs it,
    and `combine` makes one reply of theirs.
    """

    @classmethod
    def combine(cls, replies: Sequence[Any]) -> Any:
        """One reply from those of all cores, in the order of their ranks; there is at least one."""
        return replies[0]


@attrs.frozen
class CoreLoad:
    """What a core has to do at this moment."""

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int


@attrs.frozen
class GetLoad(Call[CoreLoad]):
    """Count the core's requests and free KV cache blocks."""

    @classmethod
    def combine(cls, replies: Sequence[CoreLoad]) -> CoreLoad:
        """The sums."""
        return CoreLoad(*(sum(column) for column in zip(*map(attrs.astuple, replies), strict=True)))


@attrs.frozen
class CheckIntegrity(Call[None]):
    """Check the core's books: every block is free or held exactly as often as counted. Raises where it is not."""


@attrs.frozen
class BlockStored:
    """A block's content can be found from now on, in the KV cache or the offload store."""

    group: int
    """The layers whose keys and values it holds: an index of the model's KV cache groups."""
    block_hash: bytes
    """Depends on the tokens of the block and all before it, the cache salt and the LoRA adapter."""
    parent_hash: bytes
    """Of the block before it; of a prompt's first block that of salt and adapter."""
    token_ids: bytes
    """int32 column: the block's tokens."""


@attrs.frozen
class BlockRemoved:
    """A block's content can no longer be found, neither in the KV cache nor in the offload store."""

    group: int
    removed_hash: bytes


@attrs.frozen
class AllBlocksCleared:
    """No block can be found any more."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@attrs.frozen
class KVCacheEvents:
    """What happened to cached blocks, in order."""

    last: int
    """The number of the newest event there is; the `after` to ask with next. Events count from 1."""
    num_lost: int
    """Events after `after` that are no longer kept. The receiver's picture is wrong when this is not 0."""
    events: tuple[KVCacheEvent, ...]
    """The newest ones, up to `last`."""


@attrs.frozen
class GetKVCacheEvents(Call[KVCacheEvents]):
    """The events after the one of this number; 0 is all that are kept. None where they are not recorded."""

    after: int
    data_parallel_rank: int | None = None
    """Of which core; unset is the first. Each counts its own."""


@attrs.frozen
class ResetPrefixCache(Call[bool]):
    """Forget cached prefixes. Replies False, and forgets nothing, while requests hold blocks."""

    @classmethod
    def combine(cls, replies: Sequence[bool]) -> bool:
        """Whether all have."""
        return all(replies)


@attrs.frozen
class ResetMMCache(Call[None]):
    """Forget what was kept of images and sounds. No model of this engine takes any, so there is nothing to forget."""


class PauseMode(enum.StrEnum):
    """What becomes of the requests that a pause finds."""

    ABORT = "abort"
    """They end at once."""
    WAIT = "wait"
    """They go on to their ends."""
    KEEP = "keep"
    """They rest, and go on afterwards."""


@attrs.frozen
class PauseGeneration(Call[None]):
    """Compute nothing for new requests, which wait, until `ResumeGeneration`.

    The reply comes when nothing is computed any more: with `WAIT`, when all requests that were there have ended. It
    comes at once where the pause is resumed before.
    """

    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = True
    """Forget what was computed, also for requests that are kept; for new weights."""


@attrs.frozen
class ResumeGeneration(Call[None]):
    """End a pause."""


@attrs.frozen
class IsPaused(Call[bool]):
    """Whether requests wait for the end of a pause or a sleep."""

    @classmethod
    def combine(cls, replies: Sequence[bool]) -> bool:
        """Whether any do."""
        return any(replies)


@attrs.frozen
class Sleep(Call[None]):
    """Pause, then give memory back until `WakeUp`. The reply comes when that is done."""

    level: int = 1
    """1 gives back the KV cache's memory, 2 that of the weights too."""
    mode: PauseMode = PauseMode.ABORT


@attrs.frozen
class WakeUp(Call[None]):
    """Take memory again. When nothing sleeps any more, generation goes on."""

    tags: tuple[str, ...] = ()
    """"weights" and "kv_cache"; none is both."""


@attrs.frozen
class IsSleeping(Call[bool]):
    """Whether some memory is given back."""

    @classmethod
    def combine(cls, replies: Sequence[bool]) -> bool:
        """Whether any has."""
        return any(replies)


@attrs.frozen
class CoreStats:
    """How a core does, and what it has done since its start."""

    running: int
    waiting: int
    kv_cache_usage: float
    """0 to 1: the part of the KV cache that running requests hold."""
    num_steps: int
    num_preemptions: int
    num_prefix_cache_queries: int
    """Tokens that were looked for in the prefix cache."""
    num_prefix_cache_hits: int
    """Tokens that were found there."""
    num_evicted_blocks: int
    """Cached blocks that were used for something else."""
    num_offloaded_blocks: int
    """Blocks that were copied into the offload store."""
    num_loaded_blocks: int
    """Blocks that were copied back."""
    num_drafts: int
    """Times that a request had drafts in a step. Those of grammars do not count."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    """Of the accepted ones, how many were first, second, and so on."""


@attrs.frozen
class GetStats(Call[CoreStats]):
    """Count what the core does."""

    @classmethod
    def combine(cls, replies: Sequence[CoreStats]) -> CoreStats:
        """The sums, and the mean usage."""
        sums: dict[str, Any] = {
            field.name: sum(getattr(reply, field.name) for reply in replies)
            for field in attrs.fields(CoreStats)
            if field.name != "num_accepted_tokens_per_pos"
        }
        sums["kv_cache_usage"] /= len(replies)
        columns = zip_longest(*(reply.num_accepted_tokens_per_pos for reply in replies), fillvalue=0)
        return CoreStats(**sums, num_accepted_tokens_per_pos=tuple(sum(column) for column in columns))


@attrs.frozen
class AddLoRA(Call[None]):
    """Read an adapter from a folder of the core's machine (PEFT's format), for requests that name it.

    Where there are as many as fit, the one is forgotten that was not used for longest.
    """

    name: str
    path: str


@attrs.frozen
class RemoveLoRA(Call[None]):
    """Refuse further requests of an adapter. Those that are there go on to their ends."""

    name: str


@attrs.frozen
class LoRAInfo:
    """An adapter that requests may name."""

    name: str
    path: str
    is_pinned: bool


@attrs.frozen
class ListLoRAs(Call[tuple[LoRAInfo, ...]]):
    """The adapters that requests may name."""

    @classmethod
    def combine(cls, replies: Sequence[Sequence[LoRAInfo]]) -> tuple[LoRAInfo, ...]:
        """Those that all cores have: a request goes to any of them."""
        first, *others = replies
        names = [{info.name for info in infos} for infos in others]
        return tuple(info for info in first if all(info.name in each for each in names))


@attrs.frozen
class PinLoRA(Call[None]):
    """Keep an adapter in memory and in its slot, however many others come."""

    name: str


# Operations on the worker's side


@attrs.frozen
class StartProfile(Call[None]):
    """Record what the core computes until `StopProfile`."""

    prefix: str | None = None
    """The file's name begins with it: letters, digits, `-`, `_` and `.` only."""


@attrs.frozen
class StopProfile(Call[str]):
    """End the record and write it. Replies with the file's path on the core's machine: a Chrome trace."""


@attrs.frozen
class CollectiveRPC(Call[tuple[str, ...]]):
    """Run a method of every worker that is marked for it (`worker.remote.collective_rpc`).

    Replies with each's result as JSON, in the order of the ranks.
    """

    method: str
    arguments: str = "{}"
    """Keyword arguments: a JSON object."""

    @classmethod
    def combine(cls, replies: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """All workers of all cores."""
        return tuple(result for reply in replies for result in reply)


@attrs.frozen
class WeightTensor:
    """A tensor of new weights, named and shaped as in the checkpoint that was loaded."""

    name: str
    dtype: str
    """"float32", "float16" or "bfloat16"."""
    shape: tuple[int, ...]
    data: bytes = b""
    """The values, row after row, little-endian; empty where they come another way."""


@attrs.frozen
class InitWeightTransfer(Call[None]):
    """Get ready for new weights: they come in messages ("message"), or lie in safetensors files on the core's machine
    ("file"). Generation goes on with the old ones.
    """

    method: str = "message"


@attrs.frozen
class UpdateWeights(Call[None]):
    """Take some new weights. Those that are not sent stay. They count from `FinishWeightUpdate` on."""

    tensors: tuple[WeightTensor, ...] = ()
    path: str | None = None
    """With "file": a safetensors file."""


@attrs.frozen
class FinishWeightUpdate(Call[str]):
    """Compute with the new weights from the next step on, and forget cached prefixes. Replies with the new
    `weight_version`.

    Requests that run go on with the new weights and their keys and values from before; pause first where that is wrong.
    """

    weight_version: str | None = None
    """None counts up."""


@attrs.frozen
class CallRequest:
    """Run an operation; a `Reply` with the same `call_id` follows."""

    call_id: int
    call: Call[object]


@attrs.frozen
class Stop:
    """End the core process. What is unfinished is dropped without an answer."""


@attrs.frozen
class StartWave:
    """Take part in the collective steps of all ranks, with empty ones where there is no work here. It goes to every
    rank behind each request, the request's own rank included: `core.lockstep` says why.
    """


# Core -> front end


@attrs.frozen
class Starting:
    """The core is loading."""

    stage: str
    fraction: float
    """0 to 1, of this stage."""


@attrs.frozen
class ModelFacts:
    """What a front end must know about the model that the core runs."""

    max_model_len: int
    """The most tokens of prompt and answer together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int = -1
    """The most log probabilities for each token that a request may ask for; -1 is no limit."""
    can_generate: bool = True
    """Whether it generates text."""
    pooling: PoolingFacts | None = None
    """The vectors that it gives; None where it gives none."""


@attrs.frozen
class Ready:
    """The core takes requests."""

    model: ModelFacts
    num_blocks: int
    block_size: int
    reasons: dict[str, str]
    """Derived setting -> its value and why."""
    needs_lockstep: bool = False
    """Whether this core computes in step with those of other ranks, so that `StartWave` must wake the idle ones."""


@attrs.frozen
class Finished:
    """The last word about a slot."""

    slot: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The token of `stop_token_ids` that ended it."""
    ends_with_text: bool = False
    """With `STOP`: no token ended it, for nothing could follow the last one, which is text like those before it."""
    error: ErrorData | None = None
    """Why this one request failed. Tokens before it are valid."""


@attrs.frozen
class LogprobColumns:
    """Log probabilities of tokens, in columns: an entry for each token at whose place they were asked for.

    Entries of one slot are in the order of its tokens. An entry has `counts[i]` pairs of token id and log probability:
    the chosen token's first, then the most likely ones' in their order (so rank i is theirs, except where they equal),
    or those of `SamplingParams.logprob_token_ids`.
    """

    slots: bytes
    """int32, one per entry."""
    counts: bytes
    """int32, one per entry, at least 1."""
    ranks: bytes
    """int32, one per entry: the chosen token's rank."""
    token_ids: bytes
    """int32, one per pair."""
    logprobs: bytes
    """float32, one per pair."""


@attrs.frozen
class PooledOutput:
    """Vectors of prompts, in columns: an entry for each request, of one row or of one for each token."""

    slots: bytes
    """int32, one per entry."""
    num_rows: bytes
    """int32, one per entry; -1 is a vector that is no row of a table."""
    widths: bytes
    """int32, one per entry: numbers in a row."""
    values: bytes
    """float32, entry after entry, row after row."""


@attrs.frozen
class SchedulerStats:
    """How a core does after a step. Counts are since its start."""

    running: int
    waiting: int
    kv_cache_usage: float
    """0 to 1."""
    num_steps: int
    num_preemptions: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_draft_tokens: int
    num_accepted_tokens: int


@attrs.frozen
class StepOutput:
    """What one or more steps generated for one front end, in columns."""

    sequence: int
    """Counts this front end's `StepOutput`s from 0; a gap means that one was lost."""
    step: int
    timestamp_s: float
    """The core's monotonic clock when the step ended."""
    slots: bytes = b""
    """int32: a row for each sequence with new tokens."""
    tokens: bytes = b""
    """int32: the rows' tokens, one row after another."""
    counts: bytes = b""
    """int32: tokens of each row; empty when every row has one."""
    finished: tuple[Finished, ...] = ()
    logprobs: LogprobColumns | None = None
    """Of the tokens of those rows whose requests asked for them: an entry per token."""
    prompt_logprobs: LogprobColumns | None = None
    """Of prompts, from their second token on, in parts as they are computed. All parts come before or with the first
    token of the answer; they may come with no row."""
    cached_tokens: bytes = b""
    """int32 pairs: a slot, and how many tokens of its prompt were found in the prefix cache. Comes with or before the
    slot's first row, once; absent where it is 0."""
    pooled: PooledOutput | None = None
    """Of `EncodeCoreRequest`s. Each comes once, with or before the slot's `Finished`."""
    scheduled: bytes = b""
    """int32 pairs: a slot, and the microseconds that its request waited (at most 2^31 - 1). With or before the slot's
    first row, once; not for those that were never scheduled."""
    preempted: bytes = b""
    """int32: a slot for each time that its request lost its blocks."""
    stats: SchedulerStats | None = None
    """At the end of the newest step in this message. May come with nothing else."""
    weight_version: str | None = None
    """In the first message after it has changed."""


@attrs.frozen
class Reply:
    """The answer to a `CallRequest`."""

    call_id: int
    value: bytes = b""
    """The reply, encoded by `codec.encode_reply` as the operation's type says."""
    error: ErrorData | None = None


@attrs.frozen
class EngineDead:
    """The core's last message: why it ends."""

    error: ErrorData


ToCore: TypeAlias = EngineCoreRequest | EncodeCoreRequest | AbortRequests | CallRequest | Stop | StartWave
FromCore: TypeAlias = Starting | Ready | StepOutput | Reply | EngineDead

CALLS: tuple[type[Call[object]], ...] = (
    GetLoad,
    CheckIntegrity,
    GetKVCacheEvents,
    ResetPrefixCache,
    PauseGeneration,
    ResumeGeneration,
    IsPaused,
    Sleep,
    WakeUp,
    IsSleeping,
    GetStats,
    AddLoRA,
    RemoveLoRA,
    ListLoRAs,
    PinLoRA,
    ResetMMCache,
    StartProfile,
    StopProfile,
    CollectiveRPC,
    InitWeightTransfer,
    UpdateWeights,
    FinishWeightUpdate,
)
"""Every operation. The place in this tuple is its tag on the wire."""
