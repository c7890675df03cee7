"""What of a volume's memory goes from one daemon of a mount to the next: files that are open, and what is not stored.

A daemon that was killed leaves clients with files open. The next one finds them in `Handover.still_open`: their inodes
count as open from the moment they are in memory, removed ones are not freed, and each is found by the place that it was
last known at. A door then makes the handles again, one by one, as somebody asks for them.

For the daemon after this one a volume says where its files go, and which have content that a crash would lose.
`Handover` itself keeps none of that: nothing outlives the daemon. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from typing import Any

import trio

Place = tuple[int, bytes]
"""(directory, name)"""
PLACES_MAX = 4
"""that a file is looked for at"""


class OpenBefore:
    """A file that was open when the daemon before this one ended."""

    __slots__ = ("handles", "is_new", "places", "writers")

    def __init__(self) -> None:
        self.handles = 0
        """of the former daemon, that nobody has asked for yet"""
        self.writers = 0
        """of them, those for writing"""
        self.places: list[Place] = []
        """where it may be, the likeliest first; none has one with a record of its own"""
        self.is_new = True
        """it was not stored, as far as that daemon knew: where it is at none of its places, it is at no other"""


class Handover:
    """Of a daemon that nothing outlives; `fs.handover` has that of one with a keeper."""

    outlives = False
    """there is somebody to tell"""

    def __init__(self) -> None:
        self.still_open: dict[int, OpenBefore] = {}
        """inode -> what is known of it"""
        self.lost: set[int] = set()
        """inodes with content that was not stored when that daemon ended"""
        self.ring_files: dict[str, Any] = {}
        """`ring_files.KeptFile` by their names, which nobody has taken over yet"""
        self.movers: set[Callable[[int, int, bytes], None]] = set()
        """told of each `renamed`"""
        self.is_left = False
        """the end of this daemon is not that of its clients: it stores everything, and leaves it as it is"""
        self.searched: set[int] = set()
        """directories whose names were searched for files that other hosts moved, since the watch began"""
        self.searching = trio.Lock()
        self.known_below = 0
        """the kernel may know inodes below this number of a daemon before this one"""

    @property
    def is_first(self) -> bool:
        """No former daemon left open files."""
        return True

    # -- from the daemon before ----------------------------------------------------------------------

    def gives_from(self, number: int) -> None:
        """This daemon, which nobody shares the volume with, gives new inodes numbers from here on."""
        self.known_below = min(self.known_below, number)

    def was_open(self, ino: int, places: Iterable[Place], *, writable: bool, is_new: bool = False) -> None:
        """A handle of the daemon before this one. Before the volume is opened."""
        before = self.still_open.setdefault(ino, OpenBefore())
        before.handles += 1
        before.writers += writable
        before.is_new &= is_new
        before.places += [place for place in places if place not in before.places]

    def is_at(self, ino: int, parent: int, name: bytes) -> None:
        """Another host has put a file there, which may be one of these."""
        before = self.still_open.get(ino)
        if before is not None and (parent, name) not in before.places[:1]:
            before.places = [(parent, name), *before.places][:PLACES_MAX]

    def place_before(self, ino: int) -> Place | None:
        """Where the daemon before this one found an inode not long ago; the store says whether it is there."""
        return None

    def took(self, ino: int, *, writable: bool) -> None:
        """One of these handles was made again, or will never be."""
        before = self.still_open[ino]
        before.handles -= 1
        before.writers -= writable
        if not before.handles:
            del self.still_open[ino]

    def leave(self) -> None:
        """All is for the next daemon."""
        self.is_left = True

    def miss(self, inos: Collection[int]) -> None:
        """What that daemon answered for of these files may be lost: whoever has one open for writing hears so once.
        Before a door takes files over."""
        self.lost.update(inos)

    # -- for the daemon after ------------------------------------------------------------------------

    def looked_up(self, ino: int, parent: int, name: bytes) -> None:
        """An inode is at a place, and the kernel is about to hear that."""

    def renamed(self, ino: int, parent: int, name: bytes) -> None:
        """A file that the kernel knows is under this name now."""
        self.moved(ino, parent, name)
        for told in self.movers:
            told(ino, parent, name)

    def moved(self, ino: int, parent: int, name: bytes) -> None:
        """A file, which may be open, is under this name now. Often it was before, too."""

    def stored(self, ino: int) -> None:
        """A file that was new is in the store: other hosts may rename it from now on."""

    def unsaved(self, ino: int) -> None:
        """From now on the file has content, or a size, that a crash would lose: the next daemon does not find it."""

    def saved(self, ino: int) -> None:
        """The file is stored as it is, or there is nobody any more who could miss something."""


DECIDED: ContextVar[Callable[[int, int], None] | None] = ContextVar("decided", default=None)
"""Called by whoever changes names, with the inode that a change is about and the one that it removes (0: none), right
before it may happen: so a task learns it of its own change, and what is told twice holds as it was told last."""
