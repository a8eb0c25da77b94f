"""The engine, from inside a Trio application: `async with open_engine() as engine`."""

from trioengine.client.cores import Attachment, Cores, start_cores
from trioengine.client.engine import Engine, attach_engine, open_engine
from trioengine.client.interface import EngineClient, OutputStream
from trioengine.client.session import InputSession, StreamingInput, open_session
from trioengine.client.stream import RequestStream

__all__ = [
    "Attachment",
    "Cores",
    "Engine",
    "EngineClient",
    "InputSession",
    "OutputStream",
    "RequestStream",
    "StreamingInput",
    "attach_engine",
    "open_engine",
    "open_session",
    "start_cores",
]
