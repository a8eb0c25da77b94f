"""The task tree: who owns whom, what each waits for, which scopes end it."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.server import task_tree as module
from trioengine.server.task_tree import NurseryNode, TaskNode, render_tree, task_tree


def find(node: TaskNode, name: str) -> TaskNode | None:
    if node.name.endswith(name):
        return node
    children = (child for nursery in node.nurseries for child in nursery.tasks)
    return next((found for child in children if (found := find(child, name)) is not None), None)


async def wait_here(event: trio.Event) -> None:
    await event.wait()


async def own_a_nursery(event: trio.Event) -> None:
    with trio.move_on_after(50):
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + 30
            nursery.start_soon(wait_here, event)


async def test_a_task_is_under_its_nursery_with_the_line_it_waits_in(autojump_clock: MockClock) -> None:
    """And the function of Trio's that it has called."""
    event = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(own_a_nursery, event)
        await wait_all_tasks_blocked()
        tree = task_tree()
        event.set()
    owner = find(tree.root, "own_a_nursery")
    assert owner is not None
    (inner,) = owner.nurseries
    (child,) = inner.tasks
    assert isinstance(inner, NurseryNode)
    assert inner.deadline_in_s == pytest.approx(30)
    assert not inner.is_cancelled
    assert child.name.endswith("wait_here")
    line = wait_here.__code__.co_firstlineno + 1
    assert child.waits_in[0].endswith(f".wait_here:{line}")
    assert child.waits_in[-1].startswith("trio.")
    text = render_tree(tree)
    assert f"wait_here:{line}" in text
    assert "nursery of 1, ends in 30.0 s" in text
    assert text.count("\n") >= tree.num_tasks


async def test_a_cancelled_nursery_says_so() -> None:
    """While its tasks still end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        text = render_tree(task_tree())
    assert ", cancelled" in text


async def test_a_task_that_has_not_run_is_there_too() -> None:
    """It waits in nothing yet, or at its first line."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever, name="fresh")
        fresh = find(task_tree().root, "fresh")
        nursery.cancel_scope.cancel()
    assert fresh is not None
    assert fresh.nurseries == ()


async def test_a_huge_tree_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than take as long as it likes."""
    monkeypatch.setattr(module, "MAX_TASKS", 10)
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(trio.sleep_forever)
        await wait_all_tasks_blocked()
        tree = task_tree()
        nursery.cancel_scope.cancel()
    assert tree.is_cut
    assert tree.num_tasks == 10
