"""The routes that operate the engine. They are there with `--enable-admin` only, those of adapters with `--enable-lora`
too.
"""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TypeVar, cast

import attrs
from quart import Response, request

from trioengine.client.operations import JsonValue
from trioengine.errors import CheckpointError, ModelNotFoundError, RequestError
from trioengine.openai.admin_protocol import (
    CollectiveRPCReply,
    DebugQuery,
    IsPausedReply,
    IsSleepingReply,
    PauseQuery,
    ProfileQuery,
    ProfileReply,
    ResetPrefixCacheReply,
    SleepQuery,
    StatusReply,
    WakeUpQuery,
    parse_collective_rpc_request,
    parse_query,
)
from trioengine.openai.models import parse_load_lora_request, parse_unload_lora_request
from trioengine.server.context import ServerContext
from trioengine.server.open_requests import OpenRequestInfo
from trioengine.server.replies import json_response
from trioengine.server.routes.request import json_reply, read_body
from trioengine.server.task_tree import TaskTree, render_tree, task_tree

Q = TypeVar("Q", bound=attrs.AttrsInstance)


@attrs.frozen
class DebugReply:
    """The reply of `GET /debug/tasks`."""

    requests: tuple[OpenRequestInfo, ...]
    """Those that this process answers at the moment, the oldest first."""
    tasks: TaskTree


async def load_lora_adapter(context: ServerContext) -> Response:
    """Let requests name a LoRA adapter of the engine's machine."""
    body = await read_body(parse_load_lora_request)
    context.check_unknown(body)
    engine = context.engine
    if body.lora_name in (engine.model_name, *context.config.model_alias):
        raise RequestError("lora_name is a name of the served model's own.", param="lora_name")
    loras = await context.refresh_loras()
    if body.load_inplace and any(lora.name == body.lora_name for lora in loras):
        await engine.remove_lora(body.lora_name)
    with _body_params():
        await engine.add_lora(body.lora_name, body.lora_path)
    await context.refresh_loras()
    return _status("loaded")


async def unload_lora_adapter(context: ServerContext) -> Response:
    """Refuse further requests of a LoRA adapter."""
    body = await read_body(parse_unload_lora_request)
    context.check_unknown(body)
    await context.refresh_loras()
    if body.lora_name not in context.loras:
        raise ModelNotFoundError(f"There is no adapter `{body.lora_name[:100]}` here.", param="lora_name")
    with _body_params():
        await context.engine.remove_lora(body.lora_name)
    await context.refresh_loras()
    return _status("unloaded")


async def sleep(context: ServerContext) -> Response:
    """Pause, then give memory back until `/wake_up`."""
    query = _query(SleepQuery)
    await context.run_to_end(lambda: context.engine.sleep(query.level, query.mode))
    return _status("sleeping")


async def wake_up(context: ServerContext) -> Response:
    """Take memory again."""
    query = _query(WakeUpQuery)
    await context.run_to_end(lambda: context.engine.wake_up(query.tags))
    return _status("awake")


async def is_sleeping(context: ServerContext) -> Response:
    """Whether some memory is given back."""
    return json_reply(IsSleepingReply(await context.run_to_end(context.engine.is_sleeping)))


async def pause(context: ServerContext) -> Response:
    """Let new requests wait until `/resume`. Answers when nothing is computed any more."""
    query = _query(PauseQuery)
    await context.run_to_end(lambda: context.engine.pause_generation(mode=query.mode, clear_cache=query.clear_cache))
    return _status("paused")


async def resume(context: ServerContext) -> Response:
    """End a pause."""
    await context.run_to_end(context.engine.resume_generation)
    return _status("resumed")


async def is_paused(context: ServerContext) -> Response:
    """Whether requests wait for the end of a pause or a sleep."""
    return json_reply(IsPausedReply(await context.run_to_end(context.engine.is_paused)))


async def reset_prefix_cache(context: ServerContext) -> Response:
    """Forget cached prefixes."""
    return json_reply(ResetPrefixCacheReply(await context.run_to_end(context.engine.reset_prefix_cache)))


async def collective_rpc(context: ServerContext) -> Response:
    """Run a method of every worker that is marked for it."""
    body = await read_body(parse_collective_rpc_request)
    context.check_unknown(body)
    kwargs = cast("Mapping[str, JsonValue]", body.kwargs)
    results = await context.run_to_end(
        lambda: context.engine.collective_rpc(body.method, **kwargs), timeout_s=body.timeout
    )
    return json_reply(CollectiveRPCReply(tuple(results)))


async def start_profile(context: ServerContext) -> Response:
    """Record what the cores compute."""
    query = _query(ProfileQuery)
    await context.run_to_end(lambda: context.engine.start_profile(query.prefix))
    return _status("profiling")


async def stop_profile(context: ServerContext) -> Response:
    """End the record and write it."""
    return json_reply(ProfileReply(await context.run_to_end(context.engine.stop_profile)))


async def debug_tasks(context: ServerContext) -> Response:
    """What every task of this process waits for, and its open requests. Texts and tokens are not in it."""
    query = _query(DebugQuery)
    if query.format not in ("json", "text"):
        raise RequestError("format must be json or text.", param="format")
    tree, requests = task_tree(), tuple(context.open_requests.infos())
    if query.format == "json":
        return json_response(json.dumps(attrs.asdict(DebugReply(requests, tree)), separators=(",", ":")).encode())
    lines = [
        f"{info.id}  {info.path}  {info.state}  {info.age_s} s  {info.num_prompt_tokens} + {info.num_tokens} tokens\n"
        for info in requests
    ]
    return Response("".join(lines) + "\n" + render_tree(tree), content_type="text/plain; charset=utf-8")


@contextmanager
def _body_params() -> Generator[None]:
    """The engine's errors name the operation's arguments; the body has other names for them."""
    try:
        yield
    except RequestError as error:
        param = {"name": "lora_name", "lora": "lora_name", "path": "lora_path"}.get(error.param or "")
        raise attrs.evolve(error, param=param or error.param) from None
    except CheckpointError as error:
        # What a folder holds that a caller names is the caller's fault.
        raise RequestError(error.message, param="lora_path") from None


def _status(status: str) -> Response:
    return json_reply(StatusReply(status))


def _query(query_class: type[Q]) -> Q:
    return parse_query({name: request.args.getlist(name) for name in request.args}, query_class)
