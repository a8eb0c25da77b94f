"""`litellm`, told of the server as an `openai/` or `hosted_vllm/` provider."""

import asyncio
from typing import Any

import litellm
import pytest
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: Any, server: Any) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{server.model}",
        "api_base": server.base_url,
        "api_key": server.api_key,
        "temperature": 0,
        "max_tokens": 64,
        "num_retries": 0,
    }


def test_a_stream_equals_the_whole_answer(options: dict[str, Any]) -> None:
    whole: Any = litellm.completion(messages=QUESTION, **options)
    assert "Tokyo" in whole.choices[0].message.content
    chunks: list[Any] = list(
        litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **options)
    )
    built: Any = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def test_the_async_client(options: dict[str, Any]) -> None:
    async def run() -> tuple[str, str]:
        whole: Any = await litellm.acompletion(messages=QUESTION, **options)
        text = ""
        async for chunk in await litellm.acompletion(messages=QUESTION, stream=True, **options):
            text += chunk.choices[0].delta.content or ""
        return whole.choices[0].message.content, text

    whole, streamed = asyncio.run(run())
    assert whole == streamed
    assert whole


def test_tools(options: dict[str, Any]) -> None:
    whole: Any = litellm.completion(messages=QUESTION, tools=[TOOL], tool_choice="required", **options)
    chunks = list(litellm.completion(messages=QUESTION, tools=[TOOL], tool_choice="required", stream=True, **options))
    built: Any = litellm.stream_chunk_builder(chunks)
    (call,), (streamed,) = whole.choices[0].message.tool_calls, built.choices[0].message.tool_calls
    assert call.function.name == streamed.function.name == "weather"
    assert call.function.arguments == streamed.function.arguments
    assert '"city"' in call.function.arguments


def test_structured_answers(options: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=QUESTION, response_format=City, **options)
    assert City.model_validate_json(answer.choices[0].message.content)


def test_text_completions(options: dict[str, Any]) -> None:
    if options["model"].startswith("openai/"):
        options["model"] = options["model"].replace("openai/", "text-completion-openai/")
    whole: Any = litellm.text_completion(prompt="The sky is", **options)
    text = "".join(
        chunk.choices[0].text or "" for chunk in litellm.text_completion(prompt="The sky is", stream=True, **options)
    )
    assert whole.choices[0].text == text
    assert text


def test_embeddings(options: dict[str, Any]) -> None:
    keys = {key: options[key] for key in ("model", "api_base", "api_key")}
    reply: Any = litellm.embedding(input=["a cat", "a dog"], **keys)
    again: Any = asyncio.run(litellm.aembedding(input=["a cat", "a dog"], encoding_format="float", **keys))
    assert [item["index"] for item in reply.data] == [0, 1]
    assert reply.data[0]["embedding"] == pytest.approx(again.data[0]["embedding"])
    assert reply.usage.prompt_tokens > 0


def test_errors(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=QUESTION, **{**options, "api_key": "another"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=QUESTION, **{**options, "model": "openai/no-such-model"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=QUESTION, **{**options, "temperature": -1})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "a " * 9000}], **options)


def test_the_router(server: Any, options: dict[str, Any]) -> None:
    """Of two deployments one is not there: its requests fall back to the other."""
    good = {key: options[key] for key in ("model", "api_base", "api_key")}
    router = litellm.Router(
        model_list=[
            {"model_name": "bad", "litellm_params": {**good, "model": "openai/no-such-model"}},
            {"model_name": "good", "litellm_params": good},
        ],
        fallbacks=[{"bad": ["good"]}],
        num_retries=0,
    )
    answer: Any = router.completion(model="bad", messages=QUESTION, temperature=0, max_tokens=32)
    assert "Tokyo" in answer.choices[0].message.content
