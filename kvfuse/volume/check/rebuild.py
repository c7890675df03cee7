"""Recover a volume from its segments alone: slot headers say whose bytes a slot holds.

The record store is made anew. Slabs that are lent to the block store are recognised by their heads, and their blocks
stay (`RebuiltBlocks`). A file comes back where its description says, if all its bytes are there and match their
checksums; one whose description had no room comes back in ``lost+found`` under its inode number. Empty files, links,
attributes, settings of namespaces and the owners of directories are not in the segments.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvfuse.checksum import extent_checksum, granule_checksums
from kvfuse.errors import MediumError, VolumeError
from kvfuse.options.config import Options
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab import layout
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.api import FIRST_INODE, ROOT_INODE
from kvfuse.volume.blocks.head_tables import HeadTables
from kvfuse.volume.check.block_heads import parse_heads
from kvfuse.volume.check.evidence import Progress, directory_record
from kvfuse.volume.check.rebuilt_blocks import RebuiltBlocks
from kvfuse.volume.inodes.chunk import blocks_of
from kvfuse.volume.inodes.metadata_budget import growth
from kvfuse.volume.namespaces.settings import ROOT, Settings, decode_settings
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.slots.heads import Description, decode_description
from kvfuse.volume.store import codec, schema, sealed
from kvfuse.volume.store.member import FencedRecords, membership

LOST_FOUND = b"lost+found"
COMMIT_ROWS = 1000


class _SpokenSlot(NamedTuple):
    """One slot that a valid header speaks for, and what that says."""

    generation: int
    addr: int
    slot_size: int
    length: int
    inode: int
    chunk: int
    piece_offset: int
    state: int
    checksum: int
    time: int
    descriptor_length: int
    descriptor_place: int

    @classmethod
    def of(cls, header: np.void, addr: int) -> _SpokenSlot:
        rest = [int(header[name]) for name in cls._fields[3:]]
        return cls(int(header["generation"]), addr, int(header["slot_pages"]) * layout.PAGE_SIZE, *rest)


Chunks = dict[int, tuple[schema.ExtentRecord, ...]]
"""index -> extents, of one file"""


class _File(NamedTuple):
    """One that is whole."""

    record: schema.InodeRecord
    chunks: Chunks
    generation: int
    """the highest of its pieces"""


@dataclass
class RebuildReport:
    """The files that a rebuild recovered, and those that it dropped."""

    files: int = 0
    nameless: int = 0
    """files in lost+found, of those"""
    bytes: int = 0
    blocks: int = 0
    """of the block store"""
    block_bytes: int = 0
    namespaces: list[str] = field(default_factory=list)
    """folders of namespaces of blocks"""
    dropped: list[str] = field(default_factory=list)
    """files that were not whole"""
    records_kept: str = ""
    """where the old record store was moved to"""


async def rebuild(options: Options, *, progress: Progress = lambda what, done, total: None) -> RebuildReport:
    """Make the records of the volume that ``options`` name anew.

    Of a folder the old ones are moved aside, not removed; a shared record store must not have them any more. A lost
    or damaged superblock is taken from a segment's header. VolumeError where there is none either.
    """
    if options.is_shared:
        return await _rebuild_shared(options, progress)
    return await _rebuild_folder(options, progress)


async def _rebuild_folder(options: Options, progress: Progress) -> RebuildReport:
    path = options.volume_path
    if not path.is_dir():
        raise VolumeError(f"{path} is no folder")
    with formatting.locked(path):
        known: Superblock | VolumeError
        try:
            known = formatting.read_superblock(path)
        except VolumeError as error:
            known = error
        named = None if isinstance(known, VolumeError) else known
        async with engines.open_segments(options, read_only=True, superblock=named) as segments:
            superblock = await _find_superblock(known, segments) if isinstance(known, VolumeError) else known
            work = await collect(superblock, segments, progress)
        superblock = work.with_features(superblock)
        work.report.records_kept = _move_aside(options.records_path)
        formatting.write_superblock(path, superblock)
        options.records_path.mkdir(parents=True)
        async with engines.open_records(options) as plain_records:
            records = sealed.as_formatted(plain_records, superblock)
            await records.commit(formatting.first_records(options), durable=True)
            await work.write(records)
    return work.report


async def _rebuild_shared(options: Options, progress: Progress) -> RebuildReport:
    title = options.title
    async with engines.open_records(options) as records, membership(records, options.client.lease, title) as member:
        if not await formatting.is_vacant(records):
            raise VolumeError(
                f"{title} still has records, which a rebuild replaces: keep a copy if they may be of use, then"
                f" 'etcdctl del --prefix {options.key_prefix}' and rebuild"
            )
        async with engines.open_segments(options, read_only=True) as segments:
            superblock = await _find_superblock(VolumeError(f"{title} has no superblock"), segments)
            work = await collect(superblock, segments, progress)
        superblock = work.with_features(superblock)
        records = sealed.as_formatted(records, superblock)
        await records.commit(formatting.first_records(options), durable=True)
        await work.write(FencedRecords(records, member))
        await formatting.write_shared_superblock(records, superblock, member)
    return work.report


async def collect(
    superblock: Superblock, segments: SegmentStore, progress: Progress = lambda what, done, total: None
) -> _Rebuild:
    """What segments tell."""
    work = _Rebuild(superblock.geometry, segments, progress)
    await work.read_headers()
    for done, (ino, pieces) in enumerate(sorted(work.pieces.items()), 1):
        progress("files", done, len(work.pieces))
        await work.choose_file(ino, pieces)
    work.blocks.choose()
    return work


async def _find_superblock(error: VolumeError, segments: SegmentStore) -> Superblock:
    """From the newest copy in a segment's header; ``error`` says what is wrong with the volume's own."""
    copies = []
    for info in await segments.list():
        if info.size >= layout.SUPERBLOCK_SIZE:
            with suppress(VolumeError, MediumError):
                copies.append(await formatting.read_header(segments, info.segment))
    if not copies:
        raise VolumeError(f"{error}; and no segment has a copy of it")
    return dataclasses.replace(max(copies, key=attrgetter("resizes")), segment=layout.NO_SEGMENT)


def _move_aside(folder: Path) -> str:
    if not folder.exists():
        return ""
    kept = folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}")
    folder.rename(kept)
    return str(kept)


class _Rebuild:
    """The steps of one rebuild: headers, files, records."""

    def __init__(self, geometry: Geometry, segments: SegmentStore, progress: Progress) -> None:
        self.geometry = geometry
        self.segments = segments
        self.progress = progress
        self.sizes: dict[int, int] = {}
        """of the segments that are there, in bytes"""
        self.report = RebuildReport()
        self.pieces: dict[int, list[_SpokenSlot]] = defaultdict(list)
        """inode -> its slots"""
        self.slot_sizes: dict[int, int] = {}
        """slab -> bytes of a slot"""
        self.files: dict[bytes, _File] = {}
        """by path"""
        self.generation_max = 0
        self.tables = HeadTables(geometry, segments)
        self.blocks = RebuiltBlocks(geometry.slab_size)

    def with_features(self, superblock: Superblock) -> Superblock:
        """The volume's: with the features that its content needs, and the map of its devices that was read."""
        features = superblock.features | (layout.FEATURE_LENT if self.blocks.lent else 0)
        superblock = dataclasses.replace(superblock, features=features)
        devices = self.segments.devices
        return superblock.mapped(devices.map.name) if devices is not None and devices.map.number else superblock

    # -- headers -------------------------------------------------------------------------------------

    async def read_headers(self) -> None:
        geometry = self.geometry
        self.sizes = {info.segment: info.size for info in await self.segments.list()}
        for segment in range(geometry.segment_count):
            self.progress("segments", segment + 1, geometry.segment_count)
            if segment in self.sizes:
                for slab in geometry.slabs_of(segment):
                    await self._read_slab(slab)

    async def _read_slab(self, slab: int) -> None:
        geometry = self.geometry
        table = bytearray(geometry.head_size)
        if not await self._read(*geometry.locate_head(slab), table):
            self.report.dropped.append(f"slab {slab}: the medium lost its slot headers")
            return
        if parse_heads(geometry, slab, bytes(table), None).slot_size:  # heads of files are what was there before
            try:
                (heads,) = await self.tables.read_heads([slab])
                self.blocks.add(parse_heads(geometry, slab, heads, None))
            except (MediumError, ValueError):
                self.report.dropped.append(f"slab {slab}: the medium lost the heads of its blocks")
            return
        rows, offsets = layout.find_headers(table, geometry)
        live = rows["state"] != layout.STATE_FREE
        addrs = (slab * geometry.slab_size + offsets[live]).tolist()
        found = list(map(_SpokenSlot.of, rows[live], addrs))
        if found:
            # A slab that changed its class may show old headers: the latest one says what it is now.
            slot_size = self.slot_sizes[slab] = max(found).slot_size
            for piece in found:
                if piece.slot_size == slot_size and 0 < piece.length <= slot_size:
                    self.generation_max = max(self.generation_max, piece.generation)
                    self.pieces[piece.inode].append(piece)

    async def _read(self, segment: int, offset: int, buffer: bytearray) -> bool:
        """Fill the buffer; False where the medium lost the bytes."""
        if offset + len(buffer) > self.sizes[segment]:
            return False
        try:
            await self.segments.read([Transfer(segment, offset, buffer)])
        except MediumError:
            return False
        return True

    # -- files ---------------------------------------------------------------------------------------

    async def choose_file(self, ino: int, pieces: list[_SpokenSlot]) -> None:
        """Find an inode's newest pieces, its description, and whether it is whole."""
        chunks = _newest(pieces)
        description = await self._description(chunks)
        path = description.path if description is not None else LOST_FOUND + b"/inode-%d" % ino
        if description is None and list(chunks) != [0]:
            self.report.dropped.append(f"inode {ino}: several chunks, but nothing says of what size")
            return
        extents: Chunks = {}
        for index, chunk in chunks.items():
            verified = [await self._verified(piece) for piece in chunk]
            extents[index] = tuple(extent for extent in verified if extent is not None)
            if len(extents[index]) < len(chunk):
                self.report.dropped.append(f"{path!r}: bytes of chunk {index} do not match their checksum")
                return
        stored = sum(extent.span for chunk in extents.values() for extent in chunk)
        if description is not None and stored < description.stored:
            self.report.dropped.append(f"{path!r}: {stored} of {description.stored} bytes are there")
            return
        generation = max(pieces).generation
        if path not in self.files or self.files[path].generation <= generation:  # the later one took the name
            self.files[path] = _File(_inode(ino, description, extents), extents, generation)

    async def _description(self, chunks: dict[int, list[_SpokenSlot]]) -> Description | None:
        """The newest that can be read, of the first pieces of all chunks; that of the first chunk before all others."""
        heads = [chunk[0] for chunk in chunks.values()]
        for piece in sorted(heads, key=lambda piece: (piece.chunk == 0, piece.time, -piece.chunk), reverse=True):
            length = piece.descriptor_length
            if piece.descriptor_place == layout.DESCRIPTOR_BEHIND_HEADER:
                segment, offset = self.geometry.locate_header(piece.addr, piece.slot_size)
                offset += layout.HEADER_SIZE
            elif piece.descriptor_place == layout.DESCRIPTOR_AT_SLOT_END:
                segment, offset = self.geometry.locate(piece.addr)
                offset += piece.slot_size - length
            else:
                continue
            text = bytearray(length)
            description = decode_description(bytes(text)) if await self._read(segment, offset, text) else None
            if description is not None:
                return description
        return None

    async def _verified(self, piece: _SpokenSlot) -> schema.ExtentRecord | None:
        """The extent in a slot; None where its bytes are not what its header says."""
        checksums = packing = b""
        if piece.state in (layout.STATE_SEALED, layout.STATE_PACKED):
            segment, offset = self.geometry.locate(piece.addr)
            buffer = bytearray(piece.length)
            found = await self._read(segment, offset, buffer)
            checksums = granule_checksums(buffer)
            if not found or extent_checksum(checksums, piece.length) != piece.checksum:
                return None
            if piece.state == layout.STATE_PACKED:
                packing = codec.find_packing(memoryview(buffer))
                if not packing:
                    return None
        return schema.ExtentRecord(piece.addr, piece.length, piece.generation, checksums, packing)

    # -- records -------------------------------------------------------------------------------------

    async def write(self, records: RecordStore) -> None:
        """Directories, files, slabs and counters, in a fresh record store."""
        inodes, size = count(max([FIRST_INODE, *self.pieces, *self.blocks.homes]) + 1), 0
        directories = {b"": ROOT_INODE}
        folders = self.blocks.paths(LOST_FOUND)
        if folders:
            directories |= {LOST_FOUND: next(inodes), **folders}
        self.report.namespaces = [os.fsdecode(path) for path, ino in folders.items() if ino in self.blocks.epochs]
        self.report.blocks, self.report.block_bytes = self.blocks.count, self.blocks.size
        puts: dict[bytes, bytes] = {}
        slots: dict[int, list[int]] = defaultdict(list)
        for path, file in sorted(self.files.items()):
            folder, _, name = path.rpartition(b"/")
            for above in accumulate(folder.split(b"/"), lambda above, name: above + b"/" + name):
                if above not in directories:
                    directories[above] = next(inodes)
            puts[schema.entry_key(directories[folder], name)] = schema.encode_entry_inline(file.record)
            self.report.files += 1
            self.report.nameless += folder == LOST_FOUND
            for index, extents in file.chunks.items():
                if index >= schema.INLINE_CHUNKS:
                    puts[schema.chunk_key(file.record.ino, index)] = schema.encode_chunk(extents)
                for extent in extents:
                    slots[self.geometry.slab_of(extent.addr)].append(extent.addr)
                    self.report.bytes += extent.length
            if len(puts) >= COMMIT_ROWS:
                size += growth(puts, (), {})
                await formatting.commit_in_parts(records, puts)
                puts = {}
        puts.update(_directory_records(directories, self.blocks))
        puts.update(self._slab_records(slots))
        puts.update(self.blocks.slab_records())
        (root,) = await records.get([schema.namespace_key(ROOT)])
        puts.update(self.blocks.namespace_records(decode_settings(root.value) if root is not None else Settings()))
        puts[schema.COUNTER_INODE] = schema.encode_u64(next(inodes) + schema.COUNTER_RANGE)
        puts[schema.COUNTER_GENERATION] = schema.encode_u64(self.generation_max + schema.COUNTER_RANGE)
        size += growth(puts, (), {})
        puts[schema.COUNTER_FILES] = schema.encode_counts(len(self.files) + len(directories), size)
        await formatting.commit_in_parts(records, puts)
        await records.commit({}, durable=True)

    def _slab_records(self, slots: dict[int, list[int]]) -> Iterator[tuple[bytes, bytes]]:
        """``slots``: slab -> addresses of those that files have."""
        for slab, addrs in slots.items():
            slot_size = self.slot_sizes[slab]
            bitmap = bytearray(-(-self.geometry.slots_per_slab(slot_size) // 8))
            for addr in addrs:
                index = addr % self.geometry.slab_size // slot_size
                bitmap[index >> 3] |= 1 << (index & 7)
            yield schema.slab_key(slab), schema.encode_slab(slot_size, bytes(bitmap))


def _newest(pieces: list[_SpokenSlot]) -> dict[int, list[_SpokenSlot]]:
    """chunk -> its pieces in order: of each chunk the latest set that fits together."""
    chunks: dict[int, list[_SpokenSlot]] = {}
    for index in sorted({piece.chunk for piece in pieces}):
        of_chunk = sorted((piece for piece in pieces if piece.chunk == index), reverse=True)
        # Pieces of one write have consecutive generations, the last piece the highest.
        chosen = [of_chunk[0]]
        for piece in of_chunk[1:]:
            if chosen[-1].piece_offset and piece.piece_offset + piece.length == chosen[-1].piece_offset:
                chosen.append(piece)
        if chosen[-1].piece_offset == 0:
            chunks[index] = chosen[::-1]
    return chunks


def _inode(ino: int, description: Description | None, extents: Chunks) -> schema.InodeRecord:
    now = time.time_ns()
    if description is None:
        size = sum(extent.span for extent in extents.get(0, ()))
        description = Description(b"", stat.S_IFREG | 0o600, 0, 0, size, now, layout.SLAB_SIZE_MIN, size)
    far = [chunk for index, chunk in extents.items() if index >= schema.INLINE_CHUNKS]
    return schema.InodeRecord(
        ino=ino,
        mode=description.mode,
        uid=description.uid,
        gid=description.gid,
        nlink=1,
        size=description.size,
        atime=now,
        mtime=description.mtime,
        ctime=now,
        chunk_size=description.chunk_size,
        chunks=tuple(extents.get(index, ()) for index in range(min(schema.INLINE_CHUNKS, max(extents) + 1))),
        parent=0,
        rdev=0,
        target=b"",
        flags=schema.FLAG_CHUNK_RECORDS if far else 0,
        far_blocks=sum(map(blocks_of, far)),
    )


def _directory_records(directories: dict[bytes, int], blocks: RebuiltBlocks) -> Iterator[tuple[bytes, bytes]]:
    """``directories``: path -> inode. ``blocks``: knows those that are in namespaces."""
    parents = {path: directories[path.rpartition(b"/")[0]] for path in directories if path}
    children = Counter(parents.values())
    for path, ino in directories.items():
        record = blocks.mark(ino, directory_record(ino, 0o755, 2 + children[ino], parents.get(path, 0)))
        yield schema.inode_key(ino), schema.encode_inode(record)
        yield schema.times_key(ino), schema.encode_times(record.atime, record.mtime, record.ctime)
        if path:
            yield schema.entry_key(parents[path], path.rpartition(b"/")[2]), schema.encode_entry_reference(ino)
