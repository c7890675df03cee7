"""Folders by paths that others name, and binds between them: no path leads out of its root, and none has links.

A folder is held by a descriptor (O_PATH) from the check to the bind, so nobody can exchange it in between. All
functions raise OSError; ELOOP: a symbolic link is in the path; EXDEV: the path leads out of the root.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
_OPENAT2 = 437
"""on every architecture"""
_RESOLVE = 0x02 | 0x04 | 0x08
"""RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH"""
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    """struct open_how of openat2(2)"""

    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def by_descriptor(descriptor: int) -> Path:
    """The path by which system calls without descriptors reach a folder."""
    return Path(f"/proc/self/fd/{descriptor}")


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


@contextmanager
def opened_root(path: Path) -> Iterator[int]:
    """A folder that the administrator names: links in its path are followed."""
    descriptor = os.open(path, FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_beneath(root: int, path: str) -> Iterator[int]:
    """The folder ``path`` beneath ``root``. Mount points in the path are crossed."""
    how = _OpenHow(FOLDER, 0, _RESOLVE)
    words = ctypes.c_int(root), ctypes.c_char_p(os.fsencode(path)), ctypes.byref(how)
    descriptor = _checked(_libc.syscall(ctypes.c_long(_OPENAT2), *words, ctypes.c_size_t(ctypes.sizeof(how))), path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_folders(root: int, path: str, mode: int) -> None:
    """Make the folders of ``path`` beneath ``root`` that are absent, each with ``mode``."""
    parts = PurePosixPath(path).parts
    for depth, name in enumerate(parts):
        with opened_beneath(root, str(PurePosixPath(*parts[:depth]))) as parent, suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=parent)


def bind(source: int, target: int) -> None:
    """Bind one folder to another. ``target`` goes on to name the folder below; its path names the bind."""
    _mount(by_descriptor(source), by_descriptor(target), MS_BIND)


def set_flags(top: int, flags: int) -> None:
    """Set the mount flags of the bind that ``top`` is the root of."""
    _mount(None, by_descriptor(top), MS_BIND | MS_REMOUNT | flags)


def _mount(source: Path | None, target: Path, flags: int) -> None:
    said = None if source is None else os.fsencode(source)
    _checked(_libc.mount(said, os.fsencode(target), None, ctypes.c_ulong(flags), None), "mount")


def detach(top: int) -> None:
    """Unmount what ``top`` is the root of, with what is mounted below it. Open files stay open."""
    _checked(_libc.umount2(os.fsencode(by_descriptor(top)), _MNT_DETACH), "umount")
