"""Blocks in shared memory, found and copied without the daemon (`kvfuse/blockindex` says why that is right)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import compress
from mmap import PROT_READ, mmap
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvfuse.blockindex import (
    ABSENT,
    ARENA,
    ASKED_MAX,
    ASKED_OFFSET,
    ASKED_SIZE,
    HEADER_SIZE,
    TOUCHES_MAX,
    TOUCHES_SIZE,
    UNMAPPED,
    Numbers,
    Table,
)
from kvfuse.errors import Disconnected, EngineError
from kvfuse.usrbio.client.client import Client
from kvfuse.usrbio.client.files import Namespace
from kvfuse.usrbio.client.iov import address_of
from kvfuse.usrbio.client.session import Bytes, Session, close_all
from kvfuse.usrbio.protocol.wire import Request

Found = npt.NDArray[np.bool_]
Addresses = npt.NDArray[np.uint64]


class Copying(Protocol):
    """A copy that has begun."""

    def finish(self) -> Exception | None:
        """Wait for its end. Why it failed, if it did."""


Begin = Callable[[int, Bytes, int, int], Copying]
TABLES_MAX = 4
"""one for each owner and mode of blocks in a folder"""
LOOK_SECONDS = 5.0
"""after which a client that misses blocks asks whether there is another index"""


class _Mapped:
    """One index, the arenas of its blocks, and the page where reads of them are noted."""

    def __init__(self, session: Session, namespace: Namespace, number: int) -> None:
        """OSError: there is none. Disconnected, EngineError."""
        reply, descriptors = session.request(Request.MAP_INDEX, namespace.handle, number)
        try:
            self.table = Table(np.frombuffer(mmap(descriptors[0], reply.values[0], prot=PROT_READ), np.uint8))
            touches = np.frombuffer(mmap(descriptors[1], TOUCHES_SIZE), np.uint8)
        finally:
            close_all(descriptors)
        self._session = session
        self._count = touches[:8].view(np.uint64).data
        self._touched: npt.NDArray[np.uint32] = touches[HEADER_SIZE:ASKED_OFFSET].view(np.uint32)
        self._asked_count = touches[8:16].view(np.uint64).data
        self._asked = touches[ASKED_OFFSET:].reshape(ASKED_MAX, ASKED_SIZE)
        self._lock = threading.Lock()
        self._arenas = np.zeros(0, ARENA)
        self._held: list[Bytes] = []
        """the arenas, which stay mapped for whoever copies from their addresses"""
        self._refused: set[int] = set()

    def touch(self, slots: Numbers) -> None:
        """Note that blocks were read."""
        slots = slots[-TOUCHES_MAX:]
        if not len(slots):
            return
        with self._lock:
            count = self._count[0]
            start = count % TOUCHES_MAX
            first = slots[: TOUCHES_MAX - start]
            self._touched[start : start + len(first)] = first
            if len(first) < len(slots):
                self._touched[: len(slots) - len(first)] = slots[len(first) :]
            self._count[0] = (count + len(slots)) % (1 << 64)

    def ask(self, keys: Sequence[bytes]) -> None:
        """Note that blocks were asked for, of which some are absent: a cache learns from it."""
        keys = keys[: ASKED_MAX - 1]
        lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        with self._lock:
            count = self._asked_count[0]
            places_in = (count + 1 + np.arange(len(keys))) % ASKED_MAX
            self._asked[count % ASKED_MAX, 0] = 0
            self._asked[places_in, 0] = lengths
            for length in set(lengths.tolist()):
                same = lengths == length
                text = b"".join(keys if same.all() else compress(keys, same.tolist()))
                self._asked[places_in[same], 1 : 1 + length] = np.frombuffer(text, np.uint8).reshape(-1, length)
            self._asked_count[0] = (count + 1 + len(keys)) % (1 << 64)

    def get(self, keys: Sequence[bytes], targets: Addresses, rooms: Numbers) -> Numbers:
        """The length of each block that was copied, below 0 for others."""
        slots, results = self.table.get(keys, self._arenas, targets, rooms)
        if UNMAPPED in results and self._map_arenas(slots[results == UNMAPPED]):
            slots, results = self.table.get(keys, self._arenas, targets, rooms)
        if not self.table.holds():
            results[:] = ABSENT
        else:
            self.touch(slots[results >= 0])
        return results

    def copy(self, keys: Sequence[bytes], rooms: Numbers, begin: Begin) -> Numbers:
        """As `get`, by copies that run beside this thread. Each is judged when it has ended."""
        spots = self.table.look(keys)
        self._map_arenas(spots["slot"][spots["slot"] >= 0])
        where = {int(row["number"]): int(row["size"]) for row in self._arenas}
        results: Numbers = np.full(len(keys), ABSENT, np.int64)
        destinations: list[tuple[int, Copying]] = []
        try:
            for row in np.flatnonzero(spots["slot"] >= 0).tolist():
                _, _, arena, offset, length = spots[row].item()
                if length <= rooms[row] and offset + length <= where.get(arena, -1):
                    destinations.append((row, begin(row, self._session.arena(arena), offset, length)))
        finally:
            for row, landing in destinations:
                if landing.finish() is None and self.table.is_unchanged(spots[row]):
                    results[row] = spots[row]["length"]
        if not self.table.holds():
            results[:] = ABSENT
        else:
            self.touch(spots["slot"][results >= 0])
        return results

    def get_one(self, key: bytes, target: Addresses, room: Numbers) -> int:
        """As `get` of one, at less expense; below 0 also where an arena has to be mapped first."""
        slots, results = self.table.get([key], self._arenas, target, room)
        size = int(results[0])
        if size < 0 or not self.table.holds():
            return ABSENT
        with self._lock:
            count = self._count[0]
            self._touched[count % TOUCHES_MAX] = slots[0]
            self._count[0] = (count + 1) % (1 << 64)
        return size

    def _map_arenas(self, slots: Numbers) -> bool:
        """Map the arenas that blocks are in. False: there are no more than before."""
        numbers = set(self.table.slots["arena"][slots].tolist()) - self._refused
        rows = []
        for number in numbers - set(self._arenas["number"].tolist()):
            try:
                memory = self._session.arena(number)
            except OSError:  # it went meanwhile; numbers are not used again
                self._refused.add(number)
                continue
            self._held.append(memory)
            rows.append((number, address_of(memory), len(memory)))
        if rows:
            with self._lock:
                self._arenas = np.concatenate([self._arenas, np.array(rows, ARENA)])
        return bool(rows)


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

        The length of each, below 0 for those that the daemon has to be asked for, whose room has any bytes then. None:
        there is no index.
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
        if results is not None and (results < 0).any():
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
        if results is not None and (results < 0).any():
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

    def exists(self, keys: Sequence[bytes]) -> Found | None:
        """Which blocks there are, if each is either here or certainly nowhere. None: ask the daemon about all of them.

        A cache learns from the order in which blocks are asked for, also from those that are absent.
        """
        return self._search(keys, only_first=False)

    def longest_prefix(self, keys: Sequence[bytes]) -> int | None:
        """How many blocks from the first on are here, if the next one is certainly nowhere. None: as for `exists`."""
        found = self._search(keys, only_first=True)
        return None if found is None else len(keys) if found.all() else int(found.argmin())

    def _search(self, keys: Sequence[bytes], *, only_first: bool) -> Found | None:
        """Which blocks are here; None: one that is not may be elsewhere. ``only_first``: the first one, that is."""
        tables = self._present()
        if not tables:
            return None
        slots = [mapped.table.find(keys) for mapped in tables]
        found: Found = np.max(slots, axis=0) >= 0
        missing: Sequence[bytes] = keys
        if found.any():
            missing = () if found.all() else list(compress(keys, (~found).tolist()))
        absent = tables[0].table.lacks(missing) if missing else found[:0]
        if not absent[: 1 if only_first else None].all() or not all(mapped.table.holds() for mapped in tables):
            self._look_again()
            return None
        if missing:
            tables[0].ask(keys)
        else:
            for mapped, here in zip(tables, slots, strict=True):
                mapped.touch(here[here >= 0])
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
            threading.Thread(target=self._map, args=(session,), name="kvfuse-index", daemon=True).start()

    def _map(self, session: Session) -> None:
        """Map all tables. Who calls it has the turn."""
        try:
            tables: list[_Mapped] = []
            try:
                while len(tables) < TABLES_MAX and self._namespace.handle:
                    tables.append(_Mapped(session, self._namespace, len(tables)))
            except (OSError, Disconnected, EngineError):
                pass  # there are no more, or it is not for this client
            self._mapped, self._looked_at = (session, tables), monotonic()
        finally:
            self._turn.release()
