"""`openai` for Python: every helper that reads what a server answers."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

QUESTION: Any = [{"role": "user", "content": "What is the capital of Japan?"}]
LONG: Any = [{"role": "user", "content": "Tell me a very long story."}]


class Weather(BaseModel):
    """Tell the weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0, timeout=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def ask(client: OpenAI, server: Any) -> Callable[..., Any]:
    def create(**options: Any) -> Any:
        return client.chat.completions.create(
            **{"model": server.model, "messages": QUESTION, "temperature": 0, "max_tokens": 32, **options}
        )

    return create


def test_models(client: OpenAI, server: Any) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model


def test_a_stream_equals_the_whole_answer(ask: Callable[..., Any]) -> None:
    whole = ask(seed=1, user="me", metadata={"a": "b"}, store=False)
    assert "Tokyo" in whole.choices[0].message.content
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason == "stop"


def test_the_accumulating_stream(client: OpenAI, server: Any, ask: Callable[..., Any]) -> None:
    whole = ask()
    with client.chat.completions.stream(
        model=server.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage.completion_tokens == whole.usage.completion_tokens == len(final.choices[0].logprobs.content)
    assert {"content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= set(kinds)


def test_several_answers_with_log_probabilities(ask: Callable[..., Any]) -> None:
    answer = ask(n=3, temperature=1, seed=7, max_tokens=5, logprobs=True, top_logprobs=3)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
    for choice in answer.choices:
        assert b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode() == choice.message.content
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
@pytest.mark.parametrize("strict", [True, False])
def test_a_call_of_a_tool(client: OpenAI, server: Any, ask: Callable[..., Any], tool_choice: Any, strict: bool) -> None:
    tool = openai.pydantic_function_tool(Weather)
    tool["function"]["strict"] = strict
    options = {"tools": [tool], "tool_choice": tool_choice, "max_tokens": 100}
    whole = ask(**options).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason in ("stop", "tool_calls")
    Weather.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(model=server.model, messages=QUESTION, temperature=0, **options) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        streamed = stream.get_final_completion().choices[0]
    assert names == ["Weather"]
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert streamed.finish_reason == whole.finish_reason
    if strict:
        assert isinstance(streamed.message.tool_calls[0].function.parsed_arguments, Weather)


def test_a_conversation_with_a_tools_answer(ask: Callable[..., Any]) -> None:
    tool = openai.pydantic_function_tool(Weather)
    message = ask(tools=[tool], tool_choice="required", max_tokens=100).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}
    answer = ask(messages=[*QUESTION, message, result], tools=[tool], tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_parsed_answers(client: OpenAI, server: Any) -> None:
    options: dict[str, Any] = {"model": server.model, "messages": QUESTION, "temperature": 0, "max_tokens": 100}
    whole = client.chat.completions.parse(**options, response_format=Weather)
    assert isinstance(whole.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**options, response_format=Weather) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    tools = client.chat.completions.parse(
        **options, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required"
    )
    (call,) = tools.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


def test_json_mode(ask: Callable[..., Any]) -> None:
    answer = ask(response_format={"type": "json_object"}, stop=["}"]).choices[0]
    assert answer.message.content.lstrip().startswith("{")
    assert "}" not in answer.message.content


def test_an_answer_that_was_cut_short(client: OpenAI, server: Any) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=server.model, messages=QUESTION, max_tokens=2, response_format=Weather)


def test_content_parts_and_roles(ask: Callable[..., Any]) -> None:
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of Japan?"}]
    answer = ask(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert answer.choices[0].message.content


def test_completions(client: OpenAI, server: Any) -> None:
    options: dict[str, Any] = {"model": server.model, "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(prompt=["The sky is", "Once upon"], n=1, logprobs=2, **options)
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.completions.create(prompt=["The sky is", "Once upon"], stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert whole.choices[0].logprobs.text_offset[0] == 0


def test_embeddings(client: OpenAI, server: Any) -> None:
    coded = client.embeddings.create(model=server.model, input=["a cat", "a dog"], dimensions=8)
    floats = client.embeddings.create(
        model=server.model, input=["a cat", "a dog"], dimensions=8, encoding_format="float"
    )
    assert [item.index for item in coded.data] == [0, 1]
    assert coded.data[1].embedding == pytest.approx(floats.data[1].embedding)
    assert len(coded.data[0].embedding) == 8


def test_responses(client: OpenAI, server: Any) -> None:
    options: dict[str, Any] = {"model": server.model, "temperature": 0, "max_output_tokens": 32}
    whole = client.responses.create(input=QUESTION, **options)
    assert "Tokyo" in whole.output_text
    with client.responses.stream(input=QUESTION, **options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    parsed = client.responses.parse(input=QUESTION, text_format=Weather, **{**options, "max_output_tokens": 100})
    assert isinstance(parsed.output_parsed, Weather)


def test_errors(client: OpenAI, server: Any, ask: Callable[..., Any]) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        ask(model="no-such-model")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(messages=[{"role": "user", "content": "a " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    assert client.models.list()


def test_a_closed_stream_ends_its_request(server: Any, ask: Callable[..., Any]) -> None:
    stream = ask(messages=LONG, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    assert next(stream)
    assert server.num_requests() == 1
    stream.close()
    server.wait_until_idle()


def test_a_timeout_ends_its_request(server: Any, client: OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(
            model=server.model, messages=LONG, max_tokens=4000, extra_body={"ignore_eos": True}
        )
    server.wait_until_idle()


def test_a_full_server_is_asked_again(server: Any) -> None:
    """It says so with 503 and Retry-After; the client comes again by itself."""
    statuses: list[int] = []

    def note(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        if response.status_code == 503:
            assert response.headers["retry-after"] == "1"
            server.post("/resume")

    server.post("/pause")
    http_client = openai.DefaultHttpxClient(event_hooks={"response": [note]})
    with OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=2, http_client=http_client) as client:
        queued = client.completions.create(
            model=server.model, prompt=["Hi"] * server.max_num_queued_reqs, max_tokens=1, stream=True
        )
        answer = client.completions.create(model=server.model, prompt="Hi", max_tokens=1)
        assert len(list(queued)) >= server.max_num_queued_reqs
    assert answer.choices[0].finish_reason == "length"
    assert statuses == [200, 503, 200]


def test_the_async_client(server: Any) -> None:
    async def run() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as client:

            async def ask() -> str:
                text = ""
                async with client.chat.completions.stream(
                    model=server.model, messages=QUESTION, temperature=0, max_tokens=32
                ) as stream:
                    async for event in stream:
                        if event.type == "content.delta":
                            text += event.delta
                return text

            answers = await asyncio.gather(*(ask() for _ in range(4)))
            whole = await client.chat.completions.create(
                model=server.model, messages=QUESTION, temperature=0, max_tokens=32
            )
            return answers, whole.choices[0].message.content or ""

    answers, whole = asyncio.run(run())
    assert answers == [whole] * 4


def test_raw_responses(client: OpenAI, server: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=server.model, messages=QUESTION, max_tokens=1, extra_headers={"X-Request-Id": "from-a-client"}
    )
    assert raw.request_id == raw.headers["x-request-id"] == "from-a-client"
    assert raw.parse().id.endswith("from-a-client")
    assert json.loads(raw.text)["object"] == "chat.completion"
