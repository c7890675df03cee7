"""Finds inodes that clients have open since before this daemon: they may have no name any more, or another one.

On a shared volume another host may have renamed such a file while no daemon here received the watch. A file that left
its directory has a record of its own. For one that has another name there this module reads the names of its directory;
the watch delivers later changes. A file that was never stored, as is kept with its handles, cannot have been renamed
by another host: nothing searches for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvfuse.volume.commit.pending import Pending
from kvfuse.volume.content.refresh import Refresher
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema
from kvfuse.volume.store.search import search_names

log = logging.getLogger(__name__)


async def find_open_before(
    ino: int, core: Core, pending: Pending, refresher: Refresher, take: Callable[..., Node]
) -> Node | None:
    """The node of such an inode; None: it has a record of its own, or none. ``take``: `Lookup.take_record`."""
    handover = core.nodes.handover
    while (before := handover.still_open.get(ino)) is not None:  # else it was closed meanwhile
        places = list(before.places)
        keys = [schema.orphan_key(ino), schema.inode_key(ino), *[schema.entry_key(*place) for place in places]]
        epoch = pending.epoch
        orphan, own, *entries = await core.records.get(keys)
        if (node := core.nodes.get(ino)) is not None:
            return node
        if epoch != pending.epoch:
            continue
        for place, entry in zip(places, entries, strict=True):
            record = schema.decode_entry(entry.value) if entry is not None else None
            if entry is not None and isinstance(record, schema.InodeRecord) and record.ino == ino:
                core.places.set(ino, *place)
                return take(record, entry.version, place, own=False)
        if ino not in handover.still_open or own is not None:  # it was closed meanwhile, or is found by its number
            return None
        if orphan is None:
            if core.client and not before.is_new and await _search_names(core, ino):
                continue
            return None
        record = schema.decode_inode(orphan.value)
        node = refresher.chunks.restore_chunks(Node.from_record(record), record)
        node.nlink, node.version, node.base = 0, orphan.version, record
        return core.nodes.add(node)
    return None


async def _search_names(core: Core, ino: int) -> bool:
    """Search the directories in which such an inode was. True: it has a place that was not known before. EngineError.

    All such files are found that are there: the next one that was in the same directories need not search.
    """
    handover = core.nodes.handover
    places = list(handover.still_open[ino].places)
    async with handover.searching:
        directories = {parent for parent, _ in places} - handover.searched
        if directories and handover.still_open.get(ino) is not None and core.nodes.get(ino) is None:
            log.warning("inode %d is open, and has lost its name: reading the names of its directory to find it", ino)
            for other, row in (await search_names(core.records, directories, handover.still_open)).items():
                parent, _, name = schema.split_entry_key(row.key)
                handover.is_at(other, parent, name)
            handover.searched |= directories
    return ino in handover.still_open and handover.still_open[ino].places != places
