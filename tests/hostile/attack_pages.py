"""``attack_pages.py UID MOUNT FOLDER``: has the kernel hold locks of what it shares with the daemon, for ever.

A thread reads the ring's bell into a page that never arrives, and another writes from such a page into memory that is
registered. Then the daemon has to ring that bell and to write into that memory: says what was answered.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from attacker_kit import CLIENT_SLEEPS, GET, READ, Attacker, become, memfd, say, sqe, wait_for_word
from hanging_files import hanging_file, unreadable_page

SIZE = 4096
HELD_S = 0.3
"""after which a thread is in the kernel"""


def hang(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HELD_S)
    assert thread.is_alive(), "the page arrived"


def main() -> None:
    uid, mount, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    path = hanging_file(uid)
    become(uid)
    page = unreadable_page(path)
    client = Attacker(mount)
    ring, memory = client.ring(64), memfd(SIZE, flags=0)
    iov, file, namespace = client.iov(memory, SIZE), client.file(folder / "own"), client.namespace(folder)

    def ask(entry: bytes) -> int:
        ring.words[CLIENT_SLEEPS // 8] = 1
        ring.push(entry)
        return ring.wait(1)[0][1]

    first = ask(sqe(99))
    time.sleep(HELD_S)  # until the daemon has rung the bell, which nothing else shows: then it is read
    hang(lambda: os.readv(ring.client_bell, [page]))
    say(bell="held", first=first)
    ring.map[ring.aux : ring.aux + 6] = b"absent"
    found = [ask(sqe(GET, handle=namespace, iov=iov, length=SIZE, key_length=6)) for _ in range(3)]
    say(bell="rung", found=found)
    wait_for_word()
    hang(lambda: os.pwritev(memory, [page], 0))
    say(memory="held")
    read = [ask(sqe(READ, handle=file, iov=iov, length=7)) for _ in range(3)]
    say(memory="written", read=read, there=os.pread(memory, 7, 0).decode())
    wait_for_word()
    client.close()
    wait_for_word()


if __name__ == "__main__":
    main()
