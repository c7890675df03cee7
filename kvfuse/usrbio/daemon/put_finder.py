"""Finds puts in a ring's entries that the daemon stores as one batch, and copies their bytes: see `put_batches.py`."""

from __future__ import annotations

import time

import numpy as np

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE
from kvfuse.keys import file_names
from kvfuse.native.rowcopier import copy_rows
from kvfuse.usrbio.daemon.batches import Batch
from kvfuse.usrbio.daemon.call import Entry, ServedRing
from kvfuse.usrbio.daemon.client_memory import Bytes, MappedIov
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.columns import are_plain, as_words
from kvfuse.usrbio.daemon.put_batches import CALL_SIZE, PutBatch
from kvfuse.usrbio.daemon.registered_things import NamespaceHandle
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import HINT_BITS, SQE_STRUCT, Priority
from kvfuse.volume.tier.shared_tier import TierBlock

PUTS_SIZE = 4 << 20
"""Bytes of puts that the event loop gets at once: to begin with the first ones wins more than to do all together."""
PUTS_MAX = 64
"""Puts of a batch: the event loop takes one or two milliseconds for them."""


class PutFinder:
    """Takes batches of puts out of a ring's entries (`batches.Together`). The ring's thread owns it."""

    def __init__(self, ring: ServedRing, registered: ClientRegistry, aux: Bytes) -> None:
        self._ring = ring
        self._registered = registered
        self._aux = aux

    def close(self) -> None:
        """Drop references to the ring's memory."""
        self._aux = self._aux[:0].copy()

    def start(self, batch: Batch) -> int:
        """None of one that is alone: a call does it."""
        entry, rows, taken_at = batch
        if len(rows) == 1:
            return 0
        namespace, iov = self._registered.namespaces.get(entry.handle), self._registered.iovs.get(entry.iov)
        if entry.flags or entry.priority > Priority.LOW or namespace is None or iov is None:
            return 0
        if namespace.read_only or not namespace.may_copy or namespace.waits or namespace.measures.limiters:
            return 0
        words = as_words(rows)
        if not are_plain(words, iov.size, len(self._aux)) or bool((words[:, 2] >> np.uint64(HINT_BITS)).any()):
            return 0
        lengths = rows["length"].tolist()
        batches: list[PutBatch] = []
        start = kept_size = 0
        try:
            while start < len(rows):
                end, size = start, 0
                while end < len(rows) and end - start < PUTS_MAX and (end == start or size + lengths[end] <= PUTS_SIZE):
                    size += lengths[end]
                    end += 1
                taken = self._make_batch(rows[start:end], size, taken_at, namespace, iov, batches)
                start += taken
                kept_size += size
                if start < end:
                    break
                if kept_size >= PUTS_SIZE:
                    kept_size = self._start_kept(batches)
                self._ring.turns.pause(self._ring.seat)
        finally:
            self._start_kept(batches)
        return start

    def _start_kept(self, batches: list[PutBatch]) -> int:
        """Start the batches that were kept; returns 0, the bytes kept then."""
        for batch in batches:
            self._registered.start_puts(batch)
        batches.clear()
        return 0

    def _make_batch(
        self,
        rows: Entries,
        size: int,
        taken_at: float,
        namespace: NamespaceHandle,
        iov: MappedIov,
        batches: list[PutBatch],
    ) -> int:
        """Add a batch of as many of the entries as could be copied; returns how many."""
        deadline = float("inf")
        timeouts_us = rows["timeout_us"]
        if timeouts_us.any():
            deadline = taken_at + int(timeouts_us[timeouts_us > 0].min()) / 1e6
        size += len(rows) * CALL_SIZE
        if time.monotonic() > deadline or not self._registered.share.take(size):
            return 0
        copied: list[Bytes | TierBlock] = []
        try:
            names = self._read_names(rows)
            self._copy(rows, namespace, iov, copied)
        except OSError:  # of the entry behind the copied ones: it is served alone, and gets the error
            rows = rows[: len(copied)]
            rest = size - sum(rows["length"].tolist()) - len(rows) * CALL_SIZE
            self._registered.share.give(rest)
            size -= rest
        except BaseException:
            self._registered.share.give(size)
            raise
        if copied:
            entry = Entry._make(SQE_STRUCT.unpack(rows[:1].tobytes()))._replace(length=size)
            batches.append(
                PutBatch(
                    self._ring, entry, deadline, namespace=namespace, names=names[: len(rows)], size=size,
                    rows=rows, taken_at=taken_at, blocks=[_data_of(one) for one in copied],
                )
            )  # fmt: skip
        return len(copied)

    def _read_names(self, rows: Entries) -> list[bytes]:
        """Read the file names of their keys, which the client may change afterwards."""
        starts, lengths = rows["key_offset"].tolist(), rows["key_length"].tolist()
        first, last = min(starts), max([start + length for start, length in zip(starts, lengths, strict=True)])
        if last - first > 2 * sum(lengths):
            keys = [self._aux[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)]
        else:
            text = self._aux[first:last].tobytes()
            keys = [text[start - first : start - first + length] for start, length in zip(starts, lengths, strict=True)]
        return file_names(keys)

    def _copy(self, rows: Entries, namespace: NamespaceHandle, iov: MappedIov, copied: list[Bytes | TierBlock]) -> None:
        """Copy the bytes of each, into the tier where that has room. OSError: those before it are in ``copied``."""
        offsets, lengths = rows["iov_offset"].tolist(), rows["length"].tolist()
        blocks = self._registered.allocate_many(namespace, lengths)
        targets = [
            np.empty(length, np.uint8) if block is None else block
            for block, length in zip(blocks, lengths, strict=True)
        ]
        if iov.is_sealed and iov.is_present(sum(lengths)):
            self._copy_together(iov, offsets, targets, lengths)
            copied += targets
            return
        for offset, target in zip(offsets, targets, strict=True):
            with self._ring.turns.copying(self._ring.seat):
                if isinstance(target, TierBlock):
                    target.checksums = iov.read_checked(offset, target.buffer)
                else:
                    iov.read(offset, target)
            copied.append(target)

    def _copy_together(
        self, iov: MappedIov, offsets: list[int], targets: list[Bytes | TierBlock], lengths: list[int]
    ) -> None:
        """Copy from memory that has all its pages, and keeps them."""
        memory = iov.bytes  # keeps the mapping
        copies = np.empty((len(targets), 3), np.int64)
        copies[:, 0] = offsets
        copies[:, 0] += iov.address
        copies[:, 1] = [one.address if isinstance(one, TierBlock) else one.ctypes.data for one in targets]
        copies[:, 2] = lengths
        with self._ring.turns.copying(self._ring.seat):
            checksums = copy_rows(copies)
        del memory
        start = 0
        for target, length in zip(targets, lengths, strict=True):
            end = start - (-length // GRANULE_SIZE) * CHECKSUM_SIZE
            if isinstance(target, TierBlock):
                target.checksums = checksums[start:end]
            start = end


def _data_of(copied: Bytes | TierBlock) -> memoryview | TierBlock:
    return copied if isinstance(copied, TierBlock) else copied.data
