# pyright: basic
"""Writes a model of transformers as a GGUF file, with the names and in the order that llama.cpp's converter gives it.

The names come from the `gguf` package's own table. What the converter does to the numbers is here: it reorders rows of
queries and keys for families that rotate neighbours, adds 1 to Gemma's norms, stacks experts, and writes the factors of
Llama 3's and Phi-3's ropes as tensors.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
}
"""By `model_type`."""
_INTERLEAVED = {"llama", "mistral", "mixtral", "smollm3", "granite"}
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Mixtral's, as Qwen's are called."""


def write_converted_gguf(path: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    """Write a model without a tokenizer, in float32.

    Args:
        path: the file.
        config: of transformers.
        tensors: by the names that transformers saves them under.
    """
    kind = config.model_type
    architecture = _ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_facts(writer, config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, values in _stacked_experts(tensors).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind in _INTERLEAVED and ".q_proj." in name:
            values = _interleave(values, config.num_attention_heads)
        if kind in _INTERLEAVED and ".k_proj." in name:
            values = _interleave(values, config.num_key_value_heads)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, values.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    kind = config.model_type
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(config.eos_token_id)
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    parameters = config.rope_parameters
    _add_rope(writer, parameters.get("full_attention", parameters), config, head_dim)


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any], config: Any, head_dim: int) -> None:
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        case "longrope":
            original = config.original_max_position_embeddings
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            for length in ("long", "short"):
                factors = np.array(rope[f"{length}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", factors)
        case "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, rotary_dim))


def _llama3_factors(rope: dict[str, Any], rotary_dim: int) -> np.ndarray:
    factors = []
    for exponent in range(0, rotary_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (exponent / rotary_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share_kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - share_kept) / rope["factor"] + share_kept))
    return np.array(factors, np.float32)


def _interleave(rows: Tensor, num_heads: int) -> Tensor:
    """Neighbours are rotated instead of halves."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of all experts of a layer in one tensor, [experts, rows, columns]."""
    stacked: dict[str, list[Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, values in tensors.items():
        layer, found, expert = name.partition(".experts.")
        if not found:
            others[name] = values
            continue
        _, kind, _ = expert.split(".")
        layer = layer.replace("block_sparse_moe", "mlp")
        stacked.setdefault(f"{layer}.experts.{_EXPERT_NAMES.get(kind, kind)}.weight", []).append(values)
    return others | {name: torch.stack(values) for name, values in stacked.items()}
