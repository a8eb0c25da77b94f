"""TrioEngine: LLM inference and serving built on Trio.

async with trioengine.open_engine() as engine:      # inside a Trio program
    async with engine.generate(trioengine.GenerateRequest("The sky is")) as outputs:
        async for output in outputs: ...

with trioengine.LLM() as llm:                       # in a script
    print(llm.generate("The sky is")[0].outputs[0].text)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioengine.client.engine import Engine, open_engine
    from trioengine.client.interface import EngineClient
    from trioengine.client.llm import LLM
    from trioengine.client.llm_engine import LLMEngine
    from trioengine.client.llm_inputs import EngineArgs, LoRARequest
    from trioengine.client.llm_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from trioengine.config.engine import EngineConfig
    from trioengine.types.output import CompletionOutput, FinishReason, RequestOutput
    from trioengine.types.params import RequestOutputKind, SamplingParams
    from trioengine.types.pooling import EncodeRequest, PoolingOutput, PoolingParams, TextPairPrompt
    from trioengine.types.repetition import RepetitionDetectionParams
    from trioengine.types.request import ChatPrompt, Deadlines, GenerateRequest, TextPrompt, TokensPrompt
    from trioengine.types.structured import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ChatPrompt",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Deadlines",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EncodeRequest",
    "Engine",
    "EngineArgs",
    "EngineClient",
    "EngineConfig",
    "FinishReason",
    "GenerateRequest",
    "LLMEngine",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPairPrompt",
    "TextPrompt",
    "TokensPrompt",
    "open_engine",
]

# Loaded when first asked for: the core and its pure packages must be importable without trio, and quickly.
_HOMES = {
    "LLM": "client.llm",
    "ChatPrompt": "types.request",
    "ClassificationOutput": "client.llm_outputs",
    "ClassificationRequestOutput": "client.llm_outputs",
    "CompletionOutput": "types.output",
    "Deadlines": "types.request",
    "EmbeddingOutput": "client.llm_outputs",
    "EmbeddingRequestOutput": "client.llm_outputs",
    "EncodeRequest": "types.pooling",
    "Engine": "client.engine",
    "EngineArgs": "client.llm_inputs",
    "EngineClient": "client.interface",
    "EngineConfig": "config.engine",
    "FinishReason": "types.output",
    "GenerateRequest": "types.request",
    "LLMEngine": "client.llm_engine",
    "LoRARequest": "client.llm_inputs",
    "PoolingOutput": "types.pooling",
    "PoolingParams": "types.pooling",
    "PoolingRequestOutput": "client.llm_outputs",
    "RepetitionDetectionParams": "types.repetition",
    "RequestOutput": "types.output",
    "RequestOutputKind": "types.params",
    "SamplingParams": "types.params",
    "ScoringOutput": "client.llm_outputs",
    "ScoringRequestOutput": "client.llm_outputs",
    "StructuredOutputsParams": "types.structured",
    "TextPairPrompt": "types.pooling",
    "TextPrompt": "types.request",
    "TokensPrompt": "types.request",
    "open_engine": "client.engine",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'trioengine' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"trioengine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
