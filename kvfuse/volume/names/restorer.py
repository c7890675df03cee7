"""Restores changes that a former daemon had not stored, from the log that it kept (`inodes.unstored`).

The log has the last state in memory; the record store, the stored one. The restorer makes the difference pending, as
operations would have left it, before the daemon serves anything; the first commit stores it. Some stays as stored:

* an inode with bytes for which the log had no room. A new one does not exist, and its name keeps its former inode;
* chunks whose slots are no longer free. Then something else has written to the volume since;
* bytes for which the volume has no room any more;
* everything, if the log cannot be read.

A handle that has such a file open for writing gets an error once (`Handover.miss`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvfuse import errors
from kvfuse.kept.keeper import Keeper
from kvfuse.kept.log import KeptLogReader
from kvfuse.slab.allocator import Slot
from kvfuse.volume.api import NAME_MAX
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.content.writer import Staging
from kvfuse.volume.inodes.chunk import FRESH, Chunk, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.metadata_budget import new_inode
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.unstored_states import LOST, ChunkState, Frame, NodeState, decode_frame
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.names.nameless import Nameless
from kvfuse.volume.store import schema

log = logging.getLogger(__name__)

NAME = "volume/unstored"
"""the keeper's name of the log"""
FAILED = "volume/failed"
"""the keeper's name of a mark: a daemon failed to restore the log; see `kept.keeper`"""
KEYS_AT_ONCE = 1000

Place = tuple[int, bytes]


class LogLost(Exception):
    """The log cannot be read: changes that were not stored are lost."""


@dataclass
class KeptChanges:
    """The contents of a log, all frames together."""

    kept: KeptLogReader
    nodes: dict[int, NodeState] = field(default_factory=dict)
    chunks: dict[int, dict[int, ChunkState]] = field(default_factory=dict)
    """inode -> chunk index -> chunk"""
    names: dict[Place, int] = field(default_factory=dict)
    times: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    attributes: dict[bytes, bytes | None] = field(default_factory=dict)

    def add_frame(self, frame: Frame) -> None:
        for ino in frame.no_nodes:
            self.nodes.pop(ino, None)
            self.chunks.pop(ino, None)
        for ino, index in frame.no_chunks:
            self.chunks.get(ino, {}).pop(index, None)
        for place in frame.no_names:
            self.names.pop(place, None)
        for ino in frame.no_times:
            self.times.pop(ino, None)
        for key in frame.no_attributes:
            self.attributes.pop(key, None)
        self.nodes.update([(node.ino, node) for node in frame.nodes])
        for chunk in frame.chunks:
            self.chunks.setdefault(chunk.ino, {})[chunk.index] = chunk
        self.names.update([((parent, name), ino) for parent, name, ino in frame.names if 0 < len(name) <= NAME_MAX])
        self.times.update([(ino, (atime, mtime, ctime)) for ino, atime, mtime, ctime in frame.times])
        self.attributes.update(frame.attributes)


def find_kept_changes(keeper: Keeper, volume_id: bytes) -> KeptChanges | None:
    """The changes that a former daemon left of this volume; None for none. LogLost: they cannot be read."""
    kept = keeper.take(NAME)
    if kept is None:
        return None
    try:
        found = KeptLogReader(kept)
    except (ValueError, OSError) as error:
        raise LogLost(str(error)) from error
    try:
        if kept.content != volume_id:
            raise ValueError("it is another volume's")
        left = KeptChanges(found)
        for frame in found.read_frames():
            left.add_frame(decode_frame(frame))
    except (ValueError, msgspec.DecodeError) as error:
        is_missed = not found.is_stored
        found.close()
        if is_missed:
            raise LogLost(str(error)) from error
        log.warning("files without names, left by the last daemon, are lost: %s", error)
        return None
    return left


class _Stored(NamedTuple):
    """An inode as the store has it."""

    record: schema.InodeRecord
    place: Place | None
    """its name's place, if the name's record has the inode"""
    is_orphan: bool = False


@dataclass
class Restorer:
    """Restores once, before anything runs. ``left``: from `find_kept_changes`."""

    core: Core
    journal: Journal
    lookup: Lookup
    nameless: Nameless
    chunks: Chunks
    staging: Staging
    left: KeptChanges

    def __post_init__(self) -> None:
        self._stored: dict[int, _Stored] = {}
        self._meant: dict[Place, int] = {}
        """name that the log has -> inode that it means in the store"""
        self._extents: dict[tuple[int, int], Sequence[schema.ExtentRecord]] = {}
        """(inode, index) -> stored extents of a chunk that the log has"""
        self._removed: dict[int, int] = {}
        """inode that loses its last name -> the inode that takes it, or 0"""
        self._lost: set[int] = set()
        """inodes whose content stays as stored: their writers have to get an error"""
        self._slots: dict[int, list[Slot]] = {}
        """inode -> slots that were claimed or allocated for it"""
        self._staged: dict[tuple[int, int], tuple[bytes, list[Slot]]] = {}
        """(inode, index) -> bytes, and slots for them"""

    async def restore(self) -> set[int]:
        """Make all changes pending. Returns inodes whose bytes are lost. EngineError: the store cannot be read."""
        left = self.left
        await self._read_stored()
        self._lost = {
            ino for ino, chunks in left.chunks.items() if any(one.staged_length == LOST for one in chunks.values())
        }
        wanted = [ino for ino in left.nodes if ino not in self._lost and self._is_wanted(ino)]
        for take in (self._claim_slots, self._allocate_slots):  # claims first: they need certain slots
            for ino in wanted:
                if ino not in self._lost:
                    try:
                        take(ino)
                    except (ValueError, errors.NoSpace) as error:
                        log.error("unstored bytes of inode %d are lost: %s", ino, error)
                        self.core.slabs.cancel(self._slots.pop(ino, ()))
                        self._lost.add(ino)
        for ino in left.nodes:  # also numbers beyond those announced, if the store refused commits for long
            self.core.inodes.pass_over(ino)
        nodes = {ino: node for ino in left.nodes if (node := await self._restore_node(ino)) is not None}
        await self._restore_names(nodes)
        await self._restore_rest()
        if nodes or left.names:
            log.warning(
                "restored changes that the last daemon had not stored: %d inodes, %d names", len(nodes), len(left.names)
            )
        left.kept.close()
        return self._lost

    # -- stored state --------------------------------------------------------------------------------

    async def _get_records(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        wanted, found = list(dict.fromkeys(keys)), {}
        for start in range(0, len(wanted), KEYS_AT_ONCE):
            some = wanted[start : start + KEYS_AT_ONCE]
            rows = await self.core.records.get(some)
            found.update({key: row.value for key, row in zip(some, rows, strict=True) if row is not None})
        return found

    async def _read_stored(self) -> None:
        """Read the stored state of the log's names and inodes."""
        left = self.left
        places = dict.fromkeys([*left.names, *[(one.parent, one.name) for one in left.nodes.values() if one.name]])
        keys = [schema.entry_key(*place) for place in places]
        keys += [schema.inode_key(ino) for ino in left.nodes]
        keys += [schema.orphan_key(ino) for ino, one in left.nodes.items() if not one.nlink]
        rows = await self._get_records(keys)
        references: set[int] = set()
        for place in places:
            value = rows.get(schema.entry_key(*place))
            entry = schema.decode_entry(value) if value is not None else 0
            if isinstance(entry, schema.InodeRecord):
                self._stored[entry.ino] = _Stored(entry, place)
                entry = entry.ino
            elif entry:
                references.add(entry)
            if place in left.names:
                self._meant[place] = entry
        rows |= await self._get_records([schema.inode_key(ino) for ino in references - left.nodes.keys()])
        for key, value in rows.items():
            if key[:1] in (b"i", b"o"):
                ino = schema.key_inode(key)
                self._stored[ino] = _Stored(schema.decode_inode(value), None, key[:1] == b"o")
        far = [(ino, index) for ino, chunks in left.chunks.items() for index in chunks]
        values = await self._get_records(
            [schema.chunk_key(*one) for one in far if one[1] >= schema.INLINE_CHUNKS and one[0] in self._stored]
        )
        for ino, index in far:
            stored = self._stored.get(ino)
            if stored is not None and index < len(stored.record.chunks):
                self._extents[ino, index] = stored.record.chunks[index]
            elif (value := values.get(schema.chunk_key(ino, index))) is not None:
                self._extents[ino, index] = schema.decode_chunk(value)

    def _claim_slots(self, ino: int) -> None:
        """Claim the slots that no record names. ValueError: they are not free."""
        claimed = self._slots.setdefault(ino, [])
        for index, chunk in self.left.chunks.get(ino, {}).items():
            known = {(one.addr, one.generation) for one in self._extents.get((ino, index), ())}
            for extent in chunk.extents:
                if (extent.addr, extent.generation) in known:
                    continue
                slot = Slot(extent.addr, extent.slot_size, self.left.nodes[ino].namespace)
                self.core.slabs.claim(slot)
                claimed.append(slot)

    def _allocate_slots(self, ino: int) -> None:
        """Read bytes that no slot has, and allocate slots for them. NoSpace; ValueError: the log lacks them."""
        taken = self._slots[ino]
        for index, chunk in self.left.chunks.get(ino, {}).items():
            if chunk.staged_length > 0:
                data = self.left.kept.read_pieces(chunk.pieces, chunk.staged_length)
                slots = self.core.slabs.allocate(len(data), self.left.nodes[ino].namespace)
                taken += slots
                self._staged[ino, index] = data, slots

    def _is_wanted(self, ino: int) -> bool:
        """The log has changes to restore of the inode."""
        state, stored = self.left.nodes[ino], self._stored.get(ino)
        is_open = ino in self.core.nodes.handover.still_open
        if stored is None:
            return ino not in self._lost and (state.nlink > 0 or is_open)
        return is_open or not stored.is_orphan

    # -- inodes --------------------------------------------------------------------------------------

    async def _restore_node(self, ino: int) -> Node | None:
        """Make the inode's node, in the log's state but for its names. None: the inode does not exist."""
        state, stored = self.left.nodes[ino], self._stored.get(ino)
        if not self._is_wanted(ino):
            return None
        if stored is None:
            node = Node(ino, state.mode, state.uid, state.gid, state.chunk_size)
        else:
            node = self._make_stored(stored)
        self.core.nodes.add(node)
        if ino not in self._lost:
            node.size, node.far_blocks = state.size, state.far_blocks
            node.flags = state.flags
        _set_attributes(node, state)
        if stored is None and state.nlink:
            self._count_new(node)
        for index, chunk in self.left.chunks.get(ino, {}).items() if ino not in self._lost else ():
            await self._restore_chunk(node, index, chunk)
        if state.nlink or (stored is not None and not stored.is_orphan):
            node.nlink = max(1, state.nlink)  # one without names loses the last one below
            self.journal.pending.touch(node, forced=True)
        else:
            node.nlink = 0
            node.complete = stored is None
            self.journal.pending.touch(node)
        return node

    def _make_stored(self, stored: _Stored) -> Node:
        record = stored.record
        node = self.chunks.restore_chunks(Node.from_record(record), record)
        node.own_record = stored.place is None and not stored.is_orphan
        if stored.place is not None:
            node.parent, node.name = stored.place
        return node

    def _count_new(self, node: Node) -> None:
        core = self.core
        core.file_count += 1
        if node.namespace and node.is_file:
            core.namespaces.accounts.add_files(node.namespace, 1)
        core.metadata.reserve(node, new_inode(node.name, is_directory=node.is_directory, target=node.target))
        if node.is_directory:
            core.dentries.directory_made(node.ino)

    async def _restore_chunk(self, node: Node, index: int, state: ChunkState) -> None:
        """Restore the chunk's extents, and the bytes staged over them."""
        stored = {(one.addr, one.generation): one for one in self._extents.get((node.ino, index), ())}
        before = node.chunks.get(index)
        if before is None and stored:
            before = Chunk([self.core.sharing.extent_of(one, node.namespace) for one in stored.values()])
        former = {(one.addr, one.generation): one for one in (before.extents if before is not None else ())}
        extents: list[Extent] = []
        for one in state.extents:
            extent = former.pop((one.addr, one.generation), None)
            if extent is None:
                extent = Extent(one.addr, one.slot_size, one.length, one.generation, b"", FRESH, node.namespace)
                self.core.generations.pass_over(one.generation)
                node.born.append(extent)
            extent.length, extent.reach, extent.checksums = one.length, one.reach, one.checksums
            extent.packing = one.packing
            extents.append(extent)
        for extent in former.values():
            self.core.discard(node, extent)
        if node.unstored is not None:
            node.unstored.chunk(node, index)
        node.chunk_changed(index)
        chunk = node.chunks[index] = Chunk(extents)
        if index == 0 and extents:
            node.described = (-1, b"", 0, 0, 0, 0)
        staged = self._staged.get((node.ino, index))
        if staged is not None:
            self.staging.stage_copy(node, chunk, *staged)
        elif not extents and index < schema.INLINE_CHUNKS:
            del node.chunks[index]

    # -- names ---------------------------------------------------------------------------------------

    async def _restore_names(self, nodes: dict[int, Node]) -> None:
        meant = set(self.left.names.values())
        for place, ino in self._list_names():
            was = self._meant[place]
            node = await self._find_node(ino, nodes) if ino else None
            if ino and node is None:
                log.error("the new name %r in directory %d is lost: it has no inode %d", place[1], place[0], ino)
                continue
            moved = None
            if was and was != ino:
                moved = await self._find_node(was, nodes)
                state = self.left.nodes.get(was)
                if not state.nlink if state is not None else was not in meant:
                    self._removed[was] = ino
                elif moved is not None and node is not None:
                    self.journal.pending.tie(node, moved)
            stored = bool(was)
            self.journal.pending.set_name(*place, node, stored, moved if node is None else None)
        for was, ino in self._removed.items():
            await self._remove_inode(was, nodes.get(ino))

    def _list_names(self) -> Iterator[tuple[Place, int]]:
        """Yield names and the inodes that they are to mean, without lost inodes."""
        for place, ino in self.left.names.items():
            if not (ino in self._lost and ino not in self._stored):
                yield place, ino
            elif (was := self._meant[place]) and (state := self.left.nodes.get(was)) is not None and state.nlink:
                yield place, 0  # its former inode had been renamed before

    async def _find_node(self, ino: int, nodes: dict[int, Node]) -> Node | None:
        """The node of an inode that may not have changed itself."""
        node = nodes.get(ino) or self.core.nodes.get(ino)
        if node is None and (stored := self._stored.get(ino)) is not None and not stored.is_orphan:
            node = self.core.nodes.add(self._make_stored(stored))
        return node

    async def _remove_inode(self, ino: int, heir: Node | None) -> None:
        """Remove an inode that the store has under a name, and that has none any more."""
        node = self.core.nodes.get(ino)
        if node is None:
            return
        await self.nameless.load(node)
        node.nlink = 0
        self.nameless.note_removed(node, heir if heir is not node else None)

    # -- the rest ------------------------------------------------------------------------------------

    async def _restore_rest(self) -> None:
        for ino, times in self.left.times.items():
            if ino in self._removed:
                continue
            try:
                directory = await self.lookup.find_directory(ino)
            except (errors.Stale, errors.NotADirectory):
                continue
            if directory.nlink:
                directory.atime, directory.mtime, directory.ctime = times
                self.journal.pending.touch_times(directory)
        for key, value in self.left.attributes.items():
            ino = schema.key_inode(key)
            node, state = self.core.nodes.get(ino), self.left.nodes.get(ino)
            if ino in self._removed or (state is not None and not state.nlink):
                if node is not None and not node.nlink:  # its handles see them
                    node.unstored_attributes = {key: value, **node.unstored_attributes}
                continue
            self.journal.pending.loose.put(key, value)
            if node is not None:
                node.xattr_names |= {schema.xattr_name(key)}


def _set_attributes(node: Node, state: NodeState) -> None:
    node.mode, node.uid, node.gid = state.mode, state.uid, state.gid
    node.atime, node.mtime, node.ctime = state.atime, state.mtime, state.ctime
    node.chunk_size = state.chunk_size
    node.parent, node.name, node.rdev, node.target = state.parent, state.name, state.rdev, state.target
    node.namespace, node.own_record = state.namespace, state.own_record
    if state.attributes:
        node.unstored_attributes = dict(state.attributes)
