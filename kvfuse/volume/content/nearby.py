"""What is nearer than the engine: granules of sealed extents in this host's tiers, and in other hosts' memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import trio

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, granule_checksums
from kvfuse.volume.disk.copies import GranuleRun
from kvfuse.volume.inodes.chunk import Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views import neighbours as views
from kvfuse.volume.views.neighbours import FED_PATIENCE, NO_BASE, Answer, Neighbours, Wanted

LEFT_BYTES_MAX = 4 << 20
"""that are looked at here in one go"""


def base_of(extent: Extent, offset: int) -> int:
    """``offset``: where the extent begins in the file; `NO_BASE` where its slot has other bytes than the file."""
    return NO_BASE if extent.packing else offset


def wanted_of(node: Node, base: int, stretch: GranuleRun) -> Wanted:
    first, last = stretch.low // GRANULE_SIZE, -(-stretch.high // GRANULE_SIZE)
    checksums = stretch.checksums[first * CHECKSUM_SIZE : last * CHECKSUM_SIZE]
    return Wanted(node.ino, base, stretch.addr, stretch.generation, stretch.low, stretch.high, checksums)


class Engine(Protocol):
    """Reads a stretch from the engine."""

    async def __call__(self, *, is_beside: bool) -> memoryview | None:
        """Its bytes, right; or None. ``is_beside``: others are asked meanwhile, in memory that is theirs."""


@dataclass
class Nearby:
    """For the readers of one membership. Event loop only."""

    core: Core

    @property
    def is_there(self) -> bool:
        return self.core.disk is not None or self.core.reads.neighbours is not None

    def resident(self, wanted: Wanted) -> tuple[Answer, memoryview | None]:
        """From the shared-memory tier. The bytes stay as they are while the view is held."""
        if wanted.base == NO_BASE:
            return Answer.ABSENT, None
        start, end = wanted.base + wanted.low, wanted.base + wanted.high
        block = self.core.tier.kept.get(wanted.ino)
        if block is None:
            view = self._left(wanted, start, end) if wanted.ino in self.core.tier.left else None
            return (Answer.HERE if view is not None else Answer.ABSENT), view
        node = self.core.nodes.peek(wanted.ino)
        if end > block.size or (node is not None and (block.size != node.size or _has_another(node, wanted))):
            return Answer.MOVED, None
        block.note_use()
        return Answer.HERE, block.buffer[start:end].data

    def _left(self, wanted: Wanted, start: int, end: int) -> memoryview | None:
        """Bytes of a block that the daemon before this one left, if they are those that are wanted."""
        block = self.core.tier.look_at_left(wanted.ino) if end - start <= LEFT_BYTES_MAX else None
        if block is None or end > block.size:
            return None
        view = block.buffer[start:end].data
        return view if granule_checksums(view) == wanted.checksums else None

    def is_with_others(self, stretch: GranuleRun, base: int) -> bool:
        """Another host can be asked, which most likely has it, or reads it for all."""
        neighbours = self.core.reads.neighbours
        return neighbours is not None and neighbours.may_have(stretch.addr, base)

    def patience(self, neighbours: Neighbours, wanted: Sequence[Wanted]) -> float:
        """Seconds after which these reads, of other hosts, are late: the engine is asked for what has not come."""
        engine: float = self.core.reads.speeds.remote.expect(sum([one.high - one.low for one in wanted]))
        late = views.patience(neighbours.expect(wanted), engine)
        return max(late, FED_PATIENCE) if any(one.base > 0 for one in wanted) else late

    async def read(
        self, node: Node, base: int, stretch: GranuleRun, engine: Engine, target: memoryview | None = None,
        *, lasts: bool = True,
    ) -> memoryview | None:  # fmt: skip
        """All bytes of a stretch, verified: from the disk tier, from other hosts, or else as ``engine`` answers.

        ``base``: as of `base_of`. ``target``: memory of ``high - low`` bytes that other hosts may fill; it is touched
        by nobody but ``engine`` after that has answered. Not ``lasts``: its bytes may change after this.
        """
        disk, wanted = self.core.disk, wanted_of(node, base, stretch)
        _, view = self.resident(wanted)
        if view is not None:
            return view
        if disk is not None and (data := await disk.read(stretch)) is not None:
            return data
        if not self.is_with_others(stretch, base):
            return await engine(is_beside=False)
        if target is None:
            target, lasts = np.empty(stretch.high - stretch.low, np.uint8).data, True
        data = await self._race(wanted, engine, target)
        if data is target and lasts and disk is not None and self._may_keep(node):
            disk.keep(stretch, target)
        return data

    async def _race(self, wanted: Wanted, engine: Engine, target: memoryview) -> memoryview | None:
        """Other hosts; and the engine, once they are late or have not the bytes. The first right answer."""
        neighbours = self.core.reads.neighbours
        assert neighbours is not None
        patience = self.patience(neighbours, [wanted])
        over, found, failed = trio.Event(), list[memoryview | None](), list[Exception]()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                if (await neighbours.read([wanted], [target])) == [True]:
                    found.append(target)
                    nursery.cancel_scope.cancel()
                over.set()

            nursery.start_soon(ask)
            with trio.move_on_after(patience):
                await over.wait()
            is_beside = not over.is_set()
            neighbours.hedged += is_beside
            try:
                data = await engine(is_beside=is_beside)
            except Exception as error:
                failed.append(error)
                data = None
            if data is None:
                await over.wait()
            found.append(data)
            neighbours.overtaken += data is not None and not over.is_set()
            nursery.cancel_scope.cancel()
        if failed and found[0] is None:
            raise failed[0]
        return found[0]

    def offer(self, node: Node, stretch: GranuleRun, data: memoryview, seconds: float) -> None:
        """The engine gave these bytes, in so many seconds; they are right, and do not change any more."""
        if self.core.disk is not None:
            self.core.disk.offer(stretch, data, seconds, wanted=self._may_keep(node))

    def _may_keep(self, node: Node) -> bool:
        return self.core.namespaces.may_keep(node.namespace, "disk")


def _has_another(node: Node, wanted: Wanted) -> bool:
    """Another extent has the bytes of the file by now, as far as is known in memory."""
    chunk = node.chunks.get(wanted.base // node.chunk_size)
    if chunk is None:
        return False
    return chunk.staged is not None or all(
        (extent.addr, extent.generation) != (wanted.addr, wanted.generation) for extent in chunk.extents
    )
