"""Products by Triton's kernels: as the references', and bitwise the same for a row in any batch."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402
from trioengine_kernels.linear import reference as linear_reference  # noqa: E402
from trioengine_kernels.linear import triton as linear_triton  # noqa: E402
from trioengine_kernels.quantized_linear import QuantizedWeight, WeightKind  # noqa: E402
from trioengine_kernels.quantized_linear import reference as quantized_reference  # noqa: E402
from trioengine_kernels.quantized_linear import triton as quantized_triton  # noqa: E402

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is NaN."""
    empty = torch.empty

    def poisoned(*args, **options) -> Tensor:
        made = empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def quantized_weight(kind: WeightKind, rows: int, columns: int, group_size: int = 32) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(rows + columns)
    num_groups = -(-columns // group_size)
    scales = torch.rand(rows, num_groups, generator=generator) / 64 + 1 / 64
    minimums = torch.randn(rows, num_groups, generator=generator).half()
    match kind:
        case WeightKind.INT4:
            codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        case WeightKind.FP8:
            # All codes but NaN's, subnormal ones too.
            codes = torch.randint(0, 127, (rows, columns), generator=generator, dtype=torch.uint8)
            codes |= torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.uint8) << 7
            codes = codes.view(torch.float8_e4m3fn)
        case _:
            codes = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
    return QuantizedWeight(
        kind=kind,
        codes=codes,
        scales=scales if kind is WeightKind.FP8 else scales.half(),
        minimums=minimums if kind in (WeightKind.INT4, WeightKind.INT8_AFFINE) else None,
        num_rows=rows,
        num_columns=columns,
        group_size=group_size,
    )


def check_close(out: Tensor, expected: Tensor) -> None:
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    out, wanted = out.double(), expected.double()
    assert float((out - wanted).norm() / wanted.norm()) < TOLERANCES[expected.dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(1, 70, 96), (16, 64, 80), (17, 130, 64), (65, 3, 200), (130, 131, 96)]
)
def test_linear_is_the_references(dtype: torch.dtype, tokens: int, rows: int, columns: int) -> None:
    x, weight = numbers(tokens, columns, dtype=dtype), numbers(rows, columns, dtype=dtype)
    for bias in (None, numbers(rows)):
        check_close(linear_triton.linear(x, weight, bias), linear_reference.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", WeightKind, ids=lambda kind: kind.value)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 70, 96), (17, 3, 576), (130, 131, 64)])
def test_quantized_linear_is_the_references(
    dtype: torch.dtype, kind: WeightKind, tokens: int, rows: int, columns: int
) -> None:
    x, weight = numbers(tokens, columns, dtype=dtype), quantized_weight(kind, rows, columns)
    for bias in (None, numbers(rows)):
        expected = quantized_reference.quantized_linear(x, weight, bias)
        check_close(quantized_triton.quantized_linear(x, weight, bias), expected)


@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 256, 576])
def test_float8_has_scales_for_any_runs_of_columns(group_size: int) -> None:
    x, weight = numbers(3, 576), quantized_weight(WeightKind.FP8, 34, 576, group_size)
    expected = quantized_reference.quantized_linear(x, weight)
    check_close(quantized_triton.quantized_linear(x, weight), expected)


def test_all_float8_codes_stand_for_their_numbers() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0
    weight = QuantizedWeight(
        kind=WeightKind.FP8,
        codes=codes.view(torch.float8_e4m3fn)[:, None].expand(256, 32).contiguous(),
        scales=torch.ones(256, 1),
        minimums=None,
        num_rows=256,
        num_columns=32,
        group_size=32,
    )
    x = torch.zeros(1, 32)
    x[0, 5] = 1
    out = quantized_triton.quantized_linear(x, weight)
    assert torch.equal(out[0], codes.view(torch.float8_e4m3fn).float())


def test_no_tokens_have_no_products() -> None:
    assert linear_triton.linear(numbers(0, 64), numbers(8, 64)).shape == (0, 8)
    weight = quantized_weight(WeightKind.INT4, 8, 64)
    assert quantized_triton.quantized_linear(numbers(0, 64), weight).shape == (0, 8)


def test_long_rows_are_cut_into_runs() -> None:
    """By the matrix's shape alone. Each has columns, and not few."""
    for num_rows, num_columns in [(8, 64), (64, 1024), (64, 1600), (4096, 4096), (4096, 14336), (100, 100_000)]:
        runs = linear_triton.Runs.of(num_rows, num_columns, 64, 64)
        assert runs.count == 1 or runs.blocks_per_run * 64 >= 512
        assert runs.count * runs.blocks_per_run >= runs.num_blocks > (runs.count - 1) * runs.blocks_per_run
    assert linear_triton.Runs.of(64, 1024, 64, 64).count == 2
    assert linear_triton.Runs.of(28672, 4096, 64, 64).count == 1


def test_runs_have_programs_of_their_own_where_programs_are_few() -> None:
    tile = linear_triton.Tile(max_tokens=64, num_rows=64, num_tokens=64, num_warps=4, num_stages=3)
    runs = linear_triton.Runs.of(4096, 4096, 64, 64)
    assert runs.count == 4
    sums = linear_triton.run_sums(torch.empty(200, 4096, device="meta"), tile, runs)
    assert sums is None
    out = torch.empty(64, 4096)
    sums = linear_triton.run_sums(out, tile, runs)
    assert sums is not None
    assert sums.shape == (4, 64, 4096)
    assert linear_triton.product_grid(out, tile, runs, sums) == (64, 4)
    assert linear_triton.product_grid(out, tile, runs, None) == (64, 1)


Product = Callable[[Tensor], Tensor]


def dense_product(module, columns: int) -> Product:
    weight, bias = numbers(34, columns), numbers(34)
    return lambda x: module.linear(x, weight, bias)


def quantized_product(kind: WeightKind) -> Callable[..., Product]:
    def product(module, columns: int) -> Product:
        weight, bias = quantized_weight(kind, 34, columns, 128 if kind is WeightKind.FP8 else 32), numbers(34)
        return lambda x: module.quantized_linear(x, weight, bias)

    return product


PRODUCTS = {"dense": (linear_triton, 64, dense_product)} | {
    kind.value: (quantized_triton, 128, quantized_product(kind)) for kind in WeightKind
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_is_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of each block of columns one number is not 0, so that the order of blocks is all that matters: within a block,
    on a CPU, it is that of numpy."""
    module, block, make = PRODUCTS[name]
    columns = 1056
    monkeypatch.setattr(linear_triton, "_MIN_RUN_COLUMNS", 256)
    assert linear_triton.Runs.of(34, columns, block, 64).count > 2
    product = make(module, columns)
    x = torch.zeros(70, columns)
    x[:, ::block] = numbers(70, columns)[:, ::block]
    batches = [product(x[:1]), product(x[:20])[:1], product(x)[:1]]
    # Large batches do all runs in one program.
    monkeypatch.setattr(module, "run_sums", lambda out, tile, runs: None)
    batches += [product(x[:1]), product(x)[:1]]
    for each in batches[1:]:
        assert torch.equal(each, batches[0])


@pytest.mark.parametrize("name", PRODUCTS)
def test_runs_are_added_whoever_computes_them(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, block, make = PRODUCTS[name]
    columns = 17 * 64 if block == 64 else 9 * 128  # Not as many blocks in each run.
    reference = linear_reference if name == "dense" else quantized_reference
    x = numbers(20, columns)
    expected = make(reference, columns)(x)
    check_close(make(module, columns)(x), expected)
    monkeypatch.setattr(module, "run_sums", lambda out, tile, runs: None)
    check_close(make(module, columns)(x), expected)
