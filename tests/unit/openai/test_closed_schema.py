"""Objects of answers have the properties that a schema names, where it says nothing of others."""

import json
from collections.abc import Mapping
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.openai.closed_schema import closed_schema
from trioengine.openai.structured_fields import structured_outputs_of

NAMED: Mapping[str, Any] = {"type": "object", "properties": {"a": {}}}
CLOSED = {**NAMED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (NAMED, CLOSED),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"properties": {"b": NAMED}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": NAMED}}, {"$ref": "#/$defs/a", "$defs": {"a": CLOSED}}),
        ({"oneOf": [NAMED], "discriminator": {}}, {"oneOf": [CLOSED], "discriminator": {}}),
    ],
)
def test_named_properties_are_the_only_ones(schema: Mapping[str, Any], closed: Mapping[str, Any]) -> None:
    assert closed_schema(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**NAMED, "additionalProperties": {"type": "string"}},
        {**NAMED, "patternProperties": {"^x": {}}},
        {**NAMED, "required": ["b"]},
        {**NAMED, "minProperties": 2},
        {**NAMED, "anyOf": [NAMED]},
        {"allOf": [NAMED, {"properties": {"b": {}}}]},
        {"oneOf": [NAMED, {"properties": {"b": {}}}]},
        {"properties": {"c": {"$ref": "#/$defs/a", "properties": {"b": {}}}}, "$defs": {"a": NAMED}},
    ],
    ids=str,
)
def test_a_schema_that_says_more_is_left_as_it_is(schema: Mapping[str, Any]) -> None:
    assert closed_schema(schema) == schema


def test_the_schema_of_a_response_format_is_closed() -> None:
    form = structured_outputs_of(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": dict(NAMED)}}}
    )
    assert form is not None
    assert json.loads(str(form.json)) == CLOSED


SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "integer"}, {"type": "object"}, {"const": 1}]),
    lambda parts: st.one_of(
        st.fixed_dictionaries(
            {"properties": st.dictionaries(st.sampled_from("ab"), parts, max_size=2)},
            optional={
                "required": st.lists(st.sampled_from("abc"), unique=True),
                "minProperties": st.integers(0, 3),
                "anyOf": st.lists(parts, min_size=1, max_size=2),
            },
        ),
        st.fixed_dictionaries({"oneOf": st.lists(parts, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"allOf": st.lists(parts, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"items": parts}),
    ),
    max_leaves=5,
)
VALUES = st.recursive(
    st.sampled_from([1, "x", None]),
    lambda parts: st.lists(parts, max_size=2) | st.dictionaries(st.sampled_from("abc"), parts, max_size=3),
    max_leaves=5,
)


@given(SCHEMAS, VALUES)
def test_what_fits_the_closed_schema_fits_the_schema(schema: Mapping[str, Any], value: Any) -> None:
    closed = closed_schema(schema)
    if jsonschema_rs.is_valid(closed, value):
        assert jsonschema_rs.is_valid(schema, value)
