"""Serves EXISTS, DELETE and PREFETCH of blocks that are rows in a ring's thread, where that needs no wait.

The answers, a byte for each key, go to the client's memory; the result is how many are not 0. Those of a DELETE are
there before it removes a block: where a kill comes between, the next daemon finds nothing, and answers so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.keys import file_names
from kvfuse.native.blockforms import name_columns
from kvfuse.usrbio.daemon.batches import LEFT, Batch, Results
from kvfuse.usrbio.daemon.call import Completions, Entry
from kvfuse.usrbio.daemon.client_memory import Bytes
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.registered_things import BlockDoor, NamespaceHandle
from kvfuse.usrbio.daemon.row_ops import measure
from kvfuse.usrbio.protocol.wire import SQE_STRUCT, Flag, Priority, unpack_keys

KEYS_AT_ONCE = 4096
"""keys of an entry beyond which the event loop does it, in parts: other rings wait for the whole of this one"""
_PREFIX = int(Flag.PREFIX)
Found = npt.NDArray[np.bool_]


class _Keys(NamedTuple):
    """What one entry asks about."""

    entry: Entry
    namespace: NamespaceHandle
    door: BlockDoor
    names: Sequence[bytes]


class RowKeys:
    """Of one ring (`batches.InThread`), whose thread owns it."""

    def __init__(self, registered: ClientRegistry, aux: Bytes, completions: Completions) -> None:
        self._registered = registered
        self._completions = completions
        self._aux = aux

    def close(self) -> None:
        """Drop references to the ring's memory. Nothing is served after this."""
        self._aux = self._aux[:0].copy()

    def exists(self, batch: Batch) -> Results | None:
        return self._serve(batch, _look_up, flags=_PREFIX)

    def delete(self, batch: Batch) -> Results | None:
        return self._serve(batch, self._drop)

    def prefetch(self, batch: Batch) -> Results | None:
        return self._serve(batch, _find_resident)

    def _serve(self, batch: Batch, answer: Callable[[_Keys], Found | None], *, flags: int = 0) -> Results | None:
        """``flags``: those that an entry may have. ``answer``: None: it has to wait."""
        first = batch.first
        namespace = self._registered.namespaces.get(first.handle)
        if namespace is None or (door := namespace.blocks) is None or first.flags & ~flags:
            return None
        results: Results = np.full(len(batch.rows), LEFT, np.int64)
        for number, fields in enumerate(SQE_STRUCT.iter_unpack(batch.rows.tobytes())):
            entry = Entry._make(fields)
            names = self._read_names(entry, batch.taken_at)
            if names is None or not _is_open(namespace, door):
                continue
            found = answer(_Keys(entry, namespace, door, names))
            if found is None:
                continue
            if first.flags & _PREFIX and not found.all():
                found[int(found.argmin()) :] = False
            self._aux[entry.offset : entry.offset + len(found)] = found
            results[number] = np.count_nonzero(found)
        return results

    def _read_names(self, entry: Entry, taken_at: float) -> Sequence[bytes] | None:
        """The names of an entry's keys; None: it is none that is served here. What is wrong is told later."""
        aux, start, end = self._aux, entry.key_offset, entry.key_offset + entry.key_length
        if not 0 < entry.length <= min(KEYS_AT_ONCE, entry.key_length) or entry.priority > Priority.LOW:
            return None
        if end > len(aux) or entry.offset + entry.length > len(aux) or entry.parent:
            return None
        if entry.offset < end and start < entry.offset + entry.length:  # the next daemon reads the keys again
            return None
        if entry.timeout_us and time.monotonic() > taken_at + entry.timeout_us / 1e6:
            return None
        try:
            return file_names(unpack_keys(aux[start:end].tobytes(), entry.length))
        except ValueError:
            return None

    def _drop(self, keys: _Keys) -> Found | None:
        namespace, door = keys.namespace, keys.door
        if namespace.read_only or not namespace.may_copy or namespace.waits or door.store.is_shared:
            return None
        former = self._completions.begin_known_answers(keys.entry, door.find(keys.names))
        if former is None:
            return None
        found: Found = np.frombuffer(former, np.uint8) != 0
        found |= np.array(door.store.drop(door.directory, keys.names), np.bool_)
        return found


def _is_open(namespace: NamespaceHandle, door: BlockDoor) -> bool:
    """What is known of the client's rights, and of the directory, is as it was; all that it has are rows."""
    is_there = namespace.is_checked and not (namespace.is_absent or namespace.is_cut_off)
    return is_there and door.is_current and not door.has_files


def _look_up(keys: _Keys) -> Found | None:
    if keys.door.store.is_shared and keys.door.terms.is_strict:
        return None
    began = time.perf_counter()
    found = keys.door.store.try_look_up(keys.door.directory, keys.door.namespace, name_columns(keys.names))
    if found is not None:
        measure(keys.namespace, "exists", time.perf_counter() - began, 1)
    return found


def _find_resident(keys: _Keys) -> Found | None:
    """Which blocks are in memory; None: one may have to be brought there."""
    door, loaded = keys.door, np.zeros(len(keys.names), np.bool_)
    if not door.store.knows_all or (door.store.is_shared and door.terms.is_strict):
        return None
    for table in door.readable:
        rows, _ = table.find(keys.names, door.store.now(table.namespace))
        here = np.flatnonzero(rows >= 0)
        is_loaded = table.rows["arena"][rows[here]] != 0
        if not is_loaded.all():
            return None
        loaded[here] = True
    return loaded
