"""Implements the operations on a mounted volume, by the parts of one membership; the next membership has its own.

An operation in flight when the membership ends continues with its former parts, and so changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
from bisect import bisect_left
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Literal, TypeVar

import trio

from kvfuse import errors, failing
from kvfuse.volume.api import Attributes, Caller, Changes, DirEntry, Numbers, SlotSource
from kvfuse.volume.blocks.block_files import BlockFiles, BlockHandle
from kvfuse.volume.blocks.block_names import BlockNames
from kvfuse.volume.blocks.block_numbers import is_block
from kvfuse.volume.blocks.open_blocks import OpenBlock
from kvfuse.volume.blocks.sketches import SketchHandle
from kvfuse.volume.content.holes import Holes
from kvfuse.volume.content.in_place import has_unsealed
from kvfuse.volume.content.refresh import is_quiet
from kvfuse.volume.inodes import privileges
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.handle import FileHandle, check_content
from kvfuse.volume.inodes.node import Node, check_remembered
from kvfuse.volume.measures.gates import Gate
from kvfuse.volume.measures.measures import Measures
from kvfuse.volume.measures.read_turns import LARGE_READ, wait_for_loop
from kvfuse.volume.names.listing import Listing
from kvfuse.volume.names.lookup import DOTS
from kvfuse.volume.names.opened import make_opened
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.parts import Parts
from kvfuse.volume.store import schema
from kvfuse.volume.tenancy.xattrs import check_name, check_settable
from kvfuse.volume.views import clock
from kvfuse.volume.views.content_map import ContentMap

P = TypeVar("P")
NO_CHANGES = Changes()

log = logging.getLogger(__name__)


class Inodes:
    """Implements `api.InodeApi`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._core, self._journal, self._lookups = parts.core, parts.journal, parts.lookups
        self._access = parts.mapper.access
        self._opened = make_opened(parts.lookups)
        self._blocks = parts.block_names.files if parts.block_names is not None else None

    def _blocks_of(self, ino: int) -> BlockFiles | None:
        """Who knows the number, if it is one of a block or sketch."""
        return self._blocks if self._blocks is not None and self._blocks.has(ino) else None

    def may_keep_attributes(self, ino: int) -> bool:
        return not self._lookups.is_doubtful(ino)

    async def attributes(self, ino: int) -> Attributes:
        if (blocks := self._blocks_of(ino)) is not None:
            return blocks.attributes(ino)
        node = await self._lookups.find_current(ino)
        self._access.look(node.map)
        return node

    def attributes_at_once(self, ino: int) -> Attributes | None:
        node = self._lookups.find_node_at_once(ino) if self._blocks_of(ino) is None else None
        if node is not None:
            self._access.look(node.map)
        return node

    async def set_attributes(self, ino: int, changes: Changes, caller: Caller) -> Attributes:
        if (blocks := self._blocks_of(ino)) is not None:
            found = await _check_change(self._core, blocks).set_attributes(ino, changes, caller)
            if not isinstance(found, Node):
                return found
            ino, changes = found.ino, dataclasses.replace(changes, size=None)
        node = await _check_change(self._core, self._lookups).find_current(ino)
        if changes == NO_CHANGES:
            privileges.heed_word_of_write(node, caller)
        if changes.size is not None:
            if not node.is_file:
                raise errors.InvalidArgument(f"inode {ino} is no file: it has no size to set")
            check_content(node)
            await self._parts.cutter.truncate(node, changes.size)
        if privileges.are_set_otherwise(node, changes):
            self._check_closed(node, changes)
            self._core.readers_change(node)
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
        is_forced = (changes.mode, changes.uid, changes.gid, changes.atime) != (None, None, None, None)
        self._journal.pending.touch(node, forced=is_forced)
        if node.is_directory:
            self._journal.pending.touch_times(node)
        if self._core.shared and not node.writers:
            await self._publish_attributes(node)
        return node

    def _check_closed(self, node: Node, changes: Changes) -> None:
        """NotPermitted: the mode would let all users into a folder that has a token."""
        gate = self._core.namespaces.gates.all.get(node.ino)
        if gate is not None and gate.folder == node.ino and changes.mode is not None and changes.mode & 0o007:
            raise errors.NotPermitted("the folder has a token: its mode may let in its owner and group alone")

    async def describe(self, ino: int, descriptor: str, *, may_pin: bool) -> str:
        keeper = _check_change(self._core, self._parts.xattrs).namespaces.keeper
        return await keeper.describe(await self._lookups.find_current(ino), descriptor, may_pin=may_pin)

    async def gate(self, ino: int) -> Gate | None:
        blocks = self._blocks_of(ino)
        number = blocks.namespace_of(ino) if blocks else (await self._lookups.find_current(ino)).namespace
        return self._core.namespaces.gates.all.get(number)

    async def read_symlink(self, ino: int) -> bytes:
        node = await self._lookups.find_current(ino)
        if not stat.S_ISLNK(node.mode):
            raise errors.InvalidArgument(f"inode {ino} is no symbolic link")
        self._access.read(node)
        return node.target

    async def fsync_directory(self, ino: int) -> None:
        if not self._core.read_only:
            directory = await self._lookups.find_node(ino)
            self._access.store(directory)
            await self._journal.commit(directory, *self._journal.pending.find_changed_in(ino), durable=True)
            await self._opened.publish(ino)
            if (engine := self._parts.engine) is not None and engine.is_block_namespace(directory.namespace):
                await engine.writer.flush()

    async def get_xattr(self, ino: int, name: bytes) -> bytes:
        if self._blocks_of(ino) is not None:
            check_name(name)
            raise errors.NoAttribute(f"block {ino:#x} has no attribute {name!r}")
        return await self._parts.xattrs.get(ino, name)

    async def set_xattr(self, ino: int, name: bytes, value: bytes, caller: Caller | None = None) -> None:
        xattrs = _check_change(self._core, self._parts.xattrs)
        if (blocks := self._blocks_of(ino)) is not None:
            check_settable(name)
            ino = (await blocks.make_ordinary(ino)).ino
        await self._publish_attributes(await xattrs.set(ino, name, value, caller))

    async def list_xattrs(self, ino: int) -> list[bytes]:
        return await self._parts.xattrs.list(ino) if self._blocks_of(ino) is None else []

    async def remove_xattr(self, ino: int, name: bytes, caller: Caller | None = None) -> None:
        xattrs = _check_change(self._core, self._parts.xattrs)
        if self._blocks_of(ino) is not None:
            check_name(name)
            raise errors.NoAttribute(f"block {ino:#x} has no attribute {name!r}")
        await self._publish_attributes(await xattrs.remove(ino, name, caller))

    def measures(self, ino: int) -> Measures:
        if (blocks := self._blocks_of(ino)) is not None:
            return self._core.namespaces.measures[blocks.namespace_of(ino)]
        node = self._core.nodes.get(ino)
        return self._core.namespaces.measures[node.namespace if node is not None else ROOT]

    async def _publish_attributes(self, node: Node) -> None:
        await self._parts.names.publish(node if node.is_directory else await self.find_folder(node), node)

    async def find_folder(self, node: Node) -> Node:
        """The directory whose settings hold for a file."""
        try:
            return await self._lookups.find_directory(node.parent)
        except (errors.Stale, errors.NotADirectory):
            return await self._lookups.find_node(1)

    async def seek(self, ino: int, offset: int, *, data: bool) -> int:
        if (blocks := self._blocks_of(ino)) is not None:
            size = blocks.attributes(ino).size
            if offset >= size:
                raise errors.NoSuchOffset(f"block {ino:#x} has {size} bytes")
            return offset if data else size
        return await Holes(self._parts.reader.chunks).seek(await self._lookups.find_current(ino), offset, data=data)

    async def info(self, ino: int) -> dict[str, Any]:
        if (blocks := self._blocks_of(ino)) is not None:
            return blocks.describe(ino)
        node, chunks = await self._lookups.find_node(ino), self._parts.reader.chunks
        await chunks.load_all(node)
        return {
            "ino": node.ino,
            "size": node.size,
            "blocks": node.blocks,
            "chunk_size": node.chunk_size,
            "nlink": node.nlink,
            "stored": node.stored and not node.changed,
            "publish": "strict" if self._lookups.is_strict(await self.find_folder(node)) else "relaxed",
            "extents": [row for index in sorted(node.chunks) for row in chunks.describe_chunk(node, index)],
        }


class Files:
    """Implements `api.FileApi`."""

    def __init__(self, parts: Parts, inodes: Inodes, background: trio.Nursery) -> None:
        self._parts, self._inodes, self._background = parts, inodes, background
        self._core, self._journal, self._lookups = parts.core, parts.journal, parts.lookups
        self._reader, self._writer, self._access = parts.reader, parts.writer, parts.mapper.access
        self._nameless, self._coherence, self._fetcher = parts.names.nameless, parts.coherence, parts.fetcher
        self._opened = make_opened(parts.lookups)
        self._blocks = parts.block_names.files if parts.block_names is not None else None
        if self._blocks is not None:
            self._blocks.release_file = self.release

    async def open(self, ino: int, flags: int, caller: Caller) -> FileHandle | BlockHandle:
        is_changing = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        if self._blocks is not None and self._blocks.has(ino):
            blocks = _check_change(self._core, self._blocks) if is_changing else self._blocks
            found = await blocks.open(ino, flags, caller)
            if not isinstance(found, Node):
                return found
            ino = found.ino
        node = await self._opened.find_file(ino)
        if node.is_directory:
            raise errors.IsADirectory(f"inode {ino} is a directory")
        check_content(node)
        if is_changing:
            _check_change(self._core, node)
        handle = self.make_handle(node, flags, caller)
        if flags & os.O_TRUNC:
            try:
                await self._lose_privileges(node, caller)
                await self._parts.cutter.truncate(node, 0)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await self.release(handle)
                raise
        elif caller.is_kernel:
            self._access.opened(handle)
        return handle

    def make_handle(self, node: Node, flags: int, caller: Caller) -> FileHandle:
        handle = FileHandle(node, flags, caller)
        handle.heard = self._core.doubt.epoch
        self._core.unnamed.pop(node.ino, None)
        if self._coherence is not None:
            self._coherence.opened(handle)
        return handle

    async def _read_block(self, handle: BlockHandle, offset: int, size: int, began: float) -> bytes | memoryview:
        assert self._blocks is not None
        namespace = self._blocks.namespace_of_handle(handle)
        if (measures := self._core.namespaces.measures[namespace]).limiters:
            await measures.throttle_kernel(max(0, min(size, handle.size - offset)))
        data = await self._blocks.read(handle, offset, size)
        self._measure_read(namespace, len(data), began)
        return data

    async def _find_current(self, handle: FileHandle | Node) -> Node:
        """The file of a handle, opened again if the handle is of a former membership.

        EngineError: bytes that were written through it were not stored.
        """
        if isinstance(handle, Node):
            check_remembered(handle)
            return handle
        node = handle.node
        if node.forgotten:
            if (handle.writable and not is_quiet(node)) or not node.version or not node.nlink:
                check_remembered(node)
            found = await self._lookups.find_node(node.ino)
            check_remembered(found)
            if handle.node is node:  # no other call of this handle was faster
                handle.node = found
                found.handles += 1
                found.writers += handle.writable
        return handle.node

    async def read(self, handle: FileHandle | BlockHandle, offset: int, size: int) -> bytes | bytearray | memoryview:
        began = perf_counter()
        if isinstance(handle, OpenBlock | SketchHandle):
            if handle.file is None:
                return await self._read_block(handle, offset, size, began)
            handle = handle.file
        node = await self._find_current(handle)
        if (measures := self._core.namespaces.measures[node.namespace]).limiters:
            await measures.throttle_kernel(max(0, min(size, node.size - offset)))
        if size >= LARGE_READ and len(measures.readers) > 1:
            await wait_for_loop(measures, size)
        try:
            data = await self._reader.read(node, offset, size)
        except errors.EngineError as error:
            self._core.namespaces.measures[node.namespace].failed(error, is_read=True)
            raise
        self._count_read(handle, node, len(data), began)
        return data

    async def read_into(self, handle: FileHandle | Node, offset: int, target: memoryview) -> int:
        began = perf_counter()
        node = await self._find_current(handle)
        length = await self._reader.read_into(node, offset, target)
        self._count_read(handle, node, length, began)
        return length

    async def read_once(
        self, handle: FileHandle | Node, offset: int, length: int, target: memoryview
    ) -> memoryview | None:
        began = perf_counter()
        node = await self._find_current(handle)
        past_cache = self._parts.past_cache
        if past_cache is None or self._core.tier.find(node.ino) is not None:
            return None
        data = await past_cache.read(node, offset, length, target)
        if data is not None:
            self._count_read(handle, node, length, began)
        return data

    def _count_read(self, handle: FileHandle | Node, node: Node, byte_count: int, began: float) -> None:
        self._measure_read(node.namespace, byte_count, began)
        self._access.read_by(handle, node)

    def _measure_read(self, namespace: int, byte_count: int, began: float) -> None:
        counters, measures = self._core.counters, self._core.namespaces.measures[namespace]
        seconds, times = perf_counter() - began, measures.seconds["read"]
        times.counts[bisect_left(times.bounds, seconds)] += 1
        times.sum += seconds
        measures.read_bytes += byte_count
        measures.readers[measures] = began
        counters.reads += 1
        counters.read_bytes += byte_count

    def content_map(self, handle: FileHandle | Node) -> ContentMap:
        return self._parts.mapper.map_of(handle if isinstance(handle, Node) else handle.node)

    async def show(self, handle: FileHandle | Node, first: int, last: int) -> None:
        node = await self._find_current(handle)
        measures = self._core.namespaces.measures[node.namespace]
        measures.readers[measures] = perf_counter()
        await self._parts.mapper.show(node, first, last)

    async def verify_ahead(self, handle: FileHandle | Node, offset: int, end: int) -> None:
        await self._parts.mapper.verify_ahead(await self._find_current(handle), offset, end)

    async def write(
        self, handle: FileHandle | BlockHandle, offset: int, data: bytes | memoryview, *, by_kernel: bool = False
    ) -> int:
        began = perf_counter()
        if isinstance(handle, OpenBlock | SketchHandle):
            if handle.file is None and (count := await self._write_sketch(handle, offset, data, began)) is not None:
                return count
            assert handle.file is not None
            handle = handle.file
        node = await self._find_current(handle) if handle.node.forgotten else handle.node
        if by_kernel and (measures := self._core.namespaces.measures[node.namespace]).limiters:
            await measures.throttle_kernel(len(data))
        if by_kernel:
            privileges.lose_privileges_to_kernel(node, handle.caller)
        elif data and (node.mode & privileges.SET_ID or node.flags & schema.FLAG_XATTRS):
            await self._lose_privileges(node, handle.caller)
        if handle.appends and self._coherence is not None:
            offset = self._coherence.append_offset(node, offset)
        size = node.size
        try:
            written = await self._writer.write(node, offset, data, appends=handle.appends, direct=handle.direct)
        except (errors.EngineError, errors.NoSpace) as error:
            if by_kernel:  # else the rings' door counts it
                self._core.namespaces.measures[node.namespace].failed(error, is_read=False)
            raise
        self._measure_write(node.namespace, written, began)
        if by_kernel and written < len(data) and (handle.direct or offset + len(data) <= size):
            # The kernel would take this for all of the mapped pages that it writes back, and fail a direct write (EIO).
            self._core.namespaces.accounts.check(node.namespace, len(data) - written)
            raise errors.NoSpace(f"inode {node.ino}: room for {written} of {len(data)} bytes")
        return written

    def take_over(self, *, is_all: bool = False) -> Iterator[tuple[int, SketchHandle]]:
        if self._blocks is not None:
            self._blocks.engine.answers.hear()
            yield from self._blocks.take_over(is_all=is_all)

    async def _write_sketch(
        self, handle: BlockHandle, offset: int, data: bytes | memoryview, began: float
    ) -> int | None:
        assert self._blocks is not None
        namespace = self._blocks.namespace_of_handle(handle)
        if (measures := self._core.namespaces.measures[namespace]).limiters:
            await measures.throttle_kernel(len(data))
        count = await self._blocks.write(handle, offset, data)
        if count is not None:
            self._measure_write(namespace, count, began)
        return count

    def _measure_write(self, namespace: int, byte_count: int, began: float) -> None:
        self._core.counters.writes += 1
        self._core.counters.written_bytes += byte_count
        measures = self._core.namespaces.measures[namespace]
        seconds, times = perf_counter() - began, measures.seconds["write"]
        times.counts[bisect_left(times.bounds, seconds)] += 1
        times.sum += seconds
        measures.written_bytes += byte_count

    async def write_in_slots(
        self, handle: FileHandle, offsets: Numbers, lengths: Numbers, source: SlotSource
    ) -> Numbers:
        node = await self._find_current(handle)
        await self._lose_privileges(node, handle.caller)
        written = await self._writer.in_place.write_in_slots(node, offsets, lengths, source)
        self._core.counters.writes += len(written)
        self._core.counters.written_bytes += (byte_count := int(lengths[written].sum()))
        self._core.namespaces.measures[node.namespace].written_bytes += byte_count
        return written

    async def _lose_privileges(self, node: Node, caller: Caller) -> None:
        """Clear setuid, setgid and capabilities before a write that the kernel does not see."""
        lost_bits = privileges.lose_privileges(node, caller)
        if await self._parts.xattrs.drop_capability(node) or lost_bits:
            node.ctime = clock.now()
            self._journal.pending.touch(node, forced=True)

    def is_close_awaited(self, handle: FileHandle | BlockHandle) -> bool:
        if isinstance(handle, OpenBlock | SketchHandle):
            return handle.writable
        folder = self._core.nodes.get(handle.node.parent)
        return handle.writable and (folder is None or self._lookups.is_strict(folder))

    async def flush(self, handle: FileHandle | BlockHandle) -> None:
        if isinstance(handle, OpenBlock | SketchHandle):
            if handle.file is None and self._blocks is not None:
                await self._blocks.flush(handle)
            if handle.file is None:
                return
            handle = handle.file
        node = await self._find_current(handle) if handle.writable else handle.node
        changed = node.changed or node.committing
        if handle.writable and changed and node.nlink and self._lookups.is_strict(await self._inodes.find_folder(node)):
            if self._core.shared:  # while a commit of other callers is in flight
                await self._parts.journal.flusher.write_out(node)
            await self._journal.commit(node, strict=True)
        if handle.writable:
            handle.tell_lost()

    async def fsync(self, handle: FileHandle | BlockHandle, *, data_only: bool = False) -> None:
        if self._core.read_only:
            return
        if isinstance(handle, OpenBlock | SketchHandle):
            if handle.file is None and self._blocks is not None:
                await self._blocks.fsync(handle)
            if handle.file is None:
                return
            handle = handle.file
        node = await self._find_current(handle)
        if not data_only:
            self._access.look(node.map)
            self._access.store(node)
        with self._core.doubt.telling(handle):
            await self._parts.rewriter.rewrite_file(node)
            await self._journal.commit(node, durable=True)
        await self._opened.publish(node.parent)

    async def release(self, handle: FileHandle | BlockHandle) -> None:
        if isinstance(handle, OpenBlock | SketchHandle):
            if self._blocks is not None:
                await self._blocks.release(handle)
            if handle.file is None:
                return
            handle = handle.file
        self.release_at_once(handle)

    def release_at_once(self, handle: FileHandle | BlockHandle) -> bool:
        if isinstance(handle, OpenBlock | SketchHandle):
            return False
        node = handle.node
        node.writers -= handle.writable
        if node.forgotten:
            node.handles -= 1
            return True
        if node.nlink and handle.writable and node.writers == 0:
            if node.aside:
                self._journal.pending.reconsider(node)
            if has_unsealed(node):
                self._background.start_soon(failing.once, "seals", self._seal, node)
                return True
        self._drop_handle(node)
        return True

    def _drop_handle(self, node: Node) -> None:
        """Drop a released handle; the last one of an unlinked file frees the file."""
        node.handles -= 1
        if node.handles:
            return
        if self._fetcher is not None:
            self._fetcher.closed(node)
        if (self._coherence is not None and self._coherence.closed(node)) or node.nlink:
            return
        if self._nameless.has_all_records(node):
            self._reap_file(node)
        else:
            node.handles += 1  # it stays in memory until it is reaped
            self._background.start_soon(failing.once, "removals", self._load_and_reap, node)

    def _reap_file(self, node: Node) -> None:
        """Free an unlinked file whose last handle was closed, once the kernel has forgotten it, too."""
        self._core.unnamed[node.ino] = node
        if not self._core.places.known(node.ino):
            self._nameless.reap(node)
            self._core.nodes.drop(node)

    async def _load_and_reap(self, node: Node) -> None:
        try:
            with trio.CancelScope(shield=True):
                await self._nameless.load(node)
        finally:
            node.handles -= 1
        if node.handles == 0 and not node.forgotten:
            self._reap_file(node)

    async def _seal(self, node: Node) -> None:
        """Seal a file that was changed in place, after its last writer closed it."""
        try:
            with trio.CancelScope(shield=True):
                await self._writer.in_place.seal(node)
        except errors.EngineError as error:
            log.warning("inode %d stays unsealed, so it is read without verification: %s", node.ino, error)
        finally:
            self._drop_handle(node)


class Tree:
    """Implements `api.TreeApi`."""

    def __init__(self, parts: Parts, files: Files) -> None:
        self._core, self._lookups, self._names = parts.core, parts.lookups, parts.names
        self._access, self._files = parts.mapper.access, files
        self._blocks = parts.block_names

    def _may_have_blocks(self, directory: int) -> bool:
        return self._blocks is not None and self._blocks.is_known_block_directory(directory)

    async def _block_folder(self, directory: int, name: bytes = b"") -> tuple[BlockNames, Node] | None:
        """If it is a directory of blocks. Most are not, as `_may_have_blocks` tells without a coroutine."""
        folder = await self._blocks.folder(directory, name) if self._blocks is not None else None
        return (self._blocks, folder) if self._blocks is not None and folder is not None else None

    async def _check_free(self, directory: int, name: bytes) -> None:
        """Exists: a block has the name."""
        if self._may_have_blocks(directory) and (at := await self._block_folder(directory)) is not None:
            at[0].check_free(at[1], name)

    async def lookup(self, parent: int, name: bytes) -> Attributes:
        core, lookups = self._core, self._lookups
        core.counters.lookups += 1
        if name == b"." and self._blocks is not None and self._blocks.files.has(parent):
            return self._blocks.look_up_number(parent)
        may_have_blocks = self._may_have_blocks(parent) and name not in DOTS
        at = await self._block_folder(parent, name) if may_have_blocks else None
        if at is not None:
            await at[0].files.offer(at[1])
            if (found := at[0].look_up(at[1], name)) is not None:
                return found
        node = (await (lookups.find_dots if name in DOTS else lookups.find_for_kernel)(parent, name)).node
        if node is None:
            core.counters.absent_lookups += 1
            if at is not None:
                at[0].look_failed(at[1], name)
            raise errors.NotFound(name)
        lookups.count_lookup(node)
        if core.exported:
            await lookups.wait_for_places()
        return node

    def look_up_at_once(self, parent: int, name: bytes) -> Attributes | Literal[False] | None:
        if self._may_have_blocks(parent):
            return None
        core, lookups = self._core, self._lookups
        node = lookups.find_at_once(parent, name)
        if node is None:
            return None
        core.counters.lookups += 1
        if node is False:
            core.counters.absent_lookups += 1
            return False
        return lookups.count_lookup(node)

    def forget(self, ino: int, count: int) -> None:
        if is_block(ino):
            return
        if not self._core.places.forget(ino, count):
            return
        self._lookups.forget(ino)
        node = self._core.nodes.get(ino)
        if node is not None and node.nlink == 0 and not node.handles:
            if not node.reaped:
                self._names.nameless.reap(node)
            self._core.nodes.drop(node)

    def remember(self, parent: int, entry: DirEntry) -> None:
        if isinstance(entry.attributes, Node) and self._lookups.lacks_place(entry.attributes):
            self._lookups.count_lookup(entry.attributes)
        elif not is_block(entry.attributes.ino):
            self._core.places.add(entry.attributes.ino, parent, entry.name)

    def may_keep(self, directory: int, *, means_directory: bool = False) -> bool:
        if not means_directory and self._may_have_blocks(directory):
            return False  # rings change names, and a name may mean another block at any time
        return not self._lookups.must_ask(directory)

    async def create(
        self, parent: int, name: bytes, mode: int, caller: Caller, flags: int
    ) -> tuple[FileHandle | SketchHandle, Attributes]:
        if self._may_have_blocks(parent) and (at := await self._block_folder(parent)) is not None:
            sketch = await _check_change(self._core, at[0]).create(at[1], name, mode, caller, flags)
            if sketch is not None:
                return sketch, sketch.sketch
        directory, node = await _check_change(self._core, self._names).create(
            parent, name, stat.S_IFREG | stat.S_IMODE(mode), caller
        )
        handle = self._files.make_handle(node, flags, caller)
        await self._publish(directory, node, handle)
        return handle, node

    async def make_node(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Node:
        return await self._make_inode(parent, name, mode, caller, rdev=rdev)

    async def make_directory(self, parent: int, name: bytes, mode: int, caller: Caller) -> Node:
        return await self._make_inode(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), caller)

    async def make_symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Node:
        return await self._make_inode(parent, name, stat.S_IFLNK | 0o777, caller, target=target)

    async def _make_inode(
        self, parent: int, name: bytes, mode: int, caller: Caller, *, rdev: int = 0, target: bytes = b""
    ) -> Node:
        await self._check_free(parent, name)
        directory, node = await _check_change(self._core, self._names).create(
            parent, name, mode, caller, rdev=rdev, target=target
        )
        await self._publish(directory, node)
        return node

    async def link(self, ino: int, parent: int, name: bytes) -> Node:
        await self._check_free(parent, name)
        if self._blocks is not None and self._blocks.files.has(ino):
            ino = (await self._blocks.files.make_ordinary(ino)).ino
        directory, node = await _check_change(self._core, self._names).link(ino, parent, name)
        await self._publish(directory, node)
        return node

    async def _publish(self, directory: Node, node: Node, handle: FileHandle | None = None) -> None:
        """Publish an inode of which the kernel gets a reference, perhaps a handle; after an error it gets neither."""
        try:
            await self._names.publish(directory, node)
        except BaseException:
            if handle is not None:
                await self._files.release(handle)
            self.forget(node.ino, 1)
            raise

    async def unlink(self, parent: int, name: bytes) -> None:
        at = await self._block_folder(parent, name) if self._may_have_blocks(parent) else None
        if at is not None and await _check_change(self._core, at[0]).unlink(at[1], name):
            self._core.counters.removes += 1
            return
        directory, node = await _check_change(self._core, self._names).unlink(parent, name)
        await self._names.publish(directory, node)

    async def remove_directory(self, parent: int, name: bytes) -> None:
        if (at := await self._block_folder(parent)) is not None and at[0].files.find(parent, name) is not None:
            raise errors.NotADirectory(f"{name!r} is not a directory")
        directory, node = await _check_change(self._core, self._names).remove_directory(parent, name)
        await self._names.publish(directory, node)

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        if await self._block_folder(parent) is not None or await self._block_folder(new_parent) is not None:
            blocks = _check_change(self._core, self._blocks)
            old, new = await self._lookups.find_directory(parent), await self._lookups.find_directory(new_parent)
            if blocks is not None and await blocks.rename(old, name, new, new_name, flags):
                return
        directory, node = await _check_change(self._core, self._names).rename(parent, name, new_parent, new_name, flags)
        await self._names.publish(directory, node)

    async def open_directory(self, ino: int) -> None:
        await self._lookups.find_current_directory(ino)

    async def list_directory(self, ino: int, after: int, limit: int, reader: int = 0) -> list[DirEntry]:
        if not after:
            self._access.read(await self._lookups.find_directory(ino))
        if (at := await self._block_folder(ino)) is not None:
            return await at[0].listing.list_entries(at[1], after, limit, reader)
        await self._lookups.wait_for_places()
        return await Listing(self._lookups, ino).read_entries(after, limit)

    def close_directory(self, reader: int) -> None:
        if self._blocks is not None:
            self._blocks.listing.end(reader)


def _check_change(core: Core, part: P) -> P:
    """``part``. ReadOnly: the mount may change nothing."""
    if core.read_only:
        raise errors.ReadOnly("the volume is mounted read-only")
    return part
