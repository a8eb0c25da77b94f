"""Two core processes whose steps are collective: an idle rank's empty steps release the other's barrier."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.config.engine import EngineConfig
from trioengine.runtime.core_handle import CoreHandle
from trioengine.runtime.launch import CoreLaunch
from trioengine.testing.core_driver import make_core_request
from trioengine.testing.fake_executor import generate_alone
from trioengine.transport.address import create_endpoint
from trioengine.transport.topology import BoundRouter, bind_router, core_identity, core_rank
from trioengine.types.codec import decode, encode, encode_reply
from trioengine.types.messages import (
    CallRequest,
    CheckIntegrity,
    FromCore,
    Ready,
    Reply,
    StartWave,
    StepOutput,
    Stop,
    ToCore,
    unpack_int32,
)

TIMEOUT_S = 60
RANKS = (0, 1)


class Ranks:
    """The front end of both cores."""

    def __init__(self, router: BoundRouter) -> None:
        self._socket = router.socket

    async def send(self, message: ToCore, *ranks: int) -> None:
        for rank in ranks:
            await self._socket.send([core_identity(rank), encode(message)])

    async def receive(self) -> tuple[int, FromCore]:
        identity, data = await self._socket.receive()
        rank, message = core_rank(identity), decode(data)
        assert rank is not None
        assert isinstance(message, FromCore)
        return rank, message

    async def receive_from_all(self, kind: type[FromCore]) -> list[FromCore]:
        """One message of this kind from each; others are passed over."""
        received: dict[int, FromCore] = {}
        while len(received) < len(RANKS):
            rank, message = await self.receive()
            if isinstance(message, kind):
                received[rank] = message
        return [received[rank] for rank in RANKS]

    async def tokens_of(self, *slots_by_rank: int) -> list[list[int]]:
        """The tokens of one request of each of the first ranks, until all have ended."""
        tokens: list[list[int]] = [[] for _ in slots_by_rank]
        num_open = len(slots_by_rank)
        while num_open:
            rank, message = await self.receive()
            assert isinstance(message, StepOutput)
            assert {*unpack_int32(message.slots)} <= {slots_by_rank[rank]}
            tokens[rank].extend(unpack_int32(message.tokens))
            num_open -= len(message.finished)
        return tokens


@pytest.fixture
async def ranks(tmp_path: Path) -> AsyncIterator[Ranks]:
    """Both cores, as they start."""
    handles: list[CoreHandle] = []
    with create_endpoint({}) as endpoint, trio.fail_after(TIMEOUT_S):
        router = bind_router(endpoint)
        ranks = Ranks(router)
        try:
            for rank in RANKS:
                launch = CoreLaunch(
                    endpoints=(router.endpoint.for_core(),),
                    rank=rank,
                    page_fd=-1,
                    config=EngineConfig(model="none"),
                    model=ModelLocation(ModelKind.GGUF, Path("none"), "none"),
                    options={"world_size": str(len(RANKS)), "store": str(tmp_path / "store")},
                )
                handles.append(await CoreHandle.start(launch, "trioengine.testing.lockstep_core"))
            yield ranks
            await ranks.send(Stop(), *RANKS)
        finally:
            for handle in handles:
                await handle.stop(timeout_s=10)
                handle.close()
            router.socket.close()


async def test_dummy_steps_release_a_gloo_barrier(ranks: Ranks) -> None:
    """A request on either rank is computed while the other has none, and on both at once; between requests both are
    idle and answer calls."""
    for ready in await ranks.receive_from_all(Ready):
        assert isinstance(ready, Ready)
        assert ready.needs_lockstep
    expected = generate_alone((1, 2, 3), 20, vocab_size=1000)
    request = make_core_request(5, (1, 2, 3), max_tokens=20)
    for _ in range(3):
        await ranks.send(request, 0)
        await ranks.send(StartWave(), *RANKS)
        assert await ranks.tokens_of(5) == [expected]
    await ranks.send(CallRequest(1, CheckIntegrity()), *RANKS)
    assert await ranks.receive_from_all(Reply) == [Reply(1, encode_reply(CheckIntegrity, None))] * 2
    await ranks.send(request, 0)
    await ranks.send(StartWave(), *RANKS)
    await ranks.send(make_core_request(6, (1, 2, 3), max_tokens=40), 1)
    await ranks.send(StartWave(), *RANKS)
    tokens = await ranks.tokens_of(5, 6)
    assert tokens[0] == expected
    assert (tokens[1][:20], len(tokens[1])) == (expected, 40)
