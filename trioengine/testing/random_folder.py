# pyright: basic
"""A folder with a Llama of given sizes and random weights, for benchmarks: nobody has to fetch gigabytes."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path

import tokenizers
import torch
from trioengine_kernels.benchmark.cases import ModelSizes

POOL_NUMBERS = 1 << 24
"""Random numbers that the weights are cut from."""
WEIGHT_SCALE = 0.02
TINY_SIZES = ModelSizes(
    name="tiny",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    has_tied_embeddings=True,
)
"""For tests of benchmarks."""


def write_random_folder(folder: Path, sizes: ModelSizes, dtype: str) -> None:
    """Write a Llama of these sizes with random weights, and a tokenizer of 256 bytes. Nothing ends an answer of it.

    Numbers are cut from one pool in another place for each tensor: they look random to a card, which computes faster
    with zeros, and are written as fast as the disk takes them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": sizes.has_tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    _tokenizer().save(str(folder / "tokenizer.json"))
    itemsize = getattr(torch, dtype).itemsize
    header: dict[str, object] = {}
    offset = 0
    for name, shape in _tensors(sizes).items():
        end = offset + math.prod(shape) * itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(POOL_NUMBERS, generator=generator).mul_(WEIGHT_SCALE).to(getattr(torch, dtype))
    places = random.Random(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in _tensors(sizes).values():
            if len(shape) == 1:
                file.write(_bytes(torch.ones(shape, dtype=pool.dtype)))
                continue
            num_left = math.prod(shape)
            while num_left:
                begin = places.randrange(len(pool) // 2)
                part = pool[begin : begin + min(num_left, len(pool) - begin)]
                file.write(_bytes(part))
                num_left -= len(part)


_SAFETENSORS_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _tensors(sizes: ModelSizes) -> Mapping[str, list[int]]:
    query_rows, kv_rows = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    tensors = {"model.embed_tokens.weight": [sizes.vocab_size, sizes.hidden_size]}
    for i in range(sizes.num_layers):
        prefix = f"model.layers.{i}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": [sizes.hidden_size],
            f"{prefix}.self_attn.q_proj.weight": [query_rows, sizes.hidden_size],
            f"{prefix}.self_attn.k_proj.weight": [kv_rows, sizes.hidden_size],
            f"{prefix}.self_attn.v_proj.weight": [kv_rows, sizes.hidden_size],
            f"{prefix}.self_attn.o_proj.weight": [sizes.hidden_size, query_rows],
            f"{prefix}.post_attention_layernorm.weight": [sizes.hidden_size],
            f"{prefix}.mlp.gate_proj.weight": [sizes.intermediate_size, sizes.hidden_size],
            f"{prefix}.mlp.up_proj.weight": [sizes.intermediate_size, sizes.hidden_size],
            f"{prefix}.mlp.down_proj.weight": [sizes.hidden_size, sizes.intermediate_size],
        }
    tensors["model.norm.weight"] = [sizes.hidden_size]
    if not sizes.has_tied_embeddings:
        tensors["lm_head.weight"] = [sizes.vocab_size, sizes.hidden_size]
    return tensors


def _bytes(values: torch.Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer
