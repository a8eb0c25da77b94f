"""What a model's authors recommend for sampling: generation_config.json, or GGUF's `general.sampling` keys."""

import math
from collections.abc import Mapping

import attrs

from trioengine.checkpoint.gguf import open_gguf
from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.checkpoint.small_files import read_json_object
from trioengine.errors import CheckpointError


@attrs.frozen
class GenerationDefaults:
    """Values for what a request leaves open, by the names of `SamplingParams`. None: the authors say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


_FOLDER_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
_GGUF_NAMES: Mapping[str, str] = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.ulp(0.0), 1e6),
    "max_tokens": (1, 2**31 - 1),
}
_WHOLE = frozenset({"top_k", "max_tokens"})


def read_generation_defaults(location: ModelLocation) -> GenerationDefaults:
    """Return what the model's files recommend. `do_sample` is not looked at, as in vLLM.

    Raises:
        CheckpointError: a file is damaged, or a value is none that sampling could have.
    """
    match location.kind:
        case ModelKind.FOLDER:
            path = location.path / "generation_config.json"
            source: Mapping[str, object] = read_json_object(path)
            names = _FOLDER_NAMES
        case ModelKind.GGUF:
            path = location.path
            source, names = open_gguf(path).metadata, _GGUF_NAMES
    numbers = {name: _number(source.get(key), name, f"{path}: {key}") for name, key in names.items()}
    whole = {name: None if (value := numbers.get(name)) is None else int(value) for name in _WHOLE}
    return GenerationDefaults(
        temperature=numbers.get("temperature"),
        top_p=numbers.get("top_p"),
        top_k=whole["top_k"],
        min_p=numbers.get("min_p"),
        repetition_penalty=numbers.get("repetition_penalty"),
        max_tokens=whole["max_tokens"],
    )


def _number(value: object, name: str, place: str) -> float | None:
    if value is None:
        return None
    low, high = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise CheckpointError(f"{place} is {str(value)[:50]}, which is no {name}.")
    if name in _WHOLE and value != int(value):
        raise CheckpointError(f"{place} is {value}, which is no whole number.")
    return float(value)
