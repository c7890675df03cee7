"""The file door beside file systems that do less: the work of ``kvfuse bench door``.

Each piece of work runs on each side in turn, in fresh folders: a volume in memory, a file system in C that passes all
on to a directory (``passthrough.c``), one in Python (``barefs``), and a directory itself. What a reference takes is
what libfuse, pyfuse3 and the kernel leave to the mount. Beside each figure stands the processor time of the process
that serves the side.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvfuse.errors import KvfuseError
from kvfuse.sizes import KIB, MIB, format_size
from kvfuse_bench import measures
from kvfuse_bench.daemons import barefs_mount, kvfuse_mount, passthrough_mount
from kvfuse_bench.engines.measuring import Meter, Phase
from kvfuse_bench.qos import NAMESPACE
from kvfuse_bench.rounds import Conditions, Figure, alternate_rows

KVFUSE, PASSTHROUGH, BAREFS, TMPFS = "kvfuse", "C", "pyfuse3", "tmpfs"
KVFUSE_ON_DISK, DISK = "kvfuse on disk", "disk"
PROCESSOR = "daemon us"
"""microseconds of the processor for each operation"""
FILES, BLOCKS = "files", "blocks"
"""an ordinary folder, and one of a namespace of blocks; the references have ordinary ones alone"""
CAPACITY = "capacity=4GiB"
PAGE_SIZE = 2 * MIB
OTHER_FILES = 2000
"""descriptors that other things may take"""


@dataclass(frozen=True)
class DoorSetting(Conditions):
    """And which sides there are."""

    passthrough: Path | None = None
    """the program; None: it cannot be compiled here"""
    on_disk: bool = False
    """also a volume in the folder for volumes, and that folder"""
    words: Sequence[str] = ()
    """mount options of the volumes"""

    def count(self, full: int) -> int:
        """``full`` things, scaled; at least a few."""
        return max(20, int(full * self.scale))


class Place(NamedTuple):
    """One side."""

    root: Path
    daemon: int | None = None
    is_volume: bool = False


class Run(NamedTuple):
    """One round of one side."""

    place: Place
    setting: DoorSetting
    meter: Meter

    def measure(self, name: str, call: Callable[[], object], operations: int, size: int = 0) -> None:
        """One row of the table. ``call`` does so many things, and moves so many bytes where their rate is wanted."""
        with self.meter.phase(name) as phase:
            call()
            phase.add(0.0, size, operations)

    @contextmanager
    def folder(self, kind: str = FILES) -> Iterator[Path]:
        """A new folder, removed afterwards; what is left to do then is done before the next side's turn."""
        root = self.place.root
        folder = Path(tempfile.mkdtemp(dir=root))
        try:
            if kind == BLOCKS and self.place.is_volume:
                os.setxattr(folder, NAMESPACE, b"kind=blocks admission=all")
            yield folder
        finally:
            shutil.rmtree(folder)
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
            os.close(descriptor)


def _store(run: Run) -> None:
    """Temporary name, write, close, rename."""
    for size, full in ((64 * KIB, 2000), (MIB, 200)):
        count = run.setting.count(full)
        for kind in (FILES, BLOCKS):
            with run.folder(kind) as folder:
                name = f"store {format_size(size)}, {kind}"
                run.measure(name, partial(measures.store_blocks, folder, count, size), count)


def _read(run: Run) -> None:
    """Open, read, close; the kernel has the pages, and each file is read for the second time."""
    count, size = run.setting.count(2000), 64 * KIB
    for kind in (FILES, BLOCKS):
        with run.folder(kind) as folder:
            measures.store_blocks(folder, count, size)
            read = partial(measures.read_blocks, folder, count, size)
            read()
            run.measure(f"open, read, close 64KiB, {kind}", read, count)


def _absent(run: Run) -> None:
    count = run.setting.count(10_000)
    for kind in (FILES, BLOCKS):
        with run.folder(kind) as folder:
            run.measure(f"absent names, {kind}", partial(measures.ask_absent_names, folder, count), count)


def _cold(run: Run) -> None:
    """Reads without pages in the mount's cache. Below a mount, and in a directory, all bytes are in memory."""
    count = run.setting.count(200)
    for kind in (FILES, BLOCKS):
        with run.folder(kind) as folder:
            measures.store_blocks(folder, count, MIB)
            for which in ("", " again"):
                for path in measures.block_paths(folder, count) if run.place.daemon is not None else ():
                    measures.drop_cached(Path(path))
                read = partial(measures.read_blocks, folder, count, MIB)
                run.measure(f"read 1MiB cold{which}, {kind}", read, count, count * MIB)


def _pages(run: Run) -> None:
    """What an engine does that keeps a file of 2 MiB for each page of its cache."""
    count = run.setting.count(128)
    data = os.urandom(PAGE_SIZE)
    for kind in (FILES, BLOCKS):
        with run.folder(kind) as folder:
            paths = measures.block_paths(folder, count)
            read = partial(measures.read_blocks, folder, count, PAGE_SIZE)
            run.measure(f"pages 2MiB written, {kind}", partial(_write, paths, data), count, count * PAGE_SIZE)
            run.measure(f"pages 2MiB read, {kind}", read, count, count * PAGE_SIZE)
            run.measure(f"pages 2MiB read again, {kind}", read, count, count * PAGE_SIZE)


def _write(paths: Sequence[str], data: bytes) -> None:
    for path in paths:
        with open(path, "xb", buffering=0) as file:
            if file.write(data) != len(data):
                raise KvfuseError(f"{path} took only a part of a write")


def _names(run: Run) -> None:
    """Empty files in one folder, open files, and a deep tree."""
    # the file system in C has a descriptor for each name that the kernel knows, and one for each open file
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - OTHER_FILES
    count, depth = min(run.setting.count(30_000), files_max), run.setting.count(300)
    open_count = min(run.setting.count(9000), files_max // 2)
    with run.folder() as folder:
        paths = measures.block_paths(folder, count)
        run.measure(f"{count:,} empty files: make", partial(_write, paths, b""), count)
        run.measure(f"{count:,} empty files: list, stat", partial(_list_and_stat, folder, count), count)
        run.measure(f"{count:,} empty files: remove", partial(_remove, paths), count)
    with run.folder() as folder:
        run.measure(f"{open_count:,} files kept open", partial(_keep_open, folder, open_count), open_count)
    with run.folder() as folder:
        top = folder / "deep"
        run.measure("deep tree: make", lambda: os.makedirs(top.joinpath(*["d"] * (depth - 1))), depth)
        run.measure("deep tree: walk", lambda: sum(1 for _ in os.walk(top)), depth)
        run.measure("deep tree: remove", lambda: shutil.rmtree(top), depth)


def _list_and_stat(folder: Path, count: int) -> None:
    with os.scandir(folder) as entries:
        found = sum(entry.stat().st_size == 0 for entry in entries)
    if found != count:
        raise KvfuseError(f"{folder} has {found} names instead of {count}")


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        os.unlink(path)


def _keep_open(folder: Path, count: int) -> None:
    with measures.open_files(folder, count):
        pass


def _tools(run: Run) -> None:
    """A tree of small files by the tools of a shell."""
    count = run.setting.count(3000)
    archive = run.setting.memory / "tree.tar"
    if not archive.exists():
        _make_archive(archive, count)
    with run.folder() as folder:
        tree, git = folder / "tree", ["git", "-C", f"{folder}/tree"]
        for word in ("user.name=bench", "user.email=bench@localhost", "gc.auto=0", "maintenance.auto=false"):
            git += ["-c", word]
        run.measure("small files: tar -x", partial(_call, "tar", "-xf", archive, "-C", folder), count)
        run.measure("small files: find", partial(_call, "find", tree, "-size", "+1"), count)
        run.measure("small files: tar -c", partial(_call, "tar", "-cf", folder / "tar", "-C", folder, "tree"), count)
        if shutil.which("git"):
            _call(*git, "init", "-q")
            run.measure("small files: git add", partial(_call, *git, "add", "-A"), count)
            run.measure("small files: git commit", partial(_call, *git, "commit", "-q", "-m", "all"), count)
            run.measure("small files: git status", partial(_call, *git, "status", "--porcelain"), count)
        run.measure("small files: rm -rf", partial(_call, "rm", "-rf", tree), count)


def _make_archive(archive: Path, count: int) -> None:
    """Of files of 2 KiB, 50 to a folder."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        for index in range(count):
            path = Path(folder) / "tree" / f"{index // 50:04d}" / f"{index:06d}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(2 * KIB))
        _call("tar", "-cf", archive, "-C", folder, "tree")


def _call(*command: str | Path) -> None:
    """KvfuseError where it fails."""
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False)
    if done.returncode != 0:
        raise KvfuseError(f"{' '.join(map(str, command))} failed: {done.stderr.decode(errors='replace').strip()}")


WORKS: dict[str, Callable[[Run], None]] = {
    "store": _store,
    "read": _read,
    "absent": _absent,
    "cold": _cold,
    "pages": _pages,
    "names": _names,
    "tools": _tools,
}
IN_SECONDS = ("names", "tools")
"""works whose rows are seconds instead of rates"""


def bench_door(name: str, setting: DoorSetting) -> list[Figure]:
    """A figure for each row of a piece of work."""

    def side(place_name: str, place: Place, number: int) -> dict[tuple[str, str], float]:
        setting.progress(f"{place_name}, round {number} of {setting.round_count}")
        meter = Meter(place.daemon)
        WORKS[name](Run(place, setting, meter))
        found: dict[tuple[str, str], float] = {}
        for phase in meter.phases:
            found[phase.name, _unit(name, phase)] = _value(name, phase)
            if place.daemon is not None:
                found[phase.name, PROCESSOR] = 1e6 * phase.daemon_seconds / phase.operations
        return found

    with ExitStack() as stack:
        places = _places(setting, stack)
        rows = alternate_rows({key: partial(side, key, place) for key, place in places.items()}, setting.round_count)
    figures = []
    for (row, unit), (ours, *others) in rows.items():
        if unit != PROCESSOR:
            processor = [one._replace(name=f"{one.name}: {PROCESSOR}") for one in rows[row, PROCESSOR]]
            beside = (*others[1:], *processor)
            figures.append(Figure(row, unit, ours, others[0], less_is_better=unit == "s", others=beside))
    return figures


def _unit(name: str, phase: Phase) -> str:
    return "s" if name in IN_SECONDS else "GB/s" if phase.size else "/s"


def _value(name: str, phase: Phase) -> float:
    return phase.seconds if name in IN_SECONDS else (phase.size / 1e9 or phase.operations) / phase.seconds


def _places(setting: DoorSetting, stack: ExitStack) -> dict[str, Place]:
    """The sides, ours first and what it is compared with second: mounts, until ``stack`` ends."""
    memory = setting.memory
    places = {KVFUSE: _mount_volume(memory, setting, stack)}
    if setting.passthrough is not None:
        point = memory / "passthrough"
        daemon = stack.enter_context(passthrough_mount(setting.passthrough, memory / "below", point))
        places[PASSTHROUGH] = Place(point, daemon.pid)
    daemon = stack.enter_context(barefs_mount(memory / "barefs"))
    places[BAREFS] = Place(daemon.mountpoint, daemon.pid)
    places[TMPFS] = _make_directory(memory)
    if setting.on_disk:
        places[KVFUSE_ON_DISK] = _mount_volume(setting.volumes, setting, stack)
        places[DISK] = _make_directory(setting.volumes)
    return places


def _mount_volume(folder: Path, setting: DoorSetting, stack: ExitStack) -> Place:
    mount = kvfuse_mount(folder / "volume", folder / "kvfuse", CAPACITY, *setting.words)
    daemon = stack.enter_context(mount)
    return Place(daemon.mountpoint, daemon.pid, is_volume=True)


def _make_directory(folder: Path) -> Place:
    directory = folder / "directory"
    directory.mkdir()
    return Place(directory)
