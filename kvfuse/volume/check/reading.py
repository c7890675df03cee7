"""Reads every record of a volume once, and notes what it says in an `Evidence`. A damaged record is a problem."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE
from kvfuse.errors import EngineError, VolumeError
from kvfuse.remote.records.api import Record
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Allocator
from kvfuse.slab.image import LENT, TOKEN_SIZE, SlabState
from kvfuse.slab.layout import Geometry
from kvfuse.volume.api import FILE_SIZE_MAX, ROOT_INODE
from kvfuse.volume.check.block_heads import parse_heads
from kvfuse.volume.check.evidence import MALFORMED, Evidence, Inode, Named, directory_record, named_extents
from kvfuse.volume.inodes.chunk import blocks_of
from kvfuse.volume.inodes.metadata_budget import weigh
from kvfuse.volume.namespaces.settings import ROOT, decode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.store.extents import is_sound
from kvfuse.volume.store.sealed import ScanPages, describe

T = TypeVar("T")

SCAN_ROWS = 2000
FILE_KINDS = frozenset(
    {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK}
)
INODE_KINDS: dict[bytes, tuple[Callable[[bytes], schema.InodeRecord | int], Callable[[schema.InodeRecord], bytes]]] = {
    b"i": (schema.decode_inode, schema.encode_inode),
    b"d": (schema.decode_entry, schema.encode_entry_inline),
}
"""records that may hold an inode -> how they are read, and written"""


class RecordReader:
    """One pass over all records; the check owns it. ``found``: where it notes what they say."""

    def __init__(self, found: Evidence) -> None:
        self.found = found
        self._rescued: list[SlabState] = []
        """slabs whose records are damaged"""
        self._decode_orphan = _decode_shared_orphan if found.records.limits.shared else _decode_inode

    async def read_all(self) -> None:
        await self._read_slabs()
        await self._read_inodes()
        await self._read_namespaces()
        await self._read_entries()
        await self._read_orphans()
        await self._read_chunks()
        await self._read_rest()

    async def rows(self, prefix: bytes, what: str) -> AsyncIterator[Record]:
        """Sound records; a damaged one is a problem, once."""
        done = weight = 0
        async for rows, damaged in ScanPages(self.found.records, prefix, SCAN_ROWS):
            for key in damaged:
                if key not in self.found.damaged:
                    self.found.damaged.add(key)
                    await self._drop_damaged(key)
            for row in rows:
                weight += weigh(row.key, row.value)[0]
                if schema.is_key(row.key):
                    yield row
                else:
                    self.found.problem(f"record {row.key!r} is of no kind", deletes=[row.key])
            done += len(rows)
            self.found.progress(what, done, 0)
        self.found.weights[prefix] = weight

    async def decoded(
        self, prefix: bytes, what: str, decode: Callable[[bytes], T], name: Callable[[Record], str]
    ) -> AsyncIterator[tuple[Record, T]]:
        """Sound records, and what is in them; one that cannot be decoded is a problem. ``name``: what that calls it."""
        async for row in self.rows(prefix, what):
            try:
                value = decode(row.value)
            except MALFORMED as error:
                self.found.problem(f"{name(row)} cannot be read: {error}", deletes=[row.key])
            else:
                yield row, value

    async def _drop_damaged(self, key: bytes) -> None:
        """The next round of a repair removes the records that belonged to a damaged one."""
        text = f"the record of {describe(key)} does not match its checksum"
        puts: dict[bytes, bytes] = {}
        deletes = [key]
        if key == schema.inode_key(ROOT_INODE):
            root = directory_record(ROOT_INODE, 0o700, 2)  # nobody can tell any more whose it was
            self.found.inodes[ROOT_INODE] = Inode(root)
            puts = {key: schema.encode_inode(root)}
            text += ": it gets mode 0700, and owner root"
        elif key[:1] == b"s" and schema.is_key(key):
            state = await state_from_heads(self.found.geometry, self.found.segments, schema.key_slab(key))
            if state is not None:
                self._rescued.append(state)
                puts = {key: schema.encode_slab(state.slot_size, state.bitmap)}
        elif key[:1] == b"c" and schema.is_key(key):
            deletes += self.found.far_files.get(schema.key_inode(key), [])  # or the file would show zeros there
        self.found.problem(text, puts, deletes)

    # -- reading -------------------------------------------------------------------------------------

    async def _read_slabs(self) -> None:
        states = []
        async for row in self.rows(b"s", "slabs"):
            try:
                state = SlabState(schema.key_slab(row.key), *schema.decode_slab(row.value))
                Allocator(self.found.geometry).restore([state])
                states.append(state)
            except (VolumeError, *MALFORMED) as error:
                self.found.problem(f"slab record {row.key.hex()}: {error}", deletes=[row.key])
        self.found.slabs.restore(states + self._rescued)

    async def _read_inodes(self) -> None:
        async for row, record in self.decoded(b"i", "inodes", _decode_inode, _name_inode):
            ino = schema.key_inode(row.key)
            if record.ino != ino:
                self.found.problem(f"inode record {ino} holds inode {record.ino}", deletes=[row.key])
                continue
            self.found.inodes[ino] = Inode(record)
            self._claim_all(record, row.key, row.key)

    async def _read_namespaces(self) -> None:
        """After the directories, before what is in them."""
        rows = self.decoded(
            schema.NAMESPACE_PREFIX, "namespaces", decode_settings, lambda row: f"settings {row.key.hex()}"
        )
        async for row, settings in rows:
            number = schema.key_inode(row.key)
            if settings.capacity or settings.blocks:
                self.found.namespaces.quotas[number] = settings
            folder = self.found.inodes.get(number)
            if number == ROOT or (folder is not None and stat.S_ISDIR(folder.record.mode) and number != ROOT_INODE):
                self.found.namespaces.numbers.add(number)
                is_converting = settings.kind == "cache" and settings.epoch and not self.found.records.limits.shared
                if is_converting:
                    self.found.namespaces.converting.add(number)
                if settings.is_blocks or is_converting:
                    self.found.namespaces.epochs[number] = settings.epoch
            else:
                self.found.problem(f"namespace {number} has settings, but no folder", deletes=[row.key])

    async def _read_entries(self) -> None:
        async for row, entry in self.decoded(b"d", "names", _decode_entry, lambda row: f"name {_place(row)}"):
            parent, cookie, name = schema.split_entry_key(row.key)
            if cookie != schema.name_hash(name):
                self.found.problem(f"name {_place(row)} stands in the wrong place", deletes=[row.key])
            elif parent not in self.found.inodes or not stat.S_ISDIR(self.found.inodes[parent].record.mode):
                self._lost(row, name, parent, entry)
            elif isinstance(entry, int):
                self._read_reference(row, parent, name, entry)
            else:
                self._read_inline(row, parent, name, entry)

    def _read_inline(self, row: Record, parent: int, name: bytes, entry: schema.InodeRecord) -> None:
        if entry.ino in self.found.inodes or entry.ino in self.found.inline:
            self.found.problem(f"{_place(row)}: inode {entry.ino} exists twice", deletes=[row.key])
            return
        self.found.inline.add(entry.ino)
        self.found.report.files += 1
        if self.found.wants_verify:
            self.found.places[entry.ino] = parent, name
            self.found.inline_records[entry.ino] = entry
        if entry.nlink != 1:
            mended = {row.key: schema.encode_entry_inline(replace(entry, nlink=1))}
            self.found.problem(f"{_place(row)}: {entry.nlink} links instead of 1", mended)
        expected = self.found.namespace_of(parent)
        if entry.namespace != expected:
            mended = {row.key: schema.encode_entry_inline(replace(entry, namespace=expected))}
            self.found.problem(f"{_place(row)} is in namespace {entry.namespace} instead of {expected}", mended)
        self.found.namespaces.count(entry.namespace, stat.S_ISREG(entry.mode), 0)
        self._claim_all(entry, row.key, name)

    def _read_reference(self, row: Record, parent: int, name: bytes, ino: int) -> None:
        inode = self.found.inodes.get(ino)
        if inode is None:
            self.found.problem(f"{_place(row)} names inode {ino}, which does not exist", deletes=[row.key])
            return
        inode.names += 1
        inode.parent = parent
        self.found.places[ino] = parent, name
        inode.entry = row
        if stat.S_ISDIR(inode.record.mode):
            self.found.inodes[parent].subdirectories += 1
            if inode.names > 1:
                self.found.problem(f"directory {ino} has a second name, {name!r} in {parent}", deletes=[row.key])

    def _lost(self, row: Record, name: bytes, parent: int, entry: schema.InodeRecord | int) -> None:
        """An entry of a directory that does not exist: the file goes to the root."""
        ino = entry if isinstance(entry, int) else entry.ino
        key = schema.entry_key(ROOT_INODE, b"lost+found.%d" % ino)
        self.found.problem(f"{name!r} is in directory {parent}, which does not exist", {key: row.value}, [row.key])
        if not isinstance(entry, int) and not self.found.exists(ino):
            self.found.inline.add(ino)
            self._claim_all(entry, row.key, name)

    async def _read_orphans(self) -> None:
        """Before the chunks. Nobody reads their bytes again: those are not verified."""
        async for row, record in self.decoded(b"o", "orphans", self._decode_orphan, _name_inode):
            self.found.report.notes.append(f"inode {record.ino} was unlinked while open: the next mount frees it")
            self.found.orphans.add(record.ino)
            self._claim_all(record, row.key, b"")

    async def _read_chunks(self) -> None:
        async for row in self.rows(b"c", "chunks"):
            ino = schema.key_inode(row.key)
            if not self.found.exists(ino):
                self.found.problem(f"chunk record of inode {ino}, which does not exist", deletes=[row.key])
                continue
            what = f"chunk {schema.chunk_index(row.key)} of inode {ino}"
            keys = [row.key, *self.found.far_files.get(ino, [])]
            try:
                extents = schema.decode_chunk(row.value)
            except MALFORMED as error:
                self.found.problem(f"{what}: {error}", deletes=keys)
                continue
            self.found.far_blocks[ino] += blocks_of(extents)
            for named in named_extents(ino, schema.chunk_index(row.key), extents):
                self._claim(named, keys, what)

    async def _read_rest(self) -> None:
        async for row in self.rows(b"t", "times"):
            ino = schema.key_inode(row.key)
            if ino in self.found.inodes:
                self.found.inodes[ino].has_times = len(row.value) == schema.TIMES_SIZE
            else:
                self.found.problem(f"times of directory {ino}, which does not exist", deletes=[row.key])
        hidden: set[int] = set()
        async for row in self.rows(b"x", "attributes"):
            ino = schema.key_inode(row.key)
            if not self.found.exists(ino):
                self.found.problem(f"an attribute of inode {ino}, which does not exist", deletes=[row.key])
            elif ino not in self.found.attributed:
                hidden.add(ino)
        await self._show_attributes(hidden)
        async for row in self.rows(b"j", "places"):
            if not self.found.exists(schema.key_inode(row.key)):
                text = f"the place of inode {schema.key_inode(row.key)}, which does not exist"
                self.found.problem(text, deletes=[row.key])
        for prefix in (b"n", b"k", b"v", b"r", schema.CLEARED_PREFIX):
            async for _ in self.rows(prefix, "counters"):
                pass  # `rows` verifies their checksums; `check_counters` compares their values

    async def _show_attributes(self, hidden: set[int]) -> None:
        """Inodes with attributes that do not say so: nobody finds these, and they would stay when their inode goes."""
        kinds = {**INODE_KINDS, b"o": (self._decode_orphan, schema.encode_inode)}
        for prefix, (decode, encode) in kinds.items() if hidden else ():
            async for row in self.rows(prefix, "hidden attributes"):
                with suppress(*MALFORMED):
                    record = decode(row.value)
                    if isinstance(record, schema.InodeRecord) and record.ino in hidden:
                        shown = encode(replace(record, flags=record.flags | schema.FLAG_XATTRS))
                        text = f"inode {record.ino} has attributes, and does not say so"
                        self.found.problem(text, {row.key: shown})

    # -- extents -------------------------------------------------------------------------------------

    def _claim_all(self, record: schema.InodeRecord, key: bytes, name: bytes) -> None:
        """All that a file's own record names."""
        if record.namespace:
            self.found.namespaces.homes[record.ino] = record.namespace
        if record.flags & schema.FLAG_XATTRS:
            self.found.attributed.add(record.ino)
        if record.flags & schema.FLAG_CHUNK_RECORDS and key[:1] != b"o":
            self.found.far_files[record.ino] = [key]
            self.found.far_blocks[record.ino] -= record.far_blocks
        for index, chunk in enumerate(record.chunks):
            for named in named_extents(record.ino, index, chunk):
                self._claim(named, [key], f"{name!r} (inode {record.ino}), chunk {index}")

    def _claim(self, named: Named, keys: list[bytes], what: str) -> None:
        """``keys``: the record that names the extent, and that of its file; they go when the extent cannot be right."""
        found, ino, extent = self.found, named.ino, named.extent
        found.report.extents += 1
        slot_size = found.slabs.slot_size(extent.addr) if 0 <= extent.addr < found.geometry.data_size else 0
        granules = -(-extent.length // GRANULE_SIZE)
        if not slot_size or not found.slabs.is_durable(extent.addr):
            found.problem(f"{what}: its slot {extent.addr} is not allocated", deletes=keys)
        elif extent.addr in found.owners:
            found.contested.add(extent.addr)
        elif not 0 < extent.length <= slot_size or len(extent.checksums) not in (0, granules * CHECKSUM_SIZE):
            found.problem(f"{what}: {extent.length} bytes in a slot of {slot_size}", deletes=keys)
        elif extent.packing and not (extent.checksums and is_sound(extent.packing, extent.length)):
            found.problem(f"{what}: nothing says how its {extent.length} compressed bytes are unpacked", deletes=keys)
        else:
            found.owners[extent.addr] = ino
            found.generation_max = max(found.generation_max, extent.generation)
            found.report.used_bytes += extent.length
            found.namespaces.count(found.namespaces.homes.get(ino, ROOT), 0, slot_size)
            if found.wants_verify and ino not in found.orphans:
                found.named[extent.addr] = named
                if extent.checksums:
                    found.sealed.append((ino, extent, keys))


def _place(row: Record) -> str:
    parent, _, name = schema.split_entry_key(row.key)
    return f"{name!r} in directory {parent}"


def _name_inode(row: Record) -> str:
    return f"record {row.key!r}"


def _decode_inode(value: bytes) -> schema.InodeRecord:
    record = schema.decode_inode(value)
    _check_fields(record)
    return record


def _decode_shared_orphan(value: bytes) -> schema.InodeRecord:
    """Which says who removed it."""
    record = schema.decode_orphan(value)
    _check_fields(record)
    return record


def _decode_entry(value: bytes) -> schema.InodeRecord | int:
    entry = schema.decode_entry(value)
    if isinstance(entry, schema.InodeRecord):
        _check_fields(entry, inline=True)
    return entry


def _check_fields(record: schema.InodeRecord, *, inline: bool = False) -> None:
    """ValueError, where a file system could not work with the inode."""
    kind = stat.S_IFMT(record.mode)
    if kind not in FILE_KINDS or (inline and kind == stat.S_IFDIR):
        raise ValueError(f"inode {record.ino} has mode {record.mode:#o}")
    if not 0 < record.ino < 1 << 63 or not 0 <= record.size <= FILE_SIZE_MAX:
        raise ValueError(f"inode {record.ino} has {record.size} bytes")
    if kind == stat.S_IFREG and (record.chunk_size <= 0 or record.chunk_size % layout.PAGE_SIZE):
        raise ValueError(f"inode {record.ino} has chunks of {record.chunk_size} bytes")


async def state_from_heads(geometry: Geometry, segments: SegmentStore, slab: int) -> SlabState | None:
    """A slab whose record is lost, with every slot taken: its heads say of what size. None where they do not.

    The check frees the slots that no file has when it has read all files.
    """
    if slab >= geometry.slab_count:
        return None
    table = bytearray(geometry.head_size)
    try:
        await segments.read([Transfer(*geometry.locate_head(slab), table)])
    except (EngineError, ValueError):
        return None
    blocks = parse_heads(geometry, slab, bytes(table), None)
    if blocks.slot_size:
        return SlabState(slab, LENT, blocks.token.to_bytes(TOKEN_SIZE, "little"))
    rows, _ = layout.find_headers(table, geometry)
    live = rows[rows["state"] != layout.STATE_FREE]
    if not len(live):
        return None
    slot_size = int(live["slot_pages"][live["generation"].argmax()]) * layout.PAGE_SIZE
    count = geometry.slots_per_slab(slot_size)
    bitmap = ((1 << count) - 1).to_bytes(-(-count // 8), "little")
    state = SlabState(slab, slot_size, bitmap)
    try:
        Allocator(geometry).restore([state])
    except VolumeError:
        return None
    return state
