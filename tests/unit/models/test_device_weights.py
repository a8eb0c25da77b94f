"""Weights on a device hold the numbers of the native kernels' tiles, or those of their files."""

from pathlib import Path

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gguf  # noqa: E402
from torch import Tensor  # noqa: E402
from trioengine_kernels.native.tiles import GGML_TYPE_NAMES, TileKind, pack_float, pack_ggml  # noqa: E402
from trioengine_kernels.quantized_linear import QuantizedWeight, WeightKind, dequantize  # noqa: E402

from trioengine.checkpoint.gguf import GGMLType  # noqa: E402
from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.checkpoint.quantized import QuantizedMatrix, ScaledMatrix  # noqa: E402
from trioengine.config.engine import Quantization  # noqa: E402
from trioengine.models import device_weights  # noqa: E402
from trioengine.models.device_weights import DeviceWeightMaker  # noqa: E402
from trioengine.models.loader import load_model, open_checkpoint  # noqa: E402
from trioengine.models.source import MatrixPart, StoredMatrix  # noqa: E402
from trioengine.models.torch_ops import load_torch_model  # noqa: E402
from trioengine.testing.logits import torch_logits  # noqa: E402
from trioengine.testing.native import int4_units, native_library, tile_fields  # noqa: E402
from trioengine.testing.tiny_model import random_model, tiny_config, write_gguf  # noqa: E402

CPU = torch.device("cpu")
PLACES_OF_HALVES = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.Q3_K: (108,),
}
"""Of each type's blocks. All other bytes may be anything."""


def random_part(kind: GGMLType, rows: int, columns: int, seed: int = 0) -> StoredMatrix:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // kind.block_size, kind.block_bytes), np.uint8)
    for place in PLACES_OF_HALVES[kind]:
        halves = rng.uniform(-0.01, 0.01, (len(blocks), 1)).astype("<f2")
        blocks[:, place : place + 2] = halves.view(np.uint8)
    return StoredMatrix("x", kind, blocks.reshape(rows, -1), columns)


def float_part(values: np.ndarray, kind: GGMLType = GGMLType.F32) -> StoredMatrix:
    rows = gguf.quantize(values, gguf.GGMLQuantizationType(kind)).view(np.uint8)
    return StoredMatrix("x", kind, rows.reshape(len(values), -1), values.shape[1])


def made(
    *parts: MatrixPart, dtype: torch.dtype = torch.float32, quantization: Quantization | None = None
) -> Tensor | QuantizedWeight:
    return DeviceWeightMaker(CPU, dtype, quantization).matrix(parts)


def made_planes(*parts: MatrixPart, quantization: Quantization | None = None) -> QuantizedWeight:
    weight = made(*parts, quantization=quantization)
    assert isinstance(weight, QuantizedWeight)
    return weight


def codes_of(weight: QuantizedWeight) -> np.ndarray:
    """Whole numbers, [rows, columns], read as `QuantizedWeight.codes` tells."""
    if weight.kind is not WeightKind.INT4:
        return weight.codes.numpy().astype(int)
    groups = weight.codes.numpy().reshape(weight.num_rows, -1, 16)
    return np.concatenate((groups & 15, groups >> 4), axis=2).reshape(weight.num_rows, -1).astype(int)


def check_tiles(weight: QuantizedWeight, tiles) -> None:
    """The same codes, scales and minimums, but for the rounding of these two to a row's unit in tiles of 4 bits, and to
    halves in planes."""
    assert weight.kind.name == tiles.kind.name
    codes, scales, minimums = tile_fields(tiles)
    assert np.array_equal(codes_of(weight), codes)
    check_scales(weight, scales, minimums)


def check_scales(weight: QuantizedWeight, scales: np.ndarray, minimums: np.ndarray) -> None:
    """What `check_tiles` says of them."""
    if weight.kind is not WeightKind.INT4:
        assert np.array_equal(weight.scales.numpy(), scales)
        assert weight.minimums is None or np.array_equal(weight.minimums.numpy(), minimums)
        return
    assert weight.minimums is not None
    unit, half = int4_units(scales, minimums), 2.0**-11
    assert np.all(np.abs(weight.scales.numpy() - scales) <= 0.51 * unit + half * np.abs(scales))
    assert np.all(np.abs(weight.minimums.numpy() - minimums) <= 8.1 * unit + half * np.abs(minimums))


NATIVE_KINDS = [kind for kind in PLACES_OF_HALVES if kind.name in GGML_TYPE_NAMES]


@pytest.mark.parametrize("kind", NATIVE_KINDS, ids=lambda kind: kind.name)
def test_planes_hold_what_tiles_hold(kind: GGMLType) -> None:
    part = random_part(kind, 21, 768)
    tiles = pack_ggml(native_library(), kind.name, part.rows, 21, 768)
    check_tiles(made_planes(part), tiles)


@pytest.mark.parametrize("kind", PLACES_OF_HALVES, ids=lambda kind: kind.name)
def test_planes_stand_for_the_numbers_of_the_file(kind: GGMLType) -> None:
    """Bit by bit, but where scales are rounded to halves, or numbers to codes."""
    part = random_part(kind, 5, 512)
    weight = made_planes(part)
    error = np.abs(dequantize(weight).numpy() - part.floats())
    groups = np.arange(512) // 32
    scales = np.abs(weight.scales.numpy().astype(np.float32))[:, groups]
    match kind:
        case GGMLType.Q4_K | GGMLType.Q5_K:
            assert weight.minimums is not None
            minimums = np.abs(weight.minimums.numpy().astype(np.float32))[:, groups]
            assert np.all(error <= 2.0**-11 * (codes_of(weight) * scales + minimums) + 1e-7)
        case GGMLType.Q6_K | GGMLType.Q3_K:
            assert weight.kind is WeightKind.INT8
            # Half a step, and what the scale lost.
            assert np.all(error <= scales * (0.5 + 127 * 2.0**-11) + 1e-7)
        case _:
            assert np.all(error == 0)


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16, GGMLType.BF16], ids=lambda kind: kind.name)
def test_floats_are_rounded_as_for_tiles(quantization: Quantization, kind: GGMLType) -> None:
    values = np.random.default_rng(1).standard_normal((19, 96)).astype(np.float32)
    values[3] = 0
    values[4, 40], values[5, 70], values[6, 0] = np.nan, np.inf, -np.inf
    part = float_part(values, kind)
    tiles = pack_float(native_library(), part.floats(), TileKind[quantization.name])
    weight = made_planes(part, quantization=quantization)
    codes, scales, minimums = tile_fields(tiles)
    is_finite = np.isfinite(weight.scales.numpy())
    assert np.count_nonzero(~is_finite) == 3
    if quantization is Quantization.INT8:
        assert np.array_equal(np.isfinite(scales), is_finite)
    else:
        # There, what is not finite spoils its row.
        assert np.array_equal(np.isfinite(scales), np.broadcast_to(is_finite.all(axis=1, keepdims=True), scales.shape))
    rows = is_finite.all(axis=1)
    of_groups = is_finite[:, np.arange(96) // 32]
    differences = np.abs(codes_of(weight)[of_groups] - codes[of_groups])
    # The device's codes are those of scales that were rounded to halves.
    assert differences.max() <= (1 if quantization is Quantization.INT4 else 0)
    assert np.count_nonzero(differences) < 0.01 * differences.size
    finite = attrs.evolve(
        weight,
        scales=weight.scales[rows],
        minimums=None if weight.minimums is None else weight.minimums[rows],
    )
    check_scales(finite, scales[rows], minimums[rows])


def test_floats_become_float8_with_a_scale_for_each_row() -> None:
    values = np.random.default_rng(2).standard_normal((6, 96)).astype(np.float32) * 10.0 ** np.arange(-3, 3)[:, None]
    values = values.astype(np.float32)
    values[2] = 0
    weight = made_planes(float_part(values), quantization=Quantization.FP8)
    assert (weight.kind, weight.group_size, weight.scales.shape) == (WeightKind.FP8, 96, (6, 1))
    assert np.abs(weight.codes.float().numpy()).max(axis=1) == pytest.approx([448, 448, 0, 448, 448, 448])
    error = np.abs(dequantize(weight).numpy() - values)
    assert np.all(error <= np.maximum(np.abs(values) / 16, weight.scales.numpy() * 2.0**-10) * 1.001)
    values[1, 5] = np.nan
    spoiled = made_planes(float_part(values), quantization=Quantization.FP8)
    assert np.isnan(dequantize(spoiled).numpy()).any(axis=1).tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16, GGMLType.BF16], ids=lambda kind: kind.name)
def test_floats_are_rounded_to_the_number_type(kind: GGMLType, dtype: torch.dtype) -> None:
    """Also where their columns are no groups, and where they may not be quantized."""
    values = np.random.default_rng(3).standard_normal((7, 40)).astype(np.float32)
    part = float_part(values, kind)
    expected = torch.from_numpy(part.floats()).to(dtype)
    whole = made(part, dtype=dtype)
    assert isinstance(whole, Tensor)
    assert torch.equal(whole, expected)
    stacked = made(part, part, dtype=dtype, quantization=Quantization.INT8)
    assert isinstance(stacked, Tensor)
    assert torch.equal(stacked, torch.cat((expected, expected)))
    wide = float_part(values[:, :32].copy(), kind)
    kept = DeviceWeightMaker(CPU, dtype, Quantization.INT4).matrix([wide], min_bits=16)
    assert isinstance(kept, Tensor)
    assert torch.equal(kept, torch.from_numpy(wide.floats()).to(dtype))
    bytes_ = DeviceWeightMaker(CPU, dtype, Quantization.INT4).matrix([wide], min_bits=8)
    assert isinstance(bytes_, QuantizedWeight)
    assert bytes_.kind is WeightKind.INT8


def test_a_matrix_of_several_kinds_is_in_the_form_that_holds_all() -> None:
    """Q4_K_M files have queries and keys of 4, and values of 6 bits."""
    parts = [
        random_part(kind, 24, 256, seed) for seed, kind in enumerate((GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q5_1))
    ]
    weight = made_planes(*parts)
    assert weight.kind is WeightKind.INT8_AFFINE
    alone = [dequantize(made_planes(part)) for part in parts]
    assert torch.equal(dequantize(weight), torch.cat(alone))
    assert made_planes(parts[0], parts[0]).kind is WeightKind.INT4


def test_a_matrix_that_is_not_all_quantized_becomes_floats() -> None:
    quantized = random_part(GGMLType.Q8_0, 16, 64)
    plain = float_part(np.random.default_rng(4).standard_normal((8, 64)).astype(np.float32))
    weight = made(quantized, plain)
    assert isinstance(weight, Tensor)
    assert np.array_equal(weight.numpy(), np.concatenate((quantized.floats(), plain.floats())))
    assert made_planes(quantized, plain, quantization=Quantization.INT8).kind is WeightKind.INT8


@pytest.mark.parametrize("kind", [GGMLType.Q4_K, GGMLType.Q3_K], ids=lambda kind: kind.name)
def test_what_is_made_in_pieces_is_what_is_made_whole(monkeypatch: pytest.MonkeyPatch, kind: GGMLType) -> None:
    parts = [random_part(kind, 40, 256), random_part(GGMLType.Q6_K, 24, 256)]
    whole = made_planes(*parts)
    dense = made(*parts, float_part(np.ones((3, 256), np.float32)))
    monkeypatch.setattr(device_weights, "_PIECE_VALUES", 16 * 256)
    pieces = made_planes(*parts)
    assert torch.equal(pieces.codes, whole.codes)
    assert torch.equal(pieces.scales, whole.scales)
    assert isinstance(dense, Tensor)
    in_pieces = made(*parts, float_part(np.ones((3, 256), np.float32)))
    assert isinstance(in_pieces, Tensor)
    assert torch.equal(in_pieces, dense)


def packed_matrix(*, scale: float = 0.01, size: int = 32) -> QuantizedMatrix:
    codes = np.random.default_rng(5).integers(0, 16, (20, 128)).astype(np.uint8)
    return QuantizedMatrix(
        name="x",
        num_rows=20,
        num_columns=128,
        bits=4,
        num_groups=128 // size,
        column_groups=np.arange(128) // size,
        has_groups_in_order=True,
        read_codes=lambda rows: codes[rows],
        read_scales=lambda rows: np.full((20, 128 // size), scale, np.float32)[rows],
        read_zeros=lambda rows: np.full((20, 128 // size), 7, np.int32)[rows],
    )


def test_packed_numbers_keep_their_codes() -> None:
    part = packed_matrix(scale=0.25, size=64)
    weight = made_planes(part, quantization=Quantization.INT8)
    assert weight.kind is WeightKind.INT4
    assert np.array_equal(codes_of(weight), part.codes())
    assert np.array_equal(dequantize(weight).numpy(), part.floats())


def test_packed_numbers_that_planes_cannot_hold() -> None:
    """Scales that are no halves, and groups that are no runs of 32 columns."""
    part = packed_matrix(scale=300.0)
    floats = made(part)
    assert isinstance(floats, Tensor)
    assert np.array_equal(floats.numpy(), part.floats())
    part = packed_matrix(scale=0.01, size=16)
    rounded = made_planes(part)
    assert rounded.kind is WeightKind.INT8
    assert np.abs(dequantize(rounded).numpy() - part.floats()).max() <= 0.09 / 250


FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def scaled_matrix(*, rows: int, block: tuple[int, int], columns: int = 160, table: np.ndarray = FLOAT8) -> ScaledMatrix:
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 127, (rows, columns), np.uint8) | rng.integers(0, 2, (rows, columns), np.uint8) << 7
    scales = rng.uniform(0.5, 2, (-(-rows // block[0]), -(-columns // block[1]))).astype(np.float32)
    return ScaledMatrix("x", rows, columns, codes, table, scales, *block)


@pytest.mark.parametrize(("block", "group_size"), [((128, 64), 64), ((1, 160), 160), ((50, 160), 160), ((3, 128), 128)])
def test_float8_keeps_its_codes_and_scales(block: tuple[int, int], group_size: int) -> None:
    part = scaled_matrix(rows=50, block=block)
    for quantization in (None, Quantization.FP8):
        weight = made_planes(part, quantization=quantization)
        assert (weight.kind, weight.group_size) == (WeightKind.FP8, group_size)
        assert np.array_equal(weight.codes.view(torch.uint8).numpy(), part.bytes)
        assert np.array_equal(dequantize(weight).numpy(), part.floats())
    assert made_planes(part, quantization=Quantization.INT8).kind is WeightKind.INT8


def test_float8_that_planes_cannot_hold_becomes_floats() -> None:
    """Groups that are no runs of 32 columns, numbers of another kind, parts with groups of other sizes."""
    per_row = scaled_matrix(rows=16, block=(1, 160))
    for parts in (
        [scaled_matrix(rows=16, block=(1, 16))],
        [scaled_matrix(rows=16, block=(1, 160), table=2 * FLOAT8)],
        [per_row, scaled_matrix(rows=16, block=(16, 32))],
        [per_row, random_part(GGMLType.Q8_0, 4, 160)],
    ):
        weight = made(*parts)
        assert isinstance(weight, Tensor)
        assert np.array_equal(weight.numpy(), np.concatenate([part.floats() for part in parts]))
    assert made_planes(per_row, scaled_matrix(rows=32, block=(32, 160))).kind is WeightKind.FP8


def test_a_float8_that_is_no_number_spoils_its_own_group_alone() -> None:
    part = scaled_matrix(rows=4, block=(1, 64))
    part.bytes[1, 70], part.bytes[3, 159] = 0x7F, 0xFF
    weight = made_planes(part)
    assert np.argwhere(np.isnan(weight.scales.numpy())).tolist() == [[1, 1], [3, 2]]


def test_vectors_are_float32() -> None:
    values = np.arange(5, dtype=np.float32)
    vector = DeviceWeightMaker(CPU, torch.bfloat16).vector(values)
    assert vector.dtype is torch.float32
    assert vector.tolist() == values.tolist()


class DequantizedWeights(DeviceWeightMaker):
    """What the planes stand for, for `TorchOps`."""

    def matrix(self, parts, *, min_bits=4):
        weight = super().matrix(parts, min_bits=min_bits)
        return weight if isinstance(weight, Tensor) else dequantize(weight)


def test_a_model_computes_what_its_file_says(tmp_path: Path) -> None:
    """As Q4_K_M files are: some values and down projections have 6 bits."""
    config = attrs.evolve(
        tiny_config(), hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64
    )

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, int]:
        if any(part in name for part in ("attn_v", "ffn_down", "token_embd")):
            return gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), GGMLType.Q8_0
        return gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0), GGMLType.Q4_0

    write_gguf(tmp_path / "tiny.gguf", random_model(config), encode)
    location = ModelLocation(ModelKind.GGUF, tmp_path / "tiny.gguf", "tiny")
    quantized = load_model(open_checkpoint(location), DeviceWeightMaker(CPU, torch.float32))
    layer = quantized.decoder.weights.layers[0]
    assert [weight.kind for weight in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)] == [
        WeightKind.INT8_AFFINE,
        WeightKind.INT4,
        WeightKind.INT4,
        WeightKind.INT8,
    ]
    tokens = [(place * 29 + place * place * 5 + 3) % config.vocab_size for place in range(41)]
    found = torch_logits(load_model(open_checkpoint(location), DequantizedWeights(CPU, torch.float32)), tokens)
    expected = torch_logits(load_torch_model(open_checkpoint(location)), tokens)
    # The numbers are the same, and torch computes with them in the same order.
    assert np.array_equal(found, expected)
