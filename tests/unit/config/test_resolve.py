"""`resolve`: the numbers it derives are consistent, explained, and what the user set is kept."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from trioengine.config import EngineConfig, HardwareFacts, KVGroupShape, ModelShape, resolve
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
    ),
)
def test_whatever_is_asked_the_numbers_fit_each_other_or_are_refused(
    config: EngineConfig, model: ModelShape, hardware: HardwareFacts
) -> None:
    try:
        resolved = resolve(config, model, hardware)
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
    assert kv_bytes_per_block * resolved.block_size <= (config.kv_cache_memory_bytes or hardware.ram_bytes // 4)
    assert 1 <= resolved.max_num_seqs <= resolved.max_num_logit_rows <= resolved.max_num_batched_tokens
    assert resolved.max_num_logit_rows >= min(256, resolved.max_num_batched_tokens)
    assert 2 <= resolved.max_model_len <= model.max_position_embeddings
    for name, reason in resolved.reasons.items():
        value = getattr(resolved, name)
        assert reason.startswith(f"{', '.join(map(str, value)) if isinstance(value, tuple) else value}: ")
    assert set(resolved.reasons) == {
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
