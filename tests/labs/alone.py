"""Tests run side by side in several processes (pytest -n), but some have the machine to themselves (mark ``alone``)."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Of all processes that name the same folder. Whoever waits to be alone is next: nobody else begins before."""

    def __init__(self, folder: Path) -> None:
        self._door = (folder / "door").open("w")
        self._room = (folder / "room").open("w")

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Within it no test runs that is to be ``alone``, and no other at all if this one is."""
        try:
            fcntl.flock(self._door, fcntl.LOCK_EX)
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            if not alone:
                fcntl.flock(self._door, fcntl.LOCK_UN)
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)
            fcntl.flock(self._door, fcntl.LOCK_UN)

    def close(self) -> None:
        self._door.close()
        self._room.close()
