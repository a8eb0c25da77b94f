"""What must hold of a configuration, whichever file it comes from."""

import math

import attrs

from trioengine.models.config.facts import MAX_SIZE, Facts
from trioengine.models.config.model import ModelConfig
from trioengine.models.config.rope import Llama3RopeScaling, LongRopeScaling, Rope, RopeFactors, YarnRopeScaling

MAX_NUM_LAYERS = 4096
MAX_NUM_EXPERTS = 4096


def checked(config: ModelConfig, facts: Facts) -> ModelConfig:
    """The same configuration, with the context that yarn was asked for.

    Raises:
        CheckpointError: nothing could compute it.
    """
    if config.num_heads % config.num_kv_heads:
        raise facts.error(f"{config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads evenly")
    for rope in {rope for rope in config.layer_ropes if rope is not None}:
        _check_rope(rope, config.head_dim, facts)
    for token_id in config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise facts.error(f"the end token {token_id} is not in the vocabulary of {config.vocab_size}")
    if (experts := config.experts) is not None and experts.num_experts_per_token > experts.num_experts:
        raise facts.error(f"{experts.num_experts_per_token} experts for a token are more than {experts.num_experts}")
    # Qwen's users add yarn to config.json, as they are told, and leave its max_position_embeddings.
    lengths = [
        int(min(rope.scaling.original_max_position_embeddings * rope.scaling.factor, MAX_SIZE))
        for rope in config.layer_ropes
        if rope is not None and isinstance(rope.scaling, YarnRopeScaling)
    ]
    return attrs.evolve(config, max_position_embeddings=max(config.max_position_embeddings, *lengths, 0))


def _check_rope(rope: Rope, head_dim: int, facts: Facts) -> None:
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    if rotary_dim % 2:
        raise facts.error(f"the size of an attention head that rope rotates, {rotary_dim}, is odd, which it cannot")
    if not 0 < rotary_dim <= head_dim:
        raise facts.error(f"rope cannot rotate {rotary_dim} elements of an attention head of {head_dim}")
    match rope.scaling:
        case Llama3RopeScaling(low_freq_factor=low, high_freq_factor=high) if low >= high:
            raise facts.error("low_freq_factor must be below high_freq_factor")
        case YarnRopeScaling() if math.log(rope.theta) <= 0:
            raise facts.error("rope_theta must be above 1 for yarn")
        case RopeFactors(factors=factors) if len(factors) != rotary_dim // 2:
            raise facts.error(f"{len(factors)} rope factors are not those of {rotary_dim // 2} frequencies")
        case LongRopeScaling(short_factors=short, long_factors=long) if {len(short), len(long)} != {rotary_dim // 2}:
            raise facts.error(f"short_factor and long_factor must be {rotary_dim // 2} numbers each")
        case _:
            pass
