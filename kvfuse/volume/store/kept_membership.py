"""What the daemon before this one left in the records of a client that goes on: see `member`."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvfuse.remote.records.api import ABSENT, RecordStore
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import Counts
from kvfuse.volume.store.sealed import ScanPages


class KeptMembership(NamedTuple):
    """Of a client that joins anew: nothing."""

    is_resumed: bool = False
    rest_seconds: float = 0.0
    """for which slabs of its own are given to nobody"""
    resting: frozenset[int] | None = None
    """which ones; None: all"""
    version: int = ABSENT
    """of the member record: that daemon's other records have older ones"""
    sequence_version: int = ABSENT
    """of its sequence record"""
    counts: Counts = Counts(0, 0)
    """of its inodes, and of their weight in bytes"""


NOTHING = KeptMembership()


async def read_left(
    records: RecordStore, client: int, version: int, rest_seconds: float, resting: Collection[int] | None
) -> KeptMembership:
    """Nobody else changes these records while the client is alive. EngineError; Corrupt: one is damaged."""
    sequence, counts = await records.get([schema.sequence_key(client), schema.files_key(client)])
    return KeptMembership(
        True,
        rest_seconds,
        frozenset(resting) if resting is not None else None,
        version,
        sequence.version if sequence is not None else ABSENT,
        schema.decode_counts(counts.value) if counts is not None else Counts(0, 0),
    )


async def read_own_uses(records: RecordStore, client: int) -> dict[int, Counts]:
    """Namespace -> what the client has of it. Damaged records are left out."""
    uses = {}
    async for rows, _ in ScanPages(records, schema.USE_PREFIX):
        for row in rows:
            number, owner = schema.split_use_key(row.key)
            if owner == client:
                uses[number] = schema.decode_counts(row.value)
    return uses
