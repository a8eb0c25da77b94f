"""What is known of a model that says which label a text has: their names, and how its logits become probabilities."""

import enum

import attrs

from trioengine.models.config.facts import Facts
from trioengine.types.pooling import PoolingFacts, PoolingTask, PoolingType

MAX_NUM_LABELS = 1 << 16


class LabelActivation(enum.Enum):
    """How the logits of labels become probabilities."""

    NONE = "none"
    SIGMOID = "sigmoid"
    """Each label by itself."""
    SOFTMAX = "softmax"
    """One of all labels."""


@attrs.frozen
class HeadConfig:
    """A classification head: what is made of one token's hidden state."""

    labels: tuple[str, ...]
    classify_activation: LabelActivation
    score_activation: LabelActivation
    inner_activation: str | None = None
    """"tanh" or "relu", between its two matrices; None where there is one."""
    pooling_type: PoolingType = PoolingType.CLS
    """Whose hidden state: the first token's, or the last one's."""

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What it is for, the first one before all."""
        return (PoolingTask.SCORE, PoolingTask.CLASSIFY) if len(self.labels) == 1 else (PoolingTask.CLASSIFY,)

    def pooling(self, pooling_type: PoolingType, embedding_size: int, *, normalize: bool) -> PoolingFacts:
        """The vectors of a model with this head."""
        return PoolingFacts(self.tasks, pooling_type, normalize, embedding_size, self.labels)


def read_head(
    facts: Facts, inner_activation: str | None = None, pooling_type: PoolingType = PoolingType.CLS
) -> HeadConfig:
    """Of a folder's `config.json`, as transformers and sentence-transformers have it.

    Raises:
        CheckpointError: a fact is malformed, or not known here.
    """
    labels = _labels(facts)
    match facts.text("problem_type", ""):
        case "regression":
            classify = LabelActivation.NONE
        case "multi_label_classification":
            classify = LabelActivation.SIGMOID
        case "single_label_classification":
            classify = LabelActivation.SOFTMAX
        case "":
            classify = LabelActivation.SIGMOID if len(labels) == 1 else LabelActivation.SOFTMAX
        case other:
            raise facts.error(f"the problem_type {other[:50]!r} is not known")
    return HeadConfig(labels, classify, _score_activation(facts), inner_activation, pooling_type)


def _score_activation(facts: Facts) -> LabelActivation:
    """As sentence-transformers' CrossEncoder: a sigmoid unless the folder says otherwise, by the name of a class."""
    names = facts.inner("sentence_transformers") or facts.nothing()
    name = names.text("activation_fn", facts.text("sbert_ce_default_activation_function", "Sigmoid"))
    match name.rpartition(".")[2]:
        case "Sigmoid":
            return LabelActivation.SIGMOID
        case "Identity":
            return LabelActivation.NONE
        case _:
            raise facts.error(f"the activation {name[:50]!r} of scores is not supported; Sigmoid and Identity are")


def _labels(facts: Facts) -> tuple[str, ...]:
    """Their names; transformers counts two where the configuration says nothing."""
    names = facts.inner("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(facts.size("num_labels", 2, most=MAX_NUM_LABELS)))
    count = 0
    while names.has(str(count)):
        count += 1
    if not 1 <= count <= MAX_NUM_LABELS:
        raise facts.error("id2label does not name its labels from '0' on")
    return tuple(names.text(str(i)) for i in range(count))
