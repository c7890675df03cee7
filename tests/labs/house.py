"""What the house costs its readers, measured on the sources: `test_budgets` compares it with budgets.

``python tests/labs/house.py`` prints it as budgets.toml has it.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from places import ROOT

PACKAGE = ROOT / "kvfuse"
OWN = ("self", "cls")
NAMED_ALIKE = ("__init__", "__main__")
"""stems that Python gives"""


@cache
def sources() -> dict[Path, str]:
    """Path below the package -> text."""
    return {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


def doubled(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Names with more than one place -> the places."""
    places = defaultdict(list)
    for name, path in names:
        places[name].append(str(path))
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def stems() -> Iterator[tuple[str, Path]]:
    return ((path.stem, path) for path in sources() if path.stem not in NAMED_ALIKE)


def classes() -> Iterator[tuple[str, Path]]:
    return (
        (node.name, path) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )


def foreign_assignments(tree: ast.AST) -> int:
    """How often a method or function sets a field of another object than its own."""
    return sum(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id in OWN)
        for node in ast.walk(tree)
    )


def uses(tree: ast.AST, name: str) -> bool:
    """Whether a module imports ``name``."""
    return any(
        alias.name == name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    )


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the docstring."""
    length = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return length - ((first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0)


def room_of(path: Path) -> str:
    """The room of a file of the package: its first folder, two for a room of a volume; "." for what is in none."""
    folders = path.parts[:-1]
    return "/".join(folders[: 2 if folders[:1] == ("volume",) else 1]) or "."


def lines_by_room() -> Counter[str]:
    """Lines of Python and C."""
    found: Counter[str] = Counter()
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.c")]:
        found[room_of(path.relative_to(PACKAGE))] += path.read_text().count("\n")
    return found


def counts() -> dict[str, int]:
    """What `test_budgets` compares with ``[counts]`` of budgets.toml."""
    return {
        "doubled_stems": len(doubled(stems())),
        "doubled_classes": len(doubled(classes())),
        "foreign_assignments": sum(map(foreign_assignments, trees().values())),
        "core_users": sum(uses(tree, "Core") for tree in trees().values()),
        "product_lines": lines_by_room().total(),
    }


if __name__ == "__main__":
    print("[counts]", *(f"{name} = {count}" for name, count in counts().items()), sep="\n")
    print("\n[lines]", *(f'"{room}" = {count}' for room, count in sorted(lines_by_room().items())), sep="\n")
