"""Packs registered things of a connection for the next daemon: content, and descriptors."""

from __future__ import annotations

import msgspec

from kvfuse.access.namespace_handle import NamespaceHandle
from kvfuse.usrbio.daemon.client_memory import MappedIov
from kvfuse.usrbio.daemon.device_iovs import DeviceIov
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.volume.views.ring_files import KeptFile

Kept = tuple[object, list[int]]


class KeptIov(msgspec.Struct):
    """An iov; kept with the descriptor of the memory."""

    size: int
    offset: int = 0
    """first byte of a device's memory"""


class KeptNamespace(msgspec.Struct):
    ino: int
    mode: int
    gid: int
    read_only: bool
    descriptor: str
    by_path: bool = False


class KeptRing(msgspec.Struct):
    """A ring; kept with descriptors of its memory, its journal, the daemon's bell and the client's."""

    entries: int
    aux_size: int
    op_mask: int
    """-1: all operations"""


def pack_file(thing: OpenFile) -> Kept:
    place = thing.handle.place
    return KeptFile(thing.ino, thing.readable, thing.writable, [place] if place[1] else []), []


def pack_iov(thing: MappedIov) -> Kept:
    return KeptIov(thing.size), [thing.descriptor]


def pack_device(thing: DeviceIov) -> Kept:
    return KeptIov(thing.size, thing.offset), [thing.descriptor]


def pack_namespace(thing: NamespaceHandle) -> Kept:
    row = KeptNamespace(thing.ino, thing.mode, thing.group.gid, thing.read_only, thing.descriptor, thing.by_path)
    return row, []
