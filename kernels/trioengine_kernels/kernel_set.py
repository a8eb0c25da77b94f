# pyright: basic
"""The operations of a device, all of one kind: Triton's, or plain torch, which is what they have to compute.

They read what they are told from tensors, start nothing that the host waits for, and so can be recorded in a graph.
"""

from collections.abc import Callable

import attrs
from torch import Tensor


@attrs.frozen(eq=False)
class KernelSet:
    """One function for each operation; `<op>/reference.py` and `<op>/triton.py` tell what they take and return."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rope_write_kv: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    silu_and_mul: Callable[..., Tensor]
    gelu_tanh_and_mul: Callable[..., Tensor]
    soft_cap: Callable[..., Tensor]
    embedding: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    """Of the deterministic mode: a row's numbers do not depend on the other rows."""
    quantized_linear: Callable[..., Tensor]
    lora: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    prepare_step: Callable[..., tuple[Tensor, Tensor]]
    apply_rules: Callable[..., Tensor]
    sample: Callable[..., Tensor]
    logprobs: Callable[..., object]
