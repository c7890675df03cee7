"""Tells of the blocks of a folder: first all present names, then each change. Doors send what it tells."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, cast

from kvfuse import errors
from kvfuse.access.namespace_access import NamespaceAccess
from kvfuse.access.namespace_handle import NamespaceHandle
from kvfuse.volume.api import RingApi
from kvfuse.volume.views.news import NameEvent, PackedNames, Row, Watch


class FollowedKind(Enum):
    """What is told of names."""

    PRESENT = auto()
    READY = auto()
    """all names that are present were told"""
    STORED = auto()
    REMOVED = auto()
    CLEARED = auto()


KINDS = {
    NameEvent.STORED: FollowedKind.STORED,
    NameEvent.REMOVED: FollowedKind.REMOVED,
    NameEvent.CLEARED: FollowedKind.CLEARED,
}


class FollowedNames(NamedTuple):
    """Something happened to some names; ``packed``: as in `PackedNames`, in the place of ``names``."""

    kind: FollowedKind
    names: Sequence[bytes] = ()
    packed: PackedNames | None = None


@dataclass
class BlockFollower:
    """Who follows the blocks of a directory. ``namespace``: a handle that nobody else uses."""

    volume: RingApi
    admission: NamespaceAccess
    namespace: NamespaceHandle

    async def check(self) -> None:
        """PermissionDenied unless the peer may list the directory; InvalidArgument: its blocks are files; Stale."""
        directory = await self.admission.read_directory(self.namespace)
        if self.namespace.is_absent:
            raise errors.Stale(f"inode {self.namespace.ino} was removed")
        if not self.admission.may_access(self.namespace, directory, 5):
            raise errors.PermissionDenied("the mode of the directory does not allow the client's user to list it")
        if await self.volume.blocks.block_namespace(directory.ino) is None:
            raise errors.InvalidArgument("the directory is in no namespace of kind blocks: only these are followed")

    async def tell_present(self, watch: Watch, names_max: int) -> AsyncGenerator[FollowedNames, None]:
        """All names that are there, of up to so many at once, and what changes meanwhile. The errors of `check`."""
        after, is_last = 0, False
        while not is_last:
            names, after = await self.volume.blocks.listing(self.namespace.ino, after, names_max)
            is_last = not after
            await self.check()
            for start in range(0, len(names), names_max):
                yield FollowedNames(FollowedKind.PRESENT, names[start : start + names_max])
            for told in take_changes(watch, names_max):  # changes while the page was read, and before
                yield told
        yield FollowedNames(FollowedKind.READY)


def take_changes(watch: Watch, names_max: int) -> Iterator[FollowedNames]:
    """What has changed since the last call. `BlockFollower.check` comes before."""
    for (change, is_packed), group in itertools.groupby(watch.take(), key=lambda row: (row[0], len(row) > 2)):
        if is_packed:
            for packed in cast(Iterable[PackedNames], group):
                yield FollowedNames(KINDS[change], packed=packed)
            continue
        names = [name for _, name in cast(Iterable[Row], group) if name]
        for start in range(0, max(1, len(names)), names_max):
            yield FollowedNames(KINDS[change], names[start : start + names_max])
