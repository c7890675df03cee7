"""Makes resent FUSE requests idempotent: a change of names that a killed daemon may have executed is executed once.

The kernel resends requests that a killed daemon did not answer. Before a change can happen, the daemon stores its
decision in shared memory (`DECIDED`): the inode that the request makes, links, removes or renames. An inode number is
never given twice. So the names themselves show whether the change was executed: the name to make has its inode, or the
name to remove has another inode, or none. If the change was executed, the answer is as it was; if not - it was never
reached, or not stored when the daemon was killed - it is executed now.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from mmap import mmap
from typing import NamedTuple, TypeVar

from kvfuse import errors
from kvfuse.kept.keeper import Keeper
from kvfuse.kept.rows import COUNT_MIN, Rows
from kvfuse.volume.api import Attributes, Caller, Handle, VolumeApi
from kvfuse.volume.views.handover import DECIDED

FORM = 1
ROW = struct.Struct("<QQQ")
"""inode, removed inode or 0, number of the request"""
_UNIQUE_AT = 16
COUNT_MAX = 4096
"""many more than requests that can be in flight"""
ANSWERED = 1024
"""decisions that are kept after their requests' answers, which may not have reached the kernel. Decisions of former
daemons count as answered"""

R = TypeVar("R")


class Decision(NamedTuple):
    """What a request of a former daemon was about to do."""

    ino: int
    other: int
    """inode that had the (new) name; 0: none"""


class Decisions:
    """The table of decisions, in shared memory."""

    def __init__(self, keeper: Keeper) -> None:
        self._rows = Rows(keeper, "fuse/answers", FORM, ROW.size, COUNT_MAX, _UNIQUE_AT)
        self.before: dict[int, Decision] = {}
        """number of a former daemon's request -> its decision"""
        self._answered: deque[int] = deque()
        self._rows_in_c = Rows(keeper, "fuse/answers-in-c", FORM, ROW.size, COUNT_MIN, _UNIQUE_AT)
        memory = self._rows_in_c.memory
        for offset in self._rows_in_c.list_used():
            ino, other, unique = ROW.unpack_from(memory, offset)
            self.before[unique] = Decision(ino, other)
        found = [(*ROW.unpack_from(self._rows.memory, offset), offset) for offset in self._rows.list_used()]
        for ino, other, unique, offset in sorted(found, key=lambda row: row[2]):
            self.before[unique] = Decision(ino, other)
            self._answered.append(offset)

    def record_decision(self, unique: int, offset: int | None, ino: int, other: int) -> int | None:
        """Store what a request is about to do, at ``offset`` or in a new row. Returns the offset; None: no room."""
        if offset is None:
            offset = self._rows.take_row()
        if offset is not None:
            ROW.pack_into(self._rows.memory, offset, ino, other, unique)
        return offset

    def mark_answered(self, offset: int) -> None:
        """Keep the decision of a request that is about to be answered, and free the oldest beyond `ANSWERED`."""
        self._answered.append(offset)
        if len(self._answered) > ANSWERED:
            self._rows.free_row(self._answered.popleft())

    def drop_decision(self, offset: int) -> None:
        """Free the row of a request that changed nothing."""
        self._rows.free_row(offset)

    @property
    def in_c(self) -> mmap:
        """Rows that C fills, the oldest ones again; see ``native/blockdrafts.h``."""
        return self._rows_in_c.memory

    def close(self) -> None:
        self._rows.close()
        self._rows_in_c.close()


class IdempotentChanges:
    """Idempotent changes of names, as in `TreeApi`. ``number``: see `fusewire.request`.

    ``decisions``: None where nothing outlives this daemon. Each method reads the number before it awaits.
    """

    def __init__(self, volume: VolumeApi, decisions: Decisions | None, number: Callable[[], tuple[int, bool]]) -> None:
        self._volume = volume
        self._decisions = decisions
        self._number = number

    def _pop_former(self) -> tuple[int, Decision | None]:
        """(number of the present request, its decision in a former daemon)"""
        unique, is_resent = self._number()
        if not is_resent or self._decisions is None:
            return unique, None
        return unique, self._decisions.before.pop(unique, None)

    async def _run_change(self, unique: int, change: Awaitable[R]) -> R:
        """Await a change, and store its decision."""
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
        """Look a name up; the lookup counts. None: no such name."""
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

    async def _find_made(self, former: Decision, parent: int, name: bytes) -> Attributes | None:
        """Look up what the request made in a former daemon; the lookup counts. None: that is missing."""
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
        made = await self._find_made(former, parent, name) if former is not None else None
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
        made = await self._find_made(former, parent, name) if former is not None else None
        return made if made is not None else await self._run_change(unique, make())

    # -- names that are removed or moved -------------------------------------------------------------

    async def unlink(self, parent: int, name: bytes) -> None:
        unique, former = self._pop_former()
        if former is None or await self._find_ino(parent, name) == former.ino:
            await self._run_change(unique, self._volume.tree.unlink(parent, name))

    async def remove_directory(self, parent: int, name: bytes) -> None:
        unique, former = self._pop_former()
        if former is None or await self._find_ino(parent, name) == former.ino:
            await self._run_change(unique, self._volume.tree.remove_directory(parent, name))

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        """Two names of one inode: their rename changes nothing, and may be executed twice."""
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
        """The former daemon has appended these bytes."""
        if handle.size < offset + len(data):
            return False
        return bytes(await self._volume.files.read(handle, offset, len(data))) == data
