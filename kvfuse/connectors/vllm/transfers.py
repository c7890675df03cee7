"""Jobs that move blocks between an engine's memory and the store, in threads. See `Transfers`."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, copy_context
from time import monotonic
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.connectors.request_hints import Hinted
from kvfuse.connectors.steady_store import Region, SteadyStore
from kvfuse.usrbio.client import NO_HINTS, PutHints

log = logging.getLogger(__name__)

Found = npt.NDArray[np.bool_]

BYTES_AT_ONCE = 64 << 20
"""moved by one call to the store: each has a deadline"""
SUSPECTS_MAX = 100_000
SETTLING_PAUSE_S = 0.02
"""between looks whether a daemon that went away can still write"""


class Job(NamedTuple):
    """Blocks to be moved, in prefix order."""

    number: int
    keys: Sequence[bytes]
    """the engine's; of the store from when it begins"""
    slots: Sequence[int]
    """rows of the memory"""
    is_load: bool
    submitted_at: float
    context: Context
    """of who submitted it: the store's requests are children of the span there"""
    hints: PutHints = NO_HINTS
    """of a store: blocks that were put without are put again"""


class JobOutcome(NamedTuple):
    """Of one job."""

    number: int
    moved: Found
    """which of its blocks were"""
    is_load: bool
    seconds: float
    """from its begin on"""
    is_shed: bool = False


class Transfers:
    """Loads and stores of one engine: each kind has threads of its own, so that no load waits for a store.

    Jobs are over at ``deadline`` seconds after they were submitted; what is not moved by then is not moved at all. The
    one exception: a job whose daemon hung in the middle of it is over when that can write, or store, no more.
    """

    def __init__(
        self, store: SteadyStore, region: Region, row_size: int, *, deadline: float, backlog: int, threads: int,
        name: Callable[[bytes], bytes] = bytes,
    ) -> None:  # fmt: skip
        """``row_size``: bytes of a slot. ``backlog``: bytes of stores that may wait; more are shed. ``threads``: for
        each kind. ``name``: the store's key of the engine's; the threads ask it, once for each key of a job."""
        self._store, self._region, self._row_size, self._name = store, region, row_size, name
        self._deadline, self._backlog = deadline, backlog
        self._hinted = Hinted()
        self.counts: Counter[str] = Counter()
        """blocks: ``loaded``, ``load_missed``, ``stored``, ``store_known`` (were there), ``store_failed``,
        ``store_shed``"""
        self._suspects: set[bytes] = set()
        """were there and could not be loaded, as what is damaged: they are stored again when the engine has them"""
        self._waiting: dict[bool, deque[Job]] = {True: deque(), False: deque()}
        """by `Job.is_load`"""
        self._waiting_bytes = 0
        """of stores"""
        self._under_way = 0
        self._changed = threading.Condition()
        self._outcomes: deque[JobOutcome] = deque()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(is_load,), name=f"kvfuse-{name}-{number}", daemon=True)
            for is_load, name in ((True, "load"), (False, "store"))
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, number: int, keys: Sequence[bytes], slots: Sequence[int], *, is_load: bool, hints: PutHints = NO_HINTS
    ) -> None:
        """Never waits. A store beyond the backlog is shed: nothing of it is moved."""
        job = Job(number, keys, slots, is_load, monotonic(), copy_context(), hints)
        size = 0 if is_load else len(keys) * self._row_size
        with self._changed:
            if self._closed or (size and self._waiting_bytes and self._waiting_bytes + size > self._backlog):
                self._shed(job)
                return
            self._waiting_bytes += size
            self._under_way += 1
            self._waiting[is_load].append(job)
            self._changed.notify_all()

    def take_outcomes(self) -> list[JobOutcome]:
        """Of the jobs that are over since."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    @property
    def backlog_size(self) -> int:
        """Bytes of stores that wait."""
        return self._waiting_bytes

    def drain(self) -> None:
        """Returns when no job is under way, and nobody writes into the memory."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)

    def close(self) -> None:
        """Jobs that wait are shed; those that are being moved end first."""
        with self._changed:
            self._closed = True
            for waiting in self._waiting.values():
                for job in waiting:
                    self._shed(job)
                self._under_way -= len(waiting)
                waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- the threads ---------------------------------------------------------------------------------

    def _work(self, is_load: bool) -> None:
        waiting = self._waiting[is_load]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: waiting or self._closed)
                if not waiting:
                    return
                job = waiting.popleft()
                if not is_load:
                    self._waiting_bytes -= len(job.keys) * self._row_size
            begun = monotonic()
            moved = np.zeros(len(job.keys), np.bool_)
            try:
                named = job._replace(keys=[self._name(key) for key in job.keys])
                moved = job.context.run(self._load if is_load else self._put, named)
            except Exception:  # the engine goes on, whatever it was
                log.exception("job %d of %d blocks failed", job.number, len(job.keys))
            with self._changed:
                self._outcomes.append(JobOutcome(job.number, moved, is_load, monotonic() - begun))
                self._under_way -= 1
                self._changed.notify_all()

    def _shed(self, job: Job) -> None:
        self.counts["load_missed" if job.is_load else "store_shed"] += len(job.keys)
        nothing: Found = np.zeros(len(job.keys), np.bool_)
        self._outcomes.append(JobOutcome(job.number, nothing, job.is_load, 0.0, is_shed=True))

    def _load(self, job: Job) -> Found:
        """Blocks of a prefix: those after a part of which nothing was there are not asked for."""
        loaded: Found = np.zeros(len(job.keys), np.bool_)
        is_asked = False
        for part in self._parts(job):
            if not self._store.is_up:
                break
            is_asked = True
            keys, offsets, left = job.keys[part], self._offsets(job.slots[part]), self._time_left(job)
            results = self._store.get(keys, self._region, offsets, [self._row_size] * len(keys), deadline=left)
            loaded[part] = results == self._row_size
            if not loaded[part].any():
                break
        if is_asked and not loaded.all():
            self._wait_for_silence()
            self._suspect([key for key, is_loaded in zip(job.keys, loaded.tolist(), strict=True) if not is_loaded])
        self._count(loaded=int(loaded.sum()), load_missed=int((~loaded).sum()))
        return loaded

    def _wait_for_silence(self) -> None:
        """Until nobody moves on account of a job that is over: its slots may be used for something else then."""
        with self._changed:
            while not (self._store.is_silent or self._closed):
                self._changed.wait(SETTLING_PAUSE_S)

    def _suspect(self, keys: list[bytes]) -> None:
        if len(self._suspects) < SUSPECTS_MAX:
            self._suspects.update(keys)

    def _put(self, job: Job) -> Found:
        """Those that are there are not written again, unless they are to have hints that they may not have."""
        suspects = self._suspects.intersection(job.keys)
        known = self._store.exists(job.keys)
        known &= [key not in suspects for key in job.keys]
        if job.hints != NO_HINTS:
            known &= self._hinted.among(job.keys, job.hints)
        stored = known.copy()
        for part in self._parts(job):
            rows = np.flatnonzero(~known[part]) + part.start
            if not len(rows):
                continue
            slots, sizes = [job.slots[row] for row in rows], [self._row_size] * len(rows)
            keys, offsets, left = [job.keys[row] for row in rows], self._offsets(slots), self._time_left(job)
            stored[rows] = self._store.put(keys, self._region, offsets, sizes, deadline=left, hints=job.hints)
            if job.hints != NO_HINTS:
                self._hinted.add([job.keys[row] for row in rows.tolist() if stored[row]], job.hints)
            if not self._store.is_up:
                break
        if not stored.all():
            self._wait_for_silence()  # else a daemon that hangs would store what is in the slots by then
        self._suspects.difference_update(suspects)
        self._count(
            store_known=int(known.sum()), stored=int((stored & ~known).sum()), store_failed=int((~stored).sum())
        )
        return stored

    def _parts(self, job: Job) -> Iterator[slice]:
        """None once the deadline has passed."""
        count = max(BYTES_AT_ONCE // self._row_size, 1)
        for start in range(0, len(job.keys), count):
            if self._time_left(job) <= 0:
                return
            yield slice(start, min(start + count, len(job.keys)))

    def _time_left(self, job: Job) -> float:
        """Seconds until its deadline."""
        return job.submitted_at + self._deadline - monotonic()

    def _offsets(self, slots: Sequence[int]) -> list[int]:
        return [int(slot) * self._row_size for slot in slots]

    def _count(self, **counts: int) -> None:
        with self._changed:
            self.counts.update(counts)
