"""Log probabilities from columns to values."""

from array import array
from collections.abc import Sequence

from trioengine.frontend.logprobs import LogprobEntry, entries_by_slot
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.messages import LogprobColumns, pack_int32
from trioengine.types.output import Logprob

TOKENIZER = FakeTokenizer(["€"])
EURO = 256


def entry(rank: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> LogprobEntry:
    return LogprobEntry(rank, pack_int32(token_ids), array("f", logprobs).tobytes())


def test_each_slot_gets_its_entries_in_order() -> None:
    columns = LogprobColumns(
        slots=pack_int32([3, 0, 3]),
        counts=pack_int32([1, 3, 2]),
        ranks=pack_int32([7, 2, 1]),
        token_ids=pack_int32([10, 20, 21, 22, 30, 31]),
        logprobs=array("f", [-1, -2, -2.5, -3, -4, -5]).tobytes(),
    )
    assert entries_by_slot(columns) == {
        3: [entry(7, [10], [-1]), entry(1, [30, 31], [-4, -5])],
        0: [entry(2, [20, 21, 22], [-2, -2.5, -3])],
    }


def test_the_chosen_token_is_reported_beside_the_most_likely() -> None:
    """With its own rank, and not at the price of the last of them."""
    position = entry(9, [97, EURO, 98], [-4, -0.5, -1]).to_position(TOKENIZER)
    assert position.chosen == Logprob(97, -4.0, 9, b"a")
    assert position.top == (Logprob(EURO, -0.5, 1, "€".encode()), Logprob(98, -1.0, 2, b"b"))


def test_equals_share_the_best_place() -> None:
    position = entry(2, [3, 1, 2, 3, 4, 5], [-2, -1, -2, -2, -2, -9999]).to_position(TOKENIZER)
    assert [logprob.rank for logprob in position.top] == [1, 2, 2, 2, 5]


def test_tokens_that_were_listed_have_no_rank() -> None:
    """They are told in their order, whatever their places are."""
    position = entry(2, [3, 1, 5], [-2, -9, -1]).to_position(TOKENIZER, has_ranks=False)
    assert (position.chosen.rank, [each.rank for each in position.top]) == (2, [0, 0])
    assert [each.token_id for each in position.top] == [1, 5]


def test_a_token_may_be_a_part_of_a_character() -> None:
    """Or of none: the model may have more rows than its tokenizer has tokens."""
    position = entry(1, [0xE2, 9999], [-1, -1]).to_position(TOKENIZER)
    assert position.chosen.token_bytes == b"\xe2"
    assert position.top[0].token_bytes == b""
