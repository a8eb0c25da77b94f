"""`pydantic-ai`: agents with tools, structured output in each of its modes, and streams."""

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the capital of Japan?"
SETTINGS: Any = {"temperature": 0.0, "max_tokens": 64}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)


@pytest.fixture
def model(server: Any) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=server.base_url, api_key=server.api_key)
    return OpenAIChatModel(server.model, provider=provider)


def test_a_stream_equals_the_whole_answer(model: OpenAIChatModel) -> None:
    agent = Agent(model, instructions="You are a helpful AI assistant.", model_settings=SETTINGS)

    async def run() -> tuple[str, str, int]:
        whole = await agent.run(QUESTION)
        async with agent.run_stream(QUESTION) as stream:
            text = "".join([delta async for delta in stream.stream_text(delta=True, debounce_by=None)])
            return whole.output, text, stream.usage.output_tokens

    whole, streamed, num_tokens = asyncio.run(run())
    assert whole == streamed
    assert "Tokyo" in whole
    assert num_tokens > 0


@pytest.mark.parametrize("output_type", [City, ToolOutput(City), NativeOutput(City)])
def test_structured_output(model: OpenAIChatModel, output_type: Any) -> None:
    """By a tool that must be called, and by response_format."""
    agent = Agent(model, output_type=output_type, model_settings=SETTINGS, retries=0)
    assert isinstance(agent.run_sync(QUESTION).output, City)

    async def stream() -> Any:
        async with agent.run_stream(QUESTION) as result:
            return [output async for output in result.stream_output(debounce_by=None)][-1]

    assert isinstance(asyncio.run(stream()), City)


def test_a_tool_is_called_and_its_answer_used(model: OpenAIChatModel) -> None:
    """In a turn that must call this tool; the next turn, with the tool's answer, is free."""
    asked: list[str] = []

    def settings(context: Any) -> Any:
        return {**SETTINGS, "tool_choice": "none" if asked else ["capital"]}

    agent = Agent(model, model_settings=settings)

    @agent.tool_plain
    def capital(country: Literal["Japan", "France"]) -> str:
        """Tell a country's capital."""
        asked.append(country)
        return "Tokyo"

    result = agent.run_sync(QUESTION)
    assert asked
    assert result.output
    assert any(part.part_kind == "tool-return" for message in result.all_messages() for part in message.parts)


def test_errors(model: OpenAIChatModel, server: Any) -> None:
    other = OpenAIChatModel("no-such-model", provider=OpenAIProvider(base_url=server.base_url, api_key=server.api_key))
    with pytest.raises(ModelHTTPError) as caught:
        Agent(other).run_sync(QUESTION)
    assert caught.value.status_code == 404
