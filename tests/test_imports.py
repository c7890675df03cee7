"""Imports point one way: cli -> (fs -> holder | usrbio | metrics | peer) -> volume -> (slab | policy | remote) -> kept,
native; no circles."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfuse
from kvfuse.cli import COMMANDS
from kvfuse.volume.api import BlockApi, FileApi, InodeApi, RingApi

PACKAGE = Path(kvfuse.__file__).parent
ROOT = PACKAGE.parent

BASE = {"errors", "checksum", "sizes", "keys", "touchpage", "kept", "failing", "serving", "traceparent"}
DOOR = BASE | {"native", "options", "errnos", "machine_memory", "mounttable", "credentials", "volume"}

ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "errnos": {"errors"},
    "sizes": set(),
    "keys": set(),
    "machine_memory": set(),
    "touchpage": set(),
    "failing": {"errors"},
    "serving": set(),
    "traceparent": set(),
    "native": {"checksum"},
    "kept": set(),
    "mounttable": set(),
    "checksum": {"errors"},
    "credentials": set(),
    "options": {"errors", "sizes"},
    "slab": BASE,
    "policy": {"errors"},
    "remote": BASE | {"native", "options"},
    "volume": BASE | {"native", "options", "machine_memory", "mounttable", "credentials", "slab", "remote", "policy"},
    "holder": {"errors", "mounttable", "kept"},
    "fs": DOOR | {"holder"},
    "usrbio": DOOR,
    "metrics": {"errors", "options", "volume.api"},
    "peer": DOOR,
    "target": DOOR | {"remote"},
    "connectors": BASE | {"usrbio.client"},
    "cli": DOOR | {"fs", "holder", "usrbio", "metrics", "peer", "target", "connectors", "slab", "remote", "policy"},
}
"""room -> what it may import of this package, beside itself and the version in kvfuse/__init__.py"""

BESIDE: dict[str, tuple[str, set[str]]] = {
    "kvfuse_cluster": ("tools/cluster", {"kvfuse.cli", "kvfuse.errors", "kvfuse.sizes"}),
    "kvfuse_bench": (
        "benchmarks",
        {"kvfuse_cluster", "kvfuse.cli", "kvfuse.errors", "kvfuse.sizes", "kvfuse.policy", "kvfuse.connectors"}
        | {"kvfuse.usrbio.client", "kvfuse.usrbio.hf3fs"}
        | {"kvfuse.native", "kvfuse.options", "kvfuse.volume"},  # of hosts without mounts: `scale`
    ),
    "kvfuse_kubernetes": (
        "kubernetes",
        {"kvfuse.cli", "kvfuse.errors", "kvfuse.sizes", "kvfuse.mounttable", "kvfuse.options"},
    ),
}
"""package beside kvfuse, which imports none -> (its folder, what it may import of this project beside itself)"""

OF_ENGINES = {"lmcache", "sglang", "torch", "ucm", "vllm"}
"""what adapters import, in the environments of their engines"""

INNER: dict[str, list[set[str]]] = {
    "volume": [
        *[{"views"}, {"measures"}, {"tier"}, {"api"}, {"store"}, {"disk"}, {"namespaces"}, {"inodes"}],
        *[{"slots"}, {"commit"}, {"content"}, {"names"}, {"blocks"}, {"tenancy"}, {"hosts"}],
        *[{"opening"}, {"check"}, {"parts"}, {"operations", "restored_files"}, {"volume"}, {"running"}],
    ],
    "usrbio": [{"protocol"}, {"client", "daemon"}, {"hf3fs"}],
    "remote": [{"libc", "faults"}, {"mapguard"}, {"records", "segments"}, {"index"}],
}
"""room -> its rooms from the bottom up: each may import itself and those before it, not those beside it"""

OUTSIDE: dict[str, set[str]] = {
    "pyfuse3": {"fs", "cli.mount"},
    "lmdb": {"remote.records"},
    "hpack": {"remote.records"},
    "h11": {"metrics"},
    "prometheus_client": {"metrics"},
    "pyverbs": {"peer"},
    "hiredis": {"remote.index"},
    "rados": {"remote.segments"},
    "cuda": {"usrbio.client.gpu.cuda"},
    "click": {"cli"},
    "rich": {"cli"},
    "zstandard": {"volume.store.codec"},
    "opentelemetry": {"cli.tracing"},
}
"""package of others -> the only places that may import it"""

BESIDE_HOLDER = {"child", "held", "pace", "pulse", "rights", "signals", "status_socket", "store", "things"}
"""what `holder.main`, a program without the package, finds in its own folder"""

MODULES_OF = {
    "cuda-bindings": "cuda",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
"""package -> what it is imported as, where that is another name"""

OF_DAEMONS = {"daemon_side", "guarding", "mounting_apart", "takeover"}
"""modules of `holder` that daemons import; the others need no package"""

CONTRACT = {"volume.api", "volume.views", "volume.measures", "volume.tier"}
"""what the rings' door may import of the volume"""

PURE = {"trio", "os", "time", "datetime", "threading", "asyncio", "socket", "random", "pathlib"}
"""what slab and policy, which are synchronous and have no I/O and no clock, do without"""


def imported_names(source: str, module: str) -> Iterator[str]:
    """Every module a source may import, wherever in it: "a.b" for `import a.b`, "a.b.c" for `from a.b import c`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_within(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def points_down(place: str, imported: str) -> bool:
    """Within one room, both as "volume.commit.journal"."""
    room, own, *_ = place.split(".")
    floor = imported.split(".")[1]
    below = [inner for floors in INNER[room] for inner in floors] if own == "__init__" else [own]
    for floors in INNER[room]:
        if own in floors:
            break
        below += floors
    return floor in below


def find_circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, through whatever others, also for their types alone."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    circles = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for other in edges.get(module, ()):
            if other not in order:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            start = path.index(module)
            circle = path[start:]
            del path[start:]
            if len(circle) > 1:
                circles.append(sorted(circle))

    for module in edges:
        if module not in order:
            visit(module)
    return circles


def import_edges() -> dict[str, set[str]]:
    """Module of this package -> those that it imports."""
    sources = {name.removesuffix(".__init__"): path.read_text() for name, path in modules()}
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        for name in imported_names(source, module):
            target = name if name in sources else name.rpartition(".")[0]
            if target in sources and target not in (module, "kvfuse"):
                edges.setdefault(module, set()).add(target)
    return edges


def violations(source: str, module: str) -> list[str]:
    """What ``module`` ("kvfuse.fs.ops") imports against the table."""
    place = module.removeprefix("kvfuse.")
    room = place.split(".")[0]
    found = []
    for name in imported_names(source, module):
        inner = name.removeprefix("kvfuse.")
        top = name.split(".")[0]
        if name.startswith("kvfuse.") and inner != "__version__" and not is_within(inner, ROOMS[room] | {room}):
            found.append(f"{module} imports {name}")
        if inner.startswith(room + ".") and room in INNER and not points_down(place, inner):
            found.append(f"{module} imports {name}, which is above it, or beside it")
        if top in OUTSIDE and not is_within(place, OUTSIDE[top]):
            found.append(f"{module} imports {name}")
        if room == "usrbio" and inner.startswith("volume.") and not is_within(inner, CONTRACT):
            found.append(f"{module} imports {name}, which is no part of the volume's contract")
        if room in ("slab", "policy") and top in PURE:
            found.append(f"{module} imports {name}, but {room} is pure")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["kvfuse", *path.relative_to(PACKAGE).with_suffix("").parts]
        yield ".".join(parts), path


def test_imports_point_one_way() -> None:
    found = [
        line for name, path in modules() if name != "kvfuse.__init__" for line in violations(path.read_text(), name)
    ]
    assert found == []


def test_the_holder_uses_the_standard_library_alone() -> None:
    """It is started as ``python -I -S``, and survives the removal of its package's dependencies."""
    found = [
        f"{name} imports {imported}"
        for name, path in modules()
        if name.startswith("kvfuse.holder.") and name.rpartition(".")[2] not in OF_DAEMONS
        for imported in imported_names(path.read_text(), name)
        if imported.split(".")[0] not in sys.stdlib_module_names | BESIDE_HOLDER
        and not imported.startswith("kvfuse.holder.")
    ]
    assert found == []


def test_rings_reach_into_no_inner_part_of_a_volume() -> None:
    """Of a handle they have what `api.Handle` has: its ``node`` is the volume's own."""
    parts = {"": RingApi, "files.": FileApi, "inodes.": InodeApi, "blocks.": BlockApi}
    contract = {
        f"{part}{name}"
        for part, api in parts.items()
        for one in api.__mro__
        for name in (*vars(one), *vars(one).get("__annotations__", ()))
    }
    assert {"files.open", "files.show", "blocks.put", "tier"} <= contract
    found = [
        f"{name}: {reach}"
        for name, path in modules()
        if name.startswith("kvfuse.usrbio.")
        for reach in re.findall(
            r"\bvolume\.(?:(?:files|inodes|blocks)\.)?\w+|\.node\b|\.core\b",
            re.sub("import .*|from .*", "", path.read_text()),
        )
        if reach.removeprefix("volume.") not in contract
    ]
    assert found == []


def test_no_modules_import_each_other() -> None:
    assert find_circles(import_edges()) == []


def test_a_circle_is_found() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}}) == [["b", "c"]]
    assert find_circles({"a": {"b"}, "b": {"c", "d"}, "c": {"d"}}) == []


@pytest.mark.parametrize("package", BESIDE)
def test_packages_beside_import_what_they_may(package: str) -> None:
    folder, allowed = BESIDE[package]
    sources = sorted((ROOT / folder / package).rglob("*.py"))
    if not sources:
        pytest.skip("not run from a source tree")
    found = [
        f"{path.name} imports {name}"
        for path in sources
        for name in imported_names(path.read_text(), package)
        if name.split(".")[0] in {"kvfuse", *BESIDE}
        and name != "kvfuse.__version__"
        and not is_within(name, allowed | {package})
    ]
    assert found == []


def test_kvfuse_imports_no_package_beside_it() -> None:
    """Also of a command, which is found by its entry point."""
    found = [f"{name} has {package}" for name, path in modules() for package in BESIDE if package in path.read_text()]
    assert found == []


@pytest.mark.parametrize("package", BESIDE)
def test_packages_beside_are_of_this_version(package: str) -> None:
    project = ROOT / BESIDE[package][0] / "pyproject.toml"
    if not project.exists():
        pytest.skip("not run from a source tree")
    table = tomllib.loads(project.read_text())["project"]
    assert f"kvfuse=={kvfuse.__version__}" in table["dependencies"]
    brought = table.get("entry-points", {}).get("kvfuse.commands", {})
    assert brought.keys() <= COMMANDS.keys()


def test_what_is_imported_is_declared() -> None:
    project = ROOT / "pyproject.toml"
    if not project.exists():
        pytest.skip("not run from a source tree")
    table = tomllib.loads(project.read_text())["project"]
    optional = table["optional-dependencies"]
    lines = table["dependencies"] + optional["gpu"] + optional["redis"] + optional["traces"]
    declared = {MODULES_OF.get(name := re.split("[<>=]", line)[0], name) for line in lines}
    imported = {
        name.split(".")[0]
        for module, path in modules()
        for name in imported_names(path.read_text(), module)
        if not (module.startswith("kvfuse.connectors.") and name.split(".")[0] in OF_ENGINES)
    }
    assert {
        name.replace("_", "-") for name in imported - sys.stdlib_module_names - {"kvfuse"} - BESIDE_HOLDER
    } == declared


def test_every_room_is_in_the_table() -> None:
    rooms = {name.split(".")[1] for name, _ in modules()} - {"__init__"}
    assert rooms <= ROOMS.keys()


def test_the_package_itself_imports_nothing_of_its_rooms() -> None:
    assert list(imported_names((PACKAGE / "__init__.py").read_text(), "kvfuse.__init__")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvfuse.slab.pool", "from kvfuse.remote import libc"),
        ("kvfuse.remote.records.lmdb.store", "import kvfuse.slab.layout"),
        ("kvfuse.volume.inodes.core", "from kvfuse.fs import ops"),
        ("kvfuse.volume.inodes.core", "from kvfuse.cli import main"),
        ("kvfuse.fs.ops", "from kvfuse.slab import layout"),
        ("kvfuse.fs.ops", "from ..slab import layout"),
        ("kvfuse.fs.ops", "def f():\n    from kvfuse.usrbio.protocol import queues"),
        ("kvfuse.connectors.vllm", "from kvfuse.usrbio.daemon import listener"),
        ("kvfuse.volume.inodes.core", "from kvfuse.volume.commit.journal import Journal"),
        ("kvfuse.volume.api", "from kvfuse.volume.store import schema"),
        ("kvfuse.volume.views.news", "from kvfuse.volume.tier.shared_tier import SharedTier"),
        ("kvfuse.volume.names.changes", "from kvfuse.volume.blocks.blocks import Blocks"),
        ("kvfuse.holder.takeover", "from kvfuse.fs import mount"),
        ("kvfuse.kept.log", "from kvfuse.volume.inodes.node import Node"),
        ("kvfuse.volume.hosts.coherence", "from kvfuse.volume.volume import Volume"),
        ("kvfuse.usrbio.client.ring", "from kvfuse.usrbio.daemon.limits import Limits"),
        ("kvfuse.usrbio.daemon.limits", "from kvfuse.volume.volume import Volume"),
        ("kvfuse.usrbio.daemon.limits", "from kvfuse.volume.blocks.blocks import Blocks"),
        ("kvfuse.volume.inodes.core", "import pyfuse3"),
        ("kvfuse.volume.inodes.core", "from lmdb import Environment"),
        ("kvfuse.cli.umount", "import pyfuse3.asyncio"),
        ("kvfuse.slab.pool", "import trio"),
        ("kvfuse.slab.pool", "from time import monotonic"),
        ("kvfuse.policy.books", "from time import monotonic"),
        ("kvfuse.policy.books", "from kvfuse.slab import layout"),
        ("kvfuse.errors", "from kvfuse.options.config import load"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvfuse.connectors.vllm", "from kvfuse.usrbio.client import Client"),
        ("kvfuse.fs.ops", "import pyfuse3\nfrom . import virtual\nfrom ..volume.api import FileApi"),
        ("kvfuse.cli.version", "from kvfuse import __version__\nimport kvfuse"),
        ("kvfuse.slab.pool", "import numpy\nfrom kvfuse.errors import NoSpace"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert violations(source, module) == []
