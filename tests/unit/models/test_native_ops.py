"""The native kernels compute a model's logits as torch does with the same, dequantized weights."""

from pathlib import Path

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gguf  # noqa: E402
from trioengine_kernels.native.library import ThreadPool  # noqa: E402
from trioengine_kernels.native.tiles import TileKind  # noqa: E402

from trioengine.checkpoint.gguf import GGMLType  # noqa: E402
from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config.engine import Quantization  # noqa: E402
from trioengine.models.config import Architecture, ModelConfig, Rope  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.models.native_ops import NativeModel, NativeWeights, load_native_model  # noqa: E402
from trioengine.models.source import StoredMatrix  # noqa: E402
from trioengine.models.torch_ops import (  # noqa: E402
    TorchModel,
    TorchOps,
    load_torch_model,
)
from trioengine.testing.logits import HalfCacheOps, native_logits, torch_logits  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import Encode, random_model, tiny_config, write_gguf  # noqa: E402

TINY = tiny_config()
CONFIGS = {
    "llama": TINY,
    "tied": attrs.evolve(TINY, has_tied_embeddings=True),
    "biased": attrs.evolve(TINY, has_qkv_bias=True, has_output_bias=True),
    "qwen2": attrs.evolve(TINY, architecture=Architecture.QWEN2, has_qkv_bias=True, layer_ropes=(Rope(1e6),) * 2),
    "window": attrs.evolve(TINY, layer_windows=(7, 7)),
    "windows in some layers": attrs.evolve(
        TINY, num_layers=4, layer_windows=(None, 7, 20, 7), layer_ropes=(Rope(),) * 4
    ),
    "no groups": attrs.evolve(TINY, num_kv_heads=6),
    "large heads": attrs.evolve(TINY, num_heads=3, num_kv_heads=1, head_dim=80, hidden_size=96, vocab_size=130),
}
WIDE = attrs.evolve(TINY, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64)


def tokens_of(config: ModelConfig, length: int) -> list[int]:
    return [(place * 29 + place * place * 5 + 3) % config.vocab_size for place in range(length)]


class QuantizedOps(HalfCacheOps):
    """Activations are rounded to 8 bits, 32 with one scale, as for products with quantized weights."""

    def linear(self, x, weight, bias=None):
        groups = x.unflatten(1, (-1, 32))
        scale = groups.abs().amax(dim=-1, keepdim=True) / 127
        return super().linear(((groups / scale).round() * scale).flatten(1), weight, bias)


def load_both(
    folder: Path, encode: Encode | None, config: ModelConfig, quantization: Quantization | None = None
) -> tuple[NativeModel, TorchModel]:
    write_gguf(folder / "tiny.gguf", random_model(config), encode)
    checkpoint = open_checkpoint(ModelLocation(ModelKind.GGUF, folder / "tiny.gguf", "tiny"))
    # The file has one window for all layers.
    read = attrs.evolve(checkpoint.config, layer_windows=config.layer_windows)
    checkpoint = attrs.evolve(checkpoint, config=read)
    library = native_library()
    native = load_native_model(checkpoint, library, ThreadPool(library, 2), quantization)
    return native, load_torch_model(checkpoint)


def difference(native: NativeModel, reference: TorchModel, ops: type[TorchOps]) -> float:
    """‖native − torch‖ / ‖torch‖ of the logits of one sequence, which do not depend on how it is cut."""
    tokens = tokens_of(native.config, 41)
    whole = native_logits(native, tokens, [41])
    assert np.array_equal(native_logits(native, tokens, [3, 16, 1, 21]), whole)
    expected = torch_logits(reference, tokens, ops)
    return float(np.linalg.norm(whole - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", CONFIGS)
def test_floats_give_torchs_logits(tmp_path: Path, name: str) -> None:
    native, reference = load_both(tmp_path, None, CONFIGS[name])
    assert difference(native, reference, HalfCacheOps) < 1e-4
    assert {tiles.kind for tiles in native.decoder.weights.head} == {TileKind.F32}


def encoded(kind: GGMLType) -> Encode:
    """By the gguf package where it can, else random blocks with scales that fit."""

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, int]:
        try:
            return gguf.quantize(values, gguf.GGMLQuantizationType(kind)), kind
        except NotImplementedError:
            return random_blocks(kind, values.shape), kind

    return encode


def random_blocks(kind: GGMLType, shape: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng(len(kind.name) + shape[0])
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // kind.block_size, kind.block_bytes), np.uint8)

    def set_halves(place: int, value: float) -> None:
        halves = (rng.uniform(0.5, 1, (len(blocks), 1)) * value / shape[1] ** 0.5).astype("<f2")
        blocks[:, place : place + 2] = halves.view(np.uint8)

    match kind:
        case GGMLType.Q4_K:  # Scales and minimums are six bits.
            set_halves(0, 1 / 120)
            set_halves(2, 1 / 16)
        case GGMLType.Q5_K:
            set_halves(0, 1 / 240)
            set_halves(2, 1 / 16)
        case GGMLType.Q6_K:
            set_halves(208, 1 / 1200)
        case GGMLType.Q3_K:
            set_halves(108, 1 / 60)
    return blocks.reshape(shape[0], -1)


KINDS = {
    GGMLType.F16: (TileKind.F16, 1e-3),
    GGMLType.BF16: (TileKind.F16, 1e-3),
    # Their scales and minimums are rounded to 15 bits.
    GGMLType.Q4_0: (TileKind.INT4, 0.03),
    GGMLType.Q4_1: (TileKind.INT4, 0.03),
    GGMLType.Q4_K: (TileKind.INT4, 0.03),
    GGMLType.Q8_0: (TileKind.INT8, 0.02),
    GGMLType.Q5_0: (TileKind.INT8, 0.02),
    GGMLType.Q5_1: (TileKind.INT8_AFFINE, 0.02),
    # Its scales are rounded to halves.
    GGMLType.Q5_K: (TileKind.INT8_AFFINE, 0.02),
    # Rounded again, to 8 bits with one scale for 32.
    GGMLType.Q6_K: (TileKind.INT8, 0.04),
    GGMLType.Q3_K: (TileKind.INT8, 0.04),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_type_gives_torchs_logits(tmp_path: Path, kind: GGMLType) -> None:
    """With activations of 8 bits there too; those lose a few percent in this model, which has nothing to say."""
    tile_kind, tolerance = KINDS[kind]
    native, reference = load_both(tmp_path, encoded(kind), WIDE)
    ops = QuantizedOps if tile_kind.is_quantized else HalfCacheOps
    assert difference(native, reference, ops) < tolerance
    assert difference(native, reference, HalfCacheOps) < 0.06
    for matrix in (native.decoder.weights.embedding, native.decoder.weights.layers[1].qkv):
        assert [tiles.kind for tiles in matrix] == [tile_kind]


def test_parts_of_different_types_stand_side_by_side(tmp_path: Path) -> None:
    """As in Q4_K_M files, where some values and down projections have 6 bits."""
    by_kind = {kind: encoded(kind) for kind in (GGMLType.Q4_K, GGMLType.Q6_K)}

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, int]:
        is_wide = any(part in name for part in ("attn_v", "ffn_down", "token_embd", "ffn_up"))
        return by_kind[GGMLType.Q6_K if is_wide else GGMLType.Q4_K](name, values)

    native, reference = load_both(tmp_path, encode, attrs.evolve(WIDE, has_tied_embeddings=True))
    layer = native.decoder.weights.layers[0]
    assert [(tiles.kind, tiles.rows) for tiles in layer.qkv] == [(TileKind.INT4, 384), (TileKind.INT8, 128)]
    assert [(tiles.kind, tiles.rows) for tiles in layer.mlp.gate_up] == [(TileKind.INT4, 512), (TileKind.INT8, 512)]
    assert difference(native, reference, QuantizedOps) < 0.08


@pytest.mark.parametrize(("quantization", "tolerance"), [(Quantization.INT8, 0.1), (Quantization.INT4, 0.8)])
def test_floats_are_quantized_when_asked(tmp_path: Path, quantization: Quantization, tolerance: float) -> None:
    """What 4 bits leave of random weights is little; that of a trained model's is more.

    Embedding and head, whose errors go straight into the logits, have 8.
    """
    native, reference = load_both(tmp_path, None, WIDE, quantization)
    assert 1e-4 < difference(native, reference, HalfCacheOps) < tolerance
    kind = TileKind[quantization.name]
    assert {tiles.kind for tiles in native.decoder.weights.layers[0].mlp.down} == {kind}
    weights = native.decoder.weights
    assert {tiles.kind for matrix in (weights.embedding, weights.head) for tiles in matrix} == {TileKind.INT8}


@pytest.mark.parametrize(
    ("largest", "kind"),
    [
        (1.0, TileKind.F16),
        (30000.0, TileKind.F16),
        (2.0**15, TileKind.F32),
        (2.0**-9, TileKind.F32),
        (np.inf, TileKind.F32),
    ],
)
def test_bf16_is_held_in_halves_where_those_hold_it(largest: float, kind: TileKind) -> None:
    values = np.linspace(-1, 1, 16 * 32, dtype=np.float32) * np.float32(largest)
    values[np.isnan(values)] = 0
    rows = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(16, 64)
    library = native_library()
    (tiles,) = NativeWeights(library, ThreadPool(library, 1)).matrix([StoredMatrix("x", GGMLType.BF16, rows, 32)])
    assert tiles.kind is kind


def test_what_is_packed_in_pieces_is_what_is_packed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_library()
    maker = NativeWeights(library, ThreadPool(library, 1))
    rows = random_blocks(GGMLType.Q3_K, (72, 256))
    part = StoredMatrix("x", GGMLType.Q3_K, rows, 256)
    (whole,) = maker.matrix([part])
    monkeypatch.setattr("trioengine.models.native_ops._PIECE_VALUES", 16 * 256)
    halves = [attrs.evolve(part, rows=rows[:40]), attrs.evolve(part, rows=rows[40:])]
    (pieces,) = maker.matrix(halves)
    assert (pieces.kind, pieces.rows, pieces.columns) == (whole.kind, 72, 256)
    assert np.array_equal(pieces.data, whole.data)
