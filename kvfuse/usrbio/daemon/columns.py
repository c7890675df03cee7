"""Serves entries as columns of plain numbers, which numpy compares and copies much faster than fields of records."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.daemon import ring_reads
from kvfuse.usrbio.daemon.batches import LEFT, Batch, Results
from kvfuse.usrbio.daemon.call import Entry, ServedRing
from kvfuse.usrbio.daemon.client_memory import MappedIov
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import IOV_SIZE_MAX, SQE_STRUCT, Op, Priority

LOW_HALF = np.uint64(0xFFFFFFFF)
COLUMNS_MIN = 24
"""Entries in a batch from which they are served as columns."""
OFFSET_MAX = 1 << 62
TIMEOUT_US_MAX = (1 << 32) - 1
"""largest value of the timeout in an SQE's last word; higher bits name a parent"""
_NONE = np.zeros(0, np.intp)


def as_words(rows: Entries) -> npt.NDArray[np.uint64]:
    """SQEs as rows of eight numbers each."""
    return rows.view(np.uint64).reshape(len(rows), 8)


def are_equal(column: npt.NDArray[np.uint64]) -> bool:
    """Whether all numbers of a column, which has one at least, are equal."""
    return bool((column == column[0]).all())


def may_overlap(rows: Entries) -> bool:
    """Whether targets of few reads and gets may overlap: unordered, or in several iovs. numpy is slow for so few."""
    reach, iov = 0, -1
    for fields in SQE_STRUCT.iter_unpack(rows.tobytes()):
        entry = Entry._make(fields)
        if entry.op == Op.READ or entry.op == Op.GET:
            if entry.iov_offset < reach or iov not in (-1, entry.iov):
                return True
            reach, iov = entry.iov_offset + entry.length, entry.iov
    return False


def find_overlaps(rows: Entries, registered: Mapping[int, MappedIov]) -> npt.NDArray[np.intp]:
    """Indices of reads and gets whose target bytes overlap those of another one, whose index is not returned.

    Entries that reach beyond their iov are ignored.
    """
    if len(rows) < 2:
        return _NONE
    words = as_words(rows)
    starts, lengths = words[:, 3], words[:, 4]
    ends = starts + lengths
    if bool((starts[1:] >= ends[:-1]).all()) and bool((ends >= starts).all()) and are_equal(words[:, 1] & LOW_HALF):
        return _NONE  # one after the other, as most are
    ops = rows["op"]
    iovs, iov_numbers = np.unique(rows["iov"], return_inverse=True)
    found = [registered.get(iov) for iov in iovs.tolist()]
    sizes = np.array([iov.size if iov is not None else 0 for iov in found], np.uint64)[iov_numbers]
    is_inside = (lengths <= sizes) & (starts <= sizes - np.minimum(lengths, sizes))
    chosen = np.flatnonzero(((ops == Op.READ) | (ops == Op.GET)) & is_inside)
    starts = iov_numbers[chosen].astype(np.uint64) * np.uint64(IOV_SIZE_MAX) + starts[chosen]
    ends = starts + lengths[chosen]
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    bad = np.flatnonzero((starts[1:] < np.maximum.accumulate(ends)[:-1]) & (ends[1:] > starts[1:])) + 1
    return chosen[order[bad]]


class ColumnReads:
    """Serves batches of plain reads as columns (`batches.InThread`). A ring's thread owns it."""

    def __init__(self, ring: ServedRing, registered: ClientRegistry) -> None:
        self._ring = ring
        self._registered = registered
        self._reader = ring_reads.RingReader()

    def serve(self, batch: Batch) -> Results | None:
        entry, taken_at = batch.first, batch.taken_at
        if len(batch.rows) < COLUMNS_MIN:
            return None
        file, iov = self._registered.files.get(entry.handle), self._registered.iovs.get(entry.iov)
        if entry.flags or entry.priority > Priority.LOW or file is None or iov is None:
            return None
        columns = np.ascontiguousarray(as_words(batch.rows).T)
        offsets, iov_offsets, lengths, timeouts_us = columns[[2, 3, 4, 7]]
        length_max = int(lengths.max())
        is_plain = (
            file.readable
            and not file.measures.limiters
            and iov.writable
            and length_max <= iov.size
            and int(lengths.min()) > 0
            and int((iov_offsets + lengths).max()) <= iov.size
            and int(iov_offsets.max()) <= iov.size  # or the sum may have wrapped
            and int(offsets.max()) < OFFSET_MAX
        )
        if not is_plain:
            return None
        if timeouts_us.any():
            timeout_us = int(timeouts_us.min())
            if not 0 < timeout_us <= TIMEOUT_US_MAX or timeout_us < (time.monotonic() - taken_at) * 1e6:
                return None
            if int(timeouts_us.max()) > TIMEOUT_US_MAX:
                return None
        try:
            with nullcontext() if iov.holds_lock else self._ring.turns.copying(self._ring.seat):
                results = self._reader.read_many(
                    file.map, offsets.view(np.int64), lengths.view(np.int64), iov, iov_offsets.view(np.int64)
                )
        except OSError:
            return None
        if file.map.notes_reads:
            file.map.note_read()
        _count_reads(file, results[results != LEFT], time.monotonic() - taken_at)
        return results


def _count_reads(file: OpenFile, sizes: npt.NDArray[np.int64], seconds: float) -> None:
    """Count served reads of these sizes."""
    times = file.measures.seconds["read"]
    times.counts[bisect_left(times.bounds, seconds)] += len(sizes)
    times.sum += len(sizes) * seconds
    file.measures.read_bytes += int(sizes.sum())
