"""What the core does for each operation (`Call`): one handler each, in one table."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs

from trioengine.core.background import Later
from trioengine.core.pause import MEMORY_TAGS
from trioengine.core.weights import finish_weight_update, init_weight_transfer, update_weights
from trioengine.errors import RequestError
from trioengine.types.codec import encode_reply, error_to_data
from trioengine.types.messages import (
    AddLoRA,
    Call,
    CallRequest,
    CheckIntegrity,
    CollectiveRPC,
    CoreLoad,
    CoreStats,
    FinishWeightUpdate,
    GetKVCacheEvents,
    GetLoad,
    GetStats,
    InitWeightTransfer,
    IsPaused,
    IsSleeping,
    KVCacheEvents,
    ListLoRAs,
    LoRAInfo,
    PauseGeneration,
    PauseMode,
    PinLoRA,
    RemoveLoRA,
    Reply,
    ResetMMCache,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
)
from trioengine.types.request import MAX_LORA_NAME_CHARS

if TYPE_CHECKING:
    from trioengine.core.engine_core import EngineCore

R = TypeVar("R")

_PROFILE_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


Handler: TypeAlias = "Callable[[EngineCore, Any], object]"


def get_load(core: "EngineCore", _: GetLoad) -> CoreLoad:
    """How much the core has to do."""
    return CoreLoad(
        running=core.scheduler.num_running,
        waiting=core.num_waiting,
        free_blocks=core.kv_cache.num_free_blocks,
        total_blocks=core.kv_cache.num_blocks,
    )


def get_stats(core: "EngineCore", _: GetStats) -> CoreStats:
    """What the core has done."""
    cache, speculator = core.kv_cache.statistics, core.scheduler.drafting.speculator
    drafts = speculator.statistics if speculator else None
    return CoreStats(
        running=core.scheduler.num_running,
        waiting=core.num_waiting,
        kv_cache_usage=core.kv_cache.usage,
        num_steps=core.scheduler.num_steps,
        num_preemptions=core.scheduler.num_preemptions,
        num_prefix_cache_queries=cache.num_queried_tokens,
        num_prefix_cache_hits=cache.num_hit_tokens,
        num_evicted_blocks=cache.num_evicted_blocks,
        num_offloaded_blocks=cache.num_saved_blocks,
        num_loaded_blocks=cache.num_loaded_blocks,
        num_drafts=drafts.num_drafts if drafts else 0,
        num_draft_tokens=drafts.num_draft_tokens if drafts else 0,
        num_accepted_tokens=drafts.num_accepted_tokens if drafts else 0,
        num_accepted_tokens_per_pos=tuple(drafts.num_accepted_tokens_per_pos) if drafts else (),
    )


def check_integrity(core: "EngineCore", _: CheckIntegrity) -> None:
    """Check the core's books. AssertionError: they are wrong."""
    core.check_integrity()


def get_kv_cache_events(core: "EngineCore", call: GetKVCacheEvents) -> KVCacheEvents:
    """What happened to cached blocks."""
    return core.kv_cache.events_after(call.after)


def reset_prefix_cache(core: "EngineCore", _: ResetPrefixCache) -> bool:
    """Forget cached prefixes, unless requests hold some."""
    if core.scheduler.num_running:
        return False
    core.kv_cache.reset_prefix_cache()
    return True


def reset_mm_cache(core: "EngineCore", _: ResetMMCache) -> None:
    """Nothing: no model takes images or sounds."""


def pause_generation(core: "EngineCore", call: PauseGeneration) -> Later:
    """Pause; done when nothing is computed any more."""
    core.begin_pause(call.mode)
    awaited = core.awaited_ids()

    def attempt() -> bool:
        if core.pause.mode is None:  # It was resumed before it was there.
            return True
        if core.has_any_of(awaited):
            return False
        if call.clear_cache:
            core.scheduler.preempt_all()
        if not core.scheduler.is_idle:
            return False
        if call.clear_cache:
            core.kv_cache.reset_prefix_cache()
        return True

    return Later(attempt)


def resume_generation(core: "EngineCore", _: ResumeGeneration) -> None:
    """End a pause."""
    core.pause.mode = None
    core.apply_pause()


def is_paused(core: "EngineCore", _: IsPaused) -> bool:
    """Whether requests wait."""
    return core.pause.is_on


def sleep(core: "EngineCore", call: Sleep) -> Later:
    """Pause, and then sleep. Requests that are kept are computed again after waking up."""
    if call.level not in (1, 2):
        raise RequestError(f"level must be 1 or 2, not {call.level}.", param="level")
    core.begin_pause(call.mode, is_sleep=True)
    awaited = core.awaited_ids()

    def attempt() -> bool:
        pause = core.pause
        if pause.asleep or pause.sleep_mode is None:  # It sleeps already, or was woken up before it did.
            return True
        if core.has_any_of(awaited):
            return False
        pause.sleep_mode = PauseMode.KEEP  # Whoever has come since is kept.
        core.apply_pause()
        core.scheduler.preempt_all()
        if not core.scheduler.is_idle or core.is_in_wave:
            return False
        core.kv_cache.reset_prefix_cache()
        try:
            core.executor.sleep(call.level)
        except Exception:
            pause.sleep_mode = None
            core.apply_pause()
            raise
        pause.asleep = frozenset(MEMORY_TAGS)
        return True

    return Later(attempt)


def wake_up(core: "EngineCore", call: WakeUp) -> None:
    """Take memory again; go on when nothing sleeps any more."""
    tags = core.pause.wake_up(call.tags)
    if tags:
        core.executor.wake_up(sorted(tags))
    core.pause.asleep -= tags
    if not core.pause.asleep:
        core.pause.sleep_mode = None
        core.apply_pause()


def is_sleeping(core: "EngineCore", _: IsSleeping) -> bool:
    """Whether some memory is given back."""
    return bool(core.pause.asleep)


def add_lora(core: "EngineCore", call: AddLoRA) -> Later:
    """Have an adapter read beside the steps."""
    if not 0 < len(call.name) <= MAX_LORA_NAME_CHARS:
        raise RequestError(f"name must have 1 to {MAX_LORA_NAME_CHARS} characters.", param="name")
    adapter = core.loras.begin_add(call.name, call.path, core.used_loras())
    job = core.background.start(lambda: core.executor.add_lora(adapter.lora_id, adapter.path))

    def attempt() -> bool:
        if not job.is_done:
            return False
        try:
            job.result()
        except Exception:
            core.loras.give_up(adapter)
            raise
        core.loras.finish_add(adapter, core.used_loras())
        return True

    return Later(attempt)


def remove_lora(core: "EngineCore", call: RemoveLoRA) -> None:
    """Let no further request use an adapter."""
    core.loras.remove(call.name, core.used_loras())


def list_loras(core: "EngineCore", _: ListLoRAs) -> tuple[LoRAInfo, ...]:
    """What adapters there are."""
    return core.loras.infos()


def pin_lora(core: "EngineCore", call: PinLoRA) -> None:
    """Keep an adapter."""
    core.loras.pin(call.name)


def start_profile(core: "EngineCore", call: StartProfile) -> None:
    """Record what is computed."""
    if call.prefix is not None and not _PROFILE_PREFIX.fullmatch(call.prefix):
        raise RequestError(
            "prefix must have 1 to 100 letters, digits, '-', '_' and '.', and begin with a letter or a digit.",
            param="prefix",
        )
    core.executor.start_profile(call.prefix)


def stop_profile(core: "EngineCore", _: StopProfile) -> str:
    """End the record."""
    return core.executor.stop_profile()


def collective_rpc(core: "EngineCore", call: CollectiveRPC) -> tuple[str, ...]:
    """Call a method of all workers."""
    return tuple(core.executor.collective_rpc(call.method, call.arguments))


HANDLERS: Mapping[type[Call[Any]], Handler] = {
    GetLoad: get_load,
    GetStats: get_stats,
    CheckIntegrity: check_integrity,
    GetKVCacheEvents: get_kv_cache_events,
    ResetPrefixCache: reset_prefix_cache,
    ResetMMCache: reset_mm_cache,
    PauseGeneration: pause_generation,
    ResumeGeneration: resume_generation,
    IsPaused: is_paused,
    Sleep: sleep,
    WakeUp: wake_up,
    IsSleeping: is_sleeping,
    AddLoRA: add_lora,
    RemoveLoRA: remove_lora,
    ListLoRAs: list_loras,
    PinLoRA: pin_lora,
    StartProfile: start_profile,
    StopProfile: stop_profile,
    CollectiveRPC: collective_rpc,
    InitWeightTransfer: init_weight_transfer,
    UpdateWeights: update_weights,
    FinishWeightUpdate: finish_weight_update,
}


@attrs.frozen(eq=False)
class DeferredReply:
    """A reply that is not ready yet."""

    client: int | None
    """None when it is gone."""
    call_id: int
    call_class: type[Call[object]]
    later: Later

    def attempt(self) -> Reply | None:
        """Go on with the operation; the reply when it is done, or has failed."""
        try:
            is_done = self.later.attempt()
        except Exception as error:  # A border, as below.
            return Reply(self.call_id, error=error_to_data(error))
        return Reply(self.call_id, encode_reply(self.call_class, self.later.value())) if is_done else None


def run_call(core: "EngineCore", client: int, request: CallRequest) -> Reply | DeferredReply:
    """Run an operation. Its value, or whatever it raised, is in the reply."""
    call = request.call
    try:
        value = HANDLERS[type(call)](core, call)
        if isinstance(value, Later):
            return DeferredReply(client, request.call_id, type(call), value)
        return Reply(request.call_id, encode_reply(type(call), value))
    except Exception as error:  # A border: the error is the caller's answer, and the core goes on.
        return Reply(request.call_id, error=error_to_data(error))
