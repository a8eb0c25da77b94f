"""One request: tokens in, text and exactly one ending out."""

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import EngineGenerateError
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.parent_request import ParentRequest
from trioengine.frontend.pending_output import PendingOutput
from trioengine.frontend.request_state import RequestState
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.messages import Finished, ModelFacts, pack_int32
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest

WORDS = ("DEF", "G", "HI", "J", "X", "ab", "bc", "STOP")
TOKENIZER = FakeTokenizer(WORDS)
END = TOKENIZER.end_token_id
PROCESSOR = InputProcessor(TOKENIZER, ModelFacts(100_000, TOKENIZER.vocab_size, (END,)))


class Reader(PendingOutput):
    """What a reader would have seen, put by put."""

    def deltas(self) -> list[str]:
        return list(self.texts)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def start(sampling: SamplingParams | None = None, prompt: str | Sequence[int] = "p") -> tuple[RequestState, Reader]:
    sink = Reader()
    sampling = SamplingParams(max_tokens=1000) if sampling is None else sampling
    processed = PROCESSOR.process(GenerateRequest(prompt, sampling))
    return RequestState(processed, ParentRequest(processed, rank=0, arrival_s=0.0), sink), sink


def stopping(*stops: str, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=1000, stop=stops, **others)  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def finished(reason: FinishReason = FinishReason.LENGTH, stop_token_id: int | None = None) -> Finished:
    return Finished(3, reason, stop_token_id)


def test_text_comes_with_the_token_that_completes_it() -> None:
    """A character split over tokens is held until it is whole."""
    state, sink = start()
    seen: list[str] = []
    for token_id in "a€".encode():
        assert not state.receive([token_id], None)
        seen.append(sink.text)
    assert seen == ["a", "a", "a", "a€"]
    assert sink.token_ids == list("a€".encode())
    assert not sink.is_last


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    state, sink = start()
    state.receive([97, 0xE2, 0x82], finished())
    assert sink.text == "a\ufffd"
    assert sink.finish_reason is FinishReason.LENGTH
    assert not state.is_open


def test_an_incomplete_character_of_the_prompt_is_completed_and_not_repeated() -> None:
    """Case 25 (vllm 48853): the first delta is that character only."""
    state, sink = start(prompt=list("€".encode())[:2])
    state.receive(["€".encode()[2]], None)
    assert sink.text == "€"


def test_nothing_of_a_stop_string_is_shown() -> None:
    """Case 22 (vllm 3574): DEF, G, HI, J."""
    state, sink = start(stopping("DEFGHIJ"))
    for word in ("DEF", "G", "HI"):
        assert not state.receive(ids(word), None)
        assert sink.text == ""
    assert state.receive(ids("J"), None)
    assert (sink.text, sink.finish_reason, sink.stop_reason) == ("", FinishReason.STOP, "DEFGHIJ")
    assert len(sink.token_ids) == 4  # The tokens that spell the stop are reported.


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    """Case 22 (vllm 3574): DEF, G, X."""
    state, sink = start(stopping("DEFGHIJ"))
    for word in ("DEF", "G", "X"):
        assert not state.receive(ids(word), None)
    assert sink.text == "DEFGX"


def test_a_long_stop_string_delays_nothing_past_the_token_that_rules_it_out() -> None:
    """Case 23 (vllm 13087): not a fixed number of characters is held back."""
    state, sink = start(stopping("b" * 30))
    for index in range(20):
        state.receive(ids("a"), None)
        assert sink.text == "a" * (index + 1)
    state.receive(ids("b"), None)
    assert sink.text == "a" * 20
    state.receive(ids("a"), None)
    assert sink.text == "a" * 20 + "ba"


def test_tokens_after_the_one_that_completes_the_stop_are_dropped() -> None:
    """Case 24 (vllm 47616): a step of four tokens, the third completes the stop."""
    state, sink = start(stopping("HIJ"))
    assert state.receive(ids("GHIJX"), None)
    assert sink.token_ids == ids("GHIJ")
    assert sink.text == "G"
    assert sink.finish_reason is FinishReason.STOP


def entries(token_ids: Sequence[int]) -> list[LogprobEntry]:
    """One for each token: its own alone."""
    return [LogprobEntry(1, pack_int32([token_id]), b"\0\0\0\0") for token_id in token_ids]


def test_log_probabilities_of_tokens_after_the_stop_are_dropped_with_them() -> None:
    """Case 24 (vllm 47616): of a step of four tokens three are left, and three log probabilities."""
    state, sink = start(stopping("HIJ", logprobs=0))
    step = ids("GHIJX")
    state.receive_logprobs(entries(step))
    assert state.receive(step, None)
    assert sink.token_ids == ids("GHIJ")
    assert sink.logprobs == entries(ids("GHIJ"))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.booleans())
def test_each_token_has_its_own_log_probability(row_lengths: list[int], comes_at_once: bool) -> None:
    """Also when those of several rows come together."""
    state, sink = start(SamplingParams(max_tokens=1000, logprobs=0))
    tokens = list(range(sum(row_lengths)))
    if comes_at_once:
        state.receive_logprobs(entries(tokens))
    rest = tokens
    for length in row_lengths:
        row, rest = rest[:length], rest[length:]
        if not comes_at_once:
            state.receive_logprobs(entries(row))
        state.receive(row, None if rest else finished())
        assert sink.logprobs == entries(sink.token_ids)
    assert sink.token_ids == tokens


def test_a_token_without_its_log_probability_is_a_fault() -> None:
    """Never one too few, or of another token."""
    state, sink = start(SamplingParams(logprobs=0))
    state.receive_logprobs(entries([97]))
    with pytest.raises(ValueError, match="2 tokens"):
        state.receive([97, 98], None)
    assert (sink.token_ids, state.is_open) == ([], True)


def test_log_probabilities_that_nobody_asked_for_are_ignored() -> None:
    state, sink = start()
    state.receive_logprobs(entries([97]))
    state.receive([97], None)
    assert (sink.token_ids, sink.logprobs) == ([97], None)


def test_what_is_known_of_the_prompt_reaches_only_those_who_wait() -> None:
    state, sink = start()
    state.receive_prompt(3, ())
    state.receive_prompt(0, entries([1]))
    state.receive_prompt(0, entries([2]))
    state.end(FinishReason.ABORT)
    state.receive_prompt(9, entries([3]))
    assert (sink.num_cached_tokens, sink.prompt_logprobs) == (3, entries([1, 2]))


def test_a_stop_string_begins_and_ends_inside_tokens() -> None:
    state, sink = start(stopping("bb"))
    assert state.receive(ids("abbc"), None)
    assert (sink.text, sink.token_ids) == ("a", ids("abbc"))


def test_the_stop_string_is_shown_when_asked_for() -> None:
    state, sink = start(stopping("bb", include_stop_str_in_output=True))
    assert state.receive(ids("abbc"), None)
    assert sink.text == "abb"


def test_the_stop_that_ends_first_wins() -> None:
    state, sink = start(stopping("bcX", "b", "ab"))
    assert state.receive(ids("ab"), None)
    assert (sink.text, sink.stop_reason) == ("a", "b")


def test_a_stop_string_overrides_length_in_the_same_step() -> None:
    state, sink = start(stopping("J"))
    assert state.receive(ids("HIJ"), finished(FinishReason.LENGTH))
    assert (sink.text, sink.finish_reason, sink.stop_reason) == ("HI", FinishReason.STOP, "J")


def test_the_prompt_takes_no_part_in_a_stop_string() -> None:
    state, sink = start(stopping("DEFG"), prompt="DEF")
    assert not state.receive(ids("G"), None)
    assert sink.text == "G"


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_stop_strings_wait_for_min_tokens(min_tokens: int, num_tokens: int) -> None:
    """The token that reaches the minimum may be the last."""
    state, sink = start(stopping("J", min_tokens=min_tokens))
    assert state.receive(ids("JJJJJ"), None)
    assert len(sink.token_ids) == num_tokens
    assert sink.text == "J" * (num_tokens - 1)


def test_text_held_back_is_shown_at_the_end() -> None:
    for end in (lambda state: state.receive([], finished()), lambda state: state.end(FinishReason.ABORT)):
        state, sink = start(stopping("DEFGHIJ"))
        state.receive(ids("DEFG"), None)
        assert sink.text == ""
        end(state)
        assert sink.text == "DEFG"
        assert sink.finish_reason is not None


def test_an_incomplete_character_may_complete_a_stop_string() -> None:
    state, sink = start(stopping("\ufffd"))
    state.receive([97, 0xE2], finished())
    assert (sink.text, sink.finish_reason, sink.stop_reason) == ("a", FinishReason.STOP, "\ufffd")


def test_the_end_tokens_id_is_reported_and_its_text_is_not_shown() -> None:
    state, sink = start(SamplingParams(skip_special_tokens=False))
    state.receive([*ids("X"), END], finished(FinishReason.STOP))
    assert (sink.text, sink.token_ids) == ("X", [*ids("X"), END])
    assert (sink.finish_reason, sink.stop_reason) == (FinishReason.STOP, None)


def test_a_stop_tokens_text_is_not_shown_and_it_is_the_reason() -> None:
    (stop_token,) = ids("STOP")
    state, sink = start(SamplingParams(stop_token_ids=(stop_token,)))
    state.receive(ids("XSTOP"), finished(FinishReason.STOP, stop_token))
    assert (sink.text, sink.stop_reason) == ("X", stop_token)


def test_an_end_tokens_text_is_shown_when_asked_for() -> None:
    state, sink = start(SamplingParams(include_stop_str_in_output=True))
    state.receive(ids("XSTOP"), finished(FinishReason.STOP, ids("STOP")[0]))
    assert sink.text == "XSTOP"


def test_an_answer_that_repeated_itself_says_so_and_hides_nothing() -> None:
    state, sink = start(stopping("STOP"))
    state.receive(ids("XXX"), finished(FinishReason.REPETITION))
    assert (sink.text, sink.finish_reason, sink.stop_reason) == (
        "XXX",
        FinishReason.REPETITION,
        "repetition_detected",
    )


def test_an_end_without_an_end_token_hides_nothing() -> None:
    """As where the form of the answer is complete."""
    state, sink = start()
    state.receive(ids("XJ"), Finished(3, FinishReason.STOP, ends_with_text=True))
    assert (sink.text, sink.finish_reason) == ("XJ", FinishReason.STOP)


def test_a_hidden_end_token_completes_no_stop_string() -> None:
    state, sink = start(stopping("STOP", stop_token_ids=ids("STOP")))
    state.receive(ids("STOP"), finished(FinishReason.STOP, ids("STOP")[0]))
    assert sink.stop_reason == ids("STOP")[0]


def test_control_tokens_are_shown_when_asked_for() -> None:
    for skip, text in ((True, "XX"), (False, "X<|end|>X")):
        state, sink = start(SamplingParams(skip_special_tokens=skip, ignore_eos=True))
        state.receive([*ids("X"), END, *ids("X")], None)
        assert sink.text == text


def test_without_detokenizing_there_are_only_tokens() -> None:
    state, sink = start(SamplingParams(detokenize=False))
    state.receive(ids("DEFG"), finished())
    assert (sink.texts, sink.token_ids) == ([], ids("DEFG"))


def test_an_error_comes_after_the_text_held_back() -> None:
    state, sink = start(stopping("DEFGHIJ"))
    state.receive(ids("DEF"), None)
    error = EngineGenerateError("broken")
    state.fail(error)
    assert (sink.text, sink.token_ids, sink.error) == ("DEF", ids("DEF"), error)


def test_there_is_one_ending() -> None:
    """Whatever comes first ends it; the rest is ignored."""
    enders = [
        lambda state: state.receive(ids("J"), None),
        lambda state: state.receive(ids("X"), finished()),
        lambda state: state.end(FinishReason.ABORT),
        lambda state: state.fail(EngineGenerateError("broken")),
        lambda state: state.drop(),
    ]
    for first in enders:
        for second in enders:
            state, sink = start(stopping("J"))
            first(state)
            assert not state.is_open
            before = attrs.astuple(sink)
            assert not second(state)
            assert attrs.astuple(sink) == before


@given(
    st.lists(st.sampled_from([*WORDS, "€", "a", "b", "c"]), min_size=1, max_size=12).map("".join),
    st.lists(st.text("DEFGHabc€", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_however_tokens_come_the_text_is_the_same(
    text: str, stops: list[str], includes_stop: bool, row_lengths: list[int]
) -> None:
    """Rows of several tokens, or one by one: the joined deltas are the text up to the stop that ends first."""
    sampling = SamplingParams(max_tokens=1000, stop=stops, include_stop_str_in_output=includes_stop)  # type: ignore[arg-type]
    state, sink = start(sampling)
    token_ids = ids(text)
    rest = token_ids
    for length in [*row_lengths, len(token_ids)]:
        row, rest = rest[:length], rest[length:]
        if state.is_open and row:
            state.receive(row, finished() if not rest else None)
    ends = [(text.index(stop) + len(stop), index) for index, stop in enumerate(stops) if stop in text]
    if ends:
        end, index = min(ends)
        assert sink.stop_reason == stops[index]
        assert sink.text == text[: end if includes_stop else end - len(stops[index])]
        assert TOKENIZER.decode(sink.token_ids).startswith(text[:end])
        assert not TOKENIZER.decode(sink.token_ids[:-1]).startswith(text[:end])
    else:
        assert (sink.text, sink.finish_reason, sink.token_ids) == (text, FinishReason.LENGTH, token_ids)
