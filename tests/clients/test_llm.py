"""`llm`, the command line of Simon Willison, with the server among its extra OpenAI models."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

QUESTION = "What is the capital of Japan?"


@pytest.fixture(scope="module")
def run_llm(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run `llm` with these arguments; what it wrote."""
    folder = tmp_path_factory.mktemp("llm")
    models = [
        {
            "model_id": "served",
            "model_name": server.model,
            "api_base": server.base_url,
            "api_key_name": "served",
            "supports_schema": True,
            "supports_tools": True,
        },
        {
            "model_id": "served-text",
            "model_name": server.model,
            "api_base": server.base_url,
            "api_key_name": "served",
            "completion": True,
        },
    ]
    (folder / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    (folder / "keys.json").write_text(json.dumps({"served": server.api_key}))

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("llm")), *arguments],
            env={**os.environ, "LLM_USER_PATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_stream_equals_the_whole_answer(run_llm: Callable[..., str]) -> None:
    arguments = ("-m", "served", "-o", "temperature", "0", "-o", "max_tokens", "32", QUESTION)
    whole = run_llm(*arguments, "--no-stream")
    assert "Tokyo" in whole
    assert run_llm(*arguments, "--usage") == whole


def test_a_conversation_goes_on(run_llm: Callable[..., str]) -> None:
    assert run_llm("-m", "served", "-o", "max_tokens", "16", "-s", "Be brief.", QUESTION)
    assert run_llm("-c", "-o", "max_tokens", "16", "And of France?")
    turns = json.loads(run_llm("logs", "--json", "-c"))
    assert [turn["prompt"] for turn in turns] == [QUESTION, "And of France?"]
    assert all(turn["output_tokens"] for turn in turns)


def test_a_schema(run_llm: Callable[..., str]) -> None:
    answer = run_llm("-m", "served", "-o", "temperature", "0", "--schema", "is_big bool, is_old bool", QUESTION)
    assert json.loads(answer).keys() == {"is_big", "is_old"}


def test_tools(run_llm: Callable[..., str], server: Any) -> None:
    """The model may call or not; either way the conversation ends."""
    answer = run_llm("-m", "served", "-o", "temperature", "0", "-o", "max_tokens", "32", "-T", "llm_version", QUESTION)
    assert answer
    server.wait_until_idle()


def test_a_completion(run_llm: Callable[..., str]) -> None:
    assert run_llm("-m", "served-text", "-o", "temperature", "0", "-o", "max_tokens", "8", "The sky is").strip()
