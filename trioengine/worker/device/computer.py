# pyright: basic
"""What a piece of a device's work does: logits of a step's inputs, and tokens of logits.

It reads nothing that the host changes while a step is in flight, and starts nothing that the host waits for. It does
not know where inputs come from, nor what becomes of the results.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trioengine_kernels.kernel_set import KernelSet
from trioengine_kernels.paged_attention.batch import AttentionBatch
from trioengine_kernels.sampling import Logprobs

from trioengine.models.device_ops import DeviceInput, DeviceLoRAs, DeviceModel, DeviceOps
from trioengine.worker.device.buffers import ALIGNMENT, DeviceState, StepFacts, StepInputs
from trioengine.worker.device.kv_cache import DeviceKVCache
from trioengine.worker.device.sampling import (
    SampledLogits,
    SamplingLayout,
    StepSampling,
    read_sampling,
    sample_logits,
    start_rows,
    write_sampling,
)


@attrs.frozen(eq=False)
class Rules:
    """How a step's tokens are chosen, on the device."""

    block: Tensor
    """As `sampling_layout` has it."""
    started_rows: Tensor
    """[num_started], int64: as in `StepSampling`."""
    bits: Tensor
    """As in `StepSampling`."""


@attrs.frozen(eq=False)
class Tail:
    """What is behind a step's inputs in its block: how tokens are chosen, where that is not among the inputs; and masks
    and prompts, a bit for each token."""

    sampling: StepSampling
    layout: SamplingLayout | None
    """Of `Rules.block`; None where it is among the inputs."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Words of the fields of `Rules`."""
        num_started_words = 2 * len(self.sampling.started_rows)
        return (
            0 if self.layout is None else self.layout.num_words,
            num_started_words + -num_started_words % ALIGNMENT,
            self.sampling.bits.size,
        )

    def fill(self, into: NDArray[np.int32]) -> None:
        """Write it."""
        num_block_words, num_started_words, _ = self.sizes
        block, started, bits = np.split(into, np.cumsum((num_block_words, num_started_words)))
        if self.layout is not None:
            write_sampling(self.sampling, self.layout, block)
        started.view(np.int64)[: len(self.sampling.started_rows)] = self.sampling.started_rows
        bits[:] = self.sampling.bits.reshape(-1)

    def cut(self, tail: Tensor) -> Rules:
        """The same on the device."""
        block, started, bits = tail.split(self.sizes)
        num_started = len(self.sampling.started_rows)
        return Rules(block, started.view(torch.int64)[:num_started], bits.view(self.sampling.bits.shape))


@attrs.frozen(eq=False)
class StepComputer:
    """A model that is there, with its cache."""

    model: DeviceModel
    loras: DeviceLoRAs | None
    caches: Sequence[DeviceKVCache]
    """Of each KV group."""
    state: DeviceState
    kernels: KernelSet
    facts: StepFacts
    dtype: torch.dtype
    """Of the numbers between embedding and logits."""

    def forward(
        self,
        inputs: StepInputs[Tensor],
        *,
        max_query_len: int,
        has_loras: bool,
        block_table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute a step.

        Args:
            inputs: what it is told.
            max_query_len: the most tokens of a sequence.
            has_loras: whether tokens may have adapters.
            block_table: in place of the state's.

        Returns:
            Logits, [num_logit_rows, vocab_size], and hidden states, [num_hidden_rows, hidden_size], float32.
        """
        facts, kernels, last_tokens = self.facts, self.kernels, self.state.last_tokens
        if block_table is None:
            block_table = self.state.block_table
        token_ids, slots = kernels.prepare_step(
            inputs.token_ids, inputs.token_rows, inputs.positions, last_tokens, block_table, facts.block_size
        )
        attention = [
            AttentionBatch(
                block_table=block_table[number],
                rows=inputs.rows,
                query_start=inputs.query_start,
                seq_lens=inputs.seq_lens,
                work=inputs.work[number],
                num_work=inputs.num_work[number, :1],
                block_size=facts.block_size,
                window=group.window,
                max_query_len=max_query_len,
                is_deterministic=facts.is_deterministic,
            )
            for number, group in enumerate(facts.groups)
        ]
        ops = DeviceOps(
            DeviceInput(
                token_ids=token_ids,
                positions=inputs.positions,
                # Copies, which begin at multiples of 16 bytes, or Triton would compile for others, too.
                slots=[slots[0], *(each.clone() for each in slots[1:])],
                attention=attention,
                logit_rows=inputs.logit_rows,
                hidden_rows=inputs.hidden_rows,
                lora_slots=inputs.lora_slots if has_loras else None,
            ),
            [cache.layers for cache in self.caches],
            kernels,
            dtype=self.dtype,
            loras=self.loras,
            is_deterministic=facts.is_deterministic,
        )
        logits = self.model.decoder.forward(ops)
        assert ops.hidden_states is not None
        hidden = ops.hidden_states
        if len(inputs.hidden_rows):
            # The last norm has it in its weights.
            hidden = hidden.float() / self.model.config.logit_multiplier
        return logits, hidden

    def choose(
        self,
        logits: Tensor,
        rules: Rules,
        layout: SamplingLayout,
        plan: StepSampling,
        *,
        last_tokens: Tensor | None = None,
        is_kept: bool = False,
    ) -> tuple[SampledLogits, Logprobs | None]:
        """A token for each row by its rules, and log probabilities where there are to be some.

        Args:
            logits: of the step. Overwritten, unless `is_kept`.
            rules: of its rows.
            layout: of `rules.block`.
            plan: what it was made of.
            last_tokens: of each row, before the step; None is the state's.
            is_kept: whether the logits are needed afterwards.
        """
        num_masks, arrays, num_logprobs = plan.num_masks, plan.arrays, plan.arrays.num_logprobs
        penalties = self.state.penalties
        sampling = read_sampling(rules.block, layout, penalties, rules.bits[:num_masks] if num_masks else None)
        if len(rules.started_rows):
            start_rows(penalties, rules.started_rows, rules.bits[num_masks:])
        sampled = sample_logits(
            self.kernels,
            logits,
            sampling,
            self.state.last_tokens if last_tokens is None else last_tokens,
            has_rules=plan.has_rules,
            has_forced=plan.has_forced,
            is_kept=is_kept or (num_logprobs is not None and not arrays.logprobs_are_processed),
        )
        if num_logprobs is None:
            return sampled, None
        if arrays.logprobs_are_processed:
            logits = self.kernels.processed_logits(sampled.ruled, sampling.batch)
        return sampled, self.kernels.logprobs(logits, sampled.tokens, max(0, int(num_logprobs.max())))
