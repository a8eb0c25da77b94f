"""`trioengine models`: lists, fetches, shows and removes models."""

import argparse
import json
import sys

import attrs

from trioengine.checkpoint.inventory import (
    ModelListing,
    ModelSource,
    describe,
    find_model,
    list_models,
    remove_model,
)
from trioengine.checkpoint.locate import DEFAULT_MODEL_NAME, FetchProgress, ModelLocation, resolve_model
from trioengine.cli.progress import Progress
from trioengine.config import env
from trioengine.errors import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, its MODEL and its options."""
    _add_json(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="list the models on this machine (the same as no action)")
    _add_json(listing)
    pull = actions.add_parser("pull", help="fetch a model", description="Fetch a model to this machine.")
    pull.add_argument("model", nargs="?", metavar="MODEL", help=f"a name or hub id. Default: {DEFAULT_MODEL_NAME}")
    show = actions.add_parser("show", help="tell what a model is", description="Tell what a model is.")
    show.add_argument("model", nargs="?", metavar="MODEL", help=f"as for serve. Default: {DEFAULT_MODEL_NAME}")
    _add_json(show)
    remove = actions.add_parser(
        "remove", help="remove a fetched model", description="Remove a model that trioengine has fetched."
    )
    remove.add_argument("model", metavar="MODEL", help="a name or hub id")
    remove.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _add_json(parser: argparse.ArgumentParser) -> None:
    # Before or behind the action: the one that is not given must not undo the other.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Do the action. Status 0; 1 where a person says no to a removal."""
    is_json = getattr(arguments, "json", False)
    match arguments.action:
        case "pull":
            return _pull(arguments.model)
        case "show":
            return _show(arguments.model, is_json=is_json)
        case "remove":
            return _remove(arguments.model, is_confirmed=arguments.yes)
        case _:
            return _list(is_json=is_json)


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


def _list(*, is_json: bool) -> int:
    listings = list_models(env.cache_dir())
    if is_json:
        print(json.dumps([_plain(listing) for listing in listings], indent=2))
        return 0
    width = max(len(_name(listing)) for listing in listings)
    for listing in listings:
        mark = "  (default)" if listing.name == DEFAULT_MODEL_NAME else ""
        where = listing.path or "not fetched yet"
        print(f"{_name(listing):<{width}}  {_size(listing.num_bytes):>9}  {listing.source:<13}  {where}{mark}")
    return 0


def _name(listing: ModelListing) -> str:
    """The path of a file has its own column."""
    return listing.path.stem if listing.source is ModelSource.FILE and listing.path else listing.name


def _plain(listing: ModelListing) -> dict[str, object]:
    return {
        "name": listing.name,
        "source": str(listing.source),
        "path": None if listing.path is None else str(listing.path),
        "num_bytes": listing.num_bytes,
        "is_fetched_here": listing.is_fetched_here,
    }


def _show(name: str | None, *, is_json: bool) -> int:
    listing, location = find_model(name, env.cache_dir())
    problem = _why_it_cannot_run(location)
    try:
        facts = attrs.asdict(describe(location))
    except CheckpointError:
        # Then it cannot be run either, for the same reason, which is told.
        facts = {}
    facts = _plain(listing) | facts | {"has_chat_template": _has_chat_template(location), "problem": problem}
    if is_json:
        print(json.dumps(facts, indent=2))
        return 0
    labels = {
        "name": facts["name"],
        "architecture": facts.get("architecture"),
        "parameters": f"{facts['num_parameters']:,}" if "num_parameters" in facts else None,
        "weights": facts.get("weights"),
        "context": facts.get("max_position_embeddings"),
        "chat template": "yes" if facts["has_chat_template"] else "no",
        "size": _size(listing.num_bytes),
        "from": facts["source"],
        "path": facts["path"],
        "can run": "yes" if problem is None else f"no: {problem}",
    }
    for label, value in labels.items():
        print(f"{label + ':':<14} {'unknown' if value is None else value}")
    return 0


def _why_it_cannot_run(location: ModelLocation) -> str | None:
    # Imported late: the other actions need nothing of it.
    from trioengine.runtime.build import check_model

    try:
        check_model(location)
    except CheckpointError as error:
        return str(error)
    return None


def _has_chat_template(location: ModelLocation) -> bool:
    from trioengine.tokenizer.tokenizer import load_tokenizer

    try:
        return bool(load_tokenizer(location).facts.chat_templates)
    except CheckpointError:
        return False


def _remove(name: str, *, is_confirmed: bool) -> int:
    listing, _ = find_model(name, env.cache_dir())
    if listing.is_fetched_here and not is_confirmed:
        question = f"Remove {listing.name} ({_size(listing.num_bytes)}, {listing.path})? [y/N] "
        if not sys.stdin.isatty():
            print(f"trioengine: {question.strip()} Say so with --yes.", file=sys.stderr)
            return 1
        try:
            answer = input(question)
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            return 1
    remove_model(listing, env.cache_dir())
    return 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 10 * 2**30 else f"{num_bytes / 2**20:.0f} MiB"
