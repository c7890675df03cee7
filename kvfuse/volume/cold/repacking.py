"""Packs cold blocks anew whose objects are mostly dead, so that a bucket is full of blocks that can come back.

Blocks are found where they were until the bucket has the new object; the old ones are deleted after that. A daemon that
is killed between leaves blocks in both, and the next one finds each of them once. One object is made at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms
from kvfuse.volume.cold import cold_format as layout

if TYPE_CHECKING:
    from kvfuse.volume.cold.cold_tier import ColdTier

LIVE_SHARE = 0.5
"""of an object: less of it is alive in one that is packed anew"""
PAUSE_SECONDS = 10.0
"""between two objects, and between two looks"""

Rows = npt.NDArray[np.int64]


@dataclass
class Repacking:
    """Of one cold tier. Event loop only."""

    tier: ColdTier

    async def run(self) -> None:
        """Until cancelled."""
        await self.tier.loaded.wait()
        while True:
            await trio.sleep(PAUSE_SECONDS)
            size = await self.repack() if self.tier.is_usable else 0
            if rate := self.tier.options.rate:
                await trio.sleep(size / rate)

    async def repack(self) -> int:
        """Move blocks of some objects that are mostly dead to a new one. Bytes of it; 0: nothing was moved."""
        rows = await self._choose()
        if not len(rows):
            return 0
        entries = self.tier.index.rows[rows].copy()
        found = await self.tier.read(rows)
        good = await trio.to_thread.run_sync(_are_right, entries, found)
        for row, entry, data, is_right in zip(rows.tolist(), entries, found, good.tolist(), strict=True):
            if data is not None and not is_right:
                with self.tier.taking(row, int(entry["sequence"])) as is_it:
                    if is_it:
                        self.tier.note_damaged(row)
        if not good.any():
            return 0
        chosen = np.flatnonzero(good)
        heads = self._heads_of(entries[chosen])
        offsets = layout.offsets_of(heads["length"].astype(np.int64))
        data = memoryview(bytearray(int(offsets[-1])))
        for start, place in zip(offsets.tolist(), chosen.tolist(), strict=False):
            block = found[place]
            assert block is not None
            data[start : start + len(block)] = block
        return len(data) if await self.tier.store_again(rows[chosen], entries[chosen], heads, data) else 0

    async def _choose(self) -> Rows:
        """Rows of blocks for one object: those of objects that have the least alive."""
        room, some = self.tier.options.object_size - layout.data_start(0), list[Rows]()
        for one in await self.tier.mostly_dead(LIVE_SHARE):
            rows = self.tier.alive_in(one)
            room -= int(self.tier.index.rows["length"][rows].sum()) + (layout.STEP + forms.HEAD.itemsize) * len(rows)
            if room < 0:
                break
            some.append(rows)
        return np.concatenate(some) if some else np.zeros(0, np.int64)

    def _heads_of(self, entries: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        heads = np.zeros(len(entries), forms.HEAD)
        for name in ("length", "low", "high", "sequence", "checksum", "stored", "expires", "priority"):
            heads[name] = entries[name]
        heads["magic"], heads["version"], heads["state"] = forms.HEAD_MAGIC, 1, forms.BLOCK_HEAD
        for number in np.unique(entries["group"]).tolist():
            own = entries["group"] == number
            group = self.tier.index.group(number)
            names = ("directory", "name_space", "epoch", "uid", "gid", "mode")
            for name, value in zip(names, group, strict=True):
                heads[name][own] = value
        return heads


def _are_right(entries: npt.NDArray[np.void], found: list[memoryview | None]) -> npt.NDArray[np.bool_]:
    sums = entries["checksum"].tolist()
    return np.array([data is not None and crc32c(data) == s for data, s in zip(found, sums, strict=True)], np.bool_)
