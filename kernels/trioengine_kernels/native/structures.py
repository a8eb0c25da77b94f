# pyright: basic
"""The C structures of the native backend, as ctypes sees them. Mirrors src/te.h and src/program.h, field by field."""

import ctypes
import enum
from ctypes import c_float, c_int32, c_int64, c_void_p

GROUP_BYTES = 48
"""Of a `TeGroup`: 32 quantized activations with their scale and sums."""


class OpKind(enum.IntEnum):
    """`TeOpKind`."""

    EMBEDDING = 0
    RMS_NORM = 1
    QUANTIZE = 2
    LINEAR = 3
    ADD = 4
    ROPE_TABLE = 5
    ROPE_WRITE = 6
    ATTENTION = 7
    ATTENTION_MERGE = 8
    GATED = 9
    SELECT_ROWS = 10
    SOFT_CAP = 11
    CHOOSE_EXPERTS = 12
    GROUP_BY_EXPERT = 13
    GATHER_ROWS = 14
    EXPERT_LINEAR = 15
    MIX_EXPERTS = 16
    LORA = 17
    LAYER_NORM = 18
    ACTIVATED_LINEAR = 19
    FULL_ATTENTION = 20


class RowKind(enum.IntEnum):
    """`TeRowKind`: which rows of a step an operation is for."""

    TOKENS = 0
    LOGITS = 1
    SELECTED = 2
    """Those of logits, and behind them those whose hidden states are wanted."""


class Activation(enum.IntEnum):
    """`TeActivation`."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU = 3


class Tiles(ctypes.Structure):
    """`TeTiles`."""

    _fields_ = [("data", c_void_p), ("kind", c_int32), ("rows", c_int32), ("columns", c_int32), ("groups", c_int32)]


class Embedding(ctypes.Structure):
    """`TeEmbedding`."""

    _fields_ = [("tiles", Tiles), ("out", c_void_p), ("multiplier", c_float), ("is_by_position", c_int32)]


class Norm(ctypes.Structure):
    """`TeNorm`."""

    _fields_ = [
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("groups", c_void_p),
        ("width", c_int32),
        ("epsilon", c_float),
    ]


class LayerNorm(ctypes.Structure):
    """`TeLayerNorm`."""

    _fields_ = [
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("groups", c_void_p),
        ("width", c_int32),
        ("epsilon", c_float),
    ]


class FullAttention(ctypes.Structure):
    """`TeFullAttention`."""

    _fields_ = [
        ("query_key", c_void_p),
        ("value", c_void_p),
        ("out", c_void_p),
        ("groups", c_void_p),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("scale", c_float),
    ]


class Quantize(ctypes.Structure):
    """`TeQuantize`."""

    _fields_ = [("x", c_void_p), ("groups", c_void_p), ("width", c_int32)]


class Linear(ctypes.Structure):
    """`TeLinear`."""

    _fields_ = [
        ("tiles", Tiles),
        ("x", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("may_round", c_int32),
        ("has_gate", c_int32),
        ("gated_out", c_void_p),
        ("gated_groups", c_void_p),
    ]


class ActivatedLinear(ctypes.Structure):
    """`TeActivatedLinear`."""

    _fields_ = [
        ("tiles", Tiles),
        ("x", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("groups", c_void_p),
        ("activation", c_int32),
    ]


class Add(ctypes.Structure):
    """`TeAdd`."""

    _fields_ = [("x", c_void_p), ("residual", c_void_p), ("width", c_int32)]


class RopeTable(ctypes.Structure):
    """`TeRopeTable`."""

    _fields_ = [("inverse_frequencies", c_void_p), ("out", c_void_p), ("half", c_int32), ("factor", c_float)]


class RopeWrite(ctypes.Structure):
    """`TeRopeWrite`."""

    _fields_ = [
        ("qkv", c_void_p),
        ("cos_sin", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv_stride", c_int64),
        ("query_norm_size", c_int32),
        ("key_norm_size", c_int32),
        ("epsilon", c_float),
        ("half", c_int32),
        ("num_heads", c_int32),
        ("kv_group", c_int32),
        ("layer", c_int32),
    ]


class Attention(ctypes.Structure):
    """`TeAttention`."""

    _fields_ = [
        ("query", c_void_p),
        ("out", c_void_p),
        ("groups", c_void_p),
        ("partials", c_void_p),
        ("query_stride", c_int64),
        ("kv_group", c_int32),
        ("layer", c_int32),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class Gated(ctypes.Structure):
    """`TeGated`."""

    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("groups", c_void_p),
        ("width", c_int32),
        ("activation", c_int32),
    ]


class SelectRows(ctypes.Structure):
    """`TeSelectRows`."""

    _fields_ = [("x", c_void_p), ("out", c_void_p), ("width", c_int32)]


class SoftCap(ctypes.Structure):
    """`TeSoftCap`."""

    _fields_ = [("x", c_void_p), ("width", c_int32), ("cap", c_float)]


class ChooseExperts(ctypes.Structure):
    """`TeChooseExperts`."""

    _fields_ = [
        ("logits", c_void_p),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("num_experts", c_int32),
        ("num_chosen", c_int32),
        ("is_normalized", c_int32),
    ]


class GroupByExpert(ctypes.Structure):
    """`TeGroupByExpert`."""

    _fields_ = [
        ("chosen", c_void_p),
        ("starts", c_void_p),
        ("rows", c_void_p),
        ("places", c_void_p),
        ("num_experts", c_int32),
        ("num_chosen", c_int32),
    ]


class GatherRows(ctypes.Structure):
    """`TeGatherRows`."""

    _fields_ = [("x", c_void_p), ("rows", c_void_p), ("out", c_void_p), ("row_bytes", c_int64)]


class ExpertLinear(ctypes.Structure):
    """`TeExpertLinear`."""

    _fields_ = [
        ("tiles", c_void_p),
        ("starts", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_experts", c_int32),
    ]


class MixExperts(ctypes.Structure):
    """`TeMixExperts`."""

    _fields_ = [
        ("x", c_void_p),
        ("places", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("width", c_int32),
        ("num_chosen", c_int32),
    ]


class LoraPart(ctypes.Structure):
    """`TeLoraPart`."""

    _fields_ = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("rank", c_int32),
        ("first_row", c_int32),
        ("num_rows", c_int32),
    ]


class Lora(ctypes.Structure):
    """`TeLora`."""

    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("parts", c_void_p),
        ("columns", c_int32),
        ("width", c_int32),
        ("num_parts", c_int32),
    ]


class _Body(ctypes.Union):
    _fields_ = [
        ("embedding", Embedding),
        ("norm", Norm),
        ("quantize", Quantize),
        ("linear", Linear),
        ("add", Add),
        ("rope_table", RopeTable),
        ("rope_write", RopeWrite),
        ("attention", Attention),
        ("gated", Gated),
        ("select", SelectRows),
        ("layer_norm", LayerNorm),
        ("activated_linear", ActivatedLinear),
        ("full_attention", FullAttention),
        ("soft_cap", SoftCap),
        ("choose", ChooseExperts),
        ("group", GroupByExpert),
        ("gather", GatherRows),
        ("expert_linear", ExpertLinear),
        ("mix", MixExperts),
        ("lora", Lora),
    ]


class Op(ctypes.Structure):
    """`TeOp`."""

    _anonymous_ = ("body",)
    _fields_ = [("kind", c_int32), ("row_kind", c_int32), ("rows_per_token", c_int32), ("body", _Body)]

    def parameters(self) -> ctypes.Structure:
        """The member of the union that the kind uses."""
        return getattr(self, _MEMBERS[OpKind(self.kind)])


_MEMBERS = {
    OpKind.EMBEDDING: "embedding",
    OpKind.RMS_NORM: "norm",
    OpKind.QUANTIZE: "quantize",
    OpKind.LINEAR: "linear",
    OpKind.ADD: "add",
    OpKind.ROPE_TABLE: "rope_table",
    OpKind.ROPE_WRITE: "rope_write",
    OpKind.ATTENTION: "attention",
    OpKind.ATTENTION_MERGE: "attention",
    OpKind.GATED: "gated",
    OpKind.SELECT_ROWS: "select",
    OpKind.SOFT_CAP: "soft_cap",
    OpKind.CHOOSE_EXPERTS: "choose",
    OpKind.GROUP_BY_EXPERT: "group",
    OpKind.GATHER_ROWS: "gather",
    OpKind.EXPERT_LINEAR: "expert_linear",
    OpKind.MIX_EXPERTS: "mix",
    OpKind.LORA: "lora",
    OpKind.LAYER_NORM: "layer_norm",
    OpKind.ACTIVATED_LINEAR: "activated_linear",
    OpKind.FULL_ATTENTION: "full_attention",
}


class Cache(ctypes.Structure):
    """`TeCache`."""

    _fields_ = [
        ("data", c_void_p),
        ("layer_size", c_int64),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("padded_dim", c_int32),
        ("block_size", c_int32),
    ]


class Step(ctypes.Structure):
    """`TeStep`."""

    _fields_ = [
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_logit_rows", c_int32),
        ("num_selected_rows", c_int32),
        ("max_blocks", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("selected_rows", c_void_p),
        ("caches", c_void_p),
        ("lora_slots", c_void_p),
    ]
