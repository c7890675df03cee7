"""Slot heads against records: what a check of a volume reads in the head tables of slabs."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from msgspec.structs import astuple

from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.slab.layout import Superblock
from kvfuse.volume.check.evidence import Evidence, Named
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.slots import heads

STRAY = "heads of free slots claim to be a file's"
BEHIND = "heads do not know how their slots were changed last, a rebuild may lose these files"
OLD = "heads describe a file as it was before"

CONVERTED = "files have heads of the blocks that a mount began to make of them"


class HeadCheck:
    """Compares every slot's head with what the records say; the check makes one for each pass.

    A head that does not speak for its extent is a problem: a rebuild would lose the file. What a crash may leave is a
    note: heads of free slots that claim to be a file's, heads that are behind a change in place, and descriptions of a
    file's former name, owner or size.
    Problems carry the heads as they have to be, and so does ``head_mends``.
    """

    def __init__(self, check: Evidence) -> None:
        self.check = check
        self._superblock = check.superblock
        self._geometry = check.geometry
        self._stored: Counter[int] = Counter()
        """inode -> bytes in slots"""
        self._counts = {STRAY: 0, BEHIND: 0, OLD: 0, CONVERTED: 0}

    async def run(self) -> None:
        check, geometry = self.check, self._geometry
        by_slab: dict[int, list[int]] = defaultdict(list)
        for addr, named in check.named.items():
            by_slab[geometry.slab_of(addr)].append(addr)
            self._stored[named.ino] += named.extent.span
        sizes = {info.segment: info.size for info in await check.segments.list()}
        for segment in range(geometry.segment_count):
            if sizes.get(segment) == geometry.segment_size(segment):
                for slab in geometry.slabs_of(segment):
                    if slab in check.slabs.lent:
                        continue  # heads of files are what is left there of an earlier use
                    await self._compare_slab(slab, sorted(by_slab.get(slab, ())))
                    check.progress("heads", slab + 1, geometry.slab_count)
        remedies = dict.fromkeys(self._counts, "were mended" if check.mends_heads else "'--verify --repair' mends them")
        remedies[CONVERTED] = "the next mount goes on with that"
        check.report.notes += [f"{count} {what}: {remedies[what]}" for what, count in self._counts.items() if count]

    async def _compare_slab(self, slab: int, addrs: list[int]) -> None:
        """``addrs``: of the slots that files have in it."""
        geometry = self._geometry
        table = bytearray(geometry.head_size)
        segment, start = geometry.locate_head(slab)
        try:
            await self.check.segments.read([Transfer(segment, start, table)])
        except (EngineError, ValueError) as error:
            self.check.problem(f"the heads of slab {slab} cannot be read: {error}")
            return
        self._find_strays(slab, table, addrs)
        for head in map(self._head, addrs):
            place = geometry.locate_header(head.addr, head.slot_size)[1] - start
            rows, valid = layout.parse_headers(table[place : place + layout.HEADER_SIZE], layout.HEADER_SIZE, 1)
            wrong = differences(rows[0], head, self._superblock) if valid[0] else ["it is damaged"]
            if not wrong and is_behind(rows[0], head):
                self._counts[BEHIND] += 1
                self._mend(head)
            elif wrong and self.check.namespaces.homes.get(head.ino, ROOT) in self.check.namespaces.converting:
                self._counts[CONVERTED] += 1
            elif wrong:
                text = f"inode {head.ino}: the head of its slot in segment {segment} at {start + place} is wrong"
                self.check.problem(f"{text} ({', '.join(wrong)})", writes=heads.transfers(self._superblock, [head]))
            elif rows[0]["descriptor_place"] != layout.DESCRIPTOR_NONE and head.description and not head.chunk:
                await self._compare_description(table, start, head, rows[0])

    def _head(self, addr: int) -> heads.Head:
        """The head that a slot has to have."""
        named = self.check.named[addr]
        description = b"" if named.piece_offset else self._description(named.ino)
        return head_of(named, self.check.slabs.slot_size(addr), description)

    def _description(self, ino: int) -> bytes:
        record, path = self.check.file_record(ino), self.check.path_of(ino)
        if record is None or not path:
            return b""
        owner = record.mode, record.uid, record.gid
        stored = self._stored[ino]
        description = heads.Description(path, *owner, record.size, record.mtime, record.chunk_size, stored)
        return heads.encode_description(description)

    async def _compare_description(self, table: bytearray, start: int, head: heads.Head, row: np.void) -> None:
        """Of a file's first chunk. ``table``: the slab's head, which begins at ``start`` of the segment."""
        geometry, length = self._geometry, int(row["descriptor_length"])
        if row["descriptor_place"] == layout.DESCRIPTOR_BEHIND_HEADER:
            place = geometry.locate_header(head.addr, head.slot_size)[1] - start + layout.HEADER_SIZE
            text = table[place : place + length]
        else:
            segment, offset = geometry.locate(head.addr)
            text = bytearray(min(length, head.slot_size))
            try:
                await self.check.segments.read([Transfer(segment, offset + head.slot_size - len(text), text)])
            except (EngineError, ValueError):
                text.clear()
        found, expected = heads.decode_description(bytes(text)), heads.decode_description(head.description)
        assert expected is not None
        if found is None or astuple(found)[:5] != astuple(expected)[:5]:  # path, mode, owner, size
            self._counts[OLD] += 1
            self._mend(head)

    def _mend(self, head: heads.Head) -> None:
        self.check.head_mends += heads.transfers(self._superblock, [head])

    def _find_strays(self, slab: int, table: bytearray, addrs: list[int]) -> None:
        """Heads that speak for slots which no file has, or has by other heads."""
        geometry = self._geometry
        named_places = {geometry.locate_header(addr, self.check.slabs.slot_size(addr)) for addr in addrs}
        rows, offsets = layout.find_headers(table, geometry)
        for row, offset in zip(rows, offsets.tolist(), strict=True):
            addr = slab * geometry.slab_size + offset
            slot_size = int(row["slot_pages"]) * layout.PAGE_SIZE
            place = geometry.locate_header(addr, slot_size)
            if row["state"] == layout.STATE_FREE or place in named_places:
                continue
            if addr in self.check.owners or addr in self.check.freed:
                continue  # of a removed file whose bytes are not freed yet
            self._counts[STRAY] += 1
            self.check.head_mends.append(Transfer(*place, bytes(layout.HEADER_SIZE)))


def head_of(named: Named, slot_size: int, description: bytes = b"") -> heads.Head:
    """The head that the slot of an extent has to have."""
    extent = named.extent
    life = extent.generation, extent.checksums, named.ino, named.chunk, named.piece_offset
    return heads.Head(extent.addr, slot_size, extent.length, *life, heads.state_of(extent), extent.length, description)


def differences(row: np.void, head: heads.Head, superblock: Superblock) -> list[str]:
    """How an intact header differs from the one that this extent should have; empty where it does not."""
    if row["state"] == layout.STATE_FREE:
        return ["it says that the slot is free"]
    expected = {
        "generation": head.generation,
        "inode": head.ino,
        "chunk": head.chunk,
        "piece_offset": head.piece_offset,
        "slot_pages": head.slot_size // layout.PAGE_SIZE,
    }
    wrong = [f"{name} {int(row[name])} instead of {value}" for name, value in expected.items() if row[name] != value]
    if row["fingerprint"].tobytes() != heads.fingerprint(superblock, head.ino, head.chunk):
        wrong.append("another fingerprint")
    return wrong


def is_behind(row: np.void, head: heads.Head) -> bool:
    """The extent was changed in place, or cut, and the header does not say so. One without checksums still changes."""
    found = int(row["state"]), int(row["length"]), int(row["checksum"])
    return bool(head.checksums) and found != (head.state, head.length, head.checksum)
