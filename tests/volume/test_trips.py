"""The way of a block stays short: no change makes it longer than it is."""

from __future__ import annotations

from trips import Trip, table, trips

MOST = {
    "store": Trip(224, 166, 34, 154),
    "open, read, close": Trip(32, 28, 10, 21),
    "ring GET": Trip(43, 41, 10, 22),
    "ring PUT": Trip(80, 70, 29, 55),
}
"""these only fall; a busy machine may add some calls to a store, and trio chooses which task goes first"""


async def test_no_trip_has_become_longer() -> None:
    found = await trips()
    print(table(found))
    for name, trip in found.items():
        assert all(count <= most for count, most in zip(trip, MOST[name], strict=True)), (name, trip)
