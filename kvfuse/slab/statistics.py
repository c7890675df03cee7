"""The account of an allocator: where the bytes of its slabs are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvfuse.slab.pool import Pool, Slab


class ClassStatistics(NamedTuple):
    """One slot size. Slots that are not free are used."""

    slot_size: int
    slabs: int
    slots_used: int
    slots_free: int
    slots_pending: int
    internal_bytes: int
    """slot bytes beyond what was asked for, of slots allocated since the start"""
    external_bytes: int
    """free slots in slabs that are not wholly free"""
    tail_bytes: int
    """what is left over at the ends of the slabs"""


class Statistics(NamedTuple):
    """Where all data bytes are: used + free + tail is the size of all slabs that the allocator was granted."""

    used_bytes: int
    free_bytes: int
    tail_bytes: int
    pending_bytes: int
    """part of the used ones: they come back"""
    slabs_free: int
    slabs_partial: int
    slabs_full: int
    classes: list[ClassStatistics]


def account(
    slab_size: int, slab_count: int, slabs: Collection[Slab], pools: Mapping[int, Pool], lent_count: int = 0
) -> Statistics:
    """Of ``slab_count`` slabs, of which ``slabs`` have a slot size, and others are lent, wholly used.

    ``pools``: slot size -> its slabs.
    """
    classes = [_class_statistics(slab_size, pool) for _, pool in sorted(pools.items()) if pool.slabs]
    slabs_full = sum(not slab.free_count for slab in slabs)
    used_bytes = sum(row.slots_used * row.slot_size for row in classes) + lent_count * slab_size
    tail_bytes = sum(row.tail_bytes for row in classes)
    return Statistics(
        used_bytes=used_bytes,
        free_bytes=slab_count * slab_size - used_bytes - tail_bytes,
        tail_bytes=tail_bytes,
        pending_bytes=sum(row.slots_pending * row.slot_size for row in classes),
        slabs_free=slab_count - len(slabs) - lent_count,
        slabs_partial=len(slabs) - slabs_full,
        slabs_full=slabs_full + lent_count,
        classes=classes,
    )


def _class_statistics(slab_size: int, pool: Pool) -> ClassStatistics:
    return ClassStatistics(
        slot_size=pool.slot_size,
        slabs=len(pool.slabs),
        slots_used=len(pool.slabs) * pool.slots_per_slab - pool.free_count,
        slots_free=pool.free_count,
        slots_pending=pool.pending_count,
        internal_bytes=pool.slack_bytes,
        external_bytes=pool.free_count * pool.slot_size,
        tail_bytes=len(pool.slabs) * (slab_size - pool.slots_per_slab * pool.slot_size),
    )
