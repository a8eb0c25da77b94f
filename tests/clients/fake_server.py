"""Serves an engine that answers at once, whatever it is asked, with every route that there is."""

import sys

import trio

from trioengine.config.engine import EngineConfig
from trioengine.config.server import ServerConfig
from trioengine.observability.prometheus import MetricsPage
from trioengine.server.app import create_app
from trioengine.server.serving import serve
from trioengine.testing.fake_vectors import FakeVectorEngine, pooling_facts
from trioengine.types.pooling import PoolingTask


class NoMetrics:
    """Statistics of nothing."""

    def render(self, accept: str | None = None) -> MetricsPage:
        return MetricsPage(b"# nothing\n", "text/plain; version=0.0.4; charset=utf-8")


async def main() -> None:
    facts = pooling_facts(PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.CLASSIFY)
    engine = FakeVectorEngine(model_config=facts, config=EngineConfig(enable_lora=True))
    certificate = sys.argv[1] if len(sys.argv) > 1 else None
    config = ServerConfig(port=0, enable_admin=True, ssl_certfile=certificate, http2=certificate is not None)
    app = create_app(engine, config, metrics=NoMetrics())
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve, app, config)
        print(f"Serving fakes on {url}", file=sys.stderr)


trio.run(main)
