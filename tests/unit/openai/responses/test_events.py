"""Events of a response: their order, and that joined they are the whole one, however the answer comes."""

import json
from collections.abc import Sequence
from typing import Any, cast

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from trioengine.config.engine import ReasoningParser
from trioengine.config.server import ToolCallParser
from trioengine.errors import EngineDeadError, RequestError, UnavailableError
from trioengine.openai.chat_settings import ChatSettings
from trioengine.openai.responses.events import Event, ResponseEvents, ResponseStatus
from trioengine.openai.responses.protocol import parse_response_request
from trioengine.openai.responses.translate import response_to_generate
from trioengine.openai.sse import ReplyHead
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.output import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestOutput

TOKENIZER = FakeTokenizer(["<think>", "</think>", "<tool_call>", "</tool_call>"])
TOOLS = [{"type": "function", "name": name} for name in ("f", "g")]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def make_state(reasons: bool = False, **fields: object) -> ResponseEvents:
    settings = ChatSettings.of(
        TOKENIZER,
        tool_call_parser=ToolCallParser.HERMES,
        reasoning_parser=ReasoningParser.QWEN3 if reasons else None,
    )
    request = parse_response_request(json.dumps({"input": "Hi", **fields}).encode())
    plan = response_to_generate(request, "id", settings)
    sampling = plan.generate_request.sampling
    return ResponseEvents(ReplyHead("resp_1", 5, "m"), request, plan.form, sampling, clock=lambda: 7.0)


def logprobs_of(token_id: int) -> PositionLogprobs:
    chosen = Logprob(token_id, -0.5, 1, TOKENIZER.token_bytes(token_id))
    return PositionLogprobs(chosen, (chosen,))


def outputs_of(
    text: str,
    cuts: Sequence[int],
    finish_reason: FinishReason = FinishReason.STOP,
    held: int = 0,
    has_logprobs: bool = False,
) -> list[RequestOutput]:
    """The outputs of an answer whose tokens come in groups that end at `cuts`.

    The text of up to `held` characters comes an output later, as where a stop string may begin.
    """
    token_ids = TOKENIZER.encode(text)
    ends = sorted({cut % (len(token_ids) + 1) for cut in cuts} | {len(token_ids)})
    outputs: list[RequestOutput] = []
    start, num_chars = 0, 0
    for end in ends:
        new = tuple(token_ids[start:end])
        is_last = end == len(token_ids)
        known = b"".join(map(TOKENIZER.token_bytes, token_ids[:end])).decode("utf-8", "ignore")
        num_shown = len(text) if is_last else max(num_chars, len(known) - held)
        logprobs = tuple(map(logprobs_of, new)) if has_logprobs else None
        choice = CompletionOutput(0, text[num_chars:num_shown], new, finish_reason if is_last else None, None, logprobs)
        outputs.append(RequestOutput("r", (1, 2, 3), (choice,), is_last, end, num_cached_tokens=2))
        start, num_chars = end, num_shown
    return outputs


def run(state: ResponseEvents, outputs: Sequence[RequestOutput]) -> list[Event]:
    events = list(state.begin())
    for output in outputs:
        events += state.feed(output)
    return events


def decoded(events: Sequence[Event]) -> list[Any]:
    found = [json.loads(event.data) for event in events]
    assert [event.type.decode() for event in events] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def joined(events: Sequence[Any]) -> list[Any]:
    """The items that the deltas of a stream add up to, by their own words only."""
    items: list[Any] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "response.content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "response.reasoning_summary_part.added":
                items[event["output_index"]]["summary"].append(event["part"])
            case "response.output_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "response.reasoning_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "response.reasoning_summary_text.delta":
                items[event["output_index"]]["summary"][event["summary_index"]]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_item.done":
                item = items[event["output_index"]]
                assert item["status"] == "in_progress"
                item["status"] = event["item"]["status"]
                assert item == event["item"]
            case _:
                pass
    return items


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return {name: without_ids(item) for name, item in fields.items() if name not in ("id", "call_id")}
    return [without_ids(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


PARTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "a",
        " ",
        "\n",
        "é",
        "<",
        "<tool",
        CALL,
        '<tool_call>{"name": "g"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"b"',
        "text",
    ]
)
ANSWERS = st.lists(PARTS, max_size=8).map("".join)


@given(
    ANSWERS,
    st.lists(st.integers(0, 200), max_size=12),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION]),
)
def test_the_joined_events_are_the_whole_response(
    text: str,
    cuts: list[int],
    held: int,
    reasons: bool,
    has_tools: bool,
    has_logprobs: bool,
    has_summary: bool,
    finish_reason: FinishReason,
) -> None:
    """However it is cut: items in the same order with the same texts, log probabilities, usage and status."""
    fields: dict[str, object] = {"tools": TOOLS if has_tools else []}
    if has_logprobs:
        fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    if has_summary:
        fields["reasoning"] = {"summary": "auto"}
    streamed, whole = make_state(reasons, **fields), make_state(reasons, **fields)
    events = decoded(run(streamed, outputs_of(text, cuts, finish_reason, held, has_logprobs)))
    run(whole, outputs_of(text, [], finish_reason, has_logprobs=has_logprobs))
    assert joined(events) == streamed.fields()["output"]
    assert without_ids(streamed.fields()) == without_ids(whole.fields())
    assert events[-1]["response"] == streamed.fields()
    Response.model_validate(streamed.fields(), strict=True)


def test_the_sdk_follows_every_event() -> None:
    """Reasoning, text, calls, text: each of them valid, and its own accumulation is the response."""
    text = f"<think>hm</think>a{CALL}b{CALL}"
    state = make_state(True, tools=TOOLS)
    events = run(state, outputs_of(text, range(200)))
    sdk: ResponseStreamState[Any] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        sdk.handle_event(EVENT.validate_json(event.data, strict=True))
    completed = sdk._completed_response  # pyright: ignore[reportPrivateUsage]
    assert completed is not None
    assert [item.type for item in completed.output] == [
        "reasoning",
        "message",
        "function_call",
        "message",
        "function_call",
    ]
    assert completed.output_text == "ab"


def test_the_order_of_events_is_openais() -> None:
    """Of one message: begun, opened, told, closed, ended."""
    events = decoded(run(make_state(), outputs_of("ab", [1])))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[4] == {
        "type": "response.output_text.delta",
        "item_id": events[2]["item"]["id"],
        "output_index": 0,
        "content_index": 0,
        "delta": "a",
        "logprobs": [],
        "sequence_number": 4,
    }


def test_a_response_of_the_background_is_queued_until_its_first_output() -> None:
    """Also in the object."""
    state = make_state(background=True)
    assert [event.type for event in state.begin()] == [b"response.created", b"response.queued"]
    assert state.fields()["status"] == "queued"
    (output, *_) = outputs_of("ab", [1])
    assert state.feed(output)[0].type == b"response.in_progress"
    assert state.fields()["status"] == "in_progress"


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    """As a chat's content is the empty text."""
    state = make_state()
    events = decoded(run(state, outputs_of("", [])))
    assert joined(events)[0]["content"][0]["text"] == ""
    assert state.status is ResponseStatus.COMPLETED


def test_an_answer_that_is_cut_says_where() -> None:
    """Case 28: the arguments of a call are not completed by anybody."""
    state = make_state(tools=TOOLS)
    run(state, outputs_of('<tool_call>{"name": "f", "arguments": {"a"', [5, 30], FinishReason.LENGTH))
    fields: Any = state.fields()
    assert fields["status"] == "incomplete"
    assert fields["incomplete_details"] == {"reason": "max_output_tokens"}
    assert fields["completed_at"] is None
    (call,) = fields["output"]
    assert (call["status"], call["arguments"]) == ("incomplete", '{"a"')


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("bad", param="input"), "invalid_prompt"),
        (UnavailableError("full"), "rate_limit_exceeded"),
        (EngineDeadError("died", cause="secret"), "server_error"),
        (ValueError("secret"), "server_error"),
    ],
)
def test_a_failure_keeps_what_was_told(error: Exception, code: str) -> None:
    """It ends what is open; what went wrong inside is for logs; nothing follows it."""
    state = make_state()
    (first, *_) = outputs_of("ab", [1])
    events = [*state.begin(), *state.feed(first), *state.fail(error)]
    last = decoded(events)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == code
    assert "secret" not in json.dumps(last)
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert list(state.fail(error)) == list(state.cancel()) == []
    for event in events:
        EVENT.validate_json(event.data, strict=True)


def test_a_cancelled_response_ends_as_such() -> None:
    """An abort of the engine's too."""
    state = make_state(background=True)
    events = decoded([*state.begin(), *state.cancel()])
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["status"] == "cancelled"
    aborted = make_state()
    run(aborted, outputs_of("ab", [1], FinishReason.ABORT))
    assert aborted.status is ResponseStatus.CANCELLED


def test_a_response_tells_its_request() -> None:
    """What had an effect, and what a client wants to find again."""
    state = make_state(
        instructions="i",
        metadata={"a": "b"},
        tools=TOOLS,
        tool_choice={"type": "function", "name": "f"},
        temperature=0.5,
        max_output_tokens=9,
        user="u",
        parallel_tool_calls=False,
    )
    fields: Any = state.fields()
    assert fields["instructions"] == "i"
    assert fields["metadata"] == {"a": "b"}
    assert [tool["name"] for tool in fields["tools"]] == ["f", "g"]
    assert fields["tool_choice"] == {"type": "function", "name": "f"}
    assert (fields["temperature"], fields["max_output_tokens"], fields["user"]) == (0.5, 9, "u")
    assert fields["parallel_tool_calls"] is False


def test_reasoning_tokens_are_counted() -> None:
    """With the closing marker, as for chats; their log probabilities are not the message's."""
    state = make_state(True, include=["message.output_text.logprobs"])
    run(state, outputs_of("<think>hm</think>ab", [2, 5], has_logprobs=True))
    fields: Any = state.fields()
    assert fields["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 9,
    }
    reasoning, message = fields["output"]
    assert reasoning["content"][0]["text"] == "hm"
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["a", "b"]
