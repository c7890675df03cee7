"""Holds changed records that are neither an inode's nor a name's: attributes, f records, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from kvfuse.remote.records.api import Versioned
from kvfuse.volume.inodes.metadata_budget import NOT_STORED, Stored
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.volume.inodes.node import Node
    from kvfuse.volume.inodes.unstored import Unstored


class LooseRecords:
    """Their pending puts and deletes. `Pending` owns it."""

    def __init__(self, added: Callable[[int], None], unstored: Unstored | None) -> None:
        """``added``: called with the size of each value, in bytes. ``unstored``: keeps those of attributes."""
        self.changes: dict[bytes, bytes | None] = {}
        """key -> value, None: to be deleted"""
        self.sent: dict[bytes, bytes | None] = {}
        """``changes`` of the commit that is in flight"""
        self.seen: dict[bytes, Stored] = {}
        """in a shared volume: attribute that is pending or in flight -> its stored record"""
        self._added = added
        self._unstored = unstored

    def put(self, key: bytes, value: bytes | None, stored: Stored | None = None) -> None:
        """Put a record; None deletes it. ``stored``: in a shared volume, the stored record of an attribute."""
        self.changes[key] = value
        if self._unstored is not None and key.startswith(schema.XATTR_PREFIX):
            self._unstored.attribute(key, value)
        if stored is not None:
            self.seen.setdefault(key, stored)
        self._added(len(value or b""))

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Drop pending changes of these, except those in flight: a newer change decides."""
        for key in keys:
            if self.changes.pop(key, self) is not self and self._unstored is not None:
                self._unstored.no_attributes((key,))

    def forget_seen(self, keys: Iterable[bytes]) -> None:
        """Forget the stored records of these, except those in flight: they will not change any more."""
        for key in keys:
            if key not in self.sent:
                self.seen.pop(key, None)

    def withdraw_attributes(self, node: Node) -> None:
        """Drop pending attributes of a removed inode; the next commit deletes those that are in flight.

        Its orphan record says whether stored attributes must be removed, and does not cover these. Handles of the
        file still see them.
        """
        if not node.flags & schema.FLAG_XATTRS:
            return
        prefix = schema.xattr_prefix(node.ino)
        node.unstored_attributes = {**self.list_pending(prefix), **node.unstored_attributes}
        keys = [key for key in self.changes if key.startswith(prefix)]
        self.withdraw(keys)
        self.forget_seen(keys)
        for key, value in self.sent.items():
            if value is not None and key.startswith(prefix):  # if that commit is refused, it is pending again
                self.changes[key] = None
                if self._unstored is not None:
                    self._unstored.attribute(key, None)

    def list_pending(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """Changes, not stored yet, of keys that begin with ``prefix``; value None: a delete."""
        return {key: value for key, value in {**self.sent, **self.changes}.items() if key.startswith(prefix)}

    def note_attribute(self, key: bytes, row: Versioned | None) -> None:
        """Note the stored record of an attribute that is about to change here."""
        self.seen[key] = Stored.of(key, row)

    def settle_attributes(self, keys: Iterable[bytes], puts: Mapping[bytes, bytes], version: int) -> None:
        """Note the records that a commit of ``version`` stored for attributes that have changed again since."""
        for key in [key for key in keys if key in self.seen]:
            if key not in self.changes:
                del self.seen[key]
            elif (value := puts.get(key)) is None:
                self.seen[key] = NOT_STORED
            else:
                self.seen[key] = Stored.of(key, Versioned(value, version))
