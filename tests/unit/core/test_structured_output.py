"""Masks, and how a grammar follows an answer. Real tokens, no model."""

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trioengine.checkpoint.locate import resolve_model
from trioengine.config.engine import ReasoningParser
from trioengine.config.env import cache_dir
from trioengine.core.executor import TokenMasks
from trioengine.core.structured_output import MAX_CACHED_GRAMMARS, Grammar, MaskEntry, StructuredOutputs
from trioengine.errors import EngineGenerateError, RequestError
from trioengine.testing.core_driver import CoreDriver, make_core_config, make_core_request
from trioengine.testing.fake_executor import generate_alone
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.types.params import SamplingParams
from trioengine.types.structured import StructuredOutputsParams

PATIENCE_S = 30
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Structured:
    """`StructuredOutputs` as a core has it, woken by its threads."""

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        self.tokenizer = tokenizer
        self.num_loads = 0
        self._woken = threading.Event()
        self.outputs = StructuredOutputs(
            self._load, **{"vocab_size": tokenizer.vocab_size, "wake": self._woken.set} | options
        )
        self.mask = self.outputs.masks
        ends = frozenset(tokenizer.eos_token_ids)
        self.closes = np.array(
            [t in ends or tokenizer.token_bytes(t)[:1] in (b'"', b"}", b"]", b",") for t in range(tokenizer.vocab_size)]
        )
        """By token: whether it ends a part of JSON, or the answer."""

    def _load(self) -> Tokenizer:
        self.num_loads += 1
        return self.tokenizer

    def start(
        self,
        prompt: str = "",
        ends: Sequence[int] | None = None,
        ended: bool | None = None,
        budget: int | None = None,
        **form: Any,
    ) -> Grammar:
        token_ids = self.tokenizer.encode(prompt, allow_special=True)
        end_token_ids = self.tokenizer.eos_token_ids if ends is None else ends
        params = StructuredOutputsParams(**form) if form else None
        return self.outputs.start(params, token_ids, end_token_ids, ended, budget)

    def wait(self, *grammars: Grammar) -> None:
        while not all(grammar.is_ready or grammar.error for grammar in grammars):
            assert self._woken.wait(PATIENCE_S)
            self._woken.clear()
            self.outputs.poll()

    def ready(
        self,
        prompt: str = "",
        ends: Sequence[int] | None = None,
        ended: bool | None = None,
        budget: int | None = None,
        **form: Any,
    ) -> Grammar:
        grammar = self.start(prompt, ends, ended, budget, **form)
        self.wait(grammar)
        assert grammar.error is None
        return grammar

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, allow_special=True)

    def allowed(self, grammar: Grammar, drafts: Sequence[int] = ()) -> list[set[int]]:
        """What each row of a sequence's masks allows; nothing when it is free."""
        masks = self.outputs.masks([MaskEntry(0, grammar, drafts)])
        return [] if masks is None else [tokens_of(masks, row) for row in range(len(masks.bits))]


def token_array(masks: TokenMasks, row: int) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(masks.bits[row].view(np.uint8), bitorder="little"))


def tokens_of(masks: TokenMasks, row: int) -> set[int]:
    return set(token_array(masks, row).tolist())


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(None, cache_dir=cache_dir()))


@pytest.fixture(scope="module")
def structured(tokenizer: Tokenizer) -> Iterator[Structured]:
    made = Structured(tokenizer)
    yield made
    made.outputs.close()


@pytest.fixture
def make_structured(tokenizer: Tokenizer) -> Iterator[Callable[..., Structured]]:
    made: list[Structured] = []

    def make(**options: Any) -> Structured:
        made.append(Structured(tokenizer, **options))
        return made[-1]

    yield make
    for one in made:
        one.outputs.close()


def test_nothing_is_loaded_before_the_first_grammar(make_structured: Callable[..., Structured]) -> None:
    structured = make_structured()
    assert structured.outputs.poll() == []
    assert structured.num_loads == 0
    structured.ready(regex="a")
    structured.ready(regex="b")
    assert structured.num_loads == 1


def test_a_core_starts_without_the_compiler_of_grammars() -> None:
    program = "import sys, trioengine.core.engine_core as _; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], timeout=PATIENCE_S * 2).returncode == 0


def test_a_form_compiles_once(make_structured: Callable[..., Structured]) -> None:
    """Requests that come while it compiles wait for the same; those that come later find it ready."""
    structured = make_structured()
    first, second = structured.start(json=PERSON), structured.start(json=PERSON)
    assert not first.is_ready
    structured.wait(first, second)
    assert structured.start(json=PERSON).is_ready
    first.accept(structured.ids('{"name'))
    assert structured.allowed(second)[0] != structured.allowed(first)[0]


def test_the_form_used_least_lately_is_forgotten(make_structured: Callable[..., Structured]) -> None:
    structured = make_structured()
    for index in range(MAX_CACHED_GRAMMARS):  # One by one, as threads that compile them may overtake each other.
        structured.ready(regex=f"a{index}")
    assert structured.start(regex="a0").is_ready
    structured.ready(regex="b")
    assert structured.start(regex="a0").is_ready
    assert not structured.start(regex="a1").is_ready


def test_a_form_that_does_not_compile_fails_alone(structured: Structured) -> None:
    good, bad, other = structured.start(regex="ab"), structured.start(regex="("), structured.start(regex="cd")
    structured.wait(good, bad, other)
    assert isinstance(bad.error, RequestError)
    assert bad.error.param == "structured_outputs.regex"
    assert not bad.is_ready
    assert good.is_ready
    assert other.is_ready
    with pytest.raises(RequestError):
        structured.start(choice=())


def test_an_abandoned_grammar_is_not_reported(make_structured: Callable[..., Structured]) -> None:
    structured = make_structured()
    gone, kept = structured.start(regex="a"), structured.start(regex="b")
    structured.outputs.abandon(gone)
    structured.wait(kept)
    assert not gone.is_ready
    structured.outputs.abandon(kept)
    assert structured.ready(regex="a")


def test_masks_allow_what_goes_on_with_the_text(structured: Structured) -> None:
    grammar = structured.ready(choice=("yes", "no"))
    texts = {structured.tokenizer.token_bytes(token_id) for token_id in structured.allowed(grammar)[0]}
    assert texts == {b"y", b"ye", b"yes", b"n", b"no"}


def test_rows_of_several_sequences_are_in_one_buffer(structured: Structured) -> None:
    first, second, third = (structured.ready(regex=form) for form in ("[0-9][xy]", "[xy]", "[uv]"))
    zero, x, u = (structured.ids(text)[0] for text in "0xu")
    masks = structured.mask([MaskEntry(7, first, [zero]), MaskEntry(2, second), MaskEntry(3, third)])
    assert masks is not None
    assert masks.first_rows == {7: 0, 2: 2, 3: 3}
    assert masks.bits.shape == (4, -(-structured.tokenizer.vocab_size // 32))
    assert [[t in tokens_of(masks, row) for t in (zero, x, u)] for row in range(4)] == [
        [True, False, False],
        [False, True, False],
        [False, True, False],
        [False, False, True],
    ]
    assert structured.mask([]) is None


def test_masks_stay_valid_while_those_of_the_next_step_are_made(structured: Structured) -> None:
    first, second = structured.ready(regex="ab"), structured.ready(regex="cd")
    masks = structured.mask([MaskEntry(0, first)])
    assert masks is not None
    before = masks.bits.copy()
    structured.mask([MaskEntry(0, second)])
    assert (masks.bits == before).all()


def test_drafts_have_a_row_each_and_move_nothing(structured: Structured) -> None:
    """Row after row, masks for drafts are those that follow when the drafts are accepted."""
    text = structured.ids('{"name": "Al", "age": 7}')
    ahead, behind = structured.ready(json=PERSON), structured.ready(json=PERSON)
    assert ahead.num_allowed(text) == len(text)
    rows = structured.allowed(ahead, text)
    assert structured.allowed(ahead, text) == rows
    # Behind the end nothing counts, so nothing is forbidden there either.
    assert len(rows[-1]) == structured.tokenizer.vocab_size
    for token_id, row in zip(text, rows, strict=False):
        assert structured.allowed(behind) == [row]
        assert token_id in row
        assert behind.accept([token_id]) == 1
    assert behind.is_complete
    assert not ahead.is_complete


def test_drafts_are_trimmed_to_what_is_allowed(structured: Structured) -> None:
    grammar = structured.ready(json=PERSON)
    good, bad = structured.ids('{"name'), structured.ids("[1")
    assert grammar.num_allowed([*good, *bad]) == len(good)
    assert grammar.num_allowed(bad) == 0
    assert grammar.num_allowed([]) == 0


def test_drafts_that_are_not_allowed_only_widen_no_mask(structured: Structured) -> None:
    grammar = structured.ready(choice=("yes", "no"))
    drafts = structured.ids("xx")
    rows = structured.allowed(grammar, drafts)
    assert len(rows) == 1 + len(drafts)
    assert drafts[0] not in rows[0]
    assert rows[0] == structured.allowed(grammar)[0]


def test_forced_tokens_are_the_only_ones_that_masks_allow(structured: Structured) -> None:
    grammar = structured.ready(json={"const": {"hello": ["world", 1]}}, whitespace_pattern="")
    forced = grammar.forced_tokens(100)
    assert structured.tokenizer.decode(forced).startswith('{"hello":["world')
    assert not grammar.is_complete
    assert grammar.forced_tokens(2) == forced[:2]
    assert grammar.forced_tokens(0) == []
    rows = structured.allowed(grammar, forced)
    assert rows[:-1] == [{token_id} for token_id in forced]
    for token_id in forced:
        assert structured.allowed(grammar) == [{token_id}]
        grammar.accept([token_id])
    assert bool(grammar.is_complete) == (len(rows[-1]) == structured.tokenizer.vocab_size)


def test_the_end_of_the_form_is_the_end_of_the_answer(structured: Structured) -> None:
    """Also in the middle of a step's tokens, whatever stands behind, and without an end token."""
    end = structured.tokenizer.eos_token_ids[0]
    text = structured.ids('{"a": 1}')
    for ends in (None, ()):
        grammar = structured.ready(ends=ends, json_object=True)
        assert grammar.accept([*text, end, *text]) == len(text)
        assert grammar.is_complete
        assert grammar.accept(text) == 0
        assert grammar.forced_tokens(5) == []
        assert grammar.num_allowed(text) == 0


def test_an_end_token_ends_where_the_text_may_end(structured: Structured) -> None:
    end = structured.tokenizer.eos_token_ids[0]
    grammar = structured.ready(regex="[0-9]+")
    assert end not in structured.allowed(grammar)[0]
    grammar.accept(structured.ids("12"))
    assert not grammar.is_complete
    assert set(structured.tokenizer.eos_token_ids) <= structured.allowed(grammar)[0]
    assert grammar.accept([end, end]) == 1
    assert grammar.is_complete


def test_only_the_requests_own_end_tokens_may_come(structured: Structured) -> None:
    own, text = 5, structured.ids("12")
    assert own not in structured.tokenizer.eos_token_ids
    for ends in ((), (own,)):
        grammar = structured.ready(ends=ends, regex="[0-9]+")
        grammar.accept(text)
        allowed = structured.allowed(grammar)[0]
        assert allowed.isdisjoint(structured.tokenizer.eos_token_ids)
        assert (own in allowed) == bool(ends)
        assert len(allowed) > 5


def test_a_token_that_does_not_fit_is_an_error(structured: Structured) -> None:
    grammar = structured.ready(regex="[a-z]{20}")
    letters = [structured.ids("a")[0], structured.ids("b")[0]]
    assert grammar.accept([*letters, structured.ids("7")[0], *letters]) == 2
    assert isinstance(grammar.error, EngineGenerateError)
    assert not grammar.is_complete


def test_a_grammar_past_a_limit_fails_alone(structured: Structured) -> None:
    """One that compiles, and has too many states once the text is in it."""
    hard = structured.ready(json={"type": "string", "pattern": "^" + "(" * 30 + "a" + "){1,9}" * 30 + "$"})
    easy = structured.ready(json_object=True)
    quote = structured.ids('"a')
    hard.accept(quote[:1])
    masks = None
    for _ in range(50):
        if hard.error is not None:
            break
        masks = structured.mask([MaskEntry(0, easy), MaskEntry(1, hard)])
        if hard.error is None:
            hard.accept(structured.ids("a"))
    assert isinstance(hard.error, EngineGenerateError)
    assert "too complex" in hard.error.message
    assert easy.error is None
    assert masks is not None
    assert structured.ids("{")[0] in tokens_of(masks, masks.first_rows[0])


REASONING = "<|im_start|>assistant\n<think>\n"


def test_reasoning_is_free_and_the_answer_is_bound(make_structured: Callable[..., Structured]) -> None:
    structured = make_structured(reasoning_parser=ReasoningParser.QWEN3)
    grammar = structured.ready(prompt=REASONING, choice=("yes", "no"))
    thought = structured.ids("maybe not</think>")
    assert structured.allowed(grammar) == []
    assert grammar.forced_tokens(5) == []
    assert grammar.accept(thought[:-1]) == len(thought) - 1
    assert structured.allowed(grammar, thought[:1]) == []
    assert grammar.accept([*thought[-1:], *structured.ids("yes"), *thought]) == 1 + len(structured.ids("yes"))
    assert grammar.is_complete


def test_drafts_are_bound_behind_the_end_of_reasoning(make_structured: Callable[..., Structured]) -> None:
    structured = make_structured(reasoning_parser=ReasoningParser.DEEPSEEK_R1)
    grammar = structured.ready(prompt=REASONING, choice=("yes", "no"))
    thought, answer, other = structured.ids("hm</think>"), structured.ids("yes"), structured.ids(" maybe")
    assert grammar.num_allowed([*thought, *answer]) == len(thought) + len(answer)
    assert grammar.num_allowed([*thought, *other]) == len(thought)
    assert grammar.num_allowed(thought) == len(thought)
    assert grammar.num_allowed(other) == len(other)
    rows = structured.allowed(grammar, thought)
    assert [len(row) == structured.tokenizer.vocab_size for row in rows] == [True] * len(thought) + [False]
    assert rows[-1] == structured.allowed(structured.ready(choice=("yes", "no"), ended=True))[0]


@pytest.mark.parametrize(
    ("prompt", "ended", "bound"),
    [
        ("", None, False),
        (REASONING, None, False),
        (REASONING, True, True),
        (REASONING + "\n</think>\n\n", None, True),
        (REASONING + "</think>", False, False),
    ],
)
def test_the_prompt_says_whether_reasoning_is_over_unless_the_request_does(
    prompt: str, ended: bool | None, bound: bool, make_structured: Callable[..., Structured]
) -> None:
    structured = make_structured(reasoning_parser=ReasoningParser.QWEN3)
    grammar = structured.ready(prompt=prompt, ended=ended, choice=("yes", "no"))
    assert bool(structured.allowed(grammar)) is bound


def test_without_a_reasoning_parser_the_first_token_is_bound(structured: Structured) -> None:
    assert structured.allowed(structured.ready(prompt=REASONING, choice=("yes", "no")))


NAMES = st.sampled_from(["a", "b", "some name", 'q"\\', "é"])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from(
        [
            {"type": "integer"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string"},
            {"type": "string", "maxLength": 3},
            {"type": "string", "minLength": 2, "maxLength": 6, "pattern": '^[^"]+b?$'},
            {"type": "string", "format": "date"},
            {"enum": ["x", 1, None, [1, {"k": "v"}], 'a"b']},
            {"const": {"k": [True, 0.5]}},
            {"type": "number", "minimum": -2, "exclusiveMaximum": 7.5},
            {"type": "integer", "multipleOf": 7},
            {"type": ["string", "null"], "maxLength": 2},
        ]
    ),
    st.tuples(st.integers(-20, 20), st.integers(0, 20)).map(
        lambda bounds: {"type": "integer", "minimum": bounds[0], "maximum": bounds[0] + bounds[1]}
    ),
)


def larger(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.builds(
        lambda properties, flags, additional: {
            "type": "object",
            "properties": properties,
            "required": [name for name, flag in zip(properties, flags, strict=False) if flag],
            "additionalProperties": additional,
        },
        st.dictionaries(NAMES, parts, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
        st.one_of(st.just(False), parts),
    )
    arrays = st.builds(
        lambda items, prefix, low, extra: {
            "type": "array",
            "items": items,
            "prefixItems": prefix,
            "minItems": low,
            "maxItems": low + extra,
        },
        parts,
        st.lists(parts, min_size=1, max_size=2),
        st.integers(0, 2),
        st.integers(1, 2),
    )
    return st.one_of(objects, arrays, st.lists(parts, min_size=1, max_size=3).map(lambda options: {"anyOf": options}))


SCHEMAS = st.recursive(LEAVES, larger, max_leaves=6)


def walk(structured: Structured, grammar: Grammar, seed: int, max_tokens: int = 150) -> list[int] | None:
    """Sample what masks allow, with forced tokens as drafts; the answer, or None when it has no end in sight.

    Tokens that close something are preferred more and more, so that most walks end.
    """
    choose = random.Random(seed)
    tokenizer = structured.tokenizer
    answer: list[int] = []
    while len(answer) < max_tokens:
        drafts = grammar.forced_tokens(choose.randrange(4))
        masks = structured.mask([MaskEntry(0, grammar, drafts)])
        assert masks is not None
        new: list[int] = []
        for row, draft in enumerate([*drafts, None]):
            allowed = token_array(masks, row)
            assert len(allowed), "nothing is allowed"
            closing = allowed[structured.closes[allowed]]
            pool = closing if len(closing) and choose.random() < 0.2 + len(answer) / 50 else allowed
            new.append(int(pool[choose.randrange(len(pool))]))
            if new[-1] != draft:
                break
        assert new[: len(drafts)] == drafts, "a forced token was not accepted"
        num_taken = grammar.accept(new)
        assert grammar.error is None
        answer += [token_id for token_id in new[:num_taken] if token_id not in tokenizer.eos_token_ids]
        if grammar.is_complete:
            return answer
        assert num_taken == len(new)
    return None


@settings(max_examples=40)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_masks_allow_is_json_of_the_schema(structured: Structured, schema: dict[str, Any], seed: int) -> None:
    grammar = structured.start(json=json.dumps(schema))
    structured.wait(grammar)
    if grammar.error is not None:
        assert "unsatisfiable" in grammar.error.message.lower() or "no text" in grammar.error.message
        return
    answer = walk(structured, grammar, seed)
    if answer is not None:
        value = json.loads(structured.tokenizer.decode(answer))
        assert jsonschema_rs.is_valid(schema, value, validate_formats=True)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"(ab|c[0-9]{1,3}){1,4}"},
        {"choice": ("one", "one two", "three")},
        {"grammar": 'start: "(" start ")" | "x"'},
        {"json_object": True},
    ],
)
def test_walks_of_other_forms_end_where_the_form_does(structured: Structured, form: Any, seed: int) -> None:
    answer = walk(structured, structured.ready(**form), seed)
    if answer is not None:
        again = structured.ready(**form)
        assert again.accept(answer) == len(answer)
        assert again.is_complete or structured.tokenizer.eos_token_ids[0] in structured.allowed(again)[0]


def test_json_objects_end_with_their_brace_and_white_space_is_bounded(structured: Structured) -> None:
    """A model that would write white space for ever cannot."""
    grammar = structured.ready(json_object=True)
    spaces = [t for t in range(structured.tokenizer.vocab_size) if structured.tokenizer.token_bytes(t).isspace()]
    grammar.accept(structured.ids("{"))
    num_chars = 0
    while blank := structured.allowed(grammar)[0].intersection(spaces):
        token_id = max(blank, key=lambda t: len(structured.tokenizer.token_bytes(t)))
        num_chars += len(structured.tokenizer.token_bytes(token_id))
        grammar.accept([token_id])
        assert num_chars <= 22
    assert num_chars > 0
    grammar.accept(structured.ids('"a": 1}'))
    assert grammar.is_complete


# Limits of reasoning


def test_a_budget_without_a_reasoning_parser_is_refused(structured: Structured) -> None:
    with pytest.raises(RequestError, match="reasoning_parser") as caught:
        structured.start(budget=5)
    assert caught.value.param == "thinking_token_budget"


def test_a_budget_binds_the_end_of_reasoning_and_nothing_else(make_structured: Callable[..., Structured]) -> None:
    """An answer without a form is free before and behind it, and needs nobody's attention any more then."""
    structured = make_structured(reasoning_parser=ReasoningParser.QWEN3)
    grammar = structured.ready(budget=2)
    end, words = structured.ids("</think>"), structured.ids(" so it is")
    assert structured.allowed(grammar) == []
    assert structured.allowed(grammar, words[:1]) == []
    assert grammar.num_allowed(words) == 2
    everything = set(range(structured.tokenizer.vocab_size))
    assert structured.allowed(grammar, words[:2]) == [everything, everything, {end[0]}]
    assert grammar.accept(words[:2]) == 2
    assert grammar.forced_tokens(100) == end
    assert grammar.num_allowed([*end, *words]) == len(end) + len(words)
    assert structured.allowed(grammar, end) == [*({token} for token in end), everything]
    assert not grammar.is_free
    assert grammar.accept([*end, *words]) == len(end) + len(words)
    assert (grammar.is_free, grammar.error, grammar.is_complete) == (True, None, False)
    assert structured.allowed(grammar, words) == []


def test_behind_a_spent_budget_the_form_binds(make_structured: Callable[..., Structured]) -> None:
    structured = make_structured(reasoning_parser=ReasoningParser.QWEN3)
    bound = structured.ready(ended=True, choice=("yes", "no"))
    grammar = structured.ready(budget=1, choice=("yes", "no"))
    end = structured.ids("</think>")
    drafts = [*structured.ids(" so")[:1], *end]
    rows = structured.allowed(grammar, drafts)
    assert rows[1:] == [*({token} for token in end), *structured.allowed(bound)]
    assert grammar.accept(drafts) == len(drafts)
    assert structured.allowed(grammar) == structured.allowed(bound)
    assert not grammar.is_free


@pytest.mark.parametrize(("prompt", "ended"), [("<think></think>", None), ("", True)])
def test_where_reasoning_is_over_a_budget_binds_nothing(
    prompt: str, ended: bool | None, make_structured: Callable[..., Structured]
) -> None:
    structured = make_structured(reasoning_parser=ReasoningParser.QWEN3)
    assert structured.ready(prompt, ended=ended, budget=0).is_free


def test_a_token_that_ignores_the_spent_budget_fails_its_request(make_structured: Callable[..., Structured]) -> None:
    """The mask allows one, so other rules have forbidden that."""
    structured = make_structured(reasoning_parser=ReasoningParser.QWEN3)
    grammar = structured.ready(budget=0)
    assert grammar.accept(structured.ids(" so")) == 0
    assert isinstance(grammar.error, EngineGenerateError)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_core_ends_reasoning_in_time(async_scheduling: bool, make_structured: Callable[..., Structured]) -> None:
    """The tokens before and behind are those of the model, and those beside it are unaffected."""
    structured = make_structured(reasoning_parser=ReasoningParser.QWEN3)
    vocab_size = structured.tokenizer.vocab_size
    structured.ready(budget=0)  # What it takes is there now, so that no request waits.
    config = attrs.evolve(make_core_config(vocab_size=vocab_size), async_scheduling=async_scheduling)
    driver = CoreDriver(config, structured_outputs=structured.outputs)
    sampling = SamplingParams(max_tokens=12, thinking_token_budget=4)
    bound = driver.add(make_core_request(0, (1, 2), sampling=sampling))
    ended = driver.add(attrs.evolve(make_core_request(1, (1, 2), sampling=sampling), reasoning_ended=True))
    beside = driver.add(make_core_request(2, (3, 4), max_tokens=30))
    driver.run()
    end, alone = structured.ids("</think>"), generate_alone((1, 2), 12, vocab_size=vocab_size)
    behind = generate_alone((1, 2, *alone[:4], *end), 12 - 4 - len(end), vocab_size=vocab_size)
    assert bound.tokens == [*alone[:4], *end, *behind]
    assert ended.tokens == alone
    assert beside.tokens == generate_alone((3, 4), 30, vocab_size=vocab_size)
