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
from trioengine_kernels.paged_attention.work import WORK_FIELDS

from trioengine.models.device_ops import DeviceLoRAs, DeviceModel
from trioengine.models.loader import NewTensors
from trioengine.models.lora import LoRA
from trioengine.models.torch_ops import tensors_in
from trioengine.worker.backend import LaunchBatch, StepBatch, StepNumbers, kv_cache_groups
from trioengine.worker.device.buffers import (
    DeviceState,
    StagingRing,
    StepFacts,
    StepLayout,
    StepShape,
)
from trioengine.worker.device.computer import StepComputer, Tail
from trioengine.worker.device.device import Device, HostCopy
from trioengine.worker.device.graphs import DecodeGraphs
from trioengine.worker.device.kv_cache import DeviceKVCache
from trioengine.worker.device.results import ResultShape, pack_results
from trioengine.worker.device.sampling import (
    SamplingPlanner,
    StepSampling,
    read_sampling,
    sample_logits,
    sampling_layout,
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
        self._state = DeviceState(self._facts, device.torch_device)
        self._layouts = {size: StepLayout(self._facts.decode_shape(size), self._facts) for size in options.graph_sizes}
        self._graphs = DecodeGraphs(device, options.graph_sizes)
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
            self.drop_weights()  # They may be there, and the graphs too large.
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
        self._state.drop_penalties()
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
        try:
            self._graphs.record(self._recorded_work)
        except torch.OutOfMemoryError:
            self._graph_memory = None
            raise

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
        assert len(batch.rows) == 0 or batch.rows.max() < self.max_num_seqs
        updates = batch.block_updates
        self._planner.forget(updates[(updates[:, 0] == 0) & (updates[:, 2] == 0), 1])
        plan = None if sampling is None else self._planner.plan(sampling, batch.logit_owners)
        if plan is not None and (plan.penalty_rows >= 0).any():
            self._state.begin_penalties()
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
        computer, state, num_rows = self._computer, self._state, len(batch.logit_rows)
        tail = None if plan is None else Tail(plan, None)
        staging, num_words = self._write_block(layout, batch, work, plan, tail)
        max_query_len, has_loras = int(np.diff(batch.query_start).max()), batch.lora_slots is not None

        def compute() -> Tensor:
            block = self._to_device(staging)
            inputs = layout.tensors(block)
            state.update(inputs)
            logits, hidden = computer.forward(inputs, max_query_len=max_query_len, has_loras=has_loras)
            logits, wanted_hidden = logits[:num_rows], hidden if results.num_hidden_rows else None
            self._logits, self._hidden = (logits, hidden) if tail is None else (None, None)
            if tail is not None:
                rules = attrs.evolve(tail.cut(block[num_words:]), block=inputs.sampling)
                sampled, logprobs = computer.choose(logits, rules, layout.sampling, tail.sampling)
                state.keep_tokens(inputs.sampled_rows, sampled.tokens)
                return pack_results(sampled.tokens, sampled.status, logprobs, wanted_hidden)
            if wanted_hidden is not None:
                return pack_results(None, None, None, wanted_hidden)
            return inputs.num_work.flatten()  # Anything: the host waits for it.

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
        computer, state, memory, num_rows = self._computer, self._state, self._graph_memory, len(batch.rows)
        layout, graph = self._layouts[size], self._graphs.graph(size)
        assert memory is not None
        has_more = plan.has_rules or plan.has_forced or results.num_logprobs is not None
        tail = Tail(plan, sampling_layout(plan.shape)) if has_more else None
        staging, num_words = self._write_block(layout, batch, work, _without_rules(plan) if has_more else plan, tail)

        def compute() -> Tensor:
            if tail is None:
                self._device.copy_to_device(memory.block[:num_words], staging)
                graph.replay()
                # A copy, as the next step's results take their places.
                return torch.cat((memory.results[0, :num_rows], memory.results[1, :num_rows]))
            assert tail.layout is not None
            block = self._to_device(staging)
            memory.block[:num_words].copy_(block[:num_words])
            # The graph replaces them; what is counted first are those that are there now.
            last_tokens = state.last_tokens.clone()
            graph.replay()
            rules, logits = tail.cut(block[num_words:]), memory.logits[:num_rows]
            sampled, logprobs = computer.choose(logits, rules, tail.layout, plan, last_tokens=last_tokens)
            state.keep_tokens(layout.tensors(memory.block).sampled_rows[:num_rows], sampled.tokens)
            return pack_results(sampled.tokens, sampled.status, logprobs, None)

        return self._device.launch(compute)

    def _to_device(self, staging: Tensor) -> Tensor:
        """A copy of a block. Part of a piece of work."""
        block = torch.empty(len(staging), dtype=torch.int32, device=self._device.torch_device)
        self._device.copy_to_device(block, staging)
        return block

    @property
    def _computer(self) -> StepComputer:
        """Of what is there now."""
        ready = self._ready
        assert ready is not None, "asleep"
        return StepComputer(
            ready.model, ready.loras, self._kv_caches, self._state, self._kernels, self._facts, self._options.dtype
        )

    def _write_block(
        self,
        layout: StepLayout,
        batch: LaunchBatch,
        work: Sequence[NDArray[np.int32]],
        plan: StepSampling | None,
        tail: Tail | None,
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
        computer, state, inputs = self._computer, self._state, layout.tensors(memory.block)
        sampling = read_sampling(inputs.sampling, layout.sampling, state.penalties)

        def work() -> None:
            state.update(inputs)
            logits, _ = computer.forward(inputs, max_query_len=1, has_loras=facts.has_loras)
            memory.logits[:size].copy_(logits)
            sampled = sample_logits(
                self._kernels,
                logits,
                sampling,
                state.last_tokens,
                has_rules=False,
                has_forced=False,
                is_kept=True,
            )
            memory.results[0, :size].copy_(sampled.tokens)
            memory.results[1, :size].copy_(sampled.status)
            state.keep_tokens(inputs.sampled_rows, sampled.tokens)

        return work

    # Steps that are computed one by one

    def compute(self, batch: StepBatch) -> None:
        """As `Backend.compute`. What is remembered of sequences has no part in it."""
        computer, num_seqs = self._computer, len(batch.seq_lens)
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
            block = self._to_device(staging)
            inputs, block_table = layout.tensors(block), block[num_words:].view(table.shape)
            logits, self._hidden = computer.forward(
                inputs,
                max_query_len=max_query_len,
                has_loras=batch.lora_slots is not None,
                block_table=block_table,
            )
            self._logits = logits[:num_rows]
            return inputs.num_work.flatten()

        self._ring.launched(self._device.launch(compute))

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """As `Backend.copy_logits`."""
        staging = self._ring.take(len(rows))[: len(rows)]
        staging.numpy()[:] = rows

        def select() -> Tensor:
            assert self._logits is not None, "no step was computed"
            return self._logits.index_select(0, self._to_device(staging))

        copy = self._device.launch(select)
        self._ring.launched(copy)
        return self._device.wait(copy).numpy()

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
        tail = Tail(plan, layout)
        staging = self._ring.take(sum(tail.sizes))[: sum(tail.sizes)]
        tail.fill(staging.numpy())

        computer = self._computer

        def sample() -> Tensor:
            assert self._logits is not None, "no step was computed"
            sampled, logprobs = computer.choose(
                self._logits, tail.cut(self._to_device(staging)), layout, plan, is_kept=True
            )
            return pack_results(sampled.tokens, sampled.status, logprobs, None)

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
