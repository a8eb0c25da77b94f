"""What is kept of responses, how long and for whom."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import NotFoundError, RequestError, UnavailableError
from trioengine.openai.chat_settings import ChatSettings
from trioengine.openai.responses.events import Event, ResponseEvents
from trioengine.openai.responses.protocol import parse_response_request
from trioengine.openai.responses.store import ResponseStore, StoredResponse, StoreLimits
from trioengine.openai.responses.translate import response_to_generate
from trioengine.openai.sse import ReplyHead
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.output import CompletionOutput, FinishReason, RequestOutput

SETTINGS = ChatSettings.of(FakeTokenizer())


def make_response(
    response_id: str, owner: str = "", *, text: str | None = "answer", is_logged: bool = False
) -> StoredResponse:
    """A response that has this answer; None is one that runs."""
    body = {"input": "Hi", "background": is_logged, "stream": is_logged}
    request = parse_response_request(json.dumps(body).encode())
    plan = response_to_generate(request, "id", SETTINGS)
    sampling = plan.generate_request.sampling
    state = ResponseEvents(ReplyHead(response_id, 5, "m"), request, plan.form, sampling, clock=lambda: 7.0)
    if text is not None:
        finish(state, text)
    return StoredResponse(state, owner, plan.conversation, is_background=is_logged, log=[] if is_logged else None)


def finish(state: ResponseEvents, text: str) -> None:
    choice = CompletionOutput(0, text, (1,), FinishReason.STOP)
    state.feed(RequestOutput("r", (1,), (choice,), finished=True, num_generated_tokens=1))


def keep(store: ResponseStore, response: StoredResponse, now_s: float = 0.0) -> StoredResponse:
    store.add(response)
    store.end(response, now_s)
    return response


def is_known(store: ResponseStore, response_id: str, owner: str = "", now_s: float = 0.0) -> bool:
    try:
        return store.get(response_id, owner, now_s).id == response_id
    except NotFoundError:
        return False


def test_what_has_ended_is_forgotten_after_a_while() -> None:
    """Counted from its end; what runs is not forgotten however old it is."""
    store = ResponseStore(StoreLimits(time_to_live_s=10.0))
    keep(store, make_response("a"), 0.0)
    keep(store, make_response("b"), 5.0)
    running = make_response("c", text=None, is_logged=True)
    store.add(running)
    assert is_known(store, "a", now_s=9.9)
    assert not is_known(store, "a", now_s=10.0)
    assert is_known(store, "b", now_s=10.0)
    assert is_known(store, "c", now_s=1000.0)
    store.end(running, 1000.0)
    assert len(store) == 1
    store.forget_old(1010.0)
    assert len(store) == store.num_bytes == 0


def test_a_store_may_keep_nothing() -> None:
    """What runs is there as long as it runs."""
    store = ResponseStore(StoreLimits(time_to_live_s=0.0))
    running = make_response("a", text=None, is_logged=True)
    store.add(running)
    assert is_known(store, "a", now_s=5.0)
    store.end(running, 6.0)
    keep(store, make_response("b"), 7.0)
    assert len(store) == store.num_bytes == 0


def test_the_oldest_that_ended_make_room() -> None:
    """By their end, not by their beginning; what runs stays."""
    store = ResponseStore(StoreLimits(max_responses=3))
    first = make_response("first", text=None, is_logged=True)
    store.add(first)
    keep(store, make_response("b"))
    keep(store, make_response("c"))
    keep(store, make_response("d"))
    assert [is_known(store, name) for name in ("first", "b", "c", "d")] == [True, False, True, True]
    store.end(first, 1.0)
    keep(store, make_response("e"))
    assert [is_known(store, name) for name in ("first", "c", "d", "e")] == [True, False, True, True]


def test_bytes_are_bounded() -> None:
    """Long answers make more room than short ones."""
    store = ResponseStore(StoreLimits(max_bytes=50_000))
    for number in range(20):
        keep(store, make_response(f"short{number}"))
    assert len(store) > 10
    keep(store, make_response("long", text="x" * 20_000))
    assert store.num_bytes <= 50_000
    assert is_known(store, "long")
    assert len(store) < 10
    keep(store, make_response("huge", text="x" * 100_000))
    assert not is_known(store, "huge")
    assert store.num_bytes <= 50_000


def test_events_without_room_are_dropped_and_the_response_stays() -> None:
    """Where only what runs is left to make room."""
    store = ResponseStore(StoreLimits(max_bytes=20_000))
    running = make_response("a", text=None, is_logged=True)
    store.add(running)
    num_bytes = store.num_bytes
    store.log(running, [Event(b"x", b"y" * 5000)])
    assert store.num_bytes > num_bytes + 5000
    store.log(running, [Event(b"x", b"y" * 20_000)])
    assert running.log is None
    assert store.num_bytes == num_bytes
    store.log(running, [Event(b"x", b"y")])
    assert is_known(store, "a")


def test_too_many_that_run_are_refused() -> None:
    """With 503: some of them will end."""
    store = ResponseStore(StoreLimits(max_responses=2))
    running = [make_response(name, text=None, is_logged=True) for name in ("a", "b")]
    for response in running:
        store.check_room()
        store.add(response)
    with pytest.raises(UnavailableError):
        store.check_room()
    store.end(running[0], 0.0)
    store.check_room()


def test_a_response_is_its_owners() -> None:
    """For others it is as if it were not there; its items too."""
    store = ResponseStore()
    response = keep(store, make_response("a", "me"))
    item_id = response.items[-1].id
    assert is_known(store, "a", "me")
    assert not is_known(store, "a", "you")
    assert item_id in store.known_items([item_id], "me", 0.0)
    assert store.known_items([item_id], "you", 0.0) == {}
    with pytest.raises(NotFoundError) as caught:
        store.conversation("a", "you", 0.0)
    assert caught.value.param == "previous_response_id"


def test_only_what_has_an_answer_can_be_gone_on_from() -> None:
    """Not what runs, has failed or was cancelled."""
    store = ResponseStore()
    running, failed = (make_response(name, text=None, is_logged=True) for name in ("running", "failed"))
    store.add(running)
    failed.state.fail(ValueError())
    keep(store, failed)
    for name in ("running", "failed"):
        with pytest.raises(RequestError) as caught:
            store.conversation(name, "", 0.0)
        assert caught.value.param == "previous_response_id"
    keep(store, make_response("ok"))
    assert len(store.conversation("ok", "", 0.0)) == 2


def test_items_are_forgotten_with_their_last_response() -> None:
    """Until then the conversations that go on from a forgotten response still have them."""
    store = ResponseStore()
    first = keep(store, make_response("a"))
    item_id = first.items[-1].id
    second = make_response("b")
    second.conversation = (*first.items, *second.conversation)
    keep(store, second)
    store.delete(first)
    assert item_id in store.known_items([item_id], "", 0.0)
    store.delete(second)
    assert store.known_items([item_id], "", 0.0) == {}


@given(st.lists(st.tuples(st.sampled_from("aedlx"), st.integers(0, 9), st.integers(0, 3000)), max_size=60))
def test_the_bounds_hold_whatever_is_done(steps: list[tuple[Any, int, int]]) -> None:
    """Adding, ending, deleting, logging and forgetting, in any order; the count of bytes is that of what is kept."""
    limits = StoreLimits(max_responses=6, max_bytes=20_000, time_to_live_s=100.0)
    store = ResponseStore(limits)
    known: dict[int, StoredResponse] = {}
    ids, now_s = itertools.count(), 0.0
    for kind, number, amount in steps:
        now_s += number
        response = known.get(number)
        match kind:
            case "a" if response is None:
                try:
                    store.check_room()
                except UnavailableError:
                    continue
                response = known[number] = make_response(str(next(ids)), text=None, is_logged=True)
                store.add(response)
            case "e" if response is not None and not response.state.status.is_final:
                finish(response.state, "x" * amount)
                store.end(response, now_s)
            case "d" if response is not None:
                store.delete(response)
                del known[number]
            case "l" if response is not None:
                store.log(response, [Event(b"x", b"y" * amount)])
            case "x":
                store.forget_old(now_s)
            case _:
                continue
        assert len(store) <= limits.max_responses
        kept = [stored for stored in known.values() if is_known(store, stored.id, now_s=now_s)]
        assert store.num_bytes == sum(stored.num_bytes for stored in kept)
        has_logs = any(stored.log for stored in kept if not stored.state.status.is_final)
        assert store.num_bytes <= limits.max_bytes or not has_logs
