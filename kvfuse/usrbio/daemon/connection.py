"""One client: what it asks on the control socket, what it has registered, and how all that ends.

A connection is the lifetime of everything it registered. When it ends - closed, killed, or broken - its rings stop
first, then its calls are cancelled, then its files, memory and pins go.
"""

from __future__ import annotations

import array
import errno
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import trio

from kvfuse import errors
from kvfuse.errnos import errno_of
from kvfuse.usrbio.daemon import registry
from kvfuse.usrbio.daemon.accounts import Account
from kvfuse.usrbio.daemon.audience import Audience
from kvfuse.usrbio.daemon.call import Call, Tables
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.charges import Charge
from kvfuse.usrbio.daemon.client_memory import Iov
from kvfuse.usrbio.daemon.limits import Limits
from kvfuse.usrbio.daemon.loop_calls import Calls
from kvfuse.usrbio.daemon.passing import SO_PASSRIGHTS, NotTaken, Usher, close_all
from kvfuse.usrbio.daemon.peer import Peer
from kvfuse.usrbio.daemon.penalty import BOUND, Penalty
from kvfuse.usrbio.daemon.pins import Pins
from kvfuse.usrbio.daemon.registry import Namespace, OpenFile, Remembered
from kvfuse.usrbio.daemon.ring_thread import RingThread
from kvfuse.usrbio.protocol.queues import RingMemory
from kvfuse.usrbio.protocol.wire import (
    ENTRIES_MAX,
    IOV_SIZE_MAX,
    MESSAGE_SIZE_MAX,
    VERSION,
    Access,
    Layout,
    Message,
    Request,
)
from kvfuse.volume.views.tier import ReadClass, TierBlock

log = logging.getLogger(__name__)
T = TypeVar("T")

THINGS_MAX = 65536
"""files, iovs, namespaces and pins of one connection"""
RINGS_MAX = 256
"""rings of one connection: each has a thread"""


COSTS = {
    Request.ADD_RING: 16,
    Request.DROP_RING: 16,
    Request.ADD_IOV: 4,
    Request.DROP_IOV: 4,
    Request.ADD_FILE: 4,
    Request.DROP_FILE: 2,
    Request.OPEN_NAMESPACE: 4,
}
"""what a message takes of the event loop beside its answer, in calls"""


TIER_PART = 0.5
"""of the tier's capacity: what calls of one user that are under way may hold"""


class Next(Enum):
    """The message that a connection looked at and nobody took yet."""

    NONE = auto()
    PLAIN = auto()
    WITH_DESCRIPTORS = auto()
    """which an usher has to take"""


class _Ring:
    """A ring of a connection, and its thread. ``shown``: the client's descriptors, to be closed once they are sent."""

    def __init__(self, tables: Tables[RingThread], layout: Layout, op_mask: int, shown: list[int]) -> None:
        self.size = layout.size
        with ExitStack() as undo:
            memory, descriptor = RingMemory.create(layout)
            shown.append(descriptor)
            own_bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, own_bell)
            shown.append(os.dup(own_bell))
            client_bell = _make_client_bell(shown)
            undo.callback(os.close, client_bell)
            self.thread = RingThread(tables, memory, own_bell, client_bell, op_mask)
            undo.callback(self.thread.close)
            try:
                self.thread.thread.start()
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, str(error)) from error
            self._descriptors = undo.pop_all()

    def close(self) -> None:
        """After its thread has ended."""
        self._descriptors.close()


def _make_client_bell(shown: list[int]) -> int:
    """The daemon's end of a socket pair; the client's one goes to ``shown``.

    Nothing can be sent to the daemon's end, where it would lie until the daemon closes it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    ours.shutdown(socket.SHUT_RD)
    shown.append(theirs.detach())
    return ours.detach()


class Connection:
    """One client. It is the `call.Tables` of its rings' threads."""

    def __init__(
        self,
        limits: Limits,
        stream: trio.socket.SocketType,
        peer: Peer,
        account: Account,
        audience: Audience,
        usher: Usher,
        nursery: trio.Nursery,
        share: Share,
    ) -> None:
        self.peer = peer
        self._account = account
        self._charge = limits.charges.of(peer)
        self._audience = audience
        self._penalty = Penalty()
        self._usher = usher
        self.doorman = limits.doorman
        self.interpreter = limits.interpreter
        self._user_key = (peer.uid, peer.is_unlimited)
        self.user = limits.interpreter.user(self._user_key)
        self.files: dict[int, OpenFile] = {}
        self.iovs: dict[int, Iov] = {}
        self.namespaces: dict[int, Namespace] = {}
        self._limits = limits
        self._volume = limits.volume
        self._stream = stream
        self._device = limits.device
        self.share = share
        self._calls = Calls(limits.volume, limits.kernel, self.peer, nursery, self.share, limits.desk.calls_of)
        self._rings: dict[int, _Ring] = {}
        self._handles = itertools.count(1)
        self._greeted = False
        self._has_asked = False
        """for something that it got"""
        self._next: Next = Next.NONE
        self._token = trio.lowlevel.current_trio_token()
        self._scope = trio.CancelScope()
        self._pins = Pins(THINGS_MAX, limits.pinned, account.key)
        self._remembered = Remembered()

    # -- the control socket --------------------------------------------------------------------------

    async def run(self) -> None:
        """Answer requests until the client goes, or breaks something. Then reap all it had.

        The first message is there, and it is its turn.
        """
        try:
            with self._scope:
                while await self._answer_one():
                    if self._penalty.is_broken:
                        log.info("a client is disconnected: %d more of its messages were refused than not", BOUND)
                        break
                    await self._audience.turn(self._stream)
        finally:
            if not self._has_asked:
                self._audience.penalty.judge_one(is_bad=True)
            with trio.CancelScope(shield=True):
                await self._reap()

    async def _answer_one(self) -> bool:
        """False when the client is gone, or sends what is no message."""
        data, _, flags, _ = await self._stream.recvmsg(MESSAGE_SIZE_MAX + 1, 0, socket.MSG_PEEK)
        self._next = Next.WITH_DESCRIPTORS if flags & socket.MSG_CTRUNC else Next.PLAIN
        shown: list[int] = []
        try:
            if not data:
                return False
            message = Message.unpack(data)
            reply, shown = await self._answer(message, self._next is Next.WITH_DESCRIPTORS)
            self._judge(message, is_bad=reply.status < 0)
            await self._reply(reply, shown)
            await self._drop_next()
        except ValueError as error:
            log.info("a client is disconnected: %s", error)
            return False
        finally:
            close_all(shown)
        return True

    def _judge(self, message: Message, *, is_bad: bool) -> None:
        """A message was answered."""
        if not is_bad and message.request == Request.HELLO:
            return  # else who connects, greets and goes, again and again, was good half of the time
        self._has_asked |= not is_bad
        self._penalty.judge(1, int(is_bad))
        self._audience.penalty.judge_one(is_bad=is_bad)

    async def _drop_next(self) -> None:
        """Take the message that was looked at, if nobody took it with its descriptor."""
        if self._next is Next.WITH_DESCRIPTORS:
            await self._usher.drop(self._stream)
        elif self._next is Next.PLAIN:
            await self._stream.recv(1)
        self._next = Next.NONE

    async def _answer(self, message: Message, has_descriptors: bool) -> tuple[Message, list[int]]:
        """(reply, descriptors to send and then to close)."""
        try:
            kind = Request(message.request)
            if not self._greeted and kind is not Request.HELLO:
                raise errors.InvalidArgument("the first message is HELLO")
            if has_descriptors != (kind in (Request.ADD_FILE, Request.ADD_IOV, Request.OPEN_NAMESPACE)):
                raise errors.InvalidArgument(
                    f"{kind.name} came {'with' if has_descriptors else 'without'} a descriptor"
                )
            if kind in COSTS:
                await self._audience.pause(COSTS[kind])
            values, sent = await HANDLERS[kind](self, message.values)
        except (errors.KvfuseError, OSError, ValueError) as error:
            number = (error.errno if isinstance(error, OSError) else errno_of(error)) or errno.EINVAL
            return Message(message.request, message.number, -number, text=str(error)), []
        return Message(message.request, message.number, 0, values), sent

    async def _reply(self, reply: Message, descriptors: list[int]) -> None:
        ancillary = []
        if descriptors:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]
        await self._stream.sendmsg([reply.pack()], ancillary)

    async def _inspect(self, check: Callable[[int], T]) -> T:
        """What a check says of the descriptor that came with the request."""
        return await self._taking(self._usher.inspect(self._stream, check))

    async def _taking(self, call: Awaitable[T]) -> T:
        """A call of an usher: it takes the message that is next."""
        self._next, before = Next.NONE, self._next
        try:
            return await call
        except NotTaken:
            self._next = before
            raise

    def _check_room(self, things: dict[int, Any], count_max: int) -> None:
        if len(things) >= count_max:
            raise errors.InvalidArgument(f"{count_max} of these are registered already")

    # -- requests ------------------------------------------------------------------------------------

    async def _hello(self, values: tuple[int, ...]) -> Answer:
        if values[0] != VERSION:
            raise errors.Unsupported(f"version {values[0]} is not offered, but {VERSION} is")
        self._greeted = True
        with suppress(OSError):  # Linux before 6.16 cannot refuse them
            self._stream.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
        return (VERSION, os.getpid(), ENTRIES_MAX), []

    async def _add_file(self, values: tuple[int, ...]) -> Answer:
        self._check_room(self.files, THINGS_MAX)
        if not 0 < values[0] <= Access.READ | Access.WRITE:
            raise errors.InvalidArgument(f"access {values[0]} is none")
        access = Access(values[0])
        flags = {Access.READ: os.O_RDONLY, Access.WRITE: os.O_WRONLY}.get(access, os.O_RDWR)
        with self._account.taking("user_files"):
            ino = await self._inspect(partial(registry.check_file, device=self._device, access=access))
            volume_handle = await self._volume.open(ino, flags, self._calls.caller())
            try:
                shown = self._volume.content_map(volume_handle)
            except errors.Stale:  # another host removed it meanwhile
                with trio.CancelScope(shield=True):
                    await self._volume.release(volume_handle)
                raise
        handle = next(self._handles)
        self.files[handle] = OpenFile(
            volume_handle, ino, bool(access & Access.READ), bool(access & Access.WRITE), shown
        )
        return (handle, ino, volume_handle.size), []

    async def _drop_file(self, values: tuple[int, ...]) -> Answer:
        file = self.files.pop(values[0], None)
        if file is None:
            raise errors.BadHandle(f"file {values[0]} is not registered")
        self._account.give("user_files")
        with trio.CancelScope(shield=True):  # `_reap` does not know of it any more
            await self._calls.release(file)
        return (), []

    async def _add_iov(self, values: tuple[int, ...]) -> Answer:
        self._check_room(self.iovs, THINGS_MAX)
        if not 0 < values[0] <= IOV_SIZE_MAX:
            raise errors.InvalidArgument(f"an iov of {values[0]} bytes")
        with self._account.taking("user_iovs"), self._account.taking("user_iov_size", values[0]):
            descriptor = await self._taking(self._usher.memory(self._stream))
            with trio.CancelScope(shield=True):  # else the descriptor would be nobody's
                iov = await self._usher.run(_map_memory, descriptor, values[0], self._charge)
        handle = next(self._handles)
        self.iovs[handle] = iov
        return (handle, iov.writable), []

    async def _drop_iov(self, values: tuple[int, ...]) -> Answer:
        iov = self.iovs.pop(values[0], None)
        if iov is None:
            raise errors.BadHandle(f"iov {values[0]} is not registered")
        self._account.give("user_iovs")
        self._account.give("user_iov_size", iov.size)
        for ring in list(self._rings.values()):
            await self._calls.settled(ring.thread, iov)
        last = [iov]
        del iov
        await self._drop_memory(last)
        return (), []

    async def _add_ring(self, values: tuple[int, ...]) -> Answer:
        self._check_room(self._rings, RINGS_MAX)
        layout = Layout.of(values[0], values[1])
        handle = next(self._handles)
        shown: list[int] = []
        with self._account.taking("user_rings"), self._account.taking("user_ring_size", layout.size):
            try:
                ring = self._rings[handle] = _Ring(self, layout, values[2] or -1, shown)
            except BaseException:
                close_all(shown)
                raise
        self._volume.reading_threads.add(ring.thread.jobs)
        return (handle, layout.size), shown

    async def _drop_ring(self, values: tuple[int, ...]) -> Answer:
        ring = self._rings.pop(values[0], None)
        if ring is None:
            raise errors.BadHandle(f"ring {values[0]} is not registered")
        self._account.give("user_rings")
        self._account.give("user_ring_size", ring.size)
        with trio.CancelScope(shield=True):  # `_reap` does not know of it any more
            await self._end(ring)
        return (), []

    async def _end(self, ring: _Ring) -> None:
        ring.thread.stop()
        await self._usher.run(ring.thread.thread.join)
        self._volume.reading_threads.discard(ring.thread.jobs)
        self._calls.end(ring.thread)
        ring.close()

    async def _open_namespace(self, values: tuple[int, ...]) -> Answer:
        self._check_room(self.namespaces, THINGS_MAX)
        with self._account.taking("user_files"):
            ino, read_only = await self._inspect(partial(registry.check_directory, device=self._device))
            directory = await self._volume.attributes(ino)
        gid = directory.gid if directory.mode & 0o2000 else self.peer.gid
        handle = next(self._handles)
        self.namespaces[handle] = Namespace(
            ino,
            values[0] & 0o777,
            gid,
            read_only,
            may_put=self.peer.may(directory, 3),
            waits=self._volume.blocks.waits(ino),
            remembered=self._remembered,
        )
        return (handle, ino), []

    async def _close_namespace(self, values: tuple[int, ...]) -> Answer:
        if self.namespaces.pop(values[0], None) is None:
            raise errors.BadHandle(f"namespace {values[0]} is not open")
        self._account.give("user_files")
        return (), []

    async def _map_arena(self, values: tuple[int, ...]) -> Answer:
        if values[0] not in self._pins.arenas:
            raise errors.PermissionDenied(f"arena {values[0]} holds nothing that you were given")
        descriptor = self._volume.tier.arena_descriptor(values[0])
        return (os.fstat(descriptor).st_size,), [descriptor]

    def counts(self) -> dict[str, int]:
        """How much of what is registered."""
        return {
            "files": len(self.files),
            "iovs": len(self.iovs),
            "namespaces": len(self.namespaces),
            "rings": len(self._rings),
            "pins": len(self._pins),
        }

    # -- for the rings' threads ----------------------------------------------------------------------

    def start(self, ring: RingThread, calls: list[Call]) -> None:
        self._limits.desk.put(self._user_key, ring, calls, self._calls.start)

    def cancel(self, ring: RingThread, call: Call) -> None:
        self._limits.desk.put(self._user_key, ring, [call], self._calls.cancel)

    def in_loop(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(trio.RunFinishedError):  # the daemon has ended: nobody waits for an answer
            self._token.run_sync_soon(function, *arguments)

    def pin(self, block: TierBlock) -> int:
        return self._pins.take(block)

    def unpin(self, pin: int) -> None:
        self._pins.give(pin)

    def allocate(self, namespace: Namespace, size: int) -> TierBlock | None:
        """Not where the user's calls under way could hold too much of the tier: their blocks cannot be evicted."""
        if self.share.user_size > TIER_PART * self._volume.tier.capacity:
            return None
        read_class = ReadClass(namespace.ino, self.peer.uid, namespace.gid, namespace.mode & 0o444)
        return self._volume.tier.allocate(size, read_class) if size else None

    def failed(self, reason: str) -> None:
        log.info("a client is disconnected: %s", reason)
        self.in_loop(self._scope.cancel)

    # -- the end -------------------------------------------------------------------------------------

    async def _reap(self) -> None:
        for ring in self._rings.values():
            ring.thread.stop()
        for ring in self._rings.values():
            await self._end(ring)
        self._limits.desk.drop({ring.thread for ring in self._rings.values()})
        self._rings.clear()
        self._calls.close()
        for file in self.files.values():
            await self._calls.release(file)
        self.files.clear()
        self.namespaces.clear()
        iovs = list(self.iovs.values())
        self.iovs.clear()
        await self._drop_memory(iovs)
        self._pins.clear()

    async def _drop_memory(self, iovs: list[Iov]) -> None:
        """In a thread: memory that nobody else has is given back to the machine here, 0.2 s for each GiB."""

        def drop() -> None:
            for iov in iovs:
                iov.close()
            iovs.clear()

        if iovs:
            await self._usher.run(drop)


def _map_memory(descriptor: int, size: int, charge: Charge) -> Iov:
    """In a thread: whoever is the last to close memory gives it back to the machine, 0.2 s for each GiB."""
    try:
        return Iov(descriptor, size, charge)
    except BaseException:
        os.close(descriptor)
        raise


Answer = tuple[tuple[int, ...], list[int]]
"""values of a reply, and descriptors to be sent with it"""
Handler = Callable[[Connection, tuple[int, ...]], Awaitable[Answer]]
HANDLERS: dict[Request, Handler] = {
    Request.HELLO: Connection._hello,
    Request.ADD_FILE: Connection._add_file,
    Request.DROP_FILE: Connection._drop_file,
    Request.ADD_IOV: Connection._add_iov,
    Request.DROP_IOV: Connection._drop_iov,
    Request.ADD_RING: Connection._add_ring,
    Request.DROP_RING: Connection._drop_ring,
    Request.OPEN_NAMESPACE: Connection._open_namespace,
    Request.CLOSE_NAMESPACE: Connection._close_namespace,
    Request.MAP_ARENA: Connection._map_arena,
}
