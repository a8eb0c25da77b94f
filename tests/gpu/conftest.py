"""Tests that need an NVIDIA card. `make test-gpu` runs them; elsewhere each file is skipped before it is loaded."""

from functools import cache
from pathlib import Path

import pytest

from trioengine.config import env


@cache
def missing() -> str | None:
    """What these tests lack here. Loads torch only where kernels are not interpreted."""
    if env.variables().get("TRITON_INTERPRET") != "0":
        return "Kernels are interpreted in this run; `make test-gpu` runs these on a card."
    from trioengine.worker.device.find import NoGPUError, find_gpu

    try:
        find_gpu(0)
    except NoGPUError as error:
        return str(error)
    return None


class SkippedFile(pytest.Module):
    """A file that is not loaded."""

    def collect(self):
        pytest.skip(missing() or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return SkippedFile.from_parent(parent, path=module_path) if missing() else None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")
