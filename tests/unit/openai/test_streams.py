"""Streamed and whole replies: the same text, the same usage, in shapes that OpenAI's own models accept."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from trioengine.errors import EngineDeadError
from trioengine.openai.chat_answer import ChatForm
from trioengine.openai.chat_stream import chat_events, chat_reply
from trioengine.openai.completion_stream import CompletionEvents, CompletionForm, completion_reply
from trioengine.openai.sse import PING, EventStream, ReplyHead
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.output import CompletionOutput, FinishReason, RequestOutput

HEAD = ReplyHead('id-"\\\n', 1_700_000_000, 'model "é"')


def chat_stream(head: ReplyHead, *, include_usage: bool) -> EventStream:
    return chat_events(head, ChatForm(tokenizer=FakeTokenizer(), include_usage=include_usage))


def completion_stream(head: ReplyHead, *, include_usage: bool) -> EventStream:
    return CompletionEvents.of(head, CompletionForm(include_usage=include_usage))


STREAMS = [chat_stream, completion_stream]


def output(
    text: str, finish_reason: FinishReason | None = None, stop_reason: int | str | None = None, num_tokens: int = 1
) -> RequestOutput:
    choice = CompletionOutput(0, text, (1,) * num_tokens, finish_reason, stop_reason)
    return RequestOutput("r", (1, 2, 3), (choice,), finish_reason is not None, num_tokens, num_cached_tokens=2)


def stream_bytes(events: EventStream, texts: Sequence[str], stop_reason: int | str | None = None) -> bytes:
    last = len(texts) - 1
    return b"".join(
        events.events(
            output(text, FinishReason.STOP if position == last else None, stop_reason, num_tokens=position + 1)
            if position == last
            else output(text, num_tokens=position + 1)
        )
        for position, text in enumerate(texts)
    )


def parse_events(data: bytes) -> list[Any]:
    """Every event's data, decoded; the last one must be [DONE] and is left out."""
    assert b"\r" not in data
    assert data.endswith(b"\n\n")
    events = data.removesuffix(b"\n\n").split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    assert events[-1] == b"data: [DONE]"
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]


def chat_text(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk["choices"])


def completion_text(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@given(st.lists(st.text(max_size=8), min_size=1, max_size=6), st.booleans())
def test_the_joined_deltas_are_the_whole_text(texts: list[str], include_usage: bool) -> None:
    """Case 46 (hey-api 3054): however the text is split, and whatever characters it has; the usage is the same too."""
    whole = output("".join(texts), FinishReason.STOP, num_tokens=len(texts))
    chunks = parse_events(stream_bytes(chat_stream(HEAD, include_usage=include_usage), texts))
    reply = json.loads(chat_reply(HEAD, ChatForm(tokenizer=FakeTokenizer()), whole))
    assert chat_text(chunks) == reply["choices"][0]["message"]["content"] == "".join(texts)

    completion_chunks = parse_events(stream_bytes(completion_stream(HEAD, include_usage=include_usage), texts))
    completion = json.loads(completion_reply(HEAD, CompletionForm(), [whole]))
    assert completion_text(completion_chunks) == completion["choices"][0]["text"] == "".join(texts)

    if include_usage:
        assert chunks[-1]["usage"] == completion_chunks[-1]["usage"] == reply["usage"] == completion["usage"]


@pytest.mark.parametrize("make_stream", STREAMS)
def test_usage_comes_in_its_own_chunk_when_asked_for(make_stream: Callable[..., EventStream]) -> None:
    """With no choices, before the end; null in all others."""
    *chunks, last = parse_events(stream_bytes(make_stream(HEAD, include_usage=True), ["a", "b"]))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert [chunk["usage"] for chunk in chunks] == [None, None]


@pytest.mark.parametrize("make_stream", STREAMS)
def test_usage_is_absent_when_not_asked_for(make_stream: Callable[..., EventStream]) -> None:
    """Not even null."""
    chunks = parse_events(stream_bytes(make_stream(HEAD, include_usage=False), ["a", "b"]))
    assert len(chunks) == 2
    assert all("usage" not in chunk for chunk in chunks)


def test_the_role_is_in_the_first_chunk_only() -> None:
    """Clients join deltas, and would join roles too."""
    chunks = parse_events(stream_bytes(chat_stream(HEAD, include_usage=True), ["a", "b", "c"]))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas == [{"role": "assistant", "content": "a"}, {"content": "b"}, {"content": "c"}]


@pytest.mark.parametrize("make_stream", STREAMS)
@pytest.mark.parametrize("stop_reason", [None, 7, 'a "stop"'])
def test_the_last_chunk_tells_why_it_ended(
    make_stream: Callable[..., EventStream], stop_reason: int | str | None
) -> None:
    """And no other does."""
    chunks = parse_events(stream_bytes(make_stream(HEAD, include_usage=False), ["a", "b"], stop_reason))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert choices[1]["stop_reason"] == stop_reason
    assert "stop_reason" not in choices[0]


@pytest.mark.parametrize("make_stream", STREAMS)
def test_an_output_without_news_makes_no_event(make_stream: Callable[..., EventStream]) -> None:
    """Cases 22 and 23: text that may still become a stop string is held back, and no empty chunk tells of it."""
    events = make_stream(HEAD, include_usage=False)
    assert events.events(output("")) == b""
    assert len(parse_events(stream_bytes(events, ["", "ab"]))) == 1


@pytest.mark.parametrize("make_stream", STREAMS)
def test_a_reply_of_nothing_has_one_chunk(make_stream: Callable[..., EventStream]) -> None:
    """Case 22: when the stop string was all the model said."""
    (chunk,) = parse_events(stream_bytes(make_stream(HEAD, include_usage=False), ["", "", ""], "DEFGHIJ"))
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert chunk["choices"][0]["stop_reason"] == "DEFGHIJ"


@pytest.mark.parametrize("make_stream", STREAMS)
def test_several_tokens_may_come_in_one_chunk(make_stream: Callable[..., EventStream]) -> None:
    """Case 24: a step, or a slow reader, merges them; counts are the engine's, not the number of chunks."""
    events = make_stream(HEAD, include_usage=True)
    data = events.events(output("abc", num_tokens=3)) + events.events(output("d", FinishReason.LENGTH, num_tokens=4))
    chunks = parse_events(data)
    assert len(chunks) == 3
    assert chunks[1]["choices"][0]["finish_reason"] == "length"
    assert chunks[2]["usage"]["completion_tokens"] == 4


def test_choices_keep_their_index_and_each_has_its_role() -> None:
    """Whatever order they come in."""
    events = chat_stream(HEAD, include_usage=False)
    both = tuple(CompletionOutput(index, f"{index}", (1,)) for index in (1, 0))
    ends = tuple(CompletionOutput(index, "", (), FinishReason.LENGTH) for index in (0, 1))
    data = events.events(RequestOutput("r", (1,), both, False, 2)) + events.events(
        RequestOutput("r", (1,), ends, True, 2)
    )
    choices = [chunk["choices"][0] for chunk in parse_events(data)]
    assert [choice["index"] for choice in choices] == [1, 0, 0, 1]
    assert ["role" in choice["delta"] for choice in choices] == [True, True, False, False]


def test_an_error_after_the_headers_is_one_event() -> None:
    """With the error object and nothing of the engine's inside; no [DONE] follows, so nobody takes it for an answer."""
    data = EventStream.error_event(EngineDeadError("secret"))
    assert data.startswith(b'data: {"error":{')
    assert data.endswith(b"}}\n\n")
    assert data.count(b"\n") == 2
    assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == "engine_dead"


def test_token_ids_of_a_chat_are_told_beside_its_text() -> None:
    """As vLLM has them: the prompt's beside the choices, in the first chunk of each; every token when it is there."""
    form = ChatForm(tokenizer=FakeTokenizer(), has_token_ids=True)
    whole = json.loads(chat_reply(HEAD, form, output("ab", FinishReason.STOP, num_tokens=2)))
    assert whole["prompt_token_ids"] == [1, 2, 3]
    assert whole["choices"][0]["token_ids"] == [1, 1]

    chunks = parse_events(stream_bytes(chat_events(HEAD, form), ["", "ab", "", "c"]))
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2, 3], None, None, None]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[1], [1, 1], [1] * 3, [1] * 4]
    assert chat_text(chunks) == "abc"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert ChatCompletionChunk.model_validate(chunks[0]).choices[0].delta.role == "assistant"
    assert b"token_ids" not in stream_bytes(chat_stream(HEAD, include_usage=True), ["a", "b"])


def test_a_ping_is_a_comment() -> None:
    """Case 46: every parser of server-sent events skips it."""
    assert PING == b": ping\n\n"


def test_openais_own_models_accept_the_replies() -> None:
    """Validated, not only constructed, as its SDK does."""
    whole = output("text", FinishReason.STOP, "x")
    assert (
        ChatCompletion.model_validate_json(chat_reply(HEAD, ChatForm(tokenizer=FakeTokenizer()), whole))
        .choices[0]
        .message.content
        == "text"
    )
    assert Completion.model_validate_json(completion_reply(HEAD, CompletionForm(), [whole])).choices[0].text == "text"
    for chunk in parse_events(stream_bytes(chat_stream(HEAD, include_usage=True), ["a", "b"])):
        assert ChatCompletionChunk.model_validate(chunk).model == HEAD.model
    for chunk in parse_events(stream_bytes(completion_stream(HEAD, include_usage=False), ["a"])):
        assert Completion.model_validate(chunk).id == HEAD.id
