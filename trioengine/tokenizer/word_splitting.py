"""How byte-level BPE vocabularies cut text into words, by the names that GGUF files have for it.

A file names the way and does not describe it. The names are llama.cpp's (`tokenizer.ggml.pre`); the patterns are those
of the models' own tokenizer.json. An unknown name is refused: a wrong cut gives wrong tokens silently.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import tokenizers
from tokenizers import normalizers, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS_AND_SPACE}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@attrs.frozen
class WordSplitting:
    """One way to cut text into words."""

    patterns: tuple[str, ...] = ()
    """What is cut out first, one pattern after the other."""
    is_gpt2: bool = False
    """Whether GPT-2's own rules follow."""
    composes: bool = False
    """Whether characters are composed first (NFC)."""
    ignores_merges: bool = False
    """Whether a word that is a token is that token, whatever merges say."""
    adds_bos: bool = False
    """Whether files that do not say so want BOS in front of a text."""

    def apply(self, backend: tokenizers.Tokenizer) -> None:
        """Let the tokenizer cut text this way."""
        steps: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.is_gpt2))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
        if self.composes:
            backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]


GPT2 = WordSplitting(is_gpt2=True)
QWEN2 = WordSplitting((_QWEN2,), composes=True)
_DIGITS = WordSplitting((r"\p{N}",), is_gpt2=True)
_LLAMA_3 = WordSplitting((_LLAMA3,), ignores_merges=True, adds_bos=True)
_DBRX = WordSplitting((_LLAMA3,))

WORD_SPLITTINGS: Mapping[str, WordSplitting] = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "phi-2": GPT2,
    "smollm": _DIGITS,
    "refact": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": WordSplitting((_QWEN2,)),
    "qwen35": WordSplitting((_QWEN35,), composes=True),
    "tekken": WordSplitting((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o": WordSplitting((_GPT4O,)),
    "llama4": WordSplitting((_GPT4O,), adds_bos=True),
    "deepseek-v3": WordSplitting(_DEEPSEEK3),
}
"""By the name in `tokenizer.ggml.pre`."""
