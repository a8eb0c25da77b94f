"""`LLM` as vLLM's scripts use it: over fake cores, over real models, and as programs of their own."""

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from trioengine import LLM, LoRARequest, RepetitionDetectionParams, SamplingParams, TokensPrompt
from trioengine.client import llm as llm_module
from trioengine.client.llm_engine import LLMEngine
from trioengine.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    PromptTooLongError,
    RequestError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.testing.blocking_adapter import build_fake_core_here
from trioengine.testing.fake_core import MODULE
from trioengine.testing.fake_executor import FakeExecutor, generate_alone
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.types.messages import CheckIntegrity, GetLoad

SHORT = SamplingParams(seed=1, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fake_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "multiprocess"])
def llm(request: pytest.FixtureRequest, model: str) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("trioengine.runtime.build.build_engine_core", build_fake_core_here)
        monkeypatch.setattr(llm_module, "LLMEngine", partial(LLMEngine, core_module=MODULE))
        with LLM(model, multiprocess=request.param, enable_lora=True, max_loras=2, seed=3) as llm:
            yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").llm_engine
        load = engine.call(GetLoad())
        assert (load.running, load.waiting, engine.get_num_unfinished_requests()) == (0, 0, 0)
        engine.call(CheckIntegrity())


def right_tokens(prompt: list[int], seed: int = 1) -> tuple[int, ...]:
    return tuple(generate_alone(prompt, 5, seed=seed, vocab_size=257))


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """More prompts than a server would let wait, of different lengths; ids count up, and progress is told."""
    prompts = [[number % 250, 7] for number in range(1_100)]
    params = [SamplingParams(seed=1, max_tokens=1 + number % 5, ignore_eos=True) for number in range(1_100)]
    bars: list[Any] = []

    class Bar:
        def __init__(self, total: int, **_: object) -> None:
            self.left, self.postfix = total, ""
            bars.append(self)

        def update(self, n: int) -> None:
            self.left -= n

        def close(self) -> None:
            pass

    outputs = llm.generate(prompts, params, use_tqdm=Bar)
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == tuple(prompt)
        assert output.outputs[0].token_ids == right_tokens(prompt)[: each.max_tokens]
    assert bars[0].left == 0
    ids = [int(output.request_id) for output in outputs]
    assert ids == list(range(ids[0], ids[0] + 1_100))


def test_prompts_of_every_form(llm: LLM) -> None:
    tokens = list(b"abc")
    forms: list[Any] = ["abc", tokens, {"prompt": "abc"}, {"prompt_token_ids": tokens}, TokensPrompt(tokens)]
    outputs = llm.generate(forms, SHORT)
    assert {output.outputs[0].token_ids for output in outputs} == {right_tokens(tokens)}
    assert [output.prompt for output in outputs] == ["abc", None, "abc", None, None]
    for one in forms:
        (output,) = llm.generate(one, SHORT)
        assert output.outputs[0].token_ids == right_tokens(tokens)
    assert llm.generate([], SHORT) == []


def test_log_probabilities_of_listed_tokens(llm: LLM) -> None:
    """As vLLM's scripts score labels: beside each token's own those of the list, whatever the likeliest are."""
    listed = SamplingParams(seed=1, max_tokens=3, ignore_eos=True, logprob_token_ids=[7, 200])  # type: ignore[arg-type]
    everything = SamplingParams(seed=1, max_tokens=3, ignore_eos=True, logprobs=-1)
    outputs = llm.generate(["abc", "abc"], [listed, everything])
    found, expected = (output.outputs[0].logprobs for output in outputs)
    assert found is not None
    assert expected is not None
    for position, whole in zip(found, expected, strict=True):
        assert [(each.token_id, each.rank) for each in position.top] == [(7, 0), (200, 0)]
        assert [each.logprob for each in position.top] == [whole[7].logprob, whole[200].logprob]
        assert position.chosen == whole.chosen


def test_an_answer_that_repeats_itself_ends(llm: LLM) -> None:
    """Which one that may write only one token does."""
    params = SamplingParams(
        max_tokens=50,
        allowed_token_ids=[7],  # type: ignore[arg-type]
        repetition_detection=RepetitionDetectionParams(max_pattern_size=2, min_count=4),
    )
    choice = llm.generate("abc", params)[0].outputs[0]
    assert choice.token_ids == (7,) * 4
    assert (choice.finish_reason, choice.stop_reason) == ("repetition", "repetition_detected")


def test_log_probabilities_have_both_forms(llm: LLM) -> None:
    """vLLM's: a mapping from token ids; the engine's: the chosen one and the likeliest."""
    params = SamplingParams(seed=1, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("abc", params)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert position.chosen is position[token_id]
        assert next(iter(position)) == token_id
        assert set(position) == {token_id, *(each.token_id for each in position.top)}
        assert len(position) == len(dict(position)) in (2, 3)
        for each in position.values():
            assert each.decoded_token == each.token_bytes.decode("utf-8", "replace")
            assert each.rank >= 1
        with pytest.raises(KeyError):
            position[100_000]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    (one,) = llm.chat(conversation, SHORT)
    many = llm.chat([conversation, parts], SHORT)
    assert [output.outputs[0].token_ids for output in many] == [one.outputs[0].token_ids] * 2
    assert one.prompt is not None
    assert "hi" in one.prompt
    (other,) = llm.chat(conversation, SHORT, chat_template="{{ messages[0]['content'] }}!", add_generation_prompt=False)
    assert other.prompt == "hi!"
    (tool,) = llm.chat(
        conversation,
        SHORT,
        chat_template="{{ tools[0]['function']['name'] }}{{ mood }}",
        tools=[{"type": "function", "function": {"name": "look"}}],
        chat_template_kwargs={"mood": "?"},
    )
    assert tool.prompt == "look?"


def test_without_parameters_the_authors_recommend_them(model: str, llm: LLM, tmp_path: Path) -> None:
    assert llm.get_default_sampling_params().plain() == SamplingParams()
    folder = write_fake_model(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "max_new_tokens": 3}')
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("trioengine.runtime.build.build_engine_core", build_fake_core_here)
        with LLM(str(folder), override_generation_config={"top_k": 7}) as recommended:
            assert recommended.get_default_sampling_params().plain() == SamplingParams(
                temperature=0.5, max_tokens=3, top_k=7
            )
            assert len(recommended.generate([[1, 2]])[0].outputs[0].token_ids) <= 3
        with LLM(str(folder), generation_config="vllm") as plain:
            assert plain.get_default_sampling_params().plain() == SamplingParams()


def test_recommended_parameters_may_be_set_and_used_everywhere(llm: LLM) -> None:
    """As scripts do; a name that is not there is an error, not a wish that nobody hears."""
    params = llm.get_default_sampling_params()
    params.max_tokens, params.stop, params.ignore_eos = 3, ["no such text"], True  # type: ignore[misc,assignment]
    (output,) = llm.generate([[5, 6]], params)
    assert len(output.outputs[0].token_ids) == 3
    llm.llm_engine.add_request("mine", [5, 6], params)
    outputs: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 3
    with pytest.raises(AttributeError):
        params.max_token = 4  # type: ignore[attr-defined]


def test_a_seed_of_the_engine_makes_answers_repeat(model: str) -> None:
    free = SamplingParams(max_tokens=5, ignore_eos=True)
    answers: list[Any] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("trioengine.runtime.build.build_engine_core", build_fake_core_here)
        for _ in range(2):
            with LLM(model, seed=3) as llm:
                answers.append([output.outputs[0].token_ids for output in llm.generate([[1, 2]] * 3, free)])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def test_nothing_is_run_of_a_call_with_a_wrong_request(llm: LLM) -> None:
    calls: list[tuple[Any, type[TrioEngineError]]] = [
        (lambda: llm.generate(["abc", [999_999]], SHORT), RequestError),
        (lambda: llm.generate(["abc", "abc"], [SHORT]), RequestError),
        (lambda: llm.generate(["abc"], SHORT, priority=[1, 2]), RequestError),
        (lambda: llm.generate("abc", SamplingParams(temperature=-1)), RequestError),
        (lambda: llm.generate([[1] * (1 << 18)], SHORT), PromptTooLongError),
        (lambda: llm.chat([], SHORT), RequestError),
        (lambda: llm.chat(cast(Any, "hi"), SHORT), RequestError),
        (lambda: llm.chat(cast(Any, ["hi"]), SHORT), RequestError),
        (lambda: llm.chat(cast(Any, [["hi"]]), SHORT), RequestError),
        (lambda: llm.chat(cast(Any, {"role": "user", "content": "hi"}), SHORT), RequestError),
        (lambda: llm.chat(cast(Any, None), SHORT), RequestError),
        (lambda: llm.collective_rpc(cast(Any, len)), RequestError),
        (lambda: llm.generate("abc", SHORT, lora_request=LoRARequest("x", 1, "")), TrioEngineError),
        (lambda: llm.embed("abc"), RequestError),
        (lambda: llm.embed("abc", pooling_params=cast(Any, {"dimensions": 3})), RequestError),
        (lambda: llm.score("a", ["b", "c"]), RequestError),
        (lambda: llm.score(["a", "b"], ["c"]), RequestError),
        (lambda: llm.generate("abc", cast(Any, 7)), RequestError),
    ]
    for call, error_class in calls:
        before = llm.llm_engine.get_num_unfinished_requests()
        try:
            call()
        except error_class:
            pass
        else:
            assert error_class is TrioEngineError  # The fake executor may read any folder.
        assert llm.llm_engine.get_num_unfinished_requests() == before
    assert llm.generate([[5, 6]], SHORT)[0].outputs[0].token_ids == right_tokens([5, 6])


def test_a_note_tells_which_prompt_is_wrong(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["abc", "abc", [999_999]], SHORT)
    assert caught.value.__notes__ == ["prompts[2]"]


def test_adapters_are_read_when_they_are_named(llm: LLM, tmp_path: Path) -> None:
    adapter = LoRARequest("poet", 4, str(tmp_path))
    outputs = llm.generate([[5, 6], [5, 6]], SHORT, lora_request=[adapter, None])
    assert [output.lora_request for output in outputs] == [adapter, None]
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids
    assert 4 in llm.llm_engine.list_loras()
    assert llm.llm_engine.remove_lora(4)


def test_a_sleeping_engine_says_so_and_wakes_up(llm: LLM) -> None:
    """Nothing would be computed for ever."""
    llm.sleep()
    with pytest.raises(UnavailableError, match="wake_up"):
        llm.generate("abc", SHORT)
    llm.wake_up()
    assert llm.reset_prefix_cache()
    assert llm.generate([[5, 6]], SHORT)[0].outputs[0].token_ids == right_tokens([5, 6])


async def test_it_works_inside_a_trio_run(llm: LLM) -> None:
    """It blocks it, as it says."""
    await trio.lowlevel.checkpoint()
    assert llm.generate([[5, 6]], SHORT)[0].outputs[0].token_ids == right_tokens([5, 6])
    assert llm.llm_engine.is_sleeping() is False


def test_it_works_inside_an_asyncio_run(llm: LLM) -> None:
    """As in a notebook, whose cells run inside of one."""
    import asyncio  # noqa: TID251 (the application's)

    async def cell() -> Any:
        return llm.generate([[5, 6]], SHORT)

    assert asyncio.run(cell())[0].outputs[0].token_ids == right_tokens([5, 6])


def test_a_closed_one_says_so(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioengine.runtime.build.build_engine_core", build_fake_core_here)
    llm = LLM(model)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate("abc", SHORT)
    with pytest.raises(ConfigError, match="no option 'max_num_seq'"):
        LLM(model, max_num_seq=7)
    assert not issubclass(EngineClosedError, EngineGenerateError)


def test_a_request_that_fails_after_some_tokens_is_an_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning is no answer, and the next call hears nothing of it; the same where the whole engine has died."""
    monkeypatch.setattr("trioengine.runtime.build.build_engine_core", build_fake_core_here)
    with LLM(model) as llm:
        executor = cast(FakeExecutor, llm.llm_engine.model_executor)

        def fails(_: object, num_generated: int) -> bool:
            return num_generated == 3

        with monkeypatch.context() as patch:
            patch.setattr(executor, "_fails", fails)
            for prompts in ([[5, 6]], [[5, 6], [7]]):
                with pytest.raises(EngineGenerateError, match="It was to fail"):
                    llm.generate(prompts, SHORT)
        (output,) = llm.generate([[5, 6]], SHORT)
        assert output.outputs[0].token_ids == right_tokens([5, 6])

        submit, num_steps = executor.submit, itertools.count()

        def fail_later(plan: Any) -> Any:
            if next(num_steps) == 3:
                raise RuntimeError("out of paper")
            return submit(plan)

        monkeypatch.setattr(executor, "submit", fail_later)
        with pytest.raises(EngineDeadError, match="out of paper"):
            llm.generate([[5, 6]], SHORT)


# Scripts written for vLLM

SCRIPTS = {
    "basic": """
        from trioengine import LLM, SamplingParams

        prompts = [
            "Hello, my name is",
            "The president of the United States is",
            "The capital of France is",
            "The future of AI is",
        ]
        sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
        llm = LLM(model=None, max_model_len=256, enforce_eager=True, gpu_memory_utilization=0.5, trust_remote_code=True)
        outputs = llm.generate(prompts, sampling_params)
        for output in outputs:
            prompt = output.prompt
            generated_text = output.outputs[0].text
            print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")

        conversation = [
            {"role": "system", "content": "You are a helpful assistant"},
            {"role": "user", "content": "What is the capital of France?"},
        ]
        default = llm.get_default_sampling_params()
        default.max_tokens, default.temperature, default.stop = 8, 0.0, "\\n"
        outputs = llm.chat(conversation, default, use_tqdm=False)
        print("Paris" in outputs[0].outputs[0].text)

        params = SamplingParams(n=2, temperature=1.0, max_tokens=4, logprobs=2, seed=1)
        (output,) = llm.generate({"prompt_token_ids": llm.get_tokenizer().encode("Once upon")}, params)
        for completion in output.outputs:
            for token_id, position in zip(completion.token_ids, completion.logprobs):
                best = max(position.items(), key=lambda item: item[1].logprob)
                assert position[token_id].logprob <= best[1].logprob == best[1].logprob and best[1].rank == 1
            print(completion.index, completion.finish_reason, completion.stop_reason, completion.cumulative_logprob < 0)
    """,
    "engine": """
        import argparse
        from trioengine import EngineArgs, LLMEngine, RequestOutput, SamplingParams

        def create_test_prompts():
            return [
                ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, max_tokens=6)),
                ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=6)),
                ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=6)),
            ]

        def process_requests(engine, test_prompts):
            request_id = 0
            while test_prompts or engine.has_unfinished_requests():
                if test_prompts:
                    prompt, sampling_params = test_prompts.pop(0)
                    engine.add_request(str(request_id), prompt, sampling_params)
                    request_id += 1
                request_outputs: list[RequestOutput] = engine.step()
                for request_output in request_outputs:
                    if request_output.finished:
                        print(request_output.request_id, len(request_output.outputs))

        engine = LLMEngine.from_engine_args(EngineArgs(model=None, max_model_len=256), multiprocess=True)
        process_requests(engine, create_test_prompts())
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_vllm_runs(name: str, tmp_path: Path) -> None:
    """With the bundled model, without a `__main__` guard, and without closing anything."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPTS[name]))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if name == "basic":
        assert len(lines) == 7
        assert lines[0].startswith("Prompt: 'Hello, my name is', Generated text: ")
        assert lines[4] == "True"
        assert [line.split()[0] for line in lines[5:]] == ["0", "1"]
        assert all(line.endswith("True") for line in lines[5:])
    else:
        assert sorted(lines) == ["0 1", "1 1", "2 2"]
    assert "Traceback" not in done.stderr
    assert "Processed prompts" not in done.stderr
