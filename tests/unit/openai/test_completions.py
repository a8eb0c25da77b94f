"""Completions: prompts of every kind, echoed prompts, several prompts in one reply, log probabilities side by side."""

import json
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from trioengine.errors import RequestError
from trioengine.openai.completion_protocol import parse_completion_request
from trioengine.openai.completion_stream import CompletionEvents, CompletionForm, completion_reply
from trioengine.openai.completion_translate import completion_to_generate
from trioengine.openai.sse import ReplyHead
from trioengine.types.output import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestOutput
from trioengine.types.request import GenerateRequest, TextPrompt, TokensPrompt

HEAD = ReplyHead("id", 1_700_000_000, "model")


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "Once", **fields}).encode()


def translate(**fields: object) -> Sequence[GenerateRequest]:
    return completion_to_generate(parse_completion_request(completion(**fields)), "id")


def position(data: bytes, logprob: float = -0.5) -> PositionLogprobs:
    """A token that was not the most likely one."""
    return PositionLogprobs(Logprob(7, logprob, 2, data), (Logprob(1, -0.1, 1, b"top"),))


def output(
    index: int, text: str, positions: Sequence[PositionLogprobs] = (), *, is_last: bool = False, num_tokens: int = 1
) -> RequestOutput:
    choice = CompletionOutput(
        index,
        text,
        tuple(each.chosen.token_id for each in positions) or (7,),
        FinishReason.LENGTH if is_last else None,
        logprobs=tuple(positions) or None,
    )
    return RequestOutput("r", (1, 2), (choice,), is_last, num_tokens)


def parse_events(data: bytes) -> list[Any]:
    events = data.removesuffix(b"\n\n").split(b"\n\n")
    return [json.loads(event.removeprefix(b"data: ")) for event in events if event and event != b"data: [DONE]"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", [TextPrompt("Once")]),
        (["Once"], [TextPrompt("Once")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokensPrompt([1, 2])]),
        ([[1, 2]], [TokensPrompt([1, 2])]),
        ([[1], [2, 3]], [TokensPrompt([1]), TokensPrompt([2, 3])]),
    ],
)
def test_prompts_of_every_kind_are_taken(prompt: object, expected: Sequence[object]) -> None:
    """A text, tokens, or a list of them: a request to the engine for each, in their order, with a name of its own."""
    requests = translate(prompt=prompt)
    assert [request.prompt for request in requests] == expected
    assert len({request.request_id for request in requests}) == len(expected)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([1, "a"], "prompt[0]"),
        ([1, True], "prompt[0]"),
        ([[1], [2, "a"]], "prompt[1]"),
        ([1.0], "prompt[0]"),
        ([None], "prompt[0]"),
        (5, "prompt"),
        ({}, "prompt"),
    ],
    ids=str,
)
def test_prompts_that_cannot_be_continued_are_refused(prompt: object, param: str) -> None:
    """Case 42 (OpenViking 4238): naming the one at fault."""
    with pytest.raises(RequestError) as caught:
        parse_completion_request(completion(prompt=prompt))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [{"suffix": "end"}, {"best_of": 3}, {"best_of": 1, "n": 2}, {"logprobs": True}, {"prompt_embeds": "x"}],
    ids=str,
)
def test_what_completions_cannot_honour_is_refused_by_name(fields: dict[str, object]) -> None:
    """Never a silently different answer."""
    with pytest.raises(RequestError) as caught:
        parse_completion_request(completion(**fields))
    assert caught.value.param == next(iter(fields))


def test_best_of_may_say_what_n_says() -> None:
    """Every answer that is made is told."""
    assert translate(n=3, best_of=3)[0].sampling.n == 3


def test_a_completion_keeps_its_parameters() -> None:
    """With sixteen tokens unless it says otherwise."""
    (request,) = translate(stop="x", seed=5)
    assert request.sampling.max_tokens == 16
    assert request.sampling.stop == ("x",)
    assert request.request_id == "id"


def test_no_tokens_are_wanted_with_echo_only() -> None:
    """Case 36 (vllm 6521): the core then computes the prompt alone; without echo it is a 400."""
    (request,) = translate(echo=True, max_tokens=0)
    assert request.sampling.max_tokens == 0
    assert request.sampling.prompt_logprobs == 0
    request.sampling.validate()
    (with_logprobs,) = translate(echo=True, max_tokens=0, logprobs=3)
    assert with_logprobs.sampling.prompt_logprobs == 3
    (generating,) = translate(echo=True)
    assert generating.sampling.prompt_logprobs is None
    with pytest.raises(RequestError) as caught:
        translate(max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_log_probabilities_of_a_prompt_are_told_in_its_choices() -> None:
    """As vLLM has them, by token id; the prompt of a stream, and one that is echoed with the same, is refused."""
    (request,) = translate(prompt_logprobs=1)
    assert request.sampling.prompt_logprobs == 1
    assert translate(prompt_logprobs=1, echo=True)[0].sampling.prompt_logprobs == 1
    form = CompletionForm(has_prompt_logprobs=True)
    outputs = [attrs.evolve(output(0, "a", is_last=True), prompt_logprobs=(None, position(b"b"))) for _ in range(2)]
    for choice in json.loads(completion_reply(HEAD, form, outputs))["choices"]:
        nothing, told = choice["prompt_logprobs"]
        assert nothing is None
        assert all(token.keys() == {"logprob", "rank", "decoded_token"} for token in told.values())
    for fields in ({"stream": True}, {"echo": True, "logprobs": 1}):
        with pytest.raises(RequestError) as caught:
            translate(prompt_logprobs=1, **fields)
        assert caught.value.param == "prompt_logprobs"


@given(st.lists(st.text(max_size=6), min_size=1, max_size=5), st.text(max_size=5), st.booleans())
def test_the_joined_chunks_are_the_whole_reply(texts: list[str], echo: str, has_logprobs: bool) -> None:
    """Text, and each of the four lists of log probabilities, with the prompt's in front."""
    form = CompletionForm(
        logprobs=1 if has_logprobs else None, echoes=[lambda _: echo], token_bytes=lambda token_id: b"<%d>" % token_id
    )
    positions = [position(text.encode()) for text in texts]
    prompt_logprobs = (None, position(b"second"))
    chunks: list[Any] = []
    events = CompletionEvents.of(HEAD, form)
    for place, text in enumerate(texts):
        delta = output(0, text, positions[place : place + 1] if has_logprobs else (), is_last=place == len(texts) - 1)
        if place == 0 and has_logprobs:
            delta = attrs.evolve(delta, prompt_logprobs=prompt_logprobs)
        chunks += parse_events(events.events(delta))
    whole_output = output(0, "".join(texts), positions if has_logprobs else (), is_last=True)
    if has_logprobs:
        whole_output = attrs.evolve(whole_output, prompt_logprobs=prompt_logprobs)
    whole = json.loads(completion_reply(HEAD, form, [whole_output]))["choices"][0]

    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"] == echo + "".join(texts)
    if has_logprobs:
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"][name]]
            assert joined == whole["logprobs"][name]
        assert whole["logprobs"]["tokens"][:2] == ["<1>", "second"]
        assert whole["logprobs"]["token_logprobs"][0] is None


def test_token_ids_are_told_in_each_choice() -> None:
    """As vLLM has them: a stream tells the prompt's in the first chunk, and every token when it is there."""
    form = CompletionForm(has_token_ids=True, n=2)
    whole_outputs = [output(index, "ab", [position(b"a")] * 2, is_last=True) for index in range(2)]
    both = attrs.evolve(whole_outputs[0], outputs=tuple(each.outputs[0] for each in whole_outputs))
    for choice in json.loads(completion_reply(HEAD, form, [both]))["choices"]:
        assert (choice["token_ids"], choice["prompt_token_ids"]) == ([7, 7], [1, 2])

    events = CompletionEvents.of(HEAD, form)
    chunks: list[Any] = []
    for index, text, is_last in ((0, "", False), (1, "", False), (0, "ab", False), (1, "c", False), (0, "", True)):
        chunks += parse_events(events.events(output(index, text, is_last=is_last)))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [0, 1, 0, 1, 0]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[1, 2], [1, 2], None, None, None]
    assert [choice["token_ids"] for choice in choices] == [[7]] * 5
    nothing = attrs.evolve(output(0, ""), outputs=(CompletionOutput(0, "", ()),))
    assert events.events(nothing) == b""
    plain = CompletionEvents.of(HEAD, CompletionForm()).events(output(0, "a", is_last=True))
    assert b"token_ids" not in plain


def test_log_probabilities_may_name_tokens_by_id() -> None:
    """The prompt's, the answer's and the most likely ones; offsets are those of the text, whatever the names are."""
    form = CompletionForm(
        logprobs=1, names_tokens_by_id=True, echoes=[lambda _: "é"], token_bytes=lambda _: "é".encode()
    )
    told = attrs.evolve(output(0, "bc", [position(b"b"), position(b"c")], is_last=True), prompt_logprobs=(None,))
    for reply in (
        json.loads(completion_reply(HEAD, form, [told])),
        parse_events(CompletionEvents.of(HEAD, form).events(told))[0],
    ):
        logprobs = reply["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:1", "token_id:7", "token_id:7"]
        assert logprobs["top_logprobs"][1] == {"token_id:1": -0.1, "token_id:7": -0.5}
        assert logprobs["text_offset"] == [0, 1, 2]


def test_log_probabilities_stand_side_by_side() -> None:
    """The token that stands there is among the most likely ones; offsets count characters."""
    positions = [position("né".encode()), position(b"\xe2\x82"), position(b"\xac"), position(b"x", -9999.0)]
    reply = completion_reply(HEAD, CompletionForm(logprobs=1), [output(0, "né€x", positions, is_last=True)])
    logprobs = json.loads(reply)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["né", "bytes:\\xe2\\x82", "bytes:\\xac", "x"]
    assert logprobs["text_offset"] == [0, 2, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5, -9999.0]
    assert logprobs["top_logprobs"][0] == {"top": -0.1, "né": -0.5}
    assert Completion.model_validate_json(reply).choices[0].logprobs is not None


def test_zero_log_probabilities_are_those_of_the_chosen_tokens() -> None:
    """Nothing is told of others."""
    reply = completion_reply(HEAD, CompletionForm(logprobs=0), [output(0, "a", [position(b"a")], is_last=True)])
    logprobs = json.loads(reply)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5]
    assert logprobs["top_logprobs"] is None


def test_the_choices_of_several_prompts_count_on() -> None:
    """Streamed and whole: the n choices of the first prompt come first, and the counts are of all."""
    form = CompletionForm(n=2, include_usage=True)
    second = CompletionEvents.of(HEAD, form, prompt_index=1)
    last = [output(1, "a", is_last=True, num_tokens=3), output(0, "b", is_last=True, num_tokens=4)]
    (chunk,) = parse_events(second.chunks(last[1], last))
    assert chunk["choices"][0]["index"] == 2
    usage = parse_events(second.end(last))[0]["usage"]
    whole = json.loads(completion_reply(HEAD, form, last))
    assert [choice["index"] for choice in whole["choices"]] == [1, 2]
    assert usage == whole["usage"]
    assert usage["prompt_tokens"] == 4
    assert usage["completion_tokens"] == 7


def test_counts_so_far_are_those_of_all_prompts() -> None:
    """With `continuous_usage_stats`."""
    form = CompletionForm(include_usage=True, continuous_usage=True)
    events = CompletionEvents.of(HEAD, form, prompt_index=1)
    newest = [output(0, "a", num_tokens=3), output(0, "b", num_tokens=1)]
    (chunk,) = parse_events(events.chunks(newest[1], newest))
    assert chunk["usage"]["completion_tokens"] == 4


def test_a_text_may_go_without_special_tokens() -> None:
    """vLLM's field; beside what cuts a prompt, and for each prompt."""
    assert [request.tokenization_kwargs for request in translate(prompt=["a", "b"])] == [None, None]
    without = {"add_special_tokens": False}
    assert [request.tokenization_kwargs for request in translate(prompt=["a", "b"], **without)] == [without] * 2
    (cut,) = translate(truncate_prompt_tokens=3, **without)
    assert cut.tokenization_kwargs == {"truncate_prompt_tokens": 3, **without}
