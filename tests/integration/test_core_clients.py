"""Several front ends on one core process, over real sockets: each has its own requests, and takes them along."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.config.engine import EngineConfig
from trioengine.runtime.core_handle import CoreHandle
from trioengine.runtime.launch import CoreLaunch
from trioengine.testing.core_driver import make_core_request
from trioengine.transport.address import Endpoint, create_endpoint
from trioengine.transport.topology import BoundRouter, bind_router, core_identity
from trioengine.types.codec import decode, decode_reply, encode
from trioengine.types.messages import (
    AbortRequests,
    CallRequest,
    CoreLoad,
    EngineDead,
    Finished,
    FromCore,
    GetLoad,
    PauseGeneration,
    Ready,
    Reply,
    StepOutput,
    Stop,
    ToCore,
    unpack_int32,
)
from trioengine.types.output import FinishReason

TIMEOUT_S = 30
FATAL_TOKEN = 13


@attrs.frozen
class Client:
    """A front end's socket and what comes to it."""

    router: BoundRouter

    async def send(self, message: ToCore) -> None:
        await self.router.socket.send([core_identity(0), encode(message)])

    async def receive(self, kind: type[FromCore]) -> FromCore:
        """The next message of this kind."""
        while True:
            _, data = await self.router.socket.receive()
            message = decode(data)
            if isinstance(message, kind):
                return message

    async def load(self) -> CoreLoad:
        await self.send(CallRequest(1, GetLoad()))
        reply = await self.receive(Reply)
        assert isinstance(reply, Reply)
        return decode_reply(GetLoad, reply.value)


@attrs.frozen
class Clients:
    """A core's owner, and another front end of it."""

    core: CoreHandle
    owner: Client
    other: Client


@asynccontextmanager
async def open_core(module: str, **options: str) -> AsyncIterator[Clients]:
    """A core process that is ready."""
    with create_endpoint({}) as first, create_endpoint({}) as second, trio.fail_after(TIMEOUT_S):
        owner, other = Client(bind_router(first)), Client(bind_router(second))
        endpoints: tuple[Endpoint, ...] = tuple(each.router.endpoint.for_core() for each in (owner, other))
        launch = CoreLaunch(
            endpoints=endpoints,
            rank=0,
            page_fd=-1,
            config=EngineConfig(model="none"),
            model=ModelLocation(ModelKind.GGUF, Path("none"), "none"),
            options=options,
        )
        core = await CoreHandle.start(launch, module)
        try:
            for each in (owner, other):
                assert isinstance(await each.receive(Ready), Ready)
            yield Clients(core, owner, other)
        finally:
            for each in (owner, other):
                each.router.socket.close()
            await core.stop(timeout_s=10)
            core.close()


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    """Of a scripted core."""
    async with open_core("trioengine.testing.scripted_core", fatal_token=str(FATAL_TOKEN)) as clients:
        yield clients


async def test_clients_have_slots_and_outputs_of_their_own(clients: Clients) -> None:
    """The same slot twice, and each hears of its own request only, numbered without a gap."""
    for token, client in enumerate((clients.owner, clients.other)):
        await client.send(make_core_request(0, (token,), max_tokens=3))
    for token, client in enumerate((clients.owner, clients.other)):
        outputs = [await client.receive(StepOutput) for _ in range(3)]
        columns = [(each.sequence, *unpack_int32(each.tokens)) for each in outputs if isinstance(each, StepOutput)]
        assert columns == [(0, token), (1, token), (2, token)]


async def test_the_requests_of_a_client_that_is_gone_are_dropped(clients: Clients) -> None:
    """Those of the other go on, and it can still end the core. The one that goes does not say so."""
    await clients.owner.send(make_core_request(7, (1,), max_tokens=1 << 30))
    for slot in range(5):
        await clients.other.send(make_core_request(slot, (2,), max_tokens=1 << 30))
    await clients.other.receive(StepOutput)
    clients.other.router.socket.close()
    while (await clients.owner.load()).running != 1:
        await clients.owner.receive(StepOutput)
    await clients.owner.send(AbortRequests((7,)))
    finished: list[Finished] = []
    while not finished:
        output = await clients.owner.receive(StepOutput)
        assert isinstance(output, StepOutput)
        finished.extend(output.finished)
    assert finished == [Finished(7, FinishReason.ABORT)]
    assert output.stats is not None
    assert (output.stats.running, output.stats.waiting) == (0, 0)
    await clients.owner.send(Stop())
    await clients.core.wait()
    assert "exited with status 0" in clients.core.exit_error().message


async def test_a_core_ends_with_its_owner(clients: Clients) -> None:
    """Which may have had no time to say so."""
    clients.owner.router.socket.close()
    await clients.core.wait()
    assert "exited with status 1" in clients.core.exit_error().message


async def test_every_client_hears_of_the_cores_death_and_its_traceback(clients: Clients) -> None:
    await clients.other.send(make_core_request(0, (FATAL_TOKEN,)))
    for client in (clients.owner, clients.other):
        dead = await client.receive(EngineDead)
        assert isinstance(dead, EngineDead)
        assert "Traceback" in str(dead.error.fields["cause"])
        assert "The script says that this token is the end." in str(dead.error.fields["cause"])


async def test_an_idle_core_wakes_for_a_deadline() -> None:
    """Case 20 (vllm 2901): during a pause nothing else would end its wait."""
    async with open_core("trioengine.testing.fake_core") as clients:
        await clients.owner.send(CallRequest(1, PauseGeneration()))
        await clients.owner.receive(Reply)
        await clients.other.send(attrs.evolve(make_core_request(3), queue_timeout_s=0.01))
        finished = None
        while finished is None:  # Before it ends it may be told that it waits.
            output = await clients.other.receive(StepOutput)
            assert isinstance(output, StepOutput)
            finished = next(iter(output.finished), None)
        assert finished.error is not None
        assert (finished.slot, finished.error.name) == (3, "DeadlineExceededError")
        load = await clients.owner.load()
        assert (load.running, load.waiting) == (0, 0)
