# pyright: basic
"""Writes random LoRA adapters, and puts them into a model's weights, which must come to the same."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trioengine.models.config import ModelConfig
from trioengine.models.lora import CONFIG_NAME, WEIGHTS_NAME, lora_places


def lora_tensors(
    config: ModelConfig, targets: Sequence[str] | None = None, *, rank: int = 4, seed: int = 0, size: float = 0.5
) -> dict[str, np.ndarray]:
    """Tensors as PEFT names them.

    Args:
        config: of the model.
        targets: ends of the names of modules; None is all.
        rank: of each.
        seed: the same gives the same numbers.
        size: of what comes of inputs of size 1.
    """
    generator = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for place in lora_places(config):
        if targets is None or place.module.endswith(tuple(targets)):
            name = f"base_model.model.{place.module}"
            a = generator.standard_normal((rank, place.num_columns)) / place.num_columns**0.5
            b = generator.standard_normal((place.num_rows, rank)) * size / rank**0.5
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def write_lora(
    folder: Path,
    config: ModelConfig,
    targets: Sequence[str] | None = None,
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.5,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write an adapter's folder, and return it. Needs the `safetensors` package.

    Args:
        folder: is made.
        config: as `lora_tensors`.
        targets: as `lora_tensors`.
        rank: as `lora_tensors`.
        seed: as `lora_tensors`.
        size: as `lora_tensors`.
        settings: in place of those that are written otherwise; None leaves a key out.
        tensors: None makes some that go with the rest.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": "all-linear" if targets is None else list(targets),
        "bias": "none",
        **(settings or {}),
    }
    (folder / CONFIG_NAME).write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))
    made = lora_tensors(config, targets, rank=rank, seed=seed, size=size) if tensors is None else dict(tensors)
    save_file(made, folder / WEIGHTS_NAME)
    return folder


def merged(model, lora):  # of type TorchModel and LoRA; torch is imported only where it is there
    """A torch model with an adapter's products added to its weights: `W + B A`."""
    import torch

    from trioengine.models.decoder import Decoder
    from trioengine.models.lora import LoRAMatrix

    def of(layer: int, matrix: LoRAMatrix, weight):
        weight = weight.double()
        for part in lora.parts.get((layer, matrix), {}).values():
            added = torch.from_numpy(part.b.astype(np.float64) @ part.a.astype(np.float64))
            weight[part.first_row : part.first_row + len(added)] += added
        return weight.float()

    layers = [
        attrs.evolve(
            layer,
            qkv=of(i, LoRAMatrix.QKV, layer.qkv),
            output=of(i, LoRAMatrix.OUTPUT, layer.output),
            mlp=attrs.evolve(
                layer.mlp,
                gate_up=of(i, LoRAMatrix.GATE_UP, layer.mlp.gate_up),
                down=of(i, LoRAMatrix.DOWN, layer.mlp.down),
            ),
        )
        for i, layer in enumerate(model.decoder.weights.layers)
    ]
    weights = attrs.evolve(model.decoder.weights, layers=layers)
    return attrs.evolve(model, decoder=Decoder(model.config, weights))
