"""The bundled model on the native kernels: as good as float32, and the same tokens whatever else is computed."""

from collections.abc import Iterator, Sequence

import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402

from trioengine.checkpoint.locate import resolve_model  # noqa: E402
from trioengine.client.llm import LLM  # noqa: E402
from trioengine.config import env  # noqa: E402
from trioengine.core.request import Request  # noqa: E402
from trioengine.core.request_table import RequestTable  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.models.native_ops import load_native_model  # noqa: E402
from trioengine.models.torch_ops import load_torch_model  # noqa: E402
from trioengine.testing.logits import native_logits, torch_logits  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.tokenizer.tokenizer import load_tokenizer  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402

TEXT = """The lighthouse at the end of the bay was built in 1862, after three ships had been lost on the rocks in one
winter. Its keeper was a quiet man who wrote down every storm in a large grey book: the hour, the direction of the
wind, the height of the waves and, when he could see them, the names of the boats that came home. When he died, the
book had more than nine hundred pages, and nobody in the village knew what to do with it. Years later a young woman
from the university asked to read it. She was studying how the climate of the coast had changed, and for her the old
keeper's notes were better than any machine: they began long before the first instruments were installed, and they
never stopped, not even on the days when his children were born. She found that the storms had become fewer but
stronger, and that the wind now came from the south more often than before. Her teachers did not believe it at first.
Then other books like this were found, in Norway, in Scotland and in the north of Spain, and all of them told the
same story. Today the lighthouse is a small museum. The grey book lies open on a table behind glass, and every month
somebody turns one page."""
NUM_TOKENS = 256


@pytest.fixture(scope="module", autouse=True)
def kernels_are_on() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("TRIOENGINE_CPU_KERNELS", raising=False)
        yield


def test_logits_are_close_to_those_of_float32() -> None:
    """Of the same weights: the loss is that of 8-bit activations and half precision keys and values."""
    location, library = resolve_model(None, cache_dir=env.cache_dir()), native_library()
    checkpoint = open_checkpoint(location)
    token_ids = list(load_tokenizer(location).encode(TEXT))[:NUM_TOKENS]
    assert len(token_ids) == NUM_TOKENS
    native = load_native_model(checkpoint, library, ThreadPool(library, 2))
    logits = torch.from_numpy(native_logits(native, token_ids, [100, 1, 155]))
    expected = torch.from_numpy(torch_logits(load_torch_model(checkpoint), token_ids))
    found, wanted = logits.double().log_softmax(-1), expected.double().log_softmax(-1)
    divergence = (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    agreement = (found.argmax(-1) == wanted.argmax(-1)).double().mean().item()
    assert divergence < 0.02
    assert agreement >= 0.93


PROMPTS = [TEXT[:count] for count in (20, 700, 90, 300, 45, 180)]
RULES = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.1, top_k=50, repetition_penalty=1.2, seed=8, max_tokens=20, ignore_eos=True),
]


def generate(prompts: Sequence[str], rules: Sequence[SamplingParams], **options: object) -> list[tuple[int, ...]]:
    with LLM(max_model_len=256, **options) as llm:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, rules)]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """Each prompt's answer, in steps of its own, on one thread."""
    native_library()
    with LLM(max_model_len=256, cpu_threads=1) as llm:
        return [tuple(llm.generate(prompt, RULES[i % 3])[0].outputs[0].token_ids) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_threads": 2},
        {"cpu_threads": 3, "max_num_batched_tokens": 48},
        {"cpu_threads": 2, "max_num_batched_tokens": 7, "block_size": 32},
        {"cpu_threads": 1, "max_num_seqs": 2},
    ],
    ids=["batch", "chunks", "small chunks", "pairs"],
)
def test_nothing_but_the_request_decides_its_tokens(alone: list[tuple[int, ...]], options: dict[str, int]) -> None:
    """Not the batch, the cut of the prompt, the threads or the blocks: bit for bit."""
    assert generate(PROMPTS, [RULES[i % 3] for i in range(len(PROMPTS))], **options) == alone


def test_a_preempted_sequence_goes_on_with_the_same_tokens(
    alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed again, in other steps: its keys and values are bit for bit those that it lost."""
    preempted: list[object] = []
    preempt = RequestTable.preempt

    def note_and_preempt(table: RequestTable, victim: Request) -> None:
        preempted.append(victim)
        preempt(table, victim)

    monkeypatch.setattr(RequestTable, "preempt", note_and_preempt)
    bytes_per_block = 16 * 2 * 30 * 3 * 64 * 2
    found = generate(PROMPTS, [RULES[i % 3] for i in range(len(PROMPTS))], kv_cache_memory_bytes=16 * bytes_per_block)
    assert preempted
    assert found == alone
