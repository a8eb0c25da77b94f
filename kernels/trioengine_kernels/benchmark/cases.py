# pyright: basic
"""The operations of a device in the shapes of known models, with what each has to move and compute at least.

What is read from memory in an engine, weights and caches, is read from memory here too: a case has so many buffers,
used in turn, that they do not fit into the card's cache. Small activations stay in the cache, as they do in an engine.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trioengine_kernels.experts.weights import ExpertWeights
from trioengine_kernels.kernel_set import KernelSet
from trioengine_kernels.paged_attention.batch import AttentionBatch
from trioengine_kernels.paged_attention.libraries import (
    Attention,
    AttentionNeeds,
    AttentionUnavailableError,
    choose_attention,
)
from trioengine_kernels.paged_attention.work import plan_work
from trioengine_kernels.quantized_linear import GROUP_SIZE, QuantizedWeight, WeightKind
from trioengine_kernels.sampling import SamplingBatch

MAX_BUFFERS = 256
_EPSILON = 1e-5
_BLOCK_SIZE = 16
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@attrs.frozen(kw_only=True)
class ModelSizes:
    """The sizes of a model that decide what its operations cost."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_tied_embeddings: bool
    num_experts: int = 0
    """0 is none; then `intermediate_size` is the MLP's, else each expert's."""
    num_experts_per_token: int = 0


MODELS: Sequence[ModelSizes] = (
    ModelSizes(
        name="llama-3-8b",
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        has_tied_embeddings=False,
    ),
    ModelSizes(
        name="llama-3.2-1b",
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128256,
        has_tied_embeddings=True,
    ),
    ModelSizes(
        name="smollm2-135m",
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        has_tied_embeddings=True,
    ),
    ModelSizes(
        name="qwen3-30b-a3b",
        hidden_size=2048,
        intermediate_size=768,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        has_tied_embeddings=False,
        num_experts=128,
        num_experts_per_token=8,
    ),
)


@attrs.frozen(eq=False)
class Problem:
    """An operation with its inputs, ready to run."""

    calls: Sequence[Callable[[], object]]
    """They do the same with other buffers."""
    error: Callable[[], float]
    """How far the output is from what it should be, as `OpRate.error`. Runs the operation."""
    num_bytes: int
    num_flops: int = 0


@attrs.frozen(eq=False, kw_only=True)
class Case:
    """One operation in one shape."""

    op: str
    shape: str
    dtype: torch.dtype
    config: str
    tolerance: float
    """The largest error that is right."""
    build: Callable[[], Problem]
    """Takes the device's memory, which is free again when the problem is dropped."""
    is_recordable: bool = True
    """As `Timer.seconds` wants to know."""


@attrs.frozen(eq=False, kw_only=True)
class Suite:
    """What is measured, and where."""

    kernels: KernelSet
    reference: KernelSet
    """What the outputs are compared with, computed in float32."""
    device: torch.device
    cached_bytes: int
    """What the device may keep in its cache: buffers that are used in turn take more."""
    dtype: torch.dtype = torch.bfloat16
    models: Sequence[ModelSizes] = MODELS
    batch_sizes: Sequence[int] = (1, 8, 64, 256)
    prompt_tokens: int = 2048
    context_tokens: int = 1024
    """Of each sequence that is decoded."""
    long_contexts: Sequence[tuple[int, int]] = ((8, 16384), (1, 131072))
    """(sequences, tokens of each), decoded beside those."""
    fp8_kv_batch_size: int = 64
    other_attentions: Sequence[str] = ("TORCH_SDPA", "FLASH_ATTN", "FLASHINFER")
    """Measured beside ours where they are installed."""
    lora_rank: int = 16
    num_loras: int = 4

    def cases(self, ops: Sequence[str] = ()) -> Iterator[Case]:
        """All cases of these operations; of all operations where none is named."""
        for model in self.models:
            for op, cases_of in OPS.items():
                if not ops or op in ops:
                    yield from cases_of(self, model)

    @property
    def num_rows(self) -> Sequence[int]:
        """Rows of activations: those of decodes, and of a prompt."""
        return (*self.batch_sizes, self.prompt_tokens)

    def random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normally distributed numbers on the device."""
        return (torch.randn(shape, device=self.device) * scale).to(dtype or self.dtype)

    def case(self, op: str, shape: str, build: Callable[[], Problem], config: str = "triton", **facts: object) -> Case:
        """A case of this suite's type, with the tolerance of that type unless `facts` say otherwise."""
        values: dict = {"dtype": self.dtype, "tolerance": _TOLERANCES[self.dtype], **facts}
        return Case(op=op, shape=shape, config=config, build=build, **values)

    def buffers(self, make: Callable[[], object], num_bytes: int) -> list:
        """So many of something that takes so many bytes that the cache does not hold them all."""
        return [make() for _ in range(max(1, min(MAX_BUFFERS, -(-self.cached_bytes // num_bytes))))]


def relative_error(output: Tensor, expected: Tensor) -> float:
    """‖output − expected‖ / ‖expected‖; of integers the share that differs. Infinite for what is no number."""
    if output.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return float((output != expected).float().mean())
    output, expected = output.double(), expected.double()
    error = float((output - expected).norm() / expected.norm())
    return error if error == error else float("inf")


class PoisonedMemory(TorchFunctionMode):
    """While it is entered, new floats are NaN until they are written: an output that is not written is wrong."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """What `func` returns."""
        result = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like, Tensor.new_empty) and result.is_floating_point():
            result.fill_(float("nan"))
        return result


def _error_of(run: Callable[[], Tensor], expected: Callable[[], Tensor]) -> float:
    with PoisonedMemory():
        output = run()
    return relative_error(output, expected())


def _attention(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    decodes = [(size, suite.context_tokens) for size in suite.batch_sizes]
    for num_seqs, num_keys in (*decodes, *suite.long_contexts):
        yield from _attention_cases(suite, model, num_seqs, 1, num_keys, suite.dtype)
    yield from _attention_cases(suite, model, suite.fp8_kv_batch_size, 1, suite.context_tokens, torch.float8_e4m3fn)
    yield from _attention_cases(suite, model, 1, suite.prompt_tokens, suite.prompt_tokens, suite.dtype)


def _attention_cases(
    suite: Suite, model: ModelSizes, num_seqs: int, num_queries: int, num_keys: int, kv_dtype: torch.dtype
) -> Iterator[Case]:
    shape = f"{model.name} {num_seqs}x{num_keys}" + (f" prefill {num_queries}" if num_queries > 1 else "")
    kind = ", fp8 kv" if kv_dtype != suite.dtype else ""

    def case(attention: Attention, config: str) -> Case:
        build = partial(_attention_problem, suite, model, attention, num_seqs, num_queries, num_keys, kv_dtype)
        return suite.case("paged_attention", shape, build, config + kind, is_recordable=attention.can_be_recorded)

    yield case(Attention("TRITON_ATTN", suite.kernels.paged_attention, can_be_recorded=True), "triton")
    is_cuda = suite.device.type == "cuda"
    needs = AttentionNeeds(
        dtype=suite.dtype,
        cache_dtype=kv_dtype,
        head_dim=model.head_dim,
        block_size=_BLOCK_SIZE,
        has_soft_cap=False,
        has_sinks=False,
        is_deterministic=False,
        capability=torch.cuda.get_device_capability(suite.device) if is_cuda else (0, 0),
    )
    for name in suite.other_attentions:
        # What is not installed here, or does not do this, has no line.
        with contextlib.suppress(AttentionUnavailableError):
            yield case(choose_attention(name, needs), name)


def _attention_problem(
    suite: Suite,
    model: ModelSizes,
    attention: Attention,
    num_seqs: int,
    num_queries: int,
    num_keys: int,
    kv_dtype: torch.dtype,
) -> Problem:
    num_blocks = -(-num_keys // _BLOCK_SIZE)
    query = suite.random(num_seqs * num_queries, model.num_heads, model.head_dim)
    cache_shape = (num_seqs * num_blocks, _BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    kv_bytes = 2 * num_seqs * num_keys * model.num_kv_heads * model.head_dim * kv_dtype.itemsize
    caches = suite.buffers(
        lambda: (suite.random(*cache_shape, dtype=kv_dtype), suite.random(*cache_shape, dtype=kv_dtype)), kv_bytes
    )
    batch = _attention_batch(suite, model, num_seqs, num_queries, num_keys)
    attend = partial(attention.compute, scale=model.head_dim**-0.5)
    keys, values = caches[0]
    num_pairs = num_seqs * sum(range(num_keys - num_queries + 1, num_keys + 1))
    return Problem(
        calls=[partial(attend, query, *cache, batch) for cache in caches],
        error=lambda: _error_of(
            lambda: attend(query, keys, values, batch),
            lambda: suite.reference.paged_attention(
                query.float(), keys.float(), values.float(), batch, scale=model.head_dim**-0.5
            ),
        ),
        num_bytes=kv_bytes + 2 * query.nbytes,
        num_flops=4 * num_pairs * model.num_heads * model.head_dim,
    )


def _attention_batch(suite: Suite, model: ModelSizes, num_seqs: int, num_queries: int, num_keys: int) -> AttentionBatch:
    """Sequences of one length, whose blocks lie in no order."""
    query_start = np.arange(0, num_seqs * num_queries + 1, num_queries, dtype=np.int32)
    seq_lens = np.full(num_seqs, num_keys, np.int32)
    work = plan_work(
        query_start,
        seq_lens,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        window=None,
    )
    num_blocks = num_seqs * -(-num_keys // _BLOCK_SIZE)

    def on_device(values: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(suite.device)

    return AttentionBatch(
        block_table=torch.randperm(num_blocks, device=suite.device).int().view(num_seqs, -1),
        rows=torch.arange(num_seqs, device=suite.device, dtype=torch.int32),
        query_start=on_device(query_start),
        seq_lens=on_device(seq_lens),
        work=on_device(work),
        num_work=torch.tensor([len(work)], device=suite.device, dtype=torch.int32),
        block_size=_BLOCK_SIZE,
        window=None,
        max_query_len=num_queries,
    )


def _rope_write_kv(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    for num_tokens in suite.num_rows:
        shape = f"{model.name} {num_tokens}"
        yield suite.case("rope_write_kv", shape, partial(_rope_problem, suite, model, num_tokens))


def _rope_problem(suite: Suite, model: ModelSizes, num_tokens: int) -> Problem:
    num_rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    angles = torch.rand(num_tokens, model.head_dim // 2, device=suite.device) * 6
    cos, sin = angles.cos(), angles.sin()
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    cache_shape = (num_blocks, _BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=suite.device)[:num_tokens].int()
    sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}

    def buffers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (torch.full(cache_shape, float("nan"), dtype=dtype, device=suite.device) for _ in range(2))
        return suite.random(num_tokens, num_rows), keys, values

    def run(kernels: KernelSet, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return kernels.rope_write_kv(qkv, None, None, cos, sin, keys, values, slots, norm_epsilon=_EPSILON, **sizes)

    def error() -> float:
        qkv, keys, values = buffers(suite.dtype)
        _, expected_keys, expected_values = buffers(torch.float32)
        result = _error_of(
            lambda: run(suite.kernels, qkv, keys, values),
            lambda: run(suite.reference, qkv.float(), expected_keys, expected_values),
        )
        written = slots.long()
        pairs = ((keys, expected_keys), (values, expected_values))
        return max(result, *(relative_error(a.flatten(0, 1)[written], b.flatten(0, 1)[written]) for a, b in pairs))

    num_bytes = num_tokens * 2 * num_rows * suite.dtype.itemsize
    in_turn = suite.buffers(lambda: buffers(suite.dtype), num_bytes)
    return Problem(
        calls=[partial(run, suite.kernels, *each) for each in in_turn],
        error=error,
        num_bytes=num_bytes + cos.nbytes + sin.nbytes,
    )


def _add_rms_norm(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    for num_tokens in suite.num_rows:
        yield suite.case("add_rms_norm", f"{model.name} {num_tokens}", partial(_norm_problem, suite, model, num_tokens))


def _norm_problem(suite: Suite, model: ModelSizes, num_tokens: int) -> Problem:
    weight = 1 + suite.random(model.hidden_size, dtype=torch.float32, scale=0.1)

    def inputs() -> tuple[Tensor, Tensor]:
        return suite.random(num_tokens, model.hidden_size), suite.random(num_tokens, model.hidden_size)

    def error() -> float:
        x, residual = inputs()
        # In float32 the sum would not be rounded, which is no error of the kernel.
        total = x + residual
        expected = suite.reference.rms_norm(total.float(), weight, _EPSILON)
        with PoisonedMemory():
            normed, summed = suite.kernels.add_rms_norm(x, residual, weight, _EPSILON)
        return max(relative_error(normed, expected), relative_error(summed, total))

    num_bytes = 4 * num_tokens * model.hidden_size * suite.dtype.itemsize
    in_turn = suite.buffers(inputs, num_bytes)
    return Problem(
        calls=[partial(suite.kernels.add_rms_norm, *each, weight, _EPSILON) for each in in_turn],
        error=error,
        num_bytes=num_bytes,
    )


def _silu_and_mul(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    if model.num_experts:
        return  # Part of `experts`.
    for num_tokens in suite.num_rows:
        yield suite.case(
            "silu_and_mul", f"{model.name} {num_tokens}", partial(_activation_problem, suite, model, num_tokens)
        )


def _activation_problem(suite: Suite, model: ModelSizes, num_tokens: int) -> Problem:
    num_bytes = 3 * num_tokens * model.intermediate_size * suite.dtype.itemsize
    in_turn = suite.buffers(lambda: suite.random(num_tokens, 2 * model.intermediate_size), num_bytes)
    return Problem(
        calls=[partial(suite.kernels.silu_and_mul, each) for each in in_turn],
        error=lambda: _error_of(
            lambda: suite.kernels.silu_and_mul(in_turn[0]), lambda: suite.reference.silu_and_mul(in_turn[0].float())
        ),
        num_bytes=num_bytes,
    )


def _embedding(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    for num_tokens in suite.num_rows:
        yield suite.case(
            "embedding", f"{model.name} {num_tokens}", partial(_embedding_problem, suite, model, num_tokens)
        )


def _embedding_problem(suite: Suite, model: ModelSizes, num_tokens: int) -> Problem:
    table = suite.random(model.vocab_size, model.hidden_size)
    num_bytes = 2 * num_tokens * model.hidden_size * suite.dtype.itemsize
    # Other rows of one table in turn.
    in_turn = suite.buffers(
        lambda: torch.randint(model.vocab_size, (num_tokens,), device=suite.device, dtype=torch.int32), num_bytes
    )
    return Problem(
        calls=[partial(suite.kernels.embedding, each, table, 1.0, suite.dtype) for each in in_turn],
        error=lambda: _error_of(
            lambda: suite.kernels.embedding(in_turn[0], table, 1.0, suite.dtype),
            lambda: suite.reference.embedding(in_turn[0], table, 1.0, suite.dtype),
        ),
        num_bytes=num_bytes,
    )


def _sample(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    for num_rows in suite.batch_sizes:
        for config, temperature, top_p in (("greedy", 0.0, 1.0), ("temperature", 1.0, 1.0), ("top-p", 1.0, 0.9)):
            build = partial(_sampling_problem, suite, model, num_rows, temperature, top_p)
            shape = f"{model.name} {num_rows}"
            yield suite.case("sample", shape, build, f"triton, {config}", dtype=torch.float32, tolerance=0.0)


def _sampling_problem(suite: Suite, model: ModelSizes, num_rows: int, temperature: float, top_p: float) -> Problem:
    def ints(value: int) -> Tensor:
        return torch.full((num_rows,), value, device=suite.device)

    def floats(value: float) -> Tensor:
        return torch.full((num_rows,), value, device=suite.device)

    batch = SamplingBatch(
        temperature=floats(temperature),
        top_k=ints(0),
        top_p=floats(top_p),
        min_p=floats(0.0),
        seed=torch.arange(num_rows, device=suite.device) + 7,
        position=ints(11),
    )
    # Peaked, as the logits of language models are.
    num_bytes = num_rows * model.vocab_size * 4
    in_turn = suite.buffers(lambda: suite.random(num_rows, model.vocab_size, dtype=torch.float32, scale=4.0), num_bytes)
    return Problem(
        calls=[partial(suite.kernels.sample, each, batch) for each in in_turn],
        error=lambda: _error_of(
            lambda: suite.kernels.sample(in_turn[0], batch)[0], lambda: suite.reference.sample(in_turn[0], batch)[0]
        ),
        num_bytes=num_bytes,
    )


def _matrices(model: ModelSizes) -> Mapping[str, tuple[int, int]]:
    """Name -> outputs and inputs: the largest two of a layer, one wide and one long."""
    if model.num_experts:
        return {}  # Theirs are measured as `experts`.
    return {
        "gate_up": (2 * model.intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size),
    }


def _linear(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    for name, (num_rows, num_columns) in _matrices(model).items():
        for num_tokens in suite.num_rows:
            for config, product in (("triton, deterministic", suite.kernels.linear), ("torch", F.linear)):
                yield suite.case(
                    "linear",
                    f"{model.name} {name} {num_tokens}",
                    partial(_linear_problem, suite, product, num_tokens, num_rows, num_columns),
                    config,
                )


def _linear_problem(
    suite: Suite, product: Callable[..., Tensor], num_tokens: int, num_rows: int, num_columns: int
) -> Problem:
    x = suite.random(num_tokens, num_columns)
    weight_bytes = num_rows * num_columns * suite.dtype.itemsize
    weights = suite.buffers(lambda: suite.random(num_rows, num_columns, scale=num_columns**-0.5), weight_bytes)
    return Problem(
        calls=[partial(product, x, weight, None) for weight in weights],
        error=lambda: _error_of(lambda: product(x, weights[0], None), lambda: x.float() @ weights[0].float().T),
        num_bytes=weight_bytes + (num_tokens * (num_rows + num_columns)) * suite.dtype.itemsize,
        num_flops=2 * num_tokens * num_rows * num_columns,
    )


def _quantized_linear(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    for name, (num_rows, num_columns) in _matrices(model).items():
        for num_tokens in suite.num_rows:
            for kind in (WeightKind.INT4, WeightKind.INT8, WeightKind.FP8):
                yield suite.case(
                    "quantized_linear",
                    f"{model.name} {name} {num_tokens}",
                    partial(_quantized_problem, suite, kind, num_tokens, num_rows, num_columns),
                    f"triton, {kind.value}",
                )


def _quantized_problem(suite: Suite, kind: WeightKind, num_tokens: int, num_rows: int, num_columns: int) -> Problem:
    x = suite.random(num_tokens, num_columns)
    first = random_quantized(suite, kind, num_rows, num_columns)
    planes = [plane for plane in (first.codes, first.scales, first.minimums) if plane is not None]
    weight_bytes = sum(plane.nbytes for plane in planes)
    weights = [first, *suite.buffers(lambda: random_quantized(suite, kind, num_rows, num_columns), weight_bytes)[1:]]
    product = suite.kernels.quantized_linear
    return Problem(
        calls=[partial(product, x, weight, None) for weight in weights],
        error=lambda: _error_of(
            lambda: product(x, first, None), lambda: suite.reference.quantized_linear(x.float(), first, None)
        ),
        num_bytes=weight_bytes + (num_tokens * (num_rows + num_columns)) * suite.dtype.itemsize,
        num_flops=2 * num_tokens * num_rows * num_columns,
    )


def random_quantized(suite: Suite, kind: WeightKind, num_rows: int, num_columns: int) -> QuantizedWeight:
    """A matrix of random codes whose products are about as large as the inputs."""
    num_groups = -(-num_columns // GROUP_SIZE)
    minimums, group_size = None, GROUP_SIZE
    if kind is WeightKind.INT4:
        codes = torch.randint(256, (num_rows, num_columns // 2), dtype=torch.uint8, device=suite.device)
        scales = _scales(suite, num_rows, num_groups, 1 / 4 / num_columns**0.5)
        minimums = -7.5 * scales
    elif kind is WeightKind.FP8:
        codes = suite.random(num_rows, num_columns, dtype=torch.float8_e4m3fn)
        scales = _scales(suite, num_rows, 1, num_columns**-0.5).float()
        group_size = -(-num_columns // GROUP_SIZE) * GROUP_SIZE
    else:
        codes = torch.randint(-127, 128, (num_rows, num_columns), dtype=torch.int8, device=suite.device)
        scales = _scales(suite, num_rows, num_groups, 1 / 64 / num_columns**0.5)
    return QuantizedWeight(kind, codes, scales, minimums, num_rows, num_columns, group_size)


def _scales(suite: Suite, num_rows: int, num_groups: int, size: float) -> Tensor:
    return ((torch.rand(num_rows, num_groups, device=suite.device) + 0.5) * size).half()


def _lora(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    if "gate_up" in (matrices := _matrices(model)):
        num_rows, num_columns = matrices["gate_up"]
        for num_tokens in suite.num_rows:
            build = partial(_lora_problem, suite, num_tokens, num_rows, num_columns)
            config = f"triton, rank {suite.lora_rank}, {min(num_tokens, suite.num_loras)} adapters"
            yield suite.case("lora", f"{model.name} gate_up {num_tokens}", build, config)


def _lora_problem(suite: Suite, num_tokens: int, num_rows: int, num_columns: int) -> Problem:
    rank, num_slots = suite.lora_rank, suite.num_loras + 1
    x, y = suite.random(num_tokens, num_columns), suite.random(num_tokens, num_rows)
    slots = (torch.arange(num_tokens, device=suite.device, dtype=torch.int32) % suite.num_loras) + 1

    def adapters() -> tuple[Tensor, Tensor]:
        a = suite.random(num_slots, rank, num_columns, scale=num_columns**-0.5)
        b = suite.random(num_slots, num_rows, rank, scale=rank**-0.5)
        a[0] = b[0] = 0
        return a, b

    num_used = min(num_tokens, suite.num_loras)
    adapter_bytes = num_used * rank * (num_columns + num_rows) * suite.dtype.itemsize
    in_turn = suite.buffers(adapters, adapter_bytes)
    a, b = in_turn[0]
    return Problem(
        # What is added grows with every call, and slowly: it is only time that is measured.
        calls=[partial(suite.kernels.lora, y, x, slots, 0, *each) for each in in_turn],
        error=lambda: _error_of(
            lambda: suite.kernels.lora(y.clone(), x, slots, 0, a, b),
            lambda: suite.reference.lora(y.clone().float(), x.float(), slots, 0, a.float(), b.float()),
        ),
        num_bytes=adapter_bytes + x.nbytes + 2 * y.nbytes,
        num_flops=2 * num_tokens * rank * (num_columns + num_rows),
    )


def _experts(suite: Suite, model: ModelSizes) -> Iterator[Case]:
    if model.num_experts:
        for num_tokens in suite.num_rows:
            build = partial(_experts_problem, suite, model, num_tokens)
            yield suite.case("experts", f"{model.name} {num_tokens}", build)


def _experts_problem(suite: Suite, model: ModelSizes, num_tokens: int) -> Problem:
    size, hidden_size, per_token = model.intermediate_size, model.hidden_size, model.num_experts_per_token

    def matrices(num_rows: int, num_columns: int) -> list[Tensor]:
        return [suite.random(num_rows, num_columns, scale=num_columns**-0.5) for _ in range(model.num_experts)]

    def inputs() -> tuple[Tensor, Tensor]:
        # No two logits of a token are equal in any type: which of equals are chosen is not what is compared.
        logits = torch.rand(num_tokens, model.num_experts, device=suite.device).argsort(dim=-1).to(suite.dtype) / 8
        return suite.random(num_tokens, hidden_size), logits

    gate_up, down = matrices(2 * size, hidden_size), matrices(hidden_size, size)
    weights = ExpertWeights.of(gate_up, down)
    expert_bytes = 3 * size * hidden_size * suite.dtype.itemsize
    # The experts are the same in turn, chosen by other tokens.
    in_turn = suite.buffers(inputs, min(model.num_experts, num_tokens * per_token) * expert_bytes)
    num_chosen = [len(logits.topk(per_token).indices.unique()) for _, logits in in_turn]
    run = partial(suite.kernels.experts, num_per_token=per_token, is_normalized=True, activation="silu")

    def expected() -> Tensor:
        exact = ExpertWeights.of([matrix.float() for matrix in gate_up], [matrix.float() for matrix in down])
        x, logits = in_turn[0]
        return suite.reference.experts(
            x.float(), logits.float(), exact, num_per_token=per_token, is_normalized=True, activation="silu"
        )

    return Problem(
        calls=[partial(run, *each, weights) for each in in_turn],
        error=lambda: _error_of(lambda: run(*in_turn[0], weights), expected),
        num_bytes=sum(num_chosen) * expert_bytes // len(in_turn) + 2 * num_tokens * hidden_size * suite.dtype.itemsize,
        num_flops=6 * num_tokens * per_token * size * hidden_size,
    )


OPS: Mapping[str, Callable[[Suite, ModelSizes], Iterator[Case]]] = {
    "paged_attention": _attention,
    "rope_write_kv": _rope_write_kv,
    "add_rms_norm": _add_rms_norm,
    "silu_and_mul": _silu_and_mul,
    "embedding": _embedding,
    "sample": _sample,
    "linear": _linear,
    "quantized_linear": _quantized_linear,
    "lora": _lora,
    "experts": _experts,
}
"""Name -> its cases for a model."""
