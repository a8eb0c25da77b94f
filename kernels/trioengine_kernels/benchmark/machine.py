# pyright: basic
"""What a benchmark runs on: the device, and what tells one run from another."""

import importlib.metadata
import subprocess
from pathlib import Path

import torch

from trioengine_kernels.benchmark.cases import Suite
from trioengine_kernels.benchmark.rates import RunFacts
from trioengine_kernels.benchmark.timers import CudaTimer, HostTimer, Timer


class NoCardError(Exception):
    """There is nothing here to measure."""


def open_timer(device: str) -> Timer:
    """The own clock of "cuda" or "cpu".

    Raises:
        NoCardError: torch sees no card.
    """
    if device != "cuda":
        return HostTimer()
    if not torch.cuda.is_available():
        raise NoCardError("torch sees no NVIDIA card here.")
    return CudaTimer()


def open_suite(device: str, dtype: torch.dtype = torch.bfloat16) -> Suite:
    """All cases of the Triton kernels on a device that `open_timer` was content with."""
    from trioengine_kernels.kernel_set import reference_kernels, triton_kernels

    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 0
    # Three times as much, as the card's cache keeps some of what was used last but one.
    return Suite(
        kernels=triton_kernels(),
        reference=reference_kernels(),
        device=torch.device(device),
        cached_bytes=3 * cache_bytes,
        dtype=dtype,
    )


def run_facts(device: str, commit: str | None = None) -> RunFacts:
    """Of a run here and now. `commit`: None asks git, which knows it in a clone only."""
    return RunFacts(
        card=torch.cuda.get_device_name(device) if device == "cuda" else device,
        commit=commit or _commit(Path(__file__).parent),
        torch=torch.__version__,
        triton=importlib.metadata.version("triton"),
    )


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
