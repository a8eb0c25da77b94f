"""`ChatSettings`: what the chat route must know about the model and the server besides the request."""

from pathlib import Path

import attrs

from trioengine.checkpoint.generation import GenerationDefaults
from trioengine.config.engine import ReasoningParser
from trioengine.config.server import ToolCallParser
from trioengine.errors import ConfigError, RequestError
from trioengine.openai.tool_parsers import TOOL_MARKUPS, ToolMarkup, markup_for_template
from trioengine.tokenizer.chat_template import check_chat_template, template_source
from trioengine.tokenizer.tokenizer import Tokenizer


@attrs.frozen(kw_only=True)
class ChatSettings:
    """How the model writes what is not plain text, and what requests may bring."""

    tokenizer: Tokenizer = attrs.field(repr=False)
    markup: ToolMarkup
    reasoning_parser: ReasoningParser | None = None
    allows_chat_template: bool = False
    """Whether requests may bring a template of their own."""
    chat_template: str | None = attrs.field(default=None, repr=False)
    """What requests with tools are shown in: the server's, or the model's own."""
    server_template: str | None = attrs.field(default=None, repr=False)
    """In place of the model's own."""
    generation_defaults: GenerationDefaults = attrs.field(factory=GenerationDefaults)
    """What the model's authors recommend, for what requests leave out."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        tool_call_parser: ToolCallParser | None = None,
        reasoning_parser: ReasoningParser | None = None,
        allows_chat_template: bool = False,
        server_template: str | None = None,
        generation_defaults: GenerationDefaults | None = None,
    ) -> "ChatSettings":
        """For a model with this tokenizer. Without `tool_call_parser` the chat template shows how calls are written."""
        template = server_template or template_source(tokenizer, has_tools=True)
        if tool_call_parser is None:
            tool_call_parser = markup_for_template(template)
        return cls(
            tokenizer=tokenizer,
            markup=TOOL_MARKUPS[tool_call_parser],
            reasoning_parser=reasoning_parser,
            allows_chat_template=allows_chat_template,
            chat_template=template,
            server_template=server_template,
            generation_defaults=generation_defaults or GenerationDefaults(),
        )


def read_chat_template(value: str) -> str:
    """The chat template that `ServerConfig.chat_template` is: a file's text, or, with a brace in it, itself.

    Raises:
        ConfigError: it cannot be read, or is no template.
    """
    try:
        text = value if "{" in value else Path(value).read_text(encoding="utf-8")
        check_chat_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {value} cannot be read: {error}.", option="chat_template") from None
    except RequestError as error:
        raise ConfigError(error.message, option="chat_template") from None
    return text
