"""Serves entries of blocks that are rows (`kind=blocks`) in a ring's thread, as columns: GET, PUT, EXISTS, DELETE.

A single entry is a batch of one. What has to wait - for room, for a sync, for the medium, for a look at the client's
rights - is left to the event loop (`row_calls`), as is everything that is not plain.
"""

from __future__ import annotations

import errno
import time
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from kvfuse.native import blockforms as forms
from kvfuse.usrbio.daemon.call import Entry, ServedRing
from kvfuse.usrbio.daemon.client_memory import Bytes, MappedIov
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.columns import HIGH_HALF, are_plain, as_words
from kvfuse.usrbio.daemon.registered_things import BlockDoor, NamespaceHandle
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import SQE_STRUCT, Op, Priority

_KINDS = 1 << Op.GET | 1 << Op.PUT

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class RowOps:
    """Of one ring, whose thread owns it. ``op_mask``: bit n allows operation n."""

    def __init__(self, ring: ServedRing, registered: ClientRegistry, aux: Bytes, op_mask: int) -> None:
        self._ring = ring
        self._registered = registered
        self._aux = aux
        self._op_mask = op_mask & _KINDS

    def close(self) -> None:
        """Drop references to the ring's memory."""
        self._aux = self._aux[:0].copy()

    def is_wanted(self, handle: int) -> bool:
        """Entries of this handle are of blocks that are rows."""
        namespace = self._registered.namespaces.get(handle)
        return namespace is not None and namespace.blocks is not None

    def serve(self, rows: Entries, taken_at: float) -> Entries:
        """Serve what needs no wait. Returns the others, in their order."""
        if not self._op_mask or not any(one.blocks is not None for one in list(self._registered.namespaces.values())):
            return rows
        ops = rows["op"]
        if not (((ops == Op.GET) | (ops == Op.PUT)) & (rows["flags"] == 0)).any():
            return rows
        words = as_words(rows)
        kinds = words[:, 0], words[:, 1] & np.uint64(0xFFFFFFFF)
        if len(rows) == 1 or (bool((kinds[0] == kinds[0][0]).all()) and bool((kinds[1] == kinds[1][0]).all())):
            done = self._serve_kind(rows, words, taken_at)
            return rows if done is None else rows[~done]
        left = np.ones(len(rows), np.bool_)
        groups: dict[tuple[int, int], list[int]] = {}
        for number, kind in enumerate(zip(kinds[0].tolist(), kinds[1].tolist(), strict=True)):
            groups.setdefault(kind, []).append(number)
        for numbers in groups.values():
            done = self._serve_kind(rows[numbers], words[numbers], taken_at)
            if done is not None:
                left[numbers] = ~done
        return rows[left]

    def _serve_kind(self, rows: Entries, words: Words, taken_at: float) -> npt.NDArray[np.bool_] | None:
        """Serve entries of one op, handle and iov. Which are completed; None: none."""
        entry = Entry._make(SQE_STRUCT.unpack(rows[:1].tobytes()))
        namespace, iov = self._registered.namespaces.get(entry.handle), self._registered.iovs.get(entry.iov)
        if not self._op_mask >> entry.op & 1 or namespace is None or iov is None:
            return None
        door = namespace.blocks
        if door is None or entry.flags or entry.priority > Priority.LOW or namespace.measures.limiters:
            return None
        if not namespace.is_checked or namespace.is_absent or namespace.is_cut_off or not door.is_current:
            return None
        if not are_plain(words, iov.size, len(self._aux)) or _is_late(words, taken_at):
            return None
        if not iov.is_sealed or not iov.is_present(int(words[:, 4].sum())):
            return None
        serve = self._put if entry.op == Op.PUT else self._get
        return serve(namespace, door, iov, words)

    def _names(self, words: Words) -> tuple[Bytes, Words, npt.NDArray[np.uint32]]:
        return self._aux, np.ascontiguousarray(words[:, 5]), (words[:, 1] >> HIGH_HALF).astype(np.uint32)

    def _put(
        self, namespace: NamespaceHandle, door: BlockDoor, iov: MappedIov, words: Words
    ) -> npt.NDArray[np.bool_] | None:  # fmt: skip
        if namespace.read_only or not namespace.may_copy or namespace.waits or door.own is None or door.has_files:
            return None
        began = time.perf_counter()
        sizes = words[:, 4].astype(np.int64)
        memory = iov.bytes  # keeps the mapping
        with self._ring.turns.copying(self._ring.seat):
            results, _ = door.store.try_put(
                door.own, self._names(words), words[:, 3] + np.uint64(iov.address), sizes, door.terms, plain_only=True
            )
        del memory
        done: npt.NDArray[np.bool_] = results >= 0
        count = int(np.count_nonzero(done))
        if count:
            self._ring.completions.post(words[done, 6], sizes[done])
        refused = results == forms.NOT_ADMITTED
        if refused.any():
            self._ring.completions.post(words[refused, 6], np.full(int(np.count_nonzero(refused)), -errno.ECANCELED))
        if count:
            _measure(namespace, "put", time.perf_counter() - began, count)
            namespace.measures.written_bytes += int(sizes[done].sum())
        answered: npt.NDArray[np.bool_] = done | refused
        return answered

    def _get(
        self, namespace: NamespaceHandle, door: BlockDoor, iov: MappedIov, words: Words
    ) -> npt.NDArray[np.bool_] | None:  # fmt: skip
        if not iov.writable or not door.sees_all:
            return None
        began = time.perf_counter()
        text, offsets, lengths = self._names(words)
        targets, rooms = words[:, 3] + np.uint64(iov.address), words[:, 4].astype(np.int64)
        memory = iov.bytes
        results: Numbers = np.full(len(words), forms.ABSENT, np.int64)
        with self._ring.turns.copying(self._ring.seat):
            for table in door.readable:
                rest = np.flatnonzero(results == forms.ABSENT)
                if not len(rest):
                    break
                results[rest] = door.store.get_columns(
                    table, (text, offsets[rest], lengths[rest]), targets[rest], rooms[rest]
                )
        del memory
        done: npt.NDArray[np.bool_] = results >= 0
        if not door.has_files and door.store.knows_all:
            absent = results == forms.ABSENT
            results[absent] = -errno.ENOENT
            done |= absent
        count = int(np.count_nonzero(done))
        if count:
            self._ring.completions.post(words[done, 6], results[done])
            _measure(namespace, "get", time.perf_counter() - began, count)
            namespace.measures.read_bytes += int(np.maximum(results[done], 0).sum())
        return done


def _measure(namespace: NamespaceHandle, what: str, seconds: float, count: int) -> None:
    times = namespace.measures.seconds[what]
    times.counts[bisect_left(times.bounds, seconds)] += count
    times.sum += seconds * count


def _is_late(words: Words, taken_at: float) -> bool:
    timeouts = words[:, 7]
    if not timeouts.any():
        return False
    waited = (time.monotonic() - taken_at) * 1e6
    return bool(((timeouts > 0) & (timeouts < waited)).any())
