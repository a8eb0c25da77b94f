# pyright: basic
"""Finds code that would wait for a device: `NothingIsRead`."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_READS = {
    *("__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "argwhere", "cpu", "equal", "item"),
    *("masked_select", "nonzero", "numpy", "tolist", "unique", "unique_consecutive"),
}
"""Operations that give numbers of a tensor to the host, or a tensor whose size depends on them."""


class NothingIsRead(TorchFunctionMode):
    """Within it, reading a tensor's numbers on the host is an error, as the host would wait for a real device.

    References of kernels may: they say what is computed, not how.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call it.

        Raises:
            AssertionError: it reads.
        """
        name = getattr(func, "__name__", "")
        if (name in _READS or _chooses_by_a_mask(name, args)) and not _is_in_a_reference():
            raise AssertionError(f"The host would wait for the device: it reads what a tensor holds ({name}).")
        return func(*args, **(kwargs or {}))


def _chooses_by_a_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Then it counts what is chosen first."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in tree_leaves(args[1]))


def _is_in_a_reference() -> bool:
    """Whether the innermost of our functions is one of a reference's."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("trioengine_kernels."):
            return module.rpartition(".")[2] in ("reference", "device_reference")
        if module.startswith("trioengine."):
            return False
        frame = frame.f_back
    return False
