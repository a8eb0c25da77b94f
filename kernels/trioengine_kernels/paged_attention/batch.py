# pyright: basic
"""What the attention of a step is told about sequences, as tensors that a recorded graph can read again."""

import attrs
from torch import Tensor


@attrs.frozen(eq=False)
class AttentionBatch:
    """The sequences of one step, as one KV group sees them. Tensors are int32, on the device of the queries.

    Their shapes and the other fields never change for one recorded graph; what the tensors hold does. There may be more
    places than sequences: padded places have no queries (`query_start` repeats the number of tokens), and queries
    behind the last sequence's are not computed: what comes out for them means nothing.
    """

    block_table: Tensor
    """[num_rows, max_blocks]: the blocks of every known sequence, in order. Entries that no query sees are not read."""
    rows: Tensor
    """[num_seqs]: each sequence's row of `block_table`."""
    query_start: Tensor
    """[num_seqs + 1]: the queries of sequence i are rows `query_start[i]` to `query_start[i + 1] - 1`, its last
    tokens."""
    seq_lens: Tensor
    """[num_seqs]: tokens of each sequence, those of this step included; 0 in padded places."""
    work: Tensor
    """[max_work, WORK_FIELDS]: its first rows as `paged_attention.work.plan_work` returns them, planned for this
    window, from the same `query_start` and `seq_lens`. `paged_attention.work.max_work` is enough of them."""
    num_work: Tensor
    """[1]: how many rows these are."""
    block_size: int
    window: int | None
    """A query sees itself and the `window - 1` tokens before it; None is all of them."""
    max_query_len: int
    """No sequence of the step has more queries; 1 in a graph of decodes. It decides how many rows a tile has."""
    is_deterministic: bool = False
    """A query's numbers do not depend on what else is in the step."""
