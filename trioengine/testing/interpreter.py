# pyright: basic
"""Triton's interpreter, a few times faster."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton.language as tl
from triton.runtime import interpreter


@contextlib.contextmanager
def fast_interpreter() -> Iterator[None]:
    """Launches replace Triton's functions once, not once more for each function that a kernel calls, and do not look
    whether integers overflow."""
    replace = interpreter._patch_lang
    of_launch: list[Any] = []

    class Scope:
        """Of a launch, or of a function that it calls, whose scope nobody restores."""

        def __init__(self, function: object) -> None:
            if not of_launch:
                of_launch.append(replace(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))

        def restore(self) -> None:
            of_launch.pop().restore()

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    with (
        mock.patch.object(interpreter, "_patch_lang", Scope),
        mock.patch.object(interpreter.interpreter_builder, "options", options),
    ):
        yield
    assert not of_launch
