"""The log of requests: numbers, never texts, and no line that a caller made up."""

import logging

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.observability import request_log
from trioengine.observability.request_log import MAX_NAME_CHARS, RequestLogger, log_arrival
from trioengine.observability.stats import FinishedRequestStats, IterationStats
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.pooling import PoolingParams, PoolingTask
from trioengine.types.structured import StructuredOutputsParams

SECRET = "Secret text"

FINISHED = FinishedRequestStats("chat-1", "length", 100, 64, 16, 2, 1, 16, 1.5, 0.125, 0.25, 1.0)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, request_log.__name__)
    return caplog


def test_a_request_s_arrival_names_what_is_not_the_default(log: pytest.LogCaptureFixture) -> None:
    sampling = SamplingParams(temperature=0.5, max_tokens=None, n=2, output_kind=RequestOutputKind.DELTA)
    log_arrival("chat-1", 7, sampling, priority=3, lora="poet")
    assert [record.getMessage() for record in log.records] == [
        "Request 'chat-1' came: 7 prompt tokens, temperature=0.5, max_tokens=None, output_kind=delta, n=2, priority=3,"
        " lora='poet'"
    ]


def test_a_request_for_vectors_is_logged_too(log: pytest.LogCaptureFixture) -> None:
    log_arrival("e", 3, PoolingParams(task=PoolingTask.SCORE, dimensions=8))
    assert log.records[0].getMessage() == "Request 'e' came: 3 prompt tokens, task=score, dimensions=8"


def test_a_request_s_end_has_its_times(log: pytest.LogCaptureFixture) -> None:
    request_logger = RequestLogger()
    request_logger.record(IterationStats(0))
    aborted = FinishedRequestStats("b", "abort", 9, 0, 0, 0, 1, None, 0.5, None, None, None)
    request_logger.record(IterationStats(0, finished=[FINISHED, aborted]))
    assert [record.getMessage() for record in log.records] == [
        "Request 'chat-1' ended: length, 100 prompt tokens (64 cached), 16 generated, queued 0.125 s,"
        " first token 0.250 s, decode 1.000 s, total 1.500 s, 2 preemptions",
        "Request 'b' ended: abort, 9 prompt tokens, 0 generated, total 0.500 s",
    ]


def test_no_text_of_a_caller_is_logged(log: pytest.LogCaptureFixture) -> None:
    """Stop strings, forbidden words, forms and arguments may be private."""
    sampling = SamplingParams(
        stop=(SECRET,),
        bad_words=(SECRET, SECRET),
        structured_outputs=StructuredOutputsParams(choice=(SECRET,)),
        logits_processors={"rule": SECRET},
        extra_args={"x": SECRET},
        logit_bias={5: 1.0},
    )
    log_arrival("a", 3, sampling)
    (record,) = log.records
    assert SECRET not in record.getMessage()
    assert "stop=<1>, " in record.getMessage()
    assert "bad_words=<2>, " in record.getMessage()


def _lines(request_id: str) -> list[str]:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    request_log.logger.addHandler(handler)
    request_log.logger.setLevel(logging.INFO)
    try:
        log_arrival(request_id, 1, SamplingParams(), lora=request_id)
        RequestLogger().record(IterationStats(0, finished=[attrs.evolve(FINISHED, request_id=request_id)]))
    finally:
        request_log.logger.removeHandler(handler)
        request_log.logger.setLevel(logging.NOTSET)
    return [record.getMessage() for record in said]


@given(st.text(max_size=300))
def test_a_caller_s_names_make_no_lines_of_their_own(name: str) -> None:
    for line in _lines(name):
        assert line.splitlines() == [line]
        assert line.isprintable()


def test_long_names_are_cut() -> None:
    arrival, end = _lines("x" * 100_000)
    assert "x" * MAX_NAME_CHARS + "…" in arrival
    assert len(arrival) < 2 * MAX_NAME_CHARS + 200
    assert len(end) < MAX_NAME_CHARS + 300
