"""Bodies become requests, or errors that name the field at fault."""

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import RequestError
from trioengine.openai.chat_protocol import Role, parse_chat_request
from trioengine.openai.completion_protocol import parse_completion_request
from trioengine.types.params import SamplingParams
from trioengine.types.repetition import RepetitionDetectionParams

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()


def completion(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "Once", **fields}).encode()


def test_a_request_with_nothing_else_has_the_defaults() -> None:
    """The same as `SamplingParams`, except that a chat may take what the context leaves."""
    request = parse_chat_request(chat())
    assert request.sampling == SamplingParams()
    assert request.max_tokens is None
    assert not request.stream
    assert parse_completion_request(completion()).sampling.max_tokens == 16


def test_every_sampling_field_is_taken() -> None:
    """By the names that `SamplingParams` has."""
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "seed": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    request = parse_completion_request(completion(**fields, logit_bias={"5": -100, "6": 2.5}))
    expected = SamplingParams(**fields, logit_bias={5: -100.0, 6: 2.5})  # pyright: ignore[reportArgumentType]
    assert request.sampling == expected


def test_a_repetition_is_described_by_an_object() -> None:
    """As vLLM takes it; what is left out has vLLM's default."""
    request = parse_chat_request(chat(repetition_detection={"max_pattern_size": 20, "min_count": 3}))
    assert request.sampling.repetition_detection == RepetitionDetectionParams(max_pattern_size=20, min_count=3)


def test_tokens_may_be_listed_whose_log_probabilities_are_told() -> None:
    """In place of the most likely ones. A chat must ask for log probabilities too, a completion need not."""
    sampling = parse_chat_request(chat(logprobs=True, logprob_token_ids=[5, 6])).sampling
    assert (sampling.logprobs, sampling.logprob_token_ids) == (0, (5, 6))
    assert parse_completion_request(completion(logprob_token_ids=[5])).sampling.logprobs == 0


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    """SDKs send null for what was not set."""
    names = ["temperature", "top_p", "max_tokens", "stop", "stream", "stream_options", "n", "logit_bias", "seed"]
    unsupported = ["tools", "response_format", "logprobs", "functions"]
    assert parse_chat_request(chat(**dict.fromkeys(names + unsupported))) == parse_chat_request(chat())


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"stream": "false"}, "stream"),
        ({"stream": 0}, "stream"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**70}, "top_k"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_completion_tokens": 1.0}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "2"}}, "logit_bias.1"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"model": 5}, "model"),
        ({"n": "1"}, "n"),
        ({"logprob_token_ids": 5, "logprobs": True}, "logprob_token_ids"),
        ({"repetition_detection": 3}, "repetition_detection"),
        ({"repetition_detection": {"min_count": "3"}}, "repetition_detection.min_count"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_and_never_coerced(fields: dict[str, object], path: str) -> None:
    """Case 42: `"stream": "false"` is not True."""
    with pytest.raises(RequestError) as caught:
        parse_chat_request(chat(**fields))
    assert caught.value.param == path
    assert path.partition(".")[0].partition("[")[0] in caught.value.message


def test_options_of_a_stream_need_one() -> None:
    """Also for completions; those that ask for nothing are fine."""
    with pytest.raises(RequestError, match="stream_options needs stream"):
        parse_completion_request(completion(stream_options={"include_usage": True}))
    assert parse_completion_request(completion(stream_options={})) == parse_completion_request(completion())


def test_missing_fields_are_named() -> None:
    """With the word "required"."""
    with pytest.raises(RequestError, match="messages is required"):
        parse_chat_request(b"{}")
    with pytest.raises(RequestError, match="prompt is required"):
        parse_completion_request(b"{}")


def test_thousands_of_wrong_items_make_one_short_message() -> None:
    """Case 21: the first one is enough."""
    with pytest.raises(RequestError) as caught:
        parse_chat_request(chat(messages=[5] * 3000))
    assert caught.value.param == "messages[0]"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("n", [1, 3])
def test_the_number_of_answers_is_the_samplings(n: int) -> None:
    """Which the engine makes of one request."""
    assert parse_chat_request(chat(n=n)).sampling.n == n


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"top_logprobs": 5},
        {"best_of": 2},
        {"echo": True},
        {"add_special_tokens": True},
        {"modalities": ["text", "audio"]},
        {"logprob_token_ids": [5]},
        {"prompt_logprob_token_ids": [5]},
        {"prompt_logprob_start": 1},
        {"trace_decode_token_ids": [5]},
        {"routed_experts_prompt_start": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, object]) -> None:
    """Never a silently different answer."""
    with pytest.raises(RequestError) as caught:
        parse_chat_request(chat(**fields))
    assert caught.value.param == next(iter(fields))


def test_neutral_values_of_unsupported_fields_are_fine() -> None:
    """They ask for nothing."""
    neutral = {
        "tools": [],
        "response_format": {"type": "text"},
        "logprobs": False,
        "echo": False,
        "add_special_tokens": False,
        "best_of": 1,
        "modalities": ["text"],
        "logprob_token_ids": [],
        "prompt_logprob_token_ids": None,
        "prompt_logprob_start": 0,
        "trace_decode_token_ids": [],
        "routed_experts_prompt_start": 0,
    }
    assert parse_chat_request(chat(**neutral)) == parse_chat_request(chat())


def test_true_is_not_one() -> None:
    """`best_of: true` is a mistake, not the neutral 1."""
    with pytest.raises(RequestError):
        parse_chat_request(chat(best_of=True))


def test_unknown_fields_are_ignored() -> None:
    """Also those that have a name of our own classes, or are the engine's business."""
    unknown = {"sampling": 5, "detokenize": False, "output_kind": 2, "x": [1]}
    request = parse_chat_request(chat(user="me", metadata={}, **unknown))
    assert attrs.evolve(request, unknown_fields=()) == parse_chat_request(chat())
    assert request.unknown_fields == ("detokenize", "output_kind", "sampling", "x")


def test_content_parts_are_joined() -> None:
    """Case 40 (langchaingo 667)."""
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    request = parse_chat_request(chat(messages=[{"role": "user", "content": parts}]))
    assert request.messages[0].content == "Hello, you"


def test_a_refusal_is_what_the_assistant_said() -> None:
    """In OpenAI's form, in which clients send it back."""
    parts = [{"type": "text", "text": "Sorry: "}, {"type": "refusal", "refusal": "no."}]
    request = parse_chat_request(chat(messages=[{"role": "assistant", "content": parts}]))
    assert request.messages[0].content == "Sorry: no."
    with pytest.raises(RequestError) as caught:
        parse_chat_request(chat(messages=[{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}]))
    assert caught.value.param == "messages[0].content[0].refusal"


def test_an_unknown_part_is_refused() -> None:
    """Case 40 (langchaingo 667): a picture that nobody sees is worse than an error."""
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(RequestError) as caught:
        parse_chat_request(chat(messages=[{"role": "user", "content": [part]}]))
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize("role", list(Role))
def test_every_role_is_known(role: Role) -> None:
    """And arrives as the enum's member."""
    assert parse_chat_request(chat(messages=[{"role": role.value, "content": ""}])).messages[0].role is role


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=2)
    ),
    max_leaves=4,
)
FIELDS = [
    "model",
    "messages",
    "prompt",
    "n",
    "stream",
    "stream_options",
    "stop",
    "logit_bias",
    "top_k",
    "tools",
    "seed",
]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_any_object_is_a_request_or_a_request_error(fields: dict[str, object]) -> None:
    """Never a 500 for a user's fault, and the error always names a field."""
    for parse, body in ((parse_chat_request, chat(**fields)), (parse_completion_request, completion(**fields))):
        try:
            outcome = parse(body).sampling
        except RequestError as error:
            outcome = error.param
        assert outcome
