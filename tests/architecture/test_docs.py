"""What the documents say is true: their programs are the examples that tests run, their commands exist."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from trioengine.cli.main import COMMANDS
from trioengine.cli.parser import CommandParser
from trioengine.config import env

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUM_CASES = 50
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The lines in a page's shell blocks that call us."""
    lines = "".join(blocks(page, "sh")).splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.startswith(("trioengine ", "make "))]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_readme_shows_the_examples_as_they_are(example: Path) -> None:
    """`tests/e2e/test_examples.py` runs them."""
    assert example.read_text() in blocks(ROOT / "README.md", "python")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_in_a_page_is_python_and_its_imports_are_there(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trioengine"):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_in_a_page_are_understood(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        else:
            assert words[1] in COMMANDS
            parser = CommandParser()
            importlib.import_module(f"trioengine.cli.{words[1]}").add_arguments(parser)
            parser.parse(words[2:])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    links = set(re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text()))
    pages = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.md")}
    assert pages - links == set()


def test_every_environment_variable_is_in_the_how_to() -> None:
    names = {value for name, value in vars(env).items() if name.endswith("_VARIABLE")}
    assert names
    assert [name for name in names if f"`{name}`" not in (ROOT / "docs" / "how-to.md").read_text()] == []


def test_every_case_has_tests_that_name_its_report() -> None:
    docstrings: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstrings[f"{path.relative_to(ROOT).as_posix()}::{node.name}"] = ast.get_docstring(node) or ""
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, NUM_CASES + 1))
    for number, reports, tests in rows:
        named = "\n".join(docstrings[test] for test in re.findall(r"`([^`]+)`", tests))
        assert re.search(rf"\b{number}\b", named), number
        assert [report for report in reports.split(", ") if report not in named] == []
