"""A draft model that expects what its target says is always right; whatever it expects, the tokens are the target's."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config.engine import EngineConfig  # noqa: E402
from trioengine.core.executor import NO_TOKEN, NewSequence, ScheduledSequence, StepPlan, TokenMasks  # noqa: E402
from trioengine.errors import ConfigError  # noqa: E402
from trioengine.models.loader import LoadedModel  # noqa: E402
from trioengine.models.torch_ops import TorchModel  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import native_copy, random_model, tiny_model, write_gguf  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.backend import Backend, StepBatch  # noqa: E402
from trioengine.worker.draft import CATCH_UP_TOKENS, DraftModel  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.loading import Computer, open_draft_checkpoint  # noqa: E402
from trioengine.worker.model_runner import ModelRunner  # noqa: E402
from trioengine.worker.native_backend import NativeBackend  # noqa: E402
from trioengine.worker.torch_backend import TorchBackend  # noqa: E402

BLOCK_SIZE = 16
NUM_BLOCKS = 64
NUM_DRAFTS = 3
MODEL = tiny_model()
OTHER = tiny_model(seed=1)
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=1.0, top_p=0.95)
RULED = SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={3: 5.0}, min_tokens=9)


def torch_backend(model: TorchModel) -> Backend:
    return TorchBackend(
        model, reload=lambda _: model, num_blocks=[NUM_BLOCKS] * len(model.config.kv_groups), block_size=BLOCK_SIZE
    )


def native_backend(model: TorchModel) -> Backend:
    library = native_library()
    return NativeBackend(
        native_copy(model),
        library,
        ThreadPool(library, 1),
        reload=lambda _: native_copy(model),
        num_blocks=[NUM_BLOCKS] * len(model.config.kv_groups),
        block_size=BLOCK_SIZE,
        max_tokens=256,
        max_logit_rows=64,
    )


MakeBackend = Callable[[TorchModel], Backend]
_make: list[MakeBackend] = [native_backend]


@pytest.fixture(params=[torch_backend, native_backend], autouse=True)
def each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of this module runs with each backend."""
    _make.append(request.param)
    yield
    _make.pop()


@attrs.define(eq=False)
class Known:
    """A sequence as the core sees it."""

    token_ids: list[int]
    num_prompt_tokens: int
    blocks: list[int]
    num_computed: int = 0
    num_held: int = 0
    drafts: Sequence[int] = ()
    new: NewSequence | None = None

    @property
    def answer(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class CountingBackend:
    """Another backend, and how many tokens it computed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def compute(self, batch: StepBatch) -> None:
        self.num_tokens += len(batch.token_ids)
        self._backend.compute(batch)


class Session:
    """Schedules every sequence in every step, verifies all drafts, and counts."""

    def __init__(
        self, draft: TorchModel | None = MODEL, *, max_tokens: int = 256, max_model_len: int = 512, chunk: int = 200
    ) -> None:
        target, draft_model = _make[-1](MODEL), None
        if draft is not None:
            self.draft_backend = CountingBackend(_make[-1](draft))
            draft_model = DraftModel(
                cast(Backend, self.draft_backend),
                target.kv_cache_groups,
                max_tokens=max_tokens,
                max_model_len=max_model_len,
            )
        self.runner = ModelRunner(target, draft_model=draft_model)
        self.sequences: dict[int, Known] = {}
        self.removed: list[int] = []
        self.num_wanted = NUM_DRAFTS if draft is not None else 0
        self.num_offered = 0
        self.num_verified = 0
        self.num_accepted = 0
        self.failures: dict[int, str] = {}
        self._chunk = chunk

    def add(self, sequence_id: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Known:
        blocks = list(range(8 * sequence_id, 8 * sequence_id + 8))
        known = Known(list(prompt), len(prompt), blocks)
        known.new = NewSequence(sequence_id, list(prompt), len(prompt), sampling, seed=7 + sequence_id)
        self.sequences[sequence_id] = known
        return known

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def step(
        self,
        change_drafts: Callable[[Sequence[int]], Sequence[int]] = lambda drafts: drafts,
        only_token: int | None = None,
    ) -> None:
        """Compute a step, with other drafts or a grammar that leaves the first sequence one token."""
        scheduled: list[ScheduledSequence] = []
        for sequence_id, known in self.sequences.items():
            num_tokens = len(known.token_ids) - known.num_computed
            drafts = change_drafts(known.drafts) if num_tokens == 1 else ()
            num_tokens = min(self._chunk, num_tokens) + len(drafts)
            is_sampled = known.num_computed + num_tokens >= len(known.token_ids)
            num_wanted = self.num_wanted if is_sampled else 0
            num_needed = -(-(known.num_computed + num_tokens + num_wanted) // BLOCK_SIZE)
            new_blocks = known.blocks[known.num_held : num_needed]
            known.num_held = max(known.num_held, num_needed)
            scheduled.append(
                ScheduledSequence(sequence_id, known.num_computed, num_tokens, new_blocks, drafts, num_wanted)
            )
        new = [known.new for known in self.sequences.values() if known.new is not None]
        masks = None
        if only_token is not None:
            bits = np.full((1 + len(scheduled[0].draft_token_ids), -(-MODEL.config.vocab_size // 32)), -1, np.int32)
            bits[0] = 0
            bits[0, only_token // 32] = np.uint32(1 << only_token % 32).astype(np.int32)
            masks = TokenMasks({0: 0}, bits)
        result = self.runner.run(StepPlan(0, scheduled, new, self.removed, masks))
        self.removed = []
        self.failures |= {failure.sequence_id: failure.message for failure in result.failures}
        for index, work in enumerate(scheduled):
            known = self.sequences[work.sequence_id]
            known.new, known.drafts = None, result.drafts.get(index, ())
            num_accepted = result.num_accepted.get(index, 0)
            known.num_computed += work.num_tokens - (len(work.draft_token_ids) - num_accepted)
            if result.tokens[index] != NO_TOKEN:
                known.token_ids += [*work.draft_token_ids[:num_accepted], result.tokens[index]]
            self.num_offered += len(known.drafts)
            self.num_verified += len(work.draft_token_ids)
            self.num_accepted += num_accepted
            assert len(known.drafts) <= work.max_new_drafts


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start * 17 + place * 29 + place * place * 5 + 3) % MODEL.config.vocab_size for place in range(length)]


def without_drafts(prompt: Sequence[int], num_tokens: int, sampling: SamplingParams, sequence_id: int = 0) -> list[int]:
    session = Session(draft=None)
    known = session.add(sequence_id, prompt, sampling)
    session.run(num_tokens)
    return known.answer


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, RULED])
def test_drafts_of_the_same_model_are_all_accepted(sampling: SamplingParams) -> None:
    """Whatever the rules: it draws with the same random numbers, for the same places."""
    session = Session()
    known = session.add(0, prompt_of(9), sampling)
    session.run(9)
    assert session.num_verified == 8 * NUM_DRAFTS
    assert session.num_accepted == session.num_verified
    assert known.answer == without_drafts(prompt_of(9), len(known.answer), sampling)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, RULED])
def test_drafts_of_another_model_change_no_token(sampling: SamplingParams) -> None:
    """Most of them are wrong."""
    session = Session(OTHER)
    known = session.add(0, prompt_of(9), sampling)
    session.run(20)
    assert session.num_accepted < session.num_verified / 2
    assert known.answer == without_drafts(prompt_of(9), len(known.answer), sampling)


def test_a_batch_with_prompts_in_chunks() -> None:
    """Some draft while others are in the middle of their prompts; the draft model takes fewer tokens at once."""
    session = Session(max_tokens=7, chunk=20)
    lengths = (3, 50, 33, 20, 1)
    known = [session.add(i, prompt_of(length, i), RANDOM) for i, length in enumerate(lengths)]
    session.run(10)
    assert session.num_accepted == session.num_verified > 0
    for i, length in enumerate(lengths):
        expected = without_drafts(prompt_of(length, i), len(known[i].answer), RANDOM, sequence_id=i)
        assert known[i].answer == expected


@pytest.mark.parametrize("num_steps", [1, 3, CATCH_UP_TOKENS, 2 * CATCH_UP_TOKENS + 5])
def test_a_pause_without_drafts_is_made_up_for(num_steps: int) -> None:
    """What was not computed meanwhile is, before the next draft."""
    session = Session()
    session.add(0, prompt_of(9), RANDOM)
    session.run(3)
    session.num_wanted = 0
    session.run(num_steps)
    session.num_wanted = NUM_DRAFTS
    before = session.num_verified
    session.run(3)
    assert session.num_verified == before + 2 * NUM_DRAFTS
    assert session.num_accepted == session.num_verified


def only_the_first(drafts: Sequence[int]) -> Sequence[int]:
    return drafts[:1]


def none_of_them(_: Sequence[int]) -> Sequence[int]:
    return ()


def first_is_wrong(drafts: Sequence[int]) -> Sequence[int]:
    return [(token_id + (place == 0)) % MODEL.config.vocab_size for place, token_id in enumerate(drafts)]


def second_is_wrong(drafts: Sequence[int]) -> Sequence[int]:
    return [(token_id + (place == 1)) % MODEL.config.vocab_size for place, token_id in enumerate(drafts)]


@pytest.mark.parametrize("change", [only_the_first, none_of_them, first_is_wrong, second_is_wrong])
def test_drafts_that_were_not_used_leave_no_trace(change: Callable[[Sequence[int]], Sequence[int]]) -> None:
    """Left out or wrong: the draft model goes on from the tokens that came instead."""
    session = Session()
    known = session.add(0, prompt_of(9), RANDOM)
    session.run(3)
    for _ in range(3):
        session.step(change)
        before = session.num_verified, session.num_accepted
        session.step()
        assert session.num_verified - before[0] == session.num_accepted - before[1] == NUM_DRAFTS
    assert known.answer == without_drafts(prompt_of(9), len(known.answer), RANDOM)


@pytest.mark.parametrize("num_resting", [0, 1, 3])
def test_drafts_that_turned_out_wrong_leave_no_trace(num_resting: int) -> None:
    """A grammar that the draft model does not know allows another token: it goes on from that one, also later."""
    session = Session()
    known = session.add(0, prompt_of(9), GREEDY)
    session.run(3)
    other = (known.drafts[0] + 1) % MODEL.config.vocab_size
    before = session.num_accepted
    session.num_wanted = 0 if num_resting else NUM_DRAFTS
    session.step(only_token=other)
    session.run(num_resting)
    assert known.answer[-1 - num_resting] == other
    assert session.num_accepted == before
    session.num_wanted = NUM_DRAFTS
    session.run(4 if num_resting else 3)
    assert session.num_accepted == before + 3 * NUM_DRAFTS


def test_accepted_drafts_are_not_computed_again() -> None:
    """A step with all drafts accepted costs the draft model a token for each new one."""
    session = Session()
    session.add(0, prompt_of(9), GREEDY)
    session.run(3)
    before = session.draft_backend.num_tokens
    session.run(4)
    assert session.draft_backend.num_tokens == before + 4 * (NUM_DRAFTS + 1)


def test_a_pause_is_made_up_for_in_parts() -> None:
    """The first drafts after a long pause do not wait for all of it."""
    session = Session()
    session.add(0, prompt_of(9), GREEDY)
    session.num_wanted = 0
    session.run(3 * CATCH_UP_TOKENS + 2)
    before = session.draft_backend.num_tokens
    session.num_wanted = NUM_DRAFTS
    session.run(1)
    assert session.draft_backend.num_tokens <= before + CATCH_UP_TOKENS + NUM_DRAFTS


def test_blocks_behind_a_window_are_not_used() -> None:
    """Where a target has windows in some layers, its draft model uses the blocks of the others."""
    windowed = random_model(attrs.evolve(MODEL.config, layer_windows=(BLOCK_SIZE, None)))
    target, draft = _make[-1](windowed), _make[-1](windowed)
    runner = ModelRunner(
        target, draft_model=DraftModel(draft, target.kv_cache_groups, max_tokens=64, max_model_len=512)
    )
    prompt = prompt_of(45)
    first = NewSequence(0, prompt, 45, GREEDY, seed=0)
    # Pairs of blocks: of the layer with a window, and of the other.
    expected = runner.run(StepPlan(0, [ScheduledSequence(0, 0, 45, [0, 9, 1, 8, 2, 7], (), NUM_DRAFTS)], [first]))
    second = NewSequence(1, prompt, 45, GREEDY, seed=0)
    found = runner.run(StepPlan(1, [ScheduledSequence(1, 32, 13, [-1, 9, 1, 8, 3, 6], (), NUM_DRAFTS)], [second]))
    assert found.tokens == expected.tokens
    assert len(found.drafts[0]) == NUM_DRAFTS
    assert found.drafts == expected.drafts


def test_a_sequence_may_begin_in_blocks_of_another() -> None:
    """A cached prefix is cached in the draft model, too."""
    session = Session()
    session.add(0, prompt_of(40), GREEDY)
    session.run(1)
    other = session.add(1, prompt_of(45), GREEDY)
    other.blocks[:2], other.num_computed = [0, 1], 32
    session.run(4)
    assert session.num_accepted == session.num_verified == NUM_DRAFTS * (4 + 3)


def test_a_preempted_sequence_is_computed_again() -> None:
    """It comes back as new, in other blocks."""
    session = Session()
    known = session.add(0, prompt_of(9), RANDOM)
    session.run(3)
    session.removed.append(0)
    known.new = NewSequence(0, list(known.token_ids), 9, RANDOM, seed=7)
    known.blocks, known.num_held, known.num_computed = list(range(30, 38)), 0, 0
    session.run(3)
    assert session.num_accepted == session.num_verified == NUM_DRAFTS * (2 + 2)
    assert known.answer == without_drafts(prompt_of(9), len(known.answer), RANDOM)


def test_no_drafts_beyond_the_length_that_it_was_made_for() -> None:
    """A draft model may have a shorter context than its target."""
    session = Session(max_model_len=14)
    known = session.add(0, prompt_of(9), GREEDY)
    session.run(12)
    assert 0 < session.num_offered <= 5
    assert known.answer == without_drafts(prompt_of(9), len(known.answer), GREEDY)


def test_a_draft_model_that_gives_no_numbers_gives_no_drafts() -> None:
    """The target goes on alone."""
    weights = attrs.evolve(OTHER.decoder.weights, final_norm=OTHER.decoder.weights.final_norm * np.nan)
    broken = LoadedModel(OTHER.config, type(OTHER.decoder)(OTHER.config, weights))
    session = Session(broken)
    known = session.add(0, prompt_of(9), GREEDY)
    session.run(5)
    assert session.num_offered == 0
    assert not session.failures
    assert known.answer == without_drafts(prompt_of(9), 5, GREEDY)


def test_a_failed_sequence_leaves_the_others_their_drafts() -> None:
    """Nothing is drafted for it."""
    session = Session()
    session.add(0, prompt_of(9), GREEDY)
    session.add(1, [1, MODEL.config.vocab_size], GREEDY)
    session.run(1)
    assert list(session.failures) == [1]
    del session.sequences[1]
    session.removed.append(1)
    session.run(3)
    assert session.num_accepted == session.num_verified == 3 * NUM_DRAFTS


def test_it_sleeps_and_wakes_with_its_target() -> None:
    """Without weights and cache, then with both: it drafts as before."""
    target = _make[-1](MODEL)
    draft_model = DraftModel(_make[-1](MODEL), target.kv_cache_groups, max_tokens=64, max_model_len=512)
    executor = LocalExecutor(target, draft_model=draft_model)

    def drafts(step: int) -> Sequence[int]:
        new = NewSequence(step, prompt_of(9), 9, GREEDY, seed=0)
        executor.submit(StepPlan(step, [ScheduledSequence(step, 0, 9, [0], (), NUM_DRAFTS)], [new]))
        return executor.result().drafts[0]

    expected = drafts(0)
    assert len(expected) == NUM_DRAFTS
    executor.sleep(2)
    executor.wake_up(("weights", "kv_cache"))
    assert drafts(1) == expected


def location_of(path: Path, vocab_size: int = MODEL.config.vocab_size) -> ModelLocation:
    write_gguf(path, tiny_model(vocab_size=vocab_size))
    return ModelLocation(ModelKind.GGUF, path, path.stem)


def test_its_vocabulary_is_its_targets(tmp_path: Path) -> None:
    """Anything else is refused at start, by name."""
    other = location_of(tmp_path / "other.gguf", vocab_size=99)
    with pytest.raises(ConfigError, match="other has a vocabulary of 99 tokens, the model one of 211") as caught:
        open_draft_checkpoint(EngineConfig(), other, MODEL.config)
    assert caught.value.option == "speculative_config"


def test_offloaded_blocks_have_no_part_for_it(tmp_path: Path) -> None:
    """So the two do not go together."""
    same = location_of(tmp_path / "same.gguf")
    assert open_draft_checkpoint(EngineConfig(), same, MODEL.config).config.vocab_size == MODEL.config.vocab_size
    with pytest.raises(ConfigError) as caught:
        open_draft_checkpoint(EngineConfig(kv_offload_bytes=1 << 20), same, MODEL.config)
    assert caught.value.option == "kv_offload_bytes"


def test_its_cache_is_part_of_a_blocks_size() -> None:
    """Of the group of layers that see all tokens; a model without any cannot have one."""
    windowed = attrs.evolve(MODEL.config, layer_windows=(32, None))
    computer = Computer(native_library())
    alone, both = computer.shape(windowed), computer.shape(windowed, OTHER.config)
    sizes = [group.bytes_per_token for group in alone.kv_groups]
    assert [group.bytes_per_token for group in both.kv_groups] == [sizes[0], sizes[1] + 2 * sizes[0]]
    with pytest.raises(ConfigError, match="windows") as caught:
        computer.shape(attrs.evolve(MODEL.config, layer_windows=(32, 32)), OTHER.config)
    assert caught.value.option == "speculative_config"
