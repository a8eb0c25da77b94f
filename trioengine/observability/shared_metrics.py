"""The counts of several API-server processes on one page, whichever of them a scraper reaches.

Each process leaves its lines in a file of a folder that they share, and reads the others'. A file is replaced as a
whole, so a reader sees an old one or a new one. Files are small, and the folder is one that goes with the server.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs

FILE_PREFIX = "metrics-"

logger = logging.getLogger(__name__)


@attrs.frozen
class SharedMetrics:
    """One process's place in the folder."""

    folder: Path
    api_server: int
    """Which of the processes."""

    def leave(self, lines: Mapping[str, str]) -> None:
        """Let the others see these lines, by the names of their metrics.

        Where that fails (the server ends, the disk is full) they go on with the lines from before.
        """
        path = self.folder / f"{FILE_PREFIX}{self.api_server}.json"
        unfinished = path.with_suffix(".new")
        try:
            unfinished.write_text(json.dumps(lines), "utf-8")
            os.replace(unfinished, path)
        except OSError as error:
            logger.debug("Metrics cannot be left in %s: %s", self.folder, error)

    def others(self) -> Sequence[Mapping[str, str]]:
        """What the others have left, in their order. Those of a process that has ended stay, as its counts do."""
        found: list[tuple[int, Mapping[str, str]]] = []
        for path in self.folder.glob(f"{FILE_PREFIX}*.json"):
            number = path.stem.removeprefix(FILE_PREFIX)
            if not number.isdecimal() or int(number) == self.api_server:
                continue
            try:
                lines = _lines(path.read_bytes())
            except (OSError, ValueError) as error:
                logger.debug("Metrics in %s cannot be read: %s", path, error)
                continue
            found.append((int(number), lines))
        return [lines for _, lines in sorted(found, key=lambda each: each[0])]


def _lines(data: bytes) -> Mapping[str, str]:
    """What `leave` has written.

    Raises:
        ValueError: it is something else.
    """
    lines: Any = json.loads(data)
    if not isinstance(lines, dict):
        raise ValueError("this is no JSON object")
    if not all(isinstance(text, str) for text in cast("dict[str, object]", lines).values()):
        raise ValueError("there is something else than text")
    return cast("dict[str, str]", lines)
