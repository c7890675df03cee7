"""The journal of a ring: whichever instruction a daemon was killed at, each entry is completed once."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from killed_lines import Killed, killed_at

from kvfuse.usrbio.daemon import call, ring_journal
from kvfuse.usrbio.daemon.call import Completion, Completions
from kvfuse.usrbio.daemon.ring_journal import NO_PLACE, RingJournal
from kvfuse.usrbio.protocol import queues
from kvfuse.usrbio.protocol.queues import RingMemory
from kvfuse.usrbio.protocol.wire import SQE, SQE_STRUCT, Layout

ENTRIES = 16
KILLS = 300
"""daemons of one test"""
LINES = 120
"""that a step of a daemon has, about"""
FILES = {module.__file__ for module in (call, ring_journal, queues)}


class Client:
    """Submits numbered entries, and sees each completed once."""

    def __init__(self, descriptor: int, rng: random.Random) -> None:
        self.memory = RingMemory.attach(descriptor)
        self.rng = rng
        self.number = 0
        self.open: Counter[int] = Counter()
        """numbers of entries without a completion; a number may be that of several"""
        self.pins: list[int] = []

    def submit(self, count: int) -> None:
        rows = np.zeros(count, SQE)
        for row in range(count):
            self.number += self.rng.random() < 0.8
            rows["user_data"][row] = self.number
            self.open[self.number] += 1
        self.memory.sq.write(rows)
        self.memory.sq.publish(count)

    def reap(self, count: int) -> None:
        cq = self.memory.cq
        count = min(cq.given - cq.position, count)
        for row in cq.read(count):
            assert self.open[int(row["user_data"])] > 0, "completed twice"
            self.open[int(row["user_data"])] -= 1
            assert row["result"] == row["user_data"]
            if row["pin"]:
                self.pins.append(int(row["pin"]))
        cq.take(count)
        assert 0 <= cq.given - cq.position <= ENTRIES

    @property
    def room(self) -> int:
        return ENTRIES - self.open.total()


class Daemon:
    """Takes and completes as the thread of a ring does, until it is killed. ``held``: pins, in memory that stays."""

    def __init__(self, descriptors: list[int], held: set[int], rng: random.Random) -> None:
        memory_descriptor, journal_descriptor, bell = descriptors
        self.memory = RingMemory.attach(memory_descriptor)
        self.completions = Completions(
            self.memory, bell, held.discard, RingJournal(journal_descriptor, self.memory.layout.entries)
        )
        self.held = held
        self.rng = rng
        self.under_way: dict[int, int] = {}
        """place -> the client's number"""

    def go_on(self) -> None:
        rows, times = self.completions.restore()
        assert (times > 0).all()
        for place in rows["user_data"].tolist():
            self.under_way[place] = self.completions._journal.get_user_data(place)

    def _pin(self, place: int | None) -> int:
        if self.rng.random() < 0.5:
            return 0
        pin = self.rng.randrange(1, 1 << 30)
        self.completions.note_pin(place, pin)
        self.held.add(pin)
        return pin

    def take(self) -> None:
        sq = self.memory.sq
        count = min(
            sq.given - sq.position, ENTRIES - sum(self.completions.count_claims()), self.rng.choice([1, 1, 3, 9])
        )
        if count <= 0:
            return
        packed = sq.read_packed(count)
        numbers = sq.unpacked(packed)["user_data"].tolist()
        if count == 1 and self.rng.random() < 0.5:
            pin = self._pin(None)
            self.completions.take_lone(numbers[0], Completion(numbers[0], pin=pin, arena=bool(pin)))
            return
        self.completions.take(packed, time.monotonic())
        places = [SQE_STRUCT.unpack_from(packed, row * 64)[10] for row in range(count)]
        self.under_way.update(zip(places, numbers, strict=True))

    def complete(self) -> None:
        places = list(self.under_way)
        self.rng.shuffle(places)
        places = places[: self.rng.randrange(len(places) + 1)]
        if self.rng.random() < 0.5:
            self.completions.post(places, [self.under_way[place] for place in places])
        elif places:
            answers = [(place, Completion(self.under_way[place], pin=self._pin(place))) for place in places]
            self.completions.publish(answers)
        for place in places:
            del self.under_way[place]


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    memory, descriptor = RingMemory.create(Layout.of(ENTRIES, 0))
    own, journal_descriptor = RingJournal.create(ENTRIES)
    opened = [descriptor, journal_descriptor, os.eventfd(0, os.EFD_NONBLOCK)]
    del memory, own
    yield opened
    for number in opened:
        os.close(number)


def test_each_entry_is_completed_once_whenever_daemons_are_killed(descriptors: list[int], rng: random.Random) -> None:
    client, held, kills = Client(descriptors[0], rng), set[int](), 0
    daemon = Daemon(descriptors, held, rng)
    while kills < KILLS:
        client.submit(rng.randrange(client.room + 1))
        try:
            with killed_at(rng.randrange(1, LINES), FILES):
                daemon.take()
                daemon.complete()
        except Killed:
            kills += 1
            daemon = go_on(descriptors, held, rng)
        client.reap(rng.randrange(ENTRIES))
    while client.open.total():
        daemon.take()
        daemon.complete()
        client.reap(ENTRIES)
    assert client.number > KILLS
    assert not daemon.under_way
    assert sorted(held) == sorted(client.pins), "a pin is the client's, or was given back"


def go_on(descriptors: list[int], held: set[int], rng: random.Random) -> Daemon:
    """The next daemon, or one after that: some are killed while they begin."""
    while True:
        daemon = Daemon(descriptors, held, rng)
        try:
            with killed_at(rng.randrange(1, LINES), FILES):
                daemon.go_on()
        except Killed:
            continue
        return daemon


def test_the_oldest_entry_of_a_number_is_found(descriptors: list[int]) -> None:
    journal_ = RingJournal(descriptors[1], ENTRIES)
    rows = np.zeros(6, SQE)
    rows["user_data"] = [7, 8, 7, 9, 7, 1]
    packed = bytearray(rows.tobytes())
    journal_.enter_entries(packed, 1.0, 0)
    places = np.frombuffer(packed, SQE)["user_data"].tolist()
    assert journal_.find(7, places[5]) == places[0]
    journal_.finish_one(places[0], 6, 1)
    assert journal_.find(7, places[5]) == places[2]
    assert journal_.find(7, places[2]) == NO_PLACE, "what comes later is not what a cancel means"
    assert journal_.find(5, places[5]) == NO_PLACE


def test_answers_that_were_begun_are_known_to_the_next_daemon(descriptors: list[int], rng: random.Random) -> None:
    client = Client(descriptors[0], rng)
    client.submit(4)
    for turn in range(3):
        daemon = Daemon(descriptors, set(), rng)
        daemon.go_on()
        journal_ = daemon.completions._journal
        if not turn:
            daemon.completions.take(daemon.memory.sq.read_packed(4), 1.0)
            journal_.mark_begun(1)
            journal_.mark_begun(3)
            journal_.set_pin(3, 77)
        assert [journal_.has_begun(place) for place in range(4)] == [False, True, False, False]
        rows = journal_.read_state().rows
        assert sorted(rows["user_data"].tolist()) == [0, 1, 2, 3]
    daemon.completions.publish([(1, Completion(1))])
    assert not journal_.has_begun(1)
