"""`start_cores`: engine cores as processes of this machine, and what other processes attach to them by.

Most applications want `open_engine`, which is this and an engine over it. A supervisor of several API servers starts
the cores itself and gives each server an `Attachment`:

    async with start_cores(config, num_clients=2) as cores:
        ready = await cores.wait_ready()
        for attachment in cores.attachments:
            ...  # start a process with pass_fds=attachment.fds, write attachment.to_bytes() into a pipe to it

    async with attach_engine(Attachment.from_bytes(data)) as engine:  # in that process
        ...
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from tempfile import TemporaryDirectory

import attrs
import trio

from trioengine.checkpoint.locate import FetchProgress, ModelLocation, resolve_model
from trioengine.client.link import CoreLink, LinkClient, OnProgress, WatchedCore, check_lockstep
from trioengine.client.remote_core import RemoteCore
from trioengine.config import env
from trioengine.config.engine import EngineConfig
from trioengine.errors import ConfigError, EngineClosedError, EngineDeadError
from trioengine.frontend.frontend import Frontend
from trioengine.runtime.core_handle import CORE_MODULE, CoreAttachment, CoreHandle
from trioengine.runtime.launch import CoreLaunch, launch_converter
from trioengine.transport.address import (
    Endpoint,
    create_endpoint,
    create_network_endpoint,
    fixed_port,
    read_or_make_keys,
)
from trioengine.transport.interface import FrontEndSocket
from trioengine.transport.topology import bind_router
from trioengine.types.codec import pack, unpack
from trioengine.types.messages import Ready


@attrs.frozen
class Attachment:
    """Everything that one more client of running cores starts from; see `attach_engine`.

    Secret (it may hold keys): give it to a process through a pipe, never in its arguments or environment. Each is for
    one client, once.
    """

    endpoint: Endpoint
    config: EngineConfig
    model: ModelLocation
    cores: tuple[CoreAttachment, ...]
    metrics_folder: str
    """Where the clients show each other what they count, for `/metrics`. It goes with the cores."""

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that the process must inherit, under the same numbers (`pass_fds`)."""
        return tuple(fd for core in self.cores for fd in core.fds)

    def to_bytes(self) -> bytes:
        """For a pipe."""
        return pack(launch_converter.unstructure(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Attachment":
        """What `to_bytes` was called on."""
        return launch_converter.structure(unpack(data), cls)


@attrs.frozen
class Cores:
    """Running cores, and this process's own link to them, by which it hears how they do and ends them."""

    config: EngineConfig
    model: ModelLocation
    attachments: Sequence[Attachment]
    """One for each of the other clients."""
    frontend: Frontend
    link: CoreLink

    async def wait_ready(self, on_progress: OnProgress | None = None) -> Sequence[Ready]:
        """Wait until all cores take requests; what each has said, by rank.

        Raises:
            CheckpointError, ConfigError, EngineStartError: why one cannot start.
        """
        timeout_s = self.config.startup_timeout_s
        readies = await self.link.wait_ready(on_progress or ignore_progress, timeout_s=timeout_s)
        check_lockstep(self.config, readies[0])
        return readies

    @property
    def dead_error(self) -> EngineDeadError | EngineClosedError | None:
        """Why the cores are gone; None while all live."""
        return self.frontend.dead_error

    def check_health(self) -> None:
        """Return while all cores live and make progress.

        Raises:
            EngineDeadError, EngineClosedError: they do not.
        """
        check_health(self.frontend, self.link)


def check_health(frontend: Frontend, link: CoreLink) -> None:
    """Return while all cores live and make progress; raise why not."""
    if frontend.dead_error is not None:
        raise attrs.evolve(frontend.dead_error)
    trouble = link.trouble()
    if trouble is not None:
        raise trouble


@asynccontextmanager
async def start_cores(
    config: EngineConfig | None = None,
    *,
    num_clients: int = 0,
    make_client: Callable[[ModelLocation, int], LinkClient] | None = None,
    on_progress: OnProgress | None = None,
    core_module: str = CORE_MODULE,
    core_options: Mapping[str, str] | None = None,
) -> AsyncGenerator[Cores, None]:
    """Engine cores for the length of the block: those that `config` wants on this machine. They load meanwhile.

    Args:
        config: which model, how many cores, and how to run them; the default model when None.
        num_clients: how many other clients, usually processes, will attach to them.
        make_client: what this process's own link works for, made from the model and the number of cores.
        on_progress: called with a stage and a fraction (0 to 1) while the model is fetched.
        core_module: another core's entry module, for tests and benchmarks; `core_options` is for it.

    Leaving the block ends the cores, and what other clients have open, with `EngineDeadError`. Exceptions of the block
    leave it as themselves, not in a group. Cancelling leaves no process behind.

    Raises:
        ConfigError, CheckpointError, EngineStartError: no process is left behind.
    """
    config = EngineConfig() if config is None else config
    if config.has_remote_cores and num_clients:
        raise ConfigError("Cores on other machines have one client only.", option="data_parallel_size_local")
    progress = on_progress or ignore_progress
    location = await _find_model(config.model, progress, config.revision)
    draft_location = None if config.draft_model is None else await _find_model(config.draft_model, progress)
    with ExitStack() as stack:
        endpoint = stack.enter_context(_owners_endpoint(config))
        others = [
            stack.enter_context(fixed_port(stack.enter_context(create_endpoint(env.variables()))))
            for _ in range(num_clients)
        ]
        bound = bind_router(endpoint)
        stack.callback(bound.socket.close)
        handles: list[CoreHandle] = []
        cores: dict[int, WatchedCore] = {}
        try:
            for rank in config.local_ranks:
                launch = CoreLaunch(
                    endpoints=(bound.endpoint.for_core(), *(other.for_core() for other in others)),
                    rank=rank,
                    page_fd=-1,
                    config=config,
                    model=location,
                    draft_model=draft_location,
                    options=core_options or {},
                )
                cores[rank] = handle = await CoreHandle.start(launch, core_module)
                stack.callback(handle.close)
                handles.append(handle)
            for rank in config.remote_ranks:
                cores[rank] = RemoteCore(rank, config.step_timeout_s)
            client = (make_client or _make_client)(location, len(cores))
            attached = tuple(handle.attachment for handle in handles)
            metrics_folder = ""
            if others:
                metrics_folder = stack.enter_context(
                    TemporaryDirectory(prefix="trioengine-metrics-", ignore_cleanup_errors=True)
                )
            attachments = [
                Attachment(other, _of_client(config, index), location, attached, metrics_folder)
                for index, other in enumerate(others)
            ]

            async def stop(link: CoreLink) -> None:
                link.stop_cores()
                # A core that loads reads no messages, so it is not worth waiting for.
                timeout_s = config.core_stop_timeout_s if link.is_ready else 0.0
                async with trio.open_nursery() as nursery:
                    for handle in handles:
                        nursery.start_soon(partial(handle.stop, timeout_s=timeout_s))

            async with open_link(bound.socket, cores, client, stop) as link:
                yield Cores(config, location, attachments, client.frontend, link)
        finally:
            # In case that something above was cancelled before it could: a core ends with its pipe at the latest.
            for handle in handles:
                handle.close()


@asynccontextmanager
async def open_link(
    socket: FrontEndSocket,
    cores: Mapping[int, WatchedCore],
    client: LinkClient,
    stop: Callable[[CoreLink], Awaitable[None]] | None = None,
) -> AsyncGenerator[CoreLink, None]:
    """A link whose tasks live as long as the block. An exception of the block leaves it as itself, not in a group.

    Args:
        socket: bound.
        cores: by rank.
        client: its requests and calls get `EngineClosedError` at the end.
        stop: called then, while the tasks still run.
    """
    block_error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            link = CoreLink(socket, cores, client)
            link.start(nursery)
            try:
                yield link
            except BaseException as error:
                # Kept out of the nursery, which would wrap it in a group; raised again below.
                block_error = error
            client.frontend.fail_all(EngineClosedError("The engine is closed."))
            try:
                if stop is not None:
                    await stop(link)
            finally:
                nursery.cancel_scope.cancel()
    finally:
        # Over what the nursery raises, which is at most that a scope around the block was cancelled.
        if block_error is not None:
            raise block_error


def _make_client(_location: ModelLocation, num_cores: int) -> LinkClient:
    return LinkClient(Frontend(num_cores=num_cores, clock=trio.current_time))


def _of_client(config: EngineConfig, index: int) -> EngineConfig:
    """Each draws seeds of its own, or the same prompt would have the same answer from all."""
    return config if config.seed is None else attrs.evolve(config, seed=config.seed ^ index)


def _owners_endpoint(config: EngineConfig) -> Endpoint:
    if config.data_parallel_listen is None or config.data_parallel_key_file is None:
        return create_endpoint(env.variables())
    return create_network_endpoint(config.data_parallel_listen, read_or_make_keys(config.data_parallel_key_file))


async def _find_model(model: str | None, progress: OnProgress, revision: str | None = None) -> ModelLocation:
    def report(fetched: FetchProgress) -> None:
        trio.from_thread.check_cancelled()  # Raises here, in the thread: the download ends then.
        trio.from_thread.run_sync(progress, "fetching the model", fetched.num_bytes / max(1, fetched.total_bytes))

    def find() -> ModelLocation:
        return resolve_model(model, cache_dir=env.cache_dir(), revision=revision, progress=report)

    return await trio.to_thread.run_sync(find, abandon_on_cancel=True)


def ignore_progress(_stage: str, _fraction: float) -> None:
    """For those who do not want to know."""
