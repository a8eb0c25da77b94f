"""LoRA adapters of several cores: requests go to any of them, so what one does not have, none may have.

Each core reads an adapter by itself, which may fail on one machine alone, and makes room by its own use.
"""

from collections.abc import Sequence

from trioengine.errors import UnavailableError
from trioengine.types.messages import ListLoRAs, LoRAInfo


def odd_loras(lists: Sequence[Sequence[LoRAInfo]]) -> Sequence[tuple[int, str]]:
    """The adapters that some cores have and some have not: the core, counted from 0, and the name.

    Args:
        lists: what each core has.
    """
    common = {info.name for info in ListLoRAs.combine(lists)}
    return [(core, info.name) for core, infos in enumerate(lists) for info in infos if info.name not in common]


def check_added(name: str, lists: Sequence[Sequence[LoRAInfo]]) -> None:
    """Return when all cores have an adapter that was added to all.

    Raises:
        UnavailableError: one has forgotten it already.
    """
    if all(info.name != name for info in ListLoRAs.combine(lists)):
        raise UnavailableError(f"The adapter {name!r} has made room for another one that was added at the same time.")
