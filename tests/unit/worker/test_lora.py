# pyright: basic
"""Adapters in a batch: each sequence's logits are those of the model with its adapter merged into the weights."""

from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.core.executor import LoRALoad, NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.models.lora import LoRA, read_lora  # noqa: E402
from trioengine.models.torch_ops import load_torch_model  # noqa: E402
from trioengine.testing.logits import HalfCacheOps, torch_logits  # noqa: E402
from trioengine.testing.lora import merged, write_lora  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import native_copy, random_model, tiny_config, write_gguf  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.types.pooling import PoolingParams, PoolingType  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.native_backend import NativeBackend  # noqa: E402
from trioengine.worker.packing import pack_step  # noqa: E402
from trioengine.worker.sequences import SequenceState, sequence_state  # noqa: E402
from trioengine.worker.torch_backend import TorchBackend  # noqa: E402

MODEL = random_model(attrs.evolve(tiny_config(), has_qkv_bias=True))
VOCAB_SIZE = MODEL.config.vocab_size
NUM_BLOCKS = 24
BLOCK_SIZE = 16
TOLERANCE = 1e-4


def make_torch(max_loras=2):
    return TorchBackend(MODEL, reload=lambda _: MODEL, num_blocks=[NUM_BLOCKS], block_size=BLOCK_SIZE)


def make_native(max_loras=2, num_threads=2):
    library, model = native_library(), native_copy(MODEL)
    return NativeBackend(
        model,
        library,
        ThreadPool(library, num_threads),
        reload=lambda _: model,
        num_blocks=[NUM_BLOCKS],
        block_size=BLOCK_SIZE,
        max_tokens=128,
        max_logit_rows=128,
        max_loras=max_loras,
    )


BACKENDS = pytest.mark.parametrize("make", [make_torch, make_native])


@attrs.define
class Part:
    """As `worker.packing.TokenRange`."""

    state: SequenceState
    first: int
    end: int


class Batch:
    """Sequences on a backend, with the logits of all their tokens."""

    def __init__(self, backend, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self.backend = backend
        self.states = [
            sequence_state(
                NewSequence(i, tokens(length, i), length, SamplingParams(), seed=0, lora_slot=slot), VOCAB_SIZE
            )
            for i, (slot, length) in enumerate(zip(slots, lengths, strict=True))
        ]
        first = 0
        for state, length in zip(self.states, lengths, strict=True):
            count = -(-length // BLOCK_SIZE)
            state.add_blocks(range(first, first + count))
            first += count
        assert first <= NUM_BLOCKS
        self.done = [0] * len(lengths)
        self.logits = [[] for _ in lengths]

    def step(self, *counts: int) -> None:
        """The next tokens of each; 0 leaves a sequence out."""
        members = [i for i, count in enumerate(counts) if count]
        parts = [Part(self.states[i], self.done[i], self.done[i] + counts[i]) for i in members]
        batch = pack_step(
            parts,
            range(sum(counts)),
            block_size=BLOCK_SIZE,
            num_blocks=[NUM_BLOCKS],
            block_groups=[0],
            has_loras=True,
        )
        self.backend.compute(batch)
        rows = self.backend.copy_logits(range(sum(counts)))
        for i, of_sequence in zip(members, np.split(rows, np.cumsum([counts[i] for i in members])[:-1]), strict=True):
            self.logits[i].append(of_sequence)
            self.done[i] += counts[i]

    def all(self, number: int) -> np.ndarray:
        assert self.done[number] == len(self.states[number].token_ids)
        return np.concatenate(self.logits[number])


def tokens(length: int, start: int) -> list[int]:
    return [(start * 17 + place * 29 + place * place * 5 + 3) % VOCAB_SIZE for place in range(length)]


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> list[LoRA]:
    """Of ranks 3 and 16, the second of all matrices, and a third of one."""
    folder = tmp_path_factory.mktemp("loras")
    made = [
        write_lora(folder / "a", MODEL.config, ["q_proj", "v_proj", "gate_proj"], rank=3, seed=1),
        write_lora(folder / "b", MODEL.config, rank=16, seed=2),
        write_lora(folder / "c", MODEL.config, ["layers.1.mlp.down_proj"], rank=5, seed=3, size=2),
    ]
    return [read_lora(str(path), MODEL.config, 16) for path in made]


def wanted(lora: LoRA | None, make, length: int, start: int) -> np.ndarray:
    model = MODEL if lora is None else merged(MODEL, lora)
    if make is make_torch:
        return torch_logits(model, tokens(length, start))
    return torch_logits(model, tokens(length, start), HalfCacheOps)


def test_an_adapter_that_peft_has_saved_gives_pefts_logits() -> None:
    """In the fixture are a Llama, an adapter and the logits of both, as PEFT 0.21.2 and transformers 5.24 made them: a
    pattern of modules, others of ranks and alphas, rslora."""
    folder = Path(__file__).parents[2] / "fixtures" / "peft"
    checkpoint = open_checkpoint(ModelLocation(ModelKind.FOLDER, folder / "model", "peft"))
    lora = read_lora(str(folder / "adapter"), checkpoint.config, 3)
    expected = np.load(folder / "logits.npy")
    token_ids = range(3, 27)
    model = load_torch_model(checkpoint)
    assert relative_error(torch_logits(merged(model, lora), token_ids), expected) < 1e-5
    assert relative_error(torch_logits(model, token_ids), expected) > 0.1


def test_rows_of_a_gguf_file_are_in_the_order_of_adapters(tmp_path: Path, loras: list[LoRA]) -> None:
    """llama.cpp stores queries and keys of a Llama in another order."""
    config = attrs.evolve(MODEL.config, has_qkv_bias=False)
    model = random_model(config)
    write_gguf(tmp_path / "model.gguf", model)
    read = load_torch_model(open_checkpoint(ModelLocation(ModelKind.GGUF, tmp_path / "model.gguf", "tiny")))
    backend = TorchBackend(read, reload=lambda _: read, num_blocks=[NUM_BLOCKS], block_size=BLOCK_SIZE)
    backend.load_lora(1, loras[1])
    batch = Batch(backend, [1], [20])
    batch.step(20)
    assert relative_error(batch.all(0), torch_logits(merged(model, loras[1]), tokens(20, 0))) < TOLERANCE


SCHEDULES = {
    "prefill": [(20, 33, 25, 18)],
    "chunked prefill": [(7, 16, 1, 5), (0, 1, 24, 5), (13, 16, 0, 8)],
    "decode": [(17, 30, 22, 15), *[(1, 1, 1, 1)] * 3],
    "mixed": [(19, 0, 0, 0), (1, 30, 0, 0), (0, 1, 20, 17), (0, 1, 5, 0), (0, 1, 0, 1)],
}


@BACKENDS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_of_base_and_two_adapters_equals_the_merged_weights(make, schedule: str, loras: list[LoRA]) -> None:
    backend = make()
    backend.load_lora(1, loras[0])
    backend.load_lora(2, loras[1])
    batch = Batch(backend, [1, 0, 2, 1], [20, 33, 25, 18])
    for counts in SCHEDULES[schedule]:
        batch.step(*counts)
    base = wanted(None, make, 20, 0)
    for number, lora in enumerate([loras[0], None, loras[1], loras[0]]):
        length = len(batch.states[number].token_ids)
        assert relative_error(batch.all(number), wanted(lora, make, length, number)) < TOLERANCE
    assert relative_error(batch.all(0), base) > 0.1


@BACKENDS
def test_each_target_counts(make, tmp_path: Path) -> None:
    """An adapter of one module changes the logits, and as the merged weights say."""
    backend = make()
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for seed, module in enumerate(modules):
        lora = read_lora(
            str(write_lora(tmp_path / module, MODEL.config, [module], seed=seed, size=2)), MODEL.config, 16
        )
        backend.load_lora(1, lora)
        batch = Batch(backend, [1], [20])
        batch.step(20)
        assert relative_error(batch.all(0), wanted(lora, make, 20, 0)) < TOLERANCE
        assert relative_error(batch.all(0), wanted(None, make, 20, 0)) > 1e-2


@BACKENDS
def test_logits_of_few_rows_keep_their_adapters(make, loras: list[LoRA]) -> None:
    """From the last layer's attention on, only rows whose logits are wanted are computed."""
    backend = make()
    backend.load_lora(1, loras[0])
    backend.load_lora(2, loras[1])
    batch = Batch(backend, [2, 0, 1], [9, 12, 10])
    parts = [Part(state, 0, len(state.token_ids)) for state in batch.states]
    packed = pack_step(
        parts, [8, 20, 30], block_size=BLOCK_SIZE, num_blocks=[NUM_BLOCKS], block_groups=[0], has_loras=True
    )
    backend.compute(packed)
    for number, (lora, length) in enumerate(((loras[1], 9), (None, 12), (loras[0], 10))):
        found = backend.copy_logits([number])[0]
        assert relative_error(found, wanted(lora, make, length, number)[-1]) < TOLERANCE


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_sequences_bits_do_not_depend_on_the_batch(num_threads: int, loras: list[LoRA]) -> None:
    """On the native kernels: alone and whole, or in parts beside others, with another slot for its adapter."""
    slots, lengths = [1, 0, 2, 1], [20, 33, 25, 18]
    backend = make_native(num_threads=num_threads)
    backend.load_lora(1, loras[0])
    backend.load_lora(2, loras[1])
    together = Batch(backend, slots, lengths)
    for counts in SCHEDULES["mixed"]:
        together.step(*counts)
    swapped = make_native(num_threads=1)
    swapped.load_lora(2, loras[0])
    swapped.load_lora(1, loras[1])
    for number, slot in enumerate(slots):
        alone = Batch(swapped, [(0, 2, 1)[slot] if i == number else 0 for i in range(4)], lengths)
        alone.step(*(length if i == number else 0 for i, length in enumerate(lengths)))
        assert (alone.all(number) == together.all(number)).all()


def test_a_backend_with_slots_computes_the_same_bits_without_adapters() -> None:
    """And a step without adapters does none of their operations."""
    with_slots, without = Batch(make_native(), [0, 0], [20, 30]), Batch(make_native(max_loras=0), [0, 0], [20, 30])
    for batch in (with_slots, without):
        batch.step(20, 11)
        batch.step(0, 19)
    for number in range(2):
        assert (with_slots.all(number) == without.all(number)).all()
    parts = [Part(state, 0, 5) for state in with_slots.states]
    packed = pack_step(parts, [0], block_size=BLOCK_SIZE, num_blocks=[NUM_BLOCKS], block_groups=[0], has_loras=True)
    assert packed.lora_slots is None


@BACKENDS
def test_slots_are_filled_anew_while_serving_and_survive_sleep(make, loras: list[LoRA]) -> None:
    backend = make()

    def check(slot: int, lora: LoRA) -> None:
        batch = Batch(backend, [slot], [20])
        batch.step(20)
        assert relative_error(batch.all(0), wanted(lora, make, 20, 0)) < TOLERANCE

    backend.load_lora(1, loras[0])
    check(1, loras[0])
    backend.load_lora(2, loras[2])
    check(2, loras[2])
    backend.load_lora(1, loras[1])
    check(1, loras[1])
    check(2, loras[2])
    backend.drop_weights()
    backend.drop_kv_cache()
    backend.load_lora(2, loras[0])
    backend.make_kv_cache()
    backend.load_weights()
    check(1, loras[1])
    check(2, loras[0])


@BACKENDS
@pytest.mark.parametrize("pooling_type", list(PoolingType))
def test_vectors_take_adapters(make, pooling_type: PoolingType, loras: list[LoRA]) -> None:
    """An embedding of an adapter's model beside one of the model itself, and beside text that is generated."""
    params = PoolingParams(pooling_type=pooling_type, normalize=True)

    def vectors(backend, slots: Sequence[int]) -> list[np.ndarray]:
        executor = LocalExecutor(backend, read_lora=lambda path: loras[int(path)])
        executor.add_lora(7, "0")
        sampling = SamplingParams(max_tokens=0)
        new = [
            NewSequence(i, tokens(9, 3), 9, sampling, seed=0, lora_slot=slot, pooling=params)
            for i, slot in enumerate(slots)
        ]
        new.append(NewSequence(9, tokens(5, 1), 5, SamplingParams(temperature=0), seed=0, lora_slot=slots[0]))
        works = [ScheduledSequence(each.sequence_id, 0, len(each.token_ids), [i]) for i, each in enumerate(new)]
        loads = [LoRALoad(1, 7)] if any(slots) else []
        executor.submit(StepPlan(0, works, new, lora_loads=loads))
        pooled = executor.result().pooled
        return [pooled[i] for i in range(len(slots))]

    found = vectors(make(), [1, 0])
    model = merged(MODEL, loras[0])
    (changed,) = vectors(
        TorchBackend(model, reload=lambda _: model, num_blocks=[NUM_BLOCKS], block_size=BLOCK_SIZE), [0]
    )
    (plain,) = vectors(make_torch(), [0])
    # Native keys and values are halves.
    assert np.linalg.norm(found[0] - changed) < 5e-3
    assert np.linalg.norm(found[1] - plain) < 5e-3
    assert np.linalg.norm(changed - plain) > 0.1
