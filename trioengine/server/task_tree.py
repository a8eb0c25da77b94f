"""What every task of this Trio run waits for, as data and as text: a debugger that needs no debugger.

It reads names of functions and numbers of lines only, never a value of a variable, so no prompt can show up in it.
"""

import math
from collections.abc import Iterator
from types import FrameType

import attrs
import trio

MAX_WAITING_FRAMES = 4
MAX_TASKS = 20_000


@attrs.frozen
class TaskNode:
    """A task."""

    name: str
    waits_in: tuple[str, ...]
    """The innermost functions, `module.function:line`, the outermost of them first; of Trio's own the first only."""
    nurseries: tuple["NurseryNode", ...]


@attrs.frozen
class NurseryNode:
    """A nursery that a task has opened."""

    deadline_in_s: float | None
    """Seconds until its own cancel scope ends it; None is never."""
    is_cancelled: bool
    tasks: tuple[TaskNode, ...]


@attrs.frozen
class TaskTree:
    """All tasks of this run, from the root task down."""

    num_tasks: int
    is_cut: bool
    """Whether there are so many that some were left out."""
    root: TaskNode


def task_tree() -> TaskTree:
    """The tree at this moment. Does not wait, so it is consistent; takes about 10 µs for each task."""
    root = trio.lowlevel.current_root_task()
    assert root is not None, "inside a Trio run there is a root task"
    walk = _Walk(trio.current_time())
    node = walk.task(root)
    return TaskTree(walk.num_tasks, walk.is_cut, node)


def render_tree(tree: TaskTree) -> str:
    """One line for each task, indented by what owns it."""
    return "\n".join(_task_lines(tree.root, "")) + "\n"


class _Walk:
    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self.num_tasks = 0
        self.is_cut = False

    def task(self, task: trio.lowlevel.Task) -> TaskNode:
        self.num_tasks += 1
        return TaskNode(task.name, _waits_in(task), tuple(map(self._nursery, task.child_nurseries)))

    def _nursery(self, nursery: trio.Nursery) -> NurseryNode:
        scope = nursery.cancel_scope
        is_endless = math.isinf(scope.deadline)
        return NurseryNode(
            deadline_in_s=None if is_endless else round(scope.deadline - self._now_s, 3),
            is_cancelled=scope.cancel_called,
            tasks=tuple(self._children(nursery)),
        )

    def _children(self, nursery: trio.Nursery) -> Iterator[TaskNode]:
        for child in sorted(nursery.child_tasks, key=lambda task: task.name):
            if self.num_tasks >= MAX_TASKS:
                self.is_cut = True
                return
            yield self.task(child)


def _waits_in(task: trio.lowlevel.Task) -> tuple[str, ...]:
    frames = list(task.iter_await_frames())
    num_ours = max((place + 1 for place, (frame, _) in enumerate(frames) if not _is_trios(frame)), default=0)
    shown = [_describe(frame, line) for frame, line in frames[:num_ours] if not _is_trios(frame)][-MAX_WAITING_FRAMES:]
    # And the function of Trio's that it has called, which tells what kind of waiting it is.
    return (*shown, *(_describe(frame, line) for frame, line in frames[num_ours : num_ours + 1]))


def _is_trios(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] == "trio"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _describe(frame: FrameType, line: int) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}:{line}"


def _task_lines(task: TaskNode, indent: str) -> Iterator[str]:
    where = " > ".join(task.waits_in) or "nothing: it has not run yet"
    yield f"{indent}{task.name}  waits in {where}"
    for nursery in task.nurseries:
        state = ", cancelled" if nursery.is_cancelled else ""
        deadline = "" if nursery.deadline_in_s is None else f", ends in {nursery.deadline_in_s} s"
        yield f"{indent}  nursery of {len(nursery.tasks)}{deadline}{state}"
        for child in nursery.tasks:
            yield from _task_lines(child, indent + "    ")
