"""Defines things that a client registers, as files and namespaces, their handles, and checks of their descriptors.

The event loop makes objects, and ring threads read them by references of their own: a thing that was dropped stays
usable until the last operation that found it has ended.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from kvfuse import errors
from kvfuse.usrbio.daemon.connection_keeping import ConnectionKeeping
from kvfuse.usrbio.daemon.once_buffers import ONCE_MIN
from kvfuse.usrbio.daemon.user_accounts import Limit, UserAccount
from kvfuse.usrbio.protocol.wire import Access
from kvfuse.volume.measures.measures import Measures
from kvfuse.volume.views.content_map import ContentMap

TMPFS_MAGIC = 0x01021994
"""the type of tmpfs, and of memfds, in statfs(2)"""
_fstatfs = ctypes.CDLL(None, use_errno=True).fstatfs


@dataclass(eq=False)
class OpenFile:
    """A registered file. ``handle``: the volume's, open as long as the file is registered."""

    handle: Any
    ino: int
    readable: bool
    writable: bool
    map: ContentMap
    measures: Measures = field(default_factory=Measures)
    """measures of its namespace"""
    reads_once: bool = False
    """what is read of it need not stay in the page cache; the next daemon does not know that"""
    use_count: int = 0
    """operations on the event loop that need the handle"""
    dropped: bool = False
    is_cut: bool = False
    """a former daemon had not stored all bytes written to it, and no FSYNC has reported that yet"""
    when_told: Callable[[], None] = lambda: None
    """called when one reports it"""

    def goes_past_cache(self, length: int) -> bool:
        """A read of so many bytes, which are not in the page cache, does."""
        return self.reads_once and length >= ONCE_MIN


T = TypeVar("T")


@dataclass(eq=False, repr=False)
class HandleMap(dict[int, T]):
    """Registered things of one kind, by handles that no other thing of the connection has. Ring threads only look.

    ``limit``, ``size_limit``: the limits of the user's account for their number and their sizes. ``keep``: packs a
    thing for the next daemon: content, and descriptors, which stay the thing's.
    """

    kind: str
    count_max: int
    handles: ConnectionKeeping
    account: UserAccount
    limit: Limit
    size_limit: Limit | None = None
    keep: Callable[[T], tuple[object, list[int]]] | None = None

    @contextmanager
    def taking(self, size: int = 0) -> Iterator[None]:
        """Charge the user for one more of ``size`` bytes; not where the body fails. InvalidArgument, QuotaExceeded."""
        if len(self) >= self.count_max:
            raise errors.InvalidArgument(f"the connection has {self.count_max} registered already: drop some")
        with (
            self.account.taking(self.limit),
            self.account.taking(self.size_limit, size) if self.size_limit else nullcontext(),
        ):
            yield

    def add(self, thing: T) -> int:
        """Register a thing that `taking` has charged; returns its handle."""
        handle = next(self.handles)
        if self.keep is not None:
            self.handles.add(self.kind, handle, *self.keep(thing))
        self[handle] = thing
        return handle

    def is_dropped(self, handle: int) -> bool:
        """Whether the former daemon dropped it, for a request that the client retries, as nobody answered it."""
        return handle not in self and self.handles.was_dropped(handle)

    def remove(self, handle: int) -> T:
        """Unregister a thing, and refund the user. BadHandle."""
        if handle not in self:
            raise errors.BadHandle(f"{self.kind} {handle} is not registered")
        self.handles.drop(self.kind, handle)
        thing: Any = self.pop(handle)
        self.account.give(self.limit)
        if self.size_limit:
            self.account.give(self.size_limit, thing.size)
        return cast(T, thing)


def check_memory(descriptor: int) -> None:
    """OSError EINVAL for anything but shared memory in ordinary pages.

    Huge pages (hugetlbfs, or a memfd of them) have seals, too. But a hole in them is SIGBUS where the machine's pool is
    empty, whereas tmpfs fills it, or fails the system call.
    """
    fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    kind = (ctypes.c_long * 32)()
    if _fstatfs(descriptor, kind) or kind[0] != TMPFS_MAGIC:
        raise OSError(errno.EINVAL, "the memory must be a memfd of ordinary pages, or a file in a tmpfs")


def check_file(descriptor: int, device: int, access: Access) -> int:
    """The inode of a descriptor of a regular file of the mount, open as ``access`` says. May wait for the kernel.

    KvfuseError: BadHandle, PermissionDenied, InvalidArgument.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    status = os.fstat(descriptor)
    if status.st_dev != device or flags & os.O_PATH:
        raise errors.BadHandle("the descriptor is not of an open file of this mount")
    if not stat.S_ISREG(status.st_mode):
        raise errors.InvalidArgument("the descriptor is not of a regular file")
    mode = flags & os.O_ACCMODE
    if (access & Access.READ and mode == os.O_WRONLY) or (access & Access.WRITE and mode == os.O_RDONLY):
        raise errors.PermissionDenied(f"the descriptor is not open for {access.name}")
    return status.st_ino


def check_directory(descriptor: int, device: int) -> tuple[int, bool]:
    """(inode, bound read-only) of a descriptor of a directory of the mount. May wait for the kernel.

    KvfuseError: BadHandle, NotADirectory.
    """
    status = os.fstat(descriptor)
    if status.st_dev != device:
        raise errors.BadHandle("the descriptor is not of this mount")
    if not stat.S_ISDIR(status.st_mode):
        raise errors.NotADirectory("the descriptor is not of a directory")
    return status.st_ino, bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)
