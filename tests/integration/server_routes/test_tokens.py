"""`/tokenize` and `/detokenize`."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from quart import Response

from trioengine.frontend.renderer import Renderer
from trioengine.server.app import create_app
from trioengine.testing.fake_vectors import FakeVectorEngine

CHAT = [{"role": "user", "content": "hi"}]


async def post(path: str, body: dict[str, Any]) -> Response:
    return await create_app(FakeVectorEngine()).test_client().post(path, json=body)


async def json_of(response: Response, status: int = 200) -> Any:
    body = json.loads(await response.get_data())
    assert response.status_code == status, body
    return body


async def test_a_text_is_counted_and_comes_back() -> None:
    """Its tokens, how many, and how many there may be."""
    reply = await json_of(await post("/tokenize", {"prompt": "né"}))
    assert reply == {"count": 3, "max_model_len": 2048, "tokens": list("né".encode()), "token_strs": None}
    assert await json_of(await post("/detokenize", {"tokens": reply["tokens"]})) == {"prompt": "né"}


async def test_a_conversation_is_tokenized_as_the_model_reads_it() -> None:
    """By its chat template, with or without the start of the answer."""
    full = await json_of(await post("/tokenize", {"messages": CHAT}))
    short = await json_of(await post("/tokenize", {"messages": CHAT, "add_generation_prompt": False}))
    text = (await json_of(await post("/detokenize", {"tokens": full["tokens"]})))["prompt"]
    assert text == "user: hi<|end|>assistant: "
    assert full["count"] - short["count"] == len("assistant: ")


async def test_tokens_come_as_text_too() -> None:
    """When asked for, of texts and conversations."""
    for body in ({"prompt": "hi"}, {"messages": CHAT}):
        reply = await json_of(await post("/tokenize", {**body, "return_token_strs": True}))
        assert len(reply["token_strs"]) == reply["count"]


async def test_a_long_text_is_tokenized_beside_the_event_loop() -> None:
    """Case 19 (vllm 1026): with the same result."""
    reply = await json_of(await post("/tokenize", {"prompt": "ab" * 50_000}))
    assert reply["count"] == 100_000


async def test_many_tokens_become_text_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result, and the same errors."""
    threads: list[bool] = []
    detokenize = Renderer.detokenize

    def watched(renderer: Renderer, token_ids: Sequence[int]) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return detokenize(renderer, token_ids)

    monkeypatch.setattr(Renderer, "detokenize", watched)
    for count in (5, 100_000):
        assert await json_of(await post("/detokenize", {"tokens": [97] * count})) == {"prompt": "a" * count}
        wrong = await json_of(await post("/detokenize", {"tokens": [97] * count + [-1]}), 400)
        assert wrong["error"]["param"] == f"tokens[{count}]"
    assert threads == [True, True, False, False]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": 5}, "messages"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [100_000]}, "tokens[0]"),
    ],
    ids=str,
)
async def test_what_is_no_text_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    """Naming the field."""
    assert (await json_of(await post(path, body), 400))["error"]["param"] == param
