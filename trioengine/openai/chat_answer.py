"""Reads a chat's answer: reasoning, text and tool calls out of one text, streamed or whole alike."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs

from trioengine.config.engine import ReasoningParser
from trioengine.openai.chat_protocol import ChatCompletionRequest
from trioengine.openai.chat_settings import ChatSettings
from trioengine.openai.chat_translate import ChatPlan
from trioengine.openai.reasoning import ReasoningReader, reasons
from trioengine.openai.tool_parsers import ToolMarkup
from trioengine.openai.tool_parsers.base import ArgumentsDelta, CallStart, TextDelta, ToolParser
from trioengine.tokenizer.tokenizer import Tokenizer


@attrs.define
class CallDelta:
    """What is new of a tool call."""

    index: int
    id: str | None
    """Only where the call begins."""
    name: str | None
    """Likewise."""
    arguments: str


@attrs.frozen
class ReasoningDelta:
    """More of the reasoning."""

    text: str


AnswerEvent: TypeAlias = ReasoningDelta | TextDelta | CallDelta


@attrs.define
class AnswerDelta:
    """What is new of an answer."""

    reasoning: str = ""
    text: str = ""
    calls: list[CallDelta] = attrs.field(factory=list[CallDelta])

    @property
    def has_news(self) -> bool:
        """Whether there is anything."""
        return bool(self.reasoning or self.text or self.calls)


@attrs.frozen(kw_only=True)
class ChatForm:
    """What a request's reply looks like."""

    tokenizer: Tokenizer = attrs.field(repr=False)
    include_usage: bool = False
    continuous_usage: bool = False
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False
    has_token_ids: bool = False
    names_tokens_by_id: bool = False
    """Whether log probabilities do."""
    tool_names: tuple[str, ...] = ()
    markup: ToolMarkup | None = None
    """Of calls; None where the answer is not read for them."""
    is_parallel: bool = True
    """False shows one call of an answer at most."""
    reasoning_parser: ReasoningParser | None = None
    reasoning_kwargs: Mapping[str, object] | None = None
    shows_reasoning: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether an answer is nothing but text."""
        tells_tokens = self.has_logprobs or self.has_token_ids
        return self.markup is None and self.reasoning_parser is None and not tells_tokens


def chat_form(request: ChatCompletionRequest, plan: ChatPlan, settings: ChatSettings) -> ChatForm:
    """What the reply to a request looks like."""
    return ChatForm(
        tokenizer=settings.tokenizer,
        include_usage=bool(request.stream_options.include_usage),
        continuous_usage=bool(request.stream_options.continuous_usage_stats),
        has_logprobs=request.logprobs,
        has_prompt_logprobs=request.sampling.prompt_logprobs is not None,
        has_token_ids=request.return_token_ids,
        names_tokens_by_id=request.return_tokens_as_token_ids,
        tool_names=plan.tools.names,
        markup=settings.markup if plan.tools.names else None,
        is_parallel=request.parallel_tool_calls,
        reasoning_parser=settings.reasoning_parser,
        reasoning_kwargs=plan.generate_request.reasoning_parser_kwargs,
        shows_reasoning=request.include_reasoning,
    )


class AnswerReader:
    """One choice of a reply, fed in pieces. However they are cut, the deltas joined are the same."""

    def __init__(self, form: ChatForm, prompt_token_ids: Sequence[int]) -> None:
        """Start before the answer to this prompt."""
        self.has_calls = False
        """Whether a call was shown."""
        self._form = form
        self._reasoning: ReasoningReader | None = None
        parser = form.reasoning_parser
        if parser is not None and reasons(parser, prompt_token_ids, form.tokenizer, form.reasoning_kwargs):
            self._reasoning = ReasoningReader(parser, form.tokenizer)
        self._calls: ToolParser | None = None
        self._new_id: Callable[[], str] | None = None
        if form.markup is not None:
            self._calls, self._new_id = form.markup.make_parser(form.tool_names), form.markup.new_id

    @property
    def num_reasoning_tokens(self) -> int:
        """So far."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def feed(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> AnswerDelta:
        """What is certain after this piece; after the last one, all."""
        delta = AnswerDelta()
        for event in self.events(text, token_ids, is_last=is_last):
            match event:
                case ReasoningDelta(text):
                    delta.reasoning += text
                case TextDelta(text):
                    delta.text += text
                case CallDelta(index=index, arguments=arguments):
                    # Arguments belong to the call that was started last, in this delta or before.
                    if event.id is None and delta.calls and delta.calls[-1].index == index:
                        delta.calls[-1].arguments += arguments
                    else:
                        delta.calls.append(event)
        return delta

    def events(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> Sequence[AnswerEvent]:
        """What is certain after this piece, in the order in which the model wrote it."""
        events: list[AnswerEvent] = []
        if self._reasoning is not None:
            parts = [self._reasoning.feed(text, token_ids)]
            if is_last:
                parts.append(self._reasoning.finish())
            reasoning = "".join(part.reasoning for part in parts)
            if reasoning and self._form.shows_reasoning:
                events.append(ReasoningDelta(reasoning))
            text = "".join(part.answer for part in parts)
        if self._calls is None:
            if text:
                events.append(TextDelta(text))
            return events
        found = list(self._calls.feed(text))
        if is_last:
            found += self._calls.finish()
        for event in found:
            match event:
                case TextDelta():
                    events.append(event)
                case CallStart(index, name) if index == 0 or self._form.is_parallel:
                    assert self._new_id is not None
                    self.has_calls = True
                    events.append(CallDelta(index, self._new_id(), name, ""))
                case ArgumentsDelta(index, arguments) if index == 0 or self._form.is_parallel:
                    events.append(CallDelta(index, None, None, arguments))
                case _:
                    pass
        return events
