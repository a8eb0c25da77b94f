"""Replies of `/v1/completions`, streamed and whole."""

from trioengine.openai.sse import ChunkShape, EventStream, ReplyHead, finish_fields, usage_fields, whole_reply
from trioengine.types.output import RequestOutput

_OBJECT = "text_completion"
_CHUNK = ChunkShape(
    object=_OBJECT,
    before_first_text=b'"text":',
    before_text=b'"text":',
    after_text=b"",
)


def completion_stream(head: ReplyHead, *, include_usage: bool) -> EventStream:
    """A stream of completion chunks."""
    return EventStream(head, _CHUNK, include_usage=include_usage)


def completion_reply(head: ReplyHead, output: RequestOutput) -> bytes:
    """The whole reply, from the output that has everything."""
    return whole_reply(
        head,
        _OBJECT,
        [
            {"index": choice.index, "text": choice.text, "logprobs": None, **finish_fields(choice)}
            for choice in output.outputs
        ],
        usage_fields(output),
    )
