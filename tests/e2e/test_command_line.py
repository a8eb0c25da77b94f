"""The commands as a person runs them, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trioengine.testing.served_process import ServedProcess, trioengine_command

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
FRONTEND_KEYS = {
    "output_tokens_per_s",
    "cpu_us_per_token",
    "cpu_us_per_request",
    "outputs_per_token",
    "delivery_p50_ms",
    "delivery_p99_ms",
    "abort_ms",
}
LOAD_KEYS = {
    "output_tokens_per_s",
    "prefill_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "itl_p50_ms",
    "itl_p99_ms",
}


def run(*arguments: str, text: str = "", environment: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Standard output of a command that succeeds."""
    done = subprocess.run(
        [*trioengine_command(), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **(environment or {})},
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("client", FRONTEND_KEYS),
        ("http", FRONTEND_KEYS | {"cpu_us_per_chunk"}),
        ("ws", FRONTEND_KEYS | {"cpu_us_per_chunk"}),
        ("http --api-server-count 2", FRONTEND_KEYS | {"cpu_us_per_chunk"}),
    ],
)
def test_bench_frontend_reports_exactly_its_keys(mode: str, keys: set[str]) -> None:
    words = ["--streams", "4", "--tokens", "8", "--pace-ms", "10", "--json", "--mode", *mode.split()]
    figures = json.loads(run("bench", "frontend", *words))
    assert set(figures) == keys
    assert 0 < figures["outputs_per_token"] <= 1
    assert figures["output_tokens_per_s"] > 0


def test_bench_serve_loads_our_own_server(server: ServedProcess) -> None:
    words = ["--concurrency", "2", "--num-prompts", "3", "--input-len", "9", "--output-len", "4", "--json"]
    figures = json.loads(run("bench", "serve", "--base-url", server.url, *words))
    assert set(figures) == LOAD_KEYS
    assert all(value > 0 for value in figures.values())


def test_generate_answers_and_continues() -> None:
    pytest.importorskip("torch")
    options = ["--temperature", "0", "--max-tokens", "20"]
    assert "Tokyo" in run("generate", "-", *options, text="What is the capital of Japan?\n")
    continued = run("generate", "--no-chat", "The capital of Japan is", *options)
    assert continued.strip()
    assert "assistant" not in continued


@pytest.mark.slow
def test_chat_answers_line_after_line_until_the_input_ends() -> None:
    pytest.importorskip("torch")
    said = run("chat", "--temperature", "0", "--max-tokens", "20", text="What is the capital of Japan?\nThank you.\n")
    _, first, second, rest = said.split("> ")
    assert "Tokyo" in first
    assert second.strip()
    assert rest.strip() == ""


@pytest.mark.slow
def test_bench_embed_reports_exactly_its_keys() -> None:
    """Of the default model, which gives embeddings, too."""
    figures = json.loads(run("bench", "embed", "--num-prompts", "3", "--input-len", "5", "--rounds", "1", "--json"))
    assert figures.keys() == {"inputs_per_s", "tokens_per_s"}
    assert all(figure > 0 for figure in figures.values())


@pytest.mark.slow
def test_bench_offline_reports_exactly_its_keys() -> None:
    pytest.importorskip("torch")
    words = ["--num-prompts", "2", "--input-len", "9", "--output-len", "4", "--json"]
    figures = json.loads(run("bench", "offline", *words))
    assert set(figures) == LOAD_KEYS


@pytest.mark.slow
def test_the_wheel_runs_outside_the_repository(tmp_path: Path) -> None:
    """Built, installed into an empty folder and run from there: nothing is taken from the working tree."""
    pytest.importorskip("torch")
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    pip = [sys.executable, "-P", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, ROOT], check=True, timeout=TIMEOUT_S)
    (wheel,) = wheels.glob("trioengine-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True, timeout=TIMEOUT_S)
    environment = {"PYTHONPATH": str(installed)}
    # What the page brings of others comes with their licences.
    vendored = {path.name for path in (ROOT / "web" / "vendor").iterdir()}
    licences = {path.parent.name for path in installed.glob("*.dist-info/licenses/web/vendor/*/LICENSE.txt")}
    assert licences == vendored
    # Without it, type checkers take no notice of the types.
    assert (installed / "trioengine" / "py.typed").is_file()
    # The kernels of cards, without what measures them.
    assert {path.name for path in installed.iterdir() if path.is_dir()} == {
        "trioengine",
        "trioengine_kernels",
        "bin",
        next(installed.glob("*.dist-info")).name,
    }
    kernels = {path.parent.name for path in (ROOT / "kernels" / "trioengine_kernels").glob("*/triton.py")}
    assert "paged_attention" in kernels
    assert {path.parent.name for path in (installed / "trioengine_kernels").glob("*/triton.py")} == kernels

    program = (
        "import importlib.util, trioengine, trioengine_kernels, trioengine.server.page, trioengine.worker\n"
        "from trioengine_kernels.native.library import PREBUILT, load_library\n"
        "assert importlib.util.find_spec('kernels') is None\n"
        # Nothing is compiled where it is installed.
        "assert load_library(None).path == PREBUILT, 'the wheel has no compiled CPU kernels'\n"
        "trioengine.server.page.page_blueprint()\n"
        "print(trioengine.__file__, trioengine_kernels.__file__)"
    )
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **environment},
        cwd=tmp_path,
    ).stdout.split()
    assert all(Path(path).is_relative_to(installed) for path in loaded)
    answer = run("generate", "Hello", "--max-tokens", "2", environment=environment, cwd=tmp_path)
    assert answer.strip()
