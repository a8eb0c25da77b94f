"""Encoders equal transformers', on both backends, whatever texts are computed together."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trioengine_kernels.native.library import NativeUnavailableError, load_library  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config import env  # noqa: E402
from trioengine.config.engine import EngineConfig, Quantization  # noqa: E402
from trioengine.config.resolve import HardwareFacts, ModelShape, resolve_encoder  # noqa: E402
from trioengine.errors import CheckpointError  # noqa: E402
from trioengine.models.encoder_loader import load_encoder, open_encoder  # noqa: E402
from trioengine.models.torch_ops import TorchWeights  # noqa: E402
from trioengine.testing.tiny_encoder import (  # noqa: E402
    TINY_BERT,
    VOCAB_SIZE,
    location_of,
    run_texts,
    vectors_of,
    write_sentence_transformer,
)
from trioengine.types.messages import UpdateWeights  # noqa: E402
from trioengine.types.pooling import PoolingParams, PoolingTask, PoolingType  # noqa: E402
from trioengine.worker.encoder_backends import load_encoder_executor  # noqa: E402

TOLERANCE = 1e-5
BACKENDS = ("torch", "native")
TINY_DISTILBERT = {
    "vocab_size": VOCAB_SIZE,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 80,
    "initializer_range": 0.3,
}
CASES = {
    "bert": ("Bert", TINY_BERT),
    "bert, gelu_new": ("Bert", {**TINY_BERT, "hidden_act": "gelu_new"}),
    "bert, relu": ("Bert", {**TINY_BERT, "hidden_act": "relu"}),
    "bert, epsilon": ("Bert", {**TINY_BERT, "layer_norm_eps": 0.5}),
    "bert, odd heads": ("Bert", {**TINY_BERT, "hidden_size": 60, "num_attention_heads": 3}),
    "bert, one type": ("Bert", {**TINY_BERT, "type_vocab_size": 1}),
    "roberta": ("Roberta", {**TINY_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {**TINY_BERT, "type_vocab_size": 1, "pad_token_id": 4}),
    "distilbert": ("DistilBert", TINY_DISTILBERT),
}
TEXTS = [[7, 8, 9], [5], list(range(6, 76)), [90, 6, 6, 6, 50], list(range(20, 37))]


def make_folder(folder, name, settings, kind="Model", **more):
    """A model of transformers with random weights, and its folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings, **more)
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key.lower():  # These are ones and zeros, and would hide what is wrong.
                parameter.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained(folder)
    return model


def make_executor(location, backend="native", quantization=None, **options):
    """The executor that an engine would have."""
    library = None
    if backend == "native":
        try:
            library = load_library(env.cache_dir() / "native")
        except NativeUnavailableError as error:
            pytest.skip(str(error))
    checkpoint = open_encoder(location)
    assert checkpoint is not None
    config = checkpoint.config
    shape = ModelShape(config.num_parameters, config.max_length, (), config.vocab_size)
    resolved = resolve_encoder(EngineConfig(cpu_threads=2, **options), shape, HardwareFacts(2, 1 << 33, 1e11))
    return load_encoder_executor(checkpoint, resolved, library, quantization=quantization)


def hidden_states(model, text, types=None):
    """[tokens, hidden_size], of transformers."""
    inputs = {"input_ids": torch.tensor([text])}
    if types is not None:
        inputs["token_type_ids"] = torch.tensor([types])
    with torch.no_grad():
        return model(**inputs).last_hidden_state[0].numpy()


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


TOKEN_VECTORS = PoolingParams(task=PoolingTask.TOKEN_EMBED, normalize=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", list(CASES))
def test_hidden_states_are_those_of_transformers(tmp_path, backend, case):
    model = make_folder(tmp_path, *CASES[case])
    executor = make_executor(location_of(tmp_path), backend)
    for text, vectors in zip(TEXTS, vectors_of(run_texts(executor, TEXTS, TOKEN_VECTORS)), strict=True):
        assert relative_error(vectors, hidden_states(model, text)) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_second_text_of_a_pair_has_the_other_type(tmp_path, backend):
    model = make_folder(tmp_path, *CASES["bert"])
    executor = make_executor(location_of(tmp_path), backend)
    text, start = TEXTS[4], 6
    vectors = vectors_of(run_texts(executor, [text, text], TOKEN_VECTORS, second_text_starts=[start, None]))
    types = [0] * start + [1] * (len(text) - start)
    assert relative_error(vectors[0], hidden_states(model, text, types)) < TOLERANCE
    assert relative_error(vectors[1], hidden_states(model, text)) < TOLERANCE


def test_a_text_is_the_same_alone_and_in_company(tmp_path):
    """In every bit, on the native kernels: nothing is padded."""
    make_folder(tmp_path, *CASES["bert"])
    for quantization in (None, Quantization.INT8):
        executor = make_executor(location_of(tmp_path), quantization=quantization)
        together = vectors_of(run_texts(executor, TEXTS, PoolingParams(pooling_type=PoolingType.MEAN, normalize=True)))
        for step, text in enumerate(TEXTS, start=1):
            params = PoolingParams(pooling_type=PoolingType.MEAN, normalize=True)
            (alone,) = vectors_of(run_texts(executor, [text], params, step=step))
            assert (alone == together[step - 1]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_pooling(tmp_path, backend):
    """Each kind of vector is what its name says of the hidden states; dimensions are cut before the norm."""
    model = make_folder(tmp_path, *CASES["bert"])
    executor = make_executor(location_of(tmp_path), backend)
    expected = {
        PoolingType.MEAN: lambda hidden: hidden.mean(axis=0),
        PoolingType.CLS: lambda hidden: hidden[0],
        PoolingType.LAST: lambda hidden: hidden[-1],
    }
    step = 0
    for pooling_type, pool in expected.items():
        for dimensions in (None, 10):
            for normalize in (False, True):
                step += 1
                params = PoolingParams(pooling_type=pooling_type, dimensions=dimensions, normalize=normalize)
                for text, vector in zip(TEXTS, vectors_of(run_texts(executor, TEXTS, params, step=step)), strict=True):
                    pooled = pool(hidden_states(model, text).astype(np.float64))[:dimensions]
                    if normalize:
                        pooled /= np.linalg.norm(pooled)
                        assert abs(np.linalg.norm(vector) - 1) < 1e-6
                    assert relative_error(vector, pooled) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "problem_type", "num_labels", "activate"),
    [
        ("Bert", None, 3, lambda x: torch.softmax(x, -1)),
        ("Bert", None, 1, torch.sigmoid),
        ("Bert", "regression", 1, lambda x: x),
        ("Bert", "multi_label_classification", 3, torch.sigmoid),
        ("Roberta", "single_label_classification", 2, lambda x: torch.softmax(x, -1)),
        ("DistilBert", None, 3, lambda x: torch.softmax(x, -1)),
    ],
)
def test_classification(tmp_path, backend, name, problem_type, num_labels, activate):
    """As the heads of transformers, and with the activation that the kind of problem asks for."""
    settings = CASES[name.lower()][1]
    model = make_folder(
        tmp_path, name, settings, "ForSequenceClassification", num_labels=num_labels, problem_type=problem_type
    )
    executor = make_executor(location_of(tmp_path), backend)
    assert len(open_encoder(location_of(tmp_path)).config.pooling.labels) == num_labels
    for step, use_activation in enumerate((False, True)):
        params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=use_activation)
        for text, numbers in zip(TEXTS, vectors_of(run_texts(executor, TEXTS, params, step=step)), strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([text])).logits[0]
            assert relative_error(numbers, (activate(logits) if use_activation else logits).numpy()) < 2 * TOLERANCE


@pytest.mark.parametrize(
    ("activation_fn", "is_probability"), [(None, True), ("torch.nn.modules.linear.Identity", False)]
)
def test_scores_are_those_of_a_cross_encoder(tmp_path, activation_fn, is_probability):
    """A sigmoid, unless the folder names another function."""
    more = {} if activation_fn is None else {"sentence_transformers": {"activation_fn": activation_fn}}
    model = make_folder(tmp_path, "Bert", TINY_BERT, "ForSequenceClassification", num_labels=1, **more)
    executor = make_executor(location_of(tmp_path))
    (score,) = vectors_of(
        run_texts(
            executor,
            [TEXTS[4]],
            PoolingParams(task=PoolingTask.SCORE, use_activation=True),
            second_text_starts=[5],
        )
    )
    types = torch.tensor([[0] * 5 + [1] * (len(TEXTS[4]) - 5)])
    with torch.no_grad():
        logit = model(input_ids=torch.tensor([TEXTS[4]]), token_type_ids=types).logits[0, 0].item()
    expected = 1 / (1 + np.exp(-logit)) if is_probability else logit
    assert score.shape == (1,)
    assert abs(score[0] - expected) < 1e-5 * max(1, abs(expected))


def test_int8_weights_are_near(tmp_path):
    model = make_folder(tmp_path, "Bert", {**TINY_BERT, "hidden_size": 128, "initializer_range": 0.1})
    executor = make_executor(location_of(tmp_path), quantization=Quantization.INT8)
    params = PoolingParams(pooling_type=PoolingType.MEAN, normalize=True)
    for text, vector in zip(TEXTS, vectors_of(run_texts(executor, TEXTS, params)), strict=True):
        expected = hidden_states(model, text).mean(axis=0)
        assert vector @ expected / np.linalg.norm(expected) > 0.999


def test_a_text_that_is_not_a_number_fails_alone(tmp_path):
    make_folder(tmp_path, *CASES["bert"])
    checkpoint = open_encoder(location_of(tmp_path))
    model = load_encoder(checkpoint, TorchWeights())
    model.encoder.weights.embedding[50] = float("nan")
    executor = make_executor(location_of(tmp_path), "torch")
    executor._backend._ready = model
    result = run_texts(executor, TEXTS, PoolingParams(pooling_type=PoolingType.MEAN, normalize=True))
    failed = [index for index, text in enumerate(TEXTS) if 50 in text]
    assert [failure.sequence_id for failure in result.failures] == failed
    assert sorted(result.pooled) == [index for index in range(len(TEXTS)) if index not in failed]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sleep_gives_the_weights_back(tmp_path, backend):
    make_folder(tmp_path, *CASES["bert"])
    executor = make_executor(location_of(tmp_path), backend)
    params = PoolingParams(pooling_type=PoolingType.CLS, normalize=False)
    before = vectors_of(run_texts(executor, TEXTS, params))
    executor.sleep(2)
    executor.wake_up(["weights", "kv_cache"])
    after = vectors_of(run_texts(executor, TEXTS, params, step=1))
    assert all((one == other).all() for one, other in zip(before, after, strict=True))
    executor.sleep(2)
    make_folder(tmp_path, "Bert", {**TINY_BERT, "num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="not what it was"):
        executor.wake_up(["weights"])


def change_config(folder, **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "swish_glu"}, "activation"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "evenly"),
        ({"hidden_size": 32}, "has the shape"),
        ({"num_hidden_layers": 4}, "is missing"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers"),
        ({"vocab_size": "absent"}, "vocab_size is missing"),
        ({"layer_norm_eps": -1}, "layer_norm_eps"),
        ({"type_vocab_size": 9}, "type_vocab_size"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, changes, message):
    make_folder(tmp_path, *CASES["bert"])
    change_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        make_executor(location_of(tmp_path), "torch")


def test_sentence_transformers_says_how_texts_become_vectors(tmp_path):
    make_folder(tmp_path, *CASES["bert"])
    facts = open_encoder(location_of(tmp_path)).config
    assert (facts.pooling_type, facts.normalize, facts.max_length) == (PoolingType.MEAN, True, 80)
    write_sentence_transformer(tmp_path, pooling="cls_token", normalize=False, max_length=40)
    facts = open_encoder(location_of(tmp_path)).config
    assert (facts.pooling_type, facts.normalize, facts.max_length) == (PoolingType.CLS, False, 40)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    assert open_encoder(location_of(tmp_path)).config.pooling_type is PoolingType.LAST


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("modules.json", "[", "cannot be read"),
        ("modules.json", "{}", "not a list"),
        ("modules.json", "[]", "no module Pooling"),
        ("modules.json", '[{"type": "x.Dense", "path": "2_Dense"}]', "Dense"),
        ("modules.json", '[{"type": "x.Pooling", "path": "../.."}]', "not one inside"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "max"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}', "cls and mean"),
        ("1_Pooling/config.json", "{}", "none"),
    ],
)
def test_other_sentence_transformers_are_refused(tmp_path, name, text, message):
    make_folder(tmp_path, *CASES["bert"])
    write_sentence_transformer(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_encoder(location_of(tmp_path))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gguf(tmp_path, backend):
    """The names that llama.cpp gives a BERT's tensors."""
    gguf = pytest.importorskip("gguf")
    model = make_folder(tmp_path, *CASES["bert"])
    path = tmp_path / "bert.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(80)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 3)
    for name, tensor in model.state_dict().items():
        if not name.startswith("pooler"):
            base, _, part = name.rpartition(".")
            writer.add_tensor(f"{names.get_name(base)}.{part}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    location = ModelLocation(ModelKind.GGUF, path, "bert")
    assert open_encoder(location).config.pooling_type is PoolingType.CLS
    executor = make_executor(location, backend)
    for text, vectors in zip(TEXTS, vectors_of(run_texts(executor, TEXTS, TOKEN_VECTORS)), strict=True):
        assert relative_error(vectors, hidden_states(model, text)) < TOLERANCE


@pytest.mark.parametrize("computer", ["native", "torch"])
def test_new_weights_make_the_encoder_that_a_folder_with_them_is(tmp_path, computer):
    """Its classification head included, which is not read as the others are."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        config = transformers.BertConfig(**TINY_BERT, num_labels=3)
        transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / name)
    executor, fresh = (make_executor(location_of(tmp_path / name), computer) for name in ("old", "new"))
    params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=True)
    before, wanted = (vectors_of(run_texts(each, TEXTS, params)) for each in (executor, fresh))
    executor.update_weights(UpdateWeights(path=str(tmp_path / "new" / "model.safetensors")))
    executor.prepare_weights()
    assert np.array_equal(vectors_of(run_texts(executor, TEXTS, params)), before)
    executor.apply_weights()
    assert np.array_equal(vectors_of(run_texts(executor, TEXTS, params)), wanted)
    assert executor.collective_rpc("check_weights", "{}") == fresh.collective_rpc("check_weights", "{}")
    assert not np.array_equal(before, wanted)
