# pyright: basic
"""Low-rank adapters of a product, of each token another one (Hu et al., 2021, "LoRA")."""

from collections.abc import Mapping, Sequence

from torch import Tensor


def lora(y: Tensor, x: Tensor, slots: Tensor, adapters: Mapping[int, Sequence[tuple[int, Tensor, Tensor]]]) -> Tensor:
    """`y`, and for each token with an adapter `b @ (a @ x)` added to the adapter's outputs.

    Args:
        y: [num_tokens, rows]. Not changed.
        x: [num_tokens, columns].
        slots: [num_tokens]; 0 is no adapter.
        adapters: by slot, the parts of each: first output, a [rank, columns] and b [outputs, rank]. A slot that is not
            among them adds nothing.
    """
    y = y.clone()
    for slot in slots.unique().tolist():
        if parts := adapters.get(slot, ()) if slot else ():
            tokens = (slots == slot).nonzero().squeeze(1)
            for first, a, b in parts:
                y[tokens, first : first + len(b)] += (x[tokens] @ a.T) @ b.T
    return y
