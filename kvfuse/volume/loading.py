"""The state of a volume, read from its records when it is opened."""

from __future__ import annotations

import struct
from pathlib import Path

from kvfuse import errors
from kvfuse.config import Options
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab.allocator import Allocator, SlabState
from kvfuse.slab.layout import PAGE_SIZE, SUPERBLOCK_SIZE, Superblock, parse_superblock
from kvfuse.volume import schema
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.core import Core, NumberRange
from kvfuse.volume.node import Nodes
from kvfuse.volume.tier import SharedTier


async def load_core(options: Options, superblock: Superblock, records: RecordStore, segments: SegmentStore) -> Core:
    """The state of a volume from its records."""
    keys = [schema.COUNTER_INODE, schema.COUNTER_GENERATION, schema.COUNTER_FILES, schema.inode_key(ROOT_INODE)]
    found = await records.get([*keys, schema.EXACT_SIZES])
    values = [record.value for record in found if record is not None]
    if len(values) < len(found):
        raise errors.VolumeError(
            f"{options.volume_path}: the record store is damaged (no counters): 'kvfuse fsck --rebuild' recovers blocks"
        )
    try:
        return await _load_values(options, superblock, records, segments, values)
    except (ValueError, struct.error) as error:
        raise errors.VolumeError(
            f"{options.volume_path}: the record store is damaged ({error}): 'kvfuse fsck --repair' mends what can be"
        ) from error


async def _load_values(
    options: Options, superblock: Superblock, records: RecordStore, segments: SegmentStore, values: list[bytes]
) -> Core:
    """``values``: of the counters, the root directory and the exact sizes."""
    geometry = superblock.geometry
    inode, generation, files = [schema.decode_u64(value) for value in values[:3]]
    sizes = {*schema.decode_u64s(values[4]), *options.volume.exact_sizes}
    slabs = Allocator(geometry, {-(-size // PAGE_SIZE) * PAGE_SIZE for size in sizes if size <= geometry.slab_size})
    states: list[SlabState] = []
    after = b""
    while rows := await records.scan(b"s", after, 1000):
        states += [SlabState(schema.key_slab(row.key), *schema.decode_slab(row.value)) for row in rows]
        after = rows[-1].key
    slabs.restore(states)
    tier = SharedTier(options.cache.tier_size)
    used = {geometry.locate_head(state.slab)[0] for state in states}
    await _check_segments(options.volume_path, superblock, segments, used)
    return Core(
        superblock=superblock,
        geometry=geometry,
        records=records,
        segments=segments,
        slabs=slabs,
        nodes=Nodes(options.cache.nodes, tier),
        tier=tier,
        chunk_size=min(schema.decode_inode(values[3]).chunk_size or options.volume.chunk_size, geometry.slab_size),
        strict=options.publish.mode == "strict",
        read_only=options.mount.read_only,
        inodes=NumberRange(schema.COUNTER_INODE, inode),
        generations=NumberRange(schema.COUNTER_GENERATION, generation),
        file_count=files,
    )


async def _check_segments(path: Path, superblock: Superblock, segments: SegmentStore, used: set[int]) -> None:
    """VolumeError unless every segment that holds bytes is there, whole, and this volume's."""
    remedy = "'kvfuse fsck --verify' tells which files are lost"
    sizes = {info.segment: info.size for info in await segments.list()}
    for segment in sorted(used):
        size = superblock.geometry.segment_size(segment)
        if sizes.get(segment) != size:
            found = f"has {sizes[segment]} bytes instead of {size}" if segment in sizes else "is missing"
            raise errors.VolumeError(f"{path}: segment {segment} {found}: {remedy}")
        image = bytearray(SUPERBLOCK_SIZE)
        await segments.read([Transfer(segment, 0, image)])
        try:
            header = parse_superblock(image)
        except errors.VolumeError as error:
            raise errors.VolumeError(f"{path}: segment {segment}: {error}: {remedy}") from None
        if (header.volume_id, header.segment) != (superblock.volume_id, segment):
            raise errors.VolumeError(f"{path}: the file of segment {segment} is another segment's: {remedy}")
