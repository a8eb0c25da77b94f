"""The models on this machine: which there are, what they are, and removing those that this engine has fetched.

Nothing here fetches anything, or reads a weight.
"""

import enum
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import attrs

from trioengine.checkpoint.gguf import open_gguf
from trioengine.checkpoint.locate import (
    DEFAULT_MODEL,
    HUB_ID,
    MODELS_FOLDER,
    ModelKind,
    ModelLocation,
    hub_folder,
    hub_mark,
    locate_file,
    locate_folder,
    packaged_path,
)
from trioengine.checkpoint.quantized import open_packed, read_weight_format
from trioengine.checkpoint.safetensors import open_safetensors
from trioengine.checkpoint.small_files import read_json_object
from trioengine.errors import CheckpointError


class ModelSource(enum.StrEnum):
    """Where a model comes from."""

    PACKAGE = "package index"
    HUB = "hub"
    FILE = "file"
    """Somebody put it there."""


@attrs.frozen
class ModelListing:
    """A model that can be named."""

    name: str
    """What to give as MODEL."""
    source: ModelSource
    path: Path | None
    """None: not fetched yet."""
    num_bytes: int
    """On disk, or to download when it is not fetched yet."""
    is_fetched_here: bool = False
    """Whether this engine has fetched it, and may remove it."""


@attrs.frozen
class ModelDescription:
    """What the files of a model say about it. None: they do not say it."""

    architecture: str | None
    num_parameters: int
    weights: str
    """How they are stored: types, those of most parameters first, or the method that quantized them."""
    max_position_embeddings: int | None
    """The longest context that the model was trained for."""
    num_bytes: int
    """On disk."""


def list_models(cache_dir: Path) -> Sequence[ModelListing]:
    """The default model, fetched or not, other GGUF files in the cache folder, and the hub's models that can be run."""
    path = packaged_path(DEFAULT_MODEL, cache_dir)
    default = ModelListing(DEFAULT_MODEL.name, ModelSource.PACKAGE, None, DEFAULT_MODEL.wheel_bytes)
    if path.exists():
        default = attrs.evolve(default, path=path, num_bytes=path.stat().st_size, is_fetched_here=True)
    listings = [default]
    for other in sorted((cache_dir / MODELS_FOLDER).glob("*/*.gguf")):
        if other != path and other.is_file():
            listings.append(ModelListing(str(other), ModelSource.FILE, other, other.stat().st_size))
    anywhere = hub_folder("org/name")
    folders = [] if anywhere is None else sorted(anywhere.parent.glob("models--*--*"))
    names = (folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)
    return listings + [listing for name in names if (listing := _hub_listing(name, cache_dir)) is not None]


def find_model(name: str | None, cache_dir: Path) -> tuple[ModelListing, ModelLocation]:
    """A model that is on this machine, named as for `locate.resolve_model`.

    Raises:
        CheckpointError: it is not here, or is no model.
    """
    if name is None or name == DEFAULT_MODEL.name:
        listing = list_models(cache_dir)[0]
        if listing.path is not None:
            return listing, ModelLocation(ModelKind.GGUF, listing.path, listing.name)
    else:
        path = Path(name).expanduser()
        try:
            if path.exists():
                location = locate_folder(path) if path.is_dir() else locate_file(path)
                known = {listing.path: listing for listing in list_models(cache_dir)}
                found = ModelListing(name, ModelSource.FILE, location.path, sum(_sizes(location)))
                return known.get(location.path, found), location
        except (OSError, ValueError) as error:  # too long, a null byte, no permission
            raise CheckpointError(f"MODEL {name[:200]!r} cannot be looked up: {str(error)[:200]}.") from error
        if HUB_ID.fullmatch(name) and (listing := _hub_listing(name, cache_dir)) is not None and listing.path:
            return listing, attrs.evolve(locate_folder(listing.path), served_name=name)
    shown = DEFAULT_MODEL.name if name is None else name[:200]
    raise CheckpointError(
        f"The model {shown!r} is not on this machine. `trioengine models` lists those that are, `trioengine models pull"
        f" {shown}` fetches it."
    )


def describe(location: ModelLocation) -> ModelDescription:
    """Read what the files say: headers and configurations, no weights. Works for models that cannot be run, too.

    Raises:
        CheckpointError: a file is damaged, or its weights are packed in a way that cannot be read.
    """
    match location.kind:
        case ModelKind.GGUF:
            return _describe_gguf(location)
        case ModelKind.FOLDER:
            return _describe_folder(location)


def remove_model(listing: ModelListing, cache_dir: Path) -> None:
    """Remove a model that this engine has fetched.

    Raises:
        CheckpointError: it has not fetched it, or it cannot be removed.
    """
    if not listing.is_fetched_here or listing.path is None:
        how = "with the program that has" if listing.source is ModelSource.HUB else "yourself"
        raise CheckpointError(
            f"{listing.name} was not fetched by trioengine, which removes only what it has fetched. Remove"
            f" {listing.path} {how}.",
            path=str(listing.path),
        )
    try:
        match listing.source:
            case ModelSource.HUB:
                folder = hub_folder(listing.name)
                assert folder is not None, "it was listed"
                shutil.rmtree(folder)
                hub_mark(listing.name, cache_dir).unlink(missing_ok=True)
            case _:
                listing.path.unlink()
                if not any(listing.path.parent.iterdir()):
                    listing.path.parent.rmdir()
    except OSError as error:
        raise CheckpointError(f"{listing.path} cannot be removed: {error}.", path=str(listing.path)) from error


def _hub_listing(hub_id: str, cache_dir: Path) -> ModelListing | None:
    """None where it is not here, or not a model that can be run."""
    folder = hub_folder(hub_id)
    snapshot = None if folder is None else _snapshot(folder)
    if snapshot is None:
        return None
    try:
        location = locate_folder(snapshot)
        num_bytes = sum(_sizes(location))
    except (CheckpointError, OSError):
        return None
    is_ours = hub_mark(hub_id, cache_dir).exists()
    return ModelListing(hub_id, ModelSource.HUB, location.path, num_bytes, is_ours)


def _snapshot(folder: Path) -> Path | None:
    """The files of the main branch, or of any where that was not fetched."""
    main = folder / "refs" / "main"
    try:
        snapshot = folder / "snapshots" / main.read_text().strip()
        if snapshot.is_dir():
            return snapshot
    except (OSError, ValueError):
        pass
    return next((path for path in sorted((folder / "snapshots").glob("*")) if path.is_dir()), None)


def _sizes(location: ModelLocation) -> Iterable[int]:
    paths = [location.path] if location.kind is ModelKind.GGUF else location.path.iterdir()
    return (path.stat().st_size for path in paths if path.is_file())


def _describe_gguf(location: ModelLocation) -> ModelDescription:
    file = open_gguf(location.path)
    architecture = file.metadata.get("general.architecture")
    context = file.metadata.get(f"{architecture}.context_length")
    tensors = [(math.prod(tensor.shape), tensor.ggml_type.name) for tensor in file.tensors.values()]
    return ModelDescription(
        architecture=architecture if isinstance(architecture, str) else None,
        num_parameters=sum(count for count, _ in tensors),
        weights=_most_first(tensors),
        max_position_embeddings=context if isinstance(context, int) else None,
        num_bytes=sum(_sizes(location)),
    )


def _describe_folder(location: ModelLocation) -> ModelDescription:
    facts = read_json_object(location.path / "config.json")
    tensors = open_safetensors(location.path)
    weight_format = read_weight_format(location.path)
    packed = 0
    if weight_format is not None:
        found = open_packed(location.path, weight_format, tensors)
        packed = sum(matrix.num_rows * matrix.num_columns for matrix in found.matrices.values())
        tensors = found.others
    counts = [(math.prod(tensor.shape), str(tensor.dtype)) for tensor in tensors.values()]
    kinds = _most_first(counts)
    names, context = facts.get("architectures"), _text_facts(facts).get("max_position_embeddings")
    name = cast(list[object], names)[0] if isinstance(names, list) and names else None
    return ModelDescription(
        architecture=name if isinstance(name, str) else None,
        num_parameters=packed + sum(count for count, _ in counts),
        weights=kinds if weight_format is None else f"{weight_format.description}; {kinds}",
        max_position_embeddings=context if isinstance(context, int) else None,
        num_bytes=sum(_sizes(location)),
    )


def _text_facts(facts: Mapping[str, object]) -> Mapping[str, object]:
    """Of models that see pictures, too, the part for text."""
    text = facts.get("text_config")
    return cast(Mapping[str, object], text) if isinstance(text, dict) else facts


def _most_first(counts: Iterable[tuple[int, str]]) -> str:
    totals: dict[str, int] = {}
    for count, name in counts:
        totals[name] = totals.get(name, 0) + count
    return ", ".join(sorted(totals, key=lambda name: -totals[name]))
