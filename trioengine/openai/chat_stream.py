"""Replies of `/v1/chat/completions`, streamed and whole."""

from trioengine.openai.sse import ChunkShape, EventStream, ReplyHead, finish_fields, usage_fields, whole_reply
from trioengine.types.output import RequestOutput

_CHUNK = ChunkShape(
    object="chat.completion.chunk",
    before_first_text=b'"delta":{"role":"assistant","content":',
    before_text=b'"delta":{"content":',
    after_text=b"}",
)


def chat_stream(head: ReplyHead, *, include_usage: bool) -> EventStream:
    """A stream of chat chunks. The first chunk of each choice has the role."""
    return EventStream(head, _CHUNK, include_usage=include_usage)


def chat_reply(head: ReplyHead, output: RequestOutput) -> bytes:
    """The whole reply, from the output that has everything."""
    return whole_reply(
        head,
        "chat.completion",
        [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                **finish_fields(choice),
            }
            for choice in output.outputs
        ],
        usage_fields(output),
    )
