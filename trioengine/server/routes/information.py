"""The routes that tell how the server does and what it has."""

from quart import Response, request

from trioengine import __version__
from trioengine.errors import ModelNotFoundError
from trioengine.openai.admin_protocol import StatusReply, VersionReply
from trioengine.openai.models import ModelList, model_cards
from trioengine.server.context import ServerContext
from trioengine.server.routes.request import json_reply
from trioengine.types.messages import GetLoad


async def models(context: ServerContext) -> Response:
    """The served model, and the LoRA adapters that requests may name."""
    return json_reply(await _model_cards(context))


async def model(context: ServerContext, model_id: str) -> Response:
    """One of them."""
    for card in (await _model_cards(context)).data:
        if card.id == model_id:
            return json_reply(card)
    raise ModelNotFoundError(f"The model `{model_id[:100]}` does not exist here.", param="model")


async def health(context: ServerContext) -> Response:
    """Whether the engine lives: 503 when it has died, or hangs."""
    context.engine.check_health()
    return json_reply(StatusReply("ok"))


async def ready(context: ServerContext) -> Response:
    """Whether new requests are taken: 503 also while the server drains."""
    context.check_open()
    context.engine.check_health()
    return json_reply(StatusReply("ready"))


async def version(context: ServerContext) -> Response:
    """The server's version."""
    del context
    return json_reply(VersionReply(__version__))


async def load(context: ServerContext) -> Response:
    """How many requests run and wait, and how much of the KV cache is free."""
    context.engine.check_health()  # A core that hangs would let the caller wait.
    return json_reply(await context.engine.call(GetLoad()))


async def metrics(context: ServerContext) -> Response:
    """Statistics for Prometheus; OpenMetrics where the scraper asks for it."""
    assert context.metrics is not None, "the route is there with metrics only"
    page = context.metrics.render(request.headers.get("Accept"))
    return Response(page.body, content_type=page.content_type)


async def _model_cards(context: ServerContext) -> ModelList:
    context.engine.check_health()
    loras = tuple(await context.refresh_loras())
    facts = context.engine.model_config
    names = (context.engine.model_name, *context.config.model_alias)
    return model_cards(names, facts.max_model_len, context.started_s, loras)
