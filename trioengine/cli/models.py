"""`trioengine models`: what is on this machine; `trioengine models pull` fetches a model."""

import argparse

from trioengine.checkpoint.locate import DEFAULT_MODEL_NAME, FetchProgress, list_models, resolve_model
from trioengine.cli.progress import Progress
from trioengine.config import env


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, and MODEL to fetch."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    pull = actions.add_parser("pull", help="fetch a model", description="Fetch a model to this machine.")
    pull.add_argument("model", nargs="?", metavar="MODEL", help=f"a name or hub id. Default: {DEFAULT_MODEL_NAME}")


def run(arguments: argparse.Namespace) -> int:
    """List or fetch. Status 0."""
    return _pull(arguments.model) if arguments.action == "pull" else _list()


def _pull(name: str | None) -> int:
    progress = Progress()

    def report(fetched: FetchProgress) -> None:
        progress(f"Downloading {name or DEFAULT_MODEL_NAME}", fetched.num_bytes / max(1, fetched.total_bytes))

    try:
        location = resolve_model(name, cache_dir=env.cache_dir(), progress=report)
    finally:
        progress.clear()
    print(location.path)
    return 0


def _list() -> int:
    listings = list_models(env.cache_dir())
    width = max(len(listing.name) for listing in listings)
    for listing in listings:
        mark = "  (default)" if listing.name == DEFAULT_MODEL_NAME else ""
        size = f"{listing.num_bytes / 2**20:6.0f} MiB"
        print(f"{listing.name:<{width}}  {size}  {listing.path or 'not fetched yet'}{mark}")
    return 0
