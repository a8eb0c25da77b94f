"""A device's runner: what the host waits for, what is copied, which graphs are replayed, and what must not be mixed up.

That it computes the right numbers, `test_device_machine` and the conformance suite say.
"""

import math
from collections.abc import Sequence

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.sampler import LogitBias, RaggedIds, SamplingArrays  # noqa: E402

from trioengine.core.executor import (  # noqa: E402
    NO_TOKEN,
    NewSequence,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenMasks,
)
from trioengine.models.decoder import Decoder  # noqa: E402
from trioengine.models.loader import LoadedModel  # noqa: E402
from trioengine.models.torch_ops import TorchModel  # noqa: E402
from trioengine.testing.device_backend import device_backend  # noqa: E402
from trioengine.testing.fake_device import FakeDevice  # noqa: E402
from trioengine.testing.tiny_model import tiny_model  # noqa: E402
from trioengine.tokenizer.bad_words import BadWordsRules  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.types.pooling import PoolingParams, PoolingTask, PoolingType  # noqa: E402
from trioengine.worker.backend import Backend, LaunchBatch  # noqa: E402
from trioengine.worker.device import buffers  # noqa: E402
from trioengine.worker.device.backend import DeviceBackend, LaunchedDeviceStep  # noqa: E402
from trioengine.worker.draft import DraftModel  # noqa: E402
from trioengine.worker.logits_processors import LogitsProcessors  # noqa: E402
from trioengine.worker.model_runner import ModelRunner  # noqa: E402
from trioengine.worker.torch_backend import TorchBackend  # noqa: E402

MODEL = tiny_model(vocab_size=61)
VOCAB_SIZE = MODEL.config.vocab_size
BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_NUM_SEQS = 8
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=1.0)
PENALTIES = SamplingParams(temperature=0.8, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
WORDS = BadWordsRules(lambda _: [f"<{token_id}>".encode() for token_id in range(VOCAB_SIZE)], VOCAB_SIZE)


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start * 17 + place * 29 + place * place * 5 + 3) % VOCAB_SIZE for place in range(length)]


def torch_backend(model: TorchModel = MODEL) -> Backend:
    return TorchBackend(model, reload=lambda _: model, num_blocks=[NUM_BLOCKS], block_size=BLOCK_SIZE)


class Sequences:
    """Plans steps of all of its sequences, each with all its tokens, and may do so before the last ones are known."""

    def __init__(self, backend: Backend | None = None, *, graph_sizes: Sequence[int] = (1, 2, 4)) -> None:
        self.device = FakeDevice()
        if backend is None:
            backend = device_backend(
                MODEL,
                self.device,
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                max_model_len=64,
                max_num_seqs=MAX_NUM_SEQS,
                graph_sizes=graph_sizes,
            )
        self.runner = ModelRunner(backend, bad_words_rules=WORDS)
        self.step = 0
        self.computed: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.free = list(range(NUM_BLOCKS))
        self.new: list[NewSequence] = []
        self.removed: list[int] = []
        self.in_flight: list[list[int]] = []
        self.tokens: dict[int, list[int]] = {}
        self.results: list[StepResult] = []

    def add(
        self, sequence_id: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY, num_prompt: int | None = None
    ) -> None:
        new = NewSequence(sequence_id, prompt, num_prompt or len(prompt), sampling, seed=sequence_id)
        self.new.append(new)
        self.computed[sequence_id], self.ends[sequence_id] = 0, len(prompt)
        self.blocks[sequence_id] = []
        self.tokens.setdefault(sequence_id, [])

    def remove(self, sequence_id: int) -> None:
        self.removed.append(sequence_id)
        self.free[:0] = self.blocks.pop(sequence_id)
        del self.computed[sequence_id], self.ends[sequence_id]

    def work(self, sequence_id: int, num_tokens: int | None = None, drafts: Sequence[int] = ()) -> ScheduledSequence:
        first = self.computed[sequence_id]
        end = self.ends[sequence_id] + len(drafts) if num_tokens is None else first + num_tokens
        blocks = self.blocks[sequence_id]
        num_new = -(-end // BLOCK_SIZE) - len(blocks)
        new = [self.free.pop(0) for _ in range(num_new)]
        blocks.extend(new)
        self.computed[sequence_id] = end - len(drafts)
        if end >= self.ends[sequence_id]:
            self.ends[sequence_id] += 1
        return ScheduledSequence(sequence_id, first, end - first, new, drafts)

    def launch(self, masks: TokenMasks | None = None, scheduled: Sequence[ScheduledSequence] | None = None) -> None:
        if scheduled is None:
            scheduled = [self.work(sequence_id) for sequence_id in self.computed]
        self.in_flight.append([work.sequence_id for work in scheduled])
        self.runner.launch(StepPlan(self.step, scheduled, self.new, self.removed, masks))
        self.step, self.new, self.removed = self.step + 1, [], []

    def finish(self) -> StepResult:
        result = self.runner.finish()
        self.results.append(result)
        for sequence_id, token in zip(self.in_flight.pop(0), result.tokens, strict=True):
            if token != NO_TOKEN:
                self.tokens[sequence_id].append(token)
        return result

    def run(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.launch()
            self.finish()

    def run_ahead(self, num_steps: int) -> None:
        """With two in flight."""
        self.launch()
        for _ in range(num_steps - 1):
            self.launch()
            self.finish()
        self.finish()


def alone(prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY, seed: int = 0) -> list[int]:
    """What the plain torch backend says."""
    sequences = Sequences(torch_backend())
    sequences.add(seed, prompt, sampling)
    sequences.run(num_tokens)
    return sequences.tokens[seed]


def assert_same(found: Sequences, expected: Sequences) -> None:
    """Tokens and log probabilities."""
    assert found.tokens == expected.tokens
    for result, other in zip(found.results, expected.results, strict=True):
        assert result.logprobs.keys() == other.logprobs.keys()
        for index, (entry,) in result.logprobs.items():
            assert entry.token_ids == other.logprobs[index][0].token_ids
            assert entry.logprobs == pytest.approx(other.logprobs[index][0].logprobs, rel=1e-4, abs=1e-4)


def decoding(num_seqs: int, sampling: SamplingParams = GREEDY, **options) -> Sequences:
    """Sequences whose prompts are done."""
    sequences = Sequences(**options)
    for number in range(num_seqs):
        sequences.add(number, prompt_of(3 + number, number), sampling)
    sequences.run()
    return sequences


# What the host waits for, and what is copied


@pytest.mark.parametrize("graph_sizes", [(), (1, 2, 4)])
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, PENALTIES, attrs.evolve(RANDOM, logprobs=2), attrs.evolve(RANDOM, logprobs=0, logit_bias={3: 1.0})],
)
def test_a_step_waits_once_and_copies_once(graph_sizes: Sequence[int], sampling: SamplingParams) -> None:
    """Launching waits for nothing, with two steps in flight; each result waits for one event. With a graph, and with
    what comes behind it."""
    sequences = decoding(3, sampling, graph_sizes=graph_sizes)
    device = sequences.device
    sequences.launch()
    for _ in range(6):
        num_waits, num_copies = device.num_synchronizations, device.num_copies_to_device
        sequences.launch()
        assert device.num_synchronizations == num_waits
        assert device.num_queued == 2
        sequences.finish()
        assert device.num_synchronizations == num_waits + 1
        assert device.num_copies_to_device == num_copies + 1
        assert device.num_queued == 1
    sequences.finish()
    assert sequences.runner.num_waits == 0
    plain = Sequences(torch_backend())
    for number in range(3):
        plain.add(number, prompt_of(3 + number, number), sampling)
    plain.run(8)
    assert_same(sequences, plain)


@pytest.mark.parametrize("sampling", [GREEDY, attrs.evolve(PENALTIES, logprobs=1)])
def test_results_are_their_steps_however_late_they_are_copied(sampling: SamplingParams) -> None:
    """The device has computed the next step when the copy of the first one's results is done."""
    sequences = decoding(4, sampling)
    for _ in range(3):
        sequences.launch()
        sequences.launch()
        sequences.device.advance(2)
        sequences.finish()
        sequences.finish()
    assert replayed(sequences) == [4] * 6
    assert sequences.tokens == {i: alone(prompt_of(3 + i, i), 7, sampling, seed=i) for i in range(4)}


def test_a_prompt_waits_once_and_copies_once() -> None:
    """Also where the step samples nothing."""
    sequences = Sequences()
    sequences.add(0, prompt_of(9), PENALTIES)
    num_waits, num_copies = sequences.device.num_synchronizations, sequences.device.num_copies_to_device
    for num_tokens in (4, 3, None):
        sequences.launch(scheduled=[sequences.work(0, num_tokens)])
    assert sequences.device.num_synchronizations == num_waits
    assert [sequences.finish().tokens for _ in range(3)] == [[NO_TOKEN], [NO_TOKEN], alone(prompt_of(9), 1, PENALTIES)]
    assert sequences.device.num_synchronizations == num_waits + 3
    assert sequences.device.num_copies_to_device == num_copies + 3


def test_staging_memory_is_written_again_only_when_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer blocks than steps in flight the host has to wait; where it does not, the device reads the numbers of
    another step, and this test, like all others, would see it."""
    monkeypatch.setattr(buffers, "NUM_STAGING_BLOCKS", 1)
    expected = alone(prompt_of(3), 6)
    sequences = decoding(1)
    num_waits = sequences.device.num_synchronizations
    sequences.launch()
    sequences.launch()
    assert sequences.device.num_synchronizations == num_waits + 1
    sequences.finish()
    sequences.finish()
    sequences.run_ahead(3)
    assert sequences.tokens[0] == expected

    sequences = decoding(1)
    monkeypatch.setattr(buffers.StagingRing, "launched", lambda *_: None)
    # Both steps then read what the second was told.
    sequences.launch()
    sequences.launch()
    sequences.finish()
    sequences.finish()
    assert sequences.tokens[0] != expected[:3]


# Graphs


@pytest.mark.parametrize(("num_seqs", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, None)])
def test_decodes_are_replayed_from_the_smallest_graph_that_fits(num_seqs: int, size: int | None) -> None:
    sequences = decoding(num_seqs)
    assert replayed(sequences) == []
    sequences.run_ahead(3)
    assert replayed(sequences) == ([] if size is None else [size] * 3)


def test_other_steps_are_not_replayed() -> None:
    """Prompts, steps with drafts, and a decode that brings more blocks than a graph has room for."""
    sequences = decoding(1)
    sequences.add(1, prompt_of(5, 1))
    sequences.run()
    drafts = alone(prompt_of(3), 4)[2:4]
    sequences.launch(scheduled=[sequences.work(0, drafts=drafts)])
    assert sequences.finish().num_accepted == {0: 2}
    assert replayed(sequences) == []
    # Its prefix is in blocks that another has computed.
    sequences.add(2, prompt_of(5, 1))
    sequences.blocks[2] = []
    sequences.launch(scheduled=[ScheduledSequence(2, 4, 1, [*sequences.blocks[1][:1], 50])])
    assert sequences.finish().tokens == alone(prompt_of(5, 1), 1)
    assert replayed(sequences) == []


def test_padding_changes_nothing() -> None:
    """A graph of four with one sequence: nobody's row and nobody's block take what its other rows write."""
    sequences = decoding(1, PENALTIES, graph_sizes=(4,))
    backend = backend_of(sequences)
    before = [cache.data.clone() for cache in backend._kv_caches]
    table, last_tokens = backend._state.block_table.clone(), backend._state.last_tokens.clone()
    sequences.launch()
    sequences.finish()
    assert replayed(sequences) == [4]
    for cache, old in zip(backend._kv_caches, before, strict=True):
        blocks = (cache.data != old).flatten(3).any(3).any(0).any(0).nonzero().flatten().tolist()
        assert {*blocks} - {NUM_BLOCKS} == {sequences.blocks[0][-1]}
    rows = (backend._state.last_tokens != last_tokens).nonzero().flatten().tolist()
    assert set(rows) <= {0, MAX_NUM_SEQS}
    assert (backend._state.block_table == table).all()


def test_a_graph_that_would_use_other_memory_is_an_error() -> None:
    """As on a device, whose graph would go on with the old."""
    sequences = decoding(1)
    backend = backend_of(sequences)
    backend._state.last_tokens = backend._state.last_tokens.clone()
    sequences.launch()
    with pytest.raises(AssertionError, match="not where they were"):
        sequences.finish()


def test_graphs_are_recorded_again_for_other_weights() -> None:
    """And after sleep."""
    other = tiny_model(vocab_size=61, seed=3)
    sequences = decoding(2)
    backend = backend_of(sequences)
    for sequence_id in (0, 1):
        sequences.remove(sequence_id)
    sequences.run()
    backend.drop_weights()
    backend.drop_kv_cache()
    backend.load_weights()
    backend.make_kv_cache()
    sequences.add(2, prompt_of(4, 2))
    sequences.run(4)
    assert sequences.tokens[2] == alone(prompt_of(4, 2), 4)
    assert replayed(sequences) == [1] * 3
    backend._reload = lambda _: device_backend(other, FakeDevice(), num_blocks=1)._ready.model
    backend.prepare_weights({})()
    sequences.remove(2)
    sequences.add(3, prompt_of(4, 2))
    sequences.run(4)
    plain = Sequences(torch_backend(other))
    plain.add(3, prompt_of(4, 2))
    plain.run(4)
    assert sequences.tokens[3] == plain.tokens[3]
    assert replayed(sequences) == [None] * 3 + [1] * 3


# Sequences that end, come and go


def test_a_row_passes_on_while_its_step_is_in_flight() -> None:
    """What is in flight for a sequence that was removed is still its own, and whoever has its row and its blocks then
    does not notice; penalties count from nothing."""
    sequences = decoding(2, PENALTIES)
    sequences.launch()
    sequences.remove(0)
    sequences.add(5, prompt_of(6, 5), PENALTIES)
    sequences.launch()
    sequences.launch()
    for _ in range(3):
        sequences.finish()
    sequences.run_ahead(4)
    assert sequences.tokens[0] == alone(prompt_of(3), 2, PENALTIES)
    assert sequences.tokens[1] == alone(prompt_of(4, 1), 8, PENALTIES, seed=1)
    assert sequences.tokens[5] == alone(prompt_of(6, 5), 6, PENALTIES, seed=5)


def test_a_preempted_sequence_goes_on() -> None:
    sequences = decoding(2, PENALTIES)
    sequences.run_ahead(3)
    tokens = [*prompt_of(3), *sequences.tokens[0]]
    sequences.launch()
    sequences.remove(0)
    sequences.launch()
    sequences.finish()
    tokens.append(sequences.tokens[0][-1])
    sequences.add(0, tokens, PENALTIES, num_prompt=3)
    sequences.launch()
    sequences.finish()
    sequences.finish()
    sequences.run_ahead(3)
    assert sequences.tokens[0] == alone(prompt_of(3), 9, PENALTIES)


def broken_model() -> TorchModel:
    """Logits after token 7 are no numbers."""
    weights = MODEL.decoder.weights
    embedding = weights.embedding.clone()
    embedding[7] = math.nan
    return LoadedModel(MODEL.config, Decoder(MODEL.config, attrs.evolve(weights, embedding=embedding)))


@pytest.mark.parametrize("graph_sizes", [(), (4,)])
def test_what_is_no_number_fails_alone_one_step_late(graph_sizes: Sequence[int]) -> None:
    """The step that is in flight then has the sequence, too: it fails again, and the others go on."""
    device = FakeDevice()
    backend = device_backend(
        broken_model(), device, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=64, graph_sizes=graph_sizes
    )
    sequences = Sequences(backend)
    forced, kept = SamplingParams(temperature=0, logit_bias={7: 100.0}), SamplingParams(logit_bias={7: -100.0})
    sequences.add(0, prompt_of(5, 2), kept)
    sequences.add(1, prompt_of(4), forced)
    sequences.run()
    assert sequences.tokens[1] == [7]
    sequences.launch()
    sequences.launch()
    failed = [sequences.finish() for _ in range(2)]
    assert [[failure.sequence_id for failure in result.failures] for result in failed] == [[1], [1]]
    assert [result.tokens[1] for result in failed] == [NO_TOKEN, NO_TOKEN]
    blocks = list(sequences.blocks[1])
    sequences.remove(1)
    sequences.add(2, prompt_of(6, 4), kept)
    sequences.run_ahead(3)
    assert {*blocks} <= {*sequences.blocks[2]}
    assert sequences.tokens[0] == alone(prompt_of(5, 2), 6, kept)
    assert sequences.tokens[2] == alone(prompt_of(6, 4), 3, kept, seed=2)


def test_a_failed_sequence_gives_nothing_more() -> None:
    """Of the step that was in flight when its failure became known: no log probabilities either."""
    found: list[list[StepResult]] = []
    plain = torch_backend(broken_model())
    late = device_backend(broken_model(), FakeDevice(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=64)
    for backend in (plain, late):
        sequences = Sequences(backend)
        sequences.add(0, [3, 7, 5, 6, 8, 9], attrs.evolve(GREEDY, prompt_logprobs=1))
        sequences.launch(scheduled=[sequences.work(0, 3)])
        sequences.launch(scheduled=[sequences.work(0)])
        found.append([sequences.finish() for _ in range(2)])
    for results in found:
        assert [[failure.sequence_id for failure in result.failures] for result in results] == [[0], [0]]
        assert [result.prompt_logprobs.keys() for result in results] == [{0}, set()]


def test_a_mask_of_nothing_fails_its_sequence() -> None:
    sequences = decoding(2)
    bits = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    sequences.launch(TokenMasks({0: 0}, bits))
    result = sequences.finish()
    assert [failure.sequence_id for failure in result.failures] == [0]
    assert sequences.tokens[1] == alone(prompt_of(4, 1), 2)


def test_a_row_gets_one_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of its prompt besides, nor those behind drafts: a device writes in no order."""
    sequences = Sequences()
    sequences.add(0, prompt_of(4), attrs.evolve(GREEDY, prompt_logprobs=0))
    sequences.add(1, prompt_of(3, 1))
    backend, batches = backend_of(sequences), []
    launch = backend.launch

    def spy(batch: LaunchBatch, sampling: SamplingArrays | None) -> LaunchedDeviceStep:
        batches.append(batch)
        return launch(batch, sampling)

    monkeypatch.setattr(backend, "launch", spy)
    sequences.run()
    sequences.launch(scheduled=[sequences.work(0, drafts=[3, 4]), sequences.work(1)])
    sequences.finish()
    assert [batch.logit_owners.tolist() for batch in batches] == [[0, 0, 0, 0, 1], [0, 0, 0, 1]]
    assert [batch.sampled_rows.tolist() for batch in batches] == [[-1, -1, -1, 0, 1], [-1, -1, -1, -1]]


# Steps that must know the tokens before them


class AddOne:
    """A custom logits processor that looks at what was said."""

    def __init__(self, _: object) -> None:
        pass

    def validate(self, _: object) -> None:
        pass

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> None:
        logits[(sum(output) + 1) % VOCAB_SIZE] += 50


PROCESSORS = LogitsProcessors({"add_one": AddOne})


@pytest.mark.parametrize(
    ("sampling", "num_waits"),
    [
        (RANDOM, 0),
        (attrs.evolve(RANDOM, logprobs=3, min_tokens=5, logit_bias={5: 1.0}), 0),
        # A step with rules like these is done when it was launched: the one behind it has nothing to wait for. Of words
        # only what was said before counts.
        (attrs.evolve(RANDOM, logprob_token_ids=(3, 4), logit_bias={3: 2.0}), 0),
        (attrs.evolve(RANDOM, logits_processors={"add_one": {}}), 0),
        (attrs.evolve(RANDOM, bad_words=("<3><4>",)), 5),
    ],
)
def test_some_steps_wait_for_the_tokens_before_them(sampling: SamplingParams, num_waits: int) -> None:
    """And give what they would give one by one."""
    ahead, plain = Sequences(), Sequences(torch_backend())
    for sequences in (ahead, plain):
        sequences.runner._logits_processors = PROCESSORS
        sequences.add(0, prompt_of(4))
        sequences.add(1, prompt_of(5, 1), sampling)
    ahead.run_ahead(6)
    plain.run(6)
    assert_same(ahead, plain)
    assert ahead.runner.num_waits == num_waits
    assert [state.num_unknown for state in ahead.runner._sequences.values()] == [0, 0]


@pytest.mark.parametrize("sampling", [{"logits_processors": {"add_one": {}}}, {"logprob_token_ids": (1, 2)}])
def test_a_step_that_reads_logits_waits_for_those_before_it(sampling: dict[str, object]) -> None:
    ahead, plain = Sequences(), Sequences(torch_backend())
    for sequences in (ahead, plain):
        sequences.runner._logits_processors = PROCESSORS
        sequences.add(0, prompt_of(4), PENALTIES)
        sequences.launch()
        sequences.add(1, prompt_of(5, 1), attrs.evolve(GREEDY, **sampling))
        sequences.launch()
    assert ahead.runner.num_waits == 1
    assert ahead.device.num_queued == 0
    for sequences in (ahead, plain):
        sequences.finish()
        sequences.finish()
    assert_same(ahead, plain)


def test_a_step_with_drafts_waits_for_those_before_it() -> None:
    """They are guesses of what comes behind tokens that are known."""
    expected = alone(prompt_of(4), 4)
    sequences = Sequences()
    sequences.add(0, prompt_of(4))
    sequences.launch()
    sequences.launch(scheduled=[sequences.work(0, drafts=expected[1:3])])
    assert sequences.runner.num_waits == 1
    assert sequences.finish().tokens == expected[:1]
    result = sequences.finish()
    assert (result.tokens, result.num_accepted) == (expected[3:], {0: 2})


@pytest.mark.parametrize("sampling", [GREEDY, PENALTIES])
def test_a_draft_model_on_the_device_drafts_what_it_says_itself(sampling: SamplingParams) -> None:
    """With its target's blocks, and without its target's rows."""

    def draft_model(backend: Backend) -> DraftModel:
        return DraftModel(backend, backend.kv_cache_groups, max_tokens=32, max_model_len=64)

    drafts: list[list[int]] = []
    for make in (torch_backend, lambda: backend_of(Sequences())):
        sequences = Sequences()
        sequences.runner._draft_model = draft_model(make())
        sequences.add(0, prompt_of(5), sampling)
        sequences.blocks[0] = list(range(10))
        work = ScheduledSequence(0, 0, 5, list(range(10)), max_new_drafts=3)
        sequences.launch(scheduled=[work])
        result = sequences.finish()
        assert result.tokens == alone(prompt_of(5), 1, sampling)
        drafts.append(list(result.drafts[0]))
        work = ScheduledSequence(0, 5, 4, (), draft_token_ids=result.drafts[0], max_new_drafts=2)
        sequences.launch(scheduled=[work])
        result = sequences.finish()
        tokens = [*drafts[-1][: result.num_accepted.get(0, 0)], result.tokens[0]]
        assert tokens == alone(prompt_of(5), 5, sampling)[1 : 1 + len(tokens)]
        drafts[-1].extend(result.drafts[0])
    assert drafts[0] == drafts[1]


def test_logits_stay_while_they_are_sampled() -> None:
    """As every backend's do until the next step, whatever rules there are."""
    sequences = Sequences()
    sequences.runner._logits_processors = PROCESSORS
    sequences.add(0, prompt_of(4), attrs.evolve(GREEDY, logits_processors={"add_one": {}}))
    sequences.run()
    backend = backend_of(sequences)
    before = backend.copy_logits([0])
    bias = LogitBias(RaggedIds(np.array([0, 1]), np.array([9], np.int32)), np.array([100], np.float32))
    arrays = SamplingArrays(
        temperature=np.zeros(1, np.float32),
        top_k=np.zeros(1, np.int32),
        top_p=np.ones(1, np.float32),
        min_p=np.zeros(1, np.float32),
        seed=np.zeros(1, np.uint64),
        position=np.zeros(1, np.int64),
        logit_bias=bias,
    )
    assert backend.sample(arrays).token_ids.tolist() == [9]
    assert (backend.copy_logits([0]) == before).all()


# Vectors


def test_hidden_states_come_with_their_step() -> None:
    """While the next step is in flight."""
    pooling = PoolingParams(task=PoolingTask.TOKEN_EMBED, pooling_type=PoolingType.LAST, normalize=True)
    vectors: list[np.ndarray] = []
    for sequences in (Sequences(), Sequences(torch_backend())):
        sampling = SamplingParams(max_tokens=0)
        sequences.add(0, prompt_of(4))
        for number in (1, 2):
            new = NewSequence(number, prompt_of(5, number), 5, sampling, seed=0, pooling=pooling)
            sequences.add(number, new.token_ids)
            sequences.new[-1] = new
        sequences.launch(scheduled=[sequences.work(0), sequences.work(1, 2), sequences.work(2)])
        sequences.launch(scheduled=[sequences.work(0), sequences.work(1)])
        results = [sequences.finish() for _ in range(2)]
        assert sequences.tokens[0] == alone(prompt_of(4), 2)
        assert [sorted(result.pooled) for result in results] == [[2], [1]]
        vectors += [results[0].pooled[2], results[1].pooled[1]]
    for found, expected in zip(vectors[:2], vectors[2:], strict=True):
        assert found.shape == (5, MODEL.config.hidden_size)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# Memory


def test_weights_that_do_not_fit_are_a_memory_error() -> None:
    """As the executor expects it, which then says so."""
    backend = backend_of(Sequences())

    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("No room.")

    backend._reload = fail
    backend.drop_weights()
    for call in (backend.load_weights, lambda: backend.prepare_weights({})):
        with pytest.raises(MemoryError, match="No room"):
            call()


def test_a_cache_that_does_not_fit_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(Sequences())
    backend.drop_kv_cache()

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("No room.")

    monkeypatch.setattr(backend, "_make_caches", fail)
    with pytest.raises(MemoryError, match="No room"):
        backend.make_kv_cache()
    monkeypatch.undo()
    backend.make_kv_cache()
    assert len(backend._kv_caches) == 1


def test_weights_are_told_as_bytes() -> None:
    backend = backend_of(Sequences())
    num_bytes = sum(len(array) for array in backend.weight_arrays())
    assert num_bytes == sum(len(array) * 4 for array in torch_backend().weight_arrays())
    backend.drop_weights()
    assert list(backend.weight_arrays()) == []


def replayed(sequences: Sequences) -> list[int | None]:
    """The sizes of the graphs that were replayed; None of those that there are no more."""
    sizes = {id(graph): size for size, graph in backend_of(sequences)._graphs._graphs.items()}
    return [sizes.get(id(graph)) for graph in sequences.device.replayed]


def backend_of(sequences: Sequences) -> DeviceBackend:
    backend = sequences.runner._backend
    assert isinstance(backend, DeviceBackend)
    return backend
