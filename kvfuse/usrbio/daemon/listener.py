"""Accepts clients on the control socket, and bounds what all of them together have.

`connection.py` serves each of them.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import trio

from kvfuse import errors, failing
from kvfuse.access.client_process import ClientProcess, read_credentials
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.options.options import UsrbioOptions
from kvfuse.usrbio.daemon import restored_connection
from kvfuse.usrbio.daemon.audience import CONNECT_COST, Audience, Audiences
from kvfuse.usrbio.daemon.bell_watcher import BellWatcher
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.connection import Connection
from kvfuse.usrbio.daemon.connection_keeping import Arrivals, ConnectionKeeping, KeptConnection, find_kept
from kvfuse.usrbio.daemon.descriptor_receiver import DescriptorReceiver, DescriptorReceivers, open_receivers, try_close
from kvfuse.usrbio.daemon.device_memory import DeviceMemories
from kvfuse.usrbio.daemon.interpreter import Interpreter, watch_loop
from kvfuse.usrbio.daemon.limits import MEMORY_SIZE, Limits
from kvfuse.usrbio.daemon.ring_thread import THREAD_NAME
from kvfuse.usrbio.daemon.user_accounts import UserAccount
from kvfuse.volume.api import RingApi
from kvfuse.volume.views.kernel_cache import KernelCache

log = logging.getLogger(__name__)

UNPROVEN_MAX = 64
"""clients of uid 0 whose capabilities are not known yet"""
UNPROVEN_THREADS = 4
WARNING_SECONDS = 1.0
"""least time between two warnings of refused clients"""
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
HAND_OVER_SECONDS = 2.0
"""time that entries in flight have to end, before the next daemon executes them again"""
HAND_OVER_LOOK_SECONDS = 0.005
SCARCE_SECONDS = 0.1
"""time after which a failed accept is retried"""


async def serve_rings(
    volume: RingApi,
    listener: socket.socket,
    kernel: KernelCache,
    device: int,
    *,
    options: UsrbioOptions | None = None,
    device_memories: DeviceMemories | None = None,
    keeper: Keeper = NO_KEEPER,
    handing_over: trio.Event | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve clients that connect to ``listener``, until cancelled. ``device``: st_dev of the mount's files.

    ``options``: the limits of users; None: the default ones. ``device_memories``: see `Limits`. ``keeper``: keeps what
    outlives this daemon, and clients of a former one, which continue. Once ``handing_over`` is set, rings take no more
    entries; those in flight end, or stay for the next daemon after ``HAND_OVER_SECONDS``, with all clients; then it
    returns.
    """
    turns = Interpreter()
    with listener.dup() as accepting, BellWatcher(turns) as bell_watcher, watch_loop(turns), ExitStack() as undo:
        accepting.setblocking(False)
        limits = Limits(volume, kernel, device, bell_watcher, options or UsrbioOptions(), device_memories, keeper)
        files, movers = volume.left_open.ring_files, volume.left_open.movers
        left, arrivals = find_kept(keeper, volume.tier, files)
        restored_connection.give_up_files(volume, set(files).difference(*[one.files for one in left]))
        movers.add(limits.kept_files.note_move)
        undo.callback(movers.discard, limits.kept_files.note_move)
        async with open_receivers() as receivers, limits.device_memories.serving(), trio.open_nursery() as nursery:
            clients = Clients(limits, receivers, nursery)
            nursery.start_soon(failing.vital_task, limits.call_queue.run)
            if handing_over is not None:
                nursery.start_soon(failing.vital_task, clients.hand_over, handing_over)
            for one in left:
                clients.restore_client(one)
            for arrival in arrivals:
                stream = socket.socket(fileno=arrival.socket)
                stream.setblocking(False)
                clients.receive_client(stream, arrival.name)
            volume.sections["rings"] = clients.statistics
            volume.sections["ring_users"] = limits.accounts.statistics
            volume.user_sections["rings"] = clients.statistics_of
            volume.user_sections["ring_users"] = limits.accounts.statistics_of
            volume.listings["clients"] = clients.listing
            task_status.started()
            with failing.vital():
                await _accept(accepting, clients)


async def _accept(listener: socket.socket, clients: Clients) -> None:
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            clients.receive_client(listener.accept()[0])  # one in a pass of the event loop: others wait for that long
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in SCARCE:
                raise
            log.warning("accepting a client failed and is tried again: %s", error)
            await trio.sleep(SCARCE_SECONDS)


class Clients:
    """All connected clients; the listener's task owns it."""

    def __init__(self, limits: Limits, receivers: DescriptorReceivers, nursery: trio.Nursery) -> None:
        """``nursery``: of tasks that end with it."""
        self.limits = limits
        self._receivers = receivers
        self._nursery = nursery
        self._audiences = Audiences(limits.call_queue, nursery)
        self._unproven = 0
        self._unproven_threads = trio.CapacityLimiter(UNPROVEN_THREADS)
        self._warned_at = -WARNING_SECONDS
        self._connections: set[Connection] = set()
        self._arrivals = Arrivals(limits.keeper)

    def receive_client(self, client: socket.socket, name: str = "") -> None:
        """Serve a new client, or close it at once where its user has too many: cheap where many connect.

        ``name``: under which the former daemon kept it.
        """
        uid = read_credentials(client)[1]
        try:
            if uid:
                self.limits.accounts.check_connections(uid)
            elif self._unproven >= UNPROVEN_MAX:
                raise errors.QuotaExceeded(f"{UNPROVEN_MAX} processes of uid 0 have connected at once")
        except errors.QuotaExceeded as error:
            if try_close(client):
                self._arrivals.drop(name)
                self._warn(error)
                return
        name = self._arrivals.keep(client, name)
        self._nursery.start_soon(self._serve, trio.socket.from_stdlib_socket(client), None, name)

    def restore_client(self, left: KeptConnection) -> None:
        """Serve a client of the former daemon."""
        stream = socket.socket(fileno=left.socket)
        stream.setblocking(False)
        self._nursery.start_soon(self._serve, trio.socket.from_stdlib_socket(stream), left)

    async def hand_over(self, wanted: trio.Event) -> None:
        """Once ``wanted`` is set, leave all clients to the next daemon."""
        await wanted.wait()
        with trio.move_on_after(HAND_OVER_SECONDS):
            while True:
                rings = [ring for one in self._connections for ring in one.registered.rings.values()]
                if True not in [ring.loop.pause() for ring in rings]:
                    break
                await trio.sleep(HAND_OVER_LOOK_SECONDS)
        self.limits.hands_over = True
        self._nursery.cancel_scope.cancel()

    def _warn(self, reason: object) -> None:
        if time.monotonic() - self._warned_at >= WARNING_SECONDS:
            self._warned_at = time.monotonic()
            log.warning("refused a client: %s", reason)

    async def _find_peer(self, stream: trio.socket.SocketType) -> ClientProcess:
        self._unproven += 1
        try:
            return await ClientProcess.from_socket(stream, self._unproven_threads)
        finally:
            self._unproven -= 1

    async def _serve(self, stream: trio.socket.SocketType, left: KeptConnection | None = None, name: str = "") -> None:
        """Serve one client until it is gone and its socket is closed. It counts for its user until then."""
        with stream, self._dropping_arrival(name):
            try:
                peer = await self._find_peer(stream) if left is None else left.peer
                user = (peer.uid, peer.is_unlimited)
                receiver = self._receivers.make_receiver(user, stream)
                with closing(self.limits.accounts.open(peer)) as account:
                    try:
                        account.take("user_connections")
                        async with self._audiences.join(user) as audience:
                            if left is None:
                                await audience.wait_turn(stream, CONNECT_COST)
                            await self._serve_peer(stream, peer, account, audience, receiver, left, name)
                    finally:
                        if not self.limits.hands_over:
                            if left is not None:
                                left.pins.clear()  # where no connection took them over
                                restored_connection.give_up_files(self.limits.volume, left.files)
                                if not left.page.is_closed:
                                    ConnectionKeeping(self.limits.keeper, left).close()
                            await receiver.empty_socket()
            except* (errors.QuotaExceeded, errors.InvalidArgument) as group:
                self._warn(group.exceptions[0])
            except* OSError as group:
                log.info("a client's connection failed: %s", group.exceptions[0])
            except* Exception as group:  # its own connection ends; all others continue
                failing.failures["clients of rings"] += 1
                log.error("serving a client failed", exc_info=group)

    @contextmanager
    def _dropping_arrival(self, name: str) -> Iterator[None]:
        """Drop the kept socket at the end of the body, unless that is for the next daemon."""
        try:
            yield
        finally:
            if not self.limits.hands_over:
                self._arrivals.drop(name)

    async def _serve_peer(
        self, stream: trio.socket.SocketType, peer: ClientProcess, account: UserAccount, audience: Audience,
        receiver: DescriptorReceiver, left: KeptConnection | None, name: str,
    ) -> None:  # fmt: skip
        with closing(
            Share(self.limits.pool, account.key, self.limits.under_way)
        ) as share:  # when no task of the client's is left
            async with trio.open_nursery() as nursery:
                connection = Connection(self.limits, stream, peer, account, audience, receiver, nursery, share, left)
                if name:
                    connection.registered.keeping.set_name(name)
                self._connections.add(connection)
                try:
                    await connection.run(left)
                finally:
                    self._connections.discard(connection)
                nursery.cancel_scope.cancel()

    def statistics(self) -> dict[str, int]:
        """Counts of all that clients have registered now."""
        counts = _count_things(self._connections)
        threads = sum(thread.name == THREAD_NAME for thread in threading.enumerate())
        with suppress(OSError):  # no descriptor is free
            self.limits.charges.recount()  # also what still exists of ended rings
        sizes = {"memory_bytes": MEMORY_SIZE - self.limits.pool.free, "charged_bytes": self.limits.charges.size}
        return {**counts, "threads": threads, **sizes}

    def listing(self, uid: int | None) -> list[dict[str, object]]:
        """What each client has registered; ``uid``: those of one user."""
        return [one.describe() for one in self._connections if uid in (None, one.peer.uid)]

    def statistics_of(self, uid: int) -> dict[str, int]:
        """The counts of one user's clients."""
        return dict(_count_things([connection for connection in self._connections if connection.peer.uid == uid]))


def _count_things(connections: Collection[Connection]) -> Counter[str]:
    counts = Counter(connections=len(connections), files=0, iovs=0, namespaces=0, rings=0, pins=0)
    for connection in connections:
        counts.update(connection.registered.count_things())
    return counts
