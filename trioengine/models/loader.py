# pyright: basic
"""Builds a decoder's weights, float32, from a GGUF file or from safetensors, checking every tensor's name and shape.

Quantized tensors are dequantized. This module knows how the two formats name and arrange tensors; it does not know
how the files are read (`checkpoint`) or what the decoder does with the weights.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.gguf import GGUFFile, open_gguf
from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.checkpoint.safetensors import TensorDType, TensorView, open_safetensors
from trioengine.errors import CheckpointError
from trioengine.models.config import GGUF_ARCHITECTURES, Architecture, ModelConfig, config_from_folder, config_from_gguf
from trioengine.models.decoder import Decoder, DecoderWeights, LayerWeights
from trioengine.models.rope import inverse_frequencies

ReportFraction: TypeAlias = Callable[[float], None]
"""Called with the share of the weights that is loaded, above 0 to 1."""
Floats: TypeAlias = NDArray[np.float32]


@attrs.frozen
class LoadedModel:
    """A model that can compute."""

    config: ModelConfig
    decoder: Decoder


def load_model(location: ModelLocation, report: ReportFraction | None = None) -> LoadedModel:
    """Read a model whole.

    Raises:
        CheckpointError: the files are damaged, a tensor is missing, has another shape than the configuration says or
            is not known, or the model is not one that this engine runs.
        MemoryError: the weights do not fit.
    """
    if location.kind is ModelKind.GGUF:
        file = open_gguf(location.path)
        config, source = config_from_gguf(file), _gguf_source(file)
    else:
        config, source = config_from_folder(location.path), _folder_source(location.path)
    return LoadedModel(config, Decoder(config, _load(config, source, report or (lambda fraction: None))))


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
        read: Callable[[str], Floats],
        *,
        has_interleaved_heads: bool = False,
    ) -> None:
        self.path = path
        self.names = names
        self.has_interleaved_heads = has_interleaved_heads
        """The rows of query and key projections are ordered for rope on neighbours, as llama.cpp wants them."""
        self._shapes = shapes
        self._read = read
        self._unread = set(shapes)

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

    def read(self, name: str, shape: tuple[int, ...]) -> Floats:
        self.check_shape(name, shape)
        self._unread.discard(name)
        return self._read(name)

    def ignore(self, name: str) -> None:
        self._unread.discard(name)

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
        lambda name: dequantize(tensors[name]),
        has_interleaved_heads=GGUF_ARCHITECTURES[str(file.metadata["general.architecture"])] is Architecture.LLAMA,
    )


def _folder_source(folder: Path) -> _Source:
    tensors = open_safetensors(folder)
    return _Source(
        folder,
        _FOLDER_NAMES,
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name: _to_float32(folder, tensors[name]),
    )


def _to_float32(folder: Path, tensor: TensorView) -> Floats:
    match tensor.dtype:
        case TensorDType.F32:
            values = tensor.data.view("<f4")
        case TensorDType.F16:
            values = tensor.data.view("<f2").astype(np.float32)
        case TensorDType.BF16:
            values = (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case other:
            raise CheckpointError(
                f"{folder}: the tensor {tensor.name!r} has the type {other}; F32, F16 and BF16 can be read.",
                path=str(folder),
            )
    return values.reshape(tensor.shape)


def _load(config: ModelConfig, source: _Source, report: ReportFraction) -> DecoderWeights:
    names, hidden = source.names, config.hidden_size
    num_steps = config.num_layers + 1
    frequencies = inverse_frequencies(config)
    if _ROPE_FACTORS in source:
        frequencies /= torch.from_numpy(source.read(_ROPE_FACTORS, tuple(frequencies.shape)))
    embedding = _stack(source, [f"{names.embedding}.weight"], [config.vocab_size], hidden)
    if config.has_tied_embeddings:
        head = embedding
        source.ignore(f"{names.head}.weight")
    else:
        head = _stack(source, [f"{names.head}.weight"], [config.vocab_size], hidden)
    report(1 / num_steps)
    layers: list[LayerWeights] = []
    for i in range(config.num_layers):
        layers.append(_load_layer(config, source, i))
        report((i + 2) / num_steps)
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=_stack(source, [f"{names.final_norm}.weight"], [hidden]),
        head=head,
        inverse_frequencies=frequencies,
    )
    source.check_all_read()
    return weights


def _load_layer(config: ModelConfig, source: _Source, i: int) -> LayerWeights:
    names, hidden, inner = source.names, config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_names = [name.format(i) for name in (names.query, names.key, names.value)]
    qkv_rows = [query_rows, kv_rows, kv_rows]
    output = names.output.format(i)

    def qkv(kind: str, columns: int | None) -> Tensor:
        stacked = _stack(source, [f"{name}.{kind}" for name in qkv_names], qkv_rows, columns)
        if source.has_interleaved_heads:
            rotated = stacked[: query_rows + kv_rows]
            rotated.copy_(_separate_halves(rotated, config.head_dim))
        return stacked

    return LayerWeights(
        attention_norm=_stack(source, [f"{names.attention_norm.format(i)}.weight"], [hidden]),
        qkv=qkv("weight", hidden),
        qkv_bias=qkv("bias", None) if config.has_qkv_bias else None,
        output=_stack(source, [f"{output}.weight"], [hidden], query_rows),
        output_bias=_stack(source, [f"{output}.bias"], [hidden]) if config.has_output_bias else None,
        mlp_norm=_stack(source, [f"{names.mlp_norm.format(i)}.weight"], [hidden]),
        gate_up=_stack(source, [f"{n.format(i)}.weight" for n in (names.gate, names.up)], [inner, inner], hidden),
        down=_stack(source, [f"{names.down.format(i)}.weight"], [hidden], inner),
    )


def _stack(source: _Source, names: list[str], rows: list[int], columns: int | None = None) -> Tensor:
    """Tensors [rows, columns], or [rows] without columns, one below the other."""
    tail = () if columns is None else (columns,)
    for name, num_rows in zip(names, rows, strict=True):
        # Before memory is taken: a damaged configuration may ask for any amount.
        source.check_shape(name, (num_rows, *tail))
    if len(names) == 1:
        values = source.read(names[0], (rows[0], *tail))
        # What is a view of the file would be read from it again whenever memory is short, and cannot be a tensor's.
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    stacked = np.empty((sum(rows), *tail), dtype=np.float32)
    first = 0
    for name, num_rows in zip(names, rows, strict=True):
        stacked[first : first + num_rows] = source.read(name, (num_rows, *tail))
        first += num_rows
    return torch.from_numpy(stacked)


def _separate_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from (a0, b0, a1, b1, …), where rope turns neighbours, to (a0, a1, …, b0, b1, …)."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
