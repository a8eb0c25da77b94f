# pyright: basic
"""Records torch's operations, by its own profiler."""

import contextlib
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function


class TorchProfile:
    """A record of the operations of the thread that begins it, and of what the GPU does, where there is one."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def span(self, name: str, **facts: int) -> contextlib.AbstractContextManager[object]:
        """As `Profile.span`; torch keeps facts as text."""
        return record_function(name, ", ".join(f"{key}={value}" for key, value in facts.items()))

    def write(self, path: Path) -> None:
        """As `Profile.write`."""
        self._profiler.stop()
        try:
            self._profiler.export_chrome_trace(str(path))
        except RuntimeError as error:  # What torch says of a file that cannot be written.
            raise OSError(str(error)) from error
