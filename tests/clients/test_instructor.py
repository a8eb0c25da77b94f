"""`instructor`: extraction in each of the modes in which it asks an OpenAI server."""

import asyncio
from typing import Any, Literal

import instructor
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

QUESTION: Any = [{"role": "user", "content": "Jason is 25 years old."}]


class User(BaseModel):
    """A user."""

    name: str = Field(max_length=12)
    kind: Literal["guest", "member"]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture
def options(server: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": QUESTION, "temperature": 0, "max_tokens": 120, "max_retries": 0}


@pytest.fixture
def openai_client(server: Any) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_extraction(openai_client: OpenAI, options: dict[str, Any], mode: instructor.Mode) -> None:
    client: Any = instructor.from_openai(openai_client, mode=mode)
    user, completion = client.create_with_completion(response_model=User, **options)
    assert isinstance(user, User)
    assert completion.usage.completion_tokens > 0
    partial = list(client.create_partial(response_model=User, **options))
    assert partial[-1].name == user.name
    assert partial[-1].kind == user.kind


def test_json_mode(openai_client: OpenAI, options: dict[str, Any]) -> None:
    """The schema is in the prompt only; the model can be trusted with this one."""
    client: Any = instructor.from_openai(openai_client, mode=instructor.Mode.JSON)
    person = client.create(response_model=Person, **options)
    assert (person.name, person.age) == ("Jason", 25)


def test_the_async_client(server: Any, options: dict[str, Any]) -> None:
    async def run() -> Any:
        async with AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as opened:
            client: Any = instructor.from_openai(opened, mode=instructor.Mode.JSON_SCHEMA)
            return await client.create(response_model=User, **options)

    assert isinstance(asyncio.run(run()), User)
