"""Clients for Node: `openai`, and the Vercel `ai` SDK."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("name", ["openai.test.mjs", "ai_sdk.test.mjs"])
def test_node(run_node: Callable[[str], None], server: Any, name: str) -> None:
    run_node(name)
    server.wait_until_idle()
    assert server.num_requests() == 0
