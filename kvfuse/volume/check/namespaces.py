"""Namespaces, checked: whose every inode is, and what each namespace has against what its records say.

An inode's namespace is its directory's. A use that is recorded wrong is mended last, when all inodes are in theirs.
"""

from __future__ import annotations

import stat

from msgspec.structs import replace

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.evidence import Evidence
from kvfuse.volume.check.reading import RecordReader
from kvfuse.volume.namespaces.accounts import UNBOUNDED
from kvfuse.volume.namespaces.grants import Grants, decode_grants, encode_grants, is_over
from kvfuse.volume.namespaces.namespace_uses import NO_USE, NOTHING, NamespaceUse
from kvfuse.volume.namespaces.settings import ROOT, Settings
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
        found.uses.setdefault(number, {})[schema.split_use_key(row.key)[1]] = counts
    await _read_grants(reader)


async def _read_grants(reader: RecordReader) -> None:
    rows = reader.decoded(
        schema.GRANTS_PREFIX, "parts", decode_grants, lambda row: f"the parts of namespace {schema.key_inode(row.key)}"
    )
    async for row, grants in rows:
        reader.found.namespaces.grants[schema.key_inode(row.key)] = grants


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
    if check.records.limits.shared and check.report.clean:
        _compare_grants(check)


def _compare_grants(check: Evidence) -> None:
    """What clients may have, against the quotas and their use: when these are right."""
    found = check.namespaces
    for number in sorted(found.grants.keys() | found.quotas.keys() - {ROOT}):
        settings, grants = found.quotas.get(number, Settings()), found.grants.get(number)
        capacity, blocks, key = settings.capacity, settings.blocks, schema.grants_key(number)
        if number not in found.numbers:
            check.problem(f"clients have parts of namespace {number}, which is none", deletes=[key])
            continue
        if grants is not None and grants.is_unfinished(capacity, blocks):
            check.report.notes.append(f"a change of the quotas of namespace {number} was not finished: set them again")
            capacity, blocks = grants.capacity, grants.blocks
        uses = _uses_within(check, number)
        wanted = Grants(capacity, blocks, {client: use for client, use in uses.items() if any(use)})
        if grants is not None and is_over(grants):  # had they had more than the quotas, they would have as much of it
            check.report.notes.append(f"clients have parts of namespace {number} that are larger than its quotas")
        if (text := _difference(wanted, grants, uses)) is not None:
            check.problem(f"namespace {number} {text}", {key: encode_grants(wanted)})


def _difference(wanted: Grants, grants: Grants | None, uses: dict[int, NamespaceUse]) -> str | None:
    """What is wrong with the record of a namespace, if anything."""
    if grants is None:
        return "has quotas, of which no client has a part"
    if (grants.capacity, grants.blocks) != (wanted.capacity, wanted.blocks):
        return "has other quotas than those of which clients have parts"
    if grants.awaited:
        return None  # as in the middle of a change of quotas: they say what they use
    quotas = grants.quotas
    for at, unit in enumerate(("bytes", "files")):
        if quotas[at] == UNBOUNDED:
            continue
        for client, use in uses.items():
            if use[at] > grants.part(client)[at]:
                return f"counts {use[at]} {unit} of client {client:x}, which may have {grants.part(client)[at]}"
    return None


def _uses_within(check: Evidence, number: int) -> dict[int, NamespaceUse]:
    """Client -> its recorded use of a namespace and those in it."""
    uses: dict[int, NamespaceUse] = {}
    for inner, clients in check.namespaces.uses.items():
        if number in _chain(check, inner):
            for client, counts in clients.items():
                use = uses.get(client, NO_USE)
                uses[client] = NamespaceUse(use.size + (counts.size or 0), use.files + counts.inodes)
    return uses


def _chain(check: Evidence, number: int) -> set[int]:
    """A namespace and those that it is in, but for the root."""
    chain: set[int] = set()
    while number != ROOT and number not in chain and number in check.inodes:
        chain.add(number)
        number = check.namespace_of(check.inodes[number].record.parent)
    return chain
