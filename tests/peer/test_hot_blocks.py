"""Blocks that all hosts want: their writer serves a few copies, those that have them serve the others."""

from __future__ import annotations

import random
import secrets

import numpy as np
import pytest
import trio
from lent_blocks import LentBlocks
from mounting import wait_until
from peer_hosts import PeerHost, peer_hosts, until
from peer_lab import listening, mounted, stats, wait_for_peers

from kvfuse.peer import service
from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

BLOCKS = range(1, 33)
BLOCK_SIZE = 256 << 10
READERS, DEPTH = 8, 4
COPIES_MAX = 3.0
"""of each block, on average, that the writer sends for 8 readers"""


async def test_eight_hosts_read_hot_blocks_from_each_other(rng: random.Random) -> None:
    async with peer_hosts(READERS + 1, deadline=20.0) as (writer, *readers):
        for ino in BLOCKS:
            writer.neighbourhood.blocks[ino] = secrets.token_bytes(BLOCK_SIZE)
        for reader in readers:
            reader.neighbourhood.holders |= dict.fromkeys(BLOCKS, 1)
            for other in (writer, *readers):
                if other is not reader:
                    await reader.until_ready(other.neighbourhood.client)

        async def read_all(reader: PeerHost, order: list[int]) -> None:
            for ino in order:
                while ino not in reader.neighbourhood.blocks:
                    found, data = await reader.read(writer.wanted(ino))
                    if found == [True]:
                        assert data == [writer.neighbourhood.blocks[ino]]
                        reader.neighbourhood.blocks[ino] = data[0]

        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(read_all, reader, rng.sample(BLOCKS, len(BLOCKS)))
        sent = [host.listener.counters.bytes for host in (writer, *readers)]
        assert sum(sent) >= READERS * len(BLOCKS) * BLOCK_SIZE
        assert sent[0] <= COPIES_MAX * len(BLOCKS) * BLOCK_SIZE, sent
        assert sum(map(bool, sent)) > len(sent) // 2, sent


async def test_of_blocks_the_writer_sends_two_copies(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts want all of them at once: who is sent to a host that is just getting a block waits for it there."""
    monkeypatch.setattr(service, "LATE_MIN", 20.0)
    data = {number: secrets.token_bytes(BLOCK_SIZE) for number in BLOCKS}
    async with peer_hosts(READERS + 1, deadline=20.0, connections=2) as (writer, *readers):
        lent = writer.neighbourhood.lent = LentBlocks(arenas=1)
        lent.put(data)
        for reader in readers:
            reader.neighbourhood.slabs_of = 1
            reader.neighbourhood.lent = LentBlocks(arenas=1, first=12)
        for reader in readers:
            for other in (writer, *readers):
                if other is not reader:
                    await reader.until_ready(other.neighbourhood.client)
                    neighbour = reader.peers.neighbours[other.neighbourhood.client]
                    await until(lambda neighbour=neighbour: neighbour.has_blocks_ready)

        async def read_all(reader: PeerHost, order: list[int]) -> None:
            own = reader.neighbourhood.lent
            assert own is not None
            for start in range(0, len(order), DEPTH):
                numbers = order[start : start + DEPTH]
                landing, targets, _ = own.reserve_foreign(lent, numbers)
                wanted = lent.wanted(numbers, np.zeros(1, np.uint8))._replace(targets=targets)
                places = np.arange(DEPTH, dtype=np.uint32)
                assert (await reader.peers.read_blocks(wanted, 20.0, landing, places)).all()
                assert [own.content(number).tobytes() for number in numbers] == [data[number] for number in numbers]

        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(read_all, reader, rng.sample(BLOCKS, len(BLOCKS)))
        sent = [host.listener.blocks.statistics()["here"] for host in (writer, *readers)]
        assert sent[0] == 2 * len(BLOCKS), sent
        assert sum(sent) == READERS * len(BLOCKS), sent
        for reader in readers:
            counters = reader.peers.counters
            assert (counters.lost, counters.absent, counters.wrong, counters.late) == (0, 0, 0, 0)


def test_mounts_keep_what_they_got_and_serve_it_to_others(etcd: EtcdServers) -> None:
    """One after the other: so each has it before the next one asks."""
    data = {b"%d" % number: secrets.token_bytes(BLOCK_SIZE) for number in range(48)}
    with mounted(etcd, [listening() for _ in range(5)]) as (writer, *readers):
        wait_for_peers([writer, *readers])
        with BlockStore(writer.point, "blocks") as store:
            assert store.put_many(list(data), list(data.values())).all()
        late = 0
        for reader in readers:
            with BlockStore(reader.point, "blocks") as store:
                wait_until(lambda store=store: bool(store.exists(list(data)).all()), "the names")
                assert [bytes(found or b"") for found in store.get_many(list(data))] == list(data.values())
            asked = stats(reader)["peers"]["asked"]  # a busy machine may be late: then a block comes from the segments
            late += asked["hedged"] + asked["late"]
            assert stats(reader)["store"]["resident"] >= len(data) - late
        sent = [stats(mount)["peers"]["served"]["bytes"] for mount in (writer, *readers)]
        copies = [size / len(data) / BLOCK_SIZE for size in sent]
        assert late or sum(copies) <= len(readers) + 0.5, copies
        assert late or copies[0] < 3, copies
        assert max(copies[1:]) > 0, copies
