"""What a person sees while an engine starts: one changing line on a terminal, a line for each stage elsewhere."""

import contextlib
import sys
import time
from typing import TextIO

REDRAW_INTERVAL_S = 0.1


class Progress:
    """Shows stages and how far each is, on standard error. Called with a stage and a fraction from 0 to 1."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._stage: str | None = None
        self._drawn_at_s = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that `stage` is this far."""
        is_new = stage != self._stage
        if self._is_terminal:
            now_s = time.monotonic()
            if is_new or fraction >= 1 or now_s - self._drawn_at_s >= REDRAW_INTERVAL_S:
                self._drawn_at_s = now_s
                self._write(f"\r\x1b[K{stage} {fraction:4.0%}")
        elif is_new:
            self._write(f"{stage}\n")
        self._stage = stage

    def clear(self) -> None:
        """Leave no half-drawn line behind."""
        if self._is_terminal and self._stage is not None:
            self._write("\r\x1b[K")
        self._stage = None

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # Whoever watched has left; the engine is wanted all the same.
            self._stream.write(text)
            self._stream.flush()
