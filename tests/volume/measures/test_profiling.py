"""The profile: off it counts nothing, it ends by itself, and its memory is bounded."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from kvfuse.native import fusewire
from kvfuse.volume.measures.profiling import (
    CLASSES,
    COUNTED,
    HOLD_SECONDS,
    ROWS_MAX,
    Profile,
    RequestCounter,
    class_bounds,
)


class Counted:
    """In C's place: says what it was turned to, and has rows."""

    def __init__(self) -> None:
        self.turns: list[bool] = []
        self.rows = np.zeros(0, COUNTED)

    def take(self) -> bytes:
        taken, self.rows = self.rows.tobytes(), np.zeros(0, COUNTED)
        return taken


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
async def profile(counted: Counted, autojump_clock: trio.testing.MockClock) -> AsyncIterator[Profile]:
    made = Profile(trio.current_time)
    made.counter = RequestCounter(counted.turns.append, counted.take)
    made.name_of = lambda place: f"/{place // 1000}"
    yield made
    made.end()


def rows(profile: Profile) -> list[dict[str, Any]]:
    listed = profile.listing(None)
    assert listed is not None
    return list(listed["rows"])


async def test_it_counts_while_somebody_looks_and_ends_by_itself(profile: Profile, counted: Counted) -> None:
    profile.note(1, 1000, "ring get", None, calls=1)
    assert rows(profile) == []
    for _ in range(10):
        profile.note(1, 1000, "ring get", None, calls=2, size=5)
        await trio.sleep(HOLD_SECONDS - 0.1)
        rows(profile)
    (row,) = rows(profile)
    assert (row["pid"], row["namespace"], row["operation"], row["calls"], row["bytes"]) == (1, "/1", "ring get", 20, 50)
    assert counted.turns == [True]
    await trio.sleep(HOLD_SECONDS + 1)
    assert not profile.is_on
    assert counted.turns == [True, False]
    profile.note(1, 1000, "ring get", None, calls=1)
    assert rows(profile) == []


async def test_users_see_nothing_of_others(profile: Profile) -> None:
    assert profile.listing(1000) is None
    assert not profile.is_on


async def test_times_and_places_of_one_namespace_are_added(profile: Profile) -> None:
    rows(profile)
    profile.note(7, 1001, "ring put", np.array([1e-6, 2e-3]), calls=2, size=10)
    profile.note(7, 1002, "ring put", np.array([2e-3]), calls=1, misses=1, failed=1, size=1)
    (row,) = rows(profile)
    assert (row["calls"], row["misses"], row["failed"], row["bytes"]) == (3, 1, 1, 11)
    assert row["seconds"] == pytest.approx(4.001e-3)
    assert sorted(filter(None, row["times"])) == [1, 2]
    (number,) = [number for number, count in enumerate(row["times"]) if count == 2]
    low, high = class_bounds(number)
    assert low <= 2e6 < high


async def test_what_c_counted_is_added(profile: Profile, counted: Counted) -> None:
    rows(profile)
    for _ in range(2):
        counted.rows = np.zeros(3, COUNTED)
        counted.rows["pid"], counted.rows["calls"] = 99_999_999, 1
        counted.rows["op"], counted.rows["place"] = [15, 16, 0], [2000, 2001, 0]
        counted.rows["bytes"], counted.rows["ns"] = [100, 7, 0], 1000
        counted.rows["times"][:, 20] = 1
        found = {(row["operation"], row["namespace"]): row for row in rows(profile)}
    assert found.keys() == {("read", "/2"), ("write", "/2"), ("others", "")}
    assert found["read", "/2"]["bytes"] == 200
    assert found["write", "/2"]["times"][20] == 2


async def test_memory_is_bounded_whatever_is_called(profile: Profile, rng: random.Random) -> None:
    rows(profile)
    total = 0
    for _ in range(3):
        for number in range(3 * ROWS_MAX):
            profile.note(rng.randrange(1 << 20), number * 1000, "ring get", None, calls=1)
            total += 1
        found = rows(profile)
        assert len(found) <= ROWS_MAX + 1
        assert sum(row["calls"] for row in found) == total
    assert any(row["operation"] == "others" for row in found)


async def test_classes_hold_the_times_that_are_in_them(profile: Profile, rng: random.Random) -> None:
    rows(profile)
    for _ in range(300):
        seconds = 2 ** rng.uniform(-29, 2)
        before = rows(profile)
        profile.note(1, 1000, "ring get", np.array([seconds]), calls=1)
        (row,) = rows(profile)
        old = before[0]["times"] if before else [0] * CLASSES
        (number,) = [number for number in range(CLASSES) if row["times"][number] != old[number]]
        low, high = class_bounds(number)
        assert low <= seconds * 1e9 < high or number == CLASSES - 1


@pytest.mark.skipif(not fusewire.is_there, reason="needs the module of C")
def test_c_counts_by_process_place_and_kind_and_forgets_what_was_taken() -> None:
    fusewire.profile_requests(True)
    try:
        fusewire.take_profile()
        block = 1 << 62 | 3 << 52
        for inode in (5, 5, block | 1, block | 2):
            fusewire.end_profiled((11, 15, inode, 100, 1), False)
        fusewire.end_profiled((11, 15, 5, 100, 1), True)
        fusewire.end_profiled((11, 15, 5, 100, 0), False)  # nobody looked when it began
        taken = np.frombuffer(fusewire.take_profile(), COUNTED)
        found = {int(row["place"]): row for row in taken}
        assert found.keys() == {5, block}
        assert (found[5]["calls"], found[5]["failed"], found[5]["bytes"]) == (3, 1, 200)
        assert (found[block]["calls"], found[block]["pid"], found[block]["op"]) == (2, 11, 15)
        assert found[5]["times"].sum() == 3
        assert fusewire.take_profile() == b""
        for inode in range(3 * ROWS_MAX):
            fusewire.end_profiled((inode, 15, inode, 1, 1), False)
        taken = np.frombuffer(fusewire.take_profile(), COUNTED)
        assert len(taken) <= ROWS_MAX
        assert taken["calls"].sum() == 3 * ROWS_MAX
    finally:
        fusewire.profile_requests(False)
    fusewire.end_profiled((1, 15, 5, 100, 1), False)
    assert fusewire.take_profile() == b""
