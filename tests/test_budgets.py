"""What a house that can be held in a head keeps to: how long functions are, and what only falls (`budgets.toml`)."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import house
import pytest
from house import PACKAGE, sources

BUDGETS = tomllib.loads(Path(__file__).with_name("budgets.toml").read_text())
FUNCTION_LINES = 20
"""of 95 % of all functions, without their docstrings"""
SLACK = 0.02
"""a budget that is larger than what is there by more than this is to be lowered"""
SHARED_TESTS = 4
"""places that ask whether many hosts have the volume. It only falls"""


@pytest.mark.parametrize("name", BUDGETS["counts"])
def test_what_costs_readers_only_falls(name: str) -> None:
    check(name, house.counts()[name], BUDGETS["counts"][name])


def test_every_count_has_a_budget() -> None:
    assert house.counts().keys() == BUDGETS["counts"].keys()


def test_no_room_grows() -> None:
    lines = house.lines_by_room()
    assert lines.keys() == BUDGETS["lines"].keys()
    for room, count in lines.items():
        check(f"lines of {room}", count, BUDGETS["lines"][room])


def check(name: str, found: int, budget: int) -> None:
    assert found <= budget, f"{name}: {found}, and {budget} are allowed: see tests/labs/house.py for what is counted"
    assert found >= budget * (1 - SLACK) - 1, f"{name}: {found} are left of {budget}: lower it in budgets.toml"


def test_what_is_counted() -> None:
    tree = ast.parse("from kvfuse.a import Core\nself.x = 1\none.two.x = 2\none.y += 3\ndef f(): cls.z = one.z")
    assert house.foreign_assignments(tree) == 2
    assert house.uses(tree, "Core")
    assert not house.uses(tree, "core")
    paths = [Path("a/one.py"), Path("b/one.py"), Path("b/two.py")]
    assert house.doubled((path.stem, path) for path in paths) == {"one": ["a/one.py", "b/one.py"]}
    assert [house.room_of(Path(path)) for path in ("a.py", "fs/b.py", "fs/c/d.py", "volume/e.py", "volume/f/g.py")] == [
        ".", "fs", "fs", "volume", "volume/f",
    ]  # fmt: skip


def test_functions_are_short() -> None:
    lengths = sorted(house.lines_of(function) for tree in house.trees().values() for function in house.functions(tree))
    assert lengths[len(lengths) * 95 // 100] <= FUNCTION_LINES


def test_few_places_ask_who_has_the_volume() -> None:
    found = sum(len(re.findall(r"core\.shared\b", text)) for text in sources().values())
    assert found <= SHARED_TESTS
    assert found > SHARED_TESTS - 3, f"{found} are left: lower SHARED_TESTS"


@pytest.mark.parametrize("module", ["volume/parts.py", "volume/volume.py", "volume/running.py"])
def test_parts_are_whole_when_they_are_made(module: str) -> None:
    """Nobody assigns a hook to a part of a volume: what a part calls it is given when it is made."""
    stores = [
        ast.unparse(node)
        for node in ast.walk(ast.parse((PACKAGE / module).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Attribute)
        if not node.value.attr.startswith("_")  # what is its own alone
    ]
    assert stores == []


def test_names_of_test_files_are_unique() -> None:
    """pytest loads one of two, and the tests of the other one do not run."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
