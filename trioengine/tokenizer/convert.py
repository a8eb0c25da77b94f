"""Converts a tokenizer that only transformers can build to a tokenizer.json, once.

A process of its own does it, so that servers and clients never load transformers. What it makes is kept under the hash
of the files it was made from. Run as a program, this module is that process.
"""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from trioengine.config import env
from trioengine.errors import CheckpointError

CONVERTED_FOLDER = "tokenizers"
TIMEOUT_S = 300.0
MAX_SOURCE_BYTES = 256 << 20
MAX_SOURCES = 200
_SOURCE_SUFFIXES = (".json", ".model", ".txt", ".tiktoken", ".bpe", ".vocab", ".spm")
_OTHER_SUFFIX = ".index.json"


def convert_tokenizer(folder: Path, cache_dir: Path, *, timeout_s: float = TIMEOUT_S) -> Path:
    """Return the path of a tokenizer.json that equals what transformers builds from the files of a model folder.

    It takes seconds the first time. Processes that convert the same files at once each do it, and the last rename wins:
    a waste, but never a mixture.

    Raises:
        CheckpointError: transformers is not installed or cannot build this tokenizer, or the cache cannot be written.
    """
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and its tokenizer is of a kind that only transformers can build: "
            "pip install transformers, or save it once with AutoTokenizer.from_pretrained(…).save_pretrained(…).",
            path=str(folder),
        ) from error
    path = cache_dir / CONVERTED_FOLDER / f"{_hash(folder, version)}.json"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=path.parent) as temporary:
            converted = Path(temporary) / "tokenizer.json"
            _run(folder, converted, timeout_s)
            os.replace(converted, path)
    except OSError as error:
        raise CheckpointError(
            f"The converted tokenizer of {folder} cannot be written to {path.parent}: {error}. Make room or set "
            f"{env.CACHE_VARIABLE} to a folder that can be written.",
            path=str(path),
        ) from error
    return path


def _hash(folder: Path, version: str) -> str:
    """Of every file that a tokenizer may be built from."""
    digest = hashlib.sha256(version.encode())
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.name.endswith(_SOURCE_SUFFIXES) and not path.name.endswith(_OTHER_SUFFIX) and path.is_file()
    )
    num_bytes = sum((folder / name).stat().st_size for name in names)
    if num_bytes > MAX_SOURCE_BYTES or len(names) > MAX_SOURCES:
        raise CheckpointError(
            f"{folder} has {num_bytes} bytes in {len(names)} files that its tokenizer may be built from, over the "
            f"limits of {MAX_SOURCE_BYTES} and {MAX_SOURCES}.",
            path=str(folder),
        )
    for name in names:
        content = (folder / name).read_bytes()
        digest.update(f"\0{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _run(folder: Path, converted: Path, timeout_s: float) -> None:
    command = [sys.executable, "-P", "-m", "trioengine.tokenizer.convert", str(folder), str(converted)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    log_path = converted.with_suffix(".log")
    with open(log_path, "wb") as log:
        try:
            process = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**env.variables(), **offline},
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(
                f"transformers took over {timeout_s:.0f} s to build the tokenizer of {folder}.", path=str(folder)
            ) from error
    if process.returncode != 0 or not converted.exists():
        lines = log_path.read_text(errors="replace").strip().splitlines()
        raise CheckpointError(
            f"transformers could not build the tokenizer of {folder} (exit status {process.returncode}: "
            f"{lines[-1][:300] if lines else 'it said nothing'}). It may need `pip install sentencepiece protobuf`.",
            path=str(folder),
        )


def _convert_here(folder: str, converted: str) -> None:
    transformers: Any = import_module("transformers")
    # Code that comes with a model is never run.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        sys.exit(f"{type(tokenizer).__name__} has no form that the tokenizers library knows")
    with open(converted, "w", encoding="utf-8") as file:
        file.write(tokenizer.backend_tokenizer.to_str())
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    _convert_here(*sys.argv[1:])
