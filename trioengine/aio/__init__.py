"""The engine, from inside an asyncio application: `async with trioengine.aio.open_engine() as engine`.

    async with trioengine.aio.open_engine(EngineConfig(model="...")) as engine:
        async with engine.generate(GenerateRequest("Once upon a time")) as outputs:
            async for output in outputs:
                ...

The one place of the package where asyncio is known. See `aio.engine` for what is different from the engine for Trio.
"""

from trioengine.aio.engine import Engine, RequestStream, open_engine

__all__ = ["Engine", "RequestStream", "open_engine"]
