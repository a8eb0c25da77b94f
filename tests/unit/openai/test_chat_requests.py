"""What chat requests with tools, forms, reasoning and history mean for the engine."""

import json
from typing import Any, cast

import attrs
import pytest

from trioengine.checkpoint.generation import GenerationDefaults
from trioengine.config.engine import ReasoningParser
from trioengine.config.server import ToolCallParser
from trioengine.errors import ModelNotFoundError, RequestError
from trioengine.openai.chat_answer import chat_form
from trioengine.openai.chat_protocol import NamedToolChoice, ToolChoice, parse_chat_request
from trioengine.openai.chat_settings import ChatSettings
from trioengine.openai.chat_translate import ChatPlan, chat_to_generate
from trioengine.openai.translate import check_model, check_unknown_fields, unknown_fields_warning
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.request import ChatPrompt
from trioengine.types.structured import StructuredOutputsParams

TEXT_SETTINGS = ChatSettings.of(FakeTokenizer(), tool_call_parser=ToolCallParser.HERMES)
"""Of a model whose chat template does not know tools."""
SETTINGS = attrs.evolve(TEXT_SETTINGS, chat_template="{% if tools %}...")
CITY: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED_CITY = {**CITY, "additionalProperties": False}
UNSUPPORTED: dict[str, object] = {"type": "object", "properties": {"a": {"not": {}}}}
MESSAGES: list[object] = [{"role": "user", "content": "Hi"}]
NOTHING: dict[str, object] = {}


def tool(name: str = "weather", parameters: object = CITY, **fields: object) -> dict[str, object]:
    function: dict[str, object] = {"name": name, "description": "Asks.", "parameters": parameters, **fields}
    return {"type": "function", "function": function}


def plan(settings: ChatSettings = SETTINGS, **fields: object) -> ChatPlan:
    body = {"messages": MESSAGES, **fields}
    return chat_to_generate(parse_chat_request(json.dumps(body).encode()), "id", settings)


def form_of(**fields: Any) -> StructuredOutputsParams:
    form = plan(**fields).generate_request.sampling.structured_outputs
    assert form is not None
    form.validate()
    return form


def prompt_of(**fields: Any) -> ChatPrompt:
    prompt = plan(**fields).generate_request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def fault(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        plan(**fields)
    return caught.value


# Tools


def test_tools_reach_the_template_and_the_answer_is_read_for_calls() -> None:
    """Without a choice the model decides, and nothing binds it."""
    planned = plan(tools=[tool(strict=False)])
    prompt = planned.generate_request.prompt
    assert isinstance(prompt, ChatPrompt)
    function = {"name": "weather", "description": "Asks.", "parameters": CITY}
    assert prompt.template_kwargs["tools"] == [{"type": "function", "function": function}]
    assert planned.tools.names == ("weather",)
    assert planned.generate_request.sampling.structured_outputs is None
    assert planned.generate_request.sampling.skip_special_tokens is False


def test_no_tool_is_called_where_none_may_be() -> None:
    """Neither does the model hear of them, nor is the answer read for calls."""
    planned = plan(tools=[tool()], tool_choice="none")
    assert planned.tools.names == ()
    assert "tools" not in prompt_of(tools=[tool()], tool_choice="none").template_kwargs
    assert planned.generate_request.sampling.skip_special_tokens is True


def test_a_required_call_is_bound_to_the_schemas() -> None:
    """In the model's markup, with every function as a choice."""
    tag = json.loads(form_of(tools=[tool(), tool("now", None)], tool_choice="required").structural_tag or "")
    assert tag["at_least_one"] is True
    assert tag["stop_after_first"] is False
    first, second = tag["structures"]
    assert first == {
        "begin": '<tool_call>\n{"name": "weather", "arguments": ',
        "schema": CLOSED_CITY,
        "end": "}\n</tool_call>",
    }
    assert second["schema"]["properties"] == {}


def test_a_named_call_is_one_call_of_this_function() -> None:
    """Others are not possible."""
    choice = {"type": "function", "function": {"name": "now"}}
    planned = plan(tools=[tool(), tool("now")], tool_choice=choice)
    tag = json.loads(form_of(tools=[tool(), tool("now")], tool_choice=choice).structural_tag or "")
    assert planned.tools.names == ("now",)
    assert len(tag["structures"]) == 1
    assert tag["stop_after_first"] is True


@pytest.mark.parametrize(("mode", "is_bound"), [("auto", False), ("required", True)])
def test_of_allowed_tools_alone_the_model_hears(mode: str, is_bound: bool) -> None:
    """OpenAI's way to keep a list of tools and let few of them be called; errors keep their places in the list."""
    allowed = [{"type": "function", "function": {"name": name}} for name in ("now", "then")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    fields: dict[str, Any] = {"tools": [tool(), tool("now"), tool("then")], "tool_choice": choice}
    planned = plan(**fields)
    shown = cast("list[Any]", prompt_of(**fields).template_kwargs["tools"])
    assert [each["function"]["name"] for each in shown] == ["now", "then"]
    assert planned.tools.names == ("now", "then")
    assert (planned.tools.form is not None) is is_bound
    assert planned.tools.schema_paths == (
        ("tools[1].function.parameters", "tools[2].function.parameters") if is_bound else ()
    )


def test_calls_that_are_not_parallel_stop_after_the_first() -> None:
    """By the form where there is one, and for the reader always."""
    fields: dict[str, Any] = {"tools": [tool()], "tool_choice": "required", "parallel_tool_calls": False}
    assert json.loads(form_of(**fields).structural_tag or "")["stop_after_first"] is True
    request = parse_chat_request(json.dumps({"messages": MESSAGES, **fields}).encode())
    assert chat_form(request, plan(**fields), SETTINGS).is_parallel is False


def test_a_strict_function_binds_beside_free_text() -> None:
    """The model still decides whether it calls."""
    tag = json.loads(form_of(tools=[tool(strict=True), tool("b", UNSUPPORTED)]).structural_tag or "")
    assert tag["at_least_one"] is False
    assert [structure["schema"] for structure in tag["structures"]] == [CLOSED_CITY, {"type": "object"}]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_schema_that_cannot_be_kept_is_refused_with_its_path(choice: str) -> None:
    """Case 31 (llama.cpp 19051): never an unconstrained answer."""
    error = fault(tools=[tool(), tool("b", UNSUPPORTED, strict=True)], tool_choice=choice)
    assert error.param == "tools[1].function.parameters"
    assert "/properties/a/not" in error.message


def test_a_schema_that_is_not_strict_may_be_kept_in_part() -> None:
    """The call, its name and that its arguments are an object always hold."""
    tag = json.loads(form_of(tools=[tool("b", UNSUPPORTED)], tool_choice="required").structural_tag or "")
    assert tag["structures"][0]["schema"] == {"type": "object"}
    assert plan(tools=[tool("b", UNSUPPORTED)]).generate_request.sampling.structured_outputs is None


def test_a_response_format_beside_tools_binds_what_is_no_call() -> None:
    """Where the answer must be a call there is nothing left for it to bind."""
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    form = form_of(tools=[tool()], response_format=response_format)
    assert json.loads(form.structural_tag or "")["otherwise"] == CLOSED_CITY
    assert fault(tools=[tool()], response_format=response_format, tool_choice="required").param == "tool_choice"
    assert fault(tools=[tool()], structured_outputs={"regex": "a+"}).param == "tool_choice"
    assert form_of(tools=[tool()], structured_outputs={"regex": "a+"}, tool_choice="none").regex == "a+"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool('a"b')]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 200)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool()] * 300}, "tools"),
        ({"tools": NOTHING}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"tools": [{}]}, "tools": [tool()]}, "chat_template_kwargs.tools"),
        ({"tool_choice": "maybe", "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice"),
        *(
            ({"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}, "tools": [tool()]}, "tool_choice")
            for allowed in (
                None,
                {"mode": "auto", "tools": []},
                {"mode": "none", "tools": [{"type": "function", "function": {"name": "weather"}}]},
                {"mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
                {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
            )
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [tool()]}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
    ids=str,
)
def test_tools_that_make_no_sense_are_named(fields: dict[str, object], path: str) -> None:
    """Before anything is sent."""
    assert fault(**fields).param == path


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ToolChoice.NONE),
        ("auto", ToolChoice.AUTO),
        ("required", ToolChoice.REQUIRED),
        (None, ToolChoice.AUTO),
        ({"type": "required"}, ToolChoice.REQUIRED),
        ({"type": "function", "function": {"name": "weather"}}, NamedToolChoice("weather")),
    ],
)
def test_every_tool_choice_is_known(choice: object, expected: object) -> None:
    """As a word or an object."""
    body = {"messages": MESSAGES, "tools": [tool()], "tool_choice": choice}
    assert parse_chat_request(json.dumps(body).encode()).effective_tool_choice == expected


# History


def assistant(arguments: object) -> dict[str, object]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}


def test_calls_of_the_history_reach_the_template_as_objects() -> None:
    """With their ids; the tool's answer names the call."""
    history = [*MESSAGES, assistant('{"a": 1}'), {"role": "tool", "content": "2", "tool_call_id": "c1"}]
    messages = prompt_of(messages=history).messages
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert messages[2] == {"role": "tool", "content": "2", "tool_call_id": "c1"}


@pytest.mark.parametrize("arguments", ['"a"', "[1]", "{", "1", [1], '{"a": NaN}'])
def test_arguments_in_the_history_that_are_no_object_are_refused(arguments: object) -> None:
    """Case 29 (sglang 28035): naming the message."""
    error = fault(messages=[*MESSAGES, assistant(arguments)])
    assert error.param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_the_history_is_kept(name: str) -> None:
    """By the name that templates know."""
    message = {"role": "assistant", "content": "4", name: "2 + 2"}
    expected = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    assert prompt_of(messages=[*MESSAGES, message]).messages[1] == expected


# Templates without tools


def text_messages(template: str, messages: list[object], **fields: Any) -> list[dict[str, object]]:
    settings = attrs.evolve(TEXT_SETTINGS, chat_template=template)
    prompt = plan(settings, messages=messages, **fields).generate_request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert "tools" not in prompt.template_kwargs
    return [dict(message) for message in prompt.messages]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_stand_in_the_system_message_of_a_template_that_does_not_know_them(role: str) -> None:
    """Behind what it says, with the way to write a call."""
    messages = [{"role": role, "content": "Be brief."}, *MESSAGES]
    first, second = text_messages("system", messages, tools=[tool()])
    assert first["role"] == role
    content = str(first["content"])
    assert content.startswith("Be brief.\n\n")
    assert '"weather"' in content
    assert '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n</tool_call>' in content
    assert second == MESSAGES[0]
    assert text_messages("system", MESSAGES, tools=[tool()])[0]["role"] == "system"


def test_a_template_without_a_system_message_has_tools_in_the_users_first() -> None:
    """Before what the user says."""
    for template in ("{{ messages }}", "raise_exception('System role not supported') if role == 'system'"):
        (first,) = text_messages(template, MESSAGES, tools=[tool()])
        assert first["role"] == "user"
        assert str(first["content"]).endswith("\n\nHi")


def test_calls_and_results_of_the_history_become_text() -> None:
    """Results that follow each other are one message, for templates that want the roles to alternate."""
    results = [{"role": "tool", "content": text, "tool_call_id": "c1"} for text in ("2", "3")]
    messages = text_messages("system", [*MESSAGES, assistant('{"a": 1}'), *results])
    assert messages[1:] == [
        {"role": "assistant", "content": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'},
        {"role": "user", "content": "Result of add: 2\nResult of add: 3"},
    ]


# Forms, reasoning, template


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY, "strict": True}}},
            StructuredOutputsParams(json=CLOSED_CITY),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=("a", "b"))),
        ({"structured_outputs": {"json": CITY, "regex": None}}, StructuredOutputsParams(json=CITY)),
        ({"guided_regex": "a+"}, StructuredOutputsParams(regex="a+")),
        ({"guided_json": CITY}, StructuredOutputsParams(json=CITY)),
    ],
    ids=str,
)
def test_every_way_to_ask_for_a_form_is_known(fields: dict[str, Any], expected: object) -> None:
    """OpenAI's, vLLM's and vLLM's older one."""
    assert plan(**fields).generate_request.sampling.structured_outputs == expected


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": NOTHING}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": UNSUPPORTED}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": UNSUPPORTED}}, "structured_outputs.json"),
        ({"structured_outputs": NOTHING}, "structured_outputs"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
    ids=str,
)
def test_forms_that_cannot_be_kept_are_named_as_the_client_wrote_them(fields: dict[str, object], path: str) -> None:
    """Case 31 (llama.cpp 19051): with the keyword's path in the words."""
    error = fault(**fields)
    assert error.param == path
    if '"not"' in json.dumps(fields):
        assert "/properties/a/not" in error.message


@pytest.mark.parametrize(
    ("fields", "error", "message", "path"),
    [
        (
            {"tools": [tool(), tool("b", strict=True)]},
            "structured_outputs.structural_tag: /structures/1/schema/properties/a: no text satisfies it.",
            "tools[1].function.parameters: /properties/a: no text satisfies it.",
            "tools[1].function.parameters",
        ),
        (
            {"tools": [tool(), tool("b", strict=True)]},
            "structured_outputs.json: /$defs/f1/properties/a: no text satisfies it.",
            "tools[1].function.parameters: /properties/a: no text satisfies it.",
            "tools[1].function.parameters",
        ),
        (
            {"tools": [tool(), tool("b", strict=True)]},
            "structured_outputs.grammar: no text satisfies json-schema:///#/$defs/f1.",
            "tools[1].function.parameters: no text satisfies json-schema:///#/$defs/f1.",
            "tools[1].function.parameters",
        ),
        (
            {"tools": [tool(strict=True)]},
            "structured_outputs.grammar: no text satisfies it.",
            "tools: no text satisfies it.",
            "tools",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}},
            "structured_outputs.json: /: no text satisfies it.",
            "response_format: /: no text satisfies it.",
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: a.", None, "structured_outputs.regex"),
        ({}, "temperature is wrong.", None, "temperature"),
    ],
    ids=str,
)
def test_the_cores_errors_about_forms_name_what_the_client_wrote(
    fields: dict[str, Any], error: str, message: str | None, path: str
) -> None:
    """Case 31 (llama.cpp 19051): what only the compiler of grammars finds has a path too."""
    param = error.partition(":")[0] if ":" in error else "temperature"
    written = plan(**fields).as_written(RequestError(error, param=param))
    assert written.message == (message or error)
    assert written.param == path


def test_thinking_that_the_template_is_told_to_leave_out_is_not_looked_for() -> None:
    """The core hears of it too, so that a grammar binds at once."""
    settings = attrs.evolve(SETTINGS, reasoning_parser=ReasoningParser.QWEN3)
    ways: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ]
    for fields in ways:
        request = plan(settings, **fields).generate_request
        assert request.reasoning_parser_kwargs == {"enable_thinking": False}
    assert plan(settings).generate_request.reasoning_parser_kwargs is None
    assert plan(settings).generate_request.sampling.skip_special_tokens is False


def test_a_template_of_the_request_must_be_allowed() -> None:
    """It is a program."""
    assert fault(chat_template="{{ 1 }}").param == "chat_template"
    allowed = attrs.evolve(SETTINGS, allows_chat_template=True)
    prompt = plan(allowed, chat_template="{{ 1 }}").generate_request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.chat_template == "{{ 1 }}"


def test_the_last_message_may_be_continued() -> None:
    """Then there is no start of an answer in the prompt, whether that was said or not."""
    prompt = prompt_of(continue_final_message=True, documents=[{"text": "a"}])
    assert prompt.continue_final_message
    assert not prompt.add_generation_prompt
    assert prompt.template_kwargs == {"documents": [{"text": "a"}]}


# What is about sampling and the request


def test_log_probabilities_are_the_true_top() -> None:
    """As many as were asked for, beside the token's own."""
    assert plan(logprobs=True, top_logprobs=5).generate_request.sampling.logprobs == 5
    assert plan(logprobs=True).generate_request.sampling.logprobs == 0
    assert plan().generate_request.sampling.logprobs is None
    assert fault(top_logprobs=5).param == "top_logprobs"
    assert fault(logprobs=True, top_logprobs=-1).param == "top_logprobs"
    assert fault(logprobs=1).param == "logprobs"


def test_fields_of_the_request_itself_are_passed_on() -> None:
    """Priority, salt, time and choices."""
    request = plan(priority=3, cache_salt="s", timeout=2.5, n=2, seed=7, bad_words=["x"]).generate_request
    assert (request.priority, request.cache_salt, request.deadlines.total_s) == (3, "s", 2.5)
    assert (request.sampling.n, request.sampling.seed, request.sampling.bad_words) == (2, 7, ("x",))
    assert fault(timeout=0).param == "timeout"
    assert plan(truncate_prompt_tokens=5).generate_request.tokenization_kwargs == {"truncate_prompt_tokens": 5}
    assert fault(truncate_prompt_tokens=0).param == "truncate_prompt_tokens"
    assert fault(prompt_logprobs=1, stream=True).param == "prompt_logprobs"


def test_authors_defaults_fill_what_was_left_out() -> None:
    """Values of the request win, and null is the same as leaving out."""
    defaults = GenerationDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05, max_tokens=99)
    settings = attrs.evolve(SETTINGS, generation_defaults=defaults)
    sampling = plan(settings, top_k=5, temperature=None).generate_request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.6, 5, 1.05)
    assert sampling.max_tokens == 99
    assert plan(settings, max_tokens=7, temperature=1.0).generate_request.sampling.max_tokens == 7
    assert plan(settings, temperature=1.0).generate_request.sampling.temperature == 1.0


def test_a_lora_adapter_is_a_model() -> None:
    """By its name; others are not found."""
    request = parse_chat_request(json.dumps({"messages": MESSAGES, "model": "sql"}).encode())
    assert check_model(request, "served", {"sql": 1}) == "sql"
    assert check_model(attrs.evolve(request, model=None), "served") is None
    with pytest.raises(ModelNotFoundError):
        check_model(request, "served", {"other": 1})


def test_fields_that_nobody_knows_are_named() -> None:
    """In a header, in ASCII; a strict server refuses them. What other servers keep books with is no news."""
    body = {"messages": MESSAGES, "user": "u", "store": True, "metadata": NOTHING, "temprature": 1, "é\n": 2}
    request = parse_chat_request(json.dumps(body).encode())
    assert unknown_fields_warning(request) == ("fields without effect: temprature, \\xe9\\n",)
    with pytest.raises(RequestError) as caught:
        check_unknown_fields(request)
    assert caught.value.param == "temprature"
