"""Server-sent events of a streamed reply: the bytes of a chunk from parts that are prepared once per request.

Line ends are LF only. A chunk costs one JSON escape of its text and one concatenation.
"""

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii

import attrs

from trioengine.openai.errors import error_body
from trioengine.types.output import CompletionOutput, RequestOutput

CONTENT_TYPE = "text/event-stream; charset=utf-8"
PING = b": ping\n\n"
"""A comment: keeps proxies and clients from giving up, and every parser skips it."""
DONE = b"data: [DONE]\n\n"


@attrs.frozen
class ReplyHead:
    """What every chunk of a reply, or the whole one, begins with."""

    id: str
    created_s: int
    """Unix time."""
    model: str


@attrs.frozen
class ChunkShape:
    """How a kind of chunk differs from the other: `object`, and what stands around its text, as JSON."""

    object: str
    before_first_text: bytes
    before_text: bytes
    after_text: bytes


NULL = b"null"


class EventStream:
    """Outputs in, bytes of events out.

    Joined, the texts of the chunks are the text of the whole reply, and the last chunk of a choice has its
    `finish_reason`. Streams that tell more than texts override `choice_events`.
    """

    def __init__(
        self, head: ReplyHead, shape: ChunkShape, *, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        """Prepare what all chunks share.

        Args:
            head: the reply's identity.
            shape: of chat or of completions.
            include_usage: a chunk with the token counts comes before the end, and `usage` is null in all others.
            continuous_usage: with `include_usage`, every chunk has the counts so far.
        """
        fields = dumps(head_fields(head, shape.object)).removesuffix(b"}")
        self._shape = shape
        self._start = b"data: " + fields + b',"choices":['
        self._include_usage = include_usage
        self._continuous_usage = include_usage and continuous_usage
        self._before_text: dict[int, bytes] = {}
        """Index of a choice -> all that comes before the text of its second and later chunks."""
        self._set_usage(NULL)

    def events(self, output: RequestOutput) -> bytes:
        """The events of a DELTA output; empty when it shows nothing new. The finished one ends the stream."""
        if self._continuous_usage:
            self._set_usage(dumps(self.usage(output)))
        if len(output.outputs) == 1 and not output.finished:
            return self.choice_events(output.outputs[0], output)
        parts = [self.choice_events(choice, output) for choice in output.outputs]
        if output.finished:
            if self._include_usage:
                parts.append(self._start + b'],"usage":' + dumps(self.usage(output)) + b"}\n\n")
            parts.append(DONE)
        return b"".join(parts)

    @staticmethod
    def error_event(error: Exception) -> bytes:
        """The last event of a stream that fails after its headers were sent."""
        return b"data: " + error_body(error) + b"\n\n"

    def choice_events(self, choice: CompletionOutput, output: RequestOutput) -> bytes:
        """The events of one choice of an output."""
        del output
        if choice.finish_reason is None:
            if not choice.text:
                return b""
            before_text = self._before_text.get(choice.index)
            if before_text is not None:
                # Nearly all chunks are like this one.
                return before_text + encode_basestring_ascii(choice.text).encode() + self._after_text
        return self.text_chunk(choice.index, choice.text, finish=choice if choice.finish_reason is not None else None)

    def usage(self, output: RequestOutput) -> Mapping[str, object]:
        """The token counts as of an output."""
        return usage_fields(output)

    def begins(self, index: int) -> bool:
        """Whether the next chunk is the first of its choice. Whoever asks writes it."""
        if index in self._before_text:
            return False
        self._before_text[index] = self.begin_chunk(index) + self._shape.before_text
        return True

    def text_chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: bytes = NULL,
        more: bytes = b"",
        finish: CompletionOutput | Mapping[str, object] | None = None,
    ) -> bytes:
        """A chunk of a choice's text.

        Args:
            index: of the choice.
            text: what is new.
            logprobs: of the tokens in it, as JSON.
            more: further fields of the choice, as JSON, each with a comma before it.
            finish: the choice, or why it ends, where it ends with this chunk.
        """
        before_text = self._before_text.get(index)
        if before_text is None:
            before_choice = self.begin_chunk(index)
            self._before_text[index] = before_choice + self._shape.before_text
            before_text = before_choice + self._shape.before_first_text
        escaped = encode_basestring_ascii(text).encode()
        if finish is None and logprobs is NULL and not more:
            return before_text + escaped + self._after_text
        return before_text + escaped + self._shape.after_text + self.end_chunk(logprobs, finish, more)

    def begin_chunk(self, index: int) -> bytes:
        """A chunk up to the first field of its choice that is of this kind of reply."""
        return self._start + b'{"index":%d,' % index

    def end_chunk(
        self, logprobs: bytes, finish: CompletionOutput | Mapping[str, object] | None, more: bytes = b""
    ) -> bytes:
        """A chunk from behind these fields, log probabilities and the end of the choice first."""
        if finish is None:
            return b',"logprobs":' + logprobs + more + self._unfinished
        fields = finish_fields(finish) if isinstance(finish, CompletionOutput) else finish
        return b',"logprobs":' + logprobs + more + b"," + dumps(fields).removeprefix(b"{") + self._end

    def _set_usage(self, usage: bytes) -> None:
        self._end = b'],"usage":' + usage + b"}\n\n" if self._include_usage else b"]}\n\n"
        self._unfinished = b',"finish_reason":null}' + self._end
        self._after_text = self._shape.after_text + b',"logprobs":null' + self._unfinished


def head_fields(head: ReplyHead, object_name: str) -> Mapping[str, object]:
    """The first fields of a reply or chunk."""
    return {"id": head.id, "object": object_name, "created": head.created_s, "model": head.model}


def finish_fields(choice: CompletionOutput) -> Mapping[str, object]:
    """Why a choice ended."""
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


def ids_field(name: str, token_ids: Sequence[int]) -> bytes:
    """A field of token ids as `end_chunk` takes it."""
    return b',"%b":[%b]' % (name.encode(), b",".join(b"%d" % token_id for token_id in token_ids))


def usage_fields(output: RequestOutput) -> Mapping[str, object]:
    """How many tokens the request took so far."""
    num_prompt_tokens = len(output.prompt_token_ids)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": output.num_generated_tokens,
        "total_tokens": num_prompt_tokens + output.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def name_of_token(token_id: int) -> str:
    """The name that tells a token apart from all others, whatever bytes they have: vLLM's."""
    return f"token_id:{token_id}"


def prompt_logprobs_of(output: RequestOutput) -> Sequence[Mapping[str, object] | None]:
    """As vLLM has them: for each token of the prompt the log probabilities at its place, by token id."""
    return [
        None
        if entry is None
        else {
            str(token.token_id): {
                "logprob": token.logprob,
                "rank": token.rank,
                "decoded_token": token.token_bytes.decode(errors="replace"),
            }
            for token in (entry.chosen, *entry.top)
        }
        for entry in output.prompt_logprobs or ()
    ]


def whole_reply(
    head: ReplyHead,
    object_name: str,
    choices: Sequence[Mapping[str, object]],
    usage: Mapping[str, object],
    **more: object,
) -> bytes:
    """The body of a reply that is not streamed."""
    return dumps({**head_fields(head, object_name), "choices": choices, "usage": usage, **more})


def dumps(value: Mapping[str, object]) -> bytes:
    """Compact JSON."""
    return _ENCODER.encode(value).encode()


# `json.dumps` with separators makes one for each call, which takes longer than a chunk.
_ENCODER = json.JSONEncoder(separators=(",", ":"))
