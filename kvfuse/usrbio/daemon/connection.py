"""Serves one client: answers its control messages, registers things for it, and drops them at its end.

Everything registered lives as long as the connection. When it ends - closed, killed, or broken - its rings stop first,
then the daemon cancels its calls, then it drops files, memory and pins.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import socket
import sys
from contextlib import suppress
from functools import partial

import trio

from kvfuse import errors, failing
from kvfuse.access.client_process import ClientProcess
from kvfuse.access.namespace_handle import NO_GROUP, NamespaceHandle, Remembered
from kvfuse.errnos import errno_of
from kvfuse.usrbio.daemon import device_iovs, kept_records, registered_things, restored_connection
from kvfuse.usrbio.daemon.audience import Audience
from kvfuse.usrbio.daemon.block_feed import BlockFeed
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.client_memory import MappedIov, map_memory
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.connection_keeping import KeptConnection
from kvfuse.usrbio.daemon.descriptor_receiver import SO_PASSRIGHTS, DescriptorReceiver, close_all
from kvfuse.usrbio.daemon.limits import Limits
from kvfuse.usrbio.daemon.loop_calls import Calls
from kvfuse.usrbio.daemon.penalty import BOUND, Penalty
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.usrbio.daemon.ring_thread import OwnedRing
from kvfuse.usrbio.daemon.user_accounts import UserAccount
from kvfuse.usrbio.protocol.wire import (
    ENTRIES_MAX,
    IOV_SIZE_MAX,
    VERSION,
    Ability,
    Access,
    Layout,
    Message,
    Request,
    own_id,
)

log = logging.getLogger(__name__)

Answer = tuple[tuple[int, ...], list[int]]
"""values of a reply, and descriptors to be sent with it"""
COSTS = {
    Request.ADD_RING: 16,
    Request.DROP_RING: 16,
    Request.ADD_IOV: 4,
    Request.ADD_DMABUF: 16,
    Request.DROP_IOV: 4,
    Request.ADD_FILE: 4,
    Request.DROP_FILE: 2,
    Request.OPEN_NAMESPACE: 4,
    Request.DESCRIBE: 16,
    Request.MAP_ARENA: 16,
    Request.MAP_INDEX: 16,
}
"""cost of a message for the event loop, beside its answer, in calls"""

WITH_DESCRIPTOR = (Request.ADD_FILE, Request.ADD_IOV, Request.ADD_DMABUF, Request.OPEN_NAMESPACE)
WITH_TEXT = (Request.SHOW_TOKEN, Request.DESCRIBE)
"""requests whose methods get the text behind the message, too"""


LISTED_MAX = 100
"""files and namespaces of a connection that are listed by name"""


class Connection:
    """One client, while it is connected; the listener owns it. Event loop only."""

    def __init__(
        self,
        limits: Limits,
        stream: trio.socket.SocketType,
        peer: ClientProcess,
        account: UserAccount,
        audience: Audience,
        receiver: DescriptorReceiver,
        nursery: trio.Nursery,
        share: Share,
        left: KeptConnection | None = None,
    ) -> None:
        """``left``: the connection, from the former daemon."""
        self.peer = peer
        self._charge = limits.charges.get_charge(peer)
        self._audience = audience
        self._penalty = Penalty()
        self._receiver = receiver
        self._limits = limits
        self._stream = stream
        self._calls = Calls(
            limits.volume, limits.kernel, peer, nursery, share, limits.call_queue.list_calls, limits.device_staging
        )
        self._admission = self._calls.admission
        self._greeted = self._has_asked = left is not None
        """a request other than HELLO succeeded"""
        self._scope = trio.CancelScope()
        self.registered = ClientRegistry(limits, peer, account, share, self._calls, self._scope.cancel, left)
        self._remembered = Remembered()
        self._follower: BlockFeed | None = None
        """set by FOLLOW: the connection then serves nothing else"""

    def describe(self) -> dict[str, object]:
        """The client, and what it has registered; of files and namespaces the first ones by name. Sizes in bytes."""
        has, path_of = self.registered, self._limits.volume.path_of
        return {
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "follows": self._follower is not None,
            "rings": len(has.rings),
            "ring_bytes": sum(ring.size for ring in has.rings.values()),
            "files": len(has.files),
            "file_names": [path_of(file.ino) for file in list(has.files.values())[:LISTED_MAX]],
            "namespaces": [path_of(one.ino) for one in list(has.namespaces.values())[:LISTED_MAX]],
            "iovs": len(has.iovs) + len(has.devices),
            "iov_bytes": sum(iov.size for things in (has.iovs, has.devices) for iov in things.values()),
            "pins": len(has.pins),
        }

    # -- the control socket --------------------------------------------------------------------------

    async def run(self, left: KeptConnection | None = None) -> None:
        """Answer requests until the client disconnects, or breaks a rule. Then drop all that it had.

        The caller has waited for the first message and its turn, except for a connection that was ``left``.
        """
        try:
            with self._scope:
                if left is not None:
                    await self._restore(left)
                while self._follower is not None or await self._answer_one():
                    if self._penalty.is_broken:
                        log.info("disconnecting a client: %d more of its messages were refused than answered", BOUND)
                        break
                    if self._follower is not None:
                        await self._follower.run()
                        break
                    await self._audience.wait_turn(self._stream)
        finally:
            if not self._has_asked:
                self._audience.penalty.judge_one(is_bad=True)
            is_cut = isinstance(sys.exception(), trio.Cancelled)
            with trio.CancelScope(shield=True):
                await self._reap(is_cut=is_cut)

    async def _restore(self, left: KeptConnection) -> None:
        """Continue a connection of the former daemon."""
        things, volume = self.registered, self._limits.volume
        memories = restored_connection.Memories(self._charge, self._limits.device_memories, self._receiver)
        pause = self._audience.pause
        try:
            reply = await restored_connection.restore(
                left, things, volume, self._calls, memories, self._remembered, pause
            )
        except (errors.KvfuseError, OSError):
            raise
        except Exception as error:
            if not things.keeping.note_failure():
                failing.end_process(error)  # the next daemon tries again, once
            raise
        if reply is not None:
            await self._reply(reply, [])
            things.keeping.end_reply()
        if left.said.follows:
            namespace = NamespaceHandle(left.said.follows, 0, NO_GROUP, by_path=left.said.by_path)
            self._follower = BlockFeed(
                volume, self._admission, namespace, self._stream, self._audience.pause, goes_on=True
            )

    async def _answer_one(self) -> bool:
        """Answer the next message. False: the client is gone, or sent no valid message."""
        data = await self._receiver.peek_message()
        shown: list[int] = []
        try:
            if not data:
                return False
            message = Message.unpack(data)
            reply, shown = await self._answer(message)
            self._judge(message, is_bad=reply.status < 0)
            self.registered.keeping.begin_reply()
            await self._reply(reply, shown)
            self.registered.keeping.end_reply()
            await self._receiver.take_message()
        except ValueError as error:
            log.info("disconnecting a client: %s", error)
            return False
        finally:
            close_all(shown)
        return True

    def _judge(self, message: Message, *, is_bad: bool) -> None:
        """Count an answered message for the penalties."""
        if not is_bad and message.request == Request.HELLO:
            return  # else a client that connects, greets and disconnects again and again was good half of the time
        self._has_asked |= not is_bad
        self._penalty.judge(1, int(is_bad))
        self._audience.penalty.judge_one(is_bad=is_bad)

    async def _answer(self, message: Message) -> tuple[Message, list[int]]:
        """Execute a request: (reply, descriptors to send and then to close)."""
        try:
            kind = Request(message.request)
            if not self._greeted and kind is not Request.HELLO:
                raise errors.InvalidArgument("the first message of a connection must be HELLO")
            has_descriptors = self._receiver.has_descriptors
            if has_descriptors != (kind in WITH_DESCRIPTOR):
                raise errors.InvalidArgument(f"{kind.name} {'carries' if has_descriptors else 'lacks'} a descriptor")
            if has_descriptors:
                self.registered.keeping.begin_request(message.request, message.number)
            if kind in COSTS:
                await self._audience.pause(COSTS[kind])
            arguments = (message.values, message.text) if kind in WITH_TEXT else (message.values,)
            values, sent = await getattr(self, f"_{kind.name.lower()}")(*arguments)
        except (errors.KvfuseError, OSError, ValueError) as error:
            number = (error.errno if isinstance(error, OSError) else errno_of(error)) or errno.EINVAL
            return Message(message.request, message.number, -number, text=str(error)), []
        return Message(message.request, message.number, 0, values), sent

    async def _reply(self, reply: Message, descriptors: list[int]) -> None:
        passed = array.array("i", descriptors).tobytes()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if descriptors else []
        await self._stream.sendmsg([reply.pack()], ancillary)

    # -- requests: each has the method of its name -----------------------------------------------------

    async def _hello(self, values: tuple[int, ...]) -> Answer:
        if values[0] != VERSION:
            raise errors.Unsupported(f"protocol version {values[0]} is not supported: this daemon has {VERSION}")
        self._greeted = True
        with suppress(OSError):  # Linux before 6.16 cannot refuse them
            self._stream.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
        self.registered.keeping.keep_connection(self._stream, self.peer)
        abilities = Ability(0) if self._limits.device_memories.lacks else Ability.DMABUF
        epoch, pid, namespace = own_id()
        return (VERSION, pid, ENTRIES_MAX, abilities, epoch, namespace), []

    async def _add_file(self, values: tuple[int, ...]) -> Answer:
        reads_once, wanted = bool(values[0] & Access.ONCE), values[0] & ~int(Access.ONCE)
        if not 0 < wanted <= Access.READ | Access.WRITE:
            raise errors.InvalidArgument(
                f"access {values[0]}: it must be 1 (read), 2 (write) or 3 (both), plus 4 (once)"
            )
        access = Access(wanted)
        flags = {Access.READ: os.O_RDONLY, Access.WRITE: os.O_WRONLY}.get(access, os.O_RDWR)
        files = self.registered.files
        with files.taking():
            ino = await self._receiver.inspect(
                partial(registered_things.check_file, device=self._limits.device, access=access)
            )
            await self._admission.check_access(ino)
            opened = await self._limits.volume.files.open(ino, flags, self.peer.make_caller())
            try:
                shown = self._limits.volume.files.content_map(opened)
            except errors.Stale:  # another host removed it meanwhile
                with trio.CancelScope(shield=True):
                    await self._limits.volume.files.release(opened)
                raise
        ino = opened.number or ino  # a block is another inode, a file's, by now
        file = OpenFile(
            opened, ino, bool(access & Access.READ), bool(access & Access.WRITE), shown, reads_once=reads_once
        )
        file.measures = self._limits.volume.inodes.measures(ino)
        return (files.add(file), ino, opened.size), []

    async def _drop_file(self, values: tuple[int, ...]) -> Answer:
        if self.registered.files.is_dropped(values[0]):
            return (), []
        file = self.registered.files.remove(values[0])
        with trio.CancelScope(shield=True):  # `_reap` does not know of it any more
            await self._calls.files.release(file)
        return (), []

    async def _add_iov(self, values: tuple[int, ...]) -> Answer:
        if not 0 < values[0] <= IOV_SIZE_MAX:
            raise errors.InvalidArgument(f"an iov of {values[0]} bytes")
        iovs = self.registered.iovs
        with iovs.taking(values[0]):
            descriptor = await self._receiver.take_memory()
            with trio.CancelScope(shield=True):  # else the descriptor would leak
                iov = await self._receiver.run(map_memory, descriptor, values[0], self._charge)
        return (iovs.add(iov), iov.writable), []

    async def _add_dmabuf(self, values: tuple[int, ...]) -> Answer:
        memories, iovs = self._limits.device_memories, self.registered.devices
        return (await device_iovs.add_iov(memories, iovs, self._receiver, values[0], values[1]),), []

    async def _drop_iov(self, values: tuple[int, ...]) -> Answer:
        if self.registered.iovs.is_dropped(values[0]) and values[0] not in self.registered.devices:
            return (), []
        if values[0] in self.registered.devices:
            iov = self.registered.devices.remove(values[0])
            with trio.CancelScope(shield=True):  # `_reap` does not know of it any more
                for ring in list(self.registered.rings.values()):
                    await self._calls.end_writes(ring.loop, iov)
                await device_iovs.close_iovs(iov)
            return (), []
        last = [self.registered.iovs.remove(values[0])]
        for ring in list(self.registered.rings.values()):
            await self._calls.end_writes(ring.loop, last[0])
        await _drop_memory(self._receiver, last)
        return (), []

    async def _add_ring(self, values: tuple[int, ...]) -> Answer:
        layout = Layout.of(values[0], values[1])
        shown: list[int] = []
        with self.registered.rings.taking(layout.size):
            try:
                ring = OwnedRing.create(self.registered, layout, values[2] or -1, shown, self._charge)
            except BaseException:
                close_all(shown)
                raise
        self._limits.volume.reading_threads.add(ring.loop.jobs)
        handle = self.registered.rings.add(ring)
        os.close(shown.pop())
        return (handle, layout.size), shown

    async def _drop_ring(self, values: tuple[int, ...]) -> Answer:
        if self.registered.rings.is_dropped(values[0]):
            return (), []
        ring = self.registered.rings.remove(values[0])
        with trio.CancelScope(shield=True):  # `_reap` does not know of it any more
            await self._end_ring(ring)
        return (), []

    async def _end_ring(self, ring: OwnedRing) -> None:
        ring.loop.stop()
        await self._receiver.run(ring.loop.thread.join)
        self._limits.volume.reading_threads.discard(ring.loop.jobs)
        self._calls.cancel_ring(ring.loop)
        await self._calls.devices.wait_for_lists()
        ring.close()

    async def _open_namespace(self, values: tuple[int, ...]) -> Answer:
        namespaces = self.registered.namespaces
        with namespaces.taking():
            ino, read_only = await self._receiver.inspect(
                partial(registered_things.check_directory, device=self._limits.device)
            )
            has_token = await self._admission.check_access(ino)
            by_path = await self._admission.may_reach(ino)
            group = await self._admission.find_group(ino)
            directory = await self._limits.volume.inodes.attributes(ino)
        namespace = NamespaceHandle(
            ino,
            values[0] & 0o777,
            group,
            read_only,
            may_put=has_token or self.peer.may_access(directory, 3),
            waits=self._limits.volume.blocks.waits(ino),
            by_path=by_path,
            measures=self._limits.volume.inodes.measures(ino),
            remembered=self._remembered,
        )
        return (namespaces.add(namespace), ino), []

    def _get_namespace(self, handle: int) -> NamespaceHandle:
        namespace = self.registered.namespaces.get(handle)
        if namespace is None:
            raise errors.BadHandle(f"{handle} is no namespace")
        return namespace

    async def _close_namespace(self, values: tuple[int, ...]) -> Answer:
        if not self.registered.namespaces.is_dropped(values[0]):
            self.registered.namespaces.remove(values[0])
        return (), []

    async def _follow(self, values: tuple[int, ...]) -> Answer:
        registered = self._get_namespace(values[0])
        namespace = NamespaceHandle(registered.ino, 0, NO_GROUP, by_path=registered.by_path)
        follower = BlockFeed(self._limits.volume, self._admission, namespace, self._stream, self._audience.pause)
        await follower.check()
        self.registered.namespaces.account.take("user_followers")
        self.registered.keeping.keep_words(follows=namespace.ino, by_path=namespace.by_path)
        self._follower = follower
        return (), []

    async def _show_token(self, values: tuple[int, ...], token: str) -> Answer:
        self._admission.add_token(token)
        self.registered.keeping.keep_words(token=token)
        return (), []

    async def _describe(self, values: tuple[int, ...], descriptor: str) -> Answer:
        namespace = self._get_namespace(values[0])
        await self._admission.describe(namespace, descriptor)
        self.registered.keeping.change("namespace", values[0], kept_records.pack_namespace(namespace)[0])
        return (), []

    async def _map_index(self, values: tuple[int, ...]) -> Answer:
        namespace, account = self._get_namespace(values[0]), self.registered.namespaces.account
        return await self._calls.indexes.open(namespace, values[1], account)

    async def _map_arena(self, values: tuple[int, ...]) -> Answer:
        namespaces, is_viewed = self.registered.namespaces.values(), values[0] in self.registered.pins.arenas
        descriptor = await self._calls.indexes.map_arena(values[0], namespaces, is_viewed=is_viewed)
        return (os.fstat(descriptor).st_size,), [descriptor]

    # -- the end -------------------------------------------------------------------------------------

    async def _reap(self, *, is_cut: bool) -> None:
        """Drop all that is registered. ``is_cut``: the daemon ends, not the client, which still reads its views."""
        things = self.registered
        if self._limits.hands_over:
            await restored_connection.leave_connection(things, self._calls, self._receiver)
            return
        self._calls.indexes.close()
        for ring in things.rings.values():
            ring.loop.stop()
        devices = list(things.devices.values())
        things.devices.clear()
        await device_iovs.close_iovs(*devices)
        for ring in things.rings.values():
            await self._end_ring(ring)
        self._limits.call_queue.drop({ring.loop for ring in things.rings.values()})
        things.rings.clear()
        self._calls.close()
        for file in things.files.values():
            await self._calls.files.release(file)
        things.files.clear()
        things.namespaces.clear()
        iovs = list(things.iovs.values())
        things.iovs.clear()
        await _drop_memory(self._receiver, iovs)
        if is_cut:
            restored_connection.hold_pins(things.pins)
        things.pins.clear()
        things.keeping.close()


async def _drop_memory(receiver: DescriptorReceiver, iovs: list[MappedIov]) -> None:
    """Unmap in a thread: the last one to close memory frees it, 0.2 s for each GiB."""

    def drop() -> None:
        for iov in iovs:
            iov.close()
        iovs.clear()

    if iovs:
        await receiver.run(drop)
