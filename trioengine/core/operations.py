"""What the core does for each operation (`Call`): one handler each, in one table."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from trioengine.types.codec import encode_reply, error_to_data
from trioengine.types.messages import (
    Call,
    CallRequest,
    CheckIntegrity,
    CoreLoad,
    GetKVCacheEvents,
    GetLoad,
    KVCacheEvents,
    Reply,
)

if TYPE_CHECKING:
    from trioengine.core.engine_core import EngineCore

R = TypeVar("R")
Handler: TypeAlias = "Callable[[EngineCore, Any], object]"


def get_load(core: "EngineCore", _: GetLoad) -> CoreLoad:
    """How much the core has to do."""
    return CoreLoad(
        running=core.scheduler.num_running,
        waiting=core.scheduler.num_waiting,
        free_blocks=core.kv_cache.num_free_blocks,
        total_blocks=core.kv_cache.num_blocks,
    )


def check_integrity(core: "EngineCore", _: CheckIntegrity) -> None:
    """Check the core's books. AssertionError: they are wrong."""
    core.check_integrity()


def get_kv_cache_events(core: "EngineCore", call: GetKVCacheEvents) -> KVCacheEvents:
    """What happened to cached blocks."""
    return core.kv_cache.events_after(call.after)


HANDLERS: Mapping[type[Call[Any]], Handler] = {
    GetLoad: get_load,
    CheckIntegrity: check_integrity,
    GetKVCacheEvents: get_kv_cache_events,
}


def run_call(core: "EngineCore", request: CallRequest) -> Reply:
    """Run an operation. Its value, or whatever it raised, is in the reply."""
    call = request.call
    try:
        value = HANDLERS[type(call)](core, call)
        return Reply(request.call_id, encode_reply(type(call), value))
    except Exception as error:  # A border: the error is the caller's answer, and the core goes on.
        return Reply(request.call_id, error=error_to_data(error))
