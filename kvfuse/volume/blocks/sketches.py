"""Sketches: files in directories of blocks that somebody writes, with their bytes in memory alone (`sketch_memory`).

A sketch has the number of an inode that does not exist yet, so that it can become an ordinary file under the eyes of
the kernel; or the number of the block of which it is a copy. Nothing here waits.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass, field

import trio

from kvfuse.volume.api import Caller
from kvfuse.volume.blocks import sketch_memory
from kvfuse.volume.blocks.kernel_answers import KernelAnswers
from kvfuse.volume.blocks.open_blocks import BlockEntry, CopyMemory
from kvfuse.volume.blocks.sketch_memory import SketchBytes, SketchFacts, SketchMemory, SketchSlot
from kvfuse.volume.inodes.handle import FileHandle, next_handle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views import clock
from kvfuse.volume.views.handover import OpenBefore

log = logging.getLogger(__name__)

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
        self.content = SketchBytes()
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
        self.left = OpenBefore()
        """its handles of the former daemon that nobody has asked for yet"""
        self.was_being_written = False
        """when the former daemon ended"""
        self.is_named = False
        """its name means it"""
        self.node: Node | None = None
        """the ordinary file that it has become"""
        self.lock = trio.Lock()

    @property
    def size(self) -> int:
        return self.content.size

    @property
    def blocks(self) -> int:
        return -(-self.size // 4096) * 8

    @property
    def place(self) -> tuple[int, bytes]:
        return self.directory, self.name

    @property
    def writers(self) -> int:
        return sum(handle.writable for handle in self.handles) + self.left.writers

    @property
    def is_open(self) -> bool:
        return bool(self.handles) or self.left.handles > 0

    @property
    def is_being_written(self) -> bool:
        """Somebody has written to it since his last close of a descriptor."""
        is_left = self.was_being_written and self.left.writers > 0
        return is_left or any(handle.has_written for handle in self.handles)

    def put_bytes(self, offset: int, data: bytes | memoryview) -> None:
        self.content.put(offset, data)
        self.touch()

    def set_size(self, size: int) -> None:
        self.content.set_size(size)
        self.touch()

    def touch(self) -> None:
        """Its bytes have changed: by somebody who is writing it."""
        self.is_changed = self.is_rewritten = True
        self.is_refused = False
        self.mtime = self.ctime = clock.now()
        self.content.note_times(self.mtime, self.ctime, self._flags | sketch_memory.WRITTEN)

    # -- for the next daemon ---------------------------------------------------------------------------

    @property
    def _flags(self) -> int:
        flags = sketch_memory.CHANGED * self.is_changed | sketch_memory.REWRITTEN * self.is_rewritten
        return flags | sketch_memory.REFUSED * self.is_refused | sketch_memory.NAMED * self.is_named

    def keep(self) -> None:
        """Have the next daemon find it as it is now."""
        content = self.content
        if content.is_kept:
            content.note_times(self.mtime, self.ctime, self._flags | sketch_memory.WRITTEN * self.is_being_written)
            content.note_facts(self.ino, self.sequence, self._facts())

    def keep_flags(self) -> None:
        self.content.note_flags(self._flags | sketch_memory.WRITTEN * self.is_being_written)

    def _facts(self) -> SketchFacts:
        return SketchFacts(
            self.directory, self.namespace, self.atime, self.mode, self.uid, self.gid, self.nlink, self.expires,
            self.priority, self.name,
        )  # fmt: skip

    @classmethod
    def restore(cls, slot: SketchSlot, facts: SketchFacts, sequence: int, left: OpenBefore) -> Sketch:
        """A sketch of the former daemon. ``left``: its handles."""
        name, namespace = facts.name, facts.namespace
        sketch = cls(slot.ino, facts.directory, namespace, name, facts.mode, facts.uid, facts.gid)
        sketch.content, sketch.sequence, sketch.left, flags = slot, sequence, left, slot.flags
        sketch.nlink, sketch.expires, sketch.priority = facts.nlink, facts.expires, facts.priority
        sketch.atime, (sketch.mtime, sketch.ctime) = facts.atime, slot.times
        sketch.is_changed, sketch.is_rewritten = (
            bool(flags & sketch_memory.CHANGED),
            bool(flags & sketch_memory.REWRITTEN),
        )
        sketch.is_refused, sketch.was_being_written = (
            bool(flags & sketch_memory.REFUSED),
            bool(flags & sketch_memory.WRITTEN),
        )
        sketch.is_named = bool(flags & sketch_memory.NAMED)
        return sketch


class SketchHandle:
    """A sketch that is open; see `api.Handle`. ``file``: the ordinary file's, once it has become one."""

    cache_valid = True
    is_new = True

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
        self.unique = 0
        """number of the request by which C made the file; 0: it did not"""
        sketch.handles[self] = None

    @property
    def number(self) -> int:
        return self.sketch.ino

    @property
    def size(self) -> int:
        return self.sketch.size if self.file is None else self.file.size

    @property
    def place(self) -> tuple[int, bytes]:
        return self.sketch.place


@dataclass
class Sketches:
    """All sketches of a volume. Event loop only.

    ``names_held``: directory -> names in it that sketches have. ``answers``: hears of them. ``slots``: memory that the
    next daemon finds.
    """

    memory: CopyMemory
    slots: SketchMemory
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
        sketch.keep()

    def add_restored(self, sketch: Sketch) -> None:
        """A sketch of the former daemon."""
        self.take(sketch, max(FLOOR, sketch.size))
        self.by_ino[sketch.ino] = sketch
        self.answers.hold_inode(sketch.ino, 1)
        if sketch.nlink and sketch.is_named:
            self.enter(sketch)

    def enter(self, sketch: Sketch) -> None:
        """The name of the sketch means it from now on, if it means no other one."""
        if sketch.place not in self.by_place:
            self.by_place[sketch.place] = sketch
            self.answers.hold_name(*sketch.place, 1)
            self.names_held[sketch.directory] += 1
            sketch.is_named = True
            sketch.keep_flags()

    def leave(self, sketch: Sketch) -> None:
        """The name means the sketch no longer."""
        if self.by_place.get(sketch.place) is sketch:
            sketch.is_named = False
            sketch.keep_flags()
            del self.by_place[sketch.place]
            self.answers.hold_name(*sketch.place, -1)
            self.names_held[sketch.directory] -= 1
            if not self.names_held[sketch.directory]:
                del self.names_held[sketch.directory]

    def move(self, sketch: Sketch, directory: int, name: bytes) -> None:
        """The sketch has another name. The caller has the next daemon find that (`Sketch.keep`)."""
        self.leave(sketch)
        sketch.directory, sketch.name = directory, name
        self.enter(sketch)

    def unlink(self, sketch: Sketch) -> None:
        """The sketch has no name any more, and is as long as it is open."""
        self.leave(sketch)
        sketch.nlink = 0
        sketch.ctime = clock.now()
        sketch.keep()

    def end(self, sketch: Sketch) -> None:
        """Nobody has it open."""
        self.leave(sketch)
        self.lose_number(sketch.ino)
        self.drop_bytes(sketch)

    def drop_bytes(self, sketch: Sketch) -> None:
        """Nobody needs the bytes of a sketch any more: the next daemon does not find it."""
        sketch.content.end()
        sketch.content = SketchBytes()
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
        self.memory.used += size
        self._allocate(sketch, size)
        sketch.reserved = size

    def _allocate(self, sketch: Sketch, size: int) -> None:
        """Memory for so many bytes: what outlives this daemon, where there is such."""
        is_first = not sketch.reserved and not sketch.content.is_kept
        if is_first and size:
            sketch.content = self.slots.take()
        if not sketch.content.allocate(size):
            log.warning("file %r of directory %d ends with this daemon", sketch.name, sketch.directory)
            with sketch.content.view() as view:
                content = SketchBytes(view)
            sketch.content.end()
            sketch.content = content

    def resize(self, sketch: Sketch, size: int) -> bool:
        """Count so many bytes for a sketch. False: there is no memory for them."""
        more = size - sketch.reserved
        if more > 0 and not self.memory.take(more):
            return False
        if more > 0:
            self._allocate(sketch, size)
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
