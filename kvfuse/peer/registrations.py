"""Registrations of memory that lives for long (arenas of the tier, iovs, staging), made when they are first needed."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.peer.verbs import Device, Registration, VerbsError

Bytes = npt.NDArray[np.uint8]


class Registrations:
    """Of one device, up to ``bytes_max``: beyond that, those that were not used for longest are ended.

    A memory is an array, and views of it are not the same memory. It is kept here only as long as somebody else keeps
    it: then `run` ends its registration. Until then its pages stay, so nobody ever reads pages of something else. For
    the event loop; memory may be dropped in any thread.
    """

    def __init__(self, device: Device, bytes_max: int, *, remote: bool) -> None:
        self.bytes = 0
        self._device, self._bytes_max, self._remote = device, bytes_max, remote
        self._known: OrderedDict[int, Registration] = OrderedDict()
        """by identity of the memory, those used last at the end"""
        self._gone: deque[int] = deque()
        """identities of memory that was dropped; they may be another's by now"""
        self._registering = trio.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._wake = trio.Event()

    def get(self, memory: Bytes) -> Registration | None:
        """The registration of a memory, if there is one."""
        registration = self._known.get(id(memory))
        # Memory that was dropped and not noticed yet may have had the same identity.
        if registration is None or id(memory) in self._gone:
            return None
        self._known.move_to_end(id(memory))
        return registration

    async def of(self, memory: Bytes) -> Registration:
        """The registration of a memory; made, if there is none. VerbsError."""
        async with self._registering:
            if found := self.get(memory):
                return found
            await self._end_gone()
            if memory.nbytes > self._bytes_max:
                raise VerbsError(f"memory of {memory.nbytes} bytes is more than may be registered")
            while self.bytes + memory.nbytes > self._bytes_max:
                await self._end(next(iter(self._known)))
            # Without the memory as its owner: it would live as long as the registration.
            registration = await self._device.register(memory.ctypes.data, memory.nbytes, None, remote=self._remote)
            self._known[id(memory)] = registration
            self.bytes += memory.nbytes
            weakref.finalize(memory, self._dropped, id(memory)).atexit = False
            return registration

    async def run(self) -> None:
        """End registrations of memory that was dropped. Until cancelled; then all are ended."""
        self._token = trio.lowlevel.current_trio_token()
        try:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                async with self._registering:
                    await self._end_gone()
        finally:
            self._token = None
            with trio.CancelScope(shield=True):
                for identity in list(self._known):
                    await self._end(identity)

    def _dropped(self, identity: int) -> None:
        """In whichever thread dropped the memory, and before its address can be another's."""
        self._gone.append(identity)
        if (token := self._token) is not None:
            try:
                token.run_sync_soon(self._wake_up, idempotent=True)
            except trio.RunFinishedError:
                pass

    def _wake_up(self) -> None:
        self._wake.set()

    async def _end_gone(self) -> None:
        while self._gone:
            await self._end(self._gone[0])
            self._gone.popleft()

    async def _end(self, identity: int) -> None:
        """Nobody finds it from now on; then it is ended."""
        registration = self._known.pop(identity, None)
        if registration is not None:
            self.bytes -= registration.size
            await registration.aclose()
