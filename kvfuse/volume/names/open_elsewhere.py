"""Frees files that this client removed from a shared volume, once no client has them open.

A client that has one open puts an ``h`` record within a grace. After a grace without one no client reads the file,
and its slots may be reused as soon as their freeing is committed. A client that is alone need not wait. A call
without room waits for files that are about to be freed (`Removed.free_removed_files`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count, islice

import msgspec
import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Versioned
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.commit.terms import slot_records_max
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.inodes.chunk import RESTED, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.large_removal import RETRY_SECONDS, list_far_chunks
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import all_keys, get_sound
from kvfuse.volume.store.transaction import Transaction

log = logging.getLogger(__name__)

FREED_MAX = 256
"""Removed inodes that are checked together."""
ALONE_SECONDS = 0.5
"""How long removed files rest if no other client is known: freeing many together is cheaper."""


@dataclass
class Removed:
    """Frees the files that this client removed. Each membership of a shared volume has one."""

    core: Core
    journal: Journal
    chunks: Chunks

    def __post_init__(self) -> None:
        self._removed = self.journal.refusals.to_free
        self._later = self._removed.waiting
        self._open: deque[tuple[float, int]] = deque()
        """(when it was found to be open, inode)"""
        self._is_wanted = False
        """a call waits for room"""
        self._is_looking = False
        """some inodes are being checked"""
        self._is_over = False
        """nothing is freed here any more: the membership has ended"""
        self.freed_at = -math.inf
        """when some were last freed while other hosts had the volume, which then free the slots in their slabs"""
        self._looked = trio.Event()
        """set, and replaced by a new one, after each check"""

    async def free_removed_files(self, deadline: float, namespace: int | None) -> bool:
        """A `Source`: free more of the files that this client removed. False: none is about to be freed."""
        if self._is_over or not (self._later or self._is_looking):
            return False
        self._is_wanted = True
        self._removed.hurry()
        with trio.move_on_at(deadline):
            await self._looked.wait()
            return not self._is_over
        return False

    async def run(self) -> None:
        """Free files that have rested, until cancelled. Open files are checked again a grace later.

        May be restarted.
        """
        self._is_over = False
        try:
            await self._run()
        finally:
            self._is_over = True
            self._looked.set()

    async def _run(self) -> None:
        while True:
            await self._removed.wait(self._find_due_time())
            inos = self._take_due()
            if not inos:
                continue
            self._is_looking = True
            try:
                await self._free_unheld(inos)
            except EngineError as error:
                log.warning("freeing %d removed inodes failed and is tried again: %s", len(inos), error)
                self._put_back(inos.items())
                await trio.sleep(RETRY_SECONDS)
            except Exception:
                self._put_back(inos.items())
                raise
            finally:
                self._is_looking = False
                self._looked.set()
                self._looked = trio.Event()

    @property
    def _rest_seconds(self) -> float:
        """How long removed files rest."""
        if not self.core.is_alone():
            return self.core.grace.seconds
        return 0.0 if self._is_wanted else ALONE_SECONDS

    def _find_due_time(self) -> float:
        """Time of the next check of an inode, in trio's time."""
        removed = self._later[0][0] + self._rest_seconds if self._later else math.inf
        found_open = self._open[0][0] + self.core.grace.seconds if self._open else math.inf
        return min(removed, found_open)

    def _take_due(self) -> dict[int, float]:
        """Take inodes to check now. Returns inode -> when it was removed, or found to be open."""
        now = trio.current_time()
        taken: dict[int, float] = {}
        for waiting, rest in ((self._later, self._rest_seconds), (self._open, self.core.grace.seconds)):
            while waiting and len(taken) < FREED_MAX and waiting[0][0] + rest <= now:
                since, ino = waiting.popleft()
                taken[ino] = since
        if not self._later:
            self._is_wanted = False
        return taken

    def _put_back(self, items: Iterable[tuple[int, float]]) -> None:
        """Return inodes whose check failed to the queue."""
        self._later.extendleft((since, ino) for ino, since in reversed(list(items)))

    async def _free_unheld(self, inos: dict[int, float]) -> None:
        """Free inodes that no client has open. ``inos``: from `_take_due`.

        It reads members first: a client from the time of the removal is still a member, or cannot read any more.
        """
        members = await self.core.records.scan(b"m", limit=2)
        if any(schema.key_client(row.key) != self.core.client for row in members):
            rested = trio.current_time() - self.core.grace.seconds
            early = {ino: since for ino, since in inos.items() if since > rested}
            if early:  # a client has joined that was not known here
                self._put_back(early.items())
                await trio.sleep(RETRY_SECONDS)
                inos = {ino: since for ino, since in inos.items() if ino not in early}
            self.freed_at = trio.current_time()
        held = {schema.split_open_key(key)[0] for key in await all_keys(self.core.records, b"h")}
        rows = await get_sound(self.core.records, [schema.orphan_key(ino) for ino in inos]) if inos else []
        for ino, row in zip(inos, rows, strict=True):
            known = self.core.nodes.get(ino)
            is_open = known is not None and known.handles > 0
            if ino in held or is_open or ino in self.core.nodes.handover.still_open:
                self._open.append((trio.current_time(), ino))
            elif row is not None:
                await self._free_orphan(schema.decode_orphan(row.value), row.version)

    async def _free_orphan(self, record: schema.InodeRecord, version: int) -> None:
        """Free everything of an orphan record. It must be this client's, or of a remover that is dead.

        ``version``: of the orphan record, which is expected with all that is freed.
        """
        known = self.core.nodes.get(record.ino)
        if known is not None:
            known.reaped = True
            known.end_map()
            self.core.nodes.drop(known)
        node = self.chunks.restore_chunks(Node.from_record(record), record)
        node.nlink, node.version = 0, version
        await self.chunks.load_all(node)
        if not await self._unfold_record(node, record):
            return
        items: list[tuple[bytes, list[Extent]]] = [(key, []) for key in await self._list_small_keys(node)]
        for index in list_far_chunks(node):
            items.append((schema.chunk_key(node.ino, index), node.chunks.pop(index).extents))
        await self._free_pieces(node, items)

    async def _list_small_keys(self, node: Node) -> list[bytes]:
        """Keys of its place, and of its attributes."""
        keys = [schema.place_key(node.ino)] if node.flags & schema.FLAG_PLACED else []
        after = b""
        while node.flags & schema.FLAG_XATTRS and (
            rows := await self.core.records.scan(schema.xattr_prefix(node.ino), after)
        ):
            for row in rows:
                keys.append(row.key)
                self.journal.pending.loose.note_attribute(row.key, Versioned(row.value, row.version))
            after = rows[-1].key
        return keys

    async def _unfold_record(self, node: Node, record: schema.InodeRecord) -> bool:
        """Move the slots of an orphan record to chunk records if one commit cannot free all of them.

        False: another client is freeing it. No client reads these chunks, so their numbers do not matter.
        """
        inline = [index for index in node.chunks if index < schema.INLINE_CHUNKS]
        if sum([len(node.chunks[index].extents) for index in inline]) <= self._slots_max:
            return True
        puts: dict[bytes, bytes] = {}
        numbers = (number for number in count(schema.INLINE_CHUNKS) if number not in node.chunks)
        for index, number in zip(inline, list(islice(numbers, len(inline))), strict=True):
            chunk = node.chunks[number] = node.chunks.pop(index)
            extents = tuple([extent.record() for extent in chunk.extents])
            puts[schema.chunk_key(node.ino, number)] = schema.encode_chunk(extents)
        key = schema.orphan_key(node.ino)
        rest = msgspec.structs.replace(record, chunks=(), flags=record.flags | schema.FLAG_CHUNK_RECORDS)
        puts[key] = schema.encode_orphan(rest, self.core.client)
        versions: list[int] = []
        if not await self.journal.transact(Transaction({key: node.version}, puts, applied=versions.append)):
            return False
        node.version = versions[-1]
        return True

    @property
    def _slots_max(self) -> int:
        """Most slots that one commit frees."""
        return 2 * slot_records_max(self.core.records.limits)

    async def _free_pieces(self, node: Node, items: list[tuple[bytes, list[Extent]]]) -> None:
        """Delete records and free their extents, in as many commits as needed.

        The last commit deletes the orphan record and frees its extents.
        """
        deleted_count = 0
        for key, extents in items:
            is_full = len(node.dead) + len(extents) > self._slots_max
            if deleted_count and (is_full or deleted_count == self.journal.chunk_count_max):
                self.journal.pending.add_gone(node)
                await self.journal.commit(node)
                deleted_count = 0
            node.extra[key] = None
            node.dead += _mark_rested(extents)
            deleted_count += 1
        inline_count = sum([len(chunk.extents) for chunk in node.chunks.values()])
        if deleted_count and len(node.dead) + inline_count > self._slots_max:
            self.journal.pending.add_gone(node)
            await self.journal.commit(node)
        node.extra[schema.orphan_key(node.ino)] = None
        for chunk in node.chunks.values():
            node.dead += _mark_rested(chunk.extents)
        self.journal.pending.add_gone(node)


def _mark_rested(extents: Iterable[Extent]) -> Iterable[Extent]:
    """Mark extents as rested: no client reads them, so their slots may be reused after the commit."""
    for extent in extents:
        extent.state = RESTED
        yield extent
