"""Removal of files of a shared volume that were cleared, as their names are found in the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Record
from kvfuse.volume.content.refresh import is_quiet
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.names.bulk_removal import BulkRemoval, Going
from kvfuse.volume.names.plans import NamePlace
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages, get_sound

PAGE_ROWS = 1000
ATTEMPTS_MAX = 4
"""commits of the same files: one that is refused says that other hosts have removed some of them"""
PEERS = 4
"""commits that wait at the same time"""


@dataclass
class ClearedFiles:
    """Removes them. ``unlink``: the name from a file that has others, or is being changed here."""

    core: Core
    removal: BulkRemoval
    unlink: Callable[[NamePlace], Awaitable[None]]

    async def remove_in(self, directory: int | None) -> int:
        """Of one directory, or (None) of all. Returns how many are left. EngineError."""
        prefix, left = b"d" if directory is None else schema.entry_prefix(directory), 0
        async for rows, _ in ScanPages(self.core.records, prefix, PAGE_ROWS):
            left += await self._remove(rows)
            await trio.lowlevel.checkpoint()
        return left

    async def _remove(self, rows: Sequence[Record]) -> int:
        going, others = await self._sort(rows)
        size = self.removal.files_max
        parts = [going[at : at + size] for at in range(0, len(going), size)]
        counts: list[int] = []
        failures: list[EngineError] = []

        async def work() -> None:
            while parts and not failures:
                try:
                    counts.append(await self._remove_part(parts.pop()))
                except EngineError as error:
                    failures.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(min(PEERS, len(parts))):
                nursery.start_soon(work)
        if failures:
            raise failures[0]
        for row in others:
            directory, _, name = schema.split_entry_key(row.key)
            await self.unlink(NamePlace(directory, name, is_entered=False))
        return sum(counts) + (await self._count([row.key for row in others]) if others else 0)

    async def _remove_part(self, going: list[Going]) -> int:
        for _ in range(ATTEMPTS_MAX):
            if not going or await self.removal.commit(going):
                return 0
            going, others = await self._sort(await self._read([one.row.key for one in going]))
            if others:
                return len(going) + len(others)
        return len(going)

    async def _count(self, keys: Sequence[bytes]) -> int:
        """How many of these names mean cleared files."""
        going, others = await self._sort(await self._read(keys))
        return len(going) + len(others)

    async def _read(self, keys: Sequence[bytes]) -> list[Record]:
        found = zip(keys, await get_sound(self.core.records, keys), strict=True)
        return [Record(key, *row) for key, row in found if row is not None]

    async def _sort(self, rows: Sequence[Record]) -> tuple[list[Going], list[Record]]:
        """Those of these names that mean cleared files: what a commit may remove, and what is to be unlinked."""
        going: list[Going] = []
        others: list[Record] = []
        linked: list[tuple[Record, int]] = []
        for row in rows:
            entry = schema.decode_entry(row.value)
            if isinstance(entry, int):
                linked.append((row, entry))
            elif self.core.is_cleared(entry):
                if self._is_changing(row, entry.ino):
                    others.append(row)
                else:
                    going.append(Going(row, entry))
        found = await get_sound(self.core.records, [schema.inode_key(ino) for _, ino in linked]) if linked else []
        for (row, _), own in zip(linked, found, strict=True):
            if own is not None and self.core.is_cleared(schema.decode_inode(own.value)):
                others.append(row)
        return going, others

    def _is_changing(self, row: Record, ino: int) -> bool:
        """The file or its name is about to change here."""
        directory, _, name = schema.split_entry_key(row.key)
        node = self.core.nodes.get(ino)
        is_changing = node is not None and (node.own_record or not is_quiet(node))
        return is_changing or self.core.dentries.get(directory, name).change is not None
