"""Copies of granules, and the heads by which a copy in a local slot describes itself.

A copy is one granule of a sealed extent. The *key* of a granule is the volume address of its first byte; together with
the generation of the extent's slot it means the same bytes for ever. The head is a slot header of format version 1
(`slab/layout.py`) with these fields:

    state        STATE_COPY
    inode        the key
    generation   of the extent
    length       bytes in the slot
    chunk        bytes of the granule, where they are compressed in the slot (zstd); else 0
    checksum     CRC32C of the granule, as the extent's record has it
    fingerprint  the volume's id
    time         when the copy was written, seconds since the epoch
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, Buffer
from kvfuse.slab import layout
from kvfuse.slab.layout import PAGE_SIZE, Geometry


class Granule(NamedTuple):
    """A granule, as the record of its extent describes it."""

    key: int
    generation: int
    length: int
    checksum: int


class SealedExtent(Protocol):
    """What the tier wants to know of an extent."""

    addr: int
    generation: int
    length: int
    checksums: bytes


class GranuleRun(NamedTuple):
    """Neighbouring granules of one sealed extent: all fields but the last two are of its record. Sizes in bytes."""

    addr: int
    generation: int
    length: int
    checksums: bytes
    """CRC32C of each started granule, 4 bytes little endian each"""
    low: int
    """where the first granule begins in the extent"""
    high: int
    """where the last one ends"""

    @classmethod
    def around(cls, extent: SealedExtent, start: int, end: int) -> Self:
        """The granules in which the bytes ``start``..``end`` of an extent are."""
        low = start // GRANULE_SIZE * GRANULE_SIZE
        high = min(-(-end // GRANULE_SIZE) * GRANULE_SIZE, extent.length)
        return cls(extent.addr, extent.generation, extent.length, extent.checksums, low, high)

    def granules(self) -> list[Granule]:
        numbers = range(self.low // GRANULE_SIZE, -(-self.high // GRANULE_SIZE))
        return [
            Granule(
                self.addr + number * GRANULE_SIZE,
                self.generation,
                min(GRANULE_SIZE, self.length - number * GRANULE_SIZE),
                int.from_bytes(self.checksums[number * CHECKSUM_SIZE : (number + 1) * CHECKSUM_SIZE], "little"),
            )
            for number in numbers
        ]


class Copy(msgspec.Struct, gc=False):
    """A granule that is in a local slot: there are many of these."""

    place: int
    """local address of the slot"""
    generation: int
    length: int
    """of the granule"""
    checksum: int
    stored: int
    """bytes in the slot; fewer than ``length``: compressed"""


COPY_ROW = np.dtype(
    [
        ("key", "u8"),
        ("place", "u8"),
        ("generation", "u8"),
        ("length", "u4"),
        ("checksum", "u4"),
        ("stored", "u4"),
        ("time", "u4"),
        ("slot_size", "u4"),
    ]
)
"""A copy as its head describes it; ``place`` and ``slot_size`` in bytes."""

Rows = npt.NDArray[np.void]


def pack_head(granule: Granule, stored: int, slot_size: int, volume_id: bytes, time: int) -> bytes:
    """The head of a copy that has ``stored`` bytes in its slot. ``time``: seconds since the epoch."""
    return layout.pack_header(
        state=layout.STATE_COPY,
        slot_size=slot_size,
        length=stored,
        generation=granule.generation,
        inode=granule.key,
        chunk=granule.length if stored < granule.length else 0,
        piece_offset=0,
        checksum=granule.checksum,
        time=time,
        fingerprint=volume_id,
    )


def parse_heads(table: Buffer, slab: int, geometry: Geometry, volume_id: bytes) -> Rows:
    """The copies, COPY_ROWs, of which a slab's head table has heads. All are of one slot size.

    A crash may leave heads of a former slot size behind; those that are fewer are ignored.
    """
    rows, offsets = layout.find_headers(table, geometry)
    own = np.frombuffer(volume_id, np.uint8)
    is_copy = (rows["state"] == layout.STATE_COPY) & (rows["fingerprint"] == own).all(axis=1)
    is_copy &= (
        (rows["inode"] % PAGE_SIZE == 0)
        & (rows["length"] > 0)
        & (rows["length"] <= rows["slot_pages"].astype(np.int64) * PAGE_SIZE)
    )
    rows, offsets = rows[is_copy], offsets[is_copy]
    if not len(rows):
        return np.empty(0, COPY_ROW)
    pages = np.bincount(rows["slot_pages"]).argmax()
    of_size = rows["slot_pages"] == pages
    rows, offsets = rows[of_size], offsets[of_size]
    found = np.empty(len(rows), COPY_ROW)
    for name in ("generation", "checksum", "time"):
        found[name] = rows[name]
    found["key"], found["stored"] = rows["inode"], rows["length"]
    found["length"] = np.where(rows["chunk"] > 0, rows["chunk"], rows["length"])
    found["place"] = offsets + slab * geometry.slab_size
    found["slot_size"] = pages * PAGE_SIZE
    return found


def newest(rows: Rows) -> Rows:
    """One row for each key, that of the copy that was written last; those that were written first come first."""
    ordered = rows[np.lexsort((rows["time"], rows["key"]))]
    is_last = np.ones(len(ordered), np.bool_)
    is_last[:-1] = ordered["key"][1:] != ordered["key"][:-1]
    kept = ordered[is_last]
    return kept[np.argsort(kept["time"], kind="stable")]
