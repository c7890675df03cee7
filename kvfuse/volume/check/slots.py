"""Slots against files: whose a slot is that several files claim, and whether the bytes in all slots are right."""

from __future__ import annotations

from contextlib import suppress

from kvfuse.checksum import granule_checksums
from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.volume.check.evidence import MALFORMED, Evidence, extents_in
from kvfuse.volume.check.reading import RecordReader


async def settle_contested(reader: RecordReader) -> None:
    """Slots that several files claim: the header says whose they are, every other file goes."""
    check = reader.found
    if not check.contested:
        return
    owners = {addr: await _header_owner(check, addr) for addr in check.contested}
    for prefix in (b"i", b"d", b"c"):
        async for row in reader.rows(prefix, "contested slots"):
            with suppress(*MALFORMED):
                for ino, _, _, extent in extents_in(row):
                    if extent.addr in owners and owners[extent.addr] != (ino, extent.generation):
                        keys = [row.key, *check.far_files.get(ino, [])]
                        check.problem(f"inode {ino}: its slot {extent.addr} is another file's too", deletes=keys)


async def _header_owner(check: Evidence, addr: int) -> tuple[int, int] | None:
    """(inode, generation) in the header of a slot; None where it cannot be read."""
    table = bytearray(layout.HEADER_SIZE)
    place = check.geometry.locate_header(addr, check.slabs.slot_size(addr))
    try:
        await check.segments.read([Transfer(*place, table)])
    except (EngineError, ValueError):
        return None
    rows, valid = layout.parse_headers(table, layout.HEADER_SIZE, 1)
    return (int(rows[0]["inode"]), int(rows[0]["generation"])) if valid[0] else None


async def verify_data(check: Evidence) -> None:
    """Read what is sealed, and compare; a file with a wrong byte is to be removed."""
    total = sum(extent.length for _, extent, _ in check.sealed)
    check.sealed.sort(key=lambda row: row[1].addr)
    bad: set[bytes] = set()
    for ino, extent, keys in check.sealed:
        segment, offset = check.geometry.locate(extent.addr)
        buffer = bytearray(extent.length)
        try:
            await check.segments.read([Transfer(segment, offset, buffer)])
            right = granule_checksums(buffer) == extent.checksums
        except (EngineError, ValueError):
            right = False
        if not right and keys[-1] not in bad:
            bad.add(keys[-1])
            check.problem(f"inode {ino}: its bytes in segment {segment} at {offset} are wrong", deletes=keys)
        check.report.verified_bytes += extent.length
        check.progress("bytes", check.report.verified_bytes, total)
