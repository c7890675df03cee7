"""Check a volume that nobody has mounted: records against each other and against the slabs.

The check reads every record once and keeps a few numbers per inode and slot. Each problem carries the
records that would mend it; ``repair`` commits them. What cannot be trusted is removed rather than
guessed: a missing file is a miss, a wrong one is wrong output.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfuse.options.config import Options
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab.layout import Superblock
from kvfuse.volume.check.compare import (
    check_counters,
    check_reachable,
    check_segments,
    compare_inodes,
    compare_slabs,
)
from kvfuse.volume.check.evidence import Evidence, Progress, Report
from kvfuse.volume.check.heads import HeadCheck
from kvfuse.volume.check.reading import RecordReader
from kvfuse.volume.check.shared_records import read_shared
from kvfuse.volume.check.slots import settle_contested, verify_data
from kvfuse.volume.opening.holding import hold

REPAIR_ROUNDS = 8
WRITES_MAX = 256
"""Heads that are written together."""


async def fsck(
    options: Options,
    *,
    repair: bool = False,
    verify: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Check the volume that ``options`` name. VolumeBusy while it is mounted, VolumeError where it is none.

    ``verify``: read every sealed byte too, and compare slot heads with the records. ``repair``: mend what was found
    and check again, until nothing is left to mend; the report is then of the last check, with the number of repairs.
    """
    async with hold(options, records_read_only=not repair, segments_read_only=not repair) as held:
        check = Check(held.superblock, held.records, held.segments, progress, mends_heads=repair)
        report = await check.run(verify)
        repaired = 0
        for _ in range(REPAIR_ROUNDS if repair else 0):
            if report.clean:
                break
            # What goes takes others with it: names of an inode, slots of a file.
            repaired += len(report.problems)
            await check.repair()
            check = Check(held.superblock, held.records, held.segments, progress, mends_heads=True)
            report = await check.run(verify)
        if repair:
            await check.write(check.head_mends)
        report.repaired = repaired
        return report


class Check:
    """One pass over everything, and the repair of what it found."""

    def __init__(
        self,
        superblock: Superblock,
        records: RecordStore,
        segments: SegmentStore,
        progress: Progress = lambda what, done, total: None,
        *,
        mends_heads: bool = False,
    ) -> None:
        """``mends_heads``: the caller writes ``head_mends`` when this is over."""
        self._superblock = superblock
        self._records = records
        self._segments = segments
        self._progress = progress
        self._mends_heads = mends_heads
        self._report = Report()
        self.head_mends: list[Transfer] = []

    async def run(self, verify: bool) -> Report:
        """``verify``: read every sealed byte, too, and compare slot heads."""
        evidence = Evidence(self._superblock, self._records, self._segments, self._progress, verify)
        self._report = evidence.report
        reader = RecordReader(evidence)
        await reader.read_all()
        await read_shared(reader)
        await settle_contested(reader)
        compare_inodes(evidence)
        check_reachable(evidence)
        compare_slabs(evidence)
        await check_counters(evidence)
        await check_segments(evidence)
        if verify:
            await verify_data(evidence)
            compare = HeadCheck(evidence, mends_heads=self._mends_heads)
            await compare.run()
            self.head_mends = compare.mends
        return self._report

    async def repair(self) -> None:
        """Commit what mends the problems, in the order in which they were found."""
        for problem in self._report.problems:
            deletes = [key for key in problem.deletes if key not in problem.puts]
            if problem.puts or deletes:
                await self._records.commit(problem.puts, deletes)
        await self._records.commit({}, durable=True)
        await self.write([transfer for problem in self._report.problems for transfer in problem.writes])

    async def write(self, transfers: Sequence[Transfer]) -> None:
        """Into segments, durably."""
        for start in range(0, len(transfers), WRITES_MAX):
            await self._segments.write(transfers[start : start + WRITES_MAX])
        if transfers:
            await self._segments.sync()
