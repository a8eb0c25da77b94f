"""The command `trioengine`: picks the subcommand, turns errors into one line and an exit status.

Only the subcommand that runs is imported, so that `--help` and a mistyped option answer at once.
"""

import argparse
import contextlib
import errno
import importlib
import logging
import signal
import sys
from collections.abc import Generator, Sequence
from typing import Protocol, cast

from trioengine import __version__
from trioengine.cli.parser import CommandParser
from trioengine.cli.streams import drop_output, open_missing_streams, say
from trioengine.config import env
from trioengine.errors import TrioEngineError

EXIT_FAILURE = 1
EXIT_USAGE = 2
"""As argparse has it."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EAGAIN)
"""What the machine, or a limit of this process, does not give: no bug, so its own words are enough."""

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
    open_missing_streams()
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        # A model may say what the terminal's encoding has no character for.
        reconfigure(errors="replace")
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    name = parser.parse(words[:1]).command
    try:
        if name in QUIET_COMMANDS:
            env.set_default_log_level("warning")
        logging.basicConfig(level=env.log_level().upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        with _interrupts_ending_at_once():
            command = cast(Command, importlib.import_module(f"trioengine.cli.{name}"))
        parser = CommandParser(prog=f"trioengine {name}", description=COMMANDS[name])
        command.add_arguments(parser)
        arguments = parser.parse(words[1:])
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
            say(f"trioengine: {error}")
            return EXIT_FAILURE
        case ModuleNotFoundError(name=name) if name in SERVER_PACKAGES:
            say(f"trioengine: {name} is not installed. The server needs: pip install 'trioengine[server]'")
            return EXIT_FAILURE
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case BrokenPipeError():
            # Whoever read our output has left.
            drop_output()
            return EXIT_FAILURE
        case OSError(errno=number) if number in MACHINE_ERRORS:
            say(f"trioengine: {error}")
            drop_output()
            return EXIT_FAILURE
        case _:
            return None


@contextlib.contextmanager
def _interrupts_ending_at_once() -> Generator[None]:
    """While nothing is to be cleaned up yet, Ctrl-C ends the process as it ends one that knows nothing of it.

    An exception would come up in the middle of an import, which may lose it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _parser() -> CommandParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    parser = CommandParser(
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
