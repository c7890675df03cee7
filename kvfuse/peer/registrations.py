"""Registrations of memory that lives for long (arenas of the tier), made piece by piece when they are first needed."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.peer.verbs import PIECE, MemoryPart, RdmaDevice, Registration, VerbsError

Bytes = npt.NDArray[np.uint8]


class Registrations:
    """Of one device, up to ``bytes_max``: beyond that, pieces that were not used for longest are ended.

    A memory is an array, and views of it are not the same memory. It is cut into pieces of `verbs.PIECE` bytes, as
    registering takes all memory of a range, also what was never touched. It is kept here only as long as somebody else
    keeps it: then `run` ends its registrations. Until then its pages stay, so nobody ever reads pages of something
    else. For the event loop; memory may be dropped in any thread.
    """

    def __init__(self, device: RdmaDevice, bytes_max: int, *, remote: bool) -> None:
        self.bytes = 0
        self._device, self._bytes_max, self._remote = device, bytes_max, remote
        self._known: dict[int, dict[int, Registration]] = {}
        """identity of a memory -> its pieces, by their numbers"""
        self._used: OrderedDict[tuple[int, int], None] = OrderedDict()
        """(identity, number) of all pieces, those used last at the end"""
        self._gone: deque[int] = deque()
        """identities of memory that was dropped; they may be another's by now"""
        self._registering = trio.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._wake = trio.Event()

    def parts(self, memory: Bytes, start: int, size: int) -> list[MemoryPart] | None:
        """A range of a memory, cut where pieces end; None where not all of it is registered. ``size`` > 0."""
        pieces = self._known.get(id(memory))
        # Memory that was dropped and not noticed yet may have had the same identity.
        if pieces is None or id(memory) in self._gone:
            return None
        found = []
        for number in _numbers(start, size):
            if (piece := pieces.get(number)) is None:
                return None
            low, high = max(start, number * PIECE), min(start + size, (number + 1) * PIECE)
            found.append(MemoryPart(piece.address + low - number * PIECE, high - low, piece.lkey, piece.rkey))
            self._used.move_to_end((id(memory), number))
        return found

    async def cover(self, memory: Bytes, start: int, size: int) -> None:
        """Register what of a range is not yet. VerbsError, with some pieces registered, perhaps."""
        async with self._registering:
            await self._end_gone()
            for number in _numbers(start, size):
                if number not in self._known.get(id(memory), ()):
                    await self._register(memory, number)

    async def _register(self, memory: Bytes, number: int) -> None:
        size = min(PIECE, memory.nbytes - number * PIECE)
        if size > self._bytes_max:
            raise VerbsError(f"memory of {size} bytes is more than may be registered")
        while self.bytes + size > self._bytes_max:
            await self._end(next(iter(self._used)))
        # Without the memory as its owner: it would live as long as the registration.
        address = memory.ctypes.data + number * PIECE
        piece = await self._device.register(address, size, None, remote=self._remote)
        if id(memory) not in self._known:
            self._known[id(memory)] = {}
            weakref.finalize(memory, self._dropped, id(memory)).atexit = False
        self._known[id(memory)][number] = piece
        self._used[id(memory), number] = None
        self.bytes += size

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
                async with self._registering:
                    await self.end_all()

    async def end_all(self) -> None:
        """Take back all access that was given."""
        for key in list(self._used):
            await self._end(key)

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
            identity = self._gone[0]
            for number in list(self._known.get(identity, ())):
                await self._end((identity, number))
            self._gone.popleft()

    async def _end(self, key: tuple[int, int]) -> None:
        """Nobody finds it from now on; then it is ended."""
        identity, number = key
        del self._used[key]
        pieces = self._known[identity]
        piece = pieces.pop(number)
        if not pieces:
            del self._known[identity]
        self.bytes -= piece.size
        await piece.aclose()


def _numbers(start: int, size: int) -> range:
    """Of the pieces of a range."""
    return range(start // PIECE, (start + size - 1) // PIECE + 1)
