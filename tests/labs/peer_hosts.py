"""Hosts that read from each other, in this process, without volumes: their blocks are given to them."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import trio
from lent_blocks import LentBlocks
from soft_rdma import SoftNetwork, soft_rdma

from kvfuse.checksum import granule_checksums
from kvfuse.options.options import PeerOptions
from kvfuse.peer.greeting import HostIdentity
from kvfuse.peer.peer_listener import Listener
from kvfuse.peer.rdma import Rdma, open_rdma
from kvfuse.peer.service import Peers
from kvfuse.volume.hosts.feeding import Feeding
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.store.peer_records import PeerRecord
from kvfuse.volume.views.neighbours import Answer, Wanted

VOLUME_ID = bytes(range(16))
PATIENCE = 20.0


@dataclass(eq=False)
class Hood:
    """As much of a `Neighbourhood` as is asked: of a host that has blocks in memory."""

    client: int
    shared_secret: bytes
    blocks: dict[int, bytes | memoryview] = field(default_factory=dict)
    """inode -> the bytes of its only extent; its address is the inode's number, its generation 1"""
    places: dict[int, PeerRecord] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)
    """address -> client"""
    volume_id: bytes = VOLUME_ID
    lent: LentBlocks | None = None
    """blocks that are rows"""
    slabs_of: int = 0
    """the client that holds all slabs"""
    has_disk: bool = False
    fed_bytes: int = 0

    def __post_init__(self) -> None:
        self.changed = trio.Event()
        self.feeding = Feeding(cast(Core, None))  # it reads nothing: see `feeder`

    @property
    def identity(self) -> HostIdentity:
        return HostIdentity(self.volume_id, self.client, self.shared_secret)

    def change(self) -> None:
        """Others have come or gone."""
        self.changed.set()
        self.changed = trio.Event()

    async def secret(self) -> bytes:
        return self.shared_secret

    async def follow(self) -> None:
        await trio.sleep_forever()

    def holder(self, addr: int) -> int:
        return self.holders.get(addr, 0)

    def slab_holder(self, slab: int) -> int:
        return self.slabs_of

    def feeder(self, addr: int) -> int:
        """Who holds a slot has it in memory: nobody reads one for all."""
        return self.client

    def lender(self) -> object | None:
        return self.lent.lender if self.lent is not None else None

    def resident(self, wanted: Wanted) -> tuple[Answer, memoryview | None]:
        data = self.blocks.get(wanted.ino)
        if data is None:
            return Answer.ABSENT, None
        if wanted.generation != 1 or wanted.high > len(data):
            return Answer.MOVED, None
        return Answer.HERE, memoryview(data)[wanted.low : wanted.high]

    async def stored(self, wanted: Wanted) -> memoryview | None:
        return None


@dataclass
class _Volume:
    """As much of a volume as `Peers` uses."""

    neighbourhood: Hood
    rows: None = None


@dataclass
class PeerHost:
    neighbourhood: Hood
    listener: Listener
    peers: Peers
    port: int

    def wanted(self, ino: int, generation: int = 1) -> Wanted:
        """All of a block that this host has."""
        data = self.neighbourhood.blocks[ino]
        return Wanted(ino, 0, ino, generation, 0, len(data), granule_checksums(memoryview(data)))

    async def read(
        self, *wanted: Wanted, targets: Sequence[memoryview] | None = None
    ) -> tuple[list[bool], list[bytes]]:
        if targets is None:
            targets = [memoryview(bytearray(one.high - one.low)) for one in wanted]
        found = await self.peers.read(wanted, targets)
        return found, [bytes(one) for one in targets]

    async def until_ready(self, client: int) -> None:
        """The other host can be asked."""
        await until(lambda: (one := self.peers.neighbours.get(client)) is not None and one.is_ready)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - of other threads, and of counters
            await trio.sleep(0.005)


@asynccontextmanager
async def peer_hosts(
    count: int,
    through: Callable[[int], str] = "127.0.0.1:{}".format,
    network: SoftNetwork | None = None,
    secret: bytes | None = None,
    first: int = 1,
    abilities: tuple[str, ...] = (),
    **options: Any,
) -> AsyncIterator[list[PeerHost]]:
    """Hosts that listen, and know each other, from number ``first`` on. ``through``: where others find one at a port.
    ``abilities``: as their records say.

    By TCP, if ``options`` do not say "rdma", or there is a ``network`` that does without devices.
    """
    secret = secret or secrets.token_bytes(32)
    given = PeerOptions(**{"transport": "tcp", "listen": "127.0.0.1:1", **options})
    hosts: list[PeerHost] = []
    async with AsyncExitStack() as stack:
        adapters: list[Rdma | None] = []
        for _ in range(count):
            opened = soft_rdma(network) if network is not None else open_rdma(given, 64 << 20)
            adapters.append(await stack.enter_async_context(opened))
        nursery = await stack.enter_async_context(trio.open_nursery())
        for client, rdma in enumerate(adapters, first):
            neighbourhood, accepting = Hood(client, secret), socket.create_server(("127.0.0.1", 0), backlog=200)
            listener = Listener(lambda neighbourhood=neighbourhood: cast(Any, neighbourhood), given.in_flight, rdma)
            listener.secret = secret
            nursery.start_soon(listener.serve, accepting)
            peers = Peers(cast(Any, _Volume(neighbourhood)), given, listener)
            hosts.append(PeerHost(neighbourhood, listener, peers, int(accepting.getsockname()[1])))
        transports = ("tcp", "rdma") if adapters[0] is not None else ("tcp",)
        places = {
            host.neighbourhood.client: PeerRecord((through(host.port),), transports, (), abilities) for host in hosts
        }
        for host in hosts:
            own = host.neighbourhood.client
            host.neighbourhood.places = {client: place for client, place in places.items() if client != own}
            nursery.start_soon(host.peers.follow)
        yield hosts
        nursery.cancel_scope.cancel()
