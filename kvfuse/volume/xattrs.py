"""Extended attributes: one record each, and one that is a setting of a folder."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvfuse import errors
from kvfuse.volume import schema
from kvfuse.volume.core import Core
from kvfuse.volume.journal import Journal
from kvfuse.volume.names import Names
from kvfuse.volume.node import Node

XATTR_NAME_MAX = 255
XATTR_VALUE_MAX = 64 << 10

PUBLISH = b"user.kvfuse.publish"
"""Of a directory: "strict" or "relaxed"; new directories in it inherit the setting."""

_PUBLISH_FLAGS = {b"strict": schema.FLAG_STRICT, b"relaxed": schema.FLAG_RELAXED}
_PUBLISH_MASK = schema.FLAG_STRICT | schema.FLAG_RELAXED


@dataclass
class Xattrs:
    """See the module."""

    core: Core
    journal: Journal
    names: Names

    async def get(self, ino: int, name: bytes) -> bytes:
        node = await self.names.node(ino)
        if name == PUBLISH and node.is_directory:
            for value, flag in _PUBLISH_FLAGS.items():
                if node.flags & flag:
                    return value
        elif node.flags & schema.FLAG_XATTRS:
            key = schema.xattr_key(ino, name)
            pending = self.journal.pending_puts(key)
            if key in pending:
                found = pending[key]
            else:
                record = (await self.core.records.get([key]))[0]
                found = record.value if record is not None else None
            if found is not None:
                return found
        raise errors.NoAttribute(f"inode {ino} has no attribute {name!r}")

    async def set(self, ino: int, name: bytes, value: bytes) -> Node:
        node = await self.names.node(ino)
        if not name or len(name) > XATTR_NAME_MAX or len(value) > XATTR_VALUE_MAX:
            raise errors.AttributeTooLarge(
                f"attribute {name!r} of {len(value)} bytes:"
                f" at most {XATTR_NAME_MAX} bytes of name, {XATTR_VALUE_MAX} of value"
            )
        if name == PUBLISH:
            self._set_publish(node, value)
        else:
            if node.nlink == 0:
                raise errors.Stale(f"inode {ino} was removed")
            node.flags |= schema.FLAG_XATTRS
            node.xattr_names.add(name)
            self.journal.put(schema.xattr_key(ino, name), value)
        return self._changed(node)

    def _set_publish(self, node: Node, value: bytes) -> None:
        if not node.is_directory:
            raise errors.NotPermitted(f"inode {node.ino}: publishing is a setting of directories")
        flag = _PUBLISH_FLAGS.get(value)
        if flag is None:
            raise errors.InvalidArgument(f"{PUBLISH!r} is 'strict' or 'relaxed', not {value!r}")
        node.flags = node.flags & ~_PUBLISH_MASK | flag

    async def list(self, ino: int) -> list[bytes]:
        node = await self.names.node(ino)
        names = set()
        if node.flags & _PUBLISH_MASK and node.is_directory:
            names.add(PUBLISH)
        if node.flags & schema.FLAG_XATTRS:
            prefix = schema.xattr_prefix(ino)
            after = b""
            while rows := await self.core.records.scan(prefix, after):
                names.update(schema.xattr_name(row.key) for row in rows)
                after = rows[-1].key
            for key, value in self.journal.pending_puts(prefix).items():
                if value is None:
                    names.discard(schema.xattr_name(key))
                else:
                    names.add(schema.xattr_name(key))
        return sorted(names)

    async def remove(self, ino: int, name: bytes) -> Node:
        await self.get(ino, name)
        node = await self.names.node(ino)
        if name == PUBLISH and node.is_directory:
            node.flags &= ~_PUBLISH_MASK
        else:
            self.journal.put(schema.xattr_key(ino, name), None)
        return self._changed(node)

    def _changed(self, node: Node) -> Node:
        node.ctime = time.time_ns()
        self.journal.touch(node, forced=True)
        if node.is_directory:
            self.journal.touch_times(node)
        return node
