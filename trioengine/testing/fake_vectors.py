"""`FakeVectorEngine`: a `FakeEngine` that gives vectors too.

A vector tells which tokens it is of, so that a test sees whether it came to the right place.
"""

import attrs
import numpy as np
import trio

from trioengine.testing.fake_engine import FakeEngine
from trioengine.types.messages import ModelFacts
from trioengine.types.pooling import EncodeRequest, PoolingFacts, PoolingOutput, PoolingTask, PoolingType

EMBEDDING_SIZE = 4
ALL_TASKS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.CLASSIFY)
LABELS = ("no", "yes")


def pooling_facts(*tasks: PoolingTask) -> ModelFacts:
    """Of a model that does these tasks and generates text too."""
    facts = PoolingFacts(tasks, PoolingType.MEAN, normalize=False, embedding_size=EMBEDDING_SIZE, labels=LABELS)
    return ModelFacts(2048, 1000, (2,), pooling=facts)


@attrs.define(eq=False)
class FakeVectorEngine(FakeEngine):
    """The engine. Requests are checked and tokenized as the real one does."""

    model_config: ModelFacts = attrs.field(factory=lambda: pooling_facts(*ALL_TASKS))  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    go_on: trio.Event | None = None
    """Vectors wait for it."""
    encode_requests: list[EncodeRequest] = attrs.field(factory=list[EncodeRequest])
    """Every request for vectors that was started."""
    num_encoding: int = 0
    """Those that wait for their vectors."""
    most_encoding: int = 0
    """The most there were at once."""

    async def encode(self, request: EncodeRequest) -> PoolingOutput:
        """A vector whose first number is the number of tokens, and whose second is the first token."""
        self.check_health()
        processed = self.input_processor.process_encode(request)
        self.encode_requests.append(request)
        self.num_encoding += 1
        self.most_encoding = max(self.most_encoding, self.num_encoding)
        try:
            await trio.lowlevel.checkpoint()
            if self.go_on is not None:
                await self.go_on.wait()
        finally:
            self.num_encoding -= 1
        token_ids = processed.prompt_token_ids
        vector = np.array([len(token_ids), token_ids[0], 0.5, -1.0], np.float32)
        match processed.pooling.task:
            case PoolingTask.EMBED:
                data = vector[: processed.pooling.dimensions]
            case PoolingTask.TOKEN_EMBED:
                data = np.tile(vector, (len(token_ids), 1))
            case PoolingTask.CLASSIFY:
                data = np.array([0.25, 0.75], np.float32)
            case PoolingTask.SCORE:
                data = np.array([1 / len(token_ids)], np.float32)
        return PoolingOutput(request.request_id or "fake-request", token_ids, data)
