"""How far a blocking call is: tqdm's bar where tqdm is installed, else a line of its own."""

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, cast

DESCRIPTION = "Processed prompts"


class _Bar(Protocol):
    postfix: Any

    def update(self, n: int) -> object: ...

    def close(self) -> object: ...


UseTqdm: TypeAlias = bool | Callable[..., Any]
"""True shows a bar where someone sees it: on a terminal, in a notebook. A callable is called as `tqdm.tqdm` is."""


class PromptProgress:
    """Counts finished prompts and tokens, and shows them. `with` closes what it shows."""

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        make = use_tqdm if callable(use_tqdm) else _default_bar() if use_tqdm and _is_seen() else None
        self._started_s = time.monotonic()
        self._num_in = self._num_out = 0
        self._bar: _Bar | None = None
        if make is not None:
            self._bar = make(total=total, desc=DESCRIPTION, dynamic_ncols=True, postfix=self._speed())

    def __enter__(self) -> "PromptProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def finish_one(self, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """A prompt more is finished."""
        if self._bar is None:
            return
        self._num_in += num_prompt_tokens
        self._num_out += num_generated_tokens
        self._bar.postfix = self._speed()
        self._bar.update(1)

    def _speed(self) -> str:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        return (
            f"est. speed input: {self._num_in / elapsed_s:.2f} toks/s, output: {self._num_out / elapsed_s:.2f} toks/s"
        )


class PlainBar:
    """A line that is written anew, for machines without tqdm."""

    def __init__(self, *, total: int, desc: str, postfix: str, **_: object) -> None:
        self.postfix = postfix
        self._desc = desc
        self._total = total
        self._done = 0
        self._show()

    def update(self, n: int) -> None:
        """So many more are done."""
        self._done += n
        self._show()

    def close(self) -> None:
        """End the line."""
        sys.stderr.write("\n")
        sys.stderr.flush()

    def _show(self) -> None:
        sys.stderr.write(f"\r{self._desc}: {self._done}/{self._total}, {self.postfix}\033[K")
        sys.stderr.flush()


def _is_seen() -> bool:
    return "ipykernel" in sys.modules or sys.stderr.isatty()


def _default_bar() -> Callable[..., Any]:
    if importlib.util.find_spec("tqdm") is None:
        return PlainBar
    # The bar of notebooks needs ipywidgets, and warns without.
    home = "tqdm.auto" if importlib.util.find_spec("ipywidgets") is not None else "tqdm"
    tqdm = cast("type[Any]", importlib.import_module(home).tqdm)
    # tqdm starts a thread to look after bars that stand still.
    return type("tqdm", (tqdm,), {"monitor_interval": 0})
