"""Finds writes in a ring's entries that may be done together where their bytes are: see `write_batches.py`."""

from __future__ import annotations

import time

import numpy as np
import trio

from kvfuse.usrbio.daemon.call import Entry, Ring
from kvfuse.usrbio.daemon.client_memory import Iov
from kvfuse.usrbio.daemon.columns import LOW_HALF, OFFSET_MAX, TIMEOUT_US_MAX, as_words, same
from kvfuse.usrbio.daemon.registered import Registered
from kvfuse.usrbio.daemon.write_batches import Batch
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import LENGTH_MAX, SQE_STRUCT, Op, Priority

BATCH_SIZE = 16 << 10
"""bytes that the task of a batch takes, about"""


class BatchFinder:
    """Takes writes out of a ring's entries that may be done as batches. The ring's thread owns it."""

    def __init__(self, ring: Ring, registered: Registered) -> None:
        self._ring = ring
        self._registered = registered

    def serve(self, rows: Entries, taken_at: float) -> Entries:
        """Give the event loop batches of entries taken at ``taken_at`` (monotonic seconds). Returns the others."""
        words = as_words(rows)
        kinds = words[:, 0], words[:, 1] & LOW_HALF
        if same(kinds[0]) and same(kinds[1]):
            return rows[:0] if self._begin(rows, taken_at) else rows
        left = np.ones(len(rows), bool)
        groups: dict[tuple[int, int], list[int]] = {}
        for number, kind in enumerate(zip(kinds[0].tolist(), kinds[1].tolist(), strict=True)):
            groups.setdefault(kind, []).append(number)
        for numbers in groups.values():
            if rows["op"][numbers[0]] == Op.WRITE:
                left[numbers] = not self._begin(rows[numbers], taken_at)
        return rows[left]

    def _begin(self, rows: Entries, taken_at: float) -> bool:
        """Start a batch of entries of one op, file and iov. False where they are not all plain writes in place."""
        entry = Entry(*SQE_STRUCT.unpack(rows[:1].tobytes()))
        file, iov = self._registered.files.get(entry.handle), self._registered.iovs.get(entry.iov)
        if entry.op != Op.WRITE or entry.flags or entry.priority > Priority.LOW or file is None or iov is None:
            return False
        if not file.map.is_in_place or not file.writable or file.measures.limiters or not iov.is_sealed:
            return False
        if not _are_plain(rows, iov):
            return False
        deadline = float("inf")
        timeouts_us = rows["timeout_us"]
        if timeouts_us.any():
            deadline = taken_at + int(timeouts_us[timeouts_us > 0].min()) / 1e6
            if time.monotonic() > deadline:
                return False
        size = int(rows["length"].sum())
        if not iov.is_there(size) or not self._registered.share.take(BATCH_SIZE, 1):
            return False
        self._registered.start_writes(
            Batch(
                self._ring, entry._replace(length=size), deadline, file=file, iov=iov, size=BATCH_SIZE, weight=1,
                rows=rows, taken_at=taken_at, done=np.zeros(len(rows), bool), scope=trio.CancelScope(),
            )
        )  # fmt: skip
        return True


def _are_plain(rows: Entries, iov: Iov) -> bool:
    words = as_words(rows)
    offsets, iov_offsets, lengths = words[:, 2], words[:, 3], words[:, 4]
    length_max = int(lengths.max())
    return (
        int(lengths.min()) > 0
        and length_max <= min(iov.size, LENGTH_MAX)
        and int(iov_offsets.max()) <= iov.size  # or the sum may have wrapped
        and int((iov_offsets + lengths).max()) <= iov.size
        and int(offsets.max()) < OFFSET_MAX
        and int(words[:, 7].max()) <= TIMEOUT_US_MAX
    )
