"""Cores in lockstep: no rank is ever left waiting alone in a step, and all come to rest together."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from trioengine.core.engine_core import EngineCore
from trioengine.core.executor import StepPlan
from trioengine.core.lockstep import Wave
from trioengine.testing.core_driver import CoreDriver, make_core_config, make_core_request
from trioengine.testing.fake_executor import FakeExecutor
from trioengine.types.messages import (
    CallRequest,
    PauseMode,
    Sleep,
    StartWave,
    WakeUp,
)


class LoneExecutor(FakeExecutor):
    """Alone in its group. Notes its collective operations."""

    def __init__(self) -> None:
        super().__init__(num_blocks=64, block_size=4, vocab_size=1000)
        self.notes: list[str] = []

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        if plan.scheduled:
            self.notes.append("step")

    def execute_dummy(self) -> None:
        self.notes.append("dummy")

    def maximum(self, values: Sequence[int]) -> Sequence[int]:
        self.notes.append("agree")
        return values


def lone_core() -> tuple[EngineCore, LoneExecutor]:
    executor = LoneExecutor()
    return EngineCore(make_core_config(), executor), executor


def test_every_turn_is_one_step_and_one_agreement() -> None:
    """Also the turn that only tells the executor what to forget, and one that a message has started."""
    core, executor = lone_core()
    assert core.needs_lockstep
    core.handle(0, make_core_request(0, max_tokens=2))
    core.handle(0, StartWave())
    while core.has_work:
        core.step()
    assert executor.notes == ["step", "agree", "step", "agree", "dummy", "agree"]
    executor.notes.clear()
    core.handle(0, StartWave())
    assert core.has_work
    core.step()
    assert not core.has_work
    assert executor.notes == ["dummy", "agree"]


def test_without_lockstep_there_are_no_waves() -> None:
    core = CoreDriver().core
    assert not core.needs_lockstep
    core.handle(0, StartWave())
    assert not core.has_work


def test_a_core_falls_asleep_behind_its_wave() -> None:
    """Others may still need its empty steps, which need its memory."""
    core, executor = lone_core()
    core.handle(0, StartWave())
    assert core.handle(0, CallRequest(0, Sleep(1, PauseMode.KEEP))) is None
    assert core.is_in_wave
    assert not executor.asleep
    core.step()
    assert executor.asleep
    assert [reply.error for reply in core.take_replies(0)] == [None]
    core.handle(0, CallRequest(1, WakeUp()))
    assert not core.has_work


GONE = -1


class Rank(LoneExecutor):
    """A rank's messages, and the turns that its requests still take."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = Wave(self)
        self.inbox: dict[int, list[int | None]] = {client: [] for client in range(3)}
        self.num_turns = 0
        self.is_in_turn = False

    @property
    def wants_turn(self) -> bool:
        return self.num_turns > 0 or self.wave.is_on

    def take(self, client: int) -> None:
        """A client's next message: so many turns of work, or None, which starts a wave, or the client's end."""
        num_turns = self.inbox[client].pop(0)
        if num_turns is None:
            self.wave.start(client)
        elif num_turns == GONE:
            self.wave.drop_client(client)
        else:
            self.num_turns += num_turns


class Network(RuleBasedStateMachine):
    """Three ranks that get the messages of three clients, each client's in its order, else whenever they come.

    Who has begun a turn takes no message until all have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [Rank() for _ in range(3)]
        self.gone: set[int] = set()

    @rule(client=st.integers(0, 2), index=st.integers(0, 2), num_turns=st.integers(1, 3))
    def send(self, client: int, index: int, num_turns: int) -> None:
        """A request to one rank, and behind it what all get."""
        if client in self.gone:
            return
        self.ranks[index].inbox[client].append(num_turns)
        for rank in self.ranks:
            rank.inbox[client].append(None)

    @rule(client=st.integers(0, 2), index=st.integers(0, 2))
    def take(self, client: int, index: int) -> None:
        """A message arrives."""
        rank = self.ranks[index]
        if rank.inbox[client] and not rank.is_in_turn:
            rank.take(client)

    @rule(index=st.integers(0, 2))
    def begin_turn(self, index: int) -> None:
        """A rank's loop comes to its step."""
        rank = self.ranks[index]
        rank.is_in_turn |= rank.wants_turn
        if all(rank.is_in_turn for rank in self.ranks):
            for rank in self.ranks:
                rank.num_turns = max(0, rank.num_turns - 1)
            votes = [rank.wave.vote(has_work=rank.num_turns > 0) for rank in self.ranks]
            for rank in self.ranks:
                rank.wave.settle([max(column) for column in zip(*votes, strict=True)])
                rank.is_in_turn = False

    @rule(client=st.integers(0, 2), num_heard=st.tuples(*[st.integers(0, 4)] * 3))
    def lose_client(self, client: int, num_heard: tuple[int, int, int]) -> None:
        """A client is gone in the middle of what it sends: each rank hears so behind what it still gets of it."""
        if client in self.gone:
            return
        self.gone.add(client)
        for rank, num_messages in zip(self.ranks, num_heard, strict=True):
            rank.inbox[client][num_messages:] = [GONE]

    def teardown(self) -> None:
        """When everything arrives, all that was asked for is done, and nobody waits in a turn."""
        for _ in range(200):
            for index, rank in enumerate(self.ranks):
                for client in rank.inbox:
                    self.take(client, index)
                self.begin_turn(index)
        for rank in self.ranks:
            assert (rank.is_in_turn, rank.wants_turn, rank.num_turns) == (False, False, 0)
            assert not any(rank.inbox.values())


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
