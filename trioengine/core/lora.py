"""The LoRA adapters of an engine: which there are, which of them the executor has in slots, and who makes room.

A request names an adapter and keeps it to its end, also when it is removed meanwhile. Steps compute with what is in the
slots; an adapter takes one when a request of it starts. This module does not know what an adapter is made of.
"""

from collections.abc import Callable, Collection, Sequence

import attrs

from trioengine.core.executor import LoRALoad
from trioengine.errors import RequestError, UnavailableError
from trioengine.types.messages import LoRAInfo

NO_SLOT = 0


@attrs.define(eq=False)
class LoRAAdapter:
    """An adapter that the executor has read."""

    name: str
    path: str
    lora_id: int
    """No two have the same, also if one comes in the other's place."""
    is_pinned: bool = False
    slot: int = NO_SLOT
    num_running: int = 0
    """Running requests of it. While there are any it keeps its slot."""
    last_use: int = 0
    """Larger is later."""

    @property
    def cache_name(self) -> str:
        """What stands for it in the namespace of cached prefixes."""
        return f"{self.lora_id}:{self.name}"


class LoRAAdapters:
    """All adapters."""

    def __init__(self, max_loras: int, max_cpu_loras: int, remove: Callable[[int], None]) -> None:
        """Begin with none.

        Args:
            max_loras: the executor's slots, 1 to this; 0 refuses all adapters.
            max_cpu_loras: the most adapters that there are at once.
            remove: as `Executor.remove_lora`.
        """
        self._max_loras = max_loras
        self._max_cpu_loras = max_cpu_loras
        self._remove = remove
        self._adapters: dict[str, LoRAAdapter] = {}
        self._reading: list[LoRAAdapter] = []
        self._leaving: list[LoRAAdapter] = []  # Removed ones that requests may still use.
        self._slots: dict[int, LoRAAdapter] = {}
        self._loads: list[LoRALoad] = []
        self._num_uses = 0
        self._next_id = 1

    @property
    def has_leaving(self) -> bool:
        """Whether `forget_unused` may have something to do."""
        return bool(self._leaving)

    def infos(self) -> tuple[LoRAInfo, ...]:
        """All that requests may name, in the order in which they came."""
        return tuple(LoRAInfo(each.name, each.path, each.is_pinned) for each in self._adapters.values())

    def find(self, name: str) -> LoRAAdapter:
        """The adapter that a request names.

        Raises:
            RequestError: there is none.
        """
        return self._find(name, "lora")

    def begin_add(self, name: str, path: str, used: Collection[LoRAAdapter]) -> LoRAAdapter:
        """An adapter that is to be read, and then to be given to `finish_add` or `give_up`.

        Args:
            name: of the adapter.
            path: its folder.
            used: those of unfinished requests.

        Raises:
            RequestError: the name is taken.
            UnavailableError: there is no room, as `finish_add` says.
        """
        self._check_enabled("name")
        if name in self._adapters or any(name == each.name for each in self._reading):
            raise RequestError(f"There is an adapter {name!r} already. Remove it first.", param="name")
        self.forget_unused(used)
        self._check_room(name, used)
        adapter = LoRAAdapter(name, path, self._next_id)
        self._next_id += 1
        self._reading.append(adapter)
        return adapter

    def give_up(self, adapter: LoRAAdapter) -> None:
        """It could not be read."""
        self._reading.remove(adapter)

    def finish_add(self, adapter: LoRAAdapter, used: Collection[LoRAAdapter]) -> None:
        """Let requests name an adapter that the executor has read.

        Where there are as many as there may be, the one goes that was not used for longest.

        Raises:
            UnavailableError: all are in use or pinned. The executor has forgotten it.
        """
        self._reading.remove(adapter)
        self.forget_unused(used)
        try:
            evicted = self._check_room(adapter.name, used)
        except UnavailableError:
            self._remove(adapter.lora_id)
            raise
        self._adapters[adapter.name] = adapter
        self._touch(adapter)
        if evicted is not None:
            self.remove(evicted.name, used)

    def _check_room(self, name: str, used: Collection[LoRAAdapter]) -> LoRAAdapter | None:
        """Who must go; None where there is room."""
        if len(self._adapters) + len(self._leaving) < self._max_cpu_loras:
            return None
        candidates = [each for each in self._adapters.values() if not each.is_pinned and each not in used]
        if not candidates:
            raise UnavailableError(
                f"There is no room for the adapter {name!r}: max_cpu_loras is {self._max_cpu_loras}, and all that"
                " there are is in use or pinned."
            )
        return min(candidates, key=lambda each: each.last_use)

    def remove(self, name: str, used: Collection[LoRAAdapter]) -> None:
        """Let no further request name an adapter. It is forgotten when no unfinished one has it.

        Raises:
            RequestError: there is none.
        """
        self._leaving.append(self._find(name, "name"))
        del self._adapters[name]
        self.forget_unused(used)

    def pin(self, name: str) -> None:
        """Let an adapter not be evicted, neither from memory nor from its slot.

        Raises:
            RequestError: there is none; or no slot would be left for the others.
        """
        adapter = self._find(name, "name")
        num_pinned = sum(each.is_pinned for each in self._adapters.values() if each is not adapter)
        if num_pinned + 1 >= self._max_loras:
            raise RequestError(
                f"One slot must be left for adapters that are not pinned: of {self._max_loras} (max_loras)"
                f" {num_pinned} have pinned ones.",
                param="name",
            )
        adapter.is_pinned = True

    def forget_unused(self, used: Collection[LoRAAdapter]) -> None:
        """Give the memory of removed adapters back that no unfinished request has."""
        for adapter in [each for each in self._leaving if each not in used]:
            self._leaving.remove(adapter)
            self._remove(adapter.lora_id)
            self._slots.pop(adapter.slot, None)

    def has_place(self, adapter: LoRAAdapter) -> bool:
        """Whether a request of this adapter may start: it has a slot, or gets one in which nobody computes."""
        return adapter.slot != NO_SLOT or self._next_slot() is not None

    def start(self, adapter: LoRAAdapter) -> None:
        """Count a request that starts. The adapter has a place, and a slot afterwards."""
        if adapter.slot == NO_SLOT:
            slot = self._next_slot()
            assert slot is not None, "there is no place"
            if slot in self._slots:
                self._slots[slot].slot = NO_SLOT
            self._slots[slot] = adapter
            adapter.slot = slot
            self._loads.append(LoRALoad(slot, adapter.lora_id))
        adapter.num_running += 1
        self._touch(adapter)

    def take_loads(self) -> Sequence[LoRALoad]:
        """What slots the next plan fills."""
        if not self._loads:
            return ()
        loads, self._loads = self._loads, []
        return loads

    def check_integrity(self, running: Sequence[LoRAAdapter]) -> None:
        """Return when the books are right.

        Args:
            running: the adapter of each running request that has one.

        Raises:
            AssertionError: saying what is wrong.
        """
        known = [*self._adapters.values(), *self._leaving]
        if len(self._slots) > self._max_loras or any(
            (each.slot != NO_SLOT or each.num_running > 0) and self._slots.get(each.slot) is not each for each in known
        ):
            raise AssertionError(f"Slots are not as the adapters have them: {self._slots}")
        if any(each.num_running != running.count(each) for each in known) or not set(running) <= set(known):
            raise AssertionError(f"Adapters have other running requests than are counted: {known}")

    def _next_slot(self) -> int | None:
        """A slot that is free, or whose adapter can give it."""
        for slot in range(1, self._max_loras + 1):
            if slot not in self._slots:
                return slot
        idle = [each for each in self._slots.values() if not each.num_running and not each.is_pinned]
        return min(idle, key=lambda each: each.last_use).slot if idle else None

    def _find(self, name: str, param: str) -> LoRAAdapter:
        self._check_enabled(param)
        adapter = self._adapters.get(name)
        if adapter is None:
            raise RequestError(f"There is no adapter {name[:100]!r}.", param=param)
        return adapter

    def _check_enabled(self, param: str) -> None:
        if not self._max_loras:
            raise RequestError("This engine was started without enable_lora.", param=param)

    def _touch(self, adapter: LoRAAdapter) -> None:
        self._num_uses += 1
        adapter.last_use = self._num_uses
