"""`Portal`: a Trio run in a thread of its own, and the way there and back for tasks of one asyncio loop.

A thread, and not Trio's guest mode, in which both would share one: a thread can have only one Trio run, so as guests
two engines could not live in one application; guest mode waits for sockets in a helper thread anyway; and a thread of
its own goes on computing texts while the application holds its loop up. What crosses is plain values, by the two
thread-safe doors that the loops have for this (`call_soon_threadsafe`, `TrioToken.run_sync_soon`).
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

import attrs
import trio

from trioengine.errors import EngineClosedError

R = TypeVar("R")
T = TypeVar("T")

CLOSED = "The engine is closed."


@attrs.frozen
class _Job(Generic[R]):
    work: Callable[[], Awaitable[R]]
    scope: trio.CancelScope
    settle: Callable[[R | None, BaseException | None], None]


class Portal(Generic[T]):
    """What asyncio tasks reach the Trio run by. Made by `open_portal`; for the tasks of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, token: trio.lowlevel.TrioToken, value: T) -> None:
        self.value = value
        """What the Trio side has opened."""
        self._loop = loop
        self._token = token
        # The Trio side's.
        self._send_job, self._receive_job = trio.open_memory_channel[_Job[Any]](float("inf"))
        self._is_closed = False

    async def run(self, work: Callable[[], Awaitable[R]]) -> R:
        """Run something in a Trio task of its own, and return its value or raise its error.

        Cancelling the asyncio task cancels the Trio task, without waiting for its end.

        Raises:
            EngineClosedError: the block of `open_portal` was left.
        """
        future: asyncio.Future[R] = self._loop.create_future()
        cancel = self.start(work, lambda value, error: self._settle(future, value, error))
        try:
            return await future
        except asyncio.CancelledError:
            cancel()
            raise

    def start(
        self, work: Callable[[], Awaitable[R]], settle: Callable[[R | None, BaseException | None], None]
    ) -> Callable[[], None]:
        """Start something in a Trio task. Does not wait. Calling the result cancels it.

        `settle` is called once with its value or its error, in the asyncio loop's thread.

        Raises:
            RuntimeError: in another loop, which nobody would tell.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("The engine was opened in another event loop, and is for the tasks of that one.")
        scope = trio.CancelScope()
        job = _Job(work, scope, lambda value, error: self.tell(settle, value, error))
        if not self.post(self._accept, job):
            self._refuse(job)
        return lambda: self.cancel(scope)

    def cancel(self, scope: trio.CancelScope) -> None:
        """Cancel a scope of the Trio side, from the asyncio side."""
        self.post(scope.cancel)

    def post(self, function: Callable[..., object], *arguments: object) -> bool:
        """Call a function on the Trio side soon; False where that has ended."""
        try:
            self._token.run_sync_soon(function, *arguments)
        except trio.RunFinishedError:
            return False
        return True

    def tell(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the asyncio side soon, if that still runs. From the Trio side."""
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody is left to be told.
            self._loop.call_soon_threadsafe(function, *arguments)

    async def serve(self, close: trio.Event) -> None:
        """Run jobs until `close` is set, and end those that are left; the Trio side's main task."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when, close, nursery.cancel_scope)
                async for job in self._receive_job:
                    nursery.start_soon(self._run_job, job)
        finally:
            self._is_closed = True
            with contextlib.suppress(trio.WouldBlock):
                while True:
                    self._refuse(self._receive_job.receive_nowait())

    def _accept(self, job: _Job[Any]) -> None:
        if self._is_closed:
            self._refuse(job)
        else:
            self._send_job.send_nowait(job)

    @staticmethod
    def _refuse(job: _Job[Any]) -> None:
        job.settle(None, EngineClosedError(CLOSED))

    async def _run_job(self, job: _Job[Any]) -> None:
        value, error = None, EngineClosedError(CLOSED)
        try:
            with job.scope:
                try:
                    value, error = await job.work(), None
                except Exception as raised:  # A border: it is raised on the other side.
                    error = raised
        finally:
            job.settle(value, error)

    @staticmethod
    def _settle(future: "asyncio.Future[R]", value: Any, error: BaseException | None) -> None:
        if future.done():  # Cancelled meanwhile.
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@asynccontextmanager
async def open_portal(open_value: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncGenerator[Portal[T], None]:
    """A thread with a Trio run that holds this context open for the length of the block (of asyncio code).

    What opening raises is raised here. Cancelling, while it opens and while it closes, waits until the Trio side has
    cleaned up, which it is told to do at once.
    """
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[Portal[T]] = loop.create_future()
    finished: asyncio.Future[None] = loop.create_future()
    started: asyncio.Future[trio.lowlevel.TrioToken] = loop.create_future()
    scope, close = trio.CancelScope(), trio.Event()

    def tell(future: "asyncio.Future[R]", value: R) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody is left to be told.
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(value))

    async def main() -> None:
        token = trio.lowlevel.current_trio_token()
        tell(started, token)
        with scope:
            async with open_value() as value:
                portal = Portal(loop, token, value)
                tell(opened, portal)
                await portal.serve(close)

    def run() -> None:
        error: BaseException | None = None
        try:
            trio.run(main)
        except BaseException as raised:  # A border: it is raised on the other side.
            error = raised
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_end, (started, opened), finished, error)

    # A daemon: an application that drops its loop without closing must be able to exit; cores end with their parent.
    thread = threading.Thread(target=run, name="trioengine-aio", daemon=True)
    thread.start()

    def post(function: Callable[[], None]) -> None:
        if started.done() and started.exception() is None:
            with contextlib.suppress(trio.RunFinishedError):
                started.result().run_sync_soon(function)

    is_open = False
    try:
        await _wait_surely(started, lambda: None)  # A cancel finds its way below, once there is someone to be told.
        portal = await _wait_surely(opened, lambda: post(scope.cancel))
        is_open = True
        yield portal
    finally:
        post(close.set if is_open else scope.cancel)
        try:
            await _wait_surely(finished, lambda: post(scope.cancel))
        finally:
            thread.join()  # It has nothing left to do.


def _end(
    awaited: "Sequence[asyncio.Future[Any]]", finished: "asyncio.Future[None]", error: BaseException | None
) -> None:
    """The Trio run has ended. Its error is that of what never came; otherwise it is raised at the end."""
    missing = [future for future in awaited if not future.done()]
    for future in missing:
        future.set_exception(error or EngineClosedError(CLOSED))
        future.exception()  # It counts as seen: only the first one is waited for.
    if error is None or missing:
        finished.set_result(None)
    else:
        finished.set_exception(error)


async def _wait_surely(future: "asyncio.Future[R]", on_cancel: Callable[[], None]) -> R:
    """Wait for it whoever cancels meanwhile; `on_cancel` hurries it, and the cancellation is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        future.exception()  # It has been seen.
        raise cancelled
    return future.result()
