"""kvfuse connectors"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

import click
import numpy as np

import kvfuse.connectors as installed
from kvfuse import __version__
from kvfuse.cli import Failure
from kvfuse.cli.console import note, print_table, say_lines
from kvfuse.cli.mounts import ask_health, kvfuse_mounts, mount_of
from kvfuse.connectors.engine import version_of
from kvfuse.connectors.steady_store import DescriptorMismatch, SteadyStore
from kvfuse.errors import KvfuseError, MountError
from kvfuse.sizes import KIB, MIB, format_size
from kvfuse.usrbio.client.iov import new_memory

OK, ADVICE, FAILED = "ok", "advice", "failed"
NAMESPACE = "user.kvfuse.namespace"
BLOCK_SIZE, BLOCK_COUNT = 64 * KIB, 16
DEADLINE_S = 5.0
LOAD_SECONDS = 120.0
"""some engines take half a minute on a busy machine"""
LOAD_CLASSES = """
import importlib, json, sys
import kvfuse.connectors
kvfuse.connectors.__path__ = sys.argv[2:]
found, module = {}, importlib.import_module(sys.argv[1])
for name in getattr(module, "__all__", ()):
    try:
        getattr(module, name)
        found[name] = ""
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
CHECK_DESCRIPTOR = {"made by": "kvfuse connectors check"}

T = TypeVar("T")


class Config(Protocol):
    """What ``kvfuse.connectors.ENGINE.config`` has."""

    PACKAGE: str
    """the engine's distribution, as its makers call it; vendors' have other names"""
    ENGINE: str
    """its top module, of which the version is asked"""
    VERSIONS: str
    """those that the adapter is for, as people read it"""

    def configuration(self, mount: str, namespace: str) -> str:
        """The flags and JSON for the engine."""

    def check_engine(self) -> list[str]:
        """Advice about the installed engine."""


class Step(NamedTuple):
    """One line of a check."""

    what: str
    state: str
    detail: str


def engine_names() -> list[str]:
    """The engines that this installation has adapters for."""
    packages = {found.name for found in pkgutil.iter_modules(installed.__path__) if found.ispkg}
    folders = map(Path, installed.__path__)
    return sorted(packages & {found.parent.name for folder in folders for found in folder.glob("*/config.py")})


def load_config(name: str) -> Config:
    """Needs no engine. Failure where the adapter itself is broken."""
    try:
        return cast(Config, importlib.import_module(f"{installed.__name__}.{name}.config"))
    except Exception as error:  # it may be somebody else's
        raise Failure(f"the adapter for {name} cannot be loaded: {type(error).__name__}: {error}") from error


class EngineName(click.ParamType[str]):
    """One of the engines; found when it is asked for."""

    name = "engine"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in (names := engine_names()):
            self.fail(f"{value!r} is not one of {', '.join(names) or 'none: there are no adapters'}", param, ctx)
        return value


engine_argument = click.argument("engine", type=EngineName())
mount_argument = click.argument("mount", type=Path, required=False)
namespace_option = click.option(
    "--namespace", metavar="NAME", help="Folder of the mount with the engine's blocks.  [default: the engine's name]"
)


@click.group()
def connectors() -> None:
    """Adapters with which inference engines keep KV blocks in a mount, through rings: no file and no copy a block.

    \b
    From nothing to an engine that uses them:
      kvfuse mount /var/tmp/kv /mnt/kv -o cache,capacity=64GiB
      kvfuse connectors list                    which engines, and which version is installed
      kvfuse connectors config vllm /mnt/kv     the flags to start it with
      kvfuse connectors check vllm /mnt/kv      whether all is there

    Run these in the Python environment of the engine, with kvfuse installed in it. docs/engines-ENGINE.md has more.
    """


@connectors.command(name="list", short_help="Which engines have an adapter, and what is installed.")
def list_command() -> None:
    """Which engines there are adapters for, and what is installed in this Python environment."""
    rows = []
    for name in engine_names():
        module, page = f"{installed.__name__}.{name}", f"docs/engines-{name}.md"
        try:
            config = load_config(name)
            rows.append((name, config.PACKAGE, config.VERSIONS, version_of(config.ENGINE) or "-", module, page))
        except Failure as failure:
            rows.append((name, "-", str(failure), "-", module, page))
    print_table(("engine", "package", "versions", "installed", "module path", "page"), rows)


@connectors.command(name="config", short_help="The flags and JSON that an engine is started with.")
@engine_argument
@mount_argument
@namespace_option
def config_command(engine: str, mount: Path | None, namespace: str | None) -> None:
    """Print the flags and JSON that ENGINE is started with to keep its blocks in MOUNT (the only mount, where none is
    named).

    \b
    Examples:
      kvfuse connectors config vllm
      kvfuse connectors config sglang /mnt/kv --namespace llama-70b
    """
    point = mount.absolute() if mount else _only_mount()
    if mount:
        with suppress(MountError):
            point = mount_of(mount).point
    if not os.path.ismount(point):
        note(f"kvfuse: {point} is not mounted now; the engine goes on without a cache until it is")
    say_lines(load_config(engine).configuration(str(point), namespace or engine).rstrip("\n"))


@connectors.command(short_help="Whether an engine will find what it needs.")
@engine_argument
@mount_argument
@namespace_option
def check(engine: str, mount: Path | None, namespace: str | None) -> None:
    """Look at the versions, the mount and the namespace that ENGINE would use, and move blocks there and back.

    The blocks go to a namespace of their own beside the engine's, which is removed again. Exit status 1 if a step
    failed; advice is no failure.

    \b
    Example:
      kvfuse connectors check lmcache /mnt/kv --namespace llama-70b
    """
    steps = list(_check(engine, mount, namespace or engine))
    print_table(("what", "", ""), steps, f"kvfuse {__version__} for {engine}")
    if failed := [step.what for step in steps if step.state == FAILED]:
        raise Failure(f"{engine} would run without its cache: {', '.join(failed)}")


def _only_mount() -> Path:
    points = sorted({row.point for row in kvfuse_mounts()})
    if len(points) != 1:
        found = f"there are several: {', '.join(map(str, points))}" if points else "there is none"
        raise MountError(f"name a kvfuse mount: {found}")
    return points[0]


# -- the steps ------------------------------------------------------------------------------------------


def _check(engine: str, mount: Path | None, namespace: str) -> Iterator[Step]:
    yield from _check_engine(engine, load_config(engine))
    try:
        point = mount_of(mount).point if mount else _only_mount()
        seconds = ask_health(point)
    except (KvfuseError, OSError) as error:
        yield Step("mount", FAILED, str(error))
        return
    yield Step("mount", OK, f"{point}, answers within {1000 * seconds:.1f} ms")
    yield from _check_namespace(point / namespace)
    yield from _check_round_trip(point, point / namespace)


def _check_engine(engine: str, config: Config) -> Iterator[Step]:
    found = version_of(config.ENGINE)
    if found is None:
        yield Step(config.PACKAGE, ADVICE, f"not installed for {sys.executable}; the adapter is for {config.VERSIONS}")
        return
    yield Step(config.PACKAGE, OK, f"{found}; the adapter is for {config.VERSIONS}")
    for advice in config.check_engine():
        yield Step(config.PACKAGE, ADVICE, advice)
    failures = _load_classes(f"{installed.__name__}.{engine}")
    for name, failure in failures.items():
        if failure:
            yield Step("adapter", ADVICE if "" in failures.values() else FAILED, f"{name}: {failure}")


def _load_classes(module: str) -> dict[str, str]:
    """What an engine would load of the adapter, and why it cannot: in a process of its own, as that may do anything."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOAD_CLASSES, module, *installed.__path__],
            capture_output=True,
            text=True,
            timeout=LOAD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {module: f"it was not loaded within {LOAD_SECONDS:g} s"}
    with suppress(ValueError, IndexError):
        return cast(dict[str, str], json.loads(done.stdout.splitlines()[-1]))
    said = done.stderr.strip().splitlines()
    return {module: f"the process that loaded it ended with {done.returncode}: {said[-1] if said else 'no word'}"}


def _check_namespace(folder: Path) -> Iterator[Step]:
    what = "namespace"
    if not folder.exists():
        yield Step(what, OK, f"{folder} is not there yet: the engine makes it, a cache")
        return
    if not folder.is_dir():
        yield Step(what, FAILED, f"{folder} is not a folder")
        return
    settings = _settings(folder)
    kind = settings.get("kind", "a part of the namespace above")
    capacity = int(settings.get("capacity") or 0)
    room = f", up to {format_size(capacity)}" if capacity else ""
    yield Step(what, OK, f"{folder}, {kind}{room}")
    if kind == "files":
        yield Step(what, ADVICE, "it never loses a block: stores fail when it is full. --kind blocks evicts")
    if descriptor := settings.get("descriptor"):
        yield Step("descriptor", OK, f"{descriptor}: an engine of another model or layout is refused")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield Step(what, FAILED, f"{folder} is not this user's to read and write")


def _settings(folder: Path) -> dict[str, str]:
    """Those that are set; {} where it is no namespace of its own."""
    found = {}
    for name in ("kind", "capacity", "descriptor"):
        with suppress(OSError):
            found[name] = os.getxattr(folder, f"{NAMESPACE}.{name}").decode()
    return found


def _check_round_trip(point: Path, namespace: Path) -> Iterator[Step]:
    what = "round trip"
    try:
        with _own_store(point, namespace) as store:
            if not store.is_up:
                yield Step(what, FAILED, f"no ring: {store.reason}")
                return
            yield from _move(store, what)
    except (DescriptorMismatch, OSError) as error:
        yield Step(what, FAILED, str(error))


@contextmanager
def _own_store(point: Path, namespace: Path) -> Iterator[SteadyStore]:
    """A store of a namespace that is made beside the engine's, and removed."""
    above = next(folder for folder in namespace.parents if folder == point or folder.is_dir())
    folder = above / f".check-{secrets.token_hex(6)}"
    store = SteadyStore(point, str(folder.relative_to(point)), descriptor=CHECK_DESCRIPTOR, deadline=DEADLINE_S)
    try:
        yield store
    finally:
        store.close()
        with suppress(OSError):
            folder.rmdir()


def _move(store: SteadyStore, what: str) -> Iterator[Step]:
    """Blocks there and back, compared."""
    keys = [secrets.token_bytes(16) for _ in range(BLOCK_COUNT)]
    offsets, sizes = [index * BLOCK_SIZE for index in range(BLOCK_COUNT)], [BLOCK_SIZE] * BLOCK_COUNT
    memory, _part = new_memory(BLOCK_COUNT * BLOCK_SIZE)
    region = store.register(memory)
    content = np.frombuffer(os.urandom(len(memory)), np.uint8)
    region.array[:] = content
    stored, put_ms = _timed(lambda: store.put(keys, region, offsets, sizes))
    region.array[:] = 0
    found, ask_ms = _timed(lambda: store.exists(keys))
    got, get_ms = _timed(lambda: store.get(keys, region, offsets, sizes))
    store.delete(keys)
    if not stored.all():
        why = json.dumps(dict(store.counters.failures)) if store.counters.failures else "no room, or not admitted"
        yield Step(what, FAILED, f"{int((~stored).sum())} of {BLOCK_COUNT} blocks were not stored: {why}")
        return
    if not (found.all() and (got == BLOCK_SIZE).all() and np.array_equal(region.array, content)):
        yield Step(what, FAILED, "blocks that were stored did not come back whole")
        return
    size = f"{BLOCK_COUNT} blocks of {format_size(BLOCK_SIZE)}"
    yield Step(what, OK, f"{size}: put {put_ms:.1f} ms, exists {ask_ms:.1f} ms, get {get_ms:.1f} ms, all bytes right")
    if region.iov is None:
        yield Step("memory", ADVICE, "the daemon cannot map memory of this process: blocks are copied once more")
    if (free := _shared_memory_free()) < 64 * MIB:
        yield Step("memory", ADVICE, f"/dev/shm has {format_size(free)} left: host pools of engines live there")


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """The answer, and how many milliseconds it took."""
    start = time.perf_counter()
    answer = call()
    return answer, 1000 * (time.perf_counter() - start)


def _shared_memory_free() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
