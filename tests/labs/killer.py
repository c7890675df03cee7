"""Kills daemons of mounts with a holder at random moments, and measures for how long callers wait then."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mounting import PATIENCE_S, KvfuseMount, wait_until


class Child(NamedTuple):
    """A living process that another one began."""

    begun: int
    """in clock ticks since the machine began"""
    pid: int
    is_guard: bool
    is_beside: bool
    """it is the guard, or forks daemons"""


STANDBY = "kvfuse-standby"


def children_of(pid: int) -> list[Child]:
    """Living ones, the oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] not in "ZX":
                is_guard = b"guard.py" in (stat.parent / "cmdline").read_bytes()
                is_beside = is_guard or (stat.parent / "comm").read_text().strip() == STANDBY
                found.append(Child(int(fields[19]), int(stat.parent.name), is_guard, is_beside))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def serving_of(holder: int) -> int | None:
    """The daemon whose turn it is, or that begins to have it: who waits for an upgrade is younger. Asks nothing of a
    mount."""
    daemons = [child for child in children_of(holder) if not child.is_beside]
    return daemons[0].pid if daemons else None


class Footprint(NamedTuple):
    """Of a mount's holder and its daemon."""

    holder_descriptors: int
    holder_resident: int
    """bytes of its own memory"""
    daemon_descriptors: int
    daemon_resident: int
    children: int
    shared: int
    """bytes of memory files that the holder keeps"""

    def __str__(self) -> str:
        return (
            f"holder {self.holder_descriptors} descriptors, {self.holder_resident >> 10} KiB; daemon"
            f" {self.daemon_descriptors} descriptors, {self.daemon_resident >> 20} MiB; {self.children} children;"
            f" {self.shared >> 20} MiB kept"
        )


def footprint(mount: KvfuseMount) -> Footprint:
    """While a daemon serves, and none is killed."""
    daemon = serving_of(mount.pid)
    assert daemon is not None, "no daemon"
    shared = 0
    for link in Path(f"/proc/{mount.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(link).startswith("/memfd:"):
                shared += link.stat().st_blocks * 512
    return Footprint(
        _descriptors(mount.pid),
        _resident(mount.pid),
        _descriptors(daemon),
        _resident(daemon),
        len(children_of(mount.pid)),
        shared,
    )


def _descriptors(pid: int) -> int:
    """Those of the shared-memory tier are a cache's: not counted."""
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(link))
    return sum(
        not name.startswith(("/kvfuse-tier", "/kvfuse-blocks", "/memfd:kvfuse-rows", "/memfd:kvfuse-slabs"))
        for name in names
    )


def _resident(pid: int) -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


class Probe:
    """A caller of a mount who asks again and again, and notes the longest call."""

    def __init__(self, point: Path) -> None:
        self._point = point
        self._longest = 0.0
        self._answered = 0.0
        """when the last call that has ended began"""
        self._lock = threading.Lock()
        self._is_over = False
        self.errors: list[OSError] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._is_over:
            number += 1
            begun = time.monotonic()
            try:
                os.statvfs(self._point)
                os.path.lexists(self._point / f"absent-{number}")  # of which the kernel cannot know
            except OSError as error:
                self.errors.append(error)
                return
            with self._lock:
                self._longest = max(self._longest, time.monotonic() - begun)
                self._answered = begun
            time.sleep(0.002)  # it is a load of its own: one that never paused would be most of it

    def longest(self) -> float:
        """Seconds of the longest call since this was asked before. A call that begins now ends first."""
        asked = time.monotonic()
        wait_until(lambda: self._answered > asked or bool(self.errors), "an answer of the mount")
        if self.errors:
            raise self.errors[0]
        with self._lock:
            longest, self._longest = self._longest, 0.0
        return longest

    def end(self) -> None:
        self._is_over = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a call does not end"


class Killer:
    """Context manager: a thread that kills the daemons of some mounts in turn, until it is told to stop.

    ``pause``: the seconds between the end of one stall and the next kill, at random. One in ``early`` kills strikes
    while the next daemon still begins; 0: none.
    """

    def __init__(
        self,
        mounts: Sequence[KvfuseMount],
        seed: int,
        pause: tuple[float, float] = (0.05, 1.5),
        early: int = 8,
        rounds: int | None = None,
    ) -> None:
        self._mounts = list(mounts)
        self._rng = random.Random(seed)
        self._pause = pause
        self._early = early
        self._rounds = rounds
        self._probes = [Probe(mount.point) for mount in mounts]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.stalls: list[float] = []
        """seconds, of each kill that let a daemon come to serve"""
        self.stalls_beside: list[float] = []
        """of other mounts meanwhile"""
        self.kills = 0
        self.failure: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._rng.uniform(*self._pause)):
                self._strike(self._rng.randrange(len(self._mounts)))
                if self._rounds is not None and len(self.stalls) >= self._rounds:
                    break
        except BaseException as failure:
            self.failure = failure

    def _strike(self, index: int) -> None:
        mount = self._mounts[index]
        for probe in self._probes:
            probe.longest()
        self._kill(mount)
        while self._early and self._rng.randrange(self._early) == 0:
            time.sleep(self._rng.uniform(0.0, 0.7))  # the moment is what is drawn: nothing is waited for
            self._kill(mount)
        stalls = [probe.longest() for probe in self._probes]
        self.stalls.append(stalls.pop(index))
        self.stalls_beside += stalls

    def _kill(self, mount: KvfuseMount) -> None:
        pid = serving_of(mount.pid)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self.kills += 1
            wait_until(lambda: serving_of(mount.pid) != pid, "the end of a daemon")

    def wait(self, timeout: float) -> None:
        """For ``rounds`` kills."""
        self._thread.join(timeout)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * PATIENCE_S)
        for probe in self._probes:
            probe.end()
        if kind is None:
            if self.failure is not None:
                raise self.failure
            assert not self._thread.is_alive(), "the killer waits for a daemon"

    def __str__(self) -> str:
        text = f"{self.kills} kills, {len(self.stalls)} stalls: {percentiles(self.stalls)}"
        return f"{text}; other mounts: {percentiles(self.stalls_beside)}" if self.stalls_beside else text


def percentiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    if not ordered:
        return "none"
    median, most = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return f"p50 {1000 * median:.0f} ms, p99 {1000 * most:.0f} ms, longest {1000 * ordered[-1]:.0f} ms"
