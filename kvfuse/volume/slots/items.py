"""The chunks of one batch of writes, and how their bytes are laid into slots: checksums, extents, transfers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvfuse.checksum import granule_checksums
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab.allocator import Slot
from kvfuse.volume.inodes.chunk import FRESH, Chunk, Extent, Staged
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.slots.packer import Packed


@dataclass(slots=True, eq=False)
class Item:
    """One staged chunk in a batch."""

    node: Node
    chunk_index: int
    chunk: Chunk
    staged: Staged
    extents: list[Extent]
    """in which it is written"""
    packed: Packed | None = None
    """its bytes compressed, for a slot that is smaller than the one that it has"""
    identity: tuple[int, bytes, int, int, int, int] | None = None
    """of the file, as the headers describe it; see `identity_of`"""
    transfers: range = range(0)
    """those of the batch that have its bytes"""


def plan(core: Core, item: Item, writes: list[Transfer], cancel: Callable[[Staged, list[Slot]], None]) -> None:
    """Make the extents that will hold the staged bytes, and add what is to be written to ``writes``.

    ``cancel``: frees slots that are not needed.
    """
    first = len(writes)
    packed = _plan_packed(core, item, writes) if item.packed is not None else []
    item.extents = packed or _plan_staged(core, item.staged, writes, cancel)
    item.transfers = range(first, len(writes))


def _plan_packed(core: Core, item: Item, writes: list[Transfer]) -> list[Extent]:
    """Of compressed bytes; none where there is no slot for them but the larger one."""
    assert item.packed is not None
    data, packing = item.packed
    generation = core.generations.next()
    slot = core.slabs.take(len(data), item.staged.slots[0].owner)
    if slot is None:
        item.packed = None
        return []
    writes.append(Transfer(*core.locate(slot.addr), memoryview(data)))
    checksums = granule_checksums(data)
    return [Extent(slot.addr, slot.size, len(data), generation, checksums, FRESH, slot.owner, packing)]


def _plan_staged(
    core: Core, staged: Staged, writes: list[Transfer], cancel: Callable[[Staged, list[Slot]], None]
) -> list[Extent]:
    pieces = staged.pieces
    if len(pieces) == len(staged.slots) == 1 and 0 < staged.length == len(pieces[0]) <= staged.slots[0].size:
        return [_plan_whole(core, staged, pieces[0], writes)]
    extents: list[Extent] = []
    offset = 0
    for slot in staged.slots:
        length = min(slot.size, staged.length - offset)
        if length <= 0:
            break
        parts = staged.parts(offset, offset + length)
        checksums = granule_checksums(*parts)
        generation = core.generations.next()
        extents.append(Extent(slot.addr, slot.size, length, generation, checksums, FRESH, slot.owner))
        part_addr = slot.addr
        for part in parts:
            segment, file_offset = core.locate(part_addr)
            writes.append(Transfer(segment, file_offset, part))
            part_addr += len(part)
        offset += length
    spare = staged.slots[len(extents) :]
    if spare:
        cancel(staged, spare)
        staged.slots = staged.slots[: len(extents)]
    return extents


def _plan_whole(core: Core, staged: Staged, piece: bytes | bytearray | memoryview, writes: list[Transfer]) -> Extent:
    """For one piece and one slot, as blocks have."""
    (addr, slot_size, owner), length, checked = staged.slots[0], staged.length, staged.checked
    data = memoryview(piece)
    checksums = checked[1] if checked is not None and checked[0] is piece else granule_checksums(data)
    writes.append(Transfer(*core.locate(addr), data))
    return Extent(addr, slot_size, length, core.generations.next(), checksums, FRESH, owner)
