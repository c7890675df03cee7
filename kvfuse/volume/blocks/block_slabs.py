"""Slabs of the block store: lent by the allocator, and described by the heads that they contain.

A slab's record says that it is lent. What is in it only its heads say: `load` reads them at a mount, a slab at a time,
while calls already find what was loaded. The record has a token, which the first head of the slab repeats: so no head
of an earlier loan counts.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import EngineError
from kvfuse.kept.keeper import Keeper
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Core
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.slab.allocator import Allocator
from kvfuse.slab.image import TOKEN_SIZE
from kvfuse.slab.layout import SLAB_COUNT_MAX, Geometry
from kvfuse.volume.blocks.head_tables import HeadTables

log = logging.getLogger(__name__)

STATES = "blocks/slabs"
_FORM = b"form 2"
"""of the states, and of the tables that they go together with: what has another one is loaded from heads"""
LOADED_AT_ONCE = 32
WANTED_SECONDS = 1.0
"""for which files find the slabs that were given back for them"""
RETRY_SECONDS = 1.0


class SlabStates:
    """A few bytes for each slab in shared memory, which the next daemon finds; of slabs that there may be, too."""

    def __init__(self, keeper: Keeper, volume_id: bytes, slab_count: int) -> None:
        self.room = max(slab_count, SLAB_COUNT_MAX)
        size = self.room * forms.SLAB_STATE_SIZE
        kept = keeper.take(STATES)
        self.are_restored = False
        descriptor = -1
        if kept is not None:
            is_ours = kept.content == _FORM + volume_id and len(kept.descriptors) == 1
            if is_ours and os.fstat(kept.descriptors[0]).st_size in range(slab_count * forms.SLAB_STATE_SIZE, size + 1):
                descriptor, self.are_restored = kept.descriptors[0], True
                os.ftruncate(descriptor, size)
            else:
                for one in kept.descriptors:
                    os.close(one)
        if descriptor < 0:
            descriptor = os.memfd_create("kvfuse-slabs", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            keeper.keep(STATES, _FORM + volume_id, [descriptor])
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        os.close(descriptor)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    @property
    def slot_sizes(self) -> npt.NDArray[np.uint32]:
        """Of each slab, as it is now; 0: it has none."""
        return self.bytes.view(np.uint32)[:: forms.SLAB_STATE_SIZE // 4]

    def forget_others(self, lent: Iterable[int], slab_count: int) -> None:
        """Slabs that are not lent are nobody's, whatever a killed daemon was about to do."""
        rows = self.bytes[: slab_count * forms.SLAB_STATE_SIZE].reshape(slab_count, -1)
        is_other = np.ones(slab_count, np.bool_)
        is_other[list(lent)] = False
        rows[is_other] = 0

    def has(self, slab: int) -> bool:
        """The core has it, with all its blocks."""
        return bool(self.bytes[slab * forms.SLAB_STATE_SIZE + 8])

    def known(self, slab_count: int) -> set[int]:
        """Slabs that the former daemon had in use."""
        rows = self.bytes[: slab_count * forms.SLAB_STATE_SIZE].reshape(slab_count, -1)
        return set(np.flatnonzero(rows[:, 8]).tolist())


@dataclass
class BlockSlabs:
    """The slabs that the block store has. Event loop only.

    ``store_records``: commits what is pending. ``make_segments``: makes segments, durably. ``announce``: says, durably,
    that slabs are lent, so that programs which know none of that refuse the volume.
    """

    core: Core
    geometry: Geometry
    allocator: Allocator
    segments: SegmentStore
    make_segments: Callable[[set[int]], Awaitable[None]]
    store_records: Callable[[], Awaitable[None]]
    announce: Callable[[], Awaitable[None]]
    to_load: list[int] = field(default_factory=list)
    """lent slabs whose heads were not read yet"""
    loaded_blocks: int = 0
    loaded: trio.Event = field(default_factory=trio.Event)
    """set once all heads were read"""
    loans: int = 0
    """how often slabs were lent"""
    more: Callable[[], Awaitable[bool]] | None = None
    """takes slabs that no host of a shared volume has: whether there were any"""
    arriving: int = 0
    """slabs that the volume lent, and the core has not yet: nothing is in them"""
    _wanted_until: float = -math.inf
    _lending: trio.Lock = field(default_factory=trio.Lock)

    def __post_init__(self) -> None:
        self.heads = HeadTables(self.geometry, self.segments)

    # -- places ----------------------------------------------------------------------------------------

    def data_places(self, runs: npt.NDArray[np.void]) -> list[tuple[int, int]]:
        """(segment, file offset) of runs in the data of slabs."""
        locate, size = self.geometry.locate, self.geometry.slab_size
        return [locate(slab * size + offset) for slab, offset in zip(*_columns(runs), strict=True)]

    # -- more and fewer --------------------------------------------------------------------------------

    async def lend(self, wanted: int) -> bool:
        """Have so many slabs free, taken from the volume. EngineError. False: neither has the store, nor the volume."""
        async with self._lending:
            free = self.core.statistics()["free_slabs"]
            return free >= wanted or (not self.are_wanted and await self._lend(wanted - free)) or free > 0

    @property
    def are_wanted(self) -> bool:
        """Files lacked room just now: no slab is lent ahead of need."""
        return trio.current_time() < self._wanted_until

    def want(self) -> None:
        """A file lacks room."""
        self._wanted_until = trio.current_time() + WANTED_SECONDS

    async def _lend(self, count: int) -> bool:
        await self.announce()
        await self._make_segments(count)
        if not self.allocator.free_slab_count and self.more is not None and await self.more():
            await self._make_segments(count)
        token = os.urandom(TOKEN_SIZE)
        lent = self.allocator.lend(count, token)
        if not lent:
            return False
        self.arriving = len(lent)
        try:
            await self.store_records()
        except BaseException:
            for slab in lent:
                self.allocator.take_lent(slab)
            raise
        finally:
            self.arriving = 0
        self.loans += 1
        self.core.add_slabs(np.array(lent, np.uint32), int.from_bytes(token, "little"))
        return True

    async def _make_segments(self, count: int) -> None:
        """Make those of the slabs that are lent next: from when they are, any commit may say so."""
        made: set[int] = set()
        while not (wanted := {self.geometry.locate_head(slab)[0] for slab in self.allocator.next_free(count)}) <= made:
            await self.make_segments(wanted)  # others may take slabs meanwhile
            made |= wanted

    def give_back(self, count: int, first: int = 0) -> list[int]:
        """Give up to so many free slabs, from ``first`` on, back to the volume."""
        slabs = self.core.take_slabs(count, first)
        for slab in slabs:  # of a host that goes on, some are not granted again yet
            if slab not in self.allocator.lent:
                continue
            self.allocator.take_lent(slab)
        return slabs

    # -- at a mount ------------------------------------------------------------------------------------

    async def load(
        self, is_wanted: Callable[[Sequence[bytes]], Awaitable[None]], has_loaded: Callable[[], None] = lambda: None
    ) -> None:
        """Read the heads of all slabs in ``to_load``, until that is done. ``is_wanted``: gets heads before they count.
        ``has_loaded``: is called when those of a slab count.

        What cannot be read is tried again: blocks in it are absent until then.
        """
        self.core.set_loading(True)
        while self.to_load:
            some = self.to_load[:LOADED_AT_ONCE]
            try:
                tables = await self.heads.read_heads(some)
            except EngineError as error:
                log.warning("heads of blocks cannot be read yet: %s", error)
                await trio.sleep(RETRY_SECONDS)
                continue
            await is_wanted(tables)
            for slab, table in zip(some, tables, strict=True):
                token = int.from_bytes(self.allocator.lent[slab], "little")
                if self.more is not None:  # another host had it: what is newer there takes names from blocks of ours
                    self.core.load_foreign(slab, token, table)
                self.loaded_blocks += self.core.load_slab(slab, token, table)
                has_loaded()
                await trio.lowlevel.checkpoint()
            del self.to_load[: len(some)]
        self.core.set_loading(False)
        self.loaded.set()

    async def read_names(self, places: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Names of blocks by (slab, slot, bytes). EngineError. One that is none any more may be any bytes."""
        parts = [(slab, self.core.slot_places(slab, slot)[0], length) for slab, slot, length in places]
        return await self.heads.read(parts)


def _columns(runs: npt.NDArray[np.void]) -> tuple[list[int], list[int]]:
    return runs["slab"].tolist(), runs["offset"].tolist()
