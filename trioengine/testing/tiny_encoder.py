# pyright: basic
"""Folders of encoders with random weights, small enough to compute in a test, and an executor's answer to texts."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.core.executor import Executor, NewSequence, ScheduledSequence, StepPlan, StepResult
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingParams

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "two", "three", "four", "five", "##s", "a", "cat", "dog", "sat")
VOCAB_SIZE = 97
TINY_BERT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    # Large enough that every part of the model matters.
    "initializer_range": 0.3,
}
"""For the configurations of BERT and RoBERTa."""


def write_tokenizer(folder: Path) -> None:
    """A WordPiece tokenizer that writes `[CLS] first [SEP] second [SEP]`."""
    vocab = {word: number for number, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


def write_sentence_transformer(
    folder: Path, *, pooling: str = "mean_tokens", normalize: bool = True, max_length: int | None = None
) -> None:
    """The files with which sentence-transformers says how texts become vectors."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    if normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    keys = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    config = {f"pooling_mode_{key}": key == pooling for key in keys}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))


def location_of(folder: Path) -> ModelLocation:
    """The folder as a model."""
    return ModelLocation(ModelKind.FOLDER, folder, folder.name)


def run_texts(
    executor: Executor,
    texts: Sequence[Sequence[int]],
    pooling: PoolingParams,
    *,
    second_text_starts: Sequence[int | None] | None = None,
    step: int = 0,
) -> StepResult:
    """One step that computes these texts, each of one block; they are forgotten afterwards."""
    starts = second_text_starts or [None] * len(texts)
    ids = range(1000 * step, 1000 * step + len(texts))
    new = [
        NewSequence(
            sequence_id,
            text,
            len(text),
            SamplingParams(max_tokens=0),
            seed=0,
            pooling=pooling,
            second_text_start=start,
        )
        for sequence_id, text, start in zip(ids, texts, starts, strict=True)
    ]
    scheduled = [
        ScheduledSequence(sequence_id, 0, len(text), new_block_ids=[place])
        for place, (sequence_id, text) in enumerate(zip(ids, texts, strict=True))
    ]
    executor.submit(StepPlan(2 * step, scheduled, new))
    result = executor.result()
    executor.submit(StepPlan(2 * step + 1, [], removed=list(ids)))
    executor.result()
    return result


def vectors_of(result: StepResult) -> list[NDArray[np.float32]]:
    """The vectors of a step in which nobody failed."""
    assert not result.failures, result.failures
    return [result.pooled[index] for index in range(len(result.tokens))]
