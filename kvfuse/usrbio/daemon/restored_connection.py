"""Restores connections that a former daemon left, with the same handles; and leaves them to the next daemon.

One user may have registered very much. So the restore is work of that user, as its messages were: it waits for turns in
the call queue, between which the daemon serves the mount's calls and all other users'.

It drops things that are gone - a file, a folder: entries that name them get EBADF or EFAULT. A ring that cannot
continue ends the connection, as nobody would answer its entries.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import trio

from kvfuse import errors
from kvfuse.access.namespace_handle import NamespaceHandle, Remembered
from kvfuse.kept.keeper import Kept
from kvfuse.usrbio.daemon.audience import CONNECT_COST, TURN_COST
from kvfuse.usrbio.daemon.charges import Charge
from kvfuse.usrbio.daemon.client_memory import map_memory
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.connection_keeping import KeptConnection
from kvfuse.usrbio.daemon.descriptor_receiver import DescriptorReceiver
from kvfuse.usrbio.daemon.device_iovs import DeviceIov, close_iovs
from kvfuse.usrbio.daemon.device_memory import DeviceMemories
from kvfuse.usrbio.daemon.held_blocks import HeldBlock
from kvfuse.usrbio.daemon.kept_records import KeptIov, KeptNamespace, KeptRing
from kvfuse.usrbio.daemon.loop_calls import Calls
from kvfuse.usrbio.daemon.pins import Pins
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.usrbio.daemon.ring_thread import OwnedRing
from kvfuse.usrbio.protocol.wire import MESSAGE_SIZE_MAX, Layout, Message, Request
from kvfuse.volume.api import RingApi
from kvfuse.volume.views.ring_files import KeptFile

log = logging.getLogger(__name__)

COSTS = {"file": 4, "iov": 4, "device": 16, "namespace": 4, "ring": 16}
"""cost of a thing that is registered again, in calls"""

_held: list[Pins | list[HeldBlock]] = []
"""blocks that clients hold as their daemon ends: nothing may reuse them until this process has ended"""


@dataclass
class Memories:
    """Needs of registering memory. ``charge``: of the client's user."""

    charge: Charge
    devices: DeviceMemories
    receiver: DescriptorReceiver


@dataclass
class _Restoration:
    """Restores one connection: a method for each kind of thing."""

    things: ClientRegistry
    volume: RingApi
    calls: Calls
    memories: Memories
    remembered: Remembered

    async def restore_open_file(self, handle: int, row: KeptFile) -> None:
        """Restore a file that the volume counts as open since the volume itself was opened."""
        left_open, opened = self.volume.left_open, None
        try:
            with self.things.files.taking():
                await left_open.load(row.ino)
                opened = left_open.take_over(row.ino, _flags_of(row), self.calls.peer.make_caller())
                await self._add_file(handle, row, opened)
        finally:
            if opened is None:
                left_open.give_up(row.ino, writable=row.writable)

    async def restore_file(self, handle: int, kept: Kept) -> None:
        """The same, where the former door had this same volume."""
        row = msgspec.json.decode(kept.content, type=KeptFile)
        with self.things.files.taking():
            opened = await self.volume.files.open(row.ino, _flags_of(row), self.calls.peer.make_caller())
            await self._add_file(handle, row, opened)

    async def _add_file(self, handle: int, row: KeptFile, opened: Any) -> None:
        try:
            shown = self.volume.files.content_map(opened)
        except errors.Stale:
            with trio.CancelScope(shield=True):
                await self.volume.files.release(opened)
            raise
        measures = self.volume.inodes.measures(row.ino)
        file = OpenFile(opened, row.ino, row.readable, row.writable, shown, measures, is_cut=row.is_cut)
        self.things.keeping.add_file(handle, row)
        file.when_told = partial(self.things.keeping.clear_cut, handle)
        self.things.files[handle] = file

    async def restore_iov(self, handle: int, kept: Kept) -> None:
        row, iovs = msgspec.json.decode(kept.content, type=KeptIov), self.things.iovs
        with iovs.taking(row.size), trio.CancelScope(shield=True):
            descriptor = os.dup(kept.descriptors[0])
            iovs[handle] = await self.memories.receiver.run(map_memory, descriptor, row.size, self.memories.charge)

    async def restore_device(self, handle: int, kept: Kept) -> None:
        row, devices = msgspec.json.decode(kept.content, type=KeptIov), self.things.devices
        with devices.taking(row.size), trio.CancelScope(shield=True):
            memory = await self.memories.devices.add(kept.descriptors[0], row.offset, row.size)
            devices[handle] = DeviceIov(memory, row.size, row.offset)

    async def restore_namespace(self, handle: int, kept: Kept) -> None:
        row, namespaces = msgspec.json.decode(kept.content, type=KeptNamespace), self.things.namespaces
        has_token = False
        with namespaces.taking():
            with suppress(errors.Stale):  # the client may not use it any more: it finds nothing there, as before
                has_token = await self.calls.admission.check_access(row.ino)
            group = await self.calls.admission.find_group(row.ino)
            directory = await self.volume.inodes.attributes(row.ino)
        namespaces[handle] = NamespaceHandle(
            row.ino,
            row.mode,
            group,
            row.read_only,
            may_put=has_token or self.calls.peer.may_access(directory, 3),
            waits=self.volume.blocks.waits(row.ino),
            by_path=row.by_path,
            measures=self.volume.inodes.measures(row.ino),
            descriptor=row.descriptor,
            remembered=self.remembered,
        )

    async def restore_ring(self, handle: int, kept: Kept) -> None:
        row, rings = msgspec.json.decode(kept.content, type=KeptRing), self.things.rings
        layout = Layout.of(row.entries, row.aux_size)
        memory, journal, bell, client_bell = kept.descriptors
        with rings.taking(layout.size):
            shown = [memory, journal, os.dup(bell), os.dup(client_bell)]
            ring = OwnedRing(self.things, layout, row.op_mask, shown, self.memories.charge, is_left=True)
            ring.loop.restore()
            ring.start()
        self.volume.reading_threads.add(ring.loop.jobs)
        rings[handle] = ring


async def restore(
    left: KeptConnection, things: ClientRegistry, volume: RingApi, calls: Calls, memories: Memories,
    remembered: Remembered, pause: Callable[[float], Awaitable[None]],
) -> Message | None:  # fmt: skip
    """Register again what was registered. ``pause``: waits for the user's turn for work of a cost, in calls.

    Returns the reply to the request that no daemon has answered, if any. KvfuseError, OSError: a ring cannot continue.
    """
    keeping = things.keeping
    for token in left.said.tokens:
        calls.admission.add_token(token)
    adoption = _Restoration(things, volume, calls, memories, remembered)
    request, number, added = keeping.read_unanswered()
    is_waiting = request != 0 and _is_next_message(left.socket, number)
    rows, owed = keeping.list_kept(), CONNECT_COST
    for rings in (False, True):
        for name, kind, handle in rows:
            if (kind == "ring") is not rings:
                continue
            owed += COSTS[kind]
            if owed >= TURN_COST:
                await pause(owed)
                owed = 0
            if handle == added and (is_waiting or not request):  # the client does not know it, and asks again
                keeping.drop(kind, handle)
                continue
            row = volume.left_open.ring_files.pop(name, None)
            kept = keeping.take(name) or Kept(b"", ())
            add: Callable[[int, Kept], Awaitable[None]] = getattr(adoption, f"restore_{kind}")
            try:
                await (add(handle, kept) if row is None else adoption.restore_open_file(handle, row))
            except (errors.KvfuseError, OSError, ValueError, msgspec.MsgspecError) as error:
                log.warning("a client loses %s %d: %s", kind, handle, error)
                if rings:
                    raise
                keeping.drop(kind, handle)
            finally:
                for descriptor in kept.descriptors:
                    os.close(descriptor)
    if not request or is_waiting:
        return None
    return _make_reply(request, number, added, things)


def give_up_files(volume: RingApi, names: Iterable[str]) -> None:
    """Release registered files of connections that do not continue. ``names``: under which they were kept."""
    for name in names:
        file = volume.left_open.ring_files.pop(name, None)
        if file is not None:
            volume.left_open.give_up(file.ino, writable=file.writable)


def _flags_of(row: KeptFile) -> int:
    return os.O_RDWR if row.readable and row.writable else os.O_WRONLY if row.writable else os.O_RDONLY


def _is_next_message(descriptor: int, number: int) -> bool:
    """Whether the next message in a socket has this number."""
    with socket.socket(fileno=os.dup(descriptor)) as stream, suppress(BlockingIOError, ValueError):
        data, _, _, _ = stream.recvmsg(MESSAGE_SIZE_MAX + 1, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return Message.unpack(data).number == number
    return False


def _make_reply(request: int, number: int, handle: int, things: ClientRegistry) -> Message:
    """The reply to a request that the former daemon took, and executed if the handle exists."""
    values: tuple[int, ...] | None = None
    if request == Request.ADD_FILE and (file := things.files.get(handle)) is not None:
        values = handle, file.ino, file.handle.size
    elif request == Request.ADD_IOV and (iov := things.iovs.get(handle)) is not None:
        values = handle, int(iov.writable)
    elif request == Request.ADD_DMABUF and handle in things.devices:
        values = (handle,)
    elif request == Request.OPEN_NAMESPACE and (namespace := things.namespaces.get(handle)) is not None:
        values = handle, namespace.ino
    if values is None:
        return Message(request, number, -errno.EINTR, text="the daemon changed meanwhile: ask again")
    return Message(request, number, 0, values)


def hold_pins(pins: Pins) -> None:
    """Hold blocks that a client reads while the mount ends: they stay as they are."""
    _held.append(pins.list_blocks())


async def leave_connection(things: ClientRegistry, calls: Calls, receiver: DescriptorReceiver) -> None:
    """Leave a connection to the next daemon: its rings stop where they are, and it gives nothing back."""
    _held.append(things.pins)
    things.keeping.forget_files()
    calls.indexes.close()
    for ring in things.rings.values():
        ring.loop.stop()
    await close_iovs(*things.devices.values())
    await receiver.wait_for_thread()
    for ring in things.rings.values():
        await receiver.run(ring.loop.thread.join)
        calls.volume.reading_threads.discard(ring.loop.jobs)
        calls.cancel_ring(ring.loop)
        await calls.devices.wait_for_lists()
        ring.close(hands_over=True)
    things.rings.clear()
    calls.close()
