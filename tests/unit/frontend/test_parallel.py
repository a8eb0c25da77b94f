"""Several answers of one request: children with seeds of their own, one admission, one failure, one usage."""

import itertools
import random
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioengine.errors import EngineGenerateError, UnavailableError
from trioengine.frontend.admission import AdmissionLimits
from trioengine.testing.frontend_driver import DrivenRequest, FrontendDriver, RecordingStatLogger
from trioengine.tokenizer import stop_matcher
from trioengine.types.codec import error_to_data
from trioengine.types.messages import Finished, LogprobColumns, pack_int32
from trioengine.types.output import FinishReason, RequestOutput
from trioengine.types.params import RequestOutputKind


def texts(output: RequestOutput) -> dict[int, str]:
    assert [answer.index for answer in output.outputs] == sorted(answer.index for answer in output.outputs)
    return {answer.index: answer.text for answer in output.outputs}


def columns(slot: int, num_tokens: int) -> LogprobColumns:
    ones = pack_int32([1] * num_tokens)
    slots = pack_int32([slot] * num_tokens)
    return LogprobColumns(slots, ones, ones, pack_int32([97] * num_tokens), bytes(4 * num_tokens))


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(5, [5, 6, 7]), (2**64 - 2, [2**64 - 2, 2**64 - 1, 0]), (-2, [2**64 - 2, 2**64 - 1, 0])],
)
def test_each_answer_has_a_seed_a_slot_and_a_name_of_its_own(seed: int, seeds: list[int]) -> None:
    front = FrontendDriver()
    request = front.add("abc", n=3, seed=seed, request={"request_id": "mine", "priority": 4})
    assert [message.seed for message in request.messages] == seeds
    assert len(set(request.slots)) == 3
    assert len({message.request_id for message in request.messages}) == 3
    for message in request.messages:
        assert message.request_id.startswith("mine-")
        assert message.sampling.n == 1
        assert message.priority == 4
        assert message.prompt_token_ids == request.messages[0].prompt_token_ids


def test_stop_strings_are_prepared_once_and_found_in_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones take time and memory, which must not be multiplied by a request's answers."""
    prepared: list[object] = []
    prepare = stop_matcher._Automaton.__init__

    def count(automaton: Any, stops: Any) -> None:
        prepared.extend(stops)
        prepare(automaton, stops)

    monkeypatch.setattr(stop_matcher._Automaton, "__init__", count)
    front = FrontendDriver()
    request = front.add(n=3, stop=["end", "no"], output_kind=RequestOutputKind.CUMULATIVE)
    assert prepared == ["end", "no"]
    a, b, c = request.slots
    front.step((a, "ae"), (b, "ben"), (c, "c"))
    front.step((a, "nd"), (b, "no"), (c, "de"))
    front.step((c, "nd"))
    answers = request.read().outputs
    assert [(answer.text, answer.stop_reason) for answer in answers] == [("a", "end"), ("ben", "no"), ("cd", "end")]


def test_names_differ_between_front_ends_of_one_core() -> None:
    names = [FrontendDriver().add(request={"request_id": "x"}).messages[0].request_id for _ in range(50)]
    assert len(set(names)) == 50


def test_deltas_have_what_is_new_by_index() -> None:
    front = FrontendDriver()
    request = front.add(n=3)
    a, b, c = request.slots
    front.step((c, "x"), (a, "y"))
    output = request.read()
    assert texts(output) == {0: "y", 2: "x"}
    assert not output.finished
    assert output.num_generated_tokens == 2
    front.step((b, "1"))
    front.step((b, "23"), (a, "z"), finished=[Finished(b, FinishReason.LENGTH)])
    output = request.read()
    assert texts(output) == {0: "z", 1: "123"}
    assert [answer.finish_reason for answer in output.outputs] == [None, FinishReason.LENGTH]
    assert not output.finished
    assert output.num_generated_tokens == 6
    front.finish(a, c)
    output = request.read()
    assert texts(output) == {0: "", 2: ""}
    assert output.finished
    assert front.frontend.num_open_requests == front.frontend.num_reserved_slots == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_kinds_of_output_are_equal(seed: int) -> None:
    """Joined deltas, the last cumulative output and the only final one, however they are read; one ending for each
    index. Case 44 (vllm 8625): so are the counts of tokens.
    """
    whole: list[tuple[Any, ...]] = []
    for kind in RequestOutputKind:
        chance, reads = random.Random(seed), random.Random(seed + kind)
        front = FrontendDriver()
        request = front.add(n=3, output_kind=kind, max_tokens=50)
        slots = dict(enumerate(request.slots))
        outputs: list[RequestOutput] = []
        while slots:
            rows = [(slot, "".join(chance.choices("abc", k=chance.randint(1, 2)))) for slot in slots.values()]
            rows = chance.sample(rows, chance.randint(1, len(rows)))
            ended = [index for index, slot in slots.items() if chance.random() < 0.2]
            front.step(*rows, finished=[Finished(slots.pop(index), FinishReason.LENGTH) for index in ended])
            if kind is not RequestOutputKind.FINAL_ONLY and slots and reads.random() < 0.5:
                outputs.append(request.read())
        outputs.append(request.read())
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if kind is RequestOutputKind.DELTA:
            answers = [[each for output in outputs for each in output.outputs if each.index == i] for i in range(3)]
            assert [sum(each.finish_reason is not None for each in answer) for answer in answers] == [1, 1, 1]
            whole.append(
                tuple(("".join(e.text for e in parts), sum((e.token_ids for e in parts), ())) for parts in answers)
            )
        else:
            last = outputs[-1].outputs
            assert [each.index for each in last] == [0, 1, 2]
            assert all(each.finish_reason is FinishReason.LENGTH for each in last)
            whole.append(tuple((each.text, each.token_ids) for each in last))
            for earlier, later in itertools.pairwise(outputs):
                now = texts(later)
                assert all(now[index].startswith(text) for index, text in texts(earlier).items())
        assert outputs[-1].num_generated_tokens == sum(len(token_ids) for _, token_ids in whole[-1])
    assert whole[0] == whole[1] == whole[2]


def test_what_belongs_to_the_prompt_comes_once_with_the_first_answer() -> None:
    """It is computed for the first only."""
    front = FrontendDriver()
    request = front.add("abc", n=2, prompt_logprobs=0)
    assert [message.sampling.prompt_logprobs for message in request.messages] == [0, None]
    a, b = request.slots
    front.step((b, "x"), cached_tokens=pack_int32([b, 2]))
    output = request.read()
    assert (output.prompt_logprobs, output.num_cached_tokens) == (None, 0)
    front.step(prompt_logprobs=columns(a, 2), cached_tokens=pack_int32([a, 1]))
    front.step((b, "y"))
    assert request.read().prompt_logprobs is None
    front.step((a, "z"))
    output = request.read()
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 3
    assert output.num_cached_tokens == 1
    front.step((a, "z"), (b, "z"))
    output = request.read()
    assert (output.prompt_logprobs, output.num_cached_tokens) == (None, 1)


def test_a_prompt_is_scored_without_answers() -> None:
    front = FrontendDriver()
    request = front.add("abc", n=2, max_tokens=0, prompt_logprobs=0)
    a, b = request.slots
    front.step(prompt_logprobs=columns(a, 2), finished=[Finished(slot, FinishReason.LENGTH) for slot in (a, b)])
    output = request.read()
    assert output.finished
    assert len(output.prompt_logprobs or ()) == 3
    assert texts(output) == {0: "", 1: ""}


def test_the_failure_of_one_ends_all_after_their_output() -> None:
    """Also what was held back for a stop string; the core is told to end the others."""
    front = FrontendDriver()
    request, other = front.add(n=3, stop="xyz"), front.add()
    a, b, c = request.slots
    front.step((a, "1x"), (b, "2xy"), (c, "3"), (other.slot, "o"))
    error = error_to_data(EngineGenerateError("broken"))
    front.step((b, "4"), finished=[Finished(b, FinishReason.ABORT, error=error)])
    assert isinstance(request.sink.error, EngineGenerateError)
    assert str(request.sink.error) == "broken"
    assert texts(request.read()) == {0: "1x", 1: "2xy4", 2: "3"}
    assert sorted(front.aborts()) == [(0, a), (0, c)]
    assert other.sink.error is None
    front.step((a, "late"), (c, "late"))
    front.finish(a, c, other.slot)
    assert front.frontend.num_reserved_slots == 0


def test_a_fault_in_one_answers_text_ends_all_of_this_request_only() -> None:
    front = FrontendDriver()
    request, other = front.add(n=2), front.add(n=2)

    class Broken:
        def feed(self, token_id: int) -> str:
            raise ValueError("broken")

    request.added.state.children[1]._detokenizer = Broken()  # type: ignore[attr-defined]
    front.step((request.slots[0], "a"), (request.slots[1], "b"), (other.slots[1], "c"))
    assert isinstance(request.sink.error, EngineGenerateError)
    assert texts(request.read()) == {0: "a"}
    assert texts(other.read()) == {1: "c"}
    assert sorted(front.aborts()) == [(0, slot) for slot in request.slots]


@pytest.mark.parametrize("way", ["abort", "drop"])
def test_a_cancel_ends_all_that_are_left(way: str) -> None:
    front = FrontendDriver()
    request = front.add(n=3, request={"request_id": "x"})
    a, b, c = request.slots
    front.step((a, "1"), finished=[Finished(a, FinishReason.LENGTH)])
    if way == "abort":
        front.frontend.abort("x")
        output = request.read()
        assert output.finished
        reasons = {answer.index: answer.finish_reason for answer in output.outputs}
        assert reasons == {0: FinishReason.LENGTH, 1: FinishReason.ABORT, 2: FinishReason.ABORT}
    else:
        front.frontend.drop(request.added.state)
        front.frontend.drop(request.added.state)
    assert front.aborts() == [(0, b), (0, c)]
    assert front.frontend.num_open_requests == 0
    front.finish(b, c)
    assert front.frontend.num_reserved_slots == 0


def test_a_stop_string_ends_one_answer_and_the_others_go_on() -> None:
    front = FrontendDriver()
    request = front.add(n=2, stop="b")
    a, b = request.slots
    front.step((a, "ab"), (b, "a"))
    assert front.aborts() == [(0, a)]
    assert front.frontend.num_open_requests == 1
    front.step((b, "c"), finished=[Finished(a, FinishReason.ABORT), Finished(b, FinishReason.LENGTH)])
    output = request.read()
    assert texts(output) == {0: "a", 1: "ac"}
    assert [answer.stop_reason for answer in output.outputs] == ["b", None]
    assert output.finished


def test_admission_is_decided_once_for_all() -> None:
    """Either all are sent, or none."""
    front = FrontendDriver(admission=AdmissionLimits(max_num_queued_reqs=4))
    first = front.add(n=3)
    with pytest.raises(UnavailableError):
        front.add(n=2)
    assert front.frontend.num_queued_requests == front.frontend.num_reserved_slots == 3
    front.step((first.slots[1], "x"))
    front.add(n=2)
    assert front.frontend.num_queued_requests == 4


def test_statistics_count_the_prompt_once_and_all_tokens() -> None:
    log = RecordingStatLogger()
    front = FrontendDriver(stat_loggers=[log])
    request = front.add("abc", n=2)
    a, b = request.slots
    front.now_s = 1.0
    front.step((a, "x"), cached_tokens=pack_int32([a, 1, b, 2]))
    front.now_s = 2.0
    front.step((b, "yz"), (a, "x"), finished=[Finished(a, FinishReason.LENGTH), Finished(b, FinishReason.LENGTH)])
    assert [record.num_prompt_tokens for record in log.records] == [3, 0]
    assert [record.num_cached_tokens for record in log.records] == [1, 0]
    assert [record.num_generated_tokens for record in log.records] == [1, 3]
    assert log.records[0].times_to_first_token_s == [1.0]
    assert log.records[1].times_to_first_token_s == []
    (finished,) = log.finished
    assert (finished.n, finished.num_prompt_tokens, finished.num_generated_tokens) == (2, 3, 4)
    assert (finished.finish_reason, finished.num_cached_tokens) == ("length", 1)
    assert (finished.time_to_first_token_s, finished.decode_s, finished.e2e_latency_s) == (1.0, 1.0, 2.0)


@settings(max_examples=40)
@given(st.data())
def test_answers_never_mix(data: st.DataObject) -> None:
    """Each gets its own tokens, whatever is interleaved, on two cores."""
    front = FrontendDriver(num_cores=2)
    requests: list[DrivenRequest] = []
    expected: dict[tuple[int, int], str] = {}
    got: dict[tuple[int, int], str] = {}
    live: dict[tuple[int, int], tuple[int, int]] = {}
    """Request and index by rank and slot."""

    def read(number: int) -> None:
        for answer in requests[number].read().outputs:
            got[number, answer.index] = got.get((number, answer.index), "") + answer.text

    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["add", "step", "step", "read"])):
            case "add":
                n = data.draw(st.integers(1, 3))
                request = front.add(n=n, max_tokens=900, request={"data_parallel_rank": data.draw(st.integers(0, 1))})
                for index, slot in enumerate(request.slots):
                    assert (request.rank, slot) not in live
                    live[request.rank, slot] = (len(requests), index)
                requests.append(request)
            case "step" if live:
                rank = data.draw(st.sampled_from(sorted({rank for rank, _ in live})))
                slots = data.draw(st.sets(st.sampled_from([slot for r, slot in live if r == rank]), min_size=1))
                ended = data.draw(st.sets(st.sampled_from(sorted(slots))))
                rows: list[tuple[int, str]] = []
                for slot in slots:
                    number, index = owner = live[rank, slot]
                    rows.append((slot, f"<{number}.{index}>"))
                    expected[owner] = expected.get(owner, "") + rows[-1][1]
                for slot in ended:
                    del live[rank, slot]
                front.step(*rows, rank=rank, finished=[Finished(slot, FinishReason.LENGTH) for slot in ended])
            case "read" if requests:
                read(data.draw(st.integers(0, len(requests) - 1)))
            case _:
                pass
    for number in range(len(requests)):
        read(number)
    assert {owner: text for owner, text in got.items() if text} == expected
    assert front.frontend.num_reserved_slots == len(live)
    assert front.frontend.num_open_requests == len({number for number, _ in live.values()})


def test_kept_outputs_never_change() -> None:
    front = FrontendDriver()
    request = front.add(n=2, output_kind=RequestOutputKind.CUMULATIVE)
    kept: list[tuple[RequestOutput, dict[str, Any]]] = []
    for _ in range(3):
        front.step(*((slot, "x") for slot in request.slots))
        output = request.read()
        kept.append((output, attrs.asdict(output)))
    for output, as_read in kept:
        assert attrs.asdict(output) == as_read
    assert texts(kept[-1][0]) == {0: "xxx", 1: "xxx"}
