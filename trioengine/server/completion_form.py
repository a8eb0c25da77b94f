"""What the reply to a completion request tells besides its text."""

from collections.abc import Callable, Sequence

from trioengine.openai.completion_protocol import CompletionRequest
from trioengine.openai.completion_stream import CompletionForm
from trioengine.server.context import ServerContext
from trioengine.types.request import TextPrompt, TokensPrompt


def completion_form(context: ServerContext, body: CompletionRequest) -> CompletionForm:
    """What the reply to this request tells besides its text."""
    sampling = body.sampling
    echoes = [_echo(context, body, prompt) for prompt in body.prompt] if body.echo else ()
    return CompletionForm(
        n=sampling.n,
        include_usage=bool(body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options.continuous_usage_stats),
        logprobs=sampling.logprobs if sampling.logprob_token_ids is None else len(sampling.logprob_token_ids),
        has_prompt_logprobs=sampling.prompt_logprobs is not None,
        has_token_ids=body.return_token_ids,
        names_tokens_by_id=body.return_tokens_as_token_ids,
        echoes=echoes,
        token_bytes=context.engine.tokenizer.token_bytes if body.echo else None,
    )


def _echo(
    context: ServerContext, body: CompletionRequest, prompt: TextPrompt | TokensPrompt
) -> Callable[[Sequence[int]], str]:
    """What tells the prompt's text, given its tokens as they were used: of one that was cut, what is left."""
    limit = body.truncate_prompt_tokens
    # The special tokens around a text are not of it.
    skips_special = isinstance(prompt, TextPrompt) or body.sampling.skip_special_tokens

    def echo(token_ids: Sequence[int]) -> str:
        # Whether one that is as long as the limit was cut is not known here.
        if limit is None or len(token_ids) < limit:
            if isinstance(prompt, TextPrompt):
                return prompt.text
            token_ids = prompt.token_ids
        return context.engine.renderer.detokenize(token_ids, skip_special_tokens=skips_special)

    return echo
