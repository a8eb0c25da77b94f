"""The OpenAPI document is true: every route is in it, every reply is as it says, and its bounds are those checked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from quart import Response

from trioengine.config.engine import EngineConfig
from trioengine.config.server import ServerConfig
from trioengine.errors import RequestError
from trioengine.observability.prometheus import MetricsPage
from trioengine.openai.chat_protocol import parse_chat_request
from trioengine.openai.completion_protocol import parse_completion_request
from trioengine.server.app import create_app
from trioengine.testing.fake_vectors import FakeVectorEngine, pooling_facts
from trioengine.types.pooling import PoolingTask

MESSAGES = [{"role": "user", "content": "Hi"}]


class Metrics:
    def render(self, accept: str | None = None) -> MetricsPage:
        return MetricsPage(b"# nothing\n", "text/plain; version=0.0.4; charset=utf-8")


def make_app(config: ServerConfig | None = None, *tasks: PoolingTask) -> Any:
    facts = pooling_facts(*(tasks or (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.CLASSIFY)))
    engine = FakeVectorEngine(model_config=facts, config=EngineConfig(enable_lora=True))
    return create_app(engine, config or ServerConfig(enable_admin=True), metrics=Metrics())


async def document_of(app: Any) -> Any:
    response = await app.test_client().get("/openapi.json")
    assert response.status_code == 200
    return json.loads(await response.get_data())


def validator(document: Any, schema: Mapping[str, Any]) -> Any:
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


def body_schema(document: Any, path: str) -> Any:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


@pytest.mark.parametrize("config", [ServerConfig(web_page=False), ServerConfig(web_page=False, enable_admin=True)])
async def test_the_document_has_the_routes_that_there_are(config: ServerConfig) -> None:
    """Walked both ways."""
    app = make_app(config)
    document = await document_of(app)
    served = {
        (method.lower(), rule.rule.replace("<path:", "{").replace(">", "}"))
        for rule in app.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert described == served


async def test_every_reference_and_schema_is_sound() -> None:
    """A validator takes each; nothing is described that nothing refers to."""
    document = await document_of(make_app())
    text = json.dumps(document)
    for name, schema in document["components"]["schemas"].items():
        validator(document, schema)
        assert f'"#/components/schemas/{name}"' in text
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))


async def test_fields_are_described() -> None:
    """By the docstrings that programmers read; the text of every request and of its fields is there."""
    document = await document_of(make_app())
    schemas = document["components"]["schemas"]
    assert schemas["EmbeddingRequest"]["properties"]["dimensions"]["description"]
    assert schemas["CompletionRequest"]["properties"]["temperature"]["description"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert "sampling" not in schemas["CompletionRequest"]["properties"]
    assert "key" not in document["components"].get("securitySchemes", {})


async def test_a_server_with_keys_says_which_routes_need_one() -> None:
    """All but those that tell of health."""
    document = await document_of(make_app(ServerConfig(api_key=("k",))))
    assert document["security"] == [{"key": []}]
    open_paths = {path for path, methods in document["paths"].items() if methods.get("get", {}).get("security") == []}
    assert open_paths == {"/health", "/ready", "/ping"}


CASES: list[tuple[str, str, Any]] = [
    ("post", "/v1/chat/completions", {"messages": MESSAGES}),
    ("post", "/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
    ("post", "/v1/chat/completions", {"messages": MESSAGES, "return_token_ids": True}),
    ("post", "/v1/completions", {"prompt": "a"}),
    ("post", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True}),
    ("post", "/v1/completions", {"prompt": "a", "return_token_ids": True}),
    ("post", "/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    ("post", "/v1/responses/input_tokens", {"input": "a"}),
    ("get", "/v1/responses/{response_id}", None),
    ("get", "/v1/responses/{response_id}/input_items", None),
    ("post", "/v1/responses/{response_id}/cancel", None),
    ("delete", "/v1/responses/{response_id}", None),
    ("post", "/v1/embeddings", {"input": ["a", "b"]}),
    ("post", "/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("post", "/pooling", {"input": "a", "task": "token_embed"}),
    ("post", "/classify", {"input": "a"}),
    ("post", "/v1/score", {"text_1": "a", "text_2": "b"}),
    ("post", "/score", {"text_1": "a", "text_2": "b"}),
    ("post", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("post", "/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
    ("post", "/v2/rerank", {"query": "a", "documents": ["b"]}),
    ("post", "/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("post", "/tokenize", {"messages": MESSAGES}),
    ("post", "/detokenize", {"tokens": [97]}),
    ("get", "/v1/models", None),
    ("get", "/v1/models/{model_id}", "/v1/models/fake-model"),
    ("get", "/health", None),
    ("get", "/ready", None),
    ("get", "/ping", None),
    ("get", "/version", None),
    ("get", "/load", None),
    ("get", "/metrics", None),
    ("post", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
    ("post", "/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("post", "/sleep", None),
    ("get", "/is_sleeping", None),
    ("post", "/wake_up", None),
    ("post", "/pause", None),
    ("get", "/is_paused", None),
    ("post", "/resume", None),
    ("post", "/reset_prefix_cache", None),
    ("post", "/collective_rpc", {"method": "nothing"}),
    ("post", "/start_profile", None),
    ("post", "/stop_profile", None),
    ("get", "/debug/tasks", None),
    ("get", "/openapi.json", None),
]


REFUSED = {"/collective_rpc", "/v1/responses/{response_id}/cancel"}
"""No worker has the method; only what is in the background can be cancelled."""


async def ask(client: Any, method: str, path: str, case: Any) -> Response:
    if isinstance(case, str):
        return await client.get(case)
    return await client.open(path, method=method.upper(), json=case if method == "post" else None)


async def test_every_route_answers_as_the_document_says() -> None:
    """One server is asked all of it, in order; what is asked is allowed by the document too."""
    app = make_app()
    client = app.test_client()
    document = await document_of(app)
    response_id = ""
    for method, path, case in CASES:
        operation = document["paths"][path][method]
        if isinstance(case, dict) and "requestBody" in operation:
            validator(document, body_schema(document, path)).validate(case)
        response = await ask(client, method, path.replace("{response_id}", response_id), case)
        described = operation["responses"][str(response.status_code)].get("content", {})
        data = await response.get_data(as_text=False)
        content_type = (response.content_type or "").partition(";")[0]
        assert response.status_code == (400 if path in REFUSED else 200), (path, data)
        if path == "/v1/responses":
            response_id = json.loads(data)["id"]
        if content_type == "application/json" and described:
            validator(document, described["application/json"]["schema"]).validate(json.loads(data))
        elif described:
            assert content_type in described
    assert {(method, path) for method, path, _ in CASES} == {
        (method, path) for path, methods in document["paths"].items() for method in methods
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "echo": True}),
        ("/v1/completions", {"prompt": "a", "return_token_ids": True}),
        ("/v1/responses", {"input": "a"}),
    ],
    ids=str,
)
async def test_every_event_is_as_the_document_says(path: str, body: dict[str, Any]) -> None:
    """With usage and without."""
    app = make_app()
    document = await document_of(app)
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    events = validator(document, content["text/event-stream"]["schema"]["x-event"])
    for options in ({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        response = await app.test_client().post(path, json={**body, "stream": True, "stream_options": options})
        data = await response.get_data(as_text=True)
        lines = [line.removeprefix("data: ") for line in data.split("\n") if line.startswith("data: {")]
        assert len(lines) >= 4
        for line in lines:
            events.validate(json.loads(line))


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("post", "/v1/completions", {}, 400),
        ("post", "/v1/completions", {"prompt": "a", "model": "x"}, 404),
        ("post", "/v1/embeddings", {"input": ""}, 400),
        ("post", "/sleep?level=9", None, 400),
        ("get", "/v1/models/none", None, 404),
    ],
)
async def test_every_error_is_as_the_document_says(method: str, path: str, body: Any, status: int) -> None:
    """In OpenAI's shape."""
    app = make_app()
    document = await document_of(app)
    response = await ask(app.test_client(), method, path, body)
    assert response.status_code == status
    template = "/v1/models/{model_id}" if path.startswith("/v1/models") else path.partition("?")[0]
    described = document["paths"][template][method]["responses"][str(status)]["content"]["application/json"]["schema"]
    validator(document, described).validate(json.loads(await response.get_data()))


BOUNDED = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "n",
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", BOUNDED)
async def test_the_bounds_are_the_ones_that_are_checked(path: str, name: str) -> None:
    """A value on a bound is taken, one beyond is a 400 that names the field."""
    document = await document_of(make_app())
    schema = document["components"]["schemas"][body_schema(document, path)["$ref"].rpartition("/")[2]]
    (option,) = (each for each in schema["properties"][name]["anyOf"] if each.get("type") != "null")
    step = 1 if option["type"] == "integer" else 0.001
    base: dict[str, Any] = {"prompt": "a", "max_tokens": None} if path == "/v1/completions" else {"messages": MESSAGES}
    within = [option[bound] for bound in ("minimum", "maximum") if bound in option]
    beyond = [option["minimum"] - step] + ([option["maximum"] + step] if "maximum" in option else [])
    assert within
    for value in within:
        check(path, {**base, name: value})
    for value in beyond:
        with pytest.raises(RequestError) as caught:
            check(path, {**base, name: value})
        assert caught.value.param == name


def check(path: str, body: dict[str, Any]) -> None:
    """As a route and the engine do."""
    data = json.dumps(body).encode()
    request = parse_completion_request(data) if path == "/v1/completions" else parse_chat_request(data)
    if request.sampling.n < 1:
        raise RequestError("n", param="n")
    request.sampling.validate()


async def test_null_is_as_if_left_out() -> None:
    """In the document as on the server, for every field that need not be there."""
    app = make_app()
    document = await document_of(app)
    for path, base in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ):
        reference = body_schema(document, path)
        name = (reference.get("$ref") or reference["anyOf"][0]["$ref"]).rpartition("/")[2]
        nulls = dict.fromkeys(document["components"]["schemas"][name]["properties"])
        body = {**nulls, **base}
        validator(document, body_schema(document, path)).validate(body)
        assert (await app.test_client().post(path, json=body)).status_code == 200


async def test_the_page_about_the_api_names_every_route() -> None:
    """And the fields that are not in `SamplingParams`, which it refers to."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    document = await document_of(make_app())
    schemas = document["components"]["schemas"]
    for path in document["paths"]:
        assert f"{path}`" in page or f"{path}?" in page, path
    names = {
        name
        for class_name in ("EmbeddingRequest", "PoolingRequest", "ScoreRequest", "RerankRequest", "DetokenizeRequest")
        for name in schemas[class_name]["properties"]
    }
    for name in names - {"task"}:
        assert f"`{name}`" in page, name
