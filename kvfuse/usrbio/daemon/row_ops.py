"""Serves entries of blocks that are rows (`kind=blocks`) in a ring's thread, as columns: GET, PUT, EXISTS, DELETE.

A single entry is a batch of one. What has to wait - for room, for a sync, for the medium, for a look at the client's
rights - is left to the event loop (`row_calls`), as is everything that is not plain.
"""

from __future__ import annotations

import errno
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import entry_columns
from kvfuse.usrbio.daemon.call import Entry, ServedRing
from kvfuse.usrbio.daemon.client_memory import SMALL, Bytes, MappedIov
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.columns import LOW_HALF, are_equal, as_words
from kvfuse.usrbio.daemon.registered_things import BlockDoor, NamespaceHandle
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import HINT_BITS, LENGTH_MAX, SQE_STRUCT, Op, Priority

GET, PUT = int(Op.GET), int(Op.PUT)  # plain numbers: those of an enumeration are slow to look up
LEFT = -1 << 31
"""a result: the event loop has to do it"""

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class _Batch(NamedTuple):
    """Entries of one operation, handle and iov: what they are about, and columns of what they name.

    ``total``: bytes of all of them. ``hints``: of a PUT; all entries have the same.
    """

    namespace: NamespaceHandle
    door: BlockDoor
    iov: MappedIov
    total: int
    hints: int
    offsets: Words
    addresses: Words
    sizes: Numbers
    places: Words
    lengths: npt.NDArray[np.uint32]


class RowOps:
    """Of one ring, whose thread owns it. ``op_mask``: bit n allows operation n."""

    def __init__(self, ring: ServedRing, registered: ClientRegistry, aux: Bytes, op_mask: int) -> None:
        self._ring = ring
        self._registered = registered
        self._aux = aux
        self._aux_size = len(aux)
        known: dict[int, Callable[[_Batch], Numbers | None]] = {GET: self._get, PUT: self._put}
        self._serve_batch = {op: serve for op, serve in known.items() if op_mask >> op & 1}

    def close(self) -> None:
        """Drop references to the ring's memory."""
        self._aux = self._aux[:0].copy()
        self._serve_batch = {}

    def serve(self, rows: Entries, taken_at: float) -> Entries:
        """Serve what needs no wait. Returns the others, in their order."""
        words = as_words(rows)
        kinds = words[:, 0], words[:, 1] & LOW_HALF
        if len(rows) == 1 or (are_equal(kinds[0]) and are_equal(kinds[1])):
            done = self._serve_kind(words, taken_at)
            return rows if done is None else rows[~done]
        left = np.ones(len(rows), np.bool_)
        groups: dict[tuple[int, int], list[int]] = {}
        for number, kind in enumerate(zip(kinds[0].tolist(), kinds[1].tolist(), strict=True)):
            groups.setdefault(kind, []).append(number)
        for numbers in groups.values():
            done = self._serve_kind(words[numbers], taken_at)
            if done is not None:
                left[numbers] = ~done
        return rows[left]

    def _serve_kind(self, words: Words, taken_at: float) -> npt.NDArray[np.bool_] | None:
        """Serve entries of one operation, handle and iov. Which are completed; None: none."""
        entry = Entry._make(SQE_STRUCT.unpack(words[0].tobytes()))
        serve = self._serve_batch.get(entry.op)
        batch = self._find(entry, words, len(words), taken_at) if serve is not None else None
        results = serve(batch) if serve is not None and batch is not None else None
        if results is None or batch is None:
            return None
        done: npt.NDArray[np.bool_] = results != LEFT
        if done.all():
            self._ring.completions.post(batch.places, results)
        elif done.any():
            self._ring.completions.post(batch.places[done], results[done])
        return done

    def serve_one(self, entry: Entry, packed: bytearray, taken_at: float) -> int | None:
        """The result of an entry that is alone; None: it needs a wait, or is no such entry."""
        serve = self._serve_batch.get(entry.op)
        batch = self._find(entry, packed, 1, taken_at) if serve is not None else None
        results = serve(batch) if serve is not None and batch is not None else None
        if results is None or (result := int(results[0])) == LEFT:
            return None
        return result

    def _find(self, entry: Entry, entries: bytearray | Words, count: int, taken_at: float) -> _Batch | None:
        """What entries of the kind of ``entry`` are about; None: they are not plain, or not of rows."""
        registered = self._registered
        namespace = registered.namespaces.get(entry.handle)
        if namespace is None or (door := namespace.blocks) is None or (iov := registered.iovs.get(entry.iov)) is None:
            return None
        if entry.flags or entry.priority > Priority.LOW or namespace.measures.limiters or not iov.is_sealed:
            return None
        if not namespace.is_checked or namespace.is_absent or namespace.is_cut_off or not door.is_current:
            return None
        is_put = entry.op == PUT
        if is_put and isinstance(entries, np.ndarray) and not are_equal(entries[:, 2]):
            return None
        if is_put and entry.offset >> HINT_BITS:
            return None
        columns = np.empty((5, count), np.uint64)
        waited_us = int((time.monotonic() - taken_at) * 1e6)
        total = entry_columns(entries, self._aux_size, iov.address, iov.size, LENGTH_MAX, waited_us, columns)
        if total < 0 or not iov.is_present(total):
            return None
        offsets, addresses, sizes, places, lengths = columns
        return _Batch(
            namespace, door, iov, total, entry.offset if is_put else 0, offsets, addresses, sizes.view(np.int64),
            places, lengths.view(np.uint32)[:count],
        )  # fmt: skip

    def _has_name(self, batch: _Batch, names: frozenset[bytes]) -> bool:
        """Some entry has one of these names."""
        like = np.flatnonzero(np.isin(batch.lengths, [len(name) for name in names])).tolist()
        starts, lengths = batch.offsets, batch.lengths
        return any(bytes(self._aux[int(starts[n]) : int(starts[n]) + int(lengths[n])]) in names for n in like)

    def _put(self, batch: _Batch) -> Numbers | None:
        namespace, door, iov = batch.namespace, batch.door, batch.iov
        if namespace.read_only or not namespace.may_copy or namespace.waits or door.own is None or door.has_files:
            return None
        directories = door.store.directories.get(door.directory)
        if directories and self._has_name(batch, directories):
            return None
        began = time.perf_counter()
        memory = iov.bytes  # keeps the mapping
        names, terms = (self._aux, batch.offsets, batch.lengths), door.terms_of(batch.hints)
        with self._ring.turns.copying(self._ring.seat) if batch.total > SMALL else nullcontext():
            rows, _ = door.store.try_put(door.own, names, batch.addresses, batch.sizes, terms, plain_only=True)
        del memory
        count, results, stored = len(rows), batch.sizes, batch.total
        if (rows < 0).any():
            is_done = rows >= 0
            count, stored = int(np.count_nonzero(is_done)), int(results[is_done].sum())
            results = np.where(is_done, results, np.where(rows == forms.NOT_ADMITTED, -errno.ECANCELED, LEFT))
        if count:
            _measure(namespace, "put", time.perf_counter() - began, count)
            namespace.measures.written_bytes += stored
        return results

    def _get(self, batch: _Batch) -> Numbers | None:
        namespace, door, iov = batch.namespace, batch.door, batch.iov
        if not iov.writable or not door.sees_all:
            return None
        began = time.perf_counter()
        memory = iov.bytes
        results: Numbers = np.full(len(batch.sizes), forms.ABSENT, np.int64)
        with self._ring.turns.copying(self._ring.seat) if batch.total > SMALL else nullcontext():
            for table in door.readable:
                rest = np.flatnonzero(results == forms.ABSENT)
                if not len(rest):
                    break
                names = self._aux, batch.offsets[rest], batch.lengths[rest]
                results[rest] = door.store.get_columns(table, names, batch.addresses[rest], batch.sizes[rest])
        del memory
        got = results[results >= 0]
        is_known = not door.has_files and door.store.knows_all
        absent = np.flatnonzero(results == forms.ABSENT)
        if len(absent) and is_known:
            names = self._aux, batch.offsets[absent], batch.lengths[absent]
            door.store.note_chain(door.directory, names, is_read=True)
        results[results < 0] = np.where(results[results < 0] == forms.ABSENT, -errno.ENOENT if is_known else LEFT, LEFT)
        count = int(np.count_nonzero(results != LEFT))
        if count:
            _measure(namespace, "get", time.perf_counter() - began, count)
            namespace.measures.read_bytes += int(got.sum())
        return results


def _measure(namespace: NamespaceHandle, what: str, seconds: float, count: int) -> None:
    times = namespace.measures.seconds[what]
    times.counts[bisect_left(times.bounds, seconds)] += count
    times.sum += seconds * count
