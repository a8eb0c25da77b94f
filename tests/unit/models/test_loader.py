"""Weights from GGUF and safetensors: the same numbers in the same places, and every wrong tensor named."""

from pathlib import Path

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gguf  # noqa: E402

from trioengine.checkpoint.gguf import GGMLType, GGUFFile, GGUFTensor  # noqa: E402
from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.errors import CheckpointError  # noqa: E402
from trioengine.models import loader  # noqa: E402
from trioengine.models.config import Architecture, Llama3RopeScaling, Rope, RopeFactors  # noqa: E402
from trioengine.models.decoder import Decoder, DecoderWeights  # noqa: E402
from trioengine.models.loader import LoadedModel, ReportFraction, open_checkpoint  # noqa: E402
from trioengine.models.rope import inverse_frequencies  # noqa: E402
from trioengine.models.source import gguf_source  # noqa: E402
from trioengine.models.torch_ops import TorchModel, load_torch_model  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, tiny_model, write_folder, write_gguf  # noqa: E402


def load_model(location: ModelLocation, report: ReportFraction | None = None) -> TorchModel:
    return load_torch_model(open_checkpoint(location), report)


def assert_same_weights(found: DecoderWeights, expected: DecoderWeights) -> None:
    for name in ("embedding", "final_norm", "head"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for rotation, expected_rotation in zip(found.rotations, expected.rotations, strict=True):
        assert torch.equal(rotation.inverse_frequencies, expected_rotation.inverse_frequencies)
    assert len(found.layers) == len(expected.layers)
    for layer, expected_layer in zip(found.layers, expected.layers, strict=True):
        for field in attrs.fields(type(layer)):
            tensor, expected_tensor = getattr(layer, field.name), getattr(expected_layer, field.name)
            if field.name == "mlp":
                tensor, expected_tensor = (torch.cat((mlp.gate_up, mlp.down.T)) for mlp in (tensor, expected_tensor))
            assert (tensor is None) == (expected_tensor is None), field.name
            assert tensor is None or torch.equal(tensor, expected_tensor), field.name


def with_biases(model: LoadedModel, architecture: Architecture, *, has_output_bias: bool) -> LoadedModel:
    config = attrs.evolve(model.config, architecture=architecture, has_qkv_bias=True, has_output_bias=has_output_bias)
    layers = [
        attrs.evolve(
            layer,
            qkv_bias=torch.randn(len(layer.qkv)),
            output_bias=torch.randn(config.hidden_size) if has_output_bias else None,
        )
        for layer in model.decoder.weights.layers
    ]
    return LoadedModel(config, Decoder(config, attrs.evolve(model.decoder.weights, layers=layers)))


def tied(model: LoadedModel) -> LoadedModel:
    config, weights = attrs.evolve(model.config, has_tied_embeddings=True), model.decoder.weights
    return LoadedModel(config, Decoder(config, attrs.evolve(weights, head=weights.embedding)))


MODELS = {
    "llama": tiny_model,
    "llama tied": lambda: tied(tiny_model()),
    "llama biased": lambda: with_biases(tiny_model(), Architecture.LLAMA, has_output_bias=True),
    "qwen2": lambda: with_biases(tiny_model(), Architecture.QWEN2, has_output_bias=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_gives_back_what_was_written(tmp_path: Path, name: str) -> None:
    """The order of the rows of query and key, which GGUF files of Llamas change, included."""
    model = MODELS[name]()
    write_gguf(tmp_path / "tiny.gguf", model)
    loaded = load_model(ModelLocation(ModelKind.GGUF, tmp_path / "tiny.gguf", "tiny"))
    assert loaded.config == attrs.evolve(model.config, rms_norm_epsilon=loaded.config.rms_norm_epsilon)
    assert loaded.config.rms_norm_epsilon == pytest.approx(model.config.rms_norm_epsilon)
    assert_same_weights(loaded.decoder.weights, model.decoder.weights)


@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_a_folder_gives_back_what_was_written(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    loaded = load_model(write_folder(tmp_path, model, folder_tensors(model)))
    assert loaded.config == model.config
    assert_same_weights(loaded.decoder.weights, model.decoder.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_widened_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model()
    tensors = {name: tensor.to(dtype) for name, tensor in folder_tensors(model).items()}
    weights = load_model(write_folder(tmp_path, model, tensors)).decoder.weights
    assert weights.embedding.dtype is torch.float32
    assert torch.equal(weights.embedding, model.decoder.weights.embedding.to(dtype).float())
    assert torch.equal(weights.layers[1].qkv, model.decoder.weights.layers[1].qkv.to(dtype).float())


def test_rope_factors_of_a_gguf_file_are_llama3s_scaling() -> None:
    """The converter's factors, by its own formula, give the frequencies that the configuration's numbers give."""
    plain = inverse_frequencies(Rope(500.0), 16, 512)
    factors = []
    for frequency in plain.tolist():
        wavelength = 2 * np.pi / frequency
        if wavelength < 64 / 4.0:
            factors.append(1.0)
        elif wavelength > 64 / 1.0:
            factors.append(8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert 1.0 in factors
    assert 8.0 in factors
    assert len(set(factors)) > 2
    by_numbers = inverse_frequencies(Rope(500.0, Llama3RopeScaling(8.0, 1.0, 4.0, 64)), 16, 512)
    by_factors = inverse_frequencies(Rope(500.0, RopeFactors(tuple(factors))), 16, 512)
    assert np.allclose(by_factors, by_numbers, rtol=1e-6)


def changed_gguf(tmp_path: Path, change) -> GGUFFile:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    file = loader.open_gguf(tmp_path / "tiny.gguf")
    tensors = dict(file.tensors)
    change(tensors)
    return attrs.evolve(file, tensors=tensors)


def floats(name: str, *shape: int) -> GGUFTensor:
    return GGUFTensor(name, GGMLType.F32, shape, np.ones(shape, np.float32).reshape(-1).view(np.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), r"'blk\.1\.ffn_up\.weight' is missing"),
        (lambda t: t.pop("output_norm.weight"), r"'output_norm\.weight' is missing"),
        (
            lambda t: t.update({"blk.0.attn_k.weight": floats("blk.0.attn_k.weight", 8, 48)}),
            r"'blk\.0\.attn_k\.weight' has the shape \[8, 48\], but the configuration needs \[16, 48\]",
        ),
        (lambda t: t.update({"blk.0.attn_q_norm.weight": floats("x", 8)}), "1 tensors are not known.*attn_q_norm"),
        (
            lambda t: t.update({"rope_freqs.weight": floats("rope_freqs.weight", 3)}),
            "3 rope factors are not those of 4",
        ),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, monkeypatch, change, message) -> None:
    file = changed_gguf(tmp_path, change)
    monkeypatch.setattr(loader, "open_gguf", lambda path: file)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(ModelLocation(ModelKind.GGUF, file.path, "tiny"))
    assert caught.value.path == str(file.path)


def test_rope_factors_divide_the_frequencies(tmp_path: Path, monkeypatch) -> None:
    factors = floats("rope_freqs.weight", 4)
    factors.data.view(np.float32)[:] = [1.0, 2.0, 4.0, 8.0]
    file = changed_gguf(tmp_path, lambda t: t.update({"rope_freqs.weight": factors}))
    monkeypatch.setattr(loader, "open_gguf", lambda path: file)
    weights = load_model(ModelLocation(ModelKind.GGUF, file.path, "tiny")).decoder.weights
    expected = inverse_frequencies(Rope(), 8, 512) / np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    assert all(np.array_equal(rotation.inverse_frequencies, expected) for rotation in weights.rotations)


def test_a_folders_wrong_tensors_are_named(tmp_path: Path) -> None:
    model = tiny_model()
    tensors = folder_tensors(model)
    head = tensors.pop("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing"):
        load_model(write_folder(tmp_path, model, tensors))
    with pytest.raises(CheckpointError, match="has the type I64; F32, F16 and BF16 can be read"):
        load_model(write_folder(tmp_path, model, tensors | {"lm_head.weight": head.long()}))


def test_tensors_that_some_writers_add_are_ignored(tmp_path: Path) -> None:
    """A second copy of tied embeddings, and the frequencies that old versions saved."""
    model = tied(tiny_model())
    extra = {
        "lm_head.weight": model.decoder.weights.embedding.clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    loaded = load_model(write_folder(tmp_path, model, folder_tensors(model) | extra))
    assert loaded.decoder.weights.head is loaded.decoder.weights.embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_another_matrix_counts_although_the_configuration_ties_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Trained alone, as transformers 5 has it. The same numbers in another type are no other matrix."""
    model = tied(tiny_model())
    tensors = folder_tensors(model)
    embedding = tensors["model.embed_tokens.weight"] = model.decoder.weights.embedding.bfloat16().float()
    head = embedding.clone()
    loaded = load_model(write_folder(tmp_path, model, tensors | {"lm_head.weight": head.to(dtype)}))
    assert loaded.decoder.weights.head is loaded.decoder.weights.embedding
    head[-1, -1] += 1
    loaded = load_model(write_folder(tmp_path, model, tensors | {"lm_head.weight": head.to(dtype)}))
    assert not loaded.config.has_tied_embeddings
    assert torch.equal(loaded.decoder.weights.head, head.to(dtype).float())


def test_progress_rises_to_one(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    fractions: list[float] = []
    load_model(ModelLocation(ModelKind.GGUF, tmp_path / "tiny.gguf", "tiny"), fractions.append)
    assert fractions == sorted(fractions)
    assert len(set(fractions)) > 2
    assert fractions[-1] == 1.0


def test_quantized_weights_are_dequantized(tmp_path: Path) -> None:
    """As the gguf package, an independent implementation, does it."""
    values = torch.randn(211, 64).numpy()
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    name = "token_embd.weight"
    tensor = GGUFTensor(name, GGMLType.Q8_0, (211, 64), packed.reshape(-1))
    file = changed_gguf(tmp_path, lambda tensors: tensors.update({name: tensor}))
    source = gguf_source(file, tiny_model().config)
    expected = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(source.matrix(name, (211, 64)).floats(), expected)
