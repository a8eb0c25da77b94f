"""Options of `vllm serve` that are accepted because commands have them, and that change nothing a client could see."""

import argparse
import logging
from pathlib import Path

from trioengine.cli.options import flag_of, integer
from trioengine.errors import ConfigError

_VALUES = (
    "chat_template_content_format",
    "compilation_config",
    "convert",
    "cpu_offload_gb",
    "distributed_executor_backend",
    "download_dir",
    "guided_decoding_backend",
    "limit_mm_per_prompt",
    "load_format",
    "max_cudagraph_capture_size",
    "max_log_len",
    "max_parallel_loading_workers",
    "max_seq_len_to_capture",
    "pipeline_parallel_size",
    "prefix_caching_hash_algo",
    "runner",
    "stream_interval",
    "swap_space",
    "task",
    "tensor_parallel_size",
    "tokenizer",
    "tokenizer_mode",
    "uvicorn_log_level",
)
_SWITCHES = (
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "disable_frontend_multiprocessing",
    "disable_log_requests",
    "enable_expert_parallel",
    "enable_reasoning",
    "enable_sleep_mode",
    "exclude_tools_when_tool_choice_none",
    "fully_sharded_loras",
    "trust_remote_code",
)
"""What they ask for is the case here, or is about how vLLM computes."""
_ALWAYS_ON = (
    "enable_auto_tool_choice",
    "enable_chunked_prefill",
    "enable_prompt_tokens_details",
    "enable_request_id_headers",
    "enable_server_load_tracking",
)
"""Switches that are on here whatever a command says."""
_SHORT = {"compilation_config": "-O", "pipeline_parallel_size": "-pp", "tensor_parallel_size": "-tp"}
_SHORT_NUMBERS = {"-dp": "data_parallel_size", "-dpl": "data_parallel_size_local", "-dpn": "data_parallel_rank"}
"""Of options that are ours, too."""
_DEST = "vllm_"

logger = logging.getLogger(__name__)


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Let the command line have them, and vLLM's other names of our options. `--help` does not show them."""
    nothing = argparse.SUPPRESS
    for name in _VALUES:
        flags = [flag_of(name), *([_SHORT[name]] if name in _SHORT else [])]
        parser.add_argument(*flags, dest=_DEST + name, default=nothing, help=nothing)
    for name in (*_SWITCHES, *_ALWAYS_ON):
        action = argparse.BooleanOptionalAction
        parser.add_argument(flag_of(name), dest=_DEST + name, action=action, default=nothing, help=nothing)
    for flag, name in _SHORT_NUMBERS.items():
        parser.add_argument(flag, dest=name, type=integer, default=nothing, help=nothing)
    parser.add_argument(
        "--disable-uvicorn-access-log", dest="access_log", action="store_false", default=nothing, help=nothing
    )
    parser.add_argument("-q", dest="quantization", default=nothing, help=nothing)
    sizes = "cudagraph_capture_sizes"
    parser.add_argument(
        "--cuda-graph-sizes", dest=sizes, nargs="+", type=int, action="extend", default=nothing, help=nothing
    )


def tell_ignored(arguments: argparse.Namespace) -> None:
    """Log one line that names those that were given, if any, and one for those that ask for what cannot be.

    Raises:
        ConfigError: `--tokenizer` is not MODEL's own, and would change its answers.
    """
    given = {dest.removeprefix(_DEST): value for dest, value in vars(arguments).items() if dest.startswith(_DEST)}
    _check_tokenizer(given.get("tokenizer"), arguments.model_argument or getattr(arguments, "model", ""))
    on = [_written(name, False) for name in _ALWAYS_ON if given.get(name) is False]
    if on:
        logger.warning("This is always on here, so that these options have no effect: %s", ", ".join(on))
    others = [_written(name, value) for name, value in given.items() if _written(name, value) not in on]
    if others:
        logger.info("Options of vLLM without effect here: %s", ", ".join(others))


def _written(name: str, value: object) -> str:
    if value is False:
        return flag_of(f"no_{name}")
    return flag_of(name) + ("" if value is True else f" {value}")


def _check_tokenizer(tokenizer: str | None, model: str) -> None:
    # A .gguf file has its own, for which vLLM's users name that of the model it was made of.
    if tokenizer is not None and Path(tokenizer) != Path(model) and not model.lower().endswith(".gguf"):
        raise ConfigError(
            f"The tokenizer is the model's own, not {tokenizer!r}: leave out --tokenizer, or put its files into MODEL's"
            " folder.",
            option="tokenizer",
        )
