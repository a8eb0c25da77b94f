# pyright: basic
"""Samples a batch of rows of logits in one call of the native library.

The tokens are those of `trioengine_kernels.sampling` (see src/variants/sampling.c for why). This module checks sizes
and token ids, as C trusts them; it does not know sequences or where the logits come from.
"""

import ctypes
import enum

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine_kernels.native.library import Library, ThreadPool

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of probability 0, which JSON cannot carry."""
MAX_VOCAB_SIZE = 2**19


class SampledStatus(enum.IntEnum):
    """Whether a row could be sampled. Values are those of `TeSampledStatus` in src/sampling.h."""

    SAMPLED = 0
    IS_NAN = 1
    """The row has NaN; the token is the place of the first."""
    NOTHING_ALLOWED = 2
    """Rules or logits forbid every token; the token means nothing."""


@attrs.frozen(eq=False)
class ChangedLogits:
    """Logits that take the place of some rows' when their tokens are chosen."""

    rows: NDArray[np.int32]
    """[num_rows]: which of `logits`; below 0 is none."""
    logits: NDArray[np.float32]
    """[num_changed, vocab_size]."""


@attrs.frozen(eq=False)
class Masks:
    """Which tokens rows may choose."""

    rows: NDArray[np.int32]
    """[num_rows]: which of `bits`; below 0 is none, so all tokens."""
    bits: NDArray[np.int32]
    """[num_masks, at least ceil(vocab_size / 32)]: token t may be chosen where bit `t % 32` of word `t // 32` is
    set."""


@attrs.frozen(eq=False)
class RaggedIds:
    """Token ids for each row: those of row r are `token_ids[starts[r] : starts[r + 1]]`."""

    starts: NDArray[np.int64]
    """[num_rows + 1], from 0 to the number of ids."""
    token_ids: NDArray[np.int32]


@attrs.frozen(eq=False)
class LogitBias:
    """What is added to logits."""

    ids: RaggedIds
    """No id twice in a row."""
    values: NDArray[np.float32]
    """One for each id."""


@attrs.frozen(eq=False)
class Penalties:
    """Makes tokens that were there already less likely; `trioengine_kernels.sampling.penalize` has the formulas."""

    seen: RaggedIds
    """Prompt, then output. Rows without penalties leave it empty, which costs nothing."""
    num_prompt_tokens: NDArray[np.int64]
    """[num_rows], and so on."""
    repetition: NDArray[np.float32]
    """1 is off."""
    presence: NDArray[np.float32]
    """0 is off."""
    frequency: NDArray[np.float32]
    """0 is off."""


@attrs.frozen(eq=False)
class SamplingArrays:
    """Sampling parameters, one entry for each row of logits. Rules apply in the order of their fields."""

    temperature: NDArray[np.float32]
    """0 takes the largest logit and draws no random number."""
    top_k: NDArray[np.int32]
    """Only the k largest logits and their equals; below 1 is off."""
    top_p: NDArray[np.float32]
    """Only the largest logits until their probabilities, after `top_k` and `min_p`, sum to this, and their equals."""
    min_p: NDArray[np.float32]
    """Only tokens at least this fraction as probable as the most probable one; 0 is off."""
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]
    """The place in its sequence that the drawn token takes."""
    changed: ChangedLogits | None = None
    masks: Masks | None = None
    logit_bias: LogitBias | None = None
    penalties: Penalties | None = None
    forbidden: RaggedIds | None = None
    allowed: RaggedIds | None = None
    """Rows with some may choose these only."""
    forced: NDArray[np.int32] | None = None
    """The token that stands in a row's place already, so that no rule applies and none is chosen; below 0 is none."""
    num_logprobs: NDArray[np.int32] | None = None
    """How many of the most likely tokens' log probabilities; 0 is the chosen token's only, below 0 is none at all."""
    logprobs_are_processed: bool = False
    """Log probabilities are of what is drawn from: after the rules, over the temperature (not where that is 0), without
    tokens that `top_k`, `top_p` and `min_p` leave out. Else, and in forced rows, they are of the logits as they are."""


@attrs.frozen(eq=False)
class TokenLogprobs:
    """Natural logarithms of probabilities, none below `MIN_LOGPROB`.

    What a row did not want, or a row that is NaN, has `MIN_LOGPROB`, rank 0 and token id -1.
    """

    chosen: NDArray[np.float32]
    """[num_rows]: of the chosen token."""
    rank: NDArray[np.int32]
    """[num_rows]: the chosen token's place by probability, from 1; equals share the best place."""
    top: NDArray[np.float32]
    """[num_rows, largest num_logprobs], the most likely first, equals by token id."""
    top_token_ids: NDArray[np.int32]


@attrs.frozen(eq=False)
class SampledTokens:
    """One token for each row."""

    token_ids: NDArray[np.int32]
    status: NDArray[np.uint8]
    """Values of `SampledStatus`."""
    logprobs: TokenLogprobs | None
    """None where no row wants any."""


class _CRaggedIds(ctypes.Structure):
    _fields_ = (("starts", ctypes.c_void_p), ("ids", ctypes.c_void_p))


class _CSampling(ctypes.Structure):
    """`TeSampling` of src/sampling.h, field by field."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),
        ("position", ctypes.c_void_p),
        ("changed", ctypes.c_void_p),
        ("changed_rows", ctypes.c_void_p),
        ("mask_bits", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int64),
        ("mask_rows", ctypes.c_void_p),
        ("bias", _CRaggedIds),
        ("bias_values", ctypes.c_void_p),
        ("seen", _CRaggedIds),
        ("num_prompt_tokens", ctypes.c_void_p),
        ("repetition_penalty", ctypes.c_void_p),
        ("presence_penalty", ctypes.c_void_p),
        ("frequency_penalty", ctypes.c_void_p),
        ("forbidden", _CRaggedIds),
        ("allowed", _CRaggedIds),
        ("forced", ctypes.c_void_p),
        ("num_logprobs", ctypes.c_void_p),
        ("logprobs_are_processed", ctypes.c_int32),
        ("max_top", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("rank", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
        ("top_token_ids", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
    )


class NativeSampler:
    """Samples rows of logits on the threads of a pool, each row as a whole on one of them."""

    def __init__(self, library: Library, pool: ThreadPool) -> None:
        self._pool = pool
        self._sample = library.function("te_sample", None, ctypes.c_void_p, ctypes.c_void_p)
        self._scratch_floats = library.function("te_sampling_scratch_floats", ctypes.c_int64, ctypes.c_int32)
        struct_bytes = library.function("te_sampling_struct_bytes", ctypes.c_int64)()
        assert struct_bytes == ctypes.sizeof(_CSampling), "sampling.h and sampler.py differ"
        self._vocab_size = 0
        self._scratch = np.empty(0, np.float32)
        self._counts = np.empty(0, np.int32)

    def sample(self, logits: NDArray[np.float32], batch: SamplingArrays) -> SampledTokens:
        """Draw one token for each row. The same row gives the same token in any batch, on any number of threads.

        Args:
            logits: [num_rows, vocab_size], float32, tokens consecutive. Not changed. Minus infinity forbids a token.
            batch: the parameters of the rows.

        Raises:
            ValueError: an array has the wrong type or size, or a token id is not in the vocabulary.
        """
        num_rows, vocab_size = _check_logits(logits)
        if vocab_size != self._vocab_size:
            self._vocab_size = vocab_size
            # Pages that no row touches cost nothing.
            self._scratch = np.empty((self._pool.num_threads, self._scratch_floats(vocab_size)), np.float32)
            self._counts = np.zeros((self._pool.num_threads, vocab_size), np.int32)
        call = _CSampling()
        call.logits, call.row_stride = logits.ctypes.data, logits.strides[0] // 4
        call.num_rows, call.vocab_size = num_rows, vocab_size
        call.scratch, call.counts = self._scratch.ctypes.data, self._counts.ctypes.data
        _fill_parameters(call, batch)
        _fill_rules(call, batch)
        result = _outputs(call, batch)
        if num_rows > 0:
            self._sample(self._pool.handle, ctypes.byref(call))
        return result


def _check_logits(logits: NDArray[np.float32]) -> tuple[int, int]:
    is_consecutive = logits.ndim == 2 and (logits.size == 0 or (logits.strides[1] == 4 and logits.strides[0] % 4 == 0))
    if logits.dtype != np.float32 or not is_consecutive:
        raise ValueError("logits must be float32, [num_rows, vocab_size], with consecutive tokens.")
    if not 0 < logits.shape[1] < MAX_VOCAB_SIZE:
        raise ValueError(f"The vocabulary must have 1 to {MAX_VOCAB_SIZE - 1} tokens, not {logits.shape[1]}.")
    return logits.shape


def _fill_parameters(call: _CSampling, batch: SamplingArrays) -> None:
    shape = (call.num_rows,)
    call.temperature = _address(batch.temperature, np.float32, shape, "temperature")
    call.top_k = _address(batch.top_k, np.int32, shape, "top_k")
    call.top_p = _address(batch.top_p, np.float32, shape, "top_p")
    call.min_p = _address(batch.min_p, np.float32, shape, "min_p")
    call.seed = _address(batch.seed, np.uint64, shape, "seed")
    call.position = _address(batch.position, np.int64, shape, "position")


def _fill_rules(call: _CSampling, batch: SamplingArrays) -> None:
    shape = (call.num_rows,)
    if (changed := batch.changed) is not None:
        num_changed = len(changed.logits)
        call.changed = _address(changed.logits, np.float32, (num_changed, call.vocab_size), "changed.logits")
        call.changed_rows = _row_numbers(changed.rows, shape, num_changed, "changed.rows")
    if (masks := batch.masks) is not None:
        num_masks, num_words = masks.bits.shape
        if num_words * 32 < call.vocab_size:
            raise ValueError(f"masks.bits has bits for {num_words * 32} tokens, not for {call.vocab_size}.")
        call.mask_bits = _address(masks.bits, np.int32, (num_masks, num_words), "masks.bits")
        call.mask_stride = num_words
        call.mask_rows = _row_numbers(masks.rows, shape, num_masks, "masks.rows")
    if (bias := batch.logit_bias) is not None:
        _fill_ragged(call, call.bias, bias.ids, "logit_bias")
        call.bias_values = _address(bias.values, np.float32, bias.ids.token_ids.shape, "logit_bias.values")
    if (penalties := batch.penalties) is not None:
        _fill_ragged(call, call.seen, penalties.seen, "penalties")
        call.num_prompt_tokens = _address(penalties.num_prompt_tokens, np.int64, shape, "num_prompt_tokens")
        if np.any((penalties.num_prompt_tokens < 0) | (penalties.num_prompt_tokens > np.diff(penalties.seen.starts))):
            raise ValueError("num_prompt_tokens must be 0 to the number of tokens of the row.")
        call.repetition_penalty = _address(penalties.repetition, np.float32, shape, "repetition")
        call.presence_penalty = _address(penalties.presence, np.float32, shape, "presence")
        call.frequency_penalty = _address(penalties.frequency, np.float32, shape, "frequency")
    if batch.forbidden is not None:
        _fill_ragged(call, call.forbidden, batch.forbidden, "forbidden")
    if batch.allowed is not None:
        _fill_ragged(call, call.allowed, batch.allowed, "allowed")
    if batch.forced is not None:
        call.forced = _row_numbers(batch.forced, shape, call.vocab_size, "forced")


def _row_numbers(numbers: NDArray[np.int32], shape: tuple[int, ...], end: int, name: str) -> int:
    """The address of numbers below `end`."""
    if numbers.max(initial=-1) >= end:
        raise ValueError(f"{name} must be below {end}.")
    return _address(numbers, np.int32, shape, name)


def _fill_ragged(call: _CSampling, target: _CRaggedIds, ragged: RaggedIds, name: str) -> None:
    starts, ids = ragged.starts, ragged.token_ids
    target.starts = _address(starts, np.int64, (call.num_rows + 1,), f"{name}.starts")
    target.ids = _address(ids, np.int32, (len(ids),), f"{name}.token_ids")
    if starts[0] != 0 or starts[-1] != len(ids) or np.any(starts[1:] < starts[:-1]):
        raise ValueError(f"{name}.starts must rise from 0 to the number of ids.")
    # One look finds both ends: a negative number is a large unsigned one.
    if len(ids) and ids.view(np.uint32).max() >= call.vocab_size:
        raise ValueError(f"{name} has a token id that is not in the vocabulary of {call.vocab_size} tokens.")


def _outputs(call: _CSampling, batch: SamplingArrays) -> SampledTokens:
    num_rows = call.num_rows
    logprobs = None
    if batch.num_logprobs is not None:
        call.num_logprobs = _address(batch.num_logprobs, np.int32, (num_rows,), "num_logprobs")
        call.logprobs_are_processed = batch.logprobs_are_processed
        most = max(0, int(batch.num_logprobs.max(initial=0)))
        if most > call.vocab_size:
            raise ValueError(f"num_logprobs must be at most the size of the vocabulary, {call.vocab_size}.")
        logprobs = TokenLogprobs(
            chosen=np.empty(num_rows, np.float32),
            rank=np.empty(num_rows, np.int32),
            top=np.empty((num_rows, most), np.float32),
            top_token_ids=np.empty((num_rows, most), np.int32),
        )
        call.max_top = most
        call.chosen, call.rank = logprobs.chosen.ctypes.data, logprobs.rank.ctypes.data
        call.top, call.top_token_ids = logprobs.top.ctypes.data, logprobs.top_token_ids.ctypes.data
    result = SampledTokens(np.empty(num_rows, np.int32), np.empty(num_rows, np.uint8), logprobs)
    call.token_ids, call.status = result.token_ids.ctypes.data, result.status.ctypes.data
    return result


def _address(array: np.ndarray, dtype: type[np.generic], shape: tuple[int, ...], name: str) -> int:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be {np.dtype(dtype).name} of shape {list(shape)}, without gaps.")
    return array.ctypes.data
