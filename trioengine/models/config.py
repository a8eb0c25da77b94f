"""The facts of a model that its code needs, read from a GGUF file's metadata or a folder's `config.json`.

Model files are untrusted input: every value is checked for its kind and range, and what this engine cannot run is
refused here, before any weight is read. This module does not import torch and knows nothing about tensors but names.
"""

import enum
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import attrs

from trioengine.checkpoint.gguf import GGUFFile
from trioengine.errors import CheckpointError

MAX_SIZE = 1 << 24
"""No dimension of a real model comes near it; it keeps products of two far below any overflow."""

MAX_NUM_LAYERS = 4096


class Architecture(enum.StrEnum):
    """Model families that differ in more than numbers."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"


GGUF_ARCHITECTURES: Mapping[str, Architecture] = {"llama": Architecture.LLAMA, "qwen2": Architecture.QWEN2}
"""By `general.architecture`. Mistral files call themselves llama."""
FOLDER_ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture.LLAMA,
    "MistralForCausalLM": Architecture.MISTRAL,
    "Qwen2ForCausalLM": Architecture.QWEN2,
}
"""By `architectures` of `config.json`."""


@attrs.frozen
class LinearRopeScaling:
    """Positions are divided by `factor` (Chen et al., 2023)."""

    factor: float


@attrs.frozen
class Llama3RopeScaling:
    """Frequencies with long waves are divided by `factor`, short waves kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling: TypeAlias = LinearRopeScaling | Llama3RopeScaling


def _no_windows(config: "ModelConfig") -> tuple[int | None, ...]:
    return (None,) * config.num_layers


@attrs.frozen
class KVGroup:
    """Layers with one window."""

    window: int | None
    layers: tuple[int, ...]


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The architecture of one decoder-only model."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """The longest context that the model was trained for."""
    rms_norm_epsilon: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    layer_windows: tuple[int | None, ...] = attrs.field(default=attrs.Factory(_no_windows, takes_self=True))
    """One for each layer, where each token sees itself and the `window - 1` before it; None is all of them."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """Of the attention's output projection."""
    has_tied_embeddings: bool = False
    """The embedding is the output head, too."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""

    @property
    def kv_groups(self) -> Sequence["KVGroup"]:
        """The layers by their windows: those of one group keep the keys and values of the same tokens."""
        layers: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.layer_windows):
            layers.setdefault(window, []).append(layer)
        return [KVGroup(window, tuple(members)) for window, members in layers.items()]

    @property
    def num_parameters(self) -> int:
        """Numbers in all matrices; norms and biases, which hardly count, are left out."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        num_embeddings = 1 if self.has_tied_embeddings else 2
        return self.num_layers * layer + num_embeddings * self.vocab_size * self.hidden_size


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Read the facts from a GGUF file's metadata and the names and shapes of its tensors.

    Raises:
        CheckpointError: a fact is missing or impossible, or the architecture is not one that this engine runs.
    """
    facts = _Facts(file.metadata, str(file.path))
    name = facts.text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise facts.unsupported_architecture(name, GGUF_ARCHITECTURES)
    facts.refuse(f"{name}.expert_count", "mixtures of experts")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise facts.error("the tensor 'token_embd.weight' is missing or is no matrix")
    hidden_size = facts.size(f"{name}.embedding_length")
    num_heads = facts.size(f"{name}.attention.head_count")
    num_layers = facts.size(f"{name}.block_count", most=MAX_NUM_LAYERS)
    head_dim = facts.size(f"{name}.attention.key_length", hidden_size // num_heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if facts.size(key, head_dim) != head_dim:
            raise facts.error(f"{key} differs from the size of an attention head, {head_dim}")
    config = ModelConfig(
        architecture=GGUF_ARCHITECTURES[name],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=facts.size(f"{name}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=facts.size(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=facts.size(f"{name}.context_length"),
        rms_norm_epsilon=facts.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_theta=facts.number(f"{name}.rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(facts, name),
        layer_windows=(facts.optional_size(f"{name}.attention.sliding_window"),) * num_layers,
        has_qkv_bias="blk.0.attn_q.bias" in file.tensors,
        has_output_bias="blk.0.attn_output.bias" in file.tensors,
        has_tied_embeddings="output.weight" not in file.tensors,
        bos_token_id=facts.optional_token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=facts.token_ids("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"),
    )
    return _checked(config, facts)


def config_from_folder(folder: Path) -> ModelConfig:
    """Read the facts from `config.json`, and more end tokens from `generation_config.json` where there is one.

    Raises:
        CheckpointError: a file is missing or malformed, a fact is missing or impossible, or the model is not one that
            this engine runs.
    """
    facts = _Facts(_read_json(folder / "config.json"), str(folder / "config.json"))
    name = facts.texts("architectures")[0]
    if name not in FOLDER_ARCHITECTURES:
        raise facts.unsupported_architecture(name, FOLDER_ARCHITECTURES)
    architecture = FOLDER_ARCHITECTURES[name]
    facts.refuse("mlp_bias", "a bias in the MLP")
    if facts.text("hidden_act", "silu") != "silu":
        raise facts.error("hidden_act must be 'silu'")
    is_qwen2 = architecture is Architecture.QWEN2
    hidden_size = facts.size("hidden_size")
    num_heads = facts.size("num_attention_heads")
    num_layers = facts.size("num_hidden_layers", most=MAX_NUM_LAYERS)
    has_attention_bias = facts.flag("attention_bias", is_qwen2)
    end_tokens = facts.token_ids("eos_token_id")
    generation_path = folder / "generation_config.json"
    if generation_path.is_file():
        end_tokens += _Facts(_read_json(generation_path), str(generation_path)).token_ids("eos_token_id")
    rope_theta, rope_scaling = _folder_rope(facts)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=facts.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=facts.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=facts.size("num_key_value_heads", num_heads),
        head_dim=facts.size("head_dim", hidden_size // num_heads),
        max_position_embeddings=facts.size("max_position_embeddings"),
        rms_norm_epsilon=facts.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        layer_windows=_folder_windows(facts, architecture, num_layers),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias and not is_qwen2,
        has_tied_embeddings=facts.flag("tie_word_embeddings", False),
        bos_token_id=facts.optional_token_id("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(end_tokens)),
    )
    return _checked(config, facts)


class _Facts:
    """Typed look-ups in a mapping from an untrusted file. None counts as missing."""

    def __init__(self, values: Mapping[str, object], path: str) -> None:
        self._values = values
        self._path = path

    def error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {why}.", path=self._path)

    def unsupported_architecture(self, name: str, supported: Mapping[str, Architecture]) -> CheckpointError:
        return self.error(f"the architecture {name[:100]!r} is not supported; supported are {', '.join(supported)}")

    def refuse(self, key: str, what: str) -> None:
        if self._values.get(key):
            raise self.error(f"{key} is set, and {what} are not supported")

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def inner(self, key: str) -> "_Facts | None":
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is not an object")
        return _Facts(cast(Mapping[str, object], value), self._path)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} is not a string")
        return value

    def texts(self, key: str) -> Sequence[str]:
        """At least one."""
        values = self._get(key, None)
        items = cast(list[object], values) if isinstance(values, list) else []
        texts = [item for item in items if isinstance(item, str)]
        if not texts or len(texts) < len(items):
            raise self.error(f"{key} is not a list of strings")
        return texts

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is not true or false")
        return value

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{key} must be an integer from {least} to {most}, not {_short(value)}")
        return value

    def optional_size(self, key: str) -> int | None:
        return self.size(key) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(f"{key} must be a number above 0, not {_short(value)}")
        return float(value)

    def optional_token_id(self, key: str) -> int | None:
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, *keys: str) -> tuple[int, ...]:
        """The ids under these keys, each a number or a list, without repetitions."""
        found: dict[int, None] = {}
        for key in keys:
            value = self._values.get(key)
            ids = cast(list[object], value if isinstance(value, list) else [] if value is None else [value])
            for token_id in ids:
                if not isinstance(token_id, int) or isinstance(token_id, bool):
                    raise self.error(f"{key} is not a token id or a list of them")
                found[token_id] = None
        return tuple(found)

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def _short(value: object) -> str:
    return repr(value)[:50]


def _gguf_rope_scaling(facts: _Facts, name: str) -> RopeScaling | None:
    """Llama 3's scaling is not in the metadata: its factors are the tensor `rope_freqs.weight`."""
    match facts.text(f"{name}.rope.scaling.type", "none"):
        case "none":
            return None
        case "linear":
            return LinearRopeScaling(facts.number(f"{name}.rope.scaling.factor"))
        case other:
            raise facts.error(f"rope scaling of the type {other[:100]!r} is not supported")


def _folder_windows(facts: _Facts, architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """In all layers of Mistral; in those of Qwen2 that `layer_types` or, in older files, `max_window_layers` says."""
    if architecture is Architecture.MISTRAL:
        return (facts.optional_size("sliding_window"),) * num_layers
    if architecture is not Architecture.QWEN2 or not facts.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = facts.size("sliding_window")
    if not facts.has("layer_types"):
        # As transformers: the layers from this one on have a window.
        num_full = facts.size("max_window_layers", least=0)
        return tuple(None if layer < num_full else window for layer in range(num_layers))
    types = facts.texts("layer_types")
    if len(types) != num_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise facts.error(f"layer_types must name 'full_attention' or 'sliding_attention' for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _folder_rope(facts: _Facts) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: in `rope_parameters` where transformers 5 wrote the file, else at the top level."""
    parameters = facts.inner("rope_parameters") or facts.inner("rope_scaling")
    theta = facts.number("rope_theta", 10000.0)
    if parameters is None:
        return theta, None
    theta = parameters.number("rope_theta", theta)
    # Older files say "type".
    match parameters.text("rope_type", parameters.text("type", "default")):
        case "default":
            return theta, None
        case "linear":
            return theta, LinearRopeScaling(parameters.number("factor"))
        case "llama3":
            return theta, Llama3RopeScaling(
                factor=parameters.number("factor"),
                low_freq_factor=parameters.number("low_freq_factor"),
                high_freq_factor=parameters.number("high_freq_factor"),
                original_max_position_embeddings=parameters.size("original_max_position_embeddings"),
            )
        case other:
            raise facts.error(f"rope scaling of the type {other[:100]!r} is not supported")


def _checked(config: ModelConfig, facts: _Facts) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise facts.error(f"{config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise facts.error(f"the size of an attention head, {config.head_dim}, is odd, which rope cannot rotate")
    for token_id in config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise facts.error(f"the end token {token_id} is not in the vocabulary of {config.vocab_size}")
    scaling = config.rope_scaling
    if isinstance(scaling, Llama3RopeScaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise facts.error("low_freq_factor must be below high_freq_factor")
    return config


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        value: object = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", path=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {str(error)[:200]}.", path=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.", path=str(path))
    return cast(Mapping[str, object], value)
