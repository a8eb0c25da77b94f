"""Cases and operations through `GenerateRequest`, on a real core process with the bundled model and native kernels."""

import math
import textwrap
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import psutil
import pytest
import trio

from trioengine.checkpoint.locate import resolve_model
from trioengine.client import open_engine
from trioengine.client.engine import Engine
from trioengine.config import env
from trioengine.config.engine import EngineConfig, SchedulingPolicy, SpeculationConfig, SpeculationMethod
from trioengine.errors import EngineGenerateError, RequestError
from trioengine.testing.native import native_library
from trioengine.types.messages import (
    AllBlocksCleared,
    BlockStored,
    Call,
    CheckIntegrity,
    GetKVCacheEvents,
    GetLoad,
    GetStats,
    IsPaused,
    IsSleeping,
    PauseGeneration,
    PauseMode,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    WakeUp,
)
from trioengine.types.output import FinishReason, PositionLogprobs, RequestOutput
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest
from trioengine.types.structured import StructuredOutputsParams

TIMEOUT_S = 120
R = TypeVar("R")

STORY = "The grey book lies open on a table behind glass, and every month somebody turns one page. " * 3
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["friend", "colleague"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


class OpenEngine:
    """An open engine in a thread of its own, so that many tests share its start."""

    def __init__(self, engine: Engine, token: trio.lowlevel.TrioToken) -> None:
        self.engine = engine
        self._token = token

    def ask(self, *requests: GenerateRequest) -> list[RequestOutput | RequestError | EngineGenerateError]:
        """What became of requests that were sent together, in their order."""
        results: dict[int, RequestOutput | RequestError | EngineGenerateError] = {}

        async def one(number: int, request: GenerateRequest) -> None:
            try:
                async with self.engine.generate(request) as outputs:
                    async for output in outputs:
                        results[number] = output
            except (RequestError, EngineGenerateError) as error:
                results[number] = error

        async def everyone() -> None:
            with trio.fail_after(TIMEOUT_S):
                async with trio.open_nursery() as nursery:
                    for number, request in enumerate(requests):
                        nursery.start_soon(one, number, request)
                await self.engine.call(CheckIntegrity())

        self.run(everyone)
        return [results[number] for number in range(len(requests))]

    def answer(self, prompt: str | Sequence[int], sampling: SamplingParams = GREEDY, **fields: Any) -> RequestOutput:
        """The answer to a prompt."""
        (output,) = self.ask(GenerateRequest(prompt, sampling, **fields))
        assert isinstance(output, RequestOutput), output
        return output

    def refusal(self, sampling: SamplingParams) -> RequestError:
        """Why a request is refused, beside a neighbour that gets the answer that it gets alone."""
        alone = self.answer("The capital of France is").outputs
        error, neighbour = self.ask(
            GenerateRequest("Hello", sampling), GenerateRequest("The capital of France is", GREEDY)
        )
        assert isinstance(error, RequestError), error
        assert isinstance(neighbour, RequestOutput)
        assert neighbour.outputs == alone
        return error

    def call(self, call: Call[R]) -> R:
        """Run an operation."""
        return self.run(lambda: self.engine.call(call))

    def run(self, task: Callable[[], Awaitable[R]]) -> R:
        """Run an async function beside the engine."""
        return trio.from_thread.run(task, trio_token=self._token)


@contextmanager
def opened(**options: Any) -> Generator[OpenEngine]:
    """An engine with the bundled model."""
    native_library()
    found: list[OpenEngine] = []
    errors: list[BaseException] = []
    is_open, is_over = threading.Event(), threading.Event()

    async def run() -> None:
        async with open_engine(EngineConfig(max_model_len=512, **options)) as engine:
            found.append(OpenEngine(engine, trio.lowlevel.current_trio_token()))
            is_open.set()
            await trio.to_thread.run_sync(is_over.wait)

    def thread() -> None:
        try:
            trio.run(run)
        except BaseException as error:  # Raised in the thread of the test.
            errors.append(error)
        is_open.set()

    running = threading.Thread(target=thread)
    running.start()
    try:
        is_open.wait()
        if errors:
            raise errors[0]
        yield found[0]
    finally:
        is_over.set()
        running.join()


@pytest.fixture(scope="module")
def plain() -> Iterator[OpenEngine]:
    """As it comes, with events."""
    with opened(enable_kv_cache_events=True) as engine:
        yield engine


def logprobs_of(places: Sequence[PositionLogprobs | None] | None) -> list[float]:
    assert places is not None
    return [entry.logprob for place in places if place is not None for entry in (place.chosen, *place.top)]


# Cases from users of other engines


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {49_152: 5.0}}, "logit_bias[49152]"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias[-1]"),
        ({"stop_token_ids": [49_152]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids[0]"),
    ],
)
def test_token_ids_out_of_the_vocabulary_are_refused(plain: OpenEngine, fields: Any, param: str) -> None:
    """Case 34 (vllm 16529): and the neighbours' logits are untouched."""
    assert plain.refusal(attrs.evolve(GREEDY, **fields)).param == param


@pytest.mark.parametrize("fields", [{"temperature": 1e-4}, {"top_p": 1e-4}, {"temperature": 1e-4, "top_p": 1e-4}])
def test_tiny_temperatures_and_shares_stay_finite(plain: OpenEngine, fields: Any) -> None:
    """Case 35 (vllm 1623): the answer is then the most likely one."""
    sampling = attrs.evolve(GREEDY, temperature=1.0, logprobs=3, seed=1)
    (output,) = plain.answer("The capital of France is", attrs.evolve(sampling, **fields)).outputs
    assert output.token_ids == plain.answer("The capital of France is").outputs[0].token_ids
    assert all(map(math.isfinite, logprobs_of(output.logprobs)))


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_what_is_no_number_is_refused(plain: OpenEngine, field: str) -> None:
    """Case 35 (vllm 1623)."""
    error = plain.refusal(attrs.evolve(GREEDY, **{field: math.nan}))
    assert error.param == field


def test_no_tokens_are_generated_where_only_the_prompt_is_asked_about(plain: OpenEngine) -> None:
    """Case 36 (vllm 6521): the prompt's log probabilities and no token; without them it is refused."""
    output = plain.answer(STORY, SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert output.finished
    assert output.num_generated_tokens == 0
    assert output.outputs[0].token_ids == ()
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    assert plain.refusal(SamplingParams(max_tokens=0)).param == "max_tokens"


def test_a_prompt_that_fills_the_context_has_log_probabilities(plain: OpenEngine) -> None:
    """Case 36 (vllm 6521)."""
    prompt = [number % 1000 for number in range(512)]
    output = plain.answer(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.outputs[0].token_ids == ()
    assert len(logprobs_of(output.prompt_logprobs)) == 511


def test_log_probabilities_are_finite_where_one_token_is_left(plain: OpenEngine) -> None:
    """Case 38 (sglang 5984): of prompt and answer with top_k 1, and under a grammar; the true most likely ones."""
    sampling = SamplingParams(top_k=1, logprobs=1, prompt_logprobs=1, max_tokens=6)
    output = plain.answer("The capital of France is", sampling)
    assert all(map(math.isfinite, logprobs_of(output.prompt_logprobs)))
    bound = attrs.evolve(GREEDY, logprobs=20, structured_outputs=StructuredOutputsParams(choice=("Paris",)))
    (inside,) = plain.answer("The capital of France is", bound).outputs
    assert inside.text == "Paris"
    for (completion,), number in ((output.outputs, 1), ((inside,), 20)):
        assert completion.logprobs is not None
        assert [len(place.top) for place in completion.logprobs] == [number] * len(completion.token_ids)
        assert all(map(math.isfinite, logprobs_of(completion.logprobs)))


def test_log_probabilities_of_a_prompt_are_the_same_whatever_is_cached(plain: OpenEngine) -> None:
    """Case 48 (vllm 8268): twice with the cache on, without it, and in parts of 16 tokens."""
    sampling = attrs.evolve(GREEDY, prompt_logprobs=3)
    plain.call(ResetPrefixCache())
    plain.answer(STORY)
    assert plain.answer(STORY).num_cached_tokens > 0
    found = [plain.answer(STORY, sampling) for _ in range(2)]
    with opened(enable_prefix_caching=False, max_num_batched_tokens=16) as chunked:
        found.append(chunked.answer(STORY, sampling))
    assert found[0].prompt_logprobs is not None
    for other in found[1:]:
        assert other.prompt_logprobs == found[0].prompt_logprobs
        assert other.outputs == found[0].outputs


def test_salts_keep_prefixes_apart(plain: OpenEngine) -> None:
    """Case 47 (vllm 44701): the same tokens hit with the same salt only. Adapters are part of the same hash."""
    plain.call(ResetPrefixCache())
    hits = [
        plain.answer(STORY, cache_salt=salt).num_cached_tokens > 0 for salt in ("a", "b", None, "a", "b", None, "ab")
    ]
    assert hits == [False, False, False, True, True, True, False]


def test_a_request_of_a_higher_priority_takes_the_place_of_a_running_one() -> None:
    """Cases 49 and 50 (vllm 24365, vllm 23347, vllm 41951): with every place taken it preempts; who was preempted
    comes back before those that came later, with the tokens that it has alone."""
    ends: list[str] = []
    long = attrs.evolve(GREEDY, max_tokens=60)
    tokens: dict[str, Sequence[int]] = {}

    async def read(engine: Engine, name: str, priority: int, sampling: SamplingParams, started: trio.Event) -> None:
        async with engine.generate(GenerateRequest(STORY, sampling, priority=priority)) as outputs:
            async for output in outputs:
                tokens[name] = output.outputs[0].token_ids
                started.set()
        ends.append(name)

    async def main(engine: Engine) -> None:
        with trio.fail_after(TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                started = trio.Event()
                nursery.start_soon(read, engine, "early", 5, long, started)
                await started.wait()
                nursery.start_soon(read, engine, "late", 5, GREEDY, trio.Event())
                await engine.call(GetLoad())
                nursery.start_soon(read, engine, "urgent", -1, GREEDY, trio.Event())

    with opened(scheduling_policy=SchedulingPolicy.PRIORITY, max_num_seqs=1) as engine:
        engine.run(lambda: main(engine.engine))
        assert engine.call(GetStats()).num_preemptions == 1
        alone = engine.answer(STORY, long).outputs[0].token_ids
    assert ends == ["urgent", "early", "late"]
    assert tokens == {"urgent": alone[:12], "early": alone, "late": alone[:12]}


# Operations


def test_a_reset_makes_the_next_identical_prompt_miss(plain: OpenEngine) -> None:
    plain.answer(STORY)
    assert plain.answer(STORY).num_cached_tokens > 0
    assert plain.call(ResetPrefixCache())
    again = plain.answer(STORY)
    assert again.num_cached_tokens == 0
    assert again.outputs == plain.answer(STORY).outputs


def test_events_and_statistics_tell_what_the_core_has_done(plain: OpenEngine) -> None:
    assert plain.call(ResetPrefixCache())
    start, before = plain.call(GetKVCacheEvents(0)), plain.call(GetStats())
    assert start.events[-1] == AllBlocksCleared()
    output = plain.answer(STORY)
    hit = plain.answer(STORY)
    events, after = plain.call(GetKVCacheEvents(start.last)), plain.call(GetStats())
    stored = [event for event in events.events if isinstance(event, BlockStored)]
    num_tokens = len(output.prompt_token_ids)
    told = b"".join(event.token_ids for event in stored)
    assert memoryview(told).cast("i").tolist()[: num_tokens // 16 * 16] == [
        *output.prompt_token_ids[: num_tokens // 16 * 16]
    ]
    assert [event.parent_hash for event in stored[1:]] == [event.block_hash for event in stored[:-1]]
    assert after.num_prefix_cache_hits - before.num_prefix_cache_hits == hit.num_cached_tokens > 0
    assert after.num_prefix_cache_queries - before.num_prefix_cache_queries >= 2 * num_tokens - 2
    assert after.num_steps - before.num_steps >= 24
    assert (after.running, after.waiting, after.kv_cache_usage) == (0, 0, 0.0)


@pytest.mark.parametrize("mode", PauseMode)
def test_a_pause_with_a_stream_that_runs(plain: OpenEngine, mode: PauseMode) -> None:
    """Aborted it ends, waited for it ends first, kept it rests and goes on; who comes later waits for the end."""
    order: list[str] = []
    endings: dict[str, RequestOutput] = {}
    sampling = attrs.evolve(GREEDY, max_tokens=60)

    async def read(engine: Engine, name: str, started: trio.Event) -> None:
        async with engine.generate(GenerateRequest(STORY, sampling)) as outputs:
            async for output in outputs:
                endings[name] = output
                started.set()
        order.append(name)

    async def main() -> None:
        engine = plain.engine
        with trio.fail_after(TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                started = trio.Event()
                nursery.start_soon(read, engine, "present", started)
                await started.wait()
                await engine.call(PauseGeneration(mode, clear_cache=mode is PauseMode.KEEP))
                order.append("paused")
                assert await engine.call(IsPaused())
                steps = (await engine.call(GetStats())).num_steps
                nursery.start_soon(read, engine, "later", trio.Event())
                await engine.call(IsPaused())  # Behind the request.
                load, stats = await engine.call(GetLoad()), await engine.call(GetStats())
                assert load.running + load.waiting == (2 if mode is PauseMode.KEEP else 1)
                assert stats.num_steps == steps
                order.append("resumed")
                await engine.call(ResumeGeneration())
        await engine.call(CheckIntegrity())

    plain.run(main)
    alone = plain.answer(STORY, sampling).outputs[0]
    assert endings["later"].outputs[0] == alone
    present = endings["present"].outputs[0]
    if mode is PauseMode.ABORT:
        assert order == ["present", "paused", "resumed", "later"]
        assert present.finish_reason is FinishReason.ABORT
        assert present.token_ids == alone.token_ids[: len(present.token_ids)]
    else:
        assert present == alone
        before = ["present", "paused", "resumed"] if mode is PauseMode.WAIT else ["paused", "resumed"]
        assert order[: len(before)] == before


def test_what_sleeps_gives_its_memory_back_and_answers_the_same_afterwards(plain: OpenEngine) -> None:
    """Level 2 gives back 90 % of the weights at least, beyond what level 1 does."""
    (handle,) = cast("Any", plain.engine._link)._cores
    core = psutil.Process(handle.pid)
    weights = resolve_model(None, cache_dir=env.cache_dir()).path
    expected = plain.answer(STORY)
    resident: list[int] = []
    for level in (1, 2):
        plain.call(Sleep(level))
        assert plain.call(IsSleeping())
        resident.append(core.memory_info().rss)
        plain.call(WakeUp(("weights",)))
        assert plain.call(IsSleeping())
        plain.call(WakeUp(("kv_cache",)))
        assert not plain.call(IsSleeping())
        again = plain.answer(STORY)
        assert again.num_cached_tokens == 0
        assert again.outputs == expected.outputs
    assert resident[0] - resident[1] > 0.9 * weights.stat().st_size


# Parts that work together


@pytest.mark.parametrize("speculates", [False, True])
def test_forms_drafts_and_steps_ahead_change_no_token(plain: OpenEngine, speculates: bool) -> None:
    """All at once, beside requests that have none of it."""
    bound = StructuredOutputsParams(json=PERSON)
    requests = [
        GenerateRequest(STORY, GREEDY),
        GenerateRequest(STORY, SamplingParams(seed=3, max_tokens=30, logprobs=2)),
        GenerateRequest("A person as JSON: ", SamplingParams(seed=4, max_tokens=60, structured_outputs=bound)),
        GenerateRequest("A person as JSON: ", attrs.evolve(GREEDY, max_tokens=60, structured_outputs=bound)),
        GenerateRequest(STORY, attrs.evolve(GREEDY, prompt_logprobs=1, max_tokens=30)),
    ]
    expected = [plain.ask(request)[0] for request in requests]
    ngram = SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=3)
    with opened(
        async_scheduling=True, speculative_config=ngram if speculates else None, kv_cache_memory_bytes=60 << 20
    ) as engine:
        found = engine.ask(*requests)
    for one, other in zip(expected, found, strict=True):
        assert isinstance(one, RequestOutput)
        assert isinstance(other, RequestOutput)
        assert one.outputs == other.outputs
        assert one.prompt_logprobs == other.prompt_logprobs


def test_a_packages_logits_processor_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments are checked, and its fault is its request's only."""
    (tmp_path / "words.py").write_text(
        textwrap.dedent(
            """
            class Only:
                @staticmethod
                def validate(arguments):
                    if not isinstance(arguments.get("token_id"), int):
                        raise ValueError("token_id must be an integer")

                def __init__(self, arguments):
                    self.token_id = arguments["token_id"]

                def __call__(self, prompt_token_ids, output_token_ids, logits):
                    if len(output_token_ids) == LIMIT:
                        raise KeyError("worn out")
                    kept = logits[self.token_id]
                    logits[:] = float("-inf")
                    logits[self.token_id] = kept

            LIMIT = 5
            """
        )
    )
    metadata = tmp_path / "words-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: words\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[trioengine.logits_processors]\nonly = words:Only\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    four = attrs.evolve(GREEDY, max_tokens=4, logits_processors={"only": {"token_id": 7}})
    with opened() as engine:
        alone = engine.answer(STORY)
        good, worn_out, neighbour = engine.ask(
            GenerateRequest(STORY, four),
            GenerateRequest(STORY, attrs.evolve(four, max_tokens=9)),
            GenerateRequest(STORY, GREEDY),
        )
        error = engine.refusal(attrs.evolve(GREEDY, logits_processors={"only": {}}))
        assert (error.param, "token_id must be an integer" in error.message) == ("logits_processors.only", True)
        assert engine.refusal(attrs.evolve(GREEDY, logits_processors={"other": {}})).param == "logits_processors.other"
    assert isinstance(good, RequestOutput)
    assert good.outputs[0].token_ids == (7, 7, 7, 7)
    assert isinstance(worn_out, EngineGenerateError)
    assert "worn out" in str(worn_out)
    assert isinstance(neighbour, RequestOutput)
    assert neighbour.outputs == alone.outputs
