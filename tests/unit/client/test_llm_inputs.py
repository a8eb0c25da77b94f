"""What vLLM's scripts pass: prompts, messages, engine arguments."""

import logging
from typing import Any

import pytest

from trioengine.client.llm_inputs import EngineArgs, cache_salt_of, several, to_messages, to_prompt
from trioengine.errors import ConfigError, RequestError
from trioengine.types.pooling import PoolingParams, PoolingTask, TextPairPrompt
from trioengine.types.request import ChatPrompt, TextPrompt, TokensPrompt


@pytest.mark.parametrize(
    ("value", "prompt"),
    [
        ("abc", TextPrompt("abc")),
        ([1, 2], TokensPrompt([1, 2])),
        ({"prompt": "abc"}, TextPrompt(prompt="abc")),
        ({"prompt_token_ids": [1, 2]}, TokensPrompt(prompt_token_ids=[1, 2])),
        ({"prompt_token_ids": [1], "prompt": "a"}, TokensPrompt([1], "a")),
        ({"prompt": "abc", "multi_modal_data": None}, TextPrompt("abc")),
        (TextPairPrompt("a", "b"), TextPairPrompt("a", "b")),
        (ChatPrompt([]), ChatPrompt([])),
    ],
)
def test_prompts(value: Any, prompt: object) -> None:
    assert to_prompt(value) == prompt


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (7, "prompts[3]"),
        ({}, "prompts[3]"),
        ({"prompt": 7}, "prompts[3]"),
        ({"prompt_token_ids": "12"}, "prompts[3].prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "prompts[3].multi_modal_data"),
    ],
)
def test_what_is_no_prompt_names_its_place(value: Any, path: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_prompt(value, "prompts[3]")
    assert caught.value.param == path


def test_one_prompt_or_several() -> None:
    for one in ("abc", [1, 2], (1, 2), {"prompt": "a"}, TextPrompt("a"), TextPairPrompt("a", "b")):
        assert several(one) == [one]
    for many in (["a", "b"], [[1], [2]], [{"prompt": "a"}], [], [TextPrompt("a"), "b"]):
        assert several(many) == many
    assert cache_salt_of({"prompt": "a", "cache_salt": "s"}) == "s"
    assert cache_salt_of("a") is None


def test_parts_of_messages_are_joined() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}
    assert to_messages([message], "auto") == [{"role": "user", "content": "a\nb"}]
    assert to_messages([message], "openai") == [message]
    assert to_messages([{"role": "user", "content": "a"}], "string") == [{"role": "user", "content": "a"}]
    for content in ([{"type": "image_url"}], 7):
        with pytest.raises(RequestError) as caught:
            to_messages([{"role": "user", "content": content}], "auto")
        assert (caught.value.param or "").startswith("messages[0].content")
    with pytest.raises(RequestError, match="content_format"):
        to_messages([message], "other")


def test_arguments_of_vllm_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """Those without effect are named in one line, where they ask for something."""
    with caplog.at_level(logging.WARNING):
        quiet = EngineArgs("m", tokenizer="m", dtype="auto", tensor_parallel_size=1, revision=None, hf_overrides={})
        assert caplog.messages == []
        args = EngineArgs(model="m", dtype="half", gpu_memory_utilization=0.5, swap_space=4, max_num_seqs=7, seed=3)
    assert quiet.config.model == "m"
    assert args.config.max_num_seqs == 7
    assert (args.config.dtype, args.config.gpu_memory_utilization) == ("half", 0.5)
    assert args.config.seed == 3
    (line,) = caplog.messages
    assert "swap_space=4" in line
    assert "dtype" not in line


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"max_num_seq": 7}, "max_num_seq"),
        ({"tokenizer": "other"}, "tokenizer"),
        ({"tokenizer_revision": "v2"}, "tokenizer_revision"),
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init"),
        ({"quantization": "awq"}, "quantization"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"seed": "x"}, "seed"),
        ({"generation_config": "folder"}, "generation_config"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(options: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs("m", **options)
    assert caught.value.option == option


def test_a_pooling_task_has_a_name() -> None:
    assert PoolingParams(task="classify").task is PoolingTask.CLASSIFY
    with pytest.raises(RequestError):
        PoolingParams(task="dream").validate()
