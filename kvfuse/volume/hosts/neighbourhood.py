"""This host among those of a shared volume that read from each other: what it has, where it is found, who has what.

The host that holds a slab most likely wrote what is in it, and has it: so it is asked first, and there is no directory
of blocks. A host that answers others puts a record of where it does so, under its lease (``w``). The hosts of a volume
prove to each other that they may read its records, by a secret that is one of them.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import ABSENT, Change
from kvfuse.volume.content.nearby import Nearby
from kvfuse.volume.hosts.feeding import Feeding, feeder_of
from kvfuse.volume.hosts.reports import Reports
from kvfuse.volume.hosts.slab_view import SlabView
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.measures.read_turns import ReadTurn
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.store import peer_records, schema
from kvfuse.volume.store.member import Member
from kvfuse.volume.store.peer_records import PeerRecord
from kvfuse.volume.store.sealed import ScanPages
from kvfuse.volume.views.neighbours import BLOCK, Answer, Uses, Wanted

RETRY_SECONDS = 0.5
FEEDERS_MAX = 4096
"""Slots whose feeders are remembered."""

log = logging.getLogger(__name__)


@dataclass
class Neighbourhood:
    """Of one membership; `Volume` has it. Event loop only."""

    core: Core
    member: Member
    view: SlabView
    reports: Reports
    places: dict[int, PeerRecord] = field(default_factory=dict)
    """client -> where it answers, of all that do; while `follow` runs"""

    def __post_init__(self) -> None:
        self.changed = trio.Event()
        """set, and made anew, when ``places`` change"""
        self.feeding = Feeding(self.core)
        self._is_announced = False
        self._feeders: dict[int, int] = {}
        """address -> `feeder`, while ``places`` are as they are: to find one costs as many steps as there are hosts"""

    @property
    def client(self) -> int:
        """This host's number in the volume."""
        return self.member.client

    @property
    def volume_id(self) -> bytes:
        return self.core.superblock.volume_id

    # -- others --------------------------------------------------------------------------------------

    def holder(self, addr: int) -> int:
        """The client that holds the slab of an address, as far as is known here; `schema.NOBODY`."""
        return self.slab_holder(self.core.geometry.slab_of(addr))

    @property
    def fed_bytes(self) -> int:
        """Bytes that this host has read once and given again."""
        return self.feeding.given

    def slab_holder(self, slab: int) -> int:
        return self.view.seen(slab).holder.client

    def feeder(self, addr: int) -> int:
        """The client that reads a slot of a large file for all hosts; this one, where no other answers."""
        if (known := self._feeders.get(addr)) is not None:
            return known
        clients = [*self.places, self.client] if self._is_announced else list(self.places)
        if len(self._feeders) >= FEEDERS_MAX:
            self._feeders.clear()
        found = self._feeders[addr] = feeder_of(addr, clients) if clients else self.client
        return found

    async def follow(self) -> None:
        """Know where others answer, until this membership is over."""
        records = self.core.records
        while not self.member.lost.is_set():
            try:
                changes = records.watch(peer_records.PREFIX)
                gone = set(self.places)
                async for rows, _ in ScanPages(records, peer_records.PREFIX):
                    for row in rows:
                        gone.discard(schema.key_client(row.key))
                        self._take(Change(*row))
                for client in gone:
                    self._take(Change(peer_records.key_of(client), None, 0))
                async for change in changes:
                    self._take(change)
            except EngineError as error:
                log.info("where other hosts answer is read anew: %s", error)
            await trio.sleep(RETRY_SECONDS)

    def _take(self, change: Change) -> None:
        client = schema.key_client(change.key)
        try:
            if change.value is None:
                self.places.pop(client, None)
            elif client != self.client:
                self.places[client] = peer_records.decode(change.value)
        except schema.Malformed as error:
            log.warning("nobody knows where client %x answers: %s", client, error)
        self._feeders.clear()
        self.changed.set()
        self.changed = trio.Event()

    async def announce(self, place: PeerRecord) -> None:
        """Tell the others where this host answers, as long as it has its lease. EngineError."""
        key, value = peer_records.key_of(self.client), peer_records.encode(place)
        await self.core.records.commit({key: value}, lease=self.member.lease)
        self._is_announced = True
        self._feeders.clear()

    async def secret(self) -> bytes:
        """The secret of the volume; made where there is none yet. EngineError."""
        records, key = self.core.records, peer_records.SECRET
        while True:
            (found,) = await records.get([key])
            if found is not None:
                if len(found.value) != peer_records.SECRET_SIZE:
                    raise EngineError(f"the secret of the volume's hosts has {len(found.value)} bytes")
                return found.value
            await records.commit({key: secrets.token_bytes(peer_records.SECRET_SIZE)}, (), {key: ABSENT})

    # -- what this host has --------------------------------------------------------------------------

    def lender(self) -> object | None:
        """Of blocks that are rows, which are in memory, for threads that send them (`native._blocks.Core.lender`)."""
        return self.core.blocks.lender() if self.core.blocks is not None else None

    @property
    def has_disk(self) -> bool:
        """What is not in memory may be `stored`."""
        return self.core.disk is not None

    def resident(self, wanted: Wanted) -> tuple[Answer, memoryview | None]:
        """Granules from memory. The bytes stay as they are while the view is held."""
        return Nearby(self.core).resident(wanted) if wanted.ino != BLOCK else (Answer.ABSENT, None)

    def used(self, uses: Uses) -> None:
        """Another host used these blocks."""
        self.reports.hear_uses(uses)

    async def stored(self, wanted: Wanted) -> memoryview | None:
        """From the disk tier, verified by what it knows of its copies; else what this host feeds others with."""
        disk, blocks = self.core.disk, self.core.blocks
        if wanted.ino == BLOCK:
            view = await blocks.kept_at(wanted.addr, wanted.generation) if blocks is not None else None
            return view if view is not None and (wanted.low, wanted.high) == (0, len(view)) else None
        stretch = disk.held(wanted.addr, wanted.generation, wanted.low, wanted.high) if disk is not None else None
        view = await disk.read(stretch) if disk is not None and stretch is not None else None
        if view is None and wanted.base > 0 and self.feeder(wanted.addr) == self.client:
            key = (wanted.addr, wanted.generation, wanted.low, wanted.high)
            node = self.core.nodes.peek(wanted.ino)
            of = self.core.namespaces.measures[node.namespace if node is not None else ROOT]
            with suppress(EngineError, ValueError):  # who asked reads it
                if self.feeding.has(key):
                    return await self.feeding.read(key)
                if self.feeding.may_read(key):
                    async with ReadTurn(of, wanted.high - wanted.low):
                        return await self.feeding.read(key)
            return None
        return view
