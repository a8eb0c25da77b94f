"""The engine, from inside a Trio application: `async with open_engine() as engine`."""

from trioengine.client.engine import Engine, open_engine
from trioengine.client.interface import EngineClient, OutputStream
from trioengine.client.session import InputSession, StreamingInput, open_session
from trioengine.client.stream import RequestStream

__all__ = [
    "Engine",
    "EngineClient",
    "InputSession",
    "OutputStream",
    "RequestStream",
    "StreamingInput",
    "open_engine",
    "open_session",
]
