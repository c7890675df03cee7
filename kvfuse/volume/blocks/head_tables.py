"""Where heads and names of blocks lie in their slabs, and how they are read: by mounts, fsck and scrubs.

Heads come first, then names; both lie in the slab's head table as far as that reaches, and go on in its first slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvfuse.native import blockforms as forms
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab.layout import HEAD_RATIO, PAGE_SIZE, Geometry


@dataclass(frozen=True)
class HeadTables:
    """Of one volume."""

    geometry: Geometry
    segments: SegmentStore

    def pieces(self, slab: int, offset: int, length: int) -> list[tuple[int, int, int]]:
        """(segment, file offset, bytes) of a part of a slab's heads and names."""
        found = []
        head_size = self.geometry.head_size
        if offset < head_size:
            segment, start = self.geometry.locate_head(slab)
            part = min(length, head_size - offset)
            found.append((segment, start + offset, part))
            offset, length = offset + part, length - part
        if length:
            segment, start = self.geometry.locate(slab * self.geometry.slab_size + offset - head_size)
            found.append((segment, start, length))
        return found

    async def read_heads(self, slabs: Sequence[int], guesses: Sequence[int] | None = None) -> list[bytes]:
        """The heads of each slab, as many as its slot size says. ``guesses``: bytes of them. EngineError."""
        guesses = [forms.PAGE] * len(slabs) if guesses is None else guesses
        firsts = await self.read([(slab, 0, guess) for slab, guess in zip(slabs, guesses, strict=True)])
        sizes = [self._heads_size(first) for first in firsts]
        longer = [place for place, size in enumerate(sizes) if size > len(firsts[place])]
        if longer:
            found = await self.read([(slabs[place], 0, sizes[place]) for place in longer])
            for place, table in zip(longer, found, strict=True):
                firsts[place] = table
        return firsts

    def _heads_size(self, first: bytes) -> int:
        head = np.frombuffer(first, forms.HEAD, 1)[0]
        slot_size = int(head["slot_size"])
        is_slab = head["magic"] == forms.HEAD_MAGIC and head["state"] == forms.SLAB_HEAD
        if not is_slab or not PAGE_SIZE <= slot_size <= self.geometry.slab_size:
            return forms.PAGE
        size = forms.HEAD.itemsize * (self.geometry.slab_size // slot_size + 1)
        return -(-size // forms.PAGE) * forms.PAGE

    async def read(self, parts: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Parts of heads and names, by (slab, offset, bytes). EngineError."""
        buffers = [bytearray(length) for _, _, length in parts]
        batch = []
        for (slab, offset, length), buffer in zip(parts, buffers, strict=True):
            done = 0
            for segment, start, part in self.pieces(slab, offset, length):
                batch.append(Transfer(segment, start, memoryview(buffer)[done : done + part]))
                done += part
        await self.segments.read(batch)
        return [bytes(buffer) for buffer in buffers]


@lru_cache(maxsize=256)
def plan_slab(slab_size: int, slot_size: int) -> tuple[int, int]:
    """(slots for blocks, leading slots that heads and names take) of a slab, as the core cuts it."""
    total = slab_size // slot_size
    for lead in range(total):
        count = total - lead
        size = forms.HEAD.itemsize * (count + 1) + forms.NAME_ROOM * count
        if size <= slab_size // HEAD_RATIO + lead * slot_size:
            return count, lead
    return 0, total


def name_offset(count: int, slot: int) -> int:
    """Of a slot's name among heads and names. ``count``: slots for blocks of its slab."""
    return forms.HEAD.itemsize * (count + 1) + forms.NAME_ROOM * slot
