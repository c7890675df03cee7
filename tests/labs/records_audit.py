"""What holds of the records of a shared volume after each commit of any client, looked at while the clients work.

A check of the volume at the end says that something is wrong; this says which commit made it so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from volume_lab import Disk

from kvfuse.remote.records.api import Versioned
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.metadata_budget import weigh
from kvfuse.volume.store import schema


@dataclass
class _Facts:
    """What one record says."""

    slots: tuple[int, ...] = ()
    """addresses that it names"""
    inode: schema.InodeRecord | None = None
    reference: int | None = None
    """inode that a name means, which has a record of its own"""


@dataclass
class Audit:
    """Looks at a disk after each commit: `attach`. Small volumes only: every record is counted each time."""

    disk: Disk
    commit_count: int = 0
    failed: bool = False
    """it has said so: what comes after the first wrong commit tells nothing"""
    _facts: dict[bytes, tuple[int, _Facts]] = field(default_factory=dict)

    @classmethod
    def attach(cls, disk: Disk) -> Audit:
        audit = cls(disk)
        disk.audit = audit.look
        return audit

    def look(self, puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
        """AssertionError, with the commit that was just applied, where something does not hold any more."""
        if self.failed:
            return
        self.commit_count += 1
        problems = [*self.slot_problems(), *self.tree_problems(), *self.count_problems()]
        if problems:
            self.failed = True
            changed = [*map(_described, puts), *[f"-{_described(key)}" for key in deletes]]
            raise AssertionError(f"version {self.disk.version}: {problems} after {changed}")

    def slot_problems(self) -> list[str]:
        """Every slot that is named is allocated, and by one record; every one that is not is to be freed."""
        named: Counter[int] = Counter()
        to_free: Counter[int] = Counter()
        for key, row in self.disk.records.items():
            if key[:1] == b"f":
                to_free[schema.split_freed_key(key).addr] += 1
            else:
                named.update(self._fact(key, row).slots)
        allocated = self._allocated()
        problems = [f"slot {addr} has {count} owners" for addr, count in named.items() if count > 1]
        problems += [f"slot {addr} is named, but not allocated" for addr in named if addr not in allocated]
        problems += [f"slot {addr} is to be freed, but named" for addr in to_free if addr in named]
        problems += [f"slot {addr} is to be freed, but free" for addr in to_free if addr not in allocated]
        problems += [f"slot {addr} is to be freed {count} times" for addr, count in to_free.items() if count > 1]
        problems += [
            f"slot {addr} is allocated, but nobody has it" for addr in allocated - named.keys() - to_free.keys()
        ]
        return problems

    def count_problems(self) -> list[str]:
        """Counts of clients, of those that are here and of those that are gone, are together what is there."""
        records = self.disk.records
        counted = schema.decode_counts(records[schema.COUNTER_FILES].value)
        for key, row in records.items():
            if key[:1] == b"q":
                counted = counted.add(schema.decode_counts(row.value))
        weights = [weigh(key, row.value) for key, row in records.items()]
        found = schema.Counts(sum(count for _, count in weights), sum(size for size, _ in weights))
        return [f"counted as {counted}, but there are {found}"] if counted != found else []

    def tree_problems(self) -> list[str]:
        """Every name means an inode that is there, every inode has as many names as it says, orphans have none."""
        records = self.disk.records
        names: Counter[int] = Counter()
        folders: Counter[int] = Counter()
        inodes: dict[int, schema.InodeRecord] = {}
        problems = []
        for key, row in records.items():
            if key[:1] not in (b"d", b"i"):
                continue
            fact = self._fact(key, row)
            if fact.inode is not None:
                if fact.inode.ino in inodes:
                    problems.append(f"inode {fact.inode.ino} is recorded twice")
                inodes[fact.inode.ino] = fact.inode
            if key[:1] == b"d":
                ino = fact.inode.ino if fact.inode is not None else fact.reference or 0
                parent = schema.split_entry_key(key)[0]
                names[ino] += 1
                own = records.get(schema.inode_key(ino))
                if fact.reference is not None and own is None:
                    problems.append(f"{_described(key)} means inode {ino}, which is not there")
                if own is not None and _is_folder(self._fact(schema.inode_key(ino), own).inode):
                    folders[parent] += 1
                if schema.inode_key(parent) not in records:
                    problems.append(f"{_described(key)} is in a directory that is not there")
        for ino, record in inodes.items():
            count = 2 + folders[ino] if _is_folder(record) else names[ino]
            if record.nlink != count:
                problems.append(f"inode {ino} has {record.nlink} links recorded, but {count}")
            if _is_folder(record) and ino != ROOT_INODE and names[ino] != 1:
                problems.append(f"directory {ino} has {names[ino]} names")
            if schema.orphan_key(ino) in records:
                problems.append(f"inode {ino} has a name, and is an orphan")
        return problems + self._attribute_problems(inodes)

    def _attribute_problems(self, inodes: Mapping[int, schema.InodeRecord]) -> list[str]:
        """Every attribute is of an inode that says it has some: else nobody removes it, and nobody finds it."""
        problems = []
        for ino in {schema.key_inode(key) for key in self.disk.records if key[:1] == schema.XATTR_PREFIX}:
            orphan = self.disk.records.get(schema.orphan_key(ino))
            record = self._fact(schema.orphan_key(ino), orphan).inode if orphan is not None else inodes.get(ino)
            if record is None:
                problems.append(f"an attribute of inode {ino}, which is not there")
            elif not record.flags & schema.FLAG_XATTRS:
                problems.append(f"inode {ino} has an attribute, and does not say so")
        return problems

    def _fact(self, key: bytes, row: Versioned) -> _Facts:
        known = self._facts.get(key)
        if known is None or known[0] != row.version:
            known = self._facts[key] = (row.version, _read(key, row.value))
        return known[1]

    def _allocated(self) -> set[int]:
        found: set[int] = set()
        slab_size = self.disk.superblock.geometry.slab_size
        for key, row in self.disk.records.items():
            if key[:1] == b"s":
                slot_size, bitmap = schema.decode_slab(row.value)
                start = schema.key_slab(key) * slab_size
                bits = int.from_bytes(bitmap, "little")
                while bits:
                    low = bits & -bits
                    found.add(start + (low.bit_length() - 1) * slot_size)
                    bits ^= low
        return found


def _read(key: bytes, value: bytes) -> _Facts:
    if key[:1] == b"d":
        entry = schema.decode_entry(value)
        return _Facts(reference=entry) if isinstance(entry, int) else _Facts(_slots(entry.chunks), entry)
    if key[:1] in (b"i", b"o"):
        inode = schema.decode_inode(value)
        return _Facts(_slots(inode.chunks), inode)
    if key[:1] == b"c":
        return _Facts(_slots((schema.decode_chunk(value),)))
    return _Facts()


def _slots(chunks: tuple[tuple[schema.ExtentRecord, ...], ...]) -> tuple[int, ...]:
    return tuple([extent.addr for chunk in chunks for extent in chunk])


def _is_folder(record: schema.InodeRecord | None) -> bool:
    return record is not None and record.mode & 0o170000 == 0o040000


def _described(key: bytes) -> str:
    kind = key[:1].decode()
    if kind == "d":
        parent, _, name = schema.split_entry_key(key)
        return f"d {parent}/{name.decode(errors='replace')}"
    if kind == "f":
        return f"f {schema.split_freed_key(key).addr}"
    if kind in "itocxh":
        return f"{kind} {schema.key_inode(key)}"
    return f"{kind} {key[1:].hex()}"
