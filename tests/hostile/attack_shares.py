"""``attack_shares.py UID MOUNT KIND FOLDER``: takes as much as it gets of something, says how much, and keeps it.

KIND: ``iovs``, ``aux`` areas of 64 MiB, ``puts``, ``pins`` of as many sizes as there are arenas.
"""

from __future__ import annotations

import os
import sys
from errno import EACCES, EDQUOT, EINVAL
from pathlib import Path

from attacker_kit import GET, PUT, VIEW, Attacker, become, memfd, say, sqe, wait_for_word

MIB = 1 << 20
SIZES = 256


def iovs(mount: Path, _: Path) -> int:
    """From several connections: each may have so many."""
    descriptor = memfd(4096)
    count = 0
    clients = [Attacker(mount) for _ in range(4)]
    for client in clients:
        try:
            while True:
                client.iov(descriptor, 4096)
                count += 1
        except OSError as error:
            assert error.errno in (EDQUOT, EINVAL), error
    KEPT.extend(clients)
    return count


def aux(mount: Path, _: Path) -> int:
    client = Attacker(mount)
    KEPT.append(client)
    count = 0
    try:
        while count < 256:
            KEPT.append(client.ring(8, 64 * MIB))
            count += 1
    except OSError as error:
        assert error.errno == EDQUOT, error
    return count


def pins(mount: Path, folder: Path) -> int:
    """One view of each size. How many of the answers were views."""
    client = Attacker(mount)
    KEPT.append(client)
    namespace = client.namespace(folder)
    iov = client.iov(memfd(2 * MIB), 2 * MIB)
    ring = client.ring(64)
    count = 0
    for number in range(SIZES):
        size = 4096 * (number + 1)
        name = b"%04d" % number
        ring.map[ring.aux : ring.aux + 4] = name
        ring.push(sqe(PUT, handle=namespace, iov=iov, length=size, key_length=4))
        assert ring.wait()[0][1] == size
        ring.push(sqe(GET, handle=namespace, iov=iov, length=size, key_length=4, flags=VIEW))
        row = ring.wait()[0]
        assert row[1] == size, row
        count += row[3] != 0
    return count


def puts(mount: Path, folder: Path) -> int:
    """Of 1 MiB into a folder that may have other ideas. How many were done; the rest was forbidden."""
    client = Attacker(mount)
    KEPT.append(client)
    namespace, iov, ring = client.namespace(folder), client.iov(memfd(MIB), MIB), client.ring(32)
    ring.map[ring.aux : ring.aux + 1] = b"x"
    ring.push(*[sqe(PUT, handle=namespace, iov=iov, length=MIB, key_length=1)] * 32)
    results = [row[1] for row in ring.wait(32)]
    assert set(results) <= {MIB, -EACCES}, results
    return results.count(MIB)


KEPT: list[object] = []


def main() -> None:
    uid, mount, kind, folder = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    become(uid)
    assert os.getuid() == uid
    say(count={"iovs": iovs, "aux": aux, "pins": pins, "puts": puts}[kind](mount, folder))
    while wait_for_word() == "again":
        say(count=puts(mount, folder))


if __name__ == "__main__":
    main()
