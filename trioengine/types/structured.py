"""`StructuredOutputsParams`: the form that an answer must have."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import NoReturn, cast

import attrs

from trioengine.errors import RequestError

PARAM = "structured_outputs"
MAX_SCHEMA_CHARS = 1 << 18
"""Of `json` and `structural_tag`."""
MAX_GRAMMAR_CHARS = 1 << 16
"""Of `regex`, `grammar` and `whitespace_pattern`, and of all `choice`s together."""
MAX_TAGS = 256


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
    """Free text with tags, each of which binds what follows it: `{"structures": [{"begin": "<f>", "schema": {...},
    "end": "</f>"}, ...], "triggers": ["<f"]}`. A structure's begin starts with one of the triggers, and the text is
    free until a trigger has been written. With `"at_least_one": true` the answer is tags only; with
    `"stop_after_first": true` it ends behind the first tag; with `"otherwise": {...}` it is tags only or JSON of this
    schema."""
    whitespace_pattern: str | None = None
    """With `json` and `json_object`: a regular expression for the white space between tokens. None bounds it."""

    def validate(self) -> None:
        """Check every rule that needs neither the model nor the compiler of grammars.

        Raises:
            RequestError: naming the first field at fault.
        """
        kinds = [name for name in _KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none"
            raise RequestError(f"{PARAM} needs exactly one of {', '.join(_KINDS)}; it has {found}.", param=PARAM)
        if self.json_object not in (True, False):
            raise RequestError(f"{PARAM}.json_object must be True or False.", param=f"{PARAM}.json_object")
        for name in ("json", "structural_tag"):
            _check_text(name, getattr(self, name), MAX_SCHEMA_CHARS)
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name), MAX_GRAMMAR_CHARS)
        if self.json is not None and not isinstance(parse_json(self.json, "json"), (dict, bool)):
            raise RequestError(f"{PARAM}.json must be an object, true or false.", param=f"{PARAM}.json")
        if self.choice is not None:
            self._validate_choices(self.choice)
        if self.structural_tag is not None:
            self.tags()
        if self.whitespace_pattern is not None and self.json is None and not self.json_object:
            raise RequestError(
                f"{PARAM}.whitespace_pattern needs json or json_object.", param=f"{PARAM}.whitespace_pattern"
            )

    def tags(self) -> "tuple[StructuralTag, ...]":
        """The tags that `structural_tag` describes.

        Raises:
            RequestError: naming the place in it at fault.
        """
        content = parse_json(self.structural_tag or "null", "structural_tag")
        if not isinstance(content, dict):
            _refuse_tags("", "must be an object")
        fields = cast(dict[str, object], content)
        if unknown := fields.keys() - {
            "type",
            "structures",
            "triggers",
            "at_least_one",
            "stop_after_first",
            _OTHERWISE,
        }:
            _refuse_tags(f"/{min(unknown)}", "is not known")
        for name in ("at_least_one", "stop_after_first"):
            if not isinstance(fields.get(name, False), bool):
                _refuse_tags(f"/{name}", "must be true or false")
        if not isinstance(fields.get(_OTHERWISE, {}), (dict, bool)):
            _refuse_tags(f"/{_OTHERWISE}", "must be an object, true or false")
        structures, triggers = fields.get("structures"), fields.get("triggers")
        if not isinstance(structures, list) or not 0 < len(cast(list[object], structures)) <= MAX_TAGS:
            _refuse_tags("/structures", f"must be a list of 1 to {MAX_TAGS} objects")
        if not isinstance(triggers, list) or not 0 < len(cast(list[object], triggers)) <= MAX_TAGS:
            _refuse_tags("/triggers", f"must be a list of 1 to {MAX_TAGS} strings")
        for index, trigger in enumerate(cast(list[object], triggers)):
            if not isinstance(trigger, str) or not trigger:
                _refuse_tags(f"/triggers/{index}", "must be a string that is not empty")
        longest_first = sorted(cast(list[str], triggers), key=len, reverse=True)
        return tuple(
            _tag(f"/structures/{index}", structure, longest_first)
            for index, structure in enumerate(cast(list[object], structures))
        )

    def tag_rules(self) -> "TagRules":
        """What may stand around the tags of a `structural_tag` that is valid."""
        fields = cast("dict[str, object]", parse_json(self.structural_tag or "{}", "structural_tag"))
        return TagRules(
            is_tags_only=bool(fields.get("at_least_one")) or _OTHERWISE in fields,
            stops_after_first=bool(fields.get("stop_after_first")),
            otherwise=fields.get(_OTHERWISE),
        )

    def _validate_choices(self, choices: tuple[str, ...]) -> None:
        param = f"{PARAM}.choice"
        if not choices:
            raise RequestError(f"{param} must not be empty.", param=param)
        for index, choice in enumerate(choices):
            _check_text(f"choice[{index}]", choice, MAX_GRAMMAR_CHARS)
            if not choice:
                raise RequestError(f"{param}[{index}] must not be empty.", param=f"{param}[{index}]")
        if sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"{param} has more than {MAX_GRAMMAR_CHARS} characters.", param=param)
        if len(set(choices)) != len(choices):
            raise RequestError(f"{param} has the same string twice.", param=param)


@attrs.frozen
class StructuralTag:
    """One way in which free text becomes bound."""

    trigger: str
    """From here on the text is bound."""
    begin: str
    """What the tag starts with; it starts with the trigger."""
    schema: object
    """The JSON schema of what follows."""
    end: str
    """What the tag ends with."""


@attrs.frozen
class TagRules:
    """What may stand around tags."""

    is_tags_only: bool
    """The answer has at least one tag and nothing else, save white space. False: free text."""
    stops_after_first: bool
    """The answer ends behind the first tag."""
    otherwise: object
    """The JSON schema of answers without tags; None where there is no such choice."""


def parse_json(text: str, field: str) -> object:
    """Return what a JSON text says.

    Raises:
        RequestError: naming `structured_outputs.` and the field; the text is no JSON, or has a number that is none.
    """
    param = f"{PARAM}.{field}"

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise ValueError(f"the number {number[:40]} is too large")
        return value

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number")

    try:
        return json.loads(text, parse_float=finite, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"{param} is not valid JSON: {words}.", param=param) from None


_OTHERWISE = "otherwise"
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _check_text(field: str, value: object, max_chars: int) -> None:
    if value is None:
        return
    param = f"{PARAM}.{field}"
    if not isinstance(value, str):
        raise RequestError(f"{param} must be a string, not {type(value).__name__}.", param=param)
    if len(value) > max_chars:
        raise RequestError(f"{param} has {len(value)} characters; the limit is {max_chars}.", param=param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} has a lone surrogate at character {error.start}.", param=param) from None


def _tag(path: str, structure: object, triggers: list[str]) -> StructuralTag:
    if not isinstance(structure, dict):
        _refuse_tags(path, "must be an object")
    fields = cast(dict[str, object], structure)
    if unknown := fields.keys() - {"begin", "schema", "end"}:
        _refuse_tags(f"{path}/{min(unknown)}", "is not known")
    begin, schema, end = fields.get("begin"), fields.get("schema"), fields.get("end")
    if not isinstance(begin, str):
        _refuse_tags(f"{path}/begin", "must be a string")
    if not isinstance(end, str):
        _refuse_tags(f"{path}/end", "must be a string")
    if not isinstance(schema, (dict, bool)):
        _refuse_tags(f"{path}/schema", "must be an object, true or false")
    trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if trigger is None:
        _refuse_tags(f"{path}/begin", "starts with none of the triggers")
    return StructuralTag(trigger, begin, cast(object, schema), end)


def _refuse_tags(path: str, words: str) -> NoReturn:
    param = f"{PARAM}.structural_tag"
    raise RequestError(f"{param}: {path or '/'} {words}.", param=param)
