"""Files that this client removed from a shared volume: freed when nobody has them open, here or elsewhere.

Who has one open elsewhere says so within a grace (``h`` records). What rested for that long is read by nobody: its
slots may be written again as soon as it is committed that they are free. A client that is alone need not wait. Who has
no room waits for what is on its way (`Removed.free_removed_files`).
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
from kvfuse.volume.commit.planner import slot_records_max
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.inodes.chunk import RESTED, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.large_removal import RETRY_SECONDS, far_chunks
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import all_keys, get_sound
from kvfuse.volume.store.transaction import Transaction

log = logging.getLogger(__name__)

FREED_MAX = 64
"""Removed inodes that are looked at together."""
ALONE_SECONDS = 0.5
"""How long what a client removed stays that is alone: to free many together costs less."""


@dataclass
class Removed:
    """See the module."""

    core: Core
    journal: Journal
    chunks: Chunks

    def __post_init__(self) -> None:
        self._removed = self.journal.refusals.to_free
        self._later = self._removed.waiting
        self._open: deque[tuple[float, int]] = deque()
        """(when it was found to be open, inode)"""
        self._is_wanted = False
        """somebody has no room"""
        self._is_looking = False
        """some are looked at just now"""
        self.freed_at = -math.inf
        """when some were last freed while other hosts had the volume: slots in their slabs are theirs to free"""
        self._looked = trio.Event()
        """set, and replaced by a new one, after each look"""

    async def free_removed_files(self, deadline: float) -> bool:
        """A `Source`: has more of what this client removed freed. False: nothing of it is about to be."""
        if not (self._later or self._is_looking):
            return False
        self._is_wanted = True
        self._removed.hurry()
        with trio.move_on_at(deadline):
            await self._looked.wait()
            return True
        return False

    async def run(self) -> None:
        """Free what was removed a while ago, for ever. An open file is looked at again a grace later."""
        while True:
            await self._removed.wait(self._due())
            inos = self._take_due()
            if not inos:
                continue
            self._is_looking = True
            try:
                await self._free_unheld(inos)
            except EngineError as error:
                log.warning("%d removed inodes are not freed yet: %s", len(inos), error)
                await self._put_back(inos.items())
            finally:
                self._is_looking = False
                self._looked.set()
                self._looked = trio.Event()

    @property
    def _rest_seconds(self) -> float:
        """How long what was removed stays."""
        if not self.core.is_alone():
            return self.core.grace.seconds
        return 0.0 if self._is_wanted else ALONE_SECONDS

    def _due(self) -> float:
        """When the next inode is to be looked at."""
        removed = self._later[0][0] + self._rest_seconds if self._later else math.inf
        found_open = self._open[0][0] + self.core.grace.seconds if self._open else math.inf
        return min(removed, found_open)

    def _take_due(self) -> dict[int, float]:
        """Some inodes that are to be looked at now -> when they were removed, or found to be open."""
        now = trio.current_time()
        taken: dict[int, float] = {}
        for waiting, rest in ((self._later, self._rest_seconds), (self._open, self.core.grace.seconds)):
            while waiting and len(taken) < FREED_MAX and waiting[0][0] + rest <= now:
                since, ino = waiting.popleft()
                taken[ino] = since
        if not self._later:
            self._is_wanted = False
        return taken

    async def _put_back(self, items: Iterable[tuple[int, float]]) -> None:
        """These could not be looked at now."""
        self._later.extendleft((since, ino) for ino, since in reversed(list(items)))
        await trio.sleep(RETRY_SECONDS)

    async def _free_unheld(self, inos: dict[int, float]) -> None:
        """Free those that nobody has open. ``inos``: as of `_take_due`.

        Who was here when they were removed is a member still, or can read no more: so members are asked for first.
        """
        if await self._are_others():
            rested = trio.current_time() - self.core.grace.seconds
            early = {ino: since for ino, since in inos.items() if since > rested}
            if early:  # somebody came of whom nothing had been heard here
                await self._put_back(early.items())
                inos = {ino: since for ino, since in inos.items() if ino not in early}
            self.freed_at = trio.current_time()
        held = await self._held()
        rows = await get_sound(self.core.records, [schema.orphan_key(ino) for ino in inos]) if inos else []
        for ino, row in zip(inos, rows, strict=True):
            known = self.core.nodes.get(ino)
            if ino in held or (known is not None and known.handles):
                self._open.append((trio.current_time(), ino))
            elif row is not None:
                await self._free_orphan(schema.decode_orphan(row.value), row.version)

    async def _are_others(self) -> bool:
        """Other clients have the volume."""
        rows = await self.core.records.scan(b"m", limit=2)
        return any(schema.key_client(row.key) != self.core.client for row in rows)

    async def _held(self) -> set[int]:
        """Removed inodes that some client has open."""
        return {schema.split_open_key(key)[0] for key in await all_keys(self.core.records, b"h")}

    async def _free_orphan(self, record: schema.InodeRecord, version: int) -> None:
        """Free all that an orphan record stands for. It must be this client's, or one whose remover is gone.

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
        if not await self._unfold(node, record):
            return
        items: list[tuple[bytes, list[Extent]]] = [(key, []) for key in await self._attributes(node)]
        for index in far_chunks(node):
            items.append((schema.chunk_key(node.ino, index), node.chunks.pop(index).extents))
        await self._free_pieces(node, items)

    async def _attributes(self, node: Node) -> list[bytes]:
        keys: list[bytes] = []
        after = b""
        while node.flags & schema.FLAG_XATTRS and (
            rows := await self.core.records.scan(schema.xattr_prefix(node.ino), after)
        ):
            for row in rows:
                keys.append(row.key)
                self.journal.pending.loose.attribute_is(row.key, Versioned(row.value, row.version))
            after = rows[-1].key
        return keys

    async def _unfold(self, node: Node, record: schema.InodeRecord) -> bool:
        """Where an orphan record names more slots than go with one commit, let chunk records name them in its place.

        False: it is somebody else's business by now. Nobody reads these chunks, so any numbers do.
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
        """Slots that are freed by one commit."""
        return 2 * slot_records_max(self.core.records.limits)

    async def _free_pieces(self, node: Node, items: list[tuple[bytes, list[Extent]]]) -> None:
        """Delete records, and free the extents that each names, as many as a commit may carry beside others.

        The orphan record goes last, with the extents that it names.
        """
        deleted_count = 0
        for key, extents in items:
            is_full = len(node.dead) + len(extents) > self._slots_max
            if deleted_count and (is_full or deleted_count == self.journal.chunk_count_max):
                self.journal.pending.left(node)
                await self.journal.commit(node)
                deleted_count = 0
            node.extra[key] = None
            node.dead += _rested(extents)
            deleted_count += 1
        inline_count = sum([len(chunk.extents) for chunk in node.chunks.values()])
        if deleted_count and len(node.dead) + inline_count > self._slots_max:
            self.journal.pending.left(node)
            await self.journal.commit(node)
        node.extra[schema.orphan_key(node.ino)] = None
        for chunk in node.chunks.values():
            node.dead += _rested(chunk.extents)
        self.journal.pending.left(node)


def _rested(extents: Iterable[Extent]) -> Iterable[Extent]:
    """Extents that nobody reads any more: their slots may be written again as soon as that is committed."""
    for extent in extents:
        extent.state = RESTED
        yield extent
