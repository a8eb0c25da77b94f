"""Adapters in the core: who gets a slot, who waits, what is evicted, and what removal means."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioengine.config.engine import SchedulingPolicy
from trioengine.core.background import Job
from trioengine.errors import CheckpointError, RequestError, UnavailableError
from trioengine.testing.core_driver import Answer, CoreDriver, make_core_config, make_core_request
from trioengine.testing.fake_executor import BROKEN_LORA, generate_alone
from trioengine.types.codec import error_from_data
from trioengine.types.messages import AddLoRA, ListLoRAs, LoRAInfo, PinLoRA, RemoveLoRA, Sleep, WakeUp
from trioengine.types.output import FinishReason

VOCAB_SIZE = 1000
PROMPT = tuple(range(1, 12))


def make_driver(max_loras: int = 2, max_cpu_loras: int = 8, max_num_seqs: int = 8) -> CoreDriver:
    config = make_core_config(max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_num_seqs=max_num_seqs)
    return CoreDriver(config)


def add_all(driver: CoreDriver, *names: str) -> None:
    for name in names:
        driver.call(AddLoRA(name, f"/{name}"))


def alone(lora: str | None, num_tokens: int = 4, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    path = None if lora is None else f"/{lora}"
    return generate_alone(prompt, num_tokens, vocab_size=VOCAB_SIZE, lora_path=path)


def refusal(answer: Answer) -> RequestError:
    assert answer.finished is not None
    assert answer.finished.error is not None
    error = error_from_data(answer.finished.error)
    assert isinstance(error, RequestError)
    return error


def names_of(driver: CoreDriver) -> list[str]:
    return [info.name for info in driver.call(ListLoRAs())]


def test_sequences_of_one_step_have_their_own_adapters() -> None:
    driver = make_driver()
    add_all(driver, "a", "b")
    loras = ["a", None, "b", "a"]
    answers = [driver.add(make_core_request(slot, PROMPT, lora=lora)) for slot, lora in enumerate(loras)]
    driver.run()
    assert [answer.tokens for answer in answers] == [alone(lora) for lora in loras]
    assert len(driver.plans[0].scheduled) == 4
    assert {load.slot for load in driver.plans[0].lora_loads} == {1, 2}
    assert len({tuple(alone(lora)) for lora in loras}) == 3


@pytest.mark.parametrize("lora", ["a", "unknown", "", "x" * 5000])
def test_an_adapter_that_is_not_there_is_the_requests_fault(lora: str) -> None:
    """The neighbours do not notice."""
    driver = make_driver()
    add_all(driver, "b")
    answers = [driver.add(make_core_request(0, PROMPT, lora=lora)), driver.add(make_core_request(1, PROMPT, lora="b"))]
    driver.run()
    error = refusal(answers[0])
    assert error.param == "lora"
    assert len(error.message) < 300
    assert answers[1].tokens == alone("b")


def test_without_enable_lora_all_is_refused() -> None:
    driver = CoreDriver()
    assert "enable_lora" in refusal_of(driver, driver.add(make_core_request(0, PROMPT, lora="a"))).message
    for call in (AddLoRA("a", "/a"), RemoveLoRA("a"), PinLoRA("a")):
        with pytest.raises(RequestError, match="enable_lora"):
            driver.call(call)
    assert driver.call(ListLoRAs()) == ()


def refusal_of(driver: CoreDriver, answer: Answer) -> RequestError:
    driver.take_all()
    return refusal(answer)


def test_adapters_are_listed() -> None:
    driver = make_driver()
    add_all(driver, "a", "b")
    driver.call(PinLoRA("b"))
    assert driver.call(ListLoRAs()) == (LoRAInfo("a", "/a", is_pinned=False), LoRAInfo("b", "/b", is_pinned=True))


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_is_checked(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_driver().call(AddLoRA(name, "/a"))
    assert caught.value.param == "name"


def test_an_adapter_that_cannot_be_read_changes_nothing() -> None:
    driver = make_driver(max_cpu_loras=2)
    add_all(driver, "a", "b")
    with pytest.raises(CheckpointError):
        driver.call(AddLoRA("c", BROKEN_LORA))
    with pytest.raises(RequestError, match="'a' already"):
        driver.call(AddLoRA("a", "/other"))
    assert names_of(driver) == ["a", "b"]
    assert set(driver.executor.loras.values()) == {"/a", "/b"}


# Slots


def num_loras_at_once(driver: CoreDriver) -> int:
    """The most adapters that any step computed with."""
    slots = {new.sequence_id: new.lora_slot for plan in driver.plans for new in plan.new}
    return max(len({slots[work.sequence_id] for work in plan.scheduled} - {0}) for plan in driver.plans)


def test_who_finds_no_slot_waits_and_base_requests_pass() -> None:
    driver = make_driver(max_loras=1)
    add_all(driver, "a", "b")
    answers = [
        driver.add(make_core_request(slot, PROMPT, lora=lora)) for slot, lora in enumerate(["a", "b", None, "b"])
    ]
    driver.step()
    driver.take_all()
    assert [len(answer.tokens) for answer in answers] == [1, 0, 1, 0]
    driver.run()
    assert [answer.tokens for answer in answers] == [alone(lora) for lora in ("a", "b", None, "b")]
    assert num_loras_at_once(driver) == 1


def test_whoever_waits_for_a_slot_is_not_passed_by_for_ever() -> None:
    """A stream of requests whose adapter has its slot ends when another waits for one."""
    driver = make_driver(max_loras=1, max_num_seqs=4)
    add_all(driver, "a", "b")
    driver.add(make_core_request(0, PROMPT, lora="a"))
    driver.step()
    waiting = driver.add(make_core_request(1, PROMPT, lora="b"))
    for slot in range(2, 30):
        driver.add(make_core_request(slot, PROMPT, lora="a"))
        driver.step()
        driver.take_all()
        if waiting.finished is not None:
            break
    assert waiting.tokens == alone("b")
    driver.run()


def test_the_adapter_that_was_not_used_for_longest_gives_its_slot() -> None:
    driver = make_driver(max_loras=2)
    add_all(driver, "a", "b", "c")

    def use(lora: str) -> int:
        """How many adapters were loaded for it."""
        before = len(driver.plans)
        answer = driver.add(make_core_request(0, PROMPT, lora=lora))
        driver.run()
        assert answer.tokens == alone(lora)
        return sum(len(plan.lora_loads) for plan in driver.plans[before:])

    assert [use(lora) for lora in ("a", "b", "a", "c", "a", "b", "c")] == [1, 1, 0, 1, 0, 1, 1]


def test_pinned_adapters_keep_their_slots_and_their_memory() -> None:
    driver = make_driver(max_loras=2, max_cpu_loras=3)
    add_all(driver, "a", "b")
    driver.call(PinLoRA("a"))

    def use(lora: str) -> int:
        before = len(driver.plans)
        driver.add(make_core_request(0, PROMPT, lora=lora))
        driver.run()
        return sum(len(plan.lora_loads) for plan in driver.plans[before:])

    use("a")
    for name in ("c", "d", "e"):
        driver.call(AddLoRA(name, f"/{name}"))
        assert use(name) == 1
    assert use("a") == 0
    assert names_of(driver) == ["a", "d", "e"]
    assert set(driver.executor.loras.values()) == {"/a", "/d", "/e"}
    with pytest.raises(RequestError, match="max_loras"):
        driver.call(PinLoRA("d"))
    driver.call(PinLoRA("a"))
    driver.call(RemoveLoRA("a"))
    driver.call(PinLoRA("d"))
    for name in ("nobody", "a"):
        with pytest.raises(RequestError, match=name) as caught:
            driver.call(PinLoRA(name))
        assert caught.value.param == "name"


def test_a_removed_adapter_gives_its_slot_also_if_it_was_pinned() -> None:
    driver = make_driver(max_loras=2)
    add_all(driver, "a", "b", "c")
    driver.call(PinLoRA("a"))
    driver.add(make_core_request(0, PROMPT, lora="a"))
    driver.run()
    driver.call(RemoveLoRA("a"))
    answers = [driver.add(make_core_request(slot, PROMPT, lora=lora)) for slot, lora in enumerate("bc")]
    driver.step()
    driver.take_all()
    assert [len(answer.tokens) for answer in answers] == [1, 1]
    driver.run()


def test_there_is_no_room_while_all_adapters_are_used_or_pinned() -> None:
    driver = make_driver(max_loras=2, max_cpu_loras=2)
    add_all(driver, "a", "b")
    driver.call(PinLoRA("b"))
    answer = driver.add(make_core_request(0, PROMPT, lora="a"))
    with pytest.raises(UnavailableError, match="max_cpu_loras"):
        driver.call(AddLoRA("c", "/c"))
    assert names_of(driver) == ["a", "b"]
    driver.run()
    assert answer.tokens == alone("a")
    driver.call(AddLoRA("c", "/c"))
    assert names_of(driver) == ["b", "c"]


# Removal


def test_removal_refuses_new_requests_and_lets_the_present_ones_end() -> None:
    """Running and waiting ones alike; the memory goes when the last has ended."""
    driver = make_driver(max_num_seqs=1)
    add_all(driver, "a")
    running = driver.add(make_core_request(0, PROMPT, lora="a"))
    waiting = driver.add(make_core_request(1, PROMPT, lora="a"))
    driver.step()
    driver.call(RemoveLoRA("a"))
    assert names_of(driver) == []
    late = driver.add(make_core_request(2, PROMPT, lora="a"))
    assert refusal_of(driver, late).param == "lora"
    assert set(driver.executor.loras.values()) == {"/a"}
    driver.run()
    assert running.tokens == waiting.tokens == alone("a")
    assert driver.executor.loras == {}
    with pytest.raises(RequestError) as caught:
        driver.call(RemoveLoRA("a"))
    assert caught.value.param == "name"


def test_another_adapter_of_the_same_name_shares_nothing_with_the_old_one() -> None:
    """Not its slot, nor what was cached for it."""
    driver = make_driver()
    add_all(driver, "a")
    first = driver.add(make_core_request(0, PROMPT, max_tokens=6, lora="a"))
    driver.step()
    driver.call(RemoveLoRA("a"))
    driver.call(AddLoRA("a", "/b"))
    second = driver.add(make_core_request(1, PROMPT, max_tokens=6, lora="a"))
    driver.run()
    assert first.tokens == alone("a", 6)
    assert second.tokens == alone("b", 6)
    assert second.num_cached_tokens == 0
    assert set(driver.executor.loras.values()) == {"/b"}


def test_the_memory_goes_with_the_last_request_however_it_ends() -> None:
    driver = make_driver()
    add_all(driver, "a", "b")
    aborted = driver.add(make_core_request(0, PROMPT, lora="a"))
    driver.add(make_core_request(0, PROMPT, lora="b"), client=7)
    driver.step()
    driver.call(RemoveLoRA("a"))
    driver.call(RemoveLoRA("b"))
    driver.abort(0)
    driver.drop_client(7)
    driver.run()
    assert aborted.finished is not None
    assert aborted.finished.reason is FinishReason.ABORT
    assert driver.executor.loras == {}


# The cache, sleep


def test_an_adapter_is_part_of_what_is_cached() -> None:
    """Case 47 (vllm 44701): an adapter that is called like a salt; the same tokens hit with the same pair only."""
    config = make_core_config(max_loras=2, max_cpu_loras=2)
    driver = CoreDriver(attrs.evolve(config, enable_prefix_caching=True))
    add_all(driver, "x", "y")
    pairs = [(None, None), ("x", None), (None, "x"), ("x", "x"), ("x", "y"), ("y", "x")]
    hits: list[bool] = []
    for salt, lora in pairs * 2:
        answer = driver.add(make_core_request(0, PROMPT, cache_salt=salt, lora=lora))
        driver.run()
        assert answer.tokens == alone(lora)
        hits.append(answer.num_cached_tokens > 0)
    assert hits == [False] * 6 + [True] * 6


def test_adapters_are_there_after_sleep() -> None:
    driver = make_driver()
    add_all(driver, "a")
    driver.add(make_core_request(0, PROMPT, lora="a"))
    driver.run()
    driver.call(Sleep(2))
    add_all(driver, "b")
    driver.call(WakeUp())
    answers = [driver.add(make_core_request(slot, PROMPT, lora=lora)) for slot, lora in enumerate(["a", "b"])]
    driver.run()
    assert [answer.tokens for answer in answers] == [alone("a"), alone("b")]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), max_loras=st.integers(1, 3), num_blocks=st.integers(8, 20), ahead=st.booleans(),
       has_priorities=st.booleans())  # fmt: skip
def test_whatever_happens_everybody_gets_the_tokens_of_its_adapter(
    data: st.DataObject, max_loras: int, num_blocks: int, ahead: bool, has_priorities: bool
) -> None:
    """Requests, aborts, additions and removals in any order, preemption included."""
    policy = SchedulingPolicy.PRIORITY if has_priorities else SchedulingPolicy.FCFS
    config = make_core_config(
        max_loras=max_loras, max_cpu_loras=4, max_num_seqs=4, max_model_len=24, scheduling_policy=policy
    )
    driver = CoreDriver(attrs.evolve(config, enable_prefix_caching=True, async_scheduling=ahead), num_blocks=num_blocks)
    known: dict[str, int] = {}
    answers: list[tuple[Answer, str | None, tuple[int, ...]]] = []
    aborted: set[int] = set()
    num_added = 0
    for slot in range(data.draw(st.integers(5, 40))):
        match data.draw(st.sampled_from(["request", "request", "step", "add", "remove", "abort"])):
            case "request":
                name = data.draw(st.sampled_from([None, *known]))
                prompt = PROMPT[: data.draw(st.integers(1, 11))]
                priority = data.draw(st.integers(0, 2))
                request = make_core_request(slot, prompt, max_tokens=6, lora=name, priority=priority)
                answers.append((driver.add(request), None if name is None else f"{name}{known[name]}", prompt))
            case "step" if driver.core.has_work:
                driver.step()
                driver.take_all()
            case "add":
                name = data.draw(st.sampled_from("abcde"))
                if name not in known:
                    try:
                        driver.call(AddLoRA(name, f"/{name}{num_added}"))
                    except UnavailableError:
                        pass
                    else:
                        known[name] = num_added
                        num_added += 1
                    known = {each: known[each] for each in names_of(driver)}
            case "remove" if known:
                name = data.draw(st.sampled_from(sorted(known)))
                driver.call(RemoveLoRA(name))
                del known[name]
            case "abort" if answers:
                answer = data.draw(st.sampled_from(answers))[0]
                aborted.add(answer.slot)
                driver.abort(answer.slot)
            case _:
                pass
    driver.run()
    for answer, lora, prompt in answers:
        assert answer.finished is not None
        expected = alone(lora, 6, prompt)
        if answer.slot in aborted:
            expected = expected[: len(answer.tokens)]
        assert answer.tokens == expected
    assert num_loras_at_once(driver) <= max_loras if any(plan.scheduled for plan in driver.plans) else True
    assert len(driver.executor.loras) == len(known)


def test_steps_go_on_while_an_adapter_is_read() -> None:
    """It can be named when it is there; its name is taken before, and free again where it could not be read."""
    driver = make_driver(max_cpu_loras=2)
    jobs: list[Job[Any]] = []

    def start(work: Callable[[], object]) -> Job[Any]:
        jobs.append(job := Job(work))
        return job

    driver.core.background.start = start  # type: ignore[method-assign,assignment]
    answer = driver.add(make_core_request(0, PROMPT))
    broken, call = AddLoRA("a", BROKEN_LORA), AddLoRA("a", "/a")
    assert driver.begin_call(broken) is None
    with pytest.raises(RequestError, match="already"):
        driver.call(call)
    driver.run()
    assert answer.tokens == alone(None)
    assert driver.replies == []
    jobs.pop().run()
    driver.core.poll()
    driver.take_all()
    with pytest.raises(CheckpointError):
        driver.value_of(broken, driver.replies.pop())
    assert driver.begin_call(call) is None
    early = driver.add(make_core_request(0, PROMPT, lora="a"))
    driver.run()
    assert refusal(early).param == "lora"
    assert names_of(driver) == []
    jobs.pop().run()
    driver.core.poll()
    driver.take_all()
    assert driver.value_of(call, driver.replies.pop()) is None
    answer = driver.add(make_core_request(0, PROMPT, lora="a"))
    driver.run()
    assert answer.tokens == alone("a")
    driver.core.check_integrity()


def test_an_adapter_for_which_there_is_no_room_any_more_is_forgotten() -> None:
    """Others came while it was read, and are in use."""
    driver = make_driver(max_loras=2, max_cpu_loras=1)
    jobs: list[Job[Any]] = []
    background, start = driver.core.background, driver.core.background.start

    def keep(work: Callable[[], object]) -> Job[Any]:
        jobs.append(job := Job(work))
        return job

    background.start = keep  # type: ignore[method-assign,assignment]
    slow = AddLoRA("slow", "/slow")
    assert driver.begin_call(slow) is None
    background.start = start  # type: ignore[method-assign]
    add_all(driver, "a")
    answer = driver.add(make_core_request(0, PROMPT, lora="a"))
    jobs.pop().run()
    driver.core.poll()
    driver.take_all()
    with pytest.raises(UnavailableError, match="no room"):
        driver.value_of(slow, driver.replies.pop())
    driver.run()
    assert answer.tokens == alone("a")
    assert list(driver.executor.loras.values()) == ["/a"]
