"""`trioengine core`: one engine core on this machine, for an engine on another one."""

import argparse
import logging

import attrs

from trioengine.checkpoint.locate import resolve_model
from trioengine.cli.options import add_engine_options, engine_config_from
from trioengine.config import env
from trioengine.errors import ConfigError
from trioengine.runtime.core_process import BuildCore, run_core
from trioengine.runtime.launch import CoreLaunch
from trioengine.runtime.status_page import StatusPage
from trioengine.transport.address import create_network_endpoint, read_keys

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the engine is, MODEL, and the engine's options, which are to be the same on all machines."""
    parser.add_argument(
        "--connect",
        required=True,
        metavar="tcp://HOST:PORT",
        help="the engine's machine, and the port of its --data-parallel-listen",
    )
    parser.add_argument(
        "--key-file", required=True, metavar="PATH", help="a copy of the engine's --data-parallel-key-file"
    )
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Wait for the engine, and compute for it until it stops or is gone. Its status: 0 when it was told to stop."""
    config = engine_config_from(arguments)
    if config.data_parallel_rank is None:
        raise ConfigError("--data-parallel-rank says which of the cores this is.", option="data_parallel_rank")
    keys = attrs.evolve(read_keys(arguments.key_file), secret_key=None)
    cache_dir = env.cache_dir()
    launch = CoreLaunch(
        endpoints=(create_network_endpoint(arguments.connect, keys),),
        rank=config.data_parallel_rank,
        page_fd=-1,
        config=config,
        model=resolve_model(config.model, cache_dir=cache_dir, revision=config.revision),
        draft_model=None if config.draft_model is None else resolve_model(config.draft_model, cache_dir=cache_dir),
    )
    # Nobody shares the page: the engine asks the core itself how it does.
    page = StatusPage.create()
    try:
        logger.info("Core %d for the engine at %s.", launch.rank, arguments.connect)
        return run_core(_build(), launch, page)
    finally:
        page.close()


def _build() -> BuildCore:
    from trioengine.runtime.build import build_launched_core  # Imports what computes.

    return build_launched_core
