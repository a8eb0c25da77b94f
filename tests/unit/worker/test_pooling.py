"""Vectors of hidden states: the same in every bit, however a prompt is cut, and as transformers' for a decoder."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402

from trioengine.core.config import CoreConfig  # noqa: E402
from trioengine.core.engine_core import EngineCore  # noqa: E402
from trioengine.frontend.pooling_state import vectors_by_slot  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import native_copy, tiny_model  # noqa: E402
from trioengine.types.messages import EncodeCoreRequest, EngineCoreRequest, pack_int32, unpack_int32  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.types.pooling import PoolingFacts, PoolingParams, PoolingTask, PoolingType  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.native_backend import NativeBackend  # noqa: E402
from trioengine.worker.pooling import NotANumberError, Pooler  # noqa: E402
from trioengine.worker.torch_backend import TorchBackend  # noqa: E402

BLOCK_SIZE = 16
NUM_BLOCKS = 40
FACTS = PoolingFacts((PoolingTask.EMBED, PoolingTask.TOKEN_EMBED), PoolingType.LAST, True, 48)
PARAMS = [
    PoolingParams(pooling_type=PoolingType.LAST, normalize=True),
    PoolingParams(pooling_type=PoolingType.MEAN, normalize=False),
    PoolingParams(pooling_type=PoolingType.MEAN, normalize=True, dimensions=24),
    PoolingParams(pooling_type=PoolingType.CLS, normalize=False),
    PoolingParams(task=PoolingTask.TOKEN_EMBED, normalize=True),
]


@pytest.mark.parametrize("params", PARAMS)
@given(
    hidden=hnp.arrays(np.float32, st.tuples(st.integers(1, 20), st.just(30)), elements=st.floats(-1e6, 1e6, width=32)),
    cuts=st.sets(st.integers(1, 19)),
)
def test_cuts_change_no_bit(params, hidden, cuts):
    """Whatever parts a prompt is computed in."""

    def pooled(bounds):
        pooler = Pooler(params, len(hidden))
        for first, end in zip([0, *bounds], [*bounds, len(hidden)], strict=True):
            wanted = pooler.wanted(first, end)
            pooler.add(hidden[wanted.start : wanted.stop])
        return pooler.vectors()

    whole = pooled([])
    assert whole.tobytes() == pooled(sorted(cut for cut in cuts if cut < len(hidden))).tobytes()
    if params.pooling_type is PoolingType.MEAN and not params.normalize:
        np.testing.assert_allclose(whole, hidden.mean(axis=0, dtype=np.float64), rtol=1e-6, atol=1e-6)


def test_what_is_no_number_is_no_vector():
    pooler = Pooler(PARAMS[0], 1)
    pooler.add(np.array([[1, np.nan]], np.float32))
    with pytest.raises(NotANumberError):
        pooler.vectors()


def test_zeros_stay_zeros():
    """A vector of zeros has no direction to normalize."""
    pooler = Pooler(PARAMS[0], 1)
    pooler.add(np.zeros((1, 4), np.float32))
    assert (pooler.vectors() == 0).all()


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def make_executor(model, kind, num_blocks=NUM_BLOCKS):
    if kind == "torch":
        backend = TorchBackend(model, reload=lambda _: model, num_blocks=[num_blocks], block_size=BLOCK_SIZE)
    else:
        library = native_library()
        copy = native_copy(model)
        backend = NativeBackend(
            copy,
            library,
            ThreadPool(library, 2),
            reload=lambda _: copy,
            num_blocks=[num_blocks],
            block_size=BLOCK_SIZE,
            max_tokens=64,
            max_logit_rows=16,
        )
    return LocalExecutor(backend, pooling=FACTS)


def make_core(model, kind, *, num_blocks=NUM_BLOCKS, **changes):
    config = CoreConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_num_logit_rows=16,
        max_model_len=512,
        block_size=BLOCK_SIZE,
        vocab_size=model.config.vocab_size,
    )
    return EngineCore(attrs.evolve(config, **changes), make_executor(model, kind, num_blocks))


def run(core, requests):
    """The vectors and the tokens by slot."""
    for request in requests:
        core.handle(0, request)
    vectors, tokens, cached = {}, {}, {}
    while core.has_work:
        core.step()
        core.check_integrity()
        output = core.take_output(0)
        if output is None:
            continue
        assert not [finished for finished in output.finished if finished.error]
        for slot, token in zip(unpack_int32(output.slots), unpack_int32(output.tokens), strict=True):
            tokens.setdefault(slot, []).append(token)
        vectors.update([] if output.pooled is None else vectors_by_slot(output.pooled))
        pairs = unpack_int32(output.cached_tokens)
        cached.update(zip(pairs[::2], pairs[1::2], strict=True))
    return vectors, tokens, cached


def encode_request(slot, prompt, params):
    return EncodeCoreRequest(slot, f"e{slot}", pack_int32(prompt), params)


def generate_request(slot, prompt, max_tokens=20):
    return EngineCoreRequest(
        slot, f"g{slot}", pack_int32(prompt), SamplingParams(temperature=0, max_tokens=max_tokens), 0
    )


def prompt_of(length, seed):
    return np.random.default_rng(seed).integers(2, 200, length).tolist()


PROMPTS = [prompt_of(length, length) for length in (1, 5, 16, 17, 60, 130)]


def plain_hidden(model, prompt):
    """Hidden states behind the last norm, computed without a cache, a head, or anything paged."""
    from trioengine_kernels.rms_norm import rms_norm
    from trioengine_kernels.rope import rope

    weights, config = model.decoder.weights, model.config
    x = weights.embedding[torch.tensor(prompt)]
    (rotation,) = {id(each): each for each in weights.rotations}.values()
    angles = torch.arange(len(prompt)).unsqueeze(1) * rotation.inverse_frequencies
    for layer in weights.layers:
        heads = (rms_norm(x, layer.attention_norm, config.rms_norm_epsilon) @ layer.qkv.T).unflatten(
            1, (-1, config.head_dim)
        )
        query, key, value = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        query, key = rope(query, angles.cos(), angles.sin()), rope(key, angles.cos(), angles.sin())
        repeats = config.num_heads // config.num_kv_heads
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.repeat_interleave(repeats, 1).transpose(0, 1),
            value.repeat_interleave(repeats, 1).transpose(0, 1),
            is_causal=True,
        )
        x = x + attended.transpose(0, 1).flatten(1) @ layer.output.T
        gate, up = (rms_norm(x, layer.mlp_norm, config.rms_norm_epsilon) @ layer.mlp.gate_up.T).chunk(2, dim=1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.mlp.down.T
    return rms_norm(x, weights.final_norm, config.rms_norm_epsilon).numpy()


def expected_vector(model, prompt, params):
    hidden = plain_hidden(model, prompt).astype(np.float64)
    if params.task is PoolingTask.EMBED:
        pools = {PoolingType.LAST: hidden[-1], PoolingType.CLS: hidden[0], PoolingType.MEAN: hidden.mean(axis=0)}
        hidden = pools[params.pooling_type]
    hidden = hidden[..., : params.dimensions]
    return hidden / np.linalg.norm(hidden, axis=-1, keepdims=True) if params.normalize else hidden


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("params", PARAMS)
def test_a_decoder_embeds_beside_answers(model, kind, params):
    """In parts, in company, after preemptions: the vector of the plain computation; and answers are what they were."""
    answers = run(make_core(model, kind), [generate_request(slot, prompt_of(20, slot)) for slot in range(3)])[1]
    core = make_core(model, kind, num_blocks=13, max_num_batched_tokens=23, max_num_partial_prefills=3)
    requests = [generate_request(slot, prompt_of(20, slot)) for slot in range(3)]
    requests += [encode_request(10 + i, prompt, params) for i, prompt in enumerate(PROMPTS)]
    vectors, tokens, _ = run(core, requests)

    assert tokens == answers
    # Keys and values are halves on the native kernels.
    tolerance = 1e-5 if kind == "torch" else 5e-3
    for i, prompt in enumerate(PROMPTS):
        expected = expected_vector(model, prompt, params)
        assert vectors[10 + i].shape == expected.shape
        assert np.linalg.norm(vectors[10 + i] - expected) < tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("params", PARAMS)
def test_native_vectors_are_the_same_in_every_bit(model, params):
    """Whatever a step has room for, and whoever shares it."""
    requests = [encode_request(i, prompt, params) for i, prompt in enumerate(PROMPTS)]
    first = run(make_core(model, "native"), requests)[0]
    for budget in (1, 7, 16, 50):
        other = run(make_core(model, "native", max_num_batched_tokens=budget), requests[::-1])[0]
        assert {slot: vector.tobytes() for slot, vector in other.items()} == {
            slot: vector.tobytes() for slot, vector in first.items()
        }


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("params", PARAMS)
def test_the_prefix_cache_changes_no_vector(model, kind, params):
    """The last token's stands on what is cached; others are computed in full."""
    core = make_core(model, kind, enable_prefix_caching=True)
    prompt = PROMPTS[-1]
    (before,) = run(core, [encode_request(0, prompt, params)])[0].values()
    vectors, _, cached = run(core, [encode_request(0, prompt, params)])
    is_last = params.pooling_type is PoolingType.LAST
    assert cached == ({0: 128} if is_last else {})
    np.testing.assert_allclose(vectors[0], before, rtol=1e-4, atol=1e-5)


def test_an_executor_without_vectors_refuses_them(model):
    core = make_core(model, "torch")
    core.executor = LocalExecutor(
        TorchBackend(model, reload=lambda _: model, num_blocks=[NUM_BLOCKS], block_size=BLOCK_SIZE)
    )
    core.handle(0, encode_request(0, [3], PARAMS[0]))
    output = core.take_output(0)
    assert output is not None
    assert output.finished[0].error.name == "RequestError"
