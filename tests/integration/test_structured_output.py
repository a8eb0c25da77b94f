"""Structured outputs of the bundled model, through `GenerateRequest`: forms are kept, and nobody else is harmed."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import jsonschema_rs
import pytest
import trio

pytest.importorskip("torch")

from trioengine.checkpoint.locate import ModelLocation
from trioengine.client import blocking, open_engine
from trioengine.client.llm import LLM
from trioengine.config.engine import EngineConfig, ReasoningParser, SpeculationConfig, SpeculationMethod
from trioengine.config.server import ToolCallParser
from trioengine.core.structured_output import StructuredOutputs
from trioengine.errors import RequestError
from trioengine.openai.chat_answer import chat_form
from trioengine.openai.chat_protocol import parse_chat_request
from trioengine.openai.chat_settings import ChatSettings
from trioengine.openai.chat_stream import chat_reply
from trioengine.openai.chat_translate import chat_to_generate
from trioengine.openai.sse import ReplyHead
from trioengine.runtime import build
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.transport.zmq_blocking import poll as transport_poll
from trioengine.types.output import CompletionOutput, FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest
from trioengine.types.structured import StructuredOutputsParams
from trioengine.worker import loading

PROMPT = "A person, as JSON:\n"
PERSON: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z ]{1,20}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["friend", "colleague"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=100)
WILD = SamplingParams(temperature=1.5, max_tokens=100)


def bound(sampling: SamplingParams, **form: Any) -> SamplingParams:
    return attrs.evolve(sampling, structured_outputs=StructuredOutputsParams(**form))


def is_person(output: CompletionOutput) -> bool:
    return output.finish_reason is FinishReason.STOP and jsonschema_rs.is_valid(dict(PERSON), json.loads(output.text))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512) as llm:
        yield llm


def generate(llm: LLM, *samplings: SamplingParams, prompt: str = PROMPT) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate([prompt] * len(samplings), list(samplings))]


def test_answers_have_the_form_whatever_the_temperature(llm: LLM) -> None:
    samplings = [bound(attrs.evolve(WILD, seed=seed), json=PERSON) for seed in range(3)]
    assert all(map(is_person, generate(llm, bound(GREEDY, json=PERSON), *samplings)))


@pytest.mark.parametrize("parser", ToolCallParser)
def test_a_required_call_fits_its_schema_in_every_markup(llm: LLM, parser: ToolCallParser) -> None:
    """Of a model that was never trained to call: from the request's body to the reply's."""
    tokenizer = llm.tokenizer
    tool = {"type": "function", "function": {"name": "introduce", "parameters": PERSON, "strict": True}}
    messages = [{"role": "user", "content": "Introduce Ann, a friend."}]
    body = {"messages": messages, "tools": [tool], "tool_choice": "required", "temperature": 0, "max_tokens": 150}
    request = parse_chat_request(json.dumps(body | {"parallel_tool_calls": False}).encode())
    settings = ChatSettings.of(tokenizer, tool_call_parser=parser)
    plan = chat_to_generate(request, "id", settings)
    (output,) = llm.generate(plan.generate_request.prompt, plan.generate_request.sampling)
    reply = json.loads(chat_reply(ReplyHead("id", 0, "model"), chat_form(request, plan, settings), output))
    (choice,) = reply["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["function"]["name"] == "introduce"
    assert jsonschema_rs.is_valid(dict(PERSON), json.loads(call["function"]["arguments"]))


def test_neighbours_get_the_same_tokens_as_alone(llm: LLM) -> None:
    """Bound and free requests in one step, alone and together."""
    samplings = [
        attrs.evolve(WILD, seed=1, max_tokens=16),
        bound(attrs.evolve(WILD, seed=2), json=PERSON),
        attrs.evolve(GREEDY, max_tokens=16),
        bound(attrs.evolve(WILD, seed=3), regex="[a-z ]{10,20}"),
    ]
    alone = [generate(llm, sampling)[0].token_ids for sampling in samplings]
    assert [output.token_ids for output in generate(llm, *samplings)] == alone


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{4}-[0-9]{2}"}, r"\d{4}-\d{2}"),
        ({"choice": ("positive", "negative")}, "positive|negative"),
        ({"grammar": 'start: "<" /[a-z]{1,5}/ ">"'}, "<[a-z]{1,5}>"),
        ({"grammar": 'root ::= "a" [0-9] end\nend ::= "b" | "c"'}, r"a\d[bc]"),
    ],
)
@pytest.mark.parametrize("rules", [{}, {"ignore_eos": True}, {"min_tokens": 40}])
def test_the_end_of_the_form_ends_the_answer(llm: LLM, form: Any, pattern: str, rules: Any) -> None:
    (output,) = generate(llm, attrs.evolve(bound(WILD, **form), seed=5, **rules))
    assert re.fullmatch(pattern, output.text)
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None


def test_json_objects_end_with_their_root_and_white_space_is_bounded(llm: LLM) -> None:
    """Case 32 (ollama 2577)."""
    form = {"json_object": True}
    samplings = [bound(attrs.evolve(WILD, seed=seed, max_tokens=40), **form) for seed in range(3)]
    outputs = generate(llm, bound(GREEDY, **form), *samplings)
    assert isinstance(json.loads(outputs[0].text), dict)
    for output in outputs:
        without_strings = re.sub(r'"(?:[^"\\]|\\.)*"?', "string", output.text)
        assert not re.search(r"[ \t\n\r]{23}", without_strings)
        assert output.text.startswith("{")


def test_tags_bind_only_what_is_in_them(llm: LLM) -> None:
    """A word that the model is sure to write is the trigger."""
    structure = {"begin": " the answer ", "schema": PERSON, "end": "."}
    tag = {"structures": [structure], "triggers": [" the"]}
    prompt = "The sun is a star. It gives light to"
    (output,) = generate(llm, bound(attrs.evolve(GREEDY, max_tokens=150), structural_tag=tag), prompt=prompt)
    before, _, tagged = output.text.partition(" the")
    assert before == generate(llm, GREEDY, prompt=prompt)[0].text.partition(" the")[0]
    assert tagged.startswith(" answer {")
    content, _ = json.JSONDecoder().raw_decode(tagged.removeprefix(" answer "))
    assert jsonschema_rs.is_valid(dict(PERSON), content)


def test_log_probabilities_of_bound_answers_are_finite(llm: LLM) -> None:
    """Case 38 (sglang 5984)."""
    (output,) = generate(llm, attrs.evolve(bound(GREEDY, json=PERSON), logprobs=20))
    assert is_person(output)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    values = [entry.logprob for place in output.logprobs for entry in (place.chosen, *place.top)]
    assert len(values) == 21 * len(output.token_ids)
    assert all(-10_000 < value <= 1e-3 for value in values)


def test_speculation_changes_no_token(llm: LLM) -> None:
    samplings = [bound(attrs.evolve(WILD, seed=seed), json=PERSON) for seed in range(2)]
    samplings += [bound(GREEDY, json=PERSON), bound(GREEDY, json_object=True)]
    expected = [output.token_ids for output in generate(llm, *samplings)]
    ngram = SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=4, prompt_lookup_min=1)
    with LLM(max_model_len=512, speculative_config=ngram) as speculating:
        assert [output.token_ids for output in generate(speculating, *samplings)] == expected


def test_reasoning_is_free(llm: LLM) -> None:
    """The bundled model does not reason, and so finds no end of it, unless a budget ends it."""
    sampling = bound(attrs.evolve(GREEDY, max_tokens=12), choice=("yes", "no"))
    thinking, over = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    with LLM(max_model_len=512, reasoning_parser=ReasoningParser.QWEN3) as reasoning:
        budget = attrs.evolve(GREEDY, max_tokens=12, thinking_token_budget=4)
        outputs = reasoning.generate([thinking, over, thinking], [sampling, sampling, budget])
    (free,) = generate(llm, attrs.evolve(sampling, structured_outputs=None), prompt=thinking)
    assert outputs[0].outputs[0].token_ids == free.token_ids
    assert outputs[1].outputs[0].text in ("yes", "no")
    assert outputs[2].outputs[0].token_ids[:4] == free.token_ids[:4]
    assert "</think>" in outputs[2].outputs[0].text


async def test_a_form_that_cannot_be_kept_fails_alone() -> None:
    """Cases 31 and 33 (llama.cpp 19051, vllm 17313): after a good one, beside a good one, and before one: the engine
    and the others go on, and what cannot be kept is named by its path."""
    bad = {
        "structured_outputs.regex": {"regex": "("},
        "structured_outputs.json": {"json": {"properties": {"a": {"pattern": "(?=x)y"}}}},
        "structured_outputs.grammar": {"grammar": "start: nothing"},
    }
    texts: list[str] = []
    errors: dict[str | None, str] = {}

    async def ask(sampling: SamplingParams) -> None:
        try:
            async with engine.generate(GenerateRequest(PROMPT, sampling)) as outputs:
                async for output in outputs:
                    if output.finished:
                        texts.append(output.outputs[0].text)
        except RequestError as error:
            errors[error.param] = error.message

    with trio.fail_after(120):
        async with open_engine(EngineConfig(max_model_len=512)) as engine:
            await ask(bound(GREEDY, regex="[0-9]{4}"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, bound(GREEDY, regex="[0-9]{5}"))
                for form in bad.values():
                    nursery.start_soon(ask, bound(GREEDY, **form))
                nursery.start_soon(ask, bound(GREEDY, json={"not": {}}))
            await ask(bound(GREEDY, regex="[0-9]{6}"))
    assert sorted(map(len, texts)) == [4, 5, 6]
    assert set(errors) == set(bad)
    assert any("/properties/a/pattern: " in message or "/not: " in message for message in errors.values())


def test_the_tokenizer_is_loaded_once_for_forms_and_bad_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the core, and by the first request that needs it."""
    loaded: list[object] = []

    def load(location: ModelLocation) -> Tokenizer:
        loaded.append(location)
        return load_tokenizer(location)

    for module in (build, loading):
        monkeypatch.setattr(module, "load_tokenizer", load)
    with LLM(max_model_len=512) as llm:
        assert not loaded
        (output,) = generate(llm, bound(attrs.evolve(GREEDY, bad_words=("positive",)), choice=("positive", "negative")))
    assert output.text == "negative"
    assert len(loaded) == 1


def test_a_script_waits_for_a_grammar_without_turning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar compiles only once the script blocks."""
    blocks = threading.Event()
    compile_form = StructuredOutputs._compile

    def poll(*arguments: Any, **options: Any) -> bool:
        blocks.set()
        return transport_poll(*arguments, **options)

    def compile_later(outputs: StructuredOutputs, params: StructuredOutputsParams) -> Any:
        assert blocks.wait(60)
        return compile_form(outputs, params)

    monkeypatch.setattr(blocking, "poll", poll)
    monkeypatch.setattr(StructuredOutputs, "_compile", compile_later)
    with LLM(max_model_len=512) as llm:
        (output,) = generate(llm, bound(GREEDY, choice=("positive",)))
    assert output.text == "positive"
