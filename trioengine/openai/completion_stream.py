"""Replies of `/v1/completions`, streamed and whole: the choices of one prompt or of several, and the prompts' own text
where it is asked for.

A chunk without log probabilities costs one JSON escape of its text and one concatenation.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from trioengine.openai.sse import (
    DONE,
    NULL,
    ChunkShape,
    EventStream,
    ReplyHead,
    finish_fields,
    ids_field,
    name_of_token,
    prompt_logprobs_of,
    whole_reply,
)
from trioengine.types.output import CompletionOutput, Logprob, PositionLogprobs, RequestOutput

_OBJECT = "text_completion"
_CHUNK = ChunkShape(object=_OBJECT, before_first_text=b'"text":', before_text=b'"text":', after_text=b"")


@attrs.frozen
class CompletionForm:
    """What is told besides the text that was generated."""

    n: int = 1
    """Choices for each prompt."""
    include_usage: bool = False
    """A chunk with the token counts comes before the end, and `usage` is null in all others."""
    continuous_usage: bool = False
    """With `include_usage`: every chunk has the counts so far."""
    logprobs: int | None = None
    """How many of the most likely tokens are told for each; None is no log probabilities."""
    has_prompt_logprobs: bool = False
    """Whether whole replies tell the prompts' log probabilities by token id, in each choice."""
    has_token_ids: bool = False
    """Whether each choice tells the ids of its tokens, and of the prompt's."""
    names_tokens_by_id: bool = False
    """Whether log probabilities do."""
    echoes: Sequence[Callable[[Sequence[int]], str]] = ()
    """For each prompt its text, of its tokens as they were used. None where the reply has no prompts."""
    token_bytes: Callable[[int], bytes] | None = None
    """The tokenizer's. Needed with `echoes` and `logprobs`."""


class CompletionEvents(EventStream):
    """Outputs of one prompt in, bytes of events out. Its choices are counted on from those of the prompts before it."""

    @classmethod
    def of(cls, head: ReplyHead, form: CompletionForm, prompt_index: int = 0) -> "CompletionEvents":
        """The events of this prompt."""
        tells_tokens = form.logprobs is not None or form.has_token_ids
        is_plain = not tells_tokens and not form.echoes and prompt_index == 0
        # What is nothing but text is most of what there is, and has no more to do for each token.
        return cls(head, form) if is_plain else _RichCompletionEvents(head, form, prompt_index)

    def __init__(self, head: ReplyHead, form: CompletionForm) -> None:
        """Prepare what all chunks share."""
        super().__init__(head, _CHUNK, include_usage=form.include_usage, continuous_usage=form.continuous_usage)

    def chunks(self, output: RequestOutput, outputs: Iterable[RequestOutput]) -> bytes:
        """The events of an output where the stream is of several prompts: without the stream's end.

        Args:
            output: the newest of this prompt.
            outputs: the newest of each prompt, for the counts so far.
        """
        if self._continuous_usage:
            self._set_usage(_dumps(usage_of(outputs)))
        return b"".join([self.choice_events(choice, output) for choice in output.outputs])

    def end(self, outputs: Iterable[RequestOutput]) -> bytes:
        """The end of a stream of several prompts. `outputs` are their last ones."""
        usage = self._start + b'],"usage":' + _dumps(usage_of(outputs)) + b"}\n\n" if self._include_usage else b""
        return usage + DONE


class _RichCompletionEvents(CompletionEvents):
    """With log probabilities, token ids, the prompt's text, or choices that do not count from 0."""

    def __init__(self, head: ReplyHead, form: CompletionForm, prompt_index: int) -> None:
        super().__init__(head, form)
        self._form = form
        self._prompt_index = prompt_index
        self._first_index = prompt_index * form.n
        self._prompt_logprobs: Sequence[PositionLogprobs | None] = ()
        self._writers: dict[int, LegacyLogprobs | None] = {}
        """Index of a choice that has begun -> the writer of its log probabilities, where they were asked for."""

    def choice_events(self, choice: CompletionOutput, output: RequestOutput) -> bytes:
        """The events of one choice of an output."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        text, logprobs, token_ids = choice.text, NULL, b""
        is_first = choice.index not in self._writers
        if self._form.has_token_ids and (choice.token_ids or is_first or choice.finish_reason is not None):
            # Tokens are told as they come, also while their text is held back; the prompt's in the first chunk.
            token_ids = ids_field("token_ids", choice.token_ids)
            if is_first:
                token_ids += ids_field("prompt_token_ids", output.prompt_token_ids)
        if is_first:
            text = _echo(self._form, self._prompt_index, output) + text
            self._writers[choice.index] = self._writer(output)
        writer = self._writers[choice.index]
        is_last = choice.finish_reason is not None
        if writer is not None:
            writer.add(choice.logprobs or ())
            logprobs = _dumps(writer.take()) if writer.has_tokens or is_last else NULL
        if not text and logprobs is NULL and not token_ids and not is_last:
            return b""
        finish = choice if is_last else None
        index = self._first_index + choice.index
        return self.text_chunk(index, text, logprobs=logprobs, more=token_ids, finish=finish)

    def _writer(self, output: RequestOutput) -> "LegacyLogprobs | None":
        if self._form.logprobs is None:
            return None
        writer = LegacyLogprobs(self._form.logprobs, by_id=self._form.names_tokens_by_id)
        if self._form.echoes:
            writer.add_prompt(self._prompt_logprobs, output.prompt_token_ids, self._form.token_bytes)
        return writer


def completion_reply(head: ReplyHead, form: CompletionForm, outputs: Sequence[RequestOutput]) -> bytes:
    """The whole reply, from the outputs of all prompts, which have everything."""
    choices = [choice for index, output in enumerate(outputs) for choice in _choices(form, index, output)]
    return whole_reply(head, _OBJECT, choices, usage_of(outputs))


def usage_of(outputs: Iterable[RequestOutput]) -> Mapping[str, object]:
    """How many tokens these prompts and their choices took so far."""
    outputs = tuple(outputs)
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_generated_tokens = sum(output.num_generated_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated_tokens,
        "total_tokens": num_prompt_tokens + num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


class LegacyLogprobs:
    """Log probabilities of one choice as `/v1/completions` writes them: four lists, side by side.

    A token that is not whole characters is written as `bytes:\\x..`. Offsets count the characters of the text that the
    tokens spell, from the first token on.
    """

    def __init__(self, num_top: int, *, by_id: bool = False) -> None:
        """Tell so many of the most likely tokens; with 0, `top_logprobs` is null. `by_id` names tokens by id."""
        self._num_top = num_top
        self._name = _name_by_id if by_id else _token_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top: list[Mapping[str, float] | None] = []
        self._text_offsets: list[int] = []

    def add_prompt(
        self,
        positions: Sequence[PositionLogprobs | None],
        token_ids: Sequence[int],
        token_bytes: Callable[[int], bytes] | None,
    ) -> None:
        """Add the prompt's tokens. Nothing comes before the first, so it has no log probability."""
        assert token_bytes is not None, "a prompt that is told needs the tokenizer"
        for position, token_id in zip(positions, token_ids, strict=False):
            if position is None:
                self._add(token_id, token_bytes(token_id), None, None)
            else:
                self.add((position,))

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        """Add tokens of the answer."""
        name = self._name
        for position in positions:
            chosen = position.chosen
            top = {name(other.token_id, other.token_bytes): other.logprob for other in _with_chosen(position)}
            self._add(chosen.token_id, chosen.token_bytes, chosen.logprob, top)

    @property
    def has_tokens(self) -> bool:
        """Whether anything was added since `take` was called last."""
        return bool(self._tokens)

    def take(self) -> Mapping[str, object]:
        """What was added since this was called last."""
        fields = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top if self._num_top else None,
            "text_offset": self._text_offsets,
        }
        self._tokens, self._token_logprobs, self._top, self._text_offsets = [], [], [], []
        return fields

    def _add(self, token_id: int, data: bytes, logprob: float | None, top: Mapping[str, float] | None) -> None:
        self._tokens.append(self._name(token_id, data))
        self._token_logprobs.append(logprob)
        self._top.append(top)
        self._text_offsets.append(self._offset)
        self._offset += len(self._decoder.decode(data))


def _with_chosen(position: PositionLogprobs) -> Iterator[Logprob]:
    yield from position.top
    if all(other.token_id != position.chosen.token_id for other in position.top):
        yield position.chosen


def _name_by_id(token_id: int, data: bytes) -> str:
    del data
    return name_of_token(token_id)


def _token_text(token_id: int, data: bytes) -> str:
    del token_id
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _choices(form: CompletionForm, prompt_index: int, output: RequestOutput) -> Iterator[Mapping[str, object]]:
    echo = _echo(form, prompt_index, output)
    for choice in output.outputs:
        logprobs: Mapping[str, object] | None = None
        if form.logprobs is not None:
            writer = LegacyLogprobs(form.logprobs, by_id=form.names_tokens_by_id)
            if form.echoes:
                writer.add_prompt(output.prompt_logprobs or (), output.prompt_token_ids, form.token_bytes)
            writer.add(choice.logprobs or ())
            logprobs = writer.take()
        yield {
            "index": prompt_index * form.n + choice.index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            **finish_fields(choice),
            **({"prompt_logprobs": prompt_logprobs_of(output)} if form.has_prompt_logprobs else {}),
            **(_token_ids(choice, output) if form.has_token_ids else {}),
        }


def _echo(form: CompletionForm, prompt_index: int, output: RequestOutput) -> str:
    return form.echoes[prompt_index](output.prompt_token_ids) if form.echoes else ""


def _token_ids(choice: CompletionOutput, output: RequestOutput) -> Mapping[str, object]:
    return {"token_ids": choice.token_ids, "prompt_token_ids": output.prompt_token_ids}


def _dumps(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
