"""The whole engine on a device: what `LLM` answers is what it answers with torch on the CPU.

The device pretends to be a GPU: its work is done when somebody waits for it, and its kernels are the reference's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from trioengine_kernels.kernel_set import reference_kernels, triton_kernels  # noqa: E402
from trioengine_kernels.paged_attention.batch import AttentionBatch  # noqa: E402

from trioengine import LLM, LoRARequest, SamplingParams  # noqa: E402
from trioengine.config.engine import SpeculationConfig, SpeculationMethod  # noqa: E402
from trioengine.runtime.build import build_engine_core  # noqa: E402
from trioengine.testing.device_computer import device_computer  # noqa: E402
from trioengine.testing.fake_device import FakeDevice  # noqa: E402
from trioengine.testing.fake_tokenizer import write_fake_model  # noqa: E402
from trioengine.testing.lora import write_lora  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, tiny_config, tiny_model, write_folder  # noqa: E402
from trioengine.types.messages import CheckIntegrity  # noqa: E402
from trioengine.types.request import TokensPrompt  # noqa: E402
from trioengine.worker.loading import Computer  # noqa: E402

VOCAB_SIZE = 257
SIZES: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}
PROMPTS = [TokensPrompt([(7 * place + length) % 250 for place in range(length)]) for length in (40, 1, 17, 5, 90, 2)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=40, seed=2, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=1.2, seed=3, logit_bias={7: 5.0}, allowed_token_ids=[7, 9, 11], max_tokens=12),
]


def write_model(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    write_fake_model(folder)
    model = tiny_model(vocab_size=VOCAB_SIZE, seed=seed)
    write_folder(folder, model, folder_tensors(model))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@contextmanager
def opened(model: Path | None, computer: Computer, **options: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trioengine.runtime.build.build_engine_core", partial(build_engine_core, computer=computer))
        with LLM(None if model is None else str(model), multiprocess=False, **{**SIZES, **options}) as llm:
            yield llm
            llm.llm_engine.call(CheckIntegrity())


def answers(llm: LLM, params: Any = PARAMS, prompts: Any = PROMPTS, **options: Any) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    with opened(model, Computer(None)) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"async_scheduling": False},
        {"cudagraph_capture_sizes": (2,)},
        {"max_num_batched_tokens": 128, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_it_answers_as_torch_does(model: Path, expected: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    """Greedy, drawn with seeds, with penalties and biases, with log probabilities, four at a time."""
    device = FakeDevice()
    with opened(model, device_computer(device), **options) as llm:
        assert answers(llm) == expected
        # And again, with prefixes that are cached.
        assert answers(llm) == expected
    assert (device.num_replays > 0) is not options.get("enforce_eager", False)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_it_is_deterministic_where_that_is_asked_for(
    model: Path, expected: list[tuple[int, ...]], is_deterministic: bool
) -> None:
    """With the products and the attention of that mode, and only then; in graphs and beside them."""
    kernels, modes = reference_kernels(), set[bool]()
    linear, paged_attention = kernels.linear, kernels.paged_attention

    def note_linear(*args: Any) -> Any:
        modes.add(True)
        return linear(*args)

    def note_attention(query: Any, keys: Any, values: Any, batch: AttentionBatch, **options: Any) -> Any:
        modes.add(batch.is_deterministic)
        assert is_deterministic is batch.is_deterministic
        return paged_attention(query, keys, values, batch, **options)

    kernels = attrs.evolve(kernels, linear=note_linear, paged_attention=note_attention)
    computer = device_computer(kernels=kernels, is_deterministic=is_deterministic)
    with opened(model, computer, deterministic=is_deterministic) as llm:
        assert answers(llm) == expected
    assert modes == {is_deterministic}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_in_the_deterministic_mode_neighbours_change_no_bit(model: Path) -> None:
    """With Triton's kernels: alone, among others, and in other chunks. Log probabilities would show it."""
    pytest.importorskip("triton")
    from trioengine.testing.interpreter import fast_interpreter

    params = SamplingParams(temperature=0.9, seed=4, max_tokens=3, ignore_eos=True, logprobs=1)
    prompts, found = PROMPTS[2:4], list[Any]()
    sizes = {"cudagraph_capture_sizes": (2,), "enable_prefix_caching": False}
    with fast_interpreter():
        for max_num_batched_tokens in (9, 32):
            computer = device_computer(kernels=triton_kernels(), is_deterministic=True)
            with opened(
                model, computer, deterministic=True, max_num_batched_tokens=max_num_batched_tokens, **sizes
            ) as llm:
                for batch in [prompts] if max_num_batched_tokens == 9 else [prompts[:1], prompts[1:]]:
                    found += [output.outputs[0] for output in llm.generate(batch, params, use_tqdm=False)]
    together, alone = found[:2], found[2:]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert [each.logprobs for each in together] == [each.logprobs for each in alone]


def test_adapters_are_computed(model: Path, tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    adapters = [
        LoRARequest(str(number), number, str(write_lora(tmp_path / str(number), tiny_config(VOCAB_SIZE), seed=number)))
        for number in (1, 2)
    ]
    found: list[list[list[tuple[int, ...]]]] = []
    for computer in (Computer(None), device_computer()):
        with opened(model, computer, enable_lora=True, max_loras=2) as llm:
            assert answers(llm, GREEDY)[0] == expected[0]
            found.append([answers(llm, GREEDY, lora_request=adapter) for adapter in adapters])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_draft_model_is_on_the_device_too(model: Path, tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    """It changes no token."""
    draft = write_model(tmp_path / "draft", seed=5)
    speculation = SpeculationConfig(method=SpeculationMethod.DRAFT_MODEL, num_speculative_tokens=2, model=str(draft))
    with opened(model, device_computer(), speculative_config=speculation) as llm:
        assert answers(llm) == expected


def test_the_cache_has_what_is_left(model: Path) -> None:
    """Half of the memory is half of the blocks, with 8 bits a number twice as many."""
    num_blocks: list[int] = []
    for computer, share in [
        (device_computer(), 0.9),
        (device_computer(), 0.45),
        (device_computer(cache_dtype=torch.float8_e4m3fn), 0.225),
    ]:
        with opened(model, computer, gpu_memory_utilization=share, enforce_eager=True) as llm:
            num_blocks.append(llm.llm_engine.ready.num_blocks)
            assert "of weights" in llm.llm_engine.ready.reasons["num_kv_blocks"]
            assert len(answers(llm, GREEDY)[0]) == 12
    assert num_blocks[0] == pytest.approx(2 * num_blocks[1], rel=0.05)
    assert num_blocks[2] == pytest.approx(2 * num_blocks[1], rel=0.1)


@pytest.mark.slow
def test_the_capital_of_japan_is_tokyo_on_a_device_too() -> None:
    """The bundled model, from the planes that its quantized weights become."""
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    options = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64, "enforce_eager": True}
    with opened(None, device_computer(total_bytes=2**28), **options) as llm:
        (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert output.outputs[0].text == "The capital of Japan is Tokyo."
