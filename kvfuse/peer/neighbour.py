"""One other host, as a reader: connections to it, which are made anew when they break, and how far it is trusted."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import trio

from kvfuse.peer.connection import Connection
from kvfuse.peer.greeting import Identity, greet
from kvfuse.peer.reads import Read
from kvfuse.peer.stream import BROKEN, Stream
from kvfuse.peer.wire import WireError
from kvfuse.volume.store.peer_records import PeerRecord
from kvfuse.volume.views.speeds import Speed

CONNECT_SECONDS = 3.0
"""to resolve the name, connect and greet"""
RETRY_MIN, RETRY_MAX = 0.25, 30.0
"""seconds before the next attempt to connect, and before a host is asked again that failed"""
FAILURES_MAX = 3
"""reads in a row that were late, wrong or lost: then it is not asked for a while"""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Neighbour:
    """``patience``: seconds without a byte that was promised. ``own_load``: bytes that this host has still to send."""

    client: int
    place: PeerRecord
    identity: Callable[[], Identity]
    patience: float
    own_load: Callable[[], int]
    changed: Callable[[], None]
    """called when it can be asked, or cannot any more"""
    speed: Speed = field(default_factory=lambda: Speed(1e-3, 1e9))

    def __post_init__(self) -> None:
        self.load = 0
        """bytes that it has still to send, as it last told"""
        self.received = 0
        """bytes of reads"""
        self.state = "connecting"
        self._connections: list[Connection] = []
        self._failures = 0
        self._pause = RETRY_MIN
        self._shunned_until = -inf

    @property
    def is_connected(self) -> bool:
        return bool(self._connections)

    @property
    def is_ready(self) -> bool:
        """It can be asked now."""
        return bool(self._connections) and trio.current_time() >= self._shunned_until

    def ask(self, reads: Sequence[Read]) -> None:
        """Each is finished some time, at once where there is no connection. One question, if they are few."""
        if not self._connections:
            for read in reads:
                read.finish()
            return
        min(self._connections, key=lambda one: one.bytes).ask(reads)

    def note(self, *, is_well: bool) -> None:
        """A read ended: with an answer, or with bytes that are wrong, or too late, or not at all."""
        if is_well:
            self._failures, self._pause = 0, RETRY_MIN
            return
        if trio.current_time() < self._shunned_until:
            return  # it was asked before that: of many reads that waited for it together each one fails
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            self._failures = 0
            self._shunned_until = trio.current_time() + self._pause
            self._pause = min(2 * self._pause, RETRY_MAX)
            log.info("host %s is not asked for a while: it failed %d times", self.place.addresses[:1], FAILURES_MAX)

    def statistics(self) -> dict[str, object]:
        return {
            "client": f"{self.client:016x}", "addresses": list(self.place.addresses), "state": self.state,
            "connections": len(self._connections), "load_bytes": self.load, "received_bytes": self.received,
            "under_way_bytes": self.speed.under_way, "expected_ms_of_1MiB": round(1e3 * self.speed.expect(1 << 20), 3),
        }  # fmt: skip

    async def run(self, count: int, scope: trio.CancelScope) -> None:
        """Keep so many connections, until ``scope`` is cancelled."""
        with scope:
            async with trio.open_nursery() as nursery:
                for number in range(count):
                    nursery.start_soon(self._keep, number)

    async def _keep(self, number: int) -> None:
        """One connection; of several addresses each gets its turn."""
        pause, addresses = RETRY_MIN, self.place.addresses
        while addresses:
            address = addresses[number % len(addresses)]
            try:
                stream = await self._connect(address)
            except (*BROKEN, WireError, trio.TooSlowError, ValueError) as error:
                self.state = f"{address}: {str(error) or 'no answer'}"
                log.info("no connection to host %s: %s", address, str(error) or "no answer in time")
                number += 1
            else:
                pause = RETRY_MIN
                await self._use(stream)
            await trio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, RETRY_MAX)

    async def _use(self, stream: Stream) -> None:
        def told(load: int) -> None:
            self.load = load

        connection = Connection(stream, self.patience, self.own_load, told)
        self._connections.append(connection)
        self.state = "connected"
        self.changed()
        try:
            await connection.run()
        except WireError as error:
            log.warning("the connection to host %s ends: %s", self.place.addresses[:1], error)
        except Exception:  # a mistake of ours: nothing may depend on other hosts
            log.exception("the connection to host %s failed, and is made anew", self.place.addresses[:1])
        finally:
            self._connections.remove(connection)
            if not self._connections:
                self.state = "connecting"
                self.changed()

    async def _connect(self, address: str) -> Stream:
        """WireError, OSError, trio.TooSlowError; ValueError where the address is none."""
        host, _, port = address.rpartition(":")
        with trio.fail_after(CONNECT_SECONDS):
            opened = await trio.open_tcp_stream(host.strip("[]"), int(port))
            stream = Stream(socket.socket(fileno=opened.socket.detach()))
            try:
                await greet(stream, self.identity(), self.client)
            except BaseException:
                stream.close()
                raise
        return stream
