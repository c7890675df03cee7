"""What a house that can be held in a head keeps to: sizes of modules, classes and functions, and what only falls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfuse

PACKAGE = Path(kvfuse.__file__).parent
MODULE_LINES = 500
METHODS = 25
ATTRIBUTES = 15
FUNCTION_LINES = 20
"""of 95 % of all functions, without their docstrings"""
SHARED_TESTS = 4
"""places that ask whether many hosts have the volume. It only falls"""
EXCEPTIONS = {
    "fs.ops.KvfuseOperations": "one method for each request of the kernel, as pyfuse3 wants them",
    "volume.inodes.node.Node": "the record of one inode in memory: its fields, and the state of each that is pending",
    "slab.allocator.Allocator": "the life of a slot is one state machine, with one table",
}
"""classes that may have more methods or attributes, and why: at most 5"""


def sources() -> dict[Path, str]:
    return {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the docstring."""
    length = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return length - ((first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0)


class Members:
    """Of the classes of this project, by module and name ("volume.inodes.node.Node"), with what they inherit."""

    def __init__(self, texts: dict[Path, str]) -> None:
        trees = {".".join(path.with_suffix("").parts): ast.parse(text) for path, text in texts.items()}
        self.classes = {
            f"{module}.{node.name}": node
            for module, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }
        self._imported = {
            (module, alias.asname or alias.name): f"{node.module}.{alias.name}".removeprefix("kvfuse.")
            for module, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def of(self, name: str) -> tuple[set[str], set[str]]:
        """(methods, attributes that methods set or the class declares)"""
        node = self.classes[name]
        methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
        attributes = {
            item.attr
            for item in ast.walk(node)
            if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self"
        }
        for base in node.bases:
            inherited = self._resolve(name.rpartition(".")[0], ast.unparse(base).split("[")[0])
            if inherited in self.classes and inherited != name:
                more_methods, more_attributes = self.of(inherited)
                methods |= more_methods
                attributes |= more_attributes
        return methods, attributes

    def _resolve(self, module: str, base: str) -> str:
        """The class that ``base``, "Name" or "module.Name", means in a module; may be one of another project."""
        owner, _, name = base.rpartition(".")
        if owner:
            return f"{self._imported.get((module, owner), owner)}.{name}"
        own = f"{module}.{name}"
        return own if own in self.classes else self._imported.get((module, name), name)


def test_modules_fit_on_a_few_screens() -> None:
    large = {str(path): text.count("\n") for path, text in sources().items() if text.count("\n") > MODULE_LINES}
    assert large == {}


def test_classes_are_small() -> None:
    members = Members(sources())
    large = {}
    for name in members.classes:
        methods, attributes = map(len, members.of(name))
        if methods > METHODS or attributes > ATTRIBUTES:
            large[name] = (methods, attributes)
    assert {name: size for name, size in large.items() if name not in EXCEPTIONS} == {}
    assert large.keys() >= EXCEPTIONS.keys()
    assert len(EXCEPTIONS) <= 5


def test_classes_of_one_name_are_told_apart() -> None:
    members = Members(
        {
            Path("a/one.py"): "class Node:\n    def f(self): self.x = 1",
            Path("b/two.py"): "from kvfuse.a import one\nfrom kvfuse.a.one import Node as Other\n"
            "class Node(Other):\n    def g(self): self.y = 1\nclass Leaf(Node): ...\nclass Far(one.Node): ...",
        }
    )
    assert members.of("a.one.Node") == ({"f"}, {"x"})
    assert members.of("b.two.Node") == members.of("b.two.Leaf") == ({"f", "g"}, {"x", "y"})
    assert members.of("b.two.Far") == ({"f"}, {"x"})


def test_functions_are_short() -> None:
    lengths = sorted(lines_of(function) for text in sources().values() for function in functions(ast.parse(text)))
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
