"""Which namespaces were cleared: files with smaller inode numbers than a bound are there for nobody."""

from __future__ import annotations

from collections.abc import Callable

import trio


def _ignore(number: int, value: bytes | None, version: int) -> None:
    pass


class Cleared(dict[int, int]):
    """Namespace -> its bound, while files below it may be left: these are hidden, and being removed.

    ``Namespaces`` has it. Of a shared volume `eviction.shared_clearing` keeps it.
    """

    def __init__(self) -> None:
        self.swept = trio.Event()
        """set, and made anew, when some of these files were removed"""
        self.versions: dict[int, int] = {}
        """of a shared volume: namespace -> version of its e record, as far as this host has heard"""
        self.bounds: dict[int, int] = {}
        """of a shared volume: namespace -> the bound of its last clear"""
        self.hear: Callable[[int, bytes | None, int], None] = _ignore
        """of a shared volume: somebody has read the e record (value, version) of a namespace"""

    def has_swept(self, number: int | None = None) -> None:
        """Some cleared files were removed. ``number``: all of this namespace's were."""
        if number is not None:
            self.pop(number, None)
        self.swept.set()
        self.swept = trio.Event()
