"""What a token takes in the cache is what the configuration is told."""

import attrs
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.program import KVCache  # noqa: E402

from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import tiny_config  # noqa: E402
from trioengine.worker.kv_cache import TorchKVCache  # noqa: E402
from trioengine.worker.loading import Computer  # noqa: E402


def test_the_size_per_token_is_what_torchs_cache_takes() -> None:
    config = tiny_config()
    cache = TorchKVCache(
        num_blocks=6,
        block_size=4,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    (group,) = Computer(None).shape(config).kv_groups
    assert cache.data.nbytes == 6 * 4 * group.bytes_per_token
    assert cache.block(5).nbytes == 4 * group.bytes_per_token


@pytest.mark.parametrize("head_dim", [8, 64, 80, 100])
def test_the_size_per_token_is_what_the_native_cache_takes(head_dim: int) -> None:
    """Padding of values included."""
    config = attrs.evolve(tiny_config(), head_dim=head_dim)
    cache = KVCache(
        num_blocks=6,
        block_size=32,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    (group,) = Computer(native_library()).shape(config).kv_groups
    assert cache.data.nbytes == 6 * 32 * group.bytes_per_token
    assert cache.block(5).nbytes == 32 * group.bytes_per_token
