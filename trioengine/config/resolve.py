"""From what the user asked, what the model is and what the machine has, to the numbers an engine core runs with.

A pure function: it reads no file, no environment and no clock. `config.env.hardware_facts` looks at the machine.
"""

import operator
from collections.abc import Mapping, Sequence

import attrs

from trioengine.config.engine import EngineConfig
from trioengine.errors import ConfigError

CPU_MAX_NUM_BATCHED_TOKENS = 256
TARGET_STEP_S = 0.3
"""An abort is felt after at most one step, so a full one should not take longer than this."""
MIN_NUM_BATCHED_TOKENS = 16
ENCODER_MAX_NUM_BATCHED_TOKENS = 2048
"""Of encoders, which compute whole texts and have no answers that wait meanwhile."""
MIN_NUM_LOGIT_ROWS = 256
"""Unless a step has fewer tokens. Few sequences, too, may have drafts or want log probabilities of their prompts."""
KV_CACHE_SHARE_OF_RAM = 0.25
GPU_MAX_NUM_BATCHED_TOKENS = 8192
"""A third of a second for 8 billion weights on a card of 400 TFLOP/s; vLLM's, as is the smaller one."""
SMALL_GPU_MAX_NUM_BATCHED_TOKENS = 2048
SMALL_GPU_BYTES = 40 * 2**30
"""Cards with less compute more slowly, and have little room for what lies between the operations of a step."""
MAX_CAPTURE_SIZE = 256
"""Larger steps take long enough to be started operation by operation."""
MAX_GPU_KV_TOKENS = 2**24
"""More than cards have room for, but with tiny models: the core keeps some 64 bytes for each block of these."""


@attrs.frozen
class KVGroupShape:
    """Layers that keep the keys and values of the same tokens."""

    bytes_per_token: int
    """Keys and values of one token in these layers."""
    window: int | None = None
    """They see no further back than so many tokens."""


@attrs.frozen
class ModelShape:
    """Sizes of a model, known from its file before its weights are read."""

    num_parameters: int
    max_position_embeddings: int
    kv_groups: Sequence[KVGroupShape]
    """At least one; none of an encoder."""
    vocab_size: int


@attrs.frozen
class GPUFacts:
    """The GPU that an engine core computes on."""

    name: str
    capability: int
    """Its compute capability, times 10: 90 is 9.0."""
    total_bytes: int
    free_bytes: int
    """Before the engine takes any: other programs may have some."""


@attrs.frozen
class HardwareFacts:
    """What this process may use of the machine."""

    num_cpus: int
    ram_bytes: int
    flops_per_s: float
    """Floating-point operations per second of a matrix product on all `num_cpus`. An estimate."""
    gpu: GPUFacts | None = None
    """None where the processors compute."""


@attrs.frozen
class GPUMemoryUse:
    """What an engine takes of a GPU's memory beside its KV cache. Measured, once the weights are there."""

    weights_bytes: int
    step_bytes: int
    """Of the largest step, at its peak, and of all that is there for steps."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.step_bytes


@attrs.frozen
class ResolvedConfig:
    """The numbers an engine core runs with. Consistent with each other."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_logit_rows: int
    """Of one step: a row for each sequence, draft, and token of a prompt whose log probabilities are asked for."""
    block_size: int
    num_kv_blocks: Sequence[int]
    """For each of `ModelShape.kv_groups`."""
    num_offload_blocks: int
    """Of each group, for evicted blocks."""
    cpu_threads: int
    reasons: Mapping[str, str]
    """For each derived number its value and why: `{"cpu_threads": "2: one for each processor"}`."""
    async_scheduling: bool = False
    cudagraph_capture_sizes: Sequence[int] = ()
    """Rising: numbers of sequences, of steps that are recorded as graphs. None where the processors compute."""


def resolve(
    config: EngineConfig, model: ModelShape, hardware: HardwareFacts, gpu_memory: GPUMemoryUse | None = None
) -> ResolvedConfig:
    """The numbers to run this model with on this machine.

    A value that the user set is taken as it is, or refused.

    Args:
        config: what the user asked for.
        model: what is to be computed.
        hardware: what computes it.
        gpu_memory: of the GPU that there is. None while it is not known: then the KV cache has room for one sequence
            of the maximum length, and the other numbers are what they will be.

    Raises:
        ConfigError: the options do not fit the model or the machine. `option` names the one to change.
    """
    reasons: dict[str, str] = {}
    cpu_threads = _cpu_threads(config, hardware, reasons)
    max_model_len = _max_model_len(config, model, reasons)
    max_num_batched_tokens = _max_num_batched_tokens(config, model, hardware, cpu_threads, reasons)
    max_num_seqs = _max_num_seqs(config, max_num_batched_tokens, reasons)
    blocks_per_sequence = _blocks_per_sequence(config, model, max_model_len, max_num_batched_tokens)
    block_bytes = [config.block_size * group.bytes_per_token for group in model.kv_groups]
    if hardware.gpu is None:
        memory = _kv_memory(config, hardware, block_bytes, blocks_per_sequence, max_num_seqs)
    elif config.kv_cache_memory_bytes is not None:
        whose = f"the memory of {hardware.gpu.name}"
        memory = _kv_memory_as_set(config.kv_cache_memory_bytes, hardware.gpu.total_bytes, whose)
    else:
        one_sequence = sum(map(operator.mul, blocks_per_sequence, block_bytes))
        memory = _gpu_kv_memory(config, model, hardware.gpu, gpu_memory, one_sequence)
    num_kv_blocks = _num_kv_blocks(memory, block_bytes, config.block_size, blocks_per_sequence, max_num_seqs, reasons)
    return ResolvedConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_num_logit_rows=min(max(max_num_seqs, MIN_NUM_LOGIT_ROWS), max_num_batched_tokens),
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks,
        num_offload_blocks=_num_offload_blocks(config, model, hardware, reasons),
        cpu_threads=cpu_threads,
        async_scheduling=_async_scheduling(config, hardware, reasons),
        cudagraph_capture_sizes=() if hardware.gpu is None else _capture_sizes(config, max_num_seqs, reasons),
        reasons=reasons,
    )


def resolve_encoder(config: EngineConfig, model: ModelShape, hardware: HardwareFacts) -> ResolvedConfig:
    """As `resolve`, for a model that reads texts at once and gives vectors.

    It keeps nothing between steps: what the core counts as blocks are places for whole sequences.
    """
    for option in ("kv_cache_memory_bytes", "kv_offload_bytes", "speculative_config"):
        if getattr(config, option) is not None:
            raise ConfigError(f"{option} is for models that generate text, which this one does not.", option=option)
    reasons: dict[str, str] = {}
    cpu_threads = _cpu_threads(config, hardware, reasons)
    max_model_len = _max_model_len(config, model, reasons)
    step_tokens = config.max_num_batched_tokens
    if step_tokens is None:
        fitting = _num_fitting_tokens(config, model, hardware, cpu_threads)
        step_tokens = max(max_model_len, min(ENCODER_MAX_NUM_BATCHED_TOKENS, fitting))
        reasons["max_num_batched_tokens"] = (
            f"{step_tokens}: a text of the maximum length, and more where a step stays near"
            f" {TARGET_STEP_S * 1000:.0f} ms, at most {ENCODER_MAX_NUM_BATCHED_TOKENS}"
        )
    else:
        reasons["max_num_batched_tokens"] = f"{step_tokens}: as set"
    if step_tokens < max_model_len:
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_num_batched_tokens is {step_tokens}, but a text of max_model_len, {max_model_len} tokens, is"
                " computed in one step.",
                option="max_num_batched_tokens",
            )
        max_model_len = step_tokens
        reasons["max_model_len"] = f"{step_tokens}: the tokens of one step, which computes whole texts"
    max_num_seqs = _max_num_seqs(config, step_tokens, reasons)
    return ResolvedConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens,
        max_num_seqs=max_num_seqs,
        max_num_logit_rows=max_num_seqs,
        block_size=max_model_len,
        # Twice, for steps that are planned while others are computed.
        num_kv_blocks=(2 * max_num_seqs,),
        num_offload_blocks=0,
        cpu_threads=cpu_threads,
        async_scheduling=_async_scheduling(config, hardware, reasons),
        reasons=reasons,
    )


def _cpu_threads(config: EngineConfig, hardware: HardwareFacts, reasons: dict[str, str]) -> int:
    if config.cpu_threads is not None:
        reasons["cpu_threads"] = f"{config.cpu_threads}: as set"
        return config.cpu_threads
    reasons["cpu_threads"] = f"{hardware.num_cpus}: one for each processor that this process may use"
    return hardware.num_cpus


def _max_model_len(config: EngineConfig, model: ModelShape, reasons: dict[str, str]) -> int:
    trained = model.max_position_embeddings
    if config.max_model_len is None:
        reasons["max_model_len"] = f"{trained}: what the model was trained for"
        return trained
    if config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but this model was trained for {trained} tokens.",
            option="max_model_len",
        )
    reasons["max_model_len"] = f"{config.max_model_len}: as set; the model was trained for {trained}"
    return config.max_model_len


def _max_num_batched_tokens(
    config: EngineConfig, model: ModelShape, hardware: HardwareFacts, cpu_threads: int, reasons: dict[str, str]
) -> int:
    if config.max_num_batched_tokens is not None:
        reasons["max_num_batched_tokens"] = f"{config.max_num_batched_tokens}: as set"
        return config.max_num_batched_tokens
    if hardware.gpu is not None:
        is_small = hardware.gpu.total_bytes < SMALL_GPU_BYTES
        num_tokens = SMALL_GPU_MAX_NUM_BATCHED_TOKENS if is_small else GPU_MAX_NUM_BATCHED_TOKENS
        reasons["max_num_batched_tokens"] = (
            f"{num_tokens}: on a GPU with {'less than' if is_small else 'at least'} {_mebibytes(SMALL_GPU_BYTES)}"
        )
        return num_tokens
    seconds_per_token = _seconds_per_token(model, hardware, cpu_threads)
    fitting = _num_fitting_tokens(config, model, hardware, cpu_threads)
    num_tokens = max(MIN_NUM_BATCHED_TOKENS, min(CPU_MAX_NUM_BATCHED_TOKENS, fitting))
    reasons["max_num_batched_tokens"] = (
        f"{num_tokens}: at most {CPU_MAX_NUM_BATCHED_TOKENS} on a CPU, at least {MIN_NUM_BATCHED_TOKENS}, and a step"
        f" near {TARGET_STEP_S * 1000:.0f} ms at an estimated {seconds_per_token * 1000:.2g} ms per token"
    )
    return num_tokens


def _seconds_per_token(model: ModelShape, hardware: HardwareFacts, cpu_threads: int) -> float:
    usable = hardware.flops_per_s * min(cpu_threads, hardware.num_cpus) / hardware.num_cpus
    # A token takes one multiplication and one addition per parameter.
    return 2 * model.num_parameters / usable


def _num_fitting_tokens(config: EngineConfig, model: ModelShape, hardware: HardwareFacts, cpu_threads: int) -> int:
    """How many a step can compute in `TARGET_STEP_S`, in whole blocks."""
    fitting = int(TARGET_STEP_S / _seconds_per_token(model, hardware, cpu_threads))
    return fitting // config.block_size * config.block_size


def _max_num_seqs(config: EngineConfig, max_num_batched_tokens: int, reasons: dict[str, str]) -> int:
    """At most one sequence per token of a step, so that each running sequence gets its token in every step."""
    if config.max_num_seqs <= max_num_batched_tokens:
        reasons["max_num_seqs"] = f"{config.max_num_seqs}: as configured"
        return config.max_num_seqs
    reasons["max_num_seqs"] = (
        f"{max_num_batched_tokens}: lowered from {config.max_num_seqs} to the tokens of one step, so that every running"
        " sequence gets a token in each"
    )
    return max_num_batched_tokens


def _async_scheduling(config: EngineConfig, hardware: HardwareFacts, reasons: dict[str, str]) -> bool:
    if config.async_scheduling is not None:
        reasons["async_scheduling"] = f"{config.async_scheduling}: as set"
        return config.async_scheduling
    if hardware.gpu is not None:
        reasons["async_scheduling"] = "True: a GPU computes a step while the processors schedule the next"
        return True
    reasons["async_scheduling"] = "False: on a CPU, scheduling ahead takes the processors' time from the step that runs"
    return False


def _capture_sizes(config: EngineConfig, max_num_seqs: int, reasons: dict[str, str]) -> Sequence[int]:
    if config.enforce_eager:
        reasons["cudagraph_capture_sizes"] = ": none, as enforce_eager is set"
        return ()
    if config.cudagraph_capture_sizes:
        sizes = tuple(sorted({size for size in config.cudagraph_capture_sizes if size <= max_num_seqs}))
        if not sizes:
            raise ConfigError(
                f"cudagraph_capture_sizes are all above the {max_num_seqs} sequences that a step may have.",
                option="cudagraph_capture_sizes",
            )
        origin = "as set, up to max_num_seqs"
    else:
        most = min(max_num_seqs, MAX_CAPTURE_SIZE)
        sizes = tuple(sorted({1, 2, 4, *range(8, most + 1, 8), most} & set(range(1, most + 1))))
        origin = f"1, 2, 4, multiples of 8 and the most sequences of a step, at most {MAX_CAPTURE_SIZE}"
    reasons["cudagraph_capture_sizes"] = f"{', '.join(map(str, sizes))}: {origin}"
    return sizes


def _blocks_per_sequence(
    config: EngineConfig, model: ModelShape, max_model_len: int, max_num_batched_tokens: int
) -> Sequence[int]:
    """The most that one sequence needs of each group. Blocks behind the window are free before a step takes others."""
    num_blocks: list[int] = []
    for group in model.kv_groups:
        num_tokens = max_model_len
        if group.window is not None:
            # What is seen and computed in a step may begin and end in the middle of blocks.
            num_tokens = min(num_tokens, group.window + max_num_batched_tokens + config.block_size)
        num_blocks.append(-(-num_tokens // config.block_size))
    return num_blocks


@attrs.frozen
class _KVMemory:
    """What there is for the KV cache."""

    num_bytes: int
    origin: str
    """Where the number comes from."""
    option: str
    """The one to change where it is too little."""
    advice: str = "Set kv_cache_memory_bytes to at least that"


def _kv_memory(
    config: EngineConfig,
    hardware: HardwareFacts,
    block_bytes: Sequence[int],
    blocks_per_sequence: Sequence[int],
    max_num_seqs: int,
) -> _KVMemory:
    """Of the machine's own memory."""
    if config.kv_cache_memory_bytes is not None:
        return _kv_memory_as_set(config.kv_cache_memory_bytes, hardware.ram_bytes, "this machine's memory")
    needed_bytes = max_num_seqs * sum(map(operator.mul, blocks_per_sequence, block_bytes))
    num_bytes = min(int(hardware.ram_bytes * KV_CACHE_SHARE_OF_RAM), needed_bytes)
    origin = (
        f"what {max_num_seqs} sequences of the maximum length need"
        if num_bytes == needed_bytes
        else f"a quarter of {_mebibytes(hardware.ram_bytes)} memory"
    )
    return _KVMemory(num_bytes, origin, "kv_cache_memory_bytes")


def _kv_memory_as_set(num_bytes: int, all_bytes: int, whose: str) -> _KVMemory:
    if num_bytes > all_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes is {num_bytes}, more than {whose} of {all_bytes} bytes.",
            option="kv_cache_memory_bytes",
        )
    return _KVMemory(num_bytes, "kv_cache_memory_bytes as set", "kv_cache_memory_bytes")


def _gpu_kv_memory(
    config: EngineConfig, model: ModelShape, gpu: GPUFacts, use: GPUMemoryUse | None, one_sequence: int
) -> _KVMemory:
    """Of a GPU's memory, where the user has set no number. `one_sequence`: the bytes that it needs."""
    share, option = config.gpu_memory_utilization, "gpu_memory_utilization"
    allowed_bytes = int(gpu.total_bytes * share)
    if allowed_bytes > gpu.free_bytes:
        raise ConfigError(
            f"gpu_memory_utilization is {share:g}: {_mebibytes(allowed_bytes)} of {gpu.name}, but other programs leave"
            f" only {_mebibytes(gpu.free_bytes)} of it. End them, or lower it.",
            option=option,
        )
    if use is None:
        return _KVMemory(one_sequence, "one sequence of the maximum length", option)
    origin = (
        f"what {share:g} of {_mebibytes(gpu.total_bytes)} leave beside {_mebibytes(use.weights_bytes)} of weights and"
        f" {_mebibytes(use.step_bytes)} for a step"
    )
    most_bytes = max(one_sequence, MAX_GPU_KV_TOKENS * sum(group.bytes_per_token for group in model.kv_groups))
    num_bytes = min(max(0, allowed_bytes - use.num_bytes), most_bytes)
    advice = "Raise gpu_memory_utilization, lower max_num_batched_tokens, quantize the weights"
    return _KVMemory(num_bytes, origin, option, advice)


def _num_kv_blocks(
    memory: _KVMemory,
    block_bytes: Sequence[int],
    block_size: int,
    blocks_per_sequence: Sequence[int],
    max_num_seqs: int,
    reasons: dict[str, str],
) -> Sequence[int]:
    """Each group has room for one sequence of the maximum length; what is left gives all groups equally many blocks.

    So shorter sequences do not find one group full while the others are empty.
    """
    least_bytes = sum(map(operator.mul, blocks_per_sequence, block_bytes))
    needed = [max_num_seqs * number for number in blocks_per_sequence]
    num_bytes = memory.num_bytes
    if num_bytes < least_bytes:
        raise ConfigError(
            f"The KV cache has room for {num_bytes // sum(block_bytes) * block_size} tokens ({memory.origin}), but one"
            f" sequence of the maximum length needs {least_bytes} bytes. {memory.advice}, or lower max_model_len.",
            option=memory.option,
        )
    # More than all sequences need only keeps prefixes, for which a window's blocks are no use without all others.
    most = [number if number < max(needed) else num_bytes for number in needed]
    spare = [most - own for most, own in zip(most, blocks_per_sequence, strict=True)]
    divided = _divided(num_bytes - least_bytes, block_bytes, spare)
    num_blocks = tuple(map(operator.add, blocks_per_sequence, divided))
    sizes = [
        f"{_mebibytes(number * size)} in blocks of {size} bytes"
        for number, size in zip(num_blocks, block_bytes, strict=True)
    ]
    reasons["num_kv_blocks"] = f"{', '.join(map(str, num_blocks))}: {', '.join(sizes)}; {memory.origin}"
    return num_blocks


def _divided(num_bytes: int, block_bytes: Sequence[int], most: Sequence[int]) -> Sequence[int]:
    """Equally many blocks for all groups, but for those that want fewer."""
    num_blocks = [0] * len(most)
    groups = sorted(range(len(most)), key=lambda group: most[group], reverse=True)
    while groups:
        equal = num_bytes // sum(block_bytes[group] for group in groups)
        if equal <= most[groups[-1]]:
            for group in groups:
                num_blocks[group] = equal
            break
        group = groups.pop()
        num_blocks[group] = most[group]
        num_bytes -= most[group] * block_bytes[group]
    return num_blocks


def _num_offload_blocks(
    config: EngineConfig, model: ModelShape, hardware: HardwareFacts, reasons: dict[str, str]
) -> int:
    num_bytes = config.kv_offload_bytes
    if num_bytes is None:
        return 0
    if config.kv_offload_path is None and num_bytes > hardware.ram_bytes:
        raise ConfigError(
            f"kv_offload_bytes is {num_bytes}, more than this machine's memory of {hardware.ram_bytes} bytes. Set"
            " kv_offload_path to keep blocks in a folder.",
            option="kv_offload_bytes",
        )
    block_bytes = config.block_size * sum(group.bytes_per_token for group in model.kv_groups)
    num_blocks = num_bytes // block_bytes
    if num_blocks == 0:
        raise ConfigError(
            f"kv_offload_bytes is {num_bytes}, but one block takes {block_bytes}.", option="kv_offload_bytes"
        )
    reasons["num_offload_blocks"] = f"{num_blocks}: kv_offload_bytes as set, in blocks of {block_bytes} bytes"
    return num_blocks


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
