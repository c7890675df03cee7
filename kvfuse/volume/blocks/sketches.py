"""Sketches: files in directories of blocks that somebody writes, with their bytes in memory alone.

A sketch has the number of an inode that does not exist yet, so that it can become an ordinary file under the eyes of
the kernel; or the number of the block of which it is a copy. Nothing here waits.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import trio

from kvfuse.volume.api import Caller
from kvfuse.volume.blocks.kernel_answers import KernelAnswers
from kvfuse.volume.blocks.open_blocks import BlockEntry, CopyMemory
from kvfuse.volume.inodes.handle import FileHandle, next_handle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views import clock

HOLE_MAX = 1 << 20
"""bytes of a hole that a write, or a longer size, may leave in a sketch"""
FLOOR = 4096
"""bytes that a sketch counts at least"""


class Sketch:
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
        self.is_refused = False
        """a close has said that these bytes could not be stored: they are not stored unasked"""
        self.sequence = 0
        """of the block that it has stored, or is to replace; 0: none had the name when it was made"""
        self.block: BlockEntry | None = None
        """the block that has these bytes, unless `is_changed`"""
        self.expires, self.priority = 0, 128
        """of the block"""
        self.is_rewritten = False
        """it has other bytes than those that it began with"""
        self.handles: dict[SketchHandle, None] = {}
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
        self.is_changed = self.is_rewritten = True
        self.is_refused = False
        self.mtime = self.ctime = clock.now()


class SketchHandle:
    """A sketch that is open; see `api.Handle`. ``file``: the ordinary file's, once it has become one."""

    cache_valid = True
    is_new = True
    number = 0

    def __init__(self, sketch: Sketch, flags: int, caller: Caller) -> None:
        self.id = next_handle()
        self.sketch = sketch
        self.flags = flags
        self.caller = caller
        self.file: FileHandle | None = None
        mode = flags & os.O_ACCMODE
        self.readable, self.writable = mode != os.O_WRONLY, mode != os.O_RDONLY
        self.appends = bool(flags & os.O_APPEND)
        self.direct = bool(flags & os.O_DIRECT)
        self.has_written = False
        """since the last close of a descriptor"""
        sketch.handles[self] = None

    @property
    def size(self) -> int:
        return self.sketch.size if self.file is None else self.file.size

    @property
    def place(self) -> tuple[int, bytes]:
        return self.sketch.place


@dataclass
class Sketches:
    """All sketches of a volume. Event loop only.

    ``names_held``: directory -> names in it that sketches have. ``answers``: hears of them.
    """

    memory: CopyMemory
    names_held: Counter[int]
    answers: KernelAnswers
    by_ino: dict[int, Sketch] = field(default_factory=dict)
    by_place: dict[tuple[int, bytes], Sketch] = field(default_factory=dict)
    _room: trio.Event = field(default_factory=trio.Event)

    def add(self, sketch: Sketch) -> None:
        """A new sketch. Its name is free, if it has one."""
        self.by_ino[sketch.ino] = sketch
        self.answers.hold_inode(sketch.ino, 1)
        if sketch.nlink:
            self.enter(sketch)

    def enter(self, sketch: Sketch) -> None:
        """The name of the sketch means it from now on, if it means no other one."""
        if sketch.place not in self.by_place:
            self.by_place[sketch.place] = sketch
            self.answers.hold_name(*sketch.place, 1)
            self.names_held[sketch.directory] += 1

    def leave(self, sketch: Sketch) -> None:
        """The name means the sketch no longer."""
        if self.by_place.get(sketch.place) is sketch:
            del self.by_place[sketch.place]
            self.answers.hold_name(*sketch.place, -1)
            self.names_held[sketch.directory] -= 1
            if not self.names_held[sketch.directory]:
                del self.names_held[sketch.directory]

    def move(self, sketch: Sketch, directory: int, name: bytes) -> None:
        self.leave(sketch)
        sketch.directory, sketch.name = directory, name
        self.enter(sketch)

    def unlink(self, sketch: Sketch) -> None:
        """The sketch has no name any more, and is as long as it is open."""
        self.leave(sketch)
        sketch.nlink = 0
        sketch.ctime = clock.now()

    def end(self, sketch: Sketch) -> None:
        """Nobody has it open."""
        self.leave(sketch)
        self.lose_number(sketch.ino)
        sketch.data = bytearray()
        self.resize(sketch, 0)

    def lose_number(self, ino: int) -> None:
        """The number means no sketch any more, if it did."""
        if self.by_ino.pop(ino, None) is not None:
            self.answers.hold_inode(ino, -1)

    def in_directory(self, directory: int) -> list[Sketch]:
        if directory not in self.names_held:
            return []
        return [sketch for sketch in self.by_place.values() if sketch.directory == directory]

    # -- memory ----------------------------------------------------------------------------------------

    def take(self, sketch: Sketch, size: int) -> None:
        """Count bytes that a new sketch brings, whatever others have."""
        sketch.reserved = size
        self.memory.used += size

    def resize(self, sketch: Sketch, size: int) -> bool:
        """Count so many bytes for a sketch. False: there is no memory for them."""
        more = size - sketch.reserved
        if more > 0 and not self.memory.take(more):
            return False
        sketch.reserved = size
        if more < 0:
            self.memory.give(-more)
            self._room.set()
            self._room = trio.Event()
        return True

    async def wait_for_room(self, seconds: float) -> None:
        """Return when there is more memory, or it took too long."""
        with trio.move_on_after(seconds):
            await self._room.wait()
