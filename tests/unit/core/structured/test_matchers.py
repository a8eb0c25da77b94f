"""What compiles, what is refused, and what errors say."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers

from trioengine.core.structured.json_schema import MAX_DEPTH
from trioengine.core.structured.matchers import MAX_GRAMMAR_LINES, MatcherCompiler
from trioengine.errors import RequestError
from trioengine.tokenizer.parts import TokenizerFacts
from trioengine.tokenizer.sentencepiece import Algorithm, SentencePieceModel, TokenType, build_sentencepiece
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.structured import StructuredOutputsParams

CHOICES = ("yes", "no", "not", 'a "b"\n\\', "é😀\x7f\u2028")
ANY_OBJECT = {"type": "object"}


def can_write(
    compiler: MatcherCompiler, tokenizer: Tokenizer, text: str, allow_special: bool = False, **form: Any
) -> bool:
    matcher = compiler.compile(StructuredOutputsParams(**form))
    token_ids = tokenizer.encode(text, add_special_tokens=False, allow_special=allow_special)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, "/not: this keyword is not supported"),
        ({"properties": {"a": {"pattern": "(?=x)y"}}}, "/properties/a/pattern: .*look-ahead"),
        ({"properties": {"a/b~": {"pattern": "("}}}, "/properties/a~1b~0/pattern: "),
        ({"items": {"anyOf": [{}, {"type": "strin"}]}}, "/items/anyOf/1/type: must be of array"),
        ({"maxLenght": 3}, "/maxLenght: this keyword is not supported"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "/x-guidance: "),
        ({"format": "regex"}, "/format: must be one of date"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, r"/\$ref: is not in here, and nothing is fetched"),
        ({"$id": "https://a.org/b", "items": {"$ref": "c.json"}}, r"/items/\$ref: it is not in here"),
        ({"$ref": "#/$defs/a"}, r"/\$ref: points to no schema"),
        ({"$ref": "#/default", "default": {}}, r"/\$ref: points to no schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": []}}}, r"/\$defs/a/enum: must be a list"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"pattern": "("}}}, r"/\$defs/a/pattern: "),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf: it cannot be seen"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "/: "),
        ({"type": "array", "minItems": 2.0}, "/minItems: must be an integer"),
        ({"exclusiveMinimum": True}, "/exclusiveMinimum: must be a number"),
        ({"minimum": 2**53 + 1}, "/minimum: is beyond 2"),
        ({"enum": [[{"a": 2**53 + 1}]]}, "/enum: is beyond 2"),
        ({"const": "a\x01"}, "/const: has a control character"),
        ({"required": "a"}, "/required: must be a list of strings"),
        ({"items": [{}]}, "/items: must be a schema"),
        ({"properties": {"a": 1}}, "/properties: must be an object whose values are schemas"),
        ({"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#"}}}, r"/properties/a/\$schema: "),
        ({"$schema": "https://example.org/schema"}, r"/\$schema: must be draft"),
        ({"type": "object", "minProperties": 2}, "/minProperties: may be at most one more"),
        (False, "/: no value of finite length"),
        ({"$ref": "#"}, "/: no value of finite length"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "/: no value of finite length"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "/: no value of finite length"),
        ({"anyOf": [{"$ref": "#"}, False]}, "/: no value of finite length"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "/: .*'a' is unsatisfiable"),
    ],
)
def test_what_is_wrong_with_a_schema_is_named_with_its_path(
    schema: Any, message: str, compiler: MatcherCompiler
) -> None:
    with pytest.raises(RequestError, match=rf"^structured_outputs\.json: {message}") as caught:
        compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
    assert caught.value.param == "structured_outputs.json"
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"$ref": "#"}},
        {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["next"]},
        {"x-order": 1, "title": "t", "examples": [{"not": {}}], "default": {"$ref": "#/nowhere"}},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}], "additionalItems": False},
        {"type": "object", "minProperties": 2, "required": ["a"]},
        {"oneOf": [{"type": "object", "properties": {"kind": {"const": k}}, "required": ["kind"]} for k in "ab"]},
        True,
    ],
)
def test_schemas_that_can_be_kept_are_taken(schema: Any, compiler: MatcherCompiler) -> None:
    assert compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_schemas_nest_to_a_limit(compiler: MatcherCompiler) -> None:
    assert compiler.compile(StructuredOutputsParams(json=nested(40)))
    with pytest.raises(RequestError, match="deep"):
        compiler.compile(StructuredOutputsParams(json=nested(MAX_DEPTH + 1)))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)} | {"5000": {}}},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 40}}, "allOf": [{"$ref": "#/$defs/a"}] * 40},
        {"allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(3000)]},
    ],
)
def test_hostile_schemas_are_refused_in_time(schema: Any, compiler: MatcherCompiler) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.json: "):
        compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": "(?=a)a"}, "regex: .*look-ahead"),
        ({"regex": r"(a)\1"}, "regex: .*backreferences"),
        ({"regex": "(" * 30 + "a" + "){1,9}" * 30}, "regex: .*too many"),
        ({"regex": ""}, "regex: only an empty answer"),
        ({"regex": r"[^\s\S]"}, "regex: no text satisfies it"),
        ({"grammar": "start: missing"}, "grammar: unknown name"),
        ({"grammar": 'start: a\na: a "x"'}, "grammar: no text satisfies it"),
        ({"grammar": "start: " + "|".join(f'"a{i}"' for i in range(4000))}, "grammar: .*items"),
        ({"grammar": "hello"}, "grammar is neither Lark"),
        ({"grammar": 'root ::= "a" ???'}, "grammar is neither Lark"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "grammar is neither Lark .*deep"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "grammar: .*nested"),
        ({"grammar": 'start: "a"\n' * (MAX_GRAMMAR_LINES + 1)}, "grammar has more than"),
        ({"grammar": '{"grammars": [{"json_schema": {"x-guidance": {"lenient": true}}}]}'}, "grammar is neither Lark"),
        ({"json_object": True, "whitespace_pattern": "("}, "whitespace_pattern: .*unclosed group"),
        ({"json_object": True, "whitespace_pattern": ".*"}, "whitespace_pattern: it matches more"),
        ({"json_object": True, "whitespace_pattern": r"\s*"}, "whitespace_pattern: it matches more"),
    ],
)
def test_what_is_wrong_with_another_form_is_named(form: Any, message: str, compiler: MatcherCompiler) -> None:
    with pytest.raises(RequestError, match=rf"^structured_outputs\.{message}"):
        compiler.compile(StructuredOutputsParams(**form))


@pytest.mark.parametrize(
    ("form", "written", "not_written"),
    [
        ({"regex": "a/b{1,2}|^c\n$"}, ["a/b", "a/bb", "c\n"], ["a/", "c", "a/bbb"]),
        ({"regex": r"\d[\d.]\D"}, ["12a", "1.é"], ["٣2a", "1٣a", "123"]),
        ({"choice": CHOICES}, list(CHOICES), ["n", "", "yesno"]),
        ({"grammar": 'start: "a" b?\nb: "b" start | /[0-9]+/'}, ["a", "ab" + "a12", "a7"], ["b", "ab"]),
        ({"grammar": 'root ::= "a" b? \nb ::= "b" root | [0-9]+ # c\n'}, ["a", "aba12", "a7"], ["b", "ab"]),
        (
            {"grammar": 'root ::= other\nother ::= "\\u00e9" [\\u0041\\x42] "\\\\u0041"'},
            ["éA\\u0041", "éB\\u0041"],
            ["éAA"],
        ),
        ({"json_object": True}, ['{"a": [1, {"b": null}]}', "{}", '{\n  "a": 1\n}'], ["[]", "1", '{"a":  1}', "{} "]),
        ({"json_object": True, "whitespace_pattern": ""}, ['{"a":1}'], ['{"a": 1}']),
        ({"json": {"type": "object"}, "whitespace_pattern": "[ \n]?"}, ['{"a": 1}', '{\n"a":1}'], ['{"a":  1}']),
        ({"json": {"type": "string"}}, ['"\\n\\"é"'], ['"\\u0061"', '"\\/"', '"\n"']),
    ],
)
def test_exactly_the_form_can_be_written(
    form: Any, written: list[str], not_written: list[str], compiler: MatcherCompiler, tokenizer: Tokenizer
) -> None:
    assert [text for text in written if not can_write(compiler, tokenizer, text, **form)] == []
    assert [text for text in not_written if can_write(compiler, tokenizer, text, **form)] == []


def test_an_additional_property_is_no_named_one_in_disguise(compiler: MatcherCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert can_write(compiler, tokenizer, '{"a": 1, "b": "x"}', json=schema)
    for text in ('{"a": "x"}', '{"\\u0061": "x"}', '{"a": 1, "a": "x"}'):
        assert not can_write(compiler, tokenizer, text, json=schema)


TAGS = {
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=say>", "schema": ANY_OBJECT, "end": ""},
        {"begin": "<|im_start|>tool\n", "schema": {"type": "integer"}, "end": "<repo_name>"},
    ],
    "triggers": ["<f=", "<|im_start|>"],
}


@pytest.mark.parametrize(
    "text",
    [
        "free text, of <any> kind: <f",
        "<f=add>12</f>",
        'a <f=add>12</f> b <f=say>{"a": 1} c',
        "a<|im_start|>tool\n7<repo_name> and on",
    ],
)
def test_text_around_tags_is_free(text: str, compiler: MatcherCompiler, tokenizer: Tokenizer) -> None:
    assert can_write(compiler, tokenizer, text, allow_special=True, structural_tag=TAGS)


@pytest.mark.parametrize(
    "text", ["<f=sub>1</f>", "a <f=add>x</f>", "<f=add>1", "<|im_start|>user", "<|im_start|>tool\nx", "a<repo_name>"]
)
def test_tags_bind_from_their_trigger_on(text: str, compiler: MatcherCompiler, tokenizer: Tokenizer) -> None:
    assert not can_write(compiler, tokenizer, text, allow_special=True, structural_tag=TAGS)


@pytest.mark.parametrize(
    ("rules", "right", "wrong"),
    [
        (
            {"at_least_one": True},
            ["<f=add>1</f>", '\n<f=add>1</f>\n<|im_start|>tool\n7<repo_name>\n<f=say>{"a": 1}'],
            ["", "x<f=add>1</f>", "<f=add>1</f>x", "<f=add>1", "<f=sub>1</f>", "     <f=add>1</f>"],
        ),
        (
            {"at_least_one": True, "stop_after_first": True},
            ["<f=add>1</f>", " <f=add>1</f>"],
            ["<f=add>1</f><f=add>1</f>", "x"],
        ),
        ({"stop_after_first": True}, ["x", "x <f=add>1</f>", ""], ["<f=add>1</f>x", "<f=add>1</f><f=add>1</f>"]),
        (
            {"otherwise": {"type": "array", "items": False}},
            ["[]", "<f=add>1</f>", "<f=add>1</f> <f=add>2</f>"],
            ["x", "[]<f=add>1</f>", "<f=add>1</f>[]", "[1]"],
        ),
    ],
    ids=str,
)
def test_what_may_stand_around_tags(
    rules: dict[str, object], right: list[str], wrong: list[str], compiler: MatcherCompiler, tokenizer: Tokenizer
) -> None:
    def is_possible(text: str) -> bool:
        return can_write(compiler, tokenizer, text, allow_special=True, structural_tag=TAGS | rules)

    assert [text for text in right if not is_possible(text)] == []
    assert [text for text in wrong if is_possible(text)] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": {"not": {}}}, "/structures/0/schema/not: this keyword"),
        ({"schema": {"properties": {"a": {"pattern": "("}}}}, "/structures/0/schema/properties/a/pattern: "),
        ({"begin": "x<repo_name>"}, "the trigger .* has a control token, so it must begin with it"),
        ({"end": "x<|im_end|>"}, ".* has a token that ends the answer"),
    ],
)
def test_what_is_wrong_with_a_tag_is_named(change: dict[str, object], message: str, compiler: MatcherCompiler) -> None:
    tag = {"begin": "<f>", "schema": ANY_OBJECT, "end": ""} | change
    params = StructuredOutputsParams(structural_tag={"structures": [tag], "triggers": [tag["begin"]]})
    with pytest.raises(RequestError, match=rf"structured_outputs\.structural_tag: {message}"):
        compiler.compile(params)


def test_vocabularies_of_model_and_tokenizer_may_differ(tokenizer: Tokenizer) -> None:
    """Ids without a token, and tokens that cannot be sampled, are never allowed."""
    for vocab_size in (tokenizer.vocab_size + 100, 40_000):
        compiler = MatcherCompiler(tokenizer, vocab_size)
        matcher = compiler.compile(StructuredOutputsParams(json={"type": "string"}))
        matcher.consume_tokens(tokenizer.encode('"', add_special_tokens=False))
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert mask.bit_count() > 10_000
        assert mask >> min(vocab_size, tokenizer.vocab_size) == 0


def sentencepiece(*words: str) -> tokenizers.Tokenizer:
    """As Llama 2's: a space in front of every text, two of which are one, and bytes for what is no piece."""
    letters = dict.fromkeys("▁" + "".join(words))
    beginnings = dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1))
    pieces = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *beginnings)
    types = (TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces))
    scores = tuple(-float(number) for number in range(len(pieces)))
    return build_sentencepiece(SentencePieceModel(pieces, scores, types[: len(pieces)], Algorithm.BPE))


@pytest.mark.parametrize("is_lowered", [False, True])
@pytest.mark.parametrize("text", ["cat", " cat", "a  cat", "Cat", "é日", '{"cat": 1}', "</s>", "\ncat\n"])
def test_a_form_can_be_written_whatever_the_tokenizer_does_to_texts(text: str, is_lowered: bool) -> None:
    """It may put a space in front of each, join spaces or change letters; what must come next is spelled exactly."""
    backend = sentencepiece("▁cat", "cat", "▁a")
    if is_lowered:
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])  # pyright: ignore
    tokenizer = Tokenizer(backend, TokenizerFacts(bos_token_id=1, eos_token_ids=(2,)))
    matcher = MatcherCompiler(tokenizer, tokenizer.vocab_size).compile(StructuredOutputsParams(choice=[text]))
    written: list[int] = []
    while not matcher.is_stopped():
        forced = matcher.compute_ff_tokens()
        assert forced, (written, matcher.get_error())
        assert matcher.consume_tokens(forced)
        written += forced
    assert b"".join(map(tokenizer.token_bytes, written)).removesuffix(b"</s>" * (written[-1] == 2)) == text.encode()


def test_forced_text_is_spelled_as_the_tokenizer_spells_it_inside_a_text() -> None:
    """Not the longest token first: the model has seen no others."""
    backend = sentencepiece("abc", "ab", "bcd")
    tokenizer = Tokenizer(backend, TokenizerFacts(bos_token_id=1, eos_token_ids=(2,)))
    matcher = MatcherCompiler(tokenizer, tokenizer.vocab_size).compile(StructuredOutputsParams(regex="xbcd"))
    pieces = [tokenizer.id_to_token(token_id) for token_id in matcher.compute_ff_tokens()]
    assert pieces[:2] == ["<0x78>", "bcd"]
