"""Brings blocks into the shared-memory tier: those that are prefetched, that are got again and again, and those that
other hosts have in memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from kvfuse.volume.api import Binding
from kvfuse.volume.content.kept_copies import KeptCopies, read_class
from kvfuse.volume.content.nearby import Nearby, wanted_of
from kvfuse.volume.content.reader import Reader
from kvfuse.volume.disk.copies import GranuleRun
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.tier.shared_tier import TierBlock
from kvfuse.volume.views.neighbours import Neighbours, Wanted

TOGETHER_BYTES = 32 << 20
TOGETHER_ROWS = 128
"""that are asked of other hosts at once"""
PAUSE_KEYS = 16
"""keys that are processed before other tasks may run"""


@dataclass
class _Coming:
    """A block that is asked for. ``wanted``: what of it; its bytes go where the block has them."""

    place: int
    node: Node
    binding: Binding
    version: int
    block: TierBlock
    wanted: list[Wanted] = field(default_factory=list)

    @property
    def targets(self) -> list[memoryview]:
        data = self.block.buffer.data
        return [data[one.base + one.low : one.base + one.high] for one in self.wanted]


@dataclass
class Promotion:
    """Of one membership; `api.NearApi`. `Blocks` has it, and ``bind`` is its."""

    core: Core
    reader: Reader
    bind: Callable[[int, bytes], Awaitable[Binding | None]]

    def __post_init__(self) -> None:
        self._left = KeptCopies(self.core, self.reader.chunks)
        self._coming: dict[int, trio.Event] = {}
        """inodes that are being read -> set when that has ended"""

    # -- from other hosts ----------------------------------------------------------------------------

    async def from_neighbours(self, binding: Binding) -> bool:
        neighbours, node = self.core.reads.neighbours, self.core.nodes.get(binding.ino)
        if neighbours is None or node is None or node.ino in self.core.tier:
            return False
        return _wanted(neighbours, node) is not None and await self.bring(node, binding)

    async def all_of(self, directory: int, names: Sequence[bytes], may_read: Callable[[Binding], bool]) -> list[bool]:
        neighbours = self.core.reads.neighbours
        found = [False] * len(names)
        coming: list[_Coming] = []
        size = rows = 0
        for place, name in enumerate(names):
            if place % PAUSE_KEYS == PAUSE_KEYS - 1:
                await trio.lowlevel.checkpoint()
            binding = await self.bind(directory, name)
            node = self.core.nodes.get(binding.ino) if binding is not None else None
            if binding is None or node is None or not may_read(binding):
                continue
            found[place] = await self._is_here(node)
            if found[place] or neighbours is None or (one := self._prepared(neighbours, place, node, binding)) is None:
                continue
            coming.append(one)
            size, rows = size + one.block.size, rows + len(one.wanted)
            if size >= TOGETHER_BYTES or rows >= TOGETHER_ROWS:
                await self._receive(neighbours, coming, found)
                coming, size, rows = [], 0, 0
        if coming and neighbours is not None:
            await self._receive(neighbours, coming, found)
        return found

    def _prepared(self, neighbours: Neighbours, place: int, node: Node, binding: Binding) -> _Coming | None:
        """A block that another host may have, with room for it; None: it does not come so, or is on its way."""
        if node.ino in self._coming or (wanted := _wanted(neighbours, node)) is None:
            return None
        block = self._room(node)
        return _Coming(place, node, binding, binding.map.version, block, wanted) if block is not None else None

    async def _receive(self, neighbours: Neighbours, coming: Sequence[_Coming], found: list[bool]) -> None:
        """Ask for blocks together, and keep those that came; what is late then is asked of the engine, as it is got."""
        events = {one.node.ino: trio.Event() for one in coming}
        self._coming |= events
        try:
            wanted, targets = [], []
            for one in coming:
                wanted += one.wanted
                targets += one.targets
            patience = Nearby(self.core).patience(neighbours, wanted)
            are_right = await neighbours.read(wanted, targets, patience)
            for one in coming:
                own_rows, are_right = are_right[: len(one.wanted)], are_right[len(one.wanted) :]
                found[one.place] = all(own_rows) and self._keep(one.node, one.binding, one.version, one.block)
        finally:
            for ino, event in events.items():
                del self._coming[ino]
                event.set()

    # -- from wherever they are ----------------------------------------------------------------------

    async def if_wanted(self, binding: Binding) -> bool:
        node = self.core.nodes.get(binding.ino)
        if node is None or not (node.ino in self.core.tier or self.core.tier.is_wanted(node.ino)):
            return False
        return await self.bring(node, binding)

    async def bring(self, node: Node, binding: Binding) -> bool:
        """Read a file into the tier, once for all who ask meanwhile; whether that has it then."""
        if await self._is_here(node):
            return True
        if (coming := self._coming.get(node.ino)) is not None:
            await coming.wait()
            return node.ino in self.core.tier.kept
        self._coming[node.ino] = trio.Event()
        try:
            block = self._room(node)
            if block is None:
                return False
            version = binding.map.version
            await self.reader.read_into(node, 0, block.buffer.data)
            return self._keep(node, binding, version, block)
        finally:
            self._coming.pop(node.ino).set()

    async def _is_here(self, node: Node) -> bool:
        return node.ino in self.core.tier.kept or (
            node.ino in self.core.tier.left and await self._left.admit(node) is not None
        )

    def _room(self, node: Node) -> TierBlock | None:
        """For all of the file. None: there is none, or it does not belong into the tier."""
        if not node.size or node.own_record or not _is_quiet(node):
            return None
        if not self.core.namespaces.may_keep(node.namespace, "dram"):
            return None
        return self.core.tier.allocate(node.size, read_class(node))

    def _keep(self, node: Node, binding: Binding, version: int, block: TierBlock) -> bool:
        """The block has the file's bytes, unless they changed since. The content map will show it instead of slots."""
        if not (binding.valid and binding.map.version == version and _is_quiet(node)):
            return False
        self.core.tier.keep(node.ino, block, binding.name)
        for index, chunk in node.chunks.items():
            if chunk.staged is None and chunk.extents and chunk.extents[0].packing:
                self.core.tier.note_packed(node.ino, index, chunk.extents[0].addr, chunk.extents[0].generation)
        if node.map is not None:
            for index in list(node.map.rows):
                node.map.hide(index)
        return True


def _wanted(neighbours: Neighbours, node: Node) -> list[Wanted] | None:
    """All granules of a file, if other hosts may have all of them."""
    wanted = []
    for index in range(-(-node.size // node.chunk_size)):
        chunk = node.chunks.get(index)
        if chunk is None or chunk.staged is not None:
            return None
        base = index * node.chunk_size
        for extent in chunk.extents:
            if extent.packing or not extent.checksums or not neighbours.may_have(extent.addr):
                return None
            wanted.append(wanted_of(node, base, GranuleRun.around(extent, 0, extent.length)))
            base += extent.length
        if base != min(node.size, (index + 1) * node.chunk_size):
            return None  # the rest are zeros
    return wanted or None


def _is_quiet(node: Node) -> bool:
    """No caller is changing the file's bytes over several awaits."""
    return not node.writers and node.lock is None
