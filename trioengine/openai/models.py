"""The models that a server has, as `/v1/models` tells them, and the bodies that add and remove adapters."""

from collections.abc import Sequence

import attrs

from trioengine.openai.protocol import make_request_converter, parse_fields, register_object, structure_body
from trioengine.types.messages import LoRAInfo


@attrs.frozen(kw_only=True)
class ModelCard:
    """A name that requests may have in `model`."""

    id: str
    object: str = "model"
    created: int
    """Unix time: when this server started."""
    owned_by: str = "trioengine"
    root: str
    """The path of an adapter; of the served model its name."""
    parent: str | None = None
    """The served model, for an adapter."""
    max_model_len: int
    """The most tokens of prompt and answer together."""


@attrs.frozen
class ModelList:
    """The reply of `GET /v1/models`."""

    object: str
    data: tuple[ModelCard, ...]


@attrs.frozen(kw_only=True)
class LoadLoRARequest:
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    """What requests name it by."""
    lora_path: str
    """A folder on the engine's machine, in PEFT's format."""
    load_inplace: bool = False
    """Whether an adapter of this name is replaced; else that is an error."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the body that nobody here knows, and that had no effect."""


@attrs.frozen(kw_only=True)
class UnloadLoRARequest:
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    unknown_fields: tuple[str, ...] = ()
    """Fields of the body that nobody here knows, and that had no effect."""


def model_cards(names: Sequence[str], max_model_len: int, created_s: int, loras: tuple[LoRAInfo, ...]) -> ModelList:
    """The served model first, by each of its names, then its adapters."""
    own, *_ = names
    cards = [ModelCard(id=name, created=created_s, root=own, max_model_len=max_model_len) for name in names]
    cards += [
        ModelCard(id=lora.name, created=created_s, root=lora.path, parent=own, max_model_len=max_model_len)
        for lora in loras
    ]
    return ModelList("list", tuple(cards))


def parse_load_lora_request(body: bytes) -> LoadLoRARequest:
    """The adapter to load.

    Raises:
        RequestError: `param` is the path of the field at fault.
    """
    return structure_body(_CONVERTER, parse_fields(body, {}), LoadLoRARequest)


def parse_unload_lora_request(body: bytes) -> UnloadLoRARequest:
    """The adapter to unload.

    Raises:
        RequestError: as `parse_load_lora_request`.
    """
    return structure_body(_CONVERTER, parse_fields(body, {}), UnloadLoRARequest)


_CONVERTER = make_request_converter()
register_object(_CONVERTER, LoadLoRARequest)
register_object(_CONVERTER, UnloadLoRARequest)
