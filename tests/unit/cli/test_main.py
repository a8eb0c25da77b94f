"""What the shell sees: one line for an error, the right exit status, no traceback for a person's mistake."""

import argparse
import errno
import io
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trioengine.cli import main as cli
from trioengine.errors import EngineStartError


def install(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
    def run(arguments: argparse.Namespace) -> int:
        if error is not None:
            raise error
        return 0

    command = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "trioengine.cli.models", command)


def test_a_known_error_is_one_line_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, EngineStartError("The weights are missing."))
    assert cli.main(["models"]) == 1
    assert capsys.readouterr().err == "trioengine: The weights are missing.\n"


def test_a_known_error_out_of_nested_nurseries_is_still_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, BaseExceptionGroup("", [ExceptionGroup("", [EngineStartError("Too little memory.")])]))
    assert cli.main(["models"]) == 1
    assert capsys.readouterr().err == "trioengine: Too little memory.\n"


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, BaseExceptionGroup("", [KeyboardInterrupt()]))
    assert cli.main(["models"]) == 130


def test_ctrl_c_before_there_is_anything_to_clean_up_ends_the_process_without_a_word() -> None:
    """In the middle of an import an exception could be lost, or be a traceback."""
    program = (
        "import os, signal, sys\n"
        "from trioengine.cli import main\n"
        "main.importlib.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT)\n"
        "main.main(['models'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_what_the_machine_does_not_give_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "drop_output", lambda: None)
    install(monkeypatch, ExceptionGroup("", [OSError(errno.EMFILE, "Too many open files")]))
    assert cli.main(["models"]) == 1
    assert capsys.readouterr().err == "trioengine: [Errno 24] Too many open files\n"


def test_a_terminal_without_a_character_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a model says."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))

    def run(arguments: argparse.Namespace) -> int:
        print("日本", end="")
        return 0

    monkeypatch.setitem(sys.modules, "trioengine.cli.models", SimpleNamespace(add_arguments=lambda _: None, run=run))
    assert cli.main(["models"]) == 0
    assert shown.getvalue() == b"??"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["models"])


def test_a_missing_server_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, ModuleNotFoundError(name="hypercorn"))
    assert cli.main(["models"]) == 1
    assert "trioengine[server]" in capsys.readouterr().err


def test_no_command_at_all_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2."""
    assert cli.main([]) == 2
    told = capsys.readouterr().err
    assert all(command in told for command in cli.COMMANDS)


@pytest.mark.parametrize("words", [["nonsense"], ["models", "--nonsense"]])
def test_a_wrong_command_line_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_models_lists_the_default_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIOENGINE_CACHE", str(tmp_path))
    assert cli.main(["models"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out


def test_pulling_a_model_that_is_nowhere_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIOENGINE_CACHE", str(tmp_path))
    assert cli.main(["models", "pull", "no-such-model"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
