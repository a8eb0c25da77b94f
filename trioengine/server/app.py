"""The application that `trioengine serve` serves: OpenAI's routes, the chat page, OpenAI's errors everywhere else."""

import trio
from quart_trio import QuartTrio

from trioengine.client.interface import EngineClient
from trioengine.config.server import ServerConfig
from trioengine.server.blueprint import handle_error, openai_blueprint
from trioengine.server.context import MetricsSource
from trioengine.server.page import page_blueprint
from trioengine.server.responses import Responses


def create_app(
    engine: EngineClient,
    config: ServerConfig | None = None,
    *,
    shutdown: trio.Event | None = None,
    stop: trio.Event | None = None,
    metrics: MetricsSource | None = None,
    responses: Responses | None = None,
) -> QuartTrio:
    """A Quart-Trio application over an open engine. Open the engine around the server, not in `before_serving`.

    Body limits and keys are the server's: `serve` enforces them. The arguments are those of `openai_blueprint`.
    """
    app = QuartTrio("trioengine", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = None
    app.register_blueprint(
        openai_blueprint(engine, config, shutdown=shutdown, stop=stop, metrics=metrics, responses=responses)
    )
    if config is None or config.web_page:
        app.register_blueprint(page_blueprint())
    app.register_error_handler(Exception, handle_error)
    return app
