"""Output waits in columns and leaves as one message."""

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
