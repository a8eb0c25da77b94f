# pyright: basic
"""What is known of a model that only transformers can build before its weights are read: what it asks of attention.

Two functions stand in transformers' registries under a name of our own; what they do while a model computes is an
`Attention`. The one here takes notes, for a model without weights, and refuses what the engine cannot give. Code that
comes with a model is never run.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trioengine.checkpoint.locate import ModelLocation
from trioengine.checkpoint.small_files import read_json_object
from trioengine.errors import CheckpointError
from trioengine.models.config import CLASSIFYING
from trioengine.models.config.facts import MAX_SIZE
from trioengine.models.encoder_config import FOLDER_CLASSES
from trioengine.models.loader import CheckpointVersion, checkpoint_version

ATTENTION_NAME = "trioengine"
"""Ours in transformers' registries."""


@attrs.frozen
class AttentionCall:
    """What one layer asks of attention."""

    window: int | None
    num_kv_heads: int
    head_dim: int
    """Of keys."""
    value_dim: int
    """At most `head_dim`."""


@attrs.frozen
class TransformersKVGroup:
    """Layers with one window and equally large keys."""

    window: int | None
    num_kv_heads: int
    head_dim: int
    layers: tuple[int, ...]

    @property
    def num_token_values(self) -> int:
        """Numbers of a token's keys and values in all layers."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim


@attrs.frozen(kw_only=True)
class TransformersConfig:
    """The facts of a model that the engine needs; what else there is only transformers knows."""

    architecture: str
    """The name of its class."""
    vocab_size: int
    max_position_embeddings: int
    num_active_parameters: int
    """About as many numbers as a token is multiplied by."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    attention_calls: tuple[AttentionCall, ...]
    """In the order in which a step makes them: one for each layer."""

    @property
    def kv_groups(self) -> Sequence[TransformersKVGroup]:
        """The layers whose keys and values lie together."""
        layers: dict[tuple[int | None, int, int], list[int]] = {}
        for layer, call in enumerate(self.attention_calls):
            layers.setdefault((call.window, call.num_kv_heads, call.head_dim), []).append(layer)
        return [TransformersKVGroup(*shape, tuple(members)) for shape, members in layers.items()]


@attrs.frozen(eq=False)
class TransformersCheckpoint:
    """A folder whose facts are read; its weights are not."""

    version: CheckpointVersion
    config: TransformersConfig

    @property
    def location(self) -> ModelLocation:
        """Where it is."""
        return self.version.location


def open_transformers_checkpoint(location: ModelLocation) -> TransformersCheckpoint:
    """Read a folder's facts and find out, without its weights, what the model asks of attention.

    Raises:
        CheckpointError: transformers does not know the architecture, or the model needs what is not here.
    """
    version = checkpoint_version(location)
    config = _read_config(location.path)
    model = _build_without_weights(location.path, config)
    calls, vocab_size = _probe(location.path, model)
    return TransformersCheckpoint(
        version,
        TransformersConfig(
            architecture=type(model).__name__,
            vocab_size=vocab_size,
            max_position_embeddings=_max_length(location.path, config),
            num_active_parameters=_num_active_parameters(model),
            eos_token_ids=_end_tokens(location.path, config),
            attention_calls=calls,
        ),
    )


class Attention(Protocol):
    """What our registered functions do while a model computes."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        asked: Mapping[str, Any],
    ) -> Tensor:
        """[1, num_tokens, num_heads, head_dim of values], of queries [1, num_heads, num_tokens, head_dim] and keys and
        values like them, with the other keywords of the interface."""
        ...

    def mask(self, window: int | None) -> Tensor | None:
        """What attention gets as its mask."""
        ...


_current: contextvars.ContextVar[Attention] = contextvars.ContextVar("_current")


@contextlib.contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Within, models of this thread that were made with our attention use this one."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def _registered_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: object
) -> tuple[Tensor, None]:
    return _current.get().attend(module, query, key, value, attention_mask, asked), None


def _registered_mask(*args: object, local_size: int | None = None, **asked: object) -> Tensor | None:
    return _current.get().mask(local_size)


AttentionInterface.register(ATTENTION_NAME, _registered_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _registered_mask)


def _read_config(path: Path) -> transformers.PretrainedConfig:
    facts = read_json_object(path / "config.json")
    kind = str(facts.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise checkpoint_error(
            path,
            f"neither this engine nor transformers {transformers.__version__} knows the model type {kind[:100]!r} of"
            " config.json",
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Whatever transformers makes of a damaged file.
        raise checkpoint_error(path, f"transformers cannot read its configuration: {summary(error)}") from error
    if config.is_encoder_decoder:
        raise checkpoint_error(path, "it is an encoder with a decoder, which is not supported")
    if config.get_text_config() is not config:
        raise checkpoint_error(path, "it takes more than text, which is not supported")
    if facts.get("quantization_config") is not None:
        raise checkpoint_error(path, f"its weights are packed, which the model type {kind[:100]!r} may not be")
    return config


def _build_without_weights(path: Path, config: transformers.PretrainedConfig) -> PreTrainedModel:
    names = config.architectures or []
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if known is None or known not in names:
        why = f"its architectures are {', '.join(names)[:100] or 'not named'}; of its model type "
        why += "none can be run" if known is None else f"only {known} can be run"
        if known is None or not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
            why += f". Vectors and labels are given by {', '.join((*FOLDER_CLASSES, *CLASSIFYING))}"
        raise checkpoint_error(path, why)
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=ATTENTION_NAME,
                experts_implementation="eager",  # The others need numbers.
                dtype=torch.float32,
                trust_remote_code=False,
            )
    except Exception as error:  # Whatever transformers makes of impossible sizes.
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # It has a table of attentions of its own.
            raise checkpoint_error(path, _OWN_ATTENTION) from error
        raise checkpoint_error(path, f"transformers cannot build it: {summary(error)}") from error
    if getattr(module, "_is_stateful", False):
        raise checkpoint_error(path, "it keeps a state beside keys and values, which is not supported")
    return prepared(module)


def prepared(module: PreTrainedModel) -> PreTrainedModel:
    """The same, as it is to compute: without dropout and without losses of routers."""
    if hasattr(module.config, "output_router_logits"):
        module.config.output_router_logits = False
    return module.eval()


@torch.no_grad()  # Not inference mode, where `_NothingIsSet` would see other operations.
def _probe(path: Path, module: PreTrainedModel) -> tuple[tuple[AttentionCall, ...], int]:
    """What it asks of attention, and the size of its vocabulary."""
    probe = _Probe(path)
    token_ids = torch.zeros(_PROBE_TOKENS, dtype=torch.int64, device="meta")
    try:
        with attending(probe), _NumbersAreZero(), _NothingIsSet():
            vocab_size = logits_of(module, token_ids, token_ids, {}).shape[1]
    except CheckpointError:
        raise
    except Exception as error:  # It is transformers' code that runs.
        raise checkpoint_error(path, f"what it asks of attention cannot be found out: {summary(error)}") from error
    if not probe.calls:
        raise checkpoint_error(path, _OWN_ATTENTION)
    num_layers = getattr(module.config, "num_hidden_layers", None)
    if len(probe.calls) != num_layers:
        raise checkpoint_error(
            path,
            f"its {num_layers} layers attend {len(probe.calls)} times: linear attention, convolutions, state spaces and"
            " the like are not supported",
        )
    return tuple(probe.calls), vocab_size


def logits_of(module: PreTrainedModel, token_ids: Tensor, positions: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """[num_rows, vocab_size] of packed tokens, int64. `rows`: by a keyword of the model which rows are wanted."""
    return module(
        input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **rows
    ).logits[0]


def _max_length(path: Path, config: transformers.PretrainedConfig) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise checkpoint_error(path, "its max_position_embeddings is missing")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(each for each in rope.values() if isinstance(each, dict))]:
        kind = parameters.get("rope_type")
        if kind == "dynamic":
            raise checkpoint_error(path, "its rope scaling is dynamic: results would depend on other requests")
        if kind == "yarn":
            original, factor = parameters.get("original_max_position_embeddings"), parameters.get("factor")
            if isinstance(original, int) and isinstance(factor, (int, float)):
                length = max(length, int(min(original * factor, MAX_SIZE)))
        if kind == "longrope":
            # Beyond it transformers takes other frequencies, for all sequences of a step.
            original = parameters.get("original_max_position_embeddings", length)
            length = min(length, getattr(config, "original_max_position_embeddings", None) or original)
    return length


def _num_active_parameters(module: PreTrainedModel) -> int:
    config = module.config
    sizes = [getattr(config, name, None) for name in ("num_local_experts", "n_routed_experts", "num_experts")]
    num_experts = next((size for size in sizes if isinstance(size, int) and size > 0), 1)
    share = min(1.0, (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts)
    return round(
        sum(weight.numel() * (share if ".experts." in name else 1.0) for name, weight in module.named_parameters())
    )


def _end_tokens(path: Path, config: transformers.PretrainedConfig) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for value in (config.eos_token_id, read_json_object(path / "generation_config.json").get("eos_token_id")):
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise checkpoint_error(path, "eos_token_id is not a token id or a list of them")
            found[token_id] = None
    return tuple(found)


def summary(error: Exception) -> str:
    """In one line, without a full stop."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(".")


def checkpoint_error(path: Path, why: str) -> CheckpointError:
    """About a model's folder; `why` is without a full stop."""
    return CheckpointError(f"{path}: {why}.", path=str(path))


class _Probe:
    """Notes what a model without weights asks of attention."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._windows: dict[int, int | None] = {}
        self._masks: list[Tensor] = []
        self.calls: list[AttentionCall] = []

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        asked: Mapping[str, Any],
    ) -> Tensor:
        window = asked["sliding_window"] if "sliding_window" in asked else getattr(module, "sliding_window", None)
        self._check(module, query, key, value, mask, asked, window)
        self.calls.append(AttentionCall(window, key.shape[1], key.shape[3], value.shape[3]))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def mask(self, window: int | None) -> Tensor | None:
        mask = torch.empty(1, 1, _PROBE_TOKENS, _PROBE_TOKENS, device="meta", dtype=torch.bool)
        self._masks.append(mask)  # So that its id stays its own.
        self._windows[id(mask)] = window
        return mask

    def _check(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        asked: Mapping[str, Any],
        window: int | None,
    ) -> None:
        unknown = sorted(name for name, given in asked.items() if name not in _KNOWN_KEYWORDS and given is not None)
        if unknown:
            raise checkpoint_error(self._path, f"its attention takes {', '.join(unknown)}, which is not supported")
        if asked.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise checkpoint_error(self._path, "its attention is not causal, so it does not generate text")
        if query.shape[2] != key.shape[2] or key.shape[:3] != value.shape[:3]:
            raise checkpoint_error(
                self._path, "its attention looks at something else than the tokens before, which is not supported"
            )
        if query.shape[3] != key.shape[3] or value.shape[3] > key.shape[3] or query.shape[1] % key.shape[1]:
            raise checkpoint_error(self._path, "its queries, keys and values have sizes that do not fit together")
        base = mask if mask is None or id(mask) in self._windows else mask._base
        if mask is not None and id(base) not in self._windows:
            raise checkpoint_error(self._path, "its attention has a mask of its own, which is not supported")
        if window != (None if base is None else self._windows[id(base)]):
            raise checkpoint_error(self._path, "its attention sees other tokens than a causal window's")


_OWN_ATTENTION = "its attention is code of its own, which this engine's cannot take the place of"
_PROBE_TOKENS = 8
_KNOWN_KEYWORDS = frozenset(
    {
        *("scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "dropout", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)
"""Of the attention interface: what our function does, and what does not change results."""


class _NumbersAreZero(TorchFunctionMode):
    """Lets code run that looks at numbers of tensors without data: they are 0 and False."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _LOOKS:
            return _LOOKS[func]
        if func is Tensor.tolist:
            return np.zeros(args[0].shape, np.int64).tolist()
        return func(*args, **(kwargs or {}))


_LOOKS = {Tensor.item: 0, Tensor.__bool__: False, Tensor.__int__: 0, Tensor.__float__: 0.0, Tensor.__index__: 0}


class _NothingIsSet(TorchDispatchMode):
    """The same within torch's own code, and for code that looks for places that are set, as routers of experts do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
