"""The table of places where the kernel found inodes last, from one daemon to the next."""

from __future__ import annotations

import pytest

from kvfuse.fs.recent import COUNT, RecentPlaces
from kvfuse.kept.keeper import MemoryKeeper

pytestmark = pytest.mark.ring(1)


def test_the_last_places_are_found_by_the_next_daemon() -> None:
    keeper = MemoryKeeper()
    table = RecentPlaces(keeper)
    assert table.before == {}
    for number in range(COUNT + 10):
        table.add_place(100 + number, 1, b"name-%d" % number)
    table.add_place(100 + COUNT, 2, b"x" * 255)
    table.close()
    for _ in range(2):
        table = RecentPlaces(keeper)
        assert len(table.before) == COUNT - 1
        assert 100 + 10 not in table.before
        assert table.before[100 + 11] == (1, b"name-11")
        assert table.before[100 + COUNT] == (2, b"x" * 255)
        table.close()
    table = RecentPlaces(keeper)
    table.add_place(5, 6, b"new")
    table.close()
    table = RecentPlaces(keeper)
    assert table.before[5] == (6, b"new")
    assert 100 + 11 not in table.before
    assert 100 + 12 in table.before
    table.close()
