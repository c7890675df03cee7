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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvfuse import errors
from kvfuse.usrbio.daemon.connection_keeping import ConnectionKeeping
from kvfuse.usrbio.daemon.user_accounts import Limit, UserAccount
from kvfuse.usrbio.protocol.wire import TTL_MAX, Access, PutHints
from kvfuse.volume.api import ROW_TERMS, Binding, RowApi, RowTable, RowTerms
from kvfuse.volume.measures.gates import Gates
from kvfuse.volume.measures.measures import Measures
from kvfuse.volume.views.ancestors import Ancestors
from kvfuse.volume.views.content_map import ContentMap

TMPFS_MAGIC = 0x01021994
"""the type of tmpfs, and of memfds, in statfs(2)"""
BINDINGS_MAX = 100_000
"""keys that a connection remembers, of all its namespaces"""
UNCHECKED = -2
"""no epoch of `Gates`"""
_NO_GATES, _NO_ANCESTORS = Gates(), Ancestors()
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
    use_count: int = 0
    """operations on the event loop that need the handle"""
    dropped: bool = False
    is_cut: bool = False
    """a former daemon had not stored all bytes written to it, and no FSYNC has reported that yet"""
    when_told: Callable[[], None] = lambda: None
    """called when one reports it"""


@dataclass(eq=False)
class Remembered:
    """The number of keys that the namespaces of a connection remember together. Event loop only."""

    count: int = 0
    namespaces: set[NamespaceHandle] = field(default_factory=set)

    def make_room(self) -> None:
        """Make room for one more key: where ``BINDINGS_MAX`` are remembered, forget all; calls look them up again."""
        if self.count >= BINDINGS_MAX:
            for namespace in self.namespaces:
                namespace.bindings = {}
            self.namespaces.clear()
            self.count = 0


class Group(NamedTuple):
    """The group of new blocks in a directory, as of ``changes`` of ``ancestors``."""

    gid: int
    ancestors: Ancestors = _NO_ANCESTORS
    changes: int = 0

    @property
    def is_current(self) -> bool:
        """Whether no change of the directory's group or mode has begun. Any thread."""
        return self.changes == self.ancestors.changes


NO_GROUP = Group(0)
"""for directories into which nothing is put"""


@dataclass(eq=False, frozen=True)
class BlockDoor:
    """What the threads of a client may do with blocks that are rows, as the event loop found it."""

    store: RowApi
    directory: int
    namespace: int
    own: RowTable | None
    """where its own blocks go; None: it may put none"""
    tables: tuple[RowTable, ...]
    """of the directory, at that time"""
    readable: tuple[RowTable, ...]
    has_files: bool
    """names of the directory may also mean ordinary files"""
    reads_all: bool
    """it may read all blocks of the directory"""
    asks_first: bool = False
    """each answer is what all hosts have: the event loop asks them"""
    terms: RowTerms = ROW_TERMS

    def terms_of(self, hints: int) -> RowTerms:
        """The terms of a put with these hints. ValueError. Any thread."""
        if not hints:
            return self.terms
        ttl, priority = PutHints.unpack(hints)
        expires = min(self.store.now(self.namespace) + ttl, TTL_MAX) if ttl else 0
        return self.terms._replace(expires=expires, priority=self.terms.priority + priority)

    def find(self, names: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which blocks the directory has, whoever may read them, and whatever they are worth. Any thread."""
        found = np.zeros(len(names), np.bool_)
        for table in self.store.tables_of(self.directory):
            found |= table.find(names, self.store.now(table.namespace))[0] >= 0
        return found

    @property
    def sees_all(self) -> bool:
        """Its threads may read all blocks of the directory."""
        return self.reads_all and not self.asks_first

    @property
    def is_current(self) -> bool:
        """Whether the directory has the same tables as then, and as few files. Any thread."""
        store = self.store
        same = self.tables is store.tables_of(self.directory) and not store.has_ended
        return same and (self.has_files or self.directory not in store.with_files)


@dataclass(eq=False)
class NamespaceHandle:
    """A registered directory, whose files are blocks."""

    ino: int
    mode: int
    """permission bits of new blocks"""
    group: Group
    read_only: bool = False
    """the peer has it through a mount that is bound read-only"""
    may_list: bool = False
    """the peer may, as far as known, find out every name; else it must not see blocks that it did not name"""
    may_put: bool = True
    """the peer may, as far as known, make names in it; else a put is not copied before the event loop allowed it"""
    measures: Measures = field(default_factory=Measures)
    """measures of the volume's namespace around it"""
    waits: bool = False
    """a put in it waits for its commit, as far as known"""
    by_path: bool = False
    """the peer's user could search all directories above it when the peer registered it: so it has to be able to later,
    too. Else somebody gave it the descriptor, or it has the directory through a bind mount"""
    gates: Gates = _NO_GATES
    epoch: int = UNCHECKED
    """epoch of ``gates`` as of which the rights below are known"""
    ancestors: Ancestors = _NO_ANCESTORS
    changes: int = 0
    """changes of ``ancestors``, the same"""
    descriptor: str = ""
    """the client's description of its blocks; it may not use the directory where the namespace has another one"""
    has_token: bool = False
    """the peer has shown the token of the volume's namespace that it is in, and may all there"""
    is_absent: bool = False
    """the peer may not use that namespace: for it the directory is empty"""
    is_cut_off: bool = False
    """a directory above it does not let the peer through any more"""
    blocks: BlockDoor | None = None
    """None: its blocks are files, or the event loop has to look"""
    bindings: dict[bytes, Binding] = field(default_factory=dict)
    """file name -> its binding, which this peer may read; may be invalid by now"""
    remembered: Remembered = field(default_factory=Remembered)
    """shared by all namespaces of the connection"""

    @property
    def may_copy(self) -> bool:
        """Whether a put may be copied before the event loop looks at it. Any thread."""
        return self.may_put and self.group.is_current

    @property
    def is_checked(self) -> bool:
        """Whether the peer's rights are the same as when the event loop read them. Any thread."""
        return self.epoch == self.gates.epoch and self.changes == self.ancestors.changes

    def remember(self, name: bytes, binding: Binding) -> None:
        self.remembered.make_room()
        self.remembered.namespaces.add(self)
        self.remembered.count += name not in self.bindings
        self.bindings[name] = binding


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
