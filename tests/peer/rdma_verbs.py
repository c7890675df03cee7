"""Reads by RDMA between processes. In the machine of scripts/rdma-vm, where `test_virtual_machine` runs this.

Its kernel carries out a READ within the call that posts it, and is some ten times slower than this machine: what is
asserted here is never a time.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing
from lent_memory import shared_memory
from verbs_owner import Owner, owner, pattern

from kvfuse.peer.devices import find_devices
from kvfuse.peer.peer_wire import WireError
from kvfuse.peer.queue_pair import READ, QueuePair, QueuePairOptions, ReadOutcome, Reads
from kvfuse.peer.verbs import PIECE, NoDevice, RdmaDevice, Registration, VerbsError, open_device

BLOCK = 64 << 10
SIZE = 8 << 20
QUICK = QueuePairOptions(depth=64, timeout=15, retries=6)
"""who does not answer is given up within a second: a busy machine may not give this one a turn for half of that"""


@pytest.fixture
def device() -> Iterator[RdmaDevice]:
    with open_device() as one:
        yield one


@pytest.fixture(scope="module")
def lender() -> Iterator[Owner]:
    with owner(SIZE) as one:
        yield one


@pytest.fixture
async def mine(device: RdmaDevice) -> AsyncIterator[Registration]:
    """Memory for what is read."""
    memory = shared_memory(SIZE)
    registration = await device.register(memory.ctypes.data, SIZE, memory, remote=False)
    yield registration
    registration.close()


def read_rows(lender: Owner, mine: Registration, blocks: list[int], size: int = BLOCK) -> Reads:
    """Of these blocks of the owner, which go one behind the other."""
    rows = np.zeros(len(blocks), READ)
    for place, block in enumerate(blocks):
        start = block * size
        (part,) = mine.parts(mine.address + place * size, size)
        rkey = lender.keys[start // PIECE]
        rows[place] = (lender.address + start, part.address, size, rkey, part.lkey)
    return rows


def assert_same(mine: Registration, blocks: list[int], size: int = BLOCK) -> None:
    """These blocks are where `read_rows` has them go."""
    memory, expected = mine.owner, pattern(SIZE)
    assert isinstance(memory, np.ndarray)
    for place, block in enumerate(blocks):
        assert (memory[place * size :][:size] == expected[block * size :][:size]).all(), f"block {block}"


@asynccontextmanager
async def watched(what: str) -> AsyncIterator[list[float]]:
    """Print how long other tasks had to wait meanwhile. Yields how long they waited for each of their turns."""
    waits: list[float] = []

    async def wait() -> None:
        while True:
            began = trio.current_time()
            await trio.lowlevel.checkpoint()
            waits.append(trio.current_time() - began)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        while not waits:
            await trio.lowlevel.checkpoint()
        waits.clear()
        yield waits
        count = len(waits)
        while len(waits) == count:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    print(f"{what}: others waited for {max(waits) * 1e3:.1f} ms at most, for each of {len(waits)} turns")


async def test_blocks_arrive_whole_by_one_completion(device: RdmaDevice, mine: Registration, lender: Owner) -> None:
    pair = QueuePair(device, QUICK)
    await lender.connect(pair)
    blocks = [int(block) for block in np.random.default_rng(5).permutation(SIZE // BLOCK)[:48]]
    outcome = await pair.read(read_rows(lender, mine, blocks))
    assert outcome == ReadOutcome(48, "")
    assert_same(mine, blocks)
    counters = pair.counters
    assert (counters.reads, counters.bytes) == (48, 48 * BLOCK)
    assert (counters.batches, counters.completions) == (1, 1)
    pair.close()


async def test_a_batch_longer_than_the_queue_is_posted_in_parts(
    device: RdmaDevice, mine: Registration, lender: Owner
) -> None:
    pair = QueuePair(device, QueuePairOptions(depth=16))
    await lender.connect(pair)
    blocks = list(range(40))
    assert await pair.read(read_rows(lender, mine, blocks, 4096)) == ReadOutcome(40, "")
    assert_same(mine, blocks, 4096)
    assert (pair.counters.batches, pair.counters.completions) == (3, 3)
    pair.close()


async def test_several_tasks_read_by_one_pair(device: RdmaDevice, mine: Registration, lender: Owner) -> None:
    pair = QueuePair(device, QueuePairOptions(depth=24))
    await lender.connect(pair)
    rows = read_rows(lender, mine, list(range(96)), 4096)
    outcomes: list[ReadOutcome] = []

    async def read(start: int, count: int) -> None:
        outcomes.append(await pair.read(rows[start : start + count]))

    async with trio.open_nursery() as nursery:
        for start, count in ((0, 10), (10, 30), (40, 1), (41, 55)):
            nursery.start_soon(read, start, count)
    assert sorted(outcomes) == [ReadOutcome(1, ""), ReadOutcome(10, ""), ReadOutcome(30, ""), ReadOutcome(55, "")]
    assert_same(mine, list(range(96)), 4096)
    pair.close()


async def test_a_range_across_pieces_is_read_in_parts(device: RdmaDevice, mine: Registration, lender: Owner) -> None:
    """Two keys here and two keys there, at different places."""
    pair = QueuePair(device, QUICK)
    await lender.connect(pair)
    remote, size = PIECE - 5000, 20000
    parts = mine.parts(mine.address + PIECE - 8192, size)
    assert [part.size for part in parts] == [8192, size - 8192]
    rows = np.zeros(3, READ)
    rows[0] = (lender.address + remote, parts[0].address, 5000, lender.keys[0], parts[0].lkey)
    rows[1] = (lender.address + PIECE, parts[0].address + 5000, 3192, lender.keys[1], parts[0].lkey)
    rows[2] = (lender.address + PIECE + 3192, parts[1].address, parts[1].size, lender.keys[1], parts[1].lkey)
    assert await pair.read(rows) == ReadOutcome(3, "")
    memory = mine.owner
    assert isinstance(memory, np.ndarray)
    assert (memory[PIECE - 8192 :][:size] == pattern(SIZE)[remote:][:size]).all()
    pair.close()


@pytest.mark.parametrize("wrong", ["key", "range"])
async def test_a_read_that_is_not_allowed(device: RdmaDevice, mine: Registration, lender: Owner, wrong: str) -> None:
    """What is before it has come, what is behind it has not, and another queue pair reads on."""
    pair = QueuePair(device, QUICK)
    await lender.connect(pair)
    rows = read_rows(lender, mine, [3, 4, 5, 6])
    if wrong == "key":
        rows["rkey"][2] ^= 0x5500
    else:
        rows["remote"][2] = lender.address + SIZE - 4096
    assert await pair.read(rows) == ReadOutcome(2, "REM_ACCESS_ERR")
    assert_same(mine, [3, 4])
    memory = mine.owner
    assert isinstance(memory, np.ndarray)
    assert not memory[3 * BLOCK : 4 * BLOCK].any()
    assert (await pair.read(rows[:1]), dict(pair.errors)) == (ReadOutcome(0, "REM_ACCESS_ERR"), {"REM_ACCESS_ERR": 1})
    pair.close()
    again = QueuePair(device, QUICK)
    await lender.connect(again)
    assert await again.read(read_rows(lender, mine, [7])) == ReadOutcome(1, "")
    assert_same(mine, [7])
    again.close()


async def test_a_failure_ends_the_reads_of_all(device: RdmaDevice, mine: Registration, lender: Owner) -> None:
    pair = QueuePair(device, QUICK)
    await lender.connect(pair)
    good, bad = read_rows(lender, mine, [1, 2]), read_rows(lender, mine, [3])
    bad["rkey"] ^= 0x5500
    outcomes = {}

    async def read(name: str, rows: Reads) -> None:
        outcomes[name] = await pair.read(rows)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, "before", good)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(read, "bad", bad)
        while pair.counters.reads < 3:
            await trio.lowlevel.checkpoint()
        nursery.start_soon(read, "behind", good)
    assert outcomes.pop("before") == ReadOutcome(2, "")
    assert outcomes == {name: ReadOutcome(0, "REM_ACCESS_ERR") for name in ("bad", "behind")}
    pair.close()


async def test_memory_that_is_taken_back(device: RdmaDevice, mine: Registration) -> None:
    with owner(SIZE) as lender:
        pair = QueuePair(device, QUICK)
        await lender.connect(pair)
        old = read_rows(lender, mine, [3])
        assert await pair.read(old) == ReadOutcome(1, "")
        lender.ask("revoke")
        outcome = await pair.read(old)
        assert (outcome.whole, outcome.status) in [(0, "REM_ACCESS_ERR"), (0, "RETRY_EXC_ERR")]
        pair.close()
        lender.keys = lender.ask("register")
        pair = QueuePair(device, QUICK)
        await lender.connect(pair)
        assert await pair.read(read_rows(lender, mine, [4, 5])) == ReadOutcome(2, "")
        assert_same(mine, [4, 5])
        assert (await pair.read(old)).whole == 0, "the old key opens the new registration"
        pair.close()


async def test_an_owner_that_is_killed_before_it_is_read(device: RdmaDevice, mine: Registration) -> None:
    with owner(SIZE) as lender:
        pair = QueuePair(device, QUICK)
        await lender.connect(pair)
        rows = read_rows(lender, mine, [1, 2, 3])
        lender.kill()
        assert await pair.read(rows) == ReadOutcome(0, "RETRY_EXC_ERR")
        pair.close()


async def test_an_owner_that_is_killed_under_reads(device: RdmaDevice, mine: Registration) -> None:
    """What has come by then is whole."""
    with owner(SIZE) as lender:
        pair = QueuePair(device, QueuePairOptions(depth=SIZE // BLOCK, timeout=15, retries=6))
        await lender.connect(pair)
        outcomes = []

        async def read() -> None:
            outcomes.append(await pair.read(read_rows(lender, mine, list(range(SIZE // BLOCK)))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            while pair.counters.reads < 10:
                await trio.lowlevel.checkpoint()
            lender.kill()
        ((whole, status),) = outcomes
        assert status == "RETRY_EXC_ERR"
        assert 0 < whole < SIZE // BLOCK
        assert_same(mine, list(range(whole)))
        pair.close()


async def test_a_cancelled_read_writes_no_more(device: RdmaDevice, mine: Registration, lender: Owner) -> None:
    pair = QueuePair(device, QueuePairOptions(depth=SIZE // BLOCK))
    await lender.connect(pair)
    rows, others = read_rows(lender, mine, list(range(SIZE // BLOCK))), []
    memory = mine.owner
    assert isinstance(memory, np.ndarray)

    async def read_behind() -> None:
        others.append(await pair.read(rows[:1]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_behind)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(pair.read, rows)
                while pair.counters.reads < 10:
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        memory[:] = 0
        assert pair.ended == "CANCELLED"
    assert others in ([ReadOutcome(1, "")], [ReadOutcome(0, "CANCELLED")])
    again = QueuePair(device, QUICK)
    await lender.connect(again)
    assert await again.read(rows[-1:]) == ReadOutcome(1, "")
    assert not memory[:-BLOCK].any()
    for one in (again, pair):
        one.close()


async def test_a_closed_pair_tells_who_waits(device: RdmaDevice, mine: Registration) -> None:
    """The owner is stopped dead, so that a read takes as long as all its retries."""
    with owner(SIZE) as lender:
        pair = QueuePair(device, QueuePairOptions(timeout=18, retries=7))
        await lender.connect(pair)
        lender.kill()
        outcomes = []

        async def read() -> None:
            outcomes.append(await pair.read(read_rows(lender, mine, [1])))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            pair.close()
        assert outcomes == [ReadOutcome(0, "CLOSED")]
        pair.close()


async def test_a_place_that_is_none(device: RdmaDevice) -> None:
    pair = QueuePair(device, QUICK)
    for wrong in (b"", bytes(32), b"\1\5\1" + bytes(29), b"\1\7" + b"\1" * 30, b"\1" * 33):
        with pytest.raises(WireError, match="place"):
            await pair.connect(wrong)
    pair.close()


async def test_memory_that_cannot_be_registered(device: RdmaDevice) -> None:
    memory = shared_memory(PIECE)
    with pytest.raises(VerbsError, match="cannot be registered with rxe0: Bad address"):
        await device.register(memory.ctypes.data, 1 << 40, memory, remote=True)
    with pytest.raises(VerbsError, match="rxe0 cannot use memory of other devices"):
        device.register_dmabuf(0, 0, PIECE, remote=False)


async def test_registering_leaves_time_to_others(device: RdmaDevice) -> None:
    """64 MiB, as an arena has. The time is printed; that other tasks had their turns is what is asserted."""
    memory = shared_memory(64 << 20)
    memory[::4096] = 1
    pieces = memory.size // PIECE
    async with watched("registering 64 MiB") as turns:
        registration = await device.register(memory.ctypes.data, memory.size, memory, remote=True)
    assert len(turns) >= pieces // 2
    async with watched("ending that") as turns:
        await registration.aclose()
    assert len(turns) >= pieces // 2
    assert not registration.is_open


async def test_reading_leaves_time_to_others(device: RdmaDevice, mine: Registration, lender: Owner) -> None:
    """By a device that carries out READs in the calls that post them."""
    async with watched("making a queue pair"):
        pair = QueuePair(device, QUICK)
    place = lender.ask("connect", pair.place)
    async with watched("connecting it"):
        await pair.connect(place)
    rows = read_rows(lender, mine, list(range(64)))
    async with watched("reading 4 MiB") as turns:
        assert await pair.read(rows) == ReadOutcome(64, "")
    assert len(turns) >= 32
    async with watched("closing it"):
        pair.close()


def test_a_device_whose_interface_is_down() -> None:
    assert [(str(info), info.is_active) for info in find_devices()] == [("rxe0", True), ("rxe1", True)]
    open_device("rxe1").close()
    subprocess.run(["ip", "link", "set", "nic1", "down"], check=True)
    with pytest.raises(NoDevice, match="RDMA device rxe1: its port is DOWN"):
        open_device("rxe1")
    subprocess.run(["ip", "link", "set", "nic1", "up"], check=True)
