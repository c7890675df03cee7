"""``attack_client_memory.py UID MOUNT WHAT ...``: memory that its owner takes away from the daemon, or never had."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable

from attacker_kit import READ, WRITE, Attacker, become, memfd, say, sqe, wait_for_word

GIB = 1 << 30
STEP = 8 << 20
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


def there(descriptor: int) -> int:
    """Bytes of memory that are there."""
    return os.fstat(descriptor).st_blocks * 512


class Mover:
    """Reads a file into memory, or writes it from there, 8 MiB at a time."""

    def __init__(self, mount: str, path: str) -> None:
        self.client = Attacker(mount)
        self._ring = self.client.ring()
        self._file = self.client.file(path)

    def move(self, op: int, iov: int, position: int, length: int = STEP) -> int:
        """The file's first bytes, to or from a position: the result."""
        self._ring.push(sqe(op, handle=self._file, iov=iov, iov_offset=position, length=length))
        return self._ring.wait()[0][1]

    def move_all(self, op: int, descriptor: int, size: int) -> list[int]:
        """Register memory, and move the file's first bytes to or from each part of it: results, each one once."""
        iov = self.client.iov(descriptor, size)
        return list(dict.fromkeys(self.move(op, iov, position) for position in range(0, size, STEP)))


def registration(client: Attacker, descriptor: int, size: int) -> int:
    """0, or the errno that the daemon answers."""
    try:
        client.iov(descriptor, size)
    except OSError as error:
        return error.errno or -1
    return 0


def huge(mount: str, path: str, pool: str) -> None:
    """Have the daemon copy into a huge page that was there, when no other one is left in the machine's pool."""
    mover = Mover(mount, path)
    descriptor = memfd(HUGE_PAGE, flags=os.MFD_ALLOW_SEALING | MFD_HUGETLB)
    file = os.open(pool, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, HUGE_PAGE)
    answers = [registration(mover.client, descriptor, HUGE_PAGE), registration(mover.client, file, HUGE_PAGE)]
    if not answers[0]:
        touch(descriptor, HUGE_PAGE)
        punch(descriptor, 0, HUGE_PAGE)
        touch(memfd(HUGE_PAGE, flags=MFD_HUGETLB), HUGE_PAGE)
        mover.move(READ, 3, 0)
    say(answers=answers)


def holes(mount: str, path: str) -> None:
    """Have nothing but zeros read into memory that is not there, but for two pages."""
    memory = memfd(GIB)
    os.pwrite(memory, b"x" * 4096, 5 * STEP + 100)
    results = Mover(mount, path).move_all(READ, memory, GIB)
    say(results=results, there=there(memory), zeros=not any(os.pread(memory, 2 * STEP, 5 * STEP)))


def data(mount: str, path: str) -> None:
    """Have bytes read into memory that is not there, by several connections, and keep the memory."""
    memories = [memfd(GIB) for _ in range(3)]
    results = [Mover(mount, path).move_all(READ, memory, GIB) for memory in memories]
    say(results=results, there=sum(map(there, memories)))


def punched(mount: str, path: str) -> None:
    """Give back what was read before more is read."""
    memory, mover, results = memfd(GIB), Mover(mount, path), set()
    for _ in range(20):
        results |= set(mover.move_all(READ, memory, 3 * STEP))
        punch(memory, 0, GIB)
    say(results=sorted(results))


def swapped(mount: str, path: str) -> None:
    """Touch memory, have the daemon see that it is there, punch it out, and have the daemon fill it. Keep all of it."""
    mover, size, results, memories = Mover(mount, path), 1 << 20, set(), []
    for _ in range(1000):
        memories.append(memfd(size))
        touch(memories[-1], size).close()
        iov = mover.client.iov(memories[-1], size)
        mover.move(READ, iov, 0, 4096)
        punch(memories[-1], 0, size)
        results.add(mover.move(READ, iov, 0, size - 4096))
    say(results=sorted(results), there=sum(map(there, memories)))


def touched(mount: str, path: str) -> None:
    """Use memory of our own, as much as we like."""
    memory = memfd(20 * STEP)
    touch(memory, 20 * STEP)
    say(results=Mover(mount, path).move_all(READ, memory, 20 * STEP))


def shared_file(mount: str, path: str) -> None:
    """As `data`, in a file of /dev/shm, which cannot be sealed."""
    memory = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE, 0o600)
    os.ftruncate(memory, GIB)
    say(results=[Mover(mount, path).move_all(READ, memory, GIB)], there=there(memory))


def writes(mount: str, path: str) -> None:
    """Write from memory that is not there."""
    memory = memfd(GIB)
    say(results=Mover(mount, path).move_all(WRITE, memory, GIB), there=there(memory))


ATTACKS: dict[str, Callable[..., None]] = {
    attack.__name__: attack for attack in (data, holes, huge, punched, shared_file, swapped, touched, writes)
}


def main() -> None:
    uid, mount, what, *arguments = sys.argv[1:]
    become(int(uid))
    ATTACKS[what](mount, *arguments)
    wait_for_word()


if __name__ == "__main__":
    main()
