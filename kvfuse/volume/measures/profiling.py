"""Who calls what now: calls by process, place and operation, through all doors, counted while somebody looks.

Off, a call costs a look at `Profile.is_on`. `look` begins it, and it ends by itself `HOLD_SECONDS` after the last look:
a viewer that is killed leaves nothing behind. Memory is bounded: what finds no row is counted in one without process
and place. Threads of rings note, too. The kernel's requests are counted in C (``native/requestprofile.h``), and
gathered.

A place is an inode's number, of a block that of its table. Twice a second rows of places are added to sums of
namespaces, while the volume most likely still has those inodes in memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from kvfuse import failing

HOLD_SECONDS = 5.0
GATHER_SECONDS = 0.5
"""between two gatherings of what C counted"""
ROWS_MAX = 4096
CLASSES = 64
"""of times: two for each doubling of nanoseconds"""
COUNTED = np.dtype(
    [
        *((name, "<u8") for name in ("pid", "op", "place", "calls", "failed", "bytes", "ns")),
        ("times", "<u4", CLASSES),
    ]
)
"""a row as ``requestprofile.h`` has it"""
REQUESTS = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 20: "fsync", 21: "setxattr", 22: "getxattr", 23: "listxattr", 24: "removexattr", 25: "flush",
    26: "init", 27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 34: "access", 35: "create",
    39: "ioctl", 42: "forget", 43: "fallocate", 44: "readdir", 45: "rename", 46: "lseek", 47: "copy_file_range",
}  # fmt: skip
"""opcode of the kernel's requests -> name"""


REST = "others"
"""operation of what found no row of its own"""


class CallKey(NamedTuple):
    """Of a row. ``where``: place or namespace."""

    pid: int
    where: int | str
    operation: str


@dataclass(slots=True)
class CallSums:
    """Sums of calls."""

    calls: int = 0
    misses: int = 0
    """blocks that were not there"""
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    times: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(CLASSES, np.int64))
    """calls by class"""

    def count(self, calls: int, misses: int, failed: int, size: int, seconds: float) -> None:
        self.calls += calls
        self.misses += misses
        self.failed += failed
        self.bytes += size
        self.seconds += seconds

    def add(self, other: CallSums) -> None:
        self.count(other.calls, other.misses, other.failed, other.bytes, other.seconds)
        self.times += other.times


class SumsByKey(dict[CallKey, CallSums]):
    """Up to `ROWS_MAX`, and one with the rest."""

    def at(self, key: CallKey) -> CallSums:
        """The row of a key, or of the rest."""
        row = self.get(key)
        if row is None:
            key = key if len(self) < ROWS_MAX else CallKey(0, type(key.where)(), REST)
            row = self.setdefault(key, CallSums())
        return row


@dataclass(frozen=True)
class RequestCounter:
    """Counts calls elsewhere. Event loop only."""

    turn: Callable[[bool], None]
    """on or off"""
    take: Callable[[], bytes]
    """rows of `COUNTED` since the last call"""


class Profile:
    """Sums of calls since it was begun. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_on = False
        self.began = 0.0
        self.counter: RequestCounter | None = None
        self.name_of: Callable[[int], str | None] = str
        """the path of the namespace that a place is in; None: it does not count. Event loop only"""
        self._clock = clock
        self._until = 0.0
        self._fresh = SumsByKey()
        """by place, since the last gathering"""
        self._sums = SumsByKey()
        """by namespace"""
        self._owners: dict[int, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def look(self) -> None:
        """Begin to count, or go on. Event loop only."""
        self._until = self._clock() + HOLD_SECONDS
        if not self.is_on:
            if self.counter is not None:
                self.counter.turn(True)
            self.began = self._clock()
            self.is_on = True
            trio.lowlevel.spawn_system_task(failing.service, "profile", self._run)
        self._gather()

    async def _run(self) -> None:
        while self._clock() < self._until:
            await trio.sleep(GATHER_SECONDS)
            self._gather()
        self.end()

    def end(self) -> None:
        """Count no more, and drop all rows."""
        self.is_on = False
        if self.counter is not None:
            self.counter.turn(False)
        with self._lock:
            self._fresh.clear()
        self._sums.clear()
        self._owners.clear()

    # -- counting ------------------------------------------------------------------------------------

    def note(
        self, pid: int, place: int, operation: str, seconds: npt.NDArray[np.float64] | None, *,
        calls: int, misses: int = 0, failed: int = 0, size: int = 0,
    ) -> None:  # fmt: skip
        """Count calls that are alike. ``seconds``: of each; None: that is not known. Any thread."""
        times = None if seconds is None else np.bincount(_classes(seconds * 1e9), minlength=CLASSES)
        with self._lock:
            if self.is_on:
                row = self._fresh.at(CallKey(pid, place, operation))
                row.count(calls, misses, failed, size, float(seconds.sum()) if seconds is not None else 0.0)
                row.times += 0 if times is None else times

    def note_one(
        self, pid: int, place: int, operation: str, seconds: float, *, misses: int = 0, failed: int = 0, size: int = 0
    ) -> None:
        """`note` of one call: an array of one would take longer than the call."""
        nanoseconds = max(int(seconds * 1e9), 2)
        top = nanoseconds.bit_length() - 1
        number = min(2 * top + (nanoseconds >> top - 1 & 1), CLASSES - 1)
        with self._lock:
            if self.is_on:
                row = self._fresh.at(CallKey(pid, place, operation))
                row.count(1, misses, failed, size, seconds)
                row.times[number] += 1

    def _gather(self) -> None:
        """Add what was counted to the sums. Processes are looked at while they most likely still run."""
        with self._lock:
            fresh, self._fresh = self._fresh, SumsByKey()
        for key, row in fresh.items():
            self._add(key.pid, key.where, key.operation, row)
        for one in np.frombuffer(self.counter.take(), COUNTED) if self.counter is not None else ():
            number = int(one["op"])
            operation = REQUESTS.get(number, f"request {number}") if number else REST
            row = CallSums(int(one["calls"]), 0, int(one["failed"]), int(one["bytes"]), int(one["ns"]) / 1e9)
            row.times += one["times"]
            self._add(int(one["pid"]), int(one["place"]), operation, row)

    def _add(self, thread: int, place: int | str, operation: str, row: CallSums) -> None:
        namespace = self.name_of(int(place)) if place else ""
        if namespace is None:
            return
        self._sums.at(CallKey(self._owner(thread)[0], namespace, operation)).add(row)

    def _owner(self, thread: int) -> tuple[int, str]:
        """(process, command) of a thread, as the kernel's requests have it; of one that has ended, itself."""
        found = self._owners.get(thread)
        if found is None:
            if len(self._owners) >= ROWS_MAX:
                self._owners.clear()
            found = self._owners[thread] = _read_owner(thread)
        return found

    # -- what is shown -------------------------------------------------------------------------------

    def listing(self, uid: int | None) -> Mapping[str, Any] | None:
        """Look, and list sums since the profile began, by process, namespace and operation.

        None for a user who may not see others: ``uid``. Event loop only.
        """
        if uid is not None:
            return None
        self.look()
        return {
            "seconds": round(self._clock() - self.began, 6),
            "rows": [self._shown(key, row) for key, row in self._sums.items()],
        }

    def _shown(self, key: CallKey, row: CallSums) -> dict[str, Any]:
        sums = {name: getattr(row, name) for name in ("calls", "misses", "failed", "bytes", "seconds")}
        command = self._owner(key.pid)[1]
        names = {"pid": key.pid, "command": command, "namespace": key.where, "operation": key.operation}
        return {**names, **sums, "times": row.times.tolist()}


PROFILE = Profile()
"""of this daemon"""


def _classes(ns: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The class of each time: as `profile_class` in C."""
    whole = np.maximum(ns, 1.0)
    fractions, exponents = np.frexp(whole)  # a fraction of 0.5 .. 1
    classes = 2 * (exponents - 1) + (fractions >= 0.75)
    found: npt.NDArray[np.int64] = np.clip(classes, 0, CLASSES - 1).astype(np.int64)
    return found


def class_bounds(number: int) -> tuple[float, float]:
    """(least, most) nanoseconds of a class."""
    low = 2.0 ** (number // 2)
    return (low * 1.5, low * 2) if number % 2 else (low, low * 1.5)


def _read_owner(thread: int) -> tuple[int, str]:
    folder = Path("/proc", str(thread))
    try:
        status = (folder / "status").read_bytes()
        process = int(status.partition(b"\nTgid:")[2].split(None, 1)[0])
        return process, os.fsdecode(Path("/proc", str(process), "comm").read_bytes()).strip()
    except (OSError, ValueError, IndexError):
        return thread, "the kernel" if not thread else ""
