"""Replaces the mount of a dead daemon: the new mount is in place before the dead one is detached.

Were the dead mount detached first, programs would see the bare folder until the new daemon answers, and write into it.
So libfuse mounts at a temporary folder; this module moves a copy of that mount *beneath* the dead one
(Linux 6.5), and detaches the dead one. Older kernels allow only the other order, and without root the dead mount is
detached just before libfuse mounts: a window of microseconds to milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfuse.errors import MountError
from kvfuse.mounttable import DEAD, FILE_SYSTEM, top_mount

OPEN_TREE, MOVE_MOUNT = 428, 429
"""numbers of system calls, the same on all processors"""
OPEN_TREE_CLONE = 1
MOVE_MOUNT_FROM_EMPTY_PATH = 0x004
MOVE_MOUNT_BENEATH = 0x200
AT_FDCWD = -100
MNT_DETACH = 2

log = logging.getLogger(__name__)
libc = ctypes.CDLL(None, use_errno=True)


def is_dead_mount(point: Path) -> bool:
    """Whether the top mount at ``point`` is a kvfuse mount whose daemon is dead. Queries no other file system."""
    row = top_mount(point)
    if row is None or row.file_system != FILE_SYSTEM:
        return False
    try:
        os.statvfs(row.point)
    except OSError as error:
        return error.errno in DEAD
    return False


@contextmanager
def replace_dead_mount(point: Path) -> Iterator[Path]:
    """Yield where to mount in the body; afterwards move that mount to ``point`` and detach the dead one there.

    MountError where the kernel refuses: then the dead mount stays, and the new one is unmounted.
    """
    if os.geteuid() != 0:
        subprocess.run(["fusermount3", "-u", "-z", "--", point], stdin=subprocess.DEVNULL, check=False)
        yield point
        return
    with tempfile.TemporaryDirectory(prefix="kvfuse-mount-") as folder:
        yield Path(folder)
        try:
            tree = check(libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(folder), OPEN_TREE_CLONE | os.O_CLOEXEC))
            try:
                _attach_mount(tree, point)
            finally:
                os.close(tree)
        except OSError as error:
            raise MountError(f"{point} cannot take the place of the dead mount there: {error.strerror}") from error
        finally:
            unmount(Path(folder))


def _attach_mount(tree: int, point: Path) -> None:
    """Attach a detached mount at ``point`` in place of the dead mount on top of it. OSError."""
    target = os.fsencode(point)
    try:
        check(libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, target, MOVE_MOUNT_FROM_EMPTY_PATH | MOVE_MOUNT_BENEATH))
        unmount(point)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an unknown flag, or a mount that allows none beneath it
            raise
        unmount(point)
        check(libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, target, MOVE_MOUNT_FROM_EMPTY_PATH))


def unmount(point: Path) -> None:
    """Detach the top mount at ``point``, in use or not. OSError."""
    check(libc.umount2(os.fsencode(point), MNT_DETACH))


def check(result: int) -> int:
    """Return the result of a call of ``libc``. OSError where it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
