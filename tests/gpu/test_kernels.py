"""Each Triton kernel against its reference, which computes on the CPU in float32, in what models may ask of it.

`test_shapes.py` has the shapes of real models; here are options, edges and sizes that divide nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor
from trioengine_kernels.experts.weights import ExpertWeights
from trioengine_kernels.kernel_set import reference_kernels, triton_kernels
from trioengine_kernels.paged_attention.batch import AttentionBatch
from trioengine_kernels.paged_attention.work import plan_work
from trioengine_kernels.quantized_linear import WeightKind

from trioengine.testing.quantized_weights import random_quantized_weight

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Of the norm of the result."""
FP8 = torch.float8_e4m3fn
HALVES = [torch.bfloat16, torch.float16]

kernels, reference = triton_kernels(), reference_kernels()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` makes is full of NaN, or of -1."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def poisoned(*args: Any, make: Any = make, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

        monkeypatch.setattr(torch, name, poisoned)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_card(value: Any) -> Any:
    """The same in the card's memory."""
    return _mapped(value, lambda tensor: tensor.to("cuda"))


def exact(value: Any) -> Any:
    """The same numbers, of 16 bits as float32, in memory of their own."""
    return _mapped(value, lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor.clone())


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, ExpertWeights):
        return ExpertWeights.of(*(_mapped(part.matrices, change) for part in (value.gate_up, value.down)))
    if attrs.has(type(value)):
        changed = {field.name: _mapped(getattr(value, field.name), change) for field in attrs.fields(type(value))}
        return attrs.evolve(value, **changed)
    if isinstance(value, Mapping):
        return {name: _mapped(each, change) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(each, change) for each in value)
    return value


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    found, expected = found.cpu().double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def check(op: str, *args: Any, dtype: torch.dtype, changed: Sequence[int] = (), **options: Any) -> None:
    """Compute on both, and compare results and the arguments that change."""
    card_args, exact_args = on_card(args), exact(args)
    found = getattr(kernels, op)(*card_args, **on_card(options))
    expected = getattr(reference, op)(*exact_args, **exact(options))
    pairs = list(zip(found, expected, strict=True)) if isinstance(found, tuple) else [(found, expected)]
    pairs += [(card_args[place], exact_args[place]) for place in changed]
    for one, other in pairs:
        # The cache of 8 bits rounds sums that differ in their last places to different neighbours, now and then.
        tolerance = TOLERANCE[dtype] if one.dtype is not FP8 else 5e-3
        assert error(one, other) < tolerance


@attrs.frozen(kw_only=True)
class Attention:
    """What an attention layer may be, and the sequences of a step: (queries, tokens) of each."""

    sequences: Sequence[tuple[int, int]]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    is_fp8: bool = False
    is_deterministic: bool = False

    def batch(self, block_table: Tensor) -> AttentionBatch:
        query_lens, seq_lens = np.array(self.sequences, np.int32).T
        query_start = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        work = plan_work(
            query_start,
            seq_lens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=self.window,
            is_deterministic=self.is_deterministic,
        )
        # Rows of the table in another order than the sequences, and room for more work than there is.
        return AttentionBatch(
            block_table=block_table.flip(0),
            rows=torch.arange(len(self.sequences) - 1, -1, -1, dtype=torch.int32),
            query_start=torch.from_numpy(query_start),
            seq_lens=torch.from_numpy(seq_lens.copy()),
            work=torch.cat((torch.from_numpy(work), torch.full((3, work.shape[1]), -1, dtype=torch.int32))),
            num_work=torch.tensor([len(work)], dtype=torch.int32),
            block_size=self.block_size,
            window=self.window,
            max_query_len=int(query_lens.max()),
            is_deterministic=self.is_deterministic,
        )

    def arguments(self, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
        num_tokens = sum(num_queries for num_queries, _ in self.sequences)
        max_blocks = max(-(-length // self.block_size) for _, length in self.sequences) + 1
        num_blocks = max_blocks * len(self.sequences)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).int()
        cache = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        kv_dtype = FP8 if self.is_fp8 else dtype
        options: dict[str, Any] = {"scale": self.head_dim**-0.5, "soft_cap": self.soft_cap}
        if self.has_sinks:
            options["sinks"] = random(self.num_heads, seed=4)
        if self.is_fp8:
            options |= {"key_scale": 0.5, "value_scale": 2.0}
        query = random(num_tokens, self.num_heads, self.head_dim, seed=1, dtype=dtype)
        keys, values = (random(*cache, seed=seed, dtype=kv_dtype) for seed in (2, 3))
        return [query, keys, values, self.batch(order.view(-1, max_blocks))], options


LENGTHS = (1, 15, 16, 17, 200)
DECODES = tuple((1, length) for length in LENGTHS)
CHUNKS = ((17, 17), (1, 200), (33, 300), (100, 100), (15, 16))
ATTENTION = {
    "decodes": Attention(sequences=DECODES),
    "chunks": Attention(sequences=CHUNKS),
    "long decodes": Attention(sequences=((1, 5000), (1, 3), (1, 40_000))),
    "long chunks": Attention(sequences=((70, 5000), (3, 3), (512, 2100))),
    "Llama 3": Attention(sequences=CHUNKS, num_heads=32, num_kv_heads=8, head_dim=128),
    "80 dimensions": Attention(sequences=CHUNKS, num_heads=4, num_kv_heads=4, head_dim=80),
    "96 dimensions": Attention(sequences=DECODES, num_heads=32, num_kv_heads=32, head_dim=96),
    "256 dimensions": Attention(sequences=CHUNKS, num_heads=8, num_kv_heads=4, head_dim=256),
    "window": Attention(sequences=CHUNKS, window=40),
    "long window": Attention(sequences=((1, 9000), (70, 5000)), window=4096, num_heads=32, num_kv_heads=8),
    "soft cap": Attention(sequences=CHUNKS, soft_cap=5.0, head_dim=128),
    "sinks": Attention(sequences=CHUNKS, has_sinks=True),
    "sinks of long decodes": Attention(sequences=((1, 5000), (1, 3)), has_sinks=True, window=3000),
    "fp8 decodes": Attention(sequences=((1, 5000), *DECODES), is_fp8=True, head_dim=128),
    "fp8 chunks": Attention(sequences=CHUNKS, is_fp8=True, window=64),
    "deterministic": Attention(sequences=((1, 5000), *CHUNKS), is_deterministic=True),
    "blocks of 32": Attention(sequences=CHUNKS, block_size=32),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION.keys())
def test_paged_attention(case: Attention, dtype: torch.dtype) -> None:
    arguments, options = case.arguments(dtype)
    check("paged_attention", *arguments, dtype=dtype, **options)


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "norm"),
    [
        (9, 3, 64, 64, None),
        (32, 8, 128, 128, "head"),
        (5, 5, 80, 32, "all"),
        (8, 4, 256, 256, "head"),
        (3, 1, 96, 0, None),
    ],
)
def test_rope_write_kv(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    norm: str | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    num_tokens, num_blocks, block_size = 37, 5, 16
    width = {"head": (1, 1), "all": (num_heads, num_kv_heads)}.get(norm or "")
    norms = [None, None] if width is None else [1 + random(heads * head_dim, seed=9) / 4 for heads in width]
    angles = random(num_tokens, rotary_dim // 2, seed=8) * 3
    cache = (num_blocks, block_size, num_kv_heads, head_dim)
    arguments = [
        random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        *norms,
        angles.cos() if rotary_dim else None,
        angles.sin() if rotary_dim else None,
        random(*cache, seed=1, dtype=kv_dtype or dtype),
        random(*cache, seed=2, dtype=kv_dtype or dtype),
        torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens].int(),
    ]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    scales = {"key_scale": 0.03, "value_scale": 0.02} if kv_dtype else {}
    check("rope_write_kv", *arguments, dtype=dtype, changed=(5, 6), norm_epsilon=1e-6, **sizes, **scales)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 576), (3, 48), (17, 4096), (256, 5120), (2, 16384), (1, 100)])
def test_operations_on_rows(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = random(num_tokens, size, dtype=dtype), random(num_tokens, size, seed=1, dtype=dtype)
    weight = 1 + random(size, seed=2) / 4
    check("rms_norm", x, weight, 1e-6, dtype=dtype)
    check("add_rms_norm", x, residual, weight, 1e-6, dtype=dtype)
    check("silu_and_mul", x, dtype=dtype)
    check("gelu_tanh_and_mul", x, dtype=dtype)
    check("soft_cap", x, 0.7, dtype=dtype)


def test_prepare_step() -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_rows, max_blocks, block_size = 300, 9, 40, 16
    token_ids = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32)
    rows = torch.randint(0, num_rows, (num_tokens,), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, max_blocks * block_size, (num_tokens,), generator=generator, dtype=torch.int32)
    last_tokens = torch.arange(100, 100 + num_rows, dtype=torch.int32)
    table = torch.randint(0, 10_000, (2, num_rows, max_blocks), generator=generator, dtype=torch.int32)
    arguments = (token_ids, rows, positions, last_tokens, table)
    found = kernels.prepare_step(*on_card(arguments), block_size)
    for one, other in zip(found, reference.prepare_step(*arguments, block_size), strict=True):
        assert torch.equal(one.cpu(), other)


MATRICES = [(576, 1536), (2048, 512), (100, 96), (4096, 4096)]
"""[rows, columns]."""


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [None, *WeightKind], ids=str)
def test_embedding(kind: WeightKind | None, dtype: torch.dtype) -> None:
    table = random(1000, 576, dtype=dtype) if kind is None else random_quantized_weight(kind, 1000, 576)
    token_ids = torch.tensor([0, 999, 5, 5, 17], dtype=torch.int32)
    check("embedding", token_ids, table, 12.0, dtype, dtype=dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 17, 64, 300])
@pytest.mark.parametrize(("num_rows", "num_columns"), MATRICES)
def test_linear(num_rows: int, num_columns: int, num_tokens: int, dtype: torch.dtype) -> None:
    x, weight = random(num_tokens, num_columns, dtype=dtype), random(num_rows, num_columns, seed=1, dtype=dtype)
    check("linear", x, weight, None, dtype=dtype)
    check("linear", x, weight, random(num_rows, seed=2), dtype=dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 17, 64, 300])
@pytest.mark.parametrize(("num_rows", "num_columns"), MATRICES)
@pytest.mark.parametrize("kind", WeightKind)
def test_quantized_linear(
    kind: WeightKind, num_rows: int, num_columns: int, num_tokens: int, dtype: torch.dtype
) -> None:
    x, bias = random(num_tokens, num_columns, dtype=dtype), random(num_rows, seed=2)
    for group_size in (64, num_columns) if kind is WeightKind.FP8 else (64,):
        weight = random_quantized_weight(kind, num_rows, num_columns, fp8_group_size=group_size)
        check("quantized_linear", x, weight, bias, dtype=dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [8, 16, 24, 64, 512])
@pytest.mark.parametrize("num_tokens", [1, 17, 256])
def test_lora(num_tokens: int, rank: int, dtype: torch.dtype) -> None:
    y, x = random(num_tokens, 1600, dtype=dtype), random(num_tokens, 2048, seed=1, dtype=dtype)
    a, b = random(5, rank, 2048, seed=2) / 45, random(5, 1000, rank, seed=3) / rank**0.5
    slots = torch.randint(0, 5, (num_tokens,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    check("lora", y, x, slots, 300, a.to(dtype), b.to(dtype), dtype=dtype, changed=(0,))


def expert_weights(kind: WeightKind | None, num_experts: int, dtype: torch.dtype) -> ExpertWeights:
    def matrices(num_rows: int, num_columns: int) -> list[Any]:
        if kind is not None:
            return [random_quantized_weight(kind, num_rows, num_columns, seed=seed) for seed in range(num_experts)]
        scale = num_columns**-0.5
        return [(random(num_rows, num_columns, seed=seed) * scale).to(dtype) for seed in range(num_experts)]

    return ExpertWeights.of(matrices(2 * 768, 512), matrices(512, 768))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [None, *WeightKind], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_per_token"), [(1, 64, 8), (33, 16, 2), (300, 8, 2), (700, 4, 2)]
)
def test_experts(
    num_tokens: int, num_experts: int, num_per_token: int, kind: WeightKind | None, dtype: torch.dtype
) -> None:
    x = random(num_tokens, 512, dtype=dtype)
    logits = random(num_tokens, num_experts, seed=1)
    weights = expert_weights(kind, num_experts, dtype)
    for activation, is_normalized in (("silu", True), ("gelu_tanh", False)):
        options = {"num_per_token": num_per_token, "is_normalized": is_normalized, "activation": activation}
        check("experts", x, logits, weights, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
class TestATokenGetsTheSameInAnyBatch:
    """Bit by bit: what the deterministic mode is made of."""

    @pytest.mark.parametrize(("num_rows", "num_columns"), MATRICES)
    @pytest.mark.parametrize("kind", [None, *WeightKind], ids=str)
    def test_products(self, kind: WeightKind | None, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
        x = random(515, num_columns, dtype=dtype).cuda()
        if kind is None:
            weight, product = random(num_rows, num_columns, seed=1, dtype=dtype), kernels.linear
        else:
            weight, product = random_quantized_weight(kind, num_rows, num_columns), kernels.quantized_linear
        weight = on_card(weight)
        together = product(x, weight, None)
        for first, end in ((0, 1), (3, 20), (100, 164), (7, 300)):
            assert torch.equal(product(x[first:end].contiguous(), weight, None), together[first:end])

    @pytest.mark.parametrize("kind", [None, *WeightKind], ids=str)
    def test_experts(self, kind: WeightKind | None, dtype: torch.dtype) -> None:
        x, logits = random(700, 512, dtype=dtype).cuda(), random(700, 4, seed=1).cuda()
        weights = on_card(expert_weights(kind, 4, dtype))
        options = {"num_per_token": 2, "is_normalized": True, "activation": "silu"}
        together = kernels.experts(x, logits, weights, **options)
        for first, end in ((0, 1), (3, 20), (100, 164)):
            assert torch.equal(
                kernels.experts(x[first:end], logits[first:end], weights, **options), together[first:end]
            )

    def test_lora(self, dtype: torch.dtype) -> None:
        y, x = random(300, 96, dtype=dtype).cuda(), random(300, 2048, seed=1, dtype=dtype).cuda()
        a, b = (random(3, 24, 2048, seed=2) / 45).to(dtype).cuda(), random(3, 96, 24, seed=3, dtype=dtype).cuda()
        slots = (torch.arange(300) % 3).int().cuda()
        together = kernels.lora(y.clone(), x, slots, 0, a, b)
        for first, end in ((0, 1), (1, 2), (3, 20), (100, 164)):
            part = kernels.lora(y[first:end].clone(), x[first:end], slots[first:end], 0, a, b)
            assert torch.equal(part, together[first:end])

    @pytest.mark.parametrize("length", [17, 1000, 5000])
    def test_attention(self, length: int, dtype: torch.dtype) -> None:
        """A prompt's last query, when it is computed with its prompt, in a chunk, and alone as a decode."""
        found: list[Tensor] = []
        for num_queries in (length, 13, 1):
            case = Attention(sequences=((num_queries, length), (5, 300)), is_deterministic=True)
            (query, keys, values, batch), options = case.arguments(dtype)
            query = random(length + 5, case.num_heads, case.head_dim, seed=1, dtype=dtype)
            query = torch.cat((query[length - num_queries : length], query[length:]))
            arguments = on_card([query, keys, values, batch])
            found.append(kernels.paged_attention(*arguments, **options)[num_queries - 1])
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
