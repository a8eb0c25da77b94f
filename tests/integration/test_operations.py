"""Operations on the worker's side, through a real core process with a tiny model and native kernels."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import trio

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from trioengine.client.engine import Engine, open_engine  # noqa: E402
from trioengine.config.engine import EngineConfig  # noqa: E402
from trioengine.errors import RequestError  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_encoder import write_tokenizer  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, tiny_model, write_folder  # noqa: E402
from trioengine.types.messages import (  # noqa: E402
    CheckIntegrity,
    CollectiveRPC,
    FinishWeightUpdate,
    InitWeightTransfer,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
    WeightTensor,
)
from trioengine.types.output import RequestOutput  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.types.pooling import EncodeRequest, PoolingParams, PoolingTask  # noqa: E402
from trioengine.types.request import GenerateRequest  # noqa: E402

TIMEOUT_S = 120
OLD, NEW = folder_tensors(tiny_model()), folder_tensors(tiny_model(seed=1))
PROMPT = [10, 20, 30, 40, 50]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model as it was, and as it is to be."""
    native_library()
    paths = {name: tmp_path_factory.mktemp(name) for name in ("old", "new")}
    for name, tensors in (("old", OLD), ("new", NEW)):
        write_folder(paths[name], tiny_model(), tensors)
        write_tokenizer(paths[name])
    return paths


@asynccontextmanager
async def opened(folder: Path, profile_dir: Path | None = None) -> AsyncGenerator[Engine]:
    config = EngineConfig(model=str(folder), max_model_len=256, profile_dir=profile_dir and str(profile_dir))
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(config) as engine:
            yield engine
            await engine.call(CheckIntegrity())


async def answer(engine: Engine) -> RequestOutput:
    """Tokens and log probabilities, which tell weights apart bit for bit."""
    async with engine.generate(GenerateRequest(PROMPT, GREEDY)) as outputs:
        return [output async for output in outputs][-1]


async def checksum(engine: Engine) -> str:
    (reply,) = await engine.call(CollectiveRPC("check_weights"))
    return cast(str, json.loads(reply))


def weights(tensors: Mapping[str, Tensor]) -> tuple[WeightTensor, ...]:
    return tuple(
        WeightTensor(name, "float32", tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in tensors.items()
    )


async def test_after_new_weights_the_next_token_is_that_of_a_fresh_engine(folders: dict[str, Path]) -> None:
    """Not before they are finished, and also after a sleep; a stream that runs meanwhile goes on to its end."""
    async with opened(folders["new"]) as engine:
        new, new_checksum = await answer(engine), await checksum(engine)
        assert new.weight_version is None
    async with opened(folders["old"]) as engine:
        old = await answer(engine)
        assert old.outputs != new.outputs
        await engine.call(InitWeightTransfer())
        names = list(NEW)
        for part in (names[:5], names[5:]):
            await engine.call(UpdateWeights(weights({name: NEW[name] for name in part})))
        assert (await answer(engine)).outputs == old.outputs
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        async with engine.generate(GenerateRequest(PROMPT, long)) as outputs:
            await anext(outputs)
            assert await engine.call(FinishWeightUpdate()) == "1"
            last = [output async for output in outputs][-1]
        assert len(last.outputs[0].token_ids) == 200
        assert last.weight_version == "1"
        after = await answer(engine)
        assert after.outputs == new.outputs
        assert after.weight_version == "1"
        assert await checksum(engine) == new_checksum
        await engine.call(Sleep(2))
        await engine.call(WakeUp())
        assert (await answer(engine)).outputs == new.outputs
        await engine.call(InitWeightTransfer("file"))
        await engine.call(UpdateWeights(path=str(folders["old"] / "model.safetensors")))
        assert await engine.call(FinishWeightUpdate("as at first")) == "as at first"
        again = await answer(engine)
        assert again.outputs == old.outputs
        assert again.weight_version == "as at first"


async def test_what_is_wrong_changes_nothing(folders: dict[str, Path]) -> None:
    """Each is the caller's error, by its name; the engine goes on as it was."""
    async with opened(folders["old"]) as engine:
        before = (await answer(engine)).outputs, await checksum(engine)
        (tensor,) = weights({"lm_head.weight": NEW["lm_head.weight"]})
        await engine.call(InitWeightTransfer())
        for wrong in (
            WeightTensor("model.nonsense", tensor.dtype, tensor.shape, tensor.data),
            WeightTensor(tensor.name, tensor.dtype, (211, 47), tensor.data),
            WeightTensor(tensor.name, "bfloat16", tensor.shape, tensor.data),
            WeightTensor(tensor.name, "int8", tensor.shape, tensor.data),
        ):
            with pytest.raises(RequestError, match=wrong.name):
                await engine.call(UpdateWeights((tensor, wrong)))
        with pytest.raises(RequestError, match="No weights"):
            await engine.call(FinishWeightUpdate())
        for method in ("close", "submit", "nonsense"):
            with pytest.raises(RequestError, match=method):
                await engine.call(CollectiveRPC(method))
        with pytest.raises(RequestError, match="does not take"):
            await engine.call(CollectiveRPC("check_weights", '{"x": 1}'))
        assert ((await answer(engine)).outputs, await checksum(engine)) == before
        (info,) = await engine.call(CollectiveRPC("get_model_info"))
        assert json.loads(info) == {
            "architecture": "llama",
            "backend": "native",
            "hidden_size": 48,
            "num_layers": 2,
            "num_parameters": sum(tensor.numel() for tensor in OLD.values() if tensor.ndim == 2),
            "vocab_size": 211,
        }
        (number,) = await engine.call(CollectiveRPC("num_parameters"))
        assert json.loads(number) == json.loads(info)["num_parameters"]


async def test_a_profile_is_a_trace_of_the_steps(folders: dict[str, Path], tmp_path: Path) -> None:
    async with opened(folders["old"], tmp_path) as engine:
        alone = await answer(engine)
        with pytest.raises(RequestError):
            await engine.call(StopProfile())
        with pytest.raises(RequestError):
            await engine.call(StartProfile("../up"))
        await engine.call(StartProfile("slow"))
        with pytest.raises(RequestError):
            await engine.call(StartProfile())
        assert (await answer(engine)).outputs == alone.outputs
        path = Path(await engine.call(StopProfile()))
        assert (await answer(engine)).outputs == alone.outputs
    assert path.parent == tmp_path
    assert path.name.startswith("slow-")
    events = json.loads(await trio.Path(path).read_text())["traceEvents"]
    # Others only take a request out.
    steps = [event["args"]["tokens"] for event in events if event["name"] == "step" and event["args"]["tokens"]]
    assert steps == [len(PROMPT)] + 7 * [1]
    assert sum(event["name"] == "attention" for event in events) == 2 * 8
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)


async def test_a_decoder_with_a_classification_head_gives_labels_and_no_text(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_labels=3, initializer_range=0.2)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with torch.no_grad():
        model.config.pad_token_id = 0
        expected = model(torch.tensor([PROMPT])).logits[0].softmax(-1).numpy()
    async with opened(tmp_path) as engine:
        params = PoolingParams(task=PoolingTask.CLASSIFY)
        output = await engine.encode(EncodeRequest(PROMPT, params))
        assert np.allclose(output.data, expected, atol=3e-3)
        with pytest.raises(RequestError):
            await answer(engine)
