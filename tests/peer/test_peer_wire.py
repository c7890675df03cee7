"""Hosts over TCP, without volumes: greetings that are refused, and questions that nobody may ask."""

from __future__ import annotations

import random
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from peer_hosts import VOLUME_ID, PeerHost, peer_hosts, until
from peer_lab import HELLO_SIZE, PROOF_SIZE
from peer_questions import fuzzed_question

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.peer import peer_listener as listener_module
from kvfuse.peer.greeting import HostIdentity, greet
from kvfuse.peer.peer_listener import CALLER_CONNECTIONS_MAX, STRANGERS_MAX
from kvfuse.peer.peer_wire import (
    HEAD_SIZE,
    QUESTION_MAGIC,
    VERSION,
    MessageHead,
    WireError,
    pack_question,
)
from kvfuse.peer.stream import BROKEN, PeerStream
from kvfuse.volume.store.peer_records import PeerRecord
from kvfuse.volume.views.neighbours import Wanted

MIB = 1 << 20
BLOCK_SIZE = 300_000
BLOCKS = range(1, 9)


@asynccontextmanager
async def two(block_size: int = BLOCK_SIZE, **options: float) -> AsyncIterator[tuple[PeerHost, PeerHost]]:
    """A host with 8 blocks, and one that reads them."""
    async with peer_hosts(2, **options) as (writer, reader):
        for ino in BLOCKS:
            writer.neighbourhood.blocks[ino] = secrets.token_bytes(block_size)
            reader.neighbourhood.holders[ino] = writer.neighbourhood.client
        await reader.until_ready(1)
        yield writer, reader


@asynccontextmanager
async def connected(host: PeerHost) -> AsyncIterator[PeerStream]:
    opened = await trio.open_tcp_stream("127.0.0.1", host.port)
    stream = PeerStream(socket.socket(fileno=opened.socket.detach()))
    try:
        yield stream
    finally:
        stream.close()


async def is_ended(stream: PeerStream) -> bool:
    """The other side ends the connection."""
    with trio.fail_after(20), suppress(*BROKEN):
        while True:
            await stream.receive(1)
    return True


async def is_served(writer: PeerHost, reader: PeerHost) -> bool:
    found, data = await reader.read(writer.wanted(5))
    return found == [True] and data == [writer.neighbourhood.blocks[5]]


def hello_of(client: int, volume_id: bytes = VOLUME_ID) -> bytes:
    return struct.pack("<8sI4x16sQ32s", b"KVFPEER\n", VERSION, volume_id, client, secrets.token_bytes(32))


# -- greetings ----------------------------------------------------------------------------------------


def another_secret(own: HostIdentity) -> HostIdentity:
    return own._replace(secret=secrets.token_bytes(32))


def no_secret(own: HostIdentity) -> HostIdentity:
    return own._replace(secret=b"")


def another_volume(own: HostIdentity) -> HostIdentity:
    return own._replace(volume_id=secrets.token_bytes(16))


@pytest.mark.parametrize("change", [another_secret, no_secret, another_volume])
async def test_who_is_not_of_the_volume_is_refused(change: Callable[[HostIdentity], HostIdentity]) -> None:
    async with two() as (writer, reader):
        own = change(reader.neighbourhood.identity._replace(client=77))
        async with connected(writer) as stream:
            with pytest.raises((WireError, OSError)):
                await greet(stream, own, 1)
        async with connected(writer) as stream:  # one that does not care what the listener proves
            with suppress(*BROKEN):
                await stream.send([memoryview(hello_of(77, own.volume_id))])
                await stream.receive(HELLO_SIZE + PROOF_SIZE)
                await stream.send([memoryview(bytes(PROOF_SIZE))])
            assert await is_ended(stream)
        assert writer.listener.counters.refused >= 1
        assert await is_served(writer, reader)
        assert writer.listener.counters.questions == 1


async def test_a_proof_that_was_overheard_proves_nothing() -> None:
    async with two() as (writer, reader):
        with socket.create_server(("127.0.0.1", 0)) as opened:
            honest = PeerStream(socket.create_connection(opened.getsockname()))
            between = PeerStream(opened.accept()[0])
        async with connected(writer) as onward, trio.open_nursery() as nursery:
            nursery.start_soon(greet, honest, reader.neighbourhood.identity, 1)
            hello = await between.receive(HELLO_SIZE)
            await onward.send([memoryview(hello)])
            await between.send([memoryview(await onward.receive(HELLO_SIZE + PROOF_SIZE))])
            overheard = await between.receive(PROOF_SIZE)
        async with connected(writer) as stream:
            await stream.send([memoryview(hello)])
            await stream.receive(HELLO_SIZE + PROOF_SIZE)
            await stream.send([memoryview(overheard)])
            assert await is_ended(stream)
        assert writer.listener.counters.refused >= 1
        between.close()
        honest.close()


async def test_a_listeners_proof_is_none_of_a_caller() -> None:
    async with two() as (writer, _), connected(writer) as stream:
        await stream.send([memoryview(hello_of(2))])
        answer = await stream.receive(HELLO_SIZE + PROOF_SIZE)
        await stream.send([memoryview(answer[HELLO_SIZE:])])
        assert await is_ended(stream)
        assert writer.listener.counters.refused == 1


async def test_a_host_that_is_another_than_its_record_says_is_left() -> None:
    async with two() as (writer, reader), connected(writer) as stream:
        with pytest.raises(WireError, match="client 1 answers where client 9 did"):
            await greet(stream, reader.neighbourhood.identity, 9)


async def test_who_is_slow_to_greet_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as (writer, reader):
        monkeypatch.setattr(listener_module, "GREETING_SECONDS", 0.1)
        async with connected(writer) as stream:
            await stream.send([memoryview(b"KVF")])
            assert await is_ended(stream)
        assert writer.listener.counters.refused == 1
        assert await is_served(writer, reader)


async def test_strangers_are_few_and_leave_others_served() -> None:
    async with two() as (writer, reader):
        strangers = [socket.create_connection(("127.0.0.1", writer.port)) for _ in range(STRANGERS_MAX + 5)]
        await until(lambda: writer.listener.counters.refused >= 5)
        assert await is_served(writer, reader)
        for one in strangers:
            one.close()
        await until(lambda: not writer.listener._strangers)
        async with connected(writer) as stream:
            await greet(stream, reader.neighbourhood.identity, 1)


async def test_a_caller_has_a_bounded_number_of_connections() -> None:
    async with two() as (writer, reader):
        own = reader.neighbourhood.identity._replace(client=50)
        opened: list[PeerStream] = []
        for _ in range(CALLER_CONNECTIONS_MAX + 1):
            connection = await trio.open_tcp_stream("127.0.0.1", writer.port)
            opened.append(PeerStream(socket.socket(fileno=connection.socket.detach())))
            await greet(opened[-1], own, 1)
            await until(lambda: writer.listener._strangers == 0)
        assert await is_ended(opened[-1])
        assert writer.listener.counters.refused == 1
        for stream in opened:
            stream.close()
        await until(lambda: 50 not in writer.listener._callers)
        assert await is_served(writer, reader)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:99999", "127.0.0.1:x", "no", "", ":", "a\0b:1", "ü" * 99 + ":7", "[::1]:1"]
)
async def test_an_address_that_is_none_hurts_nobody(address: str) -> None:
    async with two() as (writer, reader):
        reader.neighbourhood.places |= {3: PeerRecord((address,)), 4: PeerRecord(())}
        reader.neighbourhood.change()
        await until(lambda: 3 in reader.peers.neighbours)
        await until(lambda: reader.peers.neighbours[3].state != "connecting")
        assert await is_served(writer, reader)


# -- questions ----------------------------------------------------------------------------------------


async def test_questions_of_any_bytes_end_at_most_their_connection(rng: random.Random) -> None:
    async with two() as (writer, reader):
        own = reader.neighbourhood.identity._replace(client=60)
        for _ in range(100):
            async with connected(writer) as stream:
                await greet(stream, own, 1)
                with suppress(*BROKEN):
                    for _ in range(3):
                        await stream.send([memoryview(fuzzed_question(rng, BLOCK_SIZE))])
            await until(lambda: not writer.listener._callers[60])
        assert writer.listener.counters.malformed > 10
        assert writer.listener.load == 0
        assert not writer.listener._sending[60]
        assert await is_served(writer, reader)


@pytest.mark.parametrize(
    ("low", "high", "base"),
    [
        (1, GRANULE_SIZE, 0),
        (GRANULE_SIZE, GRANULE_SIZE, 0),
        (0, (64 << 20) + 1, 0),
        (0, 1, -2),
        (0, 1, (1 << 62) + 1),
    ],
)
async def test_a_range_that_no_extent_has_is_malformed(low: int, high: int, base: int) -> None:
    async with two() as (writer, reader), connected(writer) as stream:
        await greet(stream, reader.neighbourhood.identity._replace(client=60), 1)
        rows = pack_question([(Wanted(1, base, 1, 1, low, high, bytes(4)), 1, 0)])
        await stream.send([memoryview(MessageHead(1, 1, 0).pack(QUESTION_MAGIC)), memoryview(rows.tobytes())])
        assert await is_ended(stream)
        assert writer.listener.counters.malformed == 1


async def test_a_reader_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "SEND_SECONDS", 0.1)
    monkeypatch.setattr(listener_module, "SEND_RATE", 1 << 30)
    async with two(block_size=16 * MIB) as (writer, reader), connected(writer) as stream:
        await greet(stream, reader.neighbourhood.identity._replace(client=60), 1)
        rows = pack_question([(writer.wanted(ino), 1, 0) for ino in (1, 2, 3)])
        await stream.send([memoryview(MessageHead(3, 1, 0).pack(QUESTION_MAGIC)), memoryview(rows.tobytes())])
        await until(lambda: writer.listener.counters.given_up == 1)
        assert writer.listener.load == 0


async def test_what_is_read_from_disk_counts_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all connections of a caller together."""
    at_once = most = 0
    may_go_on = trio.Event()

    async def stored(wanted: Wanted) -> memoryview:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await may_go_on.wait()
        return memoryview(bytes(wanted.high - wanted.low))

    async with two(in_flight=4 * MIB, deadline=20.0) as (writer, reader):
        monkeypatch.setattr(writer.neighbourhood, "stored", stored)
        own = reader.neighbourhood.identity._replace(client=60)
        rows = pack_question([(Wanted(100 + number, 0, number, 1, 0, MIB, bytes(4)), 1, 0) for number in range(3)])
        question = [memoryview(MessageHead(3, 1, 0).pack(QUESTION_MAGIC)), memoryview(rows.tobytes())]
        async with connected(writer) as one, connected(writer) as two_, connected(writer) as three:
            for stream in (one, two_, three):
                await greet(stream, own, 1)
                await stream.send(question)
            await until(lambda: at_once >= 4 and writer.listener.counters.questions >= 1)
            assert writer.listener._sending[60] == 4 * MIB
            may_go_on.set()
            for stream in (one, two_):
                await stream.receive(HEAD_SIZE)
        await until(lambda: not writer.listener._sending[60])
        assert most == 4
        assert await is_served(writer, reader)


async def test_a_caller_has_a_bounded_number_of_bytes_on_their_way() -> None:
    async with two(block_size=3 * MIB, in_flight=8 * MIB, deadline=20.0) as (writer, reader):
        found, data = await reader.read(*[writer.wanted(ino) for ino in BLOCKS])
        assert 1 <= sum(found) < len(found)
        assert reader.peers.counters.busy == len(found) - sum(found)
        right = [writer.neighbourhood.blocks[ino] == block for ino, block in zip(BLOCKS, data, strict=True)]
        assert right == found
