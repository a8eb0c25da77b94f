"""What a user may decide, checked and resolved once. Imports nothing but attrs and the standard library.

`EngineConfig` and `ServerConfig` are the sections, `resolve` derives what is unset, `config.env` alone reads the
environment.
"""

from trioengine.config.engine import EngineConfig
from trioengine.config.resolve import (
    GPUFacts,
    GPUMemoryUse,
    HardwareFacts,
    KVGroupShape,
    ModelShape,
    ResolvedConfig,
    resolve,
)
from trioengine.config.server import ServerConfig

__all__ = [
    "EngineConfig",
    "GPUFacts",
    "GPUMemoryUse",
    "HardwareFacts",
    "KVGroupShape",
    "ModelShape",
    "ResolvedConfig",
    "ServerConfig",
    "resolve",
]
