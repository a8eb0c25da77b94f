"""The engine core's loop: drain the inbox, run a step, send what came of it; with nothing to do, wait for messages."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from trioengine.errors import CodecError
from trioengine.runtime.status_page import StatusPage
from trioengine.transport.zmq_blocking import BlockingSocket, Waker, poll
from trioengine.types.codec import decode, encode
from trioengine.types.messages import (
    AbortRequests,
    CallRequest,
    EncodeCoreRequest,
    EngineCoreRequest,
    Reply,
    StepOutput,
    Stop,
    ToCore,
)

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What the loop drives: `core.engine_core.EngineCore`, whose docstrings say what each does."""

    @property
    def has_work(self) -> bool: ...

    def handle(self, client: int, message: ToCore) -> Reply | None: ...

    def poll(self) -> None: ...

    def step(self) -> None: ...

    def take_output(self, client: int) -> StepOutput | None: ...

    def take_replies(self, client: int) -> Sequence[Reply]: ...


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


def run_step_loop(core: Core, sockets: Sequence[BlockingSocket], page: StatusPage, waker: Waker | None = None) -> None:
    """Serve until a front end says `Stop`. An exception is the core's death.

    Whoever gives the core work from another thread wakes `waker`: what `core.poll` looks for.
    """
    mailboxes = [Mailbox(client, socket) for client, socket in enumerate(sockets)]
    while True:
        if not core.has_work:
            poll(sockets, full=[mailbox.socket for mailbox in mailboxes if mailbox.is_full], waker=waker)
        core.poll()
        for mailbox in mailboxes:
            if _handle_inbox(core, mailbox):
                return
        if core.has_work:
            page.begin_step()
            core.step()
            page.end_step()
        for mailbox in mailboxes:
            # While a front end does not keep up, its rows stay in the core and are merged there.
            if mailbox.flush():
                output = core.take_output(mailbox.client)
                if output is not None:
                    mailbox.add(encode(output))
                # They say that something has ended, so they come behind the output from before.
                for reply in core.take_replies(mailbox.client):
                    mailbox.add(encode(reply))
                mailbox.flush()


def _handle_inbox(core: Core, mailbox: Mailbox) -> bool:
    """Handle all messages that are here; whether one was `Stop`."""
    for parts in mailbox.socket.drain():
        try:
            message = decode(parts[-1])
        except CodecError as error:
            logger.warning("Ignored a message: %s", error)
            continue
        match message:
            case Stop():
                return True
            case EngineCoreRequest() | EncodeCoreRequest() | AbortRequests() | CallRequest():
                reply = core.handle(mailbox.client, message)
                if reply is not None:
                    mailbox.add(encode(reply))
            case _:
                logger.warning("Ignored a %s, which is not for a core.", type(message).__name__)
    return False
