"""Mounts that read from a host while that is killed, stopped, cut off, slow, or lies: 64 readers, and no wrong byte."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from mounting import KvfuseMount, stopped, wait_until
from peer_lab import asked, flipped, states, stats
from peer_load import BLOCK_SIZE, FOLDER, Pair, load, pairs

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

SLOWER_MAX = 1.5
"""times as long as reads of segments alone, where another host cannot be read from"""


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


@pytest.mark.ring(3)
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


@pytest.mark.ring(3)
def test_a_host_that_crawls_is_not_waited_for(pair: Pair) -> None:
    with load(pair) as readers:
        pair.proxy.rate = 64 << 10
        pair.wait_for("late")
        readers.wait_for_reads()


@pytest.mark.parametrize(
    "end", [KvfuseMount.kill, pytest.param(KvfuseMount.unmount, marks=pytest.mark.ring(3))], ids=["killed", "unmounted"]
)
def test_a_host_that_ended_comes_back_as_another(end: Callable[[KvfuseMount], None], etcd: EtcdServers) -> None:
    """Its blocks are read from the segments meanwhile; those that it puts when it is back from its memory."""
    with pairs(etcd, lease=6) as pair:
        pair.wait_until_served()
        with load(pair) as readers:
            end(pair.writer)
            readers.wait_for_reads()
            pair.writer.mount()
            readers.wait_for_reads()
        wait_until(lambda: "connected" in states(pair.reader), "the connection to the new client")
        pair.put("new", 100)
        pair.wait_until_served(b"new")


def test_the_engine_is_asked_beside_a_host_that_is_late(pair: Pair) -> None:
    """For files, and has the bytes first; a host that is only a little late is not forgotten."""
    paths = pair.put_files(100)
    before = asked(pair.reader)
    pair.proxy.flowing.clear()

    def was_overtaken() -> bool:
        path = paths.pop()
        assert path.read_bytes() == pair.files[path]
        return pair.counts("overtaken") > before["overtaken"]

    wait_until(was_overtaken, "a read that the engine ended")
    pair.proxy.be_honest()
    after = asked(pair.reader)
    assert after["hedged"] - before["hedged"] >= after["overtaken"] - before["overtaken"] >= 1
    assert after["late"] > before["late"]


# -- at worst the engine's speed ----------------------------------------------------------------------


@contextmanager
def lying(pair: Pair) -> Iterator[None]:
    pair.proxy.lie = flipped
    yield


@contextmanager
def crawling(pair: Pair) -> Iterator[None]:
    pair.proxy.rate = 64 << 10
    yield


@contextmanager
def cut_off(pair: Pair) -> Iterator[None]:
    pair.proxy.is_refusing = True
    pair.proxy.cut()
    yield


def stopping(pair: Pair) -> AbstractContextManager[None]:
    return stopped(pair.writer.pid)


@pytest.mark.ring(3)
@pytest.mark.parametrize("fault", [stopping, crawling, lying, cut_off])
def test_reads_beside_a_bad_host_are_as_fast_as_those_of_segments(
    fault: Callable[[Pair], AbstractContextManager[None]], pair: Pair
) -> None:
    """Of batches, in turn by a mount that asks no host. A busy machine delays either: once it was so is enough."""
    rng = random.Random(1)

    def seconds(mount: KvfuseMount) -> float:
        with BlockStore(mount.point, FOLDER) as store:
            chosen = [rng.sample(list(pair.blocks), 20) for _ in range(25)]
            began = time.monotonic()
            found = [store.get_many(keys) for keys in chosen]
            took = time.monotonic() - began
        for keys, blocks in zip(chosen, found, strict=True):
            assert [bytes(block or b"") for block in blocks] == [pair.blocks[key] for key in keys]
        return took

    ratios: list[float] = []

    def is_as_fast() -> bool:
        usual = seconds(pair.alone)
        ratios.append(seconds(pair.reader) / usual)
        return ratios[-1] < SLOWER_MAX

    with fault(pair):
        wait_until(is_as_fast, "reads as fast as those of segments")
    assert ratios
    print("slower than the engine by", ratios)
