"""The slabs and clients of a shared volume as the record store has them, kept up to date by watches.

It may be stale at any time: it serves choices and figures. A commit that acts on it expects the records it saw.
"""

from __future__ import annotations

import logging
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import trio

from kvfuse.errors import EngineError, VolumeError
from kvfuse.remote.records.api import ABSENT, Change, RecordStore
from kvfuse.slab.image import LENT, TOKEN_SIZE, SlabState, durable_slots
from kvfuse.slab.layout import Geometry, Superblock, parse_superblock
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import NOBODY, Counts, SlabHolder
from kvfuse.volume.store.sealed import ScanPages, get_page

KINDS = (b"m", b"l", b"s", b"f", b"q", schema.COUNTER_FILES, schema.SUPERBLOCK)
"""prefixes of the records that are followed"""
SCAN_ROWS = 1000
RETRY_SECONDS = 0.5

log = logging.getLogger(__name__)


class Seen(NamedTuple):
    """An l record as it was seen; version ABSENT: there was none."""

    holder: SlabHolder
    version: int


class SlabUse(NamedTuple):
    """An s record: how many of a slab's slots are durable."""

    slot_size: int
    slots_used: int


NEVER_HELD = Seen(SlabHolder(NOBODY, 0), ABSENT)
UNUSED = SlabUse(0, 0)


@dataclass
class SlabView:
    """Slabs and clients as the store has them; one membership's parts own it. ``changed``: called after each change.

    ``resized``: gets the superblock that somebody stored. Records of slabs may be known before it, which are beyond
    the volume as it was.
    """

    records: RecordStore
    geometry: Geometry
    changed: Callable[[Change], object] = lambda change: None
    resized: Callable[[Superblock], object] = lambda superblock: None

    def __post_init__(self) -> None:
        self.members: set[int] = set()
        """clients that are alive"""
        self.holders: dict[int, Seen] = {}
        self.uses: dict[int, SlabUse] = {}
        self.lent: dict[int, bytes] = {}
        """slab that has blocks of a block store -> token of its loan"""
        self._unclear: set[int] = set()
        """slabs whose holder's record is damaged"""
        self.counts: dict[int, Counts] = {}
        """client -> what it made, less what it removed"""
        self.counted = Counts(0, None)
        """the same of clients that are gone"""
        self._total = Counts(0, 0)
        """of all ``counts``"""
        self._gone: set[int] = set()
        """see `gone`"""
        self._heirs: list[int] = []
        """``members``, ascending; empty: to be sorted anew"""
        self.abandoned: set[int] = set()
        """slabs of nobody that have blocks of a block store"""
        self.freed: Counter[int] = Counter()
        """slab -> durable slots that its holder has still to free, about"""
        self.used_bytes = 0
        """of durable slots"""
        self._versions: dict[bytes, int] = {}
        """of every record here but f"""
        self._kept_count = sys.maxsize
        """slabs from this one on are given up (`Superblock.target`)"""
        self.ready = trio.Event()
        """everything was read once"""
        self.held_counts: Counter[int] = Counter()
        """client -> slabs that it holds"""
        self.given: dict[int, float] = {}
        """slab of nobody -> when its holder gave it back, in trio's time, if that was seen; who follows keeps this"""
        self.imaged: dict[int, float] = {}
        """slab with slots of files -> when its image last changed, in trio's time, if that was seen"""
        self._unheld_start = 0
        """slabs below are held"""
        self._unheld_used = 0
        """bytes of durable slots in slabs that nobody holds"""

    # -- questions -----------------------------------------------------------------------------------

    def seen(self, slab: int) -> Seen:
        return self.holders.get(slab, NEVER_HELD)

    def use(self, slab: int) -> SlabUse:
        return self.uses.get(slab, UNUSED)

    def slots_free(self, slab: int) -> int:
        """Of a slab that has a slot size; about."""
        use = self.use(slab)
        slot_count = self.geometry.slots_per_slab(use.slot_size) if use.slot_size else 0
        return slot_count - use.slots_used + max(min(self.freed[slab], use.slots_used), 0)

    def freed_bytes(self, slab: int) -> int:
        """Of slots in use that are free as soon as whoever holds the slab, or takes it, sees to it."""
        use = self.use(slab)
        return max(min(self.freed[slab], use.slots_used), 0) * use.slot_size

    def version(self, key: bytes) -> int:
        """Of a record as it was seen; ABSENT: there was none."""
        return self._versions.get(key, ABSENT)

    @property
    def kept_end(self) -> int:
        """Slabs from this one on are given up, or no slabs of the volume."""
        return min(self._kept_count, self.geometry.slab_count)

    def going(self) -> set[int]:
        """Slabs that are given up, and held or in use."""
        end = self.kept_end
        held = {slab for slab, seen in self.holders.items() if slab >= end and seen.holder.client != NOBODY}
        return held.union([slab for slab in self.uses if slab >= end])

    def files_size(self) -> int:
        """Bytes of slots that files have, without those that are free as soon as somebody sees to it."""
        slots = sum(use.slot_size * use.slots_used for slab, use in self.uses.items() if slab not in self.lent)
        return slots - sum([self.freed_bytes(slab) for slab in self.freed])

    @property
    def unheld_count(self) -> int:
        """Slabs that nobody holds, without those that are given up."""
        return max(0, self.kept_end - self.held_counts.total())

    @property
    def unheld_free_bytes(self) -> int:
        """Bytes in slabs that nobody holds and that are no durable slots."""
        return self.unheld_count * self.geometry.slab_size - self._unheld_used

    def unheld(self) -> Iterator[int]:
        """Slabs that nobody holds, ascending."""
        while self._unheld_start < self.geometry.slab_count and self.seen(self._unheld_start).holder.client != NOBODY:
            self._unheld_start += 1
        for slab in range(self._unheld_start, self.geometry.slab_count):
            if self.seen(slab).holder.client == NOBODY and slab not in self._unclear:
                yield slab

    def has_orphans(self) -> bool:
        """Blocks of the block store are in slabs that no client has which is alive."""
        return any(self.seen(slab).holder.client not in self.members for slab in self.lent)

    def gone(self) -> list[int]:
        """Clients that left something behind: slabs, or counts."""
        return sorted(self._gone)

    def heir(self, number: int, default: int) -> int:
        """The client that is alive whose turn a number is: all agree, by and by. ``default``: where there is none."""
        if not self._heirs:
            self._heirs = sorted(self.members) or [default]
        return self._heirs[number % len(self._heirs)]

    def counts_beside(self, client: int) -> Counts:
        """The common counts and those of all clients but this one."""
        own, common = self.counts.get(client, Counts(0, 0)), self.counted
        size = common.size + (self._total.size or 0) - (own.size or 0) if common.size is not None else None
        return Counts(common.inodes + self._total.inodes - own.inodes, size)

    def held_by(self, client: int) -> list[int]:
        """Its slabs, ascending, as far as the volume is known; looks at all that anybody holds."""
        count = self.geometry.slab_count
        return sorted([slab for slab, seen in self.holders.items() if seen.holder.client == client and slab < count])

    # -- following -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the records until the store is closed."""
        async with trio.open_nursery() as nursery:
            begun = [trio.Event() for _ in KINDS]
            for kind, event in zip(KINDS, begun, strict=True):
                nursery.start_soon(self._follow, kind, event)
            for event in begun:
                await event.wait()
            self.ready.set()

    async def _follow(self, kind: bytes, begun: trio.Event) -> None:
        """Changes since the watch began come twice, here and by the scan: the version tells."""
        while True:
            try:
                changes = self.records.watch(kind)
                await self._read(kind)
                begun.set()
                async for change in changes:
                    self.apply(change)
            except EngineError as error:
                log.info("what other clients do to records %r is read anew: %s", kind, error)
                await trio.sleep(RETRY_SECONDS)
            else:
                return

    async def _read(self, kind: bytes) -> None:
        """All records of a kind, and without those that are gone."""
        known = {key for key in self._versions if key.startswith(kind)}
        if kind == b"f":
            self.freed.clear()
        async for rows, damaged in ScanPages(self.records, kind, SCAN_ROWS):
            for row in rows:
                known.discard(row.key)
                self.apply(Change(*row))
            known.difference_update(damaged)
            self._note_damaged(damaged)
        for key in known:
            self.apply(Change(key, None, self._versions.get(key, ABSENT)))

    async def refresh(self, keys: Sequence[bytes]) -> None:
        """Look at records that were not as expected. One round trip; what the watches bring meanwhile is kept."""
        before = {key: self._versions.get(key, ABSENT) for key in keys}
        rows, damaged = await get_page(self.records, keys)
        self._note_damaged(damaged)
        for key, row in zip(keys, rows, strict=True):
            if key in damaged:
                continue
            if row is not None:
                self.apply(Change(key, *row))
            elif self._versions.get(key, ABSENT) == before[key]:
                self.apply(Change(key, None, before[key]))

    def _note_damaged(self, keys: Iterable[bytes]) -> None:
        """Nobody can tell who holds these slabs: this client does not ask for them."""
        self._unclear.update([schema.key_slab(key) for key in keys if key[:1] == b"l"])
        self.abandoned -= self._unclear

    def apply(self, change: Change) -> None:
        """Take over a change, unless a newer one is known. An unreadable record is left out: it is fsck's business."""
        key, value, version = change
        if not schema.is_key(key):
            return
        if key[:1] == b"f":
            self.freed[schema.key_slab(key)] += 1 if value is not None else -1
        elif version < self._versions.get(key, ABSENT):
            return
        else:
            try:
                self._APPLY[key[:1]](self, key, value, version)
            except (ValueError, struct.error, VolumeError) as error:
                log.warning("record %s is damaged, 'kvfuse fsck' mends what can be: %s", key.hex(), error)
                return
            if value is None:
                self._versions.pop(key, None)
            else:
                self._versions[key] = version
        self.changed(change)

    def _apply_member(self, key: bytes, value: bytes | None, version: int) -> None:
        client = schema.key_client(key)
        if value is None:
            self.members.discard(client)
        else:
            self.members.add(client)
        self._heirs = []
        self._note_client(client)

    def _note_client(self, client: int) -> None:
        """Something of it came or went."""
        if client not in self.members and (client in self.held_counts or client in self.counts):
            self._gone.add(client)
        else:
            self._gone.discard(client)

    def _note_lent(self, slab: int) -> None:
        """Its holder changed, or whether it has blocks."""
        if slab in self.lent and self.seen(slab).holder.client == NOBODY and slab not in self._unclear:
            self.abandoned.add(slab)
        else:
            self.abandoned.discard(slab)

    def _apply_holder(self, key: bytes, value: bytes | None, version: int) -> None:
        slab = schema.key_slab(key)
        seen = Seen(schema.decode_holder(value), version) if value is not None else NEVER_HELD
        before = self.seen(slab).holder.client
        self.holders[slab] = seen
        used = self.use(slab).slot_size * self.use(slab).slots_used
        self._unheld_used += used * ((seen.holder.client == NOBODY) - (before == NOBODY))
        if before != NOBODY:
            self.held_counts[before] -= 1
            if not self.held_counts[before]:
                del self.held_counts[before]
            if before not in self.members:
                self._note_client(before)
        if seen.holder.client != NOBODY:
            self.held_counts[seen.holder.client] += 1
            if seen.holder.client not in self.members:
                self._note_client(seen.holder.client)
        else:
            self._unheld_start = min(self._unheld_start, slab)
        if slab in self.lent:
            self._note_lent(slab)

    def _apply_slab(self, key: bytes, value: bytes | None, version: int) -> None:
        slab = schema.key_slab(key)
        use = UNUSED
        was_lent = self.lent.pop(slab, None) is not None
        self.abandoned.discard(slab)
        if value is not None:
            state = SlabState(slab, *schema.decode_slab(value))
            if state.slot_size == LENT and len(state.bitmap) == TOKEN_SIZE:
                use = SlabUse(self.geometry.slab_size, 1)  # its heads alone say how much of it is used
                self.lent[slab] = state.bitmap
            elif state.slot_size:
                use = SlabUse(state.slot_size, int(durable_slots(state, self.geometry).sum()))
        before = self.uses.pop(slab, UNUSED)
        added = use.slot_size * use.slots_used - before.slot_size * before.slots_used
        self.used_bytes += added
        if self.seen(slab).holder.client == NOBODY:
            self._unheld_used += added
        if use.slots_used:
            self.uses[slab] = use
        if slab in self.lent:
            self._note_lent(slab)
        elif not was_lent and self.ready.is_set():
            self.imaged[slab] = trio.current_time()

    def _apply_counts(self, key: bytes, value: bytes | None, version: int) -> None:
        client = schema.key_client(key)
        after = schema.decode_counts(value) if value is not None else Counts(0, 0)
        before = self.counts.pop(client, Counts(0, 0))
        if value is not None:
            self.counts[client] = after
        size = (self._total.size or 0) + (after.size or 0) - (before.size or 0)
        self._total = Counts(self._total.inodes + after.inodes - before.inodes, size)
        if client not in self.members:
            self._note_client(client)

    def _apply_counter(self, key: bytes, value: bytes | None, version: int) -> None:
        if key == schema.SUPERBLOCK:
            if value is not None:
                superblock = parse_superblock(value)
                kept = superblock.kept_slab_count
                self._kept_count = sys.maxsize if kept is None else kept
                self.resized(superblock)
            return
        self.counted = schema.decode_counts(value) if value is not None else Counts(0, None)

    _APPLY = {
        b"m": _apply_member,
        b"l": _apply_holder,
        b"s": _apply_slab,
        b"q": _apply_counts,
        b"n": _apply_counter,
    }
