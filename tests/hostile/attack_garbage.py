"""``attack_garbage.py UID MOUNT``: entries, messages and indices that mean nothing. Says how it was answered."""

from __future__ import annotations

import os
import sys
from errno import EBADF, EINVAL

from attacker_kit import GET, READ, Attacker, become, memfd, say, sqe


def main() -> None:
    uid, mount = int(sys.argv[1]), sys.argv[2]
    become(uid)
    client = Attacker(mount)
    ring = client.ring(64)
    iov = client.iov(memfd(4096), 4096)
    ring.push(sqe(READ, handle=77, iov=iov, length=4096), sqe(99, user_data=1), sqe(GET, handle=77, key_length=1))
    results = sorted(row[1] for row in ring.wait(3))
    ring.push(*[os.urandom(64) for _ in range(32)])
    ring.words[16] += 1 << 40  # a tail that cannot be
    os.eventfd_write(ring.daemon_bell, 1)
    try:
        client.answer()
        hung_up = False
    except ConnectionResetError:
        hung_up = True
    say(expected=sorted([-EBADF, -EINVAL, -EBADF]), results=results, hung_up=hung_up)


if __name__ == "__main__":
    main()
