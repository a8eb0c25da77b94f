"""WordPiece vocabularies, BERT's: from a `vocab.txt` or a GGUF file, built with `tokenizers`."""

from collections.abc import Mapping

import attrs
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from trioengine.errors import CheckpointError
from trioengine.tokenizer.parts import library_errors_as_checkpoint_errors

CONTINUATION = "##"
"""What a token begins with that goes on inside a word."""
CONTROL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@attrs.frozen
class WordPieceOptions:
    """What is done to text before it is cut into words. Names are those of tokenizer_config.json."""

    do_lower_case: bool = True
    strip_accents: bool | None = None
    """None: as `do_lower_case`."""
    tokenize_chinese_chars: bool = True


def build_wordpiece(
    vocabulary: Mapping[str, int], options: WordPieceOptions, *, unknown: str = "[UNK]"
) -> tokenizers.Tokenizer:
    """Return a tokenizer without control tokens and without what stands around a text.

    Raises:
        CheckpointError: the vocabulary lacks the unknown token.
    """
    if unknown not in vocabulary:
        raise CheckpointError(f"The WordPiece vocabulary has no token {unknown!r} for unknown words.")
    with library_errors_as_checkpoint_errors("The WordPiece vocabulary cannot be used"):
        model = models.WordPiece(
            dict(vocabulary), unk_token=unknown, continuing_subword_prefix=CONTINUATION, max_input_chars_per_word=100
        )
        backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(  # pyright: ignore[reportAttributeAccessIssue]
        clean_text=True,
        handle_chinese_chars=options.tokenize_chinese_chars,
        strip_accents=options.strip_accents,
        lowercase=options.do_lower_case,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.WordPiece(CONTINUATION, cleanup=True)  # pyright: ignore[reportAttributeAccessIssue]
    return backend
