"""``attack_punches.py UID MOUNT SIZE``: small READs into memory of which a thread punches all out, again and again.

Says how long the longest of its punches took, and how many entries were answered, for each line of input.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from pathlib import Path

from attacker_kit import READ, Attacker, become, memfd, say, sqe, wait_for_word

ENTRIES = 64
PUNCH = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"""
MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Puncher:
    """``longest``: seconds that one punch took."""

    def __init__(self, size: int) -> None:
        self.descriptor = memfd(size)
        self.longest = 0.0
        self._size = size
        self._map = mmap.mmap(self.descriptor, size)
        self._map.madvise(MADV_POPULATE_WRITE)

    def run(self) -> None:
        while True:
            started = time.perf_counter()
            _libc.fallocate(self.descriptor, PUNCH, 0, self._size)
            self.longest = max(self.longest, time.perf_counter() - started)
            self._map.madvise(MADV_POPULATE_WRITE)


def main() -> None:
    uid, mount, size = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    become(uid)
    client = Attacker(mount)
    puncher = Puncher(size)
    file = client.file(mount / "public" / "data", os.O_RDONLY)
    iov = client.iov(puncher.descriptor, size)
    ring = client.ring(ENTRIES)
    step = size // ENTRIES
    reads = [
        sqe(READ, handle=file, iov=iov, offset=4096 * number, iov_offset=step * number, length=4096)
        for number in range(ENTRIES)
    ]
    threading.Thread(target=puncher.run, daemon=True).start()
    answered = 0

    def read() -> None:
        nonlocal answered
        while True:
            for entry in reads:
                ring.push(entry)
                answered += len(ring.wait())

    threading.Thread(target=read, daemon=True).start()
    say(ready=True)
    while wait_for_word():
        say(longest=puncher.longest, answered=answered)
        puncher.longest, answered = 0.0, 0


if __name__ == "__main__":
    main()
