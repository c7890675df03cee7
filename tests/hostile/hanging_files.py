"""A file system of the attacker's own, in which whoever reads a file waits for ever: pages that never arrive.

Where the kernel copies from or to such a page, it waits, with whatever locks it holds. Raw FUSE protocol.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
from pathlib import Path

LOOKUP, FORGET, GETATTR, OPEN, READ, INIT = 1, 2, 3, 14, 15, 26
IN_HEADER, OUT_HEADER = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
ROOT, FILE = 1, 2
SIZE = 1 << 20
CLONE_NEWNS, MS_REC_PRIVATE = 0x20000, 0x44000
PR_SET_PDEATHSIG = 1
HIDDEN = "/mnt"
"""where this process alone sees the mount"""
ENOSYS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def hanging_file(uid: int) -> Path:
    """A file that opens, and whose reads nobody answers. By root, who becomes ``uid`` after it.

    The mount is in a mount namespace of this process and ends with it.
    """
    device = os.open("/dev/fuse", os.O_RDWR)
    words = f"fd={device},rootmode=40000,user_id={uid},group_id={uid},allow_other".encode()
    _check(_libc.unshare(CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None))
    _check(_libc.mount(b"hanging", HIDDEN.encode(), b"fuse", ctypes.c_ulong(0), words))
    parent = os.getpid()
    if os.fork() == 0:  # the kernel ends all waits when this process ends
        os.setresuid(uid, uid, uid)  # else its parent, who becomes this user, may not signal it
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            _answer_all(device)
        os._exit(0)
    os.close(device)
    return Path(HIDDEN, "file")


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "a hanging file system cannot be mounted")


def unreadable_page(path: Path) -> memoryview:
    """Memory whose first use by the kernel waits for ever."""
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def _answer_all(device: int) -> None:
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError:  # unmounted
            return
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        reply = _reply(opcode, node)
        if reply is not None:
            error, data = reply
            os.write(device, OUT_HEADER.pack(OUT_HEADER.size + len(data), error, unique) + data)


def _reply(opcode: int, node: int) -> tuple[int, bytes] | None:
    """(-errno, data); None: nobody gets an answer."""
    if opcode == INIT:
        return 0, struct.pack("<IIIIHHIIHHI7I", 7, 31, 0, 0, 16, 12, 1 << 17, 1, 32, 0, 0, *[0] * 7)
    if opcode == GETATTR:
        return 0, struct.pack("<QII", 3600, 0, 0) + _attributes(node)
    if opcode == LOOKUP:
        return 0, struct.pack("<QQQQII", FILE, 0, 3600, 3600, 0, 0) + _attributes(FILE)
    if opcode == OPEN:
        return 0, struct.pack("<QII", 1, 0, 0)
    return None if opcode in (READ, FORGET) else (-ENOSYS, b"")


def _attributes(node: int) -> bytes:
    mode = 0o40777 if node == ROOT else 0o100666
    return struct.pack("<6Q10I", node, SIZE, SIZE // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
