"""Paged attention in Triton, interpreted, against what it has to compute."""

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trioengine_kernels.paged_attention import triton as triton_attention  # noqa: E402
from trioengine_kernels.paged_attention.batch import AttentionBatch  # noqa: E402
from trioengine_kernels.paged_attention.device_reference import paged_attention as reference  # noqa: E402
from trioengine_kernels.paged_attention.work import plan_work  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BLOCK_SIZE = 16
LENS = [1, 15, 16, 17, 200]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
NOWHERE = 2**30
"""A block id that reading would crash on."""


class Case:
    """Sequences with random keys in shuffled blocks; every slot that holds no token is NaN."""

    def __init__(
        self,
        query_lens,
        seq_lens,
        *,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.float32,
        cache_dtype=None,
        num_padded=0,
        block_size=BLOCK_SIZE,
    ):
        torch.manual_seed(0)
        self.query_lens, self.seq_lens, self.block_size = list(query_lens), list(seq_lens), block_size
        self.query = torch.randn(sum(query_lens) + num_padded, num_heads, head_dim).to(dtype)
        num_blocks = [math.ceil(n / block_size) for n in seq_lens]
        shape = (sum(num_blocks) + 3, block_size, num_kv_heads, head_dim)
        order = torch.randperm(shape[0]).tolist()
        # One row more than there are sequences, and not in their order.
        self.rows = (torch.randperm(len(seq_lens)) + 1).tolist()
        self.block_table = torch.full((len(seq_lens) + 1, max(num_blocks) + 1), NOWHERE, dtype=torch.int32)
        caches = torch.randn(2, *shape)
        is_stale = torch.ones(shape[:2], dtype=torch.bool)
        for row, seq_len, count in zip(self.rows, seq_lens, num_blocks, strict=True):
            blocks = [order.pop() for _ in range(count)]
            self.block_table[row, :count] = torch.tensor(blocks)
            for place in range(seq_len):
                is_stale[blocks[place // block_size], place % block_size] = False
        self.caches = caches.masked_fill_(is_stale[None, :, :, None, None], torch.nan).to(cache_dtype or dtype)
        self.num_padded = num_padded

    def batch(self, window=None, is_deterministic=False, keys_per_split=128, max_query_len=None) -> AttentionBatch:
        num_seqs = len(self.seq_lens)
        padding = [0] * self.num_padded
        query_start = np.cumsum([0, *self.query_lens, *padding]).astype(np.int32)
        seq_lens = np.array([*self.seq_lens, *padding], np.int32)
        work = plan_work(
            query_start,
            seq_lens,
            num_heads=self.query.shape[1],
            num_kv_heads=self.caches.shape[3],
            head_dim=self.query.shape[2],
            window=window,
            is_deterministic=is_deterministic,
            keys_per_split=keys_per_split,
        )
        room = np.full((len(work) + 2, work.shape[1]), -1, np.int32)
        room[: len(work)] = work
        assert num_seqs == len(self.rows)
        return AttentionBatch(
            block_table=self.block_table,
            rows=torch.tensor([*self.rows, *padding], dtype=torch.int32),
            query_start=torch.from_numpy(query_start),
            seq_lens=torch.from_numpy(seq_lens),
            work=torch.from_numpy(room),
            num_work=torch.tensor([len(work)], dtype=torch.int32),
            block_size=self.block_size,
            window=window,
            max_query_len=max_query_len or max(self.query_lens),
            is_deterministic=is_deterministic,
        )

    def run(self, *, keys_per_split=128, soft_cap=None, sinks=None, key_scale=1.0, value_scale=1.0, **batch):
        """The queries' results: of ours, and of the reference."""
        told = self.batch(keys_per_split=keys_per_split, **batch)
        options = {
            "scale": self.query.shape[2] ** -0.5,
            "soft_cap": soft_cap,
            "sinks": sinks,
            "key_scale": key_scale,
            "value_scale": value_scale,
        }
        out = triton_attention.attend(self.query, *self.caches, told, **options, keys_per_split=keys_per_split)
        assert out.shape == self.query.shape
        assert out.dtype == self.query.dtype
        assert out.is_contiguous()
        num_queries = sum(self.query_lens)
        return out[:num_queries], reference(self.query, *self.caches, told, **options)[:num_queries]

    def check(self, **options) -> None:
        out, expected = self.run(**options)
        error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
        assert error < TOLERANCE[self.query.dtype]


MIXES = {
    "decodes": ([1] * 5, LENS),
    "whole prompts": ([1, 15, 17, 40], [1, 15, 17, 40]),
    "chunks and decodes": ([1, 7, 16, 1, 19], LENS),
}
DECODES, CHUNKS = ([1, 1, 1], [17, 128, 150]), ([1, 20, 3], [17, 90, 40])
of_decodes_and_chunks = pytest.mark.parametrize("step", [DECODES, CHUNKS], ids=["decodes", "chunks"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("mix", MIXES)
def test_equals_the_reference(mix: str, dtype) -> None:
    Case(*MIXES[mix], num_heads=3, num_kv_heads=1, dtype=dtype).check()


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
@of_decodes_and_chunks
def test_head_dimensions(step, head_dim: int) -> None:
    Case(*step, num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=torch.float16).check()


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16, 24])
@of_decodes_and_chunks
def test_heads_that_share_a_kv_head(step, group: int) -> None:
    Case(*step, num_heads=group, num_kv_heads=1, dtype=torch.float16).check()


@pytest.mark.parametrize("window", [1, 16, 20, 70])
@of_decodes_and_chunks
def test_windows(step, window: int) -> None:
    """Blocks that no query sees are not there; not even their ids are."""
    case = Case(*step, num_heads=1, num_kv_heads=1, dtype=torch.float16)
    for row, query_len, seq_len in zip(case.rows, case.query_lens, case.seq_lens, strict=True):
        case.block_table[row, : max(0, seq_len - query_len - window + 1) // BLOCK_SIZE] = NOWHERE
    case.check(window=window)


@pytest.mark.parametrize("window", [None, 70])
def test_a_long_chunk(window: int | None) -> None:
    """With keys that all queries of a tile see, some before and some behind them."""
    case = Case([150, 1], [300, 90], num_heads=1, num_kv_heads=1, dtype=torch.float16)
    case.check(window=window, keys_per_split=512)


@of_decodes_and_chunks
def test_soft_cap(step) -> None:
    case = Case(*step, num_heads=2, num_kv_heads=1)
    case.query *= 5
    case.check(soft_cap=3.0)


@of_decodes_and_chunks
def test_sinks(step) -> None:
    """Also those that are far above or below all scores; with several KV heads."""
    Case(*step, num_heads=4).check(sinks=torch.tensor([-200.0, 0.5, 9.0, 60.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@of_decodes_and_chunks
def test_an_fp8_cache(step, dtype) -> None:
    case = Case(*step, num_heads=2, num_kv_heads=1, dtype=dtype, cache_dtype=torch.float8_e4m3fn)
    case.check(key_scale=0.5, value_scale=3.0)


def test_everything_at_once() -> None:
    case = Case(*CHUNKS, num_heads=3, num_kv_heads=1, head_dim=80, cache_dtype=torch.float8_e4m3fn)
    case.check(window=50, soft_cap=10.0, sinks=torch.tensor([1.0, 0.0, -1.0]), key_scale=0.5, value_scale=2.0)


@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_block_sizes(block_size: int) -> None:
    Case([1, 20], [200, 33], num_heads=1, num_kv_heads=1, dtype=torch.float16, block_size=block_size).check()


@pytest.mark.parametrize("keys_per_split", [16, 32, 128])
@pytest.mark.parametrize("window", [None, 90])
def test_split_lengths(keys_per_split: int, window: int | None) -> None:
    case = Case([1, 1, 5], [200, 16, 150], num_heads=1, num_kv_heads=1, dtype=torch.float16)
    assert (case.batch(window, keys_per_split=keys_per_split).work[:, 7] > 1).any()
    case.check(keys_per_split=keys_per_split, window=window)


def test_more_splits_than_are_made() -> None:
    Case([1], [16 * 33], num_heads=1, num_kv_heads=1).check(keys_per_split=16)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_padded_places(is_deterministic: bool) -> None:
    """As in a graph that was recorded for more sequences."""
    Case([1, 1], [17, 100], num_heads=1, num_kv_heads=1, num_padded=3).check(is_deterministic=is_deterministic)


def test_nothing_to_do() -> None:
    """As when a graph is recorded: all places are padded."""
    case = Case([1], [1], num_padded=2)
    case.query_lens = [0]
    out, _ = case.run(max_query_len=1)
    assert len(out) == 0


def test_a_tile_for_more_queries_than_there_are() -> None:
    """What is fixed for a graph may be more than a step has."""
    Case([1, 1], [17, 100], num_heads=1, num_kv_heads=1).check(max_query_len=40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@of_decodes_and_chunks
def test_deterministic_mode_equals_the_reference(step, dtype) -> None:
    Case(*step, num_heads=2, num_kv_heads=1, dtype=dtype).check(is_deterministic=True)


def only(case: Case, i: int, begin: int, end: int) -> Case:
    """Of one sequence the queries at positions from `begin` to `end`, nothing else."""
    alone = copy.copy(case)
    first_row = sum(case.query_lens[: i + 1]) - case.seq_lens[i] + begin
    alone.query = case.query[first_row : first_row + end - begin]
    alone.query_lens, alone.seq_lens, alone.rows, alone.num_padded = [end - begin], [end], [case.rows[i]], 0
    return alone


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(torch.float32, {}, id="fp32"),
        pytest.param(torch.float16, {}, id="fp16"),
        pytest.param(torch.float16, {"window": 20}, id="window"),
        pytest.param(torch.float16, {"sinks": torch.tensor([3.0, -1.0])}, id="sinks"),
    ],
)
def test_deterministic_results_do_not_depend_on_chunks_and_others(dtype, options) -> None:
    """To the bit: a prompt among others, in chunks of any size, and token by token, as after a preemption."""
    case = Case([1, 70, 20], [100, 70, 50], num_heads=2, num_kv_heads=1, dtype=dtype)
    told = {"is_deterministic": True, "keys_per_split": 32} | options
    together, _ = case.run(**told)
    chunks = [only(case, 1, *cut).run(**told)[0] for cut in itertools.pairwise([0, 1, 17, 68, 69, 70])]
    assert torch.equal(torch.cat(chunks), together[1:71])
    decode, _ = only(case, 0, 99, 100).run(**told)
    assert torch.equal(decode, together[:1])


def test_a_decode_is_the_same_alone_and_among_others() -> None:
    """In any mode, to the bit, while no longer queries are among them."""
    case = Case([1] * 5, LENS, num_heads=3, num_kv_heads=1, dtype=torch.float16)
    together, _ = case.run()
    for i, seq_len in enumerate(LENS):
        alone, _ = only(case, i, seq_len - 1, seq_len).run()
        assert torch.equal(alone[0], together[i])


def test_splits_do_not_happen_where_no_sequence_can_be_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is merged."""
    monkeypatch.setattr(triton_attention, "_merge_kernel", None)
    Case([1, 5], [70, 33], num_heads=1, num_kv_heads=1).check(keys_per_split=256)


def test_wider_block_tables_take_the_same_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables widen as sequences grow, and a kernel that is compiled anew keeps all of them waiting."""
    told: list[dict[str, object]] = []
    kernel = triton_attention._attend_kernel

    def recorded(*args, **options):
        told.append(options)
        return kernel[(3,)](*args, **options)

    monkeypatch.setattr(triton_attention, "_attend_kernel", {(3,): recorded})
    for seq_len in (150, 180):
        Case([1], [seq_len], num_heads=1, num_kv_heads=1).check()
    assert told[0] == told[1]
    assert "table_stride" in kernel.kwargs["do_not_specialize"]


def test_the_default_split_is_the_plans() -> None:
    case = Case([1], [1500], num_heads=1, num_kv_heads=1, dtype=torch.float16)
    told = case.batch(keys_per_split=None)
    assert told.work[0, 7] == 3
    options = {"scale": 0.125}
    out = triton_attention.paged_attention(case.query, *case.caches, told, **options)
    expected = reference(case.query, *case.caches, told, **options)
    assert (out - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize(("shared_kib", "expected"), [(228, 3 * 100), (164, 2 * 100), (100, 100)])
def test_programs_of_a_gpu(monkeypatch: pytest.MonkeyPatch, shared_kib: int, expected: int) -> None:
    """All that have room, or one for each task where these are fewer."""
    properties = SimpleNamespace(multi_processor_count=100, shared_memory_per_multiprocessor=shared_kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device = torch.device("cuda", shared_kib % 100)
    assert triton_attention._num_programs(device, 3, num_tasks=10_000) == expected
    assert triton_attention._num_programs(device, 3, num_tasks=7) == 7


def test_variants_are_named_apart() -> None:
    names = [variant.name for variant in triton_attention.variants()]
    assert len(set(names)) == len(names)
