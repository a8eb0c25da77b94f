"""Builds a decoder's weights from a GGUF file or from safetensors, checking every tensor's name and shape.

This module knows which tensors a model has; it does not know how the files are read (`checkpoint`, `source`), in which
form a backend wants the weights (`WeightMaker`), or what the decoder does with them.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.gguf import GGUFTensor, open_gguf
from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.config.engine import Quantization
from trioengine.errors import CheckpointError
from trioengine.models.config import (
    Experts,
    ModelConfig,
    NormPlacement,
    QueryKeyNorm,
    Rope,
    config_from_folder,
    config_from_gguf,
)
from trioengine.models.decoder import (
    Decoder,
    DecoderWeights,
    GatedMLP,
    LayerWeights,
    MixtureOfExperts,
    Rotation,
)
from trioengine.models.head import ClassificationHead
from trioengine.models.rope import attention_factor, inverse_frequencies
from trioengine.models.source import Floats, MatrixPart, Source, StoredMatrix, folder_source, gguf_source

ReportFraction: TypeAlias = Callable[[float], None]
"""Called with the share of the weights that is loaded, above 0 to 1."""

NewTensors: TypeAlias = Mapping[str, GGUFTensor]
"""Weights that take the place of a checkpoint's, by name."""

NumberT = TypeVar("NumberT", np.uint8, np.float32)
MatrixT = TypeVar("MatrixT")
VectorT = TypeVar("VectorT")
MatrixT_co = TypeVar("MatrixT_co", covariant=True)
VectorT_co = TypeVar("VectorT_co", covariant=True)


def what_floats_become(asked_for: Quantization | None, min_bits: int) -> Quantization | None:
    """In a matrix that needs so many bits, as `WeightMaker.matrix` has it; None keeps them."""
    if asked_for is None or min_bits > 8:
        return None
    return Quantization.INT8 if asked_for is Quantization.INT4 and min_bits > 4 else asked_for


class WeightMaker(Protocol[MatrixT_co, VectorT_co]):
    """Brings weights into the form in which a backend computes with them."""

    def matrix(self, parts: Sequence[MatrixPart], *, min_bits: int = 4) -> MatrixT_co:
        """One matrix of these, one below the other. They have the same columns, and may be of different kinds.

        `min_bits`: where that was asked for, floats become whole numbers of at least so many bits; at 16 they stay.
        """
        ...

    def vector(self, values: Floats) -> VectorT_co:
        """These numbers, which nobody else holds."""
        ...


@attrs.frozen(eq=False)
class LoadedModel(Generic[MatrixT, VectorT]):
    """A model with its weights."""

    config: ModelConfig
    decoder: Decoder[MatrixT, VectorT]
    head: ClassificationHead | None = None


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
        self.check()
        return open_checkpoint(self.location)

    def check(self) -> None:
        """Raises:
        CheckpointError: the files are gone, or not what they were.
        """
        if _file_versions(self.location) != self.files:
            raise CheckpointError(
                f"{self.location.path} is gone or not what it was when the model was loaded. Restore it, or restart the"
                " engine to load what is there now.",
                path=str(self.location.path),
            )


@attrs.frozen(eq=False)
class Checkpoint:
    """The files of a model, open: its facts are read, its weights are not."""

    version: CheckpointVersion
    config: ModelConfig
    source: Source

    @property
    def location(self) -> ModelLocation:
        """Where it is."""
        return self.version.location

    def with_tensors(self, tensors: NewTensors) -> "Checkpoint":
        """The same with other weights, as `Source.with_tensors` says."""
        return attrs.evolve(self, source=self.source.with_tensors(tensors)) if tensors else self


def open_checkpoint(location: ModelLocation) -> Checkpoint:
    """Read a model's facts, and find its tensors.

    Raises:
        CheckpointError: the files are damaged, or the model is not one that this engine runs.
    """
    # First: a file that changes while it is read is one that has changed.
    version = checkpoint_version(location)
    match location.kind:
        case ModelKind.GGUF:
            file = open_gguf(location.path)
            config = config_from_gguf(file)
            return Checkpoint(version, config, gguf_source(file, config))
        case ModelKind.FOLDER:
            config = config_from_folder(location.path)
            source = folder_source(location.path, config)
            return Checkpoint(version, _with_own_head(config, source), source)


def _with_own_head(config: ModelConfig, source: Source) -> ModelConfig:
    """As transformers has it: an output head that is another matrix than the embedding counts, whatever `config.json`
    says. Who trains a head alone often leaves that as it was."""
    if not config.has_tied_embeddings or config.head is not None:
        return config
    names = source.names
    is_own = source.differ(f"{names.head}.weight", f"{names.embedding}.weight")
    return attrs.evolve(config, has_tied_embeddings=not is_own)


def checkpoint_version(location: ModelLocation) -> CheckpointVersion:
    """What is there now."""
    return CheckpointVersion(location, _file_versions(location))


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
    checkpoint: Checkpoint,
    maker: WeightMaker[MatrixT, VectorT],
    report: ReportFraction | None = None,
    max_length: int | None = None,
) -> LoadedModel[MatrixT, VectorT]:
    """Read a model's weights, tensor by tensor.

    Args:
        checkpoint: the model.
        maker: of the backend that will compute it.
        report: called with the share of the weights that is loaded.
        max_length: tokens of the longest sequence that will be computed, which the frequencies of some models depend
            on; None is the longest that the model was trained for.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration says, or is not known.
        MemoryError: the weights do not fit.
    """
    config = checkpoint.config
    max_length = config.max_position_embeddings if max_length is None else max_length
    head = _classification_head(config, checkpoint.source)
    weights = _load(config, checkpoint.source, maker, report or (lambda fraction: None), max_length)
    return LoadedModel(config, Decoder(config, weights), head)


def _classification_head(config: ModelConfig, source: Source) -> ClassificationHead | None:
    if config.head is None:
        return None
    shape = len(config.head.labels), config.hidden_size
    return ClassificationHead(source.matrix(f"{source.names.score}.weight", shape).floats())


def _load(
    config: ModelConfig,
    source: Source,
    maker: WeightMaker[MatrixT, VectorT],
    report: ReportFraction,
    max_length: int,
) -> DecoderWeights[MatrixT, VectorT]:
    names, hidden = source.names, config.hidden_size
    num_steps = config.num_layers + 1
    # Errors of these two go straight into the logits.
    embedding = maker.matrix([source.matrix(f"{names.embedding}.weight", (config.vocab_size, hidden))], min_bits=8)
    if config.has_tied_embeddings:
        head = embedding
        source.ignore(f"{names.head}.weight")
    else:
        head = maker.matrix([source.matrix(f"{names.head}.weight", (config.vocab_size, hidden))], min_bits=8)
    report(1 / num_steps)
    layers: list[LayerWeights[MatrixT, VectorT]] = []
    for i in range(config.num_layers):
        layers.append(_LayerLoader(config, source, maker, i).load())
        report((i + 2) / num_steps)
    final_norm = source.norm(f"{names.final_norm}.weight", hidden)
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=maker.vector(_scaled(final_norm, config.logit_multiplier)),
        head=head,
        rotations=_rotations(config, maker, max_length),
    )
    source.check_all_read()
    return weights


def _scaled(values: Floats, factor: float) -> Floats:
    with np.errstate(invalid="ignore", over="ignore"):
        values *= np.float32(factor)
    return values


def _rotations(
    config: ModelConfig, maker: WeightMaker[MatrixT, VectorT], max_length: int
) -> Sequence[Rotation[VectorT] | None]:
    """One for each layer; those that are equal are one object."""
    rotations: dict[Rope | None, Rotation[VectorT] | None] = {None: None}
    for rope in config.layer_ropes:
        if rope is not None and rope not in rotations:
            frequencies = inverse_frequencies(rope, config.head_dim, max_length)
            rotations[rope] = Rotation(maker.vector(frequencies), attention_factor(rope))
    return [rotations[rope] for rope in config.layer_ropes]


@attrs.frozen(eq=False)
class _LayerLoader(Generic[MatrixT, VectorT]):
    """Reads the weights of layer `i`."""

    config: ModelConfig
    source: Source
    maker: WeightMaker[MatrixT, VectorT]
    i: int

    def load(self) -> LayerWeights[MatrixT, VectorT]:
        config, names = self.config, self.source.names
        hidden = config.hidden_size
        query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        has_norms = config.norm_placement is not NormPlacement.AFTER
        has_post_norms = config.norm_placement is not NormPlacement.BEFORE
        match config.query_key_norm:
            case QueryKeyNorm.NONE:
                norm_sizes = None
            case QueryKeyNorm.HEAD:
                norm_sizes = config.head_dim, config.head_dim
            case QueryKeyNorm.FULL:
                norm_sizes = query_rows, kv_rows
        return LayerWeights(
            attention_norm=self._norm(names.attention_norm, hidden) if has_norms else None,
            qkv=self._qkv(query_rows, kv_rows),
            qkv_bias=self._qkv_bias(query_rows, kv_rows) if config.has_qkv_bias else None,
            query_norm=self._norm(names.query_norm, norm_sizes[0]) if norm_sizes else None,
            key_norm=self._norm(names.key_norm, norm_sizes[1]) if norm_sizes else None,
            output=self._matrix({names.output: hidden}, query_rows),
            output_bias=self._vector(f"{names.output}.bias", hidden) if config.has_output_bias else None,
            attention_post_norm=self._norm(names.attention_post_norm, hidden) if has_post_norms else None,
            mlp_norm=self._norm(names.mlp_norm, hidden) if has_norms else None,
            mlp=self._mlp() if config.experts is None else self._experts(config.experts),
            mlp_post_norm=self._norm(names.mlp_post_norm, hidden) if has_post_norms else None,
        )

    def _matrix(self, num_rows: Mapping[str, int], num_columns: int) -> MatrixT:
        return self.maker.matrix(self._parts(num_rows, num_columns))

    def _parts(self, num_rows: Mapping[str, int], num_columns: int) -> list[MatrixPart]:
        shapes = {f"{name.format(self.i)}.weight": (rows, num_columns) for name, rows in num_rows.items()}
        for name, shape in shapes.items():
            # Before memory is taken: a damaged configuration may ask for any amount.
            self.source.check_shape(name, shape)
        return [self.source.matrix(name, shape) for name, shape in shapes.items()]

    def _norm(self, name: str, size: int) -> VectorT:
        return self.maker.vector(self.source.norm(f"{name.format(self.i)}.weight", size))

    def _vector(self, name: str, size: int) -> VectorT:
        return self.maker.vector(self.source.vector(name.format(self.i), size))

    def _qkv(self, query_rows: int, kv_rows: int) -> MatrixT:
        names, hidden = self.source.names, self.config.hidden_size
        if names.qkv is not None:
            return self._matrix({names.qkv: query_rows + 2 * kv_rows}, hidden)
        parts = self._parts({names.query: query_rows, names.key: kv_rows, names.value: kv_rows}, hidden)
        if names.has_interleaved_heads:
            parts[:2] = [_with_separate_halves(part, self.config.head_dim) for part in parts[:2]]
        return self.maker.matrix(parts)

    def _qkv_bias(self, query_rows: int, kv_rows: int) -> VectorT:
        names, head_dim = self.source.names, self.config.head_dim
        query, key, value = (
            self.source.vector(f"{name.format(self.i)}.bias", size)
            for name, size in ((names.query, query_rows), (names.key, kv_rows), (names.value, kv_rows))
        )
        if names.has_interleaved_heads:
            query, key = _separate_halves(query, head_dim), _separate_halves(key, head_dim)
        return self.maker.vector(np.concatenate((query, key, value)))

    def _mlp(self) -> GatedMLP[MatrixT]:
        names, hidden, inner = self.source.names, self.config.hidden_size, self.config.intermediate_size
        fused = None if names.gate_up is None else {names.gate_up: 2 * inner}
        return GatedMLP(
            gate_up=self._matrix(fused or {names.gate: inner, names.up: inner}, hidden),
            down=self._matrix({names.down: hidden}, inner),
        )

    def _experts(self, experts: Experts) -> MixtureOfExperts[MatrixT]:
        names, hidden = self.source.names, self.config.hidden_size
        router = self._parts({names.router: experts.num_experts}, hidden)
        gates, ups, downs = (
            self._expert_parts(name, experts.num_experts, shape)
            for name, shape in (
                (names.expert_gate, (experts.intermediate_size, hidden)),
                (names.expert_up, (experts.intermediate_size, hidden)),
                (names.expert_down, (hidden, experts.intermediate_size)),
            )
        )
        return MixtureOfExperts(
            # It is small, and a token that goes to another expert is another token.
            router=self.maker.matrix(router, min_bits=16),
            experts=[
                GatedMLP(self.maker.matrix([gate, up]), self.maker.matrix([down]))
                for gate, up, down in zip(gates, ups, downs, strict=True)
            ],
        )

    def _expert_parts(self, name: str, num_experts: int, shape: tuple[int, int]) -> Sequence[MatrixPart]:
        """A matrix for each expert."""
        if name.format(self.i, 0) == name.format(self.i, 1):
            return self.source.stacked_matrices(f"{name.format(self.i)}.weight", (num_experts, *shape))
        return [self.source.matrix(f"{name.format(self.i, expert)}.weight", shape) for expert in range(num_experts)]


def _with_separate_halves(part: MatrixPart, head_dim: int) -> MatrixPart:
    assert isinstance(part, StoredMatrix), "only GGUF files have interleaved heads"
    return attrs.evolve(part, rows=_separate_halves(part.rows, head_dim))


def _separate_halves(rows: NDArray[NumberT], head_dim: int) -> NDArray[NumberT]:
    """Reorder each head's rows from (a0, b0, a1, b1, …), where rope turns neighbours, to (a0, a1, …, b0, b1, …)."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
