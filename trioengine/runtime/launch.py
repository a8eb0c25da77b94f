"""What a new core process is told, and how: through the pipe whose end also tells it that its parent is gone."""

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import attrs
from cattrs import Converter

from trioengine.checkpoint.locate import ModelLocation
from trioengine.config.engine import EngineConfig
from trioengine.transport.address import Endpoint
from trioengine.types.codec import make_strict_converter, pack, unpack

_LENGTH = struct.Struct("=I")


@attrs.frozen
class CoreLaunch:
    """Everything a core process starts from. Secret (it may hold keys): never in arguments or the environment."""

    endpoints: tuple[Endpoint, ...]
    """Of its front ends. The first is that of the core's owner, which hears how loading goes, and alone says `Stop`."""
    rank: int
    page_fd: int
    config: EngineConfig
    model: ModelLocation
    draft_model: ModelLocation | None = None
    """Where `EngineConfig.draft_model` is."""
    options: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """For cores other than the real one, which takes none."""


def write_launch(fd: int, launch: CoreLaunch) -> None:
    """Write it into the pipe, which stays open for as long as this process wants the core to live.

    Well under a pipe's capacity, so it never blocks.
    """
    data = pack(launch_converter.unstructure(launch))
    os.write(fd, _LENGTH.pack(len(data)) + data)


def read_launch(fd: int) -> CoreLaunch:
    """What the parent wrote.

    Raises:
        EOFError: the parent is gone.
    """
    (length,) = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size))
    return launch_converter.structure(unpack(_read_exactly(fd, length)), CoreLaunch)


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = os.read(fd, num_bytes - len(data))
        if not part:
            raise EOFError("The parent process has gone.")
        data += part
    return data


def _make_converter() -> Converter:
    converter = make_strict_converter(forbid_extra_keys=True)
    converter.register_structure_hook(Path, lambda value, _: Path(value))
    converter.register_unstructure_hook(Path, str)
    return converter


launch_converter = _make_converter()
"""Between a launch, or anything made of the same parts, and plain data."""
