"""Drafts: files in directories of blocks that somebody writes, with their bytes in memory alone.

A draft has the number of an inode that does not exist yet, so that it can become an ordinary file under the eyes of
the kernel; or the number of the block of which it is a copy. Nothing here waits.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import trio

from kvfuse.volume.api import Caller
from kvfuse.volume.blocks.open_blocks import CopyMemory
from kvfuse.volume.inodes.handle import FileHandle, next_handle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views import clock

HOLE_MAX = 1 << 20
"""bytes of a hole that a write, or a longer size, may leave in a draft"""
FLOOR = 4096
"""bytes that a draft counts at least"""


class Draft:
    """A file that is being written; as `api.Attributes`, too. ``lock``: of whoever publishes, moves or ends it."""

    rdev = 0

    def __init__(self, ino: int, directory: int, namespace: int, name: bytes, mode: int, uid: int, gid: int) -> None:
        self.ino = ino
        self.directory = directory
        self.namespace = namespace
        self.name = name
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.nlink = 1
        self.atime = self.mtime = self.ctime = clock.now()
        self.data = bytearray()
        self.reserved = 0
        """bytes of the memory that it has"""
        self.is_changed = False
        """the block of its name does not have these bytes, or other readers"""
        self.expires, self.priority = 0, 128
        """of the block"""
        self.handles: dict[DraftHandle, None] = {}
        self.node: Node | None = None
        """the ordinary file that it has become"""
        self.lock = trio.Lock()

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def blocks(self) -> int:
        return -(-len(self.data) // 4096) * 8

    @property
    def place(self) -> tuple[int, bytes]:
        return self.directory, self.name

    @property
    def writers(self) -> int:
        return sum(handle.writable for handle in self.handles)

    @property
    def is_being_written(self) -> bool:
        """Somebody has written to it since his last close of a descriptor."""
        return any(handle.has_written for handle in self.handles)

    def put_bytes(self, offset: int, data: bytes | memoryview) -> None:
        buffer = self.data
        if offset > len(buffer):
            buffer.extend(bytes(offset - len(buffer)))
        buffer[offset : offset + len(data)] = data
        self.touch()

    def set_size(self, size: int) -> None:
        buffer = self.data
        if size < len(buffer):
            del buffer[size:]
        else:
            buffer.extend(bytes(size - len(buffer)))
        self.touch()

    def touch(self) -> None:
        self.is_changed = True
        self.mtime = self.ctime = clock.now()


class DraftHandle:
    """A draft that is open; see `api.Handle`. ``file``: the ordinary file's, once it has become one."""

    cache_valid = True
    is_new = True

    def __init__(self, draft: Draft, flags: int, caller: Caller) -> None:
        self.id = next_handle()
        self.draft = draft
        self.flags = flags
        self.caller = caller
        self.file: FileHandle | None = None
        mode = flags & os.O_ACCMODE
        self.readable, self.writable = mode != os.O_WRONLY, mode != os.O_RDONLY
        self.appends = bool(flags & os.O_APPEND)
        self.direct = bool(flags & os.O_DIRECT)
        self.has_written = False
        """since the last close of a descriptor"""
        draft.handles[self] = None

    @property
    def size(self) -> int:
        return self.draft.size if self.file is None else self.file.size

    @property
    def place(self) -> tuple[int, bytes]:
        return self.draft.place


@dataclass
class Drafts:
    """All drafts of a volume. Event loop only.

    ``names_held``: directory -> names in it that drafts have.
    """

    memory: CopyMemory
    names_held: Counter[int]
    by_ino: dict[int, Draft] = field(default_factory=dict)
    by_place: dict[tuple[int, bytes], Draft] = field(default_factory=dict)
    _room: trio.Event = field(default_factory=trio.Event)

    def add(self, draft: Draft) -> None:
        """A new draft. Its name is free."""
        self.by_ino[draft.ino] = draft
        self.enter(draft)

    def enter(self, draft: Draft) -> None:
        """The name of the draft means it from now on, if it means no other one."""
        if self.by_place.setdefault(draft.place, draft) is draft:
            self.names_held[draft.directory] += 1

    def leave(self, draft: Draft) -> None:
        """The name means the draft no longer."""
        if self.by_place.get(draft.place) is draft:
            del self.by_place[draft.place]
            self.names_held[draft.directory] -= 1
            if not self.names_held[draft.directory]:
                del self.names_held[draft.directory]

    def move(self, draft: Draft, directory: int, name: bytes) -> None:
        self.leave(draft)
        draft.directory, draft.name = directory, name
        self.enter(draft)

    def unlink(self, draft: Draft) -> None:
        """The draft has no name any more, and is as long as it is open."""
        self.leave(draft)
        draft.nlink = 0
        draft.ctime = clock.now()

    def end(self, draft: Draft) -> None:
        """Nobody has it open."""
        self.leave(draft)
        self.by_ino.pop(draft.ino, None)
        draft.data = bytearray()
        self.resize(draft, 0)

    def in_directory(self, directory: int) -> list[Draft]:
        if directory not in self.names_held:
            return []
        return [draft for draft in self.by_place.values() if draft.directory == directory]

    # -- memory ----------------------------------------------------------------------------------------

    def resize(self, draft: Draft, size: int) -> bool:
        """Count so many bytes for a draft. False: there is no memory for them."""
        more = size - draft.reserved
        if more > 0 and not self.memory.take(more):
            return False
        draft.reserved = size
        if more < 0:
            self.memory.give(-more)
            self._room.set()
            self._room = trio.Event()
        return True

    async def wait_for_room(self, seconds: float) -> None:
        """Return when there is more memory, or it took too long."""
        with trio.move_on_after(seconds):
            await self._room.wait()
