"""Reads blocks' slots: from the disk tier of this host, else from the segments. Has copies kept, and dropped.

A copy in the disk tier is found by the slot's address and the block's sequence, so it is never one of another block.
The block's checksum is compared by the caller, whoever had the bytes; copies that were wrong are dropped by `settle`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Batch
from kvfuse.native._blocks import Core as NativeCore
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.measures.read_turns import ReadTurn
from kvfuse.volume.store.codec import Codec

READS_AT_ONCE = 32
"""of the disk tier, for one call"""
GONE_AT_ONCE = 4096


class SlotRead(NamedTuple):
    """A block that is to be read."""

    namespace: int
    address: int
    """of its slot, in the volume"""
    sequence: int
    target: memoryview
    """for the bytes in the slot"""
    plain: memoryview | None = None
    """for those of the block, where it is compressed in the slot; else these are the same"""


def slot_read(namespace: int, address: int, sequence: int, plain: memoryview, packed: int) -> SlotRead:
    """``packed``: bytes in the slot, if they are compressed there; else 0."""
    if not packed:
        return SlotRead(namespace, address, sequence, plain)
    return SlotRead(namespace, address, sequence, np.empty(packed, np.uint8).data, plain)


@dataclass
class SlotReads:
    """Of one membership. Event loop only."""

    core: Core
    native: NativeCore
    _codec: Codec = field(default_factory=Codec)

    def start(self) -> None:
        if self.core.disk is not None or self.core.block_index is not None:
            self.native.follow_gone()

    async def read(self, wanted: Sequence[SlotRead]) -> list[bool]:
        """Fill the memory of all, with anything where a slot or a copy is damaged. EngineError.

        Which came from the disk tier.
        """
        are_here = await self._read_copies(wanted)
        rest = [one for one, is_here in zip(wanted, are_here, strict=True) if not is_here]
        if rest:
            await self._read_segments(rest)
        await self._unpack(wanted)
        return are_here

    async def read_copy(self, wanted: SlotRead) -> bool:
        """Fill the memory from the disk tier; whether that has the slot, with whatever bytes."""
        (is_here,) = await self._read_copies([wanted])
        if is_here:
            await self._unpack([wanted])
        return is_here

    async def _unpack(self, wanted: Sequence[SlotRead]) -> None:
        packed = [(one.target, one.plain) for one in wanted if one.plain is not None]
        if packed:
            await trio.to_thread.run_sync(self._codec.unpack, packed)

    async def _read_copies(self, wanted: Sequence[SlotRead]) -> list[bool]:
        disk, are_here = self.core.disk, [False] * len(wanted)
        if disk is None:
            return are_here
        rest = iter(range(len(wanted)))

        async def read_some() -> None:
            for number in rest:
                one = wanted[number]
                data = await disk.read_slot(one.address, one.sequence, len(one.target))
                if data is not None:
                    one.target[:] = data
                    are_here[number] = True

        async with trio.open_nursery() as nursery:
            for _ in range(min(len(wanted), READS_AT_ONCE)):
                nursery.start_soon(read_some)
        return are_here

    async def _read_segments(self, wanted: Sequence[SlotRead]) -> None:
        reads, size = self.core.reads, sum([len(one.target) for one in wanted])
        batch = [Transfer(*self.core.locate(one.address), one.target) for one in wanted]
        began = trio.current_time()
        async with ReadTurn(self.core.namespaces.measures[wanted[0].namespace], size):
            reads.demand.calls += 1
            try:
                with reads.speeds.remote.reading(size):
                    await self.core.segments.read(batch)
            finally:
                reads.demand.calls -= 1
                if reads.demand.behind:
                    reads.demand.ended()
        if self.core.disk is not None:
            self.core.disk.note_engine(size, trio.current_time() - began)

    # -- copies --------------------------------------------------------------------------------------

    def on_disk(self, found: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Of which rows the disk tier has the block, its first bytes at least. ``found``: a copy of the rows."""
        answers = np.zeros(len(found), np.bool_)
        if (disk := self.core.disk) is None:
            return answers
        slabs, of_slab = np.unique(found["slab"].astype(np.int64), return_inverse=True)
        slots, last = found["slot"].astype(np.int64), np.zeros(len(slabs), np.int64)
        np.maximum.at(last, of_slab, slots)
        starts, slot_sizes = np.zeros(len(slabs), np.int64), np.zeros(len(slabs), np.int64)
        for number, (slab, slot) in enumerate(zip(slabs.tolist(), last.tolist(), strict=True)):
            with suppress(ValueError):  # a thread dropped the blocks just now
                first, end = (self.native.slot_places(slab, one)[1] for one in (0, slot))
                starts[number] = slab * self.core.geometry.slab_size + first
                slot_sizes[number] = (end - first) // max(slot, 1)
        addresses = starts[of_slab] + slots * slot_sizes[of_slab]
        answers[:] = disk.have_copies(addresses.tolist(), found["sequence"].tolist())
        return answers

    def copies_of(self, wanted: Sequence[SlotRead], are_copies: Iterable[bool]) -> list[memoryview | None]:
        """What came from the segments and is to be kept once it is known to be right: the targets may change before."""
        return [
            (one.target if one.plain is not None else memoryview(bytes(one.target)))
            if not is_copy and self.may_keep(one.namespace)
            else None
            for one, is_copy in zip(wanted, are_copies, strict=True)
        ]

    def settle(
        self, wanted: Sequence[SlotRead], copies: Iterable[memoryview | None], are_copies: Iterable[bool],
        results: Iterable[int],
    ) -> None:  # fmt: skip
        """Keep what was right, and drop copies that were not. ``results``: 1: right; 0: wrong."""
        if (disk := self.core.disk) is None:
            return
        for one, copy, is_copy, result in zip(wanted, copies, are_copies, results, strict=True):
            if is_copy and result == 0:
                disk.drop(one.address, len(one.target), one.sequence)
            elif copy is not None and result == 1:
                disk.keep_slot(one.address, one.sequence, copy)

    def keep_stored(self, batch: Batch) -> None:
        """Keep the blocks of a batch that was just written, where stores are to be kept."""
        disk = self.core.disk
        if disk is None or not disk.keeps_stores:
            return
        for _, namespace, address, sequence, data, size, _, _ in np.frombuffer(
            batch.blocks(False), forms.STORED
        ).tolist():
            if self.may_keep(namespace):
                disk.keep_slot(address, sequence, memory_at(data, size), lasts=False)

    def may_keep(self, namespace: int) -> bool:
        return self.core.disk is not None and self.core.namespaces.may_keep(namespace, "disk")

    async def drop_gone(self, note_gone: Callable[[npt.NDArray[np.void]], None]) -> None:
        """Drop copies of blocks that are no more, and tell of these."""
        while True:
            gone = np.frombuffer(self.native.take_gone(GONE_AT_ONCE), forms.GONE)
            note_gone(gone)
            if (disk := self.core.disk) is not None:
                for address, sequence, size in gone[["address", "sequence", "size"]].tolist():
                    disk.drop(address, size, sequence)
            if len(gone) < GONE_AT_ONCE:
                break
            await trio.lowlevel.checkpoint()


def memory_at(address: int, length: int) -> memoryview:
    """Memory of the store, which stays as long as its batch, or its landing."""
    return memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")
