"""`FakeTokenizer`: a tokenizer without a model. Ids 0 to 255 are bytes; then come words that the test chooses.

It keeps the promises of `tokenizer.Tokenizer` that front end and client use (one test holds both to them) and derives
from it only so that it is accepted in its place.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from trioengine.errors import RequestError
from trioengine.tokenizer.parts import TokenizerFacts
from trioengine.tokenizer.token_bytes import byte_stand_ins
from trioengine.tokenizer.tokenizer import PairTemplate, Tokenizer

END_TOKEN = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class FakeTokenizer(Tokenizer):
    """Bytes and `words`; the last id is the end token, the only special one. Each word is one token."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._fake_bytes = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
        self._word_ids = {word: 256 + index for index, word in enumerate(words)}
        self.end_token_id = len(self._fake_bytes)
        self._fake_bytes.append(END_TOKEN.encode())
        self._fake_shown_bytes = [*self._fake_bytes[:-1], b""]
        self._fake_texts = [_whole_text(data) for data in self._fake_bytes]
        self._fake_shown_texts = [*self._fake_texts[:-1], ""]
        self.facts = TokenizerFacts(eos_token_ids=(self.end_token_id,), chat_templates={"default": CHAT_TEMPLATE})
        self.special_token_ids = frozenset({self.end_token_id})
        self.drops_leading_space = False
        self.text_suffix = ()
        self.pair_template = PairTemplate(before=(), between=(self.end_token_id,), after=(), num_between_first=None)

    @property
    def vocab_size(self) -> int:
        return len(self._fake_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """The longest word at each place, else the bytes of the character there."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The text has a lone surrogate at character {error.start}.") from error
        words = self._word_ids | ({END_TOKEN: self.end_token_id} if allow_special else {})
        token_ids: list[int] = []
        start = 0
        while start < len(text):
            word = max((word for word in words if text.startswith(word, start)), key=len, default=None)
            token_ids.extend(text[start].encode() if word is None else [words[word]])
            start += 1 if word is None else len(word)
        return token_ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        table = self.token_byte_table(skip_special_tokens)
        return b"".join(table[token_id] for token_id in token_ids if 0 <= token_id < len(table)).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        return self._fake_bytes[token_id] if 0 <= token_id < len(self._fake_bytes) else b""

    def token_to_id(self, token: str) -> int | None:
        return self.end_token_id if token == END_TOKEN else self._word_ids.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < len(self._fake_bytes):
            return None
        return self._fake_bytes[token_id].decode("utf-8", "replace")

    def token_byte_table(self, skip_special_tokens: bool) -> Sequence[bytes]:
        return self._fake_shown_bytes if skip_special_tokens else self._fake_bytes

    def token_texts(self, skip_special_tokens: bool) -> Sequence[str | None]:
        return self._fake_shown_texts if skip_special_tokens else self._fake_texts

    def protect(self, text: str) -> str:
        """The end token that a user wrote becomes a character that no template writes."""
        return text.replace(END_TOKEN, "\ufdd0")

    def reveal(self, text: str) -> str:
        return text.replace("\ufdd0", END_TOKEN)

    def encode_rendered(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for index, written_by_users in enumerate(text.split("\ufdd0")):
            token_ids += self.encode(END_TOKEN) if index else []
            token_ids += self.encode(written_by_users, allow_special=True)
        return token_ids


def write_fake_model(folder: Path) -> Path:
    """A model folder without a model, for scripted cores: its tokenizer is the library's twin of `FakeTokenizer()`."""
    backend: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [
            {"id": 256, "content": END_TOKEN, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {chr(stand_in): byte for stand_in, byte in byte_stand_ins().items()},
            "merges": list[str](),
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_TOKEN, "chat_template": CHAT_TEMPLATE}))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
