"""What the reply to a completion request tells besides its text."""

from trioengine.openai.completion_protocol import CompletionRequest
from trioengine.openai.completion_stream import CompletionForm
from trioengine.server.context import ServerContext
from trioengine.types.request import TextPrompt, TokensPrompt


def completion_form(context: ServerContext, body: CompletionRequest) -> CompletionForm:
    """What the reply to this request tells besides its text."""
    sampling = body.sampling
    echoes = (
        [_prompt_text(context, prompt, sampling.skip_special_tokens) for prompt in body.prompt] if body.echo else ()
    )
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


def _prompt_text(context: ServerContext, prompt: TextPrompt | TokensPrompt, skip_special_tokens: bool) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return context.engine.renderer.detokenize(prompt.token_ids, skip_special_tokens=skip_special_tokens)
