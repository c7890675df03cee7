"""Files of block directories by their inode numbers: blocks that are read, drafts that are written.

A draft becomes the block of its name when a descriptor of it is closed and nobody else is in the middle of writing it.
What cannot be a block becomes an ordinary file under the same number: what is larger than a block may be, has far
holes, other bits of a mode than permissions, a second name or attributes of its own; and what is empty, at the last
close. An ordinary file of a block directory stays one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from stat import S_IFREG, S_IMODE
from typing import Any

import trio

from kvfuse import errors
from kvfuse.volume.api import Caller, Changes, RowTerms
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.blocks.block_numbers import is_block
from kvfuse.volume.blocks.drafts import FLOOR, HOLE_MAX, Draft, DraftHandle, Drafts
from kvfuse.volume.blocks.open_blocks import BlockEntry, CopyMemory, NameSearch, OpenBlock, OpenBlocks
from kvfuse.volume.content.cutting import Cutter
from kvfuse.volume.content.writer import Writer
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.views import clock

log = logging.getLogger(__name__)

PERMISSIONS = 0o777
"""bits of a mode that a block has"""
NOBODY = Caller(0, 0)
ROOM_SECONDS = 1.0
"""for which a write waits for memory before its draft becomes an ordinary file"""

BlockHandle = OpenBlock | DraftHandle


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
        self.drafts = Drafts(memory, self.engine.names_held)
        self.open_blocks = OpenBlocks(self.engine, memory)
        self.search = NameSearch(self.engine)
        self._restored: dict[int, OpenBlock] = {}
        """blocks that were open in the former daemon, and whose handles were not asked for yet"""

    # -- numbers ---------------------------------------------------------------------------------------

    def has(self, ino: int) -> bool:
        """The number is one of a block, or of a draft."""
        return is_block(ino) or ino in self.drafts.by_ino

    def attributes(self, ino: int) -> BlockEntry | Draft | Node:
        """Stale: it was removed."""
        draft = self.drafts.by_ino.get(ino)
        if draft is not None:
            return draft if draft.node is None else draft.node
        return self.open_blocks.entry_of(ino)

    def namespace_of(self, ino: int) -> int:
        draft = self.drafts.by_ino.get(ino)
        return draft.namespace if draft is not None else self.open_blocks.entry_of(ino).table.namespace

    @staticmethod
    def namespace_of_handle(handle: BlockHandle) -> int:
        return handle.entry.table.namespace if isinstance(handle, OpenBlock) else handle.draft.namespace

    def find(self, directory: int, name: bytes) -> Draft | BlockEntry | None:
        """What a name means, if it is no ordinary file."""
        return self.drafts.by_place.get((directory, name)) or self.search.find(directory, name)

    async def name_of(self, entry: BlockEntry) -> bytes:
        """Stale: the block was removed."""
        now = self.engine.now(entry.table.namespace)
        rows, _ = self.engine.native.list_rows(entry.table.place, entry.directory, entry.row - 1, 1, now)
        if not rows or rows[0][:2] != (entry.row, entry.sequence):
            raise errors.Stale(f"block {entry.ino:#x} was removed")
        name = rows[0][4]
        return name if name is not None else (await self.engine.slabs.read_names([rows[0][5:]]))[0]

    # -- opening ---------------------------------------------------------------------------------------

    async def open(self, ino: int, flags: int, caller: Caller) -> BlockHandle | Node:
        """Open a block or a draft. A node: it is an ordinary file by now. Stale, EngineError."""
        if not caller.is_kernel:  # rings know files by their inodes
            return await self.make_ordinary(ino)
        draft: Draft | Node | None = self.drafts.by_ino.get(ino)
        if draft is None and not flags & os.O_TRUNC and flags & os.O_ACCMODE == os.O_RDONLY:
            return await self._open_block(ino, flags, caller)
        if draft is None:
            draft = await self._copy_to_draft(ino, is_empty=bool(flags & os.O_TRUNC))
        if isinstance(draft, Draft):
            await self._is_draft(draft)
            draft = draft.node or draft
        if isinstance(draft, Node):
            return draft
        handle = DraftHandle(draft, flags, caller)
        if handle.writable and draft.nlink:
            self.drafts.enter(draft)
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

    async def _copy_to_draft(self, ino: int, *, is_empty: bool) -> Draft | Node:
        """A draft under the number of a block. A node: there is no memory for one. Stale."""
        entry = self.open_blocks.entry_of(ino)
        name = await self.name_of(entry)
        size = 0 if is_empty else entry.size
        draft = Draft(ino, entry.directory, entry.table.namespace, name, entry.mode, entry.uid, entry.gid)
        if not self.drafts.resize(draft, max(FLOOR, size)):
            return await self._make_block_ordinary(entry, name)
        try:
            data = b"" if is_empty else await self.open_blocks.read_whole(entry)
            other = self.find(entry.directory, name)
            if other is None or other.ino != ino:
                raise errors.Stale(f"block {ino:#x} was replaced")
        except BaseException:
            self.drafts.resize(draft, 0)
            raise
        if isinstance(other, Draft):  # somebody was faster
            self.drafts.resize(draft, 0)
            return other
        draft.data += data
        draft.is_changed = is_empty
        draft.expires, draft.priority = entry.expires, entry.priority
        draft.atime = draft.mtime = draft.ctime = entry.mtime
        self.drafts.add(draft)
        return draft

    # -- from the former daemon ------------------------------------------------------------------------

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
            return await self.open_blocks.read(handle, offset, size)
        return bytes(memoryview(handle.draft.data)[offset : offset + size])

    # -- writing ---------------------------------------------------------------------------------------

    async def write(self, handle: BlockHandle, offset: int, data: bytes | memoryview) -> int | None:
        """How much was taken. None: it has become an ordinary file, which takes it. The errors of `Writer.write`."""
        if isinstance(handle, OpenBlock):
            raise errors.BadHandle("the block is open for reading")
        draft = handle.draft
        while await self._is_draft(draft):
            start = len(draft.data) if handle.appends else offset
            if await self._has_room(draft, start, start + len(data)):
                draft.put_bytes(start, data)
                handle.has_written = True
                return len(data)
        return None

    async def truncate(self, handle: DraftHandle, size: int) -> None:
        """Set the size of a draft, or of the ordinary file that it becomes or has become."""
        draft = handle.draft
        while await self._is_draft(draft):
            if await self._has_room(draft, size, size):
                draft.set_size(size)
                self.drafts.resize(draft, max(FLOOR, size))
                handle.has_written = True
                return
        await self.cutter.truncate(self._node_of(draft), size)

    async def _is_draft(self, draft: Draft) -> bool:
        """Whether it is one, once nobody is about to change that. True: its bytes may change until the next await."""
        if draft.lock.locked():
            async with draft.lock:  # who has it next begins later
                pass
        return draft.node is None

    async def _has_room(self, draft: Draft, start: int, end: int) -> bool:
        """Whether a draft has memory for bytes up to ``end``. False: the caller looks at it again, as it has waited, or
        the draft has become an ordinary file."""
        size = len(draft.data)
        if end <= self.engine.block_max and start - size <= HOLE_MAX:
            if self.drafts.resize(draft, max(draft.reserved, FLOOR, end)):
                return True
            if self.drafts.memory.used > draft.reserved:
                await self.drafts.wait_for_room(ROOM_SECONDS)
                if self.drafts.resize(draft, max(draft.reserved, FLOOR, end)):
                    return False
        async with draft.lock:
            if draft.node is None:
                await self._become_ordinary(draft)
        return False

    # -- publishing ------------------------------------------------------------------------------------

    async def flush(self, handle: BlockHandle) -> None:
        """A descriptor was closed: the name means the block when this returns, unless others still write it."""
        if isinstance(handle, OpenBlock) or not handle.writable:
            return
        draft = handle.draft
        handle.has_written = False
        if draft.nlink and not draft.is_being_written:
            try:
                draft.lock.acquire_nowait()
            except trio.WouldBlock:
                await draft.lock.acquire()
            try:
                await self.publish(draft)
            finally:
                draft.lock.release()
            if draft.node is None and self.lookups.is_strict(await self.lookups.find_directory(draft.directory)):
                await self.engine.writer.flush()

    async def fsync(self, handle: BlockHandle) -> None:
        """What is in the file now survives a loss of power."""
        if isinstance(handle, DraftHandle) and handle.draft.nlink:
            async with handle.draft.lock:
                if handle.draft.data:
                    await self.publish(handle.draft)
                elif handle.draft.node is None:
                    await self._become_ordinary(handle.draft)
        if handle.file is None:
            await self.engine.writer.flush()

    async def publish(self, draft: Draft) -> None:
        """Have the name of a draft mean a block with its bytes, or an ordinary file. Under the draft's lock.

        NoSpace, QuotaExceeded, EngineError: the name means what it meant.
        """
        if draft.node is not None or not draft.is_changed or not draft.data:
            return
        if draft.mode & 0o7777 & ~PERMISSIONS or len(draft.data) > self.engine.block_max:
            await self._become_ordinary(draft)
            return
        try:
            with memoryview(draft.data) as content:
                await self.put(draft, draft.directory, draft.name, content)
        except errors.FileTooLarge:
            await self._become_ordinary(draft)
        else:
            draft.is_changed = False

    async def put(self, like: Draft | BlockEntry, directory: int, name: bytes, content: memoryview) -> None:
        """Store a block with owner, mode and terms of another one, in the place of whatever has the name.

        FileTooLarge: it cannot be a block. NoSpace, QuotaExceeded, EngineError.
        """
        folder = await self.lookups.find_directory(directory)
        for is_last in (False, True):
            try:
                table = self.engine.table(directory, folder.namespace, like.uid, like.gid, S_IMODE(like.mode))
            except errors.NoSpace as error:
                raise errors.FileTooLarge(str(error)) from error  # too many tables: it becomes an ordinary file
            try:
                terms = RowTerms(like.expires, like.priority)
                await self.engine.put(table, [name], [content], terms, is_admitted=True)
                break
            except errors.Stale:
                if is_last:
                    raise
        if directory in self.engine.with_files:
            await self.remove_file(directory, name)

    async def remove_file(self, directory: int, name: bytes) -> None:
        """An ordinary file leaves its name to a block."""
        node = (await self.lookups.find_name(directory, name)).node
        if node is not None and not node.is_directory:
            with suppress(errors.NotFound, errors.IsADirectory):
                await self.names.unlink(directory, name)

    # -- closing ---------------------------------------------------------------------------------------

    async def release(self, handle: BlockHandle) -> None:
        """The handle is closed. ``file``: the caller closes it, too."""
        if isinstance(handle, OpenBlock):
            self.open_blocks.release(handle)
            return
        draft = handle.draft
        is_settled = not draft.is_changed and draft.data and not draft.lock.locked()
        if handle.writable and draft.writers == 1 and draft.nlink and draft.node is None and not is_settled:
            await self._settle(draft, handle)
        del draft.handles[handle]
        if not draft.handles:
            self.drafts.end(draft)
        elif not draft.writers:
            self.drafts.leave(draft)

    async def _settle(self, draft: Draft, last: DraftHandle) -> None:
        """The last writer has closed a draft: what the kernel wrote since, as of a mapping, becomes the block's."""
        last.has_written = False
        try:
            async with draft.lock:
                if draft.writers == 1 and draft.nlink and draft.node is None:
                    await (self.publish(draft) if draft.data else self._become_ordinary(draft))
        except errors.OperationError as error:
            log.warning("file %r of directory %d is lost: %s", draft.name, draft.directory, error)
            self.lookups.refresher.news.content(draft.ino)

    # -- ordinary files --------------------------------------------------------------------------------

    async def make_ordinary(self, ino: int) -> Node:
        """Make a block or draft an ordinary file. Stale, NoSpace, QuotaExceeded, EngineError."""
        draft = self.drafts.by_ino.get(ino)
        if draft is None:
            entry = self.open_blocks.entry_of(ino)
            return await self._make_block_ordinary(entry, await self.name_of(entry))
        async with draft.lock:
            return draft.node or await self._become_ordinary(draft)

    async def _make_block_ordinary(self, entry: BlockEntry, name: bytes) -> Node:
        data = await self.open_blocks.read_whole(entry)
        node = await self._make_file(entry, entry.directory, name, bytes(data), 0)
        self.engine.drop_entry(entry.table, entry.row, entry.sequence)
        return node

    async def _become_ordinary(self, draft: Draft) -> Node:
        """Under the lock of the draft."""
        data, ino = bytes(draft.data), 0 if is_block(draft.ino) else draft.ino
        name = draft.name if draft.nlink else b".kvfuse-%x" % draft.ino
        node = await self._make_file(draft, draft.directory, name, data, ino)
        for handle in draft.handles:
            handle.file = FileHandle(node, handle.flags, handle.caller)
            handle.file.heard = self.core.doubt.epoch
        draft.node = node
        self.drafts.leave(draft)
        draft.data = bytearray()
        self.drafts.resize(draft, 0)
        if ino:
            self.drafts.by_ino.pop(ino, None)
        if draft.nlink:
            self.engine.drop(draft.directory, [name])
        else:
            await self.names.unlink(draft.directory, name)
        return node

    async def _make_file(self, like: Draft | BlockEntry, directory: int, name: bytes, data: bytes, ino: int) -> Node:
        """A new ordinary file with these bytes. ``ino``: its number; 0: any."""
        caller = Caller(like.uid, like.gid)
        if directory in self.engine.with_files:
            await self.remove_file(directory, name)
        _, node = await self.names.create(directory, name, S_IFREG | S_IMODE(like.mode), caller, ino=ino)
        self.core.places.forget(node.ino, 1)
        node.mode, node.gid = S_IFREG | S_IMODE(like.mode), like.gid
        try:
            done = 0
            while done < len(data):
                count = await self.writer.write(node, done, data[done:] if done else data)
                if not count:
                    raise errors.NoSpace(f"no room for {name!r}, which cannot be a block")
                done += count
        except BaseException:
            with trio.CancelScope(shield=True), suppress(errors.OperationError):
                await self.names.unlink(directory, name)
            raise
        node.atime, node.mtime = like.atime, like.mtime
        return node

    @staticmethod
    def _node_of(draft: Draft) -> Node:
        assert draft.node is not None, "a draft that has become a file"
        return draft.node

    # -- attributes ------------------------------------------------------------------------------------

    async def set_attributes(self, ino: int, changes: Changes, caller: Caller) -> Draft | BlockEntry | Node:
        """As `api.InodeApi.set_attributes`. A node: the caller sets them, but for the size. Times of a block stay."""
        if changes.size is not None:
            found = await self._set_size(ino, changes.size, caller)
            if isinstance(found, Node):
                return found
            ino = found.ino
        if changes.mode is not None and changes.mode & 0o7777 & ~PERMISSIONS:
            return await self.make_ordinary(ino)
        if (draft := self.drafts.by_ino.get(ino)) is not None:
            await self._is_draft(draft)
        found = self.attributes(ino)
        mode = found.mode if changes.mode is None else S_IFREG | S_IMODE(changes.mode)
        uid = found.uid if changes.uid is None else changes.uid
        gid = found.gid if changes.gid is None else changes.gid
        is_other = (mode, uid, gid) != (found.mode, found.uid, found.gid)
        if isinstance(found, Draft):
            found.mode, found.uid, found.gid = mode, uid, gid
            found.is_changed |= is_other
            found.atime = found.atime if changes.atime is None else clock.storable(changes.atime)
            found.mtime = found.mtime if changes.mtime is None else clock.storable(changes.mtime)
            found.ctime = clock.now()
        elif isinstance(found, BlockEntry) and is_other:
            return await self._move_to_readers(found, mode, uid, gid)
        return found

    async def _set_size(self, ino: int, size: int, caller: Caller) -> Draft | BlockEntry | Node:
        """truncate(2), which needs no descriptor. What the file is then."""
        handle = await self.open(ino, os.O_WRONLY, caller if caller.is_kernel else Caller(caller.uid, caller.gid))
        if isinstance(handle, Node):
            await self.cutter.truncate(handle, size)
            return handle
        assert isinstance(handle, DraftHandle)
        try:
            await self.truncate(handle, size)
            if handle.file is None and handle.draft.writers == 1:
                await self.flush(handle)
            handle.has_written = False
        finally:
            with trio.CancelScope(shield=True):
                await self.release(handle)
                if handle.file is not None:
                    await self.release_file(handle.file)
        draft = handle.draft
        return draft.node or (draft if draft.handles else self.find(*draft.place) or draft)

    async def _move_to_readers(self, entry: BlockEntry, mode: int, uid: int, gid: int) -> BlockEntry:
        """Give a block another owner or mode: it moves to another table, and has another number."""
        name = await self.name_of(entry)
        data = await self.open_blocks.read_whole(entry)
        entry.mode, entry.uid, entry.gid = mode, uid, gid
        with memoryview(data) as content:
            await self.put(entry, entry.directory, name, content)
        for handle in self.open_blocks.by_ino.get(entry.ino, ()):
            handle.entry.mode, handle.entry.uid, handle.entry.gid = mode, uid, gid
        return self.search.find(entry.directory, name) or entry

    def describe(self, ino: int) -> dict[str, Any]:
        found = self.attributes(ino)
        kind = "draft" if isinstance(found, Draft) else "block"
        facts = {"ino": found.ino, "kind": kind, "size": found.size, "blocks": found.blocks, "nlink": found.nlink}
        if isinstance(found, BlockEntry):
            facts |= {"in_memory": found.arena != 0, "expires": found.expires, "priority": found.priority}
        return facts

    def statistics(self) -> dict[str, int]:
        return {"drafts": len(self.drafts.by_ino), **self.open_blocks.statistics()}
