"""One other host, as a reader: connections to it, which are made anew when they break, and how far it is trusted."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import trio

from kvfuse.peer.block_connection import BlockAsker, BlockConnection, BlockQuestion, Numbers, cut
from kvfuse.peer.greeting import BLOCKS, GRANULES, HostIdentity, greet
from kvfuse.peer.peer_connection import PeerConnection
from kvfuse.peer.peer_reads import Read
from kvfuse.peer.peer_wire import WireError
from kvfuse.peer.queue_pair import NO_PLACE
from kvfuse.peer.rdma import Rdma
from kvfuse.peer.read_link import ReadLink
from kvfuse.peer.stream import BROKEN, PeerStream
from kvfuse.peer.verbs import VerbsError
from kvfuse.volume.measures.speeds import Speed
from kvfuse.volume.store.peer_records import PeerRecord
from kvfuse.volume.views.neighbours import Uses

CONNECT_SECONDS = 3.0
"""to resolve the name, connect and greet"""
RETRY_MIN, RETRY_MAX = 0.25, 30.0
"""seconds before the next attempt to connect, and before a host is asked again that failed"""
STEADY_SECONDS = 10.0
"""for which reads by RDMA went well: then the next failure counts as the first"""
LINK_PAUSE_MAX = 60.0
"""seconds before the next attempt to read by RDMA from a host from which that failed again and again"""
SPREAD_SIZE = 16 << 20
"""bytes from which on a batch is asked for by all connections"""
FAILURES_MAX = 3
"""reads in a row that were late, wrong or lost: then it is not asked for a while"""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Neighbour:
    """``patience``: seconds without a byte that was promised. ``own_load``: bytes that this host has still to send."""

    client: int
    place: PeerRecord
    identity: Callable[[], HostIdentity]
    patience: float
    own_load: Callable[[], int]
    changed: Callable[[], None]
    """called when it can be asked, or cannot any more"""
    rdma: Rdma | None = None
    speed: Speed = field(default_factory=lambda: Speed(1e-3, 1e9))

    def __post_init__(self) -> None:
        self.load = 0
        """bytes that it has still to send, as it last told"""
        self.received = 0
        """bytes of reads"""
        self.state = "connecting"
        self.connections: list[PeerConnection] = []
        self.block_connections: list[BlockConnection] = []
        self._running: trio.Nursery | None = None
        self._links = Attempts()
        self._failures = 0
        self._pause = RETRY_MIN
        self._shunned_until = -inf

    @property
    def is_connected(self) -> bool:
        """Blocks can be asked for."""
        return bool(self.block_connections)

    @property
    def is_ready(self) -> bool:
        """It can be asked now."""
        return bool(self.connections) and trio.current_time() >= self._shunned_until

    @property
    def has_blocks_ready(self) -> bool:
        """It can be asked for blocks now."""
        return bool(self.block_connections) and trio.current_time() >= self._shunned_until

    def ask(self, reads: Sequence[Read]) -> None:
        """Each is finished some time, at once where there is no connection. One question, if they are few bytes."""
        if not self.connections:
            for read in reads:
                read.finish()
            return
        if len(reads) == 1 or len(self.connections) == 1 or sum([read.size for read in reads]) < SPREAD_SIZE:
            min(self.connections, key=lambda one: (one.is_replaced, one.bytes)).ask(reads)
            return
        loads = {one: (one.is_replaced, one.bytes) for one in self.connections}
        shares: dict[PeerConnection, list[Read]] = {}
        for read in reads:
            chosen = min(loads, key=loads.__getitem__)
            loads[chosen] = (chosen.is_replaced, loads[chosen][1] + read.size)
            shares.setdefault(chosen, []).append(read)
        for connection, own in shares.items():
            connection.ask(own)

    def tell_uses(self, uses: Uses) -> None:
        """It is connected."""
        min(self.connections, key=lambda one: (one.is_replaced, one.bytes)).tell_uses(uses)

    def ask_blocks(self, asker: BlockAsker, chosen: Numbers, flags: int, without: int) -> int:
        """Ask for some of the asker's blocks, ``without`` a client that did not have them. How many questions that are;
        0: there is no connection."""
        wanted = asker.wanted
        size = int(wanted.lengths[chosen].sum())
        if not self.block_connections:
            return 0
        parts = cut(chosen, wanted.lengths)
        if size >= SPREAD_SIZE and len(self.block_connections) > 1 and len(chosen) > 1:
            parts = cut(chosen, wanted.lengths, max(-(-size // len(self.block_connections)), 1))
        for part in parts:
            own = size if len(parts) == 1 else int(wanted.lengths[part].sum())
            question = BlockQuestion(asker, part, flags, without, own)
            min(self.block_connections, key=lambda one: one.bytes).ask(question)
        return len(parts)

    def abandon_blocks(self, asker: BlockAsker) -> None:
        """As `BlockConnection.abandon`."""
        for connection in self.block_connections:
            connection.abandon(asker)

    def note(self, *, is_well: bool, count: int = 1) -> None:
        """So many reads ended: with an answer, or with bytes that are wrong, or too late, or not at all."""
        if is_well:
            self._failures, self._pause = 0, RETRY_MIN
            return
        if trio.current_time() < self._shunned_until:
            return  # it was asked before that: of many reads that waited for it together each one fails
        self._failures += count
        if self._failures >= FAILURES_MAX:
            self._failures = 0
            self._shunned_until = trio.current_time() + self._pause
            self._pause = min(2 * self._pause, RETRY_MAX)
            log.info("host %s is not asked for a while: it failed %d times", self.place.addresses[:1], FAILURES_MAX)

    def statistics(self) -> dict[str, object]:
        return {
            "client": f"{self.client:016x}", "addresses": list(self.place.addresses), "state": self.state,
            "connections": len(self.connections), "block_connections": len(self.block_connections),
            "rdma_connections": self._link_count(),
            "rdma_failures": self._links.failures, "load_bytes": self.load, "received_bytes": self.received,
            "under_way_bytes": self.speed.under_way, "expected_ms_of_1MiB": round(1e3 * self.speed.expect(1 << 20), 3),
        }  # fmt: skip

    def _link_count(self) -> int:
        return sum(one.link is not None and not one.link.pair.ended for one in self.connections)

    async def run(self, count: int, scope: trio.CancelScope) -> None:
        """Keep so many connections, until ``scope`` is cancelled."""
        with scope:
            async with trio.open_nursery() as self._running:
                for number in range(count):
                    self._running.start_soon(self._keep, number, GRANULES)
                    self._running.start_soon(self._keep, number, BLOCKS)

    async def _keep(self, number: int, kind: int) -> None:
        """One connection; of several addresses each gets its turn. Where its queue pair ends, a new one replaces it."""
        pause, addresses, turn = RETRY_MIN, self.place.addresses, number
        former: PeerConnection | None = None
        while addresses:
            address = addresses[turn % len(addresses)]
            try:
                connection = await self._connect(address, number, kind)
            except (*BROKEN, WireError, trio.TooSlowError, ValueError) as error:
                self.state = f"{address}: {str(error) or 'no answer'}"
                log.info("no connection to host %s: %s", address, str(error) or "no answer in time")
                turn += 1
            else:
                began = trio.current_time()
                if isinstance(connection, BlockConnection):
                    await self._run(connection, self.block_connections)
                else:
                    if former is not None:
                        former.leave()
                    former = connection
                    await self._use(connection)
                if kind == GRANULES or trio.current_time() > began + STEADY_SECONDS:
                    pause = RETRY_MIN
            await trio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, RETRY_MAX)

    async def _use(self, connection: PeerConnection) -> None:
        """Until it ends, or is to be replaced: it goes on over TCP until then."""
        assert self._running is not None
        ended = trio.Event()
        self._running.start_soon(self._run, connection, self.connections, ended)
        link = connection.link
        if link is None and not self._links_to_it:
            await ended.wait()
            return
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await ended.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            if link is not None:
                await link.over.wait()
                connection.is_replaced = True
                self._links.failed(f"a READ failed: {link.pair.ended}", self.place)
            await self._links.ready()
            connection.is_replaced = True
            nursery.cancel_scope.cancel()

    async def _run(
        self, connection: PeerConnection | BlockConnection, among: list[Any], ended: trio.Event | None = None
    ) -> None:
        among.append(connection)
        if self.connections and self.block_connections:
            self.state = "connected"
        self.changed()
        try:
            await connection.run()
        except WireError as error:
            log.warning("the connection to host %s ends: %s", self.place.addresses[:1], error)
        except Exception:  # a mistake of ours: nothing may depend on other hosts
            log.exception("the connection to host %s failed, and is made anew", self.place.addresses[:1])
        finally:
            among.remove(connection)
            if isinstance(connection, BlockConnection):
                connection.close()
            if ended is not None:
                ended.set()
            if not among:
                self.state = "connecting"
                self.changed()

    # -- connecting ----------------------------------------------------------------------------------

    @property
    def _links_to_it(self) -> bool:
        """Both hosts read by RDMA."""
        return self.rdma is not None and "rdma" in self.place.transports

    async def _connect(self, address: str, number: int, kind: int) -> PeerConnection | BlockConnection:
        """WireError, OSError, trio.TooSlowError; ValueError where the address is none."""
        host, _, port = address.rpartition(":")

        def told(load: int) -> None:
            self.load = load

        with trio.fail_after(CONNECT_SECONDS):
            opened = await trio.open_tcp_stream(host.strip("[]"), int(port))
            stream = PeerStream(socket.socket(fileno=opened.socket.detach()))
            link = self._begin_link(number) if kind == GRANULES else None
            try:
                own = link.pair.place if link is not None else NO_PLACE
                theirs = await greet(stream, self.identity(), self.client, own, kind)
                link = await self._joined(link, theirs)
                if kind == BLOCKS:
                    descriptor, is_traced = stream.detach(), self.place.is_traced
                    return BlockConnection(descriptor, self.patience, self.own_load, told, is_traced=is_traced)
            except BaseException:
                stream.close()
                if link is not None:
                    link.close()
                raise
        return PeerConnection(stream, self.patience, self.own_load, told, link, is_traced=self.place.is_traced)

    def _begin_link(self, number: int) -> ReadLink | None:
        if self.rdma is None or not self._links_to_it or not self._links.is_ready:
            return None
        try:
            return ReadLink.begun(self.rdma, number)
        except VerbsError as error:
            self._links.failed(str(error), self.place)
            return None

    async def _joined(self, link: ReadLink | None, theirs: bytes) -> ReadLink | None:
        """Connected to the other side's; None: it has none, or they do not reach each other."""
        if link is None:
            return None
        try:
            if theirs == NO_PLACE:
                raise VerbsError("it has no queue pair for this host")
            await link.pair.connect(theirs)
        except (VerbsError, WireError) as error:
            link.close()
            self._links.failed(str(error), self.place)
            return None
        return link


class Attempts:
    """To read from a host by RDMA: after each one that failed the next is later."""

    def __init__(self) -> None:
        self.failures = 0
        self._pause = RETRY_MIN
        self._from = -inf

    @property
    def is_ready(self) -> bool:
        return trio.current_time() >= self._from

    async def ready(self) -> None:
        await trio.sleep_until(max(self._from, trio.current_time()))

    def failed(self, why: str, place: PeerRecord) -> None:
        now = trio.current_time()
        log.log(
            logging.INFO if self.failures else logging.WARNING, "host %s: RDMA failed: %s", place.addresses[:1], why
        )
        if now > self._from + STEADY_SECONDS:
            self._pause = RETRY_MIN
        self.failures += 1
        self._from = now + self._pause
        self._pause = min(2 * self._pause, LINK_PAUSE_MAX)
