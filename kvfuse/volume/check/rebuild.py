"""Recover a volume from its segments alone: slot headers say whose bytes a slot holds.

The record store is made anew. A file comes back where its description says, if all its bytes are there
and match their checksums; one whose description had no room comes back in ``lost+found`` under its inode
number. Empty files, links, attributes and the owners of directories are not in the segments.
"""

from __future__ import annotations

import dataclasses
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvfuse.checksum import extent_checksum, granule_checksums
from kvfuse.errors import MediumError, VolumeError
from kvfuse.options.config import Options
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab import layout
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.api import FIRST_INODE, ROOT_INODE
from kvfuse.volume.inodes.metadata_budget import growth
from kvfuse.volume.opening import engines, format
from kvfuse.volume.slots.heads import Description, decode_description
from kvfuse.volume.store import schema, sealed
from kvfuse.volume.store.member import FencedRecords, membership

LOST_FOUND = b"lost+found"
COMMIT_ROWS = 1000


class _Piece(NamedTuple):
    """One slot that a valid header speaks for."""

    generation: int
    addr: int
    slot_size: int
    length: int
    inode: int
    chunk: int
    offset: int
    state: int
    checksum: int
    time: int
    descriptor_length: int
    descriptor_place: int


@dataclass
class RebuildReport:
    """What came back."""

    files: int = 0
    nameless: int = 0
    """files in lost+found, of those"""
    bytes: int = 0
    dropped: list[str] = field(default_factory=list)
    """files that were not whole"""
    records_kept: str = ""
    """where the old record store was moved to"""


async def rebuild(
    options: Options, *, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> RebuildReport:
    """Make the records of the volume that ``options`` name anew.

    Of a folder the old ones are moved aside, not removed; a shared record store must not have them any more. A lost
    or damaged superblock is taken from a segment's header. VolumeError where there is none either.
    """
    if options.is_shared:
        return await _rebuild_shared(options, progress)
    return await _rebuild_folder(options, progress)


async def _rebuild_folder(options: Options, progress: Callable[[str, int, int], None]) -> RebuildReport:
    path = options.volume_path
    if not path.is_dir():
        raise VolumeError(f"{path} is no folder")
    with format.locked(path):
        async with engines.open_segments(options, read_only=True) as segments:
            try:
                superblock = format.read_superblock(path)
            except VolumeError as error:
                superblock = await _find_superblock(error, segments)
            work = await _collect(superblock, segments, progress)
        work.report.records_kept = _move_aside(options.records_path)
        format.write_superblock(path, superblock)
        options.records_path.mkdir(parents=True)
        async with engines.open_records(options) as plain_records:
            records = sealed.as_formatted(plain_records, superblock)
            await format.write_first_records(options, records)
            await work.write(records)
    return work.report


async def _rebuild_shared(options: Options, progress: Callable[[str, int, int], None]) -> RebuildReport:
    title = options.title
    async with (
        engines.open_records(options) as records,
        membership(records, options.client.lease, title) as member,
    ):
        if not await format.is_vacant(records):
            raise VolumeError(
                f"{title} still has records, which a rebuild replaces: keep a copy if they may be of use, then"
                f" 'etcdctl del --prefix {options.key_prefix}' and rebuild"
            )
        async with engines.open_segments(options, read_only=True) as segments:
            superblock = await _find_superblock(VolumeError(f"{title} has no superblock"), segments)
            work = await _collect(superblock, segments, progress)
        records = sealed.as_formatted(records, superblock)
        await format.write_first_records(options, records)
        await work.write(FencedRecords(records, member))
        await format.write_shared_superblock(records, superblock, member)
    return work.report


async def _collect(
    superblock: Superblock, segments: SegmentStore, progress: Callable[[str, int, int], None]
) -> _Rebuild:
    work = _Rebuild(superblock.geometry, segments, progress)
    await work.read_headers()
    await work.choose_files()
    return work


async def _find_superblock(error: VolumeError, segments: SegmentStore) -> Superblock:
    """From the copy in a segment's header; ``error`` says what is wrong with the volume's own."""
    for info in await segments.list():
        image = bytearray(layout.SUPERBLOCK_SIZE)
        try:
            if info.size >= len(image):
                await segments.read([Transfer(info.segment, 0, image)])
            found = layout.parse_superblock(image)
        except (VolumeError, MediumError):
            continue
        return dataclasses.replace(found, segment=layout.NO_SEGMENT)
    raise VolumeError(f"{error}; and no segment has a copy of it")


def _move_aside(folder: Path) -> str:
    if not folder.exists():
        return ""
    kept = folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}")
    folder.rename(kept)
    return str(kept)


class _Rebuild:
    """The steps of one rebuild: headers, files, records."""

    def __init__(self, geometry: Geometry, segments: SegmentStore, progress: Callable[[str, int, int], None]) -> None:
        self.geometry = geometry
        self.segments = segments
        self.progress = progress
        self.sizes: dict[int, int] = {}
        """of the segments that are there, in bytes"""
        self.report = RebuildReport()
        self.pieces: dict[int, list[_Piece]] = defaultdict(list)
        """inode -> its slots"""
        self.files: dict[bytes, tuple[schema.InodeRecord, int]] = {}
        """path -> (inode, highest generation)"""
        self.far_chunks: dict[bytes, bytes] = {}
        """chunk records"""
        self.generation_max = 0

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
        rows, offsets = layout.find_headers(table, geometry)
        found = []
        for row, slot_offset in zip(rows, offsets.tolist(), strict=True):
            if row["state"] == layout.STATE_FREE:
                continue
            found.append(
                _Piece(
                    generation=int(row["generation"]),
                    addr=slab * geometry.slab_size + slot_offset,
                    slot_size=int(row["slot_pages"]) * layout.PAGE_SIZE,
                    length=int(row["length"]),
                    inode=int(row["inode"]),
                    chunk=int(row["chunk"]),
                    offset=int(row["piece_offset"]),
                    state=int(row["state"]),
                    checksum=int(row["checksum"]),
                    time=int(row["time"]),
                    descriptor_length=int(row["descriptor_length"]),
                    descriptor_place=int(row["descriptor_place"]),
                )
            )
        if found:
            # A slab that changed its class may show old headers: the latest one says what it is now.
            slot_size = max(found).slot_size
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

    async def choose_files(self) -> None:
        """Find each inode's newest pieces, its description, and whether it is whole."""
        for done, (ino, pieces) in enumerate(sorted(self.pieces.items()), 1):
            self.progress("files", done, len(self.pieces))
            await self._choose_file(ino, pieces)

    async def _choose_file(self, ino: int, pieces: list[_Piece]) -> None:
        chunks = _newest(pieces)
        description = await self._description(chunks)
        path = description.path if description is not None else LOST_FOUND + b"/inode-%d" % ino
        stored = sum(piece.length for chunk in chunks.values() for piece in chunk)
        if description is None and (list(chunks) != [0]):
            self.report.dropped.append(f"inode {ino}: several chunks, but nothing says of what size")
            return
        if description is not None and stored < description.stored:
            self.report.dropped.append(f"{path!r}: {stored} of {description.stored} bytes are there")
            return
        extents: dict[int, tuple[schema.ExtentRecord, ...]] = {}
        for index, chunk in chunks.items():
            verified = [await self._verified(piece) for piece in chunk]
            extents[index] = tuple(extent for extent in verified if extent is not None)
            if len(extents[index]) < len(chunk):
                self.report.dropped.append(f"{path!r}: bytes of chunk {index} do not match their checksum")
                return
        self._add(path, _inode(ino, description, extents), extents, max(pieces).generation)

    async def _description(self, chunks: dict[int, list[_Piece]]) -> Description | None:
        """The newest that can be read, of the first pieces of all chunks."""
        heads = sorted(
            (chunk[0] for chunk in chunks.values()), key=lambda piece: (piece.time, -piece.chunk), reverse=True
        )
        for piece in [piece for piece in heads if piece.chunk == 0] + [piece for piece in heads if piece.chunk]:
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

    async def _verified(self, piece: _Piece) -> schema.ExtentRecord | None:
        """The extent in a slot; None where its bytes are not what its header says."""
        checksums = b""
        if piece.state == layout.STATE_SEALED:
            segment, offset = self.geometry.locate(piece.addr)
            buffer = bytearray(piece.length)
            found = await self._read(segment, offset, buffer)
            checksums = granule_checksums(buffer)
            if not found or extent_checksum(checksums, piece.length) != piece.checksum:
                return None
        return schema.ExtentRecord(piece.addr, piece.length, piece.generation, checksums)

    def _add(
        self,
        path: bytes,
        record: schema.InodeRecord,
        extents: dict[int, tuple[schema.ExtentRecord, ...]],
        generation: int,
    ) -> None:
        """Two files of one name: the later one took it."""
        other = self.files.get(path)
        if other is not None and other[1] > generation:
            return
        self.files[path] = (record, generation)
        for index, chunk in extents.items():
            if index >= schema.INLINE_CHUNKS:
                self.far_chunks[schema.chunk_key(record.ino, index)] = schema.encode_chunk(chunk)

    # -- records -------------------------------------------------------------------------------------

    async def write(self, records: RecordStore) -> None:
        """Directories, files, slabs and counters, in a fresh record store."""
        inode_next, size = max([FIRST_INODE, *self.pieces]) + 1, 0
        directories: dict[bytes, int] = {b"": ROOT_INODE}
        children: dict[int, int] = defaultdict(int)
        parents: dict[int, tuple[int, bytes]] = {}
        puts: dict[bytes, bytes] = {}
        slots: dict[int, tuple[int, list[int]]] = {}
        for path, (record, _) in sorted(self.files.items()):
            folder, _, name = path.rpartition(b"/")
            for part in _ancestors(folder):
                if part not in directories:
                    directories[part] = inode_next
                    parent = directories[part.rpartition(b"/")[0]]
                    parents[inode_next] = (parent, part.rpartition(b"/")[2])
                    children[parent] += 1
                    inode_next += 1
            puts[schema.entry_key(directories[folder], name)] = schema.encode_entry_inline(record)
            self.report.files += 1
            self.report.nameless += folder == LOST_FOUND
            self._collect_slots(record, slots)
            if len(puts) >= COMMIT_ROWS:
                size += growth(puts, (), {})
                await format.commit_in_parts(records, puts)
                puts = {}
        used = {record.ino for record, _ in self.files.values()}
        puts.update({key: value for key, value in self.far_chunks.items() if schema.key_inode(key) in used})
        puts.update(_directory_records(parents, children))
        puts.update(self._slab_records(slots))
        puts[schema.COUNTER_INODE] = schema.encode_u64(inode_next + schema.COUNTER_RANGE)
        puts[schema.COUNTER_GENERATION] = schema.encode_u64(self.generation_max + schema.COUNTER_RANGE)
        size += growth(puts, (), {})
        puts[schema.COUNTER_FILES] = schema.encode_counts(len(self.files) + len(directories), size)
        await format.commit_in_parts(records, puts)
        await records.commit({}, durable=True)

    def _collect_slots(self, record: schema.InodeRecord, slots: dict[int, tuple[int, list[int]]]) -> None:
        for piece in self.pieces[record.ino]:
            extents = [extent for chunk in record.chunks for extent in chunk]
            extents += [
                extent
                for key in [schema.chunk_key(record.ino, piece.chunk)]
                if key in self.far_chunks
                for extent in schema.decode_chunk(self.far_chunks[key])
            ]
            if any(extent.addr == piece.addr and extent.generation == piece.generation for extent in extents):
                slab = self.geometry.slab_of(piece.addr)
                slots.setdefault(slab, (piece.slot_size, []))[1].append(piece.addr)
                self.report.bytes += piece.length

    def _slab_records(self, slots: dict[int, tuple[int, list[int]]]) -> Iterator[tuple[bytes, bytes]]:
        for slab, (slot_size, addrs) in slots.items():
            bitmap = bytearray(-(-self.geometry.slots_per_slab(slot_size) // 8))
            for addr in addrs:
                index = addr % self.geometry.slab_size // slot_size
                bitmap[index >> 3] |= 1 << (index & 7)
            yield schema.slab_key(slab), schema.encode_slab(slot_size, bytes(bitmap))


def _newest(pieces: list[_Piece]) -> dict[int, list[_Piece]]:
    """chunk -> its pieces in order: of each chunk the latest set that fits together."""
    chunks: dict[int, list[_Piece]] = {}
    for index in sorted({piece.chunk for piece in pieces}):
        of_chunk = sorted((piece for piece in pieces if piece.chunk == index), reverse=True)
        # Pieces of one write have consecutive generations, the last piece the highest.
        chosen = [of_chunk[0]]
        for piece in of_chunk[1:]:
            if chosen[-1].offset and piece.offset + piece.length == chosen[-1].offset:
                chosen.append(piece)
        if chosen[-1].offset == 0:
            chunks[index] = chosen[::-1]
    return chunks


def _ancestors(folder: bytes) -> Iterator[bytes]:
    """A path and the paths above it, the highest first; not the root."""
    parts = folder.split(b"/") if folder else []
    for count in range(1, len(parts) + 1):
        yield b"/".join(parts[:count])


def _inode(
    ino: int, description: Description | None, extents: dict[int, tuple[schema.ExtentRecord, ...]]
) -> schema.InodeRecord:
    now = time.time_ns()
    end = sum(extent.length for extent in extents.get(0, ()))
    inline = [extents.get(index, ()) for index in range(min(schema.INLINE_CHUNKS, max(extents) + 1))]
    far = {index: chunk for index, chunk in extents.items() if index >= schema.INLINE_CHUNKS}
    return schema.InodeRecord(
        ino=ino,
        mode=description.mode if description else stat.S_IFREG | 0o600,
        uid=description.uid if description else 0,
        gid=description.gid if description else 0,
        nlink=1,
        size=description.size if description else end,
        atime=now,
        mtime=description.mtime if description else now,
        ctime=now,
        chunk_size=description.chunk_size if description else layout.SLAB_SIZE_MIN,
        chunks=tuple(inline),
        parent=0,
        rdev=0,
        target=b"",
        flags=schema.FLAG_CHUNK_RECORDS if far else 0,
        far_blocks=sum(-(-extent.length // 4096) * 8 for chunk in far.values() for extent in chunk),
    )


def _directory_records(
    parents: dict[int, tuple[int, bytes]], children: dict[int, int]
) -> Iterator[tuple[bytes, bytes]]:
    now = time.time_ns()
    for ino in [ROOT_INODE, *parents]:
        parent, name = parents.get(ino, (0, b""))
        record = schema.InodeRecord(
            ino, stat.S_IFDIR | 0o755, 0, 0, 2 + children[ino], 0, now, now, now, 0, (), parent, 0, b"", 0, 0
        )
        yield schema.inode_key(ino), schema.encode_inode(record)
        yield schema.times_key(ino), schema.encode_times(now, now, now)
        if name:
            yield schema.entry_key(parent, name), schema.encode_entry_reference(ino)
