"""Serves GET and PUT of blocks that are rows (`kind=blocks`) in a ring's thread, as columns.

What has to wait - for a sync, for the medium, for a look at the client's rights, for longer than a moment for room - is
left to the event loop (`row_calls`), as is everything that is not plain.
"""

from __future__ import annotations

import errno
import time
from bisect import bisect_left
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.access.namespace_handle import BlockDoor, NamespaceHandle
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import entry_columns
from kvfuse.usrbio.daemon.batches import LEFT, Batch, Results
from kvfuse.usrbio.daemon.call import ServedRing
from kvfuse.usrbio.daemon.client_memory import SMALL, Bytes, MappedIov
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.columns import are_equal, as_words
from kvfuse.usrbio.protocol.wire import HINT_BITS, LENGTH_MAX, Priority, PutHints
from kvfuse.volume.api import RowTable, RowTerms

ROOM_SECONDS = 0.2
"""for which a batch of puts waits for room in the ring's thread, all in all"""
_SHORT = (forms.NO_SLOT, forms.NO_MEMORY, forms.NO_QUOTA)
Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class _Blocks(NamedTuple):
    """What a batch is about, and columns of what its entries name. ``total``: bytes of all of them."""

    namespace: NamespaceHandle
    door: BlockDoor
    iov: MappedIov
    total: int
    offsets: Words
    addresses: Words
    sizes: Numbers
    lengths: npt.NDArray[np.uint32]


class RowOps:
    """GET and PUT of one ring (`batches.InThread`), whose thread owns it."""

    def __init__(self, ring: ServedRing, registered: ClientRegistry, aux: Bytes) -> None:
        self._ring = ring
        self._registered = registered
        self._aux = aux
        self._aux_size = len(aux)

    def close(self) -> None:
        """Drop references to the ring's memory. Nothing is served after this."""
        self._aux = self._aux[:0].copy()

    def get(self, batch: Batch) -> Results | None:
        found = self._find(batch)
        return self._get(found) if found is not None else None

    def put(self, batch: Batch) -> Results | None:
        hints = batch.first.offset
        if hints >> HINT_BITS or not are_equal(as_words(batch.rows)[:, 2]):
            return None
        found = self._find(batch)
        return self._put(found, found.door.terms_of(*PutHints.unpack(hints))) if found is not None else None

    def _find(self, batch: Batch) -> _Blocks | None:
        """What entries are about; None: they are not plain, or not of rows."""
        entry, rows, taken_at = batch
        registered, count = self._registered, len(rows)
        namespace = registered.namespaces.get(entry.handle)
        if namespace is None or (door := namespace.blocks) is None or (iov := registered.iovs.get(entry.iov)) is None:
            return None
        if entry.flags or entry.priority > Priority.LOW or namespace.measures.limiters or not iov.is_sealed:
            return None
        if not namespace.is_checked or namespace.is_absent or namespace.is_cut_off or not door.is_current:
            return None
        columns = np.empty((4, count), np.uint64)
        waited_us = int((time.monotonic() - taken_at) * 1e6)
        total = entry_columns(rows, self._aux_size, iov.address, iov.size, LENGTH_MAX, waited_us, columns)
        if total < 0 or not iov.is_present(total):
            return None
        offsets, addresses, sizes, lengths = columns
        return _Blocks(
            namespace, door, iov, total, offsets, addresses, sizes.view(np.int64), lengths.view(np.uint32)[:count]
        )

    def _has_name(self, blocks: _Blocks, names: frozenset[bytes]) -> bool:
        """Some entry has one of these names."""
        like = np.flatnonzero(np.isin(blocks.lengths, [len(name) for name in names])).tolist()
        starts, lengths = blocks.offsets, blocks.lengths
        return any(bytes(self._aux[int(starts[n]) : int(starts[n]) + int(lengths[n])]) in names for n in like)

    def _put(self, blocks: _Blocks, terms: RowTerms) -> Results | None:
        namespace, door, iov = blocks.namespace, blocks.door, blocks.iov
        if namespace.read_only or not namespace.may_copy or namespace.waits or door.own is None or door.has_files:
            return None
        directories = door.store.directories.get(door.directory)
        if directories and self._has_name(blocks, directories):
            return None
        began = time.perf_counter()
        memory = iov.bytes  # keeps the mapping
        rows = self._store(blocks, door.own, terms)
        del memory
        count, results, stored = len(rows), blocks.sizes, blocks.total
        if int(rows.min()) < 0:
            is_done = rows >= 0
            count, stored = int(np.count_nonzero(is_done)), int(results[is_done].sum())
            results = np.where(is_done, results, np.where(rows == forms.NOT_ADMITTED, -errno.ECANCELED, LEFT))
        if count:
            measure(namespace, "put", time.perf_counter() - began, count)
            namespace.measures.written_bytes += stored
        return results

    def _store(self, blocks: _Blocks, table: RowTable, terms: RowTerms) -> Results:
        """Store blocks, wait a moment for room where there is none: rows, or codes of `forms`."""
        rows = self._try_to_store(blocks, table, terms)
        give_up = 0.0
        while int(rows.min()) < 0:
            rest = np.flatnonzero((rows == forms.NOT_TRIED) | np.isin(rows, _SHORT))
            if not len(rest):
                break
            why, size = int(rows[rest[0]]), int(blocks.sizes[rest[0]])
            if why != forms.NOT_TRIED:  # else it stands behind one that is never stored here
                give_up = give_up or time.monotonic() + ROOM_SECONDS
                with self._ring.turns.resting(self._ring.seat):
                    has_room = time.monotonic() < give_up and blocks.door.store.wait_for_room(why, table, size)
                if not has_room:
                    break
            part = blocks._replace(
                total=int(blocks.sizes[rest].sum()), offsets=blocks.offsets[rest], addresses=blocks.addresses[rest],
                sizes=blocks.sizes[rest], lengths=blocks.lengths[rest],
            )  # fmt: skip
            rows = rows.copy()  # the store has noted what it was
            rows[rest] = self._try_to_store(part, table, terms)
        return rows

    def _try_to_store(self, blocks: _Blocks, table: RowTable, terms: RowTerms) -> Results:
        door, names = blocks.door, (self._aux, blocks.offsets, blocks.lengths)
        with self._ring.turns.copying(self._ring.seat) if blocks.total > SMALL else nullcontext():
            return door.store.try_put(table, names, blocks.addresses, blocks.sizes, terms, plain_only=True)[0]

    def _get(self, blocks: _Blocks) -> Results | None:
        namespace, door, iov = blocks.namespace, blocks.door, blocks.iov
        if not iov.writable or not door.sees_all:
            return None
        began = time.perf_counter()
        memory = iov.bytes
        with self._ring.turns.copying(self._ring.seat) if blocks.total > SMALL else nullcontext():
            results = self._copy(blocks)
        del memory
        count, size = len(results), int(results.sum())
        if int(results.min()) < 0:
            is_absent, is_copied = results == forms.ABSENT, results >= 0
            is_known = not door.has_files and door.store.knows_all
            size = int(results[is_copied].sum())
            if is_known and is_absent.any():
                names = self._aux, blocks.offsets[is_absent], blocks.lengths[is_absent]
                cold = door.store.find_cold(door.directory, names)
                if cold is not None and cold.any():  # the event loop brings them back
                    results[np.flatnonzero(is_absent)[cold]] = LEFT
                    is_absent = results == forms.ABSENT
                    names = self._aux, blocks.offsets[is_absent], blocks.lengths[is_absent]
                door.store.note_chain(door.directory, names, is_read=True)
            results = np.where(is_copied, results, np.where(is_absent & is_known, -errno.ENOENT, LEFT))
            count = int(np.count_nonzero(results != LEFT))
        if count:
            measure(namespace, "get", time.perf_counter() - began, count)
            namespace.measures.read_bytes += size
        return results

    def _copy(self, blocks: _Blocks) -> Results:
        """Copy blocks that are in memory to the client: lengths, or codes of `forms`."""
        door, names = blocks.door, (self._aux, blocks.offsets, blocks.lengths)
        if len(door.readable) == 1:
            return door.store.get_columns(door.readable[0], names, blocks.addresses, blocks.sizes, plain_only=True)
        results: Results = np.full(len(blocks.sizes), forms.ABSENT, np.int64)
        for table in door.readable:
            rest = np.flatnonzero(results == forms.ABSENT)
            if not len(rest):
                break
            names = self._aux, blocks.offsets[rest], blocks.lengths[rest]
            results[rest] = door.store.get_columns(
                table, names, blocks.addresses[rest], blocks.sizes[rest], plain_only=True
            )
        return results


def measure(namespace: NamespaceHandle, what: str, seconds: float, count: int) -> None:
    """Count operations that took so long together."""
    times = namespace.measures.seconds[what]
    times.counts[bisect_left(times.bounds, seconds)] += count
    times.sum += seconds * count
