"""OpenAI's API over HTTP, for an open engine: `serve(create_app(engine), ServerConfig())`."""

from trioengine.server.app import create_app
from trioengine.server.blueprint import openai_blueprint
from trioengine.server.serve import serve

__all__ = ["create_app", "openai_blueprint", "serve"]
