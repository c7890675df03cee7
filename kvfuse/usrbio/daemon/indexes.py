"""Indexes of resident blocks that one connection has mapped (`volume/views/resident`)."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from kvfuse import errors
from kvfuse.usrbio.daemon.admission import Admission
from kvfuse.usrbio.daemon.registry import Namespace
from kvfuse.volume.api import RingApi
from kvfuse.volume.views.resident import Touches
from kvfuse.volume.views.tier import ReadClass

INDEXES_MAX = 64
"""of one connection"""


@dataclass
class Indexes:
    """Of one connection. Event loop only."""

    volume: RingApi
    admission: Admission
    nursery: trio.Nursery
    _opened: dict[ReadClass, Touches] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peer = self.admission.peer

    async def open(self, namespace: Namespace, number: int) -> tuple[tuple[int, ...], list[int]]:
        """(size), and descriptors of an index and of the page for touches of it.

        ``number`` 0: that of the blocks that this client puts; from 1 on those of other owners and modes. NotFound:
        there are no more. PermissionDenied: the client may not find out every name. NotSupported: somebody has to
        count what is read.
        """
        await self._check(namespace)
        readers = await self._read_class(namespace, number)
        former = self._opened.pop(readers, None)
        if former is not None:
            self.volume.tier.residents.leave(former)
        if len(self._opened) >= INDEXES_MAX:
            raise errors.InvalidArgument(f"a connection has at most {INDEXES_MAX} indexes of blocks")
        touches = self.volume.search.open(readers)
        if touches is None:
            raise errors.InvalidArgument("the daemon has as many indexes of blocks as it may have")
        self._opened[readers] = touches
        self.nursery.start_soon(self.volume.search.read_names, readers)
        return (touches.index.size,), [touches.index.descriptor(), os.dup(touches.descriptor)]

    def may_map(self, arena: int) -> bool:
        """The client has an index of the blocks in an arena."""
        return self.volume.tier.read_classes().get(arena) in self._opened

    def close(self) -> None:
        for touches in self._opened.values():
            self.volume.tier.residents.leave(touches)
        self._opened.clear()

    async def _check(self, namespace: Namespace) -> None:
        if namespace.epoch != namespace.gates.epoch:
            await self.admission.refresh(namespace)
        directory = await self.volume.inodes.attributes(namespace.ino)
        if namespace.is_absent or not (namespace.has_token or self.peer.may(directory, 5)):
            raise errors.PermissionDenied("the client's user may not list this folder")
        if namespace.measures.limiters:
            raise errors.Unsupported("the speed of this namespace is limited: its blocks are got through rings")

    async def _read_class(self, namespace: Namespace, number: int) -> ReadClass:
        own = ReadClass(namespace.ino, self.peer.uid, namespace.gid, namespace.mode & 0o444)
        if not number:
            readers = [own]
        else:
            found = dict.fromkeys(self.volume.tier.read_classes().values())
            readers = [own, *(other for other in found if other.directory == namespace.ino and other != own)]
        readers = [other for other in readers if namespace.has_token or self._may_read(other)]
        if number >= len(readers):
            raise errors.NotFound("the folder has no more indexes of blocks")
        return readers[number]

    def _may_read(self, readers: ReadClass) -> bool:
        return self.peer.may(_Readable(readers.uid, readers.gid, stat.S_IFREG | readers.mode), 4)


class _Readable(NamedTuple):
    """What `Peer.may` looks at."""

    uid: int
    gid: int
    mode: int
