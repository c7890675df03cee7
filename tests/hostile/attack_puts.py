"""``attack_puts.py UID MOUNT FOLDER COUNT SIZE``: puts blocks through a ring, as fast as they are taken.

Waits for a word first. Says how many were taken, and the seconds that took.
"""

from __future__ import annotations

import sys
import time

from attacker_kit import PUT, Attacker, become, memfd, say, sqe, wait_for_word

ENTRIES = 256
KEY_SIZE = 16


def main() -> None:
    uid, mount, folder, count, size = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    become(uid)
    client = Attacker(mount)
    namespace = client.namespace(folder)
    ring = client.ring(ENTRIES, ENTRIES * KEY_SIZE)
    iov = client.iov(memfd(size), size)
    say(ready=True)
    wait_for_word()
    started = time.monotonic()
    taken = refused = 0
    free = list(range(ENTRIES))
    for number in range(count):
        while not free:
            rows = ring.reap()
            free += [row[0] for row in rows]
            refused += sum(row[1] < 0 for row in rows)
            taken += len(rows)
            if not rows:
                time.sleep(0.0005)  # an attacker that spins would take the processor from the victim
        place = free.pop()
        ring.map[ring.aux + place * KEY_SIZE : ring.aux + (place + 1) * KEY_SIZE] = b"%016d" % number
        ring.push(
            sqe(
                PUT, handle=namespace, iov=iov, length=size, key_offset=place * KEY_SIZE, key_length=KEY_SIZE,
                user_data=place,
            )
        )  # fmt: skip
    refused += sum(row[1] < 0 for row in ring.wait(count - taken))
    say(puts=count, refused=refused, seconds=time.monotonic() - started)
    wait_for_word()


if __name__ == "__main__":
    main()
