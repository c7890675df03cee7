"""The ring benchmarks: a client in this process, the daemon in another, beside what else moves bytes on this machine.

Each is one function from ``RingSetting`` to figures. ``docs/benchmarks.md`` says what each one means.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from kvfuse.sizes import KIB, MIB
from kvfuse_bench.batches import LISTS, Cell, Timing, compare
from kvfuse_bench.daemons import cpu_seconds_of, fresh_volume
from kvfuse_bench.mooncake import Mooncake, mooncake_store
from kvfuse_bench.references import Bytes, file_reads, file_writes, memcpy, memory_file
from kvfuse_bench.ringwork import KEYS_PER_CALL, OPERATIONS, Session, Work, connect_when_open, ring_session
from kvfuse_bench.rounds import Conditions, Figure, Side, alternate
from kvfuse_bench.timing import Batch, time_batches

SECONDS = 0.25
"""of one operation in one round"""
IDLE_RINGS = 32
IDLE_SECONDS = 10.0
IDLE_SECONDS_MIN = 0.2
MOONCAKE_SEGMENTS = 4
"""size of Mooncake's segment in sets: it holds one set, what a round puts, and never has to evict"""

RATIO_TARGETS = {
    Cell("read", MIB, 8): 0.7,
    Cell("read", 4 * MIB, 8): 0.7,
    Cell("get", MIB, 8): 0.7,
    Cell("get", 4 * MIB, 8): 0.7,
    Cell("put", MIB, 8): 0.4,
    Cell("put", 4 * MIB, 8): 0.4,
}
"""of memcpy in the same rounds"""
TARGETS = {Cell("read", 4 * KIB, 256): 400_000.0, Cell("view", 4 * MIB, 8): 30.0}
NOTES = {
    "write": "in place, over bytes that are there",
    "view": "mapped, its first byte read, given back; memcpy: what a copy would take",
    "put": "new blocks, bursts of 128 MiB; written through and removed between the rounds",
}
MOONCAKE_TARGETS = {"Mooncake": 0.8, "Mooncake TCP": 1.5}
"""of what it moves within one process, and from another one, in the same rounds"""
MOONCAKE_CELLS = {
    Cell(operation, size, depth)
    for operation in ("get", "put")
    for size in (64 * KIB, MIB, 2 * MIB)
    for depth in (8, 64)
}
"""with a row of their own for each of these"""
MEDIAN_TARGETS = {Cell("read", 4 * KIB, 1): 60.0, Cell("exists", 4 * KIB, KEYS_PER_CALL): 1000.0}
"""microseconds of a batch"""
FILE_OPERATIONS = ("read", "write")
BLOCK_SIZE_MAX = 4 * MIB
"""of blocks here: those that are larger than a slab are files"""


@dataclass(frozen=True)
class RingSetting(Conditions):
    """And what is moved."""

    mooncake: Path | None = None
    """interpreter of an environment that has Mooncake"""
    sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB)
    depths: tuple[int, ...] = (1, 8, 64, 256)
    set_size: int = 256 * MIB
    """bytes that every side walks over, so that no cache holds them"""

    def time(self, batch: Batch, count_max: int = sys.maxsize) -> list[float]:
        return time_batches(batch, SECONDS * self.scale, count_max)


@contextlib.contextmanager
def _mooncakes(setting: RingSetting) -> Iterator[dict[str, Mooncake]]:
    """Mooncake's store, if there is one: with its blocks in the client's own process, and in another one."""
    with contextlib.ExitStack() as stack:
        stores = {}
        if setting.mooncake is not None:
            sizes = MOONCAKE_SEGMENTS * setting.set_size, setting.set_size
            for name, over_tcp in (("Mooncake", False), ("Mooncake TCP", True)):
                store = mooncake_store(setting.mooncake, *sizes, over_tcp=over_tcp)
                stores[name] = stack.enter_context(store)
        yield stores


@dataclass
class References:
    """The other sides of the ring benchmarks, on bytes of their own."""

    setting: RingSetting
    source: Bytes
    target: Bytes
    memory_file: int
    mooncakes: dict[str, Mooncake]

    def timings(self, cell: Cell, work: Work) -> dict[str, Timing]:
        """Those that do the same as ``cell``; memcpy first."""
        batches: dict[str, Batch] = {}
        if cell.operation not in LISTS:
            batches["memcpy"] = memcpy(self.source, self.target, cell.size, cell.depth)
        if cell.operation in ("read", "get"):
            batches["tmpfs pread"] = file_reads(self.memory_file, self.target, cell.size, cell.depth)
        elif cell.operation in ("write", "put"):
            batches["tmpfs pwrite"] = file_writes(self.memory_file, self.source, cell.size, cell.depth)
        timings = {name: self._timing(batch) for name, batch in batches.items()}
        if cell.operation in ("get", "put", "exists"):
            timings |= {name: self._mooncake_timing(store, cell, work) for name, store in self.mooncakes.items()}
        return timings

    def _timing(self, batch: Batch) -> Timing:
        return lambda _round: self.setting.time(batch)

    def _mooncake_timing(self, store: Mooncake, cell: Cell, work: Work) -> Timing:
        count = work.batch_count_max(cell.depth) * cell.depth if cell.operation == "put" else work.piece_count
        seconds = SECONDS * self.setting.scale
        return store.timing(cell.operation, size=cell.size, depth=cell.depth, count=count, seconds=seconds)

    @contextlib.contextmanager
    def blocks(self, size: int, count: int) -> Iterator[None]:
        """Mooncake has ``count`` blocks of ``size`` bytes."""
        for store in self.mooncakes.values():
            store.ask("load", size=size, count=count)
        yield
        for store in self.mooncakes.values():
            store.ask("drop")


@contextlib.contextmanager
def _references(setting: RingSetting, pattern: Bytes) -> Iterator[References]:
    with memory_file(setting.memory, pattern) as descriptor, _mooncakes(setting) as mooncakes:
        yield References(setting, pattern, pattern.copy(), descriptor, mooncakes)


def bench_operation(operation: str, setting: RingSetting) -> list[Figure]:
    """One operation in all sizes and depths that fit."""
    pattern = np.random.default_rng(0).integers(0, 256, setting.set_size, np.uint8)
    figures: list[Figure] = []
    with (
        fresh_volume(setting.volumes / "volume") as daemon,
        ring_session(daemon.mountpoint, pattern) as session,
        _references(setting, pattern) as references,
    ):
        for size in [size for size in setting.sizes if operation in FILE_OPERATIONS or size <= BLOCK_SIZE_MAX]:
            figures += _bench_size(operation, size, setting, session, references)
    return figures


def _bench_size(
    operation: str, size: int, setting: RingSetting, session: Session, references: References
) -> Iterator[Figure]:
    session.iov.array[:] = session.pattern
    with OPERATIONS[operation](session, size) as work, references.blocks(size, work.piece_count):
        for depth in setting.depths:
            if depth <= work.piece_count:
                yield from _bench_cell(Cell(operation, size, depth), work, setting, references)


def _bench_cell(cell: Cell, work: Work, setting: RingSetting, references: References) -> Iterator[Figure]:
    setting.progress(cell.name)
    work.check(cell.depth)
    batch = work.batch(cell.depth)

    def timing(_round: int) -> list[float]:
        times = setting.time(batch, work.batch_count_max(cell.depth))
        work.settle()
        return times

    figure = compare(cell, timing, references.timings(cell, work), setting.round_count)
    note = NOTES.get(cell.operation, "")
    yield figure._replace(target=TARGETS.get(cell), ratio_target=RATIO_TARGETS.get(cell), note=note)
    if (target := MEDIAN_TARGETS.get(cell)) is not None:
        median = next(other for other in figure.others if other.name == "batch median us")
        yield Figure(f"{cell.name}: median", "us", median, None, target, less_is_better=True)
    if cell in MOONCAKE_CELLS:
        for other in figure.others:
            if (ratio := MOONCAKE_TARGETS.get(other.name)) is not None:
                yield Figure(f"{cell.name}: of {other.name}", cell.unit, figure.measured, other, ratio_target=ratio)


def bench_exists(setting: RingSetting) -> list[Figure]:
    """Many names in one call: all there, and none there."""
    size = 4 * KIB
    alone = replace(setting, sizes=(size,), depths=(KEYS_PER_CALL,), set_size=KEYS_PER_CALL * size)
    return [*bench_operation("exists", alone), *bench_operation("absent", alone)]


def bench_idle(setting: RingSetting) -> list[Figure]:
    """CPU of a daemon with idle rings, beside the same without any."""
    seconds = max(IDLE_SECONDS_MIN, IDLE_SECONDS * setting.scale)
    with fresh_volume(setting.volumes / "volume") as daemon:

        def alone(_round: int) -> float:
            return _cpu_share(daemon.pid, seconds)

        def with_rings(_round: int) -> float:
            with contextlib.ExitStack() as stack:
                client = stack.enter_context(connect_when_open(daemon.mountpoint))
                for _ in range(IDLE_RINGS):
                    stack.enter_context(client.ring())
                return _cpu_share(daemon.pid, seconds)

        sides: dict[str, Side] = {"kvfuse": with_rings, "no ring": alone}
        measured, reference = alternate(sides, setting.round_count)
    name = f"CPU of a daemon with {IDLE_RINGS} idle rings"
    return [Figure(name, "% of a core", measured, reference, target=1, less_is_better=True)]


def _cpu_share(pid: int, seconds: float) -> float:
    """Percent of one core that a process takes in the next ``seconds``."""
    start, before = time.perf_counter(), cpu_seconds_of(pid)
    time.sleep(seconds)  # the time that is measured: nobody asks the daemon for anything
    return 100 * (cpu_seconds_of(pid) - before) / (time.perf_counter() - start)


RING_BENCHES: dict[str, Callable[[RingSetting], list[Figure]]] = {
    "read": partial(bench_operation, "read"),
    "write": partial(bench_operation, "write"),
    "get": partial(bench_operation, "get"),
    "view": partial(bench_operation, "view"),
    "put": partial(bench_operation, "put"),
    "exists": bench_exists,
    "idle": bench_idle,
}
