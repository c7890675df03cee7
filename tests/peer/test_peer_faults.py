"""Mounts that read from a host while that is killed, stopped, cut off, slow, or lies: 64 readers, and no wrong byte."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from mounting import KvfuseMount, stopped, wait_until
from peer_lab import PeerProxy, asked, flipped, mounted, peer_proxy, states, stats

from kvfuse.cluster.etcd import EtcdServers
from kvfuse.usrbio.client import BlockStore

READERS = 64
BLOCK_SIZE = 96 << 10
BLOCK_COUNT = 600
FOLDER = "blocks"
READER_WORDS = ("cache.tier_size=16MiB", "peer.deadline=0.5")
"""it has room for a fraction of the blocks, so that it asks again"""
SECONDS_MAX = 20.0
"""of a read, of 64 on a machine that does other things: far below what a hanging one takes"""


@dataclass
class Pair:
    """Two mounts of a volume that read from each other, one of them through a proxy; and blocks that it put."""

    writer: KvfuseMount
    reader: KvfuseMount
    proxy: PeerProxy
    blocks: dict[bytes, bytes] = field(default_factory=dict)

    def put(self, prefix: str, count: int) -> None:
        """New blocks, and wait until the reader knows of them."""
        rng = random.Random(prefix)
        made = {f"{prefix}{number}".encode(): rng.randbytes(BLOCK_SIZE) for number in range(count)}
        with BlockStore(self.writer.point, FOLDER) as store:
            assert store.put_many(list(made), list(made.values())).all()
        with BlockStore(self.reader.point, FOLDER) as store:
            wait_until(lambda: bool(store.exists(list(made)).all()), "the names on the other host")
        self.blocks |= made

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

    def wait_until_served(self) -> None:
        """The reader gets blocks from the writer again, by itself."""
        before = self.counts("right")

        def has_come() -> bool:
            self.ask()
            return self.counts("right") > before

        wait_until(has_come, "blocks from the other host")


class Load:
    """64 threads that read blocks and compare them: half by rings, half as files."""

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
            key, began = rng.choice(keys), time.monotonic()
            try:
                data = bytes(store.get(key) or b"") if number % 2 else self._read(key)
            except OSError as error:
                self.problems.append(f"{key!r}: {error}")
                continue
            if data != self._pair.blocks[key]:
                self.problems.append(f"{key!r} has {len(data)} bytes, and not its own")
            self.reads += 1
            self.seconds_max = max(self.seconds_max, time.monotonic() - began)

    def _read(self, key: bytes) -> bytes:
        with (self._pair.reader.point / FOLDER / key.decode()).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return file.read()

    def wait_for_reads(self, count: int = 4 * READERS) -> None:
        before = self.reads
        wait_until(lambda: self.reads > before + count, "readers that go on")

    @contextmanager
    def running(self) -> Iterator[None]:
        with BlockStore(self._pair.reader.point, FOLDER) as store:
            threads = [threading.Thread(target=self.run, args=(number, store)) for number in range(READERS)]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._is_over.set()
                for thread in threads:
                    thread.join()
        assert self.problems == []
        assert self.seconds_max < SECONDS_MAX


@contextmanager
def load(pair: Pair) -> Iterator[Load]:
    made = Load(pair)
    with made.running():
        made.wait_for_reads()
        yield made


@pytest.fixture(scope="module")
def shared_pair(etcd: EtcdServers) -> Iterator[Pair]:
    with peer_proxy() as proxy, mounted(etcd, [proxy.words(), READER_WORDS]) as (writer, reader):
        pair = Pair(writer, reader, proxy)
        pair.put("b", BLOCK_COUNT)
        wait_until(lambda: states(reader) == ["connected"], "the connection")
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """As it is when all is well, before and after."""
    shared_pair.proxy.be_honest()
    shared_pair.wait_until_served()
    yield shared_pair
    shared_pair.proxy.be_honest()
    shared_pair.wait_until_served()


def test_readers_of_a_host_that_is_well_need_no_segments(pair: Pair) -> None:
    before = stats(pair.reader)["peers"]["asked"]
    with load(pair):
        pair.wait_for("right")
    after = stats(pair.reader)["peers"]["asked"]
    assert after["wrong"] == before["wrong"]
    served = stats(pair.writer)["peers"]["served"]
    (client,) = served["served"]
    assert served["served"][client] == served["bytes"] > BLOCK_SIZE


def test_a_host_that_sends_wrong_bytes_is_found_out(pair: Pair) -> None:
    with load(pair) as readers:
        pair.proxy.lie = flipped
        pair.wait_for("wrong")
        readers.wait_for_reads()


def test_a_host_that_is_stopped_is_not_waited_for(pair: Pair) -> None:
    with load(pair) as readers, stopped(pair.writer.pid):
        pair.wait_for("late")
        readers.wait_for_reads()


def test_few_batches_wait_for_a_host_that_is_stopped(pair: Pair) -> None:
    """Each of these as long as a hedged read would; the others are the engine's at once."""
    waited: list[float] = []
    with stopped(pair.writer.pid):
        for _ in range(60):
            before, began = pair.counts("late"), time.monotonic()
            pair.ask()
            if pair.counts("late") > before:
                waited.append(time.monotonic() - began)
    assert 1 <= len(waited) <= 6, waited


def test_a_host_that_is_cut_off_is_connected_to_again(pair: Pair) -> None:
    with load(pair) as readers:
        pair.proxy.is_refusing = True
        pair.proxy.flowing.clear()
        before = pair.counts("rows")
        wait_until(lambda: pair.counts("rows") > before, "questions on their way")
        pair.proxy.cut()
        pair.proxy.flowing.set()
        wait_until(lambda: states(pair.reader) != ["connected"], "the end of the connections")
        readers.wait_for_reads()
        pair.proxy.be_honest()
        wait_until(lambda: states(pair.reader) == ["connected"], "new connections")


def test_a_host_that_crawls_is_not_waited_for(pair: Pair) -> None:
    with load(pair) as readers:
        pair.proxy.rate = 64 << 10
        pair.wait_for("late")
        readers.wait_for_reads()


def test_a_host_that_was_killed_comes_back_as_another(etcd: EtcdServers) -> None:
    """Its blocks are read from the segments meanwhile; those that it puts when it is back from its memory."""
    with peer_proxy() as proxy, mounted(etcd, [proxy.words(), READER_WORDS]) as (writer, reader):
        pair = Pair(writer, reader, proxy)
        pair.put("old", BLOCK_COUNT)
        pair.wait_until_served()
        with load(pair) as readers:
            writer.kill()
            readers.wait_for_reads()
            writer.mount()
            readers.wait_for_reads()
        wait_until(lambda: "connected" in states(reader), "the connection to the new client")
        pair.put("new", 100)
        before = pair.counts("right")
        pair.ask(b"new")
        assert pair.counts("right") > before


def test_the_engine_is_asked_beside_a_host_that_is_late(pair: Pair) -> None:
    """And has the bytes first; a host that is only a little late is not forgotten."""
    before = asked(pair.reader)
    pair.proxy.flowing.clear()

    def was_overtaken() -> bool:
        pair.ask()
        return pair.counts("overtaken") > before["overtaken"]

    wait_until(was_overtaken, "a read that the engine ended")
    pair.proxy.be_honest()
    after = asked(pair.reader)
    assert after["hedged"] - before["hedged"] >= after["overtaken"] - before["overtaken"] >= 1
    assert after["late"] > before["late"]
