import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from trioengine.config.engine import ReasoningParser
from trioengine.core.structured.reasoning import (
    MARKERS,
    MAX_BYTES_BEFORE_START,
    EndFinder,
    Reasoning,
    reasoning_ended_in_prompt,
)
from trioengine.tokenizer.parts import TokenizerFacts
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
    expected = len(Reasoning(QWEN, tokenizer).musts(token_ids))
    for index, token_id in enumerate(token_ids[:expected]):
        text = tokenizer.decode(token_ids[: index + 1])
        assert finder.feed(token_id) == ("</think>" in text)


def test_looking_ahead_reads_nothing(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("x</think>", add_special_tokens=False)
    reasoning = Reasoning(QWEN, tokenizer, 50)
    assert reasoning.musts(token_ids[:-1]) == [None] * len(token_ids)
    assert reasoning.musts(token_ids) == [None] * len(token_ids)
    assert [reasoning.feed(token_id) for token_id in token_ids] == [False] * (len(token_ids) - 1) + [True]


def test_a_model_that_writes_only_white_space_has_a_budget_too(tokenizer: Tokenizer) -> None:
    reasoning = Reasoning(QWEN, tokenizer, 3)
    (new_line,) = tokenizer.encode("\n", add_special_tokens=False)
    num_read = 0
    while reasoning.must() is None and num_read < 100:
        assert not reasoning.feed(new_line)
        num_read += 1
    assert 3 <= num_read <= 3 + MAX_BYTES_BEFORE_START + 1


def test_a_model_that_cannot_spell_the_end_goes_on() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>"))
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    letters = Tokenizer(backend, TokenizerFacts())
    reasoning = Reasoning(QWEN, letters, 1)
    assert reasoning.must() is None
    for _ in range(20):
        token_id = reasoning.must()
        assert not reasoning.feed(1 if token_id is None else token_id)
    assert (reasoning.must(), reasoning.forced(), reasoning.musts([1])) == (None, [], [None, None])


@pytest.mark.parametrize(("beginning", "budget"), [("", 3), ("<think>", 3), ("\n<think>", 3), ("", 0), ("<thin", 9)])
def test_a_budget_counts_tokens_of_reasoning_and_then_its_end_must_come(
    beginning: str, budget: int, tokenizer: Tokenizer
) -> None:
    """The start marker is not counted; what only begins like it is, but for the tokens that might have been its."""
    reasoning = Reasoning(QWEN, tokenizer, budget)
    for token_id in tokenizer.encode(beginning, add_special_tokens=False, allow_special=True):
        assert reasoning.must() is None
        assert not reasoning.feed(token_id)
    (word,) = tokenizer.encode(" so", add_special_tokens=False)
    for _ in range(budget):
        assert (reasoning.must(), reasoning.forced()) == (None, [])
        assert not reasoning.feed(word)
    end = tokenizer.encode("</think>", add_special_tokens=False, allow_special=True)
    assert reasoning.forced() == end
    assert reasoning.musts(end) == end
    assert reasoning.musts([word]) == end[:1]
    for index, token_id in enumerate(end):
        assert reasoning.must() == token_id
        assert reasoning.feed(token_id) is (index == len(end) - 1)


@given(
    token_ids=st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", "a", "</"]), max_size=12),
    budget=st.none() | st.integers(0, 6),
)
def test_looking_ahead_says_what_reading_says(tokenizer: Tokenizer, token_ids: list[str], budget: int | None) -> None:
    """Token after token, whatever they spell."""
    ids = [each for text in token_ids for each in tokenizer.encode(text, add_special_tokens=False, allow_special=True)]
    ahead, reasoning = Reasoning(QWEN, tokenizer, budget), Reasoning(QWEN, tokenizer, budget)
    expected = [reasoning.must()]
    for token_id in ids:
        if expected[-1] not in (None, token_id) or reasoning.feed(token_id):
            break
        expected.append(reasoning.must())
    assert ahead.musts(ids) == expected
