# pyright: basic
"""The operations of a device, all of one kind: Triton's, or plain torch, which is what they have to compute.

They read what they are told from tensors, start nothing that the host waits for, and so can be recorded in a graph.
"""

from collections.abc import Callable

import attrs
from torch import Tensor

from trioengine_kernels.sampling.reference import Logprobs


@attrs.frozen(eq=False)
class KernelSet:
    """One function for each operation; the modules that `reference_kernels` takes them from tell what they take."""

    rms_norm: Callable[..., Tensor]
    """Rows divided by their root mean square, times weights."""
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    """The same of a sum, and the sum. It may overwrite the residual."""
    rope_write_kv: Callable[..., Tensor]
    """Queries, normed and rotated; keys and values, which go into the KV cache."""
    paged_attention: Callable[..., Tensor]
    """What queries gather from the KV cache. The one operation that another library may compute."""
    silu_and_mul: Callable[..., Tensor]
    """The gate of an MLP."""
    gelu_tanh_and_mul: Callable[..., Tensor]
    """The other gate."""
    soft_cap: Callable[..., Tensor]
    """Logits that cannot leave a range."""
    embedding: Callable[..., Tensor]
    """Rows of a table, of floats or quantized."""
    linear: Callable[..., Tensor]
    """The product with a matrix of floats, of the deterministic mode: a row's numbers do not depend on the other
    rows."""
    quantized_linear: Callable[..., Tensor]
    """The product with a quantized matrix."""
    lora: Callable[..., Tensor]
    """What adapters add to products, of each token its own."""
    experts: Callable[..., Tensor]
    """A mixture of experts, from the router's logits on."""
    prepare_step: Callable[..., tuple[Tensor, Tensor]]
    """Token ids that only the device knows, and where keys and values go."""
    apply_rules: Callable[..., Tensor]
    """Masks, biases and penalties of logits."""
    sample: Callable[..., tuple[Tensor, Tensor]]
    """A token for each row of logits, and whether there was one."""
    processed_logits: Callable[..., Tensor]
    """What `sample` draws from."""
    logprobs: Callable[..., Logprobs]
    """Log probabilities of tokens and of the most likely ones."""


def reference_kernels() -> KernelSet:
    """Plain torch's, for tensors on any device."""
    from trioengine_kernels.embedding.reference import embedding
    from trioengine_kernels.experts.device_reference import experts
    from trioengine_kernels.gelu_tanh_and_mul.reference import gelu_tanh_and_mul
    from trioengine_kernels.linear.reference import linear
    from trioengine_kernels.lora.device_reference import lora
    from trioengine_kernels.paged_attention.device_reference import paged_attention
    from trioengine_kernels.prepare_step.reference import prepare_step
    from trioengine_kernels.quantized_linear.reference import quantized_linear
    from trioengine_kernels.rms_norm.reference import add_rms_norm, rms_norm
    from trioengine_kernels.rope_write_kv.reference import rope_write_kv
    from trioengine_kernels.sampling.device_reference import apply_rules, logprobs, processed_logits, sample
    from trioengine_kernels.silu_and_mul.reference import silu_and_mul
    from trioengine_kernels.soft_cap.reference import soft_cap

    return KernelSet(
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rope_write_kv=rope_write_kv,
        paged_attention=paged_attention,
        silu_and_mul=silu_and_mul,
        gelu_tanh_and_mul=gelu_tanh_and_mul,
        soft_cap=soft_cap,
        embedding=embedding,
        linear=linear,
        quantized_linear=quantized_linear,
        lora=lora,
        experts=experts,
        prepare_step=prepare_step,
        apply_rules=apply_rules,
        sample=sample,
        processed_logits=processed_logits,
        logprobs=logprobs,
    )


def triton_kernels(attention: Callable[..., Tensor] | None = None) -> KernelSet:
    """Triton's, for tensors on a GPU, or on the CPU under Triton's interpreter.

    Args:
        attention: in place of ours, as `paged_attention.libraries.choose_attention` has it.
    """
    from trioengine_kernels.embedding.triton import embedding
    from trioengine_kernels.experts.triton import experts
    from trioengine_kernels.gelu_tanh_and_mul.triton import gelu_tanh_and_mul
    from trioengine_kernels.linear.triton import linear
    from trioengine_kernels.lora.triton import lora
    from trioengine_kernels.paged_attention.triton import paged_attention
    from trioengine_kernels.prepare_step.triton import prepare_step
    from trioengine_kernels.quantized_linear.triton import quantized_linear
    from trioengine_kernels.rms_norm.triton import add_rms_norm, rms_norm
    from trioengine_kernels.rope_write_kv.triton import rope_write_kv
    from trioengine_kernels.sampling.triton import apply_rules, logprobs, processed_logits, sample
    from trioengine_kernels.silu_and_mul.triton import silu_and_mul
    from trioengine_kernels.soft_cap.triton import soft_cap

    return KernelSet(
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rope_write_kv=rope_write_kv,
        paged_attention=attention or paged_attention,
        silu_and_mul=silu_and_mul,
        gelu_tanh_and_mul=gelu_tanh_and_mul,
        soft_cap=soft_cap,
        embedding=embedding,
        linear=linear,
        quantized_linear=quantized_linear,
        lora=lora,
        experts=experts,
        prepare_step=prepare_step,
        apply_rules=apply_rules,
        sample=sample,
        processed_logits=processed_logits,
        logprobs=logprobs,
    )
