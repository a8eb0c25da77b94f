"""Makes a sequence's vectors of the hidden states of its tokens. Knows neither models nor steps."""

from typing import TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.models.config import HeadConfig, LabelActivation, ModelConfig
from trioengine.models.head import ClassificationHead
from trioengine.models.loader import LoadedModel
from trioengine.models.sentence_transformers import SentenceTransformer, read_sentence_transformer
from trioengine.types.pooling import PoolingFacts, PoolingParams, PoolingTask, PoolingType

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
MatrixT = TypeVar("MatrixT")
VectorT = TypeVar("VectorT")

SMALLEST_LENGTH = 1e-12
"""Vectors are divided by at least this, so that a vector of zeros stays one."""


class NotANumberError(Exception):
    """A model's output is not a number."""


@attrs.frozen(eq=False)
class Labels:
    """A classification head and what its numbers mean."""

    weights: ClassificationHead
    config: HeadConfig


def labels_of(model: LoadedModel[MatrixT, VectorT]) -> Labels | None:
    """Of a decoder."""
    return None if model.head is None or model.config.head is None else Labels(model.head, model.config.head)


class Pooler:
    """The vectors of one sequence, whose tokens come in order, in parts.

    The result does not depend, in a single bit, on how the tokens were cut into parts.
    """

    def __init__(self, params: PoolingParams, num_tokens: int, labels: Labels | None = None) -> None:
        """`params` are complete; for labels and scores there must be `labels`."""
        self._params = params
        self._num_tokens = num_tokens
        self._labels = labels
        self._sum: Doubles | None = None
        self._rows: list[Floats] = []

    def wanted(self, first: int, end: int) -> range:
        """Which of the tokens from `first` to `end - 1` have hidden states that are wanted."""
        match self._params.task, self._params.pooling_type:
            case PoolingTask.EMBED, PoolingType() as pooled:
                pass
            case ((PoolingTask.CLASSIFY | PoolingTask.SCORE), _):
                assert self._labels is not None
                pooled = self._labels.config.pooling_type
            case _:
                pooled = None
        match pooled:
            case PoolingType.LAST:
                return range(max(first, self._num_tokens - 1), end)
            case PoolingType.CLS:
                return range(first, min(end, 1))
            case _:
                return range(first, end)

    def add(self, hidden: Floats) -> None:
        """Take the hidden states of the wanted tokens of the next part, [tokens, hidden_size]."""
        if not len(hidden):
            return
        if self._params.task is PoolingTask.TOKEN_EMBED or self._params.pooling_type is not PoolingType.MEAN:
            self._rows.append(hidden.copy())
        elif self._sum is None:
            self._sum = np.add.reduce(hidden, axis=0, dtype=np.float64)
        else:
            # One row after the other, wherever a part ends.
            self._sum = np.add.reduce(np.concatenate((self._sum[None], hidden)), axis=0, dtype=np.float64)

    def vectors(self) -> Floats:
        """The vector, [width], or one for each token, [tokens, width], when all tokens have come.

        Raises:
            NotANumberError: the model's output is none.
        """
        match self._params.task:
            case PoolingTask.EMBED:
                vectors = self._embedding()
            case PoolingTask.TOKEN_EMBED:
                vectors = self._cut(np.concatenate(self._rows).astype(np.float64))
            case PoolingTask.CLASSIFY | PoolingTask.SCORE:
                vectors = self._logits(self._rows[0][0])
        result = vectors.astype(np.float32)
        if not np.isfinite(result).all():
            raise NotANumberError
        return result

    def _embedding(self) -> Doubles:
        if self._params.pooling_type is PoolingType.MEAN:
            assert self._sum is not None
            return self._cut(self._sum / self._num_tokens)
        return self._cut(self._rows[0][0].astype(np.float64))

    def _cut(self, vectors: Doubles) -> Doubles:
        vectors = vectors[..., : self._params.dimensions]
        if not self._params.normalize:
            return vectors
        lengths = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
        return vectors / np.maximum(lengths, SMALLEST_LENGTH)

    def _logits(self, hidden: Floats) -> Doubles:
        assert self._labels is not None
        head, config = self._labels.weights, self._labels.config
        inner = hidden
        if head.dense is not None and head.dense_bias is not None:
            inner = head.dense @ hidden + head.dense_bias
            inner = np.tanh(inner) if config.inner_activation == "tanh" else np.maximum(inner, 0)
        logits = (head.output @ inner).astype(np.float64)
        if head.output_bias is not None:
            logits += head.output_bias
        is_score = self._params.task is PoolingTask.SCORE
        activation = config.score_activation if is_score else config.classify_activation
        return _activated(logits, activation) if self._params.use_activation else logits


def decoder_pooling(location: ModelLocation, config: ModelConfig) -> PoolingFacts:
    """The vectors that a decoder gives: of its labels, where it has a head for some; else the last token's, normalized,
    unless sentence-transformers says otherwise.

    Raises:
        CheckpointError: as `read_sentence_transformer` says.
    """
    if config.head is not None:
        return config.head.pooling(PoolingType.LAST, config.hidden_size, normalize=True)
    trained = read_sentence_transformer(location.path) if location.kind is ModelKind.FOLDER else None
    if trained is None:
        trained = SentenceTransformer(PoolingType.LAST, normalize=True, max_length=None)
    tasks = PoolingTask.EMBED, PoolingTask.TOKEN_EMBED
    return PoolingFacts(tasks, trained.pooling_type, trained.normalize, config.hidden_size)


def _activated(logits: Doubles, activation: LabelActivation) -> Doubles:
    match activation:
        case LabelActivation.NONE:
            return logits
        case LabelActivation.SIGMOID:
            return np.exp(-np.logaddexp(0, -logits))
        case LabelActivation.SOFTMAX:
            weights = np.exp(logits - logits.max())
            return weights / weights.sum()
