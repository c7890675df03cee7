"""Check the cold tier of a volume that nobody has mounted: objects of the bucket beside what `cold-graves` says.

An object is put once and never changed, so it is right or useless. Where it is useless it is deleted, and noted as one
that is never read. A block whose bytes are wrong gets a grave. Blocks of a cache may be absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import crc32c
from kvfuse.errors import ConfigError, EngineError
from kvfuse.native import blockforms as forms
from kvfuse.options.config import Options
from kvfuse.remote.bucket import Bucket, NoObject, Range
from kvfuse.volume.check.evidence import CheckReport, Problem, Progress
from kvfuse.volume.cold import cold_format as layout
from kvfuse.volume.cold.grave_log import BEGUN, GRAVE, RECORD, STORED, VOID, GraveLog, Records, numbers_of, read_graves
from kvfuse.volume.opening.cold_opening import GRAVES_FILE
from kvfuse.volume.opening.engines import cold_bucket

Heads = npt.NDArray[np.void]
IN_FLIGHT = 4


@dataclass
class ColdCheck:
    """One look at all objects. ``verify``: at their bytes, too."""

    bucket: Bucket
    volume_id: bytes
    graves: Records | None
    verify: bool
    progress: Progress
    problems: list[str] = field(default_factory=list)
    useless: list[int] = field(default_factory=list)
    """objects that a repair deletes"""
    wrong: list[tuple[int, int, int]] = field(default_factory=list)
    """(low, high, sequence) of blocks that a repair buries"""
    objects: int = 0
    blocks: int = 0
    verified_bytes: int = 0

    async def run(self) -> None:
        """EngineError."""
        listed = {}
        for one in await self.bucket.list("blocks/"):
            if (number := layout.object_number(one.name)) is not None:
                listed[number] = one.size
        records = self.graves if self.graves is not None else np.zeros(0, RECORD)
        begun, void = numbers_of(records, BEGUN), numbers_of(records, VOID)
        for number in sorted(numbers_of(records, STORED) - void - listed.keys()):
            self._wrong_object(number, "it is gone, and its blocks are absent")
        known = sorted(listed.keys() & begun - void)
        for number in sorted(listed.keys() - begun - void):
            why = f"{GRAVES_FILE} does not name it" if self.graves is not None else f"{GRAVES_FILE} is lost"
            self._wrong_object(number, f"{why}, so its blocks may have been removed since")
        for place, number in enumerate(known):
            self.progress("cold objects", place, len(known))
            await self._check_object(number, listed[number])

    def _wrong_object(self, number: int, why: str) -> None:
        self.problems.append(f"cold object {number}: {why}")
        self.useless.append(number)

    async def _check_object(self, number: int, size: int) -> None:
        data = bytearray(min(size, layout.FIRST_READ))
        try:
            await self.bucket.read(layout.object_name(number), [Range(0, memoryview(data))])
            facts = layout.read_header(bytes(data), self.volume_id, number)
            if facts is None:
                return self._wrong_object(number, "its header is damaged, or another volume's")
            if facts.size != size:
                return self._wrong_object(number, f"it has {size} bytes, and its header says {facts.size}")
            if facts.data_start > len(data):
                data = bytearray(facts.data_start)
                await self.bucket.read(layout.object_name(number), [Range(0, memoryview(data))])
        except NoObject:
            return self._wrong_object(number, "it went while it was looked at")
        heads = layout.read_heads(bytes(data), facts)
        if heads is None:
            return self._wrong_object(number, "its heads do not match their checksum")
        self.objects += 1
        self.blocks += int(np.count_nonzero(heads["state"] == forms.BLOCK_HEAD))
        if self.verify:
            await self._verify(number, heads, size)
        return None

    async def _verify(self, number: int, heads: Heads, size: int) -> None:
        offsets, data = layout.offsets_of(heads["length"].astype(np.int64)), bytearray(size)
        await self.bucket.read(layout.object_name(number), [Range(0, memoryview(data))])
        self.verified_bytes += size
        wrong = []
        for head, start in zip(heads, offsets.tolist(), strict=False):
            block = memoryview(data)[start : start + int(head["length"])]
            if head["state"] == forms.BLOCK_HEAD and crc32c(block) != int(head["checksum"]):
                wrong.append((int(head["low"]), int(head["high"]), int(head["sequence"])))
        wrong = [one for one in wrong if not self._is_buried(one)]
        if wrong:
            self.problems.append(f"cold object {number}: {len(wrong)} blocks do not match their checksums")
            self.wrong += wrong

    def _is_buried(self, block: tuple[int, int, int]) -> bool:
        low, high, sequence = block
        assert self.graves is not None
        graves = self.graves[self.graves["kind"] == GRAVE]
        same = (graves["low"] == low) & (graves["high"] == high)
        return bool((graves["sequence"][same] >= sequence).any())

    async def repair(self, path: Path) -> None:
        """``path``: of the graves. EngineError, OSError."""
        if self.graves is not None:
            graves = GraveLog(path)
            try:
                graves.append(VOID, np.array(self.useless, np.uint64))
                graves.append(GRAVE, *np.array(self.wrong, np.uint64).reshape(-1, 3).T.copy())
                graves.sync()
            finally:
                graves.close()
        await self.bucket.delete([layout.object_name(number) for number in self.useless])


async def check_cold(
    options: Options, volume_id: bytes, report: CheckReport, progress: Progress, *, verify: bool, repair: bool
) -> None:
    """Add to a report what is wrong with the cold tier, if the options name one, and mend it.

    A bucket that cannot be asked is a note.
    """
    path = options.volume_path / GRAVES_FILE
    try:
        place = cold_bucket(options, volume_id)
        if place is None:
            return
        bucket = Bucket(place, place.put_deadline, IN_FLIGHT)

        async def look() -> ColdCheck:
            found = ColdCheck(bucket, volume_id, read_graves(path), verify, progress)
            await found.run()
            return found

        found = await look()
        if repair and found.problems:
            report.repaired += len(found.problems)
            await found.repair(path)
            found = await look()
    except (EngineError, ConfigError, OSError) as error:
        report.notes.append(f"the cold tier was not checked: {error}")
        return
    report.problems += [Problem(text) for text in found.problems]
    report.cold_objects, report.cold_blocks = found.objects, found.blocks
    report.verified_bytes += found.verified_bytes
