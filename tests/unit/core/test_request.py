"""A request's states, its end, and what keeps a bad one out."""

import itertools

import attrs
import pytest

from trioengine.core.config import CoreConfig
from trioengine.core.request import TRANSITIONS, Request, RequestEvent, RequestStatus, make_request
from trioengine.errors import ConfigError, PromptTooLongError, RequestError
from trioengine.testing.core_driver import make_core_config, make_core_request
from trioengine.types.messages import EngineCoreRequest, Finished
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.repetition import RepetitionDetectionParams


def make(message: EngineCoreRequest) -> Request:
    return make_request(client=0, message=message, sequence_id=0, config=make_core_config())


def test_only_what_the_table_lists_can_happen() -> None:
    """Nothing happens to a finished request, and a waiting one can only start or be aborted."""
    for status, event in itertools.product(RequestStatus, RequestEvent):
        request = make(make_core_request())
        request.status = status
        if (status, event) in TRANSITIONS:
            request.apply(event)
            assert request.status is TRANSITIONS[status, event]
        else:
            with pytest.raises(KeyError):
                request.apply(event)
            assert request.status is status
    assert not [status for status, _ in TRANSITIONS if status is RequestStatus.FINISHED]


def test_the_answer_ends_where_the_context_ends() -> None:
    """max_tokens beyond the context, and none at all, mean the rest of the context."""
    for max_tokens in (None, 62, 1000):
        message = make_core_request(prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=max_tokens))
        assert make(message).max_total_tokens == 64
    assert make(make_core_request(prompt=(1, 2, 3), max_tokens=5)).max_total_tokens == 8


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_token_ids": b""}, "prompt"),
        ({"prompt_token_ids": b"\x01\x00\x00"}, "prompt"),
        ({"prompt_token_ids": (1000).to_bytes(4, "little")}, "prompt"),
        ({"prompt_token_ids": b"\xff\xff\xff\xff"}, "prompt"),
        ({"prompt_token_ids": b"\x01\x00\x00\x00" * 64}, "prompt"),
        ({"eos_token_ids": (1000,)}, "stop_token_ids"),
        ({"sampling": SamplingParams(stop_token_ids=(-1,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(logit_bias={1000: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(logprob_token_ids=(5, 1000))}, "logprob_token_ids"),
        ({"sampling": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, object], param: str) -> None:
    """The error's `param` is the field at fault."""
    message = attrs.evolve(make_core_request(), **change)
    with pytest.raises(RequestError) as caught:
        make(message)
    assert caught.value.param == param


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers() -> None:
    """As long as the context is too long; one token less is not."""
    with pytest.raises(PromptTooLongError) as caught:
        make(make_core_request(prompt=[1] * 64))
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (64, 64)
    assert make(make_core_request(prompt=[1] * 63)).max_total_tokens == 64


def test_a_prompt_may_fill_the_context_when_only_its_log_probabilities_are_asked_for() -> None:
    """Case 36 (vllm 6521)."""
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=1)
    assert make(make_core_request(prompt=[1] * 64, sampling=scoring)).max_total_tokens == 64
    with pytest.raises(PromptTooLongError):
        make(make_core_request(prompt=[1] * 65, sampling=scoring))


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("generated", "finished"),
    [
        ([5], None),
        ([5, 6, 9], Finished(0, STOP)),
        ([5, 6, 8], Finished(0, STOP, stop_token_id=8)),
        ([5, 6, 7, 5], Finished(0, LENGTH)),
        ([5, 6, 7, 9], Finished(0, STOP)),
        ([5, 6, 7, 8], Finished(0, STOP, stop_token_id=8)),
        ([9], None),
        ([5, 8], None),
    ],
)
def test_how_a_request_ends(generated: list[int], finished: Finished | None) -> None:
    """End of text, then stop tokens, then the limit; no stop before min_tokens (2) tokens came before."""
    sampling = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(8, 9))
    request = make(make_core_request(sampling=sampling, eos_token_ids=(9,)))
    request.token_ids.extend(generated)
    assert request.stop_after(generated[-1]) == finished


@pytest.mark.parametrize(
    ("generated", "finished"),
    [
        ([1, 2, 1, 2], None),
        ([1, 2, 1, 2, 1, 2], Finished(0, FinishReason.REPETITION)),
        ([1, 1, 1, 1], Finished(0, FinishReason.REPETITION)),
        ([1, 1, 1], None),
        ([1, 2, 1, 2, 1, 8], Finished(0, STOP, stop_token_id=8)),
        ([3, 4, 5, 6, 7, 6, 7, 6, 7], Finished(0, LENGTH)),
    ],
)
def test_an_answer_that_repeats_itself_ends(generated: list[int], finished: Finished | None) -> None:
    """Three times the same one or two tokens, not counting the prompt's, nor before min_tokens (4) are there; a stop
    token and the limit come first."""
    repetition = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    sampling = SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=(8,), repetition_detection=repetition)
    request = make(make_core_request(prompt=(1, 2, 1, 2), sampling=sampling))
    request.token_ids.extend(generated)
    assert request.stop_after(generated[-1]) == finished


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(CoreConfig) if field.validator])
def test_a_limit_below_one_is_refused_by_name(name: str) -> None:
    """A config that cannot work cannot be made."""
    with pytest.raises(ConfigError) as caught:
        attrs.evolve(make_core_config(), **{name: 0})
    assert caught.value.option == name
