"""The official client, unmodified, against a real server."""

import json
import subprocess
import sys
import textwrap

import openai
import pytest

from trioengine.testing.served_process import ServedProcess

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture
def client(server: ServedProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_chat_answers_with_tokyo(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)

    assert "Tokyo" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    with client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)

    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_a_streamed_completion_equals_the_whole_one(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    whole = client.completions.create(model=model, prompt="The sky is", temperature=0, max_tokens=12)
    with client.completions.create(
        model=model, prompt="The sky is", temperature=0, max_tokens=12, stream=True
    ) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)

    assert text == whole.choices[0].text
    assert text


def test_wrong_requests_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="a " * 9000, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in str(caught.value)


ASYNC_SCRIPT = textwrap.dedent(
    """
    import asyncio, json, sys
    import openai

    async def main():
        async with openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            question = [{"role": "user", "content": "What is the capital of Japan?"}]
            options = dict(model=model, messages=question, temperature=0, max_tokens=32)
            whole = await client.chat.completions.create(**options)
            text = ""
            async with await client.chat.completions.create(**options, stream=True) as stream:
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            print(json.dumps([whole.choices[0].message.content, text]))

    asyncio.run(main())
    """
)


def test_the_async_client_streams_the_same(server: ServedProcess) -> None:
    """It runs on asyncio, so it runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASYNC_SCRIPT, server.url], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    whole, streamed = json.loads(done.stdout)
    assert "Tokyo" in whole
    assert streamed == whole


def test_embeddings_are_the_same_numbers_either_way(client: openai.OpenAI) -> None:
    """Case 39 (openai-python 1490): the SDK asks for base64 by itself, and decodes it."""
    model = client.models.list().data[0].id
    texts = ["a cat", "a dog", "an engine"]
    coded = client.embeddings.create(model=model, input=texts)
    floats = client.embeddings.create(model=model, input=texts, encoding_format="float")
    assert [item.index for item in coded.data] == [0, 1, 2]
    assert coded.usage.total_tokens == floats.usage.total_tokens > 0
    for one, other in zip(coded.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)


def test_an_echoed_prompt_has_log_probabilities_and_no_answer(client: openai.OpenAI) -> None:
    """Case 36 (vllm 6521)."""
    model = client.models.list().data[0].id
    reply = client.completions.create(model=model, prompt=["The capital", "Once"], echo=True, max_tokens=0, logprobs=1)
    assert [choice.text for choice in reply.choices] == ["The capital", "Once"]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["The", " capital"]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None


def test_responses_go_on_from_each_other_in_the_background_and_on_a_websocket(client: openai.OpenAI) -> None:
    """The actor of `trioengine serve`, its store and its WebSocket, with a model."""
    model = client.models.list().data[0].id
    question = str(QUESTION[0]["content"])
    begun = client.responses.create(model=model, input=question, temperature=0, max_output_tokens=32, background=True)
    with client.responses.stream(model=model, input=question, temperature=0, max_output_tokens=32) as stream:
        streamed = stream.get_final_response()
    assert "Tokyo" in streamed.output_text
    with client.responses.connect() as connection:
        connection.response.create(
            model=model, input="And of France?", temperature=0, max_output_tokens=32, previous_response_id=streamed.id
        )
        for event in connection:
            assert event.type != "error"
            if event.type == "response.completed":
                assert "Paris" in event.response.output_text
                break
    # It began first, and is one of a batch with the others.
    assert client.responses.retrieve(begun.id).output_text == streamed.output_text
