"""`langchain-openai`: chat models, tools, structured output, streams, legacy models and embeddings."""

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

QUESTION = "What is the capital of Japan?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


@pytest.fixture(scope="module")
def keys(server: Any) -> dict[str, Any]:
    return {"model": server.model, "base_url": server.base_url, "api_key": server.api_key, "max_retries": 0}


@pytest.fixture(scope="module")
def chat(keys: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**keys, temperature=0, max_tokens=64, stream_usage=True, timeout=60)


def test_a_stream_equals_the_whole_answer(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    assert "Tokyo" in whole.content
    total: Any = None
    for chunk in chat.stream([SystemMessage("You are a helpful AI assistant."), HumanMessage(QUESTION)]):
        total = chunk if total is None else total + chunk
    assert "Tokyo" in total.content
    assert total.usage_metadata["output_tokens"] > 0
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"] == "stop"


def test_the_async_client_and_batches(chat: ChatOpenAI) -> None:
    async def run() -> tuple[str, list[str]]:
        text = "".join([str(chunk.content) async for chunk in chat.astream(QUESTION)])
        return text, [str(answer.content) for answer in await chat.abatch([QUESTION] * 3)]

    text, answers = asyncio.run(run())
    assert answers == [text] * 3


@pytest.mark.parametrize("tool_choice", ["required", "any", "weather"])
def test_bound_tools(chat: ChatOpenAI, tool_choice: str) -> None:
    bound = chat.bind_tools([weather], tool_choice=tool_choice)
    whole: Any = bound.invoke(QUESTION)
    total: Any = None
    for chunk in bound.stream(QUESTION):
        total = chunk if total is None else total + chunk
    assert [call["name"] for call in whole.tool_calls] == ["weather"]
    assert [call["args"] for call in total.tool_calls] == [call["args"] for call in whole.tool_calls]


def test_a_conversation_with_a_tools_answer(chat: ChatOpenAI) -> None:
    call: Any = {"name": "weather", "args": {"city": "Tokyo"}, "id": "call-1"}
    answer = chat.bind_tools([weather]).invoke(
        [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("21 degrees", tool_call_id="call-1")]
    )
    assert answer.response_metadata["finish_reason"] in ("stop", "tool_calls", "length")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Any) -> None:
    answer: Any = chat.with_structured_output(City, method=method, include_raw=True).invoke(QUESTION)
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], City)
    assert isinstance(chat.with_structured_output(City, method=method, strict=True).invoke(QUESTION), City)


def test_structured_output_in_json_mode(chat: ChatOpenAI) -> None:
    answer: Any = chat.with_structured_output(City, method="json_mode", include_raw=True).invoke(
        [HumanMessage(QUESTION + ' Answer in JSON: {"name": "the name"}')]
    )
    assert answer["raw"].content.lstrip().startswith("{")


def test_log_probabilities(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]


def test_a_legacy_model(keys: dict[str, Any]) -> None:
    model = OpenAI(**keys, temperature=0, max_tokens=8)
    assert "".join(model.stream("The sky is")) == model.invoke("The sky is") != ""


def test_embeddings(keys: dict[str, Any]) -> None:
    """It sends token ids of its own tokenizer unless told not to: see docs/clients.md."""
    embeddings = OpenAIEmbeddings(**keys, check_embedding_ctx_length=False)
    one, two = embeddings.embed_documents(["a cat", "a dog"])
    assert embeddings.embed_query("a cat") == pytest.approx(one, abs=1e-3)
    assert one != two
