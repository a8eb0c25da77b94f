"""Whatever front ends do and whatever the limits, the core's books are right and answers are those given alone."""

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from trioengine.core.request import Request
from trioengine.testing.core_driver import Answer, CoreDriver, make_core_config, make_core_request
from trioengine.testing.fake_executor import generate_alone
from trioengine.types.messages import EngineCoreRequest, Finished, unpack_int32
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams

VOCAB_SIZE = 9
CLIENTS = st.integers(0, 2)
TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)


@attrs.define(eq=False)
class Sent:
    """A request that was sent, and what became of it."""

    request: EngineCoreRequest
    answer: Answer
    is_aborted: bool = False
    is_dropped: bool = False


class CoreMachine(RuleBasedStateMachine):
    """Three clients, an engine that is always too small, and a check after every step."""

    @initialize(
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 9),
        max_model_len=st.integers(2, 20),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(2, 12),
    )
    def start(
        self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int, num_blocks: int
    ) -> None:
        """An engine with these limits."""
        self.config = make_core_config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
        )
        self.driver = CoreDriver(self.config, num_blocks=num_blocks)
        self.sent: list[Sent] = []

    @rule(
        client=CLIENTS,
        prompt=st.lists(TOKEN_IDS, min_size=1, max_size=14),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        end_token_ids=st.sets(TOKEN_IDS, max_size=2),
        num_eos=st.integers(0, 1),
        seed=st.integers(0, 3),
    )
    def add(
        self,
        client: int,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        end_token_ids: set[int],
        num_eos: int,
        seed: int,
    ) -> None:
        """Send a request, perhaps one that cannot fit."""
        ends = sorted(end_token_ids)
        sampling = SamplingParams(
            max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop_token_ids=tuple(ends[num_eos:])
        )
        self._send(client, prompt, sampling, seed, tuple(ends[:num_eos]))

    @rule(client=CLIENTS, num_requests=st.integers(2, 5), num_prompt_tokens=st.integers(1, 6), seed=st.integers(0, 3))
    def add_several(self, client: int, num_requests: int, num_prompt_tokens: int, seed: int) -> None:
        """Send enough requests with long answers that blocks run out while others wait."""
        for index in range(num_requests):
            prompt = [(index + position) % VOCAB_SIZE for position in range(num_prompt_tokens)]
            self._send(client, prompt, SamplingParams(max_tokens=8), seed, ())

    @rule(client=CLIENTS, prompt=st.sampled_from([[], [VOCAB_SIZE], [-1], [0] * 50]))
    def add_invalid(self, client: int, prompt: list[int]) -> None:
        """Send a request that must be refused."""
        before = self._load()
        self._send(client, prompt, SamplingParams(), 0, ())
        assert self._load() == before

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a request in whatever state: never admitted, running, finished without our knowing, refused."""
        live = [sent for sent in self.sent if not sent.answer.finished and not sent.is_dropped]
        if live:
            sent = data.draw(st.sampled_from(live))
            sent.is_aborted = True
            self.driver.abort(sent.answer.slot, client=sent.answer.client)

    @rule(client=CLIENTS, slot=st.integers(1_000_000, 1_000_010))
    def abort_unknown(self, client: int, slot: int) -> None:
        """Abort what never was."""
        before = self._load()
        self.driver.abort(slot, client=client)
        assert self._load() == before

    @rule(client=CLIENTS)
    def drop_client(self, client: int) -> None:
        """A client vanishes; a new one may take its number."""
        self.driver.drop_client(client)
        for sent in self.sent:
            if sent.answer.client == client and not sent.answer.finished:
                sent.is_dropped = True

    @rule(client=CLIENTS)
    def take(self, client: int) -> None:
        """A client's transport has room."""
        has_output = client in self.driver.core.clients_with_output()
        assert (self.driver.take(client) is not None) == has_output

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        """Some steps, outputs pending."""
        for _ in range(num_steps):
            if self.driver.core.has_work:
                self._step()

    def teardown(self) -> None:
        """Everything comes to its end: every answer right, every block free, nothing known any more."""
        if not hasattr(self, "driver"):
            return
        num_steps = 0
        while self.driver.core.has_work:
            self._step()
            num_steps += 1
            # A step brings the oldest request nearer to its end, and only its own end makes another the oldest.
            assert num_steps <= (len(self.sent) + 1) * (2 * self.config.max_model_len + 2)
        self.driver.take_all()
        for sent in self.sent:
            self._check(sent)
        assert self._load() == (0, 0, self.driver.core.kv_cache.num_blocks)
        assert self.driver.executor.sequence_ids == set()
        assert list(self.driver.core.clients_with_output()) == []

    def _send(
        self, client: int, prompt: list[int], sampling: SamplingParams, seed: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        in_use = {
            sent.answer.slot
            for sent in self.sent
            if sent.answer.client == client and not sent.answer.finished and not sent.is_dropped
        }
        slot = min(set(range(len(in_use) + 1)) - in_use)  # As soon as a slot is free, it is used again.
        request = make_core_request(slot, prompt, sampling=sampling, seed=seed, eos_token_ids=eos_token_ids)
        self.sent.append(Sent(request, self.driver.add(request, client)))

    def _load(self) -> tuple[int, int, int]:
        core = self.driver.core
        return core.scheduler.num_running, core.scheduler.num_waiting, core.kv_cache.num_free_blocks

    def _unfinished(self) -> list[Request]:
        scheduler = self.driver.core.scheduler
        return [*scheduler._running, *scheduler._waiting.values()]  # pyright: ignore[reportPrivateUsage]

    def _step(self) -> None:
        """One step. The driver checks the books, the fake executor every rule of its border."""
        before = self._unfinished()
        self.driver.step()
        plan = self.driver.plans[-1]
        scheduled = [work.sequence_id for work in plan.scheduled]
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(scheduled) <= self.config.max_num_seqs
        # The oldest are computed, all of them in every step: nobody is overtaken, so nobody starves.
        assert scheduled == [request.sequence_id for request in before[: len(scheduled)]]
        assert scheduled or not before
        assert not set(scheduled) & set(plan.removed)

    def _check(self, sent: Sent) -> None:
        answer, request = sent.answer, sent.request
        prompt = list(unpack_int32(request.prompt_token_ids))
        finished = answer.finished
        if sent.is_dropped:
            return
        assert finished is not None
        if self._is_refused(prompt, request.sampling):
            assert finished.error is not None
            assert not answer.tokens
            return
        tokens, reason, stop_token_id = self._expected(prompt, request)
        if finished.reason is FinishReason.ABORT:
            assert sent.is_aborted
            assert answer.tokens == tokens[: len(answer.tokens)]
            assert finished == Finished(answer.slot, FinishReason.ABORT)
        else:
            assert answer.tokens == tokens
            assert finished == Finished(answer.slot, reason, stop_token_id)

    def _is_refused(self, prompt: list[int], sampling: SamplingParams) -> bool:
        if not 0 < len(prompt) < self.config.max_model_len or not set(prompt) <= set(range(VOCAB_SIZE)):
            return True
        num_cached_tokens = min(len(prompt) + (sampling.max_tokens or 0), self.config.max_model_len) - 1
        return num_cached_tokens > self.driver.core.kv_cache.num_blocks * self.config.block_size

    def _expected(self, prompt: list[int], request: EngineCoreRequest) -> tuple[list[int], FinishReason, int | None]:
        sampling = request.sampling
        ends = sorted({*request.eos_token_ids, *sampling.stop_token_ids})
        tokens = generate_alone(
            prompt,
            min(sampling.max_tokens or 0, self.config.max_model_len - len(prompt)),
            vocab_size=VOCAB_SIZE,
            seed=request.seed,
            min_tokens=sampling.min_tokens,
            end_token_ids=ends,
        )
        for index, token in enumerate(tokens):
            if token in ends and index >= sampling.min_tokens:
                stop_token_id = None if token in request.eos_token_ids else token
                return tokens[: index + 1], FinishReason.STOP, stop_token_id
        return tokens, FinishReason.LENGTH, None


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
