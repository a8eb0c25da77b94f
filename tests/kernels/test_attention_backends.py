"""The choice of an attention backend, torch's own, and what libraries that are not here would be called with."""

import math
import sys
from types import ModuleType, SimpleNamespace

import attrs
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.paged_attention import device_reference, torch_backend  # noqa: E402
from trioengine_kernels.paged_attention.batch import AttentionBatch  # noqa: E402
from trioengine_kernels.paged_attention.libraries import (  # noqa: E402
    AttentionNeeds,
    AttentionUnavailableError,
    choose_attention,
)

HOPPER = AttentionNeeds(
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    head_dim=128,
    block_size=16,
    has_soft_cap=False,
    has_sinks=False,
    is_deterministic=False,
    capability=(9, 0),
)


def make_batch(query_lens, seq_lens, *, window=None, block_size=16, rows=None) -> AttentionBatch:
    num_blocks = [math.ceil(n / block_size) for n in seq_lens]
    rows = rows or list(range(len(seq_lens)))
    table = torch.full((max(rows) + 1, max(num_blocks) + 1), -1, dtype=torch.int32)
    order = torch.randperm(sum(num_blocks)).tolist()
    for row, count in zip(rows, num_blocks, strict=True):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    return AttentionBatch(
        block_table=table,
        rows=torch.tensor(rows, dtype=torch.int32),
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        work=torch.empty(0),
        num_work=torch.empty(0),
        block_size=block_size,
        window=window,
        max_query_len=max(query_lens),
    )


def make_tensors(batch, *, num_heads=6, num_kv_heads=2, head_dim=32, dtype=torch.float32, cache_dtype=None):
    torch.manual_seed(0)
    query = torch.randn(int(batch.query_start[-1]), num_heads, head_dim).to(dtype)
    num_blocks = int(batch.block_table.max()) + 1
    caches = torch.randn(2, num_blocks, batch.block_size, num_kv_heads, head_dim).to(cache_dtype or dtype)
    return query, *caches


def relative_error(out, expected):
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("sinks", [None, [-1.0, 0.5, 3.0, 9.0, 0.0, 1.0]], ids=["", "sinks"])
def test_the_reference_of_a_device_equals_the_formula(window, soft_cap, sinks) -> None:
    query_lens, seq_lens, rows = [1, 7, 16, 1, 33], [1, 15, 16, 17, 200], [3, 0, 5, 2, 1]
    batch = make_batch(query_lens, seq_lens, window=window, rows=rows)
    query, keys, values = make_tensors(batch)
    sinks = None if sinks is None else torch.tensor(sinks)
    expected = []
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = batch.block_table[rows[i]][: math.ceil(seq_len / 16)].long()
        own_keys = keys[blocks].flatten(0, 1).double().repeat_interleave(3, dim=1)
        own_values = values[blocks].flatten(0, 1).double().repeat_interleave(3, dim=1)
        for j in range(query_len):
            end = seq_len - query_len + j + 1
            first = 0 if window is None else max(0, end - window)
            scores = (own_keys[first:end] * query[batch.query_start[i] + j].double()).sum(-1) * 0.2
            if soft_cap is not None:
                scores = torch.tanh(scores / soft_cap) * soft_cap
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().unsqueeze(0)])
            weights = scores.softmax(0)[: end - first]
            expected.append((weights.unsqueeze(-1) * own_values[first:end]).sum(0))
    out = device_reference.paged_attention(query, keys, values, batch, scale=0.2, soft_cap=soft_cap, sinks=sinks)
    assert relative_error(out, torch.stack(expected)) < 1e-5


def test_the_reference_reads_an_fp8_cache() -> None:
    batch = make_batch([1, 3], [20, 3])
    query, keys, values = make_tensors(batch, cache_dtype=torch.float8_e4m3fn)
    out = device_reference.paged_attention(query, keys, values, batch, scale=0.2, key_scale=0.5, value_scale=3.0)
    expected = device_reference.paged_attention(query, keys.float() * 0.5, values.float() * 3, batch, scale=0.2)
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["", "fp8"])
@pytest.mark.parametrize(
    "options", [{}, {"soft_cap": 3.0}, {"sinks": torch.arange(6.0)}], ids=["plain", "soft cap", "sinks"]
)
@pytest.mark.parametrize("window", [None, 20])
def test_torch_equals_the_reference(window, options, cache_dtype) -> None:
    """With places that have no queries, between others and at the end."""
    batch = make_batch([1, 0, 7, 33, 1, 0], [100, 0, 15, 200, 1, 0], window=window, rows=[3, 0, 5, 2, 1, 4])
    query, keys, values = make_tensors(batch, cache_dtype=cache_dtype)
    scales = {"key_scale": 0.5, "value_scale": 2.0} if cache_dtype else {}
    options = {"scale": 0.2} | scales | options
    out = torch_backend.paged_attention(query, keys, values, batch, **options)
    expected = device_reference.paged_attention(query, keys, values, batch, **options)
    assert relative_error(out, expected) < 1e-5


def test_torch_without_queries() -> None:
    batch = make_batch([0, 0], [0, 0])
    tensors = torch.empty(2, 6, 32), torch.zeros(1, 16, 2, 32), torch.zeros(1, 16, 2, 32)
    assert torch_backend.paged_attention(*tensors, batch, scale=1.0).shape == (2, 6, 32)


def test_torch_reads_blocks_where_it_runs_a_flash_attention_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    impl = None
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: impl)
    assert not torch_backend.reads_blocks(torch.bfloat16, (9, 0))
    impl = "FA3"
    assert torch_backend.reads_blocks(torch.bfloat16, (9, 0))
    assert not torch_backend.reads_blocks(torch.float32, (9, 0))
    assert not torch_backend.reads_blocks(torch.bfloat16, (10, 0))
    impl = "FA4"
    assert torch_backend.reads_blocks(torch.bfloat16, (10, 0))


def test_torchs_variable_length_attention_is_given_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(torch_backend, "varlen_attn", calls.record("varlen_attn"))
    batch = make_batch([1, 3], [40, 20], window=9, rows=[1, 0])
    tensors = make_tensors(batch)
    assert torch_backend._paged_varlen(*tensors, batch, 0.5) is tensors[0]
    ((_, args, options),) = calls.made
    assert args[5:7] == (3, 4 * 16)
    assert torch.equal(args[3], batch.query_start)
    assert args[4] is None
    assert options["window_size"] == (8, 0)
    assert options["enable_gqa"]
    assert torch.equal(options["block_table"], batch.block_table[[1, 0]])
    assert torch.equal(options["seqused_k"], batch.seq_lens)


class Calls:
    """Notes calls, and answers with their first argument."""

    def __init__(self) -> None:
        self.made = []

    def record(self, name):
        def call(*args, **options):
            self.made.append((name, args, options))
            return args[0] if args else None

        return call


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Puts a module with functions that note their calls where an import finds it."""
    calls = Calls()

    def install(name: str, *functions: str) -> Calls:
        module = ModuleType(name)
        for function in functions:
            setattr(module, function, calls.record(function))
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    for name in ("flash_attn", "flash_attn_interface", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    return install


def test_ours_is_the_default() -> None:
    pytest.importorskip("triton")
    for name in (None, "TRITON_ATTN"):
        chosen = choose_attention(name, HOPPER)
        assert chosen.name == "TRITON_ATTN"
        assert chosen.can_be_recorded


def test_torch_waits_for_the_device_and_so_is_not_recorded() -> None:
    chosen = choose_attention("TORCH_SDPA", HOPPER)
    assert chosen.compute is torch_backend.paged_attention
    assert not chosen.can_be_recorded


@pytest.mark.parametrize(
    ("name", "needs", "reason"),
    [
        ("XFORMERS", {}, "TRITON_ATTN, TORCH_SDPA, FLASH_ATTN, FLASHINFER"),
        ("TRITON_ATTN", {"head_dim": 512}, "256"),
        ("TRITON_ATTN", {"cache_dtype": torch.float8_e4m3fn, "capability": (8, 0)}, "8.9"),
        ("FLASH_ATTN", {}, "install flash-attn"),
        ("FLASHINFER", {}, "install flashinfer-python"),
        ("FLASH_ATTN", {"has_sinks": True}, "sinks"),
        ("FLASH_ATTN", {"dtype": torch.float32, "cache_dtype": torch.float32}, "float32"),
        ("FLASH_ATTN", {"cache_dtype": torch.float8_e4m3fn}, "float8"),
        ("FLASH_ATTN", {"head_dim": 100}, "100"),
        ("FLASHINFER", {"head_dim": 80}, "80"),
        ("FLASHINFER", {"has_sinks": True}, "sinks"),
        ("FLASHINFER", {"is_deterministic": True}, "deterministic"),
        ("TORCH_SDPA", {"is_deterministic": True}, "deterministic"),
    ],
)
def test_what_cannot_be_had(install, name: str, needs, reason: str) -> None:
    with pytest.raises(AttentionUnavailableError, match=reason):
        choose_attention(name, attrs.evolve(HOPPER, **needs))


def test_flash_attention_3(install) -> None:
    calls = install("flash_attn_interface", "flash_attn_with_kvcache")
    chosen = choose_attention("FLASH_ATTN", HOPPER)
    assert chosen.can_be_recorded
    batch = make_batch([1, 3], [40, 20], window=9, rows=[1, 0])
    query, keys, values = make_tensors(batch)
    assert chosen.compute(query, keys, values, batch, scale=0.5, soft_cap=30.0) is query
    ((name, args, options),) = calls.made
    assert name == "flash_attn_with_kvcache"
    assert [id(x) for x in args] == [id(query), id(keys), id(values)]
    assert torch.equal(options.pop("page_table"), batch.block_table[[1, 0]])
    assert options.pop("cache_seqlens") is batch.seq_lens
    assert options.pop("cu_seqlens_q") is batch.query_start
    assert options == {
        "max_seqlen_q": 3,
        "softmax_scale": 0.5,
        "causal": True,
        "window_size": (8, 0),
        "softcap": 30.0,
    }


def test_flash_attention_2(install) -> None:
    calls = install("flash_attn", "flash_attn_varlen_func")
    with pytest.raises(AttentionUnavailableError, match="set the block size to 256"):
        choose_attention("FLASH_ATTN", HOPPER)
    chosen = choose_attention("FLASH_ATTN", attrs.evolve(HOPPER, block_size=256, capability=(8, 0)))
    batch = make_batch([1, 3], [400, 20], rows=[1, 0], block_size=256)
    query, keys, values = make_tensors(batch)
    assert chosen.compute(query, keys, values, batch, scale=0.5) is query
    ((_, args, options),) = calls.made
    assert [id(x) for x in args] == [id(query), id(keys), id(values)]
    assert torch.equal(options.pop("block_table"), batch.block_table[[1, 0]])
    assert options.pop("cu_seqlens_q") is batch.query_start
    starts = options.pop("cu_seqlens_k")
    assert starts.dtype == torch.int32
    assert starts.tolist() == [0, 400, 420]
    assert options == {
        "max_seqlen_q": 3,
        "max_seqlen_k": 3 * 256,
        "softmax_scale": 0.5,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
    }


def test_flashinfer(install) -> None:
    """Its one wrapper is planned in each call; places without queries and blocks behind a sequence's are left out."""
    calls = install("flashinfer")

    def make_wrapper(workspace, layout):
        assert layout == "NHD"
        calls.made.append(("made", (workspace,), {}))
        return SimpleNamespace(plan=calls.record("plan"), run=calls.record("run"))

    sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper = make_wrapper
    chosen = choose_attention("FLASHINFER", attrs.evolve(HOPPER, cache_dtype=torch.float8_e4m3fn))
    assert not chosen.can_be_recorded
    batch = make_batch([1, 3, 0], [40, 16, 0], window=9, rows=[1, 0, 2])
    query, keys, values = make_tensors(batch)
    for _ in range(2):
        out = chosen.compute(query, keys, values, batch, scale=0.5, soft_cap=30.0, key_scale=0.5, value_scale=2.0)
        assert torch.equal(out, query)
    assert [name for name, _, _ in calls.made] == ["made", "plan", "run", "plan", "run"]
    _, args, options = calls.made[1]
    assert [x.tolist() for x in args[:4]] == [
        [0, 1, 4],
        [0, 3, 4],
        [*batch.block_table[1, :3].tolist(), int(batch.block_table[0, 0])],
        [8, 16],
    ]
    assert args[4:] == (6, 2, 32, 16)
    assert options == {
        "causal": True,
        "sm_scale": 0.5,
        "window_left": 8,
        "logits_soft_cap": 30.0,
        "q_data_type": torch.float32,
        "kv_data_type": torch.float32,
    }
    _, args, options = calls.made[2]
    assert [id(x) for x in args[1]] == [id(keys), id(values)]
    assert options == {"k_scale": 0.5, "v_scale": 2.0}
