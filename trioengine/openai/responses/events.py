"""One response as it comes: outputs in, events out, and the response object as of now.

A table of what is open decides: an answer is a row of items (reasoning, messages, calls), of which the last one may be
open. Whoever joins the deltas of the events has the items of the response; a whole reply is read by the same code.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import TypeAlias

import attrs

from trioengine.openai.chat_answer import AnswerEvent, AnswerReader, CallDelta, ChatForm, ReasoningDelta
from trioengine.openai.chat_stream import logprob_fields
from trioengine.openai.responses.items import (
    FunctionCallItem,
    Item,
    ItemRole,
    ItemStatus,
    ItemType,
    MessageItem,
    ReasoningItem,
    item_fields,
    new_item_id,
    output_text_fields,
)
from trioengine.openai.responses.pieces import Piece, TokenPieces
from trioengine.openai.responses.protocol import ResponseRequest
from trioengine.openai.responses.response_fields import failure_fields, request_fields
from trioengine.openai.sse import ReplyHead, dumps
from trioengine.openai.tool_parsers.base import TextDelta
from trioengine.types.output import CompletionOutput, FinishReason, RequestOutput
from trioengine.types.params import SamplingParams

_TEXT_DELTA = b"response.output_text.delta"


class ResponseStatus(enum.StrEnum):
    """How far a response has come."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    """It ended where `max_output_tokens` or the context does."""
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more comes."""
        return self not in (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)


@attrs.define(eq=False)
class Event:
    """One event. Not changed by anyone; freezing it would take as long as writing it."""

    type: bytes
    data: bytes
    """A JSON object, `type` and `sequence_number` in it."""

    def sse(self) -> bytes:
        """As a server-sent event."""
        return b"event: %b\ndata: %b\n\n" % (self.type, self.data)


@attrs.define
class _OpenReasoning:
    id: str
    part: str
    """"reasoning_text" or "summary_text"."""
    texts: list[str] = attrs.field(factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self.texts)


@attrs.define
class _OpenMessage:
    id: str
    before_delta: bytes
    texts: list[str] = attrs.field(factory=list[str])
    logprobs: list[Mapping[str, object]] = attrs.field(factory=list[Mapping[str, object]])

    @property
    def text(self) -> str:
        return "".join(self.texts)


@attrs.define
class _OpenCall:
    id: str
    call_id: str
    name: str
    before_delta: bytes
    texts: list[str] = attrs.field(factory=list[str])

    @property
    def arguments(self) -> str:
        return "".join(self.texts)


_Open: TypeAlias = _OpenReasoning | _OpenMessage | _OpenCall


class ResponseEvents:
    """The state of one response."""

    def __init__(
        self,
        head: ReplyHead,
        request: ResponseRequest,
        form: ChatForm,
        sampling: SamplingParams,
        *,
        clock: Callable[[], float],
    ) -> None:
        """Start before the answer.

        Args:
            head: the response's identity.
            request: as it came.
            form: how the answer is read.
            sampling: as the engine got it, with the defaults of the model's authors.
            clock: Unix time, for the end.
        """
        self.id = head.id
        self.status = ResponseStatus.QUEUED if request.background else ResponseStatus.IN_PROGRESS
        self.items: list[Item] = []
        """Of the answer, those that are done."""
        self._form = form
        self._clock = clock
        self._is_summary = request.reasoning.effective_summary is not None
        self._fields = request_fields(head, request, sampling)
        self._output: list[Mapping[str, object]] = []
        self._open: _Open | None = None
        self._reader: AnswerReader | None = None
        self._pieces: TokenPieces | None = None
        self._num_tokens_read = 0
        self._logprobs: list[Mapping[str, object]] = []
        """Of tokens whose text is held back."""
        self._after_call = False
        self._is_plain = form.is_plain
        self._latest: RequestOutput | None = None
        """None again at the end: it has the prompt."""
        self._usage: Mapping[str, object] | None = None
        """At the end."""
        self._error: Mapping[str, object] | None = None
        self._incomplete: Mapping[str, object] | None = None
        self._completed_s: int | None = None
        self._events: list[Event] = []
        self._number = 0

    def fields(self) -> Mapping[str, object]:
        """The response object as of now. What OpenAI's has no null for is left out."""
        output = self._output
        usage = self._usage or self._usage_fields()
        if self._open is not None:
            output = [*output, self._open_fields(self._open)]
        return {
            **self._fields,
            "status": self.status.value,
            "completed_at": self._completed_s,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "output": list(output),
            **({} if usage is None else {"usage": usage}),
        }

    def begin(self) -> Sequence[Event]:
        """The events before anything is known of the answer."""
        self._add_response(b"response.created")
        self._add_response(b"response.queued" if self.status is ResponseStatus.QUEUED else b"response.in_progress")
        return self._take()

    def feed(self, output: RequestOutput) -> Sequence[Event]:
        """The events of an output."""
        (choice,) = output.outputs
        self._latest = output
        message = self._open
        if self._is_plain and message is not None and choice.finish_reason is None:
            # Nearly all outputs are like this one.
            assert isinstance(message, _OpenMessage), "an answer of plain text has nothing else"
            text = choice.text
            if not text:
                return ()
            message.texts.append(text)
            data = b'%b%b,"logprobs":[],"sequence_number":%d}' % (
                message.before_delta,
                encode_basestring_ascii(text).encode(),
                self._number,
            )
            self._number += 1
            return (Event(_TEXT_DELTA, data),)
        if self.status is ResponseStatus.QUEUED:
            self.status = ResponseStatus.IN_PROGRESS
            self._add_response(b"response.in_progress")
        reader = self._reader
        if reader is None:
            reader = self._reader = AnswerReader(self._form, output.prompt_token_ids)
            if self._form.has_logprobs and self._form.markup is not None:
                self._pieces = TokenPieces()
        is_last = choice.finish_reason is not None
        if self._pieces is None:
            self._read(reader, Piece(choice.text, choice.token_ids, choice.logprobs or ()), is_last=is_last)
        else:
            for piece in self._pieces.feed(choice, is_last=is_last):
                self._read(reader, piece, is_last=False)
            if is_last:
                self._read(reader, Piece("", (), ()), is_last=True)
        if is_last:
            self._finish(choice)
        return self._take()

    def fail(self, error: Exception) -> Sequence[Event]:
        """The events of an error that ends the response; none where it has ended."""
        if self.status.is_final:
            return ()
        self._error = failure_fields(error)
        self._end(ResponseStatus.FAILED, b"response.failed")
        return self._take()

    def cancel(self) -> Sequence[Event]:
        """The events of a cancellation; none where the response has ended."""
        if self.status.is_final:
            return ()
        self._end(ResponseStatus.CANCELLED, b"response.incomplete")
        return self._take()

    def complete_empty(self) -> Sequence[Event]:
        """The events of a response without an answer, which a later one goes on from."""
        self._latest = RequestOutput("", (), (), finished=True, num_generated_tokens=0)
        self._end(ResponseStatus.COMPLETED, b"response.completed")
        return self._take()

    def _read(self, reader: AnswerReader, piece: Piece, *, is_last: bool) -> None:
        events = reader.events(piece.text, piece.token_ids, is_last=is_last)
        if piece.logprobs:
            # What is reasoning is not the message's text, nor is its closing marker.
            num_skipped = max(0, reader.num_reasoning_tokens - self._num_tokens_read)
            if not self._after_call:
                self._logprobs += map(logprob_fields, piece.logprobs[num_skipped:])
        self._num_tokens_read += len(piece.token_ids)
        for event in events:
            self._add_answer(event)

    def _add_answer(self, event: AnswerEvent) -> None:
        match event:
            case TextDelta(text):
                self._add_text(text)
            case ReasoningDelta(text):
                self._add_reasoning(text)
            case CallDelta(id=None, arguments=arguments):
                assert isinstance(self._open, _OpenCall), "arguments follow their call"
                self._add_arguments(self._open, arguments)
            case CallDelta(id=str(call_id), name=name, arguments=arguments):
                self._close(ItemStatus.COMPLETED)
                self._logprobs, self._after_call = [], True
                call = _OpenCall(new_item_id(ItemType.FUNCTION_CALL), call_id, name or "", b"")
                call.before_delta = self._before_delta("response.function_call_arguments.delta", call.id)
                self._open_item(call)
                if arguments:
                    self._add_arguments(call, arguments)
            case _:
                raise AssertionError(f"not an event of an answer: {event}")

    def _add_text(self, text: str) -> None:
        message = self._open
        if not isinstance(message, _OpenMessage):
            self._close(ItemStatus.COMPLETED)
            self._after_call = False
            message = _OpenMessage(new_item_id(ItemType.MESSAGE), b"")
            message.before_delta = self._before_delta(_TEXT_DELTA.decode(), message.id, content_index=0)
            self._open_item(message)
            self._add(b"response.content_part.added", item_id=message.id, content_index=0, part=output_text_fields(""))
        if not text and not self._logprobs:
            return
        logprobs = b"[]"
        if self._logprobs:
            logprobs = b"[" + b",".join(map(dumps, self._logprobs)) + b"]"
            message.logprobs += self._logprobs
            self._logprobs = []
        message.texts.append(text)
        self._add_bytes(
            _TEXT_DELTA,
            message.before_delta + encode_basestring_ascii(text).encode() + b',"logprobs":' + logprobs,
        )

    def _add_reasoning(self, text: str) -> None:
        reasoning = self._open
        if not isinstance(reasoning, _OpenReasoning):
            self._close(ItemStatus.COMPLETED)
            reasoning = _OpenReasoning(
                new_item_id(ItemType.REASONING), "summary_text" if self._is_summary else "reasoning_text"
            )
            self._open_item(reasoning)
            self._add(self._part_event("added"), **self._part_place(reasoning), part=_part(reasoning))
        reasoning.texts.append(text)
        name = b"response.reasoning_summary_text.delta" if self._is_summary else b"response.reasoning_text.delta"
        self._add(name, **self._part_place(reasoning), delta=text)

    def _add_arguments(self, call: _OpenCall, arguments: str) -> None:
        call.texts.append(arguments)
        self._add_bytes(
            b"response.function_call_arguments.delta",
            call.before_delta + encode_basestring_ascii(arguments).encode(),
        )

    def _open_item(self, item: _Open) -> None:
        self._open = item
        fields = dict(self._open_fields(item))
        # Its parts are added by events of their own.
        fields |= {name: [] for name in ("content", "summary") if name in fields}
        self._add(b"response.output_item.added", item=fields)

    def _close(self, status: ItemStatus) -> None:
        """End the open item, if there is one."""
        match self._open:
            case None:
                return
            case _OpenMessage() as message:
                part = output_text_fields(message.text, message.logprobs)
                place = {"item_id": message.id, "content_index": 0}
                self._add(b"response.output_text.done", **place, text=message.text, logprobs=message.logprobs)
                self._add(b"response.content_part.done", **place, part=part)
                item: Item = MessageItem(role=ItemRole.ASSISTANT, content=(message.text,), id=message.id, status=status)
                fields = {**item_fields(item), "content": [part]}
            case _OpenReasoning() as reasoning:
                name = b"response.reasoning_summary_text.done" if self._is_summary else b"response.reasoning_text.done"
                self._add(name, **self._part_place(reasoning), text=reasoning.text)
                self._add(self._part_event("done"), **self._part_place(reasoning), part=_part(reasoning))
                item = _reasoning_item(reasoning, status)
                fields = item_fields(item)
            case _OpenCall() as call:
                self._add(
                    b"response.function_call_arguments.done",
                    item_id=call.id,
                    name=call.name,
                    arguments=call.arguments,
                )
                item = _call_item(call, status)
                fields = item_fields(item)
        self._add(b"response.output_item.done", item=fields)
        self._open = None
        self._output.append(fields)
        self.items.append(item)

    def _finish(self, choice: CompletionOutput) -> None:
        match choice.finish_reason:
            case FinishReason.STOP:
                status, name, item_status = ResponseStatus.COMPLETED, b"response.completed", ItemStatus.COMPLETED
            case FinishReason.LENGTH:
                status, name, item_status = ResponseStatus.INCOMPLETE, b"response.incomplete", ItemStatus.INCOMPLETE
                self._incomplete = {"reason": "max_output_tokens"}
            case FinishReason.REPETITION:
                # OpenAI's words for the reason have none for it.
                status, name, item_status = ResponseStatus.INCOMPLETE, b"response.incomplete", ItemStatus.INCOMPLETE
            case _:
                status, name, item_status = ResponseStatus.CANCELLED, b"response.incomplete", ItemStatus.INCOMPLETE
        if self._logprobs and not self._after_call and isinstance(self._open, _OpenMessage):
            self._add_text("")
        if self._open is None and not self._output:
            self._add_text("")  # An answer of nothing is an empty message.
        self._end(status, name, item_status)

    def _end(self, status: ResponseStatus, name: bytes, item_status: ItemStatus = ItemStatus.INCOMPLETE) -> None:
        self._close(item_status)
        self._usage = self._usage_fields()
        self._latest = self._reader = self._pieces = None
        self.status = status
        self._completed_s = int(self._clock()) if status is ResponseStatus.COMPLETED else None
        self._add_response(name)

    def _open_fields(self, item: _Open) -> Mapping[str, object]:
        match item:
            case _OpenMessage():
                message = MessageItem(role=ItemRole.ASSISTANT, content=(), id=item.id, status=ItemStatus.IN_PROGRESS)
                return {**item_fields(message), "content": [output_text_fields(item.text, item.logprobs)]}
            case _OpenReasoning():
                return item_fields(_reasoning_item(item, ItemStatus.IN_PROGRESS))
            case _OpenCall():
                return item_fields(_call_item(item, ItemStatus.IN_PROGRESS))

    def _usage_fields(self) -> Mapping[str, object] | None:
        """As of the newest output; None before the first."""
        output = self._latest
        if output is None:
            return None
        num_input, num_output = len(output.prompt_token_ids), output.num_generated_tokens
        num_reasoning = 0 if self._reader is None else self._reader.num_reasoning_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + num_output,
        }

    def _part_event(self, what: str) -> bytes:
        name = "reasoning_summary_part" if self._is_summary else "content_part"
        return f"response.{name}.{what}".encode()

    def _part_place(self, reasoning: _OpenReasoning) -> Mapping[str, object]:
        return {"item_id": reasoning.id, "summary_index" if self._is_summary else "content_index": 0}

    def _before_delta(self, name: str, item_id: str, **place: int) -> bytes:
        fields = {"type": name, "item_id": item_id, "output_index": len(self._output), **place}
        return dumps(fields).removesuffix(b"}") + b',"delta":'

    def _add(self, name: bytes, /, **fields: object) -> None:
        head = {"type": name.decode(), "output_index": len(self._output)}
        self._add_bytes(name, dumps({**head, **fields}).removesuffix(b"}"))

    def _add_response(self, name: bytes) -> None:
        self._add_bytes(name, b'{"type":"%b","response":%b' % (name, dumps(self.fields())))

    def _add_bytes(self, name: bytes, data: bytes) -> None:
        self._events.append(Event(name, b'%b,"sequence_number":%d}' % (data, self._number)))
        self._number += 1

    def _take(self) -> Sequence[Event]:
        events, self._events = self._events, []
        return events


def _part(reasoning: _OpenReasoning) -> Mapping[str, object]:
    return {"type": reasoning.part, "text": reasoning.text}


def _reasoning_item(reasoning: _OpenReasoning, status: ItemStatus) -> ReasoningItem:
    texts = (reasoning.text,)
    if reasoning.part == "summary_text":
        return ReasoningItem(summary=texts, id=reasoning.id, status=status)
    return ReasoningItem(content=texts, id=reasoning.id, status=status)


def _call_item(call: _OpenCall, status: ItemStatus) -> FunctionCallItem:
    return FunctionCallItem(call_id=call.call_id, name=call.name, arguments=call.arguments, id=call.id, status=status)
