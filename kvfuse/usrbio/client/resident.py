"""Blocks in shared memory, found and copied without the daemon.

`kvfuse/native/blocktable.h` says why that is right. Blocks that are files are got through rings alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from errno import ENOENT
from itertools import compress
from mmap import PROT_READ, mmap
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvfuse.errors import Disconnected, EngineError
from kvfuse.keys import encode_keys
from kvfuse.native import blockforms as forms
from kvfuse.usrbio.client.client import Client
from kvfuse.usrbio.client.files import Namespace
from kvfuse.usrbio.client.iov import address_of
from kvfuse.usrbio.client.mapped_arenas import MappedArenas
from kvfuse.usrbio.client.mapped_table import MappedTable
from kvfuse.usrbio.client.session import Bytes, Session, close_all
from kvfuse.usrbio.client.touch_notes import TouchNotes
from kvfuse.usrbio.protocol.wire import Request

Found = npt.NDArray[np.bool_]
Addresses = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class Copying(Protocol):
    """A copy that has begun."""

    def finish(self) -> Exception | None:
        """Wait for its end. Why it failed, if it did."""


Begin = Callable[[int, Bytes, int, int], Copying]
NOT_HERE, NOWHERE = forms.ABSENT, -ENOENT
"""results of blocks: the daemon has to be asked; there certainly is none"""
TABLES_MAX = 4
"""one for each owner and mode of blocks in a folder"""
LOOK_SECONDS = 5.0
"""after which a client that misses blocks asks whether there is another table"""


class _Mapped:
    """A table that is mapped, with the arenas of its blocks."""

    def __init__(self, table: MappedTable, touches: TouchNotes, arenas: MappedArenas) -> None:
        self.table = table
        self.touches = touches
        self._arenas = arenas

    def look_up(self, keys: Sequence[bytes | str]) -> Numbers:
        return self.table.look_up(keys)

    def get(self, keys: Sequence[bytes], targets: Addresses, rooms: Numbers) -> Numbers:
        """The length of each block that was copied, `NOWHERE` for those that there certainly are not, `NOT_HERE` for
        others."""
        arenas, table = self._arenas, self.table
        rows, results = table.get(keys, arenas.rows, targets, rooms)
        if forms.NOT_MAPPED in results and arenas.map(table.rows["arena"][rows[results == forms.NOT_MAPPED]]):
            rows, results = table.get(keys, arenas.rows, targets, rooms)
        absent = self._judge(rows, results)
        self.touches.touch(rows[results >= 0])
        if absent.any():
            self.touches.ask(list(compress(keys, absent.tolist())))
        return results

    def _judge(self, rows: Numbers, results: Numbers) -> Found:
        """Whether the results of now hold; which blocks there are not."""
        absent: Found = rows == forms.ABSENT
        absent &= self.table.is_complete
        holds = self.table.holds()
        results[(results < 0) | (not holds)] = NOT_HERE
        absent &= holds
        results[absent] = NOWHERE
        return absent

    def get_one(self, key: bytes, target: Addresses, room: Numbers) -> int:
        """As `get` of one, at less expense; `NOT_HERE` also where an arena has to be mapped first."""
        row, size = self.table.get_one(key, self._arenas.rows, target, room)
        if size < 0 or not self.table.holds():
            return NOT_HERE
        self.touches.touch_one(row)
        return size

    def copy(self, keys: Sequence[bytes], rooms: Numbers, begin: Begin) -> Numbers:
        """As `get`, by copies that run beside this thread. Each is judged when it has ended."""
        spots = self.table.look(keys)
        here = (spots["row"] >= 0) & (spots["arena"] != 0)
        self._arenas.map(spots["arena"][here])
        results = _copy_spots(self.table, self._arenas, spots, here, rooms, begin)
        self._judge(np.where(results < 0, spots["row"], 0), results)
        self.touches.touch(spots["row"][results >= 0])
        return results


def _copy_spots(
    table: MappedTable, arenas: MappedArenas, spots: npt.NDArray[np.void], here: Found, rooms: Numbers,
    begin: Begin,
) -> Numbers:  # fmt: skip
    """Copy blocks from their spots, by copies that the caller begins: the length of each, `NOT_HERE` for others."""
    results: Numbers = np.full(len(spots), NOT_HERE, np.int64)
    destinations: list[tuple[int, Copying]] = []
    try:
        for row in np.flatnonzero(here).tolist():
            _, _, arena, offset, length = spots[row].item()
            if length <= rooms[row] and offset + length <= arenas.size_of(arena):
                destinations.append((row, begin(row, arenas.bytes_of(arena), offset, length)))
    finally:
        for row, landing in destinations:
            if landing.finish() is None and table.is_unchanged(spots[row]):
                results[row] = spots[row]["length"]
    if not table.holds():
        results[:] = NOT_HERE
    return results


def _open(session: Session, namespace: Namespace, number: int, former: Sequence[_Mapped]) -> _Mapped:
    """Map a table. ``former``: what is mapped already is not mapped again, as far as it is the same.

    OSError: there is none. Disconnected, EngineError.
    """
    reply, descriptors = session.request(Request.MAP_INDEX, namespace.handle, number)
    try:
        memory = np.frombuffer(mmap(descriptors[0], reply.values[0], prot=PROT_READ), np.uint8)
        touches = TouchNotes(descriptors[1])
    finally:
        close_all(descriptors)
    table, arenas = MappedTable(memory), MappedArenas(session)
    for other in former:
        if other.table.serial == table.serial:
            table, arenas = other.table, other._arenas
    return _Mapped(table, touches, arenas)


class ResidentBlocks:
    """Of one namespace; for any number of threads. Whatever it does not find, the daemon is asked.

    Tables that ended are mapped anew in a thread of their own: callers do not wait for the daemon here.
    """

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self._client = client
        self._namespace = namespace
        self._mapped: tuple[Session | None, list[_Mapped]] = None, []
        """tables, and of which connection they are"""
        self._looked_at = 0.0
        self._turn = threading.Lock()
        """of who maps tables"""
        if self._turn.acquire():
            self._map(client.session)

    def get(self, keys: Sequence[bytes], targets: Addresses, rooms: Numbers) -> Numbers | None:
        """Copy blocks to ``targets`` (addresses), where there is room for so many bytes.

        The length of each; `NOWHERE` for those that certainly are absent; `NOT_HERE` for those that the daemon has to
        be asked for, whose room has any bytes then. None: there is no table.
        """
        results: Numbers | None = None
        for mapped in self._present():
            if results is None:
                results = mapped.get(keys, targets, rooms)
                continue
            left = np.flatnonzero(results < 0)
            if not len(left):
                break
            results[left] = mapped.get([keys[row] for row in left.tolist()], targets[left], rooms[left])
        if results is not None and (results == NOT_HERE).any():
            self._look_again()
        return results

    def brings(self) -> bool:
        """Other hosts may have what is not here."""
        return any(mapped.table.has_neighbours for mapped in self._present())

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that are not here."""
        tables = self._present()
        if not tables or not keys:
            return list(keys)
        found = np.max([mapped.table.find(keys) for mapped in tables], axis=0) >= 0
        return list(compress(keys, (~found).tolist()))

    def copy(self, keys: Sequence[bytes], rooms: Numbers, begin: Begin) -> Numbers | None:
        """As `get`, by copies that the caller begins. ``begin``: (row, arena, offset, size) -> what may be waited for.

        A copy that was overtaken, or failed, has a result below 0 and may have written anything. When this returns, or
        raises, no copy is under way.
        """
        results: Numbers | None = None
        for mapped in self._present():
            if results is None:
                results = mapped.copy(keys, rooms, begin)
                continue
            left = np.flatnonzero(results < 0)
            if not len(left):
                break
            rows = left.tolist()
            asked = [keys[row] for row in rows]
            results[left] = mapped.copy(asked, rooms[left], lambda row, *where, rows=rows: begin(rows[row], *where))
        if results is not None and (results == NOT_HERE).any():
            self._look_again()
        return results

    def get_one(self, key: bytes, buffer: Bytes) -> int | None:
        """The length of the block, which was copied to the start of ``buffer``; None: `get` may find it."""
        target, room = np.array((address_of(buffer),), np.uint64), np.array((len(buffer),), np.int64)
        for mapped in self._present():
            size = mapped.get_one(key, target, room)
            if size >= 0:
                return size
        return None

    def exists(self, keys: Sequence[bytes | str]) -> Found | None:
        """Which blocks there are, if each is either here or certainly nowhere. None: ask the daemon about all of them.

        A cache learns from the order in which blocks are asked for, also from those that are absent.
        """
        return self._search(keys, only_first=False)

    def longest_prefix(self, keys: Sequence[bytes | str]) -> int | None:
        """How many blocks from the first on are here, if the next one is certainly nowhere. None: as for `exists`."""
        found = self._search(keys, only_first=True)
        return None if found is None else len(keys) if found.all() else int(found.argmin())

    def _search(self, keys: Sequence[bytes | str], *, only_first: bool) -> Found | None:
        """Which blocks are here; None: one that is not may be elsewhere. ``only_first``: the first one, that is."""
        tables = self._present()
        if not tables:
            return None
        slots = [mapped.look_up(keys) for mapped in tables]
        found: Found = (np.max(slots, axis=0) if len(slots) > 1 else slots[0]) >= 0
        if found.all():
            if not all(mapped.table.holds() for mapped in tables):
                self._look_again()
                return None
            for mapped, here in zip(tables, slots, strict=True):
                mapped.touches.touch(here[here >= 0] if len(slots) > 1 else here)
            return found
        encoded = encode_keys(keys)
        absent = tables[0].table.lacks(list(compress(encoded, (~found).tolist())))
        if not absent[: 1 if only_first else None].all() or not all(mapped.table.holds() for mapped in tables):
            self._look_again()
            return None
        tables[0].touches.ask(encoded)
        return found

    def _present(self) -> list[_Mapped]:
        """The tables of the present connection; none where it has ended."""
        session, (mapped_of, tables) = self._client.session, self._mapped
        if session.has_ended:
            return []
        if session is not mapped_of:
            self._map_soon(session)
            return []
        if not tables:
            self._look_again()
        elif any(mapped.table.has_ended for mapped in tables):
            self._map_soon(session)
        return tables

    def _look_again(self) -> None:
        """Blocks are missing: there may be others by now, of other owners."""
        if self._looked_at + LOOK_SECONDS < monotonic():
            self._map_soon(self._client.session)

    def _map_soon(self, session: Session) -> None:
        if self._turn.acquire(blocking=False):  # else another thread does it
            threading.Thread(target=self._map, args=(session,), name="kvfuse-tables", daemon=True).start()

    def _map(self, session: Session) -> None:
        """Map all tables. Who calls it has the turn."""
        try:
            tables: list[_Mapped] = []
            former = self._mapped[1] if self._mapped[0] is session else []
            try:
                while len(tables) < TABLES_MAX and self._namespace.handle:
                    tables.append(_open(session, self._namespace, len(tables), former))
            except (OSError, Disconnected, EngineError):
                pass  # there are no more, or it is not for this client
            self._mapped, self._looked_at = (session, tables), monotonic()
        finally:
            self._turn.release()
