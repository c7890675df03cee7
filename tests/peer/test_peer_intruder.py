"""A caller that has the volume's secret, and asks a mounted daemon whatever it likes."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import trio
from mounting import KvfuseMount, wait_until
from peer_lab import free_port, mounted, stats
from peer_questions import fuzzed_question

from kvfuse.checksum import granule_checksums
from kvfuse.options import config
from kvfuse.peer.greeting import HostIdentity, greet
from kvfuse.peer.peer_listener import CALLER_CONNECTIONS_MAX
from kvfuse.peer.peer_wire import (
    ANSWER,
    ANSWER_MAGIC,
    HEAD_SIZE,
    QUESTION_MAGIC,
    MessageHead,
    pack_question,
    parse_head,
    plain,
)
from kvfuse.peer.stream import BROKEN, PeerStream
from kvfuse.usrbio.client import BlockStore
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.store import peer_records, schema, sealed
from kvfuse.volume.views.neighbours import Answer, Wanted
from kvfuse_cluster.etcd import EtcdServers

IN_FLIGHT = 1 << 20
BLOCK_SIZE = 300_000
KEYS = [b"%d" % number for number in range(8)]
INTRUDER = 0xBAD


class Answered(NamedTuple):
    answer: Answer
    data: bytes


@dataclass
class Target:
    """A mounted daemon that listens, and what its volume's records say to anybody who may read them."""

    mount: KvfuseMount
    port: int
    identity: HostIdentity
    client: int
    blocks: list[Wanted]
    """all extents of each file, where its record says that they are"""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[PeerStream]:
        opened = await trio.open_tcp_stream("127.0.0.1", self.port)
        stream = PeerStream(socket.socket(fileno=opened.socket.detach()))
        try:
            await greet(stream, self.identity, self.client)
            yield stream
        finally:
            stream.close()

    def served(self) -> dict[str, int]:
        return dict(stats(self.mount)["peers"]["served"])


async def told(mount: KvfuseMount, port: int) -> Target:
    options = config.load(mount.source).options
    async with engines.open_records(options) as plain_records:
        superblock = await formatting.read_shared_superblock(plain_records, options.title)
        records = sealed.as_formatted(plain_records, superblock)
        (secret,) = await records.get([peer_records.SECRET])
        ((key, *_),) = await records.scan(peer_records.PREFIX)
        entries = [schema.decode_entry(row.value) for row in await records.scan(b"d")]
    assert secret is not None
    identity = HostIdentity(superblock.volume_id, INTRUDER, secret.value)
    blocks = []
    for entry in entries:
        base = 0
        for extent in entry.chunks[0] if not isinstance(entry, int) and entry.chunks else ():
            blocks.append(Wanted(entry.ino, base, extent.addr, extent.generation, 0, extent.length, extent.checksums))
            base += extent.length
    return Target(mount, port, identity, schema.key_client(key), blocks)


@pytest.fixture(scope="module")
def target(etcd: EtcdServers) -> Iterator[Target]:
    port = free_port()
    with mounted(etcd, [(f"peer.listen=127.0.0.1:{port}", f"peer.in_flight={IN_FLIGHT}")]) as (mount,):
        (mount.point / "files").mkdir()
        for folder in ("files", "blocks"):
            with BlockStore(mount.point, folder) as store:
                assert store.put_many(KEYS, [key * BLOCK_SIZE for key in KEYS]).all()
        wait_until(lambda: len(trio.run(told, mount, port).blocks) >= len(KEYS), "the records of the files")
        yield trio.run(told, mount, port)
        for folder in ("files", "blocks"):
            with BlockStore(mount.point, folder) as store:
                assert [bytes(found or b"") for found in store.get_many(KEYS)] == [key * BLOCK_SIZE for key in KEYS]


def anything_of(ino: int, size: int, addr: int = 0, generation: int = 1) -> Wanted:
    return Wanted(ino, 0, addr, generation, 0, size, bytes(4))


async def ask(stream: PeerStream, *wanted: Wanted) -> list[Answered]:
    rows = pack_question([(one, 1, 0) for one in wanted])
    await stream.send([memoryview(MessageHead(len(rows), 7, 0).pack(QUESTION_MAGIC)), plain(rows)])
    head = parse_head(memoryview(await stream.receive(HEAD_SIZE)), ANSWER_MAGIC)
    answers = np.empty(head.row_count, ANSWER)
    await stream.receive_into(plain(answers))
    found = []
    for answer, one in zip(map(Answer, answers["answer"].tolist()), wanted, strict=True):
        found.append(Answered(answer, await stream.receive(one.high - one.low) if answer is Answer.HERE else b""))
    return found


async def test_any_questions_leave_the_daemon_well(target: Target, rng: random.Random) -> None:
    before = target.served()
    for _ in range(60):
        async with target.connected() as stream:
            with suppress(*BROKEN):
                for _ in range(3):
                    await stream.send([memoryview(fuzzed_question(rng, BLOCK_SIZE))])
    wait_until(lambda: target.served()["malformed"] > before["malformed"] + 5, "questions that are malformed")
    wait_until(lambda: target.served()["callers"] == 0 and target.served()["load_bytes"] == 0, "the end of its callers")
    async with target.connected() as stream:
        nothing, block = await ask(stream, anything_of(1 << 40, 4096), target.blocks[1])
        assert nothing.answer is Answer.ABSENT
        assert granule_checksums(memoryview(block.data)) == target.blocks[1].checksums


async def test_many_connections_have_no_more_on_their_way_than_one(target: Target) -> None:
    """It takes nothing of what it asks for."""
    rows = pack_question([(block, 1, 0) for block in target.blocks])
    before = target.served()["busy"]
    async with trio.open_nursery() as nursery:

        async def flood(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            async with target.connected() as stream:
                for number in range(20):
                    with trio.move_on_after(0.5):
                        await stream.send(
                            [memoryview(MessageHead(len(rows), number, 0).pack(QUESTION_MAGIC)), plain(rows)]
                        )
                task_status.started()
                await trio.sleep_forever()

        for _ in range(CALLER_CONNECTIONS_MAX // 2):
            await nursery.start(flood)
            assert target.served()["load_bytes"] <= IN_FLIGHT
        wait_until(lambda: target.served()["busy"] > before, "rows for which there was no room")
        for _ in range(20):
            assert target.served()["load_bytes"] <= IN_FLIGHT
        nursery.cancel_scope.cancel()
    await trio.to_thread.run_sync(wait_until, lambda: target.served()["load_bytes"] == 0, "the end of its callers")


async def test_what_is_not_sealed_is_not_sent(target: Target) -> None:
    """Whatever slot it names: bytes of a file that is being written are nobody's."""
    path = target.mount.point / "files" / "0"
    ino, new = path.stat().st_ino, b"new!" * (BLOCK_SIZE // 4)
    own = [block for block in target.blocks if block.ino == ino]
    async with target.connected() as stream:
        assert {found.answer for found in await ask(stream, *own)} == {Answer.HERE}
        asked = [*own, anything_of(ino, BLOCK_SIZE), own[0]._replace(generation=own[0].generation + 1)]
        with path.open("r+b", buffering=0) as file:
            for written in range(0, BLOCK_SIZE, 60_000):
                os.pwrite(file.fileno(), new[written : written + 60_000], written)
                for found in await ask(stream, *asked):
                    assert b"new!" not in found.data
            os.pwrite(file.fileno(), b"0" * BLOCK_SIZE, 0)
