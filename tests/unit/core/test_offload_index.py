"""Content is in one slot at a time, and no copy of a step spoils another."""

import pytest

from trioengine.core.executor import BlockCopy
from trioengine.core.offload_index import OffloadIndex

ROOT = b"root"


def test_the_oldest_content_makes_room() -> None:
    """Whoever saves hears what was lost for it."""
    index = OffloadIndex(0, num_slots=2)
    assert index.save(7, b"a", ROOT) is None
    assert index.save(8, b"b", b"a") is None
    assert index.save(9, b"c", b"b") == b"a"
    assert b"a" not in index
    assert dict(index.stored()) == {b"b": b"a", b"c": b"b"}
    assert index.take_copies() == ([BlockCopy(0, 9, 0), BlockCopy(0, 8, 1)], {})
    assert index.take_copies() == ([], {})
    index.check_integrity()


def test_what_is_there_is_not_saved_again() -> None:
    """It is as young as if it were."""
    index = OffloadIndex(3, num_slots=2)
    index.save(7, b"a", ROOT)
    index.save(8, b"b", ROOT)
    index.take_copies()
    assert index.save(9, b"a", ROOT) is None
    assert index.take_copies() == ([], {})
    assert index.save(9, b"c", ROOT) == b"b"
    assert index.take_copies() == ([BlockCopy(3, 9, 1)], {})


def test_a_pinned_slot_is_kept_for_its_load() -> None:
    """Until the step is planned, and also when its content is forgotten meanwhile."""
    index = OffloadIndex(0, num_slots=1)
    index.save(7, b"a", ROOT)
    index.take_copies()
    index.pin([b"a"])
    index.load(b"a", 5)
    assert index.save(8, b"b", ROOT) == b"b"
    assert index.forget(b"a")
    assert index.save(8, b"b", ROOT) == b"b"
    index.check_integrity()
    assert index.take_copies() == ([], {BlockCopy(0, 5, 0): b"a"})
    assert index.save(8, b"b", ROOT) is None
    index.check_integrity()


def test_what_is_not_pinned_makes_room_before_what_is() -> None:
    """However old that is."""
    index = OffloadIndex(0, num_slots=2)
    index.save(7, b"a", ROOT)
    index.save(8, b"b", ROOT)
    index.take_copies()
    index.pin([b"a"])
    assert index.save(9, b"c", ROOT) == b"b"


def test_a_block_that_was_never_filled_has_nothing_to_save() -> None:
    """Its content is where it was, and its load is not done."""
    index = OffloadIndex(0, num_slots=2)
    index.save(7, b"a", ROOT)
    index.take_copies()
    index.pin([b"a"])
    index.load(b"a", 5)
    assert index.save(5, b"a", ROOT) is None
    assert index.take_copies() == ([], {})
    assert b"a" in index


def test_forgotten_slots_are_used_for_others() -> None:
    """What is not there is not forgotten."""
    index = OffloadIndex(0, num_slots=1)
    assert not index.forget(b"a")
    index.save(7, b"a", ROOT)
    assert index.forget(b"a")
    assert index.save(8, b"b", ROOT) is None
    index.forget_all()
    assert dict(index.stored()) == {}
    assert index.save(9, b"c", ROOT) is None
    assert index.take_copies() == ([BlockCopy(0, 9, 0)], {})


def test_check_integrity_finds_a_slot_that_is_used_twice() -> None:
    """The check sees what it is for."""
    index = OffloadIndex(0, num_slots=2)
    index.save(7, b"a", ROOT)
    index.check_integrity()
    index._slots[b"b"] = 0  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="used twice"):
        index.check_integrity()
