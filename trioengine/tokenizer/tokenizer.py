"""The tokenizer of one model: text to ids, ids to text, and the facts about special tokens.

Special tokens that a user types are plain text: user text goes through a second tokenizer over the same vocabulary in
which the special tokens have unguessable names. Only text that the model's own chat template wrote may become control
tokens. This module does not render templates and does not know requests.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import attrs
import tokenizers
from tokenizers import models

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.config import env
from trioengine.errors import CheckpointError, RequestError
from trioengine.tokenizer.from_folder import read_folder_tokenizer
from trioengine.tokenizer.from_gguf import read_gguf_tokenizer
from trioengine.tokenizer.parts import TokenizerFacts, library_errors_as_checkpoint_errors
from trioengine.tokenizer.token_bytes import read_token_bytes

LONG_TEXT_CHARS = 1 << 16
"""From here on the library's batch call pays: it computes no offsets, so it takes half the time and holds the
interpreter for a tenth of it. It also starts the library's own worker threads, which short texts should not.
"""


def load_tokenizer(location: ModelLocation) -> "Tokenizer":
    """Return the tokenizer of a model, from its GGUF metadata or the files in its folder.

    One that only transformers can build is converted by a process of its own, which takes seconds the first time.

    Raises:
        CheckpointError: a file is missing or damaged, or the tokenizer is of a kind that is not supported.
    """
    path = str(location.path)
    try:
        with library_errors_as_checkpoint_errors("the tokenizer cannot be used"):
            match location.kind:
                case ModelKind.GGUF:
                    parts = read_gguf_tokenizer(location.path)
                case ModelKind.FOLDER:
                    parts = read_folder_tokenizer(location.path, env.cache_dir())
            return Tokenizer(parts.backend, parts.facts)
    except CheckpointError as error:
        if error.path is not None:
            raise
        raise CheckpointError(f"{path}: {error.message}", path=path) from error


@attrs.frozen
class PairTemplate:
    """What a tokenizer puts around and between two texts that are one input."""

    before: Sequence[int]
    between: Sequence[int]
    after: Sequence[int]
    num_between_first: int | None
    """How many of `between` count to the first text; None where the model does not tell the two apart."""


class Tokenizer:
    """Encodes and decodes text for one model. Immutable, and safe in several threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        """Wrap a tokenizer, which must not be changed afterwards.

        Raises:
            CheckpointError: its decoder is of a kind that is not supported.
        """
        self.facts = facts
        token_bytes = read_token_bytes(backend)
        self._backend = backend
        self._bytes = token_bytes.by_id
        self.drops_leading_space = token_bytes.drops_leading_space
        """Whether a space at the very start of a text is an artefact of SentencePiece and not shown."""
        added = cast(dict[int, Any], backend.get_added_tokens_decoder())
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if _is_control(token))
        """Control tokens: user text never becomes one of them."""
        self._guard = _Guard(backend, added)

    @property
    def vocab_size(self) -> int:
        """Number of token ids. The model's embedding may have more rows."""
        return len(self._bytes)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, where the model has one."""
        return self.facts.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The model's own end of sequence, where it has one."""
        return self.facts.eos_token_ids[0] if self.facts.eos_token_ids else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer, the model's own end of sequence first."""
        return self.facts.eos_token_ids

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up a batch, where the model has one."""
        return self.facts.pad_token_id

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, whose text is usually not shown."""
        return token_id in self.special_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            text: any text; control tokens written in it are plain text unless `allow_special`.
            add_special_tokens: put the model's BOS in front where it wants one (and whatever else it adds).
            allow_special: let control tokens written in the text become control tokens.

        Raises:
            RequestError: the text has a lone surrogate, which is no character; or it spells a control token that this
                vocabulary cannot spell as text.
        """
        if allow_special:
            return _encode(self._backend, text, add_special_tokens)
        return self._guard.encode(text, add_special_tokens)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD, an id without a token is skipped."""
        table = self.token_byte_table(skip_special_tokens)
        size = len(table)
        data = b"".join([table[token_id] for token_id in token_ids if 0 <= token_id < size])
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.drops_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's own bytes, which need not be whole characters; none for an id without a token."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, given as the vocabulary writes it."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, which is not its text."""
        return self._backend.id_to_token(token_id)

    def token_byte_table(self, skip_special_tokens: bool) -> Sequence[bytes]:
        """Return the bytes of every id as they count in a text; control tokens have none when they are skipped."""
        return self._shown_bytes if skip_special_tokens else self._bytes

    def token_texts(self, skip_special_tokens: bool) -> Sequence[str | None]:
        """Return the text of every id, or None where the token's bytes are not whole characters."""
        return self._shown_texts if skip_special_tokens else self._texts

    def protect(self, text: str) -> str:
        """Return user text with the control tokens written in it replaced by stand-ins, for use in a chat template."""
        return self._guard.protect(text)

    def reveal(self, text: str) -> str:
        """Return what a template made of protected text, with the stand-ins turned back."""
        return self._guard.reveal(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of what a template made of protected text. Nothing is added in front.

        Control tokens that the template wrote become control tokens; those that users wrote are plain text. Without
        the latter, the result is that of encoding the text with `allow_special`.

        Raises:
            RequestError: the text has a lone surrogate.
        """
        if not self._guard.is_needed_for(text):
            return _encode(self._backend, text, add_special_tokens=False)
        return self._guard.encode(self._guard.guard(text), add_special_tokens=False)

    @cached_property
    def text_suffix(self) -> Sequence[int]:
        """The tokens that it puts behind a text."""
        encoding = self._backend.encode("a")
        last = max((i for i, number in enumerate(encoding.sequence_ids) if number is not None), default=-1)
        return encoding.ids[last + 1 :]

    @cached_property
    def pair_template(self) -> PairTemplate:
        """How it joins two texts."""
        encoding = self._backend.encode("a", "a")
        ids, owners = encoding.ids, encoding.sequence_ids
        firsts = [i for i, owner in enumerate(owners) if owner == 0]
        seconds = [i for i, owner in enumerate(owners) if owner == 1]
        between = slice(firsts[-1] + 1, seconds[0])
        types = encoding.type_ids
        return PairTemplate(
            before=ids[: firsts[0]],
            between=ids[between],
            after=ids[seconds[-1] + 1 :],
            num_between_first=types[between].count(0) if types[seconds[0]] else None,
        )

    @cached_property
    def _shown_bytes(self) -> list[bytes]:
        table = list(self._bytes)
        for token_id in self.special_token_ids:
            table[token_id] = b""
        return table

    @cached_property
    def _texts(self) -> list[str | None]:
        return [_whole_text(data) for data in self._bytes]

    @cached_property
    def _shown_texts(self) -> list[str | None]:
        texts = list(self._texts)
        for token_id in self.special_token_ids:
            texts[token_id] = ""
        return texts


class _Guard:
    """Keeps control tokens that users write apart from those that templates write.

    Three spellings of a control token T exist for one tokenizer: T itself, which is plain text to this one; its guard,
    which is the control token to it; and its stand-in, which carries a user's T through a template. Guard
    and stand-in contain 128 random bits and characters that Unicode reserves for internal use (U+FDD0 and following).
    They are of digits, so that filters such as `upper` leave them whole.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added: Mapping[int, Any]) -> None:
        nonce = str(secrets.randbits(128))
        self._guard_format = f"\ufdd0{nonce}.{{}}\ufdd1"
        self._stand_in_start = f"\ufdd2{nonce}."
        self._stand_in_pattern = re.compile(re.escape(self._stand_in_start) + "([0-9]+)\ufdd3")
        specials = {token_id: str(token.content) for token_id, token in added.items() if _is_control(token)}
        self._content_by_id = specials
        self._id_by_content = {content: token_id for token_id, content in specials.items()}
        longest_first = sorted(self._id_by_content, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # A normalizer could turn other text into such a token's, so only the guarded tokenizer is safe there.
        self._is_always_needed = backend.normalizer is not None and any(
            _is_control(token) and token.normalized for token in added.values()
        )
        self._backend, self._original_ids = self._build(backend, added)
        # Those of the model's own words, less what stands for unknown text and what is put around every text. Unigram
        # cannot make one from text, since they have other names in the guarded tokenizer.
        num_words = 0 if isinstance(backend.model, models.Unigram) else backend.get_vocab_size(with_added_tokens=False)
        allowed = {backend.token_to_id(getattr(backend.model, "unk_token", None) or ""), *backend.encode("").ids}
        self._forbidden_ids = frozenset(token_id for token_id in specials if token_id < num_words) - allowed

    def _build(
        self, backend: tokenizers.Tokenizer, added: Mapping[int, Any]
    ) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The tokenizer with guards for control tokens, and the original ids of those it numbers otherwise."""
        names = {
            str(token.content): self._guard_format.format(token_id)
            for token_id, token in added.items()
            if _is_control(token)
        }
        guarded = tokenizers.Tokenizer(_model_with_renamed_tokens(backend, names))
        if backend.normalizer is not None:
            guarded.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            guarded.pre_tokenizer = backend.pre_tokenizer
        if backend.post_processor is not None:
            guarded.post_processor = backend.post_processor
        contents: dict[str, int] = {}
        tokens: list[Any] = []
        for token_id, token in added.items():
            content = names.get(str(token.content), str(token.content))
            contents[content] = token_id
            tokens.append(
                tokenizers.AddedToken(
                    content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
            )
        guarded.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]
        original_ids: dict[int, int] = {}
        for content, token_id in contents.items():
            guarded_id = guarded.token_to_id(content)
            if guarded_id is not None and guarded_id != token_id:
                original_ids[guarded_id] = token_id
        return guarded, original_ids

    def protect(self, text: str) -> str:
        return self._special_pattern.sub(self._stand_in, text)

    def reveal(self, text: str) -> str:
        if self._stand_in_start not in text:
            return text
        return self._stand_in_pattern.sub(lambda match: self._content_by_id.get(int(match[1]), ""), text)

    def is_needed_for(self, text: str) -> bool:
        return self._is_always_needed or self._stand_in_start in text

    def guard(self, text: str) -> str:
        """From a template's output to what `encode` takes."""
        guarded = self._special_pattern.sub(
            lambda match: self._guard_format.format(self._id_by_content[match[0]]), text
        )
        return self.reveal(guarded)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of guarded text: guards become control tokens, all else is plain text."""
        token_ids = _encode(self._backend, text, add_special_tokens)
        if not self._forbidden_ids.isdisjoint(token_ids):
            # Possible only where a word of the model itself is a control token, as merges may make one.
            token = next(self._content_by_id[token_id] for token_id in token_ids if token_id in self._forbidden_ids)
            raise RequestError(f"The text spells the control token {token!r}, which this model cannot read as text.")
        original_ids = self._original_ids
        if not original_ids or original_ids.keys().isdisjoint(token_ids):
            return token_ids
        return [original_ids.get(token_id, token_id) for token_id in token_ids]

    def _stand_in(self, match: re.Match[str]) -> str:
        return f"{self._stand_in_start}{self._id_by_content[match[0]]}\ufdd3"


def _is_control(token: Any) -> bool:
    """Models name a character such as "!" as the token that fills up batches; it stays a character."""
    return token.special and len(token.content) > 1


def _model_with_renamed_tokens(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> models.Model:
    """The model of a tokenizer in which text cannot be cut into these tokens, because they have other names.

    Only Unigram takes every word of its vocabulary for something that text may be cut into; other models are shared.
    """
    if not isinstance(backend.model, models.Unigram):
        return backend.model
    # The library's objects describe themselves as the JSON of tokenizer.json.
    state: dict[str, Any] = json.loads(backend.model.__getstate__())  # pyright: ignore
    words = [(names.get(word, word), score) for word, score in state["vocab"]]
    return models.Unigram(words, state["unk_id"], state.get("byte_fallback", False))


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) > LONG_TEXT_CHARS:
            return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError as error:
        # The library says of a lone surrogate only that the text is no str.
        try:
            text.encode()
        except UnicodeEncodeError as surrogate:
            raise RequestError(
                f"The text has a lone surrogate (U+{ord(text[surrogate.start]):04X}) at character {surrogate.start}, "
                "which is no character."
            ) from error
        raise
    except BaseException as error:
        # The border to the model's own rules: a pattern may give up on a text, which the library does not even raise
        # as an `Exception`, and some vocabularies cannot spell every character. This text caused it.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"The model's tokenizer cannot read this text: {str(error)[:200]}.") from error


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
