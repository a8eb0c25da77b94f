# pyright: basic
"""A Llama with random weights, small enough to compute in a test, and writers of model files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trioengine_kernels.native.tiles import TileKind, pack_float

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.models.config import Architecture, ModelConfig
from trioengine.models.decoder import Decoder, DecoderWeights, GatedMLP, LayerWeights, Rotation
from trioengine.models.loader import LoadedModel
from trioengine.models.native_ops import NativeMatrix, NativeModel
from trioengine.models.rope import inverse_frequencies
from trioengine.models.source import Floats
from trioengine.models.torch_ops import TorchModel
from trioengine.testing.native import native_library


def tiny_model(*, vocab_size: int = 211, max_position_embeddings: int = 512, seed: int = 0) -> TorchModel:
    """A model of two layers with grouped heads. The same arguments give the same weights."""
    return random_model(tiny_config(vocab_size, max_position_embeddings), seed)


def tiny_config(vocab_size: int = 211, max_position_embeddings: int = 512) -> ModelConfig:
    """The architecture of `tiny_model`."""
    return ModelConfig(
        architecture=Architecture.LLAMA,
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
        rms_norm_epsilon=1e-5,
        has_tied_embeddings=False,
        eos_token_ids=(1,),
    )


def random_model(config: ModelConfig, seed: int = 0) -> TorchModel:
    """A model of this architecture, a Llama. The same arguments give the same weights."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        # Large enough that the best token wins clearly, so that rounding cannot change a greedy answer.
        return torch.randn(rows, columns, generator=generator) * 2 / columns**0.5

    def norm() -> Tensor:
        return 1 + torch.randn(config.hidden_size, generator=generator) / 4

    def bias(size: int) -> Tensor:
        return torch.randn(size, generator=generator) / 4

    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = [
        LayerWeights(
            attention_norm=norm(),
            qkv=matrix(query_rows + 2 * kv_rows, config.hidden_size),
            qkv_bias=bias(query_rows + 2 * kv_rows) if config.has_qkv_bias else None,
            query_norm=None,
            key_norm=None,
            output=matrix(config.hidden_size, query_rows),
            output_bias=bias(config.hidden_size) if config.has_output_bias else None,
            attention_post_norm=None,
            mlp_norm=norm(),
            mlp=GatedMLP(
                gate_up=matrix(2 * config.intermediate_size, config.hidden_size),
                down=matrix(config.hidden_size, config.intermediate_size),
            ),
            mlp_post_norm=None,
        )
        for _ in range(config.num_layers)
    ]
    embedding = matrix(config.vocab_size, config.hidden_size)
    (rope,) = {*config.layer_ropes}
    assert rope is not None
    frequencies = inverse_frequencies(rope, config.head_dim, config.max_position_embeddings)
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=norm(),
        head=embedding if config.has_tied_embeddings else matrix(config.vocab_size, config.hidden_size),
        rotations=[Rotation(torch.from_numpy(frequencies), 1.0)] * config.num_layers,
    )
    return LoadedModel(config, Decoder(config, weights))


def native_copy(model: TorchModel) -> NativeModel:
    """The same model, a Llama, for the native kernels, float32."""
    library = native_library()

    def matrix(values: Tensor) -> NativeMatrix:
        return [pack_float(library, values.numpy(), TileKind.F32)]

    def vector(values: Tensor | None) -> Floats | None:
        return None if values is None else values.numpy()

    weights = model.decoder.weights
    layers = [
        LayerWeights(
            attention_norm=vector(layer.attention_norm),
            qkv=matrix(layer.qkv),
            qkv_bias=vector(layer.qkv_bias),
            query_norm=None,
            key_norm=None,
            output=matrix(layer.output),
            output_bias=vector(layer.output_bias),
            attention_post_norm=None,
            mlp_norm=vector(layer.mlp_norm),
            mlp=GatedMLP(matrix(_gated_mlp(layer).gate_up), matrix(_gated_mlp(layer).down)),
            mlp_post_norm=None,
        )
        for layer in weights.layers
    ]
    rotation = weights.rotations[0]
    assert rotation is not None
    copied = DecoderWeights(
        embedding=matrix(weights.embedding),
        layers=layers,
        final_norm=weights.final_norm.numpy(),
        head=matrix(weights.head),
        rotations=[Rotation(rotation.inverse_frequencies.numpy(), 1.0)] * len(layers),
    )
    return LoadedModel(model.config, Decoder(model.config, copied))


Encode: TypeAlias = Callable[[str, NDArray[np.float32]], tuple[NDArray[np.uint8], int]]
"""Of a matrix's name and numbers makes its bytes, [rows, row bytes], and the number of their GGML type."""


def write_gguf(path: Path, model: TorchModel, encode: Encode | None = None) -> None:
    """Write a model without a tokenizer, as llama.cpp's converter does. Needs the `gguf` package.

    Args:
        path: the file.
        model: what to write.
        encode: quantizes matrices; None writes float32.
    """
    import gguf

    config, weights = model.config, model.decoder.weights
    is_qwen2 = config.architecture is Architecture.QWEN2
    writer = gguf.GGUFWriter(path, "qwen2" if is_qwen2 else "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    (rope,) = {*config.layer_ropes}
    assert rope is not None
    writer.add_rope_freq_base(rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_epsilon)
    if (window := config.layer_windows[0]) is not None:
        writer.add_sliding_window(window)
    for token_id in config.eos_token_ids[:1]:
        writer.add_eos_token_id(token_id)

    def add(name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        values = tensor.contiguous().numpy()
        if encode is None or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            data, kind = encode(name, values)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(kind))

    def add_qkv(layer: str, kind: str, stacked: Tensor | None) -> None:
        if stacked is None:
            return
        query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        query, key, value = stacked.split([query_rows, kv_rows, kv_rows])
        if not is_qwen2:
            query, key = _interleave(query, config.num_heads), _interleave(key, config.num_kv_heads)
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            add(f"{layer}.attn_{name}.{kind}", tensor)

    add("token_embd.weight", weights.embedding)
    add("output_norm.weight", weights.final_norm)
    if not config.has_tied_embeddings:
        add("output.weight", weights.head)
    for i, layer in enumerate(weights.layers):
        name = f"blk.{i}"
        mlp = _gated_mlp(layer)
        gate, up = mlp.gate_up.chunk(2)
        add(f"{name}.attn_norm.weight", layer.attention_norm)
        add_qkv(name, "weight", layer.qkv)
        add_qkv(name, "bias", layer.qkv_bias)
        add(f"{name}.attn_output.weight", layer.output)
        add(f"{name}.attn_output.bias", layer.output_bias)
        add(f"{name}.ffn_norm.weight", layer.mlp_norm)
        add(f"{name}.ffn_gate.weight", gate)
        add(f"{name}.ffn_up.weight", up)
        add(f"{name}.ffn_down.weight", mlp.down)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def folder_tensors(model: TorchModel) -> dict[str, Tensor]:
    """The weights of a Llama as transformers names and arranges them."""
    config, weights = model.config, model.decoder.weights
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, Tensor | None] = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
    }
    if not config.has_tied_embeddings:
        tensors["lm_head.weight"] = weights.head
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}"
        query, key, value = layer.qkv.split([query_rows, kv_rows, kv_rows])
        mlp = _gated_mlp(layer)
        gate, up = mlp.gate_up.chunk(2)
        tensors |= {
            f"{prefix}.input_layernorm.weight": layer.attention_norm,
            f"{prefix}.self_attn.q_proj.weight": query,
            f"{prefix}.self_attn.k_proj.weight": key,
            f"{prefix}.self_attn.v_proj.weight": value,
            f"{prefix}.self_attn.o_proj.weight": layer.output,
            f"{prefix}.post_attention_layernorm.weight": layer.mlp_norm,
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": mlp.down,
        }
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}


def write_folder(folder: Path, model: TorchModel, tensors: dict[str, Tensor]) -> ModelLocation:
    """Write a Llama's folder with these tensors. Needs the `safetensors` package."""
    from safetensors.torch import save_file

    config = model.config
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_epsilon,
        "tie_word_embeddings": config.has_tied_embeddings,
        "eos_token_id": list(config.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "model.safetensors")
    return ModelLocation(ModelKind.FOLDER, folder, "tiny")


def _gated_mlp(layer: LayerWeights[Tensor, Tensor]) -> GatedMLP[Tensor]:
    assert isinstance(layer.mlp, GatedMLP)
    return layer.mlp


def _interleave(rows: Tensor, num_heads: int) -> Tensor:
    """The order in which llama.cpp rotates: neighbours instead of halves."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
