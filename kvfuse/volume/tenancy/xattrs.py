"""Extended attributes: one record each; two of them are settings of a folder, some of them those of a namespace.

Changes of attributes of an open file without names stay in memory, because its records are about to be deleted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvfuse import errors
from kvfuse.slab.layout import PAGE_SIZE
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.device_changes import DeviceChanges
from kvfuse.volume.inodes.metadata_budget import NOT_STORED, Stored, weight
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.slots.space import RoomFinder
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import all_keys, get_marked
from kvfuse.volume.tenancy.namespace_attributes import NamespaceAttributes, is_about_namespaces
from kvfuse.volume.views import clock

XATTR_NAME_MAX = 255
XATTR_VALUE_MAX = 64 << 10
REMOVED_SIZE_MAX = 1 << 20
"""Bytes of attributes that a file without names may be given."""
NAMESPACES = (b"user", b"trusted", b"security")
"""An attribute's name begins with one of these and a dot. "system" is missing: access control lists would be
stored but not enforced."""

CAPABILITY = b"security.capability"
"""File capabilities of a program; a change of the program's bytes removes them."""

_PUBLISH_FLAGS = {b"strict": schema.FLAG_STRICT, b"relaxed": schema.FLAG_RELAXED}


class Setting(NamedTuple):
    """An attribute that is a setting of a directory; new directories in it inherit it."""

    get: Callable[[Core, Node], bytes | None]
    """None: the directory has no setting of its own"""
    set: Callable[[Core, Node, bytes], None]
    """InvalidArgument for an invalid value"""
    clear: Callable[[Core, Node], None]


def _get_publish(core: Core, node: Node) -> bytes | None:
    return next((value for value, flag in _PUBLISH_FLAGS.items() if node.flags & flag), None)


def _set_publish(core: Core, node: Node, value: bytes) -> None:
    flag = _PUBLISH_FLAGS.get(value)
    if flag is None:
        raise errors.InvalidArgument(f"user.kvfuse.publish must be 'strict' or 'relaxed', not {value!r}")
    _put_publish(core, node, flag)


def _clear_publish(core: Core, node: Node) -> None:
    _put_publish(core, node, 0)


def _put_publish(core: Core, node: Node, flag: int) -> None:
    flags = node.flags & ~schema.PUBLISH_FLAGS | flag
    node.flags = flags


def _get_chunk_size(core: Core, node: Node) -> bytes | None:
    size = core.chunk_size_in(node)
    return b"%d" % size if size != core.chunk_size else None


def _set_chunk_size(core: Core, node: Node, value: bytes) -> None:
    size_max = core.geometry.slab_size
    size = int(value) if value.isdigit() else 0
    if not PAGE_SIZE <= size <= size_max or size % PAGE_SIZE:
        raise errors.InvalidArgument(
            f"a chunk has {PAGE_SIZE} to {size_max} bytes in steps of {PAGE_SIZE}, not {value!r}"
        )
    node.chunk_size = size


def _clear_chunk_size(core: Core, node: Node) -> None:
    node.chunk_size = core.chunk_size


SETTINGS = {
    b"user.kvfuse.publish": Setting(_get_publish, _set_publish, _clear_publish),
    b"user.kvfuse.chunk_size": Setting(_get_chunk_size, _set_chunk_size, _clear_chunk_size),
}
"""``publish``: "strict" or "relaxed". ``chunk_size``: bytes that one chunk covers, of files made later."""


log = logging.getLogger(__name__)

CAPACITY = b"user.kvfuse.capacity"
"""of the root: bytes that the volume may have in its segments; root, and who mounted it, give it more. Never listed."""

DEVICES = b"user.kvfuse.devices"
"""of the root of a volume on devices: JSON of them all, see `DeviceChanges`; set to what is to change. Never listed."""


def check_name(name: bytes) -> None:
    """Unsupported for a name outside the namespaces, InvalidArgument for a namespace without a name."""
    namespace, dot, rest = name.partition(b".")
    if namespace not in NAMESPACES or not dot:
        raise errors.Unsupported(f"attribute {name!r}: its name must begin with 'user.', 'trusted.' or 'security.'")
    if not rest:
        raise errors.InvalidArgument(f"attribute {name!r}: nothing follows the namespace")


def check_settable(name: bytes) -> None:
    """Unsupported, InvalidArgument; NotPermitted: only directories have it."""
    check_name(name)
    if name in SETTINGS or name in (CAPACITY, DEVICES) or is_about_namespaces(name):
        raise errors.NotPermitted(f"{name!r} is a setting of directories")


@dataclass
class Xattrs:
    """Reads and changes attributes. Each membership has one."""

    core: Core
    journal: Journal
    space: RoomFinder
    lookups: Lookup
    namespaces: NamespaceAttributes
    devices: DeviceChanges | None
    """of a volume on devices"""

    async def get(self, ino: int, name: bytes) -> bytes:
        check_name(name)
        node = await self.lookups.find_current(ino)
        setting = SETTINGS.get(name)
        if setting is not None:
            found = setting.get(self.core, node) if node.is_directory else None
        elif is_about_namespaces(name):
            found = self.namespaces.get(node, name)
        elif name == CAPACITY:
            found = b"%d" % self.core.geometry.capacity if ino == ROOT_INODE else None
        elif name == DEVICES:
            found = self.devices.describe() if ino == ROOT_INODE and self.devices is not None else None
        else:
            found, _ = await self._look(node, name)
        if found is None:
            raise errors.NoAttribute(f"inode {ino} has no attribute {name!r}")
        return found

    async def _look(self, node: Node, name: bytes) -> tuple[bytes | None, Stored]:
        """(value or None, its stored record). The latter may be stale as soon as this returns."""
        if not node.flags & schema.FLAG_XATTRS:
            return None, NOT_STORED
        key = schema.xattr_key(node.ino, name)
        pending = self._not_stored(node, key)
        if key in pending:
            return pending[key], self.journal.pending.loose.seen.get(key, NOT_STORED)
        record = (await self.core.records.get([key]))[0]
        return record.value if record is not None else None, Stored.of(key, record)

    async def set(self, ino: int, name: bytes, value: bytes, caller: Caller | None = None) -> Node:
        """``caller``: None for this program itself, which may set all."""
        check_name(name)
        node = await self.lookups.find_current(ino)
        if len(name) > XATTR_NAME_MAX or len(value) > XATTR_VALUE_MAX:
            raise errors.AttributeTooLarge(
                f"attribute {name!r} of {len(value)} bytes:"
                f" at most {XATTR_NAME_MAX} bytes of name, {XATTR_VALUE_MAX} of value"
            )
        setting = SETTINGS.get(name)
        if setting is not None:
            if not node.is_directory:
                raise errors.NotPermitted(f"inode {ino}: {name!r} is a setting of directories")
            setting.set(self.core, node, value)
            return self._changed(node)
        if is_about_namespaces(name):
            await self.namespaces.set(node, name, value, caller)
            return node
        if name in (CAPACITY, DEVICES):
            await self._resize(node, name, value, caller)
            return node
        key = schema.xattr_key(ino, name)
        growth, stored = await self._growth(node, key, value)
        self._put(node, key, value, stored)
        node.flags |= schema.FLAG_XATTRS
        if name == CAPABILITY:
            node.capability_free = False
        self._changed(node)
        if node.nlink:
            node.xattr_names |= {name}
            self.core.metadata.reserve(node, growth)
        return node

    async def _resize(self, node: Node, name: bytes, value: bytes, caller: Caller | None) -> None:
        """InvalidArgument: that cannot be. NotPermitted, EngineError."""
        if node.ino != ROOT_INODE or (caller is not None and caller.uid not in (0, os.geteuid())):
            raise errors.NotPermitted("only root, and who mounted a volume, may give it another capacity, or devices")
        try:
            await (self._set_capacity if name == CAPACITY else self._change_devices)(value)
        except errors.VolumeError as error:
            raise errors.EngineError(str(error)) from error
        except errors.InvalidArgument as error:
            if caller is not None:  # the kernel does not tell it why
                log.warning("the volume stays as it is: %s", error)
            raise

    async def _set_capacity(self, value: bytes) -> None:
        if not value.isdigit():
            raise errors.InvalidArgument(f"a capacity is a number of bytes, not {value!r}")
        if self.core.before_shrinking is not None and int(value) < self.core.geometry.capacity:
            await self.core.before_shrinking()
        await (self.devices or self.core).resize(int(value), self.journal.freeing_bytes)

    async def _change_devices(self, value: bytes) -> None:
        if self.devices is None:
            raise errors.InvalidArgument("the volume has no devices")
        await self.devices.change(value, self.journal.freeing_bytes)

    async def _growth(self, node: Node, key: bytes, value: bytes) -> tuple[int, Stored]:
        """(bytes that the attribute may add to the records, its stored record). NoSpace.

        There is room for it until the next await. Where nobody else changes the store, it is asked only if that is
        full; else the commit has to know what it replaces.
        """
        size = weight(len(key), len(value))
        while True:
            stored = self.journal.pending.loose.seen.get(key, NOT_STORED)
            if self.core.metadata.fits(size) and not (self.core.shared and self._is_unseen(node, key)):
                return size, stored
            growth = size
            if self._is_unseen(node, key):
                (row,) = await get_marked(self.core.records, [key])
                stored = Stored.of(key, row)
                growth = max(0, size - stored.weight)  # it takes the place of this one
            if not await self.space.wait_for_records(growth, f"an attribute of inode {node.ino}"):
                return growth, stored

    def _is_unseen(self, node: Node, key: bytes) -> bool:
        """Existence and size of the stored attribute are not known here."""
        return bool(node.flags & schema.FLAG_XATTRS and node.nlink and not self.journal.pending.loose.list_pending(key))

    async def list(self, ino: int) -> list[bytes]:
        node = await self.lookups.find_current(ino)
        names: set[bytes] = set()
        if node.is_directory:
            names.update(name for name, setting in SETTINGS.items() if setting.get(self.core, node) is not None)
            names.update(self.namespaces.names(node))
        if node.flags & schema.FLAG_XATTRS:
            prefix = schema.xattr_prefix(ino)
            before = self._not_stored(node, prefix)  # a commit may settle meanwhile that the scan does not see yet
            stored = dict.fromkeys(await all_keys(self.core.records, prefix), b"")
            found = {**stored, **before, **self._not_stored(node, prefix)}
            names.update([schema.xattr_name(key) for key, value in found.items() if value is not None])
        return sorted(names)

    async def remove(self, ino: int, name: bytes, caller: Caller | None = None) -> Node:
        if name in SETTINGS:
            await self.get(ino, name)
            node = await self.lookups.find_node(ino)
            SETTINGS[name].clear(self.core, node)
        elif name in (CAPACITY, DEVICES):
            raise errors.NotPermitted("a volume keeps its capacity and devices, or is given others")
        elif is_about_namespaces(name):
            node = await self.lookups.find_current(ino)
            await self.namespaces.remove(node, name, caller)
            return node
        else:
            check_name(name)
            node = await self.lookups.find_current(ino)
            found, stored = await self._look(node, name)
            if found is None:
                raise errors.NoAttribute(f"inode {ino} has no attribute {name!r}")
            node = await self.lookups.find_node(ino)
            self._put(node, schema.xattr_key(ino, name), None, stored)
        return self._changed(node)

    async def drop_capability(self, node: Node) -> bool:
        """Remove ``security.capability`` before rings change bytes of a file. True: it had the attribute.

        Asks the store if that is not known. EngineError.
        """
        if node.capability_free or not node.flags & schema.FLAG_XATTRS:
            return False
        found, stored = await self._look(node, CAPABILITY)
        key = schema.xattr_key(node.ino, CAPABILITY)
        found = self._not_stored(node, key).get(key, found)  # it may have been set, or removed, meanwhile
        if found is not None:
            self._put(node, key, None, stored)
        node.capability_free = True
        return found is not None

    def _put(self, node: Node, key: bytes, value: bytes | None, stored: Stored) -> None:
        """Put (None: delete) an attribute. ``stored``: its record. NoSpace: too many, of a file without names."""
        if node.nlink:
            self.journal.pending.loose.put(key, value, stored if self.core.shared else None)
            return
        changes = {**node.unstored_attributes, key: value}
        if value is not None and sum(len(key) + len(value or b"") for key, value in changes.items()) > REMOVED_SIZE_MAX:
            raise errors.NoSpace(f"inode {node.ino} was removed: {REMOVED_SIZE_MAX} bytes of attributes at most")
        node.unstored_attributes = changes

    def _not_stored(self, node: Node, prefix: bytes) -> dict[bytes, bytes | None]:
        """Changes, not stored yet, of records whose keys begin with ``prefix``; value None: removed."""
        changes = self.journal.pending.loose.list_pending(prefix)
        if not node.nlink:
            changes |= {key: value for key, value in node.unstored_attributes.items() if key.startswith(prefix)}
        return changes

    def _changed(self, node: Node) -> Node:
        node.ctime = clock.now()
        self.journal.pending.touch(node, forced=True)
        if node.is_directory:
            self.journal.pending.touch_times(node)
        return node
