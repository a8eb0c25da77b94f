"""What `tools` and `tool_choice` mean: whether the answer is read for calls, and the form that it must have."""

from collections.abc import Mapping

import attrs

from trioengine.core.structured.json_schema import Schema, bound_schema
from trioengine.errors import RequestError
from trioengine.openai.chat_protocol import AllowedTools, ChatCompletionRequest, NamedToolChoice, Tool, ToolChoice
from trioengine.openai.closed_schema import closed_schema
from trioengine.openai.tool_parsers import ToolMarkup
from trioengine.openai.tool_parsers.forms import ANY_ARGUMENTS, BoundFunction, CallRules
from trioengine.types.structured import StructuredOutputsParams, parse_json

_NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


@attrs.frozen
class ToolPlan:
    """What is done about tools."""

    names: tuple[str, ...]
    """Of the tools that may be called; the answer is read for calls where there are some."""
    form: StructuredOutputsParams | None
    """Of the answer: of its calls, and what `response_format` asks for."""
    schema_paths: tuple[str, ...] = ()
    """Where in the request the schemas of the form's calls stand, in their order."""


def tool_plan(request: ChatCompletionRequest, markup: ToolMarkup) -> ToolPlan:
    """How the answer of a model that writes calls in this way is bound and read.

    A strict function's arguments always fit its schema. Those of others fit where the answer must be a call and the
    schema is one that can be kept; where it is not, they are a JSON object.

    Raises:
        RequestError: a strict schema cannot be kept, naming its path; or the answer cannot have both forms.
    """
    form = request.sampling.structured_outputs
    choice = request.effective_tool_choice
    if choice is ToolChoice.NONE:
        return ToolPlan((), form)
    tools = request.shown_tools
    if isinstance(choice, NamedToolChoice):
        tools = [(position, tool) for position, tool in tools if tool.function.name == choice.name]
    names = tuple(tool.function.name for _, tool in tools)
    must_call = choice.must_call if isinstance(choice, AllowedTools) else choice is not ToolChoice.AUTO
    if form is None and not must_call and not any(tool.function.strict for _, tool in tools):
        return ToolPlan(names, None)
    rules = CallRules(
        must_call=must_call,
        is_parallel=request.parallel_tool_calls and not isinstance(choice, NamedToolChoice),
        otherwise=None if form is None else _schema_beside_calls(form, must_call=must_call),
    )
    functions = [_bound_function(tool, f"tools[{position}].function.parameters") for position, tool in tools]
    return ToolPlan(names, markup.form(functions, rules), tuple(function.path for function in functions))


def _bound_function(tool: Tool, path: str) -> BoundFunction:
    function = tool.function
    is_strict = function.strict is True
    schema: Mapping[str, object] = _NO_ARGUMENTS if function.parameters is None else function.parameters
    if "type" not in schema and "$ref" not in schema:
        schema = {"type": "object", **schema}
    try:
        bound_schema(schema, path)
    except RequestError:
        if is_strict:
            raise
        return BoundFunction(function.name, ANY_ARGUMENTS, is_strict, path)
    return BoundFunction(function.name, closed_schema(schema), is_strict, path)


def _schema_beside_calls(form: StructuredOutputsParams, *, must_call: bool) -> Schema:
    if must_call:
        raise RequestError(
            "The answer must be a call (tool_choice), so it cannot have another form (response_format).",
            param="tool_choice",
        )
    if form.json is not None and form.whitespace_pattern is None:
        return bound_schema(parse_json(form.json, "json"), "response_format")
    if form.json_object:
        return {"type": "object"}
    raise RequestError(
        "Beside tools the form of an answer can be a JSON schema or json_object. With another form, tool_choice must be"
        " none.",
        param="tool_choice",
    )
