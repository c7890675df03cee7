"""Binds a socket inside the mount, as a process of its own: ``python binder.py DESCRIPTOR FOLDER NAME``.

A bound socket holds the mount it was bound through until it is closed, and with it every socket accepted from it:
a plain ``umount`` would say "busy" for as long as the daemon listens. So the socket is bound through a copy of the
mount: this process takes a mount namespace of its own, binds there the socket that it shares with the daemon, and
ends. Its namespace goes with it, and the copy then belongs to the socket alone. A client connects by inode, which
is the same through every mount of the file system.

It waits for the end of its input before it begins: by then the daemon knows its number, and serves its mknod.
Only the standard library is used, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_REC_PRIVATE = 0x00044000


def take_own_mounts() -> None:
    """A mount namespace of this process's own. OSError where neither root nor the system's settings allow it.

    Its mounts are private: else this process's use of the mount would keep others from unmounting theirs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a mount namespace needs root, or user namespaces: {os.strerror(number)}")
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mounts cannot be made private: {os.strerror(number)}")


def main(descriptor: int, folder: str, name: str) -> None:
    """Bind ``descriptor`` to ``name`` in ``folder``, which may be a path of any length. OSError."""
    sys.stdin.buffer.read()
    take_own_mounts()
    os.chdir(folder)
    with socket.socket(fileno=descriptor) as bound:
        bound.bind(name)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), *sys.argv[2:])
    except OSError as error:
        sys.exit(error.strerror)
