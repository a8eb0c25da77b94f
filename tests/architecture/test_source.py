"""Rules about the source itself: who may use what, that public names say what they promise, that tests test."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def parsed(*folders: str) -> dict[str, ast.Module]:
    """Every Python file below these folders, by its path from the root."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


SOURCES = parsed("trioengine", "kernels/trioengine_kernels")
TESTS = parsed("tests")

ASYNCIO_HOMES = {
    "trioengine/aio/portal.py": "the way between a Trio run and an asyncio loop",
    "trioengine/aio/engine.py": "the engine for asyncio applications",
}
THREAD_HOMES = {
    "kernels/trioengine_kernels/native/library.py": "a lock: two threads may pack weights",
    "trioengine/aio/portal.py": "the thread of the Trio run beside an asyncio loop",
    "trioengine/client/interrupts.py": "a lock: threads that share a blocking engine take turns",
    "trioengine/core/background.py": "adapters are read, and new weights made, beside a core's blocking loop",
    "trioengine/core/structured/compiler.py": "grammars are compiled beside a core's blocking loop",
    "trioengine/observability/tracing.py": "OpenTelemetry's shutdown has no limit of time, so a thread waits for it",
    "trioengine/runtime/core_process.py": "the thread beside a core's blocking loop, which ends it with its parent",
    "trioengine/worker/executor.py": "the thread in which an asynchronous executor computes",
}
SIGNAL_HOMES = {
    "trioengine/cli/main.py": "Ctrl-C before anything runs",
    "trioengine/cli/process.py": "commands own their process",
    "trioengine/cli/chat.py": "Ctrl-C stops an answer",
    "trioengine/client/interrupts.py": "Ctrl-C waits, during blocking calls, until it can be handed to its owner",
    "trioengine/runtime/core_process.py": "a core leaves Ctrl-C to its parent",
    "trioengine/testing/scripted_core.py": "a core that hears no signal but the last",
}
ENVIRONMENT_HOMES = {
    "trioengine/config/env.py": "the one module that reads the environment",
    "trioengine/checkpoint/locate.py": "hands it on to pip",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def imported(tree: ast.AST) -> set[str]:
    """The top-level packages that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


def public_names(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | Function]]:
    for node in body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_names(node.body, f"{prefix}{node.name}.")


def is_stub(node: ast.ClassDef | Function) -> bool:
    """A method of a protocol whose class says it all."""
    return len(node.body) == 1 and ast.unparse(node.body[0]) == "..."


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def asserts(node: ast.AST, helpers: set[str]) -> bool:
    """Whether a function asserts, expects an error (or a browser's `expect`), sets a deadline, or calls one of its
    file's functions that does."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assert | ast.Raise):
            return True
        if isinstance(part, ast.Call):
            name = ast.unparse(part.func).rpartition(".")[2]
            if name in helpers or name.startswith(("assert", "check_", "raises", "fail_after", "expect")):
                return True
    return False


def test_there_is_source_to_look_at() -> None:
    assert len(SOURCES) > 50
    assert len(TESTS) > 20


def test_concurrency_is_trios() -> None:
    forbidden = {"asyncio", "anyio", "multiprocessing", "concurrent"}
    assert {path for path, tree in SOURCES.items() if imported(tree) & forbidden} == set(ASYNCIO_HOMES)
    assert {path for path, tree in SOURCES.items() if "threading" in imported(tree)} <= set(THREAD_HOMES)


def test_only_commands_and_cores_take_signals() -> None:
    """An engine or a server that is embedded installs no handler: signals are the application's."""

    def takes(tree: ast.AST) -> bool:
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        return not calls.isdisjoint({"signal.signal", "trio.open_signal_receiver"})

    assert {path for path, tree in SOURCES.items() if takes(tree)} == set(SIGNAL_HOMES)


def test_one_module_reads_the_environment() -> None:
    def reads(tree: ast.AST) -> bool:
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        return not attributes.isdisjoint({"environ", "environb", "getenv", "putenv"})

    assert {path for path, tree in SOURCES.items() if reads(tree)} <= set(ENVIRONMENT_HOMES)


def test_every_module_says_what_it_does() -> None:
    assert [path for path, tree in SOURCES.items() if tree.body and not ast.get_docstring(tree)] == []


def test_public_names_say_what_they_promise() -> None:
    undocumented = [
        f"{path}: {name}"
        for path, tree in SOURCES.items()
        for name, node in public_names(tree.body)
        # A fake's methods promise what the real one's do.
        if not (ast.get_docstring(node) or is_stub(node) or (path.startswith("trioengine/testing/") and "." in name))
    ]
    assert undocumented == []


def test_tests_do_not_sleep_to_wait() -> None:
    """`time.sleep` guesses how long something takes: slow when right, flaky when wrong."""

    def sleeps(tree: ast.AST) -> bool:
        return any(ast.unparse(node.func) == "time.sleep" for node in ast.walk(tree) if isinstance(node, ast.Call))

    assert [path for path, tree in TESTS.items() if sleeps(tree)] == []


def test_every_test_asserts() -> None:
    idle: list[str] = []
    for path, tree in TESTS.items():
        helpers = {function.name for function in functions(tree) if asserts(function, set())}
        tests = [function for function in functions(tree) if function.name.startswith("test_")]
        idle += [f"{path}: {test.name}" for test in tests if not asserts(test, helpers)]
    assert idle == []


def test_the_folder_of_the_kernels_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
