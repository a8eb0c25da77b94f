# pyright: basic
"""A `DeviceBackend` on the CPU: the runner of a GPU, with plain torch's kernels on a fake device."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from trioengine_kernels.kernel_set import reference_kernels

from trioengine.models.device_ops import DeviceModel, prepared
from trioengine.models.torch_ops import TorchModel
from trioengine.testing.fake_device import FakeDevice
from trioengine.worker.device.backend import DeviceBackend, DeviceOptions


def device_backend(
    model: TorchModel,
    device: FakeDevice,
    *,
    num_blocks: int | Sequence[int],
    block_size: int = 16,
    max_model_len: int = 512,
    max_num_seqs: int = 8,
    max_loras: int = 0,
    max_lora_rank: int = 16,
    graph_sizes: Sequence[int] = (1, 2, 4),
) -> DeviceBackend:
    """A backend that computes this model, in float32. `num_blocks` is of each KV group, or for all of them."""
    is_one = isinstance(num_blocks, int)
    options = DeviceOptions(
        num_blocks=[num_blocks] * len(model.config.kv_groups) if is_one else num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        dtype=torch.float32,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        graph_sizes=graph_sizes,
    )
    # What a backend does not quantize are tensors.
    prepare = partial(prepared, cast(DeviceModel, model))
    return DeviceBackend(prepare(), device, reference_kernels(), options, reload=lambda _: prepare())
