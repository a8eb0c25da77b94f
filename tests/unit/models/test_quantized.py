"""Folders whose weights are packed: the numbers that were packed, on both backends, from every format."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402
from trioengine_kernels.native.tiles import TileKind  # noqa: E402
from trioengine_kernels.quantized_linear import WeightKind, dequantize  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.checkpoint.quantized import QuantizedMatrix, ScaledMatrix  # noqa: E402
from trioengine.config.engine import Quantization  # noqa: E402
from trioengine.models.decoder import DecoderWeights  # noqa: E402
from trioengine.models.device_weights import DeviceWeightMaker  # noqa: E402
from trioengine.models.loader import load_model, open_checkpoint  # noqa: E402
from trioengine.models.native_ops import NativeModel, NativeWeights, load_native_model  # noqa: E402
from trioengine.models.torch_ops import TorchModel, TorchOps, load_torch_model  # noqa: E402
from trioengine.testing import packed_weights  # noqa: E402
from trioengine.testing.logits import native_logits, torch_logits  # noqa: E402
from trioengine.testing.native import native_library, tile_values  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, random_model, tiny_config, write_folder  # noqa: E402

WIDE = attrs.evolve(
    tiny_config(), hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, num_layers=2
)
TOKENS = [(place * 29 + place * place * 5 + 3) % WIDE.vocab_size for place in range(33)]


class QuantizedOps(TorchOps):
    """Activations are rounded to 8 bits, 32 with one scale, as for products with quantized weights."""

    def linear(self, x, weight, bias=None):
        groups = x.unflatten(1, (-1, 32))
        scale = groups.abs().amax(dim=-1, keepdim=True) / 127
        return super().linear(((groups / scale).round() * scale).flatten(1), weight, bias)


@attrs.frozen
class Packed:
    """A matrix as a module's tensors, and the numbers that those stand for."""

    tensors: Mapping[str, Any]
    values: np.ndarray


Pack = Callable[[np.ndarray], Packed]


@attrs.frozen
class Format:
    config: Mapping[str, Any]
    pack: Pack
    tile_kind: TileKind
    error: float = 2.0**-11
    """Of native weights: of the largest number of a row."""
    logits_error: float = 0.03


def quantized(
    write: Callable[..., Mapping[str, Any]],
    values: np.ndarray,
    *,
    bits: int,
    group_size: int | None,
    is_symmetric: bool = False,
    has_sorted_columns: bool = False,
    scale_type: str = "<f2",
    **options: Any,
) -> Packed:
    """Rounds to the nearest code; zero points are those that the smallest and the largest number of a group ask for."""
    columns = values.shape[1]
    size = group_size or columns
    groups = np.arange(columns) // size
    if has_sorted_columns:
        groups = np.random.default_rng(columns).permutation(groups)
        options["column_groups"] = groups
    num_groups, top, middle = columns // size, (1 << bits) - 1, 1 << (bits - 1)
    by_group = np.stack([values[:, groups == group] for group in range(num_groups)], axis=1)
    low, high = np.minimum(by_group.min(axis=2), 0), np.maximum(by_group.max(axis=2), 0)
    scales = np.abs(by_group).max(axis=2) / (middle - 1) if is_symmetric else (high - low) / top
    if scale_type == "bf16":
        scales = torch.from_numpy(scales).bfloat16()
        exact = scales.float().numpy()
    else:
        scales = scales.astype(scale_type)
        exact = scales.astype(np.float32)
    # Version 1 of GPTQ cannot hold a zero point of 0.
    zeros = np.full(low.shape, middle) if is_symmetric else np.clip(np.rint(-low / exact), 1, top).astype(int)
    codes = np.clip(np.rint(values / exact[:, groups]) + zeros[:, groups], 0, top).astype(int)
    written = None if is_symmetric and write in COMPRESSED else zeros
    return Packed(write(codes, scales, written, **options), exact[:, groups] * (codes - zeros[:, groups]))


COMPRESSED = (packed_weights.compressed_bytes, packed_weights.compressed_packed)


def fp8(values: np.ndarray, *, rows: int | None, columns: int | None, scale_name: str) -> Packed:
    """Blocks of so many rows and columns have one scale; None is all."""
    height, width = rows or values.shape[0], columns or values.shape[1]
    row_blocks, column_blocks = np.arange(values.shape[0]) // height, np.arange(values.shape[1]) // width
    scales = np.zeros((row_blocks[-1] + 1, column_blocks[-1] + 1), np.float32)
    np.maximum.at(scales, (row_blocks[:, None], column_blocks), np.abs(values) / 448)
    spread = scales[row_blocks[:, None], column_blocks]
    weight = torch.from_numpy(values / spread).to(torch.float8_e4m3fn)
    written = scales.reshape(()) if scales.size == 1 else scales
    return Packed({"weight": weight, scale_name: written}, weight.float().numpy() * spread)


def gptq(*, bits: int, group_size: int | None, version: int = 1, is_symmetric: bool = True, **options: Any) -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size or -1}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    write = functools.partial(packed_weights.gptq, bits=bits, version=version)
    pack = functools.partial(quantized, write, bits=bits, group_size=group_size, is_symmetric=is_symmetric, **options)
    kind = TileKind.INT4 if bits == 4 else TileKind.INT8 if is_symmetric else TileKind.INT8_AFFINE
    if options.get("has_sorted_columns"):
        return Format(config | {"desc_act": True}, pack, TileKind.INT8, error=1 / 250, logits_error=0.06)
    return Format(config, pack, kind)


def compressed(layout: str, kind: str, tile_kind: TileKind, pack: Pack, bits: int = 8, **options: Any) -> Format:
    weights = {"num_bits": bits, "type": kind}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }
    return Format(config, pack, tile_kind, **options)


def compressed_packed(bits: int, group_size: int | None, *, is_symmetric: bool, **options: Any) -> Format:
    def pack(values: np.ndarray) -> Packed:
        def write(codes, scales, zeros, **more):
            zeros = None if is_symmetric else zeros
            return packed_weights.compressed_packed(codes, scales, zeros, bits=bits, **more)

        return quantized(write, values, bits=bits, group_size=group_size, is_symmetric=is_symmetric, **options)

    kind = TileKind.INT4 if bits == 4 else TileKind.INT8 if is_symmetric else TileKind.INT8_AFFINE
    if options.get("has_sorted_columns"):
        return compressed("pack-quantized", "int", TileKind.INT8, pack, bits, error=1 / 250, logits_error=0.06)
    return compressed("pack-quantized", "int", kind, pack, bits)


def compressed_bytes(layout: str, group_size: int | None, *, is_symmetric: bool) -> Format:
    pack = functools.partial(
        quantized, packed_weights.compressed_bytes, bits=8, group_size=group_size, is_symmetric=is_symmetric
    )
    return compressed(layout, "int", TileKind.INT8 if is_symmetric else TileKind.INT8_AFFINE, pack)


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
FORMATS = {
    "gptq 4 bits, 128": gptq(bits=4, group_size=128),
    "gptq 4 bits, 64, zero points": gptq(bits=4, group_size=64, is_symmetric=False),
    "gptq 4 bits, 32, version 2": gptq(bits=4, group_size=32, is_symmetric=False, version=2),
    "gptq 4 bits, rows": gptq(bits=4, group_size=None),
    "gptq 4 bits, 64, sorted": gptq(bits=4, group_size=64, has_sorted_columns=True),
    "gptq 4 bits, 16": attrs.evolve(
        gptq(bits=4, group_size=16), tile_kind=TileKind.INT8, error=1 / 250, logits_error=0.06
    ),
    "gptq 8 bits, 128": gptq(bits=8, group_size=128),
    "gptq 8 bits, 32, zero points": gptq(bits=8, group_size=32, is_symmetric=False),
    "gptq 8 bits, rows, version 2": gptq(bits=8, group_size=None, version=2),
    "awq 128": Format(
        AWQ | {"group_size": 128},
        functools.partial(quantized, packed_weights.awq, bits=4, group_size=128),
        TileKind.INT4,
    ),
    "awq 64": Format(
        AWQ | {"group_size": 64}, functools.partial(quantized, packed_weights.awq, bits=4, group_size=64), TileKind.INT4
    ),
    "pack-quantized 4 bits, 128": compressed_packed(4, 128, is_symmetric=True, scale_type="bf16"),
    "pack-quantized 4 bits, 32, zero points": compressed_packed(4, 32, is_symmetric=False),
    "pack-quantized 4 bits, sorted": compressed_packed(4, 128, is_symmetric=True, has_sorted_columns=True),
    "pack-quantized 8 bits, rows": compressed_packed(8, None, is_symmetric=True, scale_type="<f4"),
    "pack-quantized 8 bits, 128, zero points": compressed_packed(8, 128, is_symmetric=False),
    "int-quantized rows": compressed_bytes("int-quantized", None, is_symmetric=True),
    "int-quantized rows, zero points": compressed_bytes("int-quantized", None, is_symmetric=False),
    "naive-quantized 128": compressed_bytes("naive-quantized", 128, is_symmetric=True),
    "float-quantized rows": compressed(
        "float-quantized",
        "float",
        TileKind.F16,
        functools.partial(fp8, rows=1, columns=None, scale_name="weight_scale"),
    ),
    "fp8 blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        functools.partial(fp8, rows=128, columns=128, scale_name="weight_scale_inv"),
        TileKind.F16,
    ),
    "fp8": Format(
        {"quant_method": "fp8"},
        functools.partial(fp8, rows=None, columns=None, scale_name="weight_scale"),
        TileKind.F16,
    ),
}


def tensor(values: Any) -> Any:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))


def write_packed(folder: Path, packing: Format) -> tuple[ModelLocation, TorchModel]:
    """A folder with packed layers, and the model that it stands for."""
    model = random_model(WIDE)
    packed, plain = {}, {}
    for name, values in folder_tensors(model).items():
        if ".layers." in name and values.ndim == 2:
            module = packing.pack(values.numpy())
            packed |= {f"{name.removesuffix('weight')}{part}": tensor(t) for part, t in module.tensors.items()}
            plain[name] = tensor(module.values.astype(np.float32))
        else:
            packed[name] = plain[name] = values
    for part, tensors in (("packed", packed), ("plain", plain)):
        (folder / part).mkdir()
        write_folder(folder / part, model, tensors)
    path = folder / "packed" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": packing.config}))
    plain_location = ModelLocation(ModelKind.FOLDER, folder / "plain", "plain")
    return ModelLocation(ModelKind.FOLDER, folder / "packed", "packed"), load_torch_model(
        open_checkpoint(plain_location)
    )


def load_native(location: ModelLocation, quantization: Quantization | None = None) -> NativeModel:
    library = native_library()
    return load_native_model(open_checkpoint(location), library, ThreadPool(library, 2), quantization)


def layer_matrices(weights: DecoderWeights) -> list[Any]:
    return [
        matrix for layer in weights.layers for matrix in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_are_the_numbers_that_were_packed(tmp_path: Path, name: str) -> None:
    packing = FORMATS[name]
    location, expected = write_packed(tmp_path, packing)
    loaded = load_torch_model(open_checkpoint(location))
    expected_matrices = layer_matrices(expected.decoder.weights)
    for found, matrix in zip(layer_matrices(loaded.decoder.weights), expected_matrices, strict=True):
        assert torch.equal(found, matrix)

    native = load_native(location)
    for tiles, matrix in zip(layer_matrices(native.decoder.weights), expected_matrices, strict=True):
        assert [part.kind for part in tiles] == [packing.tile_kind]
        if packing.tile_kind.is_quantized:
            found, numbers = tile_values(tiles[0]), matrix.numpy()
            assert np.all(np.abs(found - numbers) <= packing.error * np.abs(numbers).max(axis=1, keepdims=True))

    on_device = load_model(open_checkpoint(location), DeviceWeightMaker(torch.device("cpu"), torch.float32))
    made = zip(*(layer_matrices(model.decoder.weights) for model in (on_device, native)), strict=True)
    for (weight, tiles), matrix in zip(made, expected_matrices, strict=True):
        if packing.tile_kind.is_quantized:
            assert weight.kind.name == packing.tile_kind.name
            found = dequantize(weight).numpy()
            # Tiles of 4 bits round scales and minimums to multiples of a row's unit.
            tolerance = 2e-4 if packing.tile_kind is TileKind.INT4 else 1e-6
            assert np.allclose(found, tile_values(tiles[0]), rtol=1e-6, atol=tolerance * np.abs(found).max())
        else:
            assert weight.kind is WeightKind.FP8
            assert torch.equal(dequantize(weight), matrix)

    logits = native_logits(native, TOKENS, [20, 13])
    reference = torch_logits(expected, TOKENS, QuantizedOps if packing.tile_kind.is_quantized else TorchOps)
    assert np.linalg.norm(logits - reference) < packing.logits_error * np.linalg.norm(reference)


def test_floats_of_8_bits_are_quantized_when_asked(tmp_path: Path) -> None:
    """Packed whole numbers stay as they are."""
    kinds = {}
    for name in ("fp8 blocks", "awq 128"):
        (tmp_path / name).mkdir()
        location, _ = write_packed(tmp_path / name, FORMATS[name])
        weights = load_native(location, Quantization.INT8).decoder.weights
        kinds[name] = {part.kind for tiles in layer_matrices(weights) for part in tiles}
    assert kinds == {"fp8 blocks": {TileKind.INT8}, "awq 128": {TileKind.INT4}}


def quantized_matrix(rows: int, columns: int, *, scale: float, zero: int, name: str = "x") -> QuantizedMatrix:
    codes = np.random.default_rng(rows).integers(0, 16, (rows, columns)).astype(np.uint8)
    groups = np.arange(columns) // 32
    shape = (rows, columns // 32)
    return QuantizedMatrix(
        name=name,
        num_rows=rows,
        num_columns=columns,
        bits=4,
        num_groups=shape[1],
        column_groups=groups,
        has_groups_in_order=True,
        read_codes=lambda part: codes[part],
        read_scales=lambda part: np.full(shape, scale, np.float32)[part],
        read_zeros=lambda part: np.full(shape, zero, np.int32)[part],
    )


def native_tiles(*parts: QuantizedMatrix | ScaledMatrix) -> list[Any]:
    library = native_library()
    return list(NativeWeights(library, ThreadPool(library, 1)).matrix(parts))


def test_what_is_packed_in_pieces_is_what_is_packed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    part = quantized_matrix(40, 64, scale=0.01, zero=3)
    (whole,) = native_tiles(part)
    monkeypatch.setattr("trioengine.models.native_ops._PIECE_VALUES", 16 * 64)
    (pieces,) = native_tiles(part)
    assert np.array_equal(whole.data, pieces.data)


def test_parts_stand_one_below_the_other_in_one_matrix_where_strips_allow_it() -> None:
    parts = [quantized_matrix(rows, 64, scale=0.01, zero=8) for rows in (32, 24, 16)]
    tiles = native_tiles(*parts)
    assert [part.rows for part in tiles] == [56, 16]
    found = np.concatenate([tile_values(part) for part in tiles])
    assert np.allclose(found, np.concatenate([part.floats() for part in parts]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [2.0**-15, 300.0])
def test_scales_that_halves_cannot_hold_make_floats(scale: float) -> None:
    part = quantized_matrix(16, 64, scale=scale, zero=8)
    (tiles,) = native_tiles(part)
    assert tiles.kind is TileKind.F32
    assert np.array_equal(tiles.data.view(np.float32).reshape(64, 16).T, part.floats())
