"""One multipart message to or from a ZeroMQ socket without waiting: whole, or not at all.

Knows no event loop; both the trio and the blocking side stand on it.
"""

import errno
from collections.abc import Sequence

import zmq

from trioengine.errors import PeerUnreachableError

# Plain ints: zmq's enums cost a conversion in every call.
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
POLLOUT = int(zmq.POLLOUT)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def try_receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message, or None when there is none.

    When this returns None, ZeroMQ has looked at all that has happened to the socket so far.
    """
    receive = socket.recv
    try:
        # A Frame knows whether more follow, which saves a getsockopt for each part.
        frame = receive(_NOBLOCK, copy=False)
    except zmq.Again:
        return None
    parts = [frame.bytes]
    while frame.more:  # the parts of one message arrive together, so none of these waits
        frame = receive(_NOBLOCK, copy=False)
        parts.append(frame.bytes)
    return parts


def try_send(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> bool:
    """Send all parts as one message and return True, or send nothing and return False.

    Raises:
        PeerUnreachableError: a ROUTER knows no peer of the identity in the first part. Nothing was sent.
        TypeError, ValueError: the parts are no message. Nothing was sent.
    """
    num_more = len(parts) - 1
    if num_more < 0:
        raise ValueError("a message needs at least one part")
    for part in parts:  # found half-way, a wrong part would leave the socket inside a message
        if not isinstance(part, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a part of a message is bytes, not {type(part).__name__}")
    send = socket.send
    try:
        send(parts[0], _NOBLOCK_MORE if num_more else _NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise PeerUnreachableError(f"no peer is connected as {parts[0]!r}") from None
        raise
    for index in range(1, num_more + 1):
        try:
            send(parts[index], _NOBLOCK if index == num_more else _NOBLOCK_MORE)
        except zmq.Again:
            # The queue's bound counts whole messages, so only the end of the peer's connection does this. ZeroMQ has
            # then rolled the message back and swallows the parts that follow up to the last: it is lost with its peer.
            continue
    return True
