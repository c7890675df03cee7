"""Check a volume that nobody has mounted: records against each other and against the slabs.

The check reads every record once and keeps a few numbers per inode and slot. Each problem carries the
records that would mend it; ``repair`` commits them. What cannot be trusted is removed rather than
guessed: a missing file is a miss, a wrong one is wrong output.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE
from kvfuse.errors import VolumeError
from kvfuse.options.config import Options
from kvfuse.remote.records.api import Record, RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Allocator
from kvfuse.slab.image import SlabState
from kvfuse.slab.layout import Superblock
from kvfuse.volume.api import FILE_SIZE_MAX, ROOT_INODE
from kvfuse.volume.check.compare import (
    check_counters,
    check_reachable,
    check_segments,
    compare_inodes,
    compare_slabs,
    empty_root,
    with_links,
)
from kvfuse.volume.check.heads import HeadCheck, Named, state_from_heads
from kvfuse.volume.check.shared_records import read_shared
from kvfuse.volume.check.slots import MALFORMED, inode_in, settle_contested, verify_data
from kvfuse.volume.inodes.core import PATH_DEPTH_MAX
from kvfuse.volume.inodes.metadata_budget import weigh
from kvfuse.volume.opening.holding import hold
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages, describe

SCAN_ROWS = 2000
REPAIR_ROUNDS = 8
WRITES_MAX = 256
"""Heads that are written together."""


FILE_KINDS = frozenset(
    {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK}
)

Progress = Callable[[str, int, int], None]
"""(what is done, how far, of how many; 0: not known)"""


@dataclass(frozen=True)
class Problem:
    """Something that should not be. ``puts`` and ``deletes`` mend it, and ``writes`` to segments."""

    text: str
    puts: dict[bytes, bytes] = field(default_factory=dict)
    deletes: tuple[bytes, ...] = ()
    writes: tuple[Transfer, ...] = ()


@dataclass
class Report:
    """What a check found."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """nothing wrong, but worth a line"""
    files: int = 0
    directories: int = 0
    extents: int = 0
    used_bytes: int = 0
    verified_bytes: int = 0
    repaired: int = 0

    @property
    def clean(self) -> bool:
        return not self.problems


@dataclass
class _Inode:
    """What the records say of an inode with a record of its own, and what was seen."""

    record: schema.InodeRecord
    names: int = 0
    subdirectories: int = 0
    parent: int = 0
    has_times: bool = False
    entry: Record | None = None
    """one that names it"""


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
    """One pass over everything."""

    def __init__(
        self,
        superblock: Superblock,
        records: RecordStore,
        segments: SegmentStore,
        progress: Progress = lambda what, done, total: None,
        *,
        mends_heads: bool = False,
    ) -> None:
        self.superblock = superblock
        self.geometry = geometry = superblock.geometry
        self.records = records
        self.segments = segments
        self.progress = progress
        self.report = Report()
        self.slabs = Allocator(geometry)
        self.inodes: dict[int, _Inode] = {}
        self.inline: set[int] = set()
        self.orphans: set[int] = set()
        self.attributed: set[int] = set()
        """inodes that say they have attributes"""
        self.owners: dict[int, int] = {}
        """slot address -> inode"""
        self.contested: set[int] = set()
        """slots that several files claim"""
        self.far_files: dict[int, list[bytes]] = {}
        """inode with chunk records -> key of its own record"""
        self.far_blocks: Counter[int] = Counter()
        """inode -> units in its chunk records, less those that its own record counts"""
        self.sealed: list[tuple[int, schema.ExtentRecord, list[bytes]]] = []
        """what `verify` reads: (inode, extent, keys of the records that go when it is wrong)"""
        self.wants_verify = False
        self.generation_max = 0
        self.damaged: set[bytes] = set()
        """keys of records that do not match their checksums"""
        self.rescued: list[SlabState] = []
        """of slabs whose records do not"""
        self.weights: dict[bytes, int] = {}
        """kind of records -> what they weigh"""
        self.mends_heads = mends_heads
        """the caller writes ``head_mends`` when this is over"""
        self.head_mends: list[Transfer] = []
        self.named: dict[int, Named] = {}
        """slot address -> what a file has there, of files that have names; where heads are compared"""
        self.places: dict[int, tuple[int, bytes]] = {}
        """inode -> (directory, name): one of its names"""
        self.inline_records: dict[int, schema.InodeRecord] = {}
        """of inodes without records of their own, where heads are compared"""
        self.freed: set[int] = set()
        """slots that only wait for who holds their slab"""
        self.counted: dict[bytes, schema.Counts] = {}
        """key of a client's counts -> these"""

    def problem(
        self,
        text: str,
        puts: dict[bytes, bytes] | None = None,
        deletes: Sequence[bytes] = (),
        writes: Sequence[Transfer] = (),
    ) -> None:
        self.report.problems.append(Problem(text, puts or {}, tuple(deletes), tuple(writes)))

    async def run(self, verify: bool) -> Report:
        self.wants_verify = verify
        await self._read_slabs()
        await self._read_inodes()
        await self._read_entries()
        await self._read_orphans()
        await self._read_chunks()
        await self._read_rest()
        await read_shared(self)
        await settle_contested(self)
        compare_inodes(self)
        check_reachable(self)
        compare_slabs(self)
        await check_counters(self)
        await check_segments(self)
        if verify:
            await verify_data(self)
            compare = HeadCheck(self)
            await compare.run()
            self.head_mends = compare.mends
        return self.report

    async def repair(self) -> None:
        """Commit what mends the problems, in the order in which they were found."""
        for problem in self.report.problems:
            deletes = [key for key in problem.deletes if key not in problem.puts]
            if problem.puts or deletes:
                await self.records.commit(problem.puts, deletes)
        await self.records.commit({}, durable=True)
        await self.write([transfer for problem in self.report.problems for transfer in problem.writes])

    async def write(self, transfers: Sequence[Transfer]) -> None:
        """Into segments, durably."""
        for start in range(0, len(transfers), WRITES_MAX):
            await self.segments.write(transfers[start : start + WRITES_MAX])
        if transfers:
            await self.segments.sync()

    def file_record(self, ino: int) -> schema.InodeRecord | None:
        inode = self.inodes.get(ino)
        return inode.record if inode is not None else self.inline_records.get(ino)

    def path_of(self, ino: int) -> bytes:
        """One path of an inode, as its names are; empty where it is not below the root."""
        parts: list[bytes] = []
        while ino != ROOT_INODE:
            if ino not in self.places or len(parts) > PATH_DEPTH_MAX:
                return b""
            ino, name = self.places[ino]
            parts.append(name)
        return b"/".join(reversed(parts))

    async def rows(self, prefix: bytes, what: str) -> AsyncIterator[Record]:
        """Sound records; a damaged one is a problem, once."""
        done = weight = 0
        async for rows, damaged in ScanPages(self.records, prefix, SCAN_ROWS):
            for key in damaged:
                if key not in self.damaged:
                    self.damaged.add(key)
                    await self._drop_damaged(key)
            for row in rows:
                weight += weigh(row.key, row.value)[0]
                if schema.is_key(row.key):
                    yield row
                else:
                    self.problem(f"record {row.key!r} is of no kind", deletes=[row.key])
            done += len(rows)
            self.progress(what, done, 0)
        self.weights[prefix] = weight

    async def _drop_damaged(self, key: bytes) -> None:
        """What goes with a damaged record is found by the next round of a repair."""
        text = f"the record of {describe(key)} does not match its checksum"
        puts: dict[bytes, bytes] = {}
        deletes = [key]
        if key == schema.inode_key(ROOT_INODE):
            root = empty_root()
            self.inodes[ROOT_INODE] = _Inode(root)
            puts = {key: schema.encode_inode(root)}
            text += ": it gets mode 0700, and owner root"
        elif key[:1] == b"s" and schema.is_key(key):
            state = await state_from_heads(self.geometry, self.segments, schema.key_slab(key))
            if state is not None:
                self.rescued.append(state)
                puts = {key: schema.encode_slab(state.slot_size, state.bitmap)}
        elif key[:1] == b"c" and schema.is_key(key):
            deletes += self.far_files.get(schema.key_inode(key), [])  # without its chunk the file would show zeros
        self.problem(text, puts, deletes)

    # -- reading -------------------------------------------------------------------------------------

    async def _read_slabs(self) -> None:
        states = []
        async for row in self.rows(b"s", "slabs"):
            try:
                state = SlabState(schema.key_slab(row.key), *schema.decode_slab(row.value))
                Allocator(self.geometry).restore([state])
                states.append(state)
            except (VolumeError, *MALFORMED) as error:
                self.problem(f"slab record {row.key.hex()}: {error}", deletes=[row.key])
        self.slabs.restore(states + self.rescued)

    async def _read_inodes(self) -> None:
        async for row in self.rows(b"i", "inodes"):
            ino = schema.key_inode(row.key)
            record = self._decode(row)
            if record is None:
                continue
            if record.ino != ino:
                self.problem(f"inode record {ino} holds inode {record.ino}", deletes=[row.key])
                continue
            self.inodes[ino] = _Inode(record)
            self._claim(record, row.key, row.key)

    def _decode(self, row: Record) -> schema.InodeRecord | None:
        try:
            record = schema.decode_inode(row.value)
            _check_fields(record)
        except MALFORMED as error:
            self.problem(f"record {row.key!r} cannot be read: {error}", deletes=[row.key])
            return None
        return record

    async def _read_entries(self) -> None:
        async for row in self.rows(b"d", "names"):
            parent, cookie, name = schema.split_entry_key(row.key)
            try:
                entry = schema.decode_entry(row.value)
                if isinstance(entry, schema.InodeRecord):
                    _check_fields(entry, inline=True)
            except MALFORMED as error:
                self.problem(f"name {name!r} in directory {parent} cannot be read: {error}", deletes=[row.key])
                continue
            if cookie != schema.name_hash(name):
                self.problem(f"name {name!r} in directory {parent} stands in the wrong place", deletes=[row.key])
            elif parent not in self.inodes or not stat.S_ISDIR(self.inodes[parent].record.mode):
                self._lost(row, name, parent, entry)
            elif isinstance(entry, int):
                self._read_reference(row, parent, name, entry)
            elif entry.ino in self.inodes or entry.ino in self.inline:
                self.problem(f"{name!r} in directory {parent}: inode {entry.ino} exists twice", deletes=[row.key])
            else:
                self.inline.add(entry.ino)
                self.report.files += 1
                if self.wants_verify:
                    self.places[entry.ino] = parent, name
                    self.inline_records[entry.ino] = entry
                if entry.nlink != 1:
                    mended = schema.encode_entry_inline(with_links(entry, nlink=1))
                    self.problem(f"{name!r} in directory {parent}: {entry.nlink} links instead of 1", {row.key: mended})
                self._claim(entry, row.key, name)

    def _read_reference(self, row: Record, parent: int, name: bytes, ino: int) -> None:
        inode = self.inodes.get(ino)
        if inode is None:
            self.problem(f"{name!r} in directory {parent} names inode {ino}, which does not exist", deletes=[row.key])
            return
        inode.names += 1
        inode.parent = parent
        self.places[ino] = parent, name
        inode.entry = row
        if stat.S_ISDIR(inode.record.mode):
            self.inodes[parent].subdirectories += 1
            if inode.names > 1:
                self.problem(f"directory {ino} has a second name, {name!r} in {parent}", deletes=[row.key])

    def _lost(self, row: Record, name: bytes, parent: int, entry: schema.InodeRecord | int) -> None:
        """An entry of a directory that does not exist: the file goes to the root."""
        ino = entry if isinstance(entry, int) else entry.ino
        key = schema.entry_key(ROOT_INODE, b"lost+found.%d" % ino)
        self.problem(f"{name!r} is in directory {parent}, which does not exist", {key: row.value}, [row.key])
        if not isinstance(entry, int) and not self._exists(ino):
            self.inline.add(ino)
            self._claim(entry, row.key, name)

    async def _read_orphans(self) -> None:
        """Before the chunks. Nobody reads their bytes again: those are not verified."""
        async for row in self.rows(b"o", "orphans"):
            record = self._decode(row)
            if record is not None:
                self.report.notes.append(f"inode {record.ino} was unlinked while open: the next mount frees it")
                self.orphans.add(record.ino)
                self._claim(record, row.key, b"")

    async def _read_chunks(self) -> None:
        async for row in self.rows(b"c", "chunks"):
            ino = schema.key_inode(row.key)
            if not self._exists(ino):
                self.problem(f"chunk record of inode {ino}, which does not exist", deletes=[row.key])
                continue
            what = f"chunk {schema.chunk_index(row.key)} of inode {ino}"
            keys = [row.key, *self.far_files.get(ino, [])]  # without its chunk the file would show zeros
            try:
                extents = schema.decode_chunk(row.value)
            except MALFORMED as error:
                self.problem(f"{what}: {error}", deletes=keys)
                continue
            self.far_blocks[ino] += sum(-(-extent.length // 4096) * 8 for extent in extents)
            self._claim_extents(ino, schema.chunk_index(row.key), extents, keys, what)

    async def _read_rest(self) -> None:
        async for row in self.rows(b"t", "times"):
            ino = schema.key_inode(row.key)
            if ino in self.inodes:
                self.inodes[ino].has_times = len(row.value) == schema.TIMES_SIZE
            else:
                self.problem(f"times of directory {ino}, which does not exist", deletes=[row.key])
        hidden: set[int] = set()
        async for row in self.rows(b"x", "attributes"):
            ino = schema.key_inode(row.key)
            if not self._exists(ino):
                self.problem(f"an attribute of inode {ino}, which does not exist", deletes=[row.key])
            elif ino not in self.attributed:
                hidden.add(ino)
        await self._show_attributes(hidden)
        for prefix in (b"n", b"k"):
            async for _ in self.rows(prefix, "counters"):
                pass  # only their checksums matter here

    async def _show_attributes(self, hidden: set[int]) -> None:
        """Inodes with attributes that do not say so: nobody finds these, and they would stay when their inode goes."""
        for prefix in (b"i", b"d", b"o") if hidden else ():
            async for row in self.rows(prefix, "hidden attributes"):
                record = inode_in(row)
                if record is not None and record.ino in hidden:
                    shown = msgspec.structs.replace(record, flags=record.flags | schema.FLAG_XATTRS)
                    encode = schema.encode_entry_inline if prefix == b"d" else schema.encode_inode
                    self.problem(f"inode {record.ino} has attributes, and does not say so", {row.key: encode(shown)})

    def _exists(self, ino: int) -> bool:
        return ino in self.inodes or ino in self.inline or ino in self.orphans

    # -- extents -------------------------------------------------------------------------------------

    def _claim(self, record: schema.InodeRecord, key: bytes, name: bytes) -> None:
        if record.flags & schema.FLAG_XATTRS:
            self.attributed.add(record.ino)
        if record.flags & schema.FLAG_CHUNK_RECORDS and key[:1] != b"o":
            self.far_files[record.ino] = [key]
            self.far_blocks[record.ino] -= record.far_blocks
        for index, chunk in enumerate(record.chunks):
            self._claim_extents(record.ino, index, chunk, [key], f"{name!r} (inode {record.ino}), chunk {index}")

    def _claim_extents(
        self, ino: int, chunk: int, extents: Sequence[schema.ExtentRecord], keys: list[bytes], what: str
    ) -> None:
        offset = 0
        for extent in extents:
            self._claim_extent(Named(ino, chunk, offset, extent), keys, what)
            offset += extent.length

    def _claim_extent(self, named: Named, keys: list[bytes], what: str) -> None:
        """``keys``: the record that names the extent, and that of its file; they go when the extent cannot be right."""
        ino, extent = named.ino, named.extent
        self.report.extents += 1
        slot_size = self.slabs.slot_size(extent.addr) if 0 <= extent.addr < self.geometry.data_size else 0
        granules = -(-extent.length // GRANULE_SIZE)
        if not self.slabs.is_durable(extent.addr) if slot_size else True:
            self.problem(f"{what}: its slot {extent.addr} is not allocated", deletes=keys)
        elif extent.addr in self.owners:
            self.contested.add(extent.addr)
        elif not 0 < extent.length <= slot_size or len(extent.checksums) not in (0, granules * CHECKSUM_SIZE):
            self.problem(f"{what}: {extent.length} bytes in a slot of {slot_size}", deletes=keys)
        else:
            self.owners[extent.addr] = ino
            self.generation_max = max(self.generation_max, extent.generation)
            self.report.used_bytes += extent.length
            if self.wants_verify and ino not in self.orphans:
                self.named[extent.addr] = named
            if self.wants_verify and extent.checksums and ino not in self.orphans:
                self.sealed.append((ino, extent, keys))


def _check_fields(record: schema.InodeRecord, *, inline: bool = False) -> None:
    """ValueError, where a file system could not work with the inode."""
    kind = stat.S_IFMT(record.mode)
    if kind not in FILE_KINDS or (inline and kind == stat.S_IFDIR):
        raise ValueError(f"inode {record.ino} has mode {record.mode:#o}")
    if not 0 < record.ino < 1 << 63 or not 0 <= record.size <= FILE_SIZE_MAX:
        raise ValueError(f"inode {record.ino} has {record.size} bytes")
    if kind == stat.S_IFREG and (record.chunk_size <= 0 or record.chunk_size % layout.PAGE_SIZE):
        raise ValueError(f"inode {record.ino} has chunks of {record.chunk_size} bytes")
