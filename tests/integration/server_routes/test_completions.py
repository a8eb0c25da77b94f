"""Completions over HTTP: several prompts, echo, log probabilities, usage."""

import json
from typing import Any

import pytest
import trio
from quart import Response
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.errors import EngineGenerateError, RequestError
from trioengine.server.app import create_app
from trioengine.server.routes import generate
from trioengine.server.stream_body import PING_INTERVAL_S
from trioengine.testing.fake_engine import FakeEngine, FakeOutputStream, ScriptedReply
from trioengine.testing.fake_vectors import FakeVectorEngine
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import open_scripted_engine
from trioengine.types.request import GenerateRequest, TextPrompt

PATH = "/v1/completions"
TRUNCATE = "truncate_prompt_tokens"


async def post(engine: Any, body: dict[str, Any]) -> Response:
    return await create_app(engine).test_client().post(PATH, json=body)


async def whole(engine: Any, **body: Any) -> Any:
    response = await post(engine, body)
    reply = json.loads(await response.get_data())
    assert response.status_code == 200, reply
    return reply


async def streamed(engine: Any, **body: Any) -> list[Any]:
    """The data of all events but the last, which is [DONE]."""
    response = await post(engine, {**body, "stream": True})
    data = await response.get_data(as_text=False)
    assert response.status_code == 200, data
    assert b"\r" not in data
    events = data.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


def joined(chunks: list[Any]) -> dict[int, tuple[str, str]]:
    """Text and reason of each choice."""
    texts: dict[int, tuple[str, str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, _ = texts.get(choice["index"], ("", ""))
            texts[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return texts


class EchoEngine(FakeEngine):
    """Answers each request with its own prompt, a character at a time."""

    def generate(self, request: GenerateRequest) -> FakeOutputStream:
        prompt = request.prompt
        text = prompt.text if isinstance(prompt, TextPrompt) else "tokens"
        return FakeOutputStream(self, request, ScriptedReply(deltas=tuple(text), num_prompt_tokens=len(text)))


async def test_several_prompts_are_answered_in_their_order() -> None:
    """A request to the engine for each; the counts are of all, and a stream tells the same."""
    engine = EchoEngine()
    body: dict[str, Any] = {"prompt": ["abc", "de", "f"]}
    reply = await whole(engine, **body)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [(0, "abc"), (1, "de"), (2, "f")]
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["completion_tokens"] == 6
    *chunks, last = await streamed(engine, **body, stream_options={"include_usage": True})
    assert joined(chunks) == {0: ("abc", "stop"), 1: ("de", "stop"), 2: ("f", "stop")}
    assert last["choices"] == []
    assert last["usage"] == reply["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert not engine.live
    assert engine.num_aborted == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_is_wrong_ends_all(stream: bool) -> None:
    """Before any byte of a stream, and nothing is left of the others."""

    async with open_scripted_engine(Script(pace_s=1.0)) as scripted:
        with trio.fail_after(5):
            response = await post(scripted.engine, {"prompt": [[1], [2, 50_000_000], [2]], "stream": stream})
        assert scripted.engine.num_open_requests == 0
    assert response.status_code == 400
    assert json.loads(await response.get_data())["error"]["param"] == "prompt[1][1]"


async def test_one_prompt_that_fails_later_ends_the_stream() -> None:
    """With one error event, and all requests are left."""

    class Failing(EchoEngine):
        def generate(self, request: GenerateRequest) -> FakeOutputStream:
            if request.prompt == TextPrompt("bad"):
                return FakeOutputStream(self, request, ScriptedReply(deltas=("x",), error=EngineGenerateError("s")))
            go_on = trio.Event()
            return FakeOutputStream(self, request, ScriptedReply(go_on=go_on))

    engine = Failing()
    with trio.fail_after(5):
        response = await post(engine, {"prompt": ["good", "bad"], "stream": True})
        data = await response.get_data(as_text=False)
    assert data.count(b'"error"') == 1
    assert data.endswith(b"}}\n\n")
    await wait_all_tasks_blocked()
    assert not engine.live


async def test_a_client_that_vanishes_ends_the_requests_of_all_prompts() -> None:
    """Case 3 (vllm 9428): streamed or whole."""
    for stream in (False, True):
        engine = FakeEngine(ScriptedReply(go_on=trio.Event()))
        client = create_app(engine).test_client()
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:

                async def ask(client: Any = client, stream: bool = stream) -> None:
                    response = await client.post(PATH, json={"prompt": ["a", "b", "c"], "stream": stream})
                    await response.get_data()

                nursery.start_soon(ask)
                await wait_all_tasks_blocked()
                assert len(engine.live) == 3
                nursery.cancel_scope.cancel()
        assert not engine.live


async def test_pings_come_while_all_prompts_are_queued(autojump_clock: MockClock) -> None:
    """Case 46 (llama.cpp 24013): comments, and no more of them once tokens come."""
    engine = FakeEngine(ScriptedReply(deltas=("a", "b"), first_delay_s=2.5 * PING_INTERVAL_S))
    response = await post(engine, {"prompt": ["x", "y"], "stream": True})
    data = await response.get_data(as_text=False)
    assert data.startswith(b": ping\n\n: ping\n\ndata: {")
    assert data.count(b": ping") == 2
    assert data.endswith(b"data: [DONE]\n\n")


async def test_what_waits_becomes_one_write() -> None:
    """The outputs of several prompts that come while the client is written to."""
    async with open_scripted_engine(Script()) as scripted:
        client = create_app(scripted.engine).test_client()
        writes: list[bytes] = []
        body = {"prompt": [[1] * 3] * 8, "max_tokens": 50, "stream": True, "ignore_eos": True}
        async with client.request(PATH, method="POST", headers={"Content-Type": "application/json"}) as connection:
            await connection.send(json.dumps(body).encode())
            await connection.send_complete()
            with trio.fail_after(10):
                async for data in _parts(connection):
                    writes.append(data)
    chunks = b"".join(writes).count(b"data: {")
    assert chunks >= len(writes)
    assert b"".join(writes).endswith(b"data: [DONE]\n\n")


async def _parts(connection: Any) -> Any:
    data = b""
    while not data.endswith(b"[DONE]\n\n"):
        data = await connection.receive()
        yield data


async def test_a_prompt_that_is_echoed_costs_no_tokens() -> None:
    """Case 36 (vllm 6521): its log probabilities, and 0 completion tokens; streamed too."""
    engine = FakeVectorEngine(reply=ScriptedReply(num_prompt_tokens=3))
    body: dict[str, Any] = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1}
    reply = await whole(engine, **body)
    (choice,) = reply["choices"]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert len(choice["logprobs"]["tokens"]) == 3
    assert reply["usage"]["completion_tokens"] == 0
    (chunk,) = await streamed(engine, **body)
    assert chunk["choices"][0]["text"] == "abc"
    assert chunk["choices"][0]["logprobs"] == choice["logprobs"]


async def test_without_echo_no_tokens_are_a_mistake() -> None:
    """Case 36 (vllm 6521): 400."""
    response = await post(FakeEngine(), {"prompt": "abc", "max_tokens": 0})
    assert response.status_code == 400
    assert json.loads(await response.get_data())["error"]["param"] == "max_tokens"


async def test_an_echo_comes_before_the_answer() -> None:
    """Of token ids too, whose text it is; once for each choice."""
    engine = FakeVectorEngine()
    body = {"prompt": [[104, 105], [106]], "echo": True}
    reply = await whole(engine, **body)
    assert [choice["text"] for choice in reply["choices"]] == ["hiHello, world!", "jHello, world!"]
    assert joined(await streamed(engine, **body))[1] == ("jHello, world!", "stop")


@pytest.mark.parametrize("prompt", ["abcdef", list(b"abcdef")], ids=["text", "tokens"])
@pytest.mark.parametrize(("limit", "echoed"), [(3, "def"), (6, "abcdef"), (7, "abcdef"), (-1, "abcdef")])
async def test_an_echo_is_the_prompt_as_it_was_used(prompt: Any, limit: int, echoed: str) -> None:
    """One that was cut is told as it was cut, as its usage and log probabilities are."""
    async with open_scripted_engine() as scripted:
        body: dict[str, Any] = {"prompt": prompt, "echo": True, TRUNCATE: limit, "max_tokens": 2}
        plain = await whole(scripted.engine, **{**body, "echo": False})
        reply = await whole(scripted.engine, **body)
        assert reply["usage"]["prompt_tokens"] == len(echoed)
        text = reply["choices"][0]["text"]
        assert text == echoed + plain["choices"][0]["text"]
        assert joined(await streamed(scripted.engine, **body))[0][0] == text


async def test_log_probabilities_of_listed_tokens_are_told() -> None:
    """In place of the most likely ones, also without `logprobs`, which alone would be none of those."""
    engine = FakeVectorEngine()
    reply = await whole(engine, prompt="ab", logprob_token_ids=[5, 6])
    assert engine.requests[0].sampling.logprob_token_ids == (5, 6)
    assert reply["choices"][0]["logprobs"]["top_logprobs"] is not None


async def test_echoed_log_probabilities_are_numbers() -> None:
    """Case 38 (sglang 5984): with `top_k: 1` too, where most tokens have none; JSON has no infinity."""
    engine = FakeVectorEngine()
    reply = await whole(engine, prompt="ab", echo=True, logprobs=1, top_k=1)
    logprobs = reply["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 9
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert engine.requests[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize(
    ("fields", "said", "message"),
    [
        ({"guided_regex": "("}, "structured_outputs.regex: unclosed group.", "guided_regex: unclosed group."),
        ({"guided_grammar": "x"}, "structured_outputs.grammar is neither.", "guided_grammar is neither."),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: unclosed group.", None),
        ({"thinking_token_budget": 5}, "thinking_token_budget needs a reasoning parser.", None),
        ({"logprob_token_ids": [5]}, "logprob_token_ids needs others.", None),
    ],
    ids=str,
)
async def test_what_only_the_core_finds_wrong_is_a_400_with_the_clients_path(
    fields: dict[str, Any], said: str, message: str | None, prompt: Any, stream: bool
) -> None:
    """Also of a stream, whose headers wait for its first output then, and of several prompts."""
    error = RequestError(said, param=said.partition(" ")[0].removesuffix(":"))
    engine = FakeEngine(ScriptedReply(deltas=(), error=error))
    response = await post(engine, {"prompt": prompt, "stream": stream, **fields})
    assert response.status_code == 400
    found = json.loads(await response.get_data())["error"]
    assert found["message"] == (message or said)
    assert found["param"] == found["message"].partition(" ")[0].removesuffix(":")
    assert not engine.live


async def test_a_stream_of_several_prompts_with_a_form_has_all_of_its_text() -> None:
    """Also what came before the headers."""
    chunks = await streamed(FakeEngine(), prompt=["a", "b"], guided_regex="H.*")
    assert joined(chunks) == dict.fromkeys(range(2), ("Hello, world!", "stop"))


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/responses"])
async def test_a_prompt_cannot_be_cut_to_more_than_the_context(path: str) -> None:
    """The error names the client's field, not the engine's."""
    prompt = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    name = {PATH: "prompt", "/v1/responses": "input"}.get(path, "messages")
    body = {name: prompt[name], TRUNCATE: 10**6}
    error = RequestError(
        "tokenization_kwargs.truncate_prompt_tokens is too much.", param=f"tokenization_kwargs.{TRUNCATE}"
    )
    engine = FakeEngine(ScriptedReply(deltas=(), error=error))
    response = await create_app(engine).test_client().post(path, json=body)
    found = json.loads(await response.get_data())["error"]
    assert response.status_code == 400
    assert (found["param"], found["message"]) == (TRUNCATE, "truncate_prompt_tokens is too much.")


async def test_more_prompts_than_may_ever_wait_are_counted_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to the engine are made of none of them: that took seconds, in which nobody else was served."""
    monkeypatch.setattr(generate, "completion_to_generate", None)
    response = await post(FakeEngine(), {"prompt": ["a"] * 600, "n": 2})
    assert response.status_code == 400
    assert json.loads(await response.get_data())["error"]["param"] == "prompt"


@pytest.mark.parametrize("n", [0, -1])
async def test_no_answers_are_a_mistake_before_the_headers(n: int) -> None:
    """Case 37 (mistral.rs 1874): also of a stream."""
    engine = FakeEngine()
    response = await post(engine, {"prompt": "a", "n": n, "stream": True})
    assert response.status_code == 400
    assert response.content_type == "application/json"
    assert json.loads(await response.get_data())["error"]["param"] == "n"
    assert not engine.requests


async def test_usage_of_several_answers_is_the_same_streamed_and_whole() -> None:
    """Case 44 (vllm 8625): n = 3, over the real client and front end."""
    async with open_scripted_engine(Script()) as scripted:
        body: dict[str, Any] = {"prompt": [[1, 2], [3]], "n": 3, "max_tokens": 5, "ignore_eos": True}
        reply = await whole(scripted.engine, **body)
        *chunks, last = await streamed(scripted.engine, **body, stream_options={"include_usage": True})
    assert reply["usage"]["prompt_tokens"] == 3
    assert reply["usage"]["completion_tokens"] == 2 * 3 * 5
    assert last["usage"] == reply["usage"]
    assert joined(chunks) == {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in reply["choices"]}
    assert sorted(joined(chunks)) == list(range(6))


async def test_counts_so_far_come_with_every_chunk_when_asked_for() -> None:
    """Of all prompts."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await streamed(EchoEngine(), prompt=["abc", "d"], stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"logit_bias": {"5000": 1}}, "logit_bias[5000]"),
        ({"stop_token_ids": [5000]}, "stop_token_ids[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "false"}, "stream"),
        ({"timeout": 0}, "timeout"),
    ],
    ids=str,
)
async def test_wrong_parameters_name_their_path(fields: dict[str, Any], param: str) -> None:
    """Cases 34 (vllm 16529) and 42: checked by the real client; neighbours go on."""
    async with open_scripted_engine(Script()) as scripted:
        neighbour = create_app(scripted.engine).test_client()
        neighbours: list[Response] = []

        async def ask() -> None:
            neighbours.append(await neighbour.post(PATH, json={"prompt": "a", "max_tokens": 30, "ignore_eos": True}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            if "5000" in param or param == "stop_token_ids[0]":
                fields = {name: _out_of_vocabulary(value) for name, value in fields.items()}
                param = param.replace("5000", "50000000")
            response = await post(scripted.engine, {"prompt": "a", **fields})
        assert response.status_code == 400
        assert json.loads(await response.get_data())["error"]["param"] == param
        assert neighbours[0].status_code == 200


def _out_of_vocabulary(value: Any) -> Any:
    return {"50000000": 1} if isinstance(value, dict) else [50_000_000]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_what_is_no_number_is_refused(text: str) -> None:
    """Case 35 (vllm 1623)."""
    data = f'{{"prompt": "a", "temperature": {text}}}'
    client = create_app(FakeEngine()).test_client()
    response = await client.post(PATH, data=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400


async def test_tiny_parameters_are_fine() -> None:
    """Case 35 (vllm 1623)."""
    assert (await whole(FakeEngine(), prompt="a", temperature=1e-4, top_p=1e-4))["choices"]


async def test_a_prompt_that_is_too_long_tells_both_numbers() -> None:
    """Case 41 (ollama 4967): checked by the real client."""
    async with open_scripted_engine(Script()) as scripted:
        length = scripted.engine.model_config.max_model_len
        response = await post(scripted.engine, {"prompt": [1] * (length + 5)})
    error = json.loads(await response.get_data())["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert str(length + 5) in error["message"]
    assert str(length) in error["message"]


@pytest.mark.parametrize("num_checkpoints", range(8, 120, 8))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancel_at_any_checkpoint_leaves_none_of_several(num_checkpoints: int, stream: bool) -> None:
    """Cases 1 (vllm 57061) and 3: while some are entered, while they run, while the last one ends."""
    engine = EchoEngine()

    async def ask() -> None:
        response = await post(engine, {"prompt": ["abc", "de", "f"], "stream": stream})
        await response.get_data()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        for _ in range(num_checkpoints):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert not engine.live
