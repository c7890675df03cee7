"""Finds writes of a ring that the daemon executes as one batch, in place: see `write_batches.py`."""

from __future__ import annotations

import time

import numpy as np
import trio

from kvfuse.usrbio.daemon.batches import Batch
from kvfuse.usrbio.daemon.call import ServedRing
from kvfuse.usrbio.daemon.client_memory import MappedIov
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.columns import OFFSET_MAX, TIMEOUT_US_MAX, as_words
from kvfuse.usrbio.daemon.write_batches import WriteBatch
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import LENGTH_MAX, Priority

BATCH_SIZE = 16 << 10
"""bytes that the task of a batch takes, about"""


class WriteFinder:
    """Takes batches of writes out of a ring's entries (`batches.Together`). The ring's thread owns it."""

    def __init__(self, ring: ServedRing, registered: ClientRegistry) -> None:
        self._ring = ring
        self._registered = registered

    def start(self, batch: Batch) -> bool:
        """False where they are not all plain writes in place."""
        entry, rows, taken_at = batch
        file, iov = self._registered.files.get(entry.handle), self._registered.iovs.get(entry.iov)
        if entry.flags or entry.priority > Priority.LOW or file is None or iov is None:
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
        if not iov.is_present(size) or not self._registered.share.take(BATCH_SIZE, 1):
            return False
        self._registered.start_writes(
            WriteBatch(
                self._ring, entry._replace(length=size), deadline, file=file, iov=iov, size=BATCH_SIZE, weight=1,
                rows=rows, taken_at=taken_at, done=np.zeros(len(rows), bool), scope=trio.CancelScope(),
            )
        )  # fmt: skip
        return True


def _are_plain(rows: Entries, iov: MappedIov) -> bool:
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
