"""Replies of the routes that answer with vectors.

A reply is written item by item, as the numbers of many vectors take longer to write than an event loop should wait.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.errors import EngineGenerateError
from trioengine.openai.encode_protocol import EncodingFormat
from trioengine.types.pooling import PoolingOutput


@attrs.frozen
class EncodeUsage:
    """How many tokens a request for vectors took."""

    prompt_tokens: int
    total_tokens: int


@attrs.frozen
class EmbeddingItem:
    """One vector."""

    object: str
    index: int
    """Of the input that it is of."""
    embedding: tuple[float, ...] | str
    """A list of numbers, or base64 of float32 numbers, little-endian."""


@attrs.frozen
class EmbeddingList:
    """The reply of `POST /v1/embeddings`."""

    id: str
    object: str
    created: int
    """Unix time."""
    model: str
    data: tuple[EmbeddingItem, ...]
    usage: EncodeUsage


@attrs.frozen
class PoolingItem:
    """What came of one input."""

    object: str
    index: int
    """Of the input that it is of."""
    data: tuple[float, ...] | tuple[tuple[float, ...], ...] | str
    """A vector; one for each token, for the task "token_embed"; base64 of its numbers where asked for."""


@attrs.frozen
class PoolingList:
    """The reply of `POST /pooling`."""

    id: str
    object: str
    created: int
    """Unix time."""
    model: str
    data: tuple[PoolingItem, ...]
    usage: EncodeUsage


@attrs.frozen
class ClassifyItem:
    """The labels of one input."""

    index: int
    """Of the input that they are of."""
    label: str | None
    """The most likely one; None where the model does not name them."""
    probs: tuple[float, ...]
    """One number for each label."""
    num_classes: int


@attrs.frozen
class ClassifyList:
    """The reply of `POST /classify`."""

    id: str
    object: str
    created: int
    """Unix time."""
    model: str
    data: tuple[ClassifyItem, ...]
    usage: EncodeUsage


@attrs.frozen
class ScoreItem:
    """How well one pair of texts goes together."""

    index: int
    object: str
    score: float


@attrs.frozen
class ScoreList:
    """The reply of `POST /v1/score`."""

    id: str
    object: str
    created: int
    """Unix time."""
    model: str
    data: tuple[ScoreItem, ...]
    usage: EncodeUsage


@attrs.frozen
class RerankDocument:
    """A document."""

    text: str


@attrs.frozen
class RerankItem:
    """A document's place."""

    index: int
    """Of the document in the request."""
    document: RerankDocument | None
    """None where it was not asked for."""
    relevance_score: float


@attrs.frozen
class RerankList:
    """The reply of `POST /v1/rerank`: the best document first."""

    id: str
    model: str
    usage: EncodeUsage
    results: tuple[RerankItem, ...]


@attrs.frozen
class EncodeHead:
    """What a reply begins with."""

    id: str
    created_s: int
    """Unix time."""
    model: str


def encode_usage(outputs: Sequence[PoolingOutput]) -> EncodeUsage:
    """The tokens of all inputs."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return EncodeUsage(num_tokens, num_tokens)


def check_finite(output: PoolingOutput) -> None:
    """Return when all numbers are numbers, as JSON has no words for others and no client expects them.

    Raises:
        EngineGenerateError: some are not.
    """
    if not np.isfinite(output.data).all():
        raise EngineGenerateError("The model's numbers for this input are infinite, or none at all.")


def embedding_parts(head: EncodeHead, outputs: Sequence[PoolingOutput], form: EncodingFormat) -> Iterator[bytes]:
    """The JSON of an `EmbeddingList`, item by item."""
    return _list_parts(head, outputs, (_item("embedding", i, output.data, form) for i, output in enumerate(outputs)))


def pooling_parts(head: EncodeHead, outputs: Sequence[PoolingOutput], form: EncodingFormat) -> Iterator[bytes]:
    """The JSON of a `PoolingList`, item by item."""
    items = (_item("pooling", i, output.data, form, name="data") for i, output in enumerate(outputs))
    return _list_parts(head, outputs, items)


def classify_parts(head: EncodeHead, outputs: Sequence[PoolingOutput], labels: Sequence[str]) -> Iterator[bytes]:
    """The JSON of a `ClassifyList`, item by item."""

    def item(index: int, probs: NDArray[np.float32]) -> Mapping[str, object]:
        best = int(np.argmax(probs))
        label = labels[best] if best < len(labels) else None
        return {"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)}

    return _list_parts(head, outputs, (item(index, output.data) for index, output in enumerate(outputs)))


def score_parts(head: EncodeHead, outputs: Sequence[PoolingOutput], scores: Sequence[float]) -> Iterator[bytes]:
    """The JSON of a `ScoreList`, item by item. `outputs` count for the usage only."""
    items = ({"index": index, "object": "score", "score": score} for index, score in enumerate(scores))
    return _list_parts(head, outputs, items)


def rerank_reply(
    head: EncodeHead,
    outputs: Sequence[PoolingOutput],
    scores: Sequence[float],
    documents: Sequence[str] | None,
    top_n: int,
) -> bytes:
    """The JSON of a `RerankList`, best first, equals in the order of the request."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or None]
    reply = RerankList(
        id=head.id,
        model=head.model,
        usage=encode_usage(outputs),
        results=tuple(
            RerankItem(index, None if documents is None else RerankDocument(documents[index]), scores[index])
            for index in best
        ),
    )
    return json.dumps(attrs.asdict(reply), separators=(",", ":")).encode()


def cosine(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """The cosine of the angle between two vectors; 0 where one of them has no direction."""
    lengths = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(np.dot(first, second)) / lengths if lengths else 0.0


def _item(
    object_name: str, index: int, data: NDArray[np.float32], form: EncodingFormat, *, name: str = "embedding"
) -> Mapping[str, object]:
    return {"object": object_name, "index": index, name: _vector(data, form)}


def _vector(data: NDArray[np.float32], form: EncodingFormat) -> object:
    match form:
        case EncodingFormat.FLOAT:
            return data.tolist()
        case EncodingFormat.BASE64:
            return base64.b64encode(data.astype("<f4", copy=False).tobytes()).decode()


def _list_parts(
    head: EncodeHead, outputs: Sequence[PoolingOutput], items: Iterator[Mapping[str, object]]
) -> Iterator[bytes]:
    fields = {"id": head.id, "object": "list", "created": head.created_s, "model": head.model}
    before = json.dumps(fields, separators=(",", ":")).removesuffix("}").encode() + b',"data":['
    for item in items:
        yield before + json.dumps(item, separators=(",", ":")).encode()
        before = b","
    usage = json.dumps(attrs.asdict(encode_usage(outputs)), separators=(",", ":")).encode()
    yield b'],"usage":' + usage + b"}"
