"""Decoders with a classification head: what transformers computes, on both backends, however prompts are cut."""

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config.resolve import ResolvedConfig  # noqa: E402
from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.errors import CheckpointError, RequestError  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.types.messages import UpdateWeights, WeightTensor  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.types.pooling import PoolingParams, PoolingTask  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.loading import Computer, load_executor, open_model  # noqa: E402

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2"]
TEXTS = [[1, 5, 9, 30, 77], [1, 8], [3, 100, 64, 7, 7, 12, 40, 41, 42]]
CONFIG = ResolvedConfig(
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    max_num_logit_rows=64,
    block_size=16,
    num_kv_blocks=(8,),
    num_offload_blocks=0,
    cpu_threads=1,
    async_scheduling=False,
    reasons={},
)
TOLERANCES = {"torch": 1e-5, "native": 3e-3}
"""Native keys and values are halves."""
SCORE = PoolingParams(task=PoolingTask.SCORE, use_activation=True)
CLASSIFY = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=True)
LOGITS = attrs.evolve(CLASSIFY, use_activation=False)


def write(folder: Path, family: str = "Llama", num_labels: int = 3, **changes: object) -> "torch.nn.Module":
    """A folder as transformers saves it, and its model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, num_labels=num_labels, **changes)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder)
    return model


def location_of(folder: Path) -> ModelLocation:
    return ModelLocation(ModelKind.FOLDER, folder, "tiny")


def load(folder: Path, computer: str = "native") -> LocalExecutor:
    checkpoint = open_model(location_of(folder))
    config = attrs.evolve(CONFIG, num_kv_blocks=[8] * len(checkpoint.config.kv_groups))
    return load_executor(checkpoint, config, Computer(native_library() if computer == "native" else None))


def vectors(executor: LocalExecutor, params: PoolingParams, chunk: int = 64) -> Sequence["np.ndarray"]:  # type: ignore[type-arg]
    """Of all texts, in steps of at most so many tokens of each."""
    executor.check_pooling(params)
    sampling = SamplingParams(max_tokens=0)
    new = [NewSequence(i, text, len(text), sampling, seed=0, pooling=params) for i, text in enumerate(TEXTS)]
    num_groups, found = len(executor.kv_cache_groups), dict[int, "np.ndarray"]()  # type: ignore[type-arg]
    for step, first in enumerate(range(0, max(map(len, TEXTS)), chunk)):
        present = [i for i, text in enumerate(TEXTS) if first < len(text)]
        works = [
            ScheduledSequence(i, first, min(chunk, len(TEXTS[i]) - first), [i] * num_groups if not step else [])
            for i in present
        ]
        executor.submit(StepPlan(step, works, () if step else new))
        result = executor.result()
        assert not result.failures
        found |= {present[index]: vector for index, vector in result.pooled.items()}
    return [found[i] for i in range(len(TEXTS))]


def relative_error(values: Sequence["np.ndarray"], expected: "np.ndarray") -> float:  # type: ignore[type-arg]
    """The largest of any text."""
    return float((np.linalg.norm(values - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


def logits_of(model: "torch.nn.Module") -> "np.ndarray":  # type: ignore[type-arg]
    with torch.no_grad():
        return np.stack([model(torch.tensor([text])).logits[0].numpy() for text in TEXTS])


@pytest.mark.parametrize("computer", ["native", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, computer: str, tmp_path: Path) -> None:
    expected = logits_of(write(tmp_path, family))
    executor = load(tmp_path, computer)
    whole = vectors(executor, LOGITS)
    assert relative_error(whole, expected) < TOLERANCES[computer]
    executor.close()
    parts = vectors(load(tmp_path, computer), LOGITS, chunk=2)
    assert relative_error(parts, expected) < TOLERANCES[computer]


@pytest.mark.parametrize("sees", [False, True])
def test_gemma_3_has_a_class_that_sees_and_one_that_does_not(sees: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**SIZES, num_labels=3, sliding_window=4)
    text_model = transformers.Gemma3TextForSequenceClassification(config).eval()
    expected = logits_of(text_model)
    if sees:
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.Gemma3ForSequenceClassification(
            transformers.Gemma3Config(
                text_config=config.to_dict(), vision_config={**vision, "image_size": 28, "patch_size": 14}, num_labels=3
            )
        )
        model.model.language_model.load_state_dict(text_model.model.state_dict())
        model.score.load_state_dict(text_model.score.state_dict())
        model.save_pretrained(tmp_path)
    else:
        text_model.save_pretrained(tmp_path)
    assert relative_error(vectors(load(tmp_path, "torch"), LOGITS), expected) < TOLERANCES["torch"]


@pytest.mark.parametrize(
    ("num_labels", "problem_type"),
    [
        (1, None),
        (3, None),
        (3, "single_label_classification"),
        (1, "multi_label_classification"),
        (3, "multi_label_classification"),
    ],
)
def test_probabilities(num_labels: int, problem_type: str | None, tmp_path: Path) -> None:
    """One label is a sigmoid, several are a softmax, unless the folder says what kind of labels they are."""
    logits = torch.from_numpy(logits_of(write(tmp_path, num_labels=num_labels, problem_type=problem_type)))
    is_softmax = problem_type == "single_label_classification" or (problem_type is None and num_labels > 1)
    expected = logits.softmax(-1) if is_softmax else logits.sigmoid()
    assert np.allclose(vectors(load(tmp_path, "torch"), CLASSIFY), expected, atol=1e-5)


def test_one_label_is_a_score(tmp_path: Path) -> None:
    expected = torch.from_numpy(logits_of(write(tmp_path, num_labels=1))).sigmoid()
    executor = load(tmp_path, "torch")
    assert executor.pooling is not None
    assert executor.pooling.tasks == (PoolingTask.SCORE, PoolingTask.CLASSIFY)
    assert np.allclose(vectors(executor, SCORE), expected, atol=1e-5)


def test_labels_have_names_and_no_text_is_generated(tmp_path: Path) -> None:
    write(tmp_path, id2label={0: "bad", 1: "good", 2: "so"}, label2id={"bad": 0, "good": 1, "so": 2})
    executor = load(tmp_path)
    assert executor.pooling is not None
    assert executor.pooling.labels == ("bad", "good", "so")
    assert executor.pooling.tasks == (PoolingTask.CLASSIFY,)
    with pytest.raises(RequestError, match="no text"):
        executor.check_sampling(SamplingParams())
    for task in (PoolingTask.EMBED, PoolingTask.SCORE):
        with pytest.raises(RequestError, match=f"cannot {task.value}"):
            executor.check_pooling(PoolingParams(task=task))


def test_the_head_can_be_replaced(tmp_path: Path) -> None:
    """And comes back after a sleep."""
    model = write(tmp_path)
    executor = load(tmp_path)
    zeros = WeightTensor("score.weight", "float32", (3, 64), bytes(3 * 64 * 4))
    executor.update_weights(UpdateWeights((zeros,)))
    assert relative_error(vectors(executor, LOGITS), logits_of(model)) < TOLERANCES["native"]
    executor.submit(StepPlan(9, [], removed=range(len(TEXTS))))
    executor.result()
    executor.prepare_weights()
    executor.apply_weights()
    executor.sleep(2)
    executor.wake_up(["weights", "kv_cache"])
    assert not np.any(vectors(executor, LOGITS))


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    facts["id2label"] = {"0": "a", "1": "b"}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        load(tmp_path)
