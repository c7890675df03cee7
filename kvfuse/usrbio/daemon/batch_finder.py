"""Finds entries of a ring that the daemon executes as one batch: writes in place (`write_batches`), and puts."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import trio

from kvfuse.usrbio.daemon.call import Entry, ServedRing
from kvfuse.usrbio.daemon.client_memory import Bytes, MappedIov
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.columns import LOW_HALF, OFFSET_MAX, TIMEOUT_US_MAX, are_equal, as_words
from kvfuse.usrbio.daemon.put_finder import PutFinder
from kvfuse.usrbio.daemon.write_batches import WriteBatch
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import LENGTH_MAX, SQE_STRUCT, Op, Priority

BATCH_SIZE = 16 << 10
"""bytes that the task of a batch takes, about"""


def take_groups(rows: Entries, op: Op, begin: Callable[[Entries, float], int], taken_at: float) -> Entries:
    """Give ``begin`` the entries of ``op``, grouped by kind (priority, handle, iov); return those that it did not take.

    ``begin``: gets entries of one kind, taken at ``taken_at`` (monotonic seconds); returns how many of the first ones
    it took.
    """
    words = as_words(rows)
    kinds = words[:, 0], words[:, 1] & LOW_HALF
    if are_equal(kinds[0]) and are_equal(kinds[1]):
        return rows[begin(rows, taken_at) :]
    left = np.ones(len(rows), bool)
    groups: dict[tuple[int, int], list[int]] = {}
    for number, kind in enumerate(zip(kinds[0].tolist(), kinds[1].tolist(), strict=True)):
        groups.setdefault(kind, []).append(number)
    for numbers in groups.values():
        if rows["op"][numbers[0]] == op:
            left[numbers[: begin(rows[numbers], taken_at)]] = False
    return rows[left]


class BatchFinder:
    """Takes batches of writes and puts out of a ring's entries. The ring's thread owns it.

    ``op_mask``: bit n allows operation n.
    """

    def __init__(self, ring: ServedRing, registered: ClientRegistry, aux: Bytes, op_mask: int) -> None:
        self._writes = WriteFinder(ring, registered)
        self._puts = PutFinder(ring, registered, aux)
        self._op_mask = op_mask

    def close(self) -> None:
        """Drop references to the ring's memory."""
        self._puts.close()

    def serve(self, rows: Entries, taken_at: float, *, in_place: bool) -> Entries:
        """Give the event loop batches of entries taken at ``taken_at`` (monotonic seconds). Returns the others.

        ``in_place``: writes may go straight to where the file's bytes are.
        """
        ops = rows["op"]
        if in_place and self._op_mask >> Op.WRITE & 1 and (ops == Op.WRITE).any():
            rows = take_groups(rows, Op.WRITE, self._writes.start_batch, taken_at)
        if self._op_mask >> Op.PUT & 1 and np.count_nonzero(ops == Op.PUT) > 1:
            rows = take_groups(rows, Op.PUT, self._puts.start_batches, taken_at)
        return rows


class WriteFinder:
    """Takes writes in place. `BatchFinder` owns it."""

    def __init__(self, ring: ServedRing, registered: ClientRegistry) -> None:
        self._ring = ring
        self._registered = registered

    def start_batch(self, rows: Entries, taken_at: float) -> int:
        """Start a batch of entries of one op, handle and iov. Returns how many it took: all or none."""
        return len(rows) if self._try_start(rows, taken_at) else 0

    def _try_start(self, rows: Entries, taken_at: float) -> bool:
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
