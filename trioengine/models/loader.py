"""Builds a decoder's weights from a GGUF file or from safetensors, checking every tensor's name and shape.

This module knows how the two formats name and arrange tensors; it does not know how the files are read (`checkpoint`),
in which form a backend wants the weights (`WeightMaker`), or what the decoder does with them.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.gguf import GGMLType, GGUFFile, GGUFTensor, open_gguf
from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.checkpoint.quantized import PackedMatrix, open_packed, read_weight_format
from trioengine.checkpoint.safetensors import TensorDType, TensorView, open_safetensors
from trioengine.errors import CheckpointError
from trioengine.models.config import GGUF_ARCHITECTURES, Architecture, ModelConfig, config_from_folder, config_from_gguf
from trioengine.models.decoder import Decoder, DecoderWeights, LayerWeights
from trioengine.models.rope import inverse_frequencies

ReportFraction: TypeAlias = Callable[[float], None]
"""Called with the share of the weights that is loaded, above 0 to 1."""
Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

NumberT = TypeVar("NumberT", np.uint8, np.float32)
MatrixT = TypeVar("MatrixT")
VectorT = TypeVar("VectorT")
MatrixT_co = TypeVar("MatrixT_co", covariant=True)
VectorT_co = TypeVar("VectorT_co", covariant=True)


@attrs.frozen(eq=False)
class StoredMatrix:
    """A matrix as its file has it: each row is a run of whole blocks of numbers."""

    name: str
    """The tensor's name in its file."""
    kind: GGMLType
    rows: Bytes
    """[num_rows, bytes of a row]. May be a read-only view of the mapped file."""
    num_columns: int

    def floats(self, first: int = 0, end: int | None = None) -> Floats:
        """Rows `first` to `end - 1` as new writable float32 numbers, [rows, columns].

        Raises:
            CheckpointError: as `dequantize` says.
        """
        rows = self.rows[first:end]
        return dequantize(GGUFTensor(self.name, self.kind, (len(rows), self.num_columns), rows.reshape(-1)))

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return len(self.rows)


MatrixPart: TypeAlias = StoredMatrix | PackedMatrix
"""A matrix of a checkpoint. All kinds have `name`, `num_rows`, `num_columns` and `floats(first, end)`."""


class WeightMaker(Protocol[MatrixT_co, VectorT_co]):
    """Brings weights into the form in which a backend computes with them."""

    def matrix(self, parts: Sequence[MatrixPart]) -> MatrixT_co:
        """One matrix of these, one below the other. They have the same columns, and may be of different kinds."""
        ...

    def vector(self, values: Floats) -> VectorT_co:
        """These numbers, which nobody else holds."""
        ...


@attrs.frozen(eq=False)
class LoadedModel(Generic[MatrixT, VectorT]):
    """A model with its weights."""

    config: ModelConfig
    decoder: Decoder[MatrixT, VectorT]


@attrs.frozen
class FileVersion:
    """What tells a file from another one in its place."""

    name: str
    num_bytes: int
    modified_ns: int


@attrs.frozen
class CheckpointVersion:
    """A checkpoint that was opened, to open the same again; none of its files is kept open."""

    location: ModelLocation
    files: Sequence[FileVersion]

    def open(self) -> "Checkpoint":
        """Open the checkpoint again.

        Raises:
            CheckpointError: the files are gone, or not what they were.
        """
        if _file_versions(self.location) != self.files:
            raise CheckpointError(
                f"{self.location.path} is gone or not what it was when the model was loaded. Restore it, or restart the"
                " engine to load what is there now.",
                path=str(self.location.path),
            )
        return open_checkpoint(self.location)


@attrs.frozen(eq=False)
class Checkpoint:
    """The files of a model, open: its facts are read, its weights are not."""

    version: CheckpointVersion
    config: ModelConfig
    source: "_Source"

    @property
    def location(self) -> ModelLocation:
        """Where it is."""
        return self.version.location


def open_checkpoint(location: ModelLocation) -> Checkpoint:
    """Read a model's facts, and find its tensors.

    Raises:
        CheckpointError: the files are damaged, or the model is not one that this engine runs.
    """
    # First: a file that changes while it is read is one that has changed.
    version = CheckpointVersion(location, _file_versions(location))
    match location.kind:
        case ModelKind.GGUF:
            file = open_gguf(location.path)
            return Checkpoint(version, config_from_gguf(file), _gguf_source(file))
        case ModelKind.FOLDER:
            return Checkpoint(version, config_from_folder(location.path), _folder_source(location.path))


def _file_versions(location: ModelLocation) -> Sequence[FileVersion]:
    """Of the files that weights and their sizes are read from; those that cannot be looked at are left out."""
    match location.kind:
        case ModelKind.GGUF:
            paths = [location.path]
        case ModelKind.FOLDER:
            paths = [*sorted(location.path.glob("*.safetensors*")), location.path / "config.json"]
    versions: list[FileVersion] = []
    for path in paths:
        with contextlib.suppress(OSError):  # Whoever opens it says what is wrong.
            stat = path.stat()
            versions.append(FileVersion(path.name, stat.st_size, stat.st_mtime_ns))
    return versions


def load_model(
    checkpoint: Checkpoint, maker: WeightMaker[MatrixT, VectorT], report: ReportFraction | None = None
) -> LoadedModel[MatrixT, VectorT]:
    """Read a model's weights, tensor by tensor.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration says, or is not known.
        MemoryError: the weights do not fit.
    """
    config = checkpoint.config
    weights = _load(config, checkpoint.source, maker, report or (lambda fraction: None))
    return LoadedModel(config, Decoder(config, weights))


@attrs.frozen
class _Names:
    """A format's names; those of a layer have its number in place of `{}`."""

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    mlp_norm: str
    gate: str
    up: str
    down: str


_GGUF_NAMES = _Names(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    attention_norm="blk.{}.attn_norm",
    query="blk.{}.attn_q",
    key="blk.{}.attn_k",
    value="blk.{}.attn_v",
    output="blk.{}.attn_output",
    mlp_norm="blk.{}.ffn_norm",
    gate="blk.{}.ffn_gate",
    up="blk.{}.ffn_up",
    down="blk.{}.ffn_down",
)
_FOLDER_NAMES = _Names(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_norm="model.layers.{}.input_layernorm",
    query="model.layers.{}.self_attn.q_proj",
    key="model.layers.{}.self_attn.k_proj",
    value="model.layers.{}.self_attn.v_proj",
    output="model.layers.{}.self_attn.o_proj",
    mlp_norm="model.layers.{}.post_attention_layernorm",
    gate="model.layers.{}.mlp.gate_proj",
    up="model.layers.{}.mlp.up_proj",
    down="model.layers.{}.mlp.down_proj",
)
_ROPE_FACTORS = "rope_freqs.weight"
"""In GGUF files: what each frequency is divided by."""


class _Source:
    """The tensors of one checkpoint, and which of them were read."""

    def __init__(
        self,
        path: Path,
        names: _Names,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], GGUFTensor],
        *,
        packed: Mapping[str, PackedMatrix] | None = None,
        optional: Collection[str] = (),
        has_interleaved_heads: bool = False,
    ) -> None:
        """`shapes` and `read` are of tensors that are no packed matrices; those that are optional need not be read."""
        self.path = path
        self.names = names
        self.has_interleaved_heads = has_interleaved_heads
        """The rows of query and key projections are ordered for rope on neighbours, as llama.cpp wants them."""
        self._packed = packed or {}
        packed_shapes = {name: (matrix.num_rows, matrix.num_columns) for name, matrix in self._packed.items()}
        self._shapes = {**shapes, **packed_shapes}
        self._read = read
        self._unread = set(self._shapes).difference(optional)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._shapes:
            raise self.error(f"the tensor {name!r} is missing")
        if self._shapes[name] != shape:
            raise self.error(
                f"the tensor {name!r} has the shape {list(self._shapes[name])}, "
                f"but the configuration needs {list(shape)}"
            )

    def matrix(self, name: str, shape: tuple[int, int]) -> MatrixPart:
        if (packed := self._packed.get(name)) is not None:
            self.check_shape(name, shape)
            self._unread.discard(name)
            return packed
        tensor = self._tensor(name, shape)
        num_rows, num_columns = shape
        return StoredMatrix(name, tensor.ggml_type, tensor.data.reshape(num_rows, -1), num_columns)

    def vector(self, name: str, size: int) -> Floats:
        if name in self._packed:
            raise self.error(f"the tensor {name!r} is a packed matrix, but the configuration needs a vector")
        return dequantize(self._tensor(name, (size,)))

    def ignore(self, name: str) -> None:
        self._unread.discard(name)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        self.check_shape(name, shape)
        self._unread.discard(name)
        return self._read(name)

    def check_all_read(self) -> None:
        """A tensor that nobody reads is part of a model that this code would compute wrongly."""
        unread = sorted(name for name in self._unread if not name.endswith(".rotary_emb.inv_freq"))
        if unread:
            shown = ", ".join(repr(name[:100]) for name in unread[:3])
            raise self.error(f"{len(unread)} tensors are not known for this architecture, such as {shown}")

    def error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why}.", path=str(self.path))


def _gguf_source(file: GGUFFile) -> _Source:
    tensors = file.tensors
    return _Source(
        file.path,
        _GGUF_NAMES,
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name: tensors[name],
        has_interleaved_heads=GGUF_ARCHITECTURES[str(file.metadata["general.architecture"])] is Architecture.LLAMA,
    )


def _folder_source(folder: Path) -> _Source:
    tensors = open_safetensors(folder)
    packed, optional = None, frozenset[str]()
    if (weight_format := read_weight_format(folder)) is not None:
        found = open_packed(folder, weight_format, tensors)
        tensors, packed, optional = found.others, found.matrices, found.optional
    return _Source(
        folder,
        _FOLDER_NAMES,
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name: _as_ggml(folder, tensors[name]),
        packed=packed,
        optional=optional,
    )


_GGML_TYPES: Mapping[TensorDType, GGMLType] = {
    TensorDType.F32: GGMLType.F32,
    TensorDType.F16: GGMLType.F16,
    TensorDType.BF16: GGMLType.BF16,
}
"""The types that both formats store in the same way."""


def _as_ggml(folder: Path, tensor: TensorView) -> GGUFTensor:
    kind = _GGML_TYPES.get(tensor.dtype)
    if kind is None:
        raise CheckpointError(
            f"{folder}: the tensor {tensor.name!r} has the type {tensor.dtype}; F32, F16 and BF16 can be read.",
            path=str(folder),
        )
    return GGUFTensor(tensor.name, kind, tensor.shape, tensor.data)


def _load(
    config: ModelConfig, source: _Source, maker: WeightMaker[MatrixT, VectorT], report: ReportFraction
) -> DecoderWeights[MatrixT, VectorT]:
    names, hidden = source.names, config.hidden_size
    num_steps = config.num_layers + 1
    frequencies = inverse_frequencies(config)
    if _ROPE_FACTORS in source:
        frequencies /= source.vector(_ROPE_FACTORS, len(frequencies))
    embedding = maker.matrix([source.matrix(f"{names.embedding}.weight", (config.vocab_size, hidden))])
    if config.has_tied_embeddings:
        head = embedding
        source.ignore(f"{names.head}.weight")
    else:
        head = maker.matrix([source.matrix(f"{names.head}.weight", (config.vocab_size, hidden))])
    report(1 / num_steps)
    layers: list[LayerWeights[MatrixT, VectorT]] = []
    for i in range(config.num_layers):
        layers.append(_load_layer(config, source, maker, i))
        report((i + 2) / num_steps)
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=maker.vector(source.vector(f"{names.final_norm}.weight", hidden)),
        head=head,
        inverse_frequencies=maker.vector(frequencies),
    )
    source.check_all_read()
    return weights


def _load_layer(
    config: ModelConfig, source: _Source, maker: WeightMaker[MatrixT, VectorT], i: int
) -> LayerWeights[MatrixT, VectorT]:
    names, hidden, inner = source.names, config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(num_rows: Mapping[str, int], num_columns: int) -> MatrixT:
        shapes = {f"{name.format(i)}.weight": (rows, num_columns) for name, rows in num_rows.items()}
        for name, shape in shapes.items():
            # Before memory is taken: a damaged configuration may ask for any amount.
            source.check_shape(name, shape)
        parts = [source.matrix(name, shape) for name, shape in shapes.items()]
        if names.query in num_rows and source.has_interleaved_heads:
            parts[:2] = [_with_separate_halves(part, config.head_dim) for part in parts[:2]]
        return maker.matrix(parts)

    def vector(name: str, size: int) -> VectorT:
        return maker.vector(source.vector(name.format(i), size))

    def qkv_bias() -> VectorT:
        query, key, value = (
            source.vector(f"{name.format(i)}.bias", size)
            for name, size in ((names.query, query_rows), (names.key, kv_rows), (names.value, kv_rows))
        )
        if source.has_interleaved_heads:
            query, key = _separate_halves(query, config.head_dim), _separate_halves(key, config.head_dim)
        return maker.vector(np.concatenate((query, key, value)))

    return LayerWeights(
        attention_norm=vector(f"{names.attention_norm}.weight", hidden),
        qkv=matrix({names.query: query_rows, names.key: kv_rows, names.value: kv_rows}, hidden),
        qkv_bias=qkv_bias() if config.has_qkv_bias else None,
        output=matrix({names.output: hidden}, query_rows),
        output_bias=vector(f"{names.output}.bias", hidden) if config.has_output_bias else None,
        mlp_norm=vector(f"{names.mlp_norm}.weight", hidden),
        gate_up=matrix({names.gate: inner, names.up: inner}, hidden),
        down=matrix({names.down: hidden}, inner),
    )


def _with_separate_halves(part: MatrixPart, head_dim: int) -> MatrixPart:
    assert isinstance(part, StoredMatrix), "only GGUF files have interleaved heads"
    return attrs.evolve(part, rows=_separate_halves(part.rows, head_dim))


def _separate_halves(rows: NDArray[NumberT], head_dim: int) -> NDArray[NumberT]:
    """Reorder each head's rows from (a0, b0, a1, b1, …), where rope turns neighbours, to (a0, a1, …, b0, b1, …)."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
