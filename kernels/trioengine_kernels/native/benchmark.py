# pyright: basic
"""How fast the native operations are on this machine, beside what its memory gives.

Each operation runs in a program of its own, many times over, and the time of the same program without it is taken
off. The best of several runs counts: other processes only make it slower.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from ctypes import c_int64, c_uint64, c_void_p

import attrs
import numpy as np

from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.program import Buffer, KVCache, ProgramBuilder, StepArrays
from trioengine_kernels.native.tiles import TileKind, WeightTiles, pack_float

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
"""Shapes of SmolLM2-135M."""
WEIGHT_BYTES = 128 << 20
"""Weights that products go through in turn: more than any cache that one core has to itself."""
BANDWIDTH_BYTES = 256 << 20
_NUM_RUNS = 7
_EPSILON = 1e-5


@attrs.frozen
class Bandwidth:
    """What all threads together read and copy, bytes per second. A copied byte counts once."""

    read_bytes_per_s: float
    copy_bytes_per_s: float


@attrs.frozen
class OpRate:
    """The speed of an operation for one size."""

    name: str
    num_tokens: int
    seconds: float
    num_bytes: int
    """Weights, keys and values read; 0 where the operation has none."""
    num_flops: int
    """Multiplications and additions; 0 where they do not say much."""

    @property
    def bytes_per_s(self) -> float:
        """Of weights, keys and values."""
        return self.num_bytes / self.seconds

    @property
    def flops_per_s(self) -> float:
        """Of multiplications and additions."""
        return self.num_flops / self.seconds


def measure_bandwidth(library: Library, pool: ThreadPool) -> Bandwidth:
    """Measure what the pool's threads get from memory. Takes half a second and 512 MB."""
    transfer = library.function("te_transfer", c_uint64, c_void_p, c_void_p, c_void_p, c_int64)
    size = BANDWIDTH_BYTES
    source, destination = library.allocate(size)[:size], library.allocate(size)[:size]
    source[:] = destination[:] = 1

    def best(to: int | None) -> float:
        return size / _best_s(lambda: transfer(pool.handle, to, source.ctypes.data, size))

    return Bandwidth(best(None), best(destination.ctypes.data))


def measure_ops(library: Library, pool: ThreadPool) -> Iterator[OpRate]:
    """Measure each operation for one token, some and many."""
    for kind in (TileKind.INT4, TileKind.INT8, TileKind.F16, TileKind.F32):
        matrices = _matrices(library, pool, kind)
        for num_tokens in (1, 8, 32, 256):
            yield _linear(library, pool, matrices, num_tokens)
    for num_sequences, num_queries, num_keys in ((1, 1, 128), (1, 1, 4096), (32, 1, 512), (1, 512, 512)):
        yield _attention(library, pool, num_sequences, num_queries, num_keys)
    weight = np.ones(HIDDEN_SIZE, np.float32)
    simple: list[tuple[str, int, Callable[[ProgramBuilder, Buffer], object]]] = [
        ("rms_norm", HIDDEN_SIZE, lambda builder, x: builder.rms_norm(x, weight, _EPSILON)),
        ("silu_mul", 2 * INTERMEDIATE_SIZE, lambda builder, x: builder.silu_mul(x)),
        ("rope_write_kv", (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, _rope),
    ]
    for name, width, record in simple:
        for num_tokens in (1, 256):
            seconds = _Harness(library, pool, width, 1, num_tokens, num_tokens).seconds_of(record, 20)
            yield OpRate(name, num_tokens, seconds, 0, 0)


def _rope(builder: ProgramBuilder, x: Buffer) -> None:
    builder.rope_write_kv(x, 0, num_heads=NUM_HEADS, inverse_frequencies=np.ones(HEAD_DIM // 2, np.float32))


def _matrices(library: Library, pool: ThreadPool, kind: TileKind) -> list[WeightTiles]:
    weights = np.random.default_rng(0).standard_normal((2 * INTERMEDIATE_SIZE, HIDDEN_SIZE), dtype=np.float32)
    matrices = [pack_float(library, weights, kind, pool=pool)]
    while sum(tiles.data.nbytes for tiles in matrices) < WEIGHT_BYTES:
        copy = library.allocate(matrices[0].data.nbytes)[: matrices[0].data.nbytes]
        copy[:] = matrices[0].data
        matrices.append(attrs.evolve(matrices[0], data=copy))
    return matrices


def _linear(library: Library, pool: ThreadPool, matrices: list[WeightTiles], num_tokens: int) -> OpRate:
    count = len(matrices) if num_tokens <= 32 else 4
    in_turn = itertools.cycle(matrices)
    seconds = _Harness(library, pool, HIDDEN_SIZE, 1, num_tokens, num_tokens).seconds_of(
        lambda builder, x: builder.linear(x, next(in_turn)), count
    )
    tiles = matrices[0]
    num_flops = 2 * num_tokens * tiles.rows * tiles.columns
    return OpRate(f"linear {tiles.kind.name.lower()}", num_tokens, seconds, tiles.data.nbytes, num_flops)


def _attention(library: Library, pool: ThreadPool, num_sequences: int, num_queries: int, num_keys: int) -> OpRate:
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    seconds = _Harness(library, pool, width, num_sequences, num_queries, num_keys).seconds_of(
        lambda builder, x: builder.attention(x, 0, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5), 10
    )
    num_pairs = num_sequences * sum(range(num_keys - num_queries + 1, num_keys + 1))
    return OpRate(
        f"attention over {num_keys}",
        num_sequences * num_queries,
        seconds,
        num_sequences * num_keys * 2 * NUM_KV_HEADS * HEAD_DIM * 2,
        4 * num_pairs * NUM_HEADS * HEAD_DIM,
    )


class _Harness:
    """Programs over random rows of one width: the last `num_queries` of `num_keys` tokens of some sequences."""

    def __init__(
        self, library: Library, pool: ThreadPool, width: int, num_sequences: int, num_queries: int, num_keys: int
    ) -> None:
        self._library, self._pool = library, pool
        self._num_tokens = num_tokens = num_sequences * num_queries
        values = np.random.default_rng(0).standard_normal((num_tokens, width), dtype=np.float32)
        self._rows = pack_float(library, values, TileKind.F32, pool=pool)
        num_blocks = -(-num_keys // 16)
        self._cache = KVCache(
            num_blocks=num_sequences * num_blocks,
            block_size=16,
            num_layers=1,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
        )
        table = np.arange(num_sequences * num_blocks, dtype=np.int32).reshape(num_sequences, -1)
        positions = np.tile(np.arange(num_keys - num_queries, num_keys, dtype=np.int32), num_sequences)
        owners = np.arange(num_sequences).repeat(num_queries)
        self._step = StepArrays(
            token_ids=np.arange(num_tokens, dtype=np.int32),
            positions=positions,
            slots=(table[owners, positions // 16] * 16 + positions % 16).astype(np.int32)[None],
            query_start=np.arange(0, num_tokens + 1, num_queries, dtype=np.int32),
            seq_lens=np.full(num_sequences, num_keys, np.int32),
            block_table=table[None],
            logit_rows=np.zeros(1, np.int32),
        )

    def seconds_of(self, record: Callable[[ProgramBuilder, Buffer], object], count: int) -> float:
        """The time that one of `count` further operations adds to a program that has one."""
        return max(self._best_s(record, count + 1) - self._best_s(record, 1), 1e-9) / count

    def _best_s(self, record: Callable[[ProgramBuilder, Buffer], object], count: int) -> float:
        builder = ProgramBuilder(
            self._library,
            max_tokens=self._num_tokens,
            max_logit_rows=1,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=self._num_tokens,
        )
        x = builder.embedding(self._rows)
        for _ in range(count):
            record(builder, x)
        program = builder.build(builder.select_rows(x))
        return _best_s(lambda: program.run(self._step, [self._cache], self._pool))


def _best_s(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_NUM_RUNS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
