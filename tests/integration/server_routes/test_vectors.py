"""Embeddings, pooling, labels, scores and ranks over an engine whose vectors tell which tokens they are of."""

import base64
import json
from typing import Any

import numpy as np
import pytest
import trio
from openai.types import CreateEmbeddingResponse
from quart import Response
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.config.server import ServerConfig
from trioengine.errors import EngineDeadError, EngineGenerateError, TrioEngineError, UnavailableError
from trioengine.server.app import create_app
from trioengine.server.routes.encode import MAX_RUNNING_INPUTS
from trioengine.testing.fake_engine import FakeEngine
from trioengine.testing.fake_vectors import FakeVectorEngine, pooling_facts
from trioengine.types.pooling import EncodeRequest, PoolingOutput, PoolingTask, TextPairPrompt
from trioengine.types.request import TextPrompt, TokensPrompt

PATH = "/v1/embeddings"


async def post(engine: FakeEngine, path: str, body: dict[str, Any], config: ServerConfig | None = None) -> Response:
    return await create_app(engine, config).test_client().post(path, json=body)


async def json_of(response: Response) -> Any:
    body = json.loads(await response.get_data())
    assert response.status_code == 200, body
    return body


async def error_of(response: Response) -> Any:
    body = await response.get_data(as_text=False)
    assert len(body) < 16 * 1024
    return json.loads(body)["error"]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [TextPrompt("ab")]),
        (["a", "bcd"], [TextPrompt("a"), TextPrompt("bcd")]),
        ([7, 8, 9], [TokensPrompt([7, 8, 9])]),
        ([[7], [8, 9]], [TokensPrompt([7]), TokensPrompt([8, 9])]),
    ],
)
async def test_inputs_of_every_kind_give_vectors_in_their_order(given: object, prompts: list[Any]) -> None:
    """Case 39 (openai-python 1490): texts and token ids, one or many; the counts are of all."""
    engine = FakeVectorEngine()
    reply = await json_of(await post(engine, PATH, {"input": given, "model": "fake-model"}))
    assert [request.prompt for request in engine.encode_requests] == prompts
    assert [item["index"] for item in reply["data"]] == list(range(len(prompts)))
    lengths = [item["embedding"][0] for item in reply["data"]]
    assert reply["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert CreateEmbeddingResponse.model_validate(reply).data[-1].embedding[0] == lengths[-1]


async def test_vectors_come_as_base64_of_little_endian_floats() -> None:
    """Case 39 (openai-python 1490): which the SDK asks for by itself; the same numbers as in a list."""
    floats = await json_of(await post(FakeVectorEngine(), PATH, {"input": ["a", "bc"]}))
    coded = await json_of(await post(FakeVectorEngine(), PATH, {"input": ["a", "bc"], "encoding_format": "base64"}))
    for one, other in zip(floats["data"], coded["data"], strict=True):
        assert np.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist() == one["embedding"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [1, 5000]}, "input[0][1]"),
        ({"input": ["a", [5000]]}, "input[1][0]"),
        ({"input": ["a", "b" * 3000]}, "input[1]"),
        ({"input": {}}, "input"),
        ({}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "timeout": 0}, "timeout"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a", "X-data-parallel-rank": 1, "priority": "high"}, "priority"),
    ],
    ids=str,
)
async def test_what_cannot_be_embedded_names_its_path(body: dict[str, Any], param: str) -> None:
    """Cases 39 and 42: and the engine goes on."""
    engine = FakeVectorEngine()
    response = await post(engine, PATH, body)
    assert response.status_code == (404 if param == "model" else 400)
    assert (await error_of(response))["param"] == param
    assert engine.num_encoding == 0
    assert (await post(engine, PATH, {"input": "a"})).status_code == 200


async def test_an_error_of_many_wrong_items_is_short() -> None:
    """Case 21 (vllm 49239): 3,000 of them."""
    response = await post(FakeVectorEngine(), PATH, {"input": [{"x": "y" * 50}] * 3000})
    assert response.status_code == 400
    assert (await error_of(response))["param"] == "input[0]"


async def test_options_of_a_vector_reach_the_engine() -> None:
    """Dimensions, truncation, priority and salt."""
    engine = FakeVectorEngine()
    options = {"dimensions": 2, "truncate_prompt_tokens": 3, "priority": 4, "cache_salt": "s"}
    reply = await json_of(await post(engine, PATH, {"input": "abcdef", **options}))
    assert reply["data"][0]["embedding"] == [3.0, ord("a")]
    (request,) = engine.encode_requests
    assert (request.priority, request.cache_salt, request.truncate_prompt_tokens) == (4, "s", 3)


async def test_headers_count_for_each_input() -> None:
    """As for texts: the session's core, the core by its rank, and the span that those of the request belong to."""
    engine = FakeVectorEngine()
    headers = {"X-Session-Id": "s", "X-data-parallel-rank": "0", "traceparent": "00-1-2-01"}
    client = create_app(engine).test_client()
    response = await client.post("/v1/embeddings", json={"input": ["a", "b"]}, headers=headers)
    assert response.status_code == 200
    said = [(each.session_id, each.data_parallel_rank, each.trace_headers) for each in engine.encode_requests]
    assert said == [("s", 0, {"traceparent": "00-1-2-01"})] * 2


async def test_a_model_without_vectors_says_so() -> None:
    """With 400."""
    assert (await error_of(await post(FakeEngine(), PATH, {"input": "a"})))["param"] == "model"


async def test_many_inputs_run_at_once_but_not_all() -> None:
    """So that one request does not take the places of all others; every input gets its vector."""
    engine = FakeVectorEngine()
    inputs = [[index % 900 + 1] for index in range(2000)]
    reply = await json_of(await post(engine, PATH, {"input": inputs}))
    assert [item["embedding"][1] for item in reply["data"]] == [float(each[0]) for each in inputs]
    assert engine.most_encoding == MAX_RUNNING_INPUTS


async def test_a_batch_that_is_cancelled_half_way_leaves_nothing() -> None:
    """Case 6 (vllm 25568): 2,000 inputs."""
    engine = FakeVectorEngine(go_on=trio.Event())
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, engine, PATH, {"input": ["a"] * 2000})
            await wait_all_tasks_blocked()
            assert engine.num_encoding == MAX_RUNNING_INPUTS
            nursery.cancel_scope.cancel()
    assert engine.num_encoding == 0
    assert len(engine.encode_requests) == MAX_RUNNING_INPUTS


async def test_a_batch_larger_than_the_queue_goes_on_with_what_fits() -> None:
    """Case 20 (vllm 2901): it needs no second try; one that finds no place at all is told to come again."""

    class Small(FakeVectorEngine):
        num_places = 3

        async def encode(self, request: EncodeRequest) -> PoolingOutput:
            if self.num_encoding >= self.num_places:
                raise UnavailableError("The engine is full.", retry_after_s=3.0)
            return await super().encode(request)

    engine = Small()
    with trio.fail_after(10):
        reply = await json_of(await post(engine, PATH, {"input": [[index + 1] for index in range(500)]}))
    assert [item["embedding"][1] for item in reply["data"]] == [float(index + 1) for index in range(500)]
    assert engine.most_encoding == 3
    engine.num_places = 0
    response = await post(engine, PATH, {"input": ["a", "b"]})
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "3"


async def test_the_first_failure_ends_the_batch() -> None:
    """As one answer; nothing else is left running."""

    class Failing(FakeVectorEngine):
        async def encode(self, request: EncodeRequest) -> PoolingOutput:
            if request.prompt == TextPrompt("bad"):
                raise EngineGenerateError("secret")
            return await super().encode(request)

    engine = Failing(go_on=trio.Event())
    with trio.fail_after(10):
        response = await post(engine, PATH, {"input": ["a", "bad", "b"]})
    assert response.status_code == 500
    assert (await error_of(response))["code"] == "generation_failed"
    assert engine.num_encoding == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_what_is_no_number_is_a_failure(value: float, encoding_format: str) -> None:
    """Case 38 (sglang 5984): never `NaN` in what should be JSON."""

    class Overflowing(FakeVectorEngine):
        async def encode(self, request: EncodeRequest) -> PoolingOutput:
            output = await super().encode(request)
            return PoolingOutput(output.request_id, output.prompt_token_ids, output.data * np.float32(value))

    with np.errstate(invalid="ignore"):
        response = await post(Overflowing(), PATH, {"input": "a", "encoding_format": encoding_format})
    assert response.status_code == 500
    assert (await error_of(response))["code"] == "generation_failed"


@pytest.mark.parametrize(
    ("error", "status"), [(EngineDeadError("dead", cause="secret"), 503), (EngineGenerateError("x"), 500)]
)
async def test_an_engine_that_fails_is_an_error_not_a_group(error: TrioEngineError, status: int) -> None:
    """Whoever raises it."""
    response = await post(FakeVectorEngine(health_error=error), PATH, {"input": ["a", "b"]})
    assert response.status_code == status
    assert (await error_of(response))["code"] == error.code


async def test_a_timeout_ends_the_batch(autojump_clock: MockClock) -> None:
    """With 504, and nothing left."""
    engine = FakeVectorEngine(go_on=trio.Event())
    started_s = trio.current_time()
    response = await post(engine, PATH, {"input": "a", "timeout": 1.5})
    assert response.status_code == 504
    assert "its timeout of 1.5 seconds" in (await error_of(response))["message"]
    assert trio.current_time() - started_s == pytest.approx(1.5)
    assert engine.num_encoding == 0


async def test_a_server_that_stops_says_so() -> None:
    """To whoever still waits for vectors."""
    engine, stop = FakeVectorEngine(go_on=trio.Event()), trio.Event()
    client = create_app(engine, stop=stop).test_client()
    responses: list[Response] = []

    async def ask() -> None:
        responses.append(await client.post(PATH, json={"input": "a"}))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            stop.set()
    assert responses[0].status_code == 503
    assert engine.num_encoding == 0


async def test_pooling_tells_what_the_model_says() -> None:
    """A vector, one for each token, or labels."""
    engine = FakeVectorEngine()
    default = await json_of(await post(engine, "/pooling", {"input": "abc"}))
    tokens = await json_of(await post(engine, "/pooling", {"input": "abc", "task": "token_embed"}))
    labels = await json_of(await post(engine, "/pooling", {"input": "abc", "task": "classify"}))
    assert default["data"][0]["data"] == [3.0, 97.0, 0.5, -1.0]
    assert tokens["data"][0]["data"] == [[3.0, 97.0, 0.5, -1.0]] * 3
    assert labels["data"][0]["data"] == [0.25, 0.75]


async def test_classify_names_the_most_likely_label() -> None:
    """With all probabilities."""
    reply = await json_of(await post(FakeVectorEngine(), "/classify", {"input": ["a", "b"]}))
    assert reply["data"][1] == {"index": 1, "label": "yes", "probs": [0.25, 0.75], "num_classes": 2}


async def test_scores_are_the_models_where_it_reads_pairs() -> None:
    """One text against many, or pair by pair."""
    engine = FakeVectorEngine(model_config=pooling_facts(PoolingTask.SCORE))
    await json_of(await post(engine, "/v1/score", {"text_1": "q", "text_2": ["a", "bb"]}))
    await json_of(await post(engine, "/score", {"text_1": ["q", "r"], "text_2": ["a", "bb"]}))
    pairs = [request.prompt for request in engine.encode_requests]
    assert pairs == [TextPairPrompt(*pair) for pair in (("q", "a"), ("q", "bb"), ("q", "a"), ("r", "bb"))]


async def test_scores_of_embeddings_are_cosines() -> None:
    """The best document first, equals in the order of the request."""
    reply = await json_of(
        await post(FakeVectorEngine(), "/v1/rerank", {"query": "a", "documents": ["zzzz", "a", "a"], "top_n": 2})
    )
    assert [result["index"] for result in reply["results"]] == [1, 2]
    assert reply["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert reply["results"][0]["document"] == {"text": "a"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/pooling", {"input": "a", "task": "score"}, "task"),
        ("/pooling", {"input": "a", "task": "sing"}, "task"),
    ],
    ids=str,
)
async def test_what_cannot_be_compared_names_its_path(path: str, body: dict[str, Any], param: str) -> None:
    """With 400."""
    response = await post(FakeVectorEngine(), path, body)
    assert response.status_code == 400
    assert (await error_of(response))["param"] == param


async def test_unknown_fields_of_a_batch_are_told_or_refused() -> None:
    """As on all routes."""
    body = {"input": "a", "wibble": 1, "user": "me"}
    response = await post(FakeVectorEngine(), PATH, body)
    assert response.headers["X-TrioEngine-Warning"] == "fields without effect: wibble"
    strict = await post(FakeVectorEngine(), PATH, body, ServerConfig(strict=True))
    assert strict.status_code == 400
    assert (await error_of(strict))["param"] == "wibble"
