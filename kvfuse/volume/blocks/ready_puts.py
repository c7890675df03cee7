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

from kvfuse.slab.allocator import Slot
from kvfuse.volume.api import NAME_MAX, VIRTUAL_NAME, Caller
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes import privileges
from kvfuse.volume.inodes.chunk import Chunk, Staged
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.dentries import are_absent
from kvfuse.volume.inodes.metadata_budget import FILE_WEIGHT
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.changes import Names
from kvfuse.volume.namespaces.accounts import files_left
from kvfuse.volume.slots.flusher import Flusher
from kvfuse.volume.tier.shared_tier import ReadClass, TierBlock
from kvfuse.volume.views import clock

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


_NO_FILE = frozenset({b"", b".", b"..", VIRTUAL_NAME})


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
        sizes = [data.size if isinstance(data, TierBlock) else len(data) for _, data in rows]
        numbers = self._ready(maker, rows, sizes)
        slots = self.core.slabs.allocate_many([sizes[number] for number in numbers], folder.namespace)
        if slots:
            numbers = numbers[: len(slots)]
            maker.make([rows[number] for number in numbers], slots)
            for number in numbers:
                done[number] = True
            maker.count(perf_counter() - began, len(slots), sum([sizes[number] for number in numbers]))
        return done

    def is_crowded(self, caller: Caller) -> bool:
        return self.journal.pending.load.is_crowded(caller.uid)

    async def settled(self) -> None:
        await self.journal.commit()

    def _is_open(self, folder: Node) -> bool:
        """Files may be made there without a wait."""
        is_plain = folder.is_directory and folder.nlink > 0 and not folder.forgotten and not folder.mode & S_ISVTX
        is_own = self.names.executor is self.names.memory and not self.core.read_only
        is_own = is_own and not self.core.inodes.is_withheld
        blocks = self.core.blocks
        is_own = is_own and not (blocks is not None and blocks.is_block_namespace(folder.namespace))
        return is_plain and is_own and not self.names.lookup.is_strict(folder)

    def _ready(self, maker: _Maker, rows: Sequence[Row], sizes: Sequence[int]) -> list[int]:
        """Numbers of rows for which there is memory, and room for records, and whose legal names mean nothing."""
        names, folder, flusher = [name for name, _ in rows], maker.folder, self.flusher
        free = are_absent(self.core.dentries, folder.ino, names)
        count_max = self._room(folder, names, maker.uid)
        staged = flusher.staged_bytes if not flusher.line.places else flusher.staging_size + 1
        found: list[int] = []
        seen = set(_NO_FILE)
        for number, name in enumerate(names):
            if staged > flusher.staging_size or len(found) >= count_max:
                break
            is_legal = len(name) <= NAME_MAX and name not in seen and b"/" not in name and b"\0" not in name
            if free[number] and is_legal and 0 < sizes[number] <= maker.chunk_size:
                found.append(number)
                seen.add(name)
                staged += sizes[number]
        return found

    def _room(self, folder: Node, names: Sequence[bytes], uid: int) -> int:
        """So many files may be made in a folder; fewer than there may where not all of ``names`` have room."""
        core, count = self.core, len(names)
        count = min(count, (self.journal.pending.load.count_room(uid) + 1) // 2)  # a file and its name are two changes
        accounts = core.namespaces.accounts
        if folder.namespace or accounts.root_blocks:
            count = min(count, files_left(accounts, folder.namespace))
        while count and not core.metadata.fits(count * FILE_WEIGHT + sum(map(len, names[:count]))):
            count //= 2
        return count


class _Maker:
    """Makes the files of one call. What is the same for all of them is found once."""

    def __init__(self, puts: ReadyPuts, folder: Node, caller: Caller, mode: int) -> None:
        self._core, self._pending, self._flusher = puts.core, puts.journal.pending, puts.flusher
        self._counters = puts.counters
        self.folder = folder
        self.uid = caller.uid
        self._gid = folder.gid if folder.mode & S_ISGID else caller.gid
        self._mode = privileges.mode_of_new(folder, S_IFREG | S_IMODE(mode), caller)
        self.chunk_size = self._core.chunk_size_in(folder)
        self._now = clock.now()

    def make(self, rows: Sequence[Row], slots: Sequence[list[Slot]]) -> None:
        """``slots``: allocated for each of ``rows``."""
        core, folder = self._core, self.folder
        nodes = [self._node(name) for name, _ in rows]
        core.file_count += len(nodes)
        if folder.namespace:
            core.namespaces.accounts.add_files(folder.namespace, len(nodes))
        self._pending.add_new(folder.ino, nodes)
        for node, (_, data), taken in zip(nodes, rows, slots, strict=True):
            self._stage(node, data, taken)
        if core.namespaces.may_keep(folder.namespace, "dram"):  # where clients may find them
            readers = ReadClass(folder.ino, self.uid, self._gid, self._mode & 0o444)
            for node, (name, data) in zip(nodes, rows, strict=True):
                if isinstance(data, TierBlock) and data.read_class == readers:
                    core.tier.keep(node.ino, data, name)

    def _node(self, name: bytes) -> Node:
        core, folder = self._core, self.folder
        node = Node(core.inodes.next(), self._mode, self.uid, self._gid, self.chunk_size)
        node.parent, node.name, node.namespace = folder.ino, name, folder.namespace
        node.atime = node.mtime = node.ctime = self._now
        node.recent = False  # what is stored and never looked at leaves memory first
        core.metadata.reserve(node, FILE_WEIGHT + len(name))
        core.nodes.add(node)
        node.unstored = None  # a crash may lose it
        return node

    def _stage(self, node: Node, data: memoryview | TierBlock, slots: list[Slot]) -> None:
        staged, chunk = Staged(), Chunk()
        if isinstance(data, TierBlock):
            content = data.buffer.data
            if data.checksums:
                staged.checked = content, data.checksums
        else:
            content = data
        node.size = staged.length = len(content)
        staged.pieces, staged.slots = [content], slots
        node.chunks[0] = chunk
        self._flusher.stage(node, chunk, staged)
        if staged.length == node.chunk_size and self._flusher.is_half_full:
            self._flusher.chunk_is_full(node, 0)

    def count(self, seconds: float, count: int, size: int) -> None:
        """So many files, of ``size`` bytes together, took so long."""
        core, folder = self._core, self.folder
        folder.mtime = folder.ctime = self._now
        self._pending.touch_times(folder)
        core.counters.creates += count
        self._counters.puts += count
        self._counters.put_bytes += size
        measures = core.namespaces.measures[folder.namespace]
        times = measures.seconds["put"]
        times.counts[bisect_left(times.bounds, seconds)] += count
        times.sum += seconds * count
        measures.written_bytes += size
