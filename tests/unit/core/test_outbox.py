"""Output waits in columns and leaves as one message."""

from trioengine.core.executor import TokenLogprobs
from trioengine.core.outbox import Outbox
from trioengine.types.messages import Finished, StepOutput, unpack_int32
from trioengine.types.output import FinishReason


def put(outbox: Outbox, *rows: tuple[int, int]) -> None:
    for slot, token in rows:
        outbox.slots.append(slot)
        outbox.tokens.append(token)


def take(outbox: Outbox) -> StepOutput:
    output = outbox.take(step=3, timestamp_s=1.5)
    assert output is not None
    return output


def test_one_token_for_each_slot_needs_no_counts() -> None:
    """The usual message has two columns."""
    outbox = Outbox()
    put(outbox, (4, 40), (2, 20))
    output = take(outbox)
    assert list(unpack_int32(output.slots)) == [4, 2]
    assert list(unpack_int32(output.tokens)) == [40, 20]
    assert (output.counts, output.step, output.timestamp_s) == (b"", 3, 1.5)


def test_steps_not_taken_merge_in_the_order_of_tokens() -> None:
    """One row for each slot, with all its tokens; ends come along."""
    outbox = Outbox()
    put(outbox, (1, 10), (2, 20))
    put(outbox, (1, 11), (3, 30))
    outbox.finish(Finished(1, FinishReason.STOP))
    put(outbox, (2, 21), (3, 31))
    outbox.finish(Finished(3, FinishReason.LENGTH))
    output = take(outbox)
    assert list(unpack_int32(output.slots)) == [1, 2, 3]
    assert list(unpack_int32(output.counts)) == [2, 2, 2]
    assert list(unpack_int32(output.tokens)) == [10, 11, 20, 21, 30, 31]
    assert [finished.slot for finished in output.finished] == [1, 3]


def test_messages_are_numbered_and_taken_once() -> None:
    """Nothing pending is no message and takes no number."""
    outbox = Outbox()
    assert outbox.take(0, 0.0) is None
    put(outbox, (1, 10))
    assert take(outbox).sequence == 0
    assert outbox.is_empty
    assert outbox.take(0, 0.0) is None
    outbox.finish(Finished(1, FinishReason.ABORT))
    assert not outbox.is_empty
    output = take(outbox)
    assert (output.sequence, output.slots, output.finished) == (1, b"", (Finished(1, FinishReason.ABORT),))


def test_log_probabilities_wait_in_columns() -> None:
    """An entry for each token; those of a prompt on their own, also without a row."""
    outbox = Outbox()
    outbox.add_prompt_logprobs(2, [TokenLogprobs([5], [-1.0], 3)])
    assert not outbox.is_empty
    output = take(outbox)
    assert (output.slots, output.logprobs) == (b"", None)
    assert output.prompt_logprobs is not None
    assert list(unpack_int32(output.prompt_logprobs.slots)) == [2]
    put(outbox, (2, 7), (4, 9))
    outbox.add_logprobs(2, [TokenLogprobs([7, 7], [-0.5, -0.5], 1)])
    outbox.add_logprobs(4, [TokenLogprobs([9], [-2.0], 8)])
    output = take(outbox)
    assert output.prompt_logprobs is None
    assert output.logprobs is not None
    columns = (output.logprobs.slots, output.logprobs.counts, output.logprobs.ranks, output.logprobs.token_ids)
    assert [list(unpack_int32(column)) for column in columns] == [[2, 4], [2, 1], [1, 8], [7, 7, 9]]
    assert list(memoryview(output.logprobs.logprobs).cast("f")) == [-0.5, -0.5, -2.0]
    put(outbox, (2, 8))
    assert take(outbox).logprobs is None


def test_cached_tokens_come_with_a_row_and_make_no_message() -> None:
    outbox = Outbox()
    outbox.add_cached_tokens(3, 16)
    assert outbox.is_empty
    put(outbox, (3, 7))
    assert list(unpack_int32(take(outbox).cached_tokens)) == [3, 16]
    put(outbox, (3, 8))
    assert take(outbox).cached_tokens == b""


def test_waits_and_preemptions_wait_in_columns() -> None:
    """Each of them is a message, also without a row; a wait has room in its column however long it was."""
    outbox = Outbox()
    outbox.add_scheduled(2, 0.0015)
    assert not outbox.is_empty
    outbox.add_scheduled(3, 1e6)
    output = take(outbox)
    assert list(unpack_int32(output.scheduled)) == [2, 1500, 3, 2**31 - 1]
    outbox.add_preempted(2)
    assert not outbox.is_empty
    output = take(outbox)
    assert (output.scheduled, list(unpack_int32(output.preempted))) == (b"", [2])
    assert outbox.is_empty
