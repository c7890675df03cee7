"""The ring's memory: layout, queues, bells, and two processes that talk through it."""

from __future__ import annotations

import fcntl
import os
import random
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvfuse.keys import file_name, file_names, key_of
from kvfuse.usrbio.client.key_area import Spans
from kvfuse.usrbio.client.tickets import Tickets
from kvfuse.usrbio.protocol.queues import Bell, Queue, RingMemory
from kvfuse.usrbio.protocol.wire import (
    CQE,
    HEADER,
    PAGE,
    SQE,
    SQE_STRUCT,
    Layout,
    Message,
    Word,
    pack_keys,
    unpack_keys,
)

PATIENCE_S = 30.0
ENTRIES = 8


@pytest.fixture
def ring() -> Iterator[tuple[RingMemory, RingMemory, int]]:
    """(one side, the other side, descriptor) of a small ring, through two mappings."""
    memory, descriptor = RingMemory.create(Layout.of(ENTRIES, PAGE))
    try:
        yield memory, RingMemory.attach(descriptor), descriptor
    finally:
        os.close(descriptor)


# -- layout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [1, 2, 256, 1 << 16])
def test_the_parts_of_a_ring_do_not_overlap(entries: int) -> None:
    layout = Layout.of(entries, 5000)
    assert max(Word) * 8 + 8 <= layout.sq_offset
    assert layout.sq_offset + entries * SQE.itemsize == layout.cq_offset
    assert layout.cq_offset + entries * CQE.itemsize <= layout.aux_offset
    assert layout.aux_offset + 5000 <= layout.size
    assert layout.sq_offset % 64 == layout.cq_offset % 32 == layout.aux_offset % PAGE == layout.size % PAGE == 0
    of_daemon = {word for word in Word if word.name.startswith("DAEMON_")}  # written once, before anybody looks
    lines = [word * 8 // 64 for word in Word if word not in of_daemon] + [Word.DAEMON_EPOCH * 8 // 64]
    assert len(set(lines)) == len(lines), "words of two writers share a cache line"
    assert Layout.parse(layout.header()) == layout


@pytest.mark.parametrize(("entries", "aux_size"), [(0, 0), (3, 0), (1 << 17, 0), (8, -1), (8, 65 << 20)])
def test_a_layout_that_cannot_be_is_refused(entries: int, aux_size: int) -> None:
    with pytest.raises(ValueError):
        Layout.of(entries, aux_size)


def test_a_changed_header_is_not_taken(ring: tuple[RingMemory, RingMemory, int]) -> None:
    memory, other, descriptor = ring
    whole = bytes(memory.bytes[: HEADER.size])
    for position in range(HEADER.size):
        assert memory.header_is_whole()
        memory.bytes[position] ^= 0x41
        assert not other.header_is_whole()
        with pytest.raises(ValueError):
            RingMemory.attach(descriptor)
        memory.bytes[position] ^= 0x41
    assert bytes(other.bytes[: HEADER.size]) == whole


def test_the_size_of_a_ring_cannot_be_changed(ring: tuple[RingMemory, RingMemory, int]) -> None:
    descriptor = ring[2]
    for size in (0, ring[0].layout.size + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL


def test_one_entry_packed_alone_is_a_row_of_the_queue(ring: tuple[RingMemory, RingMemory, int]) -> None:
    memory, other, _ = ring
    values = tuple(range(1, 14))
    SQE_STRUCT.pack_into(memory.bytes.data, memory.layout.sq_offset, *values)
    memory.sq.publish(1)
    assert other.sq.read(1)[0].item() == values


# -- queues -----------------------------------------------------------------------------------------


def test_a_queue_gives_what_was_put_in_order(ring: tuple[RingMemory, RingMemory, int], rng: random.Random) -> None:
    producer, consumer = ring[0].sq, ring[1].sq
    model: deque[int] = deque()
    number = unpublished = 0
    for _ in range(3000):
        action = rng.choice(["write", "publish", "take"])
        if action == "write":
            count = rng.randint(0, ENTRIES - (producer.position + unpublished - producer.taken))
            rows = np.zeros(count, SQE)
            rows["user_data"] = range(number, number + count)
            producer.write(rows, unpublished)
            number, unpublished = number + count, unpublished + count
        elif action == "publish":
            model.extend(range(number - unpublished, number))
            producer.publish(unpublished)
            unpublished = 0
        else:
            given = consumer.given - consumer.position
            assert given == len(model)
            count = rng.randint(0, given)
            rows = consumer.read(count)
            consumer.take(count)
            assert rows["user_data"].tolist() == [model.popleft() for _ in range(count)]
    assert number > 10 * ENTRIES, "the queue never wrapped"


def test_what_was_read_is_a_copy(ring: tuple[RingMemory, RingMemory, int]) -> None:
    rows = np.zeros(ENTRIES, SQE)
    rows["user_data"] = 7
    ring[0].sq.write(rows)
    ring[0].sq.publish(ENTRIES)
    read = ring[1].sq.read(ENTRIES)
    ring[0].bytes[ring[0].layout.sq_offset : ring[0].layout.cq_offset] = 0xFF
    assert read["user_data"].tolist() == [7] * ENTRIES


# -- bells ------------------------------------------------------------------------------------------


@pytest.fixture
def bell(ring: tuple[RingMemory, RingMemory, int]) -> Iterator[tuple[Bell, Bell]]:
    """(the sleeper's, the other side's)."""
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        yield tuple(Bell(memory.words, Word.DAEMON_SLEEPS, descriptor) for memory in ring[:2])
    finally:
        os.close(descriptor)


def is_rung(bell: Bell) -> bool:
    return bool(select.select([bell.descriptor], [], [], 0)[0])


def test_a_bell_is_rung_only_for_a_sleeper(bell: tuple[Bell, Bell], ring: tuple[RingMemory, RingMemory, int]) -> None:
    sleeper, other = bell
    ring[0].sq.publish(1)
    other.ring()
    assert not is_rung(sleeper)
    sleeper.going_to_sleep()
    other.ring()
    other.ring()
    assert is_rung(sleeper)
    sleeper.woken()
    assert not is_rung(sleeper)
    other.ring()
    assert not is_rung(sleeper)


def test_a_bell_is_rung_for_what_is_worth_it(bell: tuple[Bell, Bell], ring: tuple[RingMemory, RingMemory, int]) -> None:
    sleeper, other = bell
    sleeper.going_to_sleep(until=3)
    for published, rung in ((1, False), (1, False), (1, True), (5, True)):
        ring[0].sq.publish(published)
        other.ring()
        assert is_rung(sleeper) == rung


def test_a_bell_that_is_full_does_not_block(bell: tuple[Bell, Bell], ring: tuple[RingMemory, RingMemory, int]) -> None:
    sleeper, other = bell
    ring[0].sq.publish(1)
    sleeper.going_to_sleep()
    os.eventfd_write(sleeper.descriptor, (1 << 64) - 2)
    other.ring()
    assert is_rung(sleeper)


# -- two processes ----------------------------------------------------------------------------------


def echo(ring_descriptor: int, own_bell: int, client_bell: int, total: int) -> None:
    """The other process: answer ``total`` entries with their own numbers, asleep whenever there is nothing."""
    memory = RingMemory.attach(ring_descriptor)
    own = Bell(memory.words, Word.DAEMON_SLEEPS, own_bell)
    client = Bell(memory.words, Word.CLIENT_SLEEPS, client_bell)
    done = 0
    while done < total:
        given = sleep_until_given(memory.sq, own)
        rows = memory.sq.read(given)
        memory.sq.take(given)
        answers = np.zeros(given, CQE)
        answers["user_data"] = rows["user_data"]
        answers["result"] = rows["offset"] ^ rows["length"]
        memory.cq.write(answers)
        memory.cq.publish(given)
        client.ring()
        done += given


def sleep_until_given(queue: Queue, bell: Bell) -> int:
    """How many entries there are, at least one. TimeoutError after `PATIENCE_S`: a wakening was lost."""
    while True:
        given = queue.given - queue.position
        if given:
            return given
        bell.going_to_sleep()
        if queue.given == queue.position and not select.select([bell.descriptor], [], [], PATIENCE_S)[0]:
            raise TimeoutError("nobody rang the bell")
        bell.woken()


def test_two_processes_lose_nothing_and_no_wakening(rng: random.Random) -> None:
    total = 20_000
    memory, descriptor = RingMemory.create(Layout.of(ENTRIES, 0))
    bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
    words = [sys.executable, __file__, *map(str, (descriptor, *bells, total))]
    peer = subprocess.Popen(words, pass_fds=(descriptor, *bells))
    try:
        peer_bell = Bell(memory.words, Word.DAEMON_SLEEPS, bells[0])
        own = Bell(memory.words, Word.CLIENT_SLEEPS, bells[1])
        sent = received = 0
        expected: dict[int, int] = {}
        while received < total:
            count = rng.randint(0, min(total - sent, ENTRIES - (sent - received)))
            rows = np.zeros(count, SQE)
            rows["user_data"] = np.arange(sent, sent + count)
            rows["offset"] = [rng.randrange(1 << 40) for _ in range(count)]
            rows["length"] = [rng.randrange(1 << 40) for _ in range(count)]
            expected |= zip(rows["user_data"].tolist(), (rows["offset"] ^ rows["length"]).tolist(), strict=True)
            memory.sq.write(rows)
            memory.sq.publish(count)
            peer_bell.ring()
            sent += count
            if sent == received:
                continue
            given = sleep_until_given(memory.cq, own)
            answers = memory.cq.read(given)
            memory.cq.take(given)
            assert answers["user_data"].tolist() == list(range(received, received + given))
            for number, result in zip(answers["user_data"].tolist(), answers["result"].tolist(), strict=True):
                assert result == expected.pop(number)
            received += given
        assert peer.wait(PATIENCE_S) == 0
    finally:
        peer.kill()
        peer.wait()
        for opened in (descriptor, *bells):
            os.close(opened)


# -- what the client keeps of entries under way -----------------------------------------------------


def test_tickets_are_unique_and_give_the_callers_numbers_back(rng: random.Random) -> None:
    tickets = Tickets(16)
    busy: dict[int, int] = {}
    for _ in range(2000):
        count = rng.randint(0, 6)
        if rng.random() < 0.5 and tickets.free >= max(count, 1):
            numbers = [rng.randrange(1 << 64) for _ in range(count)]
            many = np.array(numbers, np.uint64)
            taken = [tickets.take(numbers[0])] if count == 1 else tickets.take_many(count, many).tolist()
            assert not busy.keys() & set(taken)
            busy |= zip(taken, numbers, strict=True)
        elif busy:
            chosen = rng.sample(sorted(busy), min(max(count, 1), len(busy)))
            if len(chosen) == 1 and rng.random() < 0.5:
                assert tickets.give_back_one(chosen[0]) == busy.pop(chosen[0])
                continue
            given_back, numbers = tickets.give_back(np.array(chosen, np.uint64))
            assert given_back.tolist() == chosen
            assert numbers.tolist() == [busy.pop(ticket) for ticket in chosen]
        assert tickets.free == 16 - len(busy)


@pytest.mark.parametrize("numbers", [[3], [16], [1 << 63], [0, 0]])
def test_a_ticket_that_is_not_taken_or_comes_twice_is_refused(numbers: list[int]) -> None:
    tickets = Tickets(16)
    tickets.take_many(16, 0)
    tickets.give_back(np.array([3], np.uint64))
    with pytest.raises(ValueError):
        tickets.give_back(np.array(numbers, np.uint64))
    if len(numbers) == 1:
        with pytest.raises(ValueError):
            tickets.give_back_one(numbers[0])


def test_the_oldest_of_equal_numbers_is_found() -> None:
    tickets = Tickets(4)
    first, second = tickets.take(9), tickets.take(9)
    assert tickets.find(9) == first
    tickets.give_back(np.array([first], np.uint64))
    assert tickets.take(9) == first
    assert tickets.find(9) == second
    assert tickets.find(8) is None


def test_spans_never_overlap_and_come_back_whole(rng: random.Random) -> None:
    spans = Spans(64, 4096)
    taken: dict[int, int] = {}
    for _ in range(3000):
        if rng.random() < 0.55:
            size = rng.randint(0, 600)
            offset = spans.take(size)
            if offset is None:
                continue
            assert offset >= 64
            assert offset + size <= 64 + 4096
            assert all(
                offset + max(size, 1) <= start or start + max(length, 1) <= offset for start, length in taken.items()
            )
            taken[offset] = size
        elif taken:
            chosen = rng.choice(sorted(taken))
            spans.give_back(chosen)
            del taken[chosen]
    for offset in taken:
        spans.give_back(offset)
    assert spans.take(4096) == 64


# -- keys and messages ------------------------------------------------------------------------------


def test_keys_have_names_and_names_have_keys(rng: random.Random) -> None:
    keys = [
        b"a",
        b".",
        b"..",
        b"...",
        b"%",
        b"%41",
        b"a/b",
        b"a\0",
        b"/",
        b"x" * 255,
        b"/" * 127,
        b"/" * 128,
        b"\xff\xfe",
    ]
    keys += [rng.randbytes(rng.randint(1, 255)) for _ in range(500)]
    keys += [bytes(rng.choices(b"%/.a4", k=rng.randint(1, 6))) for _ in range(500)]
    names = {file_name(key): key for key in keys}
    assert len(names) == len(set(keys)), "two keys share a name"
    for name, key in names.items():
        assert 1 <= len(name) <= 255
        assert not {b"/", b"\0"} & {name[i : i + 1] for i in range(len(name))}
        assert name not in (b".", b"..")
        assert key_of(name) == (None if name.startswith(b"%~") else key)
    assert file_names(keys) == [file_name(key) for key in keys]


@pytest.mark.parametrize("name", [b"%61", b"%2F", b"%2", b"% 2f", b"%~00", b"%zz", b""])
def test_names_that_no_key_has(name: bytes) -> None:
    assert key_of(name) is None


def test_a_namespace_holds_these_names(tmp_path: Path) -> None:
    for key in (b"%", b".", b"..", b"/etc/passwd", b"\0", b"/" * 200, b"y" * 255):
        (tmp_path / os.fsdecode(file_name(key))).touch()
    assert len(list(tmp_path.iterdir())) == 7


@pytest.mark.parametrize("key", [b"", b"x" * 256])
def test_keys_of_a_wrong_size(key: bytes) -> None:
    with pytest.raises(ValueError):
        file_name(key)
    with pytest.raises(ValueError):
        pack_keys([b"a", key])


def test_packed_keys_come_back(rng: random.Random) -> None:
    keys = [rng.randbytes(rng.randint(1, 255)) for _ in range(100)]
    packed = pack_keys(keys)
    assert unpack_keys(packed, 100) == keys
    for broken, count in ((packed[:-1], 100), (packed + b"x", 100), (packed, 99), (packed, 101), (b"\0\0", 1)):
        with pytest.raises(ValueError):
            unpack_keys(broken, count)


def test_messages_come_back_and_others_are_refused() -> None:
    message = Message(4, 17, -13, (1, 2, 3, 4, 5, 1 << 63), "why")
    assert Message.unpack(message.pack()) == message
    assert Message.unpack(Message(4, 17, text="of \udcff").pack()).text == "of ?", "a name that is no text"
    for broken in (b"", message.pack()[:63], message.pack() + bytes(2000)):
        with pytest.raises(ValueError):
            Message.unpack(broken)


if __name__ == "__main__":
    echo(*map(int, sys.argv[1:]))
