"""Finds inodes that clients have open since before this daemon: they may have no name any more, or another one."""

from __future__ import annotations

from collections.abc import Callable

from kvfuse.volume.commit.pending import Pending
from kvfuse.volume.content.refresh import Refresher
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema


async def find_open_before(
    ino: int, core: Core, pending: Pending, refresher: Refresher, take: Callable[..., Node]
) -> Node | None:
    """The node of such an inode; None, where it has a record of its own, or none. ``take``: `Lookup.take`."""
    places = list(core.nodes.handover.still_open[ino].places)
    keys = [schema.orphan_key(ino), *[schema.entry_key(*place) for place in places]]
    while True:
        epoch = pending.epoch
        orphan, *entries = await core.records.get(keys)
        if (node := core.nodes.get(ino)) is not None:
            return node
        if epoch != pending.epoch:
            continue
        for place, entry in zip(places, entries, strict=True):
            record = schema.decode_entry(entry.value) if entry is not None else None
            if entry is not None and isinstance(record, schema.InodeRecord) and record.ino == ino:
                core.places.set(ino, *place)
                return take(record, entry.version, place, own=False)
        if orphan is None or ino not in core.nodes.handover.still_open:  # it was closed meanwhile, and is gone
            return None
        record = schema.decode_inode(orphan.value)
        node = refresher.chunks.restore_chunks(Node.from_record(record), record)
        node.nlink, node.version, node.base = 0, orphan.version, record
        return core.nodes.add(node)
