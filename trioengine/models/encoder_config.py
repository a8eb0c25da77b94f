"""The facts of an encoder, read from a folder's `config.json` or a GGUF file. Untrusted, as those of decoders are."""

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import attrs

from trioengine.checkpoint.gguf import GGUFFile
from trioengine.models.config.checks import MAX_NUM_LAYERS
from trioengine.models.config.facts import Facts, read_json
from trioengine.models.config.labels import HeadConfig, read_head
from trioengine.models.sentence_transformers import SentenceTransformer, read_sentence_transformer
from trioengine.types.pooling import PoolingFacts, PoolingTask, PoolingType


class EncoderFamily(enum.Enum):
    """Encoders that differ in more than numbers."""

    BERT = "bert"
    ROBERTA = "roberta"
    """Positions count from behind the padding token's id. XLM-RoBERTa is the same."""
    DISTILBERT = "distilbert"
    """Without token types."""


class EncoderActivation(enum.Enum):
    """What is done to the inner numbers of an MLP."""

    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with tanh."""
    RELU = "relu"
    SILU = "silu"


@attrs.frozen(kw_only=True)
class EncoderConfig:
    """The architecture of one encoder."""

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    """Rows of the table of positions."""
    first_position: int
    """The row of a text's first token."""
    num_token_types: int
    """0 is none at all."""
    activation: EncoderActivation
    layer_norm_epsilon: float
    max_length: int
    """Tokens of the longest text."""
    pooling_type: PoolingType
    normalize: bool
    head: HeadConfig | None = None

    @property
    def num_parameters(self) -> int:
        """Numbers in the matrices that each token is multiplied with."""
        return self.num_layers * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)

    @property
    def pooling(self) -> PoolingFacts:
        """The vectors that it gives."""
        if self.head is not None:
            return self.head.pooling(self.pooling_type, self.hidden_size, normalize=self.normalize)
        tasks = PoolingTask.EMBED, PoolingTask.TOKEN_EMBED
        return PoolingFacts(tasks, self.pooling_type, self.normalize, self.hidden_size)


@attrs.frozen
class _Class:
    """A class of transformers."""

    family: EncoderFamily
    has_head: bool = False


FOLDER_CLASSES: Mapping[str, _Class] = {
    f"{name}{suffix}": _Class(family, has_head=suffix == "ForSequenceClassification")
    for name, family in (
        ("Bert", EncoderFamily.BERT),
        ("Roberta", EncoderFamily.ROBERTA),
        ("XLMRoberta", EncoderFamily.ROBERTA),
        ("DistilBert", EncoderFamily.DISTILBERT),
    )
    for suffix in ("Model", "ForMaskedLM", "ForSequenceClassification")
}
"""By `architectures` of `config.json`."""
GGUF_ARCHITECTURE = "bert"
"""`general.architecture`."""
_ACTIVATIONS: Mapping[str, EncoderActivation] = {
    "gelu": EncoderActivation.GELU,
    "gelu_new": EncoderActivation.GELU_TANH,
    "gelu_pytorch_tanh": EncoderActivation.GELU_TANH,
    "relu": EncoderActivation.RELU,
    "silu": EncoderActivation.SILU,
}
"""By transformers' names."""
_GGUF_POOLING_TYPES: Mapping[int, PoolingType] = {1: PoolingType.MEAN, 2: PoolingType.CLS, 3: PoolingType.LAST}


def encoder_config_from_folder(folder: Path) -> EncoderConfig:
    """Read the facts from `config.json`, and those of sentence-transformers where it has saved the folder.

    Without these, embeddings are normalized means.

    Raises:
        CheckpointError: a file is missing or malformed, a fact is missing or impossible, or the model is not one that
            this engine runs.
    """
    path = folder / "config.json"
    facts = Facts(read_json(path), str(path))
    name = facts.texts("architectures")[0]
    if name not in FOLDER_CLASSES:
        raise facts.unsupported_architecture(name, FOLDER_CLASSES)
    facts.refuse_unless("position_embedding_type", "absolute")
    facts.refuse_unless("is_decoder", False)
    facts.refuse_unless("add_cross_attention", False)
    facts.refuse_unless("sinusoidal_pos_embds", False)
    facts.refuse_unless("embedding_size")
    kind = FOLDER_CLASSES[name]
    is_distilbert, is_roberta = kind.family is EncoderFamily.DISTILBERT, kind.family is EncoderFamily.ROBERTA
    activation = facts.text("activation" if is_distilbert else "hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise facts.error(f"the activation {activation[:50]!r} is not supported; {', '.join(_ACTIVATIONS)} are")
    num_positions = facts.size("max_position_embeddings", 512)
    first_position = facts.size("pad_token_id", 1, least=0) + 1 if is_roberta else 0
    return _checked(
        EncoderConfig(
            family=kind.family,
            vocab_size=facts.size("vocab_size"),
            hidden_size=facts.size("dim" if is_distilbert else "hidden_size"),
            intermediate_size=facts.size("hidden_dim" if is_distilbert else "intermediate_size"),
            num_layers=facts.size("n_layers" if is_distilbert else "num_hidden_layers", most=MAX_NUM_LAYERS),
            num_heads=facts.size("n_heads" if is_distilbert else "num_attention_heads"),
            num_positions=num_positions,
            first_position=first_position,
            num_token_types=0 if is_distilbert else facts.size("type_vocab_size", 2, most=2),
            activation=_ACTIVATIONS[activation],
            layer_norm_epsilon=1e-12 if is_distilbert else facts.number("layer_norm_eps", 1e-12),
            max_length=num_positions - first_position,
            pooling_type=PoolingType.MEAN,
            normalize=True,
            head=read_head(facts, "relu" if is_distilbert else "tanh") if kind.has_head else None,
        ),
        read_sentence_transformer(folder),
        facts,
    )


def encoder_config_from_gguf(file: GGUFFile) -> EncoderConfig:
    """Read the facts from a GGUF file's metadata and the shapes of its tensors.

    Raises:
        CheckpointError: a fact is missing or impossible.
    """
    prefix = f"{GGUF_ARCHITECTURE}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    facts = Facts(own, str(file.path), prefix)
    if facts.has("attention.causal"):
        facts.refuse_unless("attention.causal", False)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items() if len(tensor.shape) == 2}
    for name in ("token_embd.weight", "position_embd.weight"):
        if name not in shapes:
            raise facts.error(f"the tensor {name!r} is missing or is no matrix")
    if "cls.weight" in file.tensors or "cls.output.weight" in file.tensors:
        raise facts.error("classification heads in GGUF files are not supported")
    number = facts.size("pooling_type", 1, least=0)
    if number not in _GGUF_POOLING_TYPES:
        raise facts.error(f"pooling_type {number} is not supported; 1 (mean), 2 (cls) and 3 (last) are")
    num_positions = shapes["position_embd.weight"][0]
    return _checked(
        EncoderConfig(
            family=EncoderFamily.BERT,
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=facts.size("embedding_length"),
            intermediate_size=facts.size("feed_forward_length"),
            num_layers=facts.size("block_count", most=MAX_NUM_LAYERS),
            num_heads=facts.size("attention.head_count"),
            num_positions=num_positions,
            first_position=0,
            num_token_types=shapes["token_types.weight"][0] if "token_types.weight" in shapes else 0,
            activation=EncoderActivation.GELU,
            layer_norm_epsilon=facts.number("attention.layer_norm_epsilon"),
            max_length=min(num_positions, facts.size("context_length")),
            pooling_type=_GGUF_POOLING_TYPES[number],
            normalize=True,
        ),
        None,
        facts,
    )


def _checked(config: EncoderConfig, trained: SentenceTransformer | None, facts: Facts) -> EncoderConfig:
    if config.hidden_size % config.num_heads:
        raise facts.error(f"{config.num_heads} attention heads cannot share {config.hidden_size} numbers evenly")
    if config.max_length < 1:
        raise facts.error(f"{config.num_positions} positions leave none for a text")
    if trained is None:
        return config
    max_length = config.max_length if trained.max_length is None else min(config.max_length, trained.max_length)
    return attrs.evolve(config, pooling_type=trained.pooling_type, normalize=trained.normalize, max_length=max_length)


def is_encoder_folder(folder: Path) -> bool:
    """Whether a folder's model is one of these.

    Raises:
        CheckpointError: its `config.json` cannot be read.
    """
    architectures: object = read_json(folder / "config.json").get("architectures")
    names = cast(list[object], architectures) if isinstance(architectures, list) else []
    return bool(names) and names[0] in FOLDER_CLASSES
