"""Names whose records a commit is about to delete, together with their inodes: files that are evicted in bulk.

Nobody has such a file open or changes it, and no change of its name is noted. Instead nobody looks at its record any
more: who wants to know what the name means waits until the record is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from kvfuse.errors import EngineTimeout

WAIT_SECONDS = 10.0
"""How long a call waits for the commit that deletes the record of its name."""

Place = tuple[int, bytes]
"""(directory, name)"""


class VanishingNames:
    """The table of names has it. Event loop only."""

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}
        """those whose records a commit is about to delete"""
        self._has_vanished = trio.Event()
        self._noting: list[set[Place]] = []

    def add(self, place: Place) -> None:
        """A commit is about to delete the record of this name."""
        self.places[place] = None
        for noted in self._noting:
            noted.add(place)

    @contextmanager
    def noting(self) -> Iterator[set[Place]]:
        """While records are read: the set of names that began to vanish meanwhile."""
        noted = set[Place]()
        self._noting.append(noted)
        try:
            yield noted
        finally:
            self._noting = [one for one in self._noting if one is not noted]

    def remove(self, places: list[Place]) -> None:
        """A commit deleted these."""
        for place in places:
            del self.places[place]
        self._has_vanished.set()
        self._has_vanished = trio.Event()

    async def wait_for(self, place: Place) -> None:
        """Return when the name does not vanish (any more). EngineTimeout, where the store does not delete it."""
        deadline = trio.current_time() + WAIT_SECONDS
        while place in self.places:
            with trio.move_on_at(deadline) as scope:
                await self._has_vanished.wait()
            if scope.cancelled_caught:
                raise EngineTimeout(f"{place[1]!r} is being removed, and the record store does not answer")
