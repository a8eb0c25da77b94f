"""The engine on a card: a small random model from prompts to tokens.

`tests/integration/test_device_engine.py` has more of it, on a device that only pretends.
"""

from collections.abc import Sequence
from itertools import takewhile

import attrs
import pytest
import torch
from torch import Tensor

from trioengine import LLM, SamplingParams, TokensPrompt
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.testing.tiny_model import folder_tensors, random_model, tiny_config, write_folder

VOCAB_SIZE = 257
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, top_k=100, seed=7, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of two layers with three heads for each KV head."""
    folder = write_fake_model(tmp_path_factory.mktemp("model"))
    config = attrs.evolve(
        tiny_config(VOCAB_SIZE), hidden_size=192, intermediate_size=320, num_heads=6, num_kv_heads=2, head_dim=32
    )
    made = random_model(config)
    write_folder(folder, made, folder_tensors(made))
    return str(folder)


def prompts() -> list[TokensPrompt]:
    """Of one token and of many, some of which begin alike."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 250, (300,), generator=generator).tolist()
    return [TokensPrompt(prompt_token_ids=tokens[first:end]) for first, end in SPANS]


SPANS = [(0, 1), (0, 300), (5, 20), (0, 90), (7, 23), (100, 117), (0, 91), (30, 70), (9, 10), (11, 211), (60, 61)]


def answers(llm: LLM, sampling: SamplingParams | Sequence[SamplingParams]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts(), sampling, use_tqdm=False)]


def open_llm(model: str, **options: object) -> LLM:
    return LLM(model, max_model_len=400, multiprocess=False, **options)


def agreement(found: list[list[int]], expected: list[list[int]]) -> float:
    """Of all answers together, the share until the first token that is another one."""
    num_equal = 0
    for one, other in zip(found, expected, strict=True):
        pairs = zip(one, other, strict=True)
        num_equal += len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return num_equal / sum(len(each) for each in expected)


def prompt_logprobs(llm: LLM) -> Tensor:
    """Of every token of the prompts but their first ones: what a model says with nothing to go astray by."""
    asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate(prompts(), asked, use_tqdm=False)
    return torch.tensor([place.chosen.logprob for output in outputs for place in output.prompt_logprobs[1:]])


@attrs.frozen(eq=False)
class Expected:
    """What torch says on the CPU, in float32."""

    greedy: list[list[int]]
    drawn: list[list[int]]
    prompt_logprobs: Tensor


@pytest.fixture(scope="module")
def expected(model: str) -> Expected:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRIOENGINE_CPU_KERNELS", "off")
        with open_llm(model, device="cpu") as llm:
            return Expected(answers(llm, GREEDY), answers(llm, DRAWN), prompt_logprobs(llm))


def test_float32_says_what_the_cpu_says(model: str, expected: Expected) -> None:
    """Greedy and drawn: the random numbers are the same, too. One token in a hundred may be a near tie."""
    with open_llm(model, device="cuda", dtype="float32") as llm:
        assert agreement(answers(llm, GREEDY), expected.greedy) > 0.97
        assert agreement(answers(llm, DRAWN), expected.drawn) > 0.97
        assert float((prompt_logprobs(llm) - expected.prompt_logprobs).abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"dtype": "float16"}, 0.02),
        ({"dtype": "bfloat16"}, 0.1),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, 0.5),
        ({"dtype": "bfloat16", "quantization": "int8"}, 0.2),
        ({"dtype": "bfloat16", "quantization": "fp8"}, 0.9),
        ({"dtype": "bfloat16", "quantization": "int4"}, 2.0),
    ],
    ids=str,
)
def test_fewer_bits_say_nearly_the_same(options: dict[str, str], most: float, model: str, expected: Expected) -> None:
    """Bounds are about twice what the reference's kernels differ by, in these types on the CPU."""
    with open_llm(model, device="cuda", **options) as llm:
        difference = (prompt_logprobs(llm) - expected.prompt_logprobs).abs().mean()
        assert float(difference) < most


def test_graphs_change_no_token(model: str) -> None:
    """Nor does it when a step's batch has another bucket, or none."""
    found: list[list[list[int]]] = []
    for options in ({}, {"enforce_eager": True}, {"cudagraph_capture_sizes": (2, 16)}):
        with open_llm(model, device="cuda", dtype="bfloat16", deterministic=True, **options) as llm:
            found.append(answers(llm, DRAWN))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_deterministic_tokens_do_not_depend_on_what_else_is_computed(kv_cache_dtype: str, model: str) -> None:
    """Nor on how prompts are cut into chunks."""
    options = {"dtype": "bfloat16", "deterministic": True, "kv_cache_dtype": kv_cache_dtype}
    with open_llm(model, device="cuda", **options) as llm:
        greedy, drawn = answers(llm, GREEDY), answers(llm, DRAWN)
        for sampling, together in ((GREEDY, greedy), (DRAWN, drawn)):
            for prompt, expected in zip(prompts(), together, strict=True):
                (output,) = llm.generate([prompt], sampling, use_tqdm=False)
                assert list(output.outputs[0].token_ids) == expected
    with open_llm(model, device="cuda", max_num_batched_tokens=32, max_num_seqs=8, **options) as llm:
        assert answers(llm, GREEDY) == greedy


def test_a_step_waits_for_nothing(model: str) -> None:
    """Torch raises for everything that synchronizes while steps are begun; only taking in a result may wait."""
    with open_llm(model, device="cuda", dtype="bfloat16") as llm:
        expected = answers(llm, DRAWN)  # What is compiled and recorded at first use is then there.
        from trioengine.worker.device.device import CudaDevice

        wait = CudaDevice.wait

        def waiting(self: CudaDevice, copy: object) -> torch.Tensor:
            torch.cuda.set_sync_debug_mode("default")
            try:
                return wait(self, copy)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(CudaDevice, "wait", waiting)
            torch.cuda.set_sync_debug_mode("error")
            try:
                assert answers(llm, DRAWN) == expected
            finally:
                torch.cuda.set_sync_debug_mode("default")
