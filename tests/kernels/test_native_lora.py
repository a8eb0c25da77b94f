"""Adapters of products: the reference and the native operation against numpy in float64."""

import numpy as np
import pytest
from trioengine_kernels.native.lora import LoraTable
from trioengine_kernels.native.program import KVCache, ProgramBuilder, StepArrays
from trioengine_kernels.native.tiles import TileKind, pack_float


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def matrices(ranks, columns, parts, seed=0):
    """By slot, for each part A and B."""
    return {
        slot: [
            (random(rank, columns, seed=seed + 10 * slot + i), random(rows, rank, seed=seed + 10 * slot + i + 5))
            for i, (_, rows) in enumerate(parts)
        ]
        for slot, rank in ranks.items()
    }


def expected(y, x, slots, adapters, parts):
    y, x = y.astype(np.float64), x.astype(np.float64)
    for row, slot in enumerate(slots):
        for (first, rows), (a, b) in zip(parts, adapters.get(slot, ()), strict=False):
            y[row, first : first + rows] += b.astype(np.float64) @ (a.astype(np.float64) @ x[row])
    return y


class Product:
    """A native program: `x @ weightᵀ`, with adapters."""

    def __init__(self, library, pool, weight, max_rows, adapters, parts, kind=TileKind.F32):
        self.pool = pool
        self.library = library
        self.table = LoraTable(max(adapters), weight.shape[1], parts)
        for slot, pairs in adapters.items():
            self.table.set(slot, pairs)
        self.weight = pack_float(library, weight, kind)
        self.max_rows = max_rows

    def run(self, x, slots, logit_rows=None):
        """Slots None are none; with logit rows the product is computed for these."""
        builder = ProgramBuilder(
            self.library, max_tokens=self.max_rows, max_logit_rows=self.max_rows, num_kv_heads=1, head_dim=16,
            vocab_size=len(x),
        )  # fmt: skip
        inputs = builder.embedding(pack_float(self.library, x, TileKind.F32))
        if logit_rows is not None:
            inputs = builder.select_rows(inputs)
        out = builder.linear(inputs, self.weight)
        builder.lora(inputs, out, self.table)
        program = builder.build(out if logit_rows is not None else builder.select_rows(out))
        program.memory[:] = 0xFF
        tokens = np.arange(len(x), dtype=np.int32)
        step = StepArrays(
            tokens, tokens, tokens[None], np.array([0, len(x)], np.int32), np.array([len(x)], np.int32),
            np.arange(-(-len(x) // 16), dtype=np.int32)[None, None],
            tokens if logit_rows is None else np.array(logit_rows, np.int32),
            lora_slots=None if slots is None else np.array(slots, np.int32),
        )  # fmt: skip
        cache = KVCache(num_blocks=-(-len(x) // 16), block_size=16, num_layers=1, num_kv_heads=1, head_dim=16)
        return program.run(step, [cache], self.pool).copy()


@pytest.mark.parametrize(
    ("columns", "parts"), [(48, [(0, 48), (48, 16), (64, 16)]), (7, [(0, 5)]), (576, [(3, 100)]), (1, [(0, 1)])]
)
def test_the_native_operation_equals_the_formula(library, pool, isa, columns, parts):
    width = sum(parts[-1])
    weight, x = random(width, columns, seed=1), random(21, columns)
    adapters = matrices({1: 1, 2: 8, 3: 16, 5: 19, 6: 64}, columns, parts)
    slots = [row % 7 for row in range(len(x))]
    product = Product(library, pool, weight, len(x), adapters, parts)
    plain = product.run(x, None)
    found = product.run(x, slots)
    wanted = expected(plain, x, slots, adapters, parts)
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()
    without = np.isin(slots, [0, 4])
    assert (found[without] == plain[without]).all()
    assert np.abs(found[~without] - plain[~without]).max() > 0.1


def test_a_row_is_the_same_bits_in_any_step(library, pool, isa):
    parts = [(0, 40), (40, 13)]
    weight, x = random(53, 100, seed=1), random(40, 100)
    adapters = matrices({1: 8, 2: 16, 3: 20}, 100, parts)
    slots = np.arange(40) * 7 % 4
    product = Product(library, pool, weight, len(x), adapters, parts)
    together = product.run(x, slots)
    for row in (0, 1, 2, 3, 17):
        assert (product.run(x[row : row + 1], slots[row : row + 1]) == together[row]).all()
    order = np.arange(40)[::-1]
    assert (product.run(x[order], slots[order]) == together[order]).all()


def test_rows_that_are_selected_keep_their_tokens_slots(library, pool):
    parts = [(0, 32)]
    weight, x = random(32, 64, seed=1), random(9, 64)
    adapters = matrices({1: 4, 2: 5}, 64, parts)
    product = Product(library, pool, weight, len(x), adapters, parts)
    slots = [0, 1, 2] * 3
    assert (product.run(x, slots, logit_rows=[8, 1, 3]) == product.run(x, slots)[[8, 1, 3]]).all()


def test_products_with_quantized_weights_read_the_same_floats(library, pool):
    """What an adapter reads is not rounded to 8 bits."""
    parts = [(0, 64)]
    weight, x = random(64, 96, seed=1), random(5, 96)
    adapters = matrices({1: 16}, 96, parts)
    product = Product(library, pool, weight, len(x), adapters, parts, TileKind.INT8)
    plain, found = product.run(x, None), product.run(x, [1] * 5)
    wanted = expected(plain, x, [1] * 5, adapters, parts)
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


def test_another_adapter_takes_a_slot(library, pool):
    parts = [(0, 8), (8, 8)]
    weight, x = random(16, 32, seed=1), random(3, 32)
    product = Product(library, pool, weight, 3, matrices({1: 4}, 32, parts), parts)
    plain = product.run(x, None)
    other = matrices({1: 3}, 32, parts, seed=99)
    product.table.set(1, [None, other[1][1]])
    found = product.run(x, [1, 1, 0])
    assert (found[:2, :8] == plain[:2, :8]).all()
    assert np.allclose(found[:, 8:], expected(plain[:, 8:], x, [1, 1, 0], {1: other[1][1:]}, [(0, 8)]), rtol=1e-5)


def test_what_does_not_fit_is_refused(library, pool):
    parts = [(0, 16)]
    table = LoraTable(2, 32, parts)
    pair = (random(4, 32), random(16, 4))
    for slot, pairs in ((0, [pair]), (3, [pair]), (1, [pair, pair]), (1, [(pair[0], pair[1].T)])):
        with pytest.raises(ValueError, match=r"slot|fit"):
            table.set(slot, pairs)
    product = Product(library, pool, random(16, 32), 3, {1: [pair], 2: [pair]}, parts)
    for slots in ([0, 3, 0], [0, -1, 0], [0, 0]):
        with pytest.raises(ValueError, match=r"out of range|Each token"):
            product.run(random(3, 32), slots)


def test_the_reference_equals_the_formula():
    torch = pytest.importorskip("torch")
    from trioengine_kernels.lora import lora

    parts = [(0, 20), (20, 12)]
    x, y = random(11, 24), random(11, 32, seed=3)
    adapters = matrices({1: 2, 3: 16}, 24, parts)
    slots = [0, 1, 2, 3, 3, 1, 0, 0, 1, 2, 3]
    tensors = {
        slot: [
            (first, torch.from_numpy(a), torch.from_numpy(b)) for (first, _), (a, b) in zip(parts, pairs, strict=True)
        ]
        for slot, pairs in adapters.items()
    }
    before = torch.from_numpy(y.copy())
    found = lora(before, torch.from_numpy(x), torch.tensor(slots), tensors).numpy()
    assert (before.numpy() == y).all()
    assert np.allclose(found, expected(y, x, slots, adapters, parts), rtol=1e-5, atol=1e-5)
