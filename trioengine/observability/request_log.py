"""The log of requests (`enable_log_requests`): a line when one comes, a line when it ends.

Lines have numbers, never texts: no prompt, no answer, no stop string, no schema. What callers name (ids, adapters) is
cut and quoted, so that no request writes lines of its own. Knows only `logging`; installs no handler.
"""

import enum
import logging
from collections.abc import Iterator, Sized
from typing import Any

import attrs

from trioengine.observability.stats import FinishedRequestStats, IterationStats
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingParams

MAX_NAME_CHARS = 128

logger = logging.getLogger(__name__)


def log_arrival(
    request_id: str,
    num_prompt_tokens: int,
    parameters: SamplingParams | PoolingParams,
    *,
    priority: int = 0,
    lora: str | None = None,
) -> None:
    """Say that a request has come: its id, its size, and every parameter that is not the default."""
    if not logger.isEnabledFor(logging.INFO):
        return
    facts = [f"{num_prompt_tokens} prompt tokens", *_parameters(parameters)]
    if priority:
        facts.append(f"priority={priority}")
    if lora is not None:
        facts.append(f"lora={_quoted(lora)}")
    logger.info("Request %s came: %s", _quoted(request_id), ", ".join(facts))


class RequestLogger:
    """Says how requests ended."""

    def record(self, stats: IterationStats) -> None:
        """Say it for those that have ended."""
        if stats.finished and logger.isEnabledFor(logging.INFO):
            for request in stats.finished:
                logger.info("Request %s ended: %s", _quoted(request.request_id), ", ".join(_end(request)))

    def log(self) -> None:
        """Nothing: all is said at once."""

    def close(self) -> None:
        """Nothing."""


def _end(request: FinishedRequestStats) -> Iterator[str]:
    yield request.finish_reason
    cached = f" ({request.num_cached_tokens} cached)" if request.num_cached_tokens else ""
    yield f"{request.num_prompt_tokens} prompt tokens{cached}"
    yield f"{request.num_generated_tokens} generated"
    if request.queue_s is not None:
        yield f"queued {request.queue_s:.3f} s"
    if request.time_to_first_token_s is not None:
        yield f"first token {request.time_to_first_token_s:.3f} s"
    if request.decode_s is not None:
        yield f"decode {request.decode_s:.3f} s"
    yield f"total {request.e2e_latency_s:.3f} s"
    if request.num_preemptions:
        yield f"{request.num_preemptions} preemptions"


def _parameters(parameters: SamplingParams | PoolingParams) -> Iterator[str]:
    """`name=value` of each parameter that is not the default; of texts and collections only that they are there."""
    for field in attrs.fields(type(parameters)):
        value = getattr(parameters, field.name)
        if value != field.default:
            yield f"{field.name}={_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, (bool, int, float)) or value is None:
        return str(value)
    return f"<{len(value)}>" if isinstance(value, Sized) else "<set>"


def _quoted(name: str) -> str:
    return repr(name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…")
