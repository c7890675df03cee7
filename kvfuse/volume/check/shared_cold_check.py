"""Check the cold tier of a shared volume that nobody has mounted: objects of all hosts beside what the index names.

A block of the bucket counts if the index names it. Objects that it names no block of are those of hosts that were
killed: they are no harm, and a repair deletes them. Where bytes or heads are wrong, a repair has the index forget them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import crc32c
from kvfuse.errors import ConfigError, EngineError
from kvfuse.native import blockforms as forms
from kvfuse.options.config import Options
from kvfuse.remote.bucket import Bucket, NoObject, Range
from kvfuse.remote.index.api import BlockIndex
from kvfuse.volume.check.evidence import CheckReport, Problem, Progress
from kvfuse.volume.cold import cold_format as layout
from kvfuse.volume.cold.cold_entries import ColdEntry
from kvfuse.volume.cold.host_objects import (
    ObjectPlace,
    forget_blocks,
    list_objects,
    named_blocks,
    read_object_heads,
    remove_object,
)
from kvfuse.volume.opening.engines import cold_bucket

IN_FLIGHT = 4
Heads = npt.NDArray[np.void]


@dataclass
class SharedColdCheck:
    """One look at all objects. ``verify``: at the bytes of blocks that can come back, too."""

    bucket: Bucket
    index: BlockIndex
    volume_id: bytes
    verify: bool
    progress: Progress
    problems: list[str] = field(default_factory=list)
    wrong: list[ColdEntry] = field(default_factory=list)
    """blocks that a repair has the index forget"""
    useless: dict[ObjectPlace, int] = field(default_factory=dict)
    """objects that a repair deletes, and their bytes"""
    objects: int = 0
    blocks: int = 0
    verified_bytes: int = 0

    async def run(self) -> None:
        """EngineError."""
        listed = await list_objects(self.bucket)
        for at, (place, size) in enumerate(sorted(listed.items())):
            self.progress("cold objects", at, len(listed))
            try:
                await self._check_object(place, size)
            except NoObject:
                continue  # a host's last deletion came late

    async def _check_object(self, place: ObjectPlace, size: int) -> None:
        heads = await read_object_heads(self.bucket, place, size, self.volume_id)
        if heads is None:
            self.problems.append(f"cold object {place.name}: its heads are damaged, or another volume's")
            self.useless[place] = size
            return
        self.objects += 1
        named = await named_blocks(self.index, place, heads)
        self.blocks += len(named)
        if not named:
            self.useless[place] = size
            return
        wrong = [one for one in named if not _is_as_head(one, heads)]
        if self.verify:
            data = bytearray(size)
            await self.bucket.read(place.name, [Range(0, memoryview(data))])
            self.verified_bytes += size
            wrong += [one for one in named if one not in wrong and not _is_right(one, data)]
        if wrong:
            self.problems.append(f"cold object {place.name}: {len(wrong)} blocks do not match their checksums or heads")
            self.wrong += wrong

    async def repair(self) -> None:
        """EngineError."""
        await forget_blocks(self.index, self.wrong)
        for place, size in self.useless.items():
            await remove_object(self.bucket, self.index, place, size, self.volume_id)


def _is_as_head(one: ColdEntry, heads: Heads) -> bool:
    low, high = int.from_bytes(one.key[:8], "little"), int.from_bytes(one.key[8:], "little")
    places = layout.offsets_of(heads["length"].astype(np.int64)) // layout.STEP
    same = (heads["low"] == low) & (heads["high"] == high) & (heads["state"] == forms.BLOCK_HEAD)
    same &= (heads["checksum"] == one.checksum) & (heads["length"] == one.length) & (places[:-1] == one.place)
    return bool(same.any())


def _is_right(one: ColdEntry, data: bytearray) -> bool:
    start = one.place * layout.STEP
    return crc32c(memoryview(data)[start : start + one.length]) == one.checksum


async def check_shared_cold(
    options: Options, volume_id: bytes, index: BlockIndex, report: CheckReport, progress: Progress,
    *, verify: bool, repair: bool,
) -> None:  # fmt: skip
    """Add to a report what is wrong with the cold tier, if the options name one, and mend it.

    A bucket or index that cannot be asked is a note.
    """
    try:
        place = cold_bucket(options, volume_id)
        if place is None:
            return
        bucket = Bucket(place, place.put_deadline, IN_FLIGHT)

        async def look() -> SharedColdCheck:
            found = SharedColdCheck(bucket, index, volume_id, verify, progress)
            await found.run()
            return found

        found = await look()
        if repair and (found.problems or found.useless):
            report.repaired += len(found.problems)
            await found.repair()
            found = await look()
    except (EngineError, ConfigError) as error:
        report.notes.append(f"the cold tier was not checked: {error}")
        return
    report.problems += [Problem(text) for text in found.problems]
    report.cold_objects, report.cold_blocks = found.objects, found.blocks
    report.verified_bytes += found.verified_bytes
    if count := len(found.useless):
        report.notes.append(f"{count} objects of the cold tier have no block that can come back: --repair deletes them")
