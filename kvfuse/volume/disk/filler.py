"""Writes copies into the tier, behind the reads that brought their bytes: nobody waits for it. It gives way to reads
of the disk.

Copies that are to be written wait in a queue of bounded size. Where that is full, because the disk is slower than the
readers, more are not taken. A copy's bytes and its head are written in one batch, in no order: of a copy that a crash
cut in two, or whose slot had another copy before, the head has a checksum that the bytes do not match.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import trio

from kvfuse.remote.segments.api import Buffer, Transfer
from kvfuse.slab.allocator import Slot
from kvfuse.volume.disk.copies import Granule, pack_head
from kvfuse.volume.disk.folder import Folder
from kvfuse.volume.disk.index import Index
from kvfuse.volume.measures.demand import Demand
from kvfuse.volume.store.codec import Codec, Trials

QUEUE_BYTES_MAX = 64 << 20
BATCH_BYTES = 4 << 20
"""Bytes of one call to the disk."""


class _Offer(NamedTuple):
    """A granule that is to be kept, and its bytes as they are to be stored."""

    granule: Granule
    data: Buffer


class Filler:
    """The queue, and the task that empties it. `DiskTier` owns it."""

    def __init__(self, folder: Folder, index: Index, codec: Codec | None, demand: Demand) -> None:
        """``codec``: compresses; None: nothing is compressed. ``demand``: of the disk."""
        self.folder = folder
        self.index = index
        self.queue_bytes_max = QUEUE_BYTES_MAX
        self.trials = Trials()
        self.queued_bytes = 0
        """of copies that are not written yet"""
        self.written = self.written_bytes = self.skipped = 0
        self.idle = trio.Event()
        """set while there is nothing to be written"""
        self.idle.set()
        self._codec = codec
        self._demand = demand
        self._queue: deque[_Offer] = deque()
        self._queued: set[int] = set()
        """keys"""
        self._work = trio.Event()
        self._head_sizes: dict[int, int] = {}
        """slab -> slot size of the heads that its table has"""

    def offer(self, granule: Granule, data: memoryview) -> None:
        """Keep a copy. The bytes must not change any more."""
        if granule.key in self._queued:
            return
        if self.queued_bytes + len(data) > self.queue_bytes_max:
            self.skipped += 1
            return
        self._queue.append(_Offer(granule, data))
        self._queued.add(granule.key)
        self.queued_bytes += len(data)
        if self.idle.is_set():
            self.idle = trio.Event()
        self._work.set()

    def clear(self) -> None:
        """Nothing is written of what waits."""
        self.queued_bytes -= sum(len(offer.data) for offer in self._queue)
        self._queued.difference_update(offer.granule.key for offer in self._queue)
        self._queue.clear()
        self.idle.set()

    async def run(self) -> None:
        """Write, for ever. EngineError of the disk."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._queue:
                await self._demand.give_way()
                if not self._queue:
                    break
                batch = self._next_batch()
                try:
                    await self._write(batch)
                finally:
                    self._queued.difference_update(offer.granule.key for offer in batch)
                    self.queued_bytes -= sum(len(offer.data) for offer in batch)
            self.idle.set()

    def _next_batch(self) -> list[_Offer]:
        batch, size = [self._queue.popleft()], 0
        while self._queue and (size := size + len(batch[-1].data)) < BATCH_BYTES:
            batch.append(self._queue.popleft())
        return batch

    async def _write(self, batch: list[_Offer]) -> None:
        placed = self._place(batch if self._codec is None else await self._compressed(batch, self._codec))
        try:
            await self._clear_tables({self.index.geometry.slab_of(slot.addr): slot.size for _, slot in placed})
            await self.folder.segments.write(self._transfers(placed))
        except BaseException:
            for _, slot in placed:
                self.index.cancel(slot)
            raise
        now = trio.current_time()
        for (granule, data), slot in placed:
            self.index.add(granule, len(data), slot, now)
            self.written_bytes += len(data)
        self.written += len(placed)

    async def _compressed(self, batch: list[_Offer], codec: Codec) -> list[_Offer]:
        """The batch, with those compressed that get smaller slots by it."""
        tried = [number for number in range(len(batch)) if self.trials.is_due()]
        views = [memoryview(batch[number].data) for number in tried]
        packed = await trio.to_thread.run_sync(codec.pack, views) if views else []
        class_for, result = self.index.slabs.classes.class_for, list(batch)
        for number, data in zip(tried, packed, strict=True):
            length = batch[number].granule.length
            is_smaller = len(data) < length and class_for(len(data)) < class_for(length)
            self.trials.note(length, len(data), is_smaller=is_smaller)
            if is_smaller:
                result[number] = _Offer(batch[number].granule, data)
        return result

    def _place(self, batch: list[_Offer]) -> list[tuple[_Offer, Slot]]:
        """A slot for each; without those for which there is none, or of which there is a copy by now."""
        now, placed = trio.current_time(), []
        for offer in batch:
            if self.index.find(offer.granule) is not None:
                continue
            slot = self.index.take(len(offer.data), now)
            if slot is None:
                self.skipped += 1
            else:
                placed.append((offer, slot))
        return placed

    async def _clear_tables(self, sizes: dict[int, int]) -> None:
        """Remove the heads of slots of other sizes from slabs that have these now: their places may overlap."""
        if self.folder.is_new:
            changed = [slab for slab, size in sizes.items() if self._head_sizes.get(slab, size) != size]
        else:
            changed = [slab for slab, size in sizes.items() if self._head_sizes.get(slab) != size]
        zeros, geometry = bytes(self.index.geometry.head_size), self.index.geometry
        if changed:
            await self.folder.segments.write([Transfer(*geometry.locate_head(slab), zeros) for slab in changed])
        self._head_sizes.update(sizes)

    def _transfers(self, placed: list[tuple[_Offer, Slot]]) -> list[Transfer]:
        geometry, now = self.index.geometry, int(time.time())
        transfers = []
        for (granule, data), slot in placed:
            head = pack_head(granule, len(data), slot.size, self.folder.volume_id, now)
            transfers.append(Transfer(*geometry.locate_header(slot.addr, slot.size), head))
            transfers.append(Transfer(*geometry.locate(slot.addr), data))
        return transfers
