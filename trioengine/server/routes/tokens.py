"""`/tokenize` and `/detokenize`: what a prompt is to the model."""

import trio
from quart import Response

from trioengine.frontend.input_processor import LONG_PROMPT_CHARS
from trioengine.openai.chat_translate import chat_prompt
from trioengine.openai.tokenize_protocol import (
    DetokenizeReply,
    TokenizeChatRequest,
    TokenizeReply,
    TokenizeRequest,
    parse_detokenize_request,
    parse_tokenize_request,
)
from trioengine.server.context import ServerContext
from trioengine.server.routes.request import json_reply, read_body

LONG_PROMPT_TOKENS = 16_384
"""More take over 5 ms to become text."""


async def tokenize(context: ServerContext) -> Response:
    """The token ids of a text or of a conversation, as the model would read them."""
    body = await read_body(lambda data: (parse_tokenize_request(data), len(data)))
    request, num_bytes = body
    await context.check_body(request)

    def count() -> TokenizeReply:
        return _tokenize(context, request)

    # The tokenizer lets other threads run, so a long prompt holds nobody up.
    is_long = num_bytes > LONG_PROMPT_CHARS
    reply = await trio.to_thread.run_sync(count, abandon_on_cancel=True) if is_long else count()
    return _with_warnings(json_reply(reply), context, request)


async def detokenize(context: ServerContext) -> Response:
    """The text of token ids."""
    request = await read_body(parse_detokenize_request)
    await context.check_body(request)
    detokenize, tokens = context.engine.renderer.detokenize, request.tokens
    is_long = len(tokens) > LONG_PROMPT_TOKENS
    text = await trio.to_thread.run_sync(detokenize, tokens, abandon_on_cancel=True) if is_long else detokenize(tokens)
    response = json_reply(DetokenizeReply(text))
    response.headers.update(context.warning_headers(request))
    return response


def _tokenize(context: ServerContext, request: TokenizeRequest | TokenizeChatRequest) -> TokenizeReply:
    tokenizer = context.engine.tokenizer
    match request:
        case TokenizeRequest():
            token_ids = tuple(tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens))
        case TokenizeChatRequest(chat=chat):
            prompt = chat_prompt(chat, context.chat)
            token_ids = tuple(context.engine.renderer.render(prompt).token_ids)
    token_strs = None
    if request.return_token_strs:
        token_strs = tuple(tokenizer.id_to_token(token_id) or "" for token_id in token_ids)
    return TokenizeReply(len(token_ids), context.engine.model_config.max_model_len, token_ids, token_strs)


def _with_warnings(
    response: Response, context: ServerContext, request: TokenizeRequest | TokenizeChatRequest
) -> Response:
    response.headers.update(context.warning_headers(request))
    return response
