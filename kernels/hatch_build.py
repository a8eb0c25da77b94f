# pyright: basic
"""Compiles the native CPU backend into wheels, so that an installed engine needs no C compiler.

A wheel that is built where there is no compiler has the sources only, as before: they are compiled at the first use.
"""

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

_NATIVE = Path("trioengine_kernels", "native")


class NativeBackendHook(BuildHookInterface):
    """Adds the shared object to a wheel, and the platform to its name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. An editable installation is left alone: its sources change."""
        if version == "editable":
            return
        compiler = _load(Path(self.root, "kernels", _NATIVE, "compiler.py"))
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, compiler.OBJECT_NAME)
        try:
            compiler.build(path, compiler.find_compiler())
        except (compiler.NativeUnavailableError, OSError) as error:
            self.app.display_warning(f"The wheel carries no compiled CPU kernels: {error}")
            return
        build_data["force_include"][str(path)] = str(_NATIVE / path.name)
        build_data["pure_python"] = False
        # It is called through ctypes: any Python of this platform loads it.
        build_data["tag"] = f"py3-none-{next(platform_tags())}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if version != "editable":
            self._folder.cleanup()


def _load(path: Path) -> ModuleType:
    """A module of the package, without the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
