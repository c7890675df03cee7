"""Changes of names, each of them done once, though the kernel sends requests again that a killed daemon did not answer.

What such a request did, or was about to do, is in shared memory from before it can have happened (`DECIDED`): the inode
that it makes, links, removes or renames. The number of an inode is never given twice. So whether the change is there is
seen by the names themselves: under the name that it was to make is its inode, or under the one that it was to remove is
another inode, or none. If it is there, the answer is as it was; if not - it never came to that, or it was not stored
when the daemon was killed - it is made now.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from kvfuse import errors
from kvfuse.kept.keeper import Keeper
from kvfuse.kept.rows import Rows
from kvfuse.volume.api import Attributes, Caller, Handle, VolumeApi
from kvfuse.volume.views.handover import DECIDED

FORM = 1
ROW = struct.Struct("<QQQ")
"""inode, inode that is removed or 0, number of the request"""
_UNIQUE_AT = 16
COUNT_MAX = 4096
"""many more than requests that can be under way"""
ANSWERED = 1024
"""requests of which what was decided is kept after their answers, which may not have reached the kernel. Those of
daemons before this one count as answered"""

R = TypeVar("R")


class Decision(NamedTuple):
    """What a request of a daemon before this one was about to do."""

    ino: int
    other: int
    """what had the (new) name; 0: nothing"""


class Decisions:
    """The table of what requests are about to do."""

    def __init__(self, keeper: Keeper) -> None:
        self._rows = Rows(keeper, "fuse/answers", FORM, ROW.size, COUNT_MAX, _UNIQUE_AT)
        self.before: dict[int, Decision] = {}
        """number of a request of a daemon before this one -> what it was about to do"""
        self._answered: deque[int] = deque()
        found = [(*ROW.unpack_from(self._rows.memory, offset), offset) for offset in self._rows.list_used()]
        for ino, other, unique, offset in sorted(found, key=lambda row: row[2]):
            self.before[unique] = Decision(ino, other)
            self._answered.append(offset)

    def record_decision(self, unique: int, offset: int | None, ino: int, other: int) -> int | None:
        """The request is about to do this. ``offset``: of its row, if it has one. Returns it; None: no room."""
        if offset is None:
            offset = self._rows.take_row()
        if offset is not None:
            ROW.pack_into(self._rows.memory, offset, ino, other, unique)
        return offset

    def mark_answered(self, offset: int) -> None:
        """The request is about to be answered."""
        self._answered.append(offset)
        if len(self._answered) > ANSWERED:
            self._rows.free_row(self._answered.popleft())

    def drop_decision(self, offset: int) -> None:
        """The request did nothing."""
        self._rows.free_row(offset)

    def close(self) -> None:
        self._rows.close()


class IdempotentChanges:
    """Changes of a volume by the kernel's requests, as in `TreeApi`. ``number``: see `fusewire.request`.

    ``decisions``: None where nothing outlives this daemon. Each call asks for the number before it waits.
    """

    def __init__(self, volume: VolumeApi, decisions: Decisions | None, number: Callable[[], tuple[int, bool]]) -> None:
        self._volume = volume
        self._decisions = decisions
        self._number = number

    def _pop_former(self) -> tuple[int, Decision | None]:
        """(number of the present request, what it had decided in a daemon before this one)"""
        unique, is_resent = self._number()
        if not is_resent or self._decisions is None:
            return unique, None
        return unique, self._decisions.before.pop(unique, None)

    async def _run_change(self, unique: int, change: Awaitable[R]) -> R:
        """Await a change, and keep what it decides."""
        decisions = self._decisions
        if decisions is None:
            return await change
        offset: int | None = None

        def record(ino: int, other: int) -> None:
            nonlocal offset
            offset = decisions.record_decision(unique, offset, ino, other)

        token = DECIDED.set(record)
        try:
            result = await change
        except errors.OperationError as error:
            if offset is not None and not isinstance(error, errors.EngineError):
                decisions.drop_decision(offset)
                offset = None
            raise
        finally:
            DECIDED.reset(token)
            if offset is not None:
                decisions.mark_answered(offset)
        return result

    async def _look_up(self, parent: int, name: bytes) -> Attributes | None:
        """The inode of a name, counted as looked up."""
        try:
            return await self._volume.tree.lookup(parent, name)
        except errors.NotFound:
            return None

    async def _find_ino(self, parent: int, name: bytes) -> int:
        """The inode of a name; 0 for none."""
        meant = await self._look_up(parent, name)
        if meant is None:
            return 0
        self._volume.tree.forget(meant.ino, 1)
        return meant.ino

    async def _find_made(self, former: Decision | None, parent: int, name: bytes) -> Attributes | None:
        """What the request made in a daemon before this one, counted as looked up; None: that is not there."""
        if former is None:
            return None
        meant = await self._look_up(parent, name)
        if meant is not None and meant.ino != former.ino:
            self._volume.tree.forget(meant.ino, 1)
            return None
        return meant

    # -- names that are made -------------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, mode: int, caller: Caller, flags: int
    ) -> tuple[Handle, Attributes]:
        unique, former = self._pop_former()
        made = await self._find_made(former, parent, name)
        if made is not None:
            return await self._volume.files.open(made.ino, flags & ~os.O_TRUNC, caller), made
        return await self._run_change(unique, self._volume.tree.create(parent, name, mode, caller, flags))

    async def make_node(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attributes:
        return await self._make(parent, name, lambda: self._volume.tree.make_node(parent, name, mode, rdev, caller))

    async def make_directory(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attributes:
        return await self._make(parent, name, lambda: self._volume.tree.make_directory(parent, name, mode, caller))

    async def make_symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attributes:
        return await self._make(parent, name, lambda: self._volume.tree.make_symlink(parent, name, target, caller))

    async def link(self, ino: int, parent: int, name: bytes) -> Attributes:
        return await self._make(parent, name, lambda: self._volume.tree.link(ino, parent, name))

    async def _make(self, parent: int, name: bytes, make: Callable[[], Awaitable[Attributes]]) -> Attributes:
        unique, former = self._pop_former()
        made = await self._find_made(former, parent, name)
        return made if made is not None else await self._run_change(unique, make())

    # -- names that go -------------------------------------------------------------------------------

    async def unlink(self, parent: int, name: bytes) -> None:
        unique, former = self._pop_former()
        if former is None or await self._find_ino(parent, name) == former.ino:
            await self._run_change(unique, self._volume.tree.unlink(parent, name))

    async def remove_directory(self, parent: int, name: bytes) -> None:
        unique, former = self._pop_former()
        if former is None or await self._find_ino(parent, name) == former.ino:
            await self._run_change(unique, self._volume.tree.remove_directory(parent, name))

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        """Both names may be of one inode: that is no change, and may be made twice."""
        unique, former = self._pop_former()
        if former is None or await self._find_ino(parent, name) == former.ino:
            await self._run_change(unique, self._volume.tree.rename(parent, name, new_parent, new_name, flags))

    # -- others --------------------------------------------------------------------------------------

    async def remove_xattr(self, ino: int, name: bytes, caller: Caller) -> None:
        unique, former = self._pop_former()
        try:
            await self._run_change(unique, self._remove_xattr(ino, name, caller))
        except errors.NoAttribute:
            if former is None:
                raise

    async def _remove_xattr(self, ino: int, name: bytes, caller: Caller) -> None:
        if (decided := DECIDED.get()) is not None:
            await self._volume.inodes.get_xattr(ino, name)
            decided(ino, 0)
        await self._volume.inodes.remove_xattr(ino, name, caller)

    async def is_written(self, handle: Handle, offset: int, data: bytes) -> bool:
        """The bytes, which were to go to the end of the file, went there in a daemon before this one."""
        if handle.size < offset + len(data):
            return False
        return bytes(await self._volume.files.read(handle, offset, len(data))) == data
