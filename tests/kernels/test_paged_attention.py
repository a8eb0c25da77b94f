"""The specification of paged attention against the textbook formula in float64."""

import math

import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.paged_attention import paged_attention, plan_attention  # noqa: E402
from trioengine_kernels.paged_attention import reference as paged_attention_reference  # noqa: E402

BLOCK_SIZE = 16
LENS = [1, 15, 16, 17, 200]


class Case:
    """Sequences with random keys in shuffled blocks; every slot that holds no token is NaN."""

    def __init__(self, query_lens, seq_lens, num_heads=6, num_kv_heads=2, head_dim=64, seed=0):
        torch.manual_seed(seed)
        self.query_lens, self.seq_lens = query_lens, seq_lens
        blocks_per_seq = [math.ceil(n / BLOCK_SIZE) for n in seq_lens]
        num_blocks = sum(blocks_per_seq) + 5
        order = torch.randperm(num_blocks).tolist()
        shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
        self.key_cache, self.value_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.block_table = torch.full((len(seq_lens), max(blocks_per_seq)), order[-1], dtype=torch.int32)
        self.keys, self.values = [], []
        for i, seq_len in enumerate(seq_lens):
            blocks = [order.pop(0) for _ in range(blocks_per_seq[i])]
            self.block_table[i, : len(blocks)] = torch.tensor(blocks)
            self.keys.append(torch.randn(seq_len, num_kv_heads, head_dim))
            self.values.append(torch.randn(seq_len, num_kv_heads, head_dim))
            for place in range(seq_len):
                where = blocks[place // BLOCK_SIZE], place % BLOCK_SIZE
                self.key_cache[where] = self.keys[i][place]
                self.value_cache[where] = self.values[i][place]
        self.query = torch.randn(sum(query_lens), num_heads, head_dim)
        self.query_start = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.scale = head_dim**-0.5

    def run(self, window=None, soft_cap=None, sinks=None):
        plan = plan_attention(
            self.block_table,
            self.query_start,
            torch.tensor(self.seq_lens, dtype=torch.int32),
            block_size=BLOCK_SIZE,
            window=window,
        )
        return paged_attention(
            self.query, self.key_cache, self.value_cache, plan, scale=self.scale, soft_cap=soft_cap, sinks=sinks
        )

    def expected(self, window=None, soft_cap=None, sinks=None):
        group = self.query.shape[1] // self.key_cache.shape[2]
        rows = []
        for i, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            keys = self.keys[i].double().repeat_interleave(group, dim=1)
            values = self.values[i].double().repeat_interleave(group, dim=1)
            for j in range(query_len):
                place = seq_len - query_len + j
                first = 0 if window is None else max(0, place - window + 1)
                query = self.query[self.query_start[i] + j].double()
                scores = (keys[first : place + 1] * query).sum(-1) * self.scale
                if soft_cap is not None:
                    scores = torch.tanh(scores / soft_cap) * soft_cap
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double().unsqueeze(0)])
                weights = scores.softmax(0)[: place + 1 - first]
                rows.append((weights.unsqueeze(-1) * values[first : place + 1]).sum(0))
        return torch.stack(rows)


def relative_error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("sinks", [None, [-1.0, 0.5, 3.0, 9.0, 0.0, 1.0]], ids=["", "sinks"])
@pytest.mark.parametrize(
    "query_lens",
    [
        pytest.param(LENS, id="whole prompts"),
        pytest.param([1] * 5, id="decodes"),
        pytest.param([1, 7, 16, 1, 33], id="chunks and decodes"),
    ],
)
def test_equals_the_formula(query_lens, window, soft_cap, sinks) -> None:
    case = Case(query_lens, LENS)
    sinks = None if sinks is None else torch.tensor(sinks)
    assert relative_error(case.run(window, soft_cap, sinks), case.expected(window, soft_cap, sinks)) < 1e-5


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("num_heads", [3, 9])
def test_head_sizes_and_groups(head_dim: int, num_heads: int) -> None:
    case = Case([3, 1, 1], [17, 200, 15], num_heads=num_heads, num_kv_heads=3, head_dim=head_dim)
    assert relative_error(case.run(), case.expected()) < 1e-5


def test_a_decode_is_the_same_alone_and_among_others() -> None:
    """Rounding aside: nothing of the others' keys, lengths or padding reaches a sequence."""
    case = Case([1] * 5, LENS)
    together = case.run()
    for i in range(5):
        alone = Case([1] * 5, LENS)
        alone.query, alone.block_table = alone.query[i : i + 1], alone.block_table[i : i + 1]
        alone.query_start, alone.seq_lens = torch.tensor([0, 1]).int(), [LENS[i]]
        assert relative_error(alone.run()[0], together[i].double()) < 1e-6


def test_many_long_decodes_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered at once stays under the limit, however many sequences there are."""
    monkeypatch.setattr(paged_attention_reference, "MAX_GROUP_TOKENS", 512)
    case = Case([1] * 7, [200, 190, 180, 200, 17, 16, 100])
    plan = plan_attention(
        case.block_table, case.query_start, torch.tensor(case.seq_lens, dtype=torch.int32), block_size=BLOCK_SIZE
    )
    assert all(len(group.block_ids) * BLOCK_SIZE <= 512 for group in plan.decodes)
    assert sum(len(group.rows) for group in plan.decodes) == 7
    assert relative_error(case.run(), case.expected()) < 1e-5


@pytest.mark.parametrize("window", [1, 16, 17, 40])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [5, 1, 30]], ids=["decodes", "chunks and a decode"])
def test_blocks_behind_the_window_are_not_there(query_lens, window: int) -> None:
    """Not even their ids."""
    case = Case(query_lens, [200, 77, 100])
    expected = case.expected(window)
    for i, (query_len, seq_len) in enumerate(zip(query_lens, case.seq_lens, strict=True)):
        for column in range(max(0, seq_len - query_len - window + 1) // BLOCK_SIZE):
            case.key_cache[case.block_table[i, column]] = case.value_cache[case.block_table[i, column]] = torch.nan
            case.block_table[i, column] = -1
    assert relative_error(case.run(window), expected) < 1e-5
