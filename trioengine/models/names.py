"""How the two formats name and arrange the tensors of each family."""

import attrs

from trioengine.models.config import Architecture


@attrs.frozen(kw_only=True)
class Names:
    """A format's names, without `.weight`; those of a layer have its number in place of `{}`."""

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    query: str
    key: str
    value: str
    query_norm: str
    key_norm: str
    output: str
    attention_post_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    mlp_post_norm: str
    router: str
    expert_gate: str
    """Of each expert, whose number is in place of a second `{}`; or of all, in one tensor [experts, rows, columns]."""
    expert_up: str
    expert_down: str
    qkv: str | None = None
    """In place of `query`, `key` and `value`."""
    gate_up: str | None = None
    """In place of `gate` and `up`."""
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    score: str = "score"
    """The classification head; folders only."""
    has_interleaved_heads: bool = False
    """The rows of query and key projections are ordered for rope on neighbours, as llama.cpp wants them of some."""


_GGUF = Names(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    attention_norm="blk.{}.attn_norm",
    query="blk.{}.attn_q",
    key="blk.{}.attn_k",
    value="blk.{}.attn_v",
    query_norm="blk.{}.attn_q_norm",
    key_norm="blk.{}.attn_k_norm",
    output="blk.{}.attn_output",
    attention_post_norm="blk.{}.post_attention_norm",
    mlp_norm="blk.{}.ffn_norm",
    gate="blk.{}.ffn_gate",
    up="blk.{}.ffn_up",
    down="blk.{}.ffn_down",
    mlp_post_norm="blk.{}.post_ffw_norm",
    router="blk.{}.ffn_gate_inp",
    expert_gate="blk.{}.ffn_gate_exps",
    expert_up="blk.{}.ffn_up_exps",
    expert_down="blk.{}.ffn_down_exps",
)
_INTERLEAVED = {
    Architecture.LLAMA,
    Architecture.MISTRAL,
    Architecture.MIXTRAL,
    Architecture.SMOLLM3,
    Architecture.GRANITE,
}
_FOLDER = Names(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_norm="model.layers.{}.input_layernorm",
    query="model.layers.{}.self_attn.q_proj",
    key="model.layers.{}.self_attn.k_proj",
    value="model.layers.{}.self_attn.v_proj",
    query_norm="model.layers.{}.self_attn.q_norm",
    key_norm="model.layers.{}.self_attn.k_norm",
    output="model.layers.{}.self_attn.o_proj",
    attention_post_norm="model.layers.{}.post_attention_layernorm",
    mlp_norm="model.layers.{}.post_attention_layernorm",
    gate="model.layers.{}.mlp.gate_proj",
    up="model.layers.{}.mlp.up_proj",
    down="model.layers.{}.mlp.down_proj",
    mlp_post_norm="model.layers.{}.post_feedforward_layernorm",
    router="model.layers.{}.mlp.gate",
    expert_gate="model.layers.{}.mlp.experts.{}.gate_proj",
    expert_up="model.layers.{}.mlp.experts.{}.up_proj",
    expert_down="model.layers.{}.mlp.experts.{}.down_proj",
)


def gguf_names(architecture: Architecture) -> Names:
    """Of GGUF files, where Gemma's norms are stored with 1 added."""
    names = attrs.evolve(_GGUF, has_interleaved_heads=architecture in _INTERLEAVED)
    if architecture is Architecture.PHI3:
        names = attrs.evolve(names, qkv="blk.{}.attn_qkv", gate_up="blk.{}.ffn_up")
    return names


ROOTS = ("model.", "language_model.model.", "model.language_model.")
"""What the names of a folder begin with: in models that see, too, the text model is a part."""


def folder_names(architecture: Architecture, root: str) -> Names:
    """Of safetensors, as transformers saves them. `root`: of `ROOTS`."""
    names = attrs.asdict(_folder_names(architecture))
    rooted = {
        key: root + name.removeprefix(ROOTS[0])
        for key, name in names.items()
        if isinstance(name, str) and name.startswith(ROOTS[0])
    }
    return attrs.evolve(_folder_names(architecture), **rooted)


def _folder_names(architecture: Architecture) -> Names:
    match architecture:
        case Architecture.GEMMA:
            return attrs.evolve(_FOLDER, norm_offset=1.0)
        case Architecture.GEMMA2 | Architecture.GEMMA3:
            return attrs.evolve(_FOLDER, mlp_norm="model.layers.{}.pre_feedforward_layernorm", norm_offset=1.0)
        case Architecture.PHI3:
            return attrs.evolve(
                _FOLDER, qkv="model.layers.{}.self_attn.qkv_proj", gate_up="model.layers.{}.mlp.gate_up_proj"
            )
        case Architecture.MIXTRAL:
            experts = "model.layers.{}.block_sparse_moe.experts.{}"
            return attrs.evolve(
                _FOLDER,
                router="model.layers.{}.block_sparse_moe.gate",
                expert_gate=f"{experts}.w1",
                expert_up=f"{experts}.w3",
                expert_down=f"{experts}.w2",
            )
        case _:
            return _FOLDER
