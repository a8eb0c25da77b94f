"""`EngineOperations`: what an engine can be told to do beside requests, each a thin method over one `Call`.

Written once: the real engine, its fake and the portal from asyncio share it, so it knows no event loop.
"""

import json
from collections.abc import Iterable
from typing import Protocol, TypeAlias, TypeVar

from trioengine.errors import RequestError
from trioengine.types.messages import (
    AddLoRA,
    Call,
    CollectiveRPC,
    FinishWeightUpdate,
    InitWeightTransfer,
    IsPaused,
    IsSleeping,
    ListLoRAs,
    LoRAInfo,
    ModelFacts,
    PauseGeneration,
    PauseMode,
    PinLoRA,
    RemoveLoRA,
    ResetMMCache,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
    WeightTensor,
)

R = TypeVar("R")

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

GENERATE_TASK = "generate"


class EngineOperations(Protocol):
    """Operations on all cores of an engine. Names are vLLM's.

    Each waits for the cores' reply. Cancelling stops the waiting, not the operation.

    Raises:
        EngineDeadError: the engine died before the reply.
        RequestError: an argument cannot work.
        TrioEngineError: the operation failed; its message says why.
    """

    @property
    def model_config(self) -> ModelFacts:
        """Context length, vocabulary size, end tokens, and what the model can do."""
        ...

    async def call(self, call: Call[R]) -> R:
        """Run an operation on all cores and return its typed reply: `Call.combine` of theirs."""
        ...

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: "generate", and the names of `PoolingTask`s."""
        model = self.model_config
        tasks = (GENERATE_TASK,) if model.can_generate else ()
        return tasks if model.pooling is None else (*tasks, *(task.value for task in model.pooling.tasks))

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what the cores compute until `stop_profile`."""
        await self.call(StartProfile(profile_prefix))

    async def stop_profile(self) -> str:
        """End the record. Returns the path of the trace of rank 0, on the core's machine."""
        return await self.call(StopProfile())

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing is forgotten, where requests hold blocks."""
        return await self.call(ResetPrefixCache())

    async def reset_mm_cache(self) -> None:
        """Forget what was kept of images and sounds."""
        await self.call(ResetMMCache())

    async def sleep(self, level: int = 1, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Pause, then give memory back until `wake_up`: level 1 that of the KV cache, 2 that of the weights too."""
        await self.call(Sleep(level, _pause_mode(mode)))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory again: "weights", "kv_cache", or both where none is named."""
        await self.call(WakeUp(tuple(tags or ())))

    async def is_sleeping(self) -> bool:
        """Whether some memory is given back."""
        return await self.call(IsSleeping())

    async def pause_generation(self, *, mode: PauseMode | str = PauseMode.ABORT, clear_cache: bool = True) -> None:
        """Let new requests wait until `resume_generation`. Returns when nothing is computed any more.

        Args:
            mode: what becomes of the requests that are there.
            clear_cache: forget what was computed, as new weights need.
        """
        await self.call(PauseGeneration(_pause_mode(mode), clear_cache))

    async def resume_generation(self) -> None:
        """End a pause."""
        await self.call(ResumeGeneration())

    async def is_paused(self) -> bool:
        """Whether requests wait for the end of a pause or a sleep."""
        return await self.call(IsPaused())

    async def add_lora(self, name: str, path: str) -> None:
        """Read an adapter (PEFT's format) from a folder of the core's machine, for requests that name it."""
        await self.call(AddLoRA(name, path))

    async def remove_lora(self, name: str) -> None:
        """Refuse further requests of an adapter."""
        await self.call(RemoveLoRA(name))

    async def list_loras(self) -> tuple[LoRAInfo, ...]:
        """The adapters that requests may name."""
        return await self.call(ListLoRAs())

    async def pin_lora(self, name: str) -> None:
        """Keep an adapter in memory, however many others come."""
        await self.call(PinLoRA(name))

    async def collective_rpc(self, method: str, **kwargs: JsonValue) -> tuple[JsonValue, ...]:
        """Run a method of every worker that is marked for it, with these arguments; their results, rank by rank.

        Raises:
            RequestError: the method is not marked, or does not take these arguments.
        """
        if not isinstance(method, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("method must be the name of a method that is marked for it.", param="method")
        try:
            arguments = json.dumps(kwargs, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"The arguments are no JSON: {error}", param="kwargs") from None
        return tuple(json.loads(result) for result in await self.call(CollectiveRPC(method, arguments)))

    async def init_weight_transfer(self, method: str = "message") -> None:
        """Get ready for new weights, which come with `update_weights` ("message") or lie in files ("file")."""
        await self.call(InitWeightTransfer(method))

    async def update_weights(self, tensors: Iterable[WeightTensor] = (), *, path: str | None = None) -> None:
        """Send some new weights, or name the safetensors file that they are in. The others stay as they are."""
        await self.call(UpdateWeights(tuple(tensors), path))

    async def finish_weight_update(self, weight_version: str | None = None) -> str:
        """Compute with the new weights from the next step on. Returns their version; None counts up."""
        return await self.call(FinishWeightUpdate(weight_version))


def _pause_mode(mode: PauseMode | str) -> PauseMode:
    try:
        return PauseMode(mode)
    except ValueError:
        raise RequestError(f"mode must be one of {', '.join(PauseMode)}, not {mode!r}.", param="mode") from None
