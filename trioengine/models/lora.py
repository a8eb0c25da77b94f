"""Reads LoRA adapters as PEFT saves them: a folder with `adapter_config.json` and `adapter_model.safetensors`.

An adapter adds `scale * B (A x)` to what a matrix makes of x (Hu et al., 2021). It names the modules of transformers;
here it is of the decoder's matrices, of which one may be several modules. What an adapter may ask for that is not
computed here is refused: a model that silently is not the one that was trained helps nobody.

An adapter is untrusted input, and its patterns are regular expressions: those that may take for ever are refused.
"""

import enum
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar, cast

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.gguf import GGMLType, GGUFTensor
from trioengine.checkpoint.safetensors import TensorDType, TensorView, read_safetensors_file
from trioengine.checkpoint.small_files import read_json_object
from trioengine.errors import CheckpointError, RequestError
from trioengine.models.config import ModelConfig
from trioengine.models.decoder import DecoderWeights, GatedMLP
from trioengine.models.names import ROOTS, folder_names

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_PATTERN_CHARS = 500
MAX_QUANTIFIERS = 4
"""Of a pattern. So many unbounded ones of a name of some 60 characters take milliseconds."""

Floats = NDArray[np.float32]
MatrixT = TypeVar("MatrixT")
VectorT = TypeVar("VectorT")

_PEFT_DEFAULT = 8
"""Of rank and alpha."""
_UNSUPPORTED: Mapping[str, Sequence[object]] = {
    # Each key with its values that change nothing.
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "exclude_modules": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
_NEVER_CHANGED = ("lm_head", "embed_tokens")
"""Every model has them."""
_GGML_TYPES: Mapping[TensorDType, GGMLType] = {
    TensorDType.F32: GGMLType.F32,
    TensorDType.F16: GGMLType.F16,
    TensorDType.BF16: GGMLType.BF16,
}


class LoRAMatrix(enum.Enum):
    """A matrix of a layer that adapters may change."""

    QKV = enum.auto()
    OUTPUT = enum.auto()
    GATE_UP = enum.auto()
    DOWN = enum.auto()


@attrs.frozen
class LoRAPlace:
    """A module of transformers, as part of a matrix."""

    module: str
    layer: int
    matrix: LoRAMatrix
    number: int
    """Counts the modules of the matrix."""
    first_row: int
    num_rows: int
    num_columns: int


@attrs.frozen(eq=False)
class LoRAPart:
    """What an adapter adds to some outputs of a matrix: `b @ (a @ x)`."""

    first_row: int
    a: Floats
    """[rank, columns]."""
    b: Floats
    """[rows, rank]. The scale is in it."""


@attrs.frozen(eq=False)
class LoRA:
    """An adapter of one model."""

    path: str
    parts: Mapping[tuple[int, LoRAMatrix], Mapping[int, LoRAPart]]
    """By layer and matrix, then by `LoRAPlace.number`."""

    def part(self, place: LoRAPlace) -> LoRAPart | None:
        """What it adds there."""
        return self.parts.get((place.layer, place.matrix), {}).get(place.number)


def lora_places(config: ModelConfig) -> Sequence[LoRAPlace]:
    """Every module of a model that an adapter may change. MLPs of mixtures of experts are not among them."""
    names, hidden = folder_names(config.architecture, ROOTS[0]), config.hidden_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if names.qkv is not None:
        qkv = {names.qkv: query_rows + 2 * kv_rows}
    else:
        qkv = {names.query: query_rows, names.key: kv_rows, names.value: kv_rows}
    matrices = [(LoRAMatrix.QKV, qkv, hidden), (LoRAMatrix.OUTPUT, {names.output: hidden}, query_rows)]
    if config.experts is None:
        inner = config.intermediate_size
        gate_up = {names.gate: inner, names.up: inner} if names.gate_up is None else {names.gate_up: 2 * inner}
        matrices += [(LoRAMatrix.GATE_UP, gate_up, hidden), (LoRAMatrix.DOWN, {names.down: hidden}, inner)]
    places: list[LoRAPlace] = []
    for layer in range(config.num_layers):
        for matrix, modules, num_columns in matrices:
            first_row = 0
            for number, (name, num_rows) in enumerate(modules.items()):
                places.append(LoRAPlace(name.format(layer), layer, matrix, number, first_row, num_rows, num_columns))
                first_row += num_rows
    return places


@attrs.frozen(eq=False)
class LoRATarget(Generic[MatrixT]):
    """A matrix of a model, and its modules."""

    weight: MatrixT
    places: Sequence[LoRAPlace]


def lora_targets(config: ModelConfig, weights: DecoderWeights[MatrixT, VectorT]) -> Sequence[LoRATarget[MatrixT]]:
    """The matrices of a model that adapters may change."""
    matrices: dict[tuple[int, LoRAMatrix], MatrixT] = {}
    for layer, of_layer in enumerate(weights.layers):
        matrices[layer, LoRAMatrix.QKV] = of_layer.qkv
        matrices[layer, LoRAMatrix.OUTPUT] = of_layer.output
        if isinstance(of_layer.mlp, GatedMLP):
            matrices[layer, LoRAMatrix.GATE_UP] = of_layer.mlp.gate_up
            matrices[layer, LoRAMatrix.DOWN] = of_layer.mlp.down
    places: dict[tuple[int, LoRAMatrix], list[LoRAPlace]] = {}
    for place in lora_places(config):
        places.setdefault((place.layer, place.matrix), []).append(place)
    return [LoRATarget(matrices[key], of_matrix) for key, of_matrix in places.items()]


def read_lora(path: str, config: ModelConfig, max_rank: int) -> LoRA:
    """Read an adapter for a model.

    Args:
        path: its folder.
        config: of the model.
        max_rank: the largest rank that it may have.

    Raises:
        CheckpointError: its files cannot be read, ask for what is not computed here, or are of another model.
        RequestError: its rank is too large. `param` is "path".
    """
    return _Reader(Path(path), config, max_rank).read()


@attrs.frozen
class _Settings:
    rank: int
    alpha: float
    is_rank_stabilized: bool
    target_modules: Sequence[str] | str
    alpha_pattern: Mapping[str, float]
    rank_pattern: Mapping[str, int]
    layers: Sequence[int] | None


class _Reader:
    def __init__(self, folder: Path, config: ModelConfig, max_rank: int) -> None:
        self._folder = folder
        self._places = lora_places(config)
        self._max_rank = max_rank

    def read(self) -> LoRA:
        settings = self._settings()
        targets = self._targets(settings)
        tensors = self._tensors()
        places = {place.module: place for place in self._places}
        parts: dict[tuple[int, LoRAMatrix], dict[int, LoRAPart]] = {}
        for module, pair in tensors.items():
            place = places.get(module)
            if place is None:
                raise self._error(f"it changes {module[:100]!r}, which adapters cannot change here")
            if module not in targets:
                raise self._error(f"it has tensors of {module[:100]!r}, which target_modules does not name")
            of_matrix = parts.setdefault((place.layer, place.matrix), {})
            of_matrix[place.number] = self._part(place, pair, settings)
        for module in targets:
            if module not in tensors:
                raise self._error(f"it has no tensors of {module!r}, which target_modules names")
        return LoRA(str(self._folder), parts)

    # The configuration

    def _settings(self) -> _Settings:
        raw = self._config()
        kind = raw.get("peft_type", "LORA")
        if kind != "LORA":
            raise self._error(f"peft_type is {str(kind)[:50]!r}; only LORA can be computed")
        for key, harmless in _UNSUPPORTED.items():
            value = raw.get(key)
            if value not in harmless:
                raise self._error(f"{key} is {str(value)[:50]!r}, which is not computed here")
        rank, alpha = raw.get("r", _PEFT_DEFAULT), raw.get("lora_alpha", _PEFT_DEFAULT)
        if type(rank) is not int or rank < 1:
            raise self._error(f"r must be a positive integer, not {str(rank)[:50]!r}")
        targets = raw.get("target_modules")
        if not isinstance(targets, str) and not (_is_list_of(targets, str) and targets):
            raise self._error("target_modules must be a list of names, a regular expression or 'all-linear'")
        layers = raw.get("layers_to_transform")
        if type(layers) is int:
            layers = [layers]
        if layers is not None and not _is_list_of(layers, int):
            raise self._error("layers_to_transform must be a list of numbers")
        return _Settings(
            rank,
            self._number("lora_alpha", alpha),
            raw.get("use_rslora") is True,
            cast(list[str] | str, targets),
            {key: self._number("alpha_pattern", value) for key, value in self._patterns(raw, "alpha_pattern")},
            {key: int(self._number("rank_pattern", value)) for key, value in self._patterns(raw, "rank_pattern")},
            cast(list[int] | None, layers),
        )

    def _config(self) -> Mapping[str, object]:
        path = self._folder / CONFIG_NAME
        try:
            is_there = path.exists()
        except OSError as error:  # Such as a name that is too long to be one.
            raise self._error(f"it cannot be read: {error.strerror}") from None
        if not is_there:
            raise self._error(f"it has no {CONFIG_NAME}")
        return read_json_object(path)

    def _patterns(self, raw: Mapping[str, object], key: str) -> Iterator[tuple[str, object]]:
        value: object = raw.get(key) or {}
        if not isinstance(value, dict):
            raise self._error(f"{key} must be an object")
        yield from cast(dict[str, object], value).items()

    def _number(self, key: str, value: object) -> float:
        if type(value) not in (int, float) or not 0 < abs(cast(float, value)) < 2**20:
            raise self._error(f"{key} must be a number that is not 0, not {str(value)[:50]!r}")
        return float(cast(float, value))

    def _targets(self, settings: _Settings) -> set[str]:
        """The modules that `target_modules` names."""
        wanted = settings.target_modules
        places = [place for place in self._places if settings.layers is None or place.layer in settings.layers]
        if wanted == "all-linear":
            return {place.module for place in places}
        if isinstance(wanted, str):
            pattern = self._pattern("target_modules", wanted)
            found = {place.module for place in places if pattern.fullmatch(place.module)}
            if not found:
                raise self._error(f"target_modules {wanted[:100]!r} names nothing that adapters can change here")
            return found
        found = set[str]()
        for name in wanted:
            named = {each.module for each in places if each.module == name or each.module.endswith(f".{name}")}
            if name.rpartition(".")[2] in _NEVER_CHANGED:
                raise self._error(f"target_modules names {name[:100]!r}, which adapters cannot change here")
            found |= named
        if not found:
            names = ", ".join(map(repr, wanted))[:100]
            raise self._error(f"target_modules names {names}, of which adapters can change nothing here")
        # What else it names the model may not have: adapters' lists are for many models.
        return found

    def _pattern(self, key: str, pattern: str) -> re.Pattern[str]:
        """A pattern that takes little time whatever it is matched with: no quantifier stands behind a group, where
        it could contain others, and few stand at all."""
        num_quantifiers = len(re.findall(r"[*+{]", pattern))
        if len(pattern) > MAX_PATTERN_CHARS or num_quantifiers > MAX_QUANTIFIERS or re.search(r"\)[*+{]", pattern):
            raise self._error(f"{key} has a pattern that is not taken, as it might take for ever: {pattern[:100]!r}")
        try:
            return re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise self._error(f"{key} has {pattern[:100]!r}, which is no regular expression: {error}") from error

    def _of_patterns(self, key: str, patterns: Mapping[str, float], module: str) -> float | None:
        """The value of the first pattern that matches a module's name, or its end after a point."""
        for pattern, value in patterns.items():
            compiled = self._pattern(key, pattern)
            starts = [0, *(i + 1 for i, letter in enumerate(module) if letter == ".")]
            if any(compiled.fullmatch(module, start) for start in starts):
                return value
        return None

    # The tensors

    def _tensors(self) -> Mapping[str, Mapping[str, TensorView]]:
        """By module its A and B."""
        modules: dict[str, dict[str, TensorView]] = {}
        for tensor in read_safetensors_file(self._folder / WEIGHTS_NAME):
            name = tensor.name
            match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight", name)
            if match is None:
                raise self._error(f"the tensor {name[:100]!r} is not of a kind that is known")
            root = next((root for root in ROOTS if match[1].startswith(root)), "")
            pair = modules.setdefault(match[1] if not root else ROOTS[0] + match[1].removeprefix(root), {})
            if match[2] in pair:
                raise self._error(f"the tensor {name[:100]!r} is there twice")
            pair[match[2]] = tensor
        return modules

    def _part(self, place: LoRAPlace, pair: Mapping[str, TensorView], settings: _Settings) -> LoRAPart:
        if len(pair) != 2:
            raise self._error(f"{place.module!r} has only one of lora_A and lora_B")
        rank = int(self._of_patterns("rank_pattern", settings.rank_pattern, place.module) or settings.rank)
        if rank > self._max_rank:
            raise RequestError(
                f"{self._folder}: the adapter has rank {rank}, but max_lora_rank is {self._max_rank}.", param="path"
            )
        alpha = self._of_patterns("alpha_pattern", settings.alpha_pattern, place.module) or settings.alpha
        scale = alpha / (math.sqrt(rank) if settings.is_rank_stabilized else rank)
        a = self._floats(pair["A"], (rank, place.num_columns))
        b = self._floats(pair["B"], (place.num_rows, rank))
        b *= np.float32(scale)
        return LoRAPart(place.first_row, a, b)

    def _floats(self, tensor: TensorView, shape: tuple[int, int]) -> Floats:
        if tensor.shape != shape:
            raise self._error(
                f"the tensor {tensor.name[:100]!r} has the shape {list(tensor.shape)}, but {list(shape)} is needed"
            )
        kind = _GGML_TYPES.get(tensor.dtype)
        if kind is None:
            raise self._error(
                f"the tensor {tensor.name[:100]!r} has the type {tensor.dtype}; F32, F16 and BF16 are read"
            )
        values = dequantize(GGUFTensor(tensor.name, kind, tensor.shape, tensor.data)).reshape(shape)
        if not np.isfinite(values).all():
            raise self._error(f"the tensor {tensor.name[:100]!r} has numbers that are not finite")
        return values

    def _error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._folder}: {why}.", path=str(self._folder))


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in cast(list[object], value))
