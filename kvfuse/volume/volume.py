"""A mounted volume: puts the parts of this room together behind `api.TreeApi`, `FileApi` and `RingApi`."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE, Caller, Changes, DirEntry, KernelCache, Space
from kvfuse.volume.content.in_place import has_unsealed
from kvfuse.volume.content.refresh import is_quiet
from kvfuse.volume.inodes import privileges
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.inodes.node import Node, check_remembered
from kvfuse.volume.opening.holding import Held, hold
from kvfuse.volume.running import RunningVolume, make_parts
from kvfuse.volume.store import schema
from kvfuse.volume.views import clock
from kvfuse.volume.views.content_map import ContentMap

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_volume(options: Options, mountpoint: str = "") -> AsyncIterator[Volume]:
    """The volume that ``options`` name; flushed and closed at the end. One in a folder is held alone.

    VolumeError, VolumeBusy where it cannot be opened. ``mountpoint``: for others to know who holds it.
    """
    async with (
        hold(options, mountpoint, read_only=options.mount.read_only, alone=False) as held,
        run_volume(options, held) as volume,
    ):
        yield volume


@asynccontextmanager
async def run_volume(options: Options, held: Held) -> AsyncIterator[Volume]:
    """A volume over engines that are open and stay the caller's; flushed at the end."""
    parts = await make_parts(options, held)
    async with trio.open_nursery() as nursery:
        volume = Volume(parts, options, nursery, held)
        try:
            await volume.start()
            yield volume
        finally:
            with trio.CancelScope(shield=True):
                await volume.finish()


class Volume(RunningVolume):
    """The operations of `api` on one set of engines. Opened by `open_volume`."""

    # -- names ---------------------------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes) -> Node:
        return self.lookups.count_lookup(await self.lookups.by_name(parent, name))

    def forget(self, ino: int, count: int) -> None:
        node = self.lookups.forget(ino, count)
        if node is not None:
            if not node.reaped:
                self.names.nameless.reap(node)
            self.core.nodes.drop(node)

    def remember(self, parent: int, entry: DirEntry) -> None:
        self.core.places.add(entry.attributes.ino, parent, entry.name)

    def kernel_knows(self, ino: int) -> bool:
        return ino == ROOT_INODE or self.core.places.known(ino)

    def may_keep(self, directory: int) -> bool:
        return not self.lookups.asks(directory)

    def tell(self, kernel: KernelCache) -> None:
        """Who is told of what other hosts change."""
        self.core.kernel.connect(kernel)

    def may_keep_attributes(self, ino: int) -> bool:
        return not self.lookups.is_doubtful(ino)

    async def attributes(self, ino: int) -> Node:
        node = await self.lookups.current(ino)
        self.access.look(node.map)
        return node

    async def set_attributes(self, ino: int, changes: Changes, caller: Caller) -> Node:
        self._check_writable()
        node = await self.lookups.current(ino)
        if changes == Changes():
            privileges.heed_word_of_write(node, caller)
        if changes.size is not None:
            if not node.is_file:
                raise errors.InvalidArgument(f"inode {ino} is no file: it has no size to set")
            _check_content(node)
            await self.cutter.truncate(node, changes.size)
        if (changes.mode, changes.uid, changes.gid) != (None, None, None):
            self.core.readers_change(node)
        if changes.mode is not None:
            privileges.set_permissions(node, changes.mode, caller)
        if changes.size is not None:
            privileges.lose_privileges(node, caller)
        if changes.uid is not None or changes.gid is not None:
            privileges.lose_privileges_to_owner(node, caller)
            node.uid = node.uid if changes.uid is None else changes.uid
            node.gid = node.gid if changes.gid is None else changes.gid
        node.atime = node.atime if changes.atime is None else clock.storable(changes.atime)
        node.mtime = node.mtime if changes.mtime is None else clock.storable(changes.mtime)
        node.ctime = clock.now()
        only_size = dataclasses.replace(changes, size=None, mtime=None, ctime=None) == Changes()
        self.journal.pending.touch(node, forced=not only_size)
        if node.is_directory:
            self.journal.pending.touch_times(node)
        if self.core.shared and not node.writers:
            await self._publish_attributes(node)
        return node

    async def create(self, parent: int, name: bytes, mode: int, caller: Caller, flags: int) -> tuple[FileHandle, Node]:
        self._check_writable()
        directory, node = await self.names.create(parent, name, stat.S_IFREG | stat.S_IMODE(mode), caller)
        handle = self._open(node, flags, caller)
        await self.names.publish(directory, node)
        return handle, node

    async def make_node(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Node:
        return await self._make(parent, name, mode, caller, rdev=rdev)

    async def make_directory(self, parent: int, name: bytes, mode: int, caller: Caller) -> Node:
        return await self._make(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), caller)

    async def make_symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Node:
        return await self._make(parent, name, stat.S_IFLNK | 0o777, caller, target=target)

    async def _make(
        self, parent: int, name: bytes, mode: int, caller: Caller, *, rdev: int = 0, target: bytes = b""
    ) -> Node:
        self._check_writable()
        directory, node = await self.names.create(parent, name, mode, caller, rdev=rdev, target=target)
        await self.names.publish(directory, node)
        return node

    async def link(self, ino: int, parent: int, name: bytes) -> Node:
        self._check_writable()
        directory, node = await self.names.link(ino, parent, name)
        await self.names.publish(directory, node)
        return node

    async def read_symlink(self, ino: int) -> bytes:
        node = await self.lookups.current(ino)
        if not stat.S_ISLNK(node.mode):
            raise errors.InvalidArgument(f"inode {ino} is no symbolic link")
        self.access.read(node)
        return node.target

    async def unlink(self, parent: int, name: bytes) -> None:
        self._check_writable()
        directory, node = await self.names.unlink(parent, name)
        await self.names.publish(directory, node)

    async def remove_directory(self, parent: int, name: bytes) -> None:
        self._check_writable()
        directory, node = await self.names.remove_directory(parent, name)
        await self.names.publish(directory, node)

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        self._check_writable()
        directory, node = await self.names.rename(parent, name, new_parent, new_name, flags)
        await self.names.publish(directory, node)

    async def open_directory(self, ino: int) -> None:
        await self.lookups.current_directory(ino)

    async def list_directory(self, ino: int, after: int, limit: int) -> list[DirEntry]:
        if not after:
            self.access.read(await self.lookups.directory(ino))
        return await self.lookups.list_directory(ino, after, limit)

    # -- files ---------------------------------------------------------------------------------------

    async def open(self, ino: int, flags: int, caller: Caller) -> FileHandle:
        node = await self.lookups.current(ino)
        if node.is_directory:
            raise errors.IsADirectory(f"inode {ino} is a directory")
        _check_content(node)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self._check_writable()
        handle = self._open(node, flags, caller)
        if flags & os.O_TRUNC:
            try:
                await self._lose_privileges(node, caller)
                await self.cutter.truncate(node, 0)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await self.release(handle)
                raise
        elif caller.is_kernel:
            self.access.opened(handle)
        return handle

    def _open(self, node: Node, flags: int, caller: Caller) -> FileHandle:
        handle = FileHandle(node, flags, caller)
        node.handles += 1
        if self.coherence is not None:
            self.coherence.opened(handle)
        self.core.unnamed.pop(node.ino, None)
        node.writers += handle.writable
        return handle

    async def _current(self, handle: FileHandle | Node) -> Node:
        """The file of a handle. One that was opened under a former lease is opened again.

        EngineError where bytes were written through it that nobody stored.
        """
        if isinstance(handle, Node):
            check_remembered(handle)
            return handle
        node = handle.node
        if node.forgotten:
            if (handle.writable and not is_quiet(node)) or not node.version or not node.nlink:
                check_remembered(node)
            found = await self.lookups.node(node.ino)
            check_remembered(found)
            if handle.node is node:  # no other call of this handle was faster
                handle.node = found
                found.handles += 1
                found.writers += handle.writable
        return handle.node

    async def read(self, handle: FileHandle, offset: int, size: int) -> bytes | bytearray | memoryview:
        node = await self._current(handle)
        data = await self.reader.read(node, offset, size)
        self._count_read(handle, node, len(data))
        return data

    async def read_into(self, handle: FileHandle | Node, offset: int, target: memoryview) -> int:
        node = await self._current(handle)
        length = await self.reader.read_into(node, offset, target)
        self._count_read(handle, node, length)
        return length

    def _count_read(self, handle: FileHandle | Node, node: Node, byte_count: int) -> None:
        counters = self.core.counters
        counters.reads += 1
        counters.read_bytes += byte_count
        self.access.read_by(handle, node)

    def content_map(self, handle: FileHandle | Node) -> ContentMap:
        return self.parts.mapper.map_of(_node_of(handle))

    async def show(self, handle: FileHandle | Node, first: int, last: int) -> None:
        await self.parts.mapper.show(await self._current(handle), first, last)

    async def write(self, handle: FileHandle, offset: int, data: bytes | memoryview, *, by_kernel: bool = False) -> int:
        node = await self._current(handle) if handle.node.forgotten else handle.node
        if by_kernel:
            privileges.lose_privileges_to_kernel(node, handle.caller)
        elif data and (node.mode & privileges.SET_ID or node.flags & schema.FLAG_XATTRS):
            await self._lose_privileges(node, handle.caller)
        if handle.appends and self.coherence is not None:
            offset = self.coherence.append_offset(node, offset)
        size = node.size
        written = await self.writer.write(node, offset, data, appends=handle.appends) if data else 0
        self._count_written(1, written)
        if by_kernel and written < len(data) and (handle.direct or offset + len(data) <= size):
            # It would take this for all of the mapped pages that it writes back, and make EIO of a direct write.
            raise errors.NoSpace(f"inode {node.ino}: room for {written} of {len(data)} bytes")
        return written

    async def write_in_slots(self, handle: FileHandle, writes: Sequence[tuple[int, memoryview]]) -> list[bool]:
        node = await self._current(handle)
        await self._lose_privileges(node, handle.caller)
        written = await self.writer.write_in_slots(node, writes)
        self._count_written(
            sum(written), sum(len(data) for (_, data), done in zip(writes, written, strict=True) if done)
        )
        return written

    async def _lose_privileges(self, node: Node, caller: Caller) -> None:
        """Before bytes of the file change, by a door whose writes the kernel does not see."""
        lost_bits = privileges.lose_privileges(node, caller)
        if await self.parts.xattrs.drop_capability(node) or lost_bits:
            node.ctime = clock.now()
            self.journal.pending.touch(node, forced=True)

    def _count_written(self, count: int, byte_count: int) -> None:
        self.core.counters.writes += count
        self.core.counters.written_bytes += byte_count

    async def flush(self, handle: FileHandle) -> None:
        node = await self._current(handle) if handle.writable else handle.node
        changed = node.changed or node.committing
        if handle.writable and changed and node.nlink and self.lookups.is_strict(await self._folder(node)):
            if self.core.shared:  # while a commit is under way that others wait for
                await self.flusher.write_out(node)
            await self.journal.commit(node)
        if handle.writable:
            _tell_lost(node)

    async def _folder(self, node: Node) -> Node:
        """The directory whose settings hold for a file."""
        try:
            return await self.lookups.directory(node.parent)
        except (errors.Stale, errors.NotADirectory):
            return await self.lookups.node(1)

    async def fsync(self, handle: FileHandle, *, data_only: bool = False) -> None:
        if self.read_only:
            return
        node = await self._current(handle)
        if not data_only:
            self.access.look(node.map)
            self.access.store(node)
        await self.journal.commit(node, durable=True)
        _tell_lost(node)

    async def fsync_directory(self, ino: int) -> None:
        if not self.read_only:
            directory = await self.lookups.node(ino)
            self.access.store(directory)
            await self.journal.commit(directory, *self.journal.pending.changed_in(ino), durable=True)

    async def release(self, handle: FileHandle) -> None:
        node = handle.node
        node.writers -= handle.writable
        if node.forgotten:
            node.handles -= 1
            return
        if node.nlink and handle.writable and node.writers == 0:
            if node.changed:
                self.journal.pending.touch(node)
            if has_unsealed(node):
                node.handles += 1
                self._background(self._seal(node))
        self._let_go(node)

    def _let_go(self, node: Node) -> None:
        """Nobody uses this handle any more; the last one of an unlinked file takes the file along."""
        node.handles -= 1
        if node.handles or (self.coherence is not None and self.coherence.closed(node)) or node.nlink:
            return
        if self.names.nameless.knows_all(node):
            self._reap(node)
        else:
            node.handles += 1  # it stays in memory until it is reaped
            self._background(self._load_and_reap(node))

    def _reap(self, node: Node) -> None:
        """The last handle of an unlinked file was closed. Its bytes go when the kernel forgets it, too."""
        self.core.unnamed[node.ino] = node
        if not self.core.places.known(node.ino):
            self.names.nameless.reap(node)
            self.core.nodes.drop(node)

    async def _load_and_reap(self, node: Node) -> None:
        try:
            await self.names.nameless.load(node)
        finally:
            node.handles -= 1
        if node.handles == 0 and not node.forgotten:
            self._reap(node)

    async def _seal(self, node: Node) -> None:
        """The last writer of a file that was changed in place closed it."""
        try:
            await self.writer.in_place.seal(node)
        except errors.EngineError as error:
            log.warning("inode %d stays unsealed, so it is read without verification: %s", node.ino, error)
        finally:
            self._let_go(node)

    # -- extended attributes -------------------------------------------------------------------------

    async def get_xattr(self, ino: int, name: bytes) -> bytes:
        return await self.parts.xattrs.get(ino, name)

    async def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        self._check_writable()
        await self._publish_attributes(await self.parts.xattrs.set(ino, name, value))

    async def list_xattrs(self, ino: int) -> list[bytes]:
        return await self.parts.xattrs.list(ino)

    async def remove_xattr(self, ino: int, name: bytes) -> None:
        self._check_writable()
        await self._publish_attributes(await self.parts.xattrs.remove(ino, name))

    async def _publish_attributes(self, node: Node) -> None:
        await self.names.publish(node if node.is_directory else await self._folder(node), node)

    # -- the whole -----------------------------------------------------------------------------------

    def space(self) -> Space:
        slabs, core = self.core.slabs, self.core
        if self.leases is not None:
            free, file_count = self.leases.space()
        else:
            free = slabs.free_bytes + slabs.pending_bytes + self.journal.freeing_bytes
            file_count = core.file_count
        inodes_free = core.metadata.inodes_free(file_count)
        return Space(core.geometry.data_size, free, file_count + inodes_free, inodes_free)

    async def sync(self) -> None:
        if not self.read_only:
            self.access.store_all()
            await self.journal.sync()

    def stats(self) -> dict[str, Any]:
        core = self.core
        slabs = core.slabs.statistics()
        return {
            "volume": core.superblock.volume_id.hex(),
            "uptime": round(time.time() - self._opened, 3),
            "counters": dataclasses.asdict(core.counters),
            "records": {**dataclasses.asdict(core.records.counters), "round_trips": core.records.counters.round_trips},
            "segments": dataclasses.asdict(core.segments.counters),
            "journal": dataclasses.asdict(self.journal.counters),
            "blocks": self.blocks.statistics(),
            "tier": core.tier.statistics()._asdict(),
            **{name: section() for name, section in self.sections.items()},
            "memory": {
                "nodes": len(core.nodes),
                "known_inodes": len(core.places),
                "staged_bytes": self.flusher.staged_bytes,
            },
            "slabs": {**slabs._asdict(), "classes": [row._asdict() for row in slabs.classes]},
            "metadata": {"bytes": core.metadata.size, "limit": core.metadata.limit},
            "capacity": core.geometry.capacity,
            "slab_size": core.geometry.slab_size,
        }

    async def info(self, ino: int) -> dict[str, Any]:
        node = await self.lookups.node(ino)
        await self.reader.chunks.load_all(node)
        return {
            "ino": node.ino,
            "size": node.size,
            "blocks": node.blocks,
            "chunk_size": node.chunk_size,
            "nlink": node.nlink,
            "stored": node.stored and not node.changed,
            "publish": "strict" if self.lookups.is_strict(await self._folder(node)) else "relaxed",
            "extents": [row for index in sorted(node.chunks) for row in self.reader.chunks.describe_chunk(node, index)],
        }

    # -- what operations share -----------------------------------------------------------------------

    def _check_writable(self) -> None:
        if self.read_only:
            raise errors.ReadOnly("the volume is mounted read-only")


def _node_of(handle: FileHandle | Node) -> Node:
    return handle if isinstance(handle, Node) else handle.node


def _tell_lost(node: Node) -> None:
    """NoSpace, once, where bytes that were taken before could not be kept."""
    if node.lost is not None:
        lost, node.lost = node.lost, None
        raise lost


def _check_content(node: Node) -> None:
    """Stale for a file without names whose bytes had to make room although the kernel knew it.

    The kernel then looks the name up again, and finds who took it.
    """
    if node.reaped:
        raise errors.Stale(f"inode {node.ino} was removed")
