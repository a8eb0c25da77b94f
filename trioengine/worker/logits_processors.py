"""Custom logits processors: rules that other packages bring, found by their entry points.

A package names a class in the group `trioengine.logits_processors`:

    [project.entry-points."trioengine.logits_processors"]
    only_digits = "my_package:OnlyDigits"

and a request asks for it with `SamplingParams(logits_processors={"only_digits": {"base": 10}})`. Nothing here knows how
logits come about.
"""

import importlib.metadata
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.errors import RequestError
from trioengine.types.params import SamplingParams

ENTRY_POINT_GROUP = "trioengine.logits_processors"

logger = logging.getLogger(__name__)


class LogitsProcessor(Protocol):
    """One request's custom rule. The class is called with the request's arguments, a new object for each request."""

    def __call__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: NDArray[np.float32]
    ) -> None:
        """Change the logits of the next token, in place; minus infinity forbids one.

        What it does must depend on its arguments only: a place may be computed twice (after a preemption), or for
        drafts that are then rejected. An exception fails the request, and no other.

        Args:
            prompt_token_ids: the prompt.
            output_token_ids: what stands between the prompt and the next token.
            logits: [vocab_size], before any other rule.
        """
        ...


class LogitsProcessorClass(Protocol):
    """What an entry point names."""

    def __call__(self, arguments: Mapping[str, object]) -> LogitsProcessor:
        """The processor of one request. The arguments are checked."""
        ...

    def validate(self, arguments: Mapping[str, object]) -> None:
        """Return when the arguments are right. A static or a class method.

        Raises:
            ValueError: saying what is wrong; the request is refused with this.
        """
        ...


@attrs.frozen
class BoundProcessor:
    """A processor and its name."""

    name: str
    processor: LogitsProcessor


class LogitsProcessors:
    """The processors that requests may name."""

    def __init__(self, classes: Mapping[str, LogitsProcessorClass]) -> None:
        self._classes = classes

    @classmethod
    def installed(cls) -> "LogitsProcessors":
        """Those of all installed packages. One that cannot be imported is left out, with a line in the log."""
        classes: dict[str, LogitsProcessorClass] = {}
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            try:
                classes[entry_point.name] = entry_point.load()
            except Exception:  # Whatever another package's import raises must not end the engine.
                logger.exception("The logits processor %r cannot be imported.", entry_point.name)
        return cls(classes)

    def check(self, sampling: SamplingParams) -> None:
        """Return when all processors that a request names are known and take their arguments.

        Raises:
            RequestError: naming the one at fault.
        """
        for name, text in (sampling.logits_processors or {}).items():
            param = f"logits_processors.{name}"
            processor_class = self._classes.get(name)
            if processor_class is None:
                known = ", ".join(sorted(self._classes)) or "none"
                raise RequestError(f"There is no logits processor {name!r}; installed: {known}.", param=param)
            try:
                processor_class.validate(_arguments(text))
            except ValueError as error:
                raise RequestError(
                    f"The logits processor {name!r} cannot take its arguments: {error}", param=param
                ) from error

    def bind(self, sampling: SamplingParams) -> Sequence[BoundProcessor]:
        """New processors for a sequence, whose parameters `check` has let through.

        Raises:
            LogitsProcessorError: one cannot be made.
        """
        bound: list[BoundProcessor] = []
        for name, text in (sampling.logits_processors or {}).items():
            try:
                bound.append(BoundProcessor(name, self._classes[name](_arguments(text))))
            except Exception as error:  # Another package's code; its request fails.
                raise LogitsProcessorError(_message(name, error)) from error
        return bound


class LogitsProcessorError(Exception):
    """A custom processor raised an exception; its message is for the request."""


def process_logits(
    processors: Sequence[BoundProcessor],
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    logits: NDArray[np.float32],
) -> None:
    """Let processors change a row of logits, one after the other.

    Raises:
        LogitsProcessorError: one raised an exception.
    """
    for bound in processors:
        try:
            bound.processor(prompt_token_ids, output_token_ids, logits)
        except Exception as error:  # Another package's code; its request fails.
            raise LogitsProcessorError(_message(bound.name, error)) from error


def _arguments(text: str) -> Mapping[str, object]:
    arguments: object = json.loads(text)
    if not isinstance(arguments, dict):
        raise ValueError("they are not a JSON object")
    return cast(Mapping[str, object], arguments)


def _message(name: str, error: Exception) -> str:
    return f"The logits processor {name!r} failed: {type(error).__name__}: {error}"
