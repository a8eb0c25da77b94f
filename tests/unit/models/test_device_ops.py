"""A device's operations: number types, adapters, the deterministic mode, quantized weights, and Triton's kernels.

That they compute every family is in `test_decoder`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.kernel_set import KernelSet, reference_kernels, triton_kernels  # noqa: E402
from trioengine_kernels.quantized_linear import QuantizedWeight  # noqa: E402
from trioengine_kernels.quantized_linear.reference import dequantize  # noqa: E402

from trioengine.config.engine import Quantization  # noqa: E402
from trioengine.models.config import Experts  # noqa: E402
from trioengine.models.decoder import Decoder, GatedMLP, MixtureOfExperts  # noqa: E402
from trioengine.models.device_ops import (  # noqa: E402
    DeviceExperts,
    DeviceInput,
    DeviceLoRAs,
    DeviceModel,
    DeviceOps,
    LayerKVCache,
    load_device_model,
    prepared,
)
from trioengine.models.device_weights import DeviceWeightMaker  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.models.lora import LoRA, read_lora  # noqa: E402
from trioengine.models.torch_ops import TorchModel, TorchOps, tensors_in  # noqa: E402
from trioengine.testing.logits import device_logits, torch_logits  # noqa: E402
from trioengine.testing.lora import merged, write_lora  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, random_model, tiny_config, tiny_model, write_folder  # noqa: E402

CPU = torch.device("cpu")
TOKENS = [(place * 29 + place * place * 5 + 3) % 211 for place in range(21)]
COUNTS = [16, 1, 4]
EXPERTS = Experts(num_experts=3, num_experts_per_token=2, intermediate_size=80, has_normalized_weights=True)


def difference(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def loaded(folder: Path, model: TorchModel, dtype: Any, quantization: Quantization | None = None) -> DeviceModel:
    location = write_folder(folder, model, folder_tensors(model))
    return load_device_model(open_checkpoint(location), DeviceWeightMaker(CPU, dtype, quantization))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 5e-3), ("bfloat16", 4e-2)])
def test_activations_have_the_number_type_and_logits_are_float32(tmp_path: Path, dtype: str, tolerance: float) -> None:
    kind, model = getattr(torch, dtype), tiny_model()
    device_model = loaded(tmp_path, model, kind)
    logits = device_logits(device_model, TOKENS, COUNTS, dtype=kind)
    assert logits.dtype == np.float32
    assert difference(logits, torch_logits(model, TOKENS)) < tolerance


def test_biases_are_what_their_products_need(tmp_path: Path) -> None:
    """Of floats they are added in the same operation; norms stay float32."""
    config = attrs.evolve(tiny_config(), has_qkv_bias=True, has_output_bias=True)
    half = prepared(to_dtype(random_model(config), torch.float16))
    layer = half.decoder.weights.layers[0]
    assert layer.qkv_bias is not None
    assert layer.output_bias is not None
    assert layer.mlp_norm is not None
    assert {layer.qkv_bias.dtype, layer.output_bias.dtype} == {torch.float16}
    assert layer.mlp_norm.dtype == torch.float32
    expected = torch_logits(random_model(config), TOKENS)
    assert difference(device_logits(half, TOKENS, COUNTS, dtype=torch.float16), expected) < 5e-3
    deterministic = device_logits(half, TOKENS, COUNTS, dtype=torch.float16, is_deterministic=True)
    assert difference(deterministic, expected) < 5e-3


def to_dtype(model: TorchModel, dtype: Any) -> DeviceModel:
    """The same with matrices of this type."""

    def of(weights: Any) -> Any:
        if isinstance(weights, torch.Tensor):
            return weights.to(dtype) if weights.ndim == 2 else weights
        if isinstance(weights, list | tuple):
            return [of(each) for each in weights]
        if attrs.has(type(weights)):
            fields = [field.name for field in attrs.fields(type(weights))]
            return attrs.evolve(weights, **{name: of(getattr(weights, name)) for name in fields})
        return weights

    decoder = Decoder(model.config, of(model.decoder.weights))
    return attrs.evolve(model, decoder=decoder)  # type: ignore[return-value]


class Float8CacheOps(TorchOps):
    """Keys and values are rounded to 8 bits."""

    def rope_write_kv(self, *args: Any) -> Any:
        query = super().rope_write_kv(*args)
        cache = self._kv_cache[args[4].kv_group][args[4].kv_layer]
        for numbers in (cache.keys, cache.values):
            numbers.copy_(numbers.to(torch.float8_e4m3fn))
        return query


def test_a_cache_of_fp8_holds_rounded_numbers() -> None:
    """To the bit those of its type; and that shows."""
    model = tiny_model()
    logits = device_logits(prepared(to_dtype(model, torch.float32)), TOKENS, COUNTS, cache_dtype=torch.float8_e4m3fn)
    assert difference(logits, torch_logits(model, TOKENS, Float8CacheOps)) < 1e-2
    assert difference(logits, torch_logits(model, TOKENS)) > 5e-2


def test_hidden_states_are_those_behind_the_last_norm() -> None:
    """Of the rows that are asked for; those of logits are others."""
    model = prepared(to_dtype(tiny_model(), torch.float32))
    whole, ops = operations(model, logit_rows=[4], hidden_rows=[0, 2])
    logits = model.decoder.forward(ops)
    assert ops.hidden_states is not None
    assert logits.shape == (1, 211)
    assert ops.hidden_states.shape == (2, 48)
    expected = ops.hidden_states @ model.decoder.weights.head.T  # type: ignore[union-attr]
    torch.testing.assert_close(expected, whole[[0, 2]])
    torch.testing.assert_close(logits, whole[[4]])


def operations(model: DeviceModel, logit_rows: list[int], hidden_rows: list[int]) -> tuple[Any, DeviceOps]:
    """Of a step of five tokens; and all their logits."""
    batches: list[DeviceInput] = []

    class Noted(DeviceOps):
        def __init__(self, batch: DeviceInput, *args: Any, **kwargs: Any) -> None:
            batches.append(batch)
            super().__init__(batch, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trioengine.testing.logits.DeviceOps", Noted)
        whole = torch.from_numpy(device_logits(model, TOKENS[:5], [5]))
    (batch,) = batches
    rows = [torch.tensor(rows, dtype=torch.int32) for rows in (logit_rows, hidden_rows)]
    caches = [[LayerKVCache(torch.zeros(1, 16, 2, 8), torch.zeros(1, 16, 2, 8)) for _ in range(2)]]
    changed = attrs.evolve(batch, logit_rows=rows[0], hidden_rows=rows[1])
    return whole, DeviceOps(changed, caches, reference_kernels(), dtype=torch.float32)


@pytest.fixture
def adapters(tmp_path: Path) -> Callable[..., LoRA]:
    def make(number: int, **options: Any) -> LoRA:
        folder = write_lora(tmp_path / str(number), tiny_config(), seed=number, **options)
        return read_lora(str(folder), tiny_config(), max_rank=8)

    return make


def test_an_adapter_is_what_it_adds_to_the_weights(adapters: Callable[..., LoRA]) -> None:
    model = tiny_model()
    device_model = prepared(to_dtype(model, torch.float32))
    loras = DeviceLoRAs(device_model, 2, 8, dtype=torch.float32, device=CPU)
    plain = torch_logits(model, TOKENS)
    for slot in range(3):
        assert difference(device_logits(device_model, TOKENS, COUNTS, loras=loras, lora_slot=slot), plain) < 1e-5
    first, second = adapters(1), adapters(2, rank=8)
    loras.load(1, first)
    loras.load(2, second)
    for slot, expected in [
        (0, plain),
        *((i, torch_logits(merged(model, each), TOKENS)) for i, each in [(1, first), (2, second)]),
    ]:
        logits = device_logits(device_model, TOKENS, COUNTS, loras=loras, lora_slot=slot)
        assert difference(logits, expected) < 1e-5


def test_an_adapter_takes_the_place_of_another_where_that_was(adapters: Callable[..., LoRA]) -> None:
    """A recorded graph finds it; and what it does not change, or with fewer ranks, is not the other's."""
    model = tiny_model()
    device_model = prepared(to_dtype(model, torch.float32))
    loras = DeviceLoRAs(device_model, 1, 8, dtype=torch.float32, device=CPU)
    loras.load(1, adapters(1, rank=8))
    weight = device_model.decoder.weights.layers[0].qkv
    before = [(a.data_ptr(), b.data_ptr()) for _, a, b in loras.adapters_of(weight)]
    assert [first_row for first_row, _, _ in loras.adapters_of(weight)] == [0, 48, 64]
    smaller = adapters(2, rank=2, targets=["q_proj", "down_proj"])
    loras.load(1, smaller)
    assert [(a.data_ptr(), b.data_ptr()) for _, a, b in loras.adapters_of(weight)] == before
    logits = device_logits(device_model, TOKENS, COUNTS, loras=loras, lora_slot=1)
    assert difference(logits, torch_logits(merged(model, smaller), TOKENS)) < 1e-5


def counted(kernels: KernelSet, *names: str) -> tuple[KernelSet, dict[str, int]]:
    """The same, and how often some of them are called."""
    counts = dict.fromkeys(names, 0)

    def count(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return getattr(kernels, name)(*args, **kwargs)

        return call

    return attrs.evolve(kernels, **{name: count(name) for name in names}), counts


def test_the_deterministic_mode_has_products_of_its_own() -> None:
    model = tiny_model()
    device_model = prepared(to_dtype(model, torch.float32))
    kernels, counts = counted(reference_kernels(), "linear", "quantized_linear")
    device_logits(device_model, TOKENS, [21], kernels=kernels)
    assert counts == {"linear": 0, "quantized_linear": 0}
    logits = device_logits(device_model, TOKENS, [21], kernels=kernels, is_deterministic=True)
    assert counts == {"linear": 2 * 4 + 1, "quantized_linear": 0}
    assert difference(logits, torch_logits(model, TOKENS)) < 1e-5


def without_planes(weights: Any) -> Any:
    """The numbers that quantized matrices stand for."""
    if isinstance(weights, QuantizedWeight):
        return dequantize(weights)
    if isinstance(weights, list | tuple):
        return [without_planes(each) for each in weights]
    if attrs.has(type(weights)):
        fields = [field.name for field in attrs.fields(type(weights))]
        return attrs.evolve(weights, **{name: without_planes(getattr(weights, name)) for name in fields})
    return weights


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantized_weights_have_products_of_their_own(tmp_path: Path, quantization: str) -> None:
    """In the deterministic mode, too."""
    model = random_model(attrs.evolve(tiny_config(), hidden_size=64, intermediate_size=96))
    device_model = loaded(tmp_path, model, torch.float32, Quantization(quantization))
    decoder = Decoder(model.config, without_planes(device_model.decoder.weights))
    expected = torch_logits(attrs.evolve(model, decoder=decoder), TOKENS)
    kernels, counts = counted(reference_kernels(), "linear", "quantized_linear")
    for is_deterministic in (False, True):
        logits = device_logits(device_model, TOKENS, [21], kernels=kernels, is_deterministic=is_deterministic)
        assert difference(logits, expected) < 1e-5
    num_quantized = counts["quantized_linear"] // 2
    assert num_quantized > 2 * 2
    assert counts["linear"] == 2 * 4 + 1 - num_quantized
    assert difference(logits, torch_logits(model, TOKENS)) > 1e-3


def test_experts_are_found_where_they_are() -> None:
    """Nothing is copied."""
    config = attrs.evolve(tiny_config(), experts=EXPERTS)
    model = random_model(tiny_config())
    layers = [
        attrs.evolve(layer, mlp=MixtureOfExperts(torch.randn(3, 48), [layer.mlp] * 3))
        for layer in model.decoder.weights.layers
        if isinstance(layer.mlp, GatedMLP)
    ]
    weights = attrs.evolve(model.decoder.weights, layers=layers)
    moe = prepared(attrs.evolve(model, config=config, decoder=Decoder(config, weights)))  # type: ignore[arg-type]
    (mlp, _) = (layer.mlp for layer in moe.decoder.weights.layers)
    assert isinstance(mlp, MixtureOfExperts)
    assert isinstance(mlp.experts, DeviceExperts)
    assert mlp.experts.weights.gate_up.codes.tolist() == [layers[0].mlp.experts[0].gate_up.data_ptr()] * 3
    assert len(list(tensors_in(moe.decoder.weights))) == len(list(tensors_in(weights)))
    # All experts are the same one.
    assert difference(device_logits(moe, TOKENS, COUNTS), torch_logits(model, TOKENS)) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 5e-3)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tritons_kernels_compute_the_same(tmp_path: Path, dtype: str, tolerance: float) -> None:
    kind, model = getattr(torch, dtype), tiny_model()
    logits = device_logits(loaded(tmp_path, model, kind), TOKENS[:5], [4, 1], kernels=triton_kernels(), dtype=kind)
    assert difference(logits, torch_logits(model, TOKENS[:5])) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, Quantization.INT4])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_in_the_deterministic_mode_chunks_change_no_bit(tmp_path: Path, quantization: Quantization | None) -> None:
    """Of a whole model, by Triton's kernels: a prompt at once, in chunks, and with tokens that come one by one."""
    model = random_model(attrs.evolve(tiny_config(), hidden_size=64, intermediate_size=96))
    device_model = loaded(tmp_path, model, torch.float32, quantization)
    whole, *chunked = [
        device_logits(device_model, TOKENS[:18], counts, kernels=triton_kernels(), is_deterministic=True)
        for counts in ([18], [17, 1], [1, 1, 5, 11])
    ]
    for logits in chunked:
        np.testing.assert_array_equal(logits, whole)
