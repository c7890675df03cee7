"""Pages for developers name files, functions and rooms that exist, and ARCHITECTURE stays short."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
INTERNALS = ROOT / "docs" / "internals"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PAGES = [ARCHITECTURE, ROOT / "README.md", *sorted(INTERNALS.rglob("*.md"))]
ARCHITECTURE_BYTES = 12_288
ROOTS = "kvfuse|tests|docs|scripts|benchmarks|tools"
WORD_KEYS = {"word", "meaning", "field", "room"}


def paths_of(text: str) -> set[str]:
    """Paths below the root that stand in backticks, also as words of commands."""
    words = [word for span in re.findall(r"`([^`\n]+)`", text) for word in re.split(r"[\s,]+", span)]
    return {word for word in words if re.fullmatch(rf"({ROOTS})/[\w./-]+", word)}


def steps_of(text: str) -> list[tuple[str, str]]:
    """(file below kvfuse/, class or function) of walks: lines "fs/ops.py  Class.function, function" of a block."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    rows = [re.match(r"(\S+\.py)\s+([\w.]+(?:, [\w.]+)*)", line) for block in blocks for line in block.splitlines()]
    return [(row[1], name) for row in rows if row is not None for name in row[2].split(", ")]


def definitions(source: str) -> set[str]:
    """Classes, functions, and methods as "Class.function"."""
    found = set[str]()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
            inner = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            found.update(f"{node.name}.{one.name}" for one in inner)
    return found


def words() -> list[dict[str, Any]]:
    return list(tomllib.loads((INTERNALS / "words.toml").read_text())["word"])


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_paths_exist(page: Path) -> None:
    assert sorted(path for path in paths_of(page.read_text()) if not (ROOT / path).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_architecture_is_short() -> None:
    assert len(ARCHITECTURE.read_bytes()) <= ARCHITECTURE_BYTES


def test_functions_of_walks_exist() -> None:
    steps = steps_of(ARCHITECTURE.read_text())
    assert len(steps) > 50
    missing = [
        f"{name} in {path}"
        for path, name in steps
        if not (ROOT / "kvfuse" / path).exists() or name not in definitions((ROOT / "kvfuse" / path).read_text())
    ]
    assert missing == []


def test_every_decision_is_in_the_index() -> None:
    index = (INTERNALS / "decisions" / "README.md").read_text()
    pages = {page.name for page in (INTERNALS / "decisions").glob("[0-9]*.md")}
    assert set(re.findall(r"\]\((\d{3}-[^)]+\.md)\)", index)) == pages


def test_words_stand_once() -> None:
    found = words()
    assert [row for row in found if row.keys() != WORD_KEYS or not all(row.values())] == []
    assert [word for word, count in Counter(row["word"] for row in found).items() if count > 1] == []


def test_rooms_of_words_exist() -> None:
    rooms = {row["room"] for row in words()}
    assert [room for room in rooms if not (ROOT / "kvfuse" / room).is_dir()] == []


def test_a_missing_path_is_found() -> None:
    found = paths_of("`kvfuse/a.py`, `scripts/test tests/b`, `x/kvfuse/c.py`")
    assert found == {"kvfuse/a.py", "scripts/test", "tests/b"}
    assert steps_of("```\nfs/a.py   A.b, c   text\n```\n") == [("fs/a.py", "A.b"), ("fs/a.py", "c")]
    assert definitions("class A:\n    def b(self): pass\nasync def c(): pass") == {"A", "A.b", "c"}
