"""``attack_client_memory.py UID MOUNT WHAT ...``: memory that its owner takes away from the daemon, or never had."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable

from attacker_kit import READ, Attacker, become, memfd, say, sqe

HUGE_PAGE = 2 << 20
MFD_HUGETLB = 4
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
libc = ctypes.CDLL(None, use_errno=True)


def punch(descriptor: int, offset: int, size: int) -> None:
    """Give pages back: they read as zeros."""
    flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    if libc.fallocate(descriptor, flags, ctypes.c_long(offset), ctypes.c_long(size)):
        raise OSError(ctypes.get_errno(), "fallocate")


def touch(descriptor: int, size: int) -> mmap.mmap:
    """Have all pages be there."""
    memory = mmap.mmap(descriptor, size)
    for offset in range(0, size, 4096):
        memory[offset] = 1
    return memory


def registration(client: Attacker, descriptor: int, size: int) -> int:
    """0, or the errno that the daemon answers."""
    try:
        client.iov(descriptor, size)
    except OSError as error:
        return error.errno or -1
    return 0


def huge(client: Attacker, folder: str, path: str) -> None:
    """Have the daemon copy into a huge page that was there, when no other one is left in the machine's pool."""
    descriptor = memfd(HUGE_PAGE, flags=os.MFD_ALLOW_SEALING | MFD_HUGETLB)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, HUGE_PAGE)
    answers = [registration(client, descriptor, HUGE_PAGE), registration(client, file, HUGE_PAGE)]
    if not answers[0]:
        touch(descriptor, HUGE_PAGE)
        punch(descriptor, 0, HUGE_PAGE)
        touch(memfd(HUGE_PAGE, flags=MFD_HUGETLB), HUGE_PAGE)
        ring = client.ring()
        ring.push(sqe(READ, handle=client.file(f"{folder}/file"), iov=1, length=4096))
        ring.wait()
    say(answers=answers)


ATTACKS: dict[str, Callable[..., None]] = {"huge": huge}


def main() -> None:
    uid, mount, what, *arguments = sys.argv[1:]
    become(int(uid))
    ATTACKS[what](Attacker(mount), *arguments)


if __name__ == "__main__":
    main()
