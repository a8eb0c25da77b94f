"""`trioengine chat`: a conversation at the terminal.

Ctrl-C stops an answer; at the prompt it leaves, as the end of input does.
"""

import argparse
import signal
import sys

import trio

from trioengine.cli.generate import print_delta
from trioengine.cli.line_reader import LineReader
from trioengine.cli.options import add_engine_options, engine_config_from
from trioengine.cli.progress import Progress
from trioengine.cli.sampling import add_sampling_options, sampling_from
from trioengine.client import open_engine
from trioengine.client.interface import EngineClient
from trioengine.config import EngineConfig
from trioengine.errors import RequestError
from trioengine.types.params import SamplingParams
from trioengine.types.request import ChatMessage, ChatPrompt, GenerateRequest

PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the system message, sampling and engine options."""
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling_options(parser)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the end of input or Ctrl-C at the prompt. Status 0."""
    conversation = Conversation(arguments.system, sampling_from(arguments))
    trio.run(_chat, engine_config_from(arguments), conversation)
    return 0


class Conversation:
    """What was said so far, and the scope of the answer that is being given."""

    def __init__(self, system: str | None, sampling: SamplingParams) -> None:
        self._messages: list[ChatMessage] = [] if system is None else [{"role": "system", "content": system}]
        self._sampling = sampling
        self._answering: trio.CancelScope | None = None

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """What was said so far."""
        return tuple(self._messages)

    def stop_answer(self) -> bool:
        """Stop the answer that is being given; False when there is none."""
        if self._answering is None:
            return False
        self._answering.cancel()
        return True

    async def answer(self, engine: EngineClient, text: str) -> None:
        """Show the answer to `text` as it comes, and remember both. What was said before a stop counts too.

        Raises:
            RequestError: the conversation does not fit the model any more. It is as before then.
        """
        messages: list[ChatMessage] = [*self._messages, {"role": "user", "content": text}]
        parts: list[str] = []
        with trio.CancelScope() as self._answering:
            try:
                async with engine.generate(GenerateRequest(ChatPrompt(messages), self._sampling)) as outputs:
                    async for output in outputs:
                        parts.append(output.outputs[0].text)
                        print_delta(output)
            finally:
                self._answering = None
        self._messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


async def _chat(config: EngineConfig, conversation: Conversation) -> None:
    progress = Progress()
    try:
        async with open_engine(config, on_progress=progress) as engine:
            progress.clear()
            async with trio.open_nursery() as nursery:
                await nursery.start(_watch_interrupts, conversation, nursery.cancel_scope)
                await _talk(engine, conversation)
                nursery.cancel_scope.cancel()
    finally:
        progress.clear()


async def _talk(engine: EngineClient, conversation: Conversation) -> None:
    reader = LineReader(sys.stdin.fileno())
    while True:
        print(PROMPT, end="", flush=True)
        line = await reader.read_line()
        if line is None:
            print()
            return
        if not line.strip():
            continue
        try:
            await conversation.answer(engine, line)
        except RequestError as error:
            print(f"trioengine: {error}", file=sys.stderr)
        print()


async def _watch_interrupts(
    conversation: Conversation,
    everything: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            if not conversation.stop_answer():
                print()
                everything.cancel()
