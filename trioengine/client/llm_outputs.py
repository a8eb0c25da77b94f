"""What `LLM` and `LLMEngine` give: the engine's own outputs, with the further attributes that vLLM's have."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.client.llm_inputs import LoRARequest
from trioengine.observability.stats import FinishedRequestStats
from trioengine.types import output as native
from trioengine.types import pooling
from trioengine.types.pooling import PoolingTask


@attrs.frozen(kw_only=True)
class RequestOutput(native.RequestOutput):
    """An output of a request for text."""

    prompt: str | None = None
    """The prompt's text, where it was one or came of a chat template."""
    metrics: FinishedRequestStats | None = None
    """How long it took; in the last output."""
    lora_request: LoRARequest | None = None


@attrs.frozen(eq=False)
class PooledData:
    """What came of a request for vectors."""

    data: NDArray[np.float32]


@attrs.frozen(eq=False)
class EmbeddingOutput(PooledData):
    """A vector."""

    @property
    def embedding(self) -> list[float]:
        """The vector's numbers."""
        return self.data.tolist()

    @property
    def hidden_size(self) -> int:
        """How many."""
        return len(self.data)


@attrs.frozen(eq=False)
class ClassificationOutput(PooledData):
    """One number for each label."""

    @property
    def probs(self) -> list[float]:
        """The numbers."""
        return self.data.tolist()

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.data)


@attrs.frozen(eq=False)
class ScoringOutput(PooledData):
    """How well two texts go together."""

    @property
    def score(self) -> float:
        """The larger the better."""
        return float(self.data.reshape(()))


@attrs.frozen(eq=False, kw_only=True)
class PoolingRequestOutput(pooling.PoolingOutput):
    """The vectors of a request. `data` is also that of `outputs`."""

    finished: bool = True

    @property
    def outputs(self) -> PooledData:
        """What came of it."""
        return PooledData(self.data)


@attrs.frozen(eq=False, kw_only=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """The embedding of a prompt."""

    @property
    def outputs(self) -> EmbeddingOutput:
        """The embedding."""
        return EmbeddingOutput(self.data)


@attrs.frozen(eq=False, kw_only=True)
class ClassificationRequestOutput(PoolingRequestOutput):
    """The labels of a prompt."""

    @property
    def outputs(self) -> ClassificationOutput:
        """The labels' numbers."""
        return ClassificationOutput(self.data)


@attrs.frozen(eq=False, kw_only=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """The score of two texts."""

    @property
    def outputs(self) -> ScoringOutput:
        """The score."""
        return ScoringOutput(self.data)


_CLASSES: dict[PoolingTask, type[PoolingRequestOutput]] = {
    PoolingTask.EMBED: EmbeddingRequestOutput,
    PoolingTask.CLASSIFY: ClassificationRequestOutput,
    PoolingTask.SCORE: ScoringRequestOutput,
}


def request_output(
    output: native.RequestOutput,
    prompt: str | None,
    metrics: FinishedRequestStats | None,
    lora_request: LoRARequest | None,
) -> RequestOutput:
    """The engine's output with what it does not say."""
    return RequestOutput(**_fields(output), prompt=prompt, metrics=metrics, lora_request=lora_request)


def pooling_request_output(output: pooling.PoolingOutput, task: PoolingTask) -> PoolingRequestOutput:
    """The engine's output as that of the task."""
    return _CLASSES.get(task, PoolingRequestOutput)(**_fields(output))


def cosine_score(first: pooling.PoolingOutput, second: pooling.PoolingOutput) -> ScoringRequestOutput:
    """How near two embeddings are."""
    norms = float(np.linalg.norm(first.data) * np.linalg.norm(second.data))
    score = float(first.data @ second.data) / norms if norms else 0.0
    tokens: Sequence[int] = (*first.prompt_token_ids, *second.prompt_token_ids)
    return ScoringRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        prompt_token_ids=tuple(tokens),
        data=np.array([score], np.float32),
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
    )


def _fields(output: attrs.AttrsInstance) -> dict[str, Any]:
    return {field.name: getattr(output, field.name) for field in attrs.fields(type(output))}
