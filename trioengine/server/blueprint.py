"""OpenAI's routes over an engine, as a blueprint for anybody's Quart-Trio application.

It maps: bodies to requests, outputs to bodies, exceptions to error objects. All rules are in `trioengine.openai`.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, cast

import trio
from quart import Blueprint, Response
from quart.blueprints import BlueprintSetupState

from trioengine import __version__
from trioengine.client.engine import Engine
from trioengine.client.interface import EngineClient
from trioengine.config.server import ServerConfig
from trioengine.observability.prometheus import PrometheusStatLogger
from trioengine.openai.openapi import Operation, openapi_document
from trioengine.server.context import MetricsSource, ServerContext
from trioengine.server.replies import error_response, json_response
from trioengine.server.responses import Responses, store_limits
from trioengine.server.routes.request import REQUEST_ID_HEADER, http_request_id, request_id_of_gate
from trioengine.server.routes.table import ROUTES, Route
from trioengine.server.websocket_routes import WebSocketRoutes, websocket_handlers

OPENAPI_PATH = "/openapi.json"
_DOCUMENT = Operation(method="get", path=OPENAPI_PATH, tag="information", summary="This document.", errors=(401, 403))


def openai_blueprint(
    engine: EngineClient,
    config: ServerConfig | None = None,
    *,
    shutdown: trio.Event | None = None,
    stop: trio.Event | None = None,
    metrics: MetricsSource | None = None,
    responses: Responses | None = None,
) -> Blueprint:
    """The routes of `routes.table`, `/openapi.json`, which describes them, and the WebSocket `/v1/stream`.

    A client that disconnects ends its request in the engine. Errors of these routes are OpenAI's error objects.

    Args:
        engine: open for as long as the application serves.
        config: how requests are taken (`strict`), and which routes there are (`enable_admin`). What is about
            connections is the server's business.
        shutdown: once it is set, new requests are refused with 503; those that run go on.
        stop: once it is set, those that run end with an error: an event in a stream, else 503.
        metrics: what `/metrics` shows. None takes the engine's own; where it counts nothing, there is no such route.
        responses: of `open_responses`, which makes some in the background. None keeps responses as the config says, and
            makes none there.
    """
    config = ServerConfig() if config is None else config
    metrics = metrics or _own_metrics(engine)
    context = ServerContext(
        engine, config, shutdown, stop, metrics, responses=responses or Responses(store_limits(config))
    )
    routes = offered_routes(
        enable_admin=config.enable_admin, has_metrics=metrics is not None, has_lora=engine.config.enable_lora
    )
    blueprint = Blueprint("openai", __name__)
    for route in routes:
        endpoint = route.operation.method + route.operation.path.replace(".", "_")
        handler = functools.update_wrapper(functools.partial(route.handler, context), route.handler)
        blueprint.add_url_rule(route.rule, endpoint, handler, methods=[route.operation.method.upper()])
    operations = [*(route.operation for route in routes), _DOCUMENT]
    blueprint.get(OPENAPI_PATH)(_Document(operations, has_keys=bool(config.api_key)).answer)
    blueprint.register_error_handler(Exception, handle_error)
    blueprint.after_request(_add_request_id)
    blueprint.record_once(functools.partial(_add_websockets, context))
    return blueprint


def _add_websockets(context: ServerContext, state: BlueprintSetupState) -> None:
    handlers = websocket_handlers(context, state.url_prefix or "")
    app = cast(Any, state.app)
    app.asgi_app = WebSocketRoutes(app.asgi_app, handlers)


def _own_metrics(engine: EngineClient) -> MetricsSource | None:
    loggers = engine.stat_loggers if isinstance(engine, Engine) else ()
    return next((logger for logger in loggers if isinstance(logger, PrometheusStatLogger)), None)


def offered_routes(*, enable_admin: bool, has_metrics: bool, has_lora: bool = False) -> Sequence[Route]:
    """The routes of an application with these options."""
    return [
        route
        for route in ROUTES
        if (enable_admin or not route.is_admin or (has_lora and route.is_lora))
        and (has_metrics or route.operation.path != "/metrics")
    ]


async def handle_error(error: Exception) -> Response:
    """Quart's error handler of this API. A border: whatever a route raises becomes an answer."""
    return error_response(error)


async def _add_request_id(response: Response) -> Response:
    # `serve` has one for every answer, also for those that come from no route.
    if request_id_of_gate() is None:
        response.headers[REQUEST_ID_HEADER] = http_request_id()
    return response


class _Document:
    """The OpenAPI document, made when it is first asked for: it takes a tenth of a second."""

    def __init__(self, operations: Sequence[Operation], *, has_keys: bool) -> None:
        self._operations = operations
        self._has_keys = has_keys
        self._body: bytes | None = None

    async def answer(self) -> Response:
        """The document of this server."""
        if self._body is None:
            self._body = await trio.to_thread.run_sync(self._write)
        return json_response(self._body)

    def _write(self) -> bytes:
        return json.dumps(openapi_document(self._operations, version=__version__, has_keys=self._has_keys)).encode()
