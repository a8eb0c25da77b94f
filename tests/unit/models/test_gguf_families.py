"""A GGUF file of each family, as llama.cpp's converter writes it, gives the logits of the folder it was made from."""

from collections.abc import Mapping

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.models.torch_ops import load_torch_model  # noqa: E402
from trioengine.testing.gguf_conversion import write_converted_gguf  # noqa: E402
from trioengine.testing.logits import torch_logits  # noqa: E402

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TOKENS = [(place * 29 + place * place * 5 + 3) % 131 for place in range(41)]


@attrs.frozen
class Case:
    """A tiny model."""

    config_name: str
    changes: Mapping[str, object]


def rope(**parameters):
    return {"rope_parameters": {"rope_theta": 500.0, "original_max_position_embeddings": 16, **parameters}}


LONG_ROPE = rope(rope_type="longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.25, 1.5],
                 long_factor=[2.0, 3.0, 7.0])  # fmt: skip
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CASES = {
    "llama": Case("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama rope linear": Case("LlamaConfig", rope(rope_type="linear", factor=4.0)),
    "llama rope llama3": Case(
        "LlamaConfig", rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    ),
    "llama rope yarn": Case("LlamaConfig", rope(rope_type="yarn", factor=4.0, beta_fast=4.0, beta_slow=0.5)),
    "mistral": Case("MistralConfig", {"sliding_window": 7}),
    "qwen2": Case("Qwen2Config", {}),
    "qwen3": Case("Qwen3Config", {"head_dim": 16}),
    "smollm3": Case("SmolLM3Config", {}),
    "gemma": Case("GemmaConfig", {"head_dim": 16}),
    "gemma2": Case(
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma2 27b's scale": Case(
        "Gemma2Config",
        {"head_dim": 16, "query_pre_attn_scalar": 8, "sliding_window": 7, "num_hidden_layers": 46},
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 7,
            "num_hidden_layers": 7,
            "rope_parameters": GEMMA3_ROPES,
        },
    ),
    "gemma3 27b's scale": Case(
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 8, "sliding_window": 7, "num_hidden_layers": 62},
    ),
    "phi3": Case("Phi3Config", {"original_max_position_embeddings": 16, "partial_rotary_factor": 0.75, **LONG_ROPE}),
    "phi3 with a window": Case("Phi3Config", {"sliding_window": 9}),
    "olmo2": Case("Olmo2Config", {}),
    "granite": Case(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 7.0,
        },
    ),
    "mixtral": Case("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3 moe": Case(
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_converted_file_gives_the_folders_logits(tmp_path, name) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, case.config_name)(**TINY | case.changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in parameter_name and "Gemma" not in case.config_name else 0.0
            parameter.normal_(mean, 0.2)
    model.save_pretrained(tmp_path)
    write_converted_gguf(tmp_path / "tiny.gguf", config, load_file(tmp_path / "model.safetensors"))
    folder = open_checkpoint(ModelLocation(ModelKind.FOLDER, tmp_path, "tiny"))
    converted = open_checkpoint(ModelLocation(ModelKind.GGUF, tmp_path / "tiny.gguf", "tiny"))
    expected = torch_logits(load_torch_model(folder), TOKENS)
    actual = torch_logits(load_torch_model(converted), TOKENS)
    # Metadata are float32, and so is what Gemma's norms are with 1 added.
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 1e-5
