"""However a model's text is split, its calls and texts are the same; and whatever it wrote, nothing is lost."""

import json
from collections.abc import Callable, Iterator, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioengine.openai.tool_parsers.base import ArgumentsDelta, CallStart, TextDelta, ToolEvent, ToolParser
from trioengine.openai.tool_parsers.hermes import HermesParser
from trioengine.openai.tool_parsers.json_calls import PYTHON_TAG, JsonCallsParser
from trioengine.openai.tool_parsers.mistral import MistralParser
from trioengine.openai.tool_parsers.pythonic import PythonicParser

NAMES = ("f", "get_weather", "a.b-c")

PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "json": lambda: JsonCallsParser(NAMES),
    "llama3_json": lambda: JsonCallsParser(NAMES, (PYTHON_TAG,)),
    "mistral": MistralParser,
    "pythonic": lambda: PythonicParser(NAMES),
}


@attrs.define
class Parsed:
    """What a text comes to."""

    text: str = ""
    calls: list[list[str]] = attrs.field(factory=list[list[str]])

    def add(self, events: Sequence[ToolEvent]) -> None:
        for event in events:
            match event:
                case TextDelta(text):
                    assert text
                    self.text += text
                case CallStart(index, name):
                    assert index == len(self.calls)
                    self.calls.append([name, ""])
                case ArgumentsDelta(index, text):
                    assert text
                    assert index == len(self.calls) - 1, "arguments belong to the call that was started last"
                    self.calls[index][1] += text


def parse(name: str, pieces: Sequence[str]) -> Parsed:
    parser, parsed = PARSERS[name](), Parsed()
    for piece in pieces:
        parsed.add(parser.feed(piece))
    parsed.add(parser.finish())
    return parsed


def split(text: str, places: Sequence[int]) -> list[str]:
    cuts = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def every_split(text: str) -> Iterator[list[str]]:
    yield list(text)
    for place in range(len(text) + 1):
        yield [text[:place], text[place:]]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-10, 10) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
keywords = st.sampled_from(["a", "b", "city", "class_"])
arguments = st.dictionaries(keywords, json_values, max_size=3)
calls_of = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)


def written(name: str, calls: Sequence[tuple[str, dict[str, object]]], style: int) -> str:
    """These calls as a model writes them; `style` chooses among its ways."""
    indent = 1 if style & 1 else None
    ascii_only = bool(style & 2)

    def dumps(value: object) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ascii_only)

    def as_object(function: str, values: dict[str, object], key: str = "arguments") -> str:
        if style & 4:
            return dumps({key: values, "name": function})
        if style & 8:
            return dumps({"name": function, key: json.dumps(values)})
        return dumps({"name": function, key: values, **({"id": "x"} if style & 16 else {})})

    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{as_object(*call)}\n</tool_call>" for call in calls)
        case "json":
            return f"[{', '.join(as_object(*call) for call in calls)}]"
        case "llama3_json":
            prefix = PYTHON_TAG if style & 32 else ""
            return prefix + "; ".join(as_object(*call, key="parameters") for call in calls)
        case "mistral" if style & 32:
            return "".join(f"[TOOL_CALLS]{function}[ARGS]{dumps(values)}" for function, values in calls)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(as_object(*call) for call in calls)}]"
        case _:
            texts = (
                f"{function}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
                for function, values in calls
            )
            return f"[{', '.join(texts)}]"


@pytest.mark.parametrize("name", PARSERS)
@given(calls=calls_of, style=st.integers(0, 63), places=st.lists(st.integers(0, 10_000), max_size=8))
def test_calls_are_found_however_the_text_is_split(
    name: str, calls: list[tuple[str, dict[str, object]]], style: int, places: list[int]
) -> None:
    """Case 28 (vllm 51697): all of them, in order, with arguments before the name too, and no text is left."""
    parsed = parse(name, split(written(name, calls, style), places))
    assert [(function, json.loads(text)) for function, text in parsed.calls] == calls
    assert parsed.text == ""


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=40)
@given(calls=calls_of, style=st.integers(0, 63), end=st.integers(0, 10_000), tail=st.text(max_size=6))
def test_every_split_is_the_same(
    name: str, calls: list[tuple[str, dict[str, object]]], style: int, end: int, tail: str
) -> None:
    """Case 28 (vllm 51697): at every position, in texts that are cut anywhere and go on with anything."""
    text = written(name, calls, style)[:160]
    text = text[: end % (len(text) + 1)] + tail
    whole = parse(name, [text])
    assert all(parse(name, pieces) == whole for pieces in every_split(text))


MARKUP = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", PYTHON_TAG, "<|python_start|>",
    "<|python_end|>", '{"name": "f", ', '"arguments": ', "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ";", ":",
    "=", "f", "f(", "a=1", "name", "\n", " ", "text", "<", "1", "null", '{"a": "\\u00e9"}',
]  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@given(parts=st.lists(st.sampled_from(MARKUP), max_size=12))
def test_any_text_is_parsed_alike_in_pieces_and_nothing_is_lost(name: str, parts: list[str]) -> None:
    """Malformed markup is text. Without a call, every character is."""
    text = "".join(parts)
    whole = parse(name, [text])
    assert parse(name, parts) == parse(name, list(text)) == whole
    if not whole.calls:
        assert whole.text == text


@pytest.mark.parametrize("name", PARSERS)
@given(calls=calls_of, style=st.integers(0, 63), end=st.integers(0, 10_000))
def test_no_json_is_invented_where_the_text_is_cut(
    name: str, calls: list[tuple[str, dict[str, object]]], style: int, end: int
) -> None:
    """Case 28: arguments are the beginning of what they would have been."""
    text = written(name, calls, style)
    cut = parse(name, [text[: end % len(text)]])
    whole = parse(name, [text])
    assert len(cut.calls) <= len(whole.calls)
    for (function, arguments_text), (whole_function, whole_arguments) in zip(cut.calls, whole.calls, strict=False):
        assert function == whole_function
        is_beginning = whole_arguments.startswith(arguments_text)
        # Arguments that are written as a string come as they are when it is cut.
        assert is_beginning or arguments_text.startswith('"')


@pytest.mark.parametrize("name", ["hermes", "mistral"])
@given(before=st.text(max_size=20), calls=calls_of, style=st.integers(0, 63))
def test_text_before_calls_is_kept(
    name: str, before: str, calls: list[tuple[str, dict[str, object]]], style: int
) -> None:
    """Save the white space between the two."""
    parsed = parse(name, [before + written(name, calls, style)])
    assert len(parsed.calls) == len(calls)
    assert parsed.text == before.rstrip()
