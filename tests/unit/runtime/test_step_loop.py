"""The core process's loop: what it hands on, in which order, and what it does when its front end does not keep up."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from trioengine.core.outbox import Outbox
from trioengine.errors import EngineGenerateError
from trioengine.runtime import step_loop
from trioengine.runtime.step_loop import Mailbox, run_step_loop
from trioengine.transport.zmq_blocking import Waker
from trioengine.types.codec import decode, encode, encode_reply
from trioengine.types.messages import (
    AbortRequests,
    CallRequest,
    CheckIntegrity,
    CoreLoad,
    EngineCoreRequest,
    Finished,
    GetLoad,
    Reply,
    Starting,
    StepOutput,
    Stop,
    ToCore,
    unpack_int32,
)
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams

GONE = object()
"""The event that the front end has closed its end."""


class FakeSocket:
    """A front end's mailbox: messages come when the test says, and there is room for as many as it says."""

    def __init__(self) -> None:
        self.inbox: deque[list[bytes]] = deque()
        self.sent: list[bytes] = []
        self.room = 1000
        self.is_peer_gone = False
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def drain(self, max_messages: int = 1024) -> list[list[bytes]]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def try_send(self, parts: Sequence[bytes]) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.sent.append(parts[-1])
        return True

    def outputs(self) -> list[StepOutput]:
        decoded = [decode(data) for data in self.sent]
        return [message for message in decoded if isinstance(message, StepOutput)]


class CountingCore:
    """Each step gives every request one token: the step's number."""

    def __init__(self) -> None:
        self.messages: list[ToCore] = []
        self.slots: list[int] = []
        self.outbox = Outbox()
        self.num_steps = 0
        self.steps_left = 0
        self.num_polls = 0
        self.late_replies: dict[int, Reply] = {}  # By the number of steps that they come after.
        self.timeout_s: float | None = None
        self.dropped: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.slots) and self.steps_left > 0

    def handle(self, client: int, message: ToCore) -> Reply | None:
        assert client == 0
        self.messages.append(message)
        match message:
            case EngineCoreRequest():
                self.slots.append(message.slot)
                self.steps_left += 3
            case AbortRequests(slots):
                for slot in slots:
                    self.slots.remove(slot)
                    self.outbox.finish(Finished(slot, FinishReason.ABORT))
            case CallRequest(call_id, CheckIntegrity()):
                self.late_replies[self.num_steps + self.steps_left] = Reply(call_id)
            case CallRequest(call_id):
                return Reply(call_id, encode_reply(GetLoad, CoreLoad(1, 2, 3, 4)))
            case Stop():
                pytest.fail("Stop is the loop's.")
        return None

    def step(self) -> None:
        self.steps_left -= 1
        for slot in self.slots:
            self.outbox.slots.append(slot)
            self.outbox.tokens.append(self.num_steps)
        self.num_steps += 1

    def poll(self) -> None:
        self.num_polls += 1

    def idle_timeout_s(self) -> float | None:
        return self.timeout_s

    def drop_client(self, client: int) -> None:
        self.dropped.append(client)
        self.slots.clear()

    def take_output(self, client: int) -> StepOutput | None:
        return self.outbox.take(self.num_steps, 0.0)

    def take_stats(self, client: int) -> StepOutput | None:
        return None

    def take_replies(self, client: int) -> Sequence[Reply]:
        reply = self.late_replies.pop(self.num_steps, None)
        return [reply] if reply else []


@attrs.define
class FakePage:
    """Notes what the loop says about its steps."""

    notes: list[str] = attrs.field(factory=list[str])

    def begin_step(self) -> None:
        self.notes.append("begin")

    def end_step(self) -> None:
        self.notes.append("end")


class Loop:
    """The loop over fakes; `wait` stands for the place where it blocks, and feeds it the next event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.socket, self.core, self.page = FakeSocket(), CountingCore(), FakePage()
        self.events: deque[Any] = deque()
        self.was_full: list[bool] = []
        self.timeouts_s: list[float | None] = []
        monkeypatch.setattr(step_loop, "poll", self.wait)

    def wait(
        self,
        sockets: Sequence[FakeSocket],
        *,
        full: Sequence[FakeSocket],
        waker: Waker | None,
        timeout_s: float | None,
    ) -> None:
        assert list(sockets) == [self.socket]
        assert waker is None
        self.timeouts_s.append(timeout_s)
        self.was_full.append(list(full) == [self.socket])
        event = self.events.popleft()
        if event is GONE:
            self.socket.is_peer_gone = True
        elif isinstance(event, int):
            self.socket.room += event
        else:
            self.socket.inbox.extend([b"front end", encode(message)] for message in event)

    def run(self, *events: Any) -> None:
        """Each event is a list of messages that arrive, or room to send; then it is told to stop."""
        self.events.extend([*events, [Stop()]])
        assert run_step_loop(self.core, [self.socket], self.page)  # type: ignore[list-item, arg-type]
        assert not self.events


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


def add(slot: int = 0) -> EngineCoreRequest:
    return EngineCoreRequest(slot, "id", b"\1\0\0\0", SamplingParams(), seed=0)


def test_stop_ends_it_and_nothing_after_stop_is_handled(loop: Loop) -> None:
    loop.events.append([add(1), Stop(), add(2)])
    run_step_loop(loop.core, [loop.socket], loop.page)  # type: ignore[list-item, arg-type]
    assert loop.core.messages == [add(1)]
    assert loop.page.notes == []


def test_messages_reach_the_core_in_their_order(loop: Loop) -> None:
    messages = [add(0), add(1), AbortRequests((0,)), CallRequest(0, GetLoad())]
    loop.run(messages)
    assert loop.core.messages == messages
    assert any(decode(data) == Reply(0, encode_reply(GetLoad, CoreLoad(1, 2, 3, 4))) for data in loop.socket.sent)


def test_a_front_end_that_keeps_up_gets_an_output_for_each_step(loop: Loop) -> None:
    loop.run([add()])
    assert [unpack_int32(output.tokens).tolist() for output in loop.socket.outputs()] == [[0], [1], [2]]
    assert [output.sequence for output in loop.socket.outputs()] == [0, 1, 2]
    assert loop.page.notes == ["begin", "end"] * 3
    assert loop.was_full == [False, False]


def test_for_a_front_end_that_does_not_rows_are_merged_in_the_core(loop: Loop) -> None:
    """One message waits here; everything later is one message when there is room, with no gap in the numbering."""
    loop.socket.room = 0
    loop.run([add()], [add(1)], 1, 10)
    outputs = loop.socket.outputs()
    assert [output.sequence for output in outputs] == [0, 1]
    assert unpack_int32(outputs[0].tokens).tolist() == [0]
    assert unpack_int32(outputs[1].slots).tolist() == [0, 1]
    assert unpack_int32(outputs[1].counts).tolist() == [5, 3]
    assert unpack_int32(outputs[1].tokens).tolist() == [1, 2, 3, 4, 5, 3, 4, 5]
    assert loop.was_full == [False, True, True, True, False]


def test_replies_wait_their_turn_and_are_not_lost(loop: Loop) -> None:
    loop.socket.room = 0
    loop.run([CallRequest(1, GetLoad()), CallRequest(2, GetLoad())], [CallRequest(3, GetLoad())], 2, 1)
    assert [decode(data).call_id for data in loop.socket.sent] == [1, 2, 3]  # type: ignore[union-attr]


def test_a_reply_that_comes_later_follows_the_output_from_before(loop: Loop) -> None:
    """Also when the front end does not keep up: then the reply waits with it."""
    loop.socket.room = 1
    loop.run([add(), CallRequest(7, CheckIntegrity())], 10)
    last_two = [decode(data) for data in loop.socket.sent[-2:]]
    assert isinstance(last_two[0], StepOutput)
    assert unpack_int32(last_two[0].tokens)[-1] == 2
    assert last_two[1] == Reply(7)


def test_a_call_without_work_is_answered(loop: Loop) -> None:
    loop.run([CallRequest(7, CheckIntegrity())])
    assert [decode(data) for data in loop.socket.sent] == [Reply(7)]
    assert loop.page.notes == []


def test_what_has_become_ready_elsewhere_is_looked_for_in_each_turn(loop: Loop) -> None:
    """Here one for each wait and one for each further step."""
    loop.run([], [add()])
    assert loop.core.num_polls == 3 + 2


def test_an_abort_is_answered_without_a_step(loop: Loop) -> None:
    loop.core.slots = [5]
    loop.run([AbortRequests((5,))])
    assert loop.socket.outputs()[0].finished == (Finished(5, FinishReason.ABORT),)
    assert loop.page.notes == []


def test_when_the_owner_is_gone_it_ends(loop: Loop) -> None:
    loop.events.extend([[], GONE])
    assert not run_step_loop(loop.core, [loop.socket], loop.page)  # type: ignore[list-item, arg-type]
    assert not loop.events


def test_another_front_end_that_is_gone_is_dropped(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """After what it had sent was heard, of which a `Stop` is not its business; nobody waits for it any more."""
    other, waits = FakeSocket(), list[Sequence[FakeSocket]]()

    def wait(sockets: Sequence[FakeSocket], **_: Any) -> None:
        waits.append(sockets)
        other.is_peer_gone = True
        if len(waits) != 2:
            (other if len(waits) == 1 else loop.socket).inbox.append([encode(Stop())])

    monkeypatch.setattr(step_loop, "poll", wait)
    run_step_loop(loop.core, [loop.socket, other], loop.page)  # type: ignore[list-item, arg-type]
    assert (loop.core.dropped, other.is_closed, loop.socket.is_closed) == ([1], True, False)
    assert waits == [[loop.socket, other], [loop.socket, other], [loop.socket]]


def test_what_a_front_end_said_last_is_heard(loop: Loop) -> None:
    """A `Stop` that waits behind the end of the connection counts, and is the usual way to go."""
    loop.socket.is_peer_gone = True
    loop.socket.inbox.extend([[encode(add(1))], [encode(Stop())]])
    loop.events.append([])
    run_step_loop(loop.core, [loop.socket], loop.page)  # type: ignore[list-item, arg-type]
    assert (loop.core.messages, loop.core.dropped) == ([add(1)], [])


def test_the_wait_ends_when_the_core_says_so(loop: Loop) -> None:
    loop.core.timeout_s = 2.5
    loop.run([])
    assert loop.timeouts_s == [2.5, 2.5]


def test_a_reply_too_large_for_a_message_is_an_error_of_its_call(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end would end the connection, and with it the engine."""
    monkeypatch.setattr(step_loop, "MAX_MESSAGE_BYTES", 10)
    loop.run([CallRequest(7, GetLoad())])
    (reply,) = map(decode, loop.socket.sent)
    assert isinstance(reply, Reply)
    assert (reply.call_id, reply.value) == (7, b"")
    assert reply.error is not None
    assert reply.error.name == "EngineGenerateError"
    assert "of which a message takes 10" in str(reply.error.fields)


def test_an_output_too_large_for_a_message_is_the_cores_death(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(EngineGenerateError, match="a message takes 10"):
        loop.run([add()])


def test_garbage_is_ignored(loop: Loop) -> None:
    """And so is what is for a front end."""
    loop.socket.inbox.extend([[b"x"], [b""], [b"\xc1"], [encode(Starting("x", 0.0))]])
    loop.run([add()])
    assert len(loop.socket.outputs()) == 3


def test_a_step_that_raises_is_the_end(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loop.core, "step", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.run([add()])


def test_a_mailbox_keeps_order() -> None:
    socket = FakeSocket()
    socket.room = 1
    mailbox = Mailbox(0, socket)  # type: ignore[arg-type]
    assert mailbox.flush()
    for data in (b"1", b"2", b"3"):
        mailbox.add(data)
    assert mailbox.is_full
    assert not mailbox.flush()
    socket.room = 5
    assert mailbox.flush()
    assert not mailbox.is_full
    assert socket.sent == [b"1", b"2", b"3"]
