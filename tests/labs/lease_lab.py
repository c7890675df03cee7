"""Clients of one shared disk without a file layer: slabs, their leases, and a small journal.

A *piece* stands for a file: a record that names one slot, and bytes in that slot. Whoever finds one may remove it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import trio
from volume_lab import MIB, Chaos, Disk, MemoryRecords, MemorySegments

from kvfuse.errors import EngineError, EngineTimeout, NoSpace
from kvfuse.kept.keeper import NO_KEEPER
from kvfuse.remote.records.api import ABSENT
from kvfuse.slab.allocator import Allocator, Slot
from kvfuse.volume.commit.committer import Committer, Sequence, WriteSet
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.inodes.chunk import COMMITTED, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.doubt import Doubt
from kvfuse.volume.inodes.grace import Grace
from kvfuse.volume.inodes.metadata_budget import Metadata
from kvfuse.volume.inodes.node import Nodes
from kvfuse.volume.namespaces.namespace_registry import Namespaces
from kvfuse.volume.store import schema
from kvfuse.volume.store.kept_membership import KeptMembership
from kvfuse.volume.store.member import FencedRecords, Member, Standing
from kvfuse.volume.store.numbers import SharedNumberRange
from kvfuse.volume.store.schema import MemberRecord
from kvfuse.volume.store.transaction import Transaction
from kvfuse.volume.tier.shared_tier import SharedTier

LEASE = 10.0
DEADLINE = 3.0
"""Seconds after which a call or a write is over."""
REUSE = 2 * DEADLINE
WINDOW = 0.05

_PIECE = struct.Struct(">QIQ")


class Piece(NamedTuple):
    """What the record of a piece says."""

    addr: int
    slot_size: int
    generation: int


def sequence_key(client: int) -> bytes:
    return b"\0tally%d" % client


def piece_key(client: int, number: int) -> bytes:
    return schema.chunk_key(client, number)


def pieces_of(disk: Disk) -> dict[bytes, Piece]:
    rows = disk.records.items()
    return {key: Piece(*_PIECE.unpack(row.value)) for key, row in rows if key.startswith(b"c")}


@dataclass
class Pieces:
    """A journal of pieces: batches of new ones and removals, with the images of slabs; see `JournalPart`."""

    core: Core
    committer: Committer
    extra: dict[bytes, bytes | None] = field(default_factory=dict)
    born: dict[bytes, tuple[Extent, trio.Event]] = field(default_factory=dict)
    removed: dict[bytes, tuple[Extent, int]] = field(default_factory=dict)
    """in slabs of this client -> version of the record"""
    work: trio.Event = field(default_factory=trio.Event)
    is_over: bool = False
    """the lease was lost, with what was not committed by then"""
    has_sent: bool = False

    def is_sending(self, slab: int) -> bool:
        return self.has_sent

    def put(self, key: bytes, value: bytes | None) -> None:
        self.extra[key] = value
        self.work.set()

    async def transact(self, transaction: object) -> bool:
        return await self.committer.transact(transaction)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.committer.run)
            while not self.is_over:
                with trio.move_on_after(WINDOW):
                    await self.work.wait()
                self.work = trio.Event()
                await self._commit()

    async def _commit(self) -> None:
        """Everything that came by now, until it is known what became of it, or the lease is lost."""
        born = self.born
        try:
            await self._commit_batch()
            self.has_sent = False
        except EngineError:
            self.is_over = True
        for _, event in born.values():
            event.set()

    async def _commit_batch(self) -> None:
        """Build, send, settle."""
        async with self.committer.turn:
            self.has_sent = True
            slabs = self.core.slabs
            born, self.born = self.born, {}
            removed, self.removed = self.removed, {}
            extra, self.extra = self.extra, {}
            dead, self.core.dead = self.core.dead, []
            changes = WriteSet()
            for key, (extent, _) in born.items():
                changes.puts[key] = _PIECE.pack(extent.addr, extent.slot_size, extent.generation)
                changes.expect[key] = ABSENT
            slabs.commit([extent.slot for extent, _ in born.values()])
            theirs = [extent for extent, _ in removed.values() if not self.holds(extent)]  # given back since
            changes.puts.update({self.freed_key(extent): b"" for extent in theirs})
            released = self.release([*dead, *(extent for extent, _ in removed.values())])
            changes.deletes.update(key for key, value in extra.items() if value is None)
            changes.puts.update({key: value for key, value in extra.items() if value is not None})
            changes.deletes.update(removed)
            changes.expect.update({key: version for key, (_, version) in removed.items()})
            while True:
                for state in slabs.take_dirty():
                    key = schema.slab_key(state.slab)
                    changes.puts.pop(key, None)
                    changes.deletes.discard(key)
                    if state.slot_size:
                        changes.puts[key] = schema.encode_slab(state.slot_size, state.bitmap)
                    else:
                        changes.deletes.add(key)
                if not (changes.puts or changes.deletes):
                    return
                lost = await self._send(changes)
                if not lost:
                    break
                assert lost.keys() <= removed.keys(), "only removals may be too late"
                for key in lost:  # somebody else removed it, and has put an f record
                    extent, _ = removed.pop(key)
                    if changes.puts.pop(self.freed_key(extent), None) is None:
                        changes.deletes.add(self.freed_key(extent))
                    del changes.expect[key]
                    changes.deletes.discard(key)
            self.core.reads.retire(self.core.grace.later(slabs.reclaim), released)

    def holds(self, extent: Extent) -> bool:
        return self.core.slabs.holds(self.core.geometry.slab_of(extent.addr))

    def freed_key(self, extent: Extent) -> bytes:
        return schema.freed_key(self.core.geometry.slab_of(extent.addr), extent.addr, extent.generation)

    def release(self, extents: list[Extent]) -> list[Slot]:
        """One that others freed may be among them twice, or released already."""
        slabs, released = self.core.slabs, []
        for extent in extents:
            if slabs.is_durable(extent.addr):
                slabs.release([extent.slot])
                released.append(extent.slot)
        return released

    async def _send(self, changes: WriteSet) -> Mapping[bytes, object]:
        """What was refused; nothing: it is in the store."""
        while True:
            try:
                await self.committer.resolve()
                if changes.version:
                    return {}
                return (await self.committer.send(changes, durable=True)).found
            except EngineError:
                if self.committer.records.member.lost.is_set():
                    raise
                await trio.sleep(WINDOW)


class World:
    """One disk and what is written to its slots, with checks at every step."""

    def __init__(self, disk: Disk, rng: random.Random, late: float = 0.0) -> None:
        self.disk = disk
        self.late = late
        """seconds after its deadline in which a write may still happen, at most"""
        self.rng = rng
        self.content: dict[int, bytes] = {}
        """slot address -> the piece whose bytes it has"""
        self.writing: dict[int, tuple[int, int]] = {}
        """number of a write -> range of addresses"""
        self.numbers = count(1)
        self.clients: list[Client] = []
        self.log: list[str] = []

    async def write(self, extent: Extent, key: bytes, *, task_status: trio.TaskStatus[trio.Event]) -> None:
        """A write that ends sooner or later, whoever dies meanwhile; its bytes are torn until then."""
        number, first, end = next(self.numbers), extent.addr, extent.addr + extent.slot_size
        for other_first, other_end in self.writing.values():
            assert end <= other_first or other_end <= first, f"two writes at {first}"
        for other_key, piece in pieces_of(self.disk).items():
            assert end <= piece.addr or piece.addr + piece.slot_size <= first, f"{other_key!r} is written over"
        self.writing[number] = (first, end)
        self.content[first] = b""
        done = trio.Event()
        task_status.started(done)
        await trio.sleep(self.rng.random() ** 8 * (DEADLINE + self.late))
        self.content[first] = key
        del self.writing[number]
        done.set()

    def check(self) -> None:
        """No slab belongs to two clients that may write, and no piece has lost its bytes or its slot."""
        writers = [client for client in self.clients if client.may_write]
        for slab in range(self.disk.superblock.geometry.slab_count):
            holders = [client.number for client in writers if client.core.slabs.holds(slab)]
            assert len(holders) <= 1, f"slab {slab} is held by {holders}"
        slots: dict[int, bytes] = {}
        for key, piece in pieces_of(self.disk).items():
            assert slots.setdefault(piece.addr, key) == key, "a slot of two pieces"
            assert self.content[piece.addr] == key, f"the bytes of {key!r} are gone"


class Client:
    """One life of a client: from its joining, or going on, to its end."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.rng = random.Random(world.rng.random())
        self.chaos = Chaos(self.rng, delay=0.2, deadline=DEADLINE)
        self.serial = count(1)
        self.leases: SlabLeases
        self.held: set[int] = set()
        """slabs, when it died"""
        self.well_since = 0.0
        """neither frozen nor cut off"""

    @property
    def may_write(self) -> bool:
        """A write that is begun now is over before the lease is."""
        return self.member.alive and trio.current_time() + DEADLINE < self.member._alive_until

    async def join(self) -> None:
        records = MemoryRecords(self.world.disk, self.chaos)
        asked = trio.current_time()
        lease = await records.lease(LEASE)
        puts = {schema.member_key(self.number): schema.encode_member(MemberRecord("here", self.number, "/mnt"))}
        version = await records.commit(puts, expect=dict.fromkeys(puts, ABSENT), lease=lease)
        assert version
        self._begin(records, Member(self.number, lease, version, asked), KeptMembership())

    async def resume(self, former: Client) -> bool:
        """Go on as a client whose process has died. False: its lease has ended."""
        records = MemoryRecords(self.world.disk, self.chaos)
        before = Standing(former.number, former.member.lease.identity)
        member = await Member.resume(records, "/mnt", before, NO_KEEPER)
        if member is None:
            return False
        self.number, self.serial = former.number, former.serial
        self.world.clients.remove(former)
        (sequence,) = await records.get([sequence_key(self.number)])
        left = KeptMembership(True, REUSE, None, member.version, sequence.version if sequence is not None else ABSENT)
        self._begin(records, member, left)
        return True

    def _begin(self, records: MemoryRecords, member: Member, left: KeptMembership) -> None:
        self.member = member
        self.records = FencedRecords(records, self.member)
        disk, tier = self.world.disk, SharedTier(MIB)
        generations = SharedNumberRange(schema.COUNTER_GENERATION)
        self.core = Core(
            superblock=disk.superblock,
            geometry=disk.superblock.geometry,
            records=self.records,
            segments=MemorySegments(disk, self.chaos),
            slabs=Allocator(disk.superblock.geometry, granted=False),
            nodes=Nodes(10, tier),
            tier=tier,
            chunk_size=MIB,
            strict=True,
            strict_blocks=True,
            read_only=False,
            inodes=SharedNumberRange(schema.COUNTER_INODE),
            generations=generations,
            doubt=Doubt(generations),
            metadata=Metadata(1 << 40, lambda: 0),
            file_count=0,
            namespaces=Namespaces({}),
            client=self.number,
            left=left,
            grace=Grace(REUSE),
        )
        sequence = Sequence(sequence_key(self.number), version=left.sequence_version)
        self.journal = Pieces(self.core, Committer(self.records, sequence))
        self.leases = SlabLeases(self.core, self.journal)

    @asynccontextmanager
    async def joined(self, former: Client | None = None) -> AsyncIterator[None]:
        """Alive in the body; what it was doing at its end stops where it is. ``former``: whom it goes on as."""
        if former is None or not await self.resume(former):
            await self.join()
        self.world.clients.append(self)
        self.well_since = trio.current_time()
        async with trio.open_nursery() as nursery:
            try:
                nursery.start_soon(self.member.keep)
                nursery.start_soon(self.journal.run)
                await nursery.start(self.leases.run)
                yield
            finally:
                self.member._renewing.cancel()
                nursery.cancel_scope.cancel()

    async def make(self, nursery: trio.Nursery, length: int) -> bytes:
        """Write a piece and have it committed; its key. NoSpace where there is none to be had."""
        while True:
            try:
                slots = self.core.slabs.allocate(length)
                break
            except NoSpace:
                if not await self.leases.take_unheld_slabs():
                    raise
        kept, *others = slots
        self.core.slabs.cancel(others)
        if not self.may_write or self.journal.is_over:
            self.core.slabs.cancel([kept])
            raise EngineError("the lease may end")
        key = piece_key(self.number, next(self.serial))
        extent = Extent(kept.addr, kept.size, kept.size, self.core.generations.next(), b"", COMMITTED)
        written = await nursery.start(self.world.write, extent, key)
        with trio.move_on_after(DEADLINE):
            await written.wait()
        if not written.is_set():
            self.core.grace.later(self.core.slabs.cancel)([kept])
            raise EngineTimeout("nobody knows whether it will be written")
        stored = trio.Event()
        self.journal.born[key] = (extent, stored)
        self.journal.work.set()
        await stored.wait()
        if self.journal.is_over:
            raise EngineError("the lease was lost")
        return key

    async def remove(self, key: bytes) -> bool:
        """Remove a piece, whoever made it. False: it was gone."""
        (row,) = await self.records.get([key])
        if row is None or key in self.journal.removed:
            return False
        piece = Piece(*_PIECE.unpack(row.value))
        extent = Extent(piece.addr, piece.slot_size, piece.slot_size, piece.generation, b"", COMMITTED)
        if self.holds(piece.addr):
            self.journal.removed[key] = (extent, row.version)
            self.journal.work.set()
            return True
        slab = self.core.geometry.slab_of(extent.addr)
        puts = {schema.freed_key(slab, extent.addr, extent.generation): b""}
        return await self.journal.transact(Transaction({key: row.version}, puts, [key]))

    def holds(self, addr: int) -> bool:
        """The slot at ``addr`` is this client's to allocate and to free."""
        return self.core.slabs.holds(self.core.geometry.slab_of(addr))
