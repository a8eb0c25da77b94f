"""A front end and cores in processes of their own, one of which is killed in the middle of what it says."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise

import attrs
import pytest
import trio

from trioengine.errors import PeerUnreachableError
from trioengine.transport import address
from trioengine.transport.address import Endpoint, create_endpoint
from trioengine.transport.topology import BoundRouter, bind_router, core_identity

TIMEOUT_S = 30

FLOODING_CORE = """
import json, sys
from itertools import count
from trioengine.transport.address import CurveKeys, Endpoint
from trioengine.transport.topology import connect_dealer
from trioengine.transport.zmq_blocking import poll

data = json.loads(sys.stdin.readline())
curve = data.pop("curve")
core = connect_dealer(Endpoint(**data, curve=curve and CurveKeys(**curve)), int(sys.argv[1]))
for index in count():
    message = [b"%d" % index, bytes(index * 997 % 20_000), b"%d" % index]
    while not core.try_send(message):
        if not poll([core], full=[core], timeout_s=60):
            sys.exit("nobody reads")
"""


def start_core(endpoint: Endpoint, rank: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-P", "-c", FLOODING_CORE, str(rank)], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(attrs.asdict(endpoint.for_core())).encode() + b"\n")
    process.stdin.close()
    return process


def _no_directory(base: str) -> None:
    return None


async def send_until_unreachable(router: BoundRouter, rank: int) -> None:
    while True:
        await router.socket.send([core_identity(rank), b"abort"])


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_killed_cores_leave_whole_messages_in_order(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to its death every message arrives once, whole and in order; then the core is unreachable; others go on.

    ZeroMQ lets go of a dead peer when all that it had sent has been read, so the front end must go on reading.
    """
    if transport == "tcp":
        monkeypatch.setattr(address, "_create_private_directory", _no_directory)
    processes: list[subprocess.Popen[bytes]] = []
    indices: dict[bytes, list[int]] = {core_identity(rank): [] for rank in range(2)}
    with create_endpoint({}) as endpoint:
        router = bind_router(endpoint)

        async def receive_until(identity: bytes, num_messages: int) -> None:
            while len(indices[identity]) < num_messages:
                sender, head, body, tail = await router.socket.receive()
                assert head == tail
                assert len(body) == int(head) * 997 % 20_000
                indices[sender].append(int(head))

        try:
            with trio.fail_after(TIMEOUT_S):
                for rank in range(2):
                    processes.append(start_core(router.endpoint, rank))
                for identity in indices:
                    await receive_until(identity, 200)
                os.kill(processes[0].pid, signal.SIGKILL)
                processes[0].wait()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(receive_until, core_identity(1), 10**9)
                    with pytest.raises(PeerUnreachableError):
                        await send_until_unreachable(router, 0)
                    nursery.cancel_scope.cancel()
                await receive_until(core_identity(1), len(indices[core_identity(1)]) + 200)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            router.socket.close()
    for received in indices.values():
        assert received[0] == 0
        assert all(later == earlier + 1 for earlier, later in pairwise(received))
