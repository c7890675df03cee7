"""Names in directories of blocks, for the file door: a name means a block, a sketch or an ordinary file.

Rows are looked at before the dentries of files. Where a name gets another meaning, the new one is there before the
former one goes: who looks the name up finds the one or the other.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from stat import S_IFREG, S_IMODE, S_ISGID

import trio

from kvfuse import errors
from kvfuse.volume.api import NAME_MAX, RENAME_EXCHANGE, RENAME_NOREPLACE, Attributes, Caller
from kvfuse.volume.blocks.block_files import PERMISSIONS, BlockFiles
from kvfuse.volume.blocks.block_listing import BlockListing
from kvfuse.volume.blocks.block_numbers import is_block
from kvfuse.volume.blocks.open_blocks import BlockEntry
from kvfuse.volume.blocks.sketches import FLOOR, Sketch, SketchHandle
from kvfuse.volume.inodes import privileges
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views import clock
from kvfuse.volume.views.handover import DECIDED


@dataclass
class BlockNames:
    """Of one membership. Event loop only."""

    files: BlockFiles

    def __post_init__(self) -> None:
        files = self.files
        self._core, self._engine, self._lookups, self._names = files.core, files.engine, files.lookups, files.names
        self._sketches = files.sketches
        self.listing = BlockListing(files)
        self._moving = trio.Lock()
        """of whoever needs the locks of two sketches"""

    def is_known_block_directory(self, ino: int) -> bool:
        """Whether it is one, as far as memory knows; of one that is not there: whether it may be."""
        node = self._core.nodes.get(ino)
        if node is not None:
            return self._engine.is_block_namespace(node.namespace)
        return any(found.settings.is_blocks for found in self._core.namespaces.all.values())

    async def folder(self, ino: int, name: bytes = b"") -> Node | None:
        """The directory, if it has blocks. NotADirectory, Stale."""
        if not self.is_known_block_directory(ino):
            return None
        node = await self._lookups.find_directory(ino)
        if not self._engine.is_block_namespace(node.namespace):
            return None
        if self._engine.is_shared and not (name and self._sketches.by_place.get((ino, name))):
            names = [name] if name and len(name) <= NAME_MAX else []
            await self._engine.renew(is_strict=self._lookups.has_strict_blocks(node), directory=ino, names=names)
        return node

    # -- looking ---------------------------------------------------------------------------------------

    def look_up(self, folder: Node, name: bytes) -> Sketch | BlockEntry | None:
        """What a name means, if it is no ordinary file; counted as known to the kernel."""
        found = self.files.find(folder.ino, name)
        if found is not None:
            self._count_lookup(found.ino, folder.ino, name)
        if isinstance(found, BlockEntry):
            self.files.open_blocks.looked_up.note(found, name)
        return found

    def look_up_number(self, ino: int) -> Attributes:
        """What a number of a block or a sketch means, which the kernel had forgotten; counted as known to it. Stale."""
        sketch = self._sketches.by_ino.get(ino)
        if sketch is not None and sketch.node is not None:
            return self._lookups.count_lookup(sketch.node)
        found = sketch if sketch is not None else self.files.open_blocks.find_named(ino)
        if found is None or not found.nlink:
            raise errors.Stale(f"block {ino:#x} was removed")
        self._count_lookup(ino, found.directory, b"")
        return found

    def look_failed(self, folder: Node, name: bytes) -> None:
        """The kernel looked up a name that means nothing, not even an ordinary file."""
        self._engine.eviction.looked(folder.ino, name)

    def _count_lookup(self, ino: int, directory: int, name: bytes) -> None:
        if not is_block(ino):
            self._core.places.add(ino, directory, name)

    # -- making ----------------------------------------------------------------------------------------

    def check_free(self, folder: Node, name: bytes) -> None:
        """Exists: a block or a sketch has the name."""
        if self.files.find(folder.ino, name) is not None:
            raise errors.Exists(f"{name!r} exists in directory {folder.ino}")

    async def create(self, folder: Node, name: bytes, mode: int, caller: Caller, flags: int) -> SketchHandle | None:
        """A new sketch, open. None: it has to be an ordinary file. Exists, NotFound, NameTooLong."""
        self.check_free(folder, name)
        mode = privileges.mode_of_new(folder, S_IFREG | S_IMODE(mode), caller)
        if (await self._lookups.find_name(folder.ino, name)).node is not None:
            raise errors.Exists(f"{name!r} exists in directory {folder.ino}")
        self.check_free(folder, name)
        if folder.nlink == 0:
            raise errors.NotFound(f"directory {folder.ino} was removed")
        if S_IMODE(mode) & ~PERMISSIONS:
            return None
        gid = folder.gid if folder.mode & S_ISGID else caller.gid
        sketch = Sketch(self._core.inodes.next(), folder.ino, folder.namespace, name, mode, caller.uid, gid)
        if not self._sketches.resize(sketch, FLOOR):
            return None
        if (decided := DECIDED.get()) is not None:
            decided(sketch.ino, 0)
        self._sketches.add(sketch)
        self._engine.eviction.named(folder.ino, name)
        self._note_change(folder)
        self._count_lookup(sketch.ino, *sketch.place)
        return SketchHandle(sketch, flags, caller)

    # -- removing --------------------------------------------------------------------------------------

    async def unlink(self, folder: Node, name: bytes) -> bool:
        """Remove a block or sketch. False: the name means an ordinary file, or nothing."""
        while (found := self.files.find(folder.ino, name)) is not None:
            if (decided := DECIDED.get()) is not None:
                decided(self._lasting_number(found), 0)
            if await self._detach(found, name):
                break
        else:
            return False
        if await self.files.may_have_files(folder.ino):
            await self.files.remove_file(folder.ino, name)
        self._note_change(folder)
        if self._lookups.has_strict_blocks(folder):
            await self._engine.flush()
        return True

    def _note_change(self, *folders: Node) -> None:
        """Names of directories have changed."""
        for folder in folders:
            folder.mtime = folder.ctime = clock.now()
            self._names.journal.pending.touch_times(folder)

    def _lasting_number(self, found: Sketch | BlockEntry) -> int:
        """The number that the name has for the next daemon: it knows no sketch that is in the memory of this one."""
        if isinstance(found, Sketch) and not found.content.is_kept:
            entry = self.files.search.find(*found.place)
            return self.files.open_blocks.written.show(entry).ino if entry is not None else found.ino
        return found.ino

    async def _detach(self, found: Sketch | BlockEntry, name: bytes) -> bool:
        """It loses its name. False: it did not have it any more."""
        if isinstance(found, BlockEntry):
            return await self._engine.remove_entry(found.table, found.row, found.sequence, name)
        async with found.lock:
            if self._sketches.by_place.get(found.place) is not found:
                return False
            await self._engine.remove(found.directory, [found.name])
            self._sketches.unlink(found)
            return True

    # -- renaming --------------------------------------------------------------------------------------

    async def rename(self, old: Node, name: bytes, new: Node, new_name: bytes, flags: int) -> bool:
        """Rename what is no ordinary file, or takes the name of such. False: both are ordinary files, or none.

        What is exchanged becomes an ordinary file. The errors of rename(2).
        """
        while True:
            source, target = self.files.find(old.ino, name), self.files.find(new.ino, new_name)
            if source is None and target is None:
                return False
            source_node = None if source is not None else (await self._lookups.find_name(old.ino, name)).node
            target_node = None if target is not None else (await self._lookups.find_name(new.ino, new_name)).node
            if source is None and source_node is None:
                raise errors.NotFound(f"{name!r} does not exist in directory {old.ino}")
            self._check_flags(flags, target or target_node, new_name)
            _check_directories(old, new, new_name)
            if flags == RENAME_EXCHANGE:
                for found in (source, target):
                    if found is not None:
                        await self.files.make_ordinary(found.ino)
                return False
            if (old.ino, name) == (new.ino, new_name):
                return True
            if source is None:
                await self._take_name(old, name, new, new_name)
                return True
            if target_node is not None and target_node.is_directory:
                raise errors.IsADirectory(f"{new_name!r} is a directory")
            if (decided := DECIDED.get()) is not None:
                decided(self._lasting_number(source), target.ino if target is not None else 0)
            if await self._move(source, name, new, new_name):
                break
        if target_node is not None:
            await self.files.remove_file(new.ino, new_name)
        self._note_change(old, new)
        self._core.counters.renames += 1
        if self._lookups.has_strict_blocks(new):
            await self._engine.flush()
        return True

    @staticmethod
    def _check_flags(flags: int, target: object | None, name: bytes) -> None:
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise errors.InvalidArgument(f"rename flags {flags:#x} are not supported")
        if flags == RENAME_NOREPLACE and target is not None:
            raise errors.Exists(f"{name!r} exists")
        if flags == RENAME_EXCHANGE and target is None:
            raise errors.NotFound(f"{name!r} does not exist")

    async def _take_name(self, old: Node, name: bytes, new: Node, new_name: bytes) -> None:
        """An ordinary file takes the name of a block or sketch."""
        node = (await self._lookups.find_name(old.ino, name)).node
        if node is not None and node.is_directory:
            raise errors.NotADirectory(f"{new_name!r} is not a directory")
        directory, moved = await self._names.rename(old.ino, name, new.ino, new_name, 0)
        target = self.files.find(new.ino, new_name)
        if target is not None:
            await self._detach(target, new_name)
        await self._names.publish(directory, moved)

    async def _move(self, source: Sketch | BlockEntry, name: bytes, new: Node, new_name: bytes) -> bool:
        """Give a block or sketch another name, and take it from whoever has it. False: the name means another one by
        now. NoSpace, QuotaExceeded, EngineError."""
        if isinstance(source, Sketch):
            async with self._moving:
                return await self._move_sketch(source, (source.directory, name), new, new_name)
        if await self.files.rename(source, new, new_name):
            return True
        try:
            data = await self.files.open_blocks.read_whole(source)
        except errors.Stale:
            return False
        target = self._sketches.by_place.get((new.ino, new_name))
        async with nullcontext() if target is None else target.lock:
            with memoryview(data) as content:
                block = await self.files.put(source, new.ino, new_name, content)
            if target is not None:
                self._sketches.unlink(target)
        await self._engine.remove_entry(source.table, source.row, source.sequence, name)
        if block is not None:
            self.files.open_blocks.written.note(source.ino, block)
        return True

    async def _move_sketch(self, sketch: Sketch, before: tuple[int, bytes], new: Node, new_name: bytes) -> bool:
        """Where the former name means a block, the new one does before that goes."""
        target = self._sketches.by_place.get((new.ino, new_name))
        async with sketch.lock, nullcontext() if target is None else target.lock:
            if self._sketches.by_place.get(before) is not sketch:
                return False
            was_changed = sketch.is_changed
            block = self._engine.find(*before)
            if target is not None:
                self._sketches.leave(target)
            self._sketches.move(sketch, new.ino, new_name)
            sketch.is_changed = was_changed or block is not None
            try:
                if block is not None:
                    await self.files.publish(sketch)
            except BaseException:
                self._sketches.move(sketch, *before)
                sketch.is_changed = was_changed
                if target is not None:
                    self._sketches.enter(target)
                raise
            if block is not None:
                await self._engine.remove_entry(*block, before[1])
            if target is not None:
                self._sketches.unlink(target)
            sketch.keep()
            if not is_block(sketch.ino):
                self._core.places.set(sketch.ino, new.ino, new_name)
                self._core.nodes.handover.moved(sketch.ino, new.ino, new_name)  # C may have told the kernel of it
            return True


def _check_directories(old: Node, new: Node, name: bytes) -> None:
    """NotFound, CrossesNamespaces."""
    if new.nlink == 0:
        raise errors.NotFound(f"directory {new.ino} was removed")
    if old.namespace != new.namespace:
        raise errors.CrossesNamespaces(f"{name!r} would be in another namespace: copy it there")
