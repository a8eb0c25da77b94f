"""Patterns of JSON schemas mean what they mean in JavaScript, or are refused."""

import json

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioengine.core.structured.json_pattern import FORMAT_PATTERNS, pattern_fault
from trioengine.core.structured.matchers import MatcherCompiler
from trioengine.errors import RequestError
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.structured import StructuredOutputsParams

PIECES = st.sampled_from(
    [
        r"a",
        r"b",
        r"é",
        r"]",
        r".",
        r"\"",
        r"\\",
        r"\n",
        r"\t",
        r"\d",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        r'[^"]',
        r"[^\\]",
        r'[^"\\]',
        r"[ab\]]",
        r"[^\s]",
        r"[\x00-\x1f]",
        r"[^\x00-\x1f]",
        r"[a-z\n]",
        r"\p{L}",
        r"\P{L}",
        r"\P{P}",
    ]
)
QUANTIFIED = st.tuples(PIECES, st.sampled_from(["", "", "*", "+", "?", "{1,2}", "{2}"])).map("".join)
SEQUENCE = st.lists(QUANTIFIED, min_size=1, max_size=3).map("".join)
PATTERNS = st.one_of(
    SEQUENCE.map(lambda pattern: f"^{pattern}$"),
    SEQUENCE,
    st.tuples(SEQUENCE, SEQUENCE).map(lambda two: f"^(?:{two[0]}|{two[1]})$"),
    st.tuples(SEQUENCE, SEQUENCE).map(lambda two: f"^{two[0]}|{two[1]}$"),
)
TEXTS = st.text(alphabet='ab "\\\n\r\t]1é\u2028/', max_size=4)


def can_write(compiler: MatcherCompiler, tokenizer: Tokenizer, schema: object, value: str) -> bool:
    matcher = compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
    token_ids = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@settings(max_examples=50)
@given(pattern=PATTERNS, texts=st.lists(TEXTS, min_size=3, max_size=6))
def test_what_can_be_written_matches(
    compiler: MatcherCompiler, tokenizer: Tokenizer, pattern: str, texts: list[str]
) -> None:
    """Both ways, for characters that JSON can write: what a validator takes can be written, and nothing else."""
    schema = {"type": "string", "pattern": pattern}
    try:
        compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
    except RequestError:
        # Such as `^a$b`, which nothing matches.
        assert not any(jsonschema_rs.is_valid(schema, text) for text in texts)
        return
    for text in texts:
        assert can_write(compiler, tokenizer, schema, text) == jsonschema_rs.is_valid(schema, text), text


@pytest.mark.parametrize(
    "pattern",
    [
        *("\x01", "\x7f"),
        *[
            r"\x01",
            r"[\x01]",
            r"[\x01-\x01]",
            r"\v",
            r"\cA",
            r"\u0001",
            r"(?i)a",
            r"(?i:a)",
            r"[]a]",
            r"[^]]",
            r"[[a]]",
            r"[a&&b]",
            r"[+--]",
            r"a{,3}",
            r"\Aa",
            r"\z",
            r"\<a",
            r"\x{41}",
            r"\U00000041",
        ],
    ],
)
def test_what_the_compiler_would_read_differently_is_refused(pattern: str, compiler: MatcherCompiler) -> None:
    assert pattern_fault(pattern)
    schemas = [{"type": "string", "pattern": pattern}, {"type": "object", "patternProperties": {pattern: {}}}]
    for schema in schemas:
        with pytest.raises(RequestError, match=r"/pattern(Properties)?: "):
            compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))


@pytest.mark.parametrize(
    "pattern",
    [r"^[^\x00-\x1f]*$", r"[\x00-\x7F]", "^[A-Za-z0-9._%+-]+@[a-z.-]+$", r"^\+?\d{1,3}$", "(?<n>a)", "(?:a|b)?", r"\/"],
)
def test_what_schemas_have_is_taken(pattern: str, compiler: MatcherCompiler) -> None:
    assert pattern_fault(pattern) is None
    assert compiler.compile(StructuredOutputsParams(json={"type": "string", "pattern": pattern}))


@settings(max_examples=20)
@given(day=st.dates(), time=st.times())
def test_dates_and_times_are_those_of_the_calendar(
    compiler: MatcherCompiler, tokenizer: Tokenizer, day: object, time: object
) -> None:
    for name, text in {"date": f"{day}", "time": f"{time}Z", "date-time": f"{day}T{time}+01:00"}.items():
        assert name in FORMAT_PATTERNS
        assert can_write(compiler, tokenizer, {"type": "string", "format": name}, text)


@pytest.mark.parametrize("text", ["1900-02-29", "2023-02-29", "2024-02-30", "2024-04-31", "2024-13-01", "2024-1-01"])
def test_other_dates_cannot_be_written(text: str, compiler: MatcherCompiler, tokenizer: Tokenizer) -> None:
    assert not can_write(compiler, tokenizer, {"type": "string", "format": "date"}, text)
