"""Nobody receives another request's token, whatever is aborted, dropped, delayed or interrupted between slices.

The front end under test talks with a core that is a table; messages wait both ways for as long as hypothesis likes.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trioengine.errors import EngineGenerateError, TrioEngineError
from trioengine.frontend.frontend import AddedRequest, Frontend
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.codec import decode, encode, error_to_data
from trioengine.types.messages import (
    AbortRequests,
    EngineCoreRequest,
    Finished,
    LogprobColumns,
    ModelFacts,
    StepOutput,
    pack_int32,
    unpack_int32,
)
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest, TokensPrompt

MAX_REQUESTS = 200
FIRST_WORD = 256
TOKENIZER = FakeTokenizer([f"<{number}>" for number in range(MAX_REQUESTS)])
PROCESSOR = InputProcessor(TOKENIZER, ModelFacts(100, TOKENIZER.vocab_size, ()))
EXTERNAL_IDS = st.sampled_from(["a", "b", "c"])


@attrs.define(eq=False)
class Reader:
    """A request's sink: it accepts its own tokens, and one ending."""

    number: int
    max_tokens: int
    has_logprobs: bool = False
    num_prompt_parts: int = 0
    added: AddedRequest | None = None
    token_ids: list[int] = attrs.field(factory=list[int])
    texts: list[str] = attrs.field(factory=list[str])
    finish_reason: FinishReason | None = None
    error: TrioEngineError | None = None
    has_left: bool = False
    is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        return self.has_left or self.finish_reason is not None or self.error is not None

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        assert not self.is_over
        assert not self.token_ids, "the prompt comes first"
        assert num_cached_tokens in (0, self.number)
        assert all(unpack_int32(entry.token_ids).tolist() == [FIRST_WORD + self.number] for entry in logprobs)
        self.num_prompt_parts += 1

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[LogprobEntry] = (),
        index: int = 0,
    ) -> None:
        del stop_reason, index
        assert not self.is_over
        assert set(token_ids) <= {FIRST_WORD + self.number}
        assert len(logprobs) == (len(token_ids) if self.has_logprobs else 0)
        for place, entry in enumerate(logprobs, start=len(self.token_ids) + 1):
            assert unpack_int32(entry.token_ids).tolist() == [FIRST_WORD + self.number]
            assert entry.rank == place
        self.token_ids.extend(token_ids)
        self.texts.append(text)
        self.finish_reason = finish_reason

    def put_weight_version(self, version: str) -> None:
        assert not self.is_over

    def fail(self, error: TrioEngineError) -> None:
        assert not self.is_over
        self.error = error


def columns(entries: Sequence[tuple[int, int, int]]) -> LogprobColumns:
    """Of slots, ranks and tokens: each with its own log probability alone."""
    return LogprobColumns(
        slots=pack_int32([slot for slot, _, _ in entries]),
        counts=pack_int32([1] * len(entries)),
        ranks=pack_int32([rank for _, rank, _ in entries]),
        token_ids=pack_int32([token for _, _, token in entries]),
        logprobs=array("f", [-1.0] * len(entries)).tobytes(),
    )


@attrs.define(eq=False)
class Running:
    """A request in the core."""

    reader: Reader
    token: int
    num_left: int
    num_generated: int = 0


class FrontendMachine(RuleBasedStateMachine):
    """Callers, a front end, two queues and a core."""

    @initialize(slice_rows=st.integers(1, 3))
    def start(self, slice_rows: int) -> None:
        """Slices are small, so that much happens between them."""
        self.frontend = Frontend(chunk_size=slice_rows)
        self.readers: list[Reader] = []
        self.to_core: deque[bytes] = deque()
        self.running: dict[int, Running] = {}
        self.rows: list[tuple[int, int]] = []
        self.logprobs: list[tuple[int, int, int]] = []
        """Slot, rank and token."""
        self.prompts: list[tuple[int, int]] = []
        """Slot and token."""
        self.finished: list[Finished] = []
        self.from_core: deque[bytes] = deque()
        self.num_outputs = 0
        self.slices: Iterator[None] | None = None
        self.reserved: dict[int, Reader] = {}
        """By slot: from the ADD until the front end has handled the `Finished`."""
        self.most_reserved = 0
        self.ending: tuple[int, ...] = ()
        """Slots whose `Finished` is in the message being handled."""

    # Callers

    @precondition(lambda self: len(self.readers) < MAX_REQUESTS)
    @rule(
        external_id=EXTERNAL_IDS,
        max_tokens=st.integers(1, 5),
        stops_after=st.none() | st.integers(1, 3),
        has_logprobs=st.booleans(),
    )
    def add(self, external_id: str, max_tokens: int, stops_after: int | None, has_logprobs: bool) -> None:
        """A request whose tokens are all its own number."""
        number = len(self.readers)
        reader = Reader(number, max_tokens, has_logprobs)
        stop = f"<{number}>" * stops_after if stops_after else None
        sampling = SamplingParams(max_tokens=max_tokens, stop=stop, logprobs=0 if has_logprobs else None)  # type: ignore[arg-type]
        prompt = TokensPrompt([FIRST_WORD + number])
        added = self.frontend.add(PROCESSOR.process(GenerateRequest(prompt, sampling, request_id=external_id)), reader)
        reader.added = added
        self.readers.append(reader)
        slot = added.messages[0].slot
        assert slot not in self.reserved
        self.reserved[slot] = reader
        self.most_reserved = max(self.most_reserved, len(self.reserved))
        assert slot < self.most_reserved  # The table is no larger than what was ever open at once.
        self.to_core.append(encode(added.messages[0]))

    @rule(external_id=EXTERNAL_IDS)
    def abort(self, external_id: str) -> None:
        """All live requests of this name end now."""
        live = [
            reader
            for reader in self.readers
            if not reader.is_over and reader.added is not None and reader.added.state.external_id == external_id
        ]
        self.frontend.abort(external_id)
        for reader in live:
            assert reader.finish_reason is FinishReason.ABORT
            reader.is_aborted = True

    @precondition(lambda self: any(not reader.is_over for reader in self.readers))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A reader leaves."""
        reader = data.draw(st.sampled_from([reader for reader in self.readers if not reader.is_over]))
        assert reader.added is not None
        self.frontend.drop(reader.added.state)
        reader.has_left = True

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def drop_again(self, data: st.DataObject) -> None:
        """Leaving what is over changes nothing."""
        over = [reader for reader in self.readers if reader.is_over]
        if over:
            reader = data.draw(st.sampled_from(over))
            assert reader.added is not None
            before = self.frontend.num_open_requests
            self.frontend.drop(reader.added.state)
            assert self.frontend.num_open_requests == before

    @rule()
    def abort_all(self) -> None:
        """Everything ends."""
        self.frontend.abort_all()
        assert all(reader.is_over for reader in self.readers)
        assert self.frontend.num_open_requests == 0

    # The wire

    @rule()
    def send_aborts(self) -> None:
        """The shell's turn."""
        for _, aborts in self.frontend.take_aborts():
            self.to_core.append(encode(aborts))

    @precondition(lambda self: self.to_core)
    @rule()
    def core_receives(self) -> None:
        """One message reaches the core."""
        match decode(self.to_core.popleft()):
            case EngineCoreRequest() as message:
                assert message.slot not in self.running
                (token,) = unpack_int32(message.prompt_token_ids)
                reader = self.readers[token - FIRST_WORD]
                self.running[message.slot] = Running(reader, token, reader.max_tokens)
            case AbortRequests(slots):
                for slot in slots:
                    if slot in self.running:
                        assert self.running[slot].reader.is_over, "an abort hit a request that nobody aborted"
                        del self.running[slot]
                        self.finished.append(Finished(slot, FinishReason.ABORT))

    @precondition(lambda self: self.running)
    @rule(fails=st.integers(0, 9))
    def core_steps(self, fails: int) -> None:
        """One token each; now and then one fails."""
        for index, (slot, running) in enumerate(list(self.running.items())):
            self.rows.append((slot, running.token))
            running.num_left -= 1
            running.num_generated += 1
            if running.num_generated == 1:
                self.prompts.append((slot, running.token))
            if running.reader.has_logprobs:
                self.logprobs.append((slot, running.num_generated, running.token))
            error = error_to_data(EngineGenerateError("broken")) if index + 1 == fails else None
            if error is not None or running.num_left == 0:
                del self.running[slot]
                reason = FinishReason.ABORT if error else FinishReason.LENGTH
                self.finished.append(Finished(slot, reason, error=error))

    @rule()
    def core_emits(self) -> None:
        """What came of the steps since the last time goes onto the wire, merged by slot."""
        if not self.rows and not self.finished:
            return
        by_slot: dict[int, list[int]] = {}
        for slot, token in self.rows:
            by_slot.setdefault(slot, []).append(token)
        message = StepOutput(
            self.num_outputs,
            0,
            0.0,
            slots=pack_int32(list(by_slot)),
            tokens=pack_int32([token for tokens in by_slot.values() for token in tokens]),
            counts=pack_int32([len(tokens) for tokens in by_slot.values()]),
            finished=tuple(self.finished),
            logprobs=columns(self.logprobs) if self.logprobs else None,
            prompt_logprobs=columns([(slot, 1, token) for slot, token in self.prompts]) if self.prompts else None,
            cached_tokens=pack_int32([value for slot, token in self.prompts for value in (slot, token - FIRST_WORD)]),
        )
        self.num_outputs += 1
        self.rows, self.logprobs, self.prompts, self.finished = [], [], [], []
        self.from_core.append(encode(message))

    @precondition(lambda self: self.slices is not None or self.from_core)
    @rule()
    def front_end_receives_a_slice(self) -> None:
        """The output handler goes on until it gives way."""
        if self.slices is None:
            message = decode(self.from_core.popleft())
            assert isinstance(message, StepOutput)
            self.slices = self.frontend.receive(0, message)
            self.ending = tuple(finished.slot for finished in message.finished)
        if next(self.slices, self) is self:
            self.slices = None
            for slot in self.ending:
                assert self.reserved.pop(slot).is_over
            self.ending = ()

    # Always

    @invariant()
    def books_are_right(self) -> None:
        """The front end knows exactly what is open."""
        if hasattr(self, "frontend"):
            assert self.frontend.num_open_requests == sum(not reader.is_over for reader in self.readers)
            assert self.frontend.num_reserved_slots == len(self.reserved)
            assert self.frontend.dead_error is None

    def teardown(self) -> None:
        """Everything comes to its end, and nothing is left."""
        if not hasattr(self, "frontend"):
            return
        while self.reserved or self.to_core:
            self.send_aborts()
            if self.to_core:
                self.core_receives()
            if self.running:
                self.core_steps(0)
            self.core_emits()
            while self.slices is not None or self.from_core:
                self.front_end_receives_a_slice()
        assert not self.running
        assert not self.to_core
        assert not self.frontend.has_aborts
        self.books_are_right()
        assert self.frontend._parents_by_external_id == {}
        for reader in self.readers:
            self._check(reader)

    def _check(self, reader: Reader) -> None:
        assert reader.is_over
        assert len(reader.token_ids) <= reader.max_tokens
        if reader.token_ids:
            assert reader.num_prompt_parts == 2
        if reader.finish_reason is FinishReason.LENGTH:
            assert len(reader.token_ids) == reader.max_tokens
        if reader.finish_reason is FinishReason.ABORT:
            assert reader.is_aborted or reader.added is not None
        if reader.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT) or reader.error is not None:
            # What was held back for a stop string was shown in the end.
            assert "".join(reader.texts) == f"<{reader.number}>" * len(reader.token_ids)


TestFrontendMachine = FrontendMachine.TestCase
TestFrontendMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
