"""Prompts become tokens as the model wants them, or as the caller says, and keep their text."""

from typing import Any

import pytest

from trioengine.errors import PromptTooLongError, RequestError
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.renderer import Renderer
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.messages import ModelFacts
from trioengine.types.params import SamplingParams
from trioengine.types.request import ChatPrompt, GenerateRequest, TextPrompt, TokensPrompt

BEGIN, END = 256, 257


class FramingTokenizer(FakeTokenizer):
    """Puts a token before a text and one behind it."""

    def __init__(self) -> None:
        super().__init__(["<begin>"])

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        token_ids = super().encode(text, allow_special=allow_special)
        return [BEGIN, *token_ids, END] if add_special_tokens else token_ids


RENDERER = Renderer(FramingTokenizer(), vocab_size=258, max_model_len=20)
CHAT = ChatPrompt([{"role": "user", "content": "x"}])


def test_a_text_keeps_its_text() -> None:
    assert RENDERER.render(TextPrompt("abc")) == TokensPrompt((BEGIN, *b"abc", END), "abc")


def test_a_chat_has_the_text_that_the_template_makes() -> None:
    rendered = RENDERER.render(CHAT)
    assert rendered.prompt_text is not None
    assert rendered.prompt_text.startswith("user: x")
    assert RENDERER.render(rendered) == rendered


def test_tokens_have_the_text_that_they_came_with_else_their_own() -> None:
    assert RENDERER.render(TokensPrompt([97, 98], "mine")) == TokensPrompt((97, 98), "mine")
    assert RENDERER.render(TokensPrompt([97, 98])).prompt_text == "ab"


@pytest.mark.parametrize(
    ("kwargs", "token_ids"),
    [
        (None, (BEGIN, *b"abcdef", END)),
        ({}, (BEGIN, *b"abcdef", END)),
        ({"add_special_tokens": True}, (BEGIN, *b"abcdef", END)),
        ({"add_special_tokens": False}, tuple(b"abcdef")),
        ({"truncate_prompt_tokens": 5}, (BEGIN, *b"def", END)),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, (BEGIN, *b"def", END)),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, (BEGIN, *b"abc", END)),
        ({"truncate_prompt_tokens": 8, "truncation_side": "right"}, (BEGIN, *b"abcdef", END)),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, tuple(b"def")),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False, "truncation_side": "right"}, tuple(b"abc")),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, (BEGIN, *b"a")),
        ({"truncate_prompt_tokens": 1}, (END,)),
        ({"truncate_prompt_tokens": -1}, (BEGIN, *b"abcdef", END)),
    ],
)
def test_a_text_is_cut_on_either_side_and_what_is_around_it_stays(kwargs: Any, token_ids: tuple[int, ...]) -> None:
    assert RENDERER.render(TextPrompt("abcdef"), kwargs).token_ids == token_ids


def test_what_was_cut_has_the_text_of_what_is_left() -> None:
    assert RENDERER.render(TokensPrompt(list(b"abcdef"), "abcdef"), {"truncate_prompt_tokens": 2}).prompt_text == "ef"


def test_chats_and_tokens_are_cut_too() -> None:
    whole = RENDERER.render(CHAT).token_ids
    assert RENDERER.render(CHAT, {"truncate_prompt_tokens": 4}).token_ids == tuple(whole[-4:])
    right = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
    assert RENDERER.render(CHAT, right).token_ids == tuple(whole[:4])
    assert RENDERER.render(TokensPrompt([1, 2, 3]), {"truncate_prompt_tokens": 2}).token_ids == (2, 3)


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        (5, "tokenization_kwargs"),
        ([], "tokenization_kwargs"),
        ({"truncation": True}, "tokenization_kwargs"),
        ({5: True}, "tokenization_kwargs"),
        ({"add_special_tokens": 1}, "tokenization_kwargs.add_special_tokens"),
        ({"add_special_tokens": "no"}, "tokenization_kwargs.add_special_tokens"),
        ({"truncate_prompt_tokens": 0}, "tokenization_kwargs.truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "tokenization_kwargs.truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1.0}, "tokenization_kwargs.truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "tokenization_kwargs.truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 21}, "tokenization_kwargs.truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "tokenization_kwargs.truncation_side"),
        ({"truncation_side": None}, "tokenization_kwargs.truncation_side"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(kwargs: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        RENDERER.render(TextPrompt("abc"), kwargs)
    assert caught.value.param == param


def test_a_chat_template_writes_special_tokens_itself() -> None:
    with pytest.raises(RequestError) as caught:
        RENDERER.render(CHAT, {"add_special_tokens": True})
    assert caught.value.param == "tokenization_kwargs.add_special_tokens"
    assert RENDERER.render(CHAT, {"add_special_tokens": False}) == RENDERER.render(CHAT)


@pytest.mark.parametrize("token_id", [-1, 258, 1.0, True, None])
def test_only_tokens_have_a_text(token_id: Any) -> None:
    assert RENDERER.detokenize([97, 98]) == "ab"
    with pytest.raises(RequestError) as caught:
        RENDERER.detokenize([97, token_id])
    assert caught.value.param == "tokens[1]"


# Requests


def process(prompt: Any, kwargs: Any = None, **sampling: Any) -> Any:
    processor = InputProcessor(FakeTokenizer(), ModelFacts(10, 257, ()))
    return processor.process(GenerateRequest(prompt, SamplingParams(**sampling), tokenization_kwargs=kwargs))


def test_a_prompt_is_cut_to_what_leaves_room_for_the_answer() -> None:
    cut = {"truncate_prompt_tokens": -1}
    assert process("x" * 50 + "abcd", cut, max_tokens=6).prompt_token_ids == tuple(b"abcd")
    assert len(process("x" * 50, cut, max_tokens=None).prompt_token_ids) == 9
    assert len(process("x" * 50, cut, max_tokens=1000).prompt_token_ids) == 1
    assert len(process("x" * 50, cut, max_tokens=0, prompt_logprobs=0).prompt_token_ids) == 10
    with pytest.raises(PromptTooLongError):
        process("x" * 50)
    with pytest.raises(PromptTooLongError):
        process("x" * 50, {"truncate_prompt_tokens": 10})


def test_a_request_keeps_the_text_of_its_prompt_where_it_is_known() -> None:
    assert process("abc").prompt_text == "abc"
    assert process(TokensPrompt([97], "rendered elsewhere")).prompt_text == "rendered elsewhere"
    assert process([97]).prompt_text is None
