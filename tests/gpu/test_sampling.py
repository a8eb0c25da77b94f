"""Sampling on a card: the CPU's tokens, exactly, of whole vocabularies."""

import attrs
import pytest
import torch
from torch import Tensor
from trioengine_kernels.kernel_set import reference_kernels, triton_kernels
from trioengine_kernels.sampling import SamplingBatch

kernels, reference = triton_kernels(), reference_kernels()

VOCAB_SIZES = [128_256, 49_152, 151_937]
NUM_ROWS = 24
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
TOP_KS = (0, 1, 50, 3000)
TOP_PS = (1.0, 0.9, 0.3, 0.9999)
MIN_PS = (0.0, 0.05, 0.0, 0.3, 1e-7)


def make_batch(device: str) -> SamplingBatch:
    """Rows that have each limit with most of the others."""
    rows = torch.arange(NUM_ROWS)

    def cycle(values: tuple[float, ...], step: int) -> Tensor:
        return torch.tensor([values[row // step % len(values)] for row in range(NUM_ROWS)])

    return SamplingBatch(
        temperature=cycle(TEMPERATURES, 1).to(device),
        top_k=cycle(TOP_KS, 2).long().to(device),
        top_p=cycle(TOP_PS, 3).to(device),
        min_p=cycle(MIN_PS, 1).to(device),
        seed=torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,), generator=torch.Generator().manual_seed(2)).to(device),
        position=(rows * 977).to(device),
    )


def make_logits(kind: str, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator)
    match kind:
        case "peaked":
            return logits * 4
        case "flat":
            return logits / 100
        case "rounded":
            return (logits * 4).bfloat16().float()
        case "equal":
            return torch.full_like(logits, 1.5)
        case "masked":
            logits[:, ::3] = float("-inf")
            logits[0] = float("-inf")
            logits[1, 1000] = float("nan")
            logits[2, 2000] = float("inf")
            return logits
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("kind", ["peaked", "flat", "rounded", "equal", "masked"])
def test_tokens_are_those_of_the_cpu(kind: str, vocab_size: int) -> None:
    logits = make_logits(kind, vocab_size)
    tokens, status = kernels.sample(logits.cuda(), make_batch("cuda"))
    expected, expected_status = reference.sample(logits, make_batch("cpu"))
    assert torch.equal(status.cpu(), expected_status)
    is_defined = logits.max(dim=1).values > float("-inf")
    assert torch.equal(tokens.cpu()[is_defined], expected[is_defined])


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits, batch = make_logits("peaked", VOCAB_SIZES[0]).cuda(), make_batch("cuda")
    together = kernels.sample(logits, batch)[0]
    for row in range(NUM_ROWS):
        of_row = {field.name: getattr(batch, field.name)[row : row + 1] for field in attrs.fields(SamplingBatch)}
        alone = kernels.sample(logits[row : row + 1].contiguous(), SamplingBatch(**of_row))[0]
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("kind", ["peaked", "rounded", "equal"])
def test_log_probabilities_are_those_of_the_cpu(kind: str, num_top: int) -> None:
    logits = make_logits(kind, VOCAB_SIZES[0])
    token_ids = torch.randint(0, VOCAB_SIZES[0], (NUM_ROWS,), generator=torch.Generator().manual_seed(1)).int()
    found = kernels.logprobs(logits.cuda(), token_ids.cuda(), num_top)
    expected = reference.logprobs(logits, token_ids, num_top)
    assert torch.equal(found.rank.cpu(), expected.rank)
    assert torch.equal(found.top_token_ids.cpu(), expected.top_token_ids)
    assert torch.allclose(found.chosen.cpu(), expected.chosen, rtol=1e-5, atol=1e-5)
    assert torch.allclose(found.top.cpu(), expected.top, rtol=1e-5, atol=1e-5)
