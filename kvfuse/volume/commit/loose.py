"""Records that belong to no inode's or name's own record and change with a commit: attributes, f records, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from kvfuse.remote.records.api import Versioned
from kvfuse.volume.inodes.metadata_budget import NOT_STORED, Stored
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.volume.inodes.node import Node


class LooseRecords:
    """What is to be put and deleted of them. `Pending` owns it."""

    def __init__(self, added: Callable[[int], None]) -> None:
        """``added``: called with the bytes of each that is to be put."""
        self.changes: dict[bytes, bytes | None] = {}
        """key -> value, None: to be deleted"""
        self.sent: dict[bytes, bytes | None] = {}
        """the same, of the commit that is under way"""
        self.seen: dict[bytes, Stored] = {}
        """in a shared volume: attribute that is pending, or under way -> what the store has in its place"""
        self._added = added

    def put(self, key: bytes, value: bytes | None, stored: Stored | None = None) -> None:
        """None deletes it. ``stored``: what the store has, of an attribute in a shared volume."""
        self.changes[key] = value
        if stored is not None:
            self.seen.setdefault(key, stored)
        self._added(len(value or b""))

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Forget what is pending of these, but for what is under way: somebody else has the last word."""
        for key in keys:
            self.changes.pop(key, None)

    def forget_seen(self, keys: Iterable[bytes]) -> None:
        """These are not to change any more, but for those that are under way."""
        for key in keys:
            if key not in self.sent:
                self.seen.pop(key, None)

    def withdraw_attributes(self, node: Node) -> None:
        """The inode was removed: what is pending of its attributes is not put, or taken away by the next commit.

        Its orphan record, which says whether there are attributes to be removed, need not know of these. Handles on the
        file still see them.
        """
        if not node.flags & schema.FLAG_XATTRS:
            return
        prefix = schema.xattr_prefix(node.ino)
        node.unstored_attributes = {**self.pending_puts(prefix), **node.unstored_attributes}
        keys = [key for key in self.changes if key.startswith(prefix)]
        self.withdraw(keys)
        self.forget_seen(keys)
        for key, value in self.sent.items():
            if value is not None and key.startswith(prefix):  # that commit may be refused: then it is pending again
                self.changes[key] = None

    def pending_puts(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """Changes of keys that begin with ``prefix`` and that the store does not know yet."""
        return {key: value for key, value in {**self.sent, **self.changes}.items() if key.startswith(prefix)}

    def attribute_is(self, key: bytes, row: Versioned | None) -> None:
        """What the store has of an attribute that is to change here."""
        self.seen[key] = Stored.of(key, row)

    def settle_attributes(self, keys: Iterable[bytes], puts: Mapping[bytes, bytes], version: int) -> None:
        """What the store has now of attributes that a commit changed, where they are to change once more."""
        for key in [key for key in keys if key in self.seen]:
            if key not in self.changes:
                del self.seen[key]
            elif (value := puts.get(key)) is None:
                self.seen[key] = NOT_STORED
            else:
                self.seen[key] = Stored.of(key, Versioned(value, version))
