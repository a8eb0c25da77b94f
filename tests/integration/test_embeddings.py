"""Vectors through whole engines: a tiny encoder and the real all-MiniLM-L6-v2, in process and in a core process."""

import base64
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trioengine.client.engine import Engine, open_engine  # noqa: E402
from trioengine.client.llm import LLM  # noqa: E402
from trioengine.config.engine import EngineConfig, Quantization  # noqa: E402
from trioengine.errors import ConfigError, EngineGenerateError, PromptTooLongError, RequestError  # noqa: E402
from trioengine.testing.minilm import minilm_folder  # noqa: E402
from trioengine.testing.tiny_encoder import TINY_BERT, write_sentence_transformer, write_tokenizer  # noqa: E402
from trioengine.types.messages import CheckIntegrity, GetLoad, IsSleeping, Sleep, WakeUp  # noqa: E402
from trioengine.types.pooling import (  # noqa: E402
    EncodeRequest,
    PoolingParams,
    PoolingTask,
    PoolingType,
    TextPairPrompt,
)
from trioengine.types.request import GenerateRequest  # noqa: E402

TIMEOUT_S = 60
TEXT = "a cat sat two dogs"
TOKEN_IDS = (2, 10, 11, 13, 5, 12, 9, 3)
"""[CLS] a cat sat two dog ##s [SEP]."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT as sentence-transformers saves it."""
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**TINY_BERT)).save_pretrained(path)
    write_tokenizer(path)
    write_sentence_transformer(path, max_length=40)
    return str(path)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT that scores pairs."""
    path = tmp_path_factory.mktemp("cross")
    torch.manual_seed(0)
    config = transformers.BertConfig(**TINY_BERT, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    write_tokenizer(path)
    return str(path)


@asynccontextmanager
async def opened(folder: str) -> AsyncGenerator[Engine, None]:
    # However many wait: what is refused, when too many do, is another test's.
    config = EngineConfig(model=folder, cpu_threads=1, max_num_queued_reqs=None)
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(config) as engine:
            yield engine


def test_texts_tokens_and_batches(folder: str) -> None:
    """A text is the same as its tokens; results come in the order of the prompts; a batch changes nothing."""
    with LLM(folder, cpu_threads=1) as llm:
        (one,) = llm.embed(TEXT)
        assert one.prompt_token_ids == TOKEN_IDS
        assert one.data.shape == (64,)
        assert abs(np.linalg.norm(one.data) - 1) < 1e-6
        (same,) = llm.embed([list(TOKEN_IDS)])
        texts = ["one", "a dog", TEXT, "two cats sat"] * 60
        many = llm.embed(texts)
        alone = {text: llm.embed(text)[0].data for text in texts[:4]}
        short = llm.embed(TEXT, dimensions=8)[0].data
    assert (same.data == one.data).all()
    assert all((output.data == alone[text]).all() for text, output in zip(texts, many, strict=True))
    np.testing.assert_allclose(short, one.data[:8] / np.linalg.norm(one.data[:8]), rtol=1e-5)


def test_what_an_encoder_cannot_do(folder: str) -> None:
    with LLM(folder, cpu_threads=1) as llm:
        with pytest.raises(RequestError, match="generates no text"):
            llm.generate(TEXT)
        with pytest.raises(RequestError, match="cannot score; it can: embed, token_embed"):
            llm.encode(TEXT, PoolingParams(task=PoolingTask.SCORE))
        with pytest.raises(RequestError, match="vectors have 64"):
            llm.embed(TEXT, dimensions=65)
        with pytest.raises(PromptTooLongError, match=r"50 tokens.* 40 tokens"):
            llm.embed("cat " * 48)
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            llm.embed(TEXT, truncate_prompt_tokens=41)
        assert len(llm.embed("cat " * 48, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 40
        assert llm.embed(TEXT, truncate_prompt_tokens=5)[0].prompt_token_ids == (2, 10, 11, 13, 3)
    for options in ({"kv_cache_memory_bytes": 1 << 20}, {"max_model_len": 32, "max_num_batched_tokens": 16}):
        with pytest.raises(ConfigError):
            LLM(folder, **options)


def test_pairs(cross_encoder: str) -> None:
    """The second text counts as such; the longer one loses tokens where both are too long."""
    with LLM(cross_encoder, cpu_threads=1) as llm:
        first, second = llm.encode([TextPairPrompt("a cat", "two dogs"), TextPairPrompt("two dogs", "a cat")])
        assert first.prompt_token_ids == (2, 10, 11, 3, 5, 12, 9, 3)
        assert first.data.shape == (1,)
        assert 0 < first.data[0] < 1
        assert first.data[0] != second.data[0]
        (tokens,) = llm.encode([list(first.prompt_token_ids)])
        assert tokens.data[0] != first.data[0]
        (cut,) = llm.encode([TextPairPrompt("a cat", "dog " * 90)], truncate_prompt_tokens=12)
        assert cut.prompt_token_ids == (2, 10, 11, 3, *[12] * 7, 3)
        with pytest.raises(RequestError, match="two texts"):
            llm.encode(TEXT)
        (logit,) = llm.encode(
            [TextPairPrompt("a cat", "two dogs")], PoolingParams(task=PoolingTask.SCORE, use_activation=False)
        )
        np.testing.assert_allclose(1 / (1 + np.exp(-logit.data)), first.data, rtol=1e-5)


async def test_encode_through_a_core_process(folder: str) -> None:
    """The same vectors; wrong ones are refused before anything is sent; an abort ends the one it names."""
    with LLM(folder, cpu_threads=1) as llm:
        expected = llm.embed(TEXT)[0].data
    async with opened(folder) as engine:
        assert not engine.model_config.can_generate
        output = await engine.encode(EncodeRequest(TEXT, request_id="mine"))
        assert output.request_id == "mine"
        assert (output.data == expected).all()
        with pytest.raises(RequestError, match="generates no text"):
            async with engine.generate(GenerateRequest(TEXT)):
                pass
        with pytest.raises(RequestError, match="dimensions"):
            await engine.encode(EncodeRequest(TEXT, PoolingParams(dimensions=0)))
        await engine.call(Sleep(level=2))
        assert await engine.call(IsSleeping())
        async with trio.open_nursery() as nursery:

            async def is_ended() -> None:
                with pytest.raises(EngineGenerateError, match="abort"):
                    await engine.encode(EncodeRequest(TEXT, request_id="waits"))

            nursery.start_soon(is_ended)
            await trio.testing.wait_all_tasks_blocked()
            engine.abort("waits")
        await engine.call(WakeUp())
        assert ((await engine.encode(EncodeRequest(TEXT))).data == expected).all()
        await engine.call(CheckIntegrity())


async def test_a_batch_of_2000_cancelled_half_way_is_clean(folder: str) -> None:
    """Case 6 (vllm 25568): within a step the core knows none of them, no slot stays reserved, and it goes on."""
    async with opened(folder) as engine:
        num_done = 0
        half_done = trio.Event()

        async def embed(number: int) -> None:
            nonlocal num_done
            await engine.encode(EncodeRequest([2, 4 + number % 10, 3]))
            num_done += 1
            if num_done >= 1000:
                half_done.set()

        async with trio.open_nursery() as nursery:
            for number in range(2000):
                nursery.start_soon(embed, number)
            await half_done.wait()
            nursery.cancel_scope.cancel()
        assert 1000 <= num_done < 2000
        assert engine.num_open_requests == 0
        load = await engine.call(GetLoad())
        assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)
        await engine.call(CheckIntegrity())
        assert (await engine.encode(EncodeRequest(TEXT))).data.shape == (64,)


def test_token_vectors(folder: str) -> None:
    """One for each token, of which the embedding is the mean, before it is normalized."""
    with LLM(folder, cpu_threads=1) as llm:
        (tokens,) = llm.encode(TEXT, PoolingParams(task=PoolingTask.TOKEN_EMBED, normalize=False))
        (mean,) = llm.encode(TEXT, PoolingParams(normalize=False))
        (last,) = llm.encode(TEXT, PoolingParams(pooling_type=PoolingType.LAST, normalize=False))
    assert tokens.data.shape == (len(TOKEN_IDS), 64)
    np.testing.assert_allclose(tokens.data.mean(axis=0), mean.data, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tokens.data[-1], last.data, rtol=1e-5, atol=1e-6)


def reference() -> tuple[list[str], NDArray[np.float32]]:
    """Texts and what sentence-transformers makes of them."""
    path = Path(__file__).parents[1] / "fixtures" / "minilm" / "vectors.json"
    values = json.loads(path.read_text())
    return values["texts"], np.frombuffer(base64.b64decode(values["vectors"]), "<f4").reshape(-1, 384)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_minilm_is_that_of_sentence_transformers(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-4 in every number, texts that are cut included."""
    monkeypatch.setenv("TRIOENGINE_CPU_KERNELS", kernels)
    texts, expected = reference()
    with LLM(str(minilm_folder()), cpu_threads=2) as llm:
        actual = np.stack([output.data for output in llm.embed(texts, truncate_prompt_tokens=-1)])
    assert np.abs(actual - expected).max() < 1e-4


def test_minilm_in_int8() -> None:
    texts, expected = reference()
    with LLM(str(minilm_folder()), quantization=Quantization.INT8, cpu_threads=2) as llm:
        actual = np.stack([output.data for output in llm.embed(texts, truncate_prompt_tokens=-1)])
    assert (actual * expected).sum(axis=1).min() > 0.999
