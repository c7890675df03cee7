"""Clients in processes of their own: ``python ring_clients.py KIND MOUNT [ARGUMENT]``, one JSON line answers another.

``victims``: for each question a forked client is killed in the middle of what the question names. ``witness``: works
without pause, checks every byte it gets and those around them, and reports what was wrong and the slowest call.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvfuse.usrbio.client import Client, Priority, Ring, connect

KIB, MIB = 1 << 10, 1 << 20
PATIENCE_S = 60.0
CANARY = 0xC5

FILES, FILE_SIZE = 4, MIB
BLOCKS, BLOCK_SIZE = 24, 256 * KIB
GONE = "gone-while-open"


def content(name: str, version: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``size`` bytes that are a function of the name and the version."""
    word = blake2b(f"{name}/{version}".encode(), digest_size=64).digest()
    return np.resize(np.frombuffer(word, np.uint8), size)


def prepare(folder: Path) -> None:
    """What the victims find."""
    folder.mkdir(exist_ok=True)
    for number in range(FILES):
        (folder / f"f{number}").write_bytes(content(f"f{number}", 0, FILE_SIZE).tobytes())
    for number in range(BLOCKS):
        (folder / f"b{number}").write_bytes(content(f"b{number}", 0, BLOCK_SIZE).tobytes())


# -- those that die ---------------------------------------------------------------------------------


class Victim:
    """A client with a bit of everything registered."""

    def __init__(self, mount: str, rng: random.Random) -> None:
        self.rng = rng
        self.folder = Path(mount, "victims")
        self.client: Client = connect(mount)
        self.iov = self.client.iov(2 * MIB)
        self.iov.array[:] = 1  # memory that is really there
        self.file = self.client.file(self.folder / f"f{rng.randrange(FILES)}", "rw")
        self.namespace = self.client.namespace("victims")
        self.ring = self.client.ring(64)

    def key(self) -> bytes:
        return b"b%d" % self.rng.randrange(BLOCKS)

    def place(self) -> tuple[int, int]:
        """(offset, length) in a file or the iov's first half."""
        length = self.rng.choice([1, 4096, 64 * KIB, 300 * KIB])
        return self.rng.randrange(FILE_SIZE - length), length

    def read(self, ring: Ring) -> None:
        offset, length = self.place()
        ring.prep_read(self.iov, offset, self.file, self.rng.randrange(FILE_SIZE), length)

    def write(self, ring: Ring) -> None:
        offset, length = self.place()
        ring.prep_write(self.iov, 0, self.file, offset, length, priority=self.rng.choice(list(Priority)))

    def fsync(self, ring: Ring) -> None:
        self.write(ring)
        ring.prep_fsync(self.file)

    def get(self, ring: Ring) -> None:
        ring.prep_get(self.iov, MIB * self.rng.randrange(2), self.namespace, self.key(), BLOCK_SIZE)

    def get_view(self, ring: Ring) -> None:
        ring.prep_get(None, 0, self.namespace, self.key(), 0, view=True)

    def put(self, ring: Ring) -> None:
        ring.prep_put(self.iov, 0, self.namespace, self.key(), self.rng.choice([1, 70_000, BLOCK_SIZE]))

    def exists(self, ring: Ring) -> None:
        ring.prep_exists(self.namespace, [b"x%d" % self.rng.randrange(10**6) for _ in range(200)])

    def delete(self, ring: Ring) -> None:
        ring.prep_delete(self.namespace, [self.key(), self.key()])

    def prefetch(self, ring: Ring) -> None:
        ring.prep_prefetch(self.namespace, [self.key() for _ in range(8)])

    def cancel(self, ring: Ring) -> None:
        ring.prep_get(self.iov, 0, self.namespace, self.key(), BLOCK_SIZE, user_data=7)
        ring.prep_write(self.iov, 0, self.file, 0, 4096, user_data=8, timeout=1e-4)
        ring.prep_cancel(7)
        ring.prep_cancel(8)

    def batch(self, ring: Ring) -> None:
        """Everything at once, as much as fits."""
        operations = [self.read, self.write, self.get, self.get_view, self.put, self.exists, self.delete, self.fsync]
        while ring.in_flight < 50:
            self.rng.choice(operations)(ring)

    def pins(self, ring: Ring) -> None:
        """Views that are held, and read."""
        ring.prep_prefetch(self.namespace, [b"b%d" % number for number in range(BLOCKS)])
        ring.submit()
        ring.wait(1, PATIENCE_S)
        for _ in range(16):
            self.get_view(ring)
        ring.submit()
        self.views = [ring.view(row) for row in ring.wait(16, PATIENCE_S) if row["arena"]]
        self.get_view(ring)

    def unlinked(self, ring: Ring) -> None:
        """Only this client still has the file."""
        path = self.folder / f"{GONE}-{self.rng.randrange(10**9)}"
        self.file = self.client.file(path, "rw")
        ring.prep_write(self.iov, 0, self.file, 0, MIB)
        ring.submit()
        assert ring.wait(1, PATIENCE_S)["result"].tolist() == [MIB]
        path.unlink()
        self.read(ring)

    def registering(self, ring: Ring) -> None:
        """The kill may come between any two messages, or in one."""

        def register() -> None:
            while True:
                self.client.iov(64 * KIB)
                self.client.file(self.folder / "f0", "r")
                self.client.namespace("victims")
                self.client.ring(8)

        threading.Thread(target=register, daemon=True).start()
        self.read(ring)

    def closing(self, ring: Ring) -> None:
        """While things that are in use are taken back."""
        self.batch(ring)
        ring.submit()
        for thing in (self.file, self.iov, self.client.ring(8), self.namespace, ring):
            threading.Thread(target=thing.close, daemon=True).start()
        self.ring = self.client.ring(8)

    def unreaped(self, ring: Ring) -> None:
        """The completion queue is full, and there is more."""
        ring.prep_reads(self.iov, 0, self.file, 0, 1, np.arange(64))
        ring.submit()
        ring.wait(64, PATIENCE_S, max_results=1)
        self.read(ring)


OPERATIONS = (
    "read", "write", "fsync", "get", "get_view", "put", "exists", "delete", "prefetch", "cancel",
    "batch", "pins", "unlinked", "registering", "closing", "unreaped",
)  # fmt: skip


def die(mount: str, kind: str, seed: int) -> None:
    """Do what ``kind`` says a few times, then once more, and be gone before it is done, or shortly after."""
    rng = random.Random(seed)
    victim = Victim(mount, rng)
    operation: Callable[[Ring], None] = getattr(victim, kind)
    if kind in OPERATIONS[:10]:
        for _ in range(rng.randrange(3)):
            operation(victim.ring)
            victim.ring.submit()
            victim.ring.wait(victim.ring.in_flight, PATIENCE_S)
    operation(victim.ring)
    victim.ring.submit()
    end = time.perf_counter() + rng.random() ** 2 * 4e-3
    while time.perf_counter() < end:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def victims(mount: str) -> None:
    for line in sys.stdin:
        question = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                die(mount, question["kind"], question["seed"])
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


# -- the one that watches ---------------------------------------------------------------------------


class Witness:
    """A file, blocks and memory of its own, and what must be in them."""

    SIZE = 4 * MIB

    def __init__(self, mount: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = Path(mount, f"witness-{seed}")
        self.folder.mkdir(mode=0o700)
        self.client = connect(mount)
        self.source = self.client.iov(MIB)
        self.target = self.client.iov(2 * MIB)
        self.target.array[:] = CANARY
        self.file = self.client.file(self.folder / "file", "rw")
        self.expected = np.zeros(self.SIZE, np.uint8)
        self.versions: dict[bytes, tuple[int, int]] = {}
        """key -> (version, size)"""
        self.namespace = self.client.namespace(f"witness-{seed}/blocks")
        self.ring = self.client.ring(64)
        self.slowest = 0.0
        self.rounds = 0
        self.failures: list[str] = []
        self.ended = False

    def work(self) -> None:
        try:
            os.truncate(self.folder / "file", self.SIZE)
            while not self.ended:
                self.rng.choice([self.write, self.read, self.read_pages, self.put, self.get, self.view, self.look])()
                self.rounds += 1
        except Exception as error:
            self.failures.append(f"round {self.rounds}: {error!r}")

    def run(self, count: int = 1) -> Any:
        """Submit, and the completions of all."""
        started = time.perf_counter()
        self.ring.submit()
        rows = self.ring.wait(count, PATIENCE_S)
        self.slowest = max(self.slowest, time.perf_counter() - started)
        if len(rows) != count:
            raise AssertionError(f"{len(rows)} completions of {count}")
        return rows

    def check(self, what: bool, why: str) -> None:
        if not what:
            self.failures.append(f"round {self.rounds}: {why}")

    def check_target(self, offset: int, expected: Any) -> None:
        """The bytes are there and nothing beside them was touched; then nothing is there again."""
        end = offset + len(expected)
        self.check(np.array_equal(self.target.array[offset:end], expected), f"wrong bytes at {offset}-{end}")
        self.target.array[offset:end] = CANARY
        self.check(bool((self.target.array == CANARY).all()), f"bytes beside {offset}-{end} were touched")

    def place(self, size_max: int, end: int) -> tuple[int, int]:
        size = int(size_max ** self.rng.random())
        return self.rng.randrange(end - size), size

    def write(self) -> None:
        offset, size = self.place(MIB, self.SIZE)
        data = content("file", self.rounds, size)
        self.source.array[:size] = data
        self.ring.prep_write(self.source, 0, self.file, offset, size)
        self.check(int(self.run()["result"][0]) == size, "a write failed")
        self.expected[offset : offset + size] = data

    def read(self) -> None:
        offset, size = self.place(MIB, self.SIZE)
        place = self.rng.randrange(1, self.target.size - size)
        self.ring.prep_read(self.target, place, self.file, offset, size)
        self.check(int(self.run()["result"][0]) == size, "a read failed")
        self.check_target(place, self.expected[offset : offset + size])

    def read_pages(self) -> None:
        offsets = np.array([4096 * self.rng.randrange(self.SIZE // 4096) for _ in range(32)])
        self.ring.prep_reads(self.target, np.arange(1, 33) * 4096, self.file, offsets, 4096)
        self.check(bool((self.run(32)["result"] == 4096).all()), "a read of a batch failed")
        self.check_target(4096, np.concatenate([self.expected[start : start + 4096] for start in offsets.tolist()]))

    def put(self) -> None:
        key, size = b"k%d" % self.rng.randrange(20), int((512 * KIB) ** self.rng.random())
        self.source.array[:size] = content(key.decode(), self.rounds, size)
        self.ring.prep_put(self.source, 0, self.namespace, key, size)
        self.check(int(self.run()["result"][0]) == size, "a put failed")
        self.source.array[:size] = 0  # the daemon has taken it
        self.versions[key] = (self.rounds, size)

    def known(self) -> tuple[bytes, Any]:
        """(key, its block or None)"""
        key = b"k%d" % self.rng.randrange(20)
        return key, content(key.decode(), *self.versions[key]) if key in self.versions else None

    def get(self) -> None:
        key, expected = self.known()
        place = self.rng.randrange(1, self.target.size - 512 * KIB)
        self.ring.prep_get(self.target, place, self.namespace, key, 512 * KIB)
        result = int(self.run()["result"][0])
        self.check(result == (-errno.ENOENT if expected is None else len(expected)), f"a get answers {result}")
        if result > 0 and expected is not None:
            self.check_target(place, expected)

    def view(self) -> None:
        key, expected = self.known()
        self.ring.prep_get(None, 0, self.namespace, key, 0, view=True)
        (row,) = self.run()
        if row["arena"]:
            with self.ring.view(row) as view:
                self.check(np.array_equal(np.frombuffer(view, np.uint8), expected), "a view has wrong bytes")
        else:
            wanted = -errno.ENOENT if expected is None else -errno.EMSGSIZE
            self.check(int(row["result"]) == wanted, f"a get of a view answers {row['result']}")

    def look(self) -> None:
        keys = [b"k%d" % number for number in range(20)]
        found = self.ring.prep_exists(self.namespace, keys)
        self.run()
        self.check(found.tolist() == [key in self.versions for key in keys], "exists is wrong")
        if self.rng.random() < 0.3:
            key, expected = self.known()
            deleted = self.ring.prep_delete(self.namespace, [key])
            self.run()
            self.check(deleted.tolist() == [expected is not None], "delete is wrong")
            self.versions.pop(key, None)
        with open(self.folder / "file", "rb") as file:
            self.check(file.read() == self.expected.tobytes(), "read(2) sees other bytes")


def watch(mount: str, seed: str) -> None:
    witness = Witness(mount, int(seed))
    thread = threading.Thread(target=witness.work)
    for line in sys.stdin:
        if json.loads(line)["do"] == "begin":
            thread.start()
            print("{}", flush=True)
        else:
            witness.ended = True
            thread.join()
            witness.client.close()
            report = {"rounds": witness.rounds, "slowest": witness.slowest, "failures": witness.failures[:10]}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    {"victims": victims, "witness": watch}[sys.argv[1]](*sys.argv[2:])
