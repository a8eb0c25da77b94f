"""`LLM.embed`, `classify`, `score` and `encode` with the attributes that vLLM's outputs have, on tiny real models."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trioengine import LLM, PoolingParams  # noqa: E402
from trioengine.errors import RequestError  # noqa: E402
from trioengine.testing.tiny_encoder import TINY_BERT, write_sentence_transformer, write_tokenizer  # noqa: E402
from trioengine.types.pooling import TextPairPrompt  # noqa: E402


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("embedder")
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**TINY_BERT)).save_pretrained(folder)
    write_tokenizer(folder)
    write_sentence_transformer(folder, max_length=40)
    return str(folder)


def write_classifier(folder: Path, num_labels: int) -> str:
    torch.manual_seed(0)
    config = transformers.BertConfig(**TINY_BERT, num_labels=num_labels)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def test_embeddings_are_lists_of_numbers(embedder: str) -> None:
    """And the scores of texts that a model embeds are cosines."""
    with LLM(model=embedder, runner="pooling", cpu_threads=1) as llm:
        first, second = llm.embed(["a cat", "two dogs sat"])
        assert first.outputs.embedding == first.data.tolist()
        assert first.outputs.hidden_size == len(first.outputs.embedding) == 64
        assert first.finished
        assert (first.request_id, second.request_id) == ("0", "1")
        (short,) = llm.embed("a cat", dimensions=8)
        assert len(short.outputs.embedding) == 8
        (tokens,) = llm.encode("a cat", pooling_task="token_embed")
        assert tokens.outputs.data.shape == (len(tokens.prompt_token_ids), 64)
        same, other = llm.score("a cat", ["a cat", "two dogs sat"])
        assert same.outputs.score == pytest.approx(1)
        assert other.outputs.score == pytest.approx(float(first.data @ second.data), abs=1e-6)
        assert len(llm.score(["a cat", "a dog"], ["two cats", "dogs"])) == 2
        with pytest.raises(RequestError, match="cannot classify"):
            llm.classify("a cat")


def test_labels_have_probabilities(tmp_path: Path) -> None:
    with LLM(write_classifier(tmp_path, 3), cpu_threads=1) as llm:
        one, other = llm.classify(["a cat", "two dogs"])
        assert one.outputs.num_classes == len(one.outputs.probs) == 3
        assert sum(one.outputs.probs) == pytest.approx(1)
        assert one.outputs.probs != other.outputs.probs
        (logits,) = llm.classify("a cat", pooling_params=PoolingParams(task="classify", use_activation=False))
        exponentials = np.exp(logits.data)
        np.testing.assert_allclose(exponentials / exponentials.sum(), one.data, rtol=1e-5)


def test_pairs_are_scored_by_models_that_read_both(tmp_path: Path) -> None:
    """In a core process."""
    with LLM(write_classifier(tmp_path, 1), cpu_threads=1, multiprocess=True) as llm:
        first, second = llm.score("a cat", ["two dogs", "a cat"])
        assert 0 < first.outputs.score < 1
        assert first.outputs.score != second.outputs.score
        (same,) = llm.encode(TextPairPrompt("a cat", "two dogs"), pooling_task="score")
        assert same.data.tolist() == [first.outputs.score]
        (single,) = llm.score(["a cat"], "two dogs", truncate_prompt_tokens=-1)
        assert single.outputs.score == first.outputs.score
