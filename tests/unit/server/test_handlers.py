"""The inbox of one application call."""

import trio
from trio.testing import wait_all_tasks_blocked

from trioengine.server.handlers import MAX_WAITING_MESSAGES, Inbox

PART = {"type": "http.request", "body": b"x", "more_body": True}
DISCONNECT = {"type": "http.disconnect"}


async def test_what_came_before_a_disconnect_is_received_first_and_the_disconnect_stays() -> None:
    inbox = Inbox(is_websocket=False)
    await inbox.put(PART)
    await inbox.put(DISCONNECT)
    assert [await inbox.receive() for _ in range(3)] == [PART, DISCONNECT, DISCONNECT]


async def test_a_disconnect_frees_whoever_waits_to_bring_more() -> None:
    inbox = Inbox(is_websocket=False)
    for _ in range(MAX_WAITING_MESSAGES):
        await inbox.put(PART)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.put, PART)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        await inbox.put(DISCONNECT)
    await inbox.put(PART)
    received = [await inbox.receive() for _ in range(MAX_WAITING_MESSAGES + 1)]
    assert received == [PART] * MAX_WAITING_MESSAGES + [DISCONNECT]


async def test_a_websockets_disconnect_keeps_its_code() -> None:
    inbox = Inbox(is_websocket=True)
    await inbox.put({"type": "websocket.disconnect", "code": 1000})
    assert await inbox.receive() == {"type": "websocket.disconnect", "code": 1000}
