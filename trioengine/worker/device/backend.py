# pyright: basic
"""Computes steps on a device, and begins the next one while it does: `DeviceBackend`.

All that a step is told goes to the device in one block, and all that it gives comes back in one. What later steps need
of it stays there: keys and values, block tables, the newest token and the penalties' counts of each sequence. Decodes
are replayed from graphs (`graphs` says what is in them); other steps are computed operation by operation.

A step that was begun reads nothing of the host's but its own block, so the host may plan and forget sequences
meanwhile. A row passes on to another sequence in the order of the steps, as blocks do.
"""

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trioengine_kernels.kernel_set import KernelSet
from trioengine_kernels.native.sampler import LogitBias, RaggedIds, SampledTokens, SamplingArrays
from trioengine_kernels.paged_attention.batch import AttentionBatch
from trioengine_kernels.paged_attention.work import WORK_FIELDS
from trioengine_kernels.sampling import Logprobs
from trioengine_kernels.sampling.device import empty_state

from trioengine.models.device_ops import DeviceInput, DeviceLoRAs, DeviceModel, DeviceOps
from trioengine.models.loader import NewTensors
from trioengine.models.lora import LoRA
from trioengine.models.torch_ops import tensors_in
from trioengine.worker.backend import LaunchBatch, StepBatch, StepNumbers, kv_cache_groups
from trioengine.worker.device.buffers import (
    ALIGNMENT,
    DeviceState,
    StagingRing,
    StepFacts,
    StepInputs,
    StepLayout,
    StepShape,
)
from trioengine.worker.device.device import Device, HostCopy
from trioengine.worker.device.graphs import DecodeGraphs
from trioengine.worker.device.kv_cache import DeviceKVCache
from trioengine.worker.device.results import ResultShape, pack_results
from trioengine.worker.device.sampling import (
    SampledLogits,
    SamplingLayout,
    SamplingPlanner,
    StepSampling,
    read_sampling,
    sample_logits,
    sampling_layout,
    start_rows,
    write_sampling,
)
from trioengine.worker.model_memory import ModelMemory
from trioengine.worker.pooling import Labels, labels_of
from trioengine.worker.profile import Profile
from trioengine.worker.sampler import sample_rows
from trioengine.worker.torch_profile import TorchProfile


@attrs.frozen(eq=False, kw_only=True)
class DeviceOptions:
    """What a device computes with, and how much."""

    num_blocks: Sequence[int]
    """Of each KV group."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    """Sequences that are known at a time."""
    dtype: torch.dtype
    """Of the numbers between embedding and logits."""
    kv_dtype: torch.dtype | None = None
    """None is `dtype`."""
    max_loras: int = 0
    max_lora_rank: int = 0
    is_deterministic: bool = False
    graph_sizes: Sequence[int] = ()
    """Numbers of sequences that graphs of decodes are recorded for."""


@attrs.frozen(eq=False)
class _Ready:
    model: DeviceModel
    loras: DeviceLoRAs | None
    labels: Labels | None


@attrs.frozen(eq=False)
class _GraphMemory:
    """What graphs read and write besides a step's state; each uses the first rows. It outlives them."""

    block: Tensor
    """[words of the largest], int32: what the step is told."""
    logits: Tensor
    """[largest size, vocab_size], float32."""
    results: Tensor
    """[2, largest size], int32: tokens, and how each was found."""


@attrs.frozen(eq=False)
class _Tail:
    """What is behind a step's inputs in its block: the rules of its rows, where it is computed by a graph, which does
    not read them there; and masks and prompts, a bit for each token."""

    sampling: StepSampling
    layout: SamplingLayout | None
    """Of the rules; None where they are not there."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Words of the rules, of the rows whose prompts are among the bits, and of the bits."""
        started = self.sampling.started_rows
        num_started_words = 2 * len(started)
        return (
            0 if self.layout is None else self.layout.num_words,
            num_started_words + -num_started_words % ALIGNMENT,
            self.sampling.bits.size,
        )

    def fill(self, into: NDArray[np.int32]) -> None:
        """Write it."""
        num_rule_words, num_started_words, _ = self.sizes
        rules, started, bits = np.split(into, np.cumsum((num_rule_words, num_started_words)))
        if self.layout is not None:
            write_sampling(self.sampling, self.layout, rules)
        started.view(np.int64)[: len(self.sampling.started_rows)] = self.sampling.started_rows
        bits[:] = self.sampling.bits.reshape(-1)

    def cut(self, block: Tensor) -> "_TailTensors":
        """The same on the device."""
        rules, started, bits = block.split(self.sizes)
        num_started = len(self.sampling.started_rows)
        return _TailTensors(rules, started.view(torch.int64)[:num_started], bits.view(self.sampling.bits.shape))


@attrs.frozen(eq=False)
class _TailTensors:
    rules: Tensor
    started_rows: Tensor
    bits: Tensor


class DeviceBackend(ModelMemory[DeviceModel, _Ready, DeviceKVCache]):
    """A model on a device: `AsyncBackend`."""

    def __init__(
        self,
        model: DeviceModel,
        device: Device,
        kernels: KernelSet,
        options: DeviceOptions,
        *,
        reload: Callable[[NewTensors], DeviceModel],
    ) -> None:
        """Make the cache and record graphs.

        Args:
            model: on the device.
            device: what computes.
            kernels: what computes there.
            options: sizes and types.
            reload: as `WeightsMemory` has it.

        Raises:
            MemoryError: it does not fit.
        """
        config = model.config
        self.vocab_size = config.vocab_size
        self.block_size = options.block_size
        self.max_num_seqs = options.max_num_seqs
        self.kv_cache_groups = kv_cache_groups(config, options.num_blocks)
        # Slots are 32-bit numbers.
        assert (max(options.num_blocks) + 1) * options.block_size < 2**31
        self._config = config
        self._device = device
        self._kernels = kernels
        self._options = options
        self._facts = StepFacts(
            model=config,
            groups=self.kv_cache_groups,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            has_loras=options.max_loras > 0,
            is_deterministic=options.is_deterministic,
        )
        self._loras: dict[int, LoRA] = {}
        self._ring = StagingRing(device)
        self._planner = SamplingPlanner(options.max_num_seqs, config.vocab_size)
        # Of no sequence, until one has penalties: counts of the whole vocabulary take memory.
        self._no_penalties = empty_state(0, config.vocab_size, device.torch_device)
        self._penalties = self._no_penalties
        self._state = DeviceState(self._facts, device.torch_device)
        self._layouts = {size: StepLayout(self._facts.decode_shape(size), self._facts) for size in options.graph_sizes}
        self._graphs = DecodeGraphs(device, options.graph_sizes, self._recorded_work)
        self._graph_memory: _GraphMemory | None = None
        self._logits: Tensor | None = None  # Of the newest step, where somebody may ask for them.
        self._hidden: Tensor | None = None
        self._kv_caches = ()
        super().__init__(model, reload)

    # Memory

    def _make_ready(self, model: DeviceModel) -> _Ready:
        options, loras = self._options, None
        if options.max_loras:
            device = self._device.torch_device
            loras = DeviceLoRAs(model, options.max_loras, options.max_lora_rank, dtype=options.dtype, device=device)
        return _Ready(model, loras, labels_of(model))

    def _weights_changed(self) -> None:
        self._forget_steps()
        if self._ready is not None and self._ready.loras is not None:
            for slot, lora in self._loras.items():
                self._ready.loras.load(slot, lora)
        if self._ready is None:
            self._device.return_memory()
        self._record()

    def _make_caches(self) -> Sequence[DeviceKVCache]:
        options, config = self._options, self._config
        return [
            DeviceKVCache(
                self._device,
                num_blocks=blocks.num_blocks,
                block_size=options.block_size,
                num_layers=len(group.layers),
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=options.kv_dtype or options.dtype,
            )
            for blocks, group in zip(self.kv_cache_groups, config.kv_groups, strict=True)
        ]

    def load_weights(self) -> None:
        """As `Memory.load_weights`."""
        try:
            super().load_weights()
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def prepare_weights(self, tensors: NewTensors) -> Callable[[], None]:
        """As `ReplaceableWeights.prepare_weights`."""
        try:
            return super().prepare_weights(tensors)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def drop_kv_cache(self) -> None:
        """As `Memory.drop_kv_cache`."""
        self._forget_steps()
        super().drop_kv_cache()
        self._penalties = self._no_penalties
        self._device.return_memory()

    def make_kv_cache(self) -> None:
        """As `Memory.make_kv_cache`."""
        try:
            super().make_kv_cache()
            self._record()
        except torch.OutOfMemoryError as error:
            self.drop_kv_cache()
            raise MemoryError(str(error)) from error

    def _forget_steps(self) -> None:
        """Let go of what steps have left, before what they were computed with changes."""
        self._device.synchronize()
        self._graphs.drop()
        self._graph_memory = self._logits = self._hidden = None

    def _record(self) -> None:
        """Record graphs, once there is everything that they use."""
        if not self._layouts or self._ready is None or not self._kv_caches or self._graph_memory is not None:
            return
        size, device = max(self._layouts), self._device.torch_device
        num_words = max(layout.num_words for layout in self._layouts.values())
        self._graph_memory = _GraphMemory(
            block=torch.zeros(num_words, dtype=torch.int32, device=device),
            logits=torch.zeros(size, self.vocab_size, dtype=torch.float32, device=device),
            results=torch.zeros(2, size, dtype=torch.int32, device=device),
        )
        self._graphs.record()

    def kv_block(self, group: int, block_id: int) -> NDArray[np.uint8]:
        """As `Backend.kv_block`: a copy."""
        return self._kv_caches[group].block(block_id)

    def write_kv_block(self, group: int, block_id: int, data: NDArray[np.uint8] | None) -> None:
        """As `Backend.write_kv_block`."""
        self._kv_caches[group].write(block_id, data)

    @property
    def labels(self) -> Labels | None:
        """As `Backend.labels`."""
        return None if self._ready is None else self._ready.labels

    def weight_arrays(self) -> Iterator[memoryview]:
        """As `ComputedModel.weight_arrays`."""
        tensors = iter(()) if self._ready is None else tensors_in(self._ready.model.decoder.weights)
        return (each.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data for each in tensors)

    def start_profile(self) -> Profile:
        """As `Profilable.start_profile`."""
        return TorchProfile()

    def load_lora(self, slot: int, lora: LoRA) -> None:
        """As `Backend.load_lora`."""
        assert 1 <= slot <= self._options.max_loras
        self._loras[slot] = lora
        if self._ready is not None:
            loras = self._ready.loras
            assert loras is not None
            self._device.run(lambda: loras.load(slot, lora))

    # Steps that are begun

    def launch(self, batch: LaunchBatch, sampling: SamplingArrays | None) -> "LaunchedDeviceStep":
        """As `AsyncBackend.launch`."""
        assert self._ready is not None, "asleep"
        assert len(batch.rows) == 0 or batch.rows.max() < self.max_num_seqs
        updates = batch.block_updates
        self._planner.forget(updates[(updates[:, 0] == 0) & (updates[:, 2] == 0), 1])
        plan = None if sampling is None else self._planner.plan(sampling, batch.logit_owners)
        if plan is not None and self._penalties is self._no_penalties and (plan.penalty_rows >= 0).any():
            self._penalties = empty_state(self.max_num_seqs, self.vocab_size, self._device.torch_device)
        results = ResultShape(
            num_rows=0 if plan is None else len(batch.logit_rows),
            num_logprobs=None if sampling is None else sampling.num_logprobs,
            num_hidden_rows=len(batch.hidden_rows),
            hidden_size=self._config.hidden_size,
        )
        work = self._facts.plan_work(batch.query_start, batch.seq_lens)
        size = self._graph_size(batch, plan)
        if size is None or plan is None:
            shape = StepShape.of(batch, work, plan)
            copy = self._begin_eagerly(StepLayout(shape, self._facts), batch, work, plan, results)
        else:
            copy = self._begin_graph(size, batch, work, plan, results)
        self._ring.launched(copy)
        return LaunchedDeviceStep(self._device, copy, results)

    def _graph_size(self, batch: LaunchBatch, plan: StepSampling | None) -> int | None:
        """Of the graph that computes a step; None where none does."""
        num_seqs = len(batch.rows)
        size = self._graphs.size_for(num_seqs)
        if size is None or plan is None or len(batch.token_ids) != num_seqs or len(batch.hidden_rows):
            return None
        # A sequence that comes back with all its blocks brings more of them than there is room for.
        has_room = len(batch.block_updates) <= self._layouts[size].shape.num_updates
        are_all_wanted = np.array_equal(batch.logit_rows, np.arange(num_seqs))
        return size if has_room and are_all_wanted else None

    def _begin_eagerly(
        self,
        layout: StepLayout,
        batch: LaunchBatch,
        work: Sequence[NDArray[np.int32]],
        plan: StepSampling | None,
        results: ResultShape,
    ) -> HostCopy:
        """Begin a step that is computed operation by operation."""
        tail = None if plan is None else _Tail(plan, None)
        staging, num_words = self._write_block(layout, batch, work, plan, tail)
        max_query_len = int(np.diff(batch.query_start).max())
        num_rows = len(batch.logit_rows)

        def compute() -> Tensor:
            block = torch.empty(len(staging), dtype=torch.int32, device=self._device.torch_device)
            self._device.copy_to_device(block, staging)
            inputs = layout.tensors(block)
            self._state.update(inputs)
            logits, hidden = self._forward(inputs, self._state.block_table, self._state.last_tokens, max_query_len)
            logits = logits[:num_rows]
            self._logits, self._hidden = (logits, hidden) if plan is None else (None, hidden)
            sampled = found = None
            if tail is not None:
                rules, last_tokens = (
                    attrs.evolve(tail.cut(block[num_words:]), rules=inputs.sampling),
                    self._state.last_tokens,
                )
                sampled, found = self._choose(logits, rules, layout.sampling, tail.sampling, last_tokens)
                self._state.keep_tokens(inputs.sampled_rows, sampled.tokens)
            if sampled is None and not results.num_hidden_rows:
                return inputs.num_work.flatten()  # Anything: the host waits for it.
            hidden = hidden if results.num_hidden_rows else None
            return pack_results(
                None if sampled is None else sampled.tokens, None if sampled is None else sampled.status, found, hidden
            )

        return self._device.launch(compute)

    def _begin_graph(
        self,
        size: int,
        batch: LaunchBatch,
        work: Sequence[NDArray[np.int32]],
        plan: StepSampling,
        results: ResultShape,
    ) -> HostCopy:
        """Begin a decode."""
        layout, graph, memory, num_rows = (
            self._layouts[size],
            self._graphs.graph(size),
            self._graph_memory,
            len(batch.rows),
        )
        assert memory is not None
        has_more = plan.has_rules or plan.has_forced or results.num_logprobs is not None
        tail = _Tail(plan, sampling_layout(plan.shape)) if has_more else None
        staging, num_words = self._write_block(layout, batch, work, _without_rules(plan) if has_more else plan, tail)

        def compute() -> Tensor:
            if tail is None:
                self._device.copy_to_device(memory.block[:num_words], staging)
                graph.replay()
                # A copy, as the next step's results take their places.
                return torch.cat((memory.results[0, :num_rows], memory.results[1, :num_rows]))
            assert tail.layout is not None
            block = torch.empty(len(staging), dtype=torch.int32, device=self._device.torch_device)
            self._device.copy_to_device(block, staging)
            memory.block[:num_words].copy_(block[:num_words])
            # The graph replaces them; what is counted first are those that are there now.
            last_tokens = self._state.last_tokens.clone()
            graph.replay()
            rules = tail.cut(block[num_words:])
            sampled, found = self._choose(memory.logits[:num_rows], rules, tail.layout, plan, last_tokens)
            inputs = layout.tensors(memory.block)
            self._state.keep_tokens(inputs.sampled_rows[:num_rows], sampled.tokens)
            return pack_results(sampled.tokens, sampled.status, found, None)

        return self._device.launch(compute)

    def _write_block(
        self,
        layout: StepLayout,
        batch: LaunchBatch,
        work: Sequence[NDArray[np.int32]],
        plan: StepSampling | None,
        tail: _Tail | None,
    ) -> tuple[Tensor, int]:
        """A step's block in the host's memory, and how many of its words are in front of the tail."""
        num_tail_words = 0 if tail is None else sum(tail.sizes)
        staging = self._ring.take(layout.num_words + num_tail_words)
        num_words = layout.fill(staging, batch, work, plan)
        if tail is not None:
            tail.fill(staging.numpy()[num_words : num_words + num_tail_words])
        return staging[: num_words + num_tail_words], num_words

    def _recorded_work(self, size: int) -> Callable[[], object]:
        """What the graph of a size records; its block is filled with nobody's tokens."""
        layout, memory, facts = self._layouts[size], self._graph_memory, self._facts
        assert memory is not None
        staging = self._device.staging(layout.num_words)
        layout.fill(staging, _nobodys_step(), [np.empty((0, WORK_FIELDS), np.int32)] * len(facts.groups), None)
        self._device.run(lambda: memory.block[: layout.num_words].copy_(staging))
        inputs = layout.tensors(memory.block)
        sampling = read_sampling(inputs.sampling, layout.sampling, self._no_penalties)

        def work() -> None:
            self._state.update(inputs)
            logits, _ = self._forward(inputs, self._state.block_table, self._state.last_tokens, max_query_len=1)
            memory.logits[:size].copy_(logits)
            sampled = sample_logits(
                self._kernels,
                logits,
                sampling,
                self._state.last_tokens,
                has_rules=False,
                has_forced=False,
                is_kept=True,
            )
            memory.results[0, :size].copy_(sampled.tokens)
            memory.results[1, :size].copy_(sampled.status)
            self._state.keep_tokens(inputs.sampled_rows, sampled.tokens)

        return work

    def _forward(
        self, inputs: StepInputs[Tensor], block_table: Tensor, last_tokens: Tensor, max_query_len: int
    ) -> tuple[Tensor, Tensor]:
        """Logits, [num_logit_rows, vocab_size], and hidden states, [num_hidden_rows, hidden_size], float32."""
        ready, facts, block_size = self._ready, self._facts, self.block_size
        assert ready is not None
        token_ids, slots = self._kernels.prepare_step(
            inputs.token_ids, inputs.token_rows, inputs.positions, last_tokens, block_table, block_size
        )
        attention = [
            AttentionBatch(
                block_table=block_table[number],
                rows=inputs.rows,
                query_start=inputs.query_start,
                seq_lens=inputs.seq_lens,
                work=inputs.work[number],
                num_work=inputs.num_work[number],
                block_size=block_size,
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
                slots=list(slots),
                attention=attention,
                logit_rows=inputs.logit_rows,
                hidden_rows=inputs.hidden_rows,
                lora_slots=inputs.lora_slots if facts.has_loras else None,
            ),
            [cache.layers for cache in self._kv_caches],
            self._kernels,
            dtype=self._options.dtype,
            loras=ready.loras,
            is_deterministic=facts.is_deterministic,
        )
        logits = ready.model.decoder.forward(ops)
        assert ops.hidden_states is not None
        hidden = ops.hidden_states
        if len(inputs.hidden_rows):
            # The last norm has it in its weights.
            hidden = hidden.float() / self._config.logit_multiplier
        return logits, hidden

    def _choose(
        self,
        logits: Tensor,
        tail: _TailTensors,
        layout: SamplingLayout,
        plan: StepSampling,
        last_tokens: Tensor,
        *,
        is_kept: bool = False,
    ) -> tuple[SampledLogits, Logprobs | None]:
        """A token for each row by its rules, and log probabilities where there are to be some.

        Args:
            logits: of the step. Overwritten, unless `is_kept`.
            tail: what the device is told of the rules.
            layout: of `tail.rules`.
            plan: what it was made of.
            last_tokens: of each row, before the step.
            is_kept: whether the logits are needed afterwards.
        """
        state, arrays = self._penalties, plan.arrays
        num_masks, num_logprobs = plan.num_masks, arrays.num_logprobs
        sampling = read_sampling(tail.rules, layout, state, tail.bits[:num_masks] if num_masks else None)
        if len(tail.started_rows):
            start_rows(state, tail.started_rows, tail.bits[num_masks:])
        sampled = sample_logits(
            self._kernels,
            logits,
            sampling,
            last_tokens,
            has_rules=plan.has_rules,
            has_forced=plan.has_forced,
            is_kept=is_kept or (num_logprobs is not None and not arrays.logprobs_are_processed),
        )
        if num_logprobs is None:
            return sampled, None
        if arrays.logprobs_are_processed:
            logits = self._kernels.processed_logits(sampled.ruled, sampling.batch)
        return sampled, self._kernels.logprobs(logits, sampled.tokens, max(0, int(num_logprobs.max())))

    # Steps that are computed one by one

    def compute(self, batch: StepBatch) -> None:
        """As `Backend.compute`. What is remembered of sequences has no part in it."""
        assert self._ready is not None, "asleep"
        num_seqs = len(batch.seq_lens)
        assert num_seqs <= self.max_num_seqs
        work = self._facts.plan_work(batch.query_start, batch.seq_lens)
        packed = _without_rows(batch)
        layout = StepLayout(StepShape.of(packed, work, None), self._facts)
        num_blocks = np.array([group.num_blocks for group in self.kv_cache_groups], np.int32)[:, None, None]
        table = np.where(batch.block_table < 0, num_blocks, batch.block_table)
        num_words = layout.num_words
        staging = self._ring.take(num_words + table.size)[: num_words + table.size]
        layout.fill(staging, packed, work, None)
        staging.numpy()[num_words:] = table.reshape(-1)
        max_query_len, num_rows = int(np.diff(batch.query_start).max()), len(batch.logit_rows)

        def compute() -> Tensor:
            block = torch.empty(len(staging), dtype=torch.int32, device=self._device.torch_device)
            self._device.copy_to_device(block, staging)
            inputs, block_table = layout.tensors(block), block[num_words:].view(table.shape)
            logits, self._hidden = self._forward(inputs, block_table, self._state.last_tokens, max_query_len)
            self._logits = logits[:num_rows]
            return inputs.num_work.flatten()

        self._ring.launched(self._device.launch(compute))

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """As `Backend.copy_logits`."""
        index = torch.tensor(list(rows), dtype=torch.int64)

        def select() -> Tensor:
            assert self._logits is not None, "no step was computed"
            return self._logits.index_select(0, index.to(self._device.torch_device))

        return self._device.wait(self._device.launch(select)).numpy()

    def hidden_states(self) -> NDArray[np.float32]:
        """As `Backend.hidden_states`."""

        def hidden() -> Tensor:
            assert self._hidden is not None, "no step was computed"
            return self._hidden

        return self._device.wait(self._device.launch(hidden)).numpy()

    def sample(self, arrays: SamplingArrays) -> SampledTokens:
        """As `Backend.sample`. The host does it where the device would have to know what sequences have said: as these
        steps are computed one by one, the device's counts are not of this step."""
        num_rows = len(arrays.temperature)
        if arrays.penalties is not None or arrays.changed is not None:
            return sample_rows(torch.from_numpy(self.copy_logits(range(num_rows))), arrays)
        plan = self._planner.plan(arrays, np.zeros(num_rows, np.int32))
        layout = sampling_layout(plan.shape)
        tail = _Tail(plan, layout)
        staging = self._ring.take(sum(tail.sizes))[: sum(tail.sizes)]
        tail.fill(staging.numpy())

        def sample() -> Tensor:
            assert self._logits is not None, "no step was computed"
            block = torch.empty(len(staging), dtype=torch.int32, device=self._device.torch_device)
            self._device.copy_to_device(block, staging)
            last_tokens = self._state.last_tokens
            sampled, found = self._choose(self._logits, tail.cut(block), layout, plan, last_tokens, is_kept=True)
            return pack_results(sampled.tokens, sampled.status, found, None)

        copy = self._device.launch(sample)
        self._ring.launched(copy)
        results = ResultShape(num_rows, arrays.num_logprobs, 0, 0)
        sampled = results.unpack(self._device.wait(copy).numpy()).sampled
        assert sampled is not None
        return sampled

    def compute_largest_step(self, num_tokens: int, num_logit_rows: int) -> None:
        """Compute nobody's tokens, as many as a step has at most, so that somebody can look at the memory that this
        takes. Waits."""
        facts = self._facts
        starts = np.append(np.arange(0, num_tokens, facts.max_model_len, dtype=np.int32), np.int32(num_tokens))
        lens, num_rows = np.diff(starts), min(num_tokens, num_logit_rows)
        batch = LaunchBatch(
            token_ids=np.zeros(num_tokens, np.int32),
            positions=np.arange(num_tokens, dtype=np.int32) % np.int32(facts.max_model_len),
            query_start=starts,
            seq_lens=lens,
            logit_rows=np.arange(num_rows, dtype=np.int32),
            rows=np.full(len(lens), facts.no_row, np.int32),
            block_updates=_NO_UPDATES,
            logit_owners=np.full(num_rows, facts.no_row, np.int32),
            sampled_rows=np.full(num_rows, -1, np.int32),
        )
        arrays = SamplingArrays(
            temperature=np.ones(num_rows, np.float32),
            top_k=np.full(num_rows, 50, np.int32),
            top_p=np.full(num_rows, 0.9, np.float32),
            min_p=np.zeros(num_rows, np.float32),
            seed=np.zeros(num_rows, np.uint64),
            position=np.zeros(num_rows, np.int64),
            num_logprobs=np.full(num_rows, 1, np.int32),
        )
        plan, work = self._planner.plan(arrays, batch.logit_owners), facts.plan_work(starts, lens)
        results = ResultShape(num_rows, arrays.num_logprobs, 0, 0)
        layout = StepLayout(StepShape.of(batch, work, plan), facts)
        copy = self._begin_eagerly(layout, batch, work, plan, results)
        self._ring.launched(copy)
        self._device.wait(copy)


@attrs.frozen(eq=False)
class LaunchedDeviceStep:
    """A step that the device computes: `LaunchedStep`."""

    _device: Device
    _copy: HostCopy
    _results: ResultShape

    def wait(self) -> StepNumbers:
        """As `LaunchedStep.wait`."""
        return self._results.unpack(self._device.wait(self._copy).numpy())


_NO_UPDATES = np.empty((0, 4), np.int32)


def _nobodys_step() -> LaunchBatch:
    """A step without sequences."""
    none = np.empty(0, np.int32)
    return LaunchBatch(
        token_ids=none,
        positions=none,
        query_start=np.zeros(1, np.int32),
        seq_lens=none,
        logit_rows=none,
        rows=none,
        block_updates=_NO_UPDATES,
        logit_owners=none,
        sampled_rows=none,
    )


def _without_rows(batch: StepBatch) -> LaunchBatch:
    """The same tokens, where each sequence's number in the step is its row."""
    return LaunchBatch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        query_start=batch.query_start,
        seq_lens=batch.seq_lens,
        logit_rows=batch.logit_rows,
        lora_slots=batch.lora_slots,
        hidden_rows=batch.hidden_rows,
        rows=np.arange(len(batch.seq_lens), dtype=np.int32),
        block_updates=_NO_UPDATES,
        logit_owners=np.zeros(len(batch.logit_rows), np.int32),
        sampled_rows=np.full(len(batch.logit_rows), -1, np.int32),
    )


def _without_rules(plan: StepSampling) -> StepSampling:
    """What a graph is told: only what every row has."""
    num_rows, no_ids, none = len(plan.mask_rows), np.empty(0, np.int32), np.full(len(plan.mask_rows), -1, np.int32)
    no_ragged = RaggedIds(np.zeros(num_rows + 1, np.int64), no_ids)
    return attrs.evolve(
        plan,
        mask_rows=none,
        bias=LogitBias(no_ragged, np.empty(0, np.float32)),
        penalty_rows=none,
        drafts=no_ragged,
        counted_rows=no_ids,
        counted_ids=no_ids,
    )
