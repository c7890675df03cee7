"""Two mounts of a volume that read from each other, one of them through a proxy, and 64 readers that compare bytes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from mounting import KvfuseMount, wait_until
from peer_lab import PeerProxy, asked, mounted, peer_proxy, states

from kvfuse.errors import KvfuseError
from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

READERS = 64
BLOCK_SIZE = 96 << 10
BLOCK_COUNT = 600
FOLDER, FILES = "blocks", "files"
READER_WORDS = ("cache.tier_size=16MiB", "cache.staging_size=16MiB", "peer.deadline=0.5")
"""it has room for a fraction of the blocks, so that it asks again"""
LONG_LEASE = 60
"""seconds: a host that is stopped for long still holds the slabs of its blocks after that"""
SECONDS_MAX = 20.0
"""of a read, its deadline: of 64 on a machine that does other things, and far below what a hanging one takes"""


@dataclass
class Pair:
    """Two mounts of a volume that read from each other, one of them through a proxy; and blocks that it put."""

    writer: KvfuseMount
    reader: KvfuseMount
    alone: KvfuseMount
    """a third one, as the reader, which asks no other host"""
    proxy: PeerProxy
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    files: dict[Path, bytes] = field(default_factory=dict)

    def put(self, prefix: str, count: int) -> None:
        """New blocks, and wait until the reader knows of them."""
        rng = random.Random(prefix)
        made = {f"{prefix}{number}".encode(): rng.randbytes(BLOCK_SIZE) for number in range(count)}
        with BlockStore(self.writer.point, FOLDER) as store:
            assert store.put_many(list(made), list(made.values())).all()
        for mount in (self.reader, self.alone):
            with BlockStore(mount.point, FOLDER) as store:
                wait_until(lambda store=store: bool(store.exists(list(made)).all()), "the names on another host")
        self.blocks |= made

    def put_files(self, count: int) -> list[Path]:
        """New ordinary files, which the writer has in memory, as the reader sees them. It knows of all of them then."""
        rng, folder = random.Random(count), self.writer.point / FILES
        folder.mkdir()
        made = {b"%d" % number: rng.randbytes(BLOCK_SIZE) for number in range(count)}
        with BlockStore(self.writer.point, FILES) as store:
            assert store.put_many(list(made), list(made.values())).all()
        found = {self.reader.point / FILES / name.decode(): data for name, data in made.items()}
        wait_until(lambda: all(path.exists() for path in found), "the names on another host")
        self.files |= found
        return list(found)

    def ask(self, prefix: bytes = b"") -> None:
        """Read a few blocks, and check them."""
        with BlockStore(self.reader.point, FOLDER) as store:
            keys = random.sample([key for key in self.blocks if key.startswith(prefix)], 20)
            assert [bytes(found or b"") for found in store.get_many(keys)] == [self.blocks[key] for key in keys]

    def counts(self, reason: str) -> int:
        return asked(self.reader)[reason]

    def wait_for(self, reason: str) -> None:
        """One more read ends so."""
        before = self.counts(reason)
        wait_until(lambda: self.counts(reason) > before, f"reads that were {reason}")

    def wait_until_served(self, prefix: bytes = b"") -> None:
        """The reader gets blocks from the writer again, by itself."""
        before = self.counts("right")

        def has_come() -> bool:
            self.ask(prefix)
            return self.counts("right") > before

        wait_until(has_come, "blocks from the other host")

    @contextmanager
    def well(self) -> Iterator[None]:
        """All is well before this and after it."""
        self.proxy.be_honest()
        self.wait_until_served()
        yield
        self.proxy.be_honest()
        self.wait_until_served()


@contextmanager
def pairs(etcd: EtcdServers, lease: int = LONG_LEASE) -> Iterator[Pair]:
    """With blocks that the reader's memory cannot hold."""
    with ExitStack() as stack:
        proxy = stack.enter_context(peer_proxy())
        words = [
            (*own, f"client.lease={lease}")
            for own in (proxy.words(), READER_WORDS, ("peer.reads=false", *READER_WORDS[:2]))
        ]
        writer, reader, alone = stack.enter_context(mounted(etcd, words))
        pair = Pair(writer, reader, alone, proxy)
        pair.put("b", BLOCK_COUNT)
        wait_until(lambda: states(reader) == ["connected"], "the connection")
        yield pair


class Load:
    """64 threads that read blocks and compare them: by rings, one or several at a time, and as files."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._is_over = threading.Event()
        self.problems: list[str] = []
        self.reads = 0
        self.seconds_max = 0.0

    def run(self, number: int, store: BlockStore) -> None:
        rng = random.Random(number)
        keys = list(self._pair.blocks)
        while not self._is_over.is_set():
            chosen, began = rng.sample(keys, 1 + number % 4), time.monotonic()
            try:
                found = self._get(number, store, chosen)
            except (OSError, KvfuseError) as error:
                self.problems.append(f"{chosen!r}: {error}")
                continue
            self.seconds_max = max(self.seconds_max, time.monotonic() - began)
            for key, data in zip(chosen, found, strict=True):
                if data != self._pair.blocks[key]:
                    self.problems.append(f"{key!r} has {len(data)} bytes, and not its own")
            self.reads += 1

    def _get(self, number: int, store: BlockStore, keys: Sequence[bytes]) -> list[bytes]:
        """A batch that is copied by the index of what is in memory, or views of it; or one block, or its file."""
        match number % 4:
            case 0:
                return [self._read(keys[0])]
            case 1:
                buffers = [np.empty(BLOCK_SIZE, np.uint8) for _ in keys]
                sizes = store.get_many_into(keys, buffers)
                return [buffer[: max(size, 0)].tobytes() for buffer, size in zip(buffers, sizes, strict=True)]
            case 2:
                return [bytes(store.get(key) or b"") for key in keys]
            case _:
                return [bytes(found or b"") for found in store.get_many(keys)]

    def _read(self, key: bytes) -> bytes:
        with (self._pair.reader.point / FOLDER / key.decode()).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return file.read()

    def wait_for_reads(self, count: int = 4 * READERS) -> None:
        before = self.reads
        wait_until(lambda: self.reads > before + count, "readers that go on")

    @contextmanager
    def running(self) -> Iterator[None]:
        with BlockStore(self._pair.reader.point, FOLDER, deadline=SECONDS_MAX) as store:  # an error beyond it
            threads = [threading.Thread(target=self.run, args=(number, store)) for number in range(READERS)]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._is_over.set()
                for thread in threads:
                    thread.join()
        assert self.problems == [], self.problems[:5]
        assert self.seconds_max < SECONDS_MAX, self.seconds_max


@contextmanager
def load(pair: Pair) -> Iterator[Load]:
    made = Load(pair)
    with made.running():
        made.wait_for_reads()
        yield made
