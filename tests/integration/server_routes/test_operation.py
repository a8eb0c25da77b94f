"""Routes that tell how the server does, and those that operate it; request ids and other headers; the task tree."""

import json
from typing import Any

import pytest
import trio
from quart import Response
from trio.testing import wait_all_tasks_blocked

from trioengine.config.engine import EngineConfig
from trioengine.config.server import ServerConfig
from trioengine.errors import CheckpointError, EngineDeadError, UnavailableError
from trioengine.observability.prometheus import MetricsPage
from trioengine.server.app import create_app
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.fake_vectors import FakeVectorEngine
from trioengine.types.messages import AddLoRA, PauseGeneration, PauseMode, Sleep, WakeUp

ADMIN = ServerConfig(enable_admin=True)
LORA_ROUTES = [("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")]
COMPLETION = {"prompt": "Once"}
SECRET = "tell nobody"


async def json_of(response: Response, status: int = 200) -> Any:
    body = json.loads(await response.get_data())
    assert response.status_code == status, body
    return body


def admin_client(engine: FakeEngine) -> Any:
    return create_app(engine, ADMIN).test_client()


ADMIN_ROUTES = [
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/collective_rpc"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("GET", "/debug/tasks"),
    *LORA_ROUTES,
]


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
async def test_nobody_operates_a_server_that_does_not_say_so(method: str, path: str) -> None:
    """There is nothing at these addresses, and the engine hears nothing."""
    engine = FakeEngine()
    response = await create_app(engine).test_client().open(path, method=method)
    assert (await json_of(response, 404))["error"]["code"] == "not_found"
    assert not engine.calls


async def test_sleep_and_wake_up_reach_the_engine() -> None:
    """With their options; is_sleeping tells in between."""
    engine = FakeEngine()
    client = admin_client(engine)
    await json_of(await client.post("/sleep?level=2&mode=wait"))
    assert (await json_of(await client.get("/is_sleeping"))) == {"is_sleeping": True}
    await json_of(await client.post("/wake_up?tags=weights&tags=kv_cache"))
    assert (await json_of(await client.get("/is_sleeping"))) == {"is_sleeping": False}
    assert Sleep(2, PauseMode.WAIT) in engine.calls
    assert WakeUp(("weights", "kv_cache")) in engine.calls


async def test_pause_and_resume_reach_the_engine() -> None:
    """Likewise."""
    engine = FakeEngine()
    client = admin_client(engine)
    await json_of(await client.post("/pause?mode=keep&clear_cache=false"))
    assert (await json_of(await client.get("/is_paused"))) == {"is_paused": True}
    await json_of(await client.post("/resume"))
    assert (await json_of(await client.get("/is_paused"))) == {"is_paused": False}
    assert engine.calls[0] == PauseGeneration(PauseMode.KEEP, clear_cache=False)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=x", "level"),
        ("/sleep?level=1&level=2", "level"),
        ("/sleep?depth=1", "depth"),
        ("/pause?mode=nap", "mode"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/wake_up?tags=legs", None),
    ],
)
async def test_a_wrong_query_names_the_parameter(path: str, param: str | None) -> None:
    """With 400."""
    error = (await json_of(await admin_client(FakeEngine()).post(path), 400))["error"]
    assert error["param"] == param or param is None


async def test_the_prefix_cache_is_reset_unless_requests_hold_it() -> None:
    """And the reply says which."""
    assert await json_of(await admin_client(FakeEngine()).post("/reset_prefix_cache")) == {"was_reset": True}


async def test_a_profile_is_started_and_its_path_told() -> None:
    """A second start is a 400."""
    client = admin_client(FakeEngine())
    await json_of(await client.post("/start_profile?prefix=mine"))
    await json_of(await client.post("/start_profile"), 400)
    assert (await json_of(await client.post("/stop_profile")))["path"].endswith(".json")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"method": "nothing"}, "method"),
        ({"method": "x", "args": [1]}, "args"),
        ({}, "method"),
        ({"method": 5}, "method"),
        ({"method": "x", "kwargs": [1]}, "kwargs"),
        ({"method": "x", "timeout": 0}, "timeout"),
    ],
    ids=str,
)
async def test_a_method_that_no_worker_has_is_refused(body: dict[str, Any], param: str) -> None:
    """And so is what is no call."""
    error = (await json_of(await admin_client(FakeEngine()).post("/collective_rpc", json=body), 400))["error"]
    assert error["param"] == param


async def test_adapters_are_loaded_listed_used_and_unloaded() -> None:
    """Models in `/v1/models`, names in `model`; the reply says which it was."""
    engine = FakeEngine(config=EngineConfig(enable_lora=True))
    client = admin_client(engine)
    body = {"lora_name": "mine", "lora_path": "/adapters/mine"}
    assert (await client.post("/v1/completions", json={**COMPLETION, "model": "mine"})).status_code == 404
    await json_of(await client.post("/v1/load_lora_adapter", json=body))
    cards = (await json_of(await client.get("/v1/models")))["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("fake-model", "fake-model", None),
        ("mine", "/adapters/mine", "fake-model"),
    ]
    assert (await json_of(await client.get("/v1/models/mine")))["id"] == "mine"
    reply = await json_of(await client.post("/v1/completions", json={**COMPLETION, "model": "mine"}))
    assert reply["model"] == "mine"
    assert engine.requests[0].lora == "mine"
    await json_of(await client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}))
    assert (await client.post("/v1/completions", json={**COMPLETION, "model": "mine"})).status_code == 404
    assert (await client.get("/v1/models/mine")).status_code == 404


async def test_a_folder_that_is_no_adapter_is_the_callers_fault() -> None:
    """With the reason and the field; nothing is logged as a failure of ours."""

    class WithoutFolders(FakeEngine):
        async def call(self, call: Any) -> Any:
            if isinstance(call, AddLoRA):
                raise CheckpointError(f"{call.path}: it has no adapter_config.json.", path=call.path)
            return await super().call(call)

    client = admin_client(WithoutFolders(config=EngineConfig(enable_lora=True)))
    body = {"lora_name": "mine", "lora_path": "/nowhere"}
    error = (await json_of(await client.post("/v1/load_lora_adapter", json=body), 400))["error"]
    assert error["param"] == "lora_path"
    assert error["message"] == "/nowhere: it has no adapter_config.json."


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
async def test_an_engine_with_adapters_has_their_routes_and_no_others(method: str, path: str) -> None:
    engine = FakeEngine(config=EngineConfig(enable_lora=True))
    response = await create_app(engine).test_client().open(path, method=method, json={})
    assert response.status_code == (400 if (method, path) in LORA_ROUTES else 404)


async def test_an_adapter_that_another_server_loaded_is_known() -> None:
    """The engine is asked when a name is new here."""
    engine = FakeEngine(config=EngineConfig(enable_lora=True))
    client = admin_client(engine)
    await engine.add_lora("theirs", "/adapters/theirs")
    assert (await client.post("/v1/completions", json={**COMPLETION, "model": "theirs"})).status_code == 200


async def test_the_served_models_name_is_no_adapters() -> None:
    """Nor can one be unloaded that is not there."""
    client = admin_client(FakeEngine(config=EngineConfig(enable_lora=True)))
    body = {"lora_name": "fake-model", "lora_path": "/x"}
    assert (await json_of(await client.post("/v1/load_lora_adapter", json=body), 400))["error"]["param"] == "lora_name"
    gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "none"})
    assert (await json_of(gone, 404))["error"]["param"] == "lora_name"


async def test_a_server_that_drains_is_healthy_but_not_ready() -> None:
    """So that a balancer sends nothing more, and nobody kills it."""
    shutdown = trio.Event()
    client = create_app(FakeVectorEngine(), shutdown=shutdown).test_client()
    assert (await client.get("/ready")).status_code == 200
    shutdown.set()
    ready = await client.get("/ready")
    assert ready.status_code == 503
    assert "Retry-After" in ready.headers
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ping")).status_code == 200
    for path, body in (("/v1/completions", COMPLETION), ("/v1/embeddings", {"input": "a"})):
        assert (await client.post(path, json=body)).status_code == 503


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/load", "/v1/models"])
async def test_a_dead_engine_is_neither_healthy_nor_ready(path: str) -> None:
    """Case 9 (vllm 19881)."""
    client = create_app(FakeEngine(health_error=EngineDeadError("dead"))).test_client()
    assert (await json_of(await client.get(path), 503))["error"]["code"] == "engine_dead"


@pytest.mark.parametrize(("method", "path"), [route for route in ADMIN_ROUTES if route != ("GET", "/debug/tasks")])
async def test_nobody_waits_for_an_operation_of_an_engine_that_hangs(method: str, path: str) -> None:
    """The core would not reply, for who knows how long; what the server's own tasks do can be seen even then."""
    engine = FakeEngine(health_error=EngineDeadError("It shows no sign of life."))
    body = {"method": "m", "lora_name": "a", "lora_path": "/a"} if method == "POST" else None
    client = create_app(engine, ADMIN).test_client()
    response = await client.open(path, method=method, json=body)
    assert (await json_of(response, 503))["error"]["code"] == "engine_dead"
    assert not engine.calls
    assert (await client.get("/debug/tasks")).status_code == 200


async def test_metrics_are_the_ones_that_were_given() -> None:
    """In the form that the scraper asks for; without any there is no such route."""

    class Source:
        def render(self, accept: str | None = None) -> MetricsPage:
            return MetricsPage(f"# {accept}\n".encode(), "text/plain; version=0.0.4")

    response = await create_app(FakeEngine(), metrics=Source()).test_client().get("/metrics", headers={"Accept": "x"})
    assert await response.get_data(as_text=True) == "# x\n"
    assert response.content_type == "text/plain; version=0.0.4"
    assert (await create_app(FakeEngine()).test_client().get("/metrics")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": ["a"] * 9}), ("/v1/completions", {"prompt": "a", "stream": True})],
)
async def test_an_engine_that_is_full_says_when_to_come_again(path: str, body: dict[str, Any]) -> None:
    """Case 20 (vllm 2901): 503 with Retry-After, before the prompt is tokenized, and never a hang."""

    class Full(FakeVectorEngine):
        def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
            raise UnavailableError("The queue is full.", retry_after_s=2.0)

        def generate(self, request: Any) -> Any:
            raise AssertionError("the engine was asked")

    with trio.fail_after(5):
        response = await create_app(Full()).test_client().post(path, json=body)
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "2"


@pytest.mark.parametrize("body", [{"prompt": ["a"] * 9}, {"prompt": ["a"] * 3, "n": 3}], ids=["prompts", "answers"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_that_never_fits_is_not_told_to_come_again(body: dict[str, Any], stream: bool) -> None:
    """An empty engine lets in one request of any size, but of a batch as many as may wait. The largest one fits."""
    engine = FakeEngine(config=EngineConfig(max_num_queued_reqs=8))
    client = create_app(engine).test_client()
    response = await client.post("/v1/completions", json={**body, "stream": stream})
    error = await json_of(response, 400)
    assert error["error"]["param"] == "prompt"
    assert "9" in error["error"]["message"]
    assert "Retry-After" not in response.headers
    assert not engine.requests
    assert (await client.post("/v1/completions", json={"prompt": ["a"] * 8, "stream": stream})).status_code == 200


@pytest.mark.parametrize("given", ["mine-1", "a" * 128])
async def test_a_request_id_is_kept(given: str) -> None:
    """In the header, in the reply and in the engine."""
    engine = FakeEngine()
    headers = {"X-Request-Id": given}
    response = await create_app(engine).test_client().post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.headers["X-Request-Id"] == given
    assert (await json_of(response))["id"] == engine.requests[0].request_id == f"cmpl-{given}"


@pytest.mark.parametrize("given", ["a" * 129, "with space", "", "naïve"])
async def test_a_request_id_that_fits_no_log_is_replaced(given: str) -> None:
    """As one that was not given; an error has one too."""
    client = create_app(FakeEngine()).test_client()
    first = await client.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": given})
    second = await client.post("/v1/completions", json={}, headers={"X-Request-Id": given})
    assert second.status_code == 400
    ids = {first.headers["X-Request-Id"], second.headers["X-Request-Id"]}
    assert len(ids - {given}) == 2
    assert (await json_of(first))["id"] == "cmpl-" + first.headers["X-Request-Id"]


async def test_headers_reach_the_engine() -> None:
    """Trace context, session and rank."""
    engine = FakeEngine()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": trace, "tracestate": "a=b", "X-Session-Id": "s1", "X-data-parallel-rank": "1"}
    client = create_app(engine).test_client()
    await json_of(await client.post("/v1/completions", json={**COMPLETION, "priority": 3}, headers=headers))
    (request,) = engine.requests
    assert request.trace_headers == {"traceparent": trace, "tracestate": "a=b"}
    assert (request.session_id, request.data_parallel_rank, request.priority) == ("s1", 1, 3)


@pytest.mark.parametrize(("name", "value"), [("X-Session-Id", "a b"), ("X-data-parallel-rank", "-1")])
async def test_a_header_that_cannot_be_used_is_named(name: str, value: str) -> None:
    """With 400."""
    response = (
        await create_app(FakeEngine()).test_client().post("/v1/completions", json=COMPLETION, headers={name: value})
    )
    assert (await json_of(response, 400))["error"]["param"] == name


async def test_unknown_fields_are_told_or_refused() -> None:
    """By name; those that clients send for other servers' sake are no news."""
    body = {**COMPLETION, "wibble": 1, "user": "me", "metadata": {}}
    response = await create_app(FakeEngine()).test_client().post("/v1/completions", json=body)
    assert response.headers["X-TrioEngine-Warning"] == "fields without effect: wibble"
    strict = await create_app(FakeEngine(), ServerConfig(strict=True)).test_client().post("/v1/completions", json=body)
    assert (await json_of(strict, 400))["error"]["param"] == "wibble"


async def test_the_task_tree_shows_who_waits_for_what() -> None:
    """And which requests are open; of prompts and answers it shows nothing."""
    engine = FakeEngine(ScriptedReply(deltas=(SECRET, SECRET), go_on=trio.Event()))
    client = admin_client(engine)

    async def ask(stream: bool) -> None:
        response = await client.post("/v1/completions", json={"prompt": SECRET, "stream": stream})
        await response.get_data()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, True)
            nursery.start_soon(ask, False)
            await wait_all_tasks_blocked()
            response = await client.get("/debug/tasks")
            text = await (await client.get("/debug/tasks?format=text")).get_data(as_text=True)
            nursery.cancel_scope.cancel()
    data = await response.get_data(as_text=True)
    assert SECRET not in data
    assert SECRET not in text
    reply = json.loads(data)
    states = {request["state"]: request for request in reply["requests"]}
    assert set(states) == {"streaming", "waiting"}
    assert states["streaming"]["num_tokens"] == 1
    assert states["waiting"]["num_prompt_tokens"] == 5
    assert "_leave_at_end" in data
    assert "trioengine.server.stream_body._leave_at_end" in text
    assert reply["tasks"]["num_tasks"] > 4
    assert not reply["tasks"]["is_cut"]


async def test_requests_that_have_ended_are_not_open() -> None:
    """However they ended."""
    engine = FakeVectorEngine()
    client = admin_client(engine)
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
        ("/v1/completions", {"prompt": "a", "temperature": -1}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/embeddings", {"input": [[5000]]}),
    ):
        await (await client.post(path, json=body)).get_data()
    await wait_all_tasks_blocked()
    assert (await json_of(await client.get("/debug/tasks")))["requests"] == []
