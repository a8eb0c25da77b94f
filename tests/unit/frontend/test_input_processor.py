"""Every rule is applied before anything is sent, and what was changed to make a request fit is said."""

import math
import random
from typing import Any

import attrs
import pytest

from trioengine.errors import PromptTooLongError, RequestError
from trioengine.frontend.input_processor import LONG_PROMPT_CHARS, InputProcessor
from trioengine.frontend.request_checks import MAX_CACHE_SALT_CHARS
from trioengine.testing.fake_tokenizer import END_TOKEN, FakeTokenizer
from trioengine.types.messages import ModelFacts
from trioengine.types.params import SamplingParams
from trioengine.types.request import MAX_LORA_NAME_CHARS, ChatPrompt, GenerateRequest, Prompt, TextPrompt, TokensPrompt

VOCAB_SIZE = 257
PROCESSOR = InputProcessor(FakeTokenizer(), ModelFacts(max_model_len=10, vocab_size=VOCAB_SIZE, eos_token_ids=(256,)))


def refusal(request: GenerateRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        PROCESSOR.process(request)
    return caught.value


def test_a_text_is_tokenized() -> None:
    processed = PROCESSOR.process(GenerateRequest("abc", SamplingParams(max_tokens=2)))
    assert processed.prompt_token_ids == (97, 98, 99)
    assert processed.sampling.max_tokens == 2
    assert processed.warnings == ()
    assert processed.eos_token_ids == (256,)


def test_end_tokens_in_a_text_are_text() -> None:
    """Case 27 (transformers 29279): a user cannot end anything by writing a control token."""
    processor = attrs.evolve(PROCESSOR, model=ModelFacts(1000, VOCAB_SIZE, (256,)))
    assert 256 not in processor.process(GenerateRequest(f"a{END_TOKEN}")).prompt_token_ids
    chat = ChatPrompt([{"role": "user", "content": END_TOKEN}])
    processed = processor.process(GenerateRequest(chat))
    assert processed.prompt_token_ids.count(256) == 1  # The template's own.
    assert processed.prompt_token_ids[-len("assistant: ") :] == tuple(b"assistant: ")


def test_a_chat_may_be_without_generation_prompt() -> None:
    processor = attrs.evolve(PROCESSOR, model=ModelFacts(1000, VOCAB_SIZE, (256,)))
    chat = ChatPrompt([{"role": "user", "content": "x"}], add_generation_prompt=False)
    assert processor.process(GenerateRequest(chat)).prompt_token_ids == (*b"user: x", 256)


def test_tokens_are_taken_as_they_are() -> None:
    assert PROCESSOR.process(GenerateRequest([0, 256])).prompt_token_ids == (0, 256)
    assert PROCESSOR.process(GenerateRequest(TokensPrompt((5,)))).prompt_token_ids == (5,)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31, 1.0, "1", None, True])
def test_a_token_id_that_is_none_is_refused_by_its_place(token_id: int) -> None:
    error = refusal(GenerateRequest(TokensPrompt([1, token_id])))
    assert error.param == "prompt[1]"
    assert str(VOCAB_SIZE - 1) in error.message


@pytest.mark.parametrize("prompt", [TextPrompt(""), TokensPrompt([])])
def test_an_empty_prompt_is_refused(prompt: Prompt) -> None:
    assert refusal(GenerateRequest(prompt)).param == "prompt"


def test_no_messages_are_refused() -> None:
    assert refusal(GenerateRequest(ChatPrompt([]))).param == "messages"


@pytest.mark.parametrize(("num_tokens", "param"), [(10, "prompt"), (11, "prompt")])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(num_tokens: int, param: str) -> None:
    """Case 41 (ollama 4967)."""
    error = refusal(GenerateRequest("x" * num_tokens))
    assert isinstance(error, PromptTooLongError)
    assert (error.num_prompt_tokens, error.max_model_len, error.param) == (num_tokens, 10, param)
    assert str(num_tokens) in str(error)


def test_messages_that_fill_the_context_are_refused_as_messages() -> None:
    error = refusal(GenerateRequest(ChatPrompt([{"role": "user", "content": "x" * 20}])))
    assert isinstance(error, PromptTooLongError)
    assert error.param == "messages"


def test_max_tokens_above_what_is_left_is_lowered_and_the_caller_is_told() -> None:
    processed = PROCESSOR.process(GenerateRequest("abc", SamplingParams(max_tokens=32_000)))
    assert processed.sampling.max_tokens == 7
    (warning,) = processed.warnings
    assert "32000" in warning
    assert "7" in warning


def test_max_tokens_that_just_fit_are_kept_without_a_warning() -> None:
    processed = PROCESSOR.process(GenerateRequest("abc", SamplingParams(max_tokens=7)))
    assert processed.sampling.max_tokens == 7
    assert processed.warnings == ()


def test_max_tokens_unset_is_what_is_left_without_a_warning() -> None:
    processed = PROCESSOR.process(GenerateRequest("x" * 9, SamplingParams(max_tokens=None)))
    assert processed.sampling.max_tokens == 1
    assert processed.warnings == ()


def test_min_tokens_that_do_not_fit_are_refused() -> None:
    assert refusal(GenerateRequest("abc", SamplingParams(max_tokens=None, min_tokens=8))).param == "min_tokens"
    assert refusal(GenerateRequest("abc", SamplingParams(max_tokens=9, min_tokens=8))).param == "min_tokens"
    assert PROCESSOR.process(GenerateRequest("abc", SamplingParams(max_tokens=9, min_tokens=7))).warnings


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(stop_token_ids=(0, VOCAB_SIZE)), "stop_token_ids[1]"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids[0]"),
        (SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), f"logit_bias[{VOCAB_SIZE}]"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias[-1]"),
        (SamplingParams(allowed_token_ids=(0, VOCAB_SIZE)), "allowed_token_ids[1]"),
        (SamplingParams(allowed_token_ids=(-1,)), "allowed_token_ids[0]"),
        (SamplingParams(logprob_token_ids=(0, VOCAB_SIZE)), "logprob_token_ids[1]"),
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(stop=""), "stop[0]"),
    ],
)
def test_parameters_are_checked_against_the_vocabulary(sampling: SamplingParams, param: str) -> None:
    """Case 34 (vllm 16529)."""
    assert refusal(GenerateRequest("abc", sampling)).param == param


def test_listed_tokens_are_limited_as_the_most_likely_ones_are() -> None:
    processor = attrs.evolve(PROCESSOR, model=ModelFacts(10, VOCAB_SIZE, (256,), 20))
    processor.process(GenerateRequest("a", SamplingParams(logprob_token_ids=(5,) * 20)))
    with pytest.raises(RequestError, match="more than max_logprobs allows: 20") as caught:
        processor.process(GenerateRequest("a", SamplingParams(logprob_token_ids=(5,) * 21)))
    assert caught.value.param == "logprob_token_ids"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("max_logprobs", "accepted", "refused"),
    [(20, (0, 20), (21, -1)), (0, (0,), (1, -1)), (-1, (0, VOCAB_SIZE, -1), (VOCAB_SIZE + 1,)), (999, (-1, 999), ())],
)
def test_log_probabilities_are_limited_by_the_engine(
    name: str, max_logprobs: int, accepted: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    """-1 is as many as the vocabulary has."""
    processor = attrs.evolve(PROCESSOR, model=ModelFacts(10, VOCAB_SIZE, (256,), max_logprobs))
    for wanted in accepted:
        sampling = SamplingParams(**{name: wanted})  # pyright: ignore[reportArgumentType]
        assert getattr(processor.process(GenerateRequest("a", sampling)).sampling, name) == wanted
    for wanted in refused:
        with pytest.raises(RequestError, match=f"greater than max allowed: {max(accepted)}") as caught:
            processor.process(GenerateRequest("a", SamplingParams(**{name: wanted})))  # pyright: ignore[reportArgumentType]
        assert caught.value.param == name


def test_a_prompt_may_fill_the_context_when_only_its_log_probabilities_are_asked_for() -> None:
    """Case 36 (vllm 6521)."""
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=1)
    assert PROCESSOR.process(GenerateRequest("x" * 10, scoring)).sampling.max_tokens == 0
    assert isinstance(refusal(GenerateRequest("x" * 11, scoring)), PromptTooLongError)
    assert refusal(GenerateRequest("x", SamplingParams(max_tokens=0))).param == "max_tokens"


def test_small_temperatures_and_shares_are_fine() -> None:
    """Case 35 (vllm 1623)."""
    sampling = SamplingParams(temperature=1e-4, top_p=1e-4)
    assert PROCESSOR.process(GenerateRequest("a", sampling)).sampling == attrs.evolve(sampling, max_tokens=9)
    for name in ("temperature", "top_p"):
        assert refusal(GenerateRequest("a", SamplingParams(**{name: math.nan}))).param == name  # pyright: ignore[reportArgumentType]


def test_what_belongs_to_the_request_is_kept() -> None:
    processed = PROCESSOR.process(GenerateRequest("a", priority=-5, cache_salt="mine", lora="b", reasoning_ended=True))
    assert (processed.priority, processed.cache_salt, processed.reasoning_ended) == (-5, "mine", True)
    assert processed.lora == "b"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("priority", [2**31, -(2**31) - 1, 1.0, True, None, "1"]),
        ("cache_salt", ["", "x" * (MAX_CACHE_SALT_CHARS + 1), 5, "\ud800", b"x"]),
        ("lora", ["", "x" * (MAX_LORA_NAME_CHARS + 1), 5, "\ud800", b"x"]),
        ("reasoning_ended", [1, "yes"]),
    ],
)
def test_what_belongs_to_the_request_is_checked(name: str, values: list[Any]) -> None:
    for value in values:
        assert refusal(GenerateRequest("a", **{name: value})).param == name


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (GenerateRequest("a\ud800"), "prompt"),
        (GenerateRequest("a", request_id="\ud800"), "request_id"),
        (GenerateRequest("a", SamplingParams(stop="\udfff")), "stop[0]"),
    ],
)
def test_lone_surrogates_are_refused_wherever_they_are(request_: GenerateRequest, param: str | None) -> None:
    """Case 42: they are no characters, and could not be sent."""
    error = refusal(request_)
    assert error.param == param
    assert "surrogate" in str(error)


def test_a_request_id_is_a_text() -> None:
    assert refusal(GenerateRequest("a", request_id=5)).param == "request_id"  # type: ignore[arg-type]


def test_a_null_byte_is_a_character() -> None:
    assert PROCESSOR.process(GenerateRequest("\0")).prompt_token_ids == (0,)


def test_ignore_eos_gives_the_core_no_end_tokens() -> None:
    assert PROCESSOR.process(GenerateRequest("a", SamplingParams(ignore_eos=True))).eos_token_ids == ()


def test_end_tokens_are_those_of_the_model_and_of_its_tokenizer() -> None:
    """Each once, and none that the model has no row for."""
    tokenizer = FakeTokenizer()
    assert tokenizer.eos_token_ids == (256,)

    def end_token_ids(*, vocab_size: int, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        processor = InputProcessor(tokenizer, ModelFacts(10, vocab_size, eos_token_ids))
        return processor.process(GenerateRequest("a")).eos_token_ids

    assert end_token_ids(vocab_size=VOCAB_SIZE, eos_token_ids=(7, 256)) == (7, 256)
    assert end_token_ids(vocab_size=VOCAB_SIZE, eos_token_ids=(7,)) == (7, 256)
    assert end_token_ids(vocab_size=200, eos_token_ids=(7,)) == (7,)


def test_seeds_of_the_same_source_are_the_same() -> None:
    def drawn(seed: int) -> list[int]:
        processor = attrs.evolve(PROCESSOR, seeds=random.Random(seed))
        return [processor.process(GenerateRequest("a")).seed for _ in range(3)]

    assert drawn(0) == drawn(0)
    assert len({*drawn(0), *drawn(1)}) == 6


@pytest.mark.parametrize(("seed", "sent"), [(0, 0), (7, 7), (-2, 2**64 - 2), (2**64 - 1, 2**64 - 1)])
def test_a_seed_is_kept_as_64_unsigned_bits(seed: int, sent: int) -> None:
    assert PROCESSOR.process(GenerateRequest("a", SamplingParams(seed=seed))).seed == sent


def test_seeds_and_ids_are_drawn_when_not_given() -> None:
    first, second = (PROCESSOR.process(GenerateRequest("a")) for _ in range(2))
    assert first.external_id != second.external_id
    assert first.seed != second.seed
    assert max(PROCESSOR.process(GenerateRequest("a")).seed for _ in range(100)) > 2**60
    assert PROCESSOR.process(GenerateRequest("a", request_id="mine")).external_id == "mine"


def test_long_prompts_are_recognized_before_they_are_tokenized() -> None:
    long, short = "x" * (LONG_PROMPT_CHARS + 1), "x" * LONG_PROMPT_CHARS
    assert PROCESSOR.is_long(GenerateRequest(long))
    assert not PROCESSOR.is_long(GenerateRequest(short))
    assert PROCESSOR.is_long(GenerateRequest([1] * (8 * LONG_PROMPT_CHARS + 1)))
    assert not PROCESSOR.is_long(GenerateRequest([1] * 100))
    halves = [{"role": "user", "content": "x" * (LONG_PROMPT_CHARS // 2 + 1)}] * 2
    assert PROCESSOR.is_long(GenerateRequest(ChatPrompt(halves)))
    assert not PROCESSOR.is_long(GenerateRequest(ChatPrompt([{"role": "user", "content": None}, {"role": "user"}])))
    assert PROCESSOR.is_long(GenerateRequest(ChatPrompt([{"role": "user", "content": "x"}] * 200)))
