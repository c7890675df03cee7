"""Slot heads against records: what a check of a volume reads in the head tables of slabs."""

from __future__ import annotations

from kvfuse.errors import EngineError, VolumeError
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Allocator
from kvfuse.slab.image import SlabState
from kvfuse.slab.layout import Geometry


async def state_from_heads(geometry: Geometry, segments: SegmentStore, slab: int) -> SlabState | None:
    """A slab whose record is lost, with every slot taken: its heads say of what size. None where they do not.

    The check frees the slots that no file has when it has read all files.
    """
    if slab >= geometry.slab_count:
        return None
    table = bytearray(geometry.head_size)
    try:
        await segments.read([Transfer(*geometry.locate_head(slab), table)])
    except (EngineError, ValueError):
        return None
    rows, _ = layout.find_headers(table, geometry)
    live = rows[rows["state"] != layout.STATE_FREE]
    if not len(live):
        return None
    slot_size = int(live["slot_pages"][live["generation"].argmax()]) * layout.PAGE_SIZE
    count = geometry.slots_per_slab(slot_size)
    bitmap = ((1 << count) - 1).to_bytes(-(-count // 8), "little")
    state = SlabState(slab, slot_size, bitmap)
    try:
        Allocator(geometry).restore([state])
    except VolumeError:
        return None
    return state
