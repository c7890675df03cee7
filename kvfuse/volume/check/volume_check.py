"""Check a volume that nobody has mounted: records against each other and against the slabs.

The check reads every record once, and the heads of lent slabs, and keeps a few numbers per inode, slot and block. Each
problem carries the records that would mend it; `mend` commits them. What cannot be trusted is removed rather than
guessed: a missing file is a miss, a wrong one is wrong output.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfuse.options.config import Options
from kvfuse.options.options import ColdBucketOptions
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.volume.check.block_check import BlockCheck
from kvfuse.volume.check.compare import check_counters, check_reachable, check_segments, compare_inodes, compare_slabs
from kvfuse.volume.check.evidence import CheckReport, Evidence, Progress
from kvfuse.volume.check.head_check import HeadCheck
from kvfuse.volume.check.namespaces import compare_namespaces, read_uses
from kvfuse.volume.check.reading import RecordReader
from kvfuse.volume.check.shared_records import read_shared
from kvfuse.volume.check.slots import settle_contested, verify_data
from kvfuse.volume.opening.held_volume import hold

REPAIR_ROUNDS = 8
WRITES_MAX = 256
"""Heads that are written together."""


async def fsck(
    options: Options, *, repair: bool = False, verify: bool = False, progress: Progress = lambda what, done, total: None
) -> CheckReport:
    """Check the volume that ``options`` name. VolumeBusy while it is mounted, VolumeError where it is none.

    ``verify``: read every sealed byte too, and compare slot heads with the records. ``repair``: mend what was found
    and check again, until nothing is left to mend; the report is then of the last check, with the number of repairs.
    """
    async with hold(options, read_only=not repair) as held:

        async def checked() -> Evidence:
            found = Evidence(held.superblock, held.records, held.segments, progress, verify, mends_heads=repair)
            await run_check(found)
            return found

        found, repaired = await checked(), 0
        for _ in range(REPAIR_ROUNDS if repair else 0):
            if found.report.clean:
                break
            # What goes takes others with it: names of an inode, slots of a file.
            repaired += len(found.report.problems)
            await mend(found)
            found = await checked()
        if repair:
            await _write(held.segments, found.head_mends)
        found.report.repaired = repaired
        if isinstance(options.cold, ColdBucketOptions) and held.block_index is not None:
            from kvfuse.volume.check.shared_cold_check import check_shared_cold

            parts = options, held.superblock.volume_id, held.block_index
            await check_shared_cold(*parts, found.report, progress, verify=verify, repair=repair)
        elif isinstance(options.cold, ColdBucketOptions):
            from kvfuse.volume.check.cold_check import check_cold

            volume_id = held.superblock.volume_id
            await check_cold(options, volume_id, found.report, progress, verify=verify, repair=repair)
        return found.report


async def run_check(found: Evidence) -> None:
    """One pass over everything; `Evidence` says what is read, and has the report."""
    reader = RecordReader(found)
    await reader.read_all()
    await read_shared(reader)
    await read_uses(reader)
    found.report.namespaces = len(found.namespaces.numbers)
    await settle_contested(reader)
    compare_inodes(found)
    check_reachable(found)
    compare_namespaces(found)
    compare_slabs(found)
    await check_counters(found)
    await check_segments(found)
    await BlockCheck(found).run()
    if found.wants_verify:
        await verify_data(found)
        await HeadCheck(found).run()


async def mend(found: Evidence) -> None:
    """Commit what mends the problems, in the order in which they were found."""
    for problem in found.report.problems:
        deletes = [key for key in problem.deletes if key not in problem.puts]
        if problem.puts or deletes:
            await found.records.commit(problem.puts, deletes)
    await found.records.commit({}, durable=True)
    await _write(found.segments, [transfer for problem in found.report.problems for transfer in problem.writes])


async def _write(segments: SegmentStore, transfers: Sequence[Transfer]) -> None:
    """Durably."""
    for start in range(0, len(transfers), WRITES_MAX):
        await segments.write(transfers[start : start + WRITES_MAX])
    if transfers:
        await segments.sync()
