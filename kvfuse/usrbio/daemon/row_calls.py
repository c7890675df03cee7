"""Executes calls for blocks that are rows in the event loop: those that have to wait, and rights of a client."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvfuse import errors
from kvfuse.access.namespace_handle import BlockDoor, NamespaceHandle
from kvfuse.access.row_access import RowAccess
from kvfuse.native.blockforms import name_columns
from kvfuse.usrbio.daemon.call import Call, Completion
from kvfuse.usrbio.daemon.device_calls import DeviceCalls, note_row
from kvfuse.usrbio.protocol.costs import encode_costs
from kvfuse.usrbio.protocol.wire import PutHints
from kvfuse.volume.api import RowTable
from kvfuse.volume.tier.shared_tier import TierBlock


@dataclass
class RowCalls(RowAccess):
    """The calls of one connection."""

    devices: DeviceCalls | None = None
    """None: it answers no GETs"""

    async def get(self, call: Call, namespace: NamespaceHandle, door: BlockDoor) -> bool:
        """Answer a GET. False: the directory has no such block; a file may have its name. PermissionDenied."""
        name = call.names[0]
        if door.terms.is_strict or door.store.find(namespace.ino, name) is None:
            await door.store.renew(is_strict=door.terms.is_strict, directory=namespace.ino, names=[name])
            await door.store.warm(namespace.ino, [name])
        was_found = was_fetched = False
        for _ in range(4):
            found = door.store.find(namespace.ino, name)
            was_found, was_lost = found is not None, was_found and found is None
            if was_lost:  # its host may have it in another slot by now, or the bucket has it
                await door.store.renew(is_strict=door.terms.is_strict, directory=namespace.ino, names=[name])
                await door.store.warm(namespace.ino, [name])
                continue
            if found is None:
                if not door.has_files:
                    door.store.note_chain(namespace.ino, name_columns([name]), is_read=True)
                return False
            table, row, sequence = found
            if not (namespace.has_token or self.peer.may_access(table.readers, 4)):
                raise errors.PermissionDenied(f"the client's user may not read {os.fsdecode(name)}")
            if namespace.measures.limiters:
                await namespace.measures.throttle(min(int(table.rows["length"][row]), call.entry.length))
            rows, sequences = np.array([row], np.int64), np.array([sequence], np.uint64)
            if call.entry.flags and await call.try_again():  # a view
                return True
            if call.device is not None:
                if await self._answer_on_device(call, door, found):
                    return True
            elif await call.attempt(partial(_copy, door, table)):
                return True
            if not was_fetched and (await door.store.fetch(table, [name], rows, sequences))[0]:
                was_fetched = True  # where it leaves memory again before it is copied, it is copied here
                continue
            data = await door.store.read(table, name)
            if data is None:
                continue
            if call.device is not None and 0 < len(data) <= call.entry.length:
                assert self.devices is not None
                await self.devices.answer_bytes(call, data)
                return True
            if await call.attempt(partial(_answer, data)):
                return True
        return False

    async def _answer_on_device(self, call: Call, door: BlockDoor, found: tuple[RowTable, int, int]) -> bool:
        """Have the adapter copy a block that is in memory. False: it is not, or not any more."""
        if (held := door.store.hold_row(*found)) is None or self.devices is None:
            return False
        if not 0 < held.size <= call.entry.length:
            call.ring.completions.complete(call, -errno.EMSGSIZE if held.size else 0, held.size)
            return True
        note_row(call, held)
        return await self.devices.answer_found(call)

    async def put(self, call: Call, namespace: NamespaceHandle, door: BlockDoor) -> bool:
        """Store a block. False: it cannot be one, and becomes a file. The errors of `RowApi.put`."""
        if door.own is None and namespace.may_put:
            await self.refuse_directory(namespace, door, call.names[0])
            await door.store.remove(namespace.ino, call.names)
            return False
        if door.own is None:
            raise errors.PermissionDenied("the mode of the namespace's directory does not allow the client's user this")
        await self.refuse_directory(namespace, door, call.names[0])
        content = call.data.buffer.data if isinstance(call.data, TierBlock) else memoryview(call.data)
        try:
            await door.store.put(door.own, call.names, [content], door.terms_of(*PutHints.unpack(call.entry.offset)))
        except errors.FileTooLarge:
            door.store.drop(namespace.ino, call.names)
            return False
        return True

    async def costs(self, namespace: NamespaceHandle, door: BlockDoor, names: Sequence[bytes]) -> bytes:
        """As `exists`, encoded with when each is expected to be there."""
        tiers, seconds = await self.look_up(namespace, door, names, is_timed=True)
        return encode_costs(tiers, seconds if seconds is not None else np.zeros(len(tiers), np.float32))


def _copy(door: BlockDoor, table: RowTable, call: Call) -> Completion | None:
    """Copy a block that is in memory to where the call wants it, in the ring's thread."""
    iov, entry = call.iov, call.entry
    data = door.store.copy(table, call.names[0], entry.length)
    if isinstance(data, int):
        return Completion(-errno.EMSGSIZE, data) if data >= 0 else None
    if iov is not None:
        with call.ring.turns.copying(call.ring.seat):
            iov.write(entry.iov_offset, data)
    return Completion(len(data))


def _answer(data: bytearray, call: Call) -> Completion | None:
    if len(data) > call.entry.length:
        return Completion(-errno.EMSGSIZE, len(data))
    if call.iov is not None:
        with call.ring.turns.copying(call.ring.seat):
            call.iov.write(call.entry.iov_offset, memoryview(data))
    return Completion(len(data))
