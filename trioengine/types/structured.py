"""`StructuredOutputsParams`: the form that an answer must have."""

import json
from collections.abc import Iterable, Mapping

import attrs


def _json_text(value: "str | Mapping[str, object] | bool | None") -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _choices(value: "Iterable[str] | None") -> tuple[str, ...] | None:
    return None if value is None else tuple(value)


@attrs.frozen(kw_only=True)
class StructuredOutputsParams:
    """The form of an answer; exactly one of the first six is set. Names are vLLM's."""

    json: str | None = attrs.field(default=None, converter=_json_text)
    """A JSON schema, as text or as a mapping."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: tuple[str, ...] | None = attrs.field(default=None, converter=_choices)
    """The answer is one of these."""
    grammar: str | None = None
    """A grammar in Lark's or in EBNF (GBNF) notation."""
    json_object: bool = False
    """Any JSON object."""
    structural_tag: str | None = attrs.field(default=None, converter=_json_text)
    """Free text with tags, each of which binds what follows it: `{"structures": [...], "triggers": [...]}`."""
    whitespace_pattern: str | None = None
    """With `json` and `json_object`: a regular expression for the white space between tokens. None bounds it."""
