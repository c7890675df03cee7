"""``victim.py UID MOUNT FOLDER``: one who works beside an attack. Each line of its input has it measure once more.

It answers with the seconds that each of its doings took, sorted, by their names.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from attacker_kit import Attacker, become, say

from kvfuse.usrbio.client import BlockStore

SIZE = 64 << 10


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    uid, mount, folder = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    become(uid)
    target = bytearray(SIZE)
    with BlockStore(mount, folder) as store:
        store.put(b"block", os.urandom(SIZE))
        path = mount / folder / "block"

        def stat_absent() -> None:
            assert not os.path.exists(f"{mount}/absent-{time.monotonic_ns()}")

        def read() -> None:
            with path.open("rb", buffering=0) as file:
                assert len(file.read(SIZE)) == SIZE

        def get() -> None:
            assert store.get_into(b"block", target) == SIZE

        def connect() -> None:
            client = Attacker(mount)
            client.namespace(mount / folder)
            client.close()

        doings = {"stat of an absent name": stat_absent, "open and read": read, "get": get, "connect": connect}
        gc.disable()
        say(ready=True)
        for line in sys.stdin:
            say(**{name: sorted(seconds(work) for _ in range(int(line))) for name, work in doings.items()})


if __name__ == "__main__":
    main()
