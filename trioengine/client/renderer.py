"""`Renderer`: prompts as the model reads them, for whoever wants to see, count or store them."""

from collections.abc import Sequence

import attrs

from trioengine.errors import RequestError
from trioengine.tokenizer.chat_template import render_chat
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.request import ChatPrompt, Prompt, TextPrompt, TokensPrompt


@attrs.frozen
class Renderer:
    """Makes token ids of prompts with the model's tokenizer and chat template. Pure, and safe in any thread."""

    tokenizer: Tokenizer
    vocab_size: int

    def render(self, prompt: Prompt) -> TokensPrompt:
        """The prompt's token ids, and the text that they are of. `generate` takes it in the prompt's place.

        Raises:
            RequestError: naming the field at fault, as `generate` would.
        """
        match prompt:
            case TextPrompt(text):
                return TokensPrompt(tuple(self.tokenizer.encode(text)), text)
            case ChatPrompt():
                rendered = render_chat(
                    self.tokenizer,
                    prompt.messages,
                    add_generation_prompt=prompt.add_generation_prompt,
                    template_kwargs=prompt.template_kwargs,
                )
                return TokensPrompt(tuple(rendered.token_ids), rendered.prompt_text)
            case TokensPrompt(token_ids, text):
                return TokensPrompt(tuple(token_ids), self.detokenize(token_ids) if text is None else text)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens.

        Raises:
            RequestError: one is no token of the vocabulary.
        """
        for position, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"tokens[{position}] must be a token id from 0 to {self.vocab_size - 1}.",
                    param=f"tokens[{position}]",
                )
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
