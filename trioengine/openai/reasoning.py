"""Splits a model's text into its reasoning and its answer. Like parsers of tool calls, whatever the pieces it comes in.

All before the closing marker is reasoning, as the core has it, whose grammars bind what follows; a prompt may have the
opening marker, or the model writes it. White space beside the markers belongs to neither part.
"""

import enum
from collections.abc import Mapping, Sequence

import attrs

from trioengine.config.engine import ReasoningParser
from trioengine.core.structured.reasoning import (
    MARKERS,
    MAX_TAIL_TOKENS,
    EndFinder,
    ReasoningMarkers,
    reasoning_ended_in_prompt,
)
from trioengine.openai.tool_parsers.base import held_length
from trioengine.tokenizer.tokenizer import Tokenizer

_THINKING = "enable_thinking"


@attrs.frozen
class Split:
    """What is new of both parts."""

    reasoning: str
    answer: str


class _Part(enum.Enum):
    START = enum.auto()
    """Nothing but white space and a beginning of the opening marker so far."""
    REASONING = enum.auto()
    GAP = enum.auto()
    """White space behind the closing marker."""
    ANSWER = enum.auto()


class ReasoningSplitter:
    """Reasoning up to the closing marker, then the answer."""

    def __init__(self, markers: ReasoningMarkers) -> None:
        """Start before the reasoning."""
        self._open, self._close = markers.start.decode(), markers.end.decode()
        self._part = _Part.START
        self._held = ""

    def feed(self, text: str) -> Split:
        """What is certain after this piece."""
        if self._part is _Part.ANSWER:
            return Split("", text)
        self._held += text
        if self._part is _Part.START:
            self._begin()
        reasoning = self._take_reasoning() if self._part is _Part.REASONING else ""
        return Split(reasoning, self._take_answer() if self._part is _Part.GAP else "")

    def finish(self) -> Split:
        """What was still held back, at the end of the text."""
        held, self._held = self._held, ""
        return Split("" if self._part in (_Part.ANSWER, _Part.GAP) else held, "")

    def _begin(self) -> None:
        rest = self._held.lstrip()
        if rest.startswith(self._open):
            rest = rest[len(self._open) :].lstrip()
            if not rest:
                return
        elif self._open.startswith(rest):
            return
        self._held, self._part = rest, _Part.REASONING

    def _take_reasoning(self) -> str:
        before, marker, after = self._held.partition(self._close)
        if marker:
            self._held, self._part = after, _Part.GAP
            return before.rstrip()
        certain = self._held[: len(self._held) - held_length(self._held, (self._close,))].rstrip()
        self._held = self._held[len(certain) :]
        return certain

    def _take_answer(self) -> str:
        answer, self._held = self._held.lstrip(), ""
        if answer:
            self._part = _Part.ANSWER
        return answer


class ReasoningReader:
    """The reasoning of one answer: its text, and how many tokens it took."""

    def __init__(self, parser: ReasoningParser, tokenizer: Tokenizer) -> None:
        """Start before the answer, of a model that may reason."""
        self._splitter = ReasoningSplitter(MARKERS[parser])
        self._finder: EndFinder | None = EndFinder(MARKERS[parser].end, tokenizer)
        self.num_tokens = 0
        """Of the reasoning so far, its closing marker included."""

    def feed(self, text: str, token_ids: Sequence[int]) -> Split:
        """What is certain after this piece of the answer."""
        if self._finder is not None:
            for token_id in token_ids:
                self.num_tokens += 1
                if self._finder.feed(token_id):
                    self._finder = None
                    break
        return self._splitter.feed(text)

    def finish(self) -> Split:
        """What was still held back, at the end."""
        return self._splitter.finish()


def reasons(
    parser: ReasoningParser, prompt_token_ids: Sequence[int], tokenizer: Tokenizer, kwargs: Mapping[str, object] | None
) -> bool:
    """Whether an answer begins with reasoning: not where the prompt has ended it, or the request switches it off."""
    if kwargs is not None and _THINKING in kwargs:
        return bool(kwargs[_THINKING])
    tail = tuple(prompt_token_ids[-MAX_TAIL_TOKENS:])
    return not reasoning_ended_in_prompt(MARKERS[parser], tail, tokenizer)


def thinking_kwargs(template_kwargs: Mapping[str, object]) -> Mapping[str, object] | None:
    """`GenerateRequest.reasoning_parser_kwargs` that follow from what a chat template is told: False switches off.

    True says nothing: the prompt shows whether the template obeys.
    """
    return {_THINKING: False} if template_kwargs.get(_THINKING) is False else None
