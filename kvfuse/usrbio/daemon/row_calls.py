"""Executes calls for blocks that are rows in the event loop: those that have to wait, and rights of a client."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from stat import S_ISDIR

import numpy as np
import numpy.typing as npt

from kvfuse import errors
from kvfuse.native.blockforms import name_columns
from kvfuse.usrbio.daemon.call import Call, Completion
from kvfuse.usrbio.daemon.client_process import ClientProcess
from kvfuse.usrbio.daemon.device_calls import DeviceCalls, note_row
from kvfuse.usrbio.daemon.registered_things import BlockDoor, NamespaceHandle
from kvfuse.usrbio.protocol.costs import encode_costs
from kvfuse.volume.api import RingApi, RowTable, RowTerms
from kvfuse.volume.tier.shared_tier import TierBlock


@dataclass
class RowCalls:
    """The calls of one connection."""

    volume: RingApi
    peer: ClientProcess
    devices: DeviceCalls | None = None
    """None: it answers no GETs"""

    async def settle(self, namespace: NamespaceHandle) -> None:
        """Note what the client's threads may do with the blocks of a directory, as of now. Its rights were checked."""
        store = self.volume.rows
        number = await self.volume.blocks.block_namespace(namespace.ino) if store is not None else None
        if store is None or number is None or namespace.is_absent:
            namespace.blocks = None
            return
        own = None
        if namespace.may_put and not namespace.read_only:
            with suppress(errors.NoSpace):  # too many tables: its blocks become files
                own = store.table(namespace.ino, number, self.peer.uid, namespace.group.gid, namespace.mode)
        store.shown.begin_look(namespace.ino)
        has_files = await self.volume.blocks.has_files(namespace.ino)
        knows_all = store.knows_all and not store.is_shared
        if store.shown.end_look(namespace.ino, has_files=has_files, knows_all=knows_all):
            store.with_files.discard(namespace.ino)
        tables = store.tables_of(namespace.ino)
        readable = tuple([table for table in tables if namespace.has_token or self.peer.may_access(table.readers, 4)])
        is_strict = self.volume.blocks.waits(namespace.ino)
        asks_first = is_strict and store.is_shared
        namespace.blocks = BlockDoor(
            store, namespace.ino, number, own, tables, () if asks_first else readable, has_files=has_files,
            reads_all=len(readable) == len(tables), asks_first=asks_first, terms=RowTerms(is_strict=is_strict),
        )  # fmt: skip

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
            if was_lost:  # its host may have it in another slot by now
                await door.store.renew(is_strict=door.terms.is_strict, directory=namespace.ino, names=[name])
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
            await self._refuse_directory(namespace, door, call.names[0])
            await door.store.remove(namespace.ino, call.names)
            return False
        if door.own is None:
            raise errors.PermissionDenied("the mode of the namespace's directory does not allow the client's user this")
        await self._refuse_directory(namespace, door, call.names[0])
        content = call.data.buffer.data if isinstance(call.data, TierBlock) else memoryview(call.data)
        try:
            await door.store.put(door.own, call.names, [content], door.terms_of(call.entry.offset))
        except errors.FileTooLarge:
            door.store.drop(namespace.ino, call.names)
            return False
        return True

    async def _refuse_directory(self, namespace: NamespaceHandle, door: BlockDoor, name: bytes) -> None:
        """IsADirectory: the name means one, which a block would hide."""
        if door.has_files or name in door.store.directories.get(namespace.ino, ()):
            node = await self.volume.blocks.find(namespace.ino, name)
            if node is not None and S_ISDIR(node.mode):
                raise errors.IsADirectory(f"{os.fsdecode(name)} is a directory of the namespace's directory: no block")

    async def exists(self, namespace: NamespaceHandle, door: BlockDoor, names: Sequence[bytes]) -> bytes:
        """A byte for each name: 0, it is absent, or sooner computed than read."""
        tiers, _ = await self._look_up(namespace, door, names, is_timed=False)
        found: bytes = (tiers != 0).tobytes()
        return found

    async def costs(self, namespace: NamespaceHandle, door: BlockDoor, names: Sequence[bytes]) -> bytes:
        """As `exists`, encoded with when each is expected to be there."""
        tiers, seconds = await self._look_up(namespace, door, names, is_timed=True)
        return encode_costs(tiers, seconds if seconds is not None else np.zeros(len(tiers), np.float32))

    async def _look_up(
        self, namespace: NamespaceHandle, door: BlockDoor, names: Sequence[bytes], *, is_timed: bool
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        began = time.perf_counter()
        await self._renew(door, names)
        answers = door.store.look_up(door.directory, door.namespace, name_columns(names), is_timed=is_timed)
        namespace.measures.seconds["exists"].add(time.perf_counter() - began)
        return answers

    async def _renew(self, door: BlockDoor, names: Sequence[bytes]) -> None:
        """Look for blocks of other hosts, where that may find more of these."""
        if door.store.is_shared and (door.terms.is_strict or not door.find(names).all()):
            await door.store.renew(is_strict=door.terms.is_strict, directory=door.directory, names=names)

    async def are_there(self, door: BlockDoor, names: Sequence[bytes]) -> list[bool]:
        """Which blocks exist, whatever they are worth."""
        await self._renew(door, names)
        found = door.find(names)
        if (cold := door.store.find_cold(door.directory, name_columns(names))) is not None:
            found |= cold
        answers: list[bool] = found.tolist()
        return answers

    async def prefetch(self, door: BlockDoor, namespace: NamespaceHandle, names: Sequence[bytes]) -> list[bool]:
        """Bring blocks into memory. Which are there then."""
        loaded = np.zeros(len(names), np.bool_)
        await self._renew(door, names)
        await door.store.warm(door.directory, names)
        for table in door.store.tables_of(door.directory):
            if not (namespace.has_token or self.peer.may_access(table.readers, 4)):
                continue
            rows, sequences = table.find(names, door.store.now(table.namespace))
            here = np.flatnonzero(rows >= 0)
            if not len(here):
                continue
            loaded[here] |= table.rows["arena"][rows[here]] != 0
            wanted = here[~loaded[here]]
            if len(wanted):
                some = [names[number] for number in wanted.tolist()]
                loaded[wanted] = (
                    await door.store.fetch(table, some, rows[wanted], sequences[wanted], is_ahead=True) == 1
                )
        answers: list[bool] = loaded.tolist()
        return answers


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
