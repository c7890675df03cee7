"""The store of engines: misses at once where there is no daemon, and back by itself; never an error, never long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_host import DEADLINE_S
from mounting import KvfuseMount, stop_process, stopped, temporary_mount, wait_until
from ring_lab import stats

from kvfuse.connectors.link import Region
from kvfuse.connectors.staging import GatherMemory
from kvfuse.connectors.steady_store import DescriptorMismatch, SteadyStore

WORDS = ["capacity=64MiB,cache,admission=all"]
LLAMA: dict[str, str | int] = {"model": "Llama 3", "dtype": "bf16"}
SIZE = 64 << 10
COUNT = 4
KEYS = [bytes([number]) * 32 for number in range(1, COUNT + 1)]
OFFSETS = [number * SIZE for number in range(COUNT)]
SIZES = [SIZE] * COUNT


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        yield mount


def shared_memory(size: int) -> int:
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, size)
    return descriptor


def filled(region: Region) -> None:
    for number, offset in enumerate(OFFSETS):
        region.part(offset, SIZE)[:] = number + 7


def assert_gets(store: SteadyStore, region: Region, expected: list[int]) -> None:
    region.array[:] = 0
    assert store.get(KEYS, region, OFFSETS, SIZES).tolist() == expected
    assert_filled(region, expected)


def assert_filled(region: Region, sizes: list[int]) -> None:
    for number, (offset, size) in enumerate(zip(OFFSETS, sizes, strict=True)):
        assert size < 0 or bool((region.part(offset, size) == number + 7).all())


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "plain"])
def test_blocks_go_and_come(mount: KvfuseMount, is_shared: bool) -> None:
    store = SteadyStore(mount.point, "llama", descriptor=LLAMA, deadline=DEADLINE_S)
    region = store.register(shared_memory(COUNT * SIZE) if is_shared else np.zeros(COUNT * SIZE, np.uint8))
    assert (region.iov is not None) is is_shared
    filled(region)
    assert store.put(KEYS[:3], region, OFFSETS[:3], SIZES[:3]).tolist() == [True] * 3
    assert store.exists(KEYS).tolist() == [True, True, True, False]
    assert store.longest_prefix(KEYS) == 3
    costs = store.costs(KEYS)
    assert costs is not None
    assert_gets(store, region, [SIZE, SIZE, SIZE, -1])
    assert store.get(KEYS[:1], region, [0], [SIZE // 2]).tolist() == [-1]  # no room for all of it
    assert store.delete(KEYS[:1]).tolist() == [True]
    assert_gets(store, region, [-1, SIZE, SIZE, -1])
    counters = store.counters
    assert (counters.stored, counters.got, counters.missed) == (3, 5, 4)
    assert counters.got_bytes == 5 * SIZE
    store.forget(region)
    store.close()
    assert store.get(KEYS, region, OFFSETS, SIZES).tolist() == [-1] * COUNT


def test_another_descriptor_is_refused_at_the_start(mount: KvfuseMount) -> None:
    SteadyStore(mount.point, "llama", descriptor=LLAMA, deadline=DEADLINE_S).close()
    with pytest.raises(DescriptorMismatch, match="dtype is 'bf16', not 'fp8'"):
        SteadyStore(mount.point, "llama", descriptor={**LLAMA, "dtype": "fp8"}, deadline=DEADLINE_S)


def test_a_daemon_that_dies_is_a_miss_and_comes_back(mount: KvfuseMount) -> None:
    store = SteadyStore(mount.point, "llama", descriptor=LLAMA, deadline=DEADLINE_S)
    region = store.register(shared_memory(COUNT * SIZE))
    filled(region)
    assert store.put(KEYS, region, OFFSETS, SIZES).all()
    os.sync()
    mount.kill()
    assert not store.exists(KEYS).any()
    assert store.get(KEYS, region, OFFSETS, SIZES).tolist() == [-1] * COUNT
    assert not store.put(KEYS, region, OFFSETS, SIZES).any()
    assert store.longest_prefix(KEYS) == 0
    assert store.costs(KEYS) is None
    assert not store.is_up
    assert store.counters.failures["away"] == 5 * COUNT
    mount.mount()
    wait_until(lambda: store.is_up, "the store to come back")
    filled(region)
    assert store.put(KEYS, region, OFFSETS, SIZES).all()
    assert_gets(store, region, SIZES)
    store.close()


def test_a_mount_that_is_not_there_yet(tmp_path: Path) -> None:
    point = tmp_path / "mnt"
    mount = KvfuseMount(tmp_path, WORDS)
    store = SteadyStore(point, "llama", descriptor=LLAMA, deadline=DEADLINE_S)
    region = store.register(shared_memory(COUNT * SIZE))
    assert not store.exists(KEYS).any()
    try:
        mount.mount()
        wait_until(lambda: store.is_up, "the store to connect")
        filled(region)
        assert store.put(KEYS, region, OFFSETS, SIZES).all()
        assert_gets(store, region, SIZES)
        store.close()
        mount.unmount()
        mount.fsck()
    finally:
        mount.remove()


def test_a_daemon_that_hangs_costs_one_deadline(mount: KvfuseMount) -> None:
    store = SteadyStore(mount.point, "llama", descriptor=LLAMA, deadline=1.0)
    region = store.register(shared_memory(COUNT * SIZE))
    filled(region)
    wait_until(lambda: bool(store.put(KEYS, region, OFFSETS, SIZES).all()), "a store within the deadline")
    with stopped(mount.pid):
        started = time.monotonic()
        assert not store.put(KEYS, region, OFFSETS, SIZES).any()
        assert time.monotonic() - started >= 0.5  # it waited, and gave up
        assert not store.is_up
        assert not store.put(KEYS, region, OFFSETS, SIZES).any()
    wait_until(lambda: store.is_silent, "the end of what the daemon did")  # it may store what was asked for
    region.array[:] = 0
    wait_until(lambda: store.get(KEYS, region, OFFSETS, SIZES).tolist() == SIZES, "the store to come back")
    assert_filled(region, SIZES)
    store.close()


def make_asked(mount: KvfuseMount) -> None:
    """A namespace whose absent keys clients do not know by themselves: the daemon is asked."""
    (mount.point / "llama").mkdir()
    os.setxattr(mount.point / "llama", "user.kvfuse.namespace", b"kind=blocks")
    (mount.point / "llama" / "link").symlink_to("nowhere")


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "is killed"])
def test_a_daemon_that_hangs_is_silent_when_it_is_over_with_it(mount: KvfuseMount, goes_on: bool) -> None:
    make_asked(mount)
    store = SteadyStore(mount.point, "llama", descriptor=LLAMA, deadline=0.5)
    region = store.register(shared_memory(COUNT * SIZE))
    wait_until(lambda: store.is_up, "the store to connect")
    assert store.is_silent
    stop_process(mount.pid)
    assert store.get(KEYS, region, OFFSETS, SIZES).tolist() == [-1] * COUNT
    assert not store.is_silent  # it may go on where it was
    if goes_on:
        os.kill(mount.pid, signal.SIGCONT)
    else:
        mount.kill()
    wait_until(lambda: store.is_silent, "the end of what the daemon did")
    if goes_on:
        wait_until(lambda: store.is_up, "the store to be up again, on the same connection")
        assert store._link.connections == 1
    assert store.is_up is goes_on
    store.close()


def test_a_successor_that_hangs_is_not_silent() -> None:
    """The connection stands as the next daemon takes over: who was known of it is not who writes."""
    with temporary_mount([*WORDS, "outlive=true"]) as mount:
        make_asked(mount)
        store = SteadyStore(mount.point, "llama", descriptor=LLAMA, deadline=0.5)
        region = store.register(shared_memory(COUNT * SIZE))
        wait_until(lambda: store.is_up, "the store to connect")
        former = stats(mount)["pid"]
        os.kill(former, signal.SIGKILL)
        wait_until(lambda: stats(mount)["pid"] != former, "the next daemon")
        successor = stats(mount)["pid"]
        wait_until(lambda: store.prefetch(KEYS) is not None and store.is_up, "an answer of that")
        assert store._link.connections == 1
        with stopped(successor):
            assert store.get(KEYS, region, OFFSETS, SIZES).tolist() == [-1] * COUNT
            assert not store.is_up
            assert not store.is_silent
        wait_until(lambda: store.is_silent, "the end of what it did")
        wait_until(lambda: store.is_up, "the store to be up again")
        store.close()


def test_the_child_of_a_fork_connects_by_itself(mount: KvfuseMount) -> None:
    store = SteadyStore(mount.point, "llama", descriptor=LLAMA, deadline=DEADLINE_S)
    region = store.register(shared_memory(COUNT * SIZE))
    filled(region)
    assert store.put(KEYS, region, OFFSETS, SIZES).all()
    child = os.fork()
    if not child:
        try:
            store.exists(KEYS)  # a miss, and the begin of a connection
            wait_until(lambda: store.is_up, "the child to connect")
            assert_gets(store, region, SIZES)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_gets(store, region, SIZES)
    store.close()


def test_staging_memory_that_a_hung_daemon_may_still_write_waits_until_it_is_silent(mount: KvfuseMount) -> None:
    make_asked(mount)
    store = SteadyStore(mount.point, "llama", descriptor=LLAMA, deadline=0.5)
    wait_until(lambda: store.is_up, "the store to connect")
    staging = GatherMemory(store)
    with staging.taken(SIZE) as first:
        pass
    with staging.taken(SIZE) as again:
        assert again is first
        with stopped(mount.pid):
            assert store.get(KEYS[:1], first, [0], [SIZE]).tolist() == [-1]
            with staging.taken(SIZE) as second:
                assert second is not first
            with staging.taken(SIZE) as third:
                assert third is not second  # it was given back meanwhile, but not to anybody else
    wait_until(lambda: store.is_silent, "the end of what the daemon did")
    with staging.taken(SIZE) as one, staging.taken(SIZE) as two, staging.taken(SIZE) as three:
        assert {id(one), id(two), id(three)} == {id(first), id(second), id(third)}
    store.close()
    staging.close()
