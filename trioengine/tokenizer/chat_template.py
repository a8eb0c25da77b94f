"""Renders a conversation with the model's own chat template, which is Jinja and as untrusted as the model file.

Users' strings go through the template with the control tokens written in them replaced by stand-ins (see `Tokenizer`),
so `<|im_end|>` typed by a user stays text whatever filters the template applies. This module does not know OpenAI's
request format: content is a string here.
"""

import datetime
import functools
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import attrs
from jinja2 import TemplateSyntaxError, Undefined, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_batch, do_center, do_format, do_indent, do_slice
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from trioengine.errors import CheckpointError, RequestError
from trioengine.tokenizer.tokenizer import Tokenizer

MAX_PROMPT_CHARS = 64 << 20
"""What a template may produce. Requests are bounded long before; this stops templates that run away."""
MAX_RENDER_CPU_S = 5.0
"""What a template may compute: rendering a long conversation takes a hundredth of it. A loop without end would hold up
everybody, since nothing can interrupt it."""
MAX_REPEATED_ITEMS = 1 << 20
MAX_MESSAGE_CHARS = 500
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
_SYSTEM, _DEVELOPER = "system", "developer"


@attrs.frozen
class RenderedChat:
    """A conversation as the model reads it."""

    prompt_text: str
    token_ids: list[int]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, object] | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
) -> RenderedChat:
    """Return the prompt of a conversation.

    The token ids are those of the rendered text; nothing is put in front, as a template writes BOS itself where the
    model wants it. Control tokens count only where the template wrote them. The role "developer" is "system" to a
    template that does not know it.

    Args:
        messages: each with "role", "content" and whatever else the template reads (tool calls, names). The arguments
            of a tool call are a mapping, or the JSON of one; templates get the mapping.
        add_generation_prompt: end with the start of the assistant's answer.
        template_kwargs: further variables, such as `tools`.
        continue_final_message: end with the last message's content, and nothing that closes it.
        chat_template: in place of the model's own.

    Raises:
        RequestError: the model has no chat template, a tool call's arguments are not an object, the template refuses
            the messages (with its own words), or the last message has no text to continue.
        CheckpointError: the template is not valid Jinja.
    """
    messages = [_with_parsed_arguments(position, message) for position, message in enumerate(messages)]
    if not messages:
        raise RequestError("messages must not be empty.", param="messages")
    variables = dict(template_kwargs or {})
    if reserved := variables.keys() & _RESERVED:
        raise RequestError(f"{min(reserved)} cannot be set by the request.", param="chat_template_kwargs")
    own_source = (
        None if chat_template is not None else template_source(tokenizer, has_tools=bool(variables.get("tools")))
    )
    source = own_source or chat_template
    if source is None:
        if names := ", ".join(map(repr, tokenizer.facts.chat_templates))[:MAX_MESSAGE_CHARS]:
            raise RequestError(
                f"This model's chat templates are named {names}, and none is the default one, which messages like these"
                " need. Serve it with the option chat_template, or use the completions API.",
                param="messages",
            )
        raise RequestError("This model has no chat template. Use the completions API.", param="messages")
    template = _compile(source) if own_source is not None else _compile_given(source)
    end_mark = ""
    if continue_final_message:
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message goes on with the last message, so add_generation_prompt must be false.",
                param="continue_final_message",
            )
        end_mark = secrets.token_hex(16)
        messages[-1] = _with_end_mark(messages[-1], end_mark)
    try:
        protected = [cast(dict[str, object], _protect(tokenizer, message)) for message in messages]
        if _DEVELOPER not in source:
            protected = [_with_known_role(message) for message in protected]
        variables = cast(dict[str, object], _protect(tokenizer, variables))
        variables |= {"messages": protected, "add_generation_prompt": add_generation_prompt}
        text = _render(template, {"tools": None, "documents": None} | _token_texts(tokenizer) | variables)
        if end_mark:
            text = _cut_at(text, end_mark)
    except RequestError as error:
        raise RequestError(tokenizer.reveal(error.message), param=error.param) from None
    except Exception as error:  # the border to the model's own program: whatever it raises, these messages caused it
        words = tokenizer.reveal(str(error))[:MAX_MESSAGE_CHARS]
        raise RequestError(f"The chat template cannot render these messages: {words}", param="messages") from error
    return RenderedChat(tokenizer.reveal(text), tokenizer.encode_rendered(text))


_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"})


def _with_parsed_arguments(position: int, message: Mapping[str, object]) -> Mapping[str, object]:
    """The message with its tool calls' arguments as mappings; itself when there is nothing to change."""
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return message
    parsed = list(cast(Sequence[object], calls))
    for index, call in enumerate(parsed):
        function = _mapping(_mapping(call).get("function"))
        if "arguments" in function:
            path = f"messages[{position}].tool_calls[{index}].function.arguments"
            arguments = parse_arguments(function["arguments"], path)
            parsed[index] = {**_mapping(call), "function": {**function, "arguments": arguments}}
    return {**message, "tool_calls": parsed}


def _mapping(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}


def parse_arguments(arguments: object, path: str) -> Mapping[str, object]:
    """The arguments of a tool call, of which a message has the JSON.

    Raises:
        RequestError: they are no object. `path` is its parameter.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} is not JSON: {str(error)[:200]}.", param=path) from error
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{path} must be the JSON of an object.", param=path)
    return cast(Mapping[str, object], arguments)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def template_source(tokenizer: Tokenizer, *, has_tools: bool) -> str | None:
    """The model's chat template, of several the one for such requests; None where it has none."""
    templates = tokenizer.facts.chat_templates
    source = templates.get(TOOL_TEMPLATE) if has_tools else None
    return source or templates.get(DEFAULT_TEMPLATE)


def _with_end_mark(message: Mapping[str, object], mark: str) -> Mapping[str, object]:
    content = message.get("content")
    if not isinstance(content, str) or not content or message.get("tool_calls"):
        raise RequestError("The last message has no text to continue.", param="continue_final_message")
    return {**message, "content": content + mark}


def _cut_at(text: str, mark: str) -> str:
    before, found, _ = text.rpartition(mark)
    if not found:
        raise RequestError(
            "The chat template does not show the last message's text, so it cannot be continued.",
            param="continue_final_message",
        )
    return before


def _token_texts(tokenizer: Tokenizer) -> dict[str, object]:
    facts = tokenizer.facts
    if facts.special_tokens:
        # One that they do not name is one that the template's authors did not have.
        return dict(facts.special_tokens)
    ids = {
        "bos_token": facts.bos_token_id,
        "eos_token": tokenizer.eos_token_id,
        "pad_token": facts.pad_token_id,
        "unk_token": facts.unk_token_id,
    }
    texts = {name: tokenizer.id_to_token(token_id) for name, token_id in ids.items() if token_id is not None}
    return {name: text for name, text in texts.items() if text is not None}


def _protect(tokenizer: Tokenizer, value: object) -> object:
    """A copy in which every string, keys included, is protected."""
    if isinstance(value, str):
        return tokenizer.protect(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {_protect(tokenizer, key): _protect(tokenizer, item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_protect(tokenizer, item) for item in cast(Sequence[object], value)]
    return value


def _with_known_role(message: dict[str, object]) -> dict[str, object]:
    return message | {"role": _SYSTEM} if message.get("role") == _DEVELOPER else message


def _render(template: Template, variables: dict[str, object]) -> str:
    _cpu_deadline_s.set(time.thread_time() + MAX_RENDER_CPU_S)
    parts: list[str] = []
    num_chars = 0
    for part in template.generate(variables):
        num_chars += len(part)
        if num_chars > MAX_PROMPT_CHARS:
            raise RequestError(f"The rendered chat is over {MAX_PROMPT_CHARS} characters.", param="messages")
        parts.append(part)
    return "".join(parts)


def check_chat_template(source: str) -> None:
    """Return when this can stand in place of a model's own template.

    Raises:
        RequestError: it is not valid Jinja. `param` is `chat_template`.
    """
    _compile_given(source)


@functools.lru_cache(maxsize=8)
def _compile_given(source: str) -> Template:
    """Of a request or a server: kept apart, so that requests cannot push the model's own out of the cache."""
    try:
        return _environment().from_string(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise RequestError(
            f"chat_template is not valid: {str(error)[:MAX_MESSAGE_CHARS]}.", param="chat_template"
        ) from error


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise CheckpointError(f"The model's chat template is not valid: {error}.") from error


@functools.cache
def _environment() -> "_ChatEnvironment":
    environment = _ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], cache_size=0
    )
    filters = cast(dict[str, Callable[..., object]], environment.filters)
    filters["tojson"] = _to_json
    for name, function in filters.items():
        filters[name] = _bounded(function)
    functions = cast(dict[str, object], environment.globals)
    del functions["lipsum"]
    functions["raise_exception"] = _raise_exception
    functions["strftime_now"] = _strftime_now
    return environment


_HUGE_WIDTH = re.compile(r"%[-+ #0]*(\d*\.)?(\d{5}|\*)|\{[^{}]*:[^{}]*(\d{5}|\{)")
"""A width of five digits, or of another argument, in a text for `%` or `format`."""
_cpu_deadline_s: ContextVar[float] = ContextVar("_cpu_deadline_s", default=math.inf)
"""By this thread's clock. Where nothing is rendered, as while a template is compiled, there is none."""


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses to make huge strings and lists out of nothing, and to compute for ever."""

    _num_turns = 0
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What the parts of a block, a macro or `~` are put together by."""
        texts = list(parts)
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def join_texts(self, *values: object) -> str:
        """What `~` does."""
        return self.concat(map(str, values))

    @property
    def has_time(self) -> bool:
        """Read in each turn of a loop and by each macro. Always true; once it is not, an error."""
        self._num_turns += 1  # By several threads at once, so at worst it looks a little later.
        if not self._num_turns % 16 and time.thread_time() > _cpu_deadline_s.get():
            raise RequestError(f"The chat template computes for more than {MAX_RENDER_CPU_S:g} s.", param="messages")
        return True

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(function, "__self__", None), (str, bytes, int)):
            _check_sizes(args, kwargs)
        value = super().call(context, function, *args, **kwargs)
        if isinstance(value, str):
            _check_length(len(value))
        return value

    def wrap_str_format(self, value: Any) -> Any:
        """As Jinja has it: the safe form of a text's method `format`, None for anything else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Watch().visit(template)
        template.set_environment(self)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if all(isinstance(side, (str, list, tuple)) for side in (left, right)):
                _check_length(len(left) + len(right))
            return left + right
        if operator == "%":
            _check_format(left)
            return super().call_binop(context, operator, left, right)
        if operator == "**" or (isinstance(left, int) and isinstance(right, int)):
            is_small = all(isinstance(side, (int, float)) and abs(side) < 1 << 32 for side in (left, right))
            if not is_small or (operator == "**" and abs(right) > 64):
                raise SecurityError(f"the template computes {operator} with too large numbers")
        elif not isinstance(left, float) and not isinstance(right, float):
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(count, int) and isinstance(sequence, (str, list, tuple, bytes)):
                num_items = len(cast(Sequence[object], sequence)) * count
                if num_items > MAX_REPEATED_ITEMS:
                    raise SecurityError(f"the template repeats something to {num_items} items")
        return super().call_binop(context, operator, left, right)


class _Watch(NodeTransformer):
    """Has each turn of a loop, and each macro and block, spend time, and `~` look at what it makes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _spending(node))
        if node.test is not None:
            node.test = nodes.And(_has_time(node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _spending(node))
        return node

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        method = nodes.EnvironmentAttribute("join_texts", lineno=node.lineno)
        return nodes.Call(method, node.nodes, [], None, None, lineno=node.lineno)


def _spending(node: nodes.Node) -> nodes.Node:
    return nodes.ExprStmt(_has_time(node), lineno=node.lineno)


def _has_time(node: nodes.Node) -> nodes.Expr:
    return nodes.EnvironmentAttribute("has_time", lineno=node.lineno)


def _bounded(function: Callable[..., object]) -> Callable[..., object]:
    """A filter that neither takes nor makes what is huge."""
    is_of_numbers = function in (do_batch, do_center, do_indent, do_slice, _to_json)

    @functools.wraps(function)  # With what Jinja has noted about its arguments.
    def bounded(*args: Any, **kwargs: Any) -> object:
        if is_of_numbers:
            _check_sizes(args, kwargs)
        elif function is do_format:
            _check_format(args[0])
        value = function(*args, **kwargs)
        if isinstance(value, str):
            _check_length(len(value))
        return value

    return bounded


def _check_sizes(args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_REPEATED_ITEMS:
            raise SecurityError(f"the template asks for a size of {value}")


def _check_format(text: object) -> None:
    if isinstance(text, str) and _HUGE_WIDTH.search(text):
        raise SecurityError("the template formats something to a huge width, or one that it computes")


def _check_length(num_items: int) -> None:
    if num_items > MAX_PROMPT_CHARS:
        raise SecurityError(f"the template makes something of more than {MAX_PROMPT_CHARS} characters or items")


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As the templates' authors had it: no escapes for HTML, unlike Jinja's own filter."""
    if isinstance(value, Undefined):
        raise TemplateError("an undefined value cannot be written as JSON")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise RequestError(
        f"The chat template refuses these messages: {str(message)[:MAX_MESSAGE_CHARS]}", param="messages"
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
