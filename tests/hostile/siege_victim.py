"""``siege_victim.py UID MOUNT SEED``: an honest user who looks at every byte, and at how long each call took.

It works until a line comes, answers with what it has seen since the last one, and goes on. Ends with its input.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
from attacker_kit import become

from kvfuse.usrbio.client import BlockStore, connect

SIZE = 64 << 10
BLOCKS = 64
PAUSE_SECONDS = 0.002
"""between two calls, so that it measures the daemon and not itself"""


class Victim:
    """``seconds``: by kind of call, how long each took. ``wrong``: what it got that it did not store."""

    def __init__(self, mount: Path, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        self.rng = rng
        self.client = connect(mount)
        self.store = BlockStore(self.client, folder.name + "/blocks")
        self.iov = self.client.iov(SIZE)
        self.versions: dict[int, int] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.wrong: list[str] = []
        self.count = 0

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[kind].append(time.perf_counter() - started)

    def check(self, what: str, found: bytes | None, expected: bytes | None) -> None:
        if found != expected:
            self.wrong.append(f"{what}: {found and found[:16]!r}, not {expected and expected[:16]!r}")

    def content(self, number: int) -> bytes:
        word = blake2b(b"%d/%d" % (number, self.versions[number]), digest_size=64).digest()
        return word * (SIZE // 64)

    def absent(self) -> None:
        self.count += 1
        with self.timed("stat of an absent name"):
            exists = (self.folder / f"absent-{self.count}").exists()
        self.check("an absent name", b"there" if exists else None, None)

    def put(self) -> None:
        number = self.rng.randrange(BLOCKS)
        self.versions[number] = self.versions.get(number, 0) + 1
        self.iov.array[:] = np.frombuffer(self.content(number), np.uint8)
        with self.timed("ring PUT, 64 KiB"):
            self.store.put(b"b%d" % number, self.iov.array)

    def get(self) -> None:
        if self.versions:
            number = self.rng.choice(list(self.versions))
            self.iov.array[:] = 0
            with self.timed("ring GET, 64 KiB"):
                size = self.store.get_into(b"b%d" % number, self.iov.array)
            self.check(f"block {number}", None if size is None else bytes(self.iov.buffer), self.content(number))

    def create(self) -> None:
        self.count += 1
        temporary, path = self.folder / f"new-{self.count}", self.folder / f"file-{self.count % BLOCKS}"
        data = b"%20d" % self.count * (SIZE // 20)
        with self.timed("create, write, close, rename, 64 KiB"):
            temporary.write_bytes(data)
            temporary.rename(path)
        with self.timed("open, read, close, 64 KiB"):
            found = path.read_bytes()
        self.check(path.name, found, data)

    def run(self) -> None:
        """Until the input ends."""
        calls: list[Callable[[], None]] = [self.absent, self.put, self.get, self.create]
        while True:
            readable, _, _ = select.select([sys.stdin], [], [], PAUSE_SECONDS)
            if readable:
                if not sys.stdin.readline():
                    return
                print(json.dumps({"seconds": self.seconds, "wrong": self.wrong}), flush=True)
                self.seconds.clear()
            self.rng.choice(calls)()


def main() -> None:
    uid, mount, seed = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    become(uid)
    folder = mount / f"victim-{uid}"
    os.umask(0o077)
    Victim(mount, folder, random.Random(seed)).run()


if __name__ == "__main__":
    main()
