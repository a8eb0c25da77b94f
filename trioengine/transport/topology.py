"""The two sockets between a front end and its cores: one ROUTER bound by the front end, one DEALER for each core.

Here stand all options of ZeroMQ: queue bounds, size limit, keep-alive, keys.
"""

import attrs
import zmq

from trioengine.transport.address import Endpoint
from trioengine.transport.interface import CORE_SEND_HIGH_WATER_MARK
from trioengine.transport.zmq_blocking import BlockingRouter, BlockingSocket
from trioengine.transport.zmq_trio import TrioSocket

MAX_MESSAGE_BYTES = 2**32
"""A peer that announces a larger message to a front end is disconnected before memory is taken for it.

A step's log probabilities of a long prompt, of the whole vocabulary, are some 3 GB.
"""

FRONT_END_RECEIVE_HIGH_WATER_MARK = 8
"""Messages of one core that wait in the front end. Further ones wait in the core, where they can be merged."""

TCP_BUFFER_BYTES = 64 * 2**10
"""Core's send buffer and front end's receive buffer. The kernel's megabytes would hide a stalled front end."""

KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_MAX_MISSED = 3
"""A TCP peer whose machine has gone is given up after 20 s, or, with data on the way to it, when the kernel gives up
sending (some 15 minutes: TCP_USER_TIMEOUT would give up those who only do not read, too). The kernel asks, not ZeroMQ:
see `_set_common_options`."""

_IDENTITY_PREFIX = b"\x01"  # identities that begin with a zero byte are ZeroMQ's own


def core_identity(rank: int) -> bytes:
    """The identity of the core of this data-parallel rank: first part of each message to and from it."""
    return _IDENTITY_PREFIX + rank.to_bytes(4, "big")


def core_rank(identity: bytes) -> int | None:
    """The rank of the core with this identity; None for the identity of a stranger."""
    if len(identity) != 5 or not identity.startswith(_IDENTITY_PREFIX):
        return None
    return int.from_bytes(identity[1:], "big")


@attrs.frozen
class BoundRouter:
    """A front end's open socket, and the endpoint at which it is reached."""

    socket: TrioSocket
    endpoint: Endpoint
    """As given to `bind_router`, with the port filled in for TCP. Give cores `endpoint.for_core()`."""


def bind_router(endpoint: Endpoint) -> BoundRouter:
    """A front end's socket, ready for cores to connect. Messages begin with the identity of the core.

    Sending never waits (the queue has no bound: admission bounds what is queued) and raises `PeerUnreachableError`
    for a core that is not connected. The caller closes the socket and removes the endpoint.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """
    socket, context, endpoint = _bind(endpoint)
    return BoundRouter(TrioSocket(socket, owned_context=context), endpoint)


def bind_blocking_router(endpoint: Endpoint) -> tuple[BlockingRouter, Endpoint]:
    """As `bind_router`, for a front end without an event loop: its socket, and where it is reached."""
    socket, context, endpoint = _bind(endpoint)
    return BlockingRouter(socket, owned_context=context), endpoint


def _bind(endpoint: Endpoint) -> tuple[zmq.Socket[bytes], zmq.Context[zmq.Socket[bytes]], Endpoint]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    try:
        _set_common_options(socket, endpoint)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, FRONT_END_RECEIVE_HIGH_WATER_MARK)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if endpoint.curve is not None and endpoint.curve.secret_key is not None:
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, endpoint.curve.secret_key.encode("ascii"))
        socket.bind(endpoint.address)
        bound_at = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(bound_at, bytes)
        return socket, context, attrs.evolve(endpoint, address=bound_at.rstrip(b"\0").decode())
    except BaseException:
        context.destroy(linger=0)
        raise


def connect_dealer(endpoint: Endpoint, rank: int) -> BlockingSocket:
    """The socket of core `rank` towards one front end. Connecting goes on behind the scenes; sending may begin.

    `try_send` refuses while `CORE_SEND_HIGH_WATER_MARK` messages wait here. Before they do, a front end that has
    stopped reading takes `FRONT_END_RECEIVE_HIGH_WATER_MARK` more and the kernel's buffers some 100 KB (measured on
    ipc: refused after 640 messages of 64 bytes, 88 of 1 KB, 32 of 4 KB, 24 of 16 KB and more).
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        _set_common_options(socket, endpoint)
        socket.set(zmq.ROUTING_ID, core_identity(rank))
        socket.set(zmq.SNDHWM, CORE_SEND_HIGH_WATER_MARK)
        socket.set(zmq.RCVHWM, 0)
        if endpoint.curve is not None:
            public_key, secret_key = zmq.curve_keypair()
            socket.set(zmq.CURVE_SERVERKEY, endpoint.curve.public_key.encode("ascii"))
            socket.set(zmq.CURVE_PUBLICKEY, public_key)
            socket.set(zmq.CURVE_SECRETKEY, secret_key)
        core = BlockingSocket(socket, owned_context=context)
        socket.connect(endpoint.address)
        return core
    except BaseException:
        context.destroy(linger=0)
        raise


def _set_common_options(socket: zmq.Socket[bytes], endpoint: Endpoint) -> None:
    socket.set(zmq.LINGER, 0)
    if endpoint.address.startswith("tcp://"):
        buffer_option = zmq.RCVBUF if socket.get(zmq.TYPE) == zmq.ROUTER else zmq.SNDBUF
        socket.set(buffer_option, TCP_BUFFER_BYTES)
        # Not ZMQ_HEARTBEAT_IVL: libzmq 4.3.5 aborts the whole process (`!_io_error`, stream_engine_base.cpp) when its
        # heartbeat is due for a peer that died while its messages fill our receive queue; and a front end that has not
        # read for a while cannot answer a core's heartbeat behind them. On ipc the kernel tells of a death by itself.
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_INTERVAL_S)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
        socket.set(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_MAX_MISSED)
