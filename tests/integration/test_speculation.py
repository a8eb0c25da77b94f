"""Drafts change how many steps an answer takes, and none of its tokens: through the core, on real models."""

from collections.abc import Iterator, Sequence

import attrs
import pytest
import trio

pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool

from trioengine.checkpoint.locate import resolve_model
from trioengine.client import open_engine
from trioengine.client.llm import LLM
from trioengine.config import env
from trioengine.config.engine import EngineConfig, SpeculationConfig, SpeculationMethod
from trioengine.core.config import CoreConfig
from trioengine.core.engine_core import EngineCore
from trioengine.models.torch_ops import TorchModel
from trioengine.testing.core_driver import Answer, CoreDriver, make_core_request
from trioengine.testing.native import native_library
from trioengine.testing.tiny_model import native_copy, tiny_model
from trioengine.types.messages import CoreStats, GetStats
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest
from trioengine.worker.draft import DraftModel
from trioengine.worker.executor import LocalExecutor
from trioengine.worker.native_backend import NativeBackend

MODEL = tiny_model()
OTHER = tiny_model(seed=1)
BLOCK_SIZE = 16
MAX_TOKENS = 64
NGRAM = SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=4)
DRAFT = SpeculationConfig(method=SpeculationMethod.DRAFT_MODEL, num_speculative_tokens=3, model="draft")


@attrs.frozen
class Outcome:
    """What a core made of some requests."""

    answers: Sequence[Sequence[int]]
    stats: CoreStats


def run_core(
    speculation: SpeculationConfig | None,
    draft: TorchModel | None = None,
    *,
    num_blocks: int = 64,
    enable_prefix_caching: bool = False,
    async_scheduling: bool = False,
) -> Outcome:
    """Six requests at once, some greedy, some random, some with rules, with prompts that repeat themselves."""
    driver = CoreDriver(
        CoreConfig(
            max_num_seqs=8,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_logit_rows=MAX_TOKENS,
            max_model_len=200,
            block_size=BLOCK_SIZE,
            vocab_size=MODEL.config.vocab_size,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            speculation=speculation,
        )
    )
    target = make_backend(MODEL, num_blocks)
    draft_model = None
    if draft is not None:
        draft_model = DraftModel(
            make_backend(draft, num_blocks), target.kv_cache_groups, max_tokens=MAX_TOKENS, max_model_len=200
        )
    executor = LocalExecutor(target, draft_model=draft_model, is_asynchronous=async_scheduling)
    # On this clock steps take no time, so that no draft is left out for what it costs.
    driver.core = EngineCore(driver.config, executor, clock=lambda: 0.0)
    answers: list[Answer] = []
    for slot in range(6):
        prompt = [(7 * slot + place * place) % 50 for place in range(20)] * 2
        temperature = (0.0, 0.7, 1.0)[slot % 3]
        penalty = 1.2 if slot > 3 else 1.0
        sampling = SamplingParams(
            temperature=temperature,
            repetition_penalty=penalty,
            # So few that all of what is said was said before.
            allowed_token_ids=range(4) if slot % 2 else None,
            max_tokens=40,
        )
        answers.append(driver.add(make_core_request(slot, prompt, sampling=sampling, seed=slot)))
    driver.run()
    stats = driver.call(GetStats())
    executor.close()
    assert [len(each.tokens) for each in answers] == [40] * 6
    return Outcome([tuple(each.tokens) for each in answers], stats)


def make_backend(model: TorchModel, num_blocks: int) -> NativeBackend:
    library = native_library()
    return NativeBackend(
        native_copy(model),
        library,
        ThreadPool(library, 1),
        reload=lambda _: native_copy(model),
        num_blocks=[num_blocks],
        block_size=BLOCK_SIZE,
        max_tokens=MAX_TOKENS,
        max_logit_rows=MAX_TOKENS,
    )


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """Without speculation."""
    return run_core(None)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_prompt_lookup_changes_no_token(expected: Outcome, enable_prefix_caching: bool, async_scheduling: bool) -> None:
    """Greedy or random, with rules, in a batch."""
    found = run_core(NGRAM, enable_prefix_caching=enable_prefix_caching, async_scheduling=async_scheduling)
    assert found.answers == expected.answers
    assert found.stats.num_accepted_tokens > 20


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_draft_model_that_is_its_target_has_all_drafts_accepted(expected: Outcome, async_scheduling: bool) -> None:
    """Greedy or random, with rules, in a batch; it takes about a quarter of the steps."""
    found = run_core(DRAFT, MODEL, async_scheduling=async_scheduling)
    assert found.answers == expected.answers
    assert found.stats.num_accepted_tokens == found.stats.num_draft_tokens > 150
    assert found.stats.num_steps < expected.stats.num_steps / 2


def test_a_draft_model_of_other_opinions_changes_no_token(expected: Outcome) -> None:
    """Hardly any of its drafts are right."""
    found = run_core(DRAFT, OTHER)
    assert found.answers == expected.answers
    assert found.stats.num_draft_tokens > found.stats.num_accepted_tokens


@pytest.mark.parametrize(("speculation", "draft"), [(NGRAM, None), (DRAFT, MODEL), (DRAFT, OTHER)])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted_requests_have_the_same_tokens(
    expected: Outcome, speculation: SpeculationConfig, draft: TorchModel | None, enable_prefix_caching: bool
) -> None:
    """Too few blocks for all at once: drafts never take one that a request needs."""
    found = run_core(speculation, draft, num_blocks=15, enable_prefix_caching=enable_prefix_caching)
    assert found.stats.num_preemptions > 0
    assert found.answers == expected.answers


REPEATING = "The grey book lies open on a table behind glass, and every month somebody turns one page. " * 4
REQUESTS = [
    GenerateRequest(REPEATING, SamplingParams(temperature=0, max_tokens=24)),
    GenerateRequest(REPEATING, SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24)),
    GenerateRequest("The capital of France is", SamplingParams(temperature=0, max_tokens=12)),
]
CONFIG = EngineConfig(max_model_len=512, max_num_batched_tokens=128)


@pytest.fixture(scope="module")
def expected_answers() -> Iterator[Sequence[Sequence[int]]]:
    """What the bundled model says without speculation, in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("TRIOENGINE_CPU_KERNELS", raising=False)
        with LLM(max_model_len=512, max_num_batched_tokens=128) as llm:
            outputs = llm.generate([each.prompt for each in REQUESTS], [each.sampling for each in REQUESTS])
        yield [each.outputs[0].token_ids for each in outputs]


@pytest.mark.parametrize("speculation", [NGRAM, DRAFT], ids=lambda speculation: speculation.method)
async def test_the_bundled_model_says_the_same(
    speculation: SpeculationConfig, expected_answers: Sequence[Sequence[int]]
) -> None:
    """With prompt lookup, or as its own draft model: through the whole engine."""
    if speculation.model is not None:
        name = resolve_model(None, cache_dir=env.cache_dir()).served_name
        speculation = attrs.evolve(speculation, model=name)
    answers: dict[int, Sequence[int]] = {}

    async def ask(number: int, request: GenerateRequest) -> None:
        async with engine.generate(request) as outputs:
            async for output in outputs:
                answers[number] = output.outputs[0].token_ids

    with trio.fail_after(60):
        async with open_engine(attrs.evolve(CONFIG, speculative_config=speculation)) as engine:
            async with trio.open_nursery() as nursery:
                for number, request in enumerate(REQUESTS):
                    nursery.start_soon(ask, number, request)
            stats = await engine.call(GetStats())
    assert [answers[number] for number in range(len(REQUESTS))] == expected_answers
    # Whether drafts are worth it is measured, so there may be none on a busy machine.
    if speculation.model is not None:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
