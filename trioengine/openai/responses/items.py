"""The items of a conversation: what a request brings, what an answer adds, and how both are written out.

An item that has no id gets one, so that every item of a stored response can be listed and referred to.
"""

import enum
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs
from cattrs import Converter, override

from trioengine.openai.protocol import register_object


class ItemType(enum.StrEnum):
    """What an item is."""

    MESSAGE = "message"
    FUNCTION_CALL = "function_call"
    FUNCTION_CALL_OUTPUT = "function_call_output"
    REASONING = "reasoning"
    ITEM_REFERENCE = "item_reference"


class ItemRole(enum.StrEnum):
    """Who wrote a message."""

    USER = "user"
    SYSTEM = "system"
    DEVELOPER = "developer"
    ASSISTANT = "assistant"


class ContentType(enum.StrEnum):
    """What a part of a message is: text, whoever wrote it."""

    INPUT_TEXT = "input_text"
    OUTPUT_TEXT = "output_text"
    REFUSAL = "refusal"


class ItemStatus(enum.StrEnum):
    """How far an item has come."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


_ID_PREFIXES: Mapping[ItemType, str] = {
    ItemType.MESSAGE: "msg_",
    ItemType.FUNCTION_CALL: "fc_",
    ItemType.FUNCTION_CALL_OUTPUT: "fco_",
    ItemType.REASONING: "rs_",
}


def new_item_id(item_type: ItemType) -> str:
    """An id that no other item has."""
    return _ID_PREFIXES[item_type] + secrets.token_hex(24)


@attrs.frozen(kw_only=True)
class MessageItem:
    """A message. Its content is its texts, joined when the model reads them."""

    role: ItemRole
    content: tuple[str, ...]
    id: str = attrs.field(factory=lambda: new_item_id(ItemType.MESSAGE))
    status: ItemStatus = ItemStatus.COMPLETED


@attrs.frozen(kw_only=True)
class FunctionCallItem:
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str
    """The JSON of an object."""
    id: str = attrs.field(factory=lambda: new_item_id(ItemType.FUNCTION_CALL))
    status: ItemStatus = ItemStatus.COMPLETED


@attrs.frozen(kw_only=True)
class FunctionCallOutputItem:
    """What a called function gave."""

    call_id: str
    output: str
    id: str = attrs.field(factory=lambda: new_item_id(ItemType.FUNCTION_CALL_OUTPUT))
    status: ItemStatus = ItemStatus.COMPLETED


@attrs.frozen(kw_only=True)
class ReasoningItem:
    """What the model thought before it answered."""

    content: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()
    id: str = attrs.field(factory=lambda: new_item_id(ItemType.REASONING))
    status: ItemStatus = ItemStatus.COMPLETED

    @property
    def text(self) -> str:
        """The reasoning itself, else its summary."""
        return "\n".join(self.content or self.summary)


@attrs.frozen(kw_only=True)
class ItemReference:
    """Stands for an item of a stored response."""

    id: str


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
InputItem: TypeAlias = Item | ItemReference


def item_fields(item: Item) -> Mapping[str, object]:
    """The JSON object of an item."""
    match item:
        case MessageItem():
            is_output = item.role is ItemRole.ASSISTANT
            return {
                "id": item.id,
                "type": "message",
                "role": item.role.value,
                "status": item.status.value,
                "content": [output_text_fields(text) if is_output else _input_text(text) for text in item.content],
            }
        case FunctionCallItem():
            return {
                "id": item.id,
                "type": "function_call",
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.arguments,
                "status": item.status.value,
            }
        case FunctionCallOutputItem():
            return {
                "id": item.id,
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": item.output,
                "status": item.status.value,
            }
        case ReasoningItem():
            return {
                "id": item.id,
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": text} for text in item.summary],
                "content": [{"type": "reasoning_text", "text": text} for text in item.content],
                "encrypted_content": None,
                "status": item.status.value,
            }


def output_text_fields(text: str, logprobs: Sequence[Mapping[str, object]] = ()) -> Mapping[str, object]:
    """The JSON object of a part of the model's text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _input_text(text: str) -> Mapping[str, object]:
    return {"type": "input_text", "text": text}


def num_item_bytes(item: Item) -> int:
    """About how much memory an item takes."""
    match item:
        case MessageItem():
            texts: Sequence[str] = item.content
        case FunctionCallItem():
            texts = (item.name, item.arguments)
        case FunctionCallOutputItem():
            texts = (item.output,)
        case ReasoningItem():
            texts = (*item.content, *item.summary)
    # A string has 1 to 4 bytes a character; ASCII is the rule.
    return 512 + sum(len(text) if text.isascii() else 4 * len(text) for text in texts)


@attrs.frozen
class _TypedItem:
    type: ItemType = ItemType.MESSAGE


@attrs.frozen
class _TextPart:
    type: ContentType
    text: str


@attrs.frozen
class _RefusalPart:
    type: ContentType
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_MessagePart: TypeAlias = _TextPart | _RefusalPart


class _OutputPartType(enum.StrEnum):
    INPUT_TEXT = "input_text"
    OUTPUT_TEXT = "output_text"


@attrs.frozen
class _OutputPart:
    type: _OutputPartType
    text: str


@attrs.frozen
class _ReasoningPart:
    text: str


_ITEM_CLASSES: Mapping[ItemType, type[Any]] = {
    ItemType.MESSAGE: MessageItem,
    ItemType.FUNCTION_CALL: FunctionCallItem,
    ItemType.FUNCTION_CALL_OUTPUT: FunctionCallOutputItem,
    ItemType.REASONING: ReasoningItem,
    ItemType.ITEM_REFERENCE: ItemReference,
}


def register_items(converter: Converter) -> None:
    """Let a converter of `make_request_converter` structure `InputItem`s."""

    def texts_of(value: object, _: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            raise TypeError("expected a string or a list of parts")
        return tuple(part.text for part in converter.structure(cast(object, value), tuple[_MessagePart, ...]))

    def structure_part(value: object, _: object) -> _MessagePart:
        kind = cast("dict[str, object]", value).get("type") if isinstance(value, dict) else None
        return converter.structure(value, _RefusalPart if kind == ContentType.REFUSAL else _TextPart)

    def text_of_output(value: object, _: object) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise TypeError("expected a string or a list of parts")
        return "".join(part.text for part in converter.structure(cast(object, value), tuple[_OutputPart, ...]))

    def reasoning_texts(value: object, _: object) -> tuple[str, ...]:
        return tuple(part.text for part in converter.structure(value, tuple[_ReasoningPart, ...]))

    def structure_item(value: object, _: object) -> InputItem:
        if not isinstance(value, dict):
            raise TypeError("expected an object")
        fields = {name: item for name, item in cast(dict[str, object], value).items() if item is not None}
        if "type" not in fields and "role" not in fields and "id" in fields:
            fields["type"] = ItemType.ITEM_REFERENCE.value
        kind = converter.structure(fields, _TypedItem).type
        return converter.structure(fields, _ITEM_CLASSES[kind])

    for class_ in (_TypedItem, _TextPart, _RefusalPart, _OutputPart, _ReasoningPart, FunctionCallItem, ItemReference):
        register_object(converter, class_)
    converter.register_structure_hook_func(lambda type_: type_ == _MessagePart, structure_part)
    register_object(converter, MessageItem, content=override(struct_hook=texts_of))
    register_object(converter, FunctionCallOutputItem, output=override(struct_hook=text_of_output))
    reasoning = override(struct_hook=reasoning_texts)
    register_object(converter, ReasoningItem, content=reasoning, summary=reasoning)
    converter.register_structure_hook_func(lambda type_: type_ == InputItem, structure_item)
