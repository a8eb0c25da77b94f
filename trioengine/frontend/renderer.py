"""`Renderer`: prompts as the model reads them, for `InputProcessor` and whoever wants to see, count or store them."""

from collections.abc import Mapping, Sequence

import attrs

from trioengine.errors import RequestError
from trioengine.tokenizer.chat_template import render_chat
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.request import ChatPrompt, Prompt, TextPrompt, TokensPrompt

_KWARGS = "tokenization_kwargs"


@attrs.frozen
class TokenizationKwargs:
    """How a text becomes tokens: `GenerateRequest.tokenization_kwargs`, checked."""

    add_special_tokens: bool | None = None
    """Whether a text gets what the model wants around it (BOS). None is the model's way; a chat template writes it."""
    truncate_prompt_tokens: int | None = None
    """A longer prompt loses tokens until so many are left; -1 is as many as there is room for. None cuts nothing."""
    truncation_side: str = "left"
    """Where it loses them."""

    @classmethod
    def of(cls, kwargs: Mapping[str, object] | None) -> "TokenizationKwargs":
        """From what a caller wrote.

        Raises:
            RequestError: naming the field at fault.
        """
        if kwargs is None:
            return _DEFAULT
        if not isinstance(kwargs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"{_KWARGS} must be a mapping.", param=_KWARGS)
        names = {field.name for field in attrs.fields(cls)}
        for name in kwargs:
            if name not in names:
                known = ", ".join(sorted(names))
                raise RequestError(f"{_KWARGS} has no {str(name)[:50]!r}; it may have {known}.", param=_KWARGS)
        add, truncate = kwargs.get("add_special_tokens"), kwargs.get("truncate_prompt_tokens")
        side = kwargs.get("truncation_side", "left")
        if not isinstance(add, bool | None):
            raise _error("add_special_tokens", "must be True or False")
        if truncate is not None and (type(truncate) is not int or not (truncate == -1 or truncate >= 1)):
            raise _error("truncate_prompt_tokens", "must be -1 or at least 1")
        if side not in ("left", "right"):
            raise _error("truncation_side", 'must be "left" or "right"')
        return cls(add, truncate if isinstance(truncate, int) else None, str(side))


_DEFAULT = TokenizationKwargs()


@attrs.frozen
class Renderer:
    """Makes token ids of prompts with the model's tokenizer and chat template. Pure, and safe in any thread."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int

    def render(self, prompt: Prompt, tokenization_kwargs: Mapping[str, object] | None = None) -> TokensPrompt:
        """The prompt's token ids, and the text that they are of. `generate` takes it in the prompt's place.

        Raises:
            RequestError: naming the field at fault, as `generate` would.
        """
        tokens = self.tokenize(prompt, TokenizationKwargs.of(tokenization_kwargs), room=self.max_model_len)
        if tokens.prompt_text is not None:
            return tokens
        return attrs.evolve(tokens, prompt_text=self.tokenizer.decode(tokens.token_ids, skip_special_tokens=False))

    def tokenize(self, prompt: Prompt, kwargs: TokenizationKwargs, *, room: int) -> TokensPrompt:
        """The prompt's token ids, and their text where it is known anyway. `room` is what -1 truncates to.

        Raises:
            RequestError: naming the field at fault.
        """
        try:
            tokens = self._whole(prompt, kwargs)
        except RequestError as error:
            if error.param is not None:
                raise
            # The tokenizer knows texts, not whose they are.
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise attrs.evolve(error, param=param) from error.__cause__
        add_special_tokens = kwargs.add_special_tokens is not False
        limit = self._limit(kwargs, room)
        if limit is None or len(tokens.token_ids) <= limit:
            return tokens
        around = (0, 0)
        if isinstance(prompt, TextPrompt) and add_special_tokens:
            around = self._num_around(prompt.text, tokens.token_ids)
        return TokensPrompt(_cut(tokens.token_ids, limit, kwargs.truncation_side, around))

    def _whole(self, prompt: Prompt, kwargs: TokenizationKwargs) -> TokensPrompt:
        """The prompt's tokens before any is cut."""
        match prompt:
            case TextPrompt(text):
                add_special_tokens = kwargs.add_special_tokens is not False
                return TokensPrompt(tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens)), text)
            case TokensPrompt(token_ids, text):
                return TokensPrompt(self.check_token_ids(token_ids), text)
            case ChatPrompt():
                if kwargs.add_special_tokens:
                    raise _error("add_special_tokens", "is for texts: a chat template writes special tokens itself")
                rendered = render_chat(
                    self.tokenizer,
                    prompt.messages,
                    add_generation_prompt=prompt.add_generation_prompt,
                    template_kwargs=prompt.template_kwargs,
                    continue_final_message=prompt.continue_final_message,
                    chat_template=prompt.chat_template,
                )
                return TokensPrompt(tuple(rendered.token_ids), rendered.prompt_text)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens.

        Raises:
            RequestError: one is no token of the vocabulary.
        """
        return self.tokenizer.decode(
            self.check_token_ids(token_ids, param="tokens"), skip_special_tokens=skip_special_tokens
        )

    def check_token_ids(self, token_ids: Sequence[int], *, param: str = "prompt") -> tuple[int, ...]:
        """The same ids, of which each is a token of the vocabulary.

        Raises:
            RequestError: naming the first that is none by its place.
        """
        checked = tuple(token_ids)
        for position, token_id in enumerate(checked):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"{param}[{position}] must be a token id from 0 to {self.vocab_size - 1}.",
                    param=f"{param}[{position}]",
                )
        return checked

    def _limit(self, kwargs: TokenizationKwargs, room: int) -> int | None:
        wanted = kwargs.truncate_prompt_tokens
        if wanted is None:
            return None
        if wanted > self.max_model_len:
            raise _error("truncate_prompt_tokens", f"must be at most {self.max_model_len}, the maximum context length")
        return room if wanted == -1 else wanted

    def _num_around(self, text: str, token_ids: Sequence[int]) -> tuple[int, int]:
        """How many tokens stand before and behind those of the text itself."""
        bare = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        num_around = len(token_ids) - len(bare)
        for num_before in range(num_around + 1):
            if tuple(token_ids[num_before : num_before + len(bare)]) == bare:
                return num_before, num_around - num_before
        return 0, 0


def _cut(token_ids: Sequence[int], limit: int, side: str, around: tuple[int, int]) -> tuple[int, ...]:
    """So many of the tokens; those around a text stay, where there is room."""
    num_before, num_after = around if sum(around) < limit else (0, 0)
    before, after = token_ids[:num_before], token_ids[len(token_ids) - num_after :]
    inner = token_ids[num_before : len(token_ids) - num_after]
    num_left = limit - num_before - num_after
    return (*before, *(inner[-num_left:] if side == "left" else inner[:num_left]), *after)


def _error(name: str, problem: str) -> RequestError:
    return RequestError(f"{_KWARGS}.{name} {problem}.", param=f"{_KWARGS}.{name}")
