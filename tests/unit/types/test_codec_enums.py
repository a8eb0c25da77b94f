"""Enums cross borders as themselves: code compares them with `is`."""

import pytest

from trioengine.types.codec import decode, encode, make_strict_converter
from trioengine.types.messages import EngineCoreRequest, Finished, StepOutput
from trioengine.types.output import FinishReason
from trioengine.types.params import RequestOutputKind, SamplingParams


def test_a_finish_reason_is_the_same_member_after_the_wire() -> None:
    """A string enum is not taken for a string."""
    message = StepOutput(0, 0, 0.0, finished=(Finished(1, FinishReason.ABORT),))
    decoded = decode(encode(message))
    assert isinstance(decoded, StepOutput)
    assert decoded.finished[0].reason is FinishReason.ABORT


def test_an_output_kind_is_the_same_member_after_the_wire() -> None:
    """An integer enum is not taken for an integer."""
    sampling = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    decoded = decode(encode(EngineCoreRequest(0, "id", b"\0\0\0\0", sampling, seed=1)))
    assert isinstance(decoded, EngineCoreRequest)
    assert decoded.sampling.output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize(("value", "enum_class"), [("stopped", FinishReason), (7, RequestOutputKind)])
def test_a_value_that_is_no_member_is_refused(value: object, enum_class: type) -> None:
    """As a string or integer it would be one."""
    with pytest.raises(ValueError, match="expected one of"):
        make_strict_converter(forbid_extra_keys=False).structure(value, enum_class)
