"""What `StatLogger`s are told: each message once, each request once, whoever ended it."""

import math

import pytest

from trioengine.errors import EngineDeadError, EngineGenerateError
from trioengine.observability.request_log import RequestLogger
from trioengine.observability.stats import IterationStats
from trioengine.testing.frontend_driver import FrontendDriver, RecordingStatLogger
from trioengine.types.codec import error_to_data
from trioengine.types.messages import Finished, SchedulerStats, StepOutput, pack_int32
from trioengine.types.output import FinishReason
from trioengine.types.request import Deadlines

SCHEDULER = SchedulerStats(1, 2, 0.5, 3, 4, 5, 6, 7, 8)


@pytest.fixture
def log() -> RecordingStatLogger:
    return RecordingStatLogger()


@pytest.fixture
def front(log: RecordingStatLogger) -> FrontendDriver:
    return FrontendDriver(num_cores=2, stat_loggers=[log])


def test_one_request_from_its_arrival_to_its_end(front: FrontendDriver, log: RecordingStatLogger) -> None:
    front.now_s = 10.0
    headers = {"traceparent": "00-1"}
    fields = {"request_id": "mine", "session_id": "s", "lora": "l", "trace_headers": headers, "data_parallel_rank": 1}
    request = front.add("abcd", waited_s=1.0, max_tokens=9, request=fields)
    slot = request.slot
    front.now_s = 12.0
    columns = {"scheduled": pack_int32([slot, 250_000]), "cached_tokens": pack_int32([slot, 3])}
    front.step((slot, "x"), rank=1, stats=SCHEDULER, **columns)
    front.now_s = 14.0
    front.step((slot, "yz"), rank=1, preempted=pack_int32([slot, slot]))
    front.now_s = 15.0
    front.step((slot, "!"), rank=1, finished=[Finished(slot, FinishReason.LENGTH)])
    first, second, third = log.records
    assert first == _like(first, engine=1, scheduler=SCHEDULER, num_generated_tokens=1)
    assert (first.num_prompt_tokens, first.num_cached_tokens, first.times_to_first_token_s) == (4, 3, [3.0])
    assert (second.inter_token_latencies_s, second.num_preemptions, second.num_generated_tokens) == ([1.0], 2, 2)
    assert (third.inter_token_latencies_s, third.num_prompt_tokens) == ([1.0], 0)
    (finished,) = third.finished
    assert (finished.request_id, finished.finish_reason, finished.n) == ("mine", "length", 1)
    assert (finished.num_prompt_tokens, finished.num_cached_tokens, finished.num_generated_tokens) == (4, 3, 4)
    assert (finished.num_preemptions, finished.max_tokens, finished.queue_s) == (2, 9, 0.25)
    assert (finished.time_to_first_token_s, finished.decode_s, finished.e2e_latency_s) == (3.0, 3.0, 6.0)
    assert (finished.lora, finished.session_id, finished.trace_headers) == ("l", "s", headers)


def _like(stats: IterationStats, **expected: object) -> IterationStats:
    for name, value in expected.items():
        assert getattr(stats, name) == value
    return stats


def test_endings_on_this_side_are_told_once(front: FrontendDriver, log: RecordingStatLogger) -> None:
    """By stop string, abort, leaving, a deadline, a fault and the core's error, and not again by `Finished`."""
    requests = {
        name: front.add(
            stop="!", request={"request_id": name, "data_parallel_rank": 0, "deadlines": Deadlines(total_s=limit_s)}
        )
        for name, limit_s in [("stop", 9), ("abort", 9), ("leave", 9), ("late", 1), ("fault", 9), ("error", 9)]
    }
    slots = {name: request.slot for name, request in requests.items()}
    requests["fault"].added.state.children[0]._detokenizer = None  # type: ignore[attr-defined]
    requests["fault"].added.state.children[0]._logprobs = []  # type: ignore[attr-defined]
    front.step(*((slots[name], "!" if name == "stop" else "x") for name in ("stop", "abort", "fault")))
    front.frontend.abort("abort")
    front.frontend.drop(requests["leave"].added.state)
    front.expire_at(2.0)
    front.aborts()
    error = error_to_data(EngineGenerateError("no"))
    front.step(finished=[Finished(slots["error"], FinishReason.ABORT, error=error)])
    front.finish(*(slot for name, slot in slots.items() if name != "error"), reason=FinishReason.ABORT)
    reasons = {finished.request_id: finished.finish_reason for finished in log.finished}
    assert reasons == {
        "stop": "stop",
        "abort": "abort",
        "leave": "abort",
        "late": "error",
        "fault": "error",
        "error": "error",
    }
    assert len(log.finished) == len(requests)
    by_name = {finished.request_id: finished for finished in log.finished}
    assert by_name["leave"].time_to_first_token_s is None
    assert by_name["leave"].queue_s is None
    assert by_name["leave"].decode_s is None


def test_tokens_behind_a_stop_string_are_not_counted(front: FrontendDriver, log: RecordingStatLogger) -> None:
    """All counts are those of usage."""
    request = front.add(stop="!", request={"data_parallel_rank": 0})
    front.step((request.slot, "ab!cd"))
    front.finish(request.slot, reason=FinishReason.ABORT)
    assert sum(record.num_generated_tokens for record in log.records) == 3
    assert [finished.num_generated_tokens for finished in log.finished] == [3]


def test_a_stop_string_that_the_last_byte_completes_is_the_reason(
    front: FrontendDriver, log: RecordingStatLogger
) -> None:
    """Here half a character, which is shown as U+FFFD; the core says "length"."""
    request = front.add(stop="\ufffd", request={"data_parallel_rank": 0})
    message = StepOutput(
        0, 0, 0.0, pack_int32([request.slot]), pack_int32([0xC3]), b"", (Finished(request.slot, FinishReason.LENGTH),)
    )
    list(front.frontend.receive(0, message))
    assert request.read().outputs[0].finish_reason is FinishReason.STOP
    assert [finished.finish_reason for finished in log.finished] == ["stop"]
    assert front.aborts() == []


def test_the_end_of_the_engine_is_told(front: FrontendDriver, log: RecordingStatLogger) -> None:
    for rank in (0, 1):
        front.add(request={"data_parallel_rank": rank})
    front.frontend.fail_all(EngineDeadError("gone"))
    assert [(record.engine, [each.finish_reason for each in record.finished]) for record in log.records] == [
        (0, ["error"]),
        (1, ["error"]),
    ]


def test_the_clock_is_read_once_for_each_message_and_ending(log: RecordingStatLogger) -> None:
    front = FrontendDriver(stat_loggers=[log])
    requests = [front.add(max_tokens=900) for _ in range(100)]
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return 0.0

    front.frontend._clock = clock
    for _ in range(10):
        front.step(*((request.slot, "x") for request in requests))
    assert reads == 10
    front.finish(requests[0].slot)
    assert reads == 12


def test_a_logger_that_fails_is_told_nothing_any_more(
    log: RecordingStatLogger, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a plug-in; requests and other loggers go on."""

    class Broken(RecordingStatLogger):
        def record(self, stats: IterationStats) -> None:
            super().record(stats)
            raise ValueError("broken")

    broken = Broken()
    front = FrontendDriver(stat_loggers=[broken, log])
    request = front.add(max_tokens=9)
    for _ in range(3):
        front.step((request.slot, "x"))
    assert len(broken.records) == 1
    assert len(log.records) == 3
    assert request.read().num_generated_tokens == 3
    assert "Broken failed" in caplog.text


def test_loggers_know_every_number(front: FrontendDriver, log: RecordingStatLogger) -> None:
    """Latencies are finite and none is negative, also for rows of several tokens and of several requests."""
    requests = [front.add(max_tokens=900, request={"data_parallel_rank": 0}) for _ in range(3)]
    for now_s in range(1, 6):
        front.now_s = float(now_s)
        front.step(*((request.slot, "ab") for request in requests[: now_s % 3 + 1]))
    latencies = [value for record in log.records for value in record.inter_token_latencies_s]
    assert all(math.isfinite(value) and value > 0 for value in latencies)
    assert sum(record.num_generated_tokens for record in log.records) == 2 * (2 + 3 + 1 + 2 + 3)
    assert sum(len(record.times_to_first_token_s) for record in log.records) == 3


def test_without_loggers_nothing_is_kept() -> None:
    front = FrontendDriver()
    for _ in range(10):
        front.finish(front.add().slot)
    assert front.frontend._ranks[0].ended == []


def test_requests_are_logged_by_the_callers_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    front = FrontendDriver(enable_log_requests=True, stat_loggers=[RequestLogger()])
    front.finish(front.add("secret", request={"request_id": "mine"}).slot)
    came, ended = caplog.messages
    assert came.startswith("Request 'mine' came: 6 prompt tokens")
    assert ended.startswith("Request 'mine' ended: length")
    assert "secret" not in caplog.text
