"""Slot heads: the header of a slot, and behind it, or in the slot's unused end, a description of the file.

The description has path, owner, mode and size, so that a rebuild can restore files from the segments alone.
`HeaderWriter` rewrites heads when files change; the flusher writes those of new slots with their bytes.

Nobody who stores or renames waits for the servers of heads that are late: these heads are *owed*, and written when
their servers answer. A daemon that is killed meanwhile leaves them as they were: `fsck --verify --repair` mends them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import itemgetter
from typing import NamedTuple

import msgspec
import trio

from kvfuse.checksum import CHECKSUM_SIZE, extend, extent_checksum
from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.slab.allocator import Slot
from kvfuse.slab.layout import Superblock
from kvfuse.volume.inodes.chunk import FRESH, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

log = logging.getLogger(__name__)

FINGERPRINT_SIZE = 16
"""bytes"""
OWED_MAX = 50_000
"""heads that may be owed, some 500 bytes each in memory"""
OWED_SECONDS = 0.5
"""between attempts to write them"""
OWED_AT_ONCE = 1000


class Description(msgspec.Struct, array_like=True, frozen=True):
    """The file that a slot belongs to, with all that a rebuild needs to restore it."""

    path: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    chunk_size: int
    stored: int
    """bytes in slots; if fewer are found, the file is not whole. 0: not known"""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Description).decode


def encode_description(description: Description) -> bytes:
    """Encode it, followed by its checksum."""
    text = _encode(description)
    return text + extend(0, text).to_bytes(CHECKSUM_SIZE, "little")


def decode_description(text: bytes) -> Description | None:
    """Decode a description. None: it is damaged, or of another program version."""
    body, checksum = text[:-CHECKSUM_SIZE], int.from_bytes(text[-CHECKSUM_SIZE:], "little")
    if len(text) <= CHECKSUM_SIZE or extend(0, body) != checksum:
        return None
    try:
        return _decode(body)
    except ValueError:
        return None


class Head(NamedTuple):
    """The contents of a slot's head. Addresses and sizes in bytes."""

    addr: int
    slot_size: int
    length: int
    generation: int
    checksums: bytes
    """of the extent's granules; empty: unsealed"""
    ino: int
    chunk: int
    piece_offset: int
    state: int
    reach: int
    """first bytes of the slot that no description may cover"""
    description: bytes = b""
    """with its checksum; empty: none"""

    @property
    def checksum(self) -> int:
        """Of all the extent's bytes; 0 where it is unsealed."""
        if len(self.checksums) == CHECKSUM_SIZE:
            return int.from_bytes(self.checksums, "little")
        return extent_checksum(self.checksums, self.length) if self.checksums else 0


def state_of(extent: Extent | schema.ExtentRecord) -> int:
    """What the header of its slot has to say."""
    if not extent.checksums:
        return layout.STATE_UNSEALED
    return layout.STATE_PACKED if extent.packing else layout.STATE_SEALED


def fingerprint(superblock: Superblock, ino: int, chunk: int) -> bytes:
    """128 bits that identify a file's chunk in this volume."""
    return blake2b(schema.chunk_key(ino, chunk), digest_size=FINGERPRINT_SIZE, key=superblock.volume_id).digest()


def transfers(superblock: Superblock, heads: Sequence[Head]) -> list[Transfer]:
    """The transfers that write these heads; those that are neighbours in their table are one."""
    geometry, now = superblock.geometry, int(time.time())
    made: list[Transfer] = []
    headers: list[tuple[int, int, bytes]] = []
    strides = {slot_size: geometry.header_stride(slot_size) for slot_size in {head.slot_size for head in heads}}
    hashed = blake2b(digest_size=FINGERPRINT_SIZE, key=superblock.volume_id)
    for head in heads:
        stride, description, place = strides[head.slot_size], head.description, layout.DESCRIPTOR_NONE
        if description and len(description) <= stride - layout.HEADER_SIZE:
            place = layout.DESCRIPTOR_BEHIND_HEADER
        elif description and len(description) <= head.slot_size - head.reach:
            # Clear of bytes to which records may still refer, as before an uncommitted cut, and of writes in place.
            place = layout.DESCRIPTOR_AT_SLOT_END
        header = _header(head, place, now, hashed.copy())
        if place == layout.DESCRIPTOR_BEHIND_HEADER:  # up to the next header: neighbours become one write
            header = (header + description).ljust(stride, b"\0")
        elif place == layout.DESCRIPTOR_AT_SLOT_END:
            segment, offset = geometry.locate(head.addr)
            made.append(Transfer(segment, offset + head.slot_size - len(description), description))
        headers.append((*geometry.locate_header(head.addr, head.slot_size, stride), header))
    return made + _joined(headers)


def _header(head: Head, place: int, now: int, hashed: blake2b) -> bytes:
    """``place``: of its description. ``now``: seconds. ``hashed``: of the volume, as in `fingerprint`."""
    _, slot_size, length, generation, _, ino, chunk, piece_offset, state, _, description = head
    hashed.update(schema.chunk_key(ino, chunk))
    return layout.pack_header_fields(
        layout.HEADER_MAGIC, layout.FORMAT_VERSION, state, place, length, generation, hashed.digest(), ino, chunk,
        piece_offset, head.checksum, now, len(description) if place else 0, slot_size // layout.PAGE_SIZE,
    )  # fmt: skip


def _joined(headers: list[tuple[int, int, bytes]]) -> list[Transfer]:
    """Of (segment, offset, bytes); neighbours in one transfer. Of two for one place the later one stays behind."""
    runs: list[tuple[int, int, list[bytes]]] = []
    last, end = -1, 0
    for segment, offset, header in sorted(headers, key=itemgetter(0, 1)):
        if offset != end or segment != last:
            runs.append((segment, offset, []))
        runs[-1][2].append(header)
        last, end = segment, offset + len(header)
    return [Transfer(segment, offset, b"".join(parts)) for segment, offset, parts in runs]


@dataclass
class HeaderWriter:
    """Writes slot headers, and the descriptions of files in them. Each membership has one."""

    core: Core

    def __post_init__(self) -> None:
        self._describing = trio.Lock()
        self._owed: dict[int, Head | Slot] = {}
        """address of a slot -> the head that it is to have; a slot: it is free"""
        self._owes, self._paid = trio.Event(), trio.Event()

    @property
    def owed(self) -> int:
        """Heads whose servers are late."""
        return len(self._owed)

    @property
    def owed_slabs(self) -> set[int]:
        """Slabs that have them: they stay this host's until then."""
        return {self.core.geometry.slab_of(addr) for addr in self._owed}

    @property
    def owes_much(self) -> bool:
        """From now on heads are waited for."""
        return len(self._owed) >= OWED_MAX

    def head(
        self, node: Node, index: int, offset: int, extent: Extent, folders: dict[int, bytes] | None = None
    ) -> Head:
        """The head for an extent at ``offset`` bytes of chunk ``index``; only the first one describes the file.

        ``folders``: inode -> path, with a slash, of those that were asked for since the caller waited last.
        """
        return Head(
            extent.addr,
            extent.slot_size,
            extent.length,
            extent.generation,
            extent.checksums,
            node.ino,
            index,
            offset,
            state_of(extent),
            extent.reach,
            b"" if offset or not node.nlink else self._description(node, {} if folders is None else folders),
        )

    def _description(self, node: Node, folders: dict[int, bytes]) -> bytes:
        above = folders.get(node.parent)
        if above is None:
            folder = self.core.nodes.get(node.parent)
            path = self.core.path_of(folder) if folder is not None else b""
            above = folders[node.parent] = path + b"/" if path else b""
        path, stored = above + node.name if node.name else self.core.path_of(node), node.stored_length()
        return encode_description(
            Description(path, node.mode, node.uid, node.gid, node.size, node.mtime, node.chunk_size, stored)
        )

    async def describe(self, nodes: Sequence[Node]) -> None:
        """Rewrite the headers of files that were renamed, or changed size, owner or mode, since. EngineError."""
        async with self._describing:
            changed = [node for node in nodes if identity_of(node) != node.described and self._may_describe(node)]
            heads = [self.head(node, 0, 0, node.chunks[0].extents[0]) for node in changed]
            if heads:
                await self.write(heads)

    def _may_describe(self, node: Node) -> bool:
        """The header of the first extent, which is out of date, may be rewritten. Marks it as written."""
        chunk = node.chunks.get(0)
        if chunk is None or not chunk.extents:
            return False
        node.described = identity_of(node)
        extent, slabs = chunk.extents[0], self.core.slabs
        is_ours = slabs.holds(self.core.geometry.slab_of(extent.addr)) and slabs.is_durable(extent.addr)
        if extent.state != FRESH and not is_ours:
            return False  # another host may free and reuse the slot
        extent.slot_size = slabs.slot_size(extent.addr)  # another host may have held the slab at the read
        return True

    async def write(self, heads: Sequence[Head]) -> None:
        """Those that are late are owed. EngineError."""
        made = transfers(self.core.superblock, heads)
        with self.core.reads.reading():  # slots given up meanwhile are not reused yet
            if self.owes_much:
                await self.core.segments.write(made)
            late = set[int]() if self.owes_much else await self.core.segments.servers.write_some(made)
        self.wrote(heads, [made[index] for index in late])

    def wrote(self, heads: Sequence[Head], late: Sequence[Transfer]) -> None:
        """Heads were written, but those with bytes in ``late`` are owed."""
        for head in heads if self._owed else ():
            self._owed.pop(head.addr, None)
        for head in heads if late else ():
            places = [self.core.locate(head.addr), self.core.geometry.locate_header(head.addr, head.slot_size)]
            sizes = [head.slot_size, layout.HEADER_SIZE]
            if any(_overlaps(one, *place, size) for one in late for place, size in zip(places, sizes, strict=True)):
                self._owe(head)

    def _owe(self, head: Head | Slot) -> None:
        self._owed[head.addr] = head
        self._owes.set()

    async def run(self) -> None:
        """Write what is owed, until cancelled."""
        while True:
            await self._owes.wait()
            self._owes, self._paid = trio.Event(), trio.Event()
            while self._owed:
                await trio.sleep(OWED_SECONDS)
                try:
                    await self._pay()
                except EngineError as error:
                    log.info("%d slot heads are written later: %s", len(self._owed), error)
            self._paid.set()

    async def _pay(self) -> None:
        answers, locate = self.core.segments.servers.answers, self.core.geometry.locate_header
        async with self._describing:
            ready = [
                one
                for one in self._owed.values()
                if answers(*locate(one.addr, one.slot_size if isinstance(one, Head) else one.size), layout.HEADER_SIZE)
                is not False
            ][:OWED_AT_ONCE]
            await self.write([one for one in ready if isinstance(one, Head)])
            await self._mark([one for one in ready if isinstance(one, Slot)])

    async def settle(self, seconds: float) -> None:
        """Return when nothing is owed, so many seconds later at the latest: this membership ends."""
        if self._owed:
            with trio.move_on_after(seconds):
                await self._paid.wait()
        if self._owed:
            log.warning("the heads of %d slots were not written: 'fsck --verify --repair' does that", len(self._owed))

    async def settle_descriptions(self) -> None:
        """Return when no description is being written; later ones stay clear of the present reach of extents."""
        async with self._describing:
            pass

    async def write_header(self, node: Node, index: int, extent: Extent) -> None:
        """Rewrite the header of an extent whose state or length changed in place. EngineError."""
        await self.write([self.head(node, index, node.chunks[index].start_of(extent), extent)])

    async def mark_free(self, slots: Sequence[Slot]) -> None:
        """Mark slots as free in their headers, before they may be reused.

        If the write fails, a rebuild may restore a removed block: a warning in the log, no error.
        """
        try:
            await self._mark(slots)
        except EngineError as error:
            log.warning("%d freed slots could not be marked, a rebuild may restore them: %s", len(slots), error)

    async def _mark(self, slots: Sequence[Slot]) -> None:
        geometry = self.core.geometry
        zeros = memoryview(bytes(layout.HEADER_STRIDE_MAX))
        marks = [  # up to the next header: neighbours, as an eviction frees them, become one write
            Transfer(*geometry.locate_header(slot.addr, slot.size), zeros[: geometry.header_stride(slot.size)])
            for slot in slots
        ]
        late = await self.core.segments.servers.write_some(marks)
        for slot in slots if self._owed else ():
            self._owed.pop(slot.addr, None)
        for index in late:
            self._owe(slots[index])


def _overlaps(transfer: Transfer, segment: int, offset: int, size: int) -> bool:
    end = transfer.offset + memoryview(transfer.buffer).nbytes
    return transfer.segment == segment and offset < end and transfer.offset < offset + size


def identity_of(node: Node) -> tuple[int, bytes, int, int, int, int]:
    """The attributes of a file in its headers; if they differ, the headers must be rewritten."""
    return node.parent, node.name, node.mode, node.uid, node.gid, node.size
