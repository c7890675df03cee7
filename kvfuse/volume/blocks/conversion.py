"""Converts caches of a volume of before, whose blocks were files, into namespaces of blocks: before it is served.

Blocks that have a slab for themselves keep their slots: the slab gets heads of blocks, and is lent to the block store.
Others are copied into free slabs; what has no room there, or is damaged, goes, as from a cache. Files that cannot be
blocks stay files. Nothing is written where a record says that something is, but heads, which only a rebuild asks: so
whenever this ends, the records are right, and the next mount goes on. The order of each step is

1. heads, names, and copied bytes are written and synced;
2. one commit lends the slab, deletes the records of its files, and frees the slots that were copied from.

The namespaces get their kind with the last commit. Until then their epoch says that their conversion has begun.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from stat import S_IMODE
from typing import NamedTuple

import msgspec
import numpy as np

from kvfuse.checksum import CHECKSUM_SIZE, crc32c, extent_checksum, granule_checksums
from kvfuse.errors import EngineError, VolumeError
from kvfuse.native import blockforms as forms
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab.classes import SizeClasses
from kvfuse.slab.image import LENT, TOKEN_SIZE
from kvfuse.slab.layout import PAGE_SIZE, Superblock
from kvfuse.volume.blocks.head_tables import HeadTables, name_offset, plan_slab
from kvfuse.volume.inodes.metadata_budget import weigh
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.store.codec import unpack_all
from kvfuse.volume.store.extents import ExtentRecord, find_frames
from kvfuse.volume.store.schema import InodeRecord
from kvfuse.volume.store.sealed import ScanPages, all_keys

GROUPS_MAX = 1000
"""folders with blocks of one owner and mode: see `block_tables.TABLES_MAX`; files of more stay files"""
RECORDS_AT_ONCE = 20_000
COPIES_AT_ONCE = 1000
COPIED_BYTES = 64 << 20
"""files of one commit, or of one slab, where it has more"""
SLABS_AT_ONCE = 256
SAY_SECONDS = 5.0
OWN_CLIENT = 0
"""of the use of namespaces, on a volume of one host"""
OWN_SIZES_MAX = 32
PERMISSIONS = 0o777
PRIORITY = 128

log = logging.getLogger(__name__)


@dataclass
class Converted:
    """What became of the files of caches."""

    kept: int = 0
    """blocks that are where the file was"""
    copied: int = 0
    evicted: int = 0
    """for want of room, or as they were damaged"""
    cleared: int = 0
    """files that a clear of before had not removed yet"""
    files: int = 0
    """that stay files"""
    seconds: float = 0.0

    def statistics(self) -> dict[str, float]:
        return asdict(self)


class _File(NamedTuple):
    key: bytes
    record: InodeRecord
    extents: tuple[ExtentRecord, ...]
    links: tuple[bytes, ...] = ()
    """keys of all that it stands in, where that is not just one name"""

    @property
    def keys(self) -> tuple[bytes, ...]:
        return self.links or (self.key,)

    @property
    def readers(self) -> tuple[int, int, int, int]:
        """Its group: directory, owner, permissions."""
        return schema.split_entry_key(self.key)[0], self.record.uid, self.record.gid, S_IMODE(self.record.mode)


class _Block(NamedTuple):
    """A file in a slot of a slab that is to be lent."""

    slot: int
    file: _File
    checksum: int
    sequence: int


@dataclass
class _Loan:
    """A slab that is lent with the blocks that are in it: where their files were, or a free one for copies."""

    slab: int
    slot_size: int
    blocks: list[_Block] = field(default_factory=list)
    committed: int = 0
    """blocks, from the first, that are none of files any more"""
    token: bytes = field(default_factory=partial(os.urandom, TOKEN_SIZE))
    incarnation: int = field(default_factory=lambda: int.from_bytes(os.urandom(4), "little") | 1)


class Conversion:
    """One run. ``settings``: of the caches, by number; their epochs are stored."""

    def __init__(
        self, superblock: Superblock, records: RecordStore, segments: SegmentStore, settings: dict[int, Settings]
    ) -> None:
        self._records = records
        self._segments = segments
        self._geometry = superblock.geometry
        self._settings = settings
        self._heads = HeadTables(superblock.geometry, segments)
        self._multipliers = forms.multipliers_of(superblock.volume_id)
        self._sequence = time.time_ns() // 1000
        self._bounds: dict[int, int] = {}
        """namespace -> inode number below which its files were cleared"""
        self._groups: set[tuple[int, int, int, int]] = set()
        self._slot_sizes: dict[int, int] = {}
        self._bitmaps: dict[int, bytearray] = {}
        """of slabs that have files"""
        self._free: list[int] = []
        self._freed: list[int] = []
        """that will be free when a loss of power does not bring their files back: see `_settle`"""
        self._sizes: Counter[int] = Counter()
        """of files that are copied, in whole pages"""
        self._own_sizes: frozenset[int] = frozenset()
        self._targets: dict[int, _Loan] = {}
        """by slot size"""
        self._uses: dict[int, schema.Counts] = {}
        self._counts: schema.Counts | None = None
        """of the volume, where the store does not count itself"""
        self._said = time.monotonic()
        self.done = Converted()

    async def run(self) -> Converted:
        """VolumeError, EngineError: the next run goes on."""
        began = time.monotonic()
        await self._read_state()
        in_place, others = await self._survey()
        count = sum(map(len, in_place.values())) + sum(map(len, others.values()))
        log.info("%d blocks of before are converted, %d slabs as they are", count, len(in_place))
        await self._copy_all(others)
        await self._keep_all(in_place)
        await self._finish()
        self.done.seconds = round(time.monotonic() - began, 3)
        log.info("caches were converted: %s", self.done)
        return self.done

    # -- what there is -------------------------------------------------------------------------------

    async def _read_state(self) -> None:
        async for rows, damaged in ScanPages(self._records, b"s"):
            if damaged:
                raise VolumeError("records of slabs are damaged: 'kvfuse fsck --repair' mends them")
            for row in rows:
                slab, (slot_size, bitmap) = schema.key_slab(row.key), schema.decode_slab(row.value)
                self._slot_sizes[slab], self._bitmaps[slab] = slot_size, bytearray(bitmap)
        sizes = {info.segment: info.size for info in await self._segments.list()}
        geometry = self._geometry
        for segment in sorted(sizes):
            if segment < geometry.segment_count and sizes[segment] == geometry.segment_size(segment):
                self._free += [slab for slab in geometry.slabs_of(segment) if slab not in self._slot_sizes]
        self._free.reverse()
        self._classes = SizeClasses(geometry.slab_size, set(self._slot_sizes.values()) - {LENT})
        keys = [schema.cleared_key(number) for number in self._settings]
        uses = [schema.use_key(number, OWN_CLIENT) for number in self._settings]
        found = await self._records.get([*keys, *uses, schema.COUNTER_FILES])
        for number, cleared, use in zip(self._settings, found, found[len(keys) :], strict=False):
            self._bounds[number] = schema.decode_cleared(cleared.value)[0] if cleared is not None else 0
            self._uses[number] = schema.decode_counts(use.value) if use is not None else schema.Counts(0, 0)
        if self._records.usage is None and found[-1] is not None:
            self._counts = schema.decode_counts(found[-1].value)

    async def _survey(self) -> tuple[dict[int, list[bytes]], dict[int, list[bytes]]]:
        """Keys of the files that become blocks, by slab: where the file is, and elsewhere."""
        whole: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        others: dict[int, list[bytes]] = defaultdict(list)
        links: dict[int, list[bytes]] = defaultdict(list)
        gone: list[_File] = []
        async for rows, _ in ScanPages(self._records, b"d"):
            for row in rows:
                if not schema.is_inline(row.value):
                    links[schema.key_inode(row.value)].append(row.key)
                    continue
                record = schema.decode_entry(row.value)
                assert not isinstance(record, int)
                if record.namespace not in self._settings or not schema.is_file(record):
                    continue
                if record.ino < self._bounds[record.namespace]:
                    gone.append(_File(row.key, record, await self._extents(record)))
                elif (file := await self._find(row.key, record)) is None:
                    self.done.files += 1
                elif (place := self._place(file)) is not None:
                    whole[place[0]].append((place[1], row.key))
                else:
                    largest = max(file.extents, key=lambda extent: extent.length)
                    others[self._geometry.slab_of(largest.addr)].append(row.key)
                    self._sizes[-(-record.size // PAGE_SIZE) * PAGE_SIZE] += 1
            if len(gone) >= RECORDS_AT_ONCE:
                await self._forget(gone)
                self.done.cleared += len(gone)
                gone = []
        await self._forget(gone)
        self.done.cleared += len(gone)
        await self._forget_links(links)
        in_place = {}
        for slab, found in whole.items():
            is_alone = len(found) == int.from_bytes(self._bitmaps[slab], "little").bit_count()
            count, lead = plan_slab(self._geometry.slab_size, self._slot_sizes[slab])
            if is_alone and count and any(slot >= lead for slot, _ in found):
                in_place[slab] = [key for slot, key in found if slot >= lead]
                found = [place for place in found if place[0] < lead]
            if found:
                others[slab] += [key for _, key in found]
        return in_place, others

    async def _find(self, key: bytes, record: InodeRecord) -> _File | None:
        """The file, if it can be a block."""
        mode = S_IMODE(record.mode)
        is_fit = record.nlink == 1 and 0 < record.size <= self._geometry.slab_size and not mode & ~PERMISSIONS
        if not is_fit or record.flags & schema.FLAG_XATTRS:
            return None
        file = _File(key, record, await self._extents(record))
        if sum([extent.span for extent in file.extents]) != record.size:
            return None  # it has holes
        if file.readers not in self._groups:
            if len(self._groups) >= GROUPS_MAX:
                return None
            self._groups.add(file.readers)
        return file

    async def _extents(self, record: InodeRecord) -> tuple[ExtentRecord, ...]:
        found = [extent for chunk in record.chunks for extent in chunk]
        if record.flags & schema.FLAG_CHUNK_RECORDS:
            async for rows, damaged in ScanPages(self._records, schema.chunk_prefix(record.ino)):
                if damaged:
                    return ()
                found += [extent for row in rows for extent in schema.decode_chunk(row.value)]
        return tuple(found)

    def _place(self, file: _File) -> tuple[int, int] | None:
        """(slab, slot) of a file whose slot holds just what that of a block would."""
        (extent, *more) = file.extents
        slab, offset = divmod(extent.addr, self._geometry.slab_size)
        slot_size = self._slot_sizes.get(slab, LENT)
        if more or not extent.checksums or extent.packing or slot_size == LENT or offset % slot_size:
            return None
        return slab, offset // slot_size

    # -- blocks that stay where they are -------------------------------------------------------------

    async def _keep_all(self, in_place: dict[int, list[bytes]]) -> None:
        total, slabs = sum(map(len, in_place.values())), iter(sorted(in_place))
        while some := list(self._next_slabs(slabs, in_place)):
            files = await self._read_files([key for slab in some for key in in_place[slab]])
            loans = {slab: _Loan(slab, self._slot_sizes[slab]) for slab in some}
            for file in files:
                slab, slot = self._place(file) or (-1, -1)
                _, lead = plan_slab(self._geometry.slab_size, self._slot_sizes[slab])
                checksum = extent_checksum(file.extents[0].checksums, file.record.size)
                loans[slab].blocks.append(_Block(slot - lead, file, checksum, self._next_sequence()))
            await self._lend(list(loans.values()))
            self.done.kept += len(files)
            self._say("%d of %d blocks were converted where they are", self.done.kept, total)

    def _next_slabs(self, slabs: Iterator[int], in_place: dict[int, list[bytes]]) -> Iterator[int]:
        count = 0
        for slab in islice(slabs, SLABS_AT_ONCE):
            yield slab
            count += len(in_place[slab])
            if count >= RECORDS_AT_ONCE:
                return

    async def _read_files(self, keys: Sequence[bytes]) -> list[_File]:
        found = []
        for key, row in zip(keys, await self._records.get(keys), strict=True):
            assert row is not None
            record = schema.decode_entry(row.value)
            assert not isinstance(record, int)
            found.append(_File(key, record, await self._extents(record)))
        return found

    # -- blocks that are copied ----------------------------------------------------------------------

    async def _copy_all(self, others: dict[int, list[bytes]]) -> None:
        """Copy slab by slab, so that slabs become free which later ones are copied into."""
        total = sum(map(len, others.values()))
        slab_size = self._geometry.slab_size
        often = [size for size, count in self._sizes.most_common(OWN_SIZES_MAX) if count * size >= slab_size]
        self._own_sizes = frozenset(often)
        for slab in sorted(others, key=lambda slab: -self._slot_sizes[slab]):
            for start in range(0, len(others[slab]), COPIES_AT_ONCE):
                files = await self._read_files(others[slab][start : start + COPIES_AT_ONCE])
                for some in _parts(files):
                    await self._copy(some)
                    done = self.done
                    self._say("%d of %d blocks were copied, %d evicted", done.copied, total, done.evicted)
        await self._lend(list(self._targets.values()))

    async def _copy(self, files: Sequence[_File]) -> None:
        if not self._free:
            await self._reclaim()
        writes, gone, full = list[Transfer](), list[_File](), list[_Loan]()
        for file, data in zip(files, await self._read(files), strict=True):
            slot_size = self._slot_size(file.record.size)
            target = self._target(slot_size) if data is not None else None
            if data is None or target is None:
                gone.append(file)
                continue
            slot = len(target.blocks)
            count, lead = plan_slab(self._geometry.slab_size, slot_size)
            addr = target.slab * self._geometry.slab_size + (lead + slot) * slot_size
            writes.append(Transfer(*self._geometry.locate(addr), memoryview(data)))
            target.blocks.append(_Block(slot, file, crc32c(data), self._next_sequence()))
            if len(target.blocks) == count:
                full.append(self._targets.pop(slot_size))
        await self._segments.write(writes)
        await self._lend(full)
        await self._forget(gone)
        self.done.copied += len(files) - len(gone)
        self.done.evicted += len(gone)

    def _slot_size(self, size: int) -> int:
        """Sizes that come often have slots of their own, as in the block store."""
        padded = -(-size // PAGE_SIZE) * PAGE_SIZE
        return padded if padded in self._own_sizes else self._classes.class_for(size)

    def _target(self, slot_size: int) -> _Loan | None:
        """The slab into which blocks of a size are copied. None: there is no room."""
        if slot_size not in self._targets and self._free and plan_slab(self._geometry.slab_size, slot_size)[0]:
            self._targets[slot_size] = _Loan(self._free.pop(), slot_size)
        return self._targets.get(slot_size)

    async def _reclaim(self) -> None:
        """Have slabs whose files were all copied, or evicted: no loss of power brings these back any more."""
        await self._lend(list(self._targets.values()))
        if self._freed:
            await self._records.commit({}, durable=True)
            self._free += self._freed
            self._freed = []

    async def _read(self, files: Sequence[_File]) -> list[bytearray | None]:
        """The bytes of files; None: they are damaged."""
        batch = [
            Transfer(*self._geometry.locate(extent.addr), memoryview(bytearray(extent.length)))
            for file in files
            for extent in file.extents
        ]
        try:
            await self._segments.read(batch)
        except EngineError as error:
            if len(files) > 1:
                return [(await self._read([file]))[0] for file in files]
            log.warning("a block cannot be read, and goes: %s", error)
            return [None]
        pieces = iter(batch)
        return [_join(file, [memoryview(one.buffer) for one in islice(pieces, len(file.extents))]) for file in files]

    # -- steps ---------------------------------------------------------------------------------------

    async def _lend(self, loans: Sequence[_Loan]) -> None:
        """Lend slabs, or add blocks to those that are lent."""
        loans = [loan for loan in loans if len(loan.blocks) > loan.committed]
        if not loans:
            return
        batch = list[Transfer]()
        for loan in loans:
            image = memoryview(self._image(loan))
            done = 0
            for segment, offset, length in self._heads.pieces(loan.slab, 0, len(image)):
                batch.append(Transfer(segment, offset, image[done : done + length]))
                done += length
        await self._segments.write(batch)
        await self._segments.sync()
        files = [block.file for loan in loans for block in loan.blocks[loan.committed :]]
        await self._forget(files, {loan.slab: loan.token for loan in loans})
        for loan in loans:
            loan.committed = len(loan.blocks)

    def _image(self, loan: _Loan) -> bytearray:
        """Heads and names of a slab."""
        geometry, slot_size, blocks = self._geometry, loan.slot_size, loan.blocks
        count, _ = plan_slab(geometry.slab_size, slot_size)
        former = geometry.slots_per_slab(slot_size) * geometry.header_stride(slot_size)
        image = bytearray(max(name_offset(count, count), former))
        heads = np.frombuffer(image, forms.HEAD, count + 1)
        slots = np.array([block.slot for block in blocks], np.int64)
        names = [schema.split_entry_key(block.file.key)[2] for block in blocks]
        records = [block.file.record for block in blocks]
        rows = np.zeros(len(blocks), forms.HEAD)
        rows["state"], rows["slot_size"] = forms.BLOCK_HEAD, slot_size
        rows["directory"] = [schema.split_entry_key(block.file.key)[0] for block in blocks]
        rows["low"], rows["high"] = forms.fingerprints(self._multipliers, rows["directory"], names)
        rows["sequence"] = [block.sequence for block in blocks]
        for field_name, values in self._fields(records).items():
            rows[field_name] = values
        rows["checksum"] = [block.checksum for block in blocks]
        rows["name_length"] = [len(name) for name in names]
        heads[slots + 1] = rows
        heads[0]["state"], heads[0]["slot_size"] = forms.SLAB_HEAD, slot_size
        used = [0, *(slots + 1).tolist()]
        heads["magic"][used], heads["version"][used] = forms.HEAD_MAGIC, 1
        heads["incarnation"][used], heads["token"][used] = loan.incarnation, int.from_bytes(loan.token, "little")
        starts = [index * forms.HEAD.itemsize for index in used]
        checked = forms.HEAD.itemsize - CHECKSUM_SIZE
        heads["crc"][used] = [crc32c(bytes(image[start : start + checked])) for start in starts]
        for slot, name in zip(slots.tolist(), names, strict=True):
            at = name_offset(count, slot)
            image[at : at + len(name)] = name
        return image

    def _next_sequence(self) -> int:
        """Of no other block of the volume: blocks of an earlier run have smaller ones."""
        self._sequence = max(self._sequence + 1, time.time_ns() // 1000)
        return self._sequence

    def _fields(self, records: Sequence[InodeRecord]) -> dict[str, Iterable[int]]:
        stored = [min(max(record.mtime // 1_000_000_000, 1), (1 << 32) - 1) for record in records]
        settings = [self._settings[record.namespace] for record in records]
        ends = [when + max(1, int(one.ttl)) if one.ttl else 0 for when, one in zip(stored, settings, strict=True)]
        return {
            "length": [record.size for record in records],
            "name_space": [record.namespace for record in records],
            "epoch": [one.epoch for one in settings],
            "uid": [record.uid for record in records],
            "gid": [record.gid for record in records],
            "mode": [S_IMODE(record.mode) for record in records],
            "stored": stored,
            "expires": [min(end, (1 << 32) - 1) for end in ends],
            "priority": [PRIORITY] * len(records),
        }

    async def _forget(self, files: Sequence[_File], lent: dict[int, bytes] | None = None) -> None:
        """Commit that files are none any more, and that slabs, which have some of them as blocks, are lent."""
        if not files:
            return
        puts, deletes, changed = dict[bytes, bytes](), list[bytes](), set[int]()
        for file in files:
            deletes += file.keys
            if file.record.flags & schema.FLAG_CHUNK_RECORDS:
                deletes += await all_keys(self._records, schema.chunk_prefix(file.record.ino))
            if file.record.flags & schema.FLAG_XATTRS:
                deletes += await all_keys(self._records, schema.xattr_prefix(file.record.ino))
            size = 0
            for extent in file.extents:
                slab, offset = divmod(extent.addr, self._geometry.slab_size)
                slot = offset // self._slot_sizes[slab]
                self._bitmaps[slab][slot >> 3] &= ~(1 << (slot & 7))
                changed.add(slab)
                size += self._slot_sizes[slab]
            number = file.record.namespace
            self._uses[number] = self._uses[number].add(schema.Counts(-1, -size))
        for slab in changed - (lent or {}).keys():
            if any(self._bitmaps[slab]):
                puts[schema.slab_key(slab)] = schema.encode_slab(self._slot_sizes[slab], bytes(self._bitmaps[slab]))
            else:
                deletes.append(schema.slab_key(slab))
        for slab, token in (lent or {}).items():
            puts[schema.slab_key(slab)] = schema.encode_slab(LENT, token)
        for number in {file.record.namespace for file in files} - {ROOT}:
            puts[schema.use_key(number, OWN_CLIENT)] = schema.encode_counts(*self._uses[number])
        if self._counts is not None:
            rows = await self._records.get(deletes)
            weight = sum([weigh(key, row.value)[0] for key, row in zip(deletes, rows, strict=True) if row is not None])
            self._counts = self._counts.add(schema.Counts(-len(files), -weight))
            puts[schema.COUNTER_FILES] = schema.encode_counts(*self._counts)
        await self._records.commit(puts, deletes)
        self._freed += [slab for slab in changed - (lent or {}).keys() if not any(self._bitmaps[slab])]
        for slab in lent or {}:
            self._slot_sizes[slab] = LENT

    async def _forget_links(self, links: Mapping[int, list[bytes]]) -> None:
        """Remove files of several names that were cleared."""
        inos = [ino for ino in links if ino < max(self._bounds.values())]
        rows = await self._records.get([schema.inode_key(ino) for ino in inos])
        gone = []
        for ino, row in zip(inos, rows, strict=True):
            record = schema.decode_inode(row.value) if row is not None else None
            if record is not None and schema.is_file(record) and ino < self._bounds.get(record.namespace, 0):
                keys = schema.inode_key(ino), *links[ino]
                gone.append(_File(links[ino][0], record, await self._extents(record), keys))
        await self._forget(gone)
        self.done.cleared += len(gone)

    async def _finish(self) -> None:
        """The namespaces are of blocks."""
        settings = {
            schema.namespace_key(number): encode_settings(msgspec.structs.replace(found, kind="blocks"))
            for number, found in self._settings.items()
        }
        await self._records.commit(settings, [schema.cleared_key(number) for number in self._settings], durable=True)

    def _say(self, text: str, *values: int) -> None:
        if time.monotonic() > self._said + SAY_SECONDS:
            log.info(text, *values)
            self._said = time.monotonic()


def _parts(files: Sequence[_File]) -> Iterator[Sequence[_File]]:
    """Of at most `COPIED_BYTES`, or one file."""
    start = size = 0
    for end, file in enumerate(files):
        if size and size + file.record.size > COPIED_BYTES:
            yield files[start:end]
            start, size = end, 0
        size += file.record.size
    yield files[start:]


def _join(file: _File, pieces: Sequence[memoryview]) -> bytearray | None:
    """The bytes of a file from those in its slots. None: they are damaged."""
    data, start = bytearray(file.record.size), 0
    for extent, piece in zip(file.extents, pieces, strict=True):
        if extent.checksums and granule_checksums(piece) != extent.checksums:
            return None
        part = memoryview(data)[start : start + extent.span]
        if not extent.packing:
            part[:] = piece
        else:
            frames = [piece[low:high] for low, high in find_frames(extent.packing, 0, extent.span).frames]
            if not unpack_all(frames, part):
                return None
        start += extent.span
    return data
