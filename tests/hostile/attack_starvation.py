"""``attack_starvation.py UID MOUNT KIND RINGS``: keeps so many rings busy after ``go``, until any other line of input.

KIND: ``refused`` entries that mean nothing, ``reads`` of 4 KiB, ``exists`` of many keys, ``puts`` of 64 KiB,
``bells`` that ring for nothing, ``fsyncs`` after writes of a byte, ``cancels`` of nothing, ``deletes`` and prefetches
of several keys. It refills a ring when all of it is completed, and sleeps where none is: the daemon is
what it keeps busy, not the processors.
"""

from __future__ import annotations

import os
import select
import struct
import sys
import time
from pathlib import Path

from attacker_kit import (
    CANCEL,
    CQ_HEAD,
    CQ_TAIL,
    DAEMON_SLEEPS,
    DELETE,
    EXISTS,
    FSYNC,
    PREFETCH,
    PUT,
    READ,
    SQ_TAIL,
    WRITE,
    Attacker,
    Ring,
    become,
    memfd,
    say,
    sqe,
)

ENTRIES = 64
KEYS = 4096
NAMES = 16
PUT_SIZE = 64 << 10
IDLE_SECONDS = 0.0005


def entries_of(kind: str, client: Attacker, mount: Path) -> list[bytes]:
    """What each ring is filled with."""
    if kind in ("refused", "bells"):
        return [sqe(99, user_data=number) for number in range(ENTRIES)]
    if kind == "reads":
        file = client.file(mount / "public" / "data", os.O_RDONLY)
        iov = client.iov(memfd(4096 * ENTRIES), 4096 * ENTRIES)
        return [
            sqe(READ, handle=file, iov=iov, offset=4096 * number, iov_offset=4096 * number, length=4096)
            for number in range(ENTRIES)
        ]
    folder = mount / "public" / str(os.getuid())
    if kind == "fsyncs":
        file = client.file(folder / "written", os.O_RDWR | os.O_CREAT)
        iov = client.iov(memfd(4096), 4096)
        write = sqe(WRITE, handle=file, iov=iov, length=1)
        return [write, sqe(FSYNC, handle=file)] * 4
    if kind == "cancels":
        return [sqe(CANCEL, offset=1 << 40, user_data=number) for number in range(ENTRIES)]
    namespace = client.namespace(folder)
    if kind == "deletes":
        keys = {"length": NAMES, "key_length": 2 * NAMES + 4 * NAMES, "offset": 12 * KEYS}
        return [sqe(op, handle=namespace, **keys) for op in (DELETE, PREFETCH)] * 4
    if kind == "exists":
        return [sqe(EXISTS, handle=namespace, length=KEYS, key_length=2 * KEYS + 7 * KEYS, offset=12 * KEYS)]
    iov = client.iov(memfd(PUT_SIZE), PUT_SIZE)
    return [
        sqe(PUT, handle=namespace, iov=iov, length=PUT_SIZE, key_offset=4 * number, key_length=4)
        for number in range(ENTRIES)
    ]


def fill(ring: Ring, kind: str, entries: list[bytes]) -> int:
    """Place all entries of a ring once: how many there are. From now on only its tail moves."""
    aux = b"".join(b"%04d" % number for number in range(ENTRIES))
    if kind == "exists":
        aux = struct.pack("<H", 7) * KEYS + b"".join(b"%07d" % number for number in range(KEYS))
    if kind == "deletes":
        aux = struct.pack("<H", 4) * NAMES + aux
    ring.map[ring.aux : ring.aux + len(aux)] = aux
    for number in range(ENTRIES):
        ring.map[4096 + 64 * number : 4160 + 64 * number] = entries[number % len(entries)]
    return len(entries)


def turn(ring: Ring, count: int, *, always: bool) -> bool:
    """Submit everything anew once it was completed. False where it was not."""
    words = ring.words
    if words[CQ_TAIL // 8] != words[SQ_TAIL // 8]:
        if always:
            os.eventfd_write(ring.daemon_bell, 1)
        return False
    words[CQ_HEAD // 8] = words[CQ_TAIL // 8]
    words[SQ_TAIL // 8] += count
    if words[DAEMON_SLEEPS // 8] or always:
        os.eventfd_write(ring.daemon_bell, 1)
    return True


def main() -> None:
    uid, mount, kind, ring_count = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    become(uid)
    client = Attacker(mount)
    entries = entries_of(kind, client, mount)
    rings = [client.ring(ENTRIES, 64 << 10) for _ in range(ring_count)]
    counts = [fill(ring, kind, entries) for ring in rings]
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    poll.register(client.socket, select.POLLHUP)
    say(ready=True)
    is_busy, submitted = False, 0
    while True:
        found = poll.poll(0 if is_busy else None)
        if any(descriptor != sys.stdin.fileno() for descriptor, _ in found):
            client.close()
            return say(disconnected=True, submitted=submitted)
        if found:
            is_busy = sys.stdin.readline().strip() == "go"
            while not is_busy and any(ring.words[CQ_TAIL // 8] != ring.words[SQ_TAIL // 8] for ring in rings):
                time.sleep(IDLE_SECONDS)  # it looks again: a ring without a sleep word rings no bell
            say(submitted=submitted)
        done = [turn(ring, count, always=kind == "bells") for ring, count in zip(rings, counts, strict=True)]
        submitted += sum(done) * counts[0]
        if not any(done):
            time.sleep(IDLE_SECONDS)  # all rings are full: to spin would measure the attacker


if __name__ == "__main__":
    main()
