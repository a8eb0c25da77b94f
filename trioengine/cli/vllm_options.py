"""Options of `vllm serve` that are accepted because commands have them, and that change nothing a client could see."""

import argparse
import logging

from trioengine.cli.options import flag_of

_VALUES = (
    "chat_template_content_format",
    "compilation_config",
    "convert",
    "cpu_offload_gb",
    "distributed_executor_backend",
    "download_dir",
    "limit_mm_per_prompt",
    "load_format",
    "max_cudagraph_capture_size",
    "pipeline_parallel_size",
    "runner",
    "swap_space",
    "task",
    "tensor_parallel_size",
    "tokenizer_mode",
    "uvicorn_log_level",
)
_SWITCHES = (
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "disable_log_requests",
    "enable_auto_tool_choice",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "enable_prompt_tokens_details",
    "enable_reasoning",
    "enable_request_id_headers",
    "enable_server_load_tracking",
    "enable_sleep_mode",
    "exclude_tools_when_tool_choice_none",
    "trust_remote_code",
)
"""What they ask for is the case here, or is about how vLLM computes."""
_SHORT = {"compilation_config": "-O", "pipeline_parallel_size": "-pp", "tensor_parallel_size": "-tp"}
_DEST = "vllm_"

logger = logging.getLogger(__name__)


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Let the command line have them, and vLLM's other names of our options. `--help` does not show them."""
    nothing = argparse.SUPPRESS
    for name in _VALUES:
        flags = [flag_of(name), *([_SHORT[name]] if name in _SHORT else [])]
        parser.add_argument(*flags, dest=_DEST + name, default=nothing, help=nothing)
    for name in _SWITCHES:
        parser.add_argument(flag_of(name), dest=_DEST + name, action="store_true", default=nothing, help=nothing)
    parser.add_argument(
        "--disable-uvicorn-access-log", dest="access_log", action="store_false", default=nothing, help=nothing
    )
    parser.add_argument("-q", dest="quantization", default=nothing, help=nothing)
    sizes = "cudagraph_capture_sizes"
    parser.add_argument(
        "--cuda-graph-sizes", dest=sizes, nargs="+", type=int, action="extend", default=nothing, help=nothing
    )


def tell_ignored(arguments: argparse.Namespace) -> None:
    """Log one line that names those that were given, if any."""
    given = [
        flag_of(dest.removeprefix(_DEST)) + ("" if value is True else f" {value}")
        for dest, value in vars(arguments).items()
        if dest.startswith(_DEST)
    ]
    if given:
        logger.info("Options of vLLM without effect here: %s", ", ".join(given))
