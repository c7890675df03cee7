"""Executes calls for blocks by key, in the event loop: permissions, bindings, names that the kernel must drop."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from kvfuse import errors
from kvfuse.access.namespace_access import NamespaceAccess, make_blind_names
from kvfuse.access.namespace_handle import NamespaceHandle
from kvfuse.usrbio.daemon.call import Call, Done
from kvfuse.usrbio.daemon.device_calls import DeviceCalls
from kvfuse.usrbio.daemon.row_calls import RowCalls
from kvfuse.usrbio.protocol.costs import encode_costs
from kvfuse.usrbio.protocol.wire import Flag
from kvfuse.volume.api import Binding, RingApi

EXISTS_KEYS = 2048
"""keys of one call that are looked up before other tasks may run"""


@dataclass
class BlockCalls:
    """The block calls of one connection. An error that one raises becomes its result.

    ``finish``: completes a call that changed something. ``read_here``: reads a file in the event loop, for a call.
    """

    volume: RingApi
    admission: NamespaceAccess
    finish: Callable[[Done], None]
    read_here: Callable[[Call, Any, int, int], Awaitable[None]]
    devices: DeviceCalls

    def __post_init__(self) -> None:
        self.peer = self.admission.peer
        self.rows = RowCalls(self.volume, self.peer, self.devices)

    async def get(self, call: Call) -> None:
        began = time.perf_counter()
        for is_last in (False, True):
            namespace = await self._check(call, 1)
            try:
                if namespace.blocks is not None and await self.rows.get(call, namespace, namespace.blocks):
                    namespace.measures.seconds["get"].add(time.perf_counter() - began)
                    return
                if await self._get_bound(call, namespace, is_last):
                    namespace.measures.seconds["get"].add(time.perf_counter() - began)
                    return
            except errors.Stale as error:  # another host took the name from the file after it was looked up
                if is_last:
                    raise errors.NotFound(str(error)) from error

    async def _get_bound(self, call: Call, namespace: NamespaceHandle, is_last: bool) -> bool:
        """Answer with the present block of the name. False, unless ``is_last``: the name changed meanwhile."""
        binding = await self._bind(call, namespace)
        if binding.valid and binding.map.size > call.entry.length and not call.entry.flags:  # the GET asks for the size
            call.ring.completions.complete(call, -errno.EMSGSIZE, binding.map.size)
            return True
        await self.volume.near.from_neighbours(binding)
        handle = await self.volume.files.open(binding.ino, os.O_RDONLY, self.peer.make_caller())
        try:
            size = binding.map.size
            if namespace.measures.limiters:
                await namespace.measures.throttle(_size_to_move(call, binding))
            if await self._answer_by_map(call, handle, binding):
                return True
            if not (binding.valid or is_last):
                return False
            size = handle.size
            if size > call.entry.length:
                call.ring.completions.complete(call, -errno.EMSGSIZE, size)
            elif not size:
                call.ring.completions.complete(call, 0)
            elif not (await self.volume.near.if_wanted(binding) and await self._answer_by_map(call, handle, binding)):
                await self.read_here(call, handle, 0, size)
            return True
        finally:
            with trio.CancelScope(shield=True):
                await self.volume.files.release(handle)

    async def _answer_by_map(self, call: Call, handle: Any, binding: Binding) -> bool:
        """Have the map show where the bytes are, and the ring's thread answer from it. False: it cannot."""
        size = binding.map.size
        if size > 0:
            await self.volume.files.show(handle, 0, (size - 1) // binding.map.chunk_size)
        return await call.try_again() or await self.devices.answer_found(call)

    async def _bind(self, call: Call, namespace: NamespaceHandle) -> Binding:
        """The binding of a call's name, if this peer may read it now. NotFound, PermissionDenied."""
        name = call.names[0]
        binding = await self.volume.blocks.bind(namespace.ino, name)
        if binding is None or await self._is_absent_now(call, namespace):
            raise errors.NotFound(os.fsdecode(name))
        if not (namespace.has_token or self.peer.may_access(binding, 4)):
            raise errors.PermissionDenied(f"the client's user may not read {os.fsdecode(name)}")
        namespace.remember(name, binding)
        return binding

    async def put(self, call: Call) -> None:
        entry, name = call.entry, call.names[0]
        namespace = await self._check(call, 3)
        if namespace.is_absent:
            raise errors.Stale("the directory was removed")
        if namespace.measures.limiters:
            await namespace.measures.throttle(entry.length)
        if call.data is None:
            await call.try_again()
            if call.data is None:
                return
        if namespace.blocks is not None and await self.rows.put(call, namespace, namespace.blocks):
            old = 0
            if namespace.blocks.has_files:
                (old,) = await self.volume.blocks.delete(namespace.ino, call.names)
            self.finish(Done(call, entry.length, directory=namespace.ino, names=[(name, old)]))
            return
        old = await self.volume.blocks.put(namespace.ino, name, call.data, self.peer.make_caller(), namespace.mode)
        self.finish(Done(call, entry.length, directory=namespace.ino, names=[(name, old)]))

    async def exists(self, call: Call) -> None:
        namespace = await self._check(call, 1)
        names, answers = list(call.names), bytearray()
        for start in range(0, len(names), EXISTS_KEYS):
            if start:
                await trio.lowlevel.checkpoint()
            answers += await self._look_up(namespace, names[start : start + EXISTS_KEYS], call.entry.flags)
        if await self._is_absent_now(call, namespace):
            answers = bytearray(len(names))
        if call.entry.flags & Flag.PREFIX and (first := answers.find(0)) >= 0:
            answers[first:] = bytes(len(answers) - first)
        call.ring.completions.answer_keys(call, answers)

    async def _look_up(self, namespace: NamespaceHandle, names: list[bytes], flags: int) -> bytes:
        """One byte for each name, 0 for those that do not exist."""
        if (door := namespace.blocks) is not None:
            look_up = self.rows.costs if flags & Flag.COSTS else self.rows.exists
            found = await look_up(namespace, door, names)
            if all(found) or not door.has_files:
                return bytes(found)
            files = await self._look_up_files(namespace, names, flags)
            return bytes([one or other for one, other in zip(found, files, strict=True)])
        return await self._look_up_files(namespace, names, flags)

    async def _look_up_files(self, namespace: NamespaceHandle, names: list[bytes], flags: int) -> bytes:
        if flags & Flag.COSTS:
            return encode_costs(*await self.volume.blocks.costs(namespace.ino, names))
        return bytes(await self.volume.blocks.exists(namespace.ino, names))

    async def delete(self, call: Call) -> None:
        namespace = await self._check(call, 3)
        completions = call.ring.completions
        former = completions.begin_answers(call)
        if namespace.blocks is not None:
            door = namespace.blocks
            for number, is_there in enumerate(await self.rows.are_there(door, call.names)):
                if is_there:  # the next daemon answers so, should this one end before it does
                    completions.note_found(call, number)
            gone_rows = await door.store.remove(namespace.ino, call.names, is_strict=door.terms.is_strict)
            if not door.has_files:
                found = [one or was != 0 for one, was in zip(gone_rows, former, strict=True)]
                self.finish(Done(call, 0, directory=namespace.ino, found=found))
                return
            former = bytes([one or was != 0 for one, was in zip(gone_rows, former, strict=True)])
        with trio.CancelScope(shield=True):  # else nobody would know which names the kernel has to drop
            inodes = await self.volume.blocks.delete(namespace.ino, call.names, partial(completions.note_found, call))
        gone = [row for row in zip(call.names, inodes, strict=True) if row[1]]
        found = [ino != 0 or was_found != 0 for ino, was_found in zip(inodes, former, strict=True)]
        self.finish(Done(call, 0, directory=namespace.ino, names=gone, found=found))

    async def prefetch(self, call: Call) -> None:
        namespace = await self._check(call, 1)
        if namespace.blocks is not None:
            call.ring.completions.answer_keys(call, await self.rows.prefetch(namespace.blocks, namespace, call.names))
            return
        may_read = partial(self.admission.may_access, namespace, wanted=4)
        bring = self.volume.near.all_of if call.entry.flags & Flag.NEAR else self.volume.blocks.prefetch
        loaded = await bring(namespace.ino, call.names, may_read)
        if await self._is_absent_now(call, namespace):
            loaded = [False] * len(loaded)
        call.ring.completions.answer_keys(call, loaded)

    async def _is_absent_now(self, call: Call, namespace: NamespaceHandle) -> bool:
        """Whether the peer lost its right to the namespace during a lookup. PermissionDenied."""
        if not namespace.is_checked:
            await self._check(call, 1)
        return namespace.is_absent

    async def _check(self, call: Call, wanted: int) -> NamespaceHandle:
        """The call's namespace, if the peer may use its directory so: 1 search, 2 write. PermissionDenied, ReadOnly.

        Where it is absent for the peer, the names of the call are blinded.
        """
        namespace = call.namespace
        assert namespace is not None
        if not await self.rows.check(self.admission, namespace, wanted, call.names):
            call.names = make_blind_names(len(call.names))
        return namespace


def _size_to_move(call: Call, binding: Binding) -> int:
    """Bytes that a GET moves, as far as known; 0 where it only reports the block's size."""
    size, row = max(0, binding.map.size), binding.map.rows.get(0)
    is_viewed = bool(call.entry.flags) and row is not None and row.block is not None
    return size if is_viewed or size <= call.entry.length else 0
