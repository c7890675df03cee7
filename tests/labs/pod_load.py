"""A program for a pod that knows nothing of daemons and holders: ``pod_load.py FOLDER [MOUNT]``, with MOUNT for rings.

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

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[int, bytes] = {}

    def turn(self, number: int) -> None:
        data = os.urandom(64) * (SIZE // 64)
        (self.folder / "new").write_bytes(data)
        name = self.folder / f"file-{number // 10 % 50}"
        os.rename(self.folder / "new", name)
        assert hashlib.sha256(name.read_bytes()).digest() == hashlib.sha256(data).digest()
        self.kept[number // 10 % 50] = hashlib.sha256(data).digest()
        other = number * 7 % 50
        if other in self.kept:
            found = hashlib.sha256((self.folder / f"file-{other}").read_bytes()).digest()
            assert found == self.kept[other], f"file-{other} has other bytes"


class Rings:
    """A client of rings; a block may be absent, but never another one."""

    def __init__(self, mount: Path, folder: str) -> None:
        from kvfuse.usrbio.client import BlockStore

        self.store = BlockStore(mount, folder)
        self.found = 0

    def turn(self, number: int) -> None:
        key = b"block-%d" % (number % 40)
        data = bytearray(os.urandom(64) * (SIZE // 64))
        self.store.put(key, data)
        back = self.store.get(key)
        if back is not None:
            assert back == data, f"{key!r} has other bytes"
            back.release()
            self.found += 1


def main(folder: Path, mount: Path | None) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    folder.mkdir(exist_ok=True)
    parts: dict[str, Files | Held | Rings] = {"files": Files(folder), "held": Held(folder / "held")}
    if mount is not None:
        parts["rings"] = Rings(mount, f"{folder.relative_to(mount)}/blocks")
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
    said: dict[str, object] = {"rounds": number}
    for name, rows in taken.items():
        rows.sort(reverse=True)
        slow = [[round(seconds, 3), time.strftime("%H:%M:%S", time.gmtime(at))] for seconds, at in rows[:8]]
        said[name] = {"slowest": slow, "p99": round(rows[len(rows) // 100][0], 4)}
    if mount is not None:
        said["found"] = parts["rings"].found  # type: ignore[union-attr]
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
