"""``attack_open_files.py UID MOUNT FOLDER COUNT``: opens new files for writing, a byte each, and keeps them open.

As many processes as the limit on open files asks for. The last word that it hears ends all of them.
"""

from __future__ import annotations

import os
import resource
import sys

from attacker_kit import become, say, wait_for_word

OTHER_DESCRIPTORS = 100


def keep_open(folder: str, numbers: range) -> list[int]:
    descriptors = []
    for number in numbers:
        descriptors.append(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT, 0o600))
        os.write(descriptors[-1], b"x")
    return descriptors


def main() -> None:
    uid, folder, count = int(sys.argv[1]), sys.argv[3], int(sys.argv[4])
    become(uid)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    each = min(count, limit - OTHER_DESCRIPTORS)
    ready, end = os.pipe(), os.pipe()
    for first in range(each, count, each):
        if os.fork() == 0:
            os.close(end[1])
            keep_open(folder, range(first, min(first + each, count)))
            os.write(ready[1], b"r")
            os.read(end[0], 1)  # until the first process ends
            return
    kept = keep_open(folder, range(each))
    for _ in range(each, count, each):
        os.read(ready[0], 1)
    say(opened=count, kept=len(kept))
    wait_for_word()
    os.close(end[1])
    for _ in range(each, count, each):
        os.wait()


if __name__ == "__main__":
    main()
