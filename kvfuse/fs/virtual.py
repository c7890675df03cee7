"""Serves MNT/.kvfuse: read-only files that the daemon generates, and its control socket. No FUSE and no volume here.

They use the inode numbers that ``volume.api`` reserves. A lookup finds the folder, but listings of the root omit
it, so that ``rm -rf MNT/*`` and backups leave it alone. The daemon generates a file's content at the open; stat
shows size 0, as in /proc, because no size would still be true at the read. The content depends on the caller that
opens the file: the daemon's user and root see everything, others their own part and the public one.
"""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from kvfuse.credentials import Capability, Credentials
from kvfuse.errors import BadHandle, NotADirectory, NotFound, NotPermitted, PermissionDenied
from kvfuse.volume.api import FIRST_INODE, ROOT_INODE, VIRTUAL_NAME, DirEntry

FOLDER_NAME = VIRTUAL_NAME
SOCKET_NAME = b"control.sock"
FOLDER_INODE = ROOT_INODE + 1
FIRST_FILE_INODE = FOLDER_INODE + 1
SOCKET_INODE = FIRST_FILE_INODE + 3
"""the same in all versions: a socket that was bound under another number would refuse everybody after an upgrade"""
HANDLE = 1 << 61
"""mark of handles of virtual files: a volume's handles are always smaller"""
_SEES_ALL = 1 << 58
_INODE_SHIFT, _INODE_MASK = 48, FIRST_INODE - 1
_UID_SHIFT, _UID_MASK = 16, (1 << 32) - 1
_COUNT_MASK = (1 << 16) - 1
"""fields of such a handle, by which the next daemon serves it"""


class Viewer(NamedTuple):
    """The caller that a content is generated for."""

    uid: int
    sees_all: bool
    """it runs the daemon, or could read its memory"""

    @classmethod
    def from_process(cls, uid: int, pid: int) -> Self:
        """The viewer behind a request. Uid 0 alone is not root: a container's may lack all capabilities."""
        if uid == 0:
            return cls(uid, Credentials.of(pid, uid).has(Capability.SYS_ADMIN))
        return cls(uid, uid == os.geteuid())


@dataclass(slots=True)
class VirtualAttributes:
    """``Attributes`` of the folder or of a file in it: the daemon's user's, readable by all."""

    ino: int
    mode: int
    nlink: int
    atime: int
    mtime: int
    ctime: int
    uid: int = field(default_factory=os.geteuid)
    gid: int = field(default_factory=os.getegid)
    rdev: int = 0
    size: int = 0
    blocks: int = 0


def is_virtual_handle(handle: int) -> bool:
    """Whether a handle is a virtual file's; all others are the volume's."""
    return handle & HANDLE != 0


def is_virtual(ino: int) -> bool:
    """Whether ``ino`` is the folder's or a virtual file's; all others are the volume's."""
    return ROOT_INODE < ino < FIRST_INODE


class VirtualFolder:
    """The folder and its files. ``texts``: name -> function that makes the content for a reader, at each open.

    ``binding``: one-time name by which a binder (`binder`) makes the control socket. Nobody else can know it, and pids
    of requests prove nothing where the binder runs in a container of its own.
    """

    def __init__(self, texts: Mapping[bytes, Callable[[Viewer], bytes]]) -> None:
        numbers = (ino for ino in itertools.count(FIRST_FILE_INODE) if ino != SOCKET_INODE)
        self._inodes = dict(zip(texts, numbers, strict=False))
        self._texts = {self._inodes[name]: text for name, text in texts.items()}
        self._contents: dict[int, bytes] = {}
        self._count = itertools.count()
        now = time.time_ns()
        folder = VirtualAttributes(FOLDER_INODE, stat.S_IFDIR | 0o755, 2, now, now, now)
        self._attributes = {FOLDER_INODE: folder}
        for ino in self._texts:
            self._attributes[ino] = VirtualAttributes(ino, stat.S_IFREG | 0o444, 1, now, now, now)
        self.binding: bytes | None = None

    def get_attributes(self, ino: int) -> VirtualAttributes:
        """Get attributes of the folder or a file. NotFound for an unused reserved number."""
        try:
            return self._attributes[ino]
        except KeyError:
            raise NotFound(f"inode {ino} is reserved") from None

    def lookup(self, name: bytes) -> VirtualAttributes:
        """Find the file called ``name`` in the folder; "." is the folder itself. NotFound."""
        if name == b".":
            return self._attributes[FOLDER_INODE]
        try:
            return self._attributes[self._inodes[name]]
        except KeyError:
            raise NotFound(os.fsdecode(name)) from None

    def list_files(self, after: int) -> list[DirEntry]:
        """List the files after the cookie ``after``; an inode number, always above 2, serves as the cookie."""
        found = sorted((ino, name) for name, ino in self._inodes.items() if ino > after)
        return [DirEntry(name, ino, self._attributes[ino]) for ino, name in found]

    def guard_name(self, parent: int, name: bytes) -> None:
        """NotPermitted for making, removing or replacing a virtual name."""
        if is_virtual(parent) or (parent == ROOT_INODE and name == FOLDER_NAME):
            raise NotPermitted(f"{os.fsdecode(FOLDER_NAME)} is the daemon's own")

    def make_socket(self, name: bytes, mode: int) -> VirtualAttributes:
        """mknod in the folder: NotPermitted for all but a socket by the name of ``binding``.

        The inode gets the name of the control socket; the kernel keeps one inode for both names.
        """
        if self.binding is None or name != self.binding or not stat.S_ISSOCK(mode):
            raise NotPermitted(f"{os.fsdecode(FOLDER_NAME)} is the daemon's own")
        self.binding = None
        return self.add_socket()

    def add_socket(self) -> VirtualAttributes:
        """Add the name of the control socket: its binder makes it now, or did so in a former daemon."""
        now = time.time_ns()
        self._inodes[SOCKET_NAME] = SOCKET_INODE
        made = VirtualAttributes(SOCKET_INODE, stat.S_IFSOCK | 0o666, 1, now, now, now)
        return self._attributes.setdefault(SOCKET_INODE, made)

    def open(self, ino: int, flags: int, reader: Viewer) -> int:
        """Generate the content now, and return a handle of it. PermissionDenied for writing."""
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionDenied("virtual files are read-only")
        text = self._texts.get(ino)
        if text is None:
            raise NotADirectory(f"inode {ino} is not a virtual file")
        handle = HANDLE | ino << _INODE_SHIFT | reader.uid << _UID_SHIFT | (_SEES_ALL if reader.sees_all else 0)
        while (numbered := handle | next(self._count) & _COUNT_MASK) in self._contents:
            pass
        self._contents[numbered] = text(reader)
        return numbered

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Read part of the content as of the open; by a former daemon's handle, as of the first read here.

        BadHandle.
        """
        if handle not in self._contents:
            text = self._texts.get(handle >> _INODE_SHIFT & _INODE_MASK)
            if text is None or not is_virtual_handle(handle):
                raise BadHandle(f"handle {handle} is not open")
            self._contents[handle] = text(Viewer(handle >> _UID_SHIFT & _UID_MASK, handle & _SEES_ALL != 0))
        return self._contents[handle][offset : offset + size]

    def release(self, handle: int) -> None:
        """Drop the content. Unknown handles have none."""
        self._contents.pop(handle, None)
