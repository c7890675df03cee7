"""Entries as rows and columns of plain numbers, which numpy compares and copies much faster than fields of records."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.daemon.call import Entry
from kvfuse.usrbio.daemon.client_memory import Iov
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import IOV_SIZE_MAX, SQE_STRUCT, Op

LOW_HALF = np.uint64(0xFFFFFFFF)
_NONE = np.zeros(0, np.intp)


def as_words(rows: Entries) -> npt.NDArray[np.uint64]:
    """SQEs as rows of eight numbers each."""
    return rows.view(np.uint64).reshape(len(rows), 8)


def same(column: npt.NDArray[np.uint64]) -> bool:
    """All numbers are the same. There is one at least."""
    return bool((column == column[0]).all())


def may_overlap(rows: Entries) -> bool:
    """A few entries are not in the order of places that do not touch. Without numpy, which is slow for so few."""
    reach, iov = 0, -1
    for fields in SQE_STRUCT.iter_unpack(rows.tobytes()):
        entry = Entry._make(fields)
        if entry.op == Op.READ or entry.op == Op.GET:
            if entry.iov_offset < reach or iov not in (-1, entry.iov):
                return True
            reach, iov = entry.iov_offset + entry.length, entry.iov
    return False


def find_overlaps(rows: Entries, registered: Mapping[int, Iov]) -> npt.NDArray[np.intp]:
    """Numbers of entries whose bytes would land where those of another one do, which is not among them.

    Those that reach beyond their iov are passed over.
    """
    if len(rows) < 2:
        return _NONE
    words = as_words(rows)
    starts, lengths = words[:, 3], words[:, 4]
    ends = starts + lengths
    if bool((starts[1:] >= ends[:-1]).all()) and bool((ends >= starts).all()) and same(words[:, 1] & LOW_HALF):
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
