"""New weights: what replaces a checkpoint's tensors computes what a checkpoint with them computes, bit for bit."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import gguf
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config.engine import Quantization  # noqa: E402
from trioengine.config.resolve import ResolvedConfig  # noqa: E402
from trioengine.errors import CheckpointError, RequestError, UnavailableError  # noqa: E402
from trioengine.models.loader import Checkpoint, open_checkpoint  # noqa: E402
from trioengine.testing.device_computer import device_computer  # noqa: E402
from trioengine.testing.executor_conformance import WEIGHT_CHECKS, Check, Subject  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import (  # noqa: E402
    Encode,
    folder_tensors,
    random_model,
    tiny_config,
    tiny_model,
    write_folder,
    write_gguf,
)
from trioengine.types.messages import UpdateWeights, WeightTensor  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.loading import Computer, load_executor  # noqa: E402

OLD, NEW = folder_tensors(tiny_model()), folder_tensors(tiny_model(seed=1))
NOT_NATIVE = "native", Quantization.FP8
CONFIG = ResolvedConfig(
    max_model_len=256,
    max_num_batched_tokens=256,
    max_num_seqs=8,
    max_num_logit_rows=256,
    block_size=16,
    num_kv_blocks=(24,),
    num_offload_blocks=0,
    cpu_threads=1,
    async_scheduling=False,
    reasons={},
)


def message(tensors: Mapping[str, Tensor]) -> UpdateWeights:
    return UpdateWeights(tuple(weight_tensor(name, tensor) for name, tensor in tensors.items()))


def weight_tensor(name: str, tensor: Tensor) -> WeightTensor:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else b""
    return WeightTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def folder(path: Path, tensors: Mapping[str, Tensor]) -> Checkpoint:
    path.mkdir()
    return open_checkpoint(write_folder(path, tiny_model(), dict(tensors)))


def load(
    checkpoint: Checkpoint, computer: str = "native", quantization: Quantization | None = None, **changes: object
) -> LocalExecutor:
    config = attrs.evolve(CONFIG, **changes)  # type: ignore[arg-type]
    if computer == "device":
        return load_executor(checkpoint, config, device_computer(), quantization=quantization)
    library = Computer(native_library() if computer == "native" else None)
    return load_executor(checkpoint, config, library, quantization=quantization)


def checksum(executor: LocalExecutor) -> str:
    (reply,) = executor.collective_rpc("check_weights", "{}")
    return json.loads(reply)


def updated(executor: LocalExecutor, *updates: UpdateWeights) -> LocalExecutor:
    for update in updates:
        executor.update_weights(update)
    executor.prepare_weights()
    executor.apply_weights()
    return executor


@pytest.mark.parametrize("computer", ["native", "asynchronous", "torch", "device"])
@pytest.mark.parametrize("check", WEIGHT_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, computer: str, tmp_path: Path) -> None:
    """The promises of every executor whose weights can be replaced."""
    old, new = folder(tmp_path / "old", OLD), folder(tmp_path / "new", NEW)
    kind, is_asynchronous = computer.replace("asynchronous", "native"), computer == "asynchronous"

    def maker(checkpoint: Checkpoint) -> Callable[[], LocalExecutor]:
        return lambda: load(checkpoint.version.open(), kind, async_scheduling=is_asynchronous)

    subject = Subject(make=maker(old), block_size=16, vocab_size=211, new_weights=message(NEW), make_new=maker(new))
    assert check(subject) is None


@pytest.mark.parametrize("computer", ["native", "torch", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_becomes_the_one_that_a_checkpoint_with_the_weights_is(
    computer: str, dtype: "torch.dtype", tmp_path: Path
) -> None:
    """Tensors may come in several updates, and later updates may be of others."""
    old = {name: tensor.to(dtype) for name, tensor in OLD.items()}
    new = {name: tensor.to(dtype) for name, tensor in NEW.items()}
    executor, fresh = load(folder(tmp_path / "old", old), computer), load(folder(tmp_path / "new", new), computer)
    before = checksum(executor)
    names = list(new)
    executor.update_weights(message({name: new[name] for name in names[:4]}))
    executor.update_weights(message({name: new[name] for name in names[4:9]}))
    assert checksum(executor) == before
    updated(executor)
    assert checksum(executor) not in (before, checksum(fresh))
    updated(executor, message({name: new[name] for name in names[9:]}))
    assert checksum(executor) == checksum(fresh)


@pytest.mark.parametrize(
    ("computer", "quantization"),
    [(computer, kind) for computer in ("native", "device") for kind in Quantization if (computer, kind) != NOT_NATIVE],
)
def test_floats_are_quantized_as_they_were_at_load(computer: str, quantization: Quantization, tmp_path: Path) -> None:
    executor = load(folder(tmp_path / "old", OLD), computer, quantization)
    fresh = load(folder(tmp_path / "new", NEW), computer, quantization)
    assert checksum(updated(executor, message(NEW))) == checksum(fresh)


def test_floats_take_the_checkpoints_type(tmp_path: Path) -> None:
    """A trainer has float32; a checkpoint of bfloat16 stays as small as it was."""
    halves = {name: tensor.bfloat16() for name, tensor in OLD.items()}
    fresh = load(folder(tmp_path / "new", {name: tensor.bfloat16() for name, tensor in NEW.items()}))
    assert checksum(updated(load(folder(tmp_path / "old", halves)), message(NEW))) == checksum(fresh)


def test_a_file_is_copied(tmp_path: Path) -> None:
    executor, fresh = load(folder(tmp_path / "old", OLD)), load(folder(tmp_path / "new", NEW))
    path = tmp_path / "new" / "model.safetensors"
    executor.update_weights(UpdateWeights(path=str(path)))
    save_file(OLD, path)
    assert checksum(updated(executor)) == checksum(fresh)
    with pytest.raises(CheckpointError):
        executor.update_weights(UpdateWeights(path=str(tmp_path / "missing.safetensors")))
    with pytest.raises(CheckpointError):
        executor.update_weights(UpdateWeights(path=str(tmp_path / "old" / "config.json")))


NAME = "model.layers.0.self_attn.q_proj.weight"
FLOATS = weight_tensor(NAME, OLD[NAME])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (attrs.evolve(FLOATS, name="model.layers.7.self_attn.q_proj.weight"), "none of this name"),
        (attrs.evolve(FLOATS, shape=(FLOATS.shape[1], FLOATS.shape[0] * 2)), "shape"),
        (attrs.evolve(FLOATS, shape=FLOATS.shape[:1]), "shape"),
        (attrs.evolve(FLOATS, dtype="int8"), "dtype"),
        (attrs.evolve(FLOATS, dtype="float16"), "bytes"),
        (attrs.evolve(FLOATS, data=FLOATS.data[:-1]), "bytes"),
    ],
)
def test_what_is_wrong_is_named(wrong: WeightTensor, why: str, tmp_path: Path) -> None:
    executor = load(folder(tmp_path / "old", OLD))
    before = checksum(executor)
    with pytest.raises(RequestError, match=why) as caught:
        executor.update_weights(UpdateWeights((weight_tensor("lm_head.weight", NEW["lm_head.weight"]), wrong)))
    assert wrong.name in caught.value.message
    assert caught.value.param == "tensors"
    assert checksum(updated(executor)) == before


def test_a_tied_head_changes_nothing(tmp_path: Path) -> None:
    """Trainers send it, though it is not in the files."""
    model = random_model(attrs.evolve(tiny_config(), has_tied_embeddings=True))
    (tmp_path / "tied").mkdir()
    executor = load(open_checkpoint(write_folder(tmp_path / "tied", model, folder_tensors(model))))
    before = checksum(executor)
    assert checksum(updated(executor, message({"lm_head.weight": NEW["lm_head.weight"]}))) == before


def encode_as(kind: "gguf.GGMLQuantizationType") -> Encode:
    return lambda _name, values: (gguf.quantize(values, kind), int(kind))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16", "F16"])
def test_gguf_files_have_their_own_names_and_types(kind: str, tmp_path: Path) -> None:
    config = attrs.evolve(tiny_config(), hidden_size=64, intermediate_size=96, head_dim=16, num_heads=4)
    old, new = random_model(config), random_model(config, seed=1)
    paths = [tmp_path / "old.gguf", tmp_path / "new.gguf"]
    for path, model in zip(paths, (old, new), strict=True):
        write_gguf(path, model, encode_as(gguf.GGMLQuantizationType[kind]))
    write_gguf(tmp_path / "floats.gguf", new)
    floats = gguf.GGUFReader(tmp_path / "floats.gguf").tensors
    update = message({each.name: torch.from_numpy(np.array(each.data)) for each in floats})
    executor, fresh = (load(open_checkpoint(ModelLocation(ModelKind.GGUF, path, "tiny"))) for path in paths)
    assert checksum(updated(executor, update)) == checksum(fresh)


def test_types_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    """Packed formats and K-quants, with the tensor's name."""
    config = attrs.evolve(tiny_config(), hidden_size=256, intermediate_size=256, head_dim=64, num_heads=4)
    model = random_model(config)

    def encode(name: str, values: "np.ndarray") -> tuple["np.ndarray", int]:  # type: ignore[type-arg]
        rows, columns = values.shape
        return np.zeros((rows, columns // 256 * 210), np.uint8), int(gguf.GGMLQuantizationType.Q6_K)

    write_gguf(tmp_path / "k.gguf", model, encode)
    executor = load(open_checkpoint(ModelLocation(ModelKind.GGUF, tmp_path / "k.gguf", "tiny")))
    embedding = WeightTensor("token_embd.weight", "float32", (211, 256), bytes(211 * 256 * 4))
    with pytest.raises(RequestError, match=r"'token_embd\.weight'.*Q6_K"):
        executor.update_weights(UpdateWeights((embedding,)))


def test_without_memory_nothing_changes(tmp_path: Path) -> None:
    executor = load(folder(tmp_path / "old", OLD))
    before = checksum(executor)
    assert executor.weights is not None

    class Full:
        def prepare_weights(self, tensors: object) -> Callable[[], None]:
            raise MemoryError

    model, executor.weights.model = executor.weights.model, Full()
    executor.update_weights(message(NEW))
    with pytest.raises(UnavailableError, match="memory"):
        executor.prepare_weights()
    assert checksum(executor) == before
    executor.weights.model = model
    assert checksum(updated(executor)) != before


def test_models_that_cannot_be_read_again_say_so(tmp_path: Path) -> None:
    executor = load(folder(tmp_path / "old", OLD))
    executor.weights = None
    with pytest.raises(RequestError, match="cannot be replaced"):
        executor.update_weights(message(NEW))
