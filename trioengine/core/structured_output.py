"""Answers that keep a form: which tokens may be sampled next, by a grammar for each request.

`StructuredOutputs` compiles grammars in threads and fills a step's masks; a `Grammar` follows one sequence. The
compiler of grammars (llguidance) and its view of the vocabulary are loaded by the first request that has one. This
module does not know how requests are scheduled.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.config.engine import ReasoningParser
from trioengine.core.executor import TokenMasks
from trioengine.core.structured.compiler import CompilerThreads, Job
from trioengine.core.structured.reasoning import MARKERS, MAX_TAIL_TOKENS, Reasoning, reasoning_ended_in_prompt
from trioengine.errors import EngineGenerateError, RequestError, TrioEngineError
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.structured import PARAM, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from trioengine.core.structured.matchers import MatcherCompiler

MAX_CACHED_GRAMMARS = 128
COMPILE_TIME_LIMIT_S = 10.0
NUM_BUFFERS = 2
"""Masks of one step may be in use while those of the next are filled."""


@attrs.frozen
class MaskEntry:
    """A sequence that samples in a step."""

    index: int
    """In `StepPlan.scheduled`."""
    grammar: "Grammar"
    drafts: Sequence[int] = ()
    """No more than the grammar's `num_allowed` of them."""


@attrs.frozen
class _Vocabulary:
    """What the first structured request loads."""

    tokenizer: Tokenizer
    compiler: "MatcherCompiler"


@attrs.frozen
class _FreeForm:
    """What is compiled for an answer without a form, whose reasoning alone has a limit."""


_Compiled: TypeAlias = "LLMatcher | _FreeForm"
_Job: TypeAlias = "Job[StructuredOutputsParams | None, _Compiled]"


class Grammar:
    """The form of one request's answer and the limit of its reasoning, and how far the answer is in it.

    Nothing but `is_ready` and `error` may be used before it is ready. It is ready in the same call of
    `StructuredOutputs.start` or `poll` that says so, never in between.
    """

    __slots__ = (
        "_added_ends",
        "_all_ends",
        "_forced",
        "_is_ready",
        "_matcher",
        "_own_ends",
        "_prompt_tail",
        "_reasoning",
        "_reasoning_ended",
        "_removed_ends",
        "_thinking_token_budget",
        "error",
        "is_complete",
    )

    def __init__(
        self,
        prompt_tail: Sequence[int],
        end_token_ids: Sequence[int],
        reasoning_ended: bool | None,
        thinking_token_budget: int | None,
    ) -> None:
        """Wait for a matcher. Made by `StructuredOutputs.start` only."""
        self.error: TrioEngineError | None = None
        """Why the request must end: the grammar did not compile, or it went past a limit later."""
        self.is_complete = False
        """Whether the answer is whole and nothing can follow. Without a token for it, so that it also ends where the
        end-of-text token is ignored or must not come yet."""
        self._is_ready = False
        self._matcher: LLMatcher | None = None
        """None where there is no form, and before it is ready."""
        self._prompt_tail = prompt_tail
        self._own_ends = frozenset(end_token_ids)
        self._all_ends = self._own_ends
        self._removed_ends: tuple[int, ...] = ()
        self._added_ends: tuple[int, ...] = ()
        self._reasoning_ended = reasoning_ended
        self._thinking_token_budget = thinking_token_budget
        self._reasoning: Reasoning | None = None
        """Set while the model reasons, which no form binds."""
        self._forced: list[int] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the request may run."""
        return self._is_ready

    @property
    def is_free(self) -> bool:
        """Whether it is ready and binds nothing, now and later."""
        return self._is_ready and self._matcher is None and self._reasoning is None

    def forced_tokens(self, max_tokens: int) -> list[int]:
        """The tokens that must come next, at most so many: as drafts they are certain to be accepted, and no model is
        needed to find them."""
        if self.is_complete or max_tokens <= 0:
            return []
        return self._all_forced()[:max_tokens]

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the form allows next."""
        if not self._is_ready or self.is_complete or not drafts:
            return 0
        musts = self._reasoning.musts(drafts) if self._reasoning is not None else []
        for index, (must, draft) in enumerate(zip(musts, drafts, strict=False)):
            if must not in (None, draft):
                return index
        rest = list(drafts[len(musts) :])
        if not rest or self._matcher is None:
            return len(drafts)
        return len(musts) + self._matcher.validate_tokens(rest)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on by the tokens that the answer got.

        Returns how many of them belong to it. Those behind came after its end, or do not fit, and must be dropped.
        `is_complete` and `error` may be set afterwards.
        """
        self._forced = None
        for index, token_id in enumerate(token_ids):
            if self.is_complete or self.error is not None:
                return index
            if self._reasoning is not None:
                if self._reasoning.must() not in (None, token_id):
                    self.error = EngineGenerateError("Other rules of this request forbid the end of its reasoning.")
                    return index
                if self._reasoning.feed(token_id):
                    self._reasoning = None
            elif self._matcher is None:
                pass
            elif token_id in self._all_ends and self._matcher.is_accepting():
                self.is_complete = True
                if token_id not in self._own_ends:
                    return index
            elif not self._consume(token_id):
                return index
        return len(token_ids)

    def _consume(self, token_id: int) -> bool:
        """Go on by one token; whether it fits."""
        assert self._matcher is not None
        fits = self._matcher.consume_token(token_id)
        if fits:
            self.is_complete = self._matcher.is_stopped()
        else:
            # Masks forbid what does not fit, so a limit was passed, or other rules of the request left nothing else.
            self.error = EngineGenerateError(
                f"Token {token_id} does not fit the form that {PARAM} asks for: {self._words()}."
            )
        self._check_limits()
        return fits

    def _check_limits(self) -> None:
        assert self._matcher is not None
        if self.error is None and self._matcher.is_error():
            self.is_complete = False
            self.error = EngineGenerateError(f"The grammar of {PARAM} became too complex: {self._words()}.")

    def _words(self) -> str:
        """The compiler's words for what went wrong."""
        assert self._matcher is not None
        return next(iter(self._matcher.get_error().splitlines()), "")[:200].rstrip(".")

    def _all_forced(self) -> list[int]:
        if self._forced is None:
            if self._reasoning is not None:
                self._forced = self._reasoning.forced()
            else:
                self._forced = self._matcher.compute_ff_tokens() if self._matcher is not None else []
        return self._forced

    def _begin(self, compiled: _Compiled, vocabulary: _Vocabulary, parser: ReasoningParser | None) -> None:
        ends = frozenset(vocabulary.compiler.end_token_ids)
        self._all_ends = self._own_ends | ends
        self._removed_ends = tuple(ends - self._own_ends)
        self._added_ends = tuple(self._own_ends - ends)
        if parser is not None:
            markers = MARKERS[parser]
            ended = self._reasoning_ended
            if ended is None:
                ended = reasoning_ended_in_prompt(markers, self._prompt_tail, vocabulary.tokenizer)
            if not ended:
                self._reasoning = Reasoning(markers, vocabulary.tokenizer, self._thinking_token_budget)
        self._prompt_tail = ()
        self._matcher = None if isinstance(compiled, _FreeForm) else compiled.deep_copy()
        self._is_ready = True

    def _num_rows(self, drafts: Sequence[int]) -> int:
        """How many rows of masks it needs: none while all of them are free."""
        num_rows = 1 + len(drafts)
        musts = self._reasoning.musts(drafts) if self._reasoning is not None else []
        is_free = musts.count(None) == len(musts) and (self._matcher is None or len(musts) == num_rows)
        return 0 if is_free else num_rows

    def _fill(self, rows: NDArray[np.uint32], address: int, drafts: Sequence[int], everything: int) -> None:
        """Fill one row for the next token and one for what follows each draft.

        Args:
            rows: [1 + len(drafts), words].
            address: of `rows`.
            drafts: no more than are allowed.
            everything: the last word of a row that allows all tokens.
        """
        matcher = self._matcher
        musts = self._reasoning.musts(drafts) if self._reasoning is not None else []
        for row, must in zip(rows, musts, strict=False):
            if must is None:
                _allow_all(row, everything)
            else:
                _allow_one(row, must)
        if matcher is None:
            _allow_all(rows[len(musts) :], everything)
            return
        num_consumed = 0
        forced = self._all_forced() if drafts and not musts else []
        for position in range(len(musts), len(rows)):
            row = rows[position]
            if num_consumed and matcher.is_stopped():
                # The drafts complete the answer. `accept` drops what follows, and other rules may forbid an end here.
                _allow_all(rows[position:], everything)
                break
            if position < min(len(forced), len(drafts)) and list(drafts[: position + 1]) == forced[: position + 1]:
                _allow_one(row, forced[position])
            else:
                matcher.unsafe_compute_mask_ptr(address + position * rows.strides[0], rows.strides[0])
                if self._removed_ends or self._added_ends:
                    self._set_ends(row)
            if position < len(drafts):
                if matcher.try_consume_tokens([drafts[position]]) != 1:
                    # Not allowed, so this row refuses it and what follows is never sampled.
                    rows[position + 1 :] = row
                    break
                num_consumed += 1
        if num_consumed:
            matcher.rollback(num_consumed)
        self._check_limits()

    def _set_ends(self, row: NDArray[np.uint32]) -> None:
        """Allow this request's own end tokens where the text may end, and no others."""
        assert self._matcher is not None
        if not self._matcher.is_accepting():
            return
        before = row.copy()
        for token_id in self._removed_ends:
            row[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        for token_id in self._added_ends:
            row[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        if not row.any():
            # It can only end, which the matcher did not know at the last token. `accept` drops the token.
            row[:] = before


def _allow_all(rows: NDArray[np.uint32], last_word: int) -> None:
    """Any token, in one row or in several."""
    rows[:] = 0xFFFFFFFF
    rows[..., -1] = last_word


def _allow_one(row: NDArray[np.uint32], token_id: int) -> None:
    row[:] = 0
    row[token_id >> 5] = 1 << (token_id & 31)


class StructuredOutputs:
    """All grammars of one core. Cheap until the first is asked for."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        *,
        vocab_size: int,
        reasoning_parser: ReasoningParser | None = None,
        wake: Callable[[], None] = lambda: None,
        compile_time_limit_s: float = COMPILE_TIME_LIMIT_S,
    ) -> None:
        """Load nothing yet.

        Args:
            load_tokenizer: called once, in a thread, when the first grammar is compiled.
            vocab_size: how many tokens can be sampled.
            reasoning_parser: how the model marks its reasoning, which no grammar binds.
            wake: called by a thread when `poll` has something to return.
            compile_time_limit_s: for each grammar.
        """
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._reasoning_parser = reasoning_parser
        self._vocabulary: _Vocabulary | None = None
        self._threads = CompilerThreads[StructuredOutputsParams | None, "_Compiled"](
            self._compile, prepare=self._load, wake=wake, time_limit_s=compile_time_limit_s
        )
        self._cache: OrderedDict[StructuredOutputsParams | None, _Compiled] = OrderedDict()
        self._waiting: dict[StructuredOutputsParams | None, tuple[_Job, dict[Grammar, None]]] = {}
        self._forms: dict[Grammar, StructuredOutputsParams | None] = {}  # Of those that wait.
        self._buffers: deque[NDArray[np.int32]] = deque()
        self._num_words = -(-vocab_size // 32)
        self._last_word = 0xFFFFFFFF >> (-vocab_size % 32)

    def start(
        self,
        params: StructuredOutputsParams | None,
        prompt_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        reasoning_ended: bool | None = None,
        thinking_token_budget: int | None = None,
    ) -> Grammar:
        """Return the grammar of a new request; it is ready at once when another had the same form. Never waits.

        Args:
            params: the form; None is any.
            prompt_token_ids: the prompt, of which the end says whether the model's reasoning is over.
            end_token_ids: the tokens that end this request's answer; none where they are ignored.
            reasoning_ended: says so instead of the prompt.
            thinking_token_budget: how many tokens the model may reason for; None is no limit.

        Raises:
            RequestError: the form cannot be kept, as far as is known without compiling it, or the budget, where nothing
                says what reasoning is.
            UnavailableError: too many grammars take too long to compile.
        """
        if params is not None:
            params.validate()
        if thinking_token_budget is not None and self._reasoning_parser is None:
            raise RequestError(
                "thinking_token_budget needs to know where the model's reasoning ends: start the engine with a "
                "reasoning_parser.",
                param="thinking_token_budget",
            )
        prompt_tail = tuple(prompt_token_ids[-MAX_TAIL_TOKENS:])
        grammar = Grammar(prompt_tail, end_token_ids, reasoning_ended, thinking_token_budget)
        compiled = self._cache.get(params)
        if compiled is not None:
            self._cache.move_to_end(params)
            self._begin(grammar, compiled)
            return grammar
        if params not in self._waiting:
            self._waiting[params] = (self._threads.submit(params), {})
        self._waiting[params][1][grammar] = None
        self._forms[grammar] = params
        return grammar

    def poll(self) -> Sequence[Grammar]:
        """The grammars that have become ready, or have failed, since the last call."""
        ended: list[Grammar] = []
        for job in self._threads.take_ended():
            if job.key not in self._waiting or self._waiting[job.key][0] is not job:
                continue
            _, grammars = self._waiting.pop(job.key)
            if job.compiled is not None:
                self._cache[job.key] = job.compiled
                if len(self._cache) > MAX_CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
            for grammar in grammars:
                if job.compiled is not None:
                    self._begin(grammar, job.compiled)
                grammar.error = job.error
                del self._forms[grammar]
            ended += grammars
        return ended

    def abandon(self, grammar: Grammar) -> None:
        """Forget a grammar whose request has ended before it was ready."""
        if grammar not in self._forms:
            return
        params = self._forms.pop(grammar)
        job, grammars = self._waiting[params]
        del grammars[grammar]
        if not grammars:
            job.is_wanted = False
            del self._waiting[params]

    def masks(self, entries: Sequence[MaskEntry]) -> TokenMasks | None:
        """Return what may be sampled by these sequences in the next step; None where all is free.

        Valid until the call after the next. Afterwards `error` is set for grammars that went past a limit; their rows
        allow only the end of the text, and the others' are unaffected.
        """
        counts = [entry.grammar._num_rows(entry.drafts) for entry in entries]  # pyright: ignore[reportPrivateUsage]
        num_rows = sum(counts)
        if not num_rows:
            return None
        bits = self._buffer(num_rows)
        rows = bits.view(np.uint32)
        address = bits.ctypes.data
        row_bytes = bits.strides[0]
        first_rows: dict[int, int] = {}
        first = 0
        for entry, count in zip(entries, counts, strict=True):
            if count:
                first_rows[entry.index] = first
                entry.grammar._fill(  # pyright: ignore[reportPrivateUsage]
                    rows[first : first + count], address + first * row_bytes, entry.drafts, self._last_word
                )
                first += count
        return TokenMasks(first_rows, bits)

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        self._threads.close()

    def _load(self) -> None:
        """In a thread: what is needed to compile anything."""
        if self._vocabulary is None:
            from trioengine.core.structured.matchers import MatcherCompiler

            tokenizer = self._load_tokenizer()
            self._vocabulary = _Vocabulary(tokenizer, MatcherCompiler(tokenizer, self._vocab_size))

    def _compile(self, params: StructuredOutputsParams | None) -> _Compiled:
        """In a thread."""
        assert self._vocabulary is not None
        if params is None:
            return _FreeForm()
        return self._vocabulary.compiler.compile(params)

    def _begin(self, grammar: Grammar, compiled: _Compiled) -> None:
        assert self._vocabulary is not None
        grammar._begin(compiled, self._vocabulary, self._reasoning_parser)  # pyright: ignore[reportPrivateUsage]

    def _buffer(self, num_rows: int) -> NDArray[np.int32]:
        if len(self._buffers) < NUM_BUFFERS or len(self._buffers[0]) < num_rows:
            buffer = np.zeros((max(num_rows, 8), self._num_words), np.int32)
            if len(self._buffers) == NUM_BUFFERS:
                self._buffers.popleft()
        else:
            buffer = self._buffers.popleft()
        self._buffers.append(buffer)
        return buffer[:num_rows]
