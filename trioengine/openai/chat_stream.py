"""Replies of `/v1/chat/completions`, streamed and whole."""

import functools
from collections.abc import Mapping, Sequence

import attrs

from trioengine.openai.chat_answer import AnswerDelta, AnswerReader, CallDelta, ChatForm
from trioengine.openai.sse import (
    NULL,
    ChunkShape,
    EventStream,
    ReplyHead,
    dumps,
    finish_fields,
    ids_field,
    name_of_token,
    prompt_logprobs_of,
    usage_fields,
    whole_reply,
)
from trioengine.types.output import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestOutput

_CHUNK = ChunkShape(
    object="chat.completion.chunk",
    before_first_text=b'"delta":{"role":"assistant","content":',
    before_text=b'"delta":{"content":',
    after_text=b"}",
)
_TOOL_CALLS = "tool_calls"


@attrs.define
class _Choice:
    """A choice of a stream that is not plain text."""

    reader: AnswerReader
    logprobs: list[Mapping[str, object]] = attrs.field(factory=list[Mapping[str, object]])
    """Of tokens whose text is held back."""


def chat_events(head: ReplyHead, form: ChatForm) -> EventStream:
    """A stream of chat chunks. The first chunk of each choice has the role."""
    if not form.is_plain:
        return _AnswerEvents(head, form)
    return EventStream(head, _CHUNK, include_usage=form.include_usage, continuous_usage=form.continuous_usage)


class _AnswerEvents(EventStream):
    """Of answers that are more than text."""

    def __init__(self, head: ReplyHead, form: ChatForm) -> None:
        """Prepare what all chunks share."""
        super().__init__(head, _CHUNK, include_usage=form.include_usage, continuous_usage=form.continuous_usage)
        self._form = form
        self._logprob_fields = _logprob_fields_by_id if form.names_tokens_by_id else logprob_fields
        self._choices: dict[int, _Choice] = {}

    def choice_events(self, choice: CompletionOutput, output: RequestOutput) -> bytes:
        state = self._choices.get(choice.index)
        if state is None:
            state = _Choice(AnswerReader(self._form, output.prompt_token_ids))
            self._choices[choice.index] = state
        if not self._form.has_token_ids:
            return self._chunk(choice, state)
        is_first = choice.index not in self._before_text
        chunk = self._chunk(choice, state, ids_field("token_ids", choice.token_ids))
        if not is_first or not chunk:
            return chunk
        # The prompt's are told beside the choices, in the first chunk of each.
        prompt = ids_field("prompt_token_ids", output.prompt_token_ids).removeprefix(b",")
        return chunk.replace(b"{", b"{" + prompt + b",", 1)

    def _chunk(self, choice: CompletionOutput, state: _Choice, token_ids: bytes = b"") -> bytes:
        is_last = choice.finish_reason is not None
        delta = state.reader.feed(choice.text, choice.token_ids, is_last=is_last)
        if choice.logprobs:
            state.logprobs += map(self._logprob_fields, choice.logprobs)
        # Tokens are told as they come, also while their text is held back.
        if not is_last and not delta.has_news and not (token_ids and choice.token_ids):
            return b""
        logprobs = dumps({"content": state.logprobs, "refusal": None}) if state.logprobs else NULL
        state.logprobs = []
        finish = _finish_fields(choice, has_calls=state.reader.has_calls) if is_last else None
        if not delta.reasoning and not delta.calls:
            return self.text_chunk(choice.index, delta.text, logprobs=logprobs, more=token_ids, finish=finish)
        fields: dict[str, object] = {"role": "assistant"} if self.begins(choice.index) else {}
        fields |= _delta_fields(delta, is_first=bool(fields))
        return (
            self.begin_chunk(choice.index) + b'"delta":' + dumps(fields) + self.end_chunk(logprobs, finish, token_ids)
        )

    def usage(self, output: RequestOutput) -> Mapping[str, object]:
        if self._form.reasoning_parser is None:
            return usage_fields(output)
        num_tokens = sum(choice.reader.num_reasoning_tokens for choice in self._choices.values())
        return _usage_fields(output, num_tokens)


def chat_reply(head: ReplyHead, form: ChatForm, output: RequestOutput) -> bytes:
    """The whole reply, from the output that has everything."""
    readers = [AnswerReader(form, output.prompt_token_ids) for _ in output.outputs]
    choices = [_whole_choice(form, reader, choice) for reader, choice in zip(readers, output.outputs, strict=True)]
    usage = usage_fields(output)
    if form.reasoning_parser is not None:
        usage = _usage_fields(output, sum(reader.num_reasoning_tokens for reader in readers))
    more: dict[str, object] = {"prompt_logprobs": prompt_logprobs_of(output)} if form.has_prompt_logprobs else {}
    if form.has_token_ids:
        more["prompt_token_ids"] = output.prompt_token_ids
    return whole_reply(head, "chat.completion", choices, usage, **more)


def _whole_choice(form: ChatForm, reader: AnswerReader, choice: CompletionOutput) -> Mapping[str, object]:
    answer = reader.feed(choice.text, choice.token_ids, is_last=True)
    has_text = bool(answer.text) or not (answer.calls or answer.reasoning)
    message: dict[str, object] = {
        "role": "assistant",
        "content": answer.text if has_text else None,
        "refusal": None,
    }
    if answer.calls:
        message[_TOOL_CALLS] = [_call_fields(call, has_index=False) for call in answer.calls]
    if form.reasoning_parser is not None and form.shows_reasoning:
        message |= _reasoning_fields(answer.reasoning or None)
    logprobs = None
    if form.has_logprobs:
        fields_of = _logprob_fields_by_id if form.names_tokens_by_id else logprob_fields
        logprobs = {"content": [fields_of(entry) for entry in choice.logprobs or ()], "refusal": None}
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
        **_finish_fields(choice, has_calls=reader.has_calls),
        **({"token_ids": choice.token_ids} if form.has_token_ids else {}),
    }


def _delta_fields(delta: AnswerDelta, *, is_first: bool) -> Mapping[str, object]:
    fields: dict[str, object] = {}
    if delta.text or (is_first and not delta.calls):
        fields["content"] = delta.text
    if delta.reasoning:
        fields |= _reasoning_fields(delta.reasoning)
    if delta.calls:
        fields[_TOOL_CALLS] = [_call_fields(call, has_index=True) for call in delta.calls]
    return fields


def _reasoning_fields(reasoning: str | None) -> Mapping[str, object]:
    """By both names that clients know."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _call_fields(call: CallDelta, *, has_index: bool) -> Mapping[str, object]:
    index: dict[str, object] = {"index": call.index} if has_index else {}
    if call.id is None:
        return {**index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {**index, "id": call.id, "type": "function", "function": function}


def _finish_fields(choice: CompletionOutput, *, has_calls: bool) -> Mapping[str, object]:
    fields = finish_fields(choice)
    is_calls = has_calls and choice.finish_reason is FinishReason.STOP
    return {**fields, "finish_reason": _TOOL_CALLS} if is_calls else fields


def logprob_fields(entry: PositionLogprobs) -> Mapping[str, object]:
    """The log probabilities at one place of an answer, as OpenAI writes them."""
    return {**_token_fields(entry.chosen), "top_logprobs": [_token_fields(token) for token in entry.top]}


def _token_fields(token: Logprob) -> Mapping[str, object]:
    text, numbers = _text_and_numbers(token.token_bytes)
    return {"token": text, "logprob": token.logprob, "bytes": numbers}


def _logprob_fields_by_id(entry: PositionLogprobs) -> Mapping[str, object]:
    top = [_token_fields_by_id(token) for token in entry.top]
    return {**_token_fields_by_id(entry.chosen), "top_logprobs": top}


def _token_fields_by_id(token: Logprob) -> Mapping[str, object]:
    return {**_token_fields(token), "token": name_of_token(token.token_id)}


@functools.lru_cache(maxsize=32_768)
def _text_and_numbers(token_bytes: bytes) -> tuple[str, Sequence[int]]:
    """A token's text and bytes as a client reads them. Texts are made of few different tokens."""
    return token_bytes.decode(errors="replace"), list(token_bytes)


def _usage_fields(output: RequestOutput, num_reasoning_tokens: int) -> Mapping[str, object]:
    return {**usage_fields(output), "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}
