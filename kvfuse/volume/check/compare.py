"""A check compares all records that it has read: inodes with their names, slabs with extents, counters."""

from __future__ import annotations

import dataclasses
import stat
import time
from collections import Counter

from msgspec.structs import replace

from kvfuse.errors import VolumeError
from kvfuse.remote.records.api import Usage
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.slab.image import LENT
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.evidence import Evidence
from kvfuse.volume.opening.formatting import read_header
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import get_sound


def compare_inodes(check: Evidence) -> None:
    """Links, names and times of every inode against the names that were seen."""
    for ino, inode in check.inodes.items():
        record = inode.record
        key = schema.inode_key(ino)
        if stat.S_ISDIR(record.mode):
            check.report.directories += 1
            links = 2 + inode.subdirectories
            if not inode.has_times:
                now = time.time_ns()
                mended = {schema.times_key(ino): schema.encode_times(now, now, now)}
                check.problem(f"directory {ino} has no times", mended)
            if ino != ROOT_INODE and inode.names and record.parent != inode.parent:
                mended = {key: schema.encode_inode(replace(record, parent=inode.parent, nlink=links))}
                check.problem(f"directory {ino} is in {inode.parent}, not in {record.parent}", mended)
                continue
        else:
            check.report.files += 1
            links = inode.names
        if not inode.names and ino != ROOT_INODE:
            lost = schema.entry_key(ROOT_INODE, b"lost+found.%d" % ino)
            check.problem(f"inode {ino} has no name", {lost: schema.encode_entry_reference(ino)})
        elif record.nlink != links:
            mended = {key: schema.encode_inode(replace(record, nlink=links))}
            check.problem(f"inode {ino} has {record.nlink} links recorded, but {links}", mended)
    for ino, difference in check.far_blocks.items():
        if difference and ino in check.far_files:
            text = f"inode {ino}: its chunk records hold {difference:+} units of 512 bytes"
            check.problem(text, deletes=check.far_files[ino])
    if ROOT_INODE not in check.inodes:
        check.problem("the root directory does not exist: 'kvfuse fsck --rebuild' recovers the blocks")


def check_reachable(check: Evidence) -> None:
    """Every directory is below the root: one that is below itself goes to the root."""
    reachable = {ROOT_INODE}
    for ino, inode in check.inodes.items():
        path: list[int] = []
        while ino not in reachable and ino in check.inodes and ino not in path and inode.entry is not None:
            path.append(ino)
            ino = inode.parent
            inode = check.inodes.get(ino, inode)
        if ino in path and (entry := check.inodes[ino].entry) is not None:
            lost = schema.entry_key(ROOT_INODE, b"lost+found.%d" % ino)
            check.problem(f"directory {ino} is below itself", {lost: entry.value}, [entry.key])
        reachable.update(path)


def compare_slabs(check: Evidence) -> None:
    """Durable slots that no file has are leaked. They are freed when nothing else is left to be mended."""
    is_last = check.report.clean
    for state in check.slabs.durable_images():
        if state.slot_size == LENT:
            continue
        count = check.geometry.slots_per_slab(state.slot_size)
        bitmap = bytearray(state.bitmap)
        leaked = 0
        for index in range(count):
            addr = state.slab * check.geometry.slab_size + index * state.slot_size
            if bitmap[index >> 3] >> (index & 7) & 1 and addr not in check.owners and addr not in check.freed:
                bitmap[index >> 3] &= ~(1 << (index & 7))
                leaked += 1
        if leaked:
            key = schema.slab_key(state.slab)
            text = f"slab {state.slab}: {leaked} slots of {state.slot_size} bytes are allocated, but to no file"
            if not is_last:
                check.problem(text)
            elif any(bitmap):
                check.problem(text, {key: schema.encode_slab(state.slot_size, bytes(bitmap))})
            else:
                check.problem(text, deletes=[key])


async def check_counters(check: Evidence) -> None:
    """Numbers that are given next are not in use; what statfs counts is what there is."""
    keys = [schema.COUNTER_INODE, schema.COUNTER_GENERATION, schema.COUNTER_FILES]
    *rows, exact = await get_sound(check.records, [*keys, schema.EXACT_SIZES])
    inode_max = max([*check.inodes, *check.inline, *check.orphans], default=0)
    generation_max = min(check.generation_max, 1 << 62)  # a damaged record may say anything
    for what, row, key, used in zip(("inode", "generation"), rows, keys, (inode_max, generation_max), strict=False):
        following = schema.decode_u64(row.value) if row is not None and len(row.value) == 8 else 0
        if following <= used:
            mended = {key: schema.encode_u64(used + schema.COUNTER_RANGE)}
            check.problem(f"the next {what} would be {following}, but {used} exists", mended)
    if exact is None or len(exact.value) % 8:
        check.problem("the volume's exact slot sizes are not recorded", {schema.EXACT_SIZES: schema.encode_u64s(())})
    files = check.report.files + check.report.directories
    if rows[2] is None:
        mended = {keys[2]: schema.encode_counts(files, check.weight)}
        check.problem("the number of inodes is not recorded", mended)
    elif check.records.limits.shared or check.counted:
        _check_counts(check, rows[2].value, files)
    if check.records.usage is not None:
        _check_usage(check, check.records.usage, files)


def _check_counts(check: Evidence, common: bytes, files: int) -> None:
    """What clients counted together against what is there. ``common``: the value of the record that has most of it."""
    mended = {schema.COUNTER_FILES: schema.encode_counts(files, check.weight)}
    mended |= dict.fromkeys(check.counted, schema.encode_counts(0, 0))
    try:
        counted = schema.decode_counts(common)
    except schema.Malformed:
        counted = schema.Counts(0, None)
    for counts in check.counted.values():
        counted = counted.add(counts)
    _compare_counts(check, counted, files, mended, with_size=check.records.limits.shared and not check.damaged)


def _check_usage(check: Evidence, counted: Usage, files: int) -> None:
    """What the store has counted against what is there; but what damaged records weigh is not known."""
    if not check.damaged:
        mended = {schema.USAGE: schema.encode_usage(check.weight, files)}
        _compare_counts(check, schema.Counts(counted.items, counted.size), files, mended, with_size=True)


def _compare_counts(
    check: Evidence, counted: schema.Counts, files: int, mended: dict[bytes, bytes], *, with_size: bool
) -> None:
    """A round that mends something else leaves it to the next one."""
    if counted.inodes != files:
        text = f"{counted.inodes} inodes are counted, {files} exist"
        check.problem(text, mended if check.report.clean else {})
    if not with_size or counted.size == check.weight:
        return
    if counted.size is None:
        text = "names and attributes were never counted, as an older program made the volume"
        text += f": they take {check.weight} bytes"
    else:
        text = f"names and attributes are counted as {counted.size} bytes, but they take {check.weight}"
    check.problem(text, mended if check.report.clean else {})


async def check_segments(check: Evidence) -> None:
    """Every slab that is used lies in a segment that exists, with its size."""
    used = Counter(check.geometry.locate(addr)[0] for addr in check.owners)
    present = {info.segment: info.size for info in await check.segments.list()}
    for segment, extents in sorted(used.items()):
        size = check.geometry.segment_size(segment)
        if present.get(segment) != size:
            state = f"has {present[segment]} bytes" if segment in present else "does not exist"
            check.problem(f"segment {segment} {state} instead of {size}: {extents} extents are lost")
            continue
        try:
            found = await read_header(check.segments, segment)
            if (found.volume_id, found.segment) != (check.superblock.volume_id, segment):
                check.problem(f"segment {segment} holds the header of another segment")
        except VolumeError as error:
            header = layout.pack_superblock(dataclasses.replace(check.superblock, segment=segment))
            check.problem(f"segment {segment}: {error}", writes=[Transfer(segment, 0, header)])
