"""Hosts of a shared volume read from each other: this one answers, if it listens, and asks those that do.

A reader asks the host that holds the slab; then hosts that that one names, because they fetched the same; then that one
again, which answers itself. Everything is over after a deadline; what is not there by then, or is wrong, is the
engine's to read. Nothing depends on it, and nothing is written over it.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from ctypes import c_uint8
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import EngineError, MountError
from kvfuse.options.options import PeerOptions
from kvfuse.peer.block_connection import Numbers
from kvfuse.peer.block_reads import LOST, WRONG, BlockReads, Results
from kvfuse.peer.neighbour import Neighbour
from kvfuse.peer.peer_listener import Listener
from kvfuse.peer.peer_reads import Read, ReadBatch, settle
from kvfuse.peer.peer_wire import FINAL
from kvfuse.peer.rdma import Rdma, open_rdma
from kvfuse.traceparent import TRACES
from kvfuse.volume.hosts.neighbourhood import Neighbourhood
from kvfuse.volume.store import peer_records
from kvfuse.volume.store.peer_records import PeerRecord
from kvfuse.volume.views.neighbours import (
    BLOCK,
    HEDGE_MIN,
    Answer,
    LandsBlocks,
    Uses,
    Wanted,
    WantedBlocks,
    patience,
)
from kvfuse.volume.volume import Volume

NEIGHBOURS_MAX = 256
RETRY_SECONDS = 0.5
LATE_FACTOR, LATE_MIN = 8.0, 0.25
"""A read is waited for up to so many times as long as it should take, at least so many seconds."""

log = logging.getLogger(__name__)


@dataclass
class AskedCounters:
    """Reads from other hosts; each was right, or ended for one of the reasons below."""

    rows: int = 0
    right: int = 0
    bytes: int = 0
    named: int = 0
    """that were asked of a host that another one named"""
    absent: int = 0
    moved: int = 0
    busy: int = 0
    wrong: int = 0
    """their bytes did not match the checksums"""
    lost: int = 0
    """the connection broke, or there was none any more"""
    late: int = 0
    """they were not waited for any longer"""


@dataclass
class Peers:
    """`views.neighbours.Neighbours`, of one mount."""

    volume: Volume
    options: PeerOptions
    listener: Listener
    counters: AskedCounters = field(default_factory=AskedCounters)
    hedged: int = 0
    overtaken: int = 0

    def __post_init__(self) -> None:
        self.neighbours: dict[int, Neighbour] = {}
        self._scopes: dict[int, trio.CancelScope] = {}

    @property
    def rdma(self) -> Rdma | None:
        return self.listener.rdma

    @property
    def _neighbourhood(self) -> Neighbourhood:
        neighbourhood = self.volume.neighbourhood
        assert neighbourhood is not None
        return neighbourhood

    def statistics(self) -> dict[str, Any]:
        hosts = [neighbour.statistics() for neighbour in self.neighbours.values()]
        asked = {**asdict(self.counters), "hedged": self.hedged, "overtaken": self.overtaken}
        found: dict[str, Any] = {"asked": asked, "served": self.listener.statistics(), "hosts": hosts}
        found["fed_bytes"] = self._neighbourhood.fed_bytes
        return found if self.rdma is None else {**found, "rdma": self.rdma.statistics()}

    # -- reading -------------------------------------------------------------------------------------

    def may_have(self, addr: int, base: int = 0) -> bool:
        neighbour = self._first_asked(addr, base)
        return neighbour is not None and neighbour.is_ready

    def feeds(self, addr: int, base: int) -> bool:
        neighbourhood = self._neighbourhood
        return base > 0 and bool(neighbourhood.places) and neighbourhood.feeder(addr) == neighbourhood.client

    async def feed(self, addr: int, generation: int, low: int, high: int) -> memoryview:
        return await self._neighbourhood.feeding.read((addr, generation, low, high))

    def _first_asked(self, addr: int, base: int) -> Neighbour | None:
        """Of an extent behind a file's start, who reads it for all; where that is this host, and of all others, who
        holds the slab. None: this host does, or one that does not answer."""
        neighbourhood = self._neighbourhood
        feeder = neighbourhood.feeder(addr) if base > 0 else neighbourhood.client
        return self.neighbours.get(feeder if feeder != neighbourhood.client else neighbourhood.holder(addr))

    def expect(self, wanted: Sequence[Wanted]) -> float:
        sizes = Counter[Neighbour]()
        for one in wanted:
            if (holder := self._first_asked(one.addr, one.base)) is not None:
                sizes[holder] += one.high - one.low
        return max([holder.speed.expect(size) for holder, size in sizes.items()], default=0.0)

    async def read(self, wanted: Sequence[Wanted], targets: Sequence[memoryview], patience: float = inf) -> list[bool]:
        reads = [Read(*pair) for pair in zip(wanted, targets, strict=True)]
        holders = [self._first_asked(read.wanted.addr, read.wanted.base) for read in reads]
        asked = [(read, holder) for read, holder in zip(reads, holders, strict=True) if holder is not None]
        late_from = trio.current_time() + HEDGE_MIN
        try:
            with trio.move_on_after(min(self._patience(asked), patience)):
                await self._ask(asked)
                await self._ask_named([read for read, _ in asked if not read.is_right and read.named])
        finally:
            if trio.current_time() >= late_from:  # also where its caller has the bytes from elsewhere by now
                self._note_late(reads)
            await settle(reads)
            for read in reads:
                read.abandon()
        return [read.is_right for read in reads]

    def tell_uses(self, client: int, uses: Uses) -> bool:
        neighbour = self.neighbours.get(client)
        if neighbour is None or not neighbour.is_connected:
            return False
        neighbour.tell_uses(uses)
        return True

    def _patience(self, asked: Sequence[tuple[Read, Neighbour]]) -> float:
        limit = self._limit(max([neighbour.speed.expect(read.size) for read, neighbour in asked], default=0))
        return self.options.deadline if any(read.wanted.base > 0 for read, _ in asked) else limit

    def _limit(self, expected: float) -> float:
        return min(max(LATE_FACTOR * expected, LATE_MIN), self.options.deadline)

    async def read_blocks(
        self, wanted: WantedBlocks, engine: float, landing: LandsBlocks | None = None,
        places: npt.NDArray[np.uint32] | None = None,
    ) -> npt.NDArray[np.bool_]:  # fmt: skip
        holders = self._holders(wanted.slabs)
        reads = BlockReads(wanted, holders, self.neighbours, self, landing, places)
        if not holders:
            return reads.is_right
        sizes = {holder: int(wanted.lengths[chosen].sum()) for holder, chosen in holders.items()}
        expected = max([holder.speed.expect(size) for holder, size in sizes.items()])
        late_from = trio.current_time() + HEDGE_MIN
        try:
            with trio.move_on_after(min(self._limit(expected), patience(expected, engine))):
                reads.begin()
                await reads.done.wait()
                if reads.stored:
                    await self._read_stored(reads)
        finally:
            self.counters.late += reads.abandon(is_late=trio.current_time() >= late_from)
            self.counters.rows += reads.rows
            self.counters.named += reads.named
        return reads.is_right

    def _holders(self, slabs: npt.NDArray[np.uint32]) -> dict[Neighbour, Numbers]:
        """Hosts that can be asked for blocks of slabs -> places of the slabs that each of them holds."""
        found: dict[Neighbour, Numbers] = {}
        for slab in np.unique(slabs).tolist() if len(slabs) > 1 else slabs.tolist():
            holder = self.neighbours.get(self._neighbourhood.slab_holder(slab))
            if holder is not None and holder.has_blocks_ready:
                own = np.flatnonzero(slabs == slab)
                found[holder] = np.concatenate([found[holder], own]) if holder in found else own
        return found

    async def _read_stored(self, reads: BlockReads) -> None:
        """Ask hosts for blocks that they may have on disk, as for granules."""
        wanted, asked = reads.wanted, []
        for neighbour, place in reads.stored:
            size = int(wanted.lengths[place])
            target = memoryview((c_uint8 * size).from_address(int(wanted.targets[place]))).cast("B")
            checksum = int(wanted.checksums[place]).to_bytes(4, "little")
            address, sequence = int(wanted.addresses[place]), int(wanted.generations[place])
            read = Read(Wanted(BLOCK, 0, address, sequence, 0, size, checksum), target)
            read.flags = FINAL
            asked.append((read, neighbour))
        try:
            await self._ask(asked)
        finally:
            for read, _ in asked:
                read.abandon()
        for (_, place), (read, _) in zip(reads.stored, asked, strict=True):
            reads.is_right[place] = read.is_right

    def count_blocks(self, neighbour: Neighbour, results: Results, right_size: int) -> None:
        counters, counts = self.counters, Counter(results.tolist())
        counters.right += counts[Answer.HERE]
        counters.absent += counts[Answer.ABSENT]
        counters.busy += counts[Answer.BUSY]
        counters.lost += counts[LOST]
        counters.wrong += counts[WRONG]
        counters.bytes += right_size
        neighbour.received += right_size
        if counts[WRONG]:
            log.warning("host %s sent wrong bytes of %d blocks", neighbour.place.addresses[:1], counts[WRONG])
        failures = counts[WRONG] + counts[LOST]
        neighbour.note(is_well=not failures, count=failures)

    async def _ask_named(self, reads: Sequence[Read]) -> None:
        """Ask hosts that the holders named, and the holders once more for what these do not have."""
        asked = []
        for read in reads:
            known = [self.neighbours.get(client) for client in read.named]
            ready = next((one for one in known if one is not None and one.is_ready), None)
            if ready is not None:
                asked.append((read, ready))
                read.without, read.flags = ready.client, FINAL
        self.counters.named += len(asked)
        await self._ask(asked)
        last = []
        for read in reads:
            holder = self._first_asked(read.wanted.addr, read.wanted.base)
            if not read.is_right and holder is not None:
                read.flags = FINAL
                last.append((read, holder))
        await self._ask(last)

    async def _ask(self, asked: Sequence[tuple[Read, Neighbour]]) -> None:
        """Each of its neighbour; those of one neighbour together."""
        if not asked:
            return
        batch = ReadBatch(len(asked))
        together: dict[Neighbour, list[Read]] = {}
        for read, neighbour in asked:
            read.begin(batch, neighbour)
            together.setdefault(neighbour, []).append(read)
        began = trio.current_time()
        for neighbour, reads in together.items():
            neighbour.speed.under_way += sum([read.size for read in reads])
            neighbour.ask(reads)
        try:
            await batch.done.wait()
        finally:
            for neighbour, reads in together.items():
                self._note(neighbour, reads, trio.current_time() - began)

    def _note(self, neighbour: Neighbour, reads: Iterable[Read], seconds: float) -> None:
        counters, size, ahead = self.counters, 0, neighbour.speed.under_way
        for read in reads:
            counters.rows += 1
            neighbour.speed.under_way -= read.size
            if read.is_right:
                counters.right += 1
                size += read.size
            elif not read.is_finished:
                continue  # it is late, or its reader has gone
            elif read.is_wrong:
                counters.wrong += 1
                log.warning("host %s sent wrong bytes of inode %d", neighbour.place.addresses[:1], read.wanted.ino)
            elif read.answer is Answer.MOVED:
                counters.moved += 1
            elif read.answer is Answer.BUSY:
                counters.busy += 1
            elif read.answer is Answer.ABSENT:
                counters.absent += 1
            elif read.answer is not Answer.ELSEWHERE:
                counters.lost += 1
            is_answered = read.answer not in (None, Answer.HERE)
            neighbour.note(is_well=read.is_right or is_answered or bool(read.failure))  # TCP goes on
        if size:
            neighbour.speed.note(ahead, seconds)
        counters.bytes += size
        neighbour.received += size

    def _note_late(self, reads: Iterable[Read]) -> None:
        for read in reads:
            if not read.is_finished and read.asked is not None:
                self.counters.late += 1
                read.asked.note(is_well=False)

    # -- tasks ---------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Know where others answer, and keep connections to all that do, over any number of memberships."""
        async with trio.open_nursery() as nursery:
            while True:
                neighbourhood = self._neighbourhood
                nursery.start_soon(neighbourhood.follow)
                while self._neighbourhood is neighbourhood:
                    changed = neighbourhood.changed
                    self.listener.renew()
                    neighbourhood.feeding.make_room()
                    if self.options.reads:
                        await self._meet(neighbourhood, nursery)
                    with trio.move_on_after(RETRY_SECONDS):
                        await changed.wait()

    async def _meet(self, neighbourhood: Neighbourhood, nursery: trio.Nursery) -> None:
        """Begin with hosts that have come, or moved, and end with those that have gone."""
        places = neighbourhood.places
        if places and not self.listener.secret:
            try:
                self.listener.secret = await neighbourhood.secret()
            except EngineError as error:
                log.warning("other hosts cannot be asked yet: %s", error)
                return
        for client in [one for one, known in self.neighbours.items() if places.get(one) != known.place]:
            del self.neighbours[client]
            self._scopes.pop(client).cancel()
        for client, place in places.items():
            if client not in self.neighbours and len(self.neighbours) < NEIGHBOURS_MAX:
                neighbour = Neighbour(
                    client, place, lambda: self.listener.identity, self.options.deadline, lambda: self.listener.load,
                    self._tell_clients, self.rdma,
                )  # fmt: skip
                self.neighbours[client], self._scopes[client] = neighbour, trio.CancelScope()
                nursery.start_soon(neighbour.run, self.options.connections, self._scopes[client])

    def _tell_clients(self) -> None:
        are_there = any(neighbour.is_connected for neighbour in self.neighbours.values())
        if self.volume.rows is not None:
            self.volume.rows.shown.tell_of_neighbours(are_there)

    async def announce(self, place: PeerRecord) -> None:
        """Tell the others where this host answers; again after each lost lease."""
        while True:
            neighbourhood = self._neighbourhood
            try:
                await neighbourhood.announce(place)
            except EngineError as error:
                log.warning("other hosts do not hear where this one answers: %s", error)
                await trio.sleep(RETRY_SECONDS)
                continue
            while self._neighbourhood is neighbourhood:
                await neighbourhood.member.lost.wait()
                await trio.sleep(RETRY_SECONDS)


async def serve_peers(
    volume: Volume, *, options: PeerOptions, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer other hosts of the volume, if ``options`` say where, and have those asked that answer. Until cancelled.

    MountError where nobody can listen there.
    """
    neighbourhood = volume.neighbourhood
    if neighbourhood is None:
        task_status.started()
        return

    def current() -> Neighbourhood:
        assert volume.neighbourhood is not None
        return volume.neighbourhood

    async with open_rdma(options, volume.tier.capacity) as rdma:
        listener = Listener(current, options.in_flight, rdma)
        peers = Peers(volume, options, listener)
        volume.sections["peers"] = peers.statistics
        async with trio.open_nursery() as nursery:
            if options.listen is not None:
                await _listen(peers, options.listen, neighbourhood, nursery)
            nursery.start_soon(peers.follow)
            if options.reads:
                volume.connect_neighbours(peers)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                volume.connect_neighbours(None)


async def _listen(peers: Peers, address: str, neighbourhood: Neighbourhood, nursery: trio.Nursery) -> None:
    """MountError."""
    listener = peers.listener
    try:
        listener.secret = await neighbourhood.secret()
    except EngineError as error:
        raise MountError(f"the secret of the volume's hosts cannot be read: {error}") from error
    for listening in await _listening(address):
        nursery.start_soon(listener.serve, listening)
    transports, gids = (("tcp", "rdma"), listener.rdma.gids) if listener.rdma is not None else (("tcp",), ())
    abilities = (peer_records.TRACES,) if TRACES.is_on else ()
    place = PeerRecord(addresses_of(peers.options), transports, gids, abilities)
    nursery.start_soon(peers.announce, place)


async def _listening(address: str) -> list[socket.socket]:
    """Sockets that listen there. MountError."""
    host, _, port = address.rpartition(":")
    try:
        plain = host.strip("[]")
        opened = await trio.open_tcp_listeners(int(port), host=None if plain == "::" else plain)  # None: IPv4, too
    except OSError as error:
        raise MountError(f"peer.listen: nobody can listen at {address}: {error.strerror or error}") from error
    return [socket.socket(fileno=one.socket.detach()) for one in opened]


def addresses_of(options: PeerOptions) -> tuple[str, ...]:
    """HOST:PORT of each, where others find what listens; ``listen`` is given."""
    assert options.listen is not None
    host, _, port = options.listen.rpartition(":")
    if options.advertise:
        return tuple(one if ":" in one.rpartition("]")[2] else f"{one}:{port}" for one in options.advertise)
    if host.strip("[]") in ("0.0.0.0", "::"):
        return (f"{socket.gethostname()}:{port}",)
    return (options.listen,)
