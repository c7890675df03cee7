"""A program for a pod that knows nothing of daemons and holders: ``pod_load.py FOLDER [MOUNT [cache]]``.

With MOUNT it has rings. With "cache" the folder is one, from which published files and blocks may go: it fills it.

It writes, publishes by rename, reads and compares files, goes on with a held descriptor and a lock, and has ring
clients put and get blocks. Any error ends it with a traceback. Once FOLDER/end exists it prints a line of JSON: rounds,
the slowest calls in seconds with the time of each, and the share that 99 of 100 rounds stayed below.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

PAUSE_S = 0.005
SIZE = 256 << 10


class Held:
    """A descriptor and a lock that stay, whoever serves them."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w+b", buffering=0)
        self.path = path
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def turn(self, number: int) -> None:
        text = b"%12d" % number
        assert os.pwrite(self.file.fileno(), text, 0) == 12
        assert os.pread(self.file.fileno(), 12, 0) == text
        with self.path.open("rb") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        raise AssertionError("another one got the lock")


class Files:
    """Files that are published by rename; every tenth is kept, and compared again later."""

    def __init__(self, folder: Path, is_cache: bool) -> None:
        self.folder, self.is_cache = folder, is_cache
        self.kept: dict[int, bytes] = {}
        self.evicted = 0

    def turn(self, number: int) -> None:
        data = os.urandom(64) * (SIZE // 64)
        (self.folder / "new").write_bytes(data)
        name = self.folder / f"file-{number // 10 % 50}"
        os.rename(self.folder / "new", name)
        self.kept[number // 10 % 50] = hashlib.sha256(data).digest()
        for one in (number // 10 % 50, number * 7 % 50):
            if one in self.kept:
                self.compare(one)

    def compare(self, number: int) -> None:
        try:
            found = hashlib.sha256((self.folder / f"file-{number}").read_bytes()).digest()
        except FileNotFoundError:
            assert self.is_cache
            self.evicted += 1
            return
        assert found == self.kept[number], f"file-{number} has other bytes"


class Rings:
    """A client of rings; a block may be absent, but never another one."""

    def __init__(self, mount: Path, folder: str, is_cache: bool) -> None:
        from kvfuse.usrbio.client import BlockStore

        self.store = BlockStore(mount, folder)
        self.count = 2000 if is_cache else 40
        self.found = 0

    def turn(self, number: int) -> None:
        key = b"block-%d" % (number % self.count)
        data = bytearray(os.urandom(64) * (SIZE // 64))
        self.store.put(key, data)
        back = self.store.get(key)
        if back is not None:
            assert back == data, f"{key!r} has other bytes"
            back.release()
            self.found += 1


def main(folder: Path, mount: Path | None, is_cache: bool) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    folder.mkdir(exist_ok=True)
    files = Files(folder, is_cache)
    parts: dict[str, Files | Held | Rings] = {"files": files, "held": Held(folder / "held")}
    if mount is not None:
        parts["rings"] = Rings(mount, f"{folder.relative_to(mount)}/blocks", is_cache)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    number = 0
    print("begun", flush=True)
    while not (folder / "end").exists():
        number += 1
        for name, part in parts.items():
            began = time.monotonic()
            part.turn(number)
            taken[name].append((time.monotonic() - began, time.time()))
        time.sleep(PAUSE_S)
    said: dict[str, object] = {"rounds": number, "evicted": files.evicted}
    for name, rows in taken.items():
        rows.sort(reverse=True)
        slow = [[round(seconds, 3), time.strftime("%H:%M:%S", time.gmtime(at))] for seconds, at in rows[:8]]
        said[name] = {"slowest": slow, "p99": round(rows[len(rows) // 100][0], 4)}
    if mount is not None:
        said["found"] = parts["rings"].found  # type: ignore[union-attr]
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None, "cache" in sys.argv[3:])
