"""Blocks that the store has and no books know: what was there before a mount, or in slabs that came from another host.

All names of the volume are read for it, in the background. Of two blocks the one that was not used for longer goes
first, as far as records tell: they have the times of the last write, and of reads now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from stat import S_ISREG

import trio

from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.cache import Cache, block_key
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages, get_sound
from kvfuse.volume.views import clock

SCAN_ROWS = 500


async def read_blocks(core: Core, numbers: Iterable[int], is_wanted: Callable[[int], bool]) -> None:
    """Put the files that the store has in these namespaces on their books, those not used for longest first.

    ``is_wanted``: of the slab of a file's first slot. EngineError: nothing was done.
    """
    caches = {number: core.caches[number] for number in numbers if number in core.caches}
    for cache in caches.values():
        cache.before.begin()
    found = _Found(core, is_wanted)
    async for rows, _ in ScanPages(core.records, b"d", SCAN_ROWS):
        references: list[tuple[bytes, int]] = []
        for row in rows:
            entry = schema.decode_entry(row.value)
            if not isinstance(entry, schema.InodeRecord):
                references.append((row.key, entry))
            elif entry.namespace in caches:
                found.add(row.key, entry)
        if references:
            await _read_references(core, references, caches, found)
        await trio.lowlevel.checkpoint()
    found.tell(caches)
    for cache in caches.values():
        cache.before.end()


async def _read_references(
    core: Core, references: list[tuple[bytes, int]], caches: dict[int, Cache], found: _Found
) -> None:
    """Add files that have records of their own."""
    records = await get_sound(core.records, [schema.inode_key(ino) for _, ino in references])
    for (key, _), record in zip(references, records, strict=True):
        if record is not None and (inode := schema.decode_inode(record.value)).namespace in caches:
            found.add(key, inode)


class _Found:
    """Files that the store has, in columns."""

    def __init__(self, core: Core, is_wanted: Callable[[int], bool]) -> None:
        self._core = core
        self._is_wanted = is_wanted
        self._rows: list[tuple[int, int, int, int, tuple[int, int], int]] = []

    def add(self, key: bytes, inode: schema.InodeRecord) -> None:
        slab = self._core.first_slab(inode) or 0
        if not S_ISREG(inode.mode) or not self._is_wanted(slab) or self._core.is_cleared(inode):
            return
        directory, _, name = schema.split_entry_key(key)
        size = sum([extent.length for chunk in inode.chunks for extent in chunk]) + 512 * inode.far_blocks
        used_at = max(inode.atime, inode.mtime)
        self._rows.append((used_at, block_key(directory, name), size, inode.mtime, (directory, slab), inode.namespace))

    def tell(self, caches: dict[int, Cache]) -> None:
        now = clock.now()
        for used_at, key, size, stored_at, place, namespace in sorted(self._rows):
            idle, age = (max(0.0, (now - time) / 1e9) for time in (used_at, stored_at))
            caches[namespace].found(key, size, idle, max(age, idle), place)
