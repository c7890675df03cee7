"""Puts of new blocks that need no wait, many at once: as `Blocks.put` of each, without a plan and a look for each.

All others - names that are there, strict folders, volumes of many hosts, what lacks room, memory or a permission - are
left to `Blocks.put`, which waits for what they need or raises why not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from stat import S_IFREG, S_IMODE, S_ISGID, S_ISVTX
from time import perf_counter

from kvfuse import errors
from kvfuse.slab.allocator import Slot
from kvfuse.volume.api import NAME_MAX, VIRTUAL_NAME, Caller
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes import metadata_budget, privileges
from kvfuse.volume.inodes.chunk import Chunk, Staged
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.dentries import ABSENT
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.changes import Names
from kvfuse.volume.slots.flusher import Flusher
from kvfuse.volume.views import clock
from kvfuse.volume.views.tier import ReadClass, TierBlock

Row = tuple[bytes, memoryview | TierBlock]
"""the name of a block, and its bytes"""


@dataclass
class BlockCounters:
    puts: int = 0
    put_bytes: int = 0
    deletes: int = 0
    asked: int = 0
    """names in calls of ``exists``"""
    prefetches: int = 0


_NO_FILE = frozenset({b".", b"..", VIRTUAL_NAME})


@dataclass
class ReadyPuts:
    """Of one membership. `Blocks` has it."""

    core: Core
    journal: Journal
    flusher: Flusher
    names: Names
    counters: BlockCounters

    def put(
        self, directory: int, rows: Sequence[Row], caller: Caller, mode: int, may: Callable[[Node], bool]
    ) -> list[bool]:
        began = perf_counter()
        done = [False] * len(rows)
        folder = self.core.nodes.get(directory)
        if folder is None or not self._is_open(folder) or not may(folder):
            return done
        maker = _Maker(self, folder, caller, mode)
        admitted = self._admitted(folder, rows) if self.core.caches else [True] * len(rows)
        for index, (name, data) in enumerate(rows):
            if not (admitted[index] and self._is_free(directory, name) and maker.fits(name, data)):
                continue
            try:
                slots = self.core.slabs.allocate(size_of(data), folder.namespace)
            except errors.NoSpace:
                break
            maker.make(name, data, slots)
            done[index] = True
        maker.finish(perf_counter() - began)
        self.counters.puts += maker.count
        self.counters.put_bytes += maker.size
        return done

    def _is_open(self, folder: Node) -> bool:
        """Files may be made there without a wait."""
        is_plain = folder.is_directory and folder.nlink > 0 and not folder.forgotten and not folder.mode & S_ISVTX
        is_own = self.names.executor is self.names.memory and not self.core.read_only
        return is_plain and is_own and not self.core.namespaces.cleared and not self.names.lookup.is_strict(folder)

    def _admitted(self, folder: Node, rows: Sequence[Row]) -> Sequence[bool]:
        cache = self.core.caches.get(folder.namespace)
        if cache is None:
            return [True] * len(rows)
        size = sum([size_of(data) for _, data in rows])
        has_room = self.core.has_spare_room(folder.namespace, size)
        return cache.admits(folder.ino, [name for name, _ in rows], has_room)

    def _is_free(self, directory: int, name: bytes) -> bool:
        """A legal name that means nothing."""
        dentries = self.core.dentries
        if not name or len(name) > NAME_MAX or name in _NO_FILE or b"/" in name or b"\0" in name:
            return False
        return dentries.find(directory, name) is ABSENT and (directory, name) not in dentries.vanishing.places


class _Maker:
    """Makes the files of one call. What is the same for all of them is found once."""

    def __init__(self, puts: ReadyPuts, folder: Node, caller: Caller, mode: int) -> None:
        self._core, self._pending, self._flusher = puts.core, puts.journal.pending, puts.flusher
        self._folder = folder
        self._uid = caller.uid
        self._gid = folder.gid if folder.mode & S_ISGID else caller.gid
        self._mode = privileges.mode_of_new(folder, S_IFREG | S_IMODE(mode), caller)
        self._chunk_size = self._core.chunk_size_in(folder)
        self._cache = self._core.caches.get(folder.namespace)
        self._readers = ReadClass(folder.ino, self._uid, self._gid, self._mode & 0o444)
        self._keeps = self._core.namespaces.may_keep(folder.namespace, "dram")
        self._now = clock.now()
        self.count = self.size = 0

    def fits(self, name: bytes, data: memoryview | TierBlock) -> bool:
        """There is memory for the bytes, and room for the records."""
        core, flusher, namespace = self._core, self._flusher, self._folder.namespace
        if flusher.staged_bytes > flusher.staging_size or flusher.line.places:
            return False
        if not 0 < size_of(data) <= self._chunk_size or self._pending.load.is_crowded(self._uid):
            return False
        accounts = core.namespaces.accounts
        if (namespace or accounts.root_blocks) and accounts.is_full(namespace):
            return False
        return core.metadata.fits(metadata_budget.new_inode(name))

    def make(self, name: bytes, data: memoryview | TierBlock, slots: list[Slot]) -> None:
        core, folder = self._core, self._folder
        node = Node(core.inodes.next(), self._mode, self._uid, self._gid, self._chunk_size)
        node.parent, node.name, node.namespace = folder.ino, name, folder.namespace
        node.atime = node.mtime = node.ctime = self._now
        core.nodes.add(node)
        core.file_count += 1
        if node.namespace:
            core.namespaces.accounts.add_files(node.namespace, 1)
        self._pending.touch(node)
        self._pending.set_name(folder.ino, name, node, False)
        core.metadata.reserve(node, metadata_budget.new_inode(name))
        self._stage(node, data, slots)
        if self._cache is not None:
            self._cache.named(folder.ino, name)
            size = sum([slot.size for slot in slots])
            self._cache.stored(folder.ino, name, size, slots[0].addr // core.geometry.slab_size)
        if self._keeps and isinstance(data, TierBlock) and data.read_class == self._readers:
            core.tier.keep(node.ino, data, name)
        self.count += 1
        self.size += node.size

    def _stage(self, node: Node, data: memoryview | TierBlock, slots: list[Slot]) -> None:
        staged, chunk = Staged(), Chunk()
        content = data.buffer.data if isinstance(data, TierBlock) else data
        staged.pieces, staged.length, staged.slots = [content], len(content), slots
        if isinstance(data, TierBlock) and data.checksums:
            staged.checked = content, data.checksums
        node.size = staged.length
        node.chunks[0] = chunk
        self._flusher.stage(node, chunk, staged)
        if staged.length == node.chunk_size and self._flusher.is_half_full:
            self._flusher.chunk_is_full(node, 0)

    def finish(self, seconds: float) -> None:
        """All of them took so long."""
        if not self.count:
            return
        core, folder = self._core, self._folder
        folder.mtime = folder.ctime = self._now
        self._pending.touch_times(folder)
        core.counters.creates += self.count
        if self._cache is not None:
            core.namespaces.changed.set()
        measures = core.namespaces.measures[folder.namespace]
        times = measures.seconds["put"]
        times.counts[bisect_left(times.bounds, seconds)] += self.count
        times.sum += seconds * self.count
        measures.written_bytes += self.size


def size_of(data: memoryview | TierBlock) -> int:
    """Bytes of a block."""
    return data.size if isinstance(data, TierBlock) else len(data)
