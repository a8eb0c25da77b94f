"""New weights for a core that computes: which calls may follow which, and when they begin to count.

`InitWeightTransfer` says how they come and begins anew, whatever came before it and is not finished. `UpdateWeights`
may be called as often as needed, `FinishWeightUpdate` after at least one; the next update needs no further
`InitWeightTransfer`. One of these calls at a time: each is to be answered before the next is sent.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import attrs

from trioengine.core.background import Later
from trioengine.errors import RequestError, UnavailableError
from trioengine.types.messages import FinishWeightUpdate, InitWeightTransfer, UpdateWeights

if TYPE_CHECKING:
    from trioengine.core.engine_core import EngineCore

METHODS = ("message", "file")
MAX_VERSION_CHARS = 200

R = TypeVar("R")


@attrs.define
class WeightUpdate:
    """What has come so far."""

    method: str | None = None
    """None before `InitWeightTransfer`."""
    has_tensors: bool = False
    """Whether some came since the last one was finished."""
    is_busy: bool = False
    """Whether an operation is not answered yet."""
    num_finished: int = 0


def init_weight_transfer(core: "EngineCore", call: InitWeightTransfer) -> None:
    """Begin anew."""
    if call.method not in METHODS:
        raise RequestError(f"method must be one of {', '.join(METHODS)}, not {call.method[:50]!r}.", param="method")
    update = _free(core)
    core.executor.discard_weights()
    update.method, update.has_tensors = call.method, False


def update_weights(core: "EngineCore", call: UpdateWeights) -> Later:
    """Check and keep tensors. What is computed does not change."""
    update = _begun(core)
    if update.method == "message" and (call.path is not None or not call.tensors):
        raise RequestError("This transfer is by message: give tensors, and no path.", param="tensors")
    if update.method == "file" and (call.path is None or call.tensors):
        raise RequestError("This transfer is by file: give a path, and no tensors.", param="path")

    def done(_: None) -> None:
        update.has_tensors = True

    return _later(core, partial(core.executor.update_weights, call), done)


def finish_weight_update(core: "EngineCore", call: FinishWeightUpdate) -> Later:
    """Make the new model beside the steps; then, between two of them, compute with it."""
    update = _begun(core)
    if not update.has_tensors:
        raise RequestError("No weights have come since the last update was finished.")
    version = str(update.num_finished + 1) if call.weight_version is None else call.weight_version
    if not 0 < len(version) <= MAX_VERSION_CHARS:
        raise RequestError(f"weight_version must have 1 to {MAX_VERSION_CHARS} characters.", param="weight_version")
    _check_awake(core)
    num_old_steps: int | None = None  # So many steps were planned when the weights changed.

    def apply(_: None) -> None:
        nonlocal num_old_steps
        _check_awake(core)  # It may have gone to sleep meanwhile.
        core.executor.apply_weights()
        core.kv_cache.reset_prefix_cache()
        update.has_tensors = False
        update.num_finished += 1
        num_old_steps = core.scheduler.num_steps

    applied = _later(core, core.executor.prepare_weights, apply)

    def attempt() -> bool:
        if num_old_steps is None and not applied.attempt():
            return False
        assert num_old_steps is not None
        scheduler = core.scheduler
        # What was in flight is of the old weights, and so is its output.
        if scheduler.num_in_flight and scheduler.num_steps - scheduler.num_in_flight <= num_old_steps:
            return False
        core.weight_version = version
        return True

    return Later(attempt, lambda: version)


def _later(core: "EngineCore", work: Callable[[], R], then: Callable[[R], None]) -> Later:
    """Have work done beside the steps, and go on in the loop."""
    update = core.weight_update
    update.is_busy = True
    job = core.background.start(work)

    def attempt() -> bool:
        if not job.is_done:
            return False
        update.is_busy = False
        then(job.result())
        return True

    return Later(attempt)


def _free(core: "EngineCore") -> WeightUpdate:
    if core.weight_update.is_busy:
        raise RequestError("The call before this one is not answered yet.")
    return core.weight_update


def _begun(core: "EngineCore") -> WeightUpdate:
    update = _free(core)
    if update.method is None:
        raise RequestError("Call init_weight_transfer first.")
    return update


def _check_awake(core: "EngineCore") -> None:
    if "weights" in core.pause.asleep:
        raise UnavailableError("The weights are asleep. Wake them up before the update is finished.")
