"""The command `trioengine`: picks the subcommand, turns errors into one line and an exit status.

Only the subcommand that runs is imported, so that `--help` and a mistyped option answer at once.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from trioengine import __version__
from trioengine.config import env
from trioengine.errors import TrioEngineError

EXIT_FAILURE = 1
EXIT_USAGE = 2
"""As argparse has it."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

SERVER_PACKAGES = ("hypercorn", "quart", "quart_trio")

COMMANDS = {
    "serve": "Serve a model over HTTP, with OpenAI's API.",
    "core": "Compute for an engine on another machine.",
    "generate": "Continue a prompt, or answer it, on standard output.",
    "chat": "Talk with a model.",
    "models": "List, fetch, show and remove models.",
    "bench": "Measure the front end, the engine, a server or the CPU kernels.",
}
"""Subcommand -> what it does. Each is a module of this package with `add_arguments` and `run`."""

QUIET_COMMANDS = ("generate", "chat", "bench")
"""A person reads their output: of the log only what went wrong is shown, unless `TRIOENGINE_LOG_LEVEL` says more."""


class Command(Protocol):
    """What the module of a subcommand has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Tell the parser the subcommand's options."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it, and return the exit status."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    An error of TrioEngine's is one line on standard error and status 1; a wrong command line is status 2.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        # A model may say what the terminal's encoding has no character for.
        reconfigure(errors="replace")
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    name = parser.parse_args(words[:1]).command
    try:
        if name in QUIET_COMMANDS:
            env.set_default_log_level("warning")
        logging.basicConfig(level=env.log_level().upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        command = cast(Command, importlib.import_module(f"trioengine.cli.{name}"))
        parser = argparse.ArgumentParser(prog=f"trioengine {name}", description=COMMANDS[name], allow_abbrev=False)
        command.add_arguments(parser)
        arguments = parser.parse_args(words[1:])
        return command.run(arguments)
    except BaseException as error:  # The border to the shell: what we know becomes a line, the rest goes on.
        status = _exit_status(single(error))
        if status is None:
            raise
        return status


def single(error: BaseException) -> BaseException:
    """The one exception that a group of groups holds, or the group where it holds several."""
    if isinstance(error, BaseExceptionGroup):
        exceptions = cast("BaseExceptionGroup[BaseException]", error).exceptions
        if len(exceptions) == 1:
            return single(exceptions[0])
    return cast(BaseException, error)


def _exit_status(error: BaseException) -> int | None:
    """What the shell gets for an error; None for those that are nobody's fault but ours."""
    match error:
        case TrioEngineError():
            print(f"trioengine: {error}", file=sys.stderr)
            return EXIT_FAILURE
        case ModuleNotFoundError(name=name) if name in SERVER_PACKAGES:
            print(
                f"trioengine: {name} is not installed. The server needs: pip install 'trioengine[server]'",
                file=sys.stderr,
            )
            return EXIT_FAILURE
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case BrokenPipeError():
            # Whoever read our output has left. Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILURE
        case _:
            return None


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="trioengine",
        description="LLM inference and serving on Trio.",
        epilog="\n".join(["commands:", *lines, "", "trioengine COMMAND --help tells the options of each."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trioengine {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    return parser


if __name__ == "__main__":
    sys.exit(main())
