"""Forms make a model write calls in its own markup: what they let through is what the parser reads, and fits."""

import json
from collections.abc import Mapping

import pytest

from trioengine.checkpoint.locate import resolve_model
from trioengine.config.env import cache_dir
from trioengine.config.server import ToolCallParser
from trioengine.core.structured.matchers import MatcherCompiler
from trioengine.errors import RequestError
from trioengine.openai.tool_parsers import TOOL_MARKUPS, markup_for_template
from trioengine.openai.tool_parsers.base import ArgumentsDelta, CallStart
from trioengine.openai.tool_parsers.forms import BoundFunction, CallRules, WrittenCall
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/number"}, "unit": {"enum": ["m", "s"]}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
NOTHING: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [BoundFunction("add", ADD, True, "tools[0]"), BoundFunction("now", NOTHING, True, "tools[1]")]
ANSWER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}

ONE: Mapping[ToolCallParser, str] = {
    ToolCallParser.HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 1, "unit": "m"}}\n</tool_call>',
    ToolCallParser.MISTRAL: '[TOOL_CALLS]add[ARGS]{"a": 1, "unit": "m"}',
    ToolCallParser.LLAMA3_JSON: '{"name": "add", "parameters": {"a": 1, "unit": "m"}}',
    ToolCallParser.JSON: '[{"name": "add", "arguments": {"a": 1, "unit": "m"}}]',
    ToolCallParser.PYTHONIC: '[add(a=1, unit="m")]',
}
TWO: Mapping[ToolCallParser, str] = {
    ToolCallParser.HERMES: ONE[ToolCallParser.HERMES] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ToolCallParser.MISTRAL: ONE[ToolCallParser.MISTRAL] + "[TOOL_CALLS]now[ARGS]{}",
    ToolCallParser.JSON: '[{"name": "add", "arguments": {"a": 1, "unit": "m"}}, {"name": "now", "arguments": {}}]',
    ToolCallParser.PYTHONIC: '[add(a=1, unit="m"), now()]',
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(None, cache_dir=cache_dir()))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> MatcherCompiler:
    return MatcherCompiler(tokenizer, tokenizer.vocab_size)


class Form:
    """One form, and what it lets through."""

    def __init__(self, compiler: MatcherCompiler, tokenizer: Tokenizer, name: ToolCallParser, rules: CallRules) -> None:
        self._matcher = compiler.compile(TOOL_MARKUPS[name].form(FUNCTIONS, rules))
        self._tokenizer = tokenizer

    def allows(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        return all(
            matcher.consume_token(token_id)
            for token_id in self._tokenizer.encode(text, add_special_tokens=False, allow_special=True)
        ) and bool(matcher.is_accepting())


@pytest.mark.parametrize("name", ToolCallParser)
def test_what_must_be_a_call_is_one(name: ToolCallParser, compiler: MatcherCompiler, tokenizer: Tokenizer) -> None:
    """In the model's own markup; text, other functions and wrong arguments are not possible."""
    form = Form(compiler, tokenizer, name, CallRules(must_call=True, is_parallel=False))
    one = ONE[name] if name is not ToolCallParser.JSON else ONE[name][1:-1]
    assert form.allows(one)
    assert not form.allows("Hello.")
    assert not form.allows(one.replace("add", "sub"))
    assert not form.allows(one.replace("1", '"x"'))
    assert not form.allows(one.replace('"m"', '"q"'))
    if name in TWO:
        assert not form.allows(TWO[name])


@pytest.mark.parametrize("name", TWO)
def test_several_calls_are_possible_where_they_may_be(
    name: ToolCallParser, compiler: MatcherCompiler, tokenizer: Tokenizer
) -> None:
    """And each is one of the functions."""
    form = Form(compiler, tokenizer, name, CallRules(must_call=True, is_parallel=True))
    assert form.allows(ONE[name])
    assert form.allows(TWO[name])
    assert not form.allows(TWO[name].replace("now", "then"))


@pytest.mark.parametrize("name", ToolCallParser)
def test_strict_calls_bind_beside_free_text(
    name: ToolCallParser, compiler: MatcherCompiler, tokenizer: Tokenizer
) -> None:
    """The model may answer with text; where it calls, its arguments fit."""
    form = Form(compiler, tokenizer, name, CallRules(must_call=False, is_parallel=True))
    assert form.allows("Hello, I do not call anything.")
    assert form.allows(ONE[name])
    assert not form.allows(ONE[name].replace("1", '"x"'))


@pytest.mark.parametrize("name", ToolCallParser)
def test_a_response_format_binds_what_is_no_call(
    name: ToolCallParser, compiler: MatcherCompiler, tokenizer: Tokenizer
) -> None:
    """With `response_format` beside tools."""
    form = Form(compiler, tokenizer, name, CallRules(must_call=False, is_parallel=True, otherwise=ANSWER))
    assert form.allows('{"x": 1}')
    assert form.allows(ONE[name])
    assert not form.allows("Hello.")
    assert not form.allows('{"x": "y"}')


@pytest.mark.parametrize("name", TWO)
def test_the_parser_reads_what_the_form_lets_through(name: ToolCallParser) -> None:
    """Both calls, with their arguments."""
    parser = TOOL_MARKUPS[name].make_parser(["add", "now"])
    events = [*parser.feed(TWO[name]), *parser.finish()]
    assert [event.name for event in events if isinstance(event, CallStart)] == ["add", "now"]
    texts = ["".join(e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == i) for i in (0, 1)]
    assert [json.loads(text) for text in texts] == [{"a": 1, "unit": "m"}, {}]


@pytest.mark.parametrize("name", ToolCallParser)
def test_calls_are_written_as_the_parser_reads_them(name: ToolCallParser) -> None:
    """For histories of models whose template does not write them."""
    markup = TOOL_MARKUPS[name]
    calls = [WrittenCall("add", {"a": 1, "b": "é\n"}), WrittenCall("now", {})]
    parser = markup.make_parser(["add", "now"])
    events = [*parser.feed(markup.form.write(calls)), *parser.finish()]
    assert [event.name for event in events if isinstance(event, CallStart)] == ["add", "now"]
    texts = ["".join(e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == i) for i in (0, 1)]
    assert [json.loads(text) for text in texts] == [{"a": 1, "b": "é\n"}, {}]


def test_pythonic_arguments_keep_their_order_and_may_be_left_out(
    compiler: MatcherCompiler, tokenizer: Tokenizer
) -> None:
    """Required ones may not."""
    form = Form(compiler, tokenizer, ToolCallParser.PYTHONIC, CallRules(must_call=True, is_parallel=True))
    assert all(map(form.allows, ["[add(a=1)]", "[add(a=1, b=2)]", '[add(a=1, b=2, unit="s")]', "[now(), now()]"]))
    assert not any(map(form.allows, ["[add()]", "[add(b=2)]", "[add(b=2, a=1)]", "[add(a=1,)]", "[now(a=1)]", "[]"]))


def test_a_strict_schema_that_a_markup_has_no_words_for_is_refused() -> None:
    """And one that is not strict only has to have names and values."""
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}
    rules = CallRules(must_call=True, is_parallel=True)
    form = TOOL_MARKUPS[ToolCallParser.PYTHONIC].form
    with pytest.raises(RequestError) as caught:
        form([BoundFunction("f", schema, True, "tools[0].function.parameters")], rules)
    assert caught.value.param == "tools[0].function.parameters"
    assert form([BoundFunction("f", schema, False, "")], rules).grammar is not None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call> ...", ToolCallParser.HERMES),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", ToolCallParser.MISTRAL),
        ("<|python_tag|>", ToolCallParser.LLAMA3_JSON),
        ("[func_name1(params_name1=params_value1)]", ToolCallParser.PYTHONIC),
        ("{{ messages }}", ToolCallParser.JSON),
        (None, ToolCallParser.JSON),
    ],
)
def test_the_template_shows_how_calls_are_written(template: str | None, name: ToolCallParser) -> None:
    """By the markers in it."""
    assert markup_for_template(template) is name


def test_ids_are_as_the_models_prompts_have_them() -> None:
    """Mistral's templates refuse others than nine letters and digits."""
    assert TOOL_MARKUPS[ToolCallParser.HERMES].new_id().startswith("call_")
    mistral = TOOL_MARKUPS[ToolCallParser.MISTRAL].new_id()
    assert len(mistral) == 9
    assert mistral.isalnum()


def test_references_of_a_schema_lead_into_itself(compiler: MatcherCompiler, tokenizer: Tokenizer) -> None:
    """Also where it stands inside a schema that a markup makes of it."""
    schema = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/number"},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
        "$defs": {"number": {"type": "integer"}},
    }
    function = BoundFunction("f", schema, True, "tools[0].function.parameters")
    params = TOOL_MARKUPS[ToolCallParser.JSON].form([function], CallRules(must_call=True, is_parallel=True))
    matcher = compiler.compile(params)

    def allows(arguments: str) -> bool:
        text = f'[{{"name": "f", "arguments": {arguments}}}]'
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.deep_copy().try_consume_tokens(token_ids) == len(token_ids)

    assert allows('{"value": 1, "next": {"value": 2, "next": null}}')
    assert not allows('{"value": "x", "next": null}')
    assert not allows('{"value": 1, "next": {"value": "x", "next": null}}')
