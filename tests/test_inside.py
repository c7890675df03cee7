"""Tests reach into the parts of a volume through one module, so that these may change beside one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kvfuse.volume import parts

TESTS = Path(__file__).parent
DOOR = "inside.py"


def members() -> set[str]:
    """What `Parts` has."""
    tree = ast.parse(Path(parts.__file__).read_text())
    (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Parts")
    attributes = (node for node in ast.walk(made) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"}


def reaches(source: str, members: set[str]) -> Iterator[int]:
    """Lines with ``something.parts.member``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name, value=ast.Attribute(attr="parts")) if name in members:
                yield node.lineno


def test_one_module_reaches_into_parts() -> None:
    known = members()
    assert known >= {"core", "journal", "leases", "names"}
    found = {
        path.relative_to(TESTS).as_posix(): lines
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != DOOR and (lines := list(reaches(path.read_text(), known)))
    }
    assert found == {}, f"call tests/labs/{DOOR}"


def test_reaches_are_found() -> None:
    source = "one.parts.core.tier\nPath(x).parts\none.volume.parts.journal.commit()\nbatch.parts(1)\none.parts.other"
    assert sorted(reaches(source, {"core", "journal"})) == [1, 3]
