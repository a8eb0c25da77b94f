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
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_K,
    RequestOutputKind,
    SamplingParams,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0, 1e-4, 1e-300, 1.0, 2, 100]),
        ("top_p", [0, 1e-4, 0.5, 1]),
        ("top_k", [-1, 0, 1, MAX_TOP_K]),
        ("min_p", [0.0, 1.0]),
        ("presence_penalty", [-2, 2.0]),
        ("frequency_penalty", [-2, 2.0]),
        ("repetition_penalty", [0.01, 1, 100.0]),
        ("logit_bias", [None, {}, {0: -100}, {5: 100.0}]),
        ("seed", [None, 0, -1, -(2**63), 2**64 - 1]),
        ("max_tokens", [None, 1, 32000]),
        ("min_tokens", [0, 16]),
        ("stop", [None, [], (), "x", ["a", "b"], ["x" * MAX_STOP_STRING_CHARS], ["x"] * MAX_STOP_STRINGS]),
        ("stop_token_ids", [(), [1, 2]]),
        ("output_kind", list(RequestOutputKind)),
    ],
)
def test_what_can_work_is_accepted(field: str, values: list[Any]) -> None:
    """And crosses to the core as it is."""
    for value in values:
        sampling = SamplingParams(**{field: value})
        sampling.validate()
        message = EngineCoreRequest(0, "id", b"\0\0\0\0", sampling, seed=1)
        assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("field", "values"),
    [
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
    ],
)
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


def test_greedy_is_temperature_or_top_p_zero() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_p=0).is_greedy
    assert not SamplingParams(temperature=1e-4, top_p=1e-4).is_greedy


def test_parameters_cannot_change_after_they_were_checked() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]
