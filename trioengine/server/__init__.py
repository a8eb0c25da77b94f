"""OpenAI's API over HTTP, for an open engine: `serve(create_app(engine), ServerConfig())`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioengine.server.app import create_app
    from trioengine.server.blueprint import openai_blueprint
    from trioengine.server.listeners import bind_listeners
    from trioengine.server.responses import open_responses
    from trioengine.server.serving import serve

__all__ = ["bind_listeners", "create_app", "open_responses", "openai_blueprint", "serve"]

# Loaded when first asked for: Quart and Hypercorn take a third of a second, in which a core can load.
_HOMES = {
    "bind_listeners": "listeners",
    "create_app": "app",
    "open_responses": "responses",
    "openai_blueprint": "blueprint",
    "serve": "serving",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'trioengine.server' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"trioengine.server.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
