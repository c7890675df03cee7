"""Blocks of a host's memory, read by another over TCP, without volumes: threads answer and receive."""

from __future__ import annotations

import random
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
import trio
import trio.testing
from lent_blocks import LentBlocks
from msgspec.structs import replace
from peer_hosts import PeerHost, peer_hosts, until

from kvfuse.native._peers import Spread
from kvfuse.peer import service as service_module
from kvfuse.peer.greeting import BLOCKS, greet, welcome
from kvfuse.peer.peer_wire import (
    BLOCK_ANSWER,
    BLOCK_ANSWER_MAGIC,
    BLOCK_QUESTION,
    BLOCK_QUESTION_MAGIC,
    HEAD_SIZE,
    ROWS_MAX,
    MessageHead,
    Rows,
    parse_head,
    plain,
)
from kvfuse.peer.stream import BROKEN, PeerStream
from kvfuse.volume.store.peer_records import PeerRecord
from kvfuse.volume.views.neighbours import Answer, Wanted, WantedBlocks

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 4095, 4096, 4097, 300_000, MIB, 4 * MIB)
OLD = 0xA5
"""what memory had before"""


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads have until their deadline: a busy machine is no slow host."""
    monkeypatch.setattr(service_module, "LATE_MIN", 20.0)


class Reads:
    """Of one host: blocks of another one into memory."""

    def __init__(self, writer: PeerHost, reader: PeerHost, content: dict[int, bytes]) -> None:
        self.writer, self.reader, self.content = writer, reader, content
        self.memory = np.full(sum(map(len, content.values())) + MIB, OLD, np.uint8)

    @property
    def lent(self) -> LentBlocks:
        assert self.writer.neighbourhood.lent is not None
        return self.writer.neighbourhood.lent

    def wanted(self, numbers: Sequence[int]) -> WantedBlocks:
        return self.lent.wanted(numbers, self.memory)

    async def read(self, wanted: WantedBlocks) -> list[bool]:
        return list((await self.reader.peers.read_blocks(wanted, 20.0)).tolist())

    async def all_come(self, numbers: Sequence[int] | None = None) -> bool:
        numbers = list(self.content) if numbers is None else numbers
        self.memory[:] = OLD
        assert all(await self.read(self.wanted(numbers)))
        data = b"".join([self.content[number] for number in numbers])
        assert self.memory[: len(data)].tobytes() == data
        assert (self.memory[len(data) :] == OLD).all()
        return True

    async def until_ready(self) -> None:
        neighbours = self.reader.peers.neighbours
        await until(lambda: (one := neighbours.get(1)) is not None and one.has_blocks_ready)


@asynccontextmanager
async def two(
    sizes: Sequence[int] = SIZES, lent: LentBlocks | None = None, through: Callable[[int], str] = "127.0.0.1:{}".format,
    **options: float,
) -> AsyncIterator[Reads]:  # fmt: skip
    async with peer_hosts(2, through, **{"connections": 1, "deadline": 20.0, **options}) as (writer, reader):
        content = {number: secrets.token_bytes(size) for number, size in enumerate(sizes)}
        writer.neighbourhood.lent = lent or LentBlocks()
        writer.neighbourhood.lent.put(content)
        reader.neighbourhood.slabs_of = 1
        reads = Reads(writer, reader, content)
        await reads.until_ready()
        yield reads


# -- what comes ---------------------------------------------------------------------------------------


async def test_blocks_of_all_sizes_come_to_where_they_belong(rng: random.Random) -> None:
    async with two() as reads:
        assert await reads.all_come()
        for _ in range(20):
            assert await reads.all_come(rng.sample(list(reads.content), 3))
        served = reads.writer.listener.statistics()
        assert served["questions"] == 21
        assert (served["here"], served["malformed"]) == (len(SIZES) + 60, 0)
        await until(lambda: (reads.lent.pins(), reads.writer.listener.load) == (0, 0))


@pytest.mark.parametrize("connections", [1, 3])
async def test_many_blocks_are_several_questions(connections: int) -> None:
    async with two([4 * KIB] * 1000 + [MIB] * 40, connections=connections) as reads:
        assert await reads.all_come()
        assert reads.writer.listener.statistics()["questions"] >= 1040 // ROWS_MAX


async def test_what_is_not_here_is_said_of_that_block_alone() -> None:
    async with two() as reads:
        wanted = reads.wanted([0, 1, 2, 3, 4])
        reads.lent.drop(1)
        reads.lent.put({3: b"another one"})
        wanted.addresses[2] += 4096
        wanted.lengths[4] -= 1
        assert await reads.read(wanted) == [True, False, False, False, False]
        assert reads.reader.peers.counters.absent == 4
        assert await reads.all_come([0, 2, 4, 5, 6])


async def test_other_bytes_than_were_wanted_are_found_out() -> None:
    async with two() as reads:
        wanted = reads.wanted([3, 4, 5])
        wanted.checksums[1] ^= 1
        assert await reads.read(wanted) == [True, False, True]
        assert reads.reader.peers.counters.wrong == 1


async def test_where_no_arena_may_be_pinned_for_long_blocks_are_copied() -> None:
    async with two(lent=LentBlocks(arenas_lent=0)) as reads:
        assert await reads.all_come()


async def test_a_host_has_a_bounded_number_of_bytes_on_their_way() -> None:
    async with two([2 * MIB] * 4, in_flight=MIB) as reads:
        assert await reads.read(reads.wanted([0, 1])) == [False, False]
        assert reads.reader.peers.counters.busy == 2
        await until(lambda: reads.lent.pins() == 0)


async def test_what_is_not_in_memory_is_asked_of_the_disk() -> None:
    async with two() as reads:
        writer, content = reads.writer, dict(reads.content)
        wanted = reads.wanted([1, 4, 5])
        reads.lent.drop(4)
        asked: list[Wanted] = []

        async def stored(wanted: Wanted) -> memoryview:
            asked.append(wanted)
            return memoryview(content[4])

        writer.neighbourhood.has_disk, writer.neighbourhood.stored = True, stored  # type: ignore[method-assign]
        writer.listener.renew()
        assert await reads.read(wanted) == [True, True, True]
        assert [(one.addr, one.generation, one.high) for one in asked] == [
            (int(wanted.addresses[1]), int(wanted.generations[1]), len(content[4]))
        ]
        data = b"".join([content[number] for number in (1, 4, 5)])
        assert reads.memory[: len(data)].tobytes() == data


async def test_after_another_membership_blocks_of_the_new_one_are_sent() -> None:
    async with two() as reads:
        assert await reads.all_come()
        former, new = reads.lent, LentBlocks()
        new.put({0: b"new"})
        reads.writer.neighbourhood.lent = new
        wanted = former.wanted([0], reads.memory)
        reads.writer.listener.renew()
        neighbour = reads.reader.peers.neighbours[1]
        await until(lambda: not neighbour.block_connections)
        await reads.until_ready()
        assert await reads.read(wanted) == [False]
        reads.content = {0: b"new"}
        assert await reads.all_come()


async def test_who_asks_for_what_is_on_its_way_gets_it_when_it_is_there() -> None:
    """It waits, for a moment; what is there comes before that."""
    async with two([MIB, 300_000]) as reads:
        writer = LentBlocks(first=12)
        writer.put({7: secrets.token_bytes(MIB)})
        landing, _, (place,) = reads.lent.reserve_foreign(writer, [7])
        wanted = writer.wanted([7], reads.memory[400_000:])
        own = reads.wanted([1])
        both = WantedBlocks(*[np.concatenate(pair) for pair in zip(own, wanted, strict=True)])
        results: list[list[bool]] = []
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                results.append(await reads.read(both))

            nursery.start_soon(read)
            await until(lambda: reads.memory[:300_000].tobytes() == reads.content[1])
            assert not results
            place[:] = writer.content(7)
            landed = np.zeros(1, np.int64)
            landing.land(np.ones(1, np.uint8), landed)
            assert landed.tolist() == [1]
        assert results == [[True, True]]
        assert await reads.read(both) == [True, True]


async def test_what_never_comes_is_waited_for_only_a_moment() -> None:
    async with two() as reads:
        writer = LentBlocks(first=12)
        writer.put({7: secrets.token_bytes(MIB)})
        landing, *_ = reads.lent.reserve_foreign(writer, [7])
        assert await reads.read(writer.wanted([7], reads.memory)) == [False]
        assert reads.reader.peers.counters.absent == 1
        del landing


# -- who asks, and is no reader of ours ---------------------------------------------------------------


@asynccontextmanager
async def caller(reads: Reads) -> AsyncIterator[PeerStream]:
    opened = await trio.open_tcp_stream("127.0.0.1", reads.writer.port)
    stream = PeerStream(socket.socket(fileno=opened.socket.detach()))
    try:
        await greet(stream, reads.reader.neighbourhood.identity._replace(client=60), 1, kind=BLOCKS)
        yield stream
    finally:
        stream.close()


def question_of(wanted: WantedBlocks) -> Rows:
    rows = np.zeros(len(wanted.lengths), BLOCK_QUESTION)
    rows["address"], rows["generation"], rows["length"] = wanted.addresses, wanted.generations, wanted.lengths
    return rows


def packed(rows: Rows, number: int = 1, count: int | None = None) -> bytes:
    count = len(rows) if count is None else count
    return MessageHead(count, number, 0).pack(BLOCK_QUESTION_MAGIC) + rows.tobytes()


async def test_questions_of_any_bytes_end_at_most_their_connection(rng: random.Random) -> None:
    async with two() as reads:
        good = question_of(reads.wanted([0, 1, 2, 3, 4]))
        for _ in range(100):
            rows = good.copy()
            for _ in range(rng.randrange(4)):
                name = rng.choice(list(BLOCK_QUESTION.names or ()))
                value = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8), struct.pack("<Q", 1 << 31)))
                rows[name][rng.randrange(len(rows))] = np.frombuffer(value, BLOCK_QUESTION[name], 1)[0]
            message = packed(rows, count=rng.choice((None, None, 0, ROWS_MAX + 1, 1 << 31, 4)))
            message = rng.choice((message, message[: rng.randrange(len(message))], rng.randbytes(rng.randint(1, 400))))
            async with caller(reads) as stream:
                with suppress(*BROKEN):
                    for _ in range(3):
                        await stream.send([memoryview(message)])
        listener = reads.writer.listener
        await until(lambda: bool(listener.statistics() and not listener._callers[60]))
        assert listener.statistics()["malformed"] > 5
        await until(lambda: (reads.lent.pins(), listener.load) == (0, 0))
        assert await reads.all_come()


async def test_a_reader_that_takes_nothing_is_given_up_and_what_it_had_is_given_back() -> None:
    async with two([4 * MIB] * 8) as reads:
        reads.writer.listener.blocks.set_patience(0.1)
        async with caller(reads) as stream:
            await stream.send([memoryview(packed(question_of(reads.wanted(list(reads.content)))))])
            await until(lambda: reads.lent.pins() > 0)
            await until(lambda: reads.writer.listener.statistics()["given_up"] == 1)
        await until(lambda: (reads.lent.pins(), reads.writer.listener.load) == (0, 0))
        assert await reads.all_come()


async def test_a_slow_reader_keeps_nobody_else_waiting() -> None:
    async with two([4 * MIB] * 8) as reads, caller(reads) as stream:
        await stream.send([memoryview(packed(question_of(reads.wanted(list(reads.content)))))])
        await until(lambda: reads.lent.pins() > 0)
        assert await reads.all_come()


# -- who answers, and lies ----------------------------------------------------------------------------

Lie = Callable[[PeerStream, MessageHead, Rows], Awaitable[None]]


@asynccontextmanager
async def liar(reads: Reads, lie: Lie) -> AsyncIterator[None]:
    """The reader's questions go to a host that is no better than that."""
    accepting = socket.create_server(("127.0.0.1", 0))
    own = reads.writer.neighbourhood.identity

    async def serve(stream: PeerStream) -> None:
        try:
            with suppress(*BROKEN):
                await welcome(stream, own)
                while True:  # of those for granules there is none
                    head = parse_head(memoryview(await stream.receive(HEAD_SIZE)), BLOCK_QUESTION_MAGIC)
                    rows = np.frombuffer(await stream.receive(head.row_count * BLOCK_QUESTION.itemsize), BLOCK_QUESTION)
                    await lie(stream, head, rows)
        finally:
            stream.close()

    async with trio.open_nursery() as nursery:

        async def accept() -> None:
            with trio.socket.from_stdlib_socket(accepting) as listening:
                while True:
                    opened, _ = await listening.accept()
                    nursery.start_soon(serve, PeerStream(socket.socket(fileno=opened.detach())))

        nursery.start_soon(accept)
        former = reads.reader.neighbourhood.places[1]
        reads.reader.neighbourhood.places[1] = PeerRecord((f"127.0.0.1:{accepting.getsockname()[1]}",))
        await _moved(reads)
        yield
        reads.reader.neighbourhood.places[1] = former
        await _moved(reads)
        nursery.cancel_scope.cancel()


async def _moved(reads: Reads) -> None:
    """The reader has heard that the writer is somewhere else."""
    former = reads.reader.peers.neighbours[1]
    reads.reader.neighbourhood.change()
    await until(lambda: reads.reader.peers.neighbours.get(1) not in (former, None))
    await reads.until_ready()


def answers(head: MessageHead, rows: Rows, *, answer: int = Answer.HERE) -> tuple[MessageHead, Rows]:
    found = np.zeros(len(rows), BLOCK_ANSWER)
    found["answer"], found["row"] = answer, np.arange(len(rows))
    return MessageHead(len(rows), head.number, 0), found


async def send(stream: PeerStream, head: MessageHead, rows: Rows, data: bytes = b"") -> None:
    await stream.send([memoryview(head.pack(BLOCK_ANSWER_MAGIC)), plain(rows), memoryview(data)])


async def other_bytes(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    await send(stream, *answers(head, rows), bytes(int(rows["length"].sum())))


async def unknown_answer(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    await send(stream, *answers(head, rows, answer=99))


async def no_answer(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    await send(stream, *answers(head, rows, answer=0))


async def another_number(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    own, found = answers(head, rows, answer=Answer.ABSENT)
    await send(stream, own._replace(number=head.number + 1), found)


async def another_row(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    own, found = answers(head, rows, answer=Answer.ABSENT)
    found["row"][-1] = len(rows)
    await send(stream, own, found)


async def a_row_twice(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    own, found = answers(head, rows)
    found["row"] = 0
    await send(stream, own, found, bytes(64))


async def a_row_again(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    own, found = answers(head, rows[:1], answer=Answer.ABSENT)
    await send(stream, own, found)
    await send(stream, own, found)


async def endless_rows(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    own, found = answers(head, rows)
    await send(stream, own._replace(row_count=1 << 31), found)


async def no_message(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    await stream.send([memoryview(b"HTTP/1.1 400 Bad Request" * 99)])


async def too_much(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    await send(stream, *answers(head, rows), bytes(int(rows["length"].sum()) + 9 * MIB))


async def named_itself(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    own, found = answers(head, rows, answer=Answer.ELSEWHERE)
    found["named"] = (1, 1, 1)
    await send(stream, own, found)


async def named_nobody(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
    own, found = answers(head, rows, answer=Answer.ELSEWHERE)
    found["named"] = (1 << 63, 77, 2)
    await send(stream, own, found)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (other_bytes, "wrong"), (too_much, "wrong"), (unknown_answer, "lost"), (no_answer, "lost"),
        (another_number, "lost"), (another_row, "lost"), (a_row_twice, "lost"), (a_row_again, "lost"),
        (endless_rows, "lost"), (no_message, "lost"), (named_itself, "named"), (named_nobody, "named"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)  # fmt: skip
async def test_a_lie_is_a_miss_with_a_reason(lie: Lie, reason: str) -> None:
    async with two() as reads:
        async with liar(reads, lie):
            assert await reads.read(reads.wanted([3, 4, 5])) == [False] * 3
            assert getattr(reads.reader.peers.counters, reason) >= 1, reads.reader.peers.counters
        assert await reads.all_come()


async def test_answers_of_any_bytes_are_misses(rng: random.Random) -> None:
    async with two() as reads:
        data = b"".join([reads.content[number] for number in (1, 2, 4)])

        async def lie(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
            own, found = answers(head, rows)
            message = bytearray(own.pack(BLOCK_ANSWER_MAGIC) + found.tobytes() + data)
            for _ in range(rng.randint(1, 8)):
                message[rng.randrange(min(len(message), rng.choice((32, 128, 1 << 30))))] = rng.randrange(256)
            if rng.randrange(3) == 0:
                del message[rng.randrange(len(message)) :]
            await stream.send([memoryview(message)])
            if rng.randrange(3) == 0:
                stream.close()

        reads.reader.peers.options = replace(reads.reader.peers.options, deadline=0.2)
        async with liar(reads, lie):
            for _ in range(40):
                wanted = reads.wanted([1, 2, 4])
                results, starts = await reads.read(wanted), (0, 4095, 8191)
                for is_right, start, length in zip(results, starts, wanted.lengths.tolist(), strict=True):
                    assert (
                        not is_right or reads.memory[start : start + length].tobytes() == data[start : start + length]
                    )
        reads.reader.peers.options = replace(reads.reader.peers.options, deadline=20.0)
        await reads.until_ready()
        assert await reads.all_come()


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["late", "cancelled"])
async def test_memory_of_a_read_that_is_over_is_not_touched_again(*, is_cancelled: bool) -> None:
    async with two([4 * MIB, 300_000]) as reads:
        may_go_on, has_sent = trio.Event(), trio.Event()

        async def half(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
            data = reads.content[0] + reads.content[1]
            own, found = answers(head, rows)
            await send(stream, own, found, data[: 2 * MIB])
            await may_go_on.wait()
            await stream.send([memoryview(data[2 * MIB :])])
            has_sent.set()

        async with liar(reads, half):
            peers = reads.reader.peers
            if not is_cancelled:
                peers.options = replace(peers.options, deadline=0.5)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:

                    async def cancel() -> None:
                        await until(lambda: bool((reads.memory[:MIB] != OLD).any()))
                        if is_cancelled:
                            scope.cancel()

                    nursery.start_soon(cancel)
                    assert await reads.read(reads.wanted([0, 1])) == [False, False]
            assert scope.cancelled_caught == is_cancelled
            assert is_cancelled or peers.counters.late >= 1, (
                "of an asking host, so the other one may have been cut, too"
            )
            reads.memory[:] = OLD
            connection = peers.neighbours[1].block_connections[0]
            may_go_on.set()
            await has_sent.wait()
            await until(lambda: connection._reader.facts()[0] == 0)
            assert (reads.memory == OLD).all()
        peers.options = replace(peers.options, deadline=20.0)
        assert await reads.all_come()


async def test_what_came_before_a_read_was_given_up_is_known_to_be_there() -> None:
    """A block that a thread has shown is not read anew: its memory is others' to read, and to use again, by then."""
    async with two([300_000, 300_000]) as reads:
        own, peers = LentBlocks(first=12), reads.reader.peers
        landing, places, _ = own.reserve_foreign(reads.lent, [0, 1])
        late_from = [trio.current_time()]

        def keep_the_loop_until_it_is_late() -> None:
            while not own.is_resident(0) or trio.current_time() < late_from[0]:
                time.sleep(0.001)

        async def first_alone(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
            await send(stream, *answers(head, rows), reads.content[0] + bytes(1))
            keep_the_loop_until_it_is_late()

        async with liar(reads, first_alone):
            peers.options = replace(peers.options, deadline=0.3)
            late_from[0] = trio.current_time() + 0.4
            wanted = reads.wanted([0, 1])._replace(targets=places)
            found = await peers.read_blocks(wanted, 20.0, landing, np.arange(2, dtype=np.uint32))
            assert found.tolist() == [True, False]
            results = np.zeros(2, np.int64)
            landing.land(np.zeros(2, np.uint8), results)
            assert results.tolist() == [1, 0]
            assert own.content(0).tobytes() == reads.content[0]


async def test_a_connection_on_which_nothing_comes_is_made_anew() -> None:
    async def silence(stream: PeerStream, head: MessageHead, rows: Rows) -> None:
        await trio.sleep_forever()

    async with two(deadline=0.3) as reads, liar(reads, silence):
        neighbour = reads.reader.peers.neighbours[1]
        first = neighbour.block_connections[0]
        assert await reads.read(reads.wanted([1])) == [False]
        assert reads.reader.peers.counters.late == 1
        await until(lambda: first not in neighbour.block_connections and bool(neighbour.block_connections))


# -- who is sent elsewhere ----------------------------------------------------------------------------


def spread_of(*clients: int) -> Spread:
    spread = Spread()
    spread.set_clients(np.array(clients, np.uint64))
    return spread


def test_a_host_sends_a_block_twice_and_so_does_each_that_got_it() -> None:
    spread = spread_of(*range(1, 17))
    sent = [spread.choose(4096, 1, caller, True, False) for caller in range(1, 15)]
    assert [one[:1] for one in sent] == [[], [], *[[client] for client in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)]]
    assert spread.choose(4096, 2, 9, True, False) == [], "another block"


def test_who_is_busy_is_not_chosen() -> None:
    spread = spread_of(1, 2, 3)
    assert [spread.choose(1, 1, caller, True, False) for caller in (1, 2)] == [[], []]
    spread.tell_load(1, 64 << 20)
    assert spread.choose(1, 1, 3, True, False) == [2, 1]
    spread.tell_load(2, 64 << 20)
    assert spread.choose(1, 1, 3, True, False) == []


def test_only_who_can_be_asked_and_has_it_is_named() -> None:
    spread = spread_of(1, 2)
    assert [spread.choose(1, 1, caller, True, False) for caller in (1, 2, 7)] == [[], [], [1, 2]]
    assert spread.choose(1, 1, 1, True, False) == [2]
    spread.forget(1, 1, 2)
    assert spread.choose(1, 1, 8, True, False) == [1]
    assert spread.choose(1, 1, 8, True, True) == []
    assert spread.choose(1, 1, 8, False, False) == [1], "it has it no more, and knows who has"
    spread.set_clients(np.zeros(0, np.uint64))
    assert spread.choose(1, 1, 8, False, False) == []
