"""The one module that reads the environment: variables, and what the machine lets this process use.

Functions, not constants: each call looks again, so tests and host programs may change the environment.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from trioengine.config.resolve import HardwareFacts
from trioengine.errors import ConfigError

CACHE_VARIABLE = "TRIOENGINE_CACHE"
CPU_KERNELS_VARIABLE = "TRIOENGINE_CPU_KERNELS"
LOG_LEVEL_VARIABLE = "TRIOENGINE_LOG_LEVEL"
API_KEY_VARIABLE = "TRIOENGINE_API_KEY"
LOG_LEVELS = ("debug", "info", "warning", "error")

FLOPS_PER_CPU_PER_S = 50e9
"""fp32 matrix products on one core of a common x86 or ARM machine while the others work too: 72 GFLOP/s were measured
for one core alone and 52 for each of two. Only the size of a step is derived from it, so nothing is measured at start.
"""

_CGROUP = Path("/sys/fs/cgroup")
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""NVIDIA's driver on Linux, and Windows' below its own Linux."""


def cache_dir() -> Path:
    """Where models are kept: `TRIOENGINE_CACHE`, else `trioengine` in the user's cache directory. May not exist yet.

    Raises:
        ConfigError: it would be below a home directory, and there is none.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen := os.environ.get(CACHE_VARIABLE):
            return Path(chosen).expanduser()
        # The XDG specification: a relative path is to be ignored.
        return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "trioengine"
    except RuntimeError as error:
        raise ConfigError(
            f"There is no home directory to keep models in. Set {CACHE_VARIABLE} to a folder.", option=CACHE_VARIABLE
        ) from error


def api_keys() -> tuple[str, ...]:
    """The keys in `TRIOENGINE_API_KEY`, which commas separate."""
    return tuple(key for key in map(str.strip, os.environ.get(API_KEY_VARIABLE, "").split(",")) if key)


def num_passed_sockets() -> int:
    """How many listening sockets systemd has passed to this very process; they begin at descriptor 3."""
    is_ours = os.environ.get("LISTEN_PID") == str(os.getpid())
    count = os.environ.get("LISTEN_FDS", "")
    return int(count) if is_ours and count.isdigit() else 0


def notify_socket() -> str | None:
    """Where systemd wants to hear of this service's state, as `AF_UNIX` names it; None where it does not."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return None
    return "\0" + path[1:] if path.startswith("@") else path


def watchdog_timeout_s() -> float | None:
    """How long systemd lets this process be silent before it ends it; None where it does not."""
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    timeout_us = os.environ.get("WATCHDOG_USEC", "")
    return int(timeout_us) / 1e6 if is_ours and timeout_us.isdigit() and int(timeout_us) > 0 else None


def forget_service_manager() -> None:
    """Keep what systemd says to this process from the processes that it starts."""
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"):
        os.environ.pop(name, None)


def variables() -> Mapping[str, str]:
    """The environment itself, for code that takes it as a value."""
    return os.environ


def log_level() -> str:
    """`TRIOENGINE_LOG_LEVEL` in small letters, "info" when unset.

    Raises:
        ConfigError: it is no level.
    """
    level = os.environ.get(LOG_LEVEL_VARIABLE, "").lower() or "info"
    if level not in LOG_LEVELS:
        raise ConfigError(f"{LOG_LEVEL_VARIABLE} must be one of {', '.join(LOG_LEVELS)}.", option=LOG_LEVEL_VARIABLE)
    return level


def set_default_log_level(level: str) -> None:
    """Make this the level of this process and those it starts, unless the user has set one."""
    os.environ.setdefault(LOG_LEVEL_VARIABLE, level)


def let_compute_threads_sleep() -> None:
    """Make OpenMP's threads sleep while they wait for each other. Does nothing once torch is loaded.

    By default they spin, and as soon as any other process wants a processor each of torch's thousand barriers per step
    lasts a scheduler's time slice: a step that took 0.1 s took 2.7 s. The user's own setting is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def are_cpu_kernels_off() -> bool:
    """Whether `TRIOENGINE_CPU_KERNELS` is "off", which makes torch compute in place of the native kernels.

    Raises:
        ConfigError: it is neither that nor "on".
    """
    setting = os.environ.get(CPU_KERNELS_VARIABLE, "").lower() or "on"
    if setting not in ("on", "off"):
        raise ConfigError(f"{CPU_KERNELS_VARIABLE} must be on or off, not {setting!r}.", option=CPU_KERNELS_VARIABLE)
    return setting == "off"


def may_have_gpu() -> bool:
    """Whether a GPU of NVIDIA's may be there, and `CUDA_VISIBLE_DEVICES` does not hide it: worth asking torch, which
    takes seconds to load."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and visible.partition(",")[0].strip() in ("", "-1")
    return not is_hidden and any(path.exists() for path in _GPU_DEVICES)


def hardware_facts(flops_per_cpu_per_s: float = FLOPS_PER_CPU_PER_S) -> HardwareFacts:
    """What this process may use: its processor set and memory, within the limits of its container (cgroup v2)."""
    num_cpus = _num_cpus()
    return HardwareFacts(num_cpus=num_cpus, ram_bytes=_ram_bytes(), flops_per_s=num_cpus * flops_per_cpu_per_s)


def _num_cpus() -> int:
    # macOS has no processor sets.
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota_us, _, period_us = _read(_CGROUP / "cpu.max").partition(" ")
    if quota_us.isdigit() and period_us.isdigit() and int(period_us) > 0:
        num_cpus = min(num_cpus, -(-int(quota_us) // int(period_us)))
    return max(1, num_cpus)


def _ram_bytes() -> int:
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(_CGROUP / "memory.max")
    return min(ram_bytes, int(limit)) if limit.isdigit() and int(limit) > 0 else ram_bytes


def _read(path: Path) -> str:
    """A small file's content, or nothing: the file systems of containers differ."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
