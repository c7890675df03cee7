#!/usr/bin/env python3
"""The benchmark's reference: a bare pyfuse3 file system that keeps names in a dict and bytes in memory.

It does nothing that a mount can do without: no records, no checksums, no permissions, no durability,
so what it reaches is what pyfuse3 and the kernel leave for a file system to spend. Caching answers are
those of the real mount (entry, attribute and negative timeouts), so that the kernel asks both alike.

Usage: barefs.py MOUNTPOINT. Prints "ready" once mounted; SIGTERM or an unmount ends it.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import time
from collections.abc import Sequence

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, SetattrFields, StatvfsData

TIMEOUT_S, NEGATIVE_TIMEOUT_S = 60.0, 1.0
CAPACITY_BLOCKS = 1 << 24


class Node:
    """A file or a directory. ``data`` is whole bytes as long as one write made the file, then a bytearray."""

    __slots__ = ("children", "data", "gid", "ino", "lookups", "mode", "mtime_ns", "nlink", "uid")

    def __init__(self, ino: int, mode: int, uid: int, gid: int) -> None:
        self.ino, self.mode, self.uid, self.gid = ino, mode, uid, gid
        self.nlink = 2 if stat.S_ISDIR(mode) else 1
        self.lookups = 0
        self.mtime_ns = time.time_ns()
        self.data: bytes | bytearray = b""
        self.children: dict[bytes, Node] = {}


class BareOperations(pyfuse3.Operations):
    """Names in a dict, bytes in memory. A file's handle is its inode number."""

    def __init__(self) -> None:
        super().__init__()
        root = Node(pyfuse3.ROOT_INODE, stat.S_IFDIR | 0o755, os.getuid(), os.getgid())
        self._nodes = {root.ino: root}
        self._next_ino = root.ino + 1
        self._entry = _entry()
        self._absent = _entry()
        self._absent.entry_timeout = NEGATIVE_TIMEOUT_S

    def _attributes(self, node: Node) -> EntryAttributes:
        """The one entry object, refilled: a reply copies it before any other task can run."""
        entry = self._entry
        entry.st_ino = node.ino
        entry.st_mode = node.mode
        entry.st_nlink = node.nlink
        entry.st_uid = node.uid
        entry.st_gid = node.gid
        entry.st_size = len(node.data)
        entry.st_blocks = (len(node.data) + 511) // 512
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = node.mtime_ns
        return entry

    def _add(self, parent: int, name: bytes, mode: int, ctx: RequestContext) -> Node:
        children = self._nodes[parent].children
        if name in children:
            raise FUSEError(errno.EEXIST)
        node = Node(self._next_ino, mode, ctx.uid, ctx.gid)
        self._next_ino += 1
        self._nodes[node.ino] = children[name] = node
        node.lookups = 1
        return node

    def _drop(self, node: Node) -> None:
        node.nlink = 0
        if node.lookups <= 0:
            self._nodes.pop(node.ino, None)

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        node = self._nodes[parent_inode].children.get(name)
        if node is None:
            return self._absent
        node.lookups += 1
        return self._attributes(node)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, count in inode_list:
            node = self._nodes.get(ino)
            if node is not None:
                node.lookups -= count
                if node.lookups <= 0 and node.nlink == 0:
                    del self._nodes[ino]

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(self._nodes[inode])

    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        node = self._nodes[inode]
        if fields.update_size:
            node.data = bytes(node.data[: attr.st_size]).ljust(attr.st_size, b"\0")
        if fields.update_mode:
            node.mode = attr.st_mode
        if fields.update_mtime:
            node.mtime_ns = attr.st_mtime_ns
        return self._attributes(node)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        node = self._add(parent_inode, name, mode, ctx)
        self._nodes[parent_inode].nlink += 1
        return self._attributes(node)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        node = self._add(parent_inode, name, mode, ctx)
        return FileInfo(fh=node.ino, keep_cache=True), self._attributes(node)

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if flags & os.O_TRUNC:
            self._nodes[inode].data = b""
        return FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return memoryview(self._nodes[fh].data)[off : off + size]  # type: ignore[return-value]

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        node = self._nodes[fh]
        if off == 0 and len(buf) >= len(node.data):
            node.data = buf
        else:
            if not isinstance(node.data, bytearray):
                node.data = bytearray(node.data)
            node.data.extend(bytes(max(0, off - len(node.data))))
            node.data[off : off + len(buf)] = buf
        node.mtime_ns = time.time_ns()
        return len(buf)

    async def flush(self, fh: int) -> None:
        pass

    async def fsync(self, fh: int, datasync: bool) -> None:
        pass

    async def release(self, fh: int) -> None:
        pass

    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        raise FUSEError(errno.ENODATA)  # not ENOSYS: the kernel would stop asking, and a real mount has attributes

    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self._drop(self._nodes[parent_inode].children.pop(name))

    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        parent = self._nodes[parent_inode]
        if parent.children[name].children:
            raise FUSEError(errno.ENOTEMPTY)
        parent.nlink -= 1
        self._drop(parent.children.pop(name))

    async def rename(
        self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes,
        flags: int, ctx: RequestContext,
    ) -> None:  # fmt: skip
        if flags:
            raise FUSEError(errno.EINVAL)
        source, target = self._nodes[parent_inode_old], self._nodes[parent_inode_new]
        replaced = target.children.get(name_new)
        target.children[name_new] = node = source.children.pop(name_old)
        if replaced is not None:
            self._drop(replaced)
        if stat.S_ISDIR(node.mode):
            source.nlink -= 1
            target.nlink += 1

    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        for name, node in self._nodes[fh].children.items():
            if node.ino > start_id:
                if not pyfuse3.readdir_reply(token, name, self._attributes(node), node.ino):
                    return
                node.lookups += 1

    async def releasedir(self, fh: int) -> None:
        pass

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        figures = StatvfsData()
        figures.f_bsize = figures.f_frsize = 4096
        figures.f_blocks = figures.f_bfree = figures.f_bavail = CAPACITY_BLOCKS
        figures.f_files = figures.f_ffree = figures.f_favail = CAPACITY_BLOCKS
        figures.f_namemax = 255
        return figures


def _entry() -> EntryAttributes:
    entry = EntryAttributes()
    entry.entry_timeout = entry.attr_timeout = TIMEOUT_S
    return entry


async def _end_on_sigterm() -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            pyfuse3.terminate()


async def _announce(mountpoint: str) -> None:
    await trio.to_thread.run_sync(os.stat, mountpoint)
    print("ready", flush=True)


async def serve(mountpoint: str) -> None:
    """Mount and answer until unmounted or told to end."""
    pyfuse3.init(BareOperations(), mountpoint, {"fsname=barefs", "default_permissions"})
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_on_sigterm)
            nursery.start_soon(_announce, mountpoint)
            await pyfuse3.main(min_tasks=8, max_tasks=64)
            nursery.cancel_scope.cancel()
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: barefs.py MOUNTPOINT")
    trio.run(serve, sys.argv[1])
