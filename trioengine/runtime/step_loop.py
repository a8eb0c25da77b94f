"""The engine core's loop: drain the inbox, run a step, send what came of it; with nothing to do, wait for messages."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from trioengine.errors import CodecError, EngineGenerateError
from trioengine.runtime.status_page import StatusPage
from trioengine.transport.topology import MAX_MESSAGE_BYTES
from trioengine.transport.zmq_blocking import BlockingSocket, Waker, poll
from trioengine.types.codec import decode, encode, error_to_data
from trioengine.types.messages import (
    AbortRequests,
    CallRequest,
    EncodeCoreRequest,
    EngineCoreRequest,
    Reply,
    StartWave,
    StepOutput,
    Stop,
    ToCore,
)

OWNER = 0
"""The number of the front end that owns the core."""

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What the loop drives: `core.engine_core.EngineCore`, whose docstrings say what each does."""

    @property
    def has_work(self) -> bool: ...

    def handle(self, client: int, message: ToCore) -> Reply | None: ...

    def poll(self) -> None: ...

    def idle_timeout_s(self) -> float | None: ...

    def step(self) -> None: ...

    def take_output(self, client: int) -> StepOutput | None: ...

    def take_stats(self, client: int) -> StepOutput | None: ...

    def take_replies(self, client: int) -> Sequence[Reply]: ...

    def drop_client(self, client: int) -> None: ...


class Mailbox:
    """One front end: its socket, and the messages that the socket has refused so far."""

    def __init__(self, client: int, socket: BlockingSocket) -> None:
        self.client = client
        self.socket = socket
        self._unsent: deque[bytes] = deque()

    @property
    def is_full(self) -> bool:
        """Whether the front end does not keep up."""
        return bool(self._unsent)

    def add(self, data: bytes) -> None:
        """Send, or keep for `flush`, in order."""
        self._unsent.append(data)

    def flush(self) -> bool:
        """Send what is kept; whether all of it is on its way."""
        while self._unsent:
            if not self.socket.try_send((self._unsent[0],)):
                return False
            self._unsent.popleft()
        return True


def run_step_loop(core: Core, sockets: Sequence[BlockingSocket], page: StatusPage, waker: Waker | None = None) -> bool:
    """Serve until the first front end, which owns the core, says `Stop` or is gone; whether it said so.

    An exception is the core's death.

    Front ends are numbered as in `sockets`. When another is gone, its socket is closed and its requests are dropped.

    Whoever gives the core work from another thread wakes `waker`: what `core.poll` looks for.
    """
    mailboxes = [Mailbox(client, socket) for client, socket in enumerate(sockets)]
    while True:
        if not core.has_work:
            full = [mailbox.socket for mailbox in mailboxes if mailbox.is_full]
            poll([mailbox.socket for mailbox in mailboxes], full=full, waker=waker, timeout_s=core.idle_timeout_s())
        core.poll()
        for mailbox in tuple(mailboxes):
            # Asked first: all that it had sent is here then.
            is_gone = mailbox.socket.is_peer_gone
            messages = mailbox.socket.drain()
            if _handle(core, mailbox, messages):
                return True
            if is_gone and not messages:
                if mailbox.client == OWNER:
                    return False
                logger.info("Front end %d is gone; its requests are dropped.", mailbox.client)
                mailboxes.remove(mailbox)
                mailbox.socket.close()
                core.drop_client(mailbox.client)
        if core.has_work:
            page.begin_step()
            core.step()
            page.end_step()
        for mailbox in mailboxes:
            # While a front end does not keep up, its rows stay in the core and are merged there.
            if mailbox.flush():
                output = core.take_output(mailbox.client) or core.take_stats(mailbox.client)
                if output is not None:
                    mailbox.add(_encode(output))
                # They say that something has ended, so they come behind the output from before.
                for reply in core.take_replies(mailbox.client):
                    mailbox.add(_encode(reply))
                mailbox.flush()


def _handle(core: Core, mailbox: Mailbox, messages: Iterable[Sequence[bytes]]) -> bool:
    """Handle a front end's messages; whether one was `Stop`."""
    for parts in messages:
        try:
            message = decode(parts[-1])
        except CodecError as error:
            logger.warning("Ignored a message: %s", error)
            continue
        match message:
            case Stop() if mailbox.client == OWNER:
                return True
            case EngineCoreRequest() | EncodeCoreRequest() | AbortRequests() | CallRequest() | StartWave():
                reply = core.handle(mailbox.client, message)
                if reply is not None:
                    mailbox.add(_encode(reply))
            case _:
                logger.warning("Ignored a %s of front end %d.", type(message).__name__, mailbox.client)
    return False


def _encode(message: StepOutput | Reply) -> bytes:
    """The bytes of a message. A reply that the front end would not take, and end the connection, becomes an error."""
    data = encode(message)
    if len(data) <= MAX_MESSAGE_BYTES:
        return data
    error = EngineGenerateError(f"The answer has {len(data)} bytes, of which a message takes {MAX_MESSAGE_BYTES}.")
    if isinstance(message, StepOutput):
        raise error
    return encode(Reply(message.call_id, error=error_to_data(error)))
