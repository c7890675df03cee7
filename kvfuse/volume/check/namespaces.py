"""Namespaces, checked: whose every inode is, and what each namespace has against what its records say.

An inode's namespace is its directory's. A use that is recorded wrong is mended last, when all inodes are in theirs.
"""

from __future__ import annotations

import stat

from msgspec.structs import replace

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.evidence import Evidence
from kvfuse.volume.check.reading import RecordReader
from kvfuse.volume.namespaces.uses import NOTHING
from kvfuse.volume.store import schema

OWN_CLIENT = 0
"""in a volume that one host has; of a shared one, clients that are gone"""


async def read_uses(reader: RecordReader) -> None:
    """The records of use."""
    found = reader.found.namespaces
    rows = reader.decoded(
        schema.USE_PREFIX, "uses", schema.decode_counts, lambda row: f"the use of namespace {schema.key_inode(row.key)}"
    )
    async for row, counts in rows:
        number = schema.key_inode(row.key)
        if number not in found.numbers:
            _read_stray(reader.found, number, row.key)
            continue
        found.recorded[number] = found.recorded.get(number, NOTHING).add(counts)
        found.rows.setdefault(number, []).append(row.key)


def _read_stray(check: Evidence, number: int, key: bytes) -> None:
    """Of a shared volume: each client removes its own record when it hears that the namespace is gone."""
    text = f"the use of namespace {number} is recorded, which is none"
    if check.records.limits.shared and schema.split_use_key(key)[1] != OWN_CLIENT:
        check.report.notes.append(text)
    else:
        check.problem(text, deletes=[key])


def compare_namespaces(check: Evidence) -> None:
    """Inodes with records of their own; the others were compared when they were read. Then uses."""
    for ino, inode in check.inodes.items():
        record = inode.record
        is_directory = stat.S_ISDIR(record.mode)
        if not (inode.names or ino == ROOT_INODE):
            continue
        expected = check.namespace_of(ino if is_directory else inode.parent)
        if record.namespace != expected:
            mended = {schema.inode_key(ino): schema.encode_inode(replace(record, namespace=expected))}
            check.problem(f"inode {ino} is in namespace {record.namespace} instead of {expected}", mended)
        check.namespaces.count(record.namespace, stat.S_ISREG(record.mode), 0)
    _compare_uses(check)


def _compare_uses(check: Evidence) -> None:
    """A round that mends something else leaves it to the next one."""
    found, is_last = check.namespaces, check.report.clean
    for number in sorted(found.numbers & (found.counted.keys() | found.recorded.keys())):
        counted, recorded = found.counted.get(number, NOTHING), found.recorded.get(number, NOTHING)
        if counted != recorded:
            text = f"namespace {number} has {counted.inodes} files and {counted.size} bytes of slots"
            text += f", but {recorded.inodes} and {recorded.size} are recorded"
            mended = {schema.use_key(number, OWN_CLIENT): schema.encode_counts(*counted)} if is_last else {}
            check.problem(text, mended, found.rows.get(number, []) if is_last else [])
