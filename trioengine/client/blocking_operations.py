"""`BlockingOperations`: what an engine can be told to do beside requests, for programs without an event loop.

The operations are those of `client.operations`, whose coroutines wait for nothing but `call`; vLLM's signatures differ
for adapters and `collective_rpc`.
"""

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from trioengine.client.llm_inputs import LoRARequest
from trioengine.client.operations import EngineOperations, JsonValue
from trioengine.config.engine import EngineConfig
from trioengine.errors import RequestError
from trioengine.types.messages import Call, LoRAInfo, ModelFacts, PauseMode

R = TypeVar("R")


class BlockingOperations(ABC):
    """Operations on all cores of an engine. Each returns when the cores have replied, and raises as `call` does."""

    def __init__(self) -> None:
        self._loras: dict[str, LoRARequest] = {}
        """Those that were read for requests, by name."""

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """What the engine was opened with."""

    @property
    @abstractmethod
    def model_config(self) -> ModelFacts:
        """Context length, vocabulary size, end tokens, and what the model can do."""

    @abstractmethod
    def call(self, call: Call[R]) -> R:
        """Run an operation on all cores and return its typed reply: `Call.combine` of theirs."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: "generate", and the names of `PoolingTask`s."""
        return self.operations.get_supported_tasks()

    def reset_prefix_cache(self) -> bool:
        """As `EngineOperations.reset_prefix_cache`."""
        return _run(self.operations.reset_prefix_cache())

    def reset_mm_cache(self) -> None:
        """As `EngineOperations.reset_mm_cache`."""
        _run(self.operations.reset_mm_cache())

    def sleep(self, level: int = 1, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """As `EngineOperations.sleep`."""
        _run(self.operations.sleep(level, mode))

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """As `EngineOperations.wake_up`."""
        _run(self.operations.wake_up(tags))

    def is_sleeping(self) -> bool:
        """As `EngineOperations.is_sleeping`."""
        return _run(self.operations.is_sleeping())

    def is_paused(self) -> bool:
        """As `EngineOperations.is_paused`."""
        return _run(self.operations.is_paused())

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """As `EngineOperations.start_profile`."""
        _run(self.operations.start_profile(profile_prefix))

    def stop_profile(self) -> str:
        """As `EngineOperations.stop_profile`."""
        return _run(self.operations.stop_profile())

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter. False where there is one of this name already."""
        if any(each.name == lora_request.lora_name for each in self._infos()):
            return False
        _run(self.operations.add_lora(lora_request.lora_name, lora_request.lora_path))
        self._loras[lora_request.lora_name] = lora_request
        return True

    def load_lora(self, lora_request: LoRARequest) -> None:
        """Read an adapter where it is not there.

        Raises:
            RequestError: one of this name is there, and it is another.
        """
        name = lora_request.lora_name
        num_places = self.config.max_cpu_loras or self.config.max_loras
        if self._loras.get(name) == lora_request and len(self._loras) <= num_places:
            return  # None can have been evicted.
        for each in self._infos():
            if each.name != name:
                continue
            if lora_request.lora_path and each.path != lora_request.lora_path:
                raise RequestError(f"There is another adapter {name!r}, from {each.path}.", param="lora_request")
            self._loras[name] = lora_request
            return
        self.add_lora(lora_request)

    def remove_lora(self, lora: int | str) -> bool:
        """Refuse further requests of the adapter with this number or name. False where there is none."""
        name = self._loaded_lora(lora)
        if name is not None:
            _run(self.operations.remove_lora(name))
            self._loras.pop(name, None)
        return name is not None

    def pin_lora(self, lora: int | str) -> bool:
        """Keep the adapter with this number or name in memory. False where there is none."""
        name = self._loaded_lora(lora)
        if name is not None:
            _run(self.operations.pin_lora(name))
        return name is not None

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that requests may name, as the requests that brought them gave them."""
        known = self._loras
        return {known[each.name].lora_int_id for each in self._infos() if each.name in known}

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[JsonValue] = (),
        kwargs: Mapping[str, JsonValue] | None = None,
    ) -> list[JsonValue]:
        """Run a method of every worker that is marked for it; their results, rank by rank. `timeout` is not kept.

        Raises:
            RequestError: the method is not marked, or does not take these arguments.
        """
        del timeout
        if args:
            raise RequestError("Arguments of collective_rpc have names: use kwargs.", param="args")
        return list(_run(self.operations.collective_rpc(method, **(kwargs or {}))))

    @property
    def operations(self) -> EngineOperations:
        """All operations, as coroutines that never wait for an event loop: `run_operation` runs one."""
        return _Operations(self)

    def run_operation(self, operation: Coroutine[Any, Any, R]) -> R:
        """The result of one of `operations`' methods, such as `update_weights`."""
        return _run(operation)

    def _infos(self) -> tuple[LoRAInfo, ...]:
        return _run(self.operations.list_loras())

    def _loaded_lora(self, lora: int | str) -> str | None:
        number_names = {each.lora_int_id: name for name, each in self._loras.items()}
        name = number_names.get(lora) if isinstance(lora, int) else lora
        return name if any(each.name == name for each in self._infos()) else None


class _Operations(EngineOperations):
    """The operations over a blocking `call`: their coroutines never wait."""

    def __init__(self, engine: BlockingOperations) -> None:
        self._engine = engine

    @property
    def model_config(self) -> ModelFacts:
        return self._engine.model_config

    async def call(self, call: Call[R]) -> R:
        return self._engine.call(call)


def _run(coroutine: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("an operation waited")
