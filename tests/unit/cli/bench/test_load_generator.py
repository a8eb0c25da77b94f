"""The load generator against a server of a few lines: what it sends, what it notes, what it says when things fail."""

import functools
import json
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio

from trioengine.cli.bench.load_generator import (
    CompletionLoad,
    Connection,
    ServerAddress,
    find_model,
    random_prompt,
    run_load,
)
from trioengine.cli.bench.served import ServedBench
from trioengine.errors import BenchError, ConfigError


class Server:
    """Answers `/v1/models`, and completions with three chunks and a usage."""

    def __init__(
        self,
        *,
        takes_tokens: bool = True,
        status: int = 200,
        cuts_streams: bool = False,
        event: bytes | None = None,
        hangs_up_after_answers: bool = False,
    ) -> None:
        self.takes_tokens = takes_tokens
        self.hangs_up_after_answers = hangs_up_after_answers
        self.status = status
        self.cuts_streams = cuts_streams
        self.event = event
        """What it sends last in place of the rest; nothing is an end that is too early."""
        self.bodies: list[dict[str, object]] = []
        self.num_connections = 0

    async def handle(self, stream: trio.SocketStream) -> None:
        self.num_connections += 1
        waiting = b""
        while True:
            while b"\r\n\r\n" not in waiting:
                data = await stream.receive_some()
                if not data:
                    return
                waiting += data
            head, _, waiting = waiting.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            while len(waiting) < length:
                waiting += await stream.receive_some()
            body, waiting = waiting[:length], waiting[length:]
            if not await self.answer(stream, head.split()[1], body):
                await stream.aclose()
                return

    async def answer(self, stream: trio.SocketStream, path: bytes, body: bytes) -> bool:
        if path == b"/v1/models":
            await stream.send_all(_whole(200, b'{"data": [{"id": "some-model"}]}'))
            return True
        fields = json.loads(body)
        if not self.takes_tokens and not isinstance(fields["prompt"], str):
            await stream.send_all(_whole(400, b'{"error": {"message": "text only"}}'))
            return True
        if self.status != 200:
            await stream.send_all(_whole(self.status, b'{"error": {"message": "too busy"}}'))
            return True
        self.bodies.append(fields)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + _event({"text": " one"}))
        if self.cuts_streams:
            return False
        if self.event is not None:
            await stream.send_all((_chunk(b"data: " + self.event + b"\n\n") if self.event else b"") + _chunk(b""))
            return True
        usage = {"choices": [], "usage": {"prompt_tokens": len(fields["prompt"]), "completion_tokens": 3}}
        await stream.send_all(_event({"text": " two three"}) + _event({"text": "", "finish_reason": "length"}))
        await stream.send_all(_chunk(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n") + _chunk(b""))
        return not self.hangs_up_after_answers


def _whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(choice: dict[str, str]) -> bytes:
    return _chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


@asynccontextmanager
async def running(server: Server) -> AsyncGenerator[str, None]:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(functools.partial(trio.serve_tcp, server.handle, 0, host="127.0.0.1"))
            yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            nursery.cancel_scope.cancel()


async def test_every_output_of_every_stream_is_noted() -> None:
    server = Server()
    async with running(server) as url:
        load = CompletionLoad(model="m", num_output_tokens=3, stop="!")
        prompts: list[list[int] | str] = [[number] * 4 for number in range(5)]
        times = await run_load(ServerAddress.from_url(url), load, prompts, concurrency=2)
    assert [stream.texts for stream in times] == [[" one", " two three"]] * 5
    assert all(stream.sent_s <= stream.outputs_s[0] <= stream.outputs_s[1] for stream in times)
    assert [(stream.num_prompt_tokens, stream.num_output_tokens) for stream in times] == [(4, 3)] * 5
    assert sorted(str(body["prompt"]) for body in server.bodies) == sorted(map(str, prompts))
    assert server.num_connections == 2
    assert server.bodies[0]["ignore_eos"] is True
    assert server.bodies[0]["stop"] == "!"


async def test_a_served_bench_reports_what_the_server_counted() -> None:
    server = Server()
    async with running(server) as url:
        bench = ServedBench(base_url=f"{url}/v1", concurrency=2, num_prompts=4, num_input_tokens=8, num_output_tokens=3)
        report = await bench.run()
    assert {"output_tokens_per_s", "prefill_tokens_per_s", "ttft_p50_ms", "itl_p99_ms"} <= set(report.figures())
    prompts = [str(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 5
    assert all(isinstance(body["prompt"], list) for body in server.bodies)
    assert all(body["model"] == "some-model" for body in server.bodies)


@pytest.mark.parametrize("takes_tokens", [True, False])
async def test_prompts_have_a_prefix_in_common_that_a_request_before_may_have_sent(takes_tokens: bool) -> None:
    server = Server(takes_tokens=takes_tokens)
    async with running(server) as url:
        bench = ServedBench(
            base_url=url,
            concurrency=2,
            num_prompts=4,
            num_input_tokens=8,
            num_output_tokens=3,
            num_prefix_tokens=5,
            warms_prefix=True,
        )
        await bench.run()
    prompts = [body["prompt"] for body in server.bodies[-5:]]
    lists = [prompt.split() if isinstance(prompt, str) else list(cast("list[int]", prompt)) for prompt in prompts]
    assert [len(prompt) for prompt in lists] == [13] * 5
    assert len({tuple(prompt[:5]) for prompt in lists}) == 1
    assert len({tuple(prompt[5:]) for prompt in lists}) == 5


async def test_a_figure_that_the_server_gives_no_numbers_for_is_left_out() -> None:
    """Without usage nobody knows how long the prompts were; outputs are taken for tokens then."""
    async with running(Server(event=b"[DONE]")) as url:
        bench = ServedBench(base_url=url, concurrency=1, num_prompts=2, num_input_tokens=8, num_output_tokens=3)
        figures = (await bench.run()).figures()
    assert figures["output_tokens_per_s"] > 0
    assert "prefill_tokens_per_s" not in figures


async def test_a_server_that_takes_no_token_ids_gets_text() -> None:
    server = Server(takes_tokens=False)
    async with running(server) as url:
        bench = ServedBench(base_url=url, concurrency=1, num_prompts=2, num_input_tokens=8, num_output_tokens=3)
        await bench.run()
    assert [len(str(body["prompt"]).split()) for body in server.bodies] == [8, 8]


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server(status=503), "503.*too busy"),
        (Server(cuts_streams=True), "broken"),
        (Server(event=b""), r"ended without \[DONE\]"),
        (Server(event=b'{"error": {"message": "out of luck"}}'), "broke off.*out of luck"),
        *(
            (Server(event=event), "no chunk")
            for event in (b"hello", b"null", b"\xff", b'{"choices": null}', b'{"choices": [1]}', b'{"usage": {"x": 1}}')
        ),
    ],
)
async def test_a_failed_request_ends_the_load_with_one_clear_error(server: Server, message: str) -> None:
    async with running(server) as url:
        load = CompletionLoad(model="m", num_output_tokens=3)
        with pytest.raises(BenchError, match=message):
            await run_load(ServerAddress.from_url(url), load, ["a", "b", "c"], concurrency=3)


async def test_a_connection_that_the_server_gave_up_is_made_anew() -> None:
    """As llama.cpp's server does without saying so in a header; the request had not reached it."""
    server = Server(hangs_up_after_answers=True)
    async with running(server) as url:
        load = CompletionLoad(model="m", num_output_tokens=3)
        times = await run_load(ServerAddress.from_url(url), load, ["a", "b", "c"], concurrency=1)
    assert [stream.texts for stream in times] == [[" one", " two three"]] * 3
    assert server.num_connections == len(server.bodies) == 3


async def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    async with running(Server()) as url:
        address = ServerAddress.from_url(url)
    async with Connection(address) as connection:
        with pytest.raises(BenchError, match="Cannot connect"):
            await find_model(connection)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "https://127.0.0.1", "http://", "http://a:99999", "http://ü", "http://a/ü"]
)
def test_a_base_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerAddress.from_url(url)
    assert caught.value.option == "base_url"


def test_the_same_seed_makes_the_same_prompts_and_no_two_are_alike() -> None:
    rng, again = random.Random(3), random.Random(3)
    prompts = [random_prompt(rng, 32, takes_tokens=True) for _ in range(50)]
    assert prompts == [random_prompt(again, 32, takes_tokens=True) for _ in range(50)]
    assert len(set(map(str, prompts))) == 50
