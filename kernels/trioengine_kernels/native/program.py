# pyright: basic
"""Records a model as a flat list of operations over fixed buffers, and runs it: one C call per step.

The builder checks every size when an operation is recorded, `Program.run` every index of a step: C trusts both.
Products with quantized weights need quantized activations; the builder lets the operation before them write these,
where it can. This module does not know models.
"""

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from ctypes import c_int32, c_void_p

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine_kernels.native import structures as c
from trioengine_kernels.native.buffers import BufferPlan
from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.lora import LoraTable
from trioengine_kernels.native.structures import Activation, OpKind, RowKind
from trioengine_kernels.native.tiles import TileKind, WeightTiles

KV_TOKENS = 16
"""Tokens that lie together in the cache; a block is a multiple."""
_NO_LORA_OP = (1 << 31) - 2
"""Any slot may be named where no operation looks."""
MAX_OPS = 4096
"""`TE_MAX_OPS`."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@attrs.frozen(eq=False)
class StepArrays:
    """The packed tokens of one step. All int32 and contiguous.

    A KV group is layers whose keys and values lie in the same blocks of one cache.
    """

    token_ids: Ints
    """[num_tokens]."""
    positions: Ints
    """[num_tokens]: each token's place in its sequence."""
    slots: Ints
    """[num_kv_groups, num_tokens]: `block_id * block_size + offset`, where the token's key and value are stored."""
    query_start: Ints
    """[num_seqs + 1]: sequence i's tokens are rows `query_start[i]` to `query_start[i + 1] - 1`, its last ones."""
    seq_lens: Ints
    """[num_seqs]: tokens of each sequence, those of this step included."""
    block_table: Ints
    """[num_kv_groups, num_seqs, max_blocks]: the blocks of each sequence. Entries behind a sequence's last block, and
    those whose tokens all its queries of this step have left behind the group's window, are not read."""
    logit_rows: Ints
    """[num_logit_rows]: the tokens whose logits are wanted."""
    hidden_rows: Ints = attrs.field(factory=lambda: np.empty(0, np.int32))
    """[num_hidden_rows]: the tokens whose hidden states are wanted, others than those, where the program keeps any."""
    lora_slots: Ints | None = None
    """[num_tokens]: each token's slot of the `LoraTable`s, 0 is none. None is 0 for all, and costs nothing."""


class KVCache:
    """Keys and values of a KV group's layers, halves, in a layout of the native backend's own. Empty blocks take no
    memory."""

    def __init__(self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        if block_size % KV_TOKENS or block_size <= 0:
            raise ValueError(f"A block must be a multiple of {KV_TOKENS} tokens, not {block_size}.")
        if min(num_blocks, num_layers, num_kv_heads, head_dim) <= 0:
            raise ValueError("Blocks, layers, heads and their size must be positive.")
        if num_blocks * block_size >= 1 << 31:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens are too many.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.padded_dim = _padded(head_dim)
        self._unit_size = KV_TOKENS * (head_dim + self.padded_dim)
        num_units = num_blocks * block_size // KV_TOKENS
        # numpy asks the system for zeroed pages: blocks that are never used take no memory.
        self.data = np.zeros((num_layers, num_units, num_kv_heads, self._unit_size), np.uint16)

    @staticmethod
    def bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        """What a token takes in all layers."""
        return num_layers * num_kv_heads * (head_dim + _padded(head_dim)) * 2

    @property
    def structure(self) -> c.Cache:
        """The `TeCache`."""
        layer_size = self.data[0].size
        return c.Cache(
            self.data.ctypes.data, layer_size, self.num_kv_heads, self.head_dim, self.padded_dim, self.block_size
        )

    def block(self, block_id: int) -> NDArray[np.uint16]:
        """A view of a block in all layers: [num_layers, block_size / 16, num_kv_heads, halves of 16 tokens]."""
        num_units = self.block_size // KV_TOKENS
        return self.data[:, block_id * num_units : (block_id + 1) * num_units]

    def keys(self, layer: int) -> NDArray[np.float16]:
        """A view of a layer's keys: [num_blocks * block_size / 16, num_kv_heads, head_dim, 16]."""
        units = self.data[layer, ..., : KV_TOKENS * self.head_dim].view(np.float16)
        return units.reshape(*units.shape[:2], self.head_dim, KV_TOKENS)

    def values(self, layer: int) -> NDArray[np.float16]:
        """A view of a layer's values: [num_blocks * block_size / 16, num_kv_heads, 16, head_dim]."""
        units = self.data[layer, ..., KV_TOKENS * self.head_dim :].view(np.float16)
        return units.reshape(*units.shape[:2], KV_TOKENS, self.padded_dim)[..., : self.head_dim]


def _padded(head_dim: int) -> int:
    return -(-head_dim // KV_TOKENS) * KV_TOKENS


@attrs.frozen
class Buffer:
    """The result of an operation, float32, [tokens or logit rows, width]. It gets its memory when all is recorded."""

    address: int
    """A stand-in for the address."""
    width: int
    row_kind: RowKind
    """Its rows are these of the step..."""
    rows_per_token: int
    """...each so many times."""
    op_index: int | None
    """The operation that fills it, where that one may write its quantized form, too."""


@attrs.define
class _KVGroup:
    """What a program needs of a KV group's cache and blocks."""

    num_layers: int = 0
    window: int | None = 0
    """The largest of its layers; None where one sees all tokens."""


class ProgramBuilder:
    """Records operations in the order in which they run. Results are to be read by later operations only."""

    def __init__(
        self,
        library: Library,
        *,
        max_tokens: int,
        max_logit_rows: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
    ) -> None:
        if max_tokens < 1 or max_logit_rows < 1:
            raise ValueError("max_tokens and max_logit_rows must be positive.")
        self._library = library
        self._max_tokens = max_tokens
        self._max_logit_rows = max_logit_rows
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._vocab_size = vocab_size
        self._ops: list[c.Op] = []
        self._memory = BufferPlan()
        self._kept: list[object] = []
        self._readers: dict[int, int] = {}
        """By a buffer's address: how many operations read it as floats."""
        self._quantized: dict[int, int] = {}
        """By a buffer's address: that of its quantized form."""
        self._rope_tables: dict[tuple[bytes, float], int] = {}
        self._kv_groups: list[_KVGroup] = []
        self._num_lora_slots = _NO_LORA_OP
        self._num_positions = 1 << 31
        """Positions are below this."""
        self._hidden: Buffer | None = None

    def embedding(self, tiles: WeightTiles, multiplier: float = 1.0) -> Buffer:
        """The rows of the step's token ids, times the multiplier."""
        if tiles.rows < self._vocab_size:
            raise ValueError(f"The embedding has {tiles.rows} rows for a vocabulary of {self._vocab_size}.")
        out = self._buffer(tiles.columns)
        self._add(OpKind.EMBEDDING, embedding=c.Embedding(self._tiles(tiles), out.address, multiplier))
        return out

    def position_embedding(self, tiles: WeightTiles) -> Buffer:
        """The rows of the step's positions."""
        self._num_positions = min(self._num_positions, tiles.rows)
        out = self._buffer(tiles.columns)
        self._add(OpKind.EMBEDDING, embedding=c.Embedding(self._tiles(tiles), out.address, 1.0, True))
        return out

    def layer_norm(self, x: Buffer, residual: Buffer | None, weight: Floats, bias: Floats, epsilon: float) -> Buffer:
        """`(y - mean(y)) / sqrt(mean((y - mean(y))²) + epsilon) * weight + bias` of y, which is x or x + residual."""
        weight, bias = self._constant(weight, x.width), self._constant(bias, x.width)
        out = self._like(x, x.width)
        self._read(x)
        norm = c.LayerNorm(
            x=x.address,
            weight=_address(weight),
            bias=_address(bias),
            out=out.address,
            width=x.width,
            epsilon=epsilon,
        )
        if residual is not None:
            _check_same(x, residual)
            self._read(residual)
            norm.residual = residual.address
        return attrs.evolve(out, op_index=self._add(OpKind.LAYER_NORM, x, layer_norm=norm))

    def activated_linear(self, x: Buffer, weights: WeightTiles, bias: Floats | None, activation: Activation) -> Buffer:
        """`activation(x @ weights.T + bias)`."""
        if weights.columns != x.width:
            raise ValueError(f"A matrix of {weights.columns} columns cannot be applied to {x.width}.")
        if bias is not None:
            bias = self._constant(bias, weights.rows)
        out = self._like(x, weights.rows)
        linear = c.ActivatedLinear(
            tiles=self._tiles(weights),
            x=self._source(x, weights),
            bias=None if bias is None else _address(bias),
            out=out.address,
            activation=activation,
        )
        return attrs.evolve(out, op_index=self._add(OpKind.ACTIVATED_LINEAR, x, activated_linear=linear))

    def full_attention(self, query_key: Buffer, value: Buffer, *, num_heads: int, scale: float) -> Buffer:
        """Attend from each query to all keys of its sequence, which are all in this step.

        The result is [tokens, num_heads * head_dim].

        Args:
            query_key: [tokens, 2 * num_heads * head_dim]: queries, keys.
            value: [tokens, num_heads * head_dim].
            num_heads: of each of the three.
            scale: multiplies query · key; positive.
        """
        width = num_heads * self._head_dim
        if query_key.width != 2 * width or value.width != width:
            raise ValueError(f"{query_key.width} and {value.width} are not the widths of {num_heads} heads.")
        if not query_key.row_kind is value.row_kind is RowKind.TOKENS:
            raise ValueError("Attention is of all tokens.")
        if not scale > 0:
            raise ValueError("The scale of scores must be positive.")
        self._read(query_key)
        self._read(value)
        out = self._buffer(width)
        attention = c.FullAttention(
            query_key.address, value.address, out.address, None, num_heads, self._head_dim, scale
        )
        return attrs.evolve(out, op_index=self._add(OpKind.FULL_ATTENTION, full_attention=attention))

    def rms_norm(self, x: Buffer, weight: Floats, epsilon: float) -> Buffer:
        """`x / sqrt(mean(x²) + epsilon) * weight`."""
        return self._norm(x, None, weight, epsilon)

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: Floats, epsilon: float) -> Buffer:
        """Add `x` to `residual`, in place, and return the sum's norm."""
        _check_same(x, residual)
        return self._norm(x, residual, weight, epsilon)

    def add(self, x: Buffer, residual: Buffer) -> None:
        """Add `x` to `residual`, in place."""
        _check_same(x, residual)
        self._read(x)
        self._read(residual)
        self._add(OpKind.ADD, x, add=c.Add(x.address, residual.address, x.width))
        self._changed(residual)

    def linear(
        self,
        x: Buffer,
        weights: WeightTiles | Sequence[WeightTiles],
        bias: Floats | None = None,
        *,
        may_round: bool = False,
    ) -> Buffer:
        """`x @ weights.T + bias`. Several matrices are stacked: their outputs stand side by side.

        `may_round`: weights of floats and what they are multiplied with may be rounded to bfloat16, on processors where
        that is faster.
        """
        matrices = [weights] if isinstance(weights, WeightTiles) else list(weights)
        width = sum(tiles.rows for tiles in matrices)
        if any(tiles.columns != x.width for tiles in matrices):
            raise ValueError(f"A matrix of {matrices[0].columns} columns cannot be applied to {x.width}.")
        if bias is not None:
            bias = self._constant(bias, width)
        out = self._like(x, width)
        first = 0
        for tiles in matrices:
            linear = c.Linear(
                self._tiles(tiles),
                self._source(x, tiles),
                None if bias is None else _address(bias) + 4 * first,
                out.address + 4 * first,
                width,
                may_round and not tiles.kind.is_quantized,
            )
            self._add(OpKind.LINEAR, x, linear=linear)
            first += tiles.rows
        return out

    def lora(self, x: Buffer, out: Buffer, table: LoraTable) -> None:
        """Add to `out`, in place, what each token's adapter makes of `x`.

        Adapters are put into the table later, while no step runs.
        """
        if x.width != table.num_columns or out.width < table.num_rows or x.row_kind is not out.row_kind:
            raise ValueError(f"An adapter of [{table.num_rows}, {table.num_columns}] does not fit the product.")
        self._kept.append(table)
        self._num_lora_slots = min(self._num_lora_slots, table.num_slots)
        self._read(x)
        self._read(out)
        lora = c.Lora(x.address, out.address, table.address, x.width, out.width, table.num_parts)
        self._add(OpKind.LORA, out, lora=lora)
        self._changed(out)

    def rope_write_kv(
        self,
        qkv: Buffer,
        layer: int,
        *,
        num_heads: int,
        inverse_frequencies: Floats | None,
        attention_factor: float = 1.0,
        norms: tuple[Floats, Floats] | None = None,
        epsilon: float = 0.0,
        kv_group: int = 0,
    ) -> None:
        """Normalize and rotate queries and keys in place, and store keys and values in the cache.

        Args:
            qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values.
            layer: of the group's cache.
            num_heads: of the queries.
            inverse_frequencies: [rotary_dim / 2], angle per position; None rotates nothing.
            attention_factor: multiplies what is rotated.
            norms: weights of the norms of queries and keys, each of the size of one head or of all; None is no norm.
            epsilon: of these norms.
            kv_group: whose cache and slots are used.
        """
        group = self._check_qkv(qkv, layer, num_heads, kv_group)
        half = 0 if inverse_frequencies is None else len(inverse_frequencies)
        if 2 * half > self._head_dim:
            raise ValueError(f"{half} frequencies are too many for heads of {self._head_dim}.")
        table = None if inverse_frequencies is None else self._rope_table(inverse_frequencies, attention_factor)
        rope = c.RopeWrite(
            qkv=qkv.address,
            cos_sin=table,
            qkv_stride=qkv.width,
            epsilon=epsilon,
            half=half,
            num_heads=num_heads,
            kv_group=kv_group,
            layer=layer,
        )
        if norms is not None:
            query_norm, key_norm = norms
            for norm, heads in ((query_norm, num_heads), (key_norm, self._num_kv_heads)):
                if len(norm) not in (self._head_dim, heads * self._head_dim):
                    raise ValueError(f"A norm of {len(norm)} is neither of one head nor of {heads}.")
            rope.query_norm_size, rope.key_norm_size = len(query_norm), len(key_norm)
            rope.query_norm = _address(self._constant(query_norm, len(query_norm)))
            rope.key_norm = _address(self._constant(key_norm, len(key_norm)))
        self._read(qkv)
        self._add(OpKind.ROPE_WRITE, rope_write=rope)
        self._changed(qkv)
        group.num_layers = max(group.num_layers, layer + 1)

    def attention(
        self,
        qkv: Buffer,
        layer: int,
        *,
        num_heads: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        kv_group: int = 0,
    ) -> Buffer:
        """Attend from each query to the keys of its sequence up to and including itself.

        The result is [tokens, num_heads * head_dim].

        Args:
            qkv: as `rope_write_kv` left it.
            layer: of the group's cache; this step's keys and values are in it.
            num_heads: of the queries. Head h reads KV head `h // (num_heads / num_kv_heads)`.
            scale: multiplies query · key.
            window: a query sees itself and the `window - 1` tokens before it; None is all of them.
            soft_cap: scores become `soft_cap * tanh(score / soft_cap)` before the softmax.
            kv_group: whose cache and block table are used.
        """
        group = self._check_qkv(qkv, layer, num_heads, kv_group)
        if (window is not None and window < 1) or (soft_cap is not None and not soft_cap > 0):
            raise ValueError("A window and a soft cap must be positive.")
        self._read(qkv)
        out = self._buffer(num_heads * self._head_dim)
        attention = c.Attention(
            query=qkv.address,
            out=out.address,
            query_stride=qkv.width,
            kv_group=kv_group,
            layer=layer,
            num_heads=num_heads,
            window=window or 0,
            scale=scale,
            soft_cap=soft_cap or 0.0,
        )
        index = self._add(OpKind.ATTENTION, attention=attention)
        self._add(OpKind.ATTENTION_MERGE, attention=attention)
        group.num_layers = max(group.num_layers, layer + 1)
        group.window = None if window is None or group.window is None else max(window, group.window)
        return attrs.evolve(out, op_index=index)

    def silu_mul(self, gate_up: Buffer) -> Buffer:
        """`silu(gate) * up` of [tokens, 2 * width]: gates, then values."""
        return self.gated(gate_up, Activation.SILU)

    def gated(self, gate_up: Buffer, activation: Activation) -> Buffer:
        """`activation(gate) * up` of [tokens, 2 * width]: gates, then values."""
        if gate_up.width % 2:
            raise ValueError("Gates and values must be equally many.")
        self._read(gate_up)
        width = gate_up.width // 2
        out = self._like(gate_up, width)
        gated = c.Gated(gate_up.address, out.address, None, width, activation)
        return attrs.evolve(out, op_index=self._add(OpKind.GATED, gate_up, gated=gated))

    def experts(
        self,
        x: Buffer,
        router_logits: Buffer,
        experts: Sequence[tuple[Sequence[WeightTiles], Sequence[WeightTiles]]],
        *,
        num_chosen: int,
        is_normalized: bool,
        activation: Activation,
    ) -> Buffer:
        """Each row through the experts with its largest logits: their results, weighted by a softmax and added.

        Args:
            x: what they read.
            router_logits: one for each expert.
            experts: the matrices of each, stacked: gates and values, and what is applied to their product. Those of
                all experts have the same sizes.
            num_chosen: how many each row goes through.
            is_normalized: the weights of these are made to sum to 1; else those of all experts are.
            activation: of the gates.
        """
        num_experts = len(experts)
        if router_logits.width != num_experts or router_logits.row_kind is not x.row_kind:
            raise ValueError(f"{router_logits.width} logits cannot choose one of {num_experts} experts.")
        if not 1 <= num_chosen <= num_experts or x.rows_per_token != 1:
            raise ValueError(f"{num_chosen} of {num_experts} experts cannot be chosen.")
        max_rows = self._max_rows(x)
        chosen, weights, rows, places = (self._memory.add(max_rows * num_chosen * 4) for _ in range(4))
        starts = self._memory.add((num_experts + 1) * 4)
        self._read(router_logits)
        choose = c.ChooseExperts(router_logits.address, chosen, weights, num_experts, num_chosen, is_normalized)
        self._add(OpKind.CHOOSE_EXPERTS, x, choose=choose)
        group = c.GroupByExpert(chosen, starts, rows, places, num_experts, num_chosen)
        self._add(OpKind.GROUP_BY_EXPERT, x, group=group)

        def gather(is_quantized: bool) -> Buffer:
            """The rows of `x` beside each other by expert; floats, or groups behind an address of floats."""
            row_bytes = -(-x.width // 32) * c.GROUP_BYTES if is_quantized else x.width * 4
            out = Buffer(self._memory.add(max_rows * num_chosen * row_bytes), x.width, x.row_kind, num_chosen, None)
            if is_quantized:
                source = self._quantize(x)
            else:
                self._read(x)
                source = x.address
            self._add(OpKind.GATHER_ROWS, out, gather=c.GatherRows(source, rows, out.address, row_bytes))
            return out

        gathered: dict[bool, int] = {}
        stacks = [gate_up for gate_up, _ in experts], [down for _, down in experts]
        for tiles in stacks[0][0]:
            if tiles.kind.is_quantized not in gathered:
                gathered[tiles.kind.is_quantized] = gather(tiles.kind.is_quantized).address
        gate_up = self._expert_linear(stacks[0], gathered, starts, x, num_chosen)
        gated = self.gated(gate_up, activation)
        sources: dict[bool, int] = {}
        for tiles in stacks[1][0]:
            if tiles.kind.is_quantized:
                sources[True] = self._quantize(gated)
            else:
                self._read(gated)
                sources[False] = gated.address
        if any(tiles.columns != gated.width for tiles in stacks[1][0]) or stacks[0][0][0].columns != x.width:
            raise ValueError("The matrices of the experts do not fit each other.")
        down = self._expert_linear(stacks[1], sources, starts, x, num_chosen)
        self._read(down)
        out = self._like(x, down.width)
        mix = c.MixExperts(down.address, places, weights, out.address, down.width, num_chosen)
        self._add(OpKind.MIX_EXPERTS, x, mix=mix)
        return out

    def _expert_linear(
        self,
        experts: Sequence[Sequence[WeightTiles]],
        sources: dict[bool, int],
        starts: int,
        x: Buffer,
        num_chosen: int,
    ) -> Buffer:
        """`sources`: by whether the tiles are quantized, the address of what they are applied to."""
        first = experts[0]
        width = sum(tiles.rows for tiles in first)
        out = self._like(attrs.evolve(x, rows_per_token=num_chosen), width)
        column = 0
        for part in zip(*experts, strict=True):
            is_quantized = part[0].kind.is_quantized
            if {(tiles.rows, tiles.columns, tiles.kind.is_quantized) for tiles in part} != {
                (part[0].rows, first[0].columns, is_quantized)
            }:
                raise ValueError("The experts of a layer must have matrices of the same sizes.")
            table = (c.Tiles * len(part))(*(self._tiles(tiles) for tiles in part))
            self._kept.append(table)
            linear = c.ExpertLinear(
                ctypes.addressof(table), starts, sources[is_quantized], out.address + 4 * column, width, len(part)
            )
            self._add(OpKind.EXPERT_LINEAR, out, expert_linear=linear)
            column += part[0].rows
        return out

    def soft_cap(self, x: Buffer, cap: float) -> None:
        """`cap * tanh(x / cap)`, in place."""
        if not cap > 0:
            raise ValueError("A soft cap must be positive.")
        self._read(x)
        self._add(OpKind.SOFT_CAP, x, soft_cap=c.SoftCap(x.address, x.width, cap))
        self._changed(x)

    def select_rows(self, x: Buffer) -> Buffer:
        """The rows whose logits are wanted. What is computed of the result is computed for these only."""
        return self._select(x, RowKind.LOGITS)

    def select_rows_with_hidden(self, x: Buffer) -> Buffer:
        """The rows whose logits are wanted, and behind them those whose hidden states are."""
        return self._select(x, RowKind.SELECTED)

    def keep_hidden(self, x: Buffer) -> Buffer:
        """Let `Program.hidden_states` return these rows of those whose hidden states are wanted. Once in a program.

        Returns:
            Those whose logits are wanted.
        """
        if x.row_kind is not RowKind.SELECTED or self._hidden is not None:
            raise ValueError("Hidden states are kept once, of selected rows.")
        self._read(x)
        self._hidden = x
        return attrs.evolve(x, row_kind=RowKind.LOGITS)

    def _select(self, x: Buffer, row_kind: RowKind) -> Buffer:
        if x.row_kind is not RowKind.TOKENS:
            raise ValueError("These rows are selected already.")
        self._read(x)
        out = self._buffer(x.width, row_kind)
        select = c.SelectRows(x.address, out.address, x.width)
        self._add(OpKind.SELECT_ROWS, out, select=select)
        return out

    def build(self, logits: Buffer) -> "Program":
        """Finish. `logits` is what `Program.run` returns."""
        if logits.row_kind is not RowKind.LOGITS:
            raise ValueError("Logits are computed of selected rows.")
        self._read(logits)
        self._drop_unread_floats()
        self._join_gates()
        hidden = self._hidden
        kept = [logits.address] if hidden is None else [logits.address, hidden.address]
        area = self._memory.place(self._ops, kept)

        def rows_at(buffer: Buffer, max_rows: int) -> Floats:
            first = area.offset_of(buffer.address)
            memory = area.memory[first : first + max_rows * buffer.width * 4]
            return memory.view(np.float32).reshape(max_rows, buffer.width)

        return Program(
            self._library,
            self._ops,
            self._kept,
            area.memory,
            rows_at(logits, self._max_logit_rows),
            None if hidden is None else rows_at(hidden, self._max_tokens),
            max_tokens=self._max_tokens,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            kv_groups=self._kv_groups,
            vocab_size=self._vocab_size,
            num_lora_slots=self._num_lora_slots,
            num_positions=self._num_positions,
        )

    def _norm(self, x: Buffer, residual: Buffer | None, weight: Floats, epsilon: float) -> Buffer:
        weight = self._constant(weight, x.width)
        out = self._like(x, x.width)
        self._read(x)
        norm = c.Norm(
            x=x.address,
            residual=None,
            weight=_address(weight),
            out=out.address,
            width=x.width,
            epsilon=epsilon,
        )
        if residual is not None:
            self._read(residual)
            norm.residual = residual.address
        index = self._add(OpKind.RMS_NORM, x, norm=norm)
        if residual is not None:
            self._changed(residual)
        return attrs.evolve(out, op_index=index)

    def _source(self, x: Buffer, tiles: WeightTiles) -> int:
        """The address of what a product with these reads."""
        if tiles.kind.is_quantized:
            return self._quantize(x)
        self._read(x)
        return x.address

    def _quantize(self, x: Buffer) -> int:
        """The address of a buffer's quantized form, written by the operation that fills it or by one of its own."""
        if (known := self._quantized.get(x.address)) is not None:
            return known
        groups = self._memory.add(self._max_rows(x) * -(-x.width // 32) * c.GROUP_BYTES)
        self._quantized[x.address] = groups
        if x.op_index is None or not self._takes_groups(x.op_index, groups):
            self._read(x)
            self._add(OpKind.QUANTIZE, x, quantize=c.Quantize(x.address, groups, x.width))
        return groups

    def _takes_groups(self, index: int, address: int) -> bool:
        op = self._ops[index]
        match op.kind:
            case OpKind.RMS_NORM:
                op.norm.groups = address
            case OpKind.GATED:
                op.gated.groups = address
            case OpKind.LAYER_NORM:
                op.layer_norm.groups = address
            case OpKind.ACTIVATED_LINEAR:
                op.activated_linear.groups = address
            case OpKind.FULL_ATTENTION if self._head_dim % 32 == 0:
                op.full_attention.groups = address
            case OpKind.ATTENTION if self._head_dim % 32 == 0:
                op.attention.groups = address
                self._ops[index + 1].attention.groups = address
            case _:
                return False
        return True

    def _drop_unread_floats(self) -> None:
        for op in self._ops:
            match op.kind:
                case OpKind.RMS_NORM if op.norm.groups and not self._readers.get(op.norm.out):
                    op.norm.out = None
                case OpKind.GATED if op.gated.groups and not self._readers.get(op.gated.out):
                    op.gated.out = None
                case OpKind.ACTIVATED_LINEAR if op.activated_linear.groups and not self._readers.get(
                    op.activated_linear.out
                ):
                    op.activated_linear.out = None
                case OpKind.FULL_ATTENTION if op.full_attention.groups and not self._readers.get(op.full_attention.out):
                    op.full_attention.out = None
                case OpKind.ATTENTION | OpKind.ATTENTION_MERGE if op.attention.groups and not self._readers.get(
                    op.attention.out
                ):
                    op.attention.out = None

    def _join_gates(self) -> None:
        """Tell a product whose results only the gate behind it reads that it may do the gate's work, too."""
        for linear, gated in itertools.pairwise(self._ops):
            if (
                linear.kind == OpKind.LINEAR
                and gated.kind == OpKind.GATED
                and linear.linear.out == gated.gated.x
                and linear.linear.tiles.kind <= TileKind.INT8_AFFINE
                and linear.linear.tiles.rows == 2 * gated.gated.width
                and gated.gated.width % 32 == 0
                and self._readers[gated.gated.x] == 1
            ):
                linear.linear.has_gate = True
                linear.linear.gated_out, linear.linear.gated_groups = gated.gated.out, gated.gated.groups

    def _rope_table(self, inverse_frequencies: Floats, factor: float) -> int:
        """The step's cosines and sines, computed once for all layers of the same frequencies."""
        key = inverse_frequencies.tobytes(), factor
        if (known := self._rope_tables.get(key)) is not None:
            return known
        half = len(inverse_frequencies)
        table = self._buffer(2 * half)
        frequencies = self._constant(inverse_frequencies, half)
        self._add(OpKind.ROPE_TABLE, rope_table=c.RopeTable(_address(frequencies), table.address, half, factor))
        self._rope_tables[key] = table.address
        return table.address

    def _check_qkv(self, qkv: Buffer, layer: int, num_heads: int, kv_group: int) -> _KVGroup:
        if num_heads < 1 or num_heads % self._num_kv_heads:
            raise ValueError(f"{num_heads} heads cannot share {self._num_kv_heads} KV heads.")
        if qkv.width != (num_heads + 2 * self._num_kv_heads) * self._head_dim or qkv.row_kind is not RowKind.TOKENS:
            raise ValueError(f"{qkv.width} is not the width of {num_heads} heads' queries, keys and values.")
        if layer < 0 or not 0 <= kv_group <= len(self._kv_groups):
            raise ValueError("Layers and KV groups count from 0, and groups come in their order.")
        if kv_group == len(self._kv_groups):
            self._kv_groups.append(_KVGroup())
        return self._kv_groups[kv_group]

    def _buffer(self, width: int, row_kind: RowKind = RowKind.TOKENS) -> Buffer:
        rows = self._max_logit_rows if row_kind is RowKind.LOGITS else self._max_tokens
        return Buffer(self._memory.add(rows * width * 4), width, row_kind, 1, None)

    def _like(self, x: Buffer, width: int) -> Buffer:
        """A new buffer with the rows of this one."""
        address = self._memory.add(self._max_rows(x) * width * 4)
        return attrs.evolve(x, address=address, width=width, op_index=None)

    def _max_rows(self, x: Buffer) -> int:
        return x.rows_per_token * (self._max_logit_rows if x.row_kind is RowKind.LOGITS else self._max_tokens)

    def _constant(self, values: Floats, size: int) -> Floats:
        if values.shape != (size,):
            raise ValueError(f"A vector of {size} is needed, not the shape {values.shape}.")
        copy = np.array(values, np.float32)
        self._kept.append(copy)
        return copy

    def _tiles(self, tiles: WeightTiles) -> c.Tiles:
        self._kept.append(tiles)
        return c.Tiles(_address(tiles.data), tiles.kind, tiles.rows, tiles.columns, tiles.num_groups)

    def _add(self, kind: OpKind, rows_of: Buffer | None = None, **body: ctypes.Structure) -> int:
        """`rows_of`: the operation is done for the rows of this one; None is for the step's tokens."""
        if len(self._ops) == MAX_OPS:
            raise ValueError(f"A program has at most {MAX_OPS} operations.")
        row_kind, rows_per_token = (
            (RowKind.TOKENS, 1) if rows_of is None else (rows_of.row_kind, rows_of.rows_per_token)
        )
        self._ops.append(c.Op(kind=kind, row_kind=row_kind, rows_per_token=rows_per_token, **body))
        return len(self._ops) - 1

    def _read(self, buffer: Buffer) -> None:
        address = buffer.address
        self._readers[address] = self._readers.get(address, 0) + 1

    def _changed(self, buffer: Buffer) -> None:
        self._quantized.pop(buffer.address, None)


class Program:
    """A recorded model. Not for use by two threads at once."""

    def __init__(
        self,
        library: Library,
        ops: Sequence[c.Op],
        kept: Sequence[object],
        memory: NDArray[np.uint8],
        logits: Floats,
        hidden: Floats | None,
        *,
        max_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        kv_groups: Sequence[_KVGroup],
        vocab_size: int,
        num_lora_slots: int,
        num_positions: int,
    ) -> None:
        assert library.function("te_op_bytes", ctypes.c_size_t)() == ctypes.sizeof(c.Op)
        assert library.function("te_step_bytes", ctypes.c_size_t)() == ctypes.sizeof(c.Step)
        self.max_tokens = max_tokens
        self.max_logit_rows = len(logits)
        self.memory = memory
        """Of all buffers. A step reads nothing that it did not write; tests poison it."""
        self._kept = tuple(kept)
        self._logits = logits
        self._hidden = hidden
        self._hidden_rows = slice(0, 0)
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._kv_groups = tuple(kv_groups)
        self._vocab_size = vocab_size
        self._num_lora_slots = num_lora_slots
        self._num_positions = num_positions
        self._run = library.function("te_program_run", c_int32, c_void_p, c_void_p, c_void_p)
        self._run_timed = library.function("te_program_run_timed", c_int32, *[c_void_p] * 4)
        self.op_names = tuple(c.OpKind(op.kind).name.lower() for op in ops)
        self._destroy = library.function("te_program_destroy", None, c_void_p)
        create = library.function("te_program_create", c_void_p, c_void_p, c_int32)
        self._handle: int | None = create((c.Op * len(ops))(*ops), len(ops))
        if not self._handle:
            raise MemoryError("There is no memory for the program.")

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._destroy(self._handle)
            self._handle = None

    def run(
        self,
        step: StepArrays,
        caches: Sequence[KVCache],
        pool: ThreadPool,
        times_ns: NDArray[np.int64] | None = None,
    ) -> Floats:
        """Compute a step and store its keys and values in the caches, one for each KV group.

        `times_ns`, [len(op_names) + 1], gets the time of the monotonic clock at which the first operation begins, and
        those at which each ends. A step takes a little longer then, and computes the same.

        Returns:
            The logits, [num_logit_rows, vocab_size]: a view that the next step overwrites.

        Raises:
            ValueError: the step has no or too many tokens or logit rows, or an index that is out of range.
            MemoryError: working memory for the step is not to be had.
        """
        self._check(step, caches)
        selected_rows = step.logit_rows
        if len(step.hidden_rows):
            selected_rows = np.concatenate((step.logit_rows, step.hidden_rows))
        structures = (c.Cache * len(caches))(*(cache.structure for cache in caches))
        addresses = [
            _address(array)
            for array in (
                step.token_ids,
                step.positions,
                step.slots,
                step.query_start,
                step.seq_lens,
                step.block_table,
                selected_rows,
            )
        ]
        structure = c.Step(
            len(step.token_ids),
            len(step.seq_lens),
            len(step.logit_rows),
            len(selected_rows),
            step.block_table.shape[2],
            *addresses,
            ctypes.addressof(structures),
            None if step.lora_slots is None else _address(step.lora_slots),
        )
        arguments = self._handle, pool.handle, ctypes.addressof(structure)
        if times_ns is not None:
            assert times_ns.shape == (len(self.op_names) + 1,)
            is_done = self._run_timed(*arguments, times_ns.ctypes.data)
        else:
            is_done = self._run(*arguments)
        if not is_done:
            raise MemoryError("There is no memory for the step.")
        self._hidden_rows = slice(len(step.logit_rows), len(selected_rows))
        return self._logits[: len(step.logit_rows)]

    def weight_arrays(self) -> Iterator[memoryview]:
        """All weights that the operations read, in the order in which they were recorded. Adapters are none."""
        for kept in self._kept:
            if isinstance(kept, WeightTiles):
                yield kept.data.data
            elif isinstance(kept, np.ndarray):
                yield kept.reshape(-1).view(np.uint8).data

    def hidden_states(self) -> Floats:
        """Those of the newest step's `hidden_rows`, [num_rows, hidden_size]: a view that the next step overwrites."""
        assert self._hidden is not None, "none are kept"
        return self._hidden[self._hidden_rows]

    def _check(self, step: StepArrays, caches: Sequence[KVCache]) -> None:
        num_tokens, num_seqs, num_groups = len(step.token_ids), len(step.seq_lens), len(caches)
        if step.lora_slots is not None:
            if len(step.lora_slots) != num_tokens:
                raise ValueError("Each token has a slot.")
            _check_range(step.lora_slots, self._num_lora_slots + 1)
        values = [getattr(step, field.name) for field in attrs.fields(StepArrays)]
        arrays = [value for value in values if value is not None]
        if any(array.dtype != np.int32 or not array.flags.c_contiguous for array in arrays):
            raise ValueError("The arrays of a step must be contiguous int32.")
        if num_groups < len(self._kv_groups):
            raise ValueError("There are fewer caches than KV groups.")
        if not 1 <= num_tokens <= self.max_tokens or len(step.logit_rows) > self.max_logit_rows:
            raise ValueError(
                f"A step takes 1 to {self.max_tokens} tokens and up to {self.max_logit_rows} rows of logits."
            )
        starts, lens, blocks = step.query_start, step.seq_lens, step.block_table
        counts = np.diff(starts)
        is_shaped = (
            len(step.positions) == num_tokens
            and step.slots.shape == (num_groups, num_tokens)
            and len(starts) == num_seqs + 1
            and blocks.ndim == 3
            and blocks.shape[:2] == (num_groups, num_seqs)
        )
        if not is_shaped or starts[0] != 0 or starts[-1] != num_tokens or counts.min(initial=1) < 1:
            raise ValueError("The arrays of the step do not fit each other.")
        if (lens < counts).any():
            raise ValueError("A sequence is shorter than its queries.")
        # An index out of range would read or overwrite foreign memory.
        _check_range(step.token_ids, self._vocab_size)
        _check_range(step.logit_rows, num_tokens)
        _check_range(step.hidden_rows, num_tokens)
        num_selected = len(step.logit_rows) + len(step.hidden_rows)
        if len(step.hidden_rows) and (self._hidden is None or num_selected > num_tokens):
            raise ValueError("The step wants more hidden states than there are.")
        _check_range(step.positions, self._num_positions)
        for group, cache, slots, table in zip(self._kv_groups, caches, step.slots, blocks, strict=False):
            if (cache.num_kv_heads, cache.head_dim) != (self._num_kv_heads, self._head_dim):
                raise ValueError("A cache has other heads than the program.")
            if cache.num_layers < group.num_layers:
                raise ValueError("A cache has fewer layers than its KV group.")
            if (-(-lens // cache.block_size) > table.shape[1]).any():
                raise ValueError("A sequence is longer than its blocks.")
            first_places = np.arange(table.shape[1]) * cache.block_size
            is_read = first_places < lens[:, None]
            if group.window is not None:
                is_read &= first_places + cache.block_size > (lens - counts - group.window + 1)[:, None]
            _check_range(slots, cache.num_blocks * cache.block_size)
            _check_range(table[is_read], cache.num_blocks)


def _address(array: NDArray[np.generic]) -> int:
    return array.ctypes.data


def _check_range(array: Ints, limit: int) -> None:
    if array.size and not (array.min() >= 0 and array.max() < limit):
        raise ValueError("The step holds an index that is out of range.")


def _check_same(x: Buffer, residual: Buffer) -> None:
    if x.width != residual.width or x.row_kind is not residual.row_kind:
        raise ValueError("What is added must have one shape.")
    if x.address == residual.address:
        raise ValueError("A buffer cannot be added to itself.")
