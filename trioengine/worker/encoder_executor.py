"""`EncoderExecutor`: the `core.executor.Executor` of models that read a text at once and give vectors.

Nothing is cached: a sequence is known for one step. The core counts blocks nevertheless; each holds a whole sequence,
and there is no memory behind them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.core.executor import (
    NO_TOKEN,
    KVCacheGroup,
    NewSequence,
    ScheduledSequence,
    SequenceFailure,
    StepPlan,
    StepResult,
)
from trioengine.errors import RequestError, UnavailableError
from trioengine.models.encoder_config import EncoderConfig
from trioengine.models.head import ClassificationHead
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingParams
from trioengine.worker.memory import return_freed_memory
from trioengine.worker.pooling import Labels, NotANumberError, Pooler
from trioengine.worker.profile import Profiler
from trioengine.worker.shared_operations import ComputedModel, ModelInfo, SharedOperations
from trioengine.worker.weight_transfer import ReplaceableWeights, WeightTransfer

R = TypeVar("R")


@attrs.frozen(eq=False)
class EncoderBatch:
    """The packed tokens of one step, int32, C-contiguous."""

    token_ids: NDArray[np.int32]
    """[num_tokens]."""
    positions: NDArray[np.int32]
    """[num_tokens]: rows of the table of positions."""
    query_start: NDArray[np.int32]
    """[num_seqs + 1]: the tokens of sequence i are `query_start[i]` to `query_start[i + 1] - 1`."""
    rows: NDArray[np.int32]
    """[num_rows]: the tokens whose hidden states are wanted."""


class EncoderBackend(ComputedModel, ReplaceableWeights, Protocol):
    """An encoder in one of the forms in which it is computed."""

    @property
    def config(self) -> EncoderConfig:
        """What it is."""
        ...

    @property
    def head(self) -> ClassificationHead | None:
        """What labels and scores are made with."""
        ...

    def compute(self, batch: EncoderBatch) -> NDArray[np.float32]:
        """The wanted hidden states, [num_rows, hidden_size], which are there until the next step."""
        ...

    def drop_weights(self) -> None:
        """Give the memory of the weights back."""
        ...

    def load_weights(self) -> None:
        """Read them again, unless they are there.

        Raises:
            CheckpointError: the files are gone, or not what they were.
            MemoryError: there is no memory for them.
        """
        ...


@attrs.frozen(eq=False)
class _Sequence:
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    pooler: Pooler | None
    failure: str | None = None


class EncoderExecutor(SharedOperations):
    """Computes each step when it is submitted, in the caller's thread."""

    num_offload_blocks = 0

    def __init__(
        self,
        backend: EncoderBackend,
        *,
        num_blocks: int,
        max_length: int,
        weights: WeightTransfer | None = None,
        profile_dir: str | None = None,
        model_info: ModelInfo | None = None,
    ) -> None:
        """`num_blocks` sequences of up to `max_length` tokens may be known at once. The last three are as
        `LocalExecutor` has them."""
        self.kv_cache_groups: Sequence[KVCacheGroup] = (KVCacheGroup(num_blocks),)
        self._backend: EncoderBackend | None = backend
        self._config = backend.config
        self._max_length = max_length
        self._pooling = backend.config.pooling
        self._sequences: dict[int, _Sequence] = {}
        self._results: deque[StepResult] = deque()
        self._profiler = Profiler(profile_dir)
        self._model_info = model_info
        self.weights = weights

    def check_sampling(self, sampling: SamplingParams) -> None:
        """As `Executor.check_sampling`: no text comes from here."""
        raise RequestError("This model generates no text; it is for embeddings and the like.", param="model")

    def check_pooling(self, pooling: PoolingParams) -> None:
        """As `Executor.check_pooling`."""
        if self._pooling.complete(pooling) != pooling:
            raise RequestError("The pooling parameters are not complete.", param="pooling")

    def add_lora(self, lora_id: int, path: str) -> None:
        """As `Executor.add_lora`: there are none."""
        raise RequestError("Adapters are for models that generate text.", param="lora")

    def remove_lora(self, lora_id: int) -> None:
        """As `Executor.remove_lora`: none was added."""
        raise AssertionError(f"no such adapter: {lora_id}")

    def sleep(self, level: int) -> None:
        """As `Executor.sleep`. There is no KV cache to give back."""
        assert self._backend is not None, "closed"
        if level > 1:
            self._backend.drop_weights()
            return_freed_memory()

    def wake_up(self, tags: Sequence[str]) -> None:
        """As `Executor.wake_up`."""
        assert self._backend is not None, "closed"
        try:
            if "weights" in tags:
                self._backend.load_weights()
        except MemoryError as error:
            raise UnavailableError("There is not enough memory to wake up.") from error

    def submit(self, plan: StepPlan) -> None:
        """Compute a step."""
        assert self._backend is not None, "closed"
        for sequence_id in plan.removed:
            self._sequences.pop(sequence_id, None)
        for new in plan.new:
            self._sequences[new.sequence_id] = self._sequence(new)
        pooled: dict[int, NDArray[np.float32]] = {}
        failures = [
            SequenceFailure(work.sequence_id, failure)
            for work in plan.scheduled
            if (failure := self._sequences[work.sequence_id].failure) is not None
        ]
        works = [
            (index, work)
            for index, work in enumerate(plan.scheduled)
            if self._sequences[work.sequence_id].failure is None
        ]
        if works:
            failures += self._compute(self._backend, works, pooled)
        self._results.append(StepResult(plan.step, [NO_TOKEN] * len(plan.scheduled), failures, pooled=pooled))

    def result(self) -> StepResult:
        """The result of the oldest step not fetched."""
        return self._results.popleft()

    def close(self) -> None:
        """Give the weights back. Idempotent."""
        self._backend = None
        self._sequences.clear()
        self._results.clear()

    def _between_steps(self, function: Callable[[], R]) -> R:
        return function()

    @property
    def _computed(self) -> EncoderBackend:
        assert self._backend is not None, "closed"
        return self._backend

    def _sequence(self, new: NewSequence) -> _Sequence:
        config, failure = self._config, None
        token_ids = np.array(new.token_ids, np.int64)
        if new.pooling is None:
            failure = "This model generates no text."
        elif not 0 < len(token_ids) <= self._max_length:
            failure = f"The text has {len(token_ids)} tokens; this model takes 1 to {self._max_length}."
        elif not 0 <= token_ids.min() <= token_ids.max() < config.vocab_size:
            failure = f"A token of the text is not in the vocabulary of {config.vocab_size} tokens."
        if failure is not None or new.pooling is None:
            return _Sequence(_NO_TOKENS, _NO_TOKENS, None, failure)
        positions = np.arange(config.first_position, config.first_position + len(token_ids), dtype=np.int32)
        if new.second_text_start is not None and config.num_token_types > 1:
            positions[new.second_text_start :] += config.num_positions
        head = None if self._backend is None else self._backend.head
        labels = None if head is None or config.head is None else Labels(head, config.head)
        return _Sequence(token_ids.astype(np.int32), positions, Pooler(new.pooling, len(token_ids), labels))

    def _compute(
        self,
        backend: EncoderBackend,
        works: Sequence[tuple[int, ScheduledSequence]],
        pooled: dict[int, NDArray[np.float32]],
    ) -> list[SequenceFailure]:
        """Fill in `pooled`; the sequences that failed."""
        sequences = [self._sequences[work.sequence_id] for _, work in works]
        for sequence, (_, work) in zip(sequences, works, strict=True):
            assert work.num_computed_tokens == 0
            assert work.num_tokens == len(sequence.token_ids), "a prompt was split"
        query_start = np.zeros(len(works) + 1, np.int32)
        np.cumsum([len(sequence.token_ids) for sequence in sequences], out=query_start[1:])
        rows: list[NDArray[np.int32]] = []
        for sequence, start in zip(sequences, query_start[:-1].tolist(), strict=True):
            assert sequence.pooler is not None
            wanted = sequence.pooler.wanted(0, len(sequence.token_ids))
            rows.append(np.arange(start + wanted.start, start + wanted.stop, dtype=np.int32))
        batch = EncoderBatch(
            token_ids=np.concatenate([sequence.token_ids for sequence in sequences]),
            positions=np.concatenate([sequence.positions for sequence in sequences]),
            query_start=query_start,
            rows=np.concatenate(rows),
        )
        with self._profiler.span("step", tokens=len(batch.token_ids), sequences=len(works)):
            hidden = backend.compute(batch)
        failures: list[SequenceFailure] = []
        first = 0
        for sequence, part, (index, work) in zip(sequences, rows, works, strict=True):
            assert sequence.pooler is not None
            sequence.pooler.add(hidden[first : first + len(part)])
            first += len(part)
            try:
                pooled[index] = sequence.pooler.vectors()
            except NotANumberError:
                failures.append(SequenceFailure(work.sequence_id, "The model's output for this text is not a number."))
        return failures


_NO_TOKENS = np.empty(0, np.int32)
