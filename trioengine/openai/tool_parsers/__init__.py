"""How models write tool calls, by name: each way has a parser, and a form that makes a model write it."""

import secrets
import string
from collections.abc import Callable, Collection, Mapping

import attrs

from trioengine.config.server import ToolCallParser
from trioengine.openai.tool_parsers.base import ToolParser
from trioengine.openai.tool_parsers.forms import Form, ObjectForm, PythonicForm, TaggedForm
from trioengine.openai.tool_parsers.hermes import CLOSE, OPEN, HermesParser
from trioengine.openai.tool_parsers.json_calls import PYTHON_TAG, JsonCallsParser
from trioengine.openai.tool_parsers.mistral import ARGUMENTS_MARKER, MARKER, MistralParser
from trioengine.openai.tool_parsers.pythonic import PythonicParser

_ID_LETTERS = string.ascii_letters + string.digits


@attrs.frozen
class ToolMarkup:
    """One way to write tool calls."""

    make_parser: Callable[[Collection[str]], ToolParser]
    """Takes the names of the tools."""
    form: Form
    hints: tuple[str, ...]
    """Texts in a chat template that tell of it."""
    id_prefix: str = "call_"
    num_id_letters: int = 24

    def new_id(self) -> str:
        """An id for a call, as models of this kind have them in their prompts."""
        return self.id_prefix + "".join(secrets.choice(_ID_LETTERS) for _ in range(self.num_id_letters))


TOOL_MARKUPS: Mapping[ToolCallParser, ToolMarkup] = {
    ToolCallParser.MISTRAL: ToolMarkup(
        make_parser=lambda names: MistralParser(),
        form=TaggedForm(MARKER, f"{MARKER}{{name}}{ARGUMENTS_MARKER}", ""),
        hints=(MARKER,),
        id_prefix="",
        num_id_letters=9,
    ),
    ToolCallParser.HERMES: ToolMarkup(
        make_parser=lambda names: HermesParser(),
        form=TaggedForm(OPEN, f'{OPEN}\n{{"name": "{{name}}", "arguments": ', f"}}\n{CLOSE}"),
        hints=(OPEN,),
    ),
    ToolCallParser.PYTHONIC: ToolMarkup(
        make_parser=PythonicParser,
        form=PythonicForm(),
        hints=("[func_name1(", "<|python_start|>", "func1(params_name=", "[function_name("),
    ),
    ToolCallParser.LLAMA3_JSON: ToolMarkup(
        make_parser=lambda names: JsonCallsParser(names, (PYTHON_TAG,)),
        form=ObjectForm("parameters", has_list=False),
        hints=(PYTHON_TAG, '"parameters": dictionary of argument name'),
    ),
    ToolCallParser.JSON: ToolMarkup(
        make_parser=JsonCallsParser,
        form=ObjectForm("arguments", has_list=True),
        hints=(),
    ),
}
"""By name. Of a template that has hints of several, the first counts."""


def markup_for_template(template: str | None) -> ToolCallParser:
    """The way of writing calls that a model's chat template shows; plain JSON where it shows none."""
    for name, markup in TOOL_MARKUPS.items():
        if template is not None and any(hint in template for hint in markup.hints):
            return name
    return ToolCallParser.JSON
