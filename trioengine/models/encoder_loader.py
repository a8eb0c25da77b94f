"""Builds an encoder's weights from a GGUF file or from safetensors, checking every tensor's name and shape."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import attrs
import numpy as np

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.gguf import GGMLType, GGUFTensor, open_gguf
from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.checkpoint.quantized import read_weight_format
from trioengine.checkpoint.safetensors import TensorDType, open_safetensors
from trioengine.errors import CheckpointError
from trioengine.models.encoder import Encoder, EncoderLayer, EncoderWeights, LayerNorm, Linear
from trioengine.models.encoder_config import (
    GGUF_ARCHITECTURE,
    EncoderConfig,
    EncoderFamily,
    encoder_config_from_folder,
    encoder_config_from_gguf,
    is_encoder_folder,
)
from trioengine.models.head import ClassificationHead
from trioengine.models.loader import NewTensors, ReportFraction, WeightMaker
from trioengine.models.source import Floats, StoredMatrix, TensorLayout

MatrixT = TypeVar("MatrixT")
VectorT = TypeVar("VectorT")


@attrs.frozen(eq=False)
class LoadedEncoder(Generic[MatrixT, VectorT]):
    """An encoder with its weights."""

    config: EncoderConfig
    encoder: Encoder[MatrixT, VectorT]
    head: ClassificationHead | None


@attrs.frozen
class EncoderVersion:
    """What tells an encoder from another one in its place; none of its files is kept open."""

    location: ModelLocation
    config: EncoderConfig
    shapes: Mapping[str, tuple[int, ...]]

    def open(self) -> "EncoderCheckpoint":
        """Open the same encoder again.

        Raises:
            CheckpointError: the files are gone, or not what they were.
        """
        checkpoint = open_encoder(self.location)
        if checkpoint is None or checkpoint.version != self:
            raise CheckpointError(
                f"{self.location.path} is not what it was when the model was loaded. Restore it, or restart the engine"
                " to load what is there now.",
                path=str(self.location.path),
            )
        return checkpoint


@attrs.frozen(eq=False)
class EncoderCheckpoint:
    """The files of an encoder, open: its facts are read, its weights are not."""

    location: ModelLocation
    config: EncoderConfig
    tensors: "_Tensors"

    def with_tensors(self, tensors: NewTensors) -> "EncoderCheckpoint":
        """The same with these tensors in the place of those of their names."""
        return attrs.evolve(self, tensors=self.tensors.with_tensors(tensors))

    def layouts(self) -> Mapping[str, TensorLayout]:
        """All tensors."""
        return self.tensors.layouts

    @property
    def version(self) -> EncoderVersion:
        """To open the same again."""
        return EncoderVersion(self.location, self.config, self.tensors.shapes)


def open_encoder(location: ModelLocation) -> EncoderCheckpoint | None:
    """Read an encoder's facts, and find its tensors; None where the model is no encoder.

    Raises:
        CheckpointError: the files are damaged, or the encoder is not one that this engine runs.
    """
    match location.kind:
        case ModelKind.GGUF:
            file = open_gguf(location.path)
            if file.metadata.get("general.architecture") != GGUF_ARCHITECTURE:
                return None
            config = encoder_config_from_gguf(file)
            tensors = _Tensors(location.path, file.tensors)
        case ModelKind.FOLDER:
            if not is_encoder_folder(location.path):
                return None
            config = encoder_config_from_folder(location.path)
            if read_weight_format(location.path) is not None:
                raise CheckpointError(
                    f"{location.path}: encoders with quantized weights are not supported; quantization='int8' quantizes"
                    " those of floats.",
                    path=str(location.path),
                )
            tensors = _Tensors(location.path, _folder_tensors(location.path))
    return EncoderCheckpoint(location, config, tensors)


def load_encoder(
    checkpoint: EncoderCheckpoint, maker: WeightMaker[MatrixT, VectorT], report: ReportFraction | None = None
) -> LoadedEncoder[MatrixT, VectorT]:
    """Read an encoder's weights, tensor by tensor.

    Raises:
        CheckpointError: a tensor is missing, or has another shape than the configuration says.
        MemoryError: the weights do not fit.
    """
    is_folder = checkpoint.location.kind is ModelKind.FOLDER
    names = _FOLDER_NAMES[checkpoint.config.family] if is_folder else _GGUF_NAMES
    loader = _Loader(checkpoint.config, checkpoint.tensors, names, maker)
    return loader.load(report or (lambda fraction: None))


class _Tensors:
    """The tensors of one checkpoint. Those that nobody asks for are of heads that give no vectors."""

    def __init__(self, path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
        self._path = path
        self._tensors = tensors

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def layouts(self) -> Mapping[str, TensorLayout]:
        return {name: TensorLayout(tensor.shape, tensor.ggml_type) for name, tensor in self._tensors.items()}

    def with_tensors(self, tensors: NewTensors) -> "_Tensors":
        return _Tensors(self._path, {**self._tensors, **tensors})

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def matrix(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        tensor = self._tensor(name, shape)
        return StoredMatrix(name, tensor.ggml_type, tensor.data.reshape(shape[0], -1), shape[1])

    def floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        return dequantize(self._tensor(name, shape))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._error(f"the tensor {name!r} is missing")
        if tensor.shape != shape:
            raise self._error(
                f"the tensor {name!r} has the shape {list(tensor.shape)}, but the configuration needs {list(shape)}"
            )
        return tensor

    def _error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {why}.", path=str(self._path))


_TYPES: Mapping[TensorDType, GGMLType] = {
    TensorDType.F32: GGMLType.F32,
    TensorDType.F16: GGMLType.F16,
    TensorDType.BF16: GGMLType.BF16,
}


def _folder_tensors(folder: Path) -> Mapping[str, GGUFTensor]:
    """Those of floats. Old files call the parameters of layer norms gamma and beta."""
    tensors: dict[str, GGUFTensor] = {}
    for name, tensor in open_safetensors(folder).items():
        if (kind := _TYPES.get(tensor.dtype)) is not None:
            name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            tensors[name] = GGUFTensor(name, kind, tensor.shape, tensor.data)
    return tensors


@attrs.frozen(kw_only=True)
class _Names:
    """A format's names, without `.weight` and `.bias`; those of a layer have its number in place of `{}`."""

    prefix: str = ""
    """Before all but those of a head, in files of models with one."""
    embedding: str
    positions: str
    types: str
    embedding_norm: str
    query_key: Sequence[str]
    value: str
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    head_dense: str = ""
    """With its prefix."""
    head_output: str = ""


_BERT_NAMES = _Names(
    prefix="bert.",
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    query_key=("encoder.layer.{}.attention.self.query", "encoder.layer.{}.attention.self.key"),
    value="encoder.layer.{}.attention.self.value",
    output="encoder.layer.{}.attention.output.dense",
    attention_norm="encoder.layer.{}.attention.output.LayerNorm",
    up="encoder.layer.{}.intermediate.dense",
    down="encoder.layer.{}.output.dense",
    mlp_norm="encoder.layer.{}.output.LayerNorm",
    head_dense="bert.pooler.dense",
    head_output="classifier",
)
_FOLDER_NAMES: Mapping[EncoderFamily, _Names] = {
    EncoderFamily.BERT: _BERT_NAMES,
    EncoderFamily.ROBERTA: attrs.evolve(
        _BERT_NAMES, prefix="roberta.", head_dense="classifier.dense", head_output="classifier.out_proj"
    ),
    EncoderFamily.DISTILBERT: _Names(
        prefix="distilbert.",
        embedding="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        types="",
        embedding_norm="embeddings.LayerNorm",
        query_key=("transformer.layer.{}.attention.q_lin", "transformer.layer.{}.attention.k_lin"),
        value="transformer.layer.{}.attention.v_lin",
        output="transformer.layer.{}.attention.out_lin",
        attention_norm="transformer.layer.{}.sa_layer_norm",
        up="transformer.layer.{}.ffn.lin1",
        down="transformer.layer.{}.ffn.lin2",
        mlp_norm="transformer.layer.{}.output_layer_norm",
        head_dense="pre_classifier",
        head_output="classifier",
    ),
}
_GGUF_NAMES = _Names(
    embedding="token_embd",
    positions="position_embd",
    types="token_types",
    embedding_norm="token_embd_norm",
    query_key=("blk.{}.attn_q", "blk.{}.attn_k"),
    value="blk.{}.attn_v",
    output="blk.{}.attn_output",
    attention_norm="blk.{}.attn_output_norm",
    up="blk.{}.ffn_up",
    down="blk.{}.ffn_down",
    mlp_norm="blk.{}.layer_output_norm",
)


class _Loader(Generic[MatrixT, VectorT]):
    def __init__(
        self, config: EncoderConfig, tensors: _Tensors, names: _Names, maker: WeightMaker[MatrixT, VectorT]
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._names = names
        self._maker = maker
        is_prefixed = f"{names.prefix}{names.embedding}.weight" in tensors
        self._prefix = names.prefix if is_prefixed else ""

    def load(self, report: ReportFraction) -> LoadedEncoder[MatrixT, VectorT]:
        config, names = self._config, self._names
        hidden, inner = config.hidden_size, config.intermediate_size
        embedding = self._tensors.matrix(f"{self._prefix}{names.embedding}.weight", (config.vocab_size, hidden))
        # Rows, which nobody multiplies: where they are quantized in the file they stay so.
        table = self._maker.matrix([embedding], min_bits=16)
        positions = self._maker.matrix([self._positions()], min_bits=16)
        norm = self._norm(names.embedding_norm)
        num_steps = config.num_layers + 1
        report(1 / num_steps)
        layers: list[EncoderLayer[MatrixT, VectorT]] = []
        for i in range(config.num_layers):
            layers.append(
                EncoderLayer(
                    query_key=self._linear([name.format(i) for name in names.query_key], hidden, hidden),
                    # An error of the values goes straight into the result, and they are a twelfth of the work.
                    value=self._linear([names.value.format(i)], hidden, hidden, min_bits=16),
                    output=self._linear([names.output.format(i)], hidden, hidden),
                    attention_norm=self._norm(names.attention_norm.format(i)),
                    up=self._linear([names.up.format(i)], inner, hidden),
                    down=self._linear([names.down.format(i)], hidden, inner),
                    mlp_norm=self._norm(names.mlp_norm.format(i)),
                )
            )
            report((i + 2) / num_steps)
        return LoadedEncoder(config, Encoder(config, EncoderWeights(table, positions, norm, layers)), self._head())

    def _positions(self) -> StoredMatrix:
        """For each token type, the positions' embeddings plus the type's."""
        config, names = self._config, self._names
        name = f"{self._prefix}{names.positions}.weight"
        positions = self._tensors.floats(name, (config.num_positions, config.hidden_size))
        if config.num_token_types:
            shape = config.num_token_types, config.hidden_size
            types = self._tensors.floats(f"{self._prefix}{names.types}.weight", shape)
            positions = (types[:, None] + positions).reshape(-1, config.hidden_size)
        return StoredMatrix(name, GGMLType.F32, positions.view(np.uint8), config.hidden_size)

    def _linear(
        self, names: Sequence[str], num_outputs: int, num_inputs: int, *, min_bits: int = 4
    ) -> Linear[MatrixT, VectorT]:
        """One or several, one below the other."""
        full = [f"{self._prefix}{name}" for name in names]
        parts = [self._tensors.matrix(f"{name}.weight", (num_outputs, num_inputs)) for name in full]
        bias = np.concatenate([self._tensors.floats(f"{name}.bias", (num_outputs,)) for name in full])
        return Linear(self._maker.matrix(parts, min_bits=min_bits), self._maker.vector(bias))

    def _norm(self, name: str) -> LayerNorm[VectorT]:
        shape = (self._config.hidden_size,)
        weight, bias = (self._tensors.floats(f"{self._prefix}{name}.{part}", shape) for part in ("weight", "bias"))
        return LayerNorm(self._maker.vector(weight), self._maker.vector(bias))

    def _head(self) -> ClassificationHead | None:
        config, names, floats = self._config, self._names, self._tensors.floats
        if config.head is None:
            return None
        hidden, num_labels = config.hidden_size, len(config.head.labels)
        return ClassificationHead(
            dense=floats(f"{names.head_dense}.weight", (hidden, hidden)),
            dense_bias=floats(f"{names.head_dense}.bias", (hidden,)),
            output=floats(f"{names.head_output}.weight", (num_labels, hidden)),
            output_bias=floats(f"{names.head_output}.bias", (num_labels,)),
        )
