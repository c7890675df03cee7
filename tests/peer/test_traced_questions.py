"""The span that a question belongs to goes before it: over both kinds of connections, to hosts that take it."""

from __future__ import annotations

import random
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import numpy as np
import pytest
import trio
from lent_blocks import LentBlocks
from peer_hosts import PeerHost, peer_hosts, until

from kvfuse.peer.greeting import BLOCKS, GRANULES, greet
from kvfuse.peer.peer_listener import Listener
from kvfuse.peer.peer_wire import HEAD_SIZE, PARENT_MAGIC, MessageHead
from kvfuse.peer.stream import BROKEN, PeerStream
from kvfuse.traceparent import HEARD, SIZE, SPAN, TRACES, SpanPlace, Traces
from kvfuse.volume.store import peer_records

BLOCK_SIZE = 300_000
FIRST, SECOND = SpanPlace(1 << 100 | 7, 9), SpanPlace(3, 1 << 63)


class Noted(NamedTuple):
    name: str
    parent: SpanPlace
    begin_ns: int
    end_ns: int
    facts: Mapping[str, int | str]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """Spans that hosts make of what other threads did; they make some."""
    made: list[Noted] = []
    monkeypatch.setattr(TRACES, "is_on", True)
    monkeypatch.setattr(TRACES, "malformed", 0)
    monkeypatch.setattr(TRACES, "note", lambda *facts: made.append(Noted(*facts)))
    return made


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int]]:
    """(parent, rows) of each question that Python answers."""
    found: list[tuple[bytes, int]] = []
    answer = Listener._answer

    async def note(self: Listener, *arguments: object) -> None:
        head = arguments[2]
        assert isinstance(head, MessageHead)
        found.append((HEARD.get(), head.row_count))
        await answer(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Listener, "_answer", note)
    return found


@asynccontextmanager
async def two(abilities: tuple[str, ...] = (peer_records.TRACES,)) -> AsyncIterator[tuple[PeerHost, PeerHost]]:
    async with peer_hosts(2, connections=1, deadline=20.0, abilities=abilities) as (writer, reader):
        writer.neighbourhood.blocks |= {ino: secrets.token_bytes(BLOCK_SIZE) for ino in range(1, 5)}
        reader.neighbourhood.holders |= dict.fromkeys(range(1, 5), 1)
        writer.neighbourhood.lent = LentBlocks()
        writer.neighbourhood.lent.put({number: secrets.token_bytes(BLOCK_SIZE) for number in range(4)})
        reader.neighbourhood.slabs_of = 1
        await reader.until_ready(1)
        await until(lambda: reader.peers.neighbours[1].has_blocks_ready)
        yield writer, reader


async def read_blocks(writer: PeerHost, reader: PeerHost, span: bytes) -> None:
    assert writer.neighbourhood.lent is not None
    memory = np.zeros(4 * BLOCK_SIZE, np.uint8)
    SPAN.set(span)
    found = await reader.peers.read_blocks(writer.neighbourhood.lent.wanted(range(4), memory), 20.0)
    assert found.all()


async def read_granules(writer: PeerHost, reader: PeerHost, span: bytes, *inos: int) -> None:
    SPAN.set(span)
    found, data = await reader.read(*[writer.wanted(ino) for ino in inos])
    assert all(found)
    assert data == [writer.neighbourhood.blocks[ino] for ino in inos]


async def test_questions_for_blocks_name_their_span(noted: list[Noted]) -> None:
    async with two() as (writer, reader):
        await read_blocks(writer, reader, b"")
        for span in (FIRST, SECOND):
            await read_blocks(writer, reader, span.pack())
        await until(lambda: len(noted) == 2)
        assert [one.parent for one in noted] == [FIRST, SECOND]
        for one in noted:
            assert one.name == "peer answer_blocks"
            assert one.facts == {
                "kvfuse.client": f"{2:016x}", "kvfuse.items": 4, "kvfuse.found": 4, "kvfuse.bytes": 4 * BLOCK_SIZE,
            }  # fmt: skip
            assert 0 < one.begin_ns < one.end_ns
        assert noted[0].end_ns <= noted[1].begin_ns


async def test_questions_for_granules_name_their_span(noted: list[Noted], heard: list[tuple[bytes, int]]) -> None:
    async with two() as (writer, reader):
        (connection,) = reader.peers.neighbours[1].connections
        connection._sending.is_busy = True  # so they gather, and go out together
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_granules, writer, reader, b"", 1)
            nursery.start_soon(read_granules, writer, reader, FIRST.pack(), 2, 3)
            nursery.start_soon(read_granules, writer, reader, SECOND.pack(), 4)
        await read_granules(writer, reader, b"", 1, 2)
        assert sorted(heard[:-1]) == sorted([(b"", 1), (FIRST.pack(), 2), (SECOND.pack(), 1)])
        assert heard[-1] == (b"", 2)
    assert noted == []


async def test_hosts_that_do_not_take_spans_are_sent_none(noted: list[Noted], heard: list[tuple[bytes, int]]) -> None:
    async with two(()) as (writer, reader):
        await read_blocks(writer, reader, FIRST.pack())
        await read_granules(writer, reader, FIRST.pack(), 1)
        assert heard == [(b"", 1)]
        assert writer.listener.blocks.take_spans() == b""
    assert noted == []


async def test_a_host_that_makes_no_spans_any_more_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record still says that it takes them."""
    monkeypatch.setattr(TRACES, "is_on", False)
    async with two() as (writer, reader):
        await read_blocks(writer, reader, FIRST.pack())
        await read_granules(writer, reader, FIRST.pack(), 1, 2, 3)
        assert writer.listener.statistics()["malformed"] == 0
        assert writer.listener.blocks.take_spans() == b""


@asynccontextmanager
async def greeted(writer: PeerHost, reader: PeerHost, kind: int) -> AsyncIterator[PeerStream]:
    opened = await trio.open_tcp_stream("127.0.0.1", writer.port)
    stream = PeerStream(socket.socket(fileno=opened.socket.detach()))
    try:
        await greet(stream, reader.neighbourhood.identity._replace(client=70 + kind), 1, kind=kind)
        yield stream
    finally:
        stream.close()


@pytest.mark.parametrize("kind", [GRANULES, BLOCKS])
async def test_spans_of_any_bytes_end_at_most_their_connection(
    noted: list[Noted], rng: random.Random, kind: int
) -> None:
    async with two() as (writer, reader):
        for count in (0, 2, 256, 257, 1 << 31):
            before = writer.listener.statistics()["malformed"]
            async with greeted(writer, reader, kind) as stream:
                head = struct.pack("<IIQQ8x", PARENT_MAGIC, count, 1, 0)
                assert len(head) == HEAD_SIZE
                with suppress(*BROKEN):
                    await stream.send([memoryview(head + bytes(SIZE * min(count, 300)))])
                await until(lambda before=before: writer.listener.statistics()["malformed"] == before + 1)
        async with greeted(writer, reader, kind) as stream:  # many, and no question
            for _ in range(300):
                await stream.send([memoryview(MessageHead(1, 1, 0).pack(PARENT_MAGIC) + rng.randbytes(SIZE))])
        await read_blocks(writer, reader, b"\xff" * SIZE)
        await until(lambda: TRACES.malformed == 1)
        await read_blocks(writer, reader, FIRST.pack())
        await until(lambda: len(noted) == 1)


def test_spans_are_parsed_or_ignored(rng: random.Random) -> None:
    traces = Traces()
    assert traces.parse(FIRST.pack(), "somebody") == FIRST
    assert traces.parse(b"", "somebody") is None
    unsampled = bytearray(FIRST.pack())
    unsampled[24] = 2
    assert traces.parse(bytes(unsampled), "somebody") is None
    assert traces.malformed == 0
    bad = [bytes(SIZE), FIRST.pack() + b"\0", FIRST.pack()[:-1], bytes(16) + FIRST.pack()[16:]]
    bad += [FIRST.pack()[:16] + bytes(8) + FIRST.pack()[24:], FIRST.pack()[:-1] + b"\1"]
    for row in bad:
        assert traces.parse(row, "somebody") is None
    assert traces.malformed == len(bad)
    for _ in range(200):
        traces.parse(rng.randbytes(rng.choice((SIZE, rng.randrange(100)))), "somebody")
