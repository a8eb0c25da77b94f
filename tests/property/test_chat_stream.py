"""A streamed chat reply, joined, is the whole one: text, reasoning, calls, log probabilities, reasons and usage."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from trioengine.config.engine import ReasoningParser
from trioengine.config.server import ToolCallParser
from trioengine.core.structured.reasoning import MARKERS
from trioengine.openai.chat_answer import ChatForm
from trioengine.openai.chat_stream import chat_events, chat_reply
from trioengine.openai.reasoning import ReasoningSplitter, Split
from trioengine.openai.sse import ReplyHead
from trioengine.openai.tool_parsers import TOOL_MARKUPS
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.output import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestOutput

HEAD = ReplyHead("chatcmpl-1", 1, "model")
TOKENIZER = FakeTokenizer()
PROMPT = tuple(b"prompt")

PARTS = [
    "<think>", "</think>", "thought ", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "é"}}',
    '{"name": "f", "arguments": {', "text ", "\n", "é", "<", "[TOOL_CALLS]", "f[ARGS]{}", '[f(a=1)]',
    '[{"name": "f", "parameters": {}}]',
]  # fmt: skip
texts = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@st.composite
def forms(draw: st.DrawFn) -> ChatForm:
    parser = draw(st.none() | st.sampled_from(ToolCallParser))
    return ChatForm(
        tokenizer=TOKENIZER,
        include_usage=True,
        continuous_usage=draw(st.booleans()),
        has_logprobs=draw(st.booleans()),
        tool_names=() if parser is None else ("f",),
        markup=None if parser is None else TOOL_MARKUPS[parser],
        is_parallel=draw(st.booleans()),
        reasoning_parser=draw(st.none() | st.sampled_from(ReasoningParser)),
        shows_reasoning=draw(st.booleans()),
    )


@attrs.frozen
class Answer:
    """One choice: its characters, the tokens of each, and why it ended."""

    text: str
    reason: FinishReason

    def output(self, index: int, start: int, end: int, *, with_logprobs: bool) -> CompletionOutput:
        piece = self.text[start:end]
        token_ids = tuple(piece.encode())
        logprobs = tuple(
            PositionLogprobs(Logprob(token, -0.5, 1, bytes([token])), (Logprob(token, -0.5, 1, bytes([token])),))
            for token in token_ids
        )
        is_last = end == len(self.text)
        return CompletionOutput(
            index, piece, token_ids, self.reason if is_last else None, None, logprobs if with_logprobs else None
        )


def deltas(answers: Sequence[Answer], cuts: Sequence[tuple[int, int]], *, with_logprobs: bool) -> list[RequestOutput]:
    """These answers in pieces; the pieces of different answers come mixed."""
    places = [0] * len(answers)
    finished: set[int] = set()
    outputs: list[RequestOutput] = []
    num_generated = 0

    def advance(index: int, end: int) -> None:
        nonlocal num_generated
        choice = answers[index].output(index, places[index], end, with_logprobs=with_logprobs)
        num_generated += len(choice.token_ids)
        places[index] = end
        if choice.finish_reason is not None:
            finished.add(index)
        outputs.append(RequestOutput("r", PROMPT, (choice,), len(finished) == len(answers), num_generated))

    for which, length in cuts:
        index = which % len(answers)
        if index not in finished:
            advance(index, min(places[index] + length, len(answers[index].text)))
    for index in range(len(answers)):
        if index not in finished:
            advance(index, len(answers[index].text))
    return outputs


def joined(chunks: Sequence[Any], num_choices: int) -> list[dict[str, Any]]:
    """The choices that a client makes of chunks, by the rules that clients rely on."""
    choices: list[dict[str, Any]] = [{"message": {}, "logprobs": [], "calls": []} for _ in range(num_choices)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            index: int = choice["index"]
            state = choices[index]
            delta = choice["delta"]
            assert ("role" in delta) == (not state["message"])
            assert "finish_reason" not in state
            for name, value in delta.items():
                if name == "tool_calls":
                    for call in value:
                        if call["index"] == len(state["calls"]):
                            assert call["id"]
                            assert call["type"] == "function"
                            state["calls"].append({"name": call["function"]["name"], "arguments": ""})
                        else:
                            assert "id" not in call
                            assert "name" not in call["function"]
                        state["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
                else:
                    state["message"][name] = state["message"].get(name, "") + value
            if choice["logprobs"] is not None:
                state["logprobs"] += choice["logprobs"]["content"]
            if choice["finish_reason"] is not None:
                state["finish_reason"] = choice["finish_reason"]
    return choices


@given(
    form=forms(),
    answers=st.lists(
        st.builds(Answer, texts, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])), min_size=1, max_size=3
    ),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=30),
)
def test_the_joined_stream_is_the_whole_reply(
    form: ChatForm, answers: list[Answer], cuts: list[tuple[int, int]]
) -> None:
    """Cases 28 (vllm 51697) and 44 (vllm 8625): however the engine cuts its output."""
    events = chat_events(HEAD, form)
    outputs = deltas(answers, cuts, with_logprobs=form.has_logprobs)
    data = b"".join(map(events.events, outputs))
    lines = data.removesuffix(b"\n\n").split(b"\n\n")
    assert lines.pop() == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    whole = RequestOutput(
        "r",
        PROMPT,
        tuple(
            answer.output(index, 0, len(answer.text), with_logprobs=form.has_logprobs)
            for index, answer in enumerate(answers)
        ),
        True,
        outputs[-1].num_generated_tokens,
    )
    body = chat_reply(HEAD, form, whole)
    reply = json.loads(body)

    for streamed, choice in zip(joined(chunks, len(answers)), reply["choices"], strict=True):
        message = choice["message"]
        assert streamed["message"].get("content", "") == (message["content"] or "")
        assert streamed["message"].get("reasoning_content", "") == (message.get("reasoning_content") or "")
        assert streamed["message"].get("reasoning", "") == (message.get("reasoning") or "")
        assert streamed["calls"] == [call["function"] for call in message.get("tool_calls", [])]
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"] == reply["usage"]
    assert all((chunk["usage"] is not None) == form.continuous_usage for chunk in others)
    ChatCompletion.model_validate_json(body)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


def split_whole(pieces: Sequence[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(MARKERS[ReasoningParser.QWEN3])
    parts: list[Split] = [splitter.feed(piece) for piece in pieces]
    parts.append(splitter.finish())
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


@given(parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", "a", " ", "\n", "th"]), max_size=10))
def test_reasoning_is_split_alike_however_its_text_comes(parts: list[str]) -> None:
    """At every position."""
    text = "".join(parts)
    whole = split_whole([text])
    assert split_whole(list(text)) == split_whole(parts) == whole
    assert all(split_whole([text[:place], text[place:]]) == whole for place in range(len(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nLet me see.\n</think>\n\nYes.", ("Let me see.", "Yes.")),
        ("Let me see.</think>Yes. </think>", ("Let me see.", "Yes. </think>")),
        ("<think>Let me", ("Let me", "")),
        ("<think></think>Yes.", ("", "Yes.")),
        ("a < b </think> c", ("a < b", "c")),
    ],
)
def test_reasoning_ends_at_its_marker(text: str, expected: Mapping[str, str]) -> None:
    """Whether the prompt or the model opens it; without the marker all of it is reasoning."""
    assert split_whole([text]) == expected
