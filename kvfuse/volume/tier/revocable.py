"""Shared memory that this daemon writes, that others map to read, and that is taken back whoever has it mapped.

A piece of it is a file in a tmpfs that no process has mounted. Two folders lead there, one of them read-only. Nobody
makes a descriptor for writing of one for reading that came by way of that folder: the kernel answers EROFS to every
process, root's too. So the file needs no seals. Seals against writing would forbid what the file is for: the daemon
punches out all of its pages (`RevocableMemory.take_back`), and they are free, whoever has them mapped. Readers find
zeros then; where they touch these, that is memory of their own.

To make such a file system takes CAP_SYS_ADMIN. A daemon without it has the two folders of a keeper in another container
(`kvfuse hold`). Else it makes memfds, and shows them only to processes that could end it anyway (`Supply.is_for_all`).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from functools import cached_property, partial

from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.remote.libc import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    leave_mounts,
    mount,
    punch_hole,
)
from kvfuse.volume.tier.placement import ANYWHERE, Placement

KEPT = "memory/folders"
"""keeper entry: descriptors of the two folders, that for writing first"""
_PLACE = "/proc"
"""any folder that is there: what is mounted on it is seen by one thread, and gone when that ends"""
_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC
_WORDS = "size=0,nr_inodes=0,mode=0700"
"""no limit: the tier has one"""

log = logging.getLogger(__name__)


class RevocableMemory:
    """A piece of shared memory. Both descriptors are its own, and closed with it.

    ``descriptor``: for writing. ``readable``: of the same file, by which nobody can write.
    """

    __slots__ = ("__weakref__", "descriptor", "readable")

    def __init__(self, descriptor: int, readable: int) -> None:
        self.descriptor = descriptor
        self.readable = readable
        weakref.finalize(self, _close, descriptor, readable)

    def open_for_others(self) -> int:
        """A new descriptor, by which nobody can write."""
        return os.open(f"/proc/self/fd/{self.readable}", os.O_RDONLY | os.O_CLOEXEC)

    def next_pages(self, start: int) -> tuple[int, int] | None:
        """The first range of pages from ``start`` on that are there, in bytes, whoever touched them; None: none are."""
        try:
            found = os.lseek(self.descriptor, start, os.SEEK_DATA)
        except OSError:  # ENXIO
            return None
        return found, os.lseek(self.descriptor, found, os.SEEK_HOLE)

    def take_back(self, start: int, end: int) -> None:
        """Free the pages of a range, in bytes: nobody has what was in it any more. About 0.3 s for each GiB."""
        punch_hole(self.descriptor, start, end - start)


class Supply:
    """Makes pieces. Any thread. ``is_guarded``: False makes them as where the daemon lacks CAP_SYS_ADMIN.

    ``placement``: of the pages of what is mapped as an arena. ``keeper``: may have the two folders.
    """

    def __init__(self, placement: Placement = ANYWHERE, keeper: Keeper = NO_KEEPER, *, is_guarded: bool = True) -> None:
        self.placement = placement
        self._is_guarded = is_guarded
        kept = keeper.take(KEPT)
        self._given = MemoryFolders(*kept.descriptors) if kept is not None and len(kept.descriptors) == 2 else None
        self._lock = threading.Lock()

    @property
    def is_for_all(self) -> bool:
        """Pieces may be shown to any user."""
        return self._folders is not None

    def make(self, name: str, size: int) -> RevocableMemory:
        """A piece of ``size`` bytes, all of them zeros. OSError."""
        with self._lock:
            piece = self._new(name)
        os.ftruncate(piece.descriptor, size)
        return piece

    def _new(self, name: str) -> RevocableMemory:
        folders = self._folders
        if folders is None:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
            opened = partial(os.open, f"/proc/self/fd/{descriptor}")
        else:
            descriptor = folders.create(name)
            opened = partial(os.open, name, dir_fd=folders.readable)
        try:
            return RevocableMemory(descriptor, opened(os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            if folders is not None:
                os.unlink(name, dir_fd=folders.writable)

    @cached_property
    def _folders(self) -> MemoryFolders | None:
        if self._given is not None or not self._is_guarded:
            return self._given
        return make_folders()


class MemoryFolders:
    """Descriptors of the file system's root, for writing and for reading; they keep it, and are this object's."""

    def __init__(self, writable: int, readable: int) -> None:
        self.writable, self.readable = writable, readable
        weakref.finalize(self, _close, writable, readable)

    def create(self, path: str) -> int:
        """Make a file, and a descriptor of it for writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o400, dir_fd=self.writable)
        except FileExistsError:  # a daemon was killed before it removed the name
            os.unlink(path, dir_fd=self.writable)
            return os.open(path, flags, 0o400, dir_fd=self.writable)


def make_folders() -> MemoryFolders | None:
    """Make the file system. None: this process may not; the log says why."""
    made: list[MemoryFolders] = []
    thread = threading.Thread(target=_make_folders, args=(made,), name="kvfuse-mounting")
    thread.start()
    thread.join()
    return made[0] if made else None


def _mount_folders() -> MemoryFolders:
    """Mount in this thread, which is to end afterwards. OSError."""
    leave_mounts()
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    try:
        mount("kvfuse-memory", _PLACE, "tmpfs", _FLAGS, f"{_WORDS},huge=advise")
    except OSError:  # a kernel without huge pages
        mount("kvfuse-memory", _PLACE, "tmpfs", _FLAGS, _WORDS)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    writable = os.open(_PLACE, flags)
    try:
        inner = f"{_PLACE}/readable"
        os.mkdir(inner)
        mount(_PLACE, inner, "none", MS_BIND)
        mount("none", inner, "none", MS_REMOUNT | MS_BIND | MS_RDONLY | _FLAGS)
        return MemoryFolders(writable, os.open(inner, flags))
    except BaseException:
        os.close(writable)
        raise


def _make_folders(made: list[MemoryFolders]) -> None:
    try:
        made.append(_mount_folders())
    except OSError as error:
        log.info("other users' processes map no memory of this daemon, as it cannot take it back: %s", error)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
