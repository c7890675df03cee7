"""The daemon's side of the control socket: who is connected, and what all clients together may have.

`connection.py` serves each of them.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import closing

import trio

from kvfuse import errors
from kvfuse.options.options import UsrbioOptions
from kvfuse.usrbio.daemon.accounts import Account
from kvfuse.usrbio.daemon.audience import CONNECT_COST, Audience, Audiences
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.connection import Connection
from kvfuse.usrbio.daemon.device_memory import DeviceMemories
from kvfuse.usrbio.daemon.doorman import Doorman
from kvfuse.usrbio.daemon.interpreter import Interpreter, watched_loop
from kvfuse.usrbio.daemon.limits import MEMORY_SIZE, Limits
from kvfuse.usrbio.daemon.passing import Usher, Ushers, open_ushers, turn_away
from kvfuse.usrbio.daemon.peer import Peer, credentials
from kvfuse.usrbio.daemon.ring_thread import THREAD_NAME
from kvfuse.volume.api import KernelCache, RingApi

log = logging.getLogger(__name__)

UNPROVEN_MAX = 64
"""clients of uid 0 whose capabilities are not known yet"""
UNPROVEN_THREADS = 4
WARNING_SECONDS = 1.0
"""between two warnings of clients that were turned away"""
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
SCARCE_SECONDS = 0.1
"""after which it is tried again to accept a client"""


async def serve_rings(
    volume: RingApi,
    listener: socket.socket,
    kernel: KernelCache,
    device: int,
    *,
    options: UsrbioOptions | None = None,
    device_memories: DeviceMemories | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve clients that connect to ``listener``, until cancelled. ``device``: st_dev of the mount's files.

    ``options``: the limits of users; None: the default ones. ``device_memories``: see `Limits`.
    """
    turns = Interpreter()
    with listener.dup() as accepting, Doorman(turns) as doorman, watched_loop(turns):
        accepting.setblocking(False)
        limits = Limits(volume, kernel, device, doorman, options or UsrbioOptions(), device_memories)
        async with open_ushers() as ushers, limits.device_memories.serving(), trio.open_nursery() as nursery:
            clients = Clients(limits, ushers, nursery)
            nursery.start_soon(limits.desk.run)
            volume.sections["rings"] = clients.statistics
            volume.sections["ring_users"] = limits.accounts.statistics
            volume.user_sections["rings"] = clients.statistics_of
            volume.user_sections["ring_users"] = limits.accounts.statistics_of
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(accepting)
                try:
                    clients.receive(accepting.accept()[0])  # one in a pass of the event loop: others wait for that long
                except BlockingIOError:
                    pass
                except OSError as error:
                    if error.errno not in SCARCE:
                        raise
                    log.warning("accepting a client failed and is tried again: %s", error)
                    await trio.sleep(SCARCE_SECONDS)


class Clients:
    """All that are connected; the listener's task owns it."""

    def __init__(self, limits: Limits, ushers: Ushers, nursery: trio.Nursery) -> None:
        """``nursery``: of tasks that end with it."""
        self.limits = limits
        self._ushers = ushers
        self._nursery = nursery
        self._audiences = Audiences(limits.desk, nursery)
        self._unproven = 0
        self._unproven_threads = trio.CapacityLimiter(UNPROVEN_THREADS)
        self._warned_at = -WARNING_SECONDS
        self._connections: set[Connection] = set()

    def receive(self, client: socket.socket) -> None:
        """Somebody has connected. One that is too many of its user is gone at once: to be cheap where many come."""
        uid = credentials(client)[1]
        try:
            if uid:
                self.limits.accounts.check_connections(uid)
            elif self._unproven >= UNPROVEN_MAX:
                raise errors.QuotaExceeded(f"{UNPROVEN_MAX} processes of uid 0 have connected at once")
        except errors.QuotaExceeded as error:
            if turn_away(client):
                self._warn(error)
                return
        self._nursery.start_soon(self._serve, trio.socket.from_stdlib_socket(client))

    def _warn(self, reason: object) -> None:
        if time.monotonic() - self._warned_at >= WARNING_SECONDS:
            self._warned_at = time.monotonic()
            log.warning("refused a client: %s", reason)

    async def _find_peer(self, stream: trio.socket.SocketType) -> Peer:
        self._unproven += 1
        try:
            return await Peer.of(stream, self._unproven_threads)
        finally:
            self._unproven -= 1

    async def _serve(self, stream: trio.socket.SocketType) -> None:
        """One client, until it is gone and its socket is closed. It counts for its user until then."""
        with stream:
            try:
                peer = await self._find_peer(stream)
                user = (peer.uid, peer.is_unlimited)
                usher = self._ushers.of(user, stream)
                with closing(self.limits.accounts.open(peer)) as account:
                    try:
                        account.take("user_connections")
                        async with self._audiences.of(user) as audience:
                            await audience.turn(stream, CONNECT_COST)
                            await self._serve_peer(stream, peer, account, audience, usher)
                    finally:
                        await usher.empty()
            except* (errors.QuotaExceeded, errors.InvalidArgument) as group:
                self._warn(group.exceptions[0])
            except* OSError as group:
                log.info("a client's connection failed: %s", group.exceptions[0])
            except* Exception as group:  # its own connection ends; all others go on
                log.error("serving a client failed", exc_info=group)

    async def _serve_peer(
        self, stream: trio.socket.SocketType, peer: Peer, account: Account, audience: Audience, usher: Usher
    ) -> None:
        with closing(
            Share(self.limits.pool, account.key, self.limits.under_way)
        ) as share:  # when no task of the client's is left
            async with trio.open_nursery() as nursery:
                connection = Connection(self.limits, stream, peer, account, audience, usher, nursery, share)
                self._connections.add(connection)
                try:
                    await connection.run()
                finally:
                    self._connections.discard(connection)
                nursery.cancel_scope.cancel()

    def statistics(self) -> dict[str, int]:
        """Counts of all that clients have registered now."""
        counts = _counts(self._connections)
        threads = sum(thread.name == THREAD_NAME for thread in threading.enumerate())
        sizes = {"memory_bytes": MEMORY_SIZE - self.limits.pool.free, "charged_bytes": self.limits.charges.size}
        return {**counts, "threads": threads, **sizes}

    def statistics_of(self, uid: int) -> dict[str, int]:
        """The counts of one user's clients."""
        return dict(_counts([connection for connection in self._connections if connection.peer.uid == uid]))


def _counts(connections: Collection[Connection]) -> Counter[str]:
    counts = Counter(connections=len(connections), files=0, iovs=0, namespaces=0, rings=0, pins=0)
    for connection in connections:
        counts.update(connection.registered.counts())
    return counts
