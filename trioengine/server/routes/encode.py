"""The routes that answer with vectors: embeddings, pooling, labels, scores and ranks.

All inputs of a request run at the same time, up to a limit, and end together: with the first that fails, and when the
client disconnects.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import attrs
import trio
from quart import Response, request

from trioengine.errors import RequestError, TrioEngineError, UnavailableError
from trioengine.openai.encode_protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    EncodeBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    parse_encode_body,
)
from trioengine.openai.encode_reply import (
    EncodeHead,
    check_finite,
    classify_parts,
    cosine,
    embedding_parts,
    pooling_parts,
    rerank_reply,
    score_parts,
)
from trioengine.openai.errors import at_path
from trioengine.server.context import RequestHead, ServerContext
from trioengine.server.open_requests import OpenRequest
from trioengine.server.replies import json_response
from trioengine.server.routes.request import read_body, request_head
from trioengine.types.pooling import (
    EncodePrompt,
    EncodeRequest,
    PoolingFacts,
    PoolingOutput,
    PoolingParams,
    PoolingTask,
    TextPairPrompt,
)
from trioengine.types.request import TextPrompt

MAX_RUNNING_INPUTS = 256
"""Of one request with the engine at the same time; the others wait here, and take nobody's place."""
_ITEMS_PER_SLICE = 16
"""Items of a reply that are written before others get their turn."""

B = TypeVar("B", bound=EncodeBody)


async def embeddings(context: ServerContext) -> Response:
    """One vector for each input, in their order."""
    batch = await _open_batch(context, EmbeddingRequest, "embd-")
    body = batch.body
    pooling = PoolingParams(task=PoolingTask.EMBED, dimensions=body.dimensions, normalize=body.normalize)
    outputs = await batch.run([(prompt, f"input[{i}]") for i, prompt in enumerate(body.input)], pooling)
    return await batch.reply(embedding_parts(batch.head, outputs, body.encoding_format))


async def pooling(context: ServerContext) -> Response:
    """What the model says of each input: a vector, one for each token, or labels."""
    batch = await _open_batch(context, PoolingRequest, "pool-")
    body = batch.body
    params = PoolingParams(
        task=body.task or _facts(context).tasks[0],
        dimensions=body.dimensions,
        normalize=body.normalize,
        use_activation=body.use_activation,
    )
    outputs = await batch.run([(prompt, f"input[{i}]") for i, prompt in enumerate(body.input)], params)
    return await batch.reply(pooling_parts(batch.head, outputs, body.encoding_format))


async def classify(context: ServerContext) -> Response:
    """How likely each label is, for each input."""
    batch = await _open_batch(context, ClassifyRequest, "classify-")
    body = batch.body
    params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=body.use_activation)
    outputs = await batch.run([(prompt, f"input[{i}]") for i, prompt in enumerate(body.input)], params)
    return await batch.reply(classify_parts(batch.head, outputs, _facts(context).labels))


async def score(context: ServerContext) -> Response:
    """How well pairs of texts go together."""
    batch = await _open_batch(context, ScoreRequest, "score-")
    firsts, seconds = batch.body.text_1, batch.body.text_2
    if len(firsts) not in (1, len(seconds)):
        raise RequestError(
            f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: it must be one, or as many.", param="text_1"
        )
    outputs, scores = await batch.scores(firsts, seconds, batch.body.use_activation, ("text_1", "text_2"))
    return await batch.reply(score_parts(batch.head, outputs, scores))


async def rerank(context: ServerContext) -> Response:
    """The documents that go best with a query, the best first."""
    batch = await _open_batch(context, RerankRequest, "rerank-")
    body = batch.body
    if body.top_n < 0:
        raise RequestError("top_n must be at least 0.", param="top_n")
    outputs, scores = await batch.scores((body.query,), body.documents, body.use_activation, ("query", "documents"))
    documents = body.documents if body.return_documents else None
    return json_response(
        rerank_reply(batch.head, outputs, scores, documents, body.top_n), headers=context.warning_headers(body)
    )


@attrs.frozen
class _Batch(Generic[B]):
    """The inputs of one HTTP request."""

    context: ServerContext
    body: B
    head: EncodeHead
    request_head: RequestHead
    lora: str | None

    async def run(self, inputs: Sequence[tuple[EncodePrompt, str]], params: PoolingParams) -> Sequence[PoolingOutput]:
        """What came of each input, in their order. An input comes with its path in the body, for errors.

        Raises:
            TrioEngineError: the first error of any input; the others were ended.
        """
        _facts(self.context)
        self.context.engine.check_admission()
        open_request = self.context.open_requests.open(self.head.id, request.path)
        try:
            return await self.context.run_to_end(lambda: self._run(inputs, params, open_request), self.body.timeout)
        finally:
            self.context.open_requests.close(open_request)

    async def _run(
        self, inputs: Sequence[tuple[EncodePrompt, str]], params: PoolingParams, open_request: OpenRequest
    ) -> Sequence[PoolingOutput]:
        outputs: dict[int, PoolingOutput] = {}
        errors: list[TrioEngineError] = []
        waiting = deque(enumerate(inputs))
        num_workers = min(len(inputs), MAX_RUNNING_INPUTS)

        async def work(scope: trio.CancelScope) -> None:
            nonlocal num_workers
            while waiting:
                index, (prompt, path) = waiting.popleft()
                try:
                    output = await self.context.engine.encode(self._request(index, prompt, params))
                    check_finite(output)
                except UnavailableError as error:
                    # The engine takes fewer of them at a time. As long as any of this batch run, it goes on with those.
                    if num_workers == 1:
                        errors.append(error)
                        return
                    waiting.appendleft((index, (prompt, path)))
                    num_workers -= 1
                    return
                except TrioEngineError as error:
                    errors.append(at_path(error, path))
                    scope.cancel()
                    return
                outputs[index] = output
                open_request.num_prompt_tokens = (open_request.num_prompt_tokens or 0) + len(output.prompt_token_ids)

        async with trio.open_nursery() as nursery:
            for _ in range(num_workers):
                nursery.start_soon(work, nursery.cancel_scope)
        if errors:
            raise errors[0]
        return [outputs[index] for index in range(len(inputs))]

    def _request(self, index: int, prompt: EncodePrompt, params: PoolingParams) -> EncodeRequest:
        encode_request = EncodeRequest(
            prompt,
            params,
            request_id=f"{self.head.id}-{index}",
            priority=self.body.priority,
            cache_salt=self.body.cache_salt,
            truncate_prompt_tokens=self.body.truncate_prompt_tokens,
        )
        return self.request_head.apply(encode_request, self.lora)

    async def scores(
        self, firsts: Sequence[str], seconds: Sequence[str], use_activation: bool | None, names: tuple[str, str]
    ) -> tuple[Sequence[PoolingOutput], Sequence[float]]:
        """How well each second text goes with its first one; where there is one first text, with that.

        A model that reads both at once says it itself; of others it is the cosine of their embeddings.
        """
        if PoolingTask.SCORE in _facts(self.context).tasks:
            params = PoolingParams(task=PoolingTask.SCORE, use_activation=use_activation)
            pairs = [(firsts[i % len(firsts)], second) for i, second in enumerate(seconds)]
            inputs = [(TextPairPrompt(*pair), f"{names[1]}[{i}]") for i, pair in enumerate(pairs)]
            outputs = await self.run(inputs, params)
            return outputs, [float(output.data[0]) for output in outputs]
        inputs = [
            (TextPrompt(text), f"{name}[{i}]")
            for name, texts in zip(names, (firsts, seconds), strict=True)
            for i, text in enumerate(texts)
        ]
        outputs = await self.run(inputs, PoolingParams(task=PoolingTask.EMBED))
        vectors = [output.data for output in outputs]
        others = vectors[len(firsts) :]
        return outputs, [cosine(vectors[i % len(firsts)], other) for i, other in enumerate(others)]

    async def reply(self, parts: Iterator[bytes]) -> Response:
        """The response that these parts make."""
        written: list[bytes] = []
        for part in parts:
            written.append(part)
            if len(written) % _ITEMS_PER_SLICE == 0:
                await trio.lowlevel.checkpoint()
        return json_response(b"".join(written), headers=self.context.warning_headers(self.body))


async def _open_batch(context: ServerContext, body_class: type[B], id_prefix: str) -> _Batch[B]:
    """Read the body, and check all of it that needs no engine."""
    context.check_open()
    http_head = request_head(id_prefix)
    body = await read_body(lambda data: parse_encode_body(data, body_class))
    lora = await context.check_body(body)
    head = EncodeHead(http_head.id, int(time.time()), lora or context.engine.model_name)
    return _Batch(context, body, head, http_head, lora)


def _facts(context: ServerContext) -> PoolingFacts:
    facts = context.engine.model_config.pooling
    if facts is None:
        raise RequestError("This model gives no vectors.", param="model")
    return facts
