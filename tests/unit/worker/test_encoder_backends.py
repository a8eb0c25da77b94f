"""How a step of an encoder is cut into parts that are computed one after the other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trioengine.worker.encoder_backends import cut_batch
from trioengine.worker.encoder_executor import EncoderBatch


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60), st.randoms(use_true_random=False))
def test_parts_are_the_batch_in_order(lengths, num_tokens, rng):
    """No token, row or text is lost or split, and no part is larger than it says."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(starts[-1])
    rows = sorted(rng.sample(range(total), rng.randint(0, total)))
    ids = np.arange(total, dtype=np.int32)
    batch = EncoderBatch(token_ids=ids, positions=ids + 7, query_start=starts, rows=np.array(rows, np.int32))

    parts = cut_batch(batch, num_tokens)

    assert np.concatenate([part.token_ids for part in parts]).tolist() == ids.tolist()
    assert np.concatenate([part.positions for part in parts]).tolist() == (ids + 7).tolist()
    assert np.concatenate([np.diff(part.query_start) for part in parts]).tolist() == lengths
    assert np.concatenate([part.token_ids[part.rows] for part in parts]).tolist() == rows
    for part in parts:
        assert part.query_start[0] == 0
        assert part.query_start[-1] == len(part.token_ids) == len(part.positions)
        assert len(part.token_ids) < num_tokens + np.diff(part.query_start)[-1]
        assert all(array.dtype == np.int32 for array in (part.token_ids, part.query_start, part.rows))
