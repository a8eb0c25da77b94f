"""Many streams at once, and what else the server has to do meanwhile."""

import json

import trio

from trioengine.config.server import ServerConfig
from trioengine.server.app import create_app
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import open_raw_http, request_bytes

NUM_STREAMS = 256
NUM_TOKENS = 12


async def test_health_is_answered_between_256_streams() -> None:
    """Case 17 (vllm 38157), counted, not timed: an answer waits for a few rounds of the streams, not for their end."""
    engine = FakeEngine(ScriptedReply(deltas=["token"] * NUM_TOKENS))
    config = ServerConfig(port=0, access_log=False)
    num_parts = 0
    num_running = NUM_STREAMS
    waits: list[int] = []
    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": NUM_TOKENS}).encode()
    request = request_bytes("POST", "/v1/completions", headers=[("content-type", "application/json")], body=body)

    async with open_server(create_app(engine, config), config) as server:

        async def stream() -> None:
            nonlocal num_parts, num_running
            async with open_raw_http(server.url) as client:
                await client.send(request)
                assert (await client.read_head()).status == 200
                while await client.read_chunk():
                    num_parts += 1
            num_running -= 1

        async with open_raw_http(server.url) as poller, trio.open_nursery() as nursery:
            for _ in range(NUM_STREAMS):
                nursery.start_soon(stream)
            while num_running:
                before = num_parts
                assert (await poller.request("GET", "/health")).status == 200
                waits.append(num_parts - before)
    assert num_parts >= NUM_STREAMS * NUM_TOKENS
    waits.sort()
    assert len(waits) >= 10
    assert waits[int(0.99 * len(waits))] <= 4 * NUM_STREAMS
