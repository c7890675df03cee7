"""Files of block directories by their inode numbers: blocks that are read, sketches that are written.

A sketch becomes the block of its name when a descriptor of it is closed and nobody else is in the middle of writing it.
What cannot be a block becomes an ordinary file under the same number: what is larger than a block may be, has far
holes, other bits of a mode than permissions, a second name or attributes of its own; and what is empty, at the last
close. An ordinary file of a block directory stays one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from stat import S_IFREG, S_IMODE, S_ISDIR, S_ISGID
from typing import Any

import trio

from kvfuse import errors
from kvfuse.native import blockforms as forms
from kvfuse.volume.api import Caller, Changes, RowTerms
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.blocks.block_numbers import is_block
from kvfuse.volume.blocks.kernel_answers import Notes, TakenFile
from kvfuse.volume.blocks.open_blocks import BlockEntry, CopyMemory, NameSearch, OpenBlock, OpenBlocks
from kvfuse.volume.blocks.sketch_memory import SketchMemory
from kvfuse.volume.blocks.sketches import FLOOR, HOLE_MAX, Sketch, Sketches, SketchHandle
from kvfuse.volume.content.cutting import Cutter
from kvfuse.volume.content.writer import Writer
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.listing import Listing
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.views import clock
from kvfuse.volume.views.handover import DECIDED, OpenBefore

log = logging.getLogger(__name__)

DRAFT = b".kvfuse-"
"""how names of files begin that are about to get another one, or none: no listing shows them"""
PERMISSIONS = 0o777
"""bits of a mode that a block has"""
NOBODY = Caller(0, 0)
ROOM_SECONDS = 1.0
"""for which a write waits for memory before its sketch becomes an ordinary file"""

NAMES_HELD_MAX = 256
"""subdirectories and ordinary files of a directory about which C may answer"""
BARE_SECONDS = 10.0
"""for which a directory is taken to have more"""
LOOKS = 2
"""at the names of a directory: to learn them may count as if they came"""
OFFERED_MAX = 4096
"""folders where C may make files that are remembered"""
TIME_MAX_US = (1 << 32) * 10**6 - 1
"""the latest time that a block can have"""

LOOKED_FOR = 256
"""entries of a directory that are read at once"""

BlockHandle = OpenBlock | SketchHandle


@dataclass
class BlockFiles:
    """Of one membership. Event loop only. ``release_file``: closes an ordinary file."""

    core: Core
    engine: BlockEngine
    lookups: Lookup
    names: Names
    writer: Writer
    cutter: Cutter
    release_file: Callable[[FileHandle], Awaitable[None]] = field(init=False)

    def __post_init__(self) -> None:
        memory = CopyMemory(self.engine.staging_size)
        core, engine = self.core, self.engine
        slots = SketchMemory(engine.keeper, core.superblock.volume_id, core.geometry.slab_size)
        self.sketches = Sketches(memory, slots, engine.names_held, engine.answers)
        self.open_blocks = OpenBlocks(self.engine, memory)
        self.search = NameSearch(self.engine)
        self._bare: dict[int, list[bytes] | None] = {}
        """directory -> all its names that mean inodes, which are held; None: they are being read"""
        self._crowded: dict[int, float] = {}
        """directory with more of them -> when to look again"""
        self._drafts: set[tuple[int, bytes]] = set()
        """files that get another name soon"""
        self._looked_at: set[int] = set()
        """directories of which is known whether they have ordinary files"""
        self._offered: dict[int, Node] = {}
        """folders where C may make files, or did"""
        self.engine.answers.on_notes.append(self._hear)
        self._restored: dict[int, OpenBlock] = {}
        """blocks that were open in the former daemon, and whose handles were not asked for yet"""
        self._restore_sketches()

    async def offer(self, folder: Node) -> None:
        """Have C answer the kernel about a folder of which it just asked, if all its blocks are known."""
        engine = self.engine
        if engine.is_shared or not engine.slabs.loaded.is_set():
            return
        if folder.nlink and not self.core.namespaces.measures[folder.namespace].limiters:
            await self.may_have_files(folder.ino)
            is_bare = await self._is_bare(folder.ino)
            if folder.ino in engine.with_files and not is_bare:
                return
            is_writable = is_bare and self._may_write(folder)
            if is_writable:
                engine.answers.give_numbers(self.core.inodes.next_range)
                self._offered[folder.ino] = folder
                if len(self._offered) > OFFERED_MAX:
                    engine.answers.hear()
                    del self._offered[next(iter(self._offered))]
            tables = engine.tables_of(folder.ino)
            engine.answers.offer(folder.ino, tables, is_bare=is_bare, is_writable=is_writable)

    def _may_write(self, folder: Node) -> bool:
        """Nobody has to hear at once of what is made in a folder; name, owner and mode are all there is to say."""
        found = self.core.namespaces.all.get(folder.namespace)
        return (
            not self.core.read_only
            and not folder.mode & S_ISGID
            and (found is None or not found.settings.ttl)
            and not self.lookups.has_strict_blocks(folder)
            and not self.engine.news.is_followed(folder.ino)
        )

    def _hear(self, notes: Notes) -> None:
        """What C did in folders that were offered."""
        for directory, when in notes.changed:
            folder = self._offered.get(directory)
            if folder is not None and when > folder.ctime:
                folder.mtime = folder.ctime = when
                self.names.journal.pending.touch_times(folder)
        if notes.changed:
            self.engine.answers.give_numbers(self.core.inodes.next_range)
        for place, _, size in notes.puts:
            if size and (table := self.engine.tables.all.get(place)) is not None:
                self.core.counters.writes += 1
                self.core.counters.written_bytes += size
                self.core.namespaces.measures[table.namespace].written_bytes += size

    def take_over(self, *, is_all: bool = False) -> Iterator[tuple[int, SketchHandle]]:
        """(handle of the kernel, what it is) of files that C made, and whose next request is not for it."""
        for draft in self.engine.answers.taken(is_all=is_all):
            sketch = self.sketches.by_ino.get(draft.ino)  # of the former daemon, which was about to do the same
            if sketch is None:
                self.sketches.add(sketch := self._sketch_of(draft))
            handle = SketchHandle(sketch, draft.flags, Caller(draft.uid, draft.gid, draft.pid))
            handle.has_written, handle.unique = bool(draft.content), draft.unique
            yield draft.fh, handle

    def _sketch_of(self, draft: TakenFile) -> Sketch:
        namespace = self.engine.tables.all[draft.table].namespace
        mode = S_IFREG | draft.mode
        sketch = Sketch(draft.ino, draft.directory, namespace, draft.name, mode, draft.uid, draft.gid)
        self.sketches.take(sketch, max(FLOOR, len(draft.content)))
        sketch.content.put(0, draft.content)
        sketch.is_changed = sketch.is_rewritten = bool(draft.content)
        sketch.atime, sketch.mtime, sketch.ctime = draft.made, draft.mtime, draft.mtime
        self.open_blocks.written.forget(sketch.ino)
        return sketch

    async def _is_bare(self, directory: int) -> bool:
        """All names of it that mean inodes are held, now and until another one is about to: the others have blocks, or
        nothing."""
        if directory in self._bare:
            return self._bare[directory] is not None  # else they are being read
        if trio.current_time() < self._crowded.get(directory, 0.0):
            return False
        for _ in range(LOOKS):
            self._bare[directory] = None
            self.core.dentries.watch_names(directory, "kernel", lambda: self._names_come(directory))
            try:
                entries = await Listing(self.lookups, directory).read_entries(0, NAMES_HELD_MAX + 1)
            except BaseException:
                self._names_come(directory)
                raise
            if directory in self._bare and len(entries) <= NAMES_HELD_MAX:  # none came meanwhile
                self._bare[directory] = names = [entry.name for entry in entries]
                for name in names:
                    self.engine.answers.hold_name(directory, name, 1)
                return True
        self._names_come(directory)
        self._crowded[directory] = trio.current_time() + BARE_SECONDS
        return False

    def _names_come(self, directory: int) -> None:
        """A name of a directory is about to mean an inode, or may be."""
        for name in self._bare.pop(directory, None) or ():
            self.engine.answers.hold_name(directory, name, -1)
        self.engine.answers.take_back(directory)

    # -- numbers ---------------------------------------------------------------------------------------

    def has(self, ino: int) -> bool:
        """The number is one of a block, or of a sketch."""
        return is_block(ino) or ino in self.sketches.by_ino or ino in self.open_blocks.written

    def attributes(self, ino: int) -> BlockEntry | Sketch | Node:
        """Stale: it was removed."""
        sketch = self.sketches.by_ino.get(ino)
        if sketch is not None:
            return sketch if sketch.node is None else sketch.node
        return self.open_blocks.entry_of(ino)

    def namespace_of(self, ino: int) -> int:
        sketch = self.sketches.by_ino.get(ino)
        return sketch.namespace if sketch is not None else self.open_blocks.entry_of(ino).table.namespace

    @staticmethod
    def namespace_of_handle(handle: BlockHandle) -> int:
        return handle.entry.table.namespace if isinstance(handle, OpenBlock) else handle.sketch.namespace

    def find(self, directory: int, name: bytes) -> Sketch | BlockEntry | None:
        """What a name means, if it is no ordinary file."""
        if (sketch := self.sketches.by_place.get((directory, name))) is not None:
            return sketch
        entry = self.search.find(directory, name)
        return self.open_blocks.written.show(entry) if entry is not None else None

    async def name_of(self, entry: BlockEntry) -> bytes:
        """Stale: the block was removed."""
        now = self.engine.now(entry.table.namespace)
        rows, _ = self.engine.native.list_rows(entry.table.number, entry.directory, entry.row - 1, 1, now)
        if not rows or rows[0][:2] != (entry.row, entry.sequence):
            raise errors.Stale(f"block {entry.ino:#x} was removed")
        name = rows[0][4]
        return name if name is not None else (await self.engine.slabs.read_names([rows[0][5:]]))[0]

    # -- opening ---------------------------------------------------------------------------------------

    async def open(self, ino: int, flags: int, caller: Caller) -> BlockHandle | Node:
        """Open a block or a sketch. A node: it is an ordinary file by now. Stale, EngineError."""
        if not caller.is_kernel:  # rings know files by their inodes
            return await self.make_ordinary(ino)
        while True:
            sketch: Sketch | Node | None = self.sketches.by_ino.get(ino)
            if sketch is None and not flags & os.O_TRUNC and flags & os.O_ACCMODE == os.O_RDONLY:
                return await self._open_block(ino, flags, caller)
            if sketch is None:
                sketch = await self._copy_to_sketch(ino, is_empty=bool(flags & os.O_TRUNC))
            if isinstance(sketch, Node):
                return sketch
            await self._is_sketch(sketch)
            if sketch.node is not None:
                return sketch.node
            if self.sketches.by_ino.get(sketch.ino) is sketch:  # its last close has not ended it meanwhile
                break
        handle = SketchHandle(sketch, flags, caller)
        if handle.writable and sketch.nlink:
            self.sketches.enter(sketch)
        if flags & os.O_TRUNC:
            await self.truncate(handle, 0)
        return handle

    async def _open_block(self, ino: int, flags: int, caller: Caller) -> OpenBlock:
        handle = self.open_blocks.open(self.open_blocks.entry_of(ino), caller, direct=bool(flags & os.O_DIRECT))
        try:
            await self.open_blocks.keep(handle)
        except BaseException:
            self.open_blocks.release(handle)
            raise
        return handle

    async def _copy_to_sketch(self, ino: int, *, is_empty: bool) -> Sketch | Node:
        """A sketch under the number of a block. A node: there is no memory for one. Stale.

        A block that has lost its name becomes a sketch without one.
        """
        entry = self.open_blocks.entry_of(ino)
        name = await self.name_of(entry) if entry.nlink else b""
        size = 0 if is_empty else entry.size
        sketch = Sketch(ino, entry.directory, entry.table.namespace, name, entry.mode, entry.uid, entry.gid)
        if not self.sketches.resize(sketch, max(FLOOR, size)):
            return await self._make_block_ordinary(entry, name)
        try:
            data = b"" if is_empty else await self.open_blocks.read_whole(entry)
            other = self.find(entry.directory, name)
        except BaseException:
            self.sketches.drop_bytes(sketch)
            raise
        if isinstance(other, Sketch) and other.ino == ino:  # somebody was faster
            self.sketches.drop_bytes(sketch)
            return other
        sketch.nlink = int(other is not None and other.ino == ino)
        sketch.content.put(0, data)
        sketch.is_changed = sketch.is_rewritten = is_empty
        sketch.block = None if is_empty or not sketch.nlink else entry
        sketch.sequence = entry.sequence
        sketch.expires, sketch.priority = entry.expires, entry.priority
        sketch.atime, sketch.mtime, sketch.ctime = entry.atime, entry.mtime, entry.ctime
        self.open_blocks.written.forget(ino)
        self.sketches.add(sketch)
        return sketch

    # -- from the former daemon ------------------------------------------------------------------------

    def _restore_sketches(self) -> None:
        still_open = self.core.nodes.handover.still_open
        for slot, facts, sequence in self.sketches.slots.restore():
            ino = slot.ino
            if ino in self.sketches.by_ino or not self.engine.is_block_namespace(facts.namespace):
                slot.end()
                continue
            sketch = Sketch.restore(slot, facts, sequence, still_open.get(ino) or OpenBefore())
            self.open_blocks.written.forget(ino)
            self.sketches.add_restored(sketch)
            entry = self.search.find(*sketch.place) if sketch.nlink and not sketch.is_changed else None
            sketch.block = entry if entry is not None and entry.sequence == sequence else None

    def restore_sketch(self, ino: int, flags: int, caller: Caller) -> SketchHandle | None:
        """A handle of the former daemon, of a file that is being written. None: it is no such file."""
        sketch = self.sketches.by_ino.get(ino)
        if sketch is None:
            return None
        handle = SketchHandle(sketch, flags, caller)
        handle.has_written = sketch.was_being_written and handle.writable
        if sketch.node is not None:
            handle.file = FileHandle(sketch.node, flags, caller)
        return handle

    async def close_unknown(self, ino: int) -> None:
        """Handles were closed that this daemon never saw: a file that nobody else has open is as after its close."""
        sketch = self.sketches.by_ino.get(ino)
        if sketch is not None and not sketch.is_open:
            await self.release(SketchHandle(sketch, os.O_WRONLY, NOBODY))

    async def keep_restored(self, ino: int) -> None:
        """Keep the content of a block that was open in the former daemon, until `all_restored`. Stale, EngineError."""
        if ino not in self._restored:
            self._restored[ino] = handle = self.open_blocks.open(self.open_blocks.entry_of(ino), NOBODY, direct=False)
            try:
                await self.open_blocks.keep(handle)
            except BaseException:
                self.all_restored(ino)
                raise

    def restore(self, ino: int, flags: int, caller: Caller) -> OpenBlock:
        """Open a block again that was open for reading in the former daemon. Stale."""
        handle = self.open_blocks.open(self.open_blocks.entry_of(ino), caller, direct=bool(flags & os.O_DIRECT))
        self.open_blocks.share(handle)
        return handle

    def all_restored(self, ino: int) -> None:
        """No other handle of the former daemon is to come."""
        handle = self._restored.pop(ino, None)
        if handle is not None:
            self.open_blocks.release(handle)

    # -- reading ---------------------------------------------------------------------------------------

    async def read(self, handle: BlockHandle, offset: int, size: int) -> bytes | memoryview:
        if isinstance(handle, OpenBlock):
            sketch = self.sketches.by_ino.get(handle.entry.ino)
            if sketch is None or not sketch.is_rewritten:
                return await self.open_blocks.read(handle, offset, size)
        else:
            sketch = handle.sketch
        with sketch.content.view() as content:
            return bytes(content[offset : offset + size])

    # -- writing ---------------------------------------------------------------------------------------

    async def write(self, handle: BlockHandle, offset: int, data: bytes | memoryview) -> int | None:
        """How much was taken. None: it has become an ordinary file, which takes it. The errors of `Writer.write`."""
        if isinstance(handle, OpenBlock):
            raise errors.BadHandle("the block is open for reading")
        sketch = handle.sketch
        while await self._is_sketch(sketch):
            if await self._has_room(sketch, offset, offset + len(data)):
                sketch.put_bytes(offset, data)
                handle.has_written = True
                return len(data)
        return None

    async def truncate(self, handle: SketchHandle, size: int) -> None:
        """Set the size of a sketch, or of the ordinary file that it becomes or has become."""
        sketch = handle.sketch
        while await self._is_sketch(sketch):
            if await self._has_room(sketch, size, size):
                sketch.set_size(size)
                self.sketches.resize(sketch, max(FLOOR, size))
                handle.has_written = True
                return
        await self.cutter.truncate(self._node_of(sketch), size)

    async def _is_sketch(self, sketch: Sketch) -> bool:
        """Whether it is one, once nobody is about to change that. True: its bytes may change until the next await."""
        if sketch.lock.locked():
            async with sketch.lock:  # who has it next begins later
                pass
        return sketch.node is None

    async def _has_room(self, sketch: Sketch, start: int, end: int) -> bool:
        """Whether a sketch has memory for bytes up to ``end``. False: the caller looks at it again, as it has waited,
        or the sketch has become an ordinary file."""
        size = sketch.size
        if end <= self.engine.block_max and start - size <= HOLE_MAX:
            if self.sketches.resize(sketch, max(sketch.reserved, FLOOR, end)):
                return True
            if self.sketches.memory.used > sketch.reserved:
                await self.sketches.wait_for_room(ROOM_SECONDS)
                if self.sketches.resize(sketch, max(sketch.reserved, FLOOR, end)):
                    return False
        async with sketch.lock:
            if sketch.node is None:
                await self._become_ordinary(sketch)
        return False

    # -- publishing ------------------------------------------------------------------------------------

    async def flush(self, handle: BlockHandle) -> None:
        """A descriptor was closed: the name means the block when this returns, unless others still write it."""
        if isinstance(handle, OpenBlock) or not handle.writable:
            return
        sketch = handle.sketch
        handle.has_written = False
        sketch.keep_flags()
        if sketch.nlink and not sketch.is_being_written:
            try:
                sketch.lock.acquire_nowait()
            except trio.WouldBlock:
                await sketch.lock.acquire()
            try:
                await self.publish(sketch)
            except errors.OperationError:
                sketch.is_refused = True
                sketch.keep_flags()
                raise
            finally:
                sketch.lock.release()
            if sketch.node is None and self.lookups.has_strict_blocks(
                await self.lookups.find_directory(sketch.directory)
            ):
                await self.engine.flush()

    async def fsync(self, handle: BlockHandle) -> None:
        """What is in the file now survives a loss of power."""
        if isinstance(handle, SketchHandle) and handle.sketch.nlink:
            async with handle.sketch.lock:
                if handle.sketch.size:
                    await self.publish(handle.sketch)
                elif handle.sketch.node is None:
                    await self._become_ordinary(handle.sketch)
        if handle.file is None:
            await self.engine.writer.flush()

    async def publish(self, sketch: Sketch) -> None:
        """Have the name of a sketch mean a block with its bytes, or an ordinary file. Under the sketch's lock.

        NoSpace, QuotaExceeded, EngineError: the name means what it meant.
        """
        if sketch.node is not None or not sketch.is_changed or not sketch.size:
            return
        if sketch.mode & 0o7777 & ~PERMISSIONS or sketch.size > self.engine.block_max:
            await self._become_ordinary(sketch)
            return
        try:
            with sketch.content.view() as content:
                sketch.block = await self.put(sketch, sketch.directory, sketch.name, content)
        except errors.FileTooLarge:
            await self._become_ordinary(sketch)
        else:
            sketch.is_changed = sketch.is_refused = False
            if sketch.block is not None:
                sketch.sequence = sketch.block.sequence
            sketch.keep()

    async def put(
        self, like: Sketch | BlockEntry, directory: int, name: bytes, content: memoryview
    ) -> BlockEntry | None:
        """Store a block with owner, mode, time and terms of another one, in the place of whatever has the name.

        Returns it; None: it was replaced, or removed, by now.

        FileTooLarge: it cannot be a block. NoSpace, QuotaExceeded, EngineError.
        """
        folder = await self.lookups.find_directory(directory)
        if folder.nlink == 0:
            raise errors.NotFound(f"directory {directory} was removed")
        for is_last in (False, True):
            try:
                table = self.engine.table(directory, folder.namespace, like.uid, like.gid, S_IMODE(like.mode))
            except errors.NoSpace as error:
                raise errors.FileTooLarge(str(error)) from error  # too many tables: it becomes an ordinary file
            try:
                terms = RowTerms(like.expires, like.priority, shown_us=_microseconds(like.mtime))
                with self.engine.eviction.becoming(table, name):
                    (sequence,) = await self.engine.put(table, [name], [content], terms, is_admitted=True)
                break
            except errors.Stale:
                if is_last:
                    raise
        if await self.may_have_files(directory):
            await self.remove_file(directory, name)
        entry = self.search.find(directory, name)
        return entry if entry is not None and entry.sequence == sequence else None

    async def rename(self, source: BlockEntry, new: Node, name: bytes) -> bool:
        """Give a block another name in its directory without storing it again. False: that has to be."""
        if source.directory != new.ino or (new.ino, name) in self.sketches.by_place or new.nlink == 0:
            return False
        table = self.engine.tables.current(source.table)
        sequence = self.engine.rename(table, source.row, source.sequence, name)
        if sequence is None:
            return False
        if await self.may_have_files(new.ino):
            await self.remove_file(new.ino, name)
        entry = self.search.find(new.ino, name)
        if entry is not None and entry.sequence == sequence:
            self.open_blocks.written.note(source.ino, entry)
        return True

    async def may_have_files(self, directory: int) -> bool:
        """A name of it may mean an ordinary file. What a former daemon left unfinished is removed at the first look."""
        if directory not in self._looked_at:
            self._looked_at.add(directory)
            entries = await Listing(self.lookups, directory).read_entries(0, LOOKED_FOR)
            while entries:
                if any(not S_ISDIR(entry.attributes.mode) for entry in entries):
                    self.engine.with_files.add(directory)
                for entry in entries:
                    if entry.name.startswith(DRAFT) and (directory, entry.name) not in self._drafts:
                        await self.remove_file(directory, entry.name)
                entries = await Listing(self.lookups, directory).read_entries(entries[-1].cookie, LOOKED_FOR)
        return directory in self.engine.with_files

    async def remove_file(self, directory: int, name: bytes) -> None:
        """An ordinary file leaves its name to a block."""
        token = DECIDED.set(None)  # this is no request's own change
        try:
            node = (await self.lookups.find_name(directory, name)).node
            if node is not None and not node.is_directory:
                with suppress(errors.NotFound, errors.IsADirectory):
                    await self.names.unlink(directory, name)
        finally:
            DECIDED.reset(token)

    # -- closing ---------------------------------------------------------------------------------------

    async def release(self, handle: BlockHandle) -> None:
        """The handle is closed. ``file``: the caller closes it, too."""
        if isinstance(handle, OpenBlock):
            self.open_blocks.release(handle)
            return
        sketch = handle.sketch
        is_settled = not sketch.is_changed and sketch.size and not sketch.lock.locked()
        if handle.writable and sketch.writers == 1 and sketch.nlink and sketch.node is None and not is_settled:
            await self._settle(sketch, handle)
        del sketch.handles[handle]
        if not sketch.is_open:
            if sketch.is_rewritten and sketch.node is None:
                with sketch.content.view() as content:
                    self.open_blocks.rewrite(sketch.ino, bytes(content))
            if sketch.block is not None and not sketch.is_changed and sketch.nlink and sketch.node is None:
                self.open_blocks.written.note(sketch.ino, sketch.block)
                self.open_blocks.looked_up.note(replace(sketch.block, ino=sketch.ino), sketch.name)
            self.sketches.end(sketch)
        elif not sketch.writers:
            self.sketches.leave(sketch)

    async def _settle(self, sketch: Sketch, last: SketchHandle) -> None:
        """The last writer has closed a sketch: what the kernel wrote since, as of a mapping, becomes the block's.

        His close has returned by then: a block that somebody has stored since under the name of an empty file stays.
        """
        last.has_written = False
        try:
            async with sketch.lock:
                if not (sketch.writers == 1 and sketch.nlink and sketch.node is None):
                    return
                if sketch.is_refused:  # by now the name may mean what another host stored
                    raise errors.EngineError("its close has failed, and said so")
                if sketch.size:
                    await self.publish(sketch)
                elif (entry := self.search.find(*sketch.place)) is not None and entry.sequence != sketch.sequence:
                    self.sketches.unlink(sketch)
                else:
                    await self._become_ordinary(sketch)
        except errors.OperationError as error:
            log.warning("file %r of directory %d is lost: %s", sketch.name, sketch.directory, error)
            self.lookups.refresher.news.content(sketch.ino)

    # -- ordinary files --------------------------------------------------------------------------------

    async def make_ordinary(self, ino: int) -> Node:
        """Make a block or sketch an ordinary file. Stale, NoSpace, QuotaExceeded, EngineError."""
        token = DECIDED.set(None)  # what is decided here is not what a request asks for
        try:
            return await self._make_ordinary(ino)
        finally:
            DECIDED.reset(token)

    async def _make_ordinary(self, ino: int) -> Node:
        while (sketch := self.sketches.by_ino.get(ino)) is not None:
            async with sketch.lock:
                if sketch.node is not None:
                    return sketch.node
                if self.sketches.by_ino.get(ino) is sketch:  # its last close has not ended it meanwhile
                    return await self._become_ordinary(sketch)
        entry = self.open_blocks.entry_of(ino)
        return await self._make_block_ordinary(entry, await self.name_of(entry))

    async def _make_block_ordinary(self, entry: BlockEntry, name: bytes) -> Node:
        data = await self.open_blocks.read_whole(entry)
        ino = 0 if is_block(entry.ino) else entry.ino
        node = await self._make_file(entry, entry.directory, name, bytes(data), ino)
        self.open_blocks.written.forget(entry.ino)
        await self.engine.remove_entry(entry.table, entry.row, entry.sequence, name)
        await self.engine.writer.flush()
        return node

    async def _become_ordinary(self, sketch: Sketch) -> Node:
        """Under the lock of the sketch."""
        with sketch.content.view() as content:
            data = bytes(content)
        ino = 0 if is_block(sketch.ino) else sketch.ino
        name = sketch.name if sketch.nlink else DRAFT + b"%x" % sketch.ino
        node = await self._make_file(sketch, sketch.directory, name, data, ino)
        if self.core.unstored is not None:
            self.core.unstored.seal()  # the next daemon finds the file before it no longer finds the sketch
        for handle in sketch.handles:
            handle.file = FileHandle(node, handle.flags, handle.caller)
            handle.file.heard = self.core.doubt.epoch
        for reader in self.open_blocks.by_ino.get(sketch.ino, ()):
            reader.file = FileHandle(node, os.O_RDONLY, reader.caller)
        sketch.node = node
        self.sketches.leave(sketch)
        self.sketches.drop_bytes(sketch)
        if ino:
            self.sketches.lose_number(ino)
        if sketch.nlink:
            if any(await self.engine.remove(sketch.directory, [name])):
                await self.engine.writer.flush()
        else:
            await self.remove_file(sketch.directory, name)
        return node

    async def _make_file(self, like: Sketch | BlockEntry, directory: int, name: bytes, data: bytes, ino: int) -> Node:
        """A new ordinary file with these bytes. ``ino``: its number; 0: any.

        Where a block has the name, it has it until the file survives a loss of power, whole: there are both for a
        moment, should the daemon end then, and the block counts.
        """
        caller = Caller(like.uid, like.gid)
        begun = await self._find_begun(like, directory, name, ino)
        if begun is None:
            await self.remove_file(directory, name)
        is_block_there, final = self.engine.find(directory, name) is not None, name
        if is_block_there:
            if begun is not None:
                await self.remove_file(directory, name)
                begun = None
            name = DRAFT + b"%x" % (ino or like.ino)
            await self.remove_file(directory, name)
        self._drafts.add((directory, name))
        if begun is not None:
            node = begun
        else:
            is_uncounted = bool(ino) and not self.core.places.known(ino)  # C gave the number to the kernel
            _, node = await self.names.create(directory, name, S_IFREG | S_IMODE(like.mode), caller, ino=ino)
            if not is_uncounted:
                self.core.places.forget(node.ino, 1)
        node.mode, node.gid = S_IFREG | S_IMODE(like.mode), like.gid
        try:
            done = 0
            while done < len(data):
                count = await self.writer.write(node, done, data[done:] if done else data)
                if not count:
                    raise errors.NoSpace(f"no room for {name!r}, which cannot be a block")
                done += count
            node.atime, node.mtime, node.ctime = like.atime, like.mtime, like.ctime
            if is_block_there:
                await self.names.journal.commit(node, durable=True)
                await self.names.rename(directory, name, directory, final, 0)
                await self.names.journal.commit(node, durable=True)
        except BaseException:
            with trio.CancelScope(shield=True), suppress(errors.OperationError):
                await self.names.unlink(directory, node.name)
            raise
        finally:
            self._drafts.discard((directory, name))
        return node

    async def _find_begun(self, like: Sketch | BlockEntry, directory: int, name: bytes, ino: int) -> Node | None:
        """The ordinary file of this number that a former daemon had begun to make of a sketch; empty again."""
        if not ino or self.core.nodes.handover.is_first:
            return None
        node = (await self.lookups.find_name(directory, name)).node
        if node is None or node.ino != ino or not isinstance(like, Sketch):
            return None
        node.handles, node.writers = like.left.handles, like.left.writers  # the sketch has had the others
        await self.cutter.truncate(node, 0)
        return node

    @staticmethod
    def _node_of(sketch: Sketch) -> Node:
        assert sketch.node is not None, "a sketch that has become a file"
        return sketch.node

    # -- attributes ------------------------------------------------------------------------------------

    async def set_attributes(self, ino: int, changes: Changes, caller: Caller) -> Sketch | BlockEntry | Node:
        """As `api.InodeApi.set_attributes`. A node: the caller sets them, but for the size."""
        if changes.size is not None:
            found = await self._set_size(ino, changes.size, caller)
            if isinstance(found, Node):
                return found
            ino = found.ino
        if changes.mode is not None and changes.mode & 0o7777 & ~PERMISSIONS:
            return await self.make_ordinary(ino)
        if (sketch := self.sketches.by_ino.get(ino)) is not None:
            await self._is_sketch(sketch)
        found = self.attributes(ino)
        mode = found.mode if changes.mode is None else S_IFREG | S_IMODE(changes.mode)
        uid = found.uid if changes.uid is None else changes.uid
        gid = found.gid if changes.gid is None else changes.gid
        is_other = (mode, uid, gid) != (found.mode, found.uid, found.gid)
        if isinstance(found, Sketch):
            found.mode, found.uid, found.gid = mode, uid, gid
            found.is_changed |= is_other
            found.atime = found.atime if changes.atime is None else clock.storable(changes.atime)
            if changes.mtime is not None:
                found.mtime = clock.storable(changes.mtime)
                found.is_changed |= bool(found.size)
            found.ctime = clock.now()
            found.keep()
        elif isinstance(found, BlockEntry) and found.nlink:
            mtime = found.mtime if changes.mtime is None else 1000 * _microseconds(changes.mtime)
            if is_other or mtime != found.mtime:
                return await self._store_again(found, mode, uid, gid, mtime)
        elif isinstance(found, BlockEntry) and ino not in self.open_blocks.by_ino:
            raise errors.Stale(f"block {ino:#x} was removed")  # its name means something else by now: that is to change
        return found

    async def _set_size(self, ino: int, size: int, caller: Caller) -> Sketch | BlockEntry | Node:
        """truncate(2), which needs no descriptor. What the file is then."""
        handle = await self.open(ino, os.O_WRONLY, caller if caller.is_kernel else Caller(caller.uid, caller.gid))
        if isinstance(handle, Node):
            await self.cutter.truncate(handle, size)
            return handle
        assert isinstance(handle, SketchHandle)
        try:
            await self.truncate(handle, size)
            if handle.file is None and handle.sketch.writers == 1:
                await self.flush(handle)
            handle.has_written = False
        finally:
            with trio.CancelScope(shield=True):
                await self.release(handle)
                if handle.file is not None:
                    await self.release_file(handle.file)
        sketch = handle.sketch
        return sketch.node or (sketch if sketch.handles else self.find(*sketch.place) or sketch)

    async def _store_again(self, entry: BlockEntry, mode: int, uid: int, gid: int, mtime: int) -> BlockEntry:
        """Give a block another owner, mode or time: it has another row, perhaps of another table."""
        name = await self.name_of(entry)
        data = await self.open_blocks.read_whole(entry)
        self.open_blocks.looked_up.forget(entry.ino)
        entry.mode, entry.uid, entry.gid, entry.mtime = mode, uid, gid, mtime
        with memoryview(data) as content:
            block = await self.put(entry, entry.directory, name, content)
        for handle in self.open_blocks.by_ino.get(entry.ino, ()):
            handle.entry.mode, handle.entry.uid, handle.entry.gid, handle.entry.mtime = mode, uid, gid, mtime
        if block is None:
            return entry
        self.open_blocks.written.note(entry.ino, block)
        return self.open_blocks.written.show(block)

    def describe(self, ino: int) -> dict[str, Any]:
        found = self.attributes(ino)
        kind = "sketch" if isinstance(found, Sketch) else "block"
        facts = {"ino": found.ino, "kind": kind, "size": found.size, "blocks": found.blocks, "nlink": found.nlink}
        if isinstance(found, BlockEntry):
            facts |= {"in_memory": found.arena != 0, "expires": found.expires, "priority": found.priority}
            facts |= {"extents": self._describe_slot(found)}
        return facts

    def _describe_slot(self, entry: BlockEntry) -> list[dict[str, object]]:
        """Where a block is on the medium; empty: it is not written yet."""
        row, geometry = entry.table.rows[entry.row], self.engine.core.geometry
        if int(row["sequence"]) != entry.sequence or int(row["flags"]) & (forms.DIRTY | forms.WRITING):
            return []
        slab, slot = int(row["slab"]), int(row["slot"])
        _, start = self.engine.native.slot_places(slab, slot)
        segment, offset = geometry.locate(slab * geometry.slab_size + start)
        return [{"segment": segment, "offset": offset, "slab": slab, "length": entry.size}]

    def statistics(self) -> dict[str, int]:
        in_c, found = self.engine.answers.statistics(), self.open_blocks.statistics()
        found["open_blocks"] += in_c["open_handles"]
        return {"sketches": len(self.sketches.by_ino) + in_c["drafts"], **found}


def _microseconds(moment: int) -> int:
    """The nearest time that a block can have. ``moment``: in nanoseconds."""
    return min(max(moment // 1000, 1), TIME_MAX_US)
