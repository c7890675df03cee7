"""Hosts that read from each other by what is like RDMA: which bytes come, and what happens where a READ fails.

With devices, in a virtual machine: `rdma_peers`.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing
from link_lab import KIB, MIB, LinkedPair, linked
from peer_hosts import until
from soft_rdma import SoftNetwork

from kvfuse.peer import service as service_module


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads have until their deadline: a busy machine is no slow host."""
    monkeypatch.setattr(service_module, "LATE_MIN", 20.0)


@pytest.mark.parametrize(("count", "size"), [(200, 4 * KIB), (64, 64 * KIB), (8, MIB), (3, 4 * MIB)])
async def test_a_batch_is_one_list_of_reads(count: int, size: int) -> None:
    async with linked(SoftNetwork()) as pair:
        inos = pair.put([size] * count)
        await pair.until_by_rdma(inos)
        pair.memory[:] = 0
        before = pair.rdma
        assert all(await pair.read(inos))
        after = pair.rdma
        assert after["batches"] - before["batches"] == 1
        assert after["bytes"] - before["bytes"] == count * size
        assert pair.writer.listener.counters.placed >= count


async def is_by_rdma_again(pair: LinkedPair, inos: list[int]) -> bool:
    """All blocks come, and by READs, a moment later."""
    await pair.until_by_rdma(inos)
    return True


async def test_what_is_read_to_memory_that_is_not_registered_is_staged() -> None:
    async with linked(SoftNetwork()) as pair:
        inos = pair.put([4 * KIB, 300_000, 1, MIB, 4097])
        await pair.until_by_rdma(inos)
        before = pair.rdma
        targets = [memoryview(bytearray(len(pair.writer.neighbourhood.blocks[ino]))) for ino in inos]
        assert all(await pair.read(inos, targets))
        after = pair.rdma
        assert (after["batches"] - before["batches"], after["reads"] - before["reads"]) == (1, len(inos))


async def test_more_than_can_be_staged_comes_by_both_ways() -> None:
    async with linked(SoftNetwork()) as pair:
        inos = pair.put([3 * MIB] * 5)
        await pair.until_by_rdma(inos)
        before = pair.rdma
        targets = [memoryview(bytearray(3 * MIB)) for _ in inos]
        assert all(await pair.read(inos, targets))
        assert 0 < pair.rdma["bytes"] - before["bytes"] < 5 * 3 * MIB


async def test_rows_by_places_and_by_bytes_in_one_answer() -> None:
    async with linked(SoftNetwork()) as pair:
        inos = pair.put([64 * KIB] * 6)
        await pair.until_by_rdma(inos)
        for ino in inos[::2]:  # as from the disk tier
            pair.writer.neighbourhood.blocks[ino] = bytes(pair.writer.neighbourhood.blocks[ino])
        wanted, targets = [pair.writer.wanted(ino) for ino in inos], pair.targets(inos)
        del pair.writer.neighbourhood.blocks[inos[1]]
        before = pair.rdma
        found, data = await pair.reader.read(*wanted, targets=targets)
        assert found == [True, False, True, True, True, True]
        assert all(data[ino - 1] == block for ino, block in pair.writer.neighbourhood.blocks.items())
        assert pair.rdma["reads"] - before["reads"] == 2
        assert pair.reader.peers.counters.absent == 1


async def test_a_read_with_a_wrong_key_is_lost_and_the_next_one_right() -> None:
    network = SoftNetwork()
    async with linked(network) as pair:
        inos = pair.put([64 * KIB] * 4)
        await pair.until_by_rdma(inos)
        network.fails = "REM_ACCESS_ERR"
        assert await pair.read(inos) == [False] * 4
        assert pair.reader.peers.counters.lost == 4
        network.fails = ""
        assert all(await pair.read(inos)), "over TCP, while the queue pair is made anew"
        assert await is_by_rdma_again(pair, inos)
        assert pair.rdma["errors"]["REM_ACCESS_ERR"] == 1
        assert pair.reader.peers.neighbours[1].statistics()["rdma_failures"] == 1


async def test_memory_that_is_taken_back_between_answer_and_read() -> None:
    network = SoftNetwork()
    async with linked(network) as pair:
        inos = pair.put([64 * KIB] * 4)
        await pair.until_by_rdma(inos)
        network.flowing = trio.Event()
        async with trio.open_nursery() as nursery:
            found: list[bool] = []

            async def read() -> None:
                found.extend(await pair.read(inos))

            before = pair.rdma["batches"]
            nursery.start_soon(read)
            await until(lambda: pair.rdma["batches"] > before)
            rdma = pair.writer.listener.rdma
            assert rdma is not None
            await rdma.adapters[0].registrations.end_all()
            network.flowing.set()
        assert found == [False] * 4
        assert await is_by_rdma_again(pair, inos)


async def test_blocks_that_are_replaced_under_a_read_are_missed() -> None:
    """The host that has them is no liar for that."""
    network = SoftNetwork()
    async with linked(network) as pair:
        inos = pair.put([64 * KIB] * 4)
        await pair.until_by_rdma(inos)
        network.flowing = trio.Event()
        wanted, targets = [pair.writer.wanted(ino) for ino in inos], pair.targets(inos)
        found: list[bool] = []
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                found.extend(await pair.reader.peers.read(wanted, targets))

            before = pair.rdma["batches"]
            nursery.start_soon(read)
            await until(lambda: pair.rdma["batches"] > before)
            pair.lent[3 * 64 * KIB] ^= 1
            pair.lent[70_000] ^= 1
            network.flowing.set()
        assert found == [True, False, True, False]
        counters = pair.reader.peers.counters
        assert (counters.moved, counters.wrong, counters.lost) == (2, 0, 0)
        assert pair.reader.peers.neighbours[1].is_ready
        assert await is_by_rdma_again(pair, inos)


@pytest.mark.parametrize("is_staged", [False, True])
async def test_nothing_is_written_to_a_target_that_was_given_back(is_staged: bool) -> None:
    """A READ that is slow ends its queue pair if it would write there, and only then."""
    network = SoftNetwork()
    async with linked(network) as pair:
        inos = pair.put([64 * KIB] * 4)
        await pair.until_by_rdma(inos)
        network.flowing = trio.Event()
        plain = [bytearray(64 * KIB) for _ in inos]
        targets = [memoryview(one) for one in plain] if is_staged else pair.targets(inos)
        pair.memory[:] = 0
        wanted = [pair.writer.wanted(ino) for ino in inos]
        with trio.move_on_after(0.2) as scope:
            await pair.reader.peers.read(wanted, targets)
        assert scope.cancelled_caught
        network.flowing.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not pair.memory.any()
        assert not any(map(any, plain))
        assert pair.rdma["errors"].get("ABANDONED", 0) == (not is_staged)
        assert await is_by_rdma_again(pair, inos)


async def test_a_host_without_a_device_is_read_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(SoftNetwork()) as pair:
        inos = pair.put([64 * KIB] * 4)
        pair.writer.listener.rdma = None
        await pair.reader.peers.neighbours[1].connections[0]._stream.send([memoryview(b"what is no question" * 2)])
        await until(lambda: pair.reader.peers.neighbours[1].statistics()["rdma_connections"] == 0)
        await pair.reader.until_ready(1)
        before = pair.reads
        assert all(await pair.read(inos))
        assert all(await pair.read(inos))
        assert pair.reads == before


async def test_a_mount_without_a_device_says_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Once where RDMA was asked for, and it serves by TCP."""
    for transport, level in (("rdma", "WARNING"), ("auto", "INFO")):
        caplog.clear()
        with caplog.at_level("INFO"):
            async with linked(transport=transport) as pair:
                inos = pair.put([64 * KIB] * 2)
                assert all(await pair.read(inos))
        lines = [record for record in caplog.records if "TCP alone" in record.message]
        assert [record.levelname for record in lines] == [level] * 2, "one for each host"
        assert "rdma" not in pair.reader.peers.statistics()
