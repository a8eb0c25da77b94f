"""`trioengine generate`: one prompt, its answer on standard output as it comes."""

import argparse
import sys

import trio

from trioengine.cli.options import add_engine_options, engine_config_from
from trioengine.cli.progress import Progress
from trioengine.cli.sampling import add_sampling_options, add_structure_options, sampling_from
from trioengine.client import open_engine
from trioengine.client.interface import EngineClient
from trioengine.config import EngineConfig
from trioengine.types.output import RequestOutput
from trioengine.types.request import ChatPrompt, GenerateRequest, TextPrompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, MODEL, sampling, structure and engine options."""
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="treat PROMPT as a user's message, not as a text to continue. Default: where the model has a template.",
    )
    add_sampling_options(parser)
    add_structure_options(parser)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer. Status 0."""
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    sampling = sampling_from(arguments)
    is_chat: bool | None = arguments.chat

    async def generate(config: EngineConfig) -> None:
        progress = Progress()
        try:
            async with open_engine(config, on_progress=progress) as engine:
                progress.clear()
                prompt = as_chat(text) if _wants_chat(is_chat, engine) else TextPrompt(text)
                async with engine.generate(GenerateRequest(prompt, sampling)) as outputs:
                    async for output in outputs:
                        print_delta(output)
                print()
        finally:
            progress.clear()

    trio.run(generate, engine_config_from(arguments))
    return 0


def as_chat(text: str) -> ChatPrompt:
    """One message of a user."""
    return ChatPrompt([{"role": "user", "content": text}])


def print_delta(output: RequestOutput) -> None:
    """Show what is new of an answer."""
    sys.stdout.write(output.outputs[0].text)
    sys.stdout.flush()


def _wants_chat(is_chat: bool | None, engine: EngineClient) -> bool:
    return bool(engine.tokenizer.facts.chat_templates) if is_chat is None else is_chat
