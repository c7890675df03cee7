"""Six figures of a machine in half a minute: files, rings, and memcpy as what the machine can do at all.

Each figure is measured by the functions of the long benchmarks, on one volume, in alternating rounds.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvfuse.sizes import KIB, MIB
from kvfuse_bench import measures
from kvfuse_bench.daemons import fresh_volume
from kvfuse_bench.references import Bytes, memcpy
from kvfuse_bench.ringwork import KEYS_PER_CALL, OPERATIONS, Session, Work, ring_session
from kvfuse_bench.rounds import Conditions, Figure, Side, alternate
from kvfuse_bench.suite import in_fresh_folder
from kvfuse_bench.timing import time_batches

SECONDS = 0.5
"""of one ring operation, and of memcpy, in one round"""
FILE_COUNT, FILE_SIZE = 256, MIB
BLOCK_SIZE = 64 * KIB
PUT_DEPTH = 64
SET_SIZE = 64 * MIB
"""bytes that ring operations walk over; memcpy has the same"""

FIGURES = {
    "file store": ("GB/s", "1 MiB a file: temporary name, write, close, rename"),
    "file read": ("GB/s", "1 MiB a file: open, read, close; the mount's pages dropped before"),
    "ring put": ("blocks/s", f"64 KiB, {PUT_DEPTH} at once"),
    "ring get": ("us", "64 KiB, one at a time, from the shared-memory tier: median"),
    "exists": ("ms", f"{KEYS_PER_CALL:,} keys in one call: median"),
    "memcpy": ("GB/s", "1 MiB a copy, by one thread: the reference"),
}
"""figure -> (unit, what it is)"""
LESS_IS_BETTER = ("ring get", "exists")


def bench_short(conditions: Conditions) -> list[Figure]:
    pattern = np.random.default_rng(0).integers(0, 256, SET_SIZE, np.uint8)
    with (
        fresh_volume(conditions.volumes / "volume") as daemon,
        ring_session(daemon.mountpoint, pattern) as session,
        _ring_sides(session, SECONDS * conditions.scale) as rings,
    ):
        sides = _file_sides(daemon.mountpoint, max(16, int(FILE_COUNT * conditions.scale))) | rings
        sides["memcpy"] = _memcpy_side(pattern, SECONDS * conditions.scale)
        measured = alternate({name: sides[name] for name in FIGURES}, conditions.round_count)
    return [
        Figure(name, unit, one, None, less_is_better=name in LESS_IS_BETTER, note=note)
        for one, (name, (unit, note)) in zip(measured, FIGURES.items(), strict=True)
    ]


def _file_sides(root: Path, count: int) -> dict[str, Side]:
    """Store and read ``count`` files, in folders of a mount."""
    gigabytes = FILE_SIZE / 1e9
    stored, kept = root / "stored", root / "kept"
    stored.mkdir()
    kept.mkdir()
    measures.store_blocks(kept, count, FILE_SIZE)

    def read(_round: int) -> float:
        for path in measures.block_paths(kept, count):
            measures.drop_cached(Path(path))
        return gigabytes * measures.read_blocks(kept, count, FILE_SIZE)

    store = in_fresh_folder(stored, lambda folder: gigabytes * measures.store_blocks(folder, count, FILE_SIZE))
    return {"file store": store, "file read": read}


@contextlib.contextmanager
def _ring_sides(session: Session, seconds: float) -> Iterator[dict[str, Side]]:
    """Put, get and exists, each checked once."""
    session.iov.array[:] = session.pattern
    with (
        OPERATIONS["get"](session, BLOCK_SIZE) as get,
        OPERATIONS["put"](session, BLOCK_SIZE) as put,
        OPERATIONS["exists"](session, 4 * KIB) as exists,
    ):
        put.check(PUT_DEPTH)
        get.check(1)
        session.iov.array[:] = session.pattern

        def put_rate(_round: int) -> float:
            times = _times(put, PUT_DEPTH, seconds)
            return PUT_DEPTH * len(times) / sum(times)

        yield {
            "ring put": put_rate,
            "ring get": lambda _round: 1e6 * statistics.median(_times(get, 1, seconds)),
            "exists": lambda _round: 1e3 * statistics.median(_times(exists, KEYS_PER_CALL, seconds)),
        }


def _times(work: Work, depth: int, seconds: float) -> list[float]:
    times = time_batches(work.batch(depth), seconds, work.batch_count_max(depth))
    work.settle()
    return times


def _memcpy_side(pattern: Bytes, seconds: float) -> Side:
    batch = memcpy(pattern, pattern.copy(), MIB, 1)

    def side(_round: int) -> float:
        times = time_batches(batch, seconds, 1 << 62)
        return MIB * len(times) / sum(times) / 1e9

    return side
