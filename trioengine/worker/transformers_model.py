# pyright: basic
"""Models that only transformers can build, computed over the paged KV cache through its attention interface.

The modules are transformers' own, and attention is ours: it stores keys and values in the cache and attends through the
block tables. At load the results are compared with those of transformers' own attention.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trioengine_kernels.paged_attention import paged_attention, plan_attention
from trioengine_kernels.write_kv import write_kv

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.safetensors import open_safetensors
from trioengine.models.loader import NewTensors
from trioengine.models.source import as_ggml
from trioengine.models.torch_ops import DecoderInput, LayerKVCache
from trioengine.worker.transformers_checkpoint import (
    ATTENTION_NAME,
    TransformersCheckpoint,
    TransformersConfig,
    attending,
    checkpoint_error,
    logits_of,
    prepared,
    summary,
)

MAX_SELF_CHECK_ERROR = 1e-4
"""‖ours - transformers'‖ / ‖transformers'‖ of any token's logits. Rounding in float32 is a hundred times less."""
_SELF_CHECK_BLOCK_SIZE = 8
_SELF_CHECK_STEPS = ((9, 4), (11, 1), (1, 6))
"""Tokens of two sequences in three steps: whole prompts, later parts of prompts, and decodes among others."""


class TransformersModel:
    """A model with its weights, float32."""

    def __init__(self, config: TransformersConfig, module: PreTrainedModel) -> None:
        """`module`: of transformers, made with our attention."""
        self.config = config
        self._module = module
        self._group_layers = {
            layer: (number, place)
            for number, group in enumerate(config.kv_groups)
            for place, layer in enumerate(group.layers)
        }
        parameters = inspect.signature(module.forward).parameters
        self._takes_rows = "logits_to_keep" in parameters

    def forward(self, batch: DecoderInput, kv_cache: Sequence[Sequence[LayerKVCache]]) -> Tensor:
        """Compute a step.

        Args:
            batch: its tokens, with an attention plan for each KV group.
            kv_cache: for each KV group, its layers' in their order.

        Returns:
            [num_logit_rows, vocab_size].
        """
        step = _PagedStep(self.config, self._group_layers, batch, kv_cache)
        rows = {"logits_to_keep": batch.logit_rows} if self._takes_rows else {}
        with attending(step):
            logits = logits_of(self._module, batch.token_ids, batch.positions, rows)
        assert step.num_calls == len(self.config.attention_calls)
        return logits if self._takes_rows else logits.index_select(0, batch.logit_rows)

    def tensors(self) -> Iterator[Tensor]:
        """All weights."""
        return self._module.parameters()

    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, vocab_size] of one sequence, with nothing of ours: transformers' own attention, no cache."""
        self._module.set_attn_implementation("eager")
        try:
            return logits_of(self._module, token_ids, torch.arange(len(token_ids)), {})
        finally:
            self._module.set_attn_implementation(ATTENTION_NAME)


def load_transformers_model(checkpoint: TransformersCheckpoint, tensors: NewTensors | None = None) -> TransformersModel:
    """Read the weights as float32, and compare what the model computes here with what transformers computes.

    The comparison takes as long as 64 tokens of a prompt, and no memory to speak of. `tensors` take the place of those
    of their names.

    Raises:
        CheckpointError: weights are missing, not known, or no safetensors; or results differ.
    """
    path = checkpoint.location.path
    try:
        # Where tensors are given, transformers looks for none, and wants the configuration.
        given: dict[str, Any] = {}
        model_class: Any = AutoModelForCausalLM
        if tensors:
            model_class = getattr(transformers, checkpoint.config.architecture)
            given = {"config": AutoConfig.from_pretrained(path), "state_dict": _state_dict(path, tensors)}
        loaded: Any = model_class.from_pretrained(
            None if tensors else path,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **given,
        )
        module, found = loaded
    except Exception as error:  # Whatever transformers makes of a damaged file.
        _raise_if_memory(error)
        raise checkpoint_error(path, f"transformers cannot load it: {summary(error)}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, found[problem])):
            shown = ", ".join(name[:100] for name in names[:3])
            raise checkpoint_error(path, f"{len(names)} tensors are {problem.removesuffix('_keys')}, such as {shown}")
    model = TransformersModel(checkpoint.config, prepared(module))
    check_against_transformers(path, model)
    return model


def _state_dict(path: Path, tensors: NewTensors) -> dict[str, Tensor]:
    """All tensors of a folder, with these in place of those of their names."""
    files = open_safetensors(path)
    found = {name: as_ggml(path, tensor) for name, tensor in files.items() if name not in tensors}
    return {name: torch.from_numpy(dequantize(tensor)) for name, tensor in {**found, **tensors}.items()}


@torch.inference_mode()
def check_against_transformers(path: Path, model: TransformersModel) -> None:
    """Compare packed, paged, chunked steps of two sequences of random tokens with transformers' own forward.

    Raises:
        CheckpointError: they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(counts) for counts in zip(*_SELF_CHECK_STEPS, strict=True)]
    texts = [torch.randint(model.config.vocab_size, (length,), generator=generator) for length in lengths]
    error = relative_error(
        paged_logits(model, texts, _SELF_CHECK_STEPS), torch.cat(list(map(model.plain_logits, texts)))
    )
    if not error <= MAX_SELF_CHECK_ERROR:
        raise checkpoint_error(
            path,
            f"computed in steps, {model.config.architecture} differs from transformers' own results by {error:.1e}, so"
            " this engine cannot run it",
        )


def paged_logits(model: TransformersModel, texts: Sequence[Tensor], steps: Sequence[Sequence[int]]) -> Tensor:
    """The logits of whole texts, [num_tokens of all, vocab_size], computed in steps over a small paged cache.

    Args:
        model: what computes.
        texts: token ids, int64.
        steps: how many tokens of each text each step computes. The sums are the texts' lengths.
    """
    block_size, num_texts = _SELF_CHECK_BLOCK_SIZE, len(texts)
    blocks_per_text = max(-(-len(text) // block_size) for text in texts)
    num_blocks = num_texts * blocks_per_text
    # The texts' blocks lie among each other, each group's in another order.
    tables = [
        torch.arange(num_blocks).roll(number).view(blocks_per_text, num_texts).T.int()
        for number in range(len(model.config.kv_groups))
    ]
    caches = [
        [
            LayerKVCache(*torch.full((2, num_blocks, block_size, group.num_kv_heads, group.head_dim), torch.nan))
            for _ in group.layers
        ]
        for group in model.config.kv_groups
    ]
    parts: list[list[Tensor]] = [[] for _ in texts]
    computed = [0] * num_texts
    for counts in steps:
        present = [number for number in range(num_texts) if counts[number]]
        places = [torch.arange(computed[number], computed[number] + counts[number]) for number in present]
        for number in present:
            computed[number] += counts[number]
        query_start = torch.tensor([0, *(len(each) for each in places)]).cumsum(0)
        batch = DecoderInput(
            token_ids=torch.cat([texts[number][each] for number, each in zip(present, places, strict=True)]),
            positions=torch.cat(places),
            slots=[
                torch.cat(
                    [
                        table[number][each // block_size].long() * block_size + each % block_size
                        for number, each in zip(present, places, strict=True)
                    ]
                )
                for table in tables
            ],
            attention=[
                plan_attention(
                    table[present],
                    query_start,
                    torch.tensor([computed[number] for number in present]),
                    block_size=block_size,
                    window=group.window,
                )
                for table, group in zip(tables, model.config.kv_groups, strict=True)
            ],
            logit_rows=torch.arange(int(query_start[-1])),
        )
        logits = model.forward(batch, caches)
        for number, part in zip(present, logits.split([len(each) for each in places]), strict=True):
            parts[number].append(part)
    return torch.cat([torch.cat(each) for each in parts])


def relative_error(values: Tensor, expected: Tensor) -> float:
    """The largest of any row: ‖values - expected‖ / ‖expected‖. NaN where either has one."""
    return float(((values - expected).norm(dim=1) / expected.norm(dim=1)).max())


class _PagedStep:
    """Attention of one step over the paged cache."""

    def __init__(
        self,
        config: TransformersConfig,
        group_layers: Mapping[int, tuple[int, int]],
        batch: DecoderInput,
        kv_cache: Sequence[Sequence[LayerKVCache]],
    ) -> None:
        self._calls = config.attention_calls
        self._group_layers = group_layers
        self._batch = batch
        self._kv_cache = kv_cache
        self.num_calls = 0

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        asked: Mapping[str, Any],
    ) -> Tensor:
        group, layer = self._group_layers[self.num_calls]
        call, cache = self._calls[self.num_calls], self._kv_cache[group][layer]
        self.num_calls += 1
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if call.value_dim < call.head_dim:
            value = F.pad(value, (0, call.head_dim - call.value_dim))
        write_kv(key, value, cache.keys, cache.values, self._batch.slots[group])
        attended = paged_attention(
            query[0].transpose(0, 1),
            cache.keys,
            cache.values,
            self._batch.attention[group],
            scale=_scale(asked, call.head_dim),
            soft_cap=asked.get("softcap"),
            sinks=asked.get("s_aux"),
        )
        return attended[..., : call.value_dim].unsqueeze(0)

    def mask(self, window: int | None) -> Tensor | None:
        return None


def _scale(asked: Mapping[str, Any], head_dim: int) -> float:
    scale = asked.get("scaling")
    return head_dim**-0.5 if scale is None else float(scale)


def _raise_if_memory(error: Exception) -> None:
    """Torch says it with a RuntimeError."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        raise MemoryError from error
