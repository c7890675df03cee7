"""Checks that the names by which the kernel reached an inode still mean it, where other hosts change names, too.

The kernel walks a path name by name. In strict folders a lookup reads the store, except for directories whose name was
known a moment ago (`BELIEF_SECONDS`), and for files whose name this client changed last: memory answers these, and a
watch keeps it current. A directory's name is valid as of its last read from the store. The read for the last name of a
path - or, where memory answered that one, the read by the call itself - reads all names above it, too: a cached name is
checked before it counts.

A lookup of a directory itself ends with cached names. So a host that renames or removes a directory, or changes its
permissions, waits until no host uses the old name unchecked (`outlive_beliefs`). Only a directory's times and link
count may be a moment old.

A check drops a name that means another inode by then, and the call ends with `Moved`: the kernel walks the path once
more (ESTALE) and gets answers of the store. Each name is found wrong once, so a call by descriptor through a directory
that was moved elsewhere is answered at its second attempt at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import trio

from kvfuse import errors
from kvfuse.remote.records.api import Versioned
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

BELIEF_SECONDS = 0.02
"""How long a directory's name is used unchecked after it was known, unless the watch reports a change."""
WAIT_SECONDS = 1.25 * BELIEF_SECONDS
"""Wait after which no host uses the former state: longer, because clocks of hosts differ in rate."""

DEPTH_MAX = 1024
"""Most directories above each other that are checked."""

CONTESTED_SECONDS = 2.0
"""How long lookups of a name that had changed read the store, so that the kernel walks a path twice at most."""
CONTESTED_MAX = 1000
"""most such names"""

Place = tuple[int, bytes]
"""(directory, name)"""

NOWHERE: Place = (0, b"")
"""the place of a directory that was moved to an unknown place"""


class Moved(errors.Stale):
    """A name on the path has another inode than was assumed: the kernel must walk the path again."""


class PathStep(NamedTuple):
    """A name, and the inode that it was assumed to have."""

    parent: int
    name: bytes
    ino: int

    @property
    def key(self) -> bytes:
        return schema.entry_key(self.parent, self.name)


async def outlive_beliefs() -> None:
    """Wait until no host uses a state of a directory's name or mode from before this call."""
    await trio.sleep(WAIT_SECONDS)


class Paths:
    """The names by which the kernel reached inodes. Nothing here waits. ``asked_at``: when a read was sent."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._directories: dict[int, Place] = {}
        """directory that the kernel knows -> name by which the kernel reached it last"""
        self._sure_until: dict[int, float] = {}
        """such a directory -> until when its name is valid unchecked; trio's time"""
        self._doubtful: dict[int, PathStep] = {}
        """any other inode -> cached name by which the kernel reached it: not checked yet"""
        self._warned: Place | None = None
        """the last name whose lookup ended with `Moved`; the same walk may look it up once more"""
        self._contested: dict[Place, float] = {}
        """name that another host changed meanwhile -> until when each lookup of it reads the store"""

    # -- names that the kernel has -------------------------------------------------------------------

    def is_contested(self, parent: int, name: bytes) -> bool:
        """The cached inode of the name was wrong lately."""
        return trio.current_time() < self._contested.get((parent, name), -math.inf)

    def is_sure(self, directory: Node, parent: int, name: bytes) -> bool:
        """The name was known to have the directory less than `BELIEF_SECONDS` ago."""
        if self._directories.get(directory.ino) != (parent, name):
            return False
        return trio.current_time() < self._sure_until.get(directory.ino, -math.inf)

    def note_found(self, node: Node, parent: int, name: bytes, *, asked_at: float | None) -> None:
        """Note that the kernel gets the inode of a name. ``asked_at``: None if that is unchecked."""
        if node.is_directory:
            self._directories[node.ino] = (parent, name)
            if asked_at is not None:
                self._sure_until[node.ino] = asked_at + BELIEF_SECONDS
        elif asked_at is not None:
            self._doubtful.pop(node.ino, None)
        else:
            self._doubtful[node.ino] = PathStep(parent, name, node.ino)

    def note_moved(self, node: Node, parent: int, name: bytes) -> None:
        """Note that the kernel itself renamed the inode."""
        if node.ino in self._directories:
            self._directories[node.ino] = (parent, name)
        elif node.ino in self._doubtful:
            self._doubtful[node.ino] = PathStep(parent, name, node.ino)

    def forget(self, ino: int) -> None:
        """Drop an inode that the kernel does not know any more."""
        self._directories.pop(ino, None)
        self._sure_until.pop(ino, None)
        self._doubtful.pop(ino, None)

    # -- checks --------------------------------------------------------------------------------------

    def find_doubt(self, ino: int) -> PathStep | None:
        """The unchecked name by which the kernel reached an inode that is not a directory; None for none."""
        return self._doubtful.get(ino)

    def settle_doubt(self, doubt: PathStep) -> None:
        """Note that the name was checked. A later unchecked lookup of it needs its own check."""
        if self._doubtful.get(doubt.ino) is doubt:
            del self._doubtful[doubt.ino]

    def list_above(self, directory: int) -> list[PathStep]:
        """The names that lead to a directory, its own first, as far up as they are known."""
        links: list[PathStep] = []
        while directory != ROOT_INODE and len(links) < DEPTH_MAX:
            parent, name = self._find_place(directory)
            if not name:
                break
            links.append(PathStep(parent, name, directory))
            directory = parent
        return links

    def _find_place(self, ino: int) -> Place:
        place = self._directories.get(ino)
        if place is None and (node := self._core.nodes.get(ino)) is not None:
            place = (node.parent, node.name)
        return place or self._core.places.get(ino) or NOWHERE

    def find_versions(self, links: Sequence[PathStep]) -> dict[bytes, int] | None:
        """Key -> version of the records of these names; None: one of them is not known."""
        versions: dict[bytes, int] = {}
        for link in links:
            dentry = self._core.dentries.get(link.parent, link.name)
            if dentry.ino != link.ino or not dentry.version:
                return None
            versions[link.key] = dentry.version
        return versions

    def check(
        self,
        links: Sequence[PathStep],
        rows: Mapping[bytes, Versioned | None],
        asked_at: float,
        remembered: Place | None = None,
    ) -> None:
        """Compare names with the store's rows. Moved: some are wrong, and are dropped.

        ``remembered``: the name that is looked up below them, if the kernel has it in its cache. Any error of the
        lookup that revalidates it makes the kernel drop the name and look it up again: that must end with Moved, too.
        """
        wrong = [link for link in links if not self._is_current(link, rows[link.key])]
        if wrong and remembered is not None and self._warned != remembered:
            self._warned = remembered
        elif wrong:
            self._warned = None
            for link in wrong:
                self.lose_name(link)
        if wrong:
            raise Moved(f"{wrong[-1].name!r} in directory {wrong[-1].parent} is not inode {wrong[-1].ino} any more")
        for link in links:
            if link.ino in self._directories:
                self._sure_until[link.ino] = asked_at + BELIEF_SECONDS

    def lose_name(self, link: PathStep) -> None:
        """Forget a name that has another inode."""
        self._core.dentries.forget(link.parent, link.name)
        if len(self._contested) >= CONTESTED_MAX:
            self._contested.clear()
        self._contested[link.parent, link.name] = trio.current_time() + CONTESTED_SECONDS
        doubt = self._doubtful.pop(link.ino, None)
        if doubt is None and self._find_place(link.ino) == (link.parent, link.name):
            self._directories[link.ino] = NOWHERE

    def _is_current(self, link: PathStep, row: Versioned | None) -> bool:
        if row is None:
            return False
        entry = schema.decode_entry(row.value)
        if isinstance(entry, schema.InodeRecord):
            return entry.ino == link.ino
        if entry == link.ino and self._core.dentries.get(link.parent, link.name).version < row.version:
            self._core.dentries.note(link.parent, link.name, entry, row.version)
        return entry == link.ino
