"""Handles of files, as NFS servers keep them: name_to_handle_at(2) and open_by_handle_at(2)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from posix_calls import AT_FDCWD

_libc = ctypes.CDLL(None, use_errno=True)
_HEAD = struct.Struct("Ii")
_SIZE_MAX = 128


class FileHandle(NamedTuple):
    kind: int
    content: bytes


def handle_of(path: Path) -> FileHandle:
    """The kernel's handle of what has this name; of a symbolic link its own."""
    buffer = ctypes.create_string_buffer(_HEAD.pack(_SIZE_MAX, 0), _HEAD.size + _SIZE_MAX)
    mount_id = ctypes.c_int()
    if _libc.name_to_handle_at(AT_FDCWD, os.fsencode(path), buffer, ctypes.byref(mount_id), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    size, kind = _HEAD.unpack_from(buffer.raw)
    return FileHandle(kind, buffer.raw[_HEAD.size : _HEAD.size + size])


@contextmanager
def opened(point: Path, handle: FileHandle, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of what a handle means in the file system that is mounted at ``point``. Needs root."""
    root = os.open(point, os.O_RDONLY | os.O_DIRECTORY)
    try:
        words = _HEAD.pack(len(handle.content), handle.kind) + handle.content
        fd = _libc.open_by_handle_at(root, ctypes.create_string_buffer(words, len(words)), flags)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(root)
    try:
        yield fd
    finally:
        os.close(fd)


def read_handle(point: Path, handle: FileHandle) -> bytes:
    """All bytes of the file."""
    with opened(point, handle) as fd:
        return os.pread(fd, os.fstat(fd).st_size, 0)
