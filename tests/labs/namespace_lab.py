"""Namespaces of volumes in memory, and what the records say of their use, counted independently after each commit."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from volume_lab import CALLER, Disk

from kvfuse.remote.records.api import Versioned
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.namespaces.settings import ROOT, decode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.tenancy.namespace_attributes import NAMESPACE
from kvfuse.volume.volume import Volume


async def make_namespace(volume: Volume, parent: int, name: bytes, **settings: Any) -> int:
    """A new folder that is one; stored when this returns. Its number."""
    folder = (await volume.tree.make_directory(parent, name, 0o755, CALLER)).ino
    await change_namespace(volume, folder, **settings)
    return folder


async def change_namespace(volume: Volume, number: int, **settings: Any) -> None:
    """Stored when this returns. InvalidArgument."""
    text = " ".join([f"{name}={value}" for name, value in settings.items()])
    await volume.inodes.set_xattr(number, NAMESPACE, text.encode())


@dataclass
class Counted:
    size: int = 0
    files: int = 0


def count_uses(disk: Disk) -> dict[int, Counted]:
    """Namespace -> what the records of files and slabs say that it has, but for the root, without namespaces in it."""
    uses: dict[int, Counted] = defaultdict(Counted)
    homes: dict[int, int] = {}
    sizes = {schema.key_slab(key): schema.decode_slab(row.value)[0] for key, row in _rows(disk, b"s").items()}

    def add(namespace: int, extents: tuple[schema.ExtentRecord, ...]) -> None:
        for extent in extents:
            uses[namespace].size += sizes[extent.addr // disk.superblock.geometry.slab_size]

    for key, row in [*_rows(disk, b"i").items(), *_rows(disk, b"d").items(), *_rows(disk, b"o").items()]:
        record = schema.decode_entry(row.value) if key[:1] == b"d" else schema.decode_inode(row.value)
        if isinstance(record, schema.InodeRecord):
            homes[record.ino] = record.namespace
            uses[record.namespace].files += stat.S_ISREG(record.mode) and key[:1] != b"o"
            for extents in record.chunks:
                add(record.namespace, extents)
    for key, row in _rows(disk, b"c").items():
        add(homes[schema.key_inode(key)], schema.decode_chunk(row.value))
    for key, row in _rows(disk, b"f").items():
        uses[schema.decode_freed(row.value)[1]].size += sizes[schema.split_freed_key(key).slab]
    known = {schema.key_inode(key) for key in _rows(disk, schema.NAMESPACE_PREFIX)}  # removed files may outlive theirs
    return {number: use for number, use in uses.items() if number in known - {ROOT} and use != Counted()}


def recorded_uses(disk: Disk) -> dict[int, Counted]:
    """Namespace -> what its records say."""
    uses: dict[int, Counted] = defaultdict(Counted)
    known = {schema.key_inode(key) for key in _rows(disk, schema.NAMESPACE_PREFIX)}
    for key, row in _rows(disk, schema.USE_PREFIX).items():
        if schema.key_inode(key) not in known:
            continue  # of a shared volume: its client removes it when it hears that the namespace is gone
        files, size = schema.decode_counts(row.value)
        use = uses[schema.key_inode(key)]
        use.files, use.size = use.files + files, use.size + (size or 0)
    return {number: use for number, use in uses.items() if use != Counted()}


def with_inner(disk: Disk, uses: Mapping[int, Counted]) -> dict[int, Counted]:
    """The same, each with the namespaces in it."""
    whole: dict[int, Counted] = defaultdict(Counted)
    for number, use in uses.items():
        here = number
        while here:
            whole[here].size += use.size
            whole[here].files += use.files
            parent = schema.decode_inode(disk.records[schema.inode_key(here)].value).parent
            here = schema.decode_inode(disk.records[schema.inode_key(parent)].value).namespace
    return whole


@dataclass
class UseAudit:
    """Looks at a disk after each commit: `attach`. Small volumes only: every record is read each time."""

    disk: Disk
    most: dict[int, Counted] = field(default_factory=lambda: defaultdict(Counted))
    allowed: dict[int, NamespaceUse] = field(default_factory=dict)
    """namespace -> what it had in memory when its quotas changed"""
    _last: dict[int, Counted] = field(default_factory=lambda: defaultdict(Counted))

    @classmethod
    def attach(cls, disk: Disk) -> UseAudit:
        audit = cls(disk)
        audit.begin()
        disk.audit = audit.look
        return audit

    def begin(self) -> None:
        """What is there may stay."""
        self._last.update(with_inner(self.disk, count_uses(self.disk)))

    def look(self, puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
        """AssertionError where a namespace's recorded use is not what it has, or grew beyond what it may be."""
        counted = count_uses(self.disk)
        assert counted == recorded_uses(self.disk), sorted(puts)
        whole = with_inner(self.disk, counted)
        for number, use in whole.items():
            last, most, allowed = self._last[number], self.most[number], self.allowed.get(number, NamespaceUse(0, 0))
            settings = decode_settings(self.disk.records[schema.namespace_key(number)].value)
            assert use.size <= max(last.size, allowed.size, settings.capacity or use.size), (
                number,
                last,
                use,
                settings,
            )
            assert use.files <= max(last.files, allowed.files, settings.blocks or use.files), (
                number,
                last,
                use,
                settings,
            )
            most.size, most.files = max(most.size, use.size), max(most.files, use.files)
        self._last = defaultdict(Counted, whole)


def _rows(disk: Disk, prefix: bytes) -> dict[bytes, Versioned]:
    return {key: row for key, row in disk.records.items() if key.startswith(prefix)}
