"""Numbers the open files of a mount for the kernel (fh), and keeps a row of each, by which the next daemon restores it.

With a keeper each handle has a row in shared memory, from before the kernel learns its fh until its release. The fh is
the row's place and a serial number. A daemon that finds rows restores a handle when the kernel first uses its fh: that
may have to read the inode. Without a keeper there are no rows.

A row has room for two names of the file, as a crash before a rename is stored leaves it under the former one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection
from mmap import mmap
from typing import NamedTuple

import trio

from kvfuse.errors import BadHandle, EngineError, OperationError, Stale
from kvfuse.kept.keeper import Keeper
from kvfuse.kept.rows import COUNT_MIN, Rows
from kvfuse.native import fusewire
from kvfuse.volume.api import NAME_MAX, Caller, Handle, VolumeApi
from kvfuse.volume.blocks.kernel_answers import ACCESS_SHIFT

FORM = 1
"""number of the rows' format"""
ROW = struct.Struct("<QQIIIiIHHQQQ")
"""inode, request, flags (O_*), uid, gid, pid, marks; of two names: lengths, then folders; serial number"""
_REQUEST = struct.Struct("<Q")
_REQUEST_AT = 8
_MARKS = struct.Struct("<I")
_MARKS_AT = struct.calcsize("<QQIIIi")
_LENGTH = struct.Struct("<H")
_LENGTHS_AT = _MARKS_AT + _MARKS.size
_PARENT = struct.Struct("<Q")
_PARENTS_AT = _LENGTHS_AT + 2 * _LENGTH.size
_SERIAL_AT = _PARENTS_AT + 2 * _PARENT.size
_NAMES_AT = ROW.size
_NAME_ROOM = NAME_MAX + 1
ROW_SIZE = _NAMES_AT + 2 * _NAME_ROOM
ROW_IN_C_SIZE = 24
assert _NAMES_AT == _SERIAL_AT + 8 == 64

PLACE_BITS = 24
SERIAL_MAX = (1 << 60 - PLACE_BITS) - 1
"""an fh has 60 bits, and the mark; see `virtual` and `fusewire`"""
GIVEN_IN_C = 1 << 60
"""mark of an fh that C gave to a block which is read. Its row is C's: see ``native/blockdoor.h``"""
FH_BITS = GIVEN_IN_C * 2 - 1
MADE_IN_C = 1 << 59
"""likewise, to a file that it made (``native/blockdrafts.h``); the access mode is at `ACCESS_SHIFT`. It gets a row once
Python goes on with the file; the row's serial number is the whole fh"""
NOBODY = Caller(0, 0)
NO_PLACE = (1 << PLACE_BITS) - 1
"""place of a handle without a row: it does not outlive this daemon"""
KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_DIRECT | os.O_NOATIME
LOST = 1
"""mark: bytes written by this handle, or another of the same file, are lost, and no fsync has reported it yet"""
SECOND = 2
"""mark: the second name is the newer one"""
SAID_ONCE, SAID_TWICE = 4, 8
"""marks: one or two writes failed as bytes are lost. The kernel may split a write; where a later part fails, its caller
gets no error, only a short count: so the next write fails, too. An append to more than one page has two parts"""
TOLD = 16
"""mark: an fsync was about to report the loss. The row's request number is that of the fsync: it may be resent"""

NEW = 32
"""mark: the file is new and unstored; so no host can have renamed it"""


class HandleRow(NamedTuple):
    """A handle as its row describes it."""

    ino: int
    unique: int
    """number of the request that opened the file, or 0; see `TOLD`"""
    flags: int
    caller: Caller
    marks: int
    places: list[tuple[int, bytes]]
    """where the file may be, newest first"""

    @property
    def is_new(self) -> bool:
        return bool(self.marks & NEW)

    @property
    def is_writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class HandleTable:
    """The rows of all handles, in shared memory."""

    def __init__(self, keeper: Keeper) -> None:
        self._rows = Rows(keeper, "fuse/handles", FORM, ROW_SIZE, NO_PLACE, _SERIAL_AT)
        self._rows_in_c = Rows(keeper, "fuse/handles-in-c", FORM, ROW_IN_C_SIZE, COUNT_MIN)
        self.was_kept = self._rows.was_kept
        self.before: dict[int, HandleRow] = {}
        """fh -> row, of handles of a former daemon that are not restored yet"""
        self._by_request: dict[int, int] = {}
        """number of the request that opened a file -> fh, of these"""
        self._offsets: dict[int, list[int]] = {}
        """inode -> offsets of its rows"""
        self.lost: dict[int, int] = {}
        """fh of handles that have to report lost bytes -> how many writes still have to fail"""
        self.losses_dropped = trio.Event()
        """the kernel's cache has dropped what was lost with the former daemon"""
        self._given: dict[int, int] = {}
        """fh with `MADE_IN_C` -> offset of its row"""
        self._told: dict[int, int] = {}
        """number of an fsync's request that was about to report the loss in a former daemon -> fh"""
        self._serial = 0
        for offset in self._rows.list_used():
            self._restore_row(offset)

    def _restore_row(self, offset: int) -> None:
        """Index a row of a former daemon; free it if it is damaged."""
        serial = ROW.unpack_from(self._rows.memory, offset)[-1]
        row, is_given = self._read_row(offset), serial & ~FH_BITS == 0 and bool(serial & GIVEN_IN_C)
        if row is None or (serial > SERIAL_MAX and not is_given):
            self._rows.free_row(offset)
            return
        if is_given:
            fh = serial
            self._given[fh] = offset
        else:
            fh = serial << PLACE_BITS | offset // ROW_SIZE
            self._serial = max(self._serial, serial)
        self.before[fh] = row
        (self._told if row.marks & TOLD else self._by_request)[row.unique] = fh
        self._offsets.setdefault(row.ino, []).append(offset)
        if row.marks & LOST:
            self.lost[fh] = 0 if row.marks & SAID_TWICE else 1 if row.marks & SAID_ONCE else 2

    def _read_row(self, offset: int) -> HandleRow | None:
        """None: the row is damaged."""
        memory = self._rows.memory
        ino, unique, flags, uid, gid, pid, marks, *ends = ROW.unpack_from(memory, offset)
        places = []
        for number in (1, 0) if marks & SECOND else (0, 1):
            start, length, parent = offset + _NAMES_AT + number * _NAME_ROOM, ends[number], ends[2 + number]
            if 0 < length <= NAME_MAX and parent:
                places.append((parent, memory[start : start + length]))
        return HandleRow(ino, unique, flags, Caller(uid, gid, pid), marks, places) if ino else None

    def add(
        self, ino: int, flags: int, caller: Caller, place: tuple[int, bytes], unique: int, *, is_new: bool = False
    ) -> int:
        """Write a row for a file that is being opened. Returns its fh."""
        self._serial = serial = self._serial + 1 if self._serial < SERIAL_MAX else 1
        offset = self._add_row(ino, flags, caller, place, unique, serial, is_new=is_new)
        return serial << PLACE_BITS | (NO_PLACE if offset is None else offset // ROW_SIZE)

    def add_given(self, fh: int, ino: int, caller: Caller, place: tuple[int, bytes], *, is_new: bool) -> None:
        """Write a row for a file that C made, and that Python goes on with."""
        offset = self._add_row(ino, fh >> ACCESS_SHIFT, caller, place, 0, fh, is_new=is_new)
        if offset is not None:
            self._given[fh] = offset

    def _add_row(
        self, ino: int, flags: int, caller: Caller, place: tuple[int, bytes], unique: int, serial: int, *, is_new: bool
    ) -> int | None:
        """Returns its offset; None: there is no room for one."""
        offset = self._rows.take_row()
        if offset is None:
            return None
        memory, (parent, name), length = self._rows.memory, place, len(place[1])
        memory[offset + _NAMES_AT : offset + _NAMES_AT + length] = name
        uid, gid, pid = caller[:3]
        marks = NEW if is_new else 0
        ROW.pack_into(
            memory, offset, ino, unique, flags & KEPT_FLAGS, uid, gid, pid, marks, length, 0, parent, 0, serial
        )  # fmt: skip
        rows = self._offsets.get(ino)
        if rows is None:
            self._offsets[ino] = [offset]
        else:
            rows.append(offset)
        return offset

    def _offset_of(self, fh: int) -> int | None:
        """None: it has no row."""
        if fh & GIVEN_IN_C:
            return self._given.get(fh)
        return (fh & NO_PLACE) * ROW_SIZE if fh & NO_PLACE != NO_PLACE else None

    def _find_offset(self, fh: int) -> int:
        """Of a handle of a former daemon: it has a row."""
        offset = self._offset_of(fh)
        assert offset is not None, f"handle {fh:#x} has no row"
        return offset

    def remove(self, fh: int, ino: int) -> None:
        """Free the row: the file was closed."""
        offset = self._offset_of(fh)
        if offset is None:
            return
        self._given.pop(fh, None)
        rows = self._offsets[ino]
        if len(rows) > 1:
            rows.remove(offset)
        else:
            del self._offsets[ino]
        self.before.pop(fh, None)
        self.lost.pop(fh, None)
        self._rows.free_row(offset)

    def add_place(self, ino: int, parent: int, name: bytes) -> None:
        """Note another name of a file, which may be open, and may still be stored under the former name."""
        for offset in self._offsets.get(ino, ()):
            row = self._read_row(offset)
            if row is None or row.places[:1] == [(parent, name)]:
                continue
            memory, number = self._rows.memory, 0 if row.marks & SECOND else 1
            start = offset + _NAMES_AT + number * _NAME_ROOM
            _LENGTH.pack_into(memory, offset + _LENGTHS_AT + number * _LENGTH.size, 0)
            memory[start : start + len(name)] = name
            _PARENT.pack_into(memory, offset + _PARENTS_AT + number * _PARENT.size, parent)
            _LENGTH.pack_into(memory, offset + _LENGTHS_AT + number * _LENGTH.size, len(name))
            self._write_marks(offset, row.marks ^ SECOND)

    def mark_stored(self, ino: int) -> None:
        """A new file was stored: clear `NEW` in its rows."""
        for offset in self._offsets.get(ino, ()):
            row = self._read_row(offset)
            if row is not None:
                self._write_marks(offset, row.marks & ~NEW)

    def _write_marks(self, offset: int, marks: int) -> None:
        _MARKS.pack_into(self._rows.memory, offset + _MARKS_AT, marks)

    def pop_opened_by(self, unique: int) -> int | None:
        """The fh that a resent request had opened in a former daemon, if its handle was not used since."""
        fh = self._by_request.pop(unique, None)
        return fh if fh in self.before else None

    def mark_lost(self, fh: int) -> None:
        """Have the handle report lost bytes, in this daemon or a later one."""
        self._write_marks(self._find_offset(fh), self.before[fh].marks & ~(SAID_ONCE | SAID_TWICE | TOLD) | LOST)
        self.lost[fh] = 2

    def fail_write(self, fh: int) -> None:
        """EngineError for a write by a handle of `lost`, until a write's caller must have got the error."""
        count = self.lost[fh]
        if count:
            self.lost[fh] = count - 1
            self._raise_lost(fh, 0, SAID_ONCE if count == 2 else SAID_TWICE)

    def fail_fsync(self, fh: int, unique: int, *, is_resent: bool) -> None:
        """EngineError for an fsync with this request number, if bytes are lost: then the handle has reported it."""
        if self.lost.pop(fh, None) is not None:
            _REQUEST.pack_into(self._rows.memory, self._find_offset(fh) + _REQUEST_AT, unique)
            self._raise_lost(fh, LOST | SAID_ONCE | SAID_TWICE, TOLD)
        if is_resent and self._told.get(unique) == fh:
            self._raise_lost(fh, 0, 0)

    def fail_close(self, fh: int) -> None:
        """EngineError for the close of a descriptor of a handle of `lost`. The end of a process closes too, and drops
        the error: so later closes fail as well."""
        self._raise_lost(fh, 0, 0)

    def _raise_lost(self, fh: int, drop: int, add: int) -> None:
        offset = self._find_offset(fh)
        row = self._read_row(offset)
        if row is not None:
            self._write_marks(offset, row.marks & ~drop | add)
        raise EngineError("the daemon was killed before it had stored all that was written to the file")

    @property
    def in_c(self) -> mmap:
        """Rows of handles that C gave; see `GIVEN_IN_C`."""
        return self._rows_in_c.memory

    def close(self) -> None:
        self._rows.close()
        self._rows_in_c.close()


TOLD_SECONDS = 5.0
"""timeout of callers that wait until the kernel has dropped lost content"""


class OpenFiles:
    """All open files of a volume. ``table``: None where nothing outlives this daemon.

    ``cut``: inodes whose end may be lost with the former daemon.
    """

    def __init__(self, volume: VolumeApi, table: HandleTable | None, cut: Collection[int] = frozenset()) -> None:
        self._volume = volume
        self._table = table
        self._cut = frozenset(cut)
        self.has_losses = bool(cut) or (table is not None and bool(table.lost))
        """content was lost with the former daemon"""
        self._handles: dict[int, Handle] = {}
        self._inodes: dict[int, int] = {}
        self._given_by: dict[int, int] = {}
        """number of a former daemon's request that made a file -> its fh"""

    def __len__(self) -> int:
        return len(self._handles) + (len(self._table.before) if self._table is not None else 0)

    def get(self, fh: int) -> Handle | None:
        """The handle, if this process opened or restored it."""
        return self._handles.get(fh)

    def add(self, handle: Handle, ino: int, flags: int, caller: Caller, unique: int) -> int:
        """Add a file that the request of this number opened. Returns its fh."""
        if self._table is None:
            fh = handle.id
        else:
            ino = handle.number or ino
            fh = self._table.add(ino, flags, caller, handle.place, unique, is_new=handle.is_new)
            self._inodes[fh] = ino
        self._handles[fh] = handle
        return fh

    def add_given(self, fh: int, handle: Handle, unique: int = 0) -> bool:
        """Add a file that C opened; see `GIVEN_IN_C`. ``unique``: number of the request, if a former daemon may not
        have answered it. False: it is there."""
        if fh in self._handles or (self._table is not None and fh in self._table.before):
            return False
        if unique:
            self._given_by[unique] = fh
        self.take(fh, handle)
        return True

    async def find(self, fh: int) -> Handle:
        """Get the handle, or restore it from its row. BadHandle: the fh was never given. EngineError, also for a file
        of the former daemon that was never stored.
        """
        while (handle := self._handles.get(fh)) is None:
            row = self._table.before.get(fh) if self._table is not None else None
            if row is None and fh & GIVEN_IN_C and (ino := fusewire.node()):
                handle = await self._open_given(fh, ino)
                if fh in self._handles:  # another request was faster
                    await self._volume.files.release(handle)
                else:
                    self.take(fh, handle, ino)
                continue
            if row is None or self._table is None:
                raise BadHandle(f"handle {fh} is not open")
            try:
                await self._volume.left_open.load(row.ino)
            except Stale as error:
                raise EngineError(f"the file was not stored when the former daemon ended: {error}") from error
            if self._table.before.pop(fh, None) is not None:  # no other task was faster
                self._handles[fh] = self._volume.left_open.take_over(row.ino, row.flags, row.caller)
                self._inodes[fh] = row.ino
        return handle

    async def _open_given(self, fh: int, ino: int) -> Handle:
        """Open what C gave a handle of. EngineError, also for bytes that the former daemon had not stored."""
        try:
            handle: Handle = await self._volume.files.open(ino, fh >> ACCESS_SHIFT & os.O_ACCMODE, NOBODY)
        except Stale as error:
            if not fh & MADE_IN_C:
                raise
            raise EngineError("the daemon was killed before it had stored all that was written to the file") from error
        return handle

    def take(self, fh: int, handle: Handle, ino: int = 0) -> None:
        """Go on with a file whose handle C gave to the kernel. ``ino``: its inode, if `Handle.number` does not say."""
        self._handles[fh] = handle
        if self._table is not None and fh & MADE_IN_C:
            self._inodes[fh] = ino = handle.number or ino
            self._table.add_given(fh, ino, handle.caller, handle.place, is_new=handle.is_new)

    async def drop_resent(self, unique: int) -> None:
        """Release what a resent request had opened before: the kernel never learned that fh, and gets another one."""
        fh = self._table.pop_opened_by(unique) if self._table is not None else None
        if fh is None:
            fh = self._given_by.pop(unique, None)
        if fh is not None:
            await self.release(fh)

    def limit_append(self, fh: int, handle: Handle, offset: int) -> int:
        """The offset of an append that the kernel sent for ``offset``: the end that it knows may be lost."""
        return min(offset, handle.size) if self._cut and self._inodes.get(fh) in self._cut else offset

    async def wait_for_dropped_losses(self) -> None:
        """With `has_losses`: wait until the kernel's cache has dropped lost content, so that a caller that gets the
        error then reads what is left.

        Never for a write: the kernel may have its pages locked, and could not drop them.
        """
        if self._table is not None:
            with trio.move_on_after(TOLD_SECONDS):
                await self._table.losses_dropped.wait()

    def report_loss(self, fh: int, by: Callable[[HandleTable, int], None]) -> None:
        """EngineError, where the former daemon was killed before it had stored the file's content. ``by``: the method
        of the table for this kind of request."""
        if self._table is not None and fh in self._table.lost:
            by(self._table, fh)

    def report_loss_to_fsync(self, fh: int, unique: int, is_resent: bool) -> None:
        """As `report_loss`, for an fsync with this request number: the last request that fails."""
        if self._table is not None and (is_resent or self._table.lost):
            self._table.fail_fsync(fh, unique, is_resent=is_resent)

    async def release(self, fh: int) -> bool:
        """Release a closed file. False: ``fh`` is no handle of a volume's file."""
        row = self._table.before.get(fh) if self._table is not None else None
        if row is not None:
            try:
                await self.find(fh)
            except OperationError:  # its inode is gone or unreadable: no other owner has this handle
                self._volume.left_open.give_up(row.ino, writable=row.is_writable)
                self._remove_row(fh, row.ino)
                return True
        handle = self._handles.pop(fh, None)
        if handle is None:
            return False
        if self._table is not None and fh in self._inodes:
            self._remove_row(fh, self._inodes.pop(fh))
        await self._volume.files.release(handle)
        return True

    def release_at_once(self, fh: int) -> bool:
        """As `release`, of an ordinary file that this process opened or restored. False: nothing was done."""
        handle = self._handles.get(fh)
        if handle is None or fh & GIVEN_IN_C or not self._volume.files.release_at_once(handle):
            return False
        del self._handles[fh]
        if self._table is not None:
            self._table.remove(fh, self._inodes.pop(fh))
        return True

    def _remove_row(self, fh: int, ino: int) -> None:
        if self._table is not None:
            self._table.remove(fh, ino)
