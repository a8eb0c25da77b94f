# pyright: basic
"""Looks for a GPU that this engine can compute on. Loads torch only where there may be one."""

import importlib.util

from trioengine.config import env
from trioengine.config.resolve import GPUFacts
from trioengine.errors import ConfigError

MIN_CAPABILITY = 80
"""Ampere and newer: bfloat16, asynchronous copies, and the architectures that kernels are compiled for in tests."""


class NoGPUError(Exception):
    """There is none that can be used. The text says why, in whole sentences."""


def find_gpu(index: int) -> GPUFacts:
    """The GPU of the core that has this place among those of this machine.

    Raises:
        NoGPUError: there is none for any core.
        ConfigError: there are some, and fewer than cores.
    """
    if not env.may_have_gpu():
        raise NoGPUError("There is no GPU of NVIDIA's here, or CUDA_VISIBLE_DEVICES hides it.")
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise NoGPUError(f"{package} is not installed: pip install 'trioengine[gpu]'.")
    import torch

    if torch.version.cuda is None:
        raise NoGPUError("The torch that is installed was built without CUDA: pip install one with it.")
    if not torch.cuda.is_available():
        raise NoGPUError("torch can use none; NVIDIA's driver may be older than torch's CUDA, or not loaded.")
    num_gpus = torch.cuda.device_count()
    if index >= num_gpus:
        raise ConfigError(
            f"Each core has a GPU of its own, and torch sees {num_gpus}, too few for core {index}. Lower"
            " data_parallel_size, or let the processors compute with device cpu.",
            option="data_parallel_size",
        )
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    if 10 * major + minor < MIN_CAPABILITY:
        raise NoGPUError(
            f"{name} has compute capability {major}.{minor}; {MIN_CAPABILITY // 10}.0 (Ampere) or newer is needed."
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return GPUFacts(name, 10 * major + minor, total_bytes, free_bytes)
