"""Everything that is stored is read again, slowly, for as long as the volume is mounted: cold blocks rot unseen.

A pass reads every record, and of every sealed extent that a record names the bytes and the slot's head; then the
blocks of the block store (`BlockScrub`), and the list of cold objects. It reads files with O_DIRECT where that is
possible: the page cache would hide what the disk says. Of a volume that many hosts have each reads its share of the
slabs. An error is logged once and counted. A damaged block is dropped; else nothing is changed: `fsck --verify
--repair` mends heads, and removes files whose bytes are wrong.

The volume changes meanwhile. So what looks wrong is an error only if the record that names it is still the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

import trio

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, crc32c
from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.options.config import Options
from kvfuse.remote.records.api import Record
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.slab import layout
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.check.block_scrub import BlockScrub
from kvfuse.volume.check.evidence import Named, extents_in
from kvfuse.volume.check.head_check import differences, head_of
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.opening import engines
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import describe, get_sound, last_key, scan_page

ROWS = 64
"""Records that are read together."""
RECORD_COST = 4096
"""Bytes that a record counts for in the rate: it costs time, not traffic."""
PASS_SECONDS_MIN = 60.0
"""between the beginnings of two passes"""
RETRY_SECONDS = 5.0
"""after an engine did not answer"""
LOGGED_MAX = 10_000
"""Errors that are remembered, so that they are logged once."""

REMEDY = ": 'kvfuse fsck --verify' tells what can be mended"

log = logging.getLogger(__name__)


@dataclass
class ScrubCounters:
    passes: int = 0
    bytes: int = 0
    """read of extents, blocks and heads"""
    extents: int = 0
    blocks: int = 0
    """of the block store"""
    records: int = 0
    errors: int = 0
    """each wrong record, extent, head or block once"""
    last_pass_errors: int = 0
    last_pass_time: float = 0.0
    """when the last pass ended, seconds since the epoch; 0: none has"""


class Scrubbed(Protocol):
    """The parts of a mounted volume that belong to one lease."""

    core: Core
    leases: SlabLeases | None
    engine: BlockEngine | None


class Scrubber:
    """Reads a mounted volume again, a granule at a time; the volume owns it. ``run`` until ``stop``."""

    def __init__(self, parts: Callable[[], Scrubbed], options: Options) -> None:
        self.counters = ScrubCounters()
        self._parts = parts
        self._options = options
        self._rate = options.scrub.rate
        self._scope = trio.CancelScope()
        self._is_over = False
        self._due = 0.0
        self._logged: set[tuple[object, ...]] = set()
        self._pass_errors = 0

    def statistics(self) -> dict[str, object]:
        return {"rate": self._rate, **asdict(self.counters)}

    def stop(self) -> None:
        self._is_over = True
        self._scope.cancel()

    async def run(self) -> None:
        """May be begun anew."""
        if self._is_over:
            return
        with trio.CancelScope() as self._scope:
            async with AsyncExitStack() as stack:
                segments = await self._open(stack)
                while True:
                    began = trio.current_time()
                    await self._pass(segments)
                    await trio.sleep_until(began + PASS_SECONDS_MIN)

    async def _open(self, stack: AsyncExitStack) -> SegmentStore | None:
        """Files for reading past the page cache; None where the volume's own engine has to do."""
        if not self._options.has_segment_files:
            return None
        try:
            store = engines.open_segments(self._options, read_only=True, direct=True)
            return await stack.enter_async_context(store)
        except EngineError as error:
            log.info("scrub reads through the page cache: %s", error)
            return None

    async def _pass(self, segments: SegmentStore | None) -> None:
        self._pass_errors = 0
        after = b""
        while True:
            try:
                rows, damaged = await scan_page(self._parts().core.records, b"", after, ROWS)
            except EngineError as error:
                log.info("scrub waits: %s", error)
                await trio.sleep(RETRY_SECONDS)
                continue
            if not rows and not damaged:
                break
            for key in damaged:
                self._error((key,), f"the record of {describe(key)} does not match its checksum")
            for row in rows:
                await self._check_record(row, segments or self._parts().core.segments)
            after = last_key(rows, damaged)
        if (engine := self._parts().engine) is not None:
            blocks = BlockScrub(
                engine, segments or engine.core.segments, self._note_bytes, partial(self._error, remedy="")
            )
            try:
                await blocks.run()
            finally:
                self.counters.blocks += blocks.blocks
            await self._compare_cold(engine)
        self.counters.passes += 1
        self.counters.last_pass_errors = self._pass_errors
        self.counters.last_pass_time = round(time.time(), 3)

    async def _compare_cold(self, engine: BlockEngine) -> None:
        """Whether the bucket has the objects that it had. Their bytes are not read: requests cost, and each read is
        verified."""
        if engine.cold is None or not engine.cold.tier.is_loaded:
            return
        try:
            for text in await engine.cold.tier.compare():
                self._error((text,), text, remedy="")
        except EngineError as error:
            log.info("scrub leaves out the cold tier: %s", error)

    async def _check_record(self, row: Record, segments: SegmentStore) -> None:
        self.counters.records += 1
        await self._pace(RECORD_COST)
        try:
            extents = extents_in(row) if row.key[:1] in (b"d", b"i", b"c") and schema.is_key(row.key) else []
        except schema.Malformed as error:
            self._error((row.key,), f"{describe(row.key)}: {error}")
            return
        for named in extents:
            if named.extent.checksums and self._is_ours(named.extent.addr):
                self.counters.extents += 1
                for what, wrong in (await self._wrong(named, segments)).items():
                    if await self._is_current(row):
                        text = f"{describe(row.key)} (inode {named.ino}): {wrong}"
                        self._error((what, named.extent.addr, named.extent.generation), text)

    def _is_ours(self, addr: int) -> bool:
        """Of a volume of many hosts: the slabs are dealt out among those that are there."""
        leases, core = self._parts().leases, self._parts().core
        slab = core.geometry.slab_of(addr)
        if not 0 <= slab < core.geometry.slab_count:
            return False
        members = sorted(leases.view.members) if leases is not None else []
        return core.client not in members or slab % len(members) == members.index(core.client)

    async def _is_current(self, row: Record) -> bool:
        """The record that was read is still what the store has."""
        try:
            (now,) = await get_sound(self._parts().core.records, [row.key])
        except EngineError:
            return False
        return now is not None and now.version == row.version

    async def _wrong(self, named: Named, segments: SegmentStore) -> dict[str, str]:
        """The problems of an extent's bytes and head; of the bytes the first place."""
        wrong: dict[str, str] = {}
        try:
            if text := await self._wrong_bytes(named.extent, segments):
                wrong["bytes"] = text
            if text := await self._wrong_head(named, segments):
                wrong["head"] = text
        except EngineTimeout as error:
            log.info("scrub leaves out %d bytes: %s", named.extent.length, error)
        except (EngineError, ValueError) as error:
            wrong["bytes"] = f"its bytes cannot be read: {error}"
        return wrong

    async def _wrong_bytes(self, extent: schema.ExtentRecord, segments: SegmentStore) -> str:
        segment, offset = self._parts().core.geometry.locate(extent.addr)
        for start in range(0, extent.length, GRANULE_SIZE):
            buffer = bytearray(min(GRANULE_SIZE, extent.length - start))
            await self._read(segments, Transfer(segment, offset + start, buffer))
            place = start // GRANULE_SIZE * CHECKSUM_SIZE
            if crc32c(buffer) != int.from_bytes(extent.checksums[place : place + CHECKSUM_SIZE], "little"):
                return f"its bytes in segment {segment} at {offset + start} do not match their checksum"
        return ""

    async def _wrong_head(self, named: Named, segments: SegmentStore) -> str:
        core, extent = self._parts().core, named.extent
        slot_size = self._slot_size(extent.addr)
        if not slot_size:  # another host has just taken the slab, or given it back
            return ""
        segment, offset = core.geometry.locate_header(extent.addr, slot_size)
        buffer = bytearray(layout.HEADER_SIZE)
        await self._read(segments, Transfer(segment, offset, buffer))
        rows, valid = layout.parse_headers(buffer, layout.HEADER_SIZE, 1)
        wrong = differences(rows[0], head_of(named, slot_size), core.superblock) if valid[0] else ["it is damaged"]
        return f"the head of its slot in segment {segment} at {offset} is wrong ({', '.join(wrong)})" if wrong else ""

    def _slot_size(self, addr: int) -> int:
        core, leases = self._parts().core, self._parts().leases
        size = core.slabs.slot_size(addr)
        return size or (leases.view.use(core.geometry.slab_of(addr)).slot_size if leases is not None else 0)

    async def _read(self, segments: SegmentStore, transfer: Transfer) -> None:
        """A slot that is freed meanwhile is not used again before this ends."""
        with self._parts().core.reads.reading():
            await segments.read([transfer])
        await self._note_bytes(len(transfer.buffer))

    async def _note_bytes(self, size: int) -> None:
        self.counters.bytes += size
        await self._pace(size)

    async def _pace(self, size: int) -> None:
        self._due = max(self._due, trio.current_time()) + size / self._rate
        await trio.sleep_until(self._due)

    def _error(self, what: tuple[object, ...], text: str, remedy: str = REMEDY) -> None:
        self._pass_errors += 1
        if what not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(what)
            self.counters.errors += 1
            log.error("scrub: %s%s", text, remedy)
