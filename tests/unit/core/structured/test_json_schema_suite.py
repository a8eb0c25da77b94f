"""The JSON Schema Test Suite: an accepted schema lets no invalid instance pass, and docs/structured-outputs.md says how
many schemas and instances of each file are taken."""

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from trioengine.core.structured.json_schema import KEYWORDS, Support
from trioengine.core.structured.matchers import MatcherCompiler
from trioengine.errors import RequestError
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.structured import StructuredOutputsParams

ROOT = Path(__file__).parents[4]
SUITE: dict[str, list[dict[str, Any]]] = json.loads(
    (ROOT / "tests/fixtures/json_schema_test_suite/tests.json").read_text()
)
DOCS = (ROOT / "docs/structured-outputs.md").read_text()
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@attrs.define
class Count:
    """What became of one file of the suite."""

    accepted: int = 0
    refused: int = 0
    valid: int = 0
    """Valid instances of accepted schemas that can be written."""
    narrower: int = 0
    """Those that cannot."""
    errors: list[str] = attrs.field(factory=list[str])

    def row(self, name: str) -> str:
        return f"| {name} | {self.accepted} | {self.refused} | {self.valid} | {self.narrower} |"


def can_write(matcher: Any, tokenizer: Tokenizer, text: str) -> bool:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    matcher = matcher.deep_copy()
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def spellings(value: object) -> list[str]:
    """Texts of a value: with and without spaces, with and without escapes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return [json.dumps(value)]
    return [
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value),
    ]


def count(name: str, compiler: MatcherCompiler, tokenizer: Tokenizer) -> Count:
    result = Count()
    for group in SUITE[name]:
        schema = group["schema"]
        if name.startswith("draft7/") and isinstance(schema, dict):
            schema = DRAFT_7 | schema
        try:
            matcher = compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
        except RequestError as error:
            if not re.match(r"structured_outputs\.json: /", error.message):
                result.errors.append(f"{group['description']}: no path in {error.message!r}")
            result.refused += 1
            continue
        result.accepted += 1
        for test in group["tests"]:
            can = any(can_write(matcher, tokenizer, text) for text in spellings(test["data"]))
            if can and not test["valid"]:
                result.errors.append(f"{group['description']}: invalid, but can be written: {test['description']}")
            result.valid += can
            result.narrower += test["valid"] and not can
    return result


@pytest.mark.parametrize("name", SUITE)
def test_no_invalid_instance_passes_and_the_table_in_the_docs_is_right(
    name: str, compiler: MatcherCompiler, tokenizer: Tokenizer
) -> None:
    result = count(name, compiler, tokenizer)
    assert result.errors == []
    assert result.row(name) in DOCS.splitlines()


def test_the_docs_name_every_keyword_and_what_becomes_of_it() -> None:
    rows = [line.strip("|").split("|") for line in DOCS.splitlines() if line.startswith("| `")]
    documented = {name: row[1].strip() for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    names = {Support.HOLDS: "holds", Support.ANNOTATION: "annotation"}
    expected = {name: names[keyword.support] for name, keyword in KEYWORDS.items()}
    assert {name: state for name, state in documented.items() if state != "refused"} == expected
    refused = {name for name, state in documented.items() if state == "refused"}
    assert refused.isdisjoint(KEYWORDS)
    assert {"not", "contains", "if", "uniqueItems", "unevaluatedProperties", "$dynamicRef"} <= refused


def test_refused_keywords_are_refused_wherever_they_stand(compiler: MatcherCompiler) -> None:
    rows = [line.strip("|").split("|") for line in DOCS.splitlines() if line.startswith("| `")]
    for row in rows:
        if row[1].strip() == "refused":
            for name in re.findall(r"`([^`]+)`", row[0]):
                with pytest.raises(RequestError, match=re.escape(f"/properties/a/{name}: ")):
                    compiler.compile(StructuredOutputsParams(json={"properties": {"a": {name: {}}}}))
