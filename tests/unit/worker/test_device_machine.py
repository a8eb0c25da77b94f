"""Whatever a core asks of it, a device's runner gives what the plain torch backend gives, step by step.

A core schedules ahead for both; the device does its work late, or as soon as somebody lets it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")

from hypothesis import settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule  # noqa: E402

from trioengine.core.config import CoreConfig  # noqa: E402
from trioengine.core.engine_core import EngineCore  # noqa: E402
from trioengine.core.executor import StepPlan, StepResult, TokenLogprobs  # noqa: E402
from trioengine.models.decoder import Decoder  # noqa: E402
from trioengine.models.loader import LoadedModel  # noqa: E402
from trioengine.models.lora import LoRA, read_lora  # noqa: E402
from trioengine.models.torch_ops import TorchModel  # noqa: E402
from trioengine.testing.core_driver import make_core_request  # noqa: E402
from trioengine.testing.device_backend import device_backend  # noqa: E402
from trioengine.testing.fake_device import FakeDevice  # noqa: E402
from trioengine.testing.lora import write_lora  # noqa: E402
from trioengine.testing.tiny_model import random_model, tiny_config  # noqa: E402
from trioengine.tokenizer.bad_words import BadWordsRules  # noqa: E402
from trioengine.types.messages import AbortRequests  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.logits_processors import LogitsProcessors  # noqa: E402
from trioengine.worker.torch_backend import TorchBackend  # noqa: E402

VOCAB_SIZE = 61
BROKEN_TOKEN = 7
"""What comes after it is no number."""
BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
MAX_NUM_SEQS = 5


def broken_model(windows: Sequence[int | None]) -> TorchModel:
    config = attrs.evolve(tiny_config(VOCAB_SIZE, 64), num_layers=len(windows), layer_windows=tuple(windows))
    model = random_model(config)
    weights = model.decoder.weights
    embedding = weights.embedding.clone()
    embedding[BROKEN_TOKEN] = math.nan
    return LoadedModel(config, Decoder(config, attrs.evolve(weights, embedding=embedding)))


MODELS = {windows: broken_model(windows) for windows in ((None, None), (None, 6))}


class ForbidOdd:
    """A custom logits processor."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        pass

    @staticmethod
    def validate(arguments: Mapping[str, object]) -> None:
        pass

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: Any) -> None:
        logits[1::2] -= 3 + len(output)


PROCESSORS = LogitsProcessors({"forbid_odd": ForbidOdd})
WORDS = BadWordsRules(lambda _: [f"<{token_id}>".encode() for token_id in range(VOCAB_SIZE)], VOCAB_SIZE)
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.5, top_k=7, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.7, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0, frequency_penalty=1.5, logit_bias={5: 4.0, BROKEN_TOKEN: 6.0}),
    SamplingParams(temperature=1.0, logit_bias={3: 2.0, 40: -5.0}, min_tokens=3, stop_token_ids=(3, 9, 11)),
    SamplingParams(temperature=1.0, allowed_token_ids=(2, BROKEN_TOKEN, 8, 31, 32, 60), logprobs=2),
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=1.0, logprobs=3, prompt_logprobs=2, presence_penalty=1.0),
    SamplingParams(temperature=1.0, bad_words=("<5>", "<3><4>", "1><2")),
    SamplingParams(temperature=1.0, logprob_token_ids=(4, 60, 4)),
    SamplingParams(temperature=1.0, logits_processors={"forbid_odd": {}}),
)


@attrs.frozen
class Requested:
    """A request."""

    prompt: list[int]
    sampling: int
    """Of SAMPLINGS."""
    max_tokens: int
    seed: int
    lora: str | None


PROMPTS = st.lists(st.integers(8, VOCAB_SIZE - 1), min_size=1, max_size=20)
# Some are broken, and some begin alike.
ODD_PROMPTS = st.sampled_from([[20, BROKEN_TOKEN, 21], [*range(20, 33)], [*range(20, 36)], [*range(20, 29)]])
REQUESTS = st.builds(
    Requested,
    prompt=PROMPTS | ODD_PROMPTS,
    sampling=st.integers(0, len(SAMPLINGS) - 1) | st.integers(0, 3),
    max_tokens=st.integers(1, 20) | st.just(20),
    seed=st.integers(0, 2**64 - 1),
    lora=st.sampled_from([None, None, "3", "5"]),
)


class BothExecutors:
    """An executor that is two, which have to give the same."""

    def __init__(self, model: TorchModel, num_blocks: int, graph_sizes: Sequence[int]) -> None:
        groups = [num_blocks] * len(model.config.kv_groups)
        shared: Any = {
            "logits_processors": PROCESSORS,
            "bad_words_rules": WORDS,
            "read_lora": lambda path: LORAS[path],
        }
        backend = TorchBackend(model, reload=lambda _: model, num_blocks=groups, block_size=BLOCK_SIZE)
        self.plain = LocalExecutor(backend, **shared)
        self.device = FakeDevice()
        late = device_backend(
            model,
            self.device,
            num_blocks=groups,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_loras=2,
            graph_sizes=graph_sizes,
        )
        self.late = LocalExecutor(late, is_asynchronous=True, **shared)
        self.kv_cache_groups = self.plain.kv_cache_groups
        self.num_offload_blocks = 0

    def submit(self, plan: StepPlan) -> None:
        self.plain.submit(plan)
        self.late.submit(plan)

    def result(self) -> StepResult:
        expected, found = self.plain.result(), self.late.result()
        assert_equal(found, expected)
        return found

    def check_sampling(self, sampling: SamplingParams) -> None:
        self.plain.check_sampling(sampling)

    def add_lora(self, lora_id: int, path: str) -> None:
        self.plain.add_lora(lora_id, path)
        self.late.add_lora(lora_id, path)

    def remove_lora(self, lora_id: int) -> None:
        self.plain.remove_lora(lora_id)
        self.late.remove_lora(lora_id)


LORAS: dict[str, LoRA] = {}


@pytest.fixture(scope="module", autouse=True)
def loras(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two adapters of the model, which is the same with windows and without."""
    config = MODELS[None, None].config
    for seed in (3, 5):
        path = write_lora(tmp_path_factory.mktemp("lora"), config, rank=seed, seed=seed)
        LORAS[str(seed)] = read_lora(str(path), config=config, max_rank=16)


def assert_equal(found: StepResult, expected: StepResult) -> None:
    plain = attrs.evolve(expected, logprobs={}, prompt_logprobs={}, draft_seconds=0)
    assert attrs.evolve(found, logprobs={}, prompt_logprobs={}, draft_seconds=0) == plain
    for mine, theirs in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
        assert mine.keys() == theirs.keys()
        for index, entries in mine.items():
            assert len(entries) == len(theirs[index])
            for one, other in zip(entries, theirs[index], strict=True):
                assert_close(one, other)


def assert_close(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert (found.token_ids, found.rank) == (expected.token_ids, expected.rank)
    assert found.logprobs == pytest.approx(expected.logprobs, rel=1e-4, abs=1e-4)


class DeviceMachine(RuleBasedStateMachine):
    """One client, a core that schedules ahead, and two executors."""

    @initialize(
        windows=st.sampled_from(list(MODELS)),
        num_blocks=st.integers(10, 16) | st.just(30),
        max_num_batched_tokens=st.integers(4, 40),
        graph_sizes=st.sampled_from([(), (1, 2, 4), (3,)]),
        is_ahead=st.sampled_from([True, True, True, False]),
        has_prefixes=st.booleans(),
    )
    def start(
        self,
        windows: tuple[int | None, ...],
        num_blocks: int,
        max_num_batched_tokens: int,
        graph_sizes: Sequence[int],
        is_ahead: bool,
        has_prefixes: bool,
    ) -> None:
        self.executor = BothExecutors(MODELS[windows], num_blocks, graph_sizes)
        config = CoreConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            async_scheduling=is_ahead,
            enable_prefix_caching=has_prefixes,
            max_num_partial_prefills=2,
            max_loras=1,
            max_cpu_loras=2,
        )
        executor: Any = self.executor
        self.core = EngineCore(config, executor)
        for name in LORAS:
            adapter = self.core.loras.begin_add(name, name, ())
            executor.add_lora(adapter.lora_id, name)
            self.core.loras.finish_add(adapter, ())
        self.num_slots = 0

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests: list[Requested]) -> None:
        for each in requests:
            request = make_core_request(
                self.num_slots,
                each.prompt,
                sampling=attrs.evolve(SAMPLINGS[each.sampling], max_tokens=each.max_tokens),
                seed=each.seed,
                eos_token_ids=(1,),
                lora=each.lora,
            )
            assert self.core.handle(0, request) is None
            self.num_slots += 1

    @rule(number=st.integers(0, 8))
    def abort(self, number: int) -> None:
        self.core.handle(0, AbortRequests([max(0, self.num_slots - number)]))

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.core.has_work:
                self.core.step()
        self.core.take_output(0)
        self.core.check_integrity()

    @rule(num_pieces=st.integers(1, 2))
    def advance(self, num_pieces: int) -> None:
        self.executor.device.advance(num_pieces)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.core.has_work:
            self.core.step()
        assert not self.core.scheduler.num_in_flight
        for executor in (self.executor.plain, self.executor.late):
            executor.close()


TestDeviceMachine = DeviceMachine.TestCase
TestDeviceMachine.settings = settings(max_examples=10, stateful_step_count=15)
