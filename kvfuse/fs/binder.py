"""Binds a socket inside the mount, as a process of its own: ``python binder.py DESCRIPTOR FOLDER``.

A bound socket, and every socket accepted from it, holds the mount it was bound through until it is closed: a plain
``umount`` would say "busy" for as long as the daemon listens. So this process binds the socket through a copy of the
mount: it unshares its mount namespace, binds there the socket that it shares with the daemon, and ends. Its namespace
ends with it, and the copy then belongs to the socket alone. A client connects by inode, which is the same through
every mount of the file system.

Its input is the name to bind to, which only the daemon and this process know: the daemon serves the mknod of that name
once. It uses only the standard library, so that it starts in a few milliseconds.
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
    """Unshare the mount namespace. OSError where neither root nor the system's settings allow it.

    The new mounts are private: else this process's use of the mount would keep others from unmounting theirs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a mount namespace needs root, or user namespaces: {os.strerror(number)}")
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mounts cannot be made private: {os.strerror(number)}")


def main(descriptor: int, folder: str) -> None:
    """Bind ``descriptor`` in ``folder``, a path of any length, to the name on stdin, and say so. OSError."""
    name = sys.stdin.buffer.read()
    take_own_mounts()
    os.chdir(folder)
    with socket.socket(fileno=descriptor) as bound:
        bound.bind(name)
    print("bound")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2])
    except OSError as error:
        sys.exit(error.strerror)
