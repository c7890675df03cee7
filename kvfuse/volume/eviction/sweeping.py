"""Removes the files of namespaces that were cleared.

To clear a namespace is one record: files with smaller inode numbers than it says are there for nobody. Lookups see to
that (`Found.cleared`). Here they are removed, as evicted files are, and the kernel is told; then the record goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from kvfuse import errors
from kvfuse.remote.records.api import Record
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.kernel_news import KernelNews
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.plans import End, NamePlace, Plan
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import get_sound, last_key, scan_page

PAGE_ROWS = 1000
"""names that are looked at before other tasks may run"""
STEP_FILES = 4000
"""files whose slots are freed together"""


@dataclass
class Sweeper:
    """Removes cleared files. `Evictor` has it."""

    core: Core
    journal: Journal
    names: Names
    news: KernelNews
    vanish: Callable[[Record], bool]
    """as `Evictor` removes a file that only the store knows"""

    async def sweep(self, number: int) -> None:
        """Remove all files of a namespace that were cleared. EngineError: some may be left."""
        bound = self.core.namespaces.cleared[number]
        await forget_in_kernel(self.core, self.news)
        for node in [node for node in list(self.core.nodes) if node.nlink and node.name and self.core.is_cleared(node)]:
            await self._unlink(node.parent, node.name)  # also what is open for writing, and will be stored later
        await self.journal.commit()
        await self._sweep_stored()
        if self.core.namespaces.cleared.get(number) == bound:  # it was not cleared again
            self.journal.put(schema.cleared_key(number), None)
            self.core.namespaces.cleared.has_swept(number)

    async def _sweep_stored(self) -> None:
        after, count = b"", 0
        while True:
            epoch = self.journal.pending.epoch
            rows, damaged = await scan_page(self.core.records, b"d", after, PAGE_ROWS)
            if epoch != self.journal.pending.epoch:
                continue
            if not rows and not damaged:
                break
            left = [row for row in rows if not (self._is_cleared(row) and self.vanish(row))]
            count += len(rows) - len(left)
            after = last_key(rows, damaged)
            for row in await self._cleared(left):
                directory, _, name = schema.split_entry_key(row.key)
                await self._unlink(directory, name)
            if count >= STEP_FILES:
                await self._free()
                count = 0
            await trio.lowlevel.checkpoint()
        await self._free()

    async def _free(self) -> None:
        await self.journal.free_given_up(math.inf, None)
        self.core.namespaces.cleared.has_swept()

    def _is_cleared(self, row: Record) -> bool:
        entry = schema.decode_entry(row.value)
        return isinstance(entry, schema.InodeRecord) and self.core.is_cleared(entry)

    async def _cleared(self, rows: Sequence[Record]) -> list[Record]:
        """Those of these names whose inodes were cleared: some have records of their own."""
        entries = [schema.decode_entry(row.value) for row in rows]
        inos = [entry for entry in entries if isinstance(entry, int)]
        found = await get_sound(self.core.records, [schema.inode_key(ino) for ino in inos]) if inos else []
        own = {ino: schema.decode_inode(row.value) for ino, row in zip(inos, found, strict=True) if row is not None}
        records = [own.get(entry) if isinstance(entry, int) else entry for entry in entries]
        return [
            row
            for row, record in zip(rows, records, strict=True)
            if record is not None and self.core.is_cleared(record)
        ]

    async def _unlink(self, directory: int, name: bytes) -> None:
        found = await self.names.lookup.find_name(directory, name)
        if found.cleared is None:
            return
        with suppress(errors.NotFound):
            await self.names.memory.plan_later([NamePlace(directory, name, is_entered=False)], _plan_nothing)
        self._reap(found.cleared)

    def _reap(self, node: Node) -> None:
        if node.ino in self.core.unnamed and not node.handles:
            self.names.nameless.reap(node)


async def forget_in_kernel(core: Core, news: KernelNews) -> None:
    """Have the kernel told of all names and contents that it may know of cleared files."""
    for number, (ino, parent, name) in enumerate(list(core.places)):
        directory, cleared = core.nodes.peek(parent), core.namespaces.cleared
        bound = max(cleared.values(), default=0) if directory is None else cleared.get(directory.namespace, 0)
        if ino < bound:
            news.name(parent, name)
            news.content(ino)
        if number % PAGE_ROWS == 0:
            await trio.lowlevel.checkpoint()


def _plan_nothing(end: End) -> Plan:
    """Leave the name as it is: what was cleared is removed before any plan. Somebody may have made a new file since."""
    raise errors.NotFound(end.name)
