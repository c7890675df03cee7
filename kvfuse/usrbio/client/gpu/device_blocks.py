"""Blocks of a store that are got into memory of a device, or put from there.

Blocks in shared memory are copied from the arena to the device, by this process. The others pass through staging
memory: the daemon fills a part of it with one block while the device copies another one. Each submission has at most
half of the staging memory, so there are two of them under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EFAULT, EIO, EMSGSIZE, ETIMEDOUT
from functools import partial
from time import monotonic

import numpy as np

from kvfuse.usrbio.client.files import Namespace
from kvfuse.usrbio.client.gpu.gpu_memory import DeviceCopy, GpuIov, GpuRange
from kvfuse.usrbio.client.gpu.gpus import Gpus
from kvfuse.usrbio.client.gpu.interfaces import is_on_device
from kvfuse.usrbio.client.iov import address_of
from kvfuse.usrbio.client.lanes import EntryTerms, Lane, Lanes, Sizes
from kvfuse.usrbio.client.resident import NOT_HERE, ResidentBlocks
from kvfuse.usrbio.client.session import Bytes
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import NO_HINTS, Op, PutHints

NOT_ASKED = NOT_HERE
"""result of a block that the daemon has yet to be asked for"""
GUESS_PARTS = 8
"""a block whose size is not known is expected in this part of the staging memory; a larger one is asked for again"""


def range_of(buffer: object, gpus: Gpus) -> GpuRange | None:
    """The registered memory of a device that a buffer is; None: it is none of a device. ValueError: not registered."""
    if isinstance(buffer, np.ndarray | bytes | bytearray | memoryview):
        return None
    if isinstance(buffer, GpuRange):
        return buffer
    if isinstance(buffer, GpuIov):
        return buffer.range()
    return gpus.locate(buffer) if is_on_device(buffer) else None


def raise_failure(results: Sizes, ranges: Sequence[GpuRange]) -> None:
    """DeviceError, where a copy failed: that is no miss."""
    for row in np.flatnonzero(results == -EIO).tolist():
        iov = ranges[row].iov
        if iov.failure is not None:
            failure, iov.failure = iov.failure, None
            raise failure


class DeviceBlocks:
    """Of one namespace; for any number of threads."""

    def __init__(
        self, lanes: Lanes, resident: ResidentBlocks, namespace: Namespace,
        bring: Callable[[Sequence[bytes], float], bool],
    ) -> None:  # fmt: skip
        """``bring``: have other hosts' blocks brought into shared memory within a deadline; whether any came."""
        self._lanes = lanes
        self._resident = resident
        self._namespace = namespace
        self._bring = bring

    def get(self, keys: Sequence[bytes], ranges: Sequence[GpuRange], terms: EntryTerms) -> Sizes:
        """The size of each block, -errno for others; EIO also where the device failed (`GpuIov.failure`)."""
        results: Sizes = np.full(len(keys), NOT_ASKED, np.int64)
        direct = [row for row, range_ in enumerate(ranges) if range_.iov.handle]
        if direct:
            results[direct] = self._get_directly([keys[row] for row in direct], [ranges[row] for row in direct], terms)
        rows = [row for row, range_ in enumerate(ranges) if not range_.iov.handle or results[row] == -EIO]
        if not rows:
            return results
        staged = self._get_staged([keys[row] for row in rows], [ranges[row] for row in rows], terms)
        for row, result in zip(rows, staged.tolist(), strict=True):
            if results[row] == -EIO and result >= 0:
                ranges[row].iov.note_adapter(failed=True)
        results[rows] = staged
        return results

    def _get_directly(self, keys: Sequence[bytes], ranges: Sequence[GpuRange], terms: EntryTerms) -> Sizes:
        """By the daemon's adapter. EIO also where that failed."""
        if self._resident.brings() and (missing := self._resident.missing(keys)):
            self._bring(missing, terms["timeout"])  # together; else each is asked for alone
        results: Sizes = np.full(len(keys), -ETIMEDOUT, np.int64)
        iovs, offsets, sizes = zip(*ranges, strict=True)
        with suppress(TimeoutError), self._lanes.take() as lane:
            step = lane.ring.entries
            for start in range(0, len(keys), step):
                part = slice(start, start + step)
                numbers = np.arange(len(keys[part]))
                lane.ring.prep_gets(
                    iovs[part], offsets[part], self._namespace, keys[part], sizes[part], numbers, **terms
                )
                results[part] = lane.finish(len(numbers), terms["timeout"])["result"]
                if lane.is_late:
                    break
        results[results == -EFAULT] = -EIO  # another thread has given the adapter up meanwhile
        for row in np.flatnonzero(results >= 0).tolist():
            ranges[row].iov.note_adapter(failed=False)
        return results

    def _get_staged(self, keys: Sequence[bytes], ranges: Sequence[GpuRange], terms: EntryTerms) -> Sizes:
        """By copies of the device."""
        results = self._get_resident(keys, ranges)
        rows = np.flatnonzero(results == NOT_ASKED).tolist()
        if rows and self._resident.brings() and self._bring([keys[row] for row in rows], terms["timeout"]):
            results[rows] = self._get_resident([keys[row] for row in rows], [ranges[row] for row in rows])
            rows = np.flatnonzero(results == NOT_ASKED).tolist()
        if rows:
            results[rows] = self._move(Op.GET, [keys[row] for row in rows], [ranges[row] for row in rows], terms)
        return results

    def put(
        self, keys: Sequence[bytes], ranges: Sequence[GpuRange], terms: EntryTerms, hints: PutHints = NO_HINTS
    ) -> Sizes:
        """Results as of the completions, and of `get`."""
        return self._move(Op.PUT, keys, ranges, terms, hints)

    def _move(
        self, op: Op, keys: Sequence[bytes], ranges: Sequence[GpuRange], terms: EntryTerms, hints: PutHints = NO_HINTS
    ) -> Sizes:
        results: Sizes = np.full(len(keys), -ETIMEDOUT, np.int64)
        with suppress(TimeoutError), self._lanes.take() as lane:
            results = _Moving(lane, op, self._namespace, keys, ranges, terms, hints).run()
        return results

    def _get_resident(self, keys: Sequence[bytes], ranges: Sequence[GpuRange]) -> Sizes:
        """The size of each block that was in shared memory, -ENOENT where there is none, `NOT_ASKED` for others."""
        pinned = {link: link.arenas() for link in {range_.iov.link for range_ in ranges}}

        def begin(row: int, arena: Bytes, offset: int, size: int) -> DeviceCopy:
            iov = ranges[row].iov
            if (arenas := pinned[iov.link]) is not None:
                arenas.pin(arena)
            return iov.fill(ranges[row].offset, address_of(arena) + offset, size)

        rooms = np.fromiter((range_.size for range_ in ranges), np.int64, len(ranges))
        results = self._resident.copy(keys, rooms, begin) if len(keys) else None
        return results if results is not None else np.full(len(keys), NOT_ASKED, np.int64)


class _Moving:
    """One batch through one lane. Entries are numbered by their row."""

    def __init__(
        self,
        lane: Lane,
        op: Op,
        namespace: Namespace,
        keys: Sequence[bytes],
        ranges: Sequence[GpuRange],
        terms: EntryTerms,
        hints: PutHints,
    ) -> None:
        self._lane = lane
        self._hints = hints
        self._op = op
        self._namespace = namespace
        self._keys = keys
        self._ranges = ranges
        self._terms = terms
        self._sizes = [self._expected(range_) for range_ in ranges]
        """what the daemon is asked to move"""
        self._left = deque(range(len(keys)))
        self._results: Sizes = np.full(len(keys), -ETIMEDOUT, np.int64)
        self._under_way = 0

    def _expected(self, range_: GpuRange) -> int:
        if self._op is Op.PUT:
            return range_.size
        return min(range_.size, range_.iov.link.staging.size // GUESS_PARTS)

    def run(self) -> Sizes:
        give_up = monotonic() + self._terms["timeout"]
        while self._left or self._under_way:
            placed = self._place()
            if placed:
                self._lane.ring.submit()
                self._under_way += placed
                give_up = monotonic() + self._terms["timeout"]
            if self._under_way and not (placed and self._left):
                completions = self._lane.reap(self._terms["timeout"])
                if not len(completions):
                    break
                self._take(completions)
            elif not placed and not self._wait(give_up):
                break
        self._results[list(self._left)] = -ETIMEDOUT
        return self._results

    def _place(self) -> int:
        """Place entries of half of the staging memory, or one. How many."""
        count, size = 0, 0
        while self._left:
            row = self._left[0]
            size += self._sizes[row]
            if count and size > self._ranges[row].iov.link.staging.size // 2:
                break
            try:
                self._prepare(row)
            except BlockingIOError:  # the ring is full, or the staging memory
                break
            self._left.popleft()
            count += 1
        return count

    def _prepare(self, row: int) -> None:
        ring = self._lane.ring
        prepare = ring.prep_get if self._op is Op.GET else partial(ring.prep_put, hints=self._hints)
        iov, offset, _ = self._ranges[row]
        prepare(iov, offset, self._namespace, self._keys[row], self._sizes[row], user_data=row, **self._terms)

    def _take(self, completions: Entries) -> None:
        self._under_way -= len(completions)
        for row, result, size, *_ in completions.tolist():
            self._results[row] = result
            if result == -EMSGSIZE and self._sizes[row] < size <= self._ranges[row].size:
                self._sizes[row] = size
                self._left.append(row)

    def _wait(self, give_up: float) -> bool:
        """Others have the staging memory. False: for too long."""
        return self._ranges[self._left[0]].iov.link.staging.wait(give_up) or monotonic() < give_up
