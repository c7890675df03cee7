"""Defines the keeper: another process keeps named entries - bytes and descriptors - of a daemon for the next one.

The *holder* (`holder.main`) keeps the kernel's connection of a mount while daemons end and start. A daemon leaves there
whatever else the next one needs: descriptors of shared memory, sockets, locks, numbers. Large or changing content
belongs into shared memory, whose descriptor is kept once; an entry itself is small, and replaced as a whole.

A kill loses no entry: once `Keeper.keep` has returned, the entry is kept, in the order of the calls. Event loop's
thread only; no method waits.

Names are paths that begin with the owner: ``fuse/...`` the mount's, ``tier/...`` the shared-memory tier's,
``member`` that of the client of a shared volume, ``ring/...`` those of clients of rings.

The next daemon may be of another version. So each entry whose format may change contains its format's number, and a
daemon drops or replaces entries of other formats; a name has one meaning for ever. Before it serves, a daemon drops
entries whose names its version does not know (`drop_unknown`): after one more upgrade, a version that knows the name
would else take the stale entry for this daemon's.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

CONTENT_SIZE_MAX = 64 << 10
"""bytes of one entry"""
DESCRIPTORS_MAX = 16
"""descriptors of one entry"""
KNOWN = (
    "blocks/arena/", "blocks/drafts", "blocks/sketches", "blocks/slabs", "blocks/table/", "config",
    "fuse/answers", "fuse/answers-in-c",
    "fuse/connection", "fuse/control", "fuse/device", "fuse/handles", "fuse/handles-in-c", "fuse/places",
    "fuse/switch", "fuse/unsaved", "lock", "member", "memory/folders",
    "ring/", "tier/alive", "tier/arena/", "tier/numbers", "tier/volume", "volume/commits-fail",
    "volume/doubt", "volume/failed", "volume/given", "volume/unstored",
)  # fmt: skip
"""all names; with a slash at the end: beginnings of names"""

log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """An entry of a former daemon."""

    content: bytes
    descriptors: tuple[int, ...]
    """the caller owns and closes them"""


Binder = Callable[[socket.socket, Path, bytes], None]
"""binds a socket by a name in a folder of the mount. MountError. It waits: never in the event loop's thread"""


class Keeper(Protocol):
    """Keeps entries for the next daemon. A second entry of the same name replaces the first."""

    outlives: bool
    """entries outlive this daemon"""
    is_apart: bool
    """the keeper made the mount, in a container of its own, and the mount outlives all daemons of this container: this
    process never unmounts it"""
    deaths: Mapping[str, int]
    """cause -> deaths of former daemons"""

    @property
    def binder(self) -> Binder | None:
        """Binds sockets for this process, which may have no right to. None: this process does that itself."""
        ...

    def list_names(self, prefix: str) -> list[str]:
        """Names of the former daemon's entries that were neither dropped nor replaced; oldest first."""
        ...

    def take(self, name: str) -> Kept | None:
        """Take the former daemon's entry: once, with new descriptors. The keeper retains it until it is dropped or
        replaced. None: no such entry."""
        ...

    def keep(self, name: str, content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Keep an entry for the next daemon. The descriptors are duplicated, and stay the caller's.

        ValueError for more than ``CONTENT_SIZE_MAX`` bytes or ``DESCRIPTORS_MAX`` descriptors.
        """
        ...

    def drop(self, name: str) -> None:
        """Drop an entry. Unknown names are ignored."""
        ...

    def seal(self) -> None:
        """Ignore each later `drop`, whatever ends: the next daemon continues with all entries."""
        ...


class NoKeeper:
    """`Keeper` of a daemon whose state nothing outlives: it keeps no entries."""

    outlives = is_apart = False
    binder: Binder | None = None
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

    Its entries end with it.
    """

    outlives = True
    is_apart = False
    binder: Binder | None = None
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
        """Allow `drop` again: the next daemon begins."""
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
    """Drop entries whose names this version does not know."""
    for name in keeper.list_names(""):
        if name not in KNOWN and not name.startswith(tuple(known for known in KNOWN if known.endswith("/"))):
            log.warning("%s, which another version kept, is dropped", name)
            keeper.drop(name)


def check_sizes(content: bytes, descriptors: Sequence[int]) -> None:
    """ValueError for an entry that is too large."""
    if len(content) > CONTENT_SIZE_MAX or len(descriptors) > DESCRIPTORS_MAX:
        raise ValueError(f"a kept entry of {len(content)} bytes and {len(descriptors)} descriptors is too large")
