"""What outlives a daemon: named things - some bytes, some descriptors - that another process keeps for it.

The *holder* (`holder.main`) keeps the kernel's connection of a mount while daemons come and go. Whatever else the next
daemon is to find it gives there, too: descriptors of shared memory, sockets, locks, numbers. Large or changing content
belongs into shared memory, whose descriptor is kept once; a thing itself is replaced as a whole, and small.

A daemon that was killed has told what it told: what `Keeper.keep` returned from is kept, in the order of the calls.
Everything is for the event loop's thread, and waits for nobody.

Names are paths, and say whose a thing is: ``fuse/...`` the mount's, ``tier/...`` the shared-memory tier's,
``member`` that of the client of a shared volume, ``ring/...`` those of clients of rings.

The next daemon may be of another version. So each thing whose format may change says which one it has, and one of
another format is dropped, or replaced; a name has one meaning for ever. What has a name that this version does not know
is dropped before anything is served (`drop_unknown`): after one more upgrade, a version that knows it would else take
it for what this one left.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

CONTENT_SIZE_MAX = 64 << 10
"""bytes of one thing"""
DESCRIPTORS_MAX = 16
"""of one thing"""
KNOWN = (
    "config", "fuse/answers", "fuse/connection", "fuse/control", "fuse/device", "fuse/handles", "fuse/places",
    "fuse/switch", "fuse/unsaved", "lock", "member", "ring/", "tier/alive", "tier/arena/", "tier/numbers",
    "tier/volume", "volume/commits-fail", "volume/doubt", "volume/failed", "volume/given", "volume/unstored",
)  # fmt: skip
"""all names; with a slash at the end: beginnings of names"""

log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """A thing that a daemon before this one left."""

    content: bytes
    descriptors: tuple[int, ...]
    """the caller's own, to be closed by it"""


class Keeper(Protocol):
    """Keeps things for the next daemon. The same names again replace what was kept under them."""

    outlives: bool
    """there is somebody who keeps things"""
    deaths: Mapping[str, int]
    """of daemons before this one, by cause"""

    def list_names(self, prefix: str) -> list[str]:
        """Of things that the daemon before this one left, and that were neither dropped nor replaced; oldest first."""
        ...

    def take(self, name: str) -> Kept | None:
        """What the daemon before this one left: once, with new descriptors. It goes on to be kept until it is dropped
        or replaced. None: there is nothing."""
        ...

    def keep(self, name: str, content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Keep this for the next daemon. The descriptors are duplicated, and stay the caller's.

        ValueError for more than ``CONTENT_SIZE_MAX`` bytes or ``DESCRIPTORS_MAX`` descriptors.
        """
        ...

    def drop(self, name: str) -> None:
        """Nobody is to find this. Unknown names are ignored."""
        ...

    def seal(self) -> None:
        """The next daemon goes on with all that is kept: from now on nothing is dropped any more, whatever ends."""
        ...


class NoKeeper:
    """`Keeper` of a daemon that nothing outlives."""

    outlives = False
    deaths: Mapping[str, int] = {}

    def list_names(self, prefix: str) -> list[str]:
        return []

    def take(self, name: str) -> Kept | None:
        return None

    def keep(self, name: str, content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        pass

    def drop(self, name: str) -> None:
        pass

    def seal(self) -> None:
        pass


NO_KEEPER = NoKeeper()


class MemoryKeeper:
    """`Keeper` within one process, for a volume that is closed and opened again there: tests, and tools.

    What it keeps goes with it.
    """

    outlives = True
    deaths: Mapping[str, int] = {}

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}
        self._is_sealed = False
        weakref.finalize(self, _close_all, self._kept)

    def list_names(self, prefix: str) -> list[str]:
        return [name for name in self._kept if name.startswith(prefix)]

    def take(self, name: str) -> Kept | None:
        kept = self._kept.get(name)
        return None if kept is None else Kept(kept.content, tuple(map(os.dup, kept.descriptors)))

    def keep(self, name: str, content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        check_sizes(content, descriptors)
        copies = tuple(map(os.dup, descriptors))
        self._close(name)
        self._kept[name] = Kept(content, copies)

    def drop(self, name: str) -> None:
        if not self._is_sealed:
            self._close(name)

    def seal(self) -> None:
        self._is_sealed = True

    def unseal(self) -> None:
        """The next daemon begins."""
        self._is_sealed = False

    def _close(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        for descriptor in kept.descriptors if kept else ():
            os.close(descriptor)


def _close_all(kept: dict[str, Kept]) -> None:
    for thing in kept.values():
        for descriptor in thing.descriptors:
            os.close(descriptor)


def drop_unknown(keeper: Keeper) -> None:
    """Nobody is to find what this version does not know."""
    for name in keeper.list_names(""):
        if name not in KNOWN and not name.startswith(tuple(known for known in KNOWN if known.endswith("/"))):
            log.warning("%s, which another version kept, is dropped", name)
            keeper.drop(name)


def check_sizes(content: bytes, descriptors: Sequence[int]) -> None:
    """ValueError for a thing that is too large."""
    if len(content) > CONTENT_SIZE_MAX or len(descriptors) > DESCRIPTORS_MAX:
        raise ValueError(f"a kept thing of {len(content)} bytes and {len(descriptors)} descriptors is too large")
