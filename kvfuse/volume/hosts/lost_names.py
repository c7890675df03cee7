"""Finds out what became of inodes that other hosts took a name from: they were removed, renamed, or given a record.

A change of a name says what the name means now, and not where its former inode is. In the same directory another change
follows, of the new name, which is followed, too. A file that leaves its directory has a record of its own from then on
(`names.name_change`), and so has one with several names. A removed file has an orphan record: it must be read within
the grace, or nobody knows here that its bytes are needed (`Coherence.hold`).

An inode that no call uses is evicted at once: whoever asks for it reads it. It is looked for where the disk tier may
have copies of it, which a removed file needs no more.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Versioned
from kvfuse.volume.content.refresh import Refresher
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import get_sound
from kvfuse.volume.store.search import search_names

LOOK_SECONDS = 0.02
"""pause between two looks at an inode that is somewhere in its directory"""
LOOKS_MAX = 50
"""then all names of the directory are read"""
RETRY_SECONDS = 0.5

log = logging.getLogger(__name__)


@dataclass
class LostNames:
    """One of each membership of a shared volume. ``removed``: takes inodes whose last name another host took.

    ``drop_copies``: takes chunks of removed files that are not in memory.
    """

    refresher: Refresher
    removed: Callable[[int], None]
    drop_copies: Callable[[Iterable[Iterable[schema.ExtentRecord]]], None]
    _lost: dict[int, int] = field(default_factory=dict)
    """inode -> version of the commit that took its name"""
    _work: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.core = self.refresher.core

    def note(self, node: Node, version: int) -> None:
        """A commit of another host took the name, or the record, that memory found the inode by."""
        if not node.nlink or node.reaped or version <= node.version:
            return
        if not node.busy:
            self.core.tier.drop(node.ino)
            self.core.nodes.evict([node])
            self.refresher.news.attributes(node.ino)
        self._lost[node.ino] = version
        self._work.set()

    async def run(self) -> None:
        """Look for these, until cancelled."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            looks = 0
            while self._lost:
                try:
                    await self._look(may_search=looks >= LOOKS_MAX)
                    looks += 1
                    pause = LOOK_SECONDS
                except EngineError as error:
                    log.info("inodes that other hosts renamed or removed are looked for later: %s", error)
                    pause = RETRY_SECONDS * random.uniform(0.5, 1.0)
                if self._lost:
                    await trio.sleep(pause)

    async def _look(self, *, may_search: bool) -> None:
        """At each of them once. Others come meanwhile, and changes by the watch."""
        if self.core.disk is None:
            self._lost = {ino: version for ino, version in self._lost.items() if self._find(ino, version) is not None}
        looked = dict(self._lost)
        keys = [key for ino in looked for key in (schema.orphan_key(ino), schema.inode_key(ino))]
        rows = await get_sound(self.core.records, keys) if keys else []
        for (ino, version), orphan, own in zip(looked.items(), rows[::2], rows[1::2], strict=True):
            node = self._find(ino, version)
            if node is None and orphan is not None and self.core.nodes.find(ino) is None:
                self.drop_copies(schema.decode_orphan(orphan.value).chunks)
            if node is None or self._settle(node, orphan, own):
                self._forget(ino, version)
        if may_search:
            for ino, version in looked.items():
                if self._lost.get(ino) == version:
                    await self._search(ino, version)
                    self._forget(ino, version)

    def _forget(self, ino: int, version: int) -> None:
        """Unless it was lost again meanwhile."""
        if self._lost.get(ino) == version:
            del self._lost[ino]

    def _find(self, ino: int, version: int) -> Node | None:
        """The inode, if it is still to be looked for: the watch may have told more, or a conflict was resolved."""
        node = self.core.nodes.find(ino)
        if node is None or not node.nlink or node.reaped or max(node.version, node.moved_version) >= version:
            return None
        return node

    def _settle(self, node: Node, orphan: Versioned | None, own: Versioned | None) -> bool:
        if orphan is not None:
            self.removed(node.ino)
        elif own is not None:
            place = (node.parent, node.name)
            self.refresher.take(schema.decode_inode(own.value), own.version, place, own=True)
        return orphan is not None or own is not None

    async def _search(self, ino: int, version: int) -> None:
        """In the directory in which it was. An inode that is not there was removed, and freed. EngineError."""
        if (node := self._find(ino, version)) is None:
            return
        log.warning("inode %d was renamed by another host: reading all names of its directory to find it", ino)
        row = (await search_names(self.core.records, [node.parent], [ino])).get(ino)
        if self._find(ino, version) is None:
            return
        if row is None:
            self.removed(ino)
            return
        parent, _, name = schema.split_entry_key(row.key)
        record = schema.decode_entry(row.value)
        assert isinstance(record, schema.InodeRecord)
        self.refresher.take(record, row.version, (parent, name), own=False)
