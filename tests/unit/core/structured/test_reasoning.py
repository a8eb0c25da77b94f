import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.config.engine import ReasoningParser
from trioengine.core.structured.reasoning import MARKERS, EndFinder, reasoning_ended_in_prompt
from trioengine.tokenizer.tokenizer import Tokenizer

QWEN = MARKERS[ReasoningParser.QWEN3]


@pytest.mark.parametrize(
    ("prompt", "ended"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", True),
        ("<|im_start|>assistant\n</think>", True),
        ("<|im_start|>assistant\n<think>a</think>b<think>", False),
        ("<|im_start|>user\nWhat does </think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think></think>", True),
    ],
)
def test_only_the_models_own_turn_says_whether_reasoning_is_over(
    prompt: str, ended: bool, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode(prompt, allow_special=True)
    assert reasoning_ended_in_prompt(QWEN, token_ids, tokenizer) is ended


def test_every_parser_has_its_markers() -> None:
    assert set(MARKERS) == set(ReasoningParser)


@given(before=st.text(alphabet="</think> a", max_size=12), after=st.text(alphabet="</think> a", max_size=12))
def test_the_marker_is_found_in_any_tokens(tokenizer: Tokenizer, before: str, after: str) -> None:
    """Where text has the marker first, a token completes it, not earlier and not later."""
    token_ids = tokenizer.encode(before + "</think>" + after, add_special_tokens=False)
    finder = EndFinder(b"</think>", tokenizer)
    expected = finder.num_until_end(token_ids)
    assert expected is not None
    for index, token_id in enumerate(token_ids[:expected]):
        text = tokenizer.decode(token_ids[: index + 1])
        assert finder.feed(token_id) == ("</think>" in text)


def test_looking_ahead_reads_nothing(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("x</think>", add_special_tokens=False)
    finder = EndFinder(b"</think>", tokenizer)
    assert finder.num_until_end(token_ids[:-1]) is None
    assert finder.num_until_end(token_ids) == len(token_ids)
    assert [finder.feed(token_id) for token_id in token_ids] == [False] * (len(token_ids) - 1) + [True]
