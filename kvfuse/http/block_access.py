"""Gets, puts, finds and removes blocks of a folder for one caller; blocks that are rows, and blocks that are files."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import trio

from kvfuse import errors
from kvfuse.access.namespace_access import NamespaceAccess
from kvfuse.access.namespace_handle import BlockDoor, NamespaceHandle
from kvfuse.access.row_access import RowAccess
from kvfuse.errnos import errno_of
from kvfuse.http.kernel_drops import KernelDrops
from kvfuse.http.web_message import Lent
from kvfuse.native import blockforms as forms
from kvfuse.volume.api import Binding, RingApi, RowTable

ATTEMPTS = 3
IN_LOOP_MAX = 2 << 20
"""bytes from which on a copy is a thread's"""
LENT_MAX = 4 << 20
"""bytes of a block that is sent from where it lies"""
Numbers = npt.NDArray[np.int64]


class _Wanted:
    """The blocks of one get: their names and sizes, where each is copied to, and its status by now."""

    def __init__(self, names: Sequence[bytes], sizes: Numbers, target: npt.NDArray[np.uint8]) -> None:
        self.names = names
        self.sizes = sizes
        self.statuses = np.full(len(names), errno.ENOENT, np.int64)
        self._starts = np.cumsum(sizes) - sizes
        self._target = target

    @property
    def missing(self) -> Numbers:
        """Numbers of those that were not copied."""
        return np.flatnonzero(self.statuses == errno.ENOENT)

    def names_of(self, numbers: Numbers) -> list[bytes]:
        return [self.names[number] for number in numbers.tolist()]

    def place(self, number: int) -> npt.NDArray[np.uint8]:
        start = int(self._starts[number])
        return self._target[start : start + int(self.sizes[number])]

    async def copy(self, door: BlockDoor, table: RowTable, numbers: Numbers) -> Numbers:
        """Copy blocks of a table that are in memory: lengths, or codes of `forms`."""
        addresses = (self._target.ctypes.data + self._starts[numbers]).astype(np.uint64)
        columns, sizes = forms.name_columns(self.names_of(numbers)), self.sizes[numbers]
        copy = partial(door.store.get_columns, table, columns, addresses, sizes)
        found = copy() if sizes.sum() < IN_LOOP_MAX else await trio.to_thread.run_sync(copy)
        self.statuses[numbers[found == self.sizes[numbers]]] = 0
        return found

    def take(self, number: int, data: bytearray | None) -> None:
        """A block was read."""
        if data is not None and len(data) == self.sizes[number]:
            self.place(number)[:] = np.frombuffer(data, np.uint8)
            self.statuses[number] = 0


@dataclass
class BlockAccess:
    """The blocks of one folder, for one caller who was let in. Names are those of the blocks' files.

    ``check`` comes before each of the others, with no wait in between that lasts.
    """

    volume: RingApi
    admission: NamespaceAccess
    namespace: NamespaceHandle
    drops: KernelDrops

    def __post_init__(self) -> None:
        self.rows = RowAccess(self.volume, self.admission.peer)

    async def check(self, wanted: int, names: Sequence[bytes] = ()) -> None:
        """The caller may use the folder so: 1 search, 2 write. PermissionDenied, ReadOnly, Stale."""
        if not await self.rows.check(self.admission, self.namespace, wanted, names):
            raise errors.Stale("the folder was removed, or its namespace wants a token")

    async def exists(self, names: Sequence[bytes]) -> bytes:
        """A byte for each name, 0: absent, or sooner computed than read."""
        door = self.namespace.blocks
        found = await self.rows.exists(self.namespace, door, names) if door is not None else bytes(len(names))
        if (door is None or door.has_files) and not all(found):
            files = await self.volume.blocks.exists(self.namespace.ino, list(names))
            return bytes([bool(one or other) for one, other in zip(found, files, strict=True)])
        return found

    # -- get -----------------------------------------------------------------------------------------

    def try_hold(self, name: bytes) -> Lent | None:
        """One block that is a row and in memory, not too large. None: `look` and `get` tell more."""
        began, door = time.perf_counter(), self.namespace.blocks
        if door is None or not door.sees_all or self.namespace.measures.limiters:
            return None
        held = door.store.hold(door.directory, name)
        if held is None or not 0 < held.size <= LENT_MAX:
            return None
        data = held.home.memory.bytes[held.offset : held.offset + held.size].data
        self.namespace.measures.seconds["get"].add(time.perf_counter() - began)
        self.namespace.measures.read_bytes += held.size
        return Lent(data, held)

    async def look(self, names: Sequence[bytes]) -> tuple[Numbers, Numbers]:
        """(status, bytes) of each block: 0, or an errno."""
        statuses, sizes = np.full(len(names), errno.ENOENT, np.int64), np.zeros(len(names), np.int64)
        door = self.namespace.blocks
        if door is not None:
            await self.rows.renew(door, names)
            await door.store.warm(door.directory, names)
            for table in door.store.tables_of(door.directory):
                rows, _ = table.find(names, door.store.now(table.namespace))
                here = np.flatnonzero(rows >= 0)
                may_read = self.admission.may_access(self.namespace, table.readers, 4)
                statuses[here] = 0 if may_read else errno.EACCES
                sizes[here] = table.rows["length"][rows[here]] if may_read else 0
        if door is None or door.has_files:
            for number in np.flatnonzero(statuses == errno.ENOENT).tolist():
                statuses[number], sizes[number] = await self._look_at_file(names[number])
        return statuses, sizes

    async def _look_at_file(self, name: bytes) -> tuple[int, int]:
        binding = await self.volume.blocks.bind(self.namespace.ino, name)
        if binding is None:
            return errno.ENOENT, 0
        if not self.admission.may_access(self.namespace, binding, 4):
            return errno.EACCES, 0
        return 0, max(0, binding.map.size)

    async def get(self, names: Sequence[bytes], sizes: Numbers, target: npt.NDArray[np.uint8]) -> Numbers:
        """Copy blocks into ``target``, one behind the other, as `look` said their sizes. Statuses of each.

        A block that is not there any more, or has another size, is absent.
        """
        began, door = time.perf_counter(), self.namespace.blocks
        wanted = _Wanted(names, sizes, target)
        statuses = wanted.statuses
        if self.namespace.measures.limiters:
            await self.namespace.measures.throttle(int(sizes.sum()))
        for _ in range(ATTEMPTS if door is not None else 0):
            if door is not None and len(wanted.missing):
                await self._get_rows(door, wanted)
        if door is None or door.has_files:
            for number in wanted.missing.tolist():
                statuses[number] = await self._get_file(names[number], wanted.place(number))
        self.namespace.measures.seconds["get"].add(time.perf_counter() - began)
        self.namespace.measures.read_bytes += int(sizes[statuses == 0].sum())
        return statuses

    async def _get_rows(self, door: BlockDoor, wanted: _Wanted) -> None:
        """Copy blocks that are in memory; fetch others into memory, or read them here."""
        for table in door.store.tables_of(door.directory):
            if not len(wanted.missing):
                return
            if not self.admission.may_access(self.namespace, table.readers, 4):
                continue
            missing = wanted.missing
            rows, sequences = table.find(wanted.names_of(missing), door.store.now(table.namespace))
            is_here = rows >= 0
            here, rows, sequences = missing[is_here], rows[is_here], sequences[is_here]
            is_same = table.rows["length"][rows] == wanted.sizes[here]
            here, rows, sequences = here[is_same], rows[is_same], sequences[is_same]
            if not len(here):
                continue
            away = np.flatnonzero(await wanted.copy(door, table, here) == forms.NOT_RESIDENT)
            if len(away):
                some = wanted.names_of(here[away])
                await door.store.fetch(table, some, rows[away], sequences[away])
                await wanted.copy(door, table, here[away])
                for number in here[away].tolist():
                    if wanted.statuses[number]:
                        wanted.take(number, await door.store.read(table, wanted.names[number]))

    async def _get_file(self, name: bytes, target: npt.NDArray[np.uint8]) -> int:
        """Read a block that is a file. Its status."""
        binding = await self.volume.blocks.bind(self.namespace.ino, name)
        if binding is None:
            return errno.ENOENT
        if not self.admission.may_access(self.namespace, binding, 4):
            return errno.EACCES
        await self.volume.near.from_neighbours(binding)
        handle = await self.volume.files.open(binding.ino, os.O_RDONLY, self.admission.peer.make_caller())
        try:
            if handle.size != len(target):
                return errno.ENOENT
            count = await self.volume.files.read_into(handle, 0, target.data)
            return 0 if count == len(target) else errno.ENOENT
        finally:
            with trio.CancelScope(shield=True):
                await self.volume.files.release(handle)

    # -- changes -------------------------------------------------------------------------------------

    async def put(self, names: Sequence[bytes], blocks: Sequence[memoryview], ttl: int, priority: int) -> Numbers:
        """Store blocks. Statuses of each."""
        began, size = time.perf_counter(), sum(map(len, blocks))
        if self.namespace.measures.limiters:
            await self.namespace.measures.throttle(size)
        statuses = np.zeros(len(names), np.int64)
        door = self.namespace.blocks
        if door is None or door.own is None or not await self._put_rows(door, names, blocks, ttl, priority):
            for number, (name, block) in enumerate(zip(names, blocks, strict=True)):
                try:
                    await self._put_one(name, block, ttl, priority)
                except errors.OperationError as error:
                    statuses[number] = errno_of(error) or errno.EIO
                    self.namespace.measures.failed(error, is_read=False)
        self.namespace.measures.seconds["put"].add(time.perf_counter() - began)
        await self.drops.drop([(self.namespace.ino, name) for name in names])
        return statuses

    async def _put_rows(
        self, door: BlockDoor, names: Sequence[bytes], blocks: Sequence[memoryview], ttl: int, priority: int
    ) -> bool:
        """Store all of them as rows, if that can be done at once. False: one by one."""
        if door.has_files or door.store.directories.get(door.directory) or door.own is None:
            return False
        try:
            await door.store.put(door.own, names, blocks, door.terms_of(ttl, priority))
        except errors.OperationError:
            return False
        self.namespace.measures.written_bytes += sum(map(len, blocks))
        return True

    async def _put_one(self, name: bytes, block: memoryview, ttl: int, priority: int) -> None:
        door = self.namespace.blocks
        if door is not None:
            await self.rows.refuse_directory(self.namespace, door, name)
            if door.own is not None:
                try:
                    await door.store.put(door.own, [name], [block], door.terms_of(ttl, priority))
                except errors.FileTooLarge:
                    door.store.drop(self.namespace.ino, [name])
                else:
                    self.namespace.measures.written_bytes += len(block)
                    if door.has_files:
                        await self.volume.blocks.delete(self.namespace.ino, [name])
                    return
            else:
                await door.store.remove(self.namespace.ino, [name])
        caller = self.admission.peer.make_caller()
        await self.volume.blocks.put(self.namespace.ino, name, block, caller, stat.S_IMODE(self.namespace.mode))

    async def delete(self, names: Sequence[bytes]) -> Numbers:
        """Remove blocks. Statuses of each."""
        door, is_gone = self.namespace.blocks, np.zeros(len(names), np.bool_)
        if door is not None:
            is_gone |= await self.rows.are_there(door, names)
            await door.store.remove(self.namespace.ino, names, is_strict=door.terms.is_strict)
        if door is None or door.has_files:
            with trio.CancelScope(shield=True):  # else nobody would know which names the kernel has to drop
                is_gone |= np.array(await self.volume.blocks.delete(self.namespace.ino, names), np.int64) != 0
        await self.drops.drop([(self.namespace.ino, name) for name in names])
        return np.where(is_gone, 0, errno.ENOENT)

    async def prefetch(self, names: Sequence[bytes]) -> Numbers:
        """Bring blocks into memory. Status 0 of those that are there then."""
        if self.namespace.blocks is not None:
            loaded = await self.rows.prefetch(self.namespace.blocks, self.namespace, names)
        else:

            def may_read(binding: Binding) -> bool:
                return self.admission.may_access(self.namespace, binding, 4)

            loaded = await self.volume.blocks.prefetch(self.namespace.ino, names, may_read)
        return np.where(loaded, 0, errno.ENOENT)
