"""The way of a block stays short: no change makes it longer than it is."""

from __future__ import annotations

import tomllib

import trio.testing
from places import TESTS
from trips import Trip, shared_trips, table, trips

MOST = {name: Trip(*most) for name, most in tomllib.loads((TESTS / "budgets.toml").read_text())["trips"].items()}
SHARED = {name for name in MOST if "shared" in name or "peer" in name}


async def test_no_trip_has_become_longer() -> None:
    check(await trips(), MOST.keys() - SHARED)


async def test_no_trip_of_two_hosts_has_become_longer(autojump_clock: trio.testing.MockClock) -> None:
    check(await shared_trips(), SHARED)


def check(found: dict[str, Trip], names: set[str]) -> None:
    print(table(found))
    assert found.keys() == names
    for name, trip in found.items():
        assert all(count <= most for count, most in zip(trip, MOST[name], strict=True)), (name, trip)
