"""Vectors instead of text: what may be asked of a model that is read for its hidden states.

Names are vLLM's. Rules that need the model are checked by `PoolingFacts.complete`.
"""

import enum
from collections.abc import Mapping
from types import NoneType
from typing import cast

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.errors import RequestError
from trioengine.types.request import ChatPrompt, Deadlines, TextPrompt, TokensPrompt, prompt_of


class PoolingTask(enum.StrEnum):
    """What a vector is for."""

    EMBED = "embed"
    """One vector for the whole text."""
    TOKEN_EMBED = "token_embed"
    """One vector for each token."""
    CLASSIFY = "classify"
    """One number for each label of the model."""
    SCORE = "score"
    """One number that says how well two texts go together, of a model that reads both at once."""


class PoolingType(enum.StrEnum):
    """How the vectors of a text's tokens become one."""

    LAST = "last"
    """The last token's, which has seen all others."""
    MEAN = "mean"
    CLS = "cls"
    """The first token's."""


def _task(task: PoolingTask | str) -> PoolingTask:
    """A task that is named; what is none is left to `validate`."""
    return PoolingTask(task) if task in list(PoolingTask) else cast(PoolingTask, task)


_EMBEDDING_TASKS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)


@attrs.frozen(kw_only=True)
class PoolingParams:
    """What a request wants of its hidden states. None is what the model says."""

    task: PoolingTask = attrs.field(default=PoolingTask.EMBED, converter=_task)
    """Also by its name."""
    pooling_type: PoolingType | None = None
    """For `EMBED`."""
    dimensions: int | None = None
    """For embeddings: how many of the first numbers are kept, before they are normalized (Matryoshka embeddings)."""
    normalize: bool | None = None
    """For embeddings: whether vectors get the length 1."""
    use_activation: bool | None = None
    """For labels and scores: whether logits become probabilities."""

    def validate(self) -> None:
        """Return when the values can work for some model.

        Raises:
            RequestError: naming the field at fault.
        """
        for name, kinds in (
            ("task", (PoolingTask,)),
            ("pooling_type", (PoolingType, NoneType)),
            ("dimensions", (int, NoneType)),
            ("normalize", (bool, NoneType)),
            ("use_activation", (bool, NoneType)),
        ):
            value: object = getattr(self, name)
            if not isinstance(value, kinds) or (name == "dimensions" and isinstance(value, bool)):
                raise RequestError(f"{name} cannot be {str(value)[:50]!r}.", param=name)
        is_embedding = self.task in _EMBEDDING_TASKS
        if self.pooling_type is not None and self.task is not PoolingTask.EMBED:
            raise RequestError("pooling_type is for the task 'embed'.", param="pooling_type")
        for name in ("dimensions", "normalize"):
            if getattr(self, name) is not None and not is_embedding:
                raise RequestError(f"{name} is for embeddings, not for the task {self.task.value!r}.", param=name)
        if self.use_activation is not None and is_embedding:
            raise RequestError("use_activation is for the tasks 'classify' and 'score'.", param="use_activation")
        if self.dimensions is not None and self.dimensions < 1:
            raise RequestError("dimensions must be at least 1.", param="dimensions")

    @property
    def needs_all_tokens(self) -> bool:
        """Whether a text's first tokens must be computed, though their keys and values are cached."""
        return self.task is not PoolingTask.EMBED or self.pooling_type is not PoolingType.LAST


@attrs.frozen
class PoolingFacts:
    """What vectors a model gives."""

    tasks: tuple[PoolingTask, ...]
    """At least one; the first is the one that it was made for."""
    pooling_type: PoolingType
    """Of its embeddings."""
    normalize: bool
    embedding_size: int
    """Numbers in a vector."""
    labels: tuple[str, ...] = ()
    """What the numbers of `CLASSIFY` stand for."""

    def complete(self, params: PoolingParams) -> PoolingParams:
        """The same with nothing left to the model.

        Raises:
            RequestError: naming the field at fault.
        """
        params.validate()
        if params.task not in self.tasks:
            possible = ", ".join(task.value for task in self.tasks)
            raise RequestError(f"This model cannot {params.task.value}; it can: {possible}.", param="task")
        if params.dimensions is not None and params.dimensions > self.embedding_size:
            raise RequestError(
                f"dimensions is {params.dimensions}, but this model's vectors have {self.embedding_size}.",
                param="dimensions",
            )
        if params.task not in _EMBEDDING_TASKS:
            return attrs.evolve(params, use_activation=params.use_activation is not False)
        is_embed = params.task is PoolingTask.EMBED
        return attrs.evolve(
            params,
            pooling_type=params.pooling_type or self.pooling_type if is_embed else None,
            normalize=self.normalize if params.normalize is None else params.normalize,
        )


@attrs.frozen
class TextPairPrompt:
    """Two texts that the model reads as one input, such as a question and what may answer it."""

    first: str
    second: str


EncodePrompt = TextPrompt | TokensPrompt | ChatPrompt | TextPairPrompt


def _encode_prompt(value: "EncodePrompt | str | list[int] | tuple[int, ...]") -> EncodePrompt:
    return value if isinstance(value, TextPairPrompt) else prompt_of(value)


def _is_pooling(_: object, __: object, pooling: object) -> None:
    if not isinstance(pooling, PoolingParams):
        raise RequestError("pooling must be a PoolingParams.", param="pooling")


@attrs.frozen
class EncodeRequest:
    """A request for vectors. Travels whole, as `GenerateRequest` does.

    A string as `prompt` is a `TextPrompt`, a list of integers a `TokensPrompt`.
    """

    prompt: EncodePrompt = attrs.field(converter=_encode_prompt)
    pooling: PoolingParams = attrs.field(factory=PoolingParams, validator=_is_pooling)
    request_id: str | None = None
    """The caller's name for it, in logs and outputs; need not be unique. None draws one."""
    priority: int = 0
    """Lower values come first, where the engine's `scheduling_policy` is "priority"."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    lora: str | None = None
    """The name of the LoRA adapter that changes the model for it; None is the model itself."""
    truncate_prompt_tokens: int | None = None
    """A longer text loses tokens at its end until so many are left; -1 is as many as the model takes. None refuses a
    text that is too long."""
    data_parallel_rank: int | None = None
    """The core that computes it; None lets the load decide."""
    session_id: str | None = None
    """As `GenerateRequest.session_id`."""
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    """Of these, `total_s` and `queue_s` have a meaning."""
    trace_headers: Mapping[str, str] | None = None
    """As `GenerateRequest.trace_headers`."""


@attrs.frozen(eq=False)
class PoolingOutput:
    """What came of an `EncodeRequest`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    data: NDArray[np.float32]
    """[embedding size or labels], of `TOKEN_EMBED` [tokens, embedding size]. Read-only."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
