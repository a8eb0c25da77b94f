"""Parameters that cannot work are refused before anything is sent, by the name of the field at fault."""

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import RequestError
from trioengine.types.codec import decode, encode
from trioengine.types.messages import EngineCoreRequest
from trioengine.types.params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_EXTRA_ARGS,
    MAX_EXTRA_ARGS_CHARS,
    MAX_LOGITS_PROCESSOR_CHARS,
    MAX_LOGITS_PROCESSORS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_K,
    RequestOutputKind,
    SamplingParams,
)
from trioengine.types.repetition import MAX_PATTERN_SIZE, RepetitionDetectionParams
from trioengine.types.structured import StructuredOutputsParams

NAN, INF = math.nan, math.inf


ACCEPTED: list[tuple[str, list[Any]]] = [
    ("temperature", [0, 1e-4, 1e-300, 1.0, 2, 100]),
    ("top_p", [0, 1e-4, 0.5, 1]),
    ("top_k", [-1, 0, 1, MAX_TOP_K]),
    ("min_p", [0.0, 1.0]),
    ("presence_penalty", [-2, 2.0]),
    ("frequency_penalty", [-2, 2.0]),
    ("repetition_penalty", [0.01, 1, 100.0]),
    ("logit_bias", [None, {}, {0: -100}, {5: 100.0}]),
    ("seed", [None, 0, -2, -(2**63), 2**64 - 1]),
    ("max_tokens", [None, 1, 32000]),
    ("min_tokens", [0, 16]),
    ("stop", [None, [], (), "x", ["a", "b"], ["x" * MAX_STOP_STRING_CHARS], ["x"] * MAX_STOP_STRINGS]),
    ("stop_token_ids", [(), [1, 2]]),
    ("output_kind", list(RequestOutputKind)),
    ("allowed_token_ids", [None, [5], (5, 5)]),
    ("bad_words", [None, [], "x", ["a", "b c"], ["x" * MAX_BAD_WORD_CHARS], ["x"] * MAX_BAD_WORDS]),
    ("logprobs", [None, -1, 0, 20]),
    ("prompt_logprobs", [None, -1, 0, 20]),
    ("n", [1, 2, MAX_N]),
    ("thinking_token_budget", [None, -1, 0, 1000]),
    ("skip_reading_prefix_cache", [None, True, False]),
    ("spaces_between_special_tokens", [True, False]),
    ("stream_interval", [None, 1, 100]),
    ("flat_logprobs", [True, False]),
    ("skip_clone", [True, False]),
    ("extra_args", [None, {}, {"a": 5, "b": "text", "c": {"d": [None, 1.5]}, "e": '{"f": 1}'}]),
    ("logits_processors", [None, {}, {"a": {}}, {"a": {"x": [1, None]}, "b": '{"y": 2.5}'}]),
    ("repetition_detection", [None, RepetitionDetectionParams(), RepetitionDetectionParams(MAX_PATTERN_SIZE, 0, 2)]),
    ("logprob_token_ids", [None, [], (), [5], (6, 5, 5)]),
    ("prompt_logprob_token_ids", [None, []]),
    ("prompt_logprob_start", [None, 0]),
    ("trace_decode_token_ids", [None, []]),
    ("routed_experts_prompt_start", [0]),
]

REFUSED: list[tuple[str, list[Any]]] = [
    ("stop", [5, 1.5]),
    ("stop_token_ids", [5, True]),
    ("bad_words", [5]),
    ("allowed_token_ids", [5, False]),
    ("temperature", [-0.1, NAN, INF, -INF, 101, "1", None, True]),
    ("top_p", [-0.1, 1.1, NAN, INF, "1"]),
    ("top_k", [-2, 2**31, 1.5, NAN, True, None, "4"]),
    ("min_p", [-0.1, 1.1, NAN]),
    ("presence_penalty", [-2.1, 2.1, NAN]),
    ("frequency_penalty", [-2.1, 2.1, NAN]),
    ("repetition_penalty", [0.0, -1, 101, NAN, INF]),
    ("seed", [-(2**63) - 1, 2**64, 1.0, "1", True]),
    ("max_tokens", [0, -1, 16.0, NAN, "16", True]),
    ("min_tokens", [-1, 17, 1.0, None]),
    ("ignore_eos", [0, "false", None]),
    ("include_stop_str_in_output", [1]),
    ("skip_special_tokens", ["no"]),
    ("detokenize", [None]),
    ("output_kind", [1, "DELTA", None]),
    ("allowed_token_ids", [[]]),
    ("bad_words", [["x"] * (MAX_BAD_WORDS + 1)]),
    ("logprobs", [-2, 1.0, True, "1"]),
    ("prompt_logprobs", [-2, 1.0, True, "1"]),
    ("structured_outputs", ["{}", {"json": "{}"}, 5]),
    ("n", [0, -1, MAX_N + 1, 1.0, True, None, "2"]),
    ("thinking_token_budget", [-2, 1.0, True, "1", 2**31]),
    ("skip_reading_prefix_cache", [0, "yes"]),
    ("spaces_between_special_tokens", [None, 1]),
    ("stream_interval", [0, -1, 1.5, True, 2**31]),
    ("flat_logprobs", [None, 1]),
    ("skip_clone", [None, 1]),
    ("extra_args", ["a", [], 5, {"\ud800": 1}, {str(n): 1 for n in range(MAX_EXTRA_ARGS + 1)}]),
    ("extra_args", [{"a": "x" * MAX_EXTRA_ARGS_CHARS}]),
    ("logits_processors", ["a", [], 5, {"\ud800": {}}, {str(n): {} for n in range(MAX_LOGITS_PROCESSORS + 1)}]),
    ("repetition_detection", [{"min_count": 2}, 5, True]),
    ("logprob_token_ids", [5, True]),
    ("prompt_logprob_token_ids", [[5], [[5]], "5"]),
    ("prompt_logprob_start", [1, -1, 0.0, False]),
    ("trace_decode_token_ids", [[5]]),
    ("routed_experts_prompt_start", [1, None, False]),
]


@pytest.mark.parametrize(("field", "values"), ACCEPTED)
def test_what_can_work_is_accepted(field: str, values: list[Any]) -> None:
    """And crosses to the core as it is."""
    for value in values:
        sampling = SamplingParams(**{field: value})
        sampling.validate()
        message = EngineCoreRequest(0, "id", b"\0\0\0\0", sampling, seed=1)
        assert decode(encode(message)) == message


@pytest.mark.parametrize(("field", "values"), REFUSED)
def test_what_cannot_work_is_refused_by_its_name(field: str, values: list[Any]) -> None:
    """Out of range, not finite, of the wrong type: the core, which would have to refuse it, is never asked."""
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value}).validate()
        assert caught.value.param == field
        assert field in str(caught.value)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: SamplingParams(stop=""), "stop[0]"),
        (lambda: SamplingParams(stop=["a", ""]), "stop[1]"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=["x" * (MAX_STOP_STRING_CHARS + 1)]), "stop[0]"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=["x"] * (MAX_STOP_STRINGS + 1)), "stop"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=["a", 5]), "stop[1]"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=["\ud800"]), "stop[0]"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop="x", detokenize=False), "stop"),
        (lambda: SamplingParams(stop_token_ids=[1, 2.0]), "stop_token_ids[1]"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop_token_ids=[True]), "stop_token_ids[0]"),  # type: ignore[arg-type]
        (lambda: SamplingParams(logit_bias={1: 101}), "logit_bias[1]"),
        (lambda: SamplingParams(logit_bias={1: NAN}), "logit_bias[1]"),
        (lambda: SamplingParams(logit_bias={1: "5"}), "logit_bias[1]"),  # type: ignore[dict-item]
        (lambda: SamplingParams(logit_bias={"1": 5}), "logit_bias['1']"),  # type: ignore[dict-item]
        (lambda: SamplingParams(logit_bias=[1]), "logit_bias"),  # type: ignore[arg-type]
        (lambda: SamplingParams(allowed_token_ids=[1, "2"]), "allowed_token_ids[1]"),  # type: ignore[list-item]
        (lambda: SamplingParams(allowed_token_ids=[True]), "allowed_token_ids[0]"),
        (lambda: SamplingParams(logprob_token_ids=[1, "2"]), "logprob_token_ids[1]"),  # type: ignore[list-item]
        (lambda: SamplingParams(bad_words=["a", ""]), "bad_words[1]"),
        (lambda: SamplingParams(bad_words=[5]), "bad_words[0]"),  # type: ignore[list-item]
        (lambda: SamplingParams(bad_words=["\udfff"]), "bad_words[0]"),
        (lambda: SamplingParams(bad_words=["x" * (MAX_BAD_WORD_CHARS + 1)]), "bad_words[0]"),
        (lambda: SamplingParams(extra_args={"a": object()}), "extra_args[a]"),  # type: ignore[dict-item]
        (lambda: SamplingParams(extra_args={"a": NAN}), "extra_args[a]"),  # type: ignore[dict-item]
        (lambda: SamplingParams(logits_processors={"a": []}), "logits_processors[a]"),  # type: ignore[dict-item]
        (lambda: SamplingParams(logits_processors={"a": "{"}), "logits_processors[a]"),
        (lambda: SamplingParams(logits_processors={"a": '{"x": NaN}'}), "logits_processors[a]"),
        (lambda: SamplingParams(logits_processors={"a": {"x": NAN}}), "logits_processors[a]"),
        (lambda: SamplingParams(logits_processors={"a": {"x": object()}}), "logits_processors[a]"),
        (
            lambda: SamplingParams(logits_processors={"a": {"x": "y" * MAX_LOGITS_PROCESSOR_CHARS}}),
            "logits_processors[a]",
        ),
    ],
)
def test_items_are_refused_by_their_place(make: Callable[[], SamplingParams], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make().validate()
    assert caught.value.param == param


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2)
            for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos")
        },
    )
)
def test_whatever_is_accepted_can_be_sent_and_whatever_is_not_is_a_request_error(fields: dict[str, Any]) -> None:
    sampling = SamplingParams(**fields)
    refused = None
    try:
        sampling.validate()
    except RequestError as error:
        refused = error
    if refused is not None:
        assert refused.param in fields
        return
    if sampling.max_tokens is not None and sampling.max_tokens >= 2**63:
        return  # The front end lowers it to what the context leaves.
    message = EngineCoreRequest(0, "id", b"\0\0\0\0", sampling, seed=1)
    assert decode(encode(message)) == message


def test_no_tokens_are_asked_for_only_with_log_probabilities_of_the_prompt() -> None:
    """Case 36 (vllm 6521)."""
    SamplingParams(max_tokens=0, prompt_logprobs=0).validate()
    with pytest.raises(RequestError, match="max_tokens must be at least 1") as caught:
        SamplingParams(max_tokens=0).validate()
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(max_tokens=0, min_tokens=1, prompt_logprobs=0).validate()


def test_two_rules_that_may_leave_no_token_are_refused_together() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(allowed_token_ids=[5], structured_outputs=StructuredOutputsParams(regex="x+")).validate()
    assert caught.value.param == "allowed_token_ids"


def test_the_form_of_the_answer_is_checked_too() -> None:
    SamplingParams(structured_outputs=StructuredOutputsParams(regex="x+")).validate()
    with pytest.raises(RequestError, match="exactly one"):
        SamplingParams(structured_outputs=StructuredOutputsParams()).validate()


def test_arguments_of_logits_processors_are_kept_as_json() -> None:
    assert SamplingParams(logits_processors={"a": {"x": 1}}) == SamplingParams(logits_processors={"a": '{"x": 1}'})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_pattern_size", -1),
        ("max_pattern_size", MAX_PATTERN_SIZE + 1),
        ("max_pattern_size", True),
        ("min_pattern_size", 6),
        ("min_pattern_size", -1),
        ("min_count", 1),
        ("min_count", 2.0),
        ("min_count", 2**31),
    ],
)
def test_a_repetition_that_cannot_be_looked_for_is_refused_by_its_path(field: str, value: Any) -> None:
    fields = {"max_pattern_size": 5, "min_pattern_size": 1, "min_count": 3, field: value}
    with pytest.raises(RequestError) as caught:
        SamplingParams(repetition_detection=RepetitionDetectionParams(**fields)).validate()
    assert caught.value.param == f"repetition_detection.{field}"


def test_tokens_that_are_listed_ask_for_log_probabilities() -> None:
    assert SamplingParams(logprob_token_ids=[5]).logprobs == 0  # type: ignore[arg-type]
    assert SamplingParams(logprob_token_ids=[5], logprobs=3).logprobs == 3  # type: ignore[arg-type]
    assert SamplingParams(logprob_token_ids=[]).logprobs is None  # type: ignore[arg-type]


def test_greedy_is_temperature_or_top_p_zero() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_p=0).is_greedy
    assert not SamplingParams(temperature=1e-4, top_p=1e-4).is_greedy


def test_parameters_cannot_change_after_they_were_checked() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_p": 0}])
def test_several_answers_of_which_all_would_be_equal_are_refused(greedy: dict[str, Any]) -> None:
    SamplingParams(**greedy).validate()
    with pytest.raises(RequestError, match="all 2 would be equal") as caught:
        SamplingParams(n=2, **greedy).validate()
    assert caught.value.param == "n"


def test_extra_arguments_are_kept_as_json_and_stay_so() -> None:
    sampling = SamplingParams(extra_args={"a": 5, "b": "text", "c": {"d": None}})  # type: ignore[dict-item]
    assert sampling.extra_args == {"a": "5", "b": '"text"', "c": '{"d": null}'}
    assert attrs.evolve(sampling, n=2).extra_args == sampling.extra_args


def test_what_scripts_write_for_nothing_is_nothing() -> None:
    """As vLLM takes it."""
    nothing: Any = None
    assert SamplingParams(stop=nothing, stop_token_ids=nothing, bad_words=nothing, seed=-1) == SamplingParams()


def test_a_budget_of_minus_one_is_none() -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
