"""The benchmarks: what is compared with what, in which sizes, and what must be reached.

Every benchmark is one function from ``Setting`` to figures. ``docs/benchmarks.md`` says what each one means.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvfuse.errors import KvfuseError
from kvfuse_bench import measures
from kvfuse_bench.daemons import Daemon, Memory, barefs_mount, kvfuse_mount, memory_of
from kvfuse_bench.measures import MIB
from kvfuse_bench.qos import bench_qos
from kvfuse_bench.replay import round_trips
from kvfuse_bench.rounds import Conditions, Figure, Measured, Side, alternate

BLOCK_SIZE = 64 * 1024
SMALL_FILE_SIZE = 4096
COMMIT_DELAY = "commit_delay=0.001"
"""of mount.conf's [records]: every commit takes a millisecond longer, as over a network"""


@dataclass(frozen=True)
class Setting(Conditions):
    """And how many small files."""

    small_file_count: int = 1_000_000

    def count(self, full: int) -> int:
        """``full`` operations, scaled; at least a few."""
        return max(20, int(full * self.scale))

    def stream_size(self) -> int:
        """Bytes of a large file, whole MiB."""
        return max(16, int(1024 * self.scale)) * MIB


@contextlib.contextmanager
def _volume(setting: Setting, name: str, *words: str) -> Iterator[Daemon]:
    """A fresh volume, mounted; gone afterwards."""
    folder = setting.volumes / name
    try:
        with kvfuse_mount(folder / "volume", folder / "mnt", *words) as daemon:
            yield daemon
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _volume_and_bare(setting: Setting) -> Iterator[dict[str, Path]]:
    """Mount points to compare: a fresh volume, and the bare file system."""
    bare = setting.volumes / "barefs"
    with _volume(setting, "volume", "capacity=8GiB") as daemon, barefs_mount(bare):
        yield {"kvfuse": daemon.mountpoint, "barefs": bare}
    bare.rmdir()


def _on_round(measure: Callable[[], float]) -> Side:
    """``measure``, the same in every round."""
    return lambda _round: measure()


def in_fresh_folder(root: Path, measure: Callable[[Path], float]) -> Side:
    """``measure`` on a folder of its own each time; removing it does not count."""
    numbers = itertools.count()

    def side(_round: int) -> float:
        folder = root / f"round-{next(numbers)}"
        folder.mkdir()
        try:
            return measure(folder)
        finally:
            shutil.rmtree(folder)

    return side


def _compare(setting: Setting, sides: dict[str, Side]) -> tuple[Measured, Measured]:
    """The first side and the second, its reference."""
    measured, reference = alternate(sides, setting.round_count)
    return measured, reference


def bench_store(setting: Setting) -> list[Figure]:
    """Temporary name, write, close, rename of 64 KiB blocks, by one process."""
    count = setting.count(4000)
    with _volume_and_bare(setting) as mounts:
        sides = {
            name: in_fresh_folder(path, lambda folder: measures.store_blocks(folder, count, BLOCK_SIZE))
            for name, path in mounts.items()
        }
        figures = _compare(setting, sides)
    return [Figure("store 64 KiB blocks", "blocks/s", *figures, target=2000, ratio_target=0.7)]


def bench_absent(setting: Setting) -> list[Figure]:
    """stat of names that are not there, each asked for once."""
    count = setting.count(20_000)
    with _volume_and_bare(setting) as mounts:
        sides = {
            name: in_fresh_folder(path, lambda folder: measures.ask_absent_names(folder, count))
            for name, path in mounts.items()
        }
        figures = _compare(setting, sides)
    return [Figure("absent names", "names/s", *figures, target=15_000)]


def bench_open_files(setting: Setting) -> list[Figure]:
    """Small files made beside many that are open for writing and were never stored, and beside none."""
    count, open_count = setting.count(4000), setting.count(20_000)
    with _volume(setting, "busy", "capacity=4GiB") as busy, _volume(setting, "idle", "capacity=4GiB") as idle:
        opened = busy.mountpoint / "open"
        opened.mkdir()
        with measures.open_files(opened, open_count):
            sides = {
                name: in_fresh_folder(
                    daemon.mountpoint, lambda path: measures.store_blocks(path, count, SMALL_FILE_SIZE)
                )
                for name, daemon in {"busy": busy, "idle": idle}.items()
            }
            figures = _compare(setting, sides)
    return [Figure(f"store 4 KiB beside {open_count:,} open files", "blocks/s", *figures, ratio_target=0.67)]


def bench_read(setting: Setting) -> list[Figure]:
    """Open, read, close of 64 KiB blocks that were just stored."""
    count = setting.count(4000)
    with _volume_and_bare(setting) as mounts:
        for path in mounts.values():
            measures.store_blocks(path, count, BLOCK_SIZE)
        sides = {
            name: _on_round(partial(measures.read_blocks, path, count, BLOCK_SIZE)) for name, path in mounts.items()
        }
        figures = _compare(setting, sides)
    return [Figure("open, read, close 64 KiB blocks", "blocks/s", *figures, note="warm: the kernel keeps the pages")]


def bench_write_stream(setting: Setting) -> list[Figure]:
    """A large new file in writes of 1 MiB."""
    size = setting.stream_size()
    with _volume(setting, "volume", "capacity=8GiB") as daemon:
        roots = {"kvfuse": daemon.mountpoint, "tmpfs": setting.memory}
        sides = {
            name: in_fresh_folder(path, lambda folder: measures.write_stream(folder / "stream", size))
            for name, path in roots.items()
        }
        figures = _compare(setting, sides)
    return [Figure("1 MiB writes", "GB/s", *figures, target=0.8, note="to the page cache, both; no fsync")]


def bench_read_stream(setting: Setting) -> list[Figure]:
    """A large file in reads of 1 MiB: cold for the mount and its segments in memory, then repeated."""
    size = setting.stream_size()
    with _volume(setting, "volume", "capacity=8GiB") as daemon:
        stream, in_memory = daemon.mountpoint / "stream", setting.memory / "stream"
        measures.write_stream(stream, size)
        measures.write_stream(in_memory, size)

        def cold(_round: int) -> float:
            measures.drop_cached(stream)
            return measures.read_stream(stream)

        warm = {"kvfuse": stream, "tmpfs": in_memory}
        cold_figures = _compare(setting, {"kvfuse": cold, "memcpy": _on_round(partial(measures.copy_memory, size))})
        warm_figures = _compare(
            setting, {name: _on_round(partial(measures.read_stream, path)) for name, path in warm.items()}
        )
        in_memory.unlink()
    note = "the mount's pages dropped before each round; the segment files are in the page cache below it"
    return [
        Figure("1 MiB reads, cold", "GB/s", *cold_figures, target=3.5, note=note),
        Figure(
            "1 MiB reads, repeated", "GB/s", *warm_figures, ratio_target=0.9, note="warm: the kernel keeps the pages"
        ),
    ]


def _trips_per_1000(mountpoint: Path, count: int, store: Callable[[], float]) -> tuple[float, float]:
    """(record round trips per 1,000 blocks, blocks a second) of ``store``, which stores ``count``."""
    before = round_trips(mountpoint)
    rate = store()
    after = round_trips(mountpoint)
    if before is None or after is None:
        raise KvfuseError(f"{mountpoint} has no .kvfuse/stats")
    return 1000 * (after - before) / count, rate


def bench_round_trips(setting: Setting) -> list[Figure]:
    """Record round trips per 1,000 blocks, on a record store whose commits take a millisecond longer."""
    return [*_relaxed_trips(setting), *_strict_trips(setting)]


def _relaxed_trips(setting: Setting) -> list[Figure]:
    """Blocks stored at 2,000 a second into a relaxed volume."""
    count, pace = setting.count(6000), 2000
    trips, rates = Measured("relaxed", []), Measured("blocks/s reached", [])
    with _volume(setting, "relaxed", "capacity=8GiB", "publish=relaxed", COMMIT_DELAY) as daemon:
        for number in range(setting.round_count):
            folder = daemon.mountpoint / f"round-{number}"
            folder.mkdir()
            store = partial(measures.store_blocks_paced, folder, count, BLOCK_SIZE, pace)
            trip, rate = _trips_per_1000(daemon.mountpoint, count, store)
            trips.rounds.append(trip)
            rates.rounds.append(rate)
    note = f"offered {pace} blocks/s; a window of 50 ms makes no fewer than 10 at that pace"
    return [
        Figure("round trips per 1,000 blocks, relaxed", "", trips, rates, target=20, less_is_better=True, note=note)
    ]


def _strict_trips(setting: Setting) -> list[Figure]:
    """Eight writers that each wait for their commits, beside one that waits alone."""
    count = setting.count(2000)
    with _volume(setting, "strict", "capacity=8GiB", "publish=strict", COMMIT_DELAY) as daemon:
        root = daemon.mountpoint

        def with_writers(writer_count: int) -> Side:
            def side(number: int) -> float:
                folder = root / f"writers-{writer_count}-{number}"
                folder.mkdir()
                store = partial(measures.store_blocks_together, folder, count, BLOCK_SIZE, writer_count)
                return _trips_per_1000(root, count, store)[0]

            return side

        figures = _compare(setting, {"8 writers": with_writers(8), "1 writer": with_writers(1)})
    name = "round trips per 1,000 blocks, strict"
    note = "create, close and rename wait for a commit each; eight writers share it"
    return [Figure(name, "", *figures, target=400, less_is_better=True, note=note)]


def bench_small_files(setting: Setting) -> list[Figure]:
    """A million files of 4 KiB: the rate, the daemon's memory, and the time of the next mount."""
    count = setting.small_file_count
    folder = setting.volumes / "many"
    volume, mountpoint = folder / "volume", folder / "mnt"
    bare_rate = _bare_small_files(setting)
    try:
        with kvfuse_mount(volume, mountpoint, "capacity=8GiB") as new:
            empty = memory_of(new.pid)
            rate = measures.make_small_files(
                mountpoint, count, SMALL_FILE_SIZE, lambda done: setting.progress(f"{done:,} of {count:,} files")
            )
            full = memory_of(new.pid)
        with kvfuse_mount(volume, mountpoint) as again:
            start = time.perf_counter()
            if sum(1 for _ in mountpoint.iterdir()) < count // 1000:
                raise KvfuseError(f"{mountpoint}: folders are missing after the remount")
            mount_seconds = again.start_seconds + time.perf_counter() - start
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [
        Figure(f"{count:,} files of 4 KiB", "files/s", _once("kvfuse", rate), _once("barefs", bare_rate)),
        *_memory_figures(empty, full),
        Figure(
            "mount of the full volume", "s", _once("full", mount_seconds), _once("new", new.start_seconds),
            target=3, less_is_better=True, note="interpreter and modules included; the root listed",
        ),
    ]  # fmt: skip


def _bare_small_files(setting: Setting) -> float:
    """Files a second on the bare file system: fewer of them, for it keeps all bytes in memory."""
    bare = setting.volumes / "barefs"
    with barefs_mount(bare):
        count = min(setting.small_file_count, 50_000)
        rate = measures.make_small_files(bare, count, SMALL_FILE_SIZE, lambda done: None)
    bare.rmdir()
    return rate


def _memory_figures(empty: Memory, full: Memory) -> Iterator[Figure]:
    """The daemon's memory after the files, beside what it had on an empty volume."""
    rows = (
        ("resident", full.resident, empty.resident, 300.0),
        ("its own (anonymous)", full.anonymous, empty.anonymous, 300.0),
        ("mapped files", full.file, empty.file, None),
        ("shared", full.shared, empty.shared, None),
        ("proportional", full.proportional, empty.proportional, None),
    )
    for name, size, empty_size, target in rows:
        measured, reference = _once("full", size / 1e6), _once("empty", empty_size / 1e6)
        yield Figure(f"daemon memory, {name}", "MB", measured, reference, target=target, less_is_better=True)


def _once(name: str, value: float) -> Measured:
    """A figure that is too dear for rounds."""
    return Measured(name, [value])


def bench_eviction(setting: Setting) -> list[Figure]:
    """Blocks stored in a full cache, whose evictions go on all the time, and in an empty one: files and puts."""
    return [figure for size in (BLOCK_SIZE, 2 * MIB) for figure in _eviction_of(setting, size)]


def _eviction_of(setting: Setting, size: int) -> Iterator[Figure]:
    capacity = max(256, int(1024 * setting.scale)) * MIB
    words = (f"capacity={capacity}", f"exact_sizes={size}", "cache", "admission=all")
    fill = capacity // size
    count = 3 * fill // 4  # so many that both sides write to about the same pages of their segments, again and again
    with _volume(setting, "full", *words) as full, _volume(setting, "empty", *words) as empty:
        for door, store in {"files": measures.store_blocks, "puts": measures.put_blocks}.items():
            into = partial(_in_filled_folder, store=store, fill=fill, count=count, size=size)
            sides = {
                "full": into(full.mountpoint / door, empties=False),
                "empty": into(empty.mountpoint / door, empties=True),
            }
            name = f"{door} of {size // 1024} KiB while a full cache evicts"
            yield Figure(name, "blocks/s", *_compare(setting, sides), ratio_target=0.85)
            measures.remove_blocks(empty.mountpoint / door)


def _in_filled_folder(
    folder: Path, store: Callable[[Path, int, int, int], float], fill: int, count: int, size: int, *, empties: bool
) -> Side:
    """``count`` more blocks each time, in a folder that had ``fill`` blocks before.

    ``empties``: these are removed first, which does not count. So memory, slabs and segments are as warm in an empty
    volume as in a full one.
    """
    folder.mkdir()
    store(folder, fill, size, 0)
    numbers = itertools.count(fill, count)

    def side(_round: int) -> float:
        if empties:
            measures.remove_blocks(folder)
        return store(folder, count, size, next(numbers))

    return side


BENCHES: dict[str, Callable[[Setting], list[Figure]]] = {
    "store": bench_store,
    "absent": bench_absent,
    "open-files": bench_open_files,
    "read": bench_read,
    "write-stream": bench_write_stream,
    "read-stream": bench_read_stream,
    "round-trips": bench_round_trips,
    "eviction": bench_eviction,
    "qos": bench_qos,
}
LARGE_BENCHES: dict[str, Callable[[Setting], list[Figure]]] = {"small-files": bench_small_files}


@contextlib.contextmanager
def scratch_folders(disk: Path, memory: Path) -> Iterator[tuple[Path, Path]]:
    """Two empty folders below ``disk`` and ``memory``, gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="kvfuse-bench-", dir=disk) as on_disk,
        tempfile.TemporaryDirectory(prefix="kvfuse-bench-", dir=memory) as in_memory,
    ):
        yield Path(on_disk), Path(in_memory)
