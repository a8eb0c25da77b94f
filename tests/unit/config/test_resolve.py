"""`resolve`: the numbers it derives are consistent, explained, and what the user set is kept."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from trioengine.config import (
    EngineConfig,
    GPUFacts,
    GPUMemoryUse,
    HardwareFacts,
    KVGroupShape,
    ModelShape,
    resolve,
)
from trioengine.errors import ConfigError

SMOLLM2_TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
SMOLLM2_135M = ModelShape(
    num_parameters=134_515_008,
    max_position_embeddings=8192,
    kv_groups=[KVGroupShape(SMOLLM2_TOKEN_BYTES)],
    vocab_size=49152,
)
WINDOWED = ModelShape(
    num_parameters=134_515_008,
    max_position_embeddings=8192,
    kv_groups=[KVGroupShape(5 * 1024, window=512), KVGroupShape(1024)],
    vocab_size=49152,
)
TWO_CORES = HardwareFacts(num_cpus=2, ram_bytes=16 * 2**30, flops_per_s=100e9)
GIB = 2**30
LARGE_GPU = HardwareFacts(16, 128 * GIB, 800e9, GPUFacts("Large", 90, total_bytes=100 * GIB, free_bytes=99 * GIB))
SMALL_GPU = HardwareFacts(16, 128 * GIB, 800e9, GPUFacts("Small", 80, total_bytes=24 * GIB, free_bytes=23 * GIB))
LLAMA_8B = ModelShape(8_030_000_000, 131072, [KVGroupShape(32 * 2 * 8 * 128 * 2)], 128256)
LARGE_MACHINE = HardwareFacts(num_cpus=64, ram_bytes=512 * 2**30, flops_per_s=3200e9)


def test_a_full_step_of_the_default_model_on_two_cores_stays_near_300_ms() -> None:
    resolved = resolve(EngineConfig(), SMOLLM2_135M, TWO_CORES)
    assert resolved.max_num_batched_tokens == 96
    assert "300 ms" in resolved.reasons["max_num_batched_tokens"]


def test_a_fast_machine_gets_the_cpu_default() -> None:
    resolved = resolve(EngineConfig(), SMOLLM2_135M, LARGE_MACHINE)
    assert resolved.max_num_batched_tokens == 256
    assert resolved.max_num_seqs == 256


def test_a_huge_model_on_a_slow_machine_still_gets_some_tokens_per_step() -> None:
    huge = ModelShape(70_000_000_000, 4096, [KVGroupShape(1024)], 32000)
    assert resolve(EngineConfig(), huge, TWO_CORES).max_num_batched_tokens == 16


def test_fewer_threads_make_smaller_steps() -> None:
    resolved = resolve(EngineConfig(cpu_threads=1), SMOLLM2_135M, TWO_CORES)
    assert resolved.cpu_threads == 1
    assert resolved.max_num_batched_tokens == 48


def test_what_the_user_set_is_kept() -> None:
    config = EngineConfig(max_model_len=1000, max_num_batched_tokens=777, max_num_seqs=7, cpu_threads=3, block_size=8)
    resolved = resolve(config, SMOLLM2_135M, TWO_CORES)
    assert resolved.max_model_len == 1000
    assert resolved.max_num_batched_tokens == 777
    assert resolved.max_num_seqs == 7
    assert resolved.cpu_threads == 3
    assert resolved.block_size == 8
    assert resolved.num_kv_blocks == (7 * 125,)


def test_every_running_sequence_fits_into_a_step() -> None:
    resolved = resolve(EngineConfig(max_num_batched_tokens=10), SMOLLM2_135M, TWO_CORES)
    assert resolved.max_num_seqs == 10
    assert "lowered from 256" in resolved.reasons["max_num_seqs"]


def test_the_kv_cache_takes_a_quarter_of_memory_where_the_sequences_need_more() -> None:
    resolved = resolve(EngineConfig(), SMOLLM2_135M, TWO_CORES)
    block_bytes = 16 * SMOLLM2_TOKEN_BYTES
    assert resolved.num_kv_blocks == (4 * 2**30 // block_bytes,)
    assert "quarter" in resolved.reasons["num_kv_blocks"]


def test_the_kv_cache_takes_no_more_than_the_sequences_need() -> None:
    resolved = resolve(EngineConfig(max_num_seqs=2, max_model_len=100), SMOLLM2_135M, TWO_CORES)
    assert resolved.num_kv_blocks == (2 * 7,)


def test_kv_cache_memory_as_set_overrides_both() -> None:
    block_bytes = 16 * SMOLLM2_TOKEN_BYTES
    config = EngineConfig(kv_cache_memory_bytes=1000 * block_bytes + 5)
    assert resolve(config, SMOLLM2_135M, TWO_CORES).num_kv_blocks == (1000,)


def test_a_kv_cache_too_small_for_one_sequence_is_refused_with_the_memory_it_needs() -> None:
    needed = 512 * 16 * SMOLLM2_TOKEN_BYTES
    with pytest.raises(ConfigError, match=str(needed)) as caught:
        resolve(EngineConfig(kv_cache_memory_bytes=needed - 1), SMOLLM2_135M, TWO_CORES)
    assert caught.value.option == "kv_cache_memory_bytes"
    assert resolve(EngineConfig(kv_cache_memory_bytes=needed), SMOLLM2_135M, TWO_CORES).num_kv_blocks == (512,)


def test_a_kv_cache_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than this machine's memory") as caught:
        resolve(EngineConfig(kv_cache_memory_bytes=TWO_CORES.ram_bytes + 1), SMOLLM2_135M, TWO_CORES)
    assert caught.value.option == "kv_cache_memory_bytes"


def test_a_window_needs_few_blocks() -> None:
    """Each sequence what it sees, and what a step computes."""
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64)
    assert resolve(config, WINDOWED, TWO_CORES).num_kv_blocks == (2 * (512 + 64 + 16) // 16, 2 * 8192 // 16)


def test_groups_of_layers_share_little_memory() -> None:
    """A sequence of the maximum length fits, and what is left holds as many tokens in one group as in the others."""
    window_blocks, all_blocks = (512 + 96 + 16) // 16, 8192 // 16
    needed = 16 * 1024 * (5 * window_blocks + all_blocks)
    for spare in (0, 100):
        config = EngineConfig(kv_cache_memory_bytes=needed + spare * 16 * 6 * 1024)
        assert resolve(config, WINDOWED, TWO_CORES).num_kv_blocks == (window_blocks + spare, all_blocks + spare)
    with pytest.raises(ConfigError, match=str(needed)):
        resolve(EngineConfig(kv_cache_memory_bytes=needed - 1), WINDOWED, TWO_CORES)
    # What a window cannot use goes to the others.
    most = 96 * window_blocks
    config = EngineConfig(kv_cache_memory_bytes=needed + 2**30)
    assert resolve(config, WINDOWED, TWO_CORES).num_kv_blocks == (
        most,
        (needed + 2**30 - 16 * 5 * 1024 * most) // (16 * 1024),
    )


def test_offloaded_blocks_are_counted_over_all_groups() -> None:
    assert resolve(EngineConfig(), WINDOWED, TWO_CORES).num_offload_blocks == 0
    block_bytes = 16 * 6 * 1024
    resolved = resolve(EngineConfig(kv_offload_bytes=10 * block_bytes + 5), WINDOWED, TWO_CORES)
    assert resolved.num_offload_blocks == 10
    assert resolved.reasons["num_offload_blocks"].startswith("10: ")
    with pytest.raises(ConfigError, match=str(block_bytes)) as caught:
        resolve(EngineConfig(kv_offload_bytes=block_bytes - 1), WINDOWED, TWO_CORES)
    assert caught.value.option == "kv_offload_bytes"


def test_what_memory_cannot_hold_may_be_offloaded_to_a_disk() -> None:
    too_much = TWO_CORES.ram_bytes + 1
    with pytest.raises(ConfigError, match="kv_offload_path") as caught:
        resolve(EngineConfig(kv_offload_bytes=too_much), SMOLLM2_135M, TWO_CORES)
    assert caught.value.option == "kv_offload_bytes"
    on_disk = EngineConfig(kv_offload_bytes=too_much, kv_offload_path="/somewhere")
    assert resolve(on_disk, SMOLLM2_135M, TWO_CORES).num_offload_blocks > 0


def test_a_context_longer_than_the_model_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="8192") as caught:
        resolve(EngineConfig(max_model_len=8193), SMOLLM2_135M, TWO_CORES)
    assert caught.value.option == "max_model_len"


@given(
    config=st.builds(
        EngineConfig,
        max_model_len=st.none() | st.integers(2, 100_000),
        block_size=st.integers(1, 64),
        kv_cache_memory_bytes=st.none() | st.integers(1, 2**40),
        max_num_seqs=st.integers(1, 1000),
        max_num_batched_tokens=st.none() | st.integers(1, 10_000),
        cpu_threads=st.none() | st.integers(1, 128),
    ),
    model=st.builds(
        ModelShape,
        num_parameters=st.integers(1, 10**12),
        max_position_embeddings=st.integers(2, 10**6),
        kv_groups=st.lists(
            st.builds(KVGroupShape, st.integers(1, 10**6), st.none() | st.integers(1, 10**6)), min_size=1, max_size=4
        ),
        vocab_size=st.integers(2, 10**6),
    ),
    hardware=st.builds(
        HardwareFacts,
        num_cpus=st.integers(1, 256),
        ram_bytes=st.integers(2**20, 2**42),
        flops_per_s=st.floats(1e8, 1e15),
        gpu=st.none()
        | st.builds(
            GPUFacts,
            name=st.just("Any"),
            capability=st.just(90),
            total_bytes=st.integers(2**28, 2**40),
            free_bytes=st.integers(2**28, 2**40),
        ),
    ),
    used=st.integers(0, 2**37),
)
def test_whatever_is_asked_the_numbers_fit_each_other_or_are_refused(
    config: EngineConfig, model: ModelShape, hardware: HardwareFacts, used: int
) -> None:
    try:
        resolved = resolve(config, model, hardware, GPUMemoryUse(used, 1) if hardware.gpu else None)
    except ConfigError as refused:
        event(str(refused.option))
        return
    for num_blocks, group in zip(resolved.num_kv_blocks, model.kv_groups, strict=True):
        seen = resolved.max_model_len if group.window is None else group.window + resolved.max_num_batched_tokens
        assert num_blocks * resolved.block_size >= min(seen, resolved.max_model_len)
    kv_bytes_per_block = sum(
        num_blocks * group.bytes_per_token
        for num_blocks, group in zip(resolved.num_kv_blocks, model.kv_groups, strict=True)
    )
    most = hardware.ram_bytes // 4 if hardware.gpu is None else hardware.gpu.total_bytes * 0.9 - used
    assert kv_bytes_per_block * resolved.block_size <= (config.kv_cache_memory_bytes or most)
    assert 1 <= resolved.max_num_seqs <= resolved.max_num_logit_rows <= resolved.max_num_batched_tokens
    assert resolved.max_num_logit_rows >= min(256, resolved.max_num_batched_tokens)
    assert 2 <= resolved.max_model_len <= model.max_position_embeddings
    for name, reason in resolved.reasons.items():
        value = getattr(resolved, name)
        assert reason.startswith(f"{', '.join(map(str, value)) if isinstance(value, tuple) else value}: ")
    assert (hardware.gpu is not None) is bool(resolved.cudagraph_capture_sizes)
    assert max(resolved.cudagraph_capture_sizes, default=0) <= resolved.max_num_seqs
    assert set(resolved.reasons) - {"cudagraph_capture_sizes"} == {
        "cpu_threads",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_kv_blocks",
        "async_scheduling",
    }


def test_steps_are_scheduled_ahead_where_asked_for() -> None:
    """Not by itself on a CPU, which has nothing to spare while a step runs."""
    by_itself = resolve(EngineConfig(), SMOLLM2_135M, TWO_CORES)
    assert not by_itself.async_scheduling
    assert "CPU" in by_itself.reasons["async_scheduling"]
    assert resolve(EngineConfig(async_scheduling=True), SMOLLM2_135M, TWO_CORES).async_scheduling


def test_on_a_gpu_the_kv_cache_has_what_weights_and_steps_leave() -> None:
    """Of the share that the engine may take, also where all sequences together need less."""
    used = GPUMemoryUse(weights_bytes=15 * GIB, step_bytes=3 * GIB)
    block_bytes = 16 * LLAMA_8B.kv_groups[0].bytes_per_token
    for config, num_bytes in [
        (EngineConfig(), 72 * GIB),
        (EngineConfig(gpu_memory_utilization=0.5), 32 * GIB),
        (EngineConfig(max_num_seqs=1, max_model_len=2000), 72 * GIB),
        (EngineConfig(kv_cache_memory_bytes=40 * GIB), 40 * GIB),
    ]:
        resolved = resolve(config, LLAMA_8B, LARGE_GPU, used)
        assert resolved.num_kv_blocks == (num_bytes // block_bytes,)
    reason = resolve(EngineConfig(), LLAMA_8B, LARGE_GPU, used).reasons["num_kv_blocks"]
    assert "0.9 of 102400 MiB" in reason
    assert "15360 MiB of weights" in reason


def test_on_a_gpu_steps_are_large_and_scheduled_ahead() -> None:
    large, small = (resolve(EngineConfig(max_model_len=4096), LLAMA_8B, gpu) for gpu in (LARGE_GPU, SMALL_GPU))
    assert (large.max_num_batched_tokens, small.max_num_batched_tokens) == (8192, 2048)
    assert large.max_num_seqs == 256
    assert large.async_scheduling
    assert "GPU" in large.reasons["async_scheduling"]
    assert not resolve(EngineConfig(async_scheduling=False), LLAMA_8B, LARGE_GPU).async_scheduling


def test_before_a_gpus_memory_is_measured_one_sequence_fits() -> None:
    """The other numbers are what they will be."""
    before = resolve(EngineConfig(), LLAMA_8B, LARGE_GPU)
    after = resolve(EngineConfig(), LLAMA_8B, LARGE_GPU, GPUMemoryUse(15 * GIB, 3 * GIB))
    assert before.num_kv_blocks == (131072 // 16,)
    assert (before.max_num_batched_tokens, before.max_num_seqs) == (after.max_num_batched_tokens, after.max_num_seqs)


def test_a_tiny_model_does_not_get_a_gpu_full_of_blocks() -> None:
    """The core keeps a little for each of them in its own memory."""
    tiny = ModelShape(1000, 512, [KVGroupShape(64)], 199)
    (num_blocks,) = resolve(EngineConfig(), tiny, LARGE_GPU, GPUMemoryUse(0, 0)).num_kv_blocks
    assert num_blocks == 2**24 // 16


def test_a_gpu_that_others_use_is_said_so() -> None:
    busy = HardwareFacts(16, 128 * GIB, 800e9, GPUFacts("Busy", 90, total_bytes=100 * GIB, free_bytes=60 * GIB))
    with pytest.raises(ConfigError, match=r"other programs leave only 61440 MiB") as caught:
        resolve(EngineConfig(), LLAMA_8B, busy)
    assert caught.value.option == "gpu_memory_utilization"
    assert resolve(EngineConfig(gpu_memory_utilization=0.5), LLAMA_8B, busy).num_kv_blocks


def test_a_model_that_leaves_no_room_on_a_gpu_is_refused_with_what_helps() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization, .*max_num_batched_tokens.*max_model_len") as caught:
        resolve(EngineConfig(), LLAMA_8B, SMALL_GPU, GPUMemoryUse(15 * GIB, 8 * GIB))
    assert caught.value.option == "gpu_memory_utilization"
    with pytest.raises(ConfigError, match="the memory of Small") as caught:
        resolve(EngineConfig(kv_cache_memory_bytes=25 * GIB), LLAMA_8B, SMALL_GPU)
    assert caught.value.option == "kv_cache_memory_bytes"


def test_graphs_are_of_few_sizes() -> None:
    def sizes(**options: object) -> tuple[int, ...]:
        return tuple(resolve(EngineConfig(**options), LLAMA_8B, LARGE_GPU).cudagraph_capture_sizes)  # type: ignore[arg-type]

    assert sizes() == (1, 2, 4, *range(8, 257, 8))
    assert sizes(max_num_seqs=3) == (1, 2, 3)
    assert sizes(max_num_seqs=30) == (1, 2, 4, 8, 16, 24, 30)
    assert sizes(max_num_seqs=1000)[-1] == 256
    assert sizes(cudagraph_capture_sizes=(4, 1, 4, 512)) == (1, 4)
    assert sizes(enforce_eager=True) == ()
    with pytest.raises(ConfigError, match="256 sequences") as caught:
        sizes(cudagraph_capture_sizes=(512,))
    assert caught.value.option == "cudagraph_capture_sizes"
    assert resolve(EngineConfig(), SMOLLM2_135M, TWO_CORES).cudagraph_capture_sizes == ()
