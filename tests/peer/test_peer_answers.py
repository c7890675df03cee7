"""A host that lies, breaks off, or is slow, and those that read from it: no wrong byte, and no late one."""

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from peer_hosts import PeerHost, peer_hosts, until
from peer_lab import PROXY_HOST, Lie, PeerProxy, as_answer, flipped

from kvfuse.peer import neighbour as neighbour_module
from kvfuse.peer import service as service_module
from kvfuse.peer.peer_wire import MessageHead, Rows
from kvfuse.volume.views.neighbours import Answer

MIB = 1 << 20
BLOCKS = range(1, 9)
SLACK = 4.0
"""seconds that a busy machine may be late"""
OLD = 0xA5
"""what memory had before"""


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads have until their deadline: a busy machine is no slow host."""
    monkeypatch.setattr(service_module, "LATE_MIN", 20.0)


@asynccontextmanager
async def two(block_size: int = 300_000, **options: float) -> AsyncIterator[tuple[PeerHost, PeerHost, PeerProxy]]:
    """A host with 8 blocks, one that reads them, and the proxy between."""
    options.setdefault("deadline", 5.0)
    proxies: list[PeerProxy] = []

    def through(port: int) -> str:
        proxies.append(PeerProxy(port))
        return f"{PROXY_HOST}:{port}"

    try:
        async with peer_hosts(2, through, **options) as (writer, reader):
            for ino in BLOCKS:
                writer.neighbourhood.blocks[ino] = secrets.token_bytes(block_size)
                reader.neighbourhood.holders[ino] = writer.neighbourhood.client
            await reader.until_ready(1)
            yield writer, reader, proxies[0]
    finally:
        for proxy in proxies:
            proxy.close()


async def read_all(writer: PeerHost, reader: PeerHost) -> int:
    """How many blocks came; they are right, and came in time."""
    began = trio.current_time()
    found, data = await reader.read(*[writer.wanted(ino) for ino in BLOCKS])
    assert trio.current_time() - began < reader.peers.options.deadline + SLACK
    for ino, is_right, block in zip(BLOCKS, found, data, strict=True):
        assert not is_right or block == writer.neighbourhood.blocks[ino]
    return sum(found)


async def is_served_again(writer: PeerHost, reader: PeerHost) -> bool:
    """By itself, a moment later."""
    with trio.fail_after(20):
        while await read_all(writer, reader) < len(BLOCKS):
            await reader.until_ready(1)
    return True


# -- lies ---------------------------------------------------------------------------------------------


def elsewhere(*clients: int) -> Lie:
    def lie(head: MessageHead, rows: Rows, data: bytearray) -> bytes:
        rows["answer"] = Answer.ELSEWHERE
        rows["named"] = clients
        return as_answer(head, rows, b"")

    return lie


def saying(answer: int) -> Lie:
    def lie(head: MessageHead, rows: Rows, data: bytearray) -> bytes:
        rows["answer"] = answer
        return as_answer(head, rows, data)

    return lie


LIES: dict[str, tuple[Lie, str]] = {
    "flipped bits": (flipped, "wrong"),
    "other bytes": (lambda head, rows, data: as_answer(head, rows, bytes(len(data))), "wrong"),
    "unknown answer": (saying(99), "lost"),
    "no answer": (saying(0), "lost"),
    "absent, and bytes": (saying(Answer.ABSENT), "absent"),
    "another number": (lambda head, rows, data: as_answer(head._replace(number=head.number + 1), rows, data), "lost"),
    "more rows": (lambda head, rows, data: as_answer(head._replace(row_count=200), rows, data), "lost"),
    "endless rows": (lambda head, rows, data: as_answer(head._replace(row_count=1 << 31), rows, data), "lost"),
    "no message": (lambda head, rows, data: b"HTTP/1.1 400 Bad Request" * 9, "lost"),
    "named that are not there": (elsewhere(1 << 63, 77, 0), "lost"),
    "named itself": (elsewhere(1, 1, 1), "lost"),
    "named who asks": (elsewhere(2, 0, 0), "lost"),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_lie_is_a_miss_with_a_reason(name: str) -> None:
    lie, reason = LIES[name]
    async with two() as (writer, reader, proxy):
        proxy.lie = lie
        assert await read_all(writer, reader) == 0
        if not name.startswith("named"):
            assert getattr(reader.peers.counters, reason) >= 1, reader.peers.counters
        proxy.be_honest()
        assert await is_served_again(writer, reader)


async def test_bytes_that_were_not_asked_for_end_the_connection() -> None:
    async with two(connections=1) as (writer, reader, proxy):
        proxy.lie = lambda head, rows, data: as_answer(head, rows, data) + bytes(9 * MIB)
        assert await read_all(writer, reader) == len(BLOCKS)
        await until(lambda: not reader.peers.neighbours[1].is_ready)
        proxy.be_honest()
        assert await is_served_again(writer, reader)


@pytest.mark.parametrize("known", [None, 2521902609], ids=["new", "asked-anew-while-others-land"])
async def test_answers_of_any_bytes_are_misses(
    known: int | None, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``known``: a seed that once ended the daemon."""
    rng = random.Random(known) if known is not None else rng
    monkeypatch.setattr(neighbour_module, "RETRY_MAX", 0.1)

    def lie(head: MessageHead, rows: Rows, data: bytearray) -> bytes:
        message = bytearray(as_answer(head, rows, data))
        for _ in range(rng.randint(1, 8)):
            message[rng.randrange(min(len(message), rng.choice((32, 200, 1 << 30))))] = rng.randrange(256)
        if rng.randrange(3) == 0:
            del message[rng.randrange(len(message)) :]
        return bytes(message)

    async with two(block_size=70_000, deadline=0.3) as (writer, reader, proxy):
        proxy.lie = lie
        for number in range(50):
            if number % 4 == 3:
                proxy.cut()
            await read_all(writer, reader)
        proxy.be_honest()
        proxy.cut()
        assert await is_served_again(writer, reader)


async def test_what_moved_or_went_is_not_sent() -> None:
    async with two() as (writer, reader, _):
        found, _ = await reader.read(writer.wanted(1, generation=2), writer.wanted(2))
        assert found == [False, True]
        gone = writer.wanted(3)
        del writer.neighbourhood.blocks[3]
        assert (await reader.read(gone))[0] == [False]
        assert (reader.peers.counters.moved, reader.peers.counters.absent) == (1, 1)


async def test_other_bytes_at_the_same_place_are_found_out() -> None:
    """The writer's slot has another life, of which the reader has not heard."""
    async with two() as (writer, reader, _):
        wanted = writer.wanted(1)
        writer.neighbourhood.blocks[1] = secrets.token_bytes(len(writer.neighbourhood.blocks[1]))
        assert (await reader.read(wanted))[0] == [False]
        assert reader.peers.counters.wrong == 1


# -- memory that was given back -----------------------------------------------------------------------


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["late", "cancelled"])
async def test_memory_of_a_read_that_is_over_is_not_touched_again(*, is_cancelled: bool) -> None:
    async with two(4 * MIB, deadline=20.0 if is_cancelled else 1.0) as (writer, reader, proxy):
        proxy.rate = 2 * MIB
        targets = [bytearray(4 * MIB) for _ in range(2)]
        with trio.move_on_after(20) as scope:
            async with trio.open_nursery() as nursery:
                if is_cancelled:
                    nursery.start_soon(_cancel_when, nursery.cancel_scope, targets[0])
                found = await reader.peers.read([writer.wanted(1), writer.wanted(2)], list(map(memoryview, targets)))
                assert found == [False, False]
        assert not scope.cancelled_caught
        assert any(targets[0]), "nothing had come by then"
        assert is_cancelled or reader.peers.counters.late == 2
        for target in targets:
            target[:] = bytes([OLD]) * len(target)
        proxy.be_honest()
        neighbour = reader.peers.neighbours[1]
        await until(lambda: all(one.bytes == 0 for one in neighbour.connections))
        assert proxy.payload >= len(targets[0])
        assert await is_served_again(writer, reader)
        assert all(target == bytes([OLD]) * len(target) for target in targets)


async def _cancel_when(scope: trio.CancelScope, target: bytearray) -> None:
    """Some of it has come."""
    await until(lambda: any(target[:4096]))
    scope.cancel()


# -- trust --------------------------------------------------------------------------------------------


async def test_a_connection_on_which_nothing_comes_is_made_anew() -> None:
    async with two(deadline=0.3, connections=1) as (writer, reader, proxy):
        proxy.flowing.clear()
        assert (await reader.read(writer.wanted(1)))[0] == [False]
        connections = writer.listener.counters.connections
        await until(lambda: writer.listener.counters.connections > connections)
        proxy.be_honest()
        assert await is_served_again(writer, reader)


async def test_many_reads_that_a_host_was_late_for_at_once_are_few_failures() -> None:
    """It is asked again soon, not half a minute later."""
    async with two(deadline=0.3) as (writer, reader, proxy):
        proxy.flowing.clear()
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(reader.read, writer.wanted(1 + number % 8))
        proxy.be_honest()
        assert 8 < reader.peers.counters.late <= 64, "those that began before it was known to be late"
        neighbour = reader.peers.neighbours[1]
        assert trio.current_time() < neighbour._shunned_until < trio.current_time() + 1
        assert await is_served_again(writer, reader)


async def test_bytes_that_break_off_are_failures() -> None:
    """A host that begins its answers and never ends them is not asked for a while."""
    async with two(deadline=5.0) as (writer, reader, proxy):
        proxy.lie = lambda head, rows, data: as_answer(head, rows, data[: len(data) // 2])
        neighbour = reader.peers.neighbours[1]

        async def cut_after(count: int) -> None:
            await until(lambda: proxy.answers > count)
            proxy.cut()

        for _ in range(3):
            await reader.until_ready(1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut_after, proxy.answers)
                assert (await reader.read(writer.wanted(1)))[0] == [False]
        assert trio.current_time() < neighbour._shunned_until
