"""The way of a block stays short: no change makes it longer than it is."""

from __future__ import annotations

from trips import Trip, table, trips

MOST = {
    "store": Trip(256, 184, 41, 188),
    "open, read, close": Trip(34, 30, 11, 24),
    "ring GET": Trip(43, 41, 12, 25),
    "ring PUT": Trip(85, 75, 33, 60),
}
"""These fall. Once they rose, by one file each for rings, with what outlives a daemon: the journal of what is under
way, and rows of arenas. A busy machine may add some calls to a store, and trio chooses which task goes first."""


async def test_no_trip_has_become_longer() -> None:
    found = await trips()
    print(table(found))
    for name, trip in found.items():
        assert all(count <= most for count, most in zip(trip, MOST[name], strict=True)), (name, trip)
