"""What a process loads when it imports a package. The import contracts (`lint-imports`) see what the source says; these
tests see what happens."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def modules_after(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after a statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-P", "-c", program]
    return set(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "trioengine",
        "trioengine.client",
        "trioengine.server.app",
        "trioengine.server.serving",
        "trioengine.cli.serve",
        "trioengine.cli.bench.frontend",
    ],
)
def test_front_end_processes_load_no_torch(module: str) -> None:
    assert modules_after(f"import {module}").isdisjoint({"torch", "triton", "transformers", "trioengine_kernels"})


def test_a_core_on_a_cpu_loads_no_triton() -> None:
    """Installed for cards, it is not even looked at: its import takes a second of every start."""
    loaded = modules_after(
        "import trioengine.runtime.core_process, trioengine.runtime.build, trioengine.worker.native_backend"
    )
    assert loaded.isdisjoint({"torch", "triton"})
    assert "trioengine_kernels" in loaded
    loaded = modules_after(
        "import trioengine.runtime.build, trioengine.worker.torch_backend, trioengine_kernels.native"
    )
    assert "torch" in loaded
    assert "triton" not in loaded


def test_a_stream_endpoint_of_ones_own_needs_no_web_framework() -> None:
    loaded = modules_after("import trioengine.server.ws_endpoint, trioengine.client.remote")
    assert loaded.isdisjoint({"quart", "quart_trio", "hypercorn"})


@pytest.mark.parametrize("package", ["core", "frontend", "openai", "types", "config"])
def test_packages_without_io_load_no_io(package: str) -> None:
    statement = (
        "import importlib, pkgutil\n"
        f"package = importlib.import_module('trioengine.{package}')\n"
        "for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)"
    )
    assert modules_after(statement).isdisjoint({"torch", "trio", "zmq", "quart", "quart_trio", "hypercorn"})


@pytest.mark.parametrize("package", ["core", "frontend", "openai", "types", "config", "tokenizer"])
def test_unit_tests_of_these_packages_need_no_torch(package: str) -> None:
    """Neither themselves nor in what they import."""
    imports: set[str] = set()
    for path in (Path(__file__).parents[1] / "unit" / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imports.add(node.module or "")
            elif isinstance(node, ast.Import):
                imports |= {alias.name for alias in node.names}
    assert imports.isdisjoint({"torch", "transformers"})
    ours = ", ".join(sorted(name for name in imports if name.startswith("trioengine")))
    assert modules_after(f"import {ours}").isdisjoint({"torch", "transformers"})


def test_the_command_line_answers_without_loading_an_engine() -> None:
    loaded = modules_after("import trioengine.cli.main, trioengine.cli.models")
    assert loaded.isdisjoint({"torch", "trio", "zmq", "quart", "hypercorn"})


def test_no_package_called_kernels_can_be_imported() -> None:
    """transformers looks for a package of this name, and would take our folder for it."""
    assert importlib.util.find_spec("kernels") is None
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('kernels') is not None)"
    assert subprocess.run([sys.executable, "-P", "-c", program], timeout=60).returncode == 0
