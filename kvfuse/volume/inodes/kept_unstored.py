"""What is not in the record store yet, in shared memory that outlives the daemon: so the death of the process loses
nothing that was answered. A volume of one host with a keeper has it; a power cut may lose what it always could.

Not requests are kept but *states*: of each inode, chunk, name, directory's times and attribute that differs from what
the store has, its present state; of staged bytes a copy. Whoever changes something marks it. `seal` writes the states
of all that is marked as one frame of a log (`kept.log`), which is there wholly or not at all. It is called

* by the door, before a request is answered: so what was answered is kept;
* before a commit is built, with no wait between: so what is kept is never older than what the store has;
* when a commit is settled, with what needs not be kept any more;
* before bytes go into the slots of an extent that no commit has: the extent is kept as unsealed before it changes.

Memory is consistent whenever a task waits - a commit relies on that, too - and so is each frame. An operation that
waits in the middle may be kept half done, as it may be stored half done; it was not answered then, and the kernel sends
the request again.

Where the daemon may be killed, and what the next one finds (`names.restoring` has it brought about):

* before a seal: the state before; the request is sent again and done.
* between the seal and the answer: the state after; the request is sent again, and `fs.once` sees that it was done.
* while bytes are copied, before their frame counts: bytes beyond what the former frame knows, or bytes of a staged
  chunk that the same unanswered write overwrites: it is sent again.
* between the seal, the commit, and its settling: the store has the same state as the log, or the one before. What the
  log says is compared with what the store has: what is equal is no change. So an extent that is in no record is taken
  anew, and one that only the store's record has is given up, once.
* after bytes were written to slots, before the chunk's new state is sealed: the log has the bytes as staged. They are
  staged again, in slots of their own; nothing refers to the former ones, which are free.
* a slot that is given up, and that the log refers to, is free again after the next commit: which is built after a seal.
  Pieces of the room are free when the frame counts that does not refer to them any more.
* while the next daemon restores: the former log is kept until the new one has all of it; then the store is changed.

Where there is no room for the bytes of a file, it is kept as *lost*: what the store has of it is then what is restored
of its content - of a new one nothing, and no name -, and `Handover.unsaved` has whoever has it open hear of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvfuse.kept.keeper import Keeper
from kvfuse.kept.log import KeptLog
from kvfuse.volume.inodes.chunk import COMMITTED
from kvfuse.volume.inodes.dentries import Dentries
from kvfuse.volume.inodes.known_inodes import KnownInodes
from kvfuse.volume.inodes.node import Node, Nodes
from kvfuse.volume.inodes.staged_copies import StagedCopies, StagedCopy
from kvfuse.volume.inodes.unstored_states import (
    LOST,
    ChunkState,
    Frame,
    encode_frame,
    extents_of,
    state_of,
)
from kvfuse.volume.store.schema import INLINE_CHUNKS

log = logging.getLogger(__name__)


class _Kept:
    """An inode that is in the log, and its chunks there."""

    __slots__ = ("chunks", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.chunks: dict[int, StagedCopy | None] = {}


class KeptUnstored:
    """`Unstored` that keeps what is marked."""

    is_on = True

    def __init__(self, kept: KeptLog, nodes: Nodes, dentries: Dentries, places: KnownInodes) -> None:
        self._log = kept
        self._all_nodes, self._dentries, self._places = nodes, dentries, places
        self._nodes: dict[Node, set[int] | None] = {}
        """marked inode -> its marked chunks"""
        self._names: dict[tuple[int, bytes], None] = {}
        self._times: dict[Node, None] = {}
        self._attributes: dict[bytes, tuple[bytes | None] | None] = {}
        """key -> value; None: it is not pending any more"""
        self._kept_nodes: dict[int, _Kept] = {}
        self._kept_names: set[tuple[int, bytes]] = set()
        self._kept_times: dict[int, Node] = {}
        self._kept_attributes: dict[bytes, bytes | None] = {}
        self._copies = StagedCopies(kept)
        self._newly_lost: list[Node] = []

    def begin(self, keeper: Keeper, name: str, content: bytes) -> None:
        self.seal()
        self._log.keep_with(keeper, name, content)

    # -- marks ---------------------------------------------------------------------------------------

    def node(self, node: Node) -> None:
        self._nodes.setdefault(node, None)
        change = self._dentries.get(node.parent, node.name).change
        if change is not None and change.node is node:
            self._names[node.parent, node.name] = None

    def chunk(self, node: Node, index: int) -> None:
        chunks = self._nodes.get(node)
        if chunks is None:
            self._nodes[node] = {index}
        else:
            chunks.add(index)

    def name(self, parent: int, name: bytes) -> None:
        self._names[parent, name] = None

    def times(self, directory: Node) -> None:
        self._times[directory] = None

    def attribute(self, key: bytes, value: bytes | None) -> None:
        self._attributes[key] = (value,)

    def no_attributes(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._attributes[key] = None

    # -- what is kept --------------------------------------------------------------------------------

    def seal(self) -> None:
        if not (self._nodes or self._names or self._times or self._attributes):
            return
        if not self.is_on:
            self._forget_marks()
            return
        frame = Frame()
        try:
            self._fill(frame)
            self._write(frame)
        except Exception:  # whatever it is, what was asked for is done: its caller is answered, without this safety
            log.exception("what is not stored cannot be kept any more for a daemon after this one")
            self.give_up()

    def settled(
        self,
        nodes: Iterable[Node],
        names: Iterable[tuple[int, bytes]],
        times: Iterable[Node],
        attributes: Iterable[bytes],
    ) -> None:
        for node in nodes:
            kept = self._kept_nodes.get(node.ino)
            if kept is None:
                continue
            if node.nlink and not (node.changed or node.committing):
                self._nodes.setdefault(node, None)
            elif node.nlink and len(kept.chunks) > INLINE_CHUNKS:
                self._drop_stored(kept)
        self._names.update([(place, None) for place in names if place in self._kept_names])
        self._times.update([(node, None) for node in times if node.ino in self._kept_times])
        for key in attributes:
            if key in self._kept_attributes and key not in self._attributes:
                self._attributes[key] = None
        self.seal()

    def _drop_stored(self, kept: _Kept) -> None:
        """Of a large file that is still being changed: chunks that the store has as they are."""
        node = kept.node
        marked = self._nodes.get(node) or set()
        stored = [
            index
            for index, copy in kept.chunks.items()
            if index >= INLINE_CHUNKS and copy is None and index not in node.dirty_chunks and index not in marked
        ]
        for index in stored:
            self.chunk(node, index)

    def _fill(self, frame: Frame) -> None:
        """With all that is marked; nothing is marked then."""
        if self._nodes:
            nodes, self._nodes = self._nodes, {}
            for node, chunks in nodes.items():
                self._fill_node(frame, node, chunks)
        if self._names:
            names, self._names = self._names, {}
            get, kept = self._dentries.get, self._kept_names
            for place in names:
                change = get(*place).change
                if change is not None:
                    kept.add(place)
                    frame.names.append((*place, change.node.ino if change.node is not None else 0))
                elif place in kept:
                    kept.remove(place)
                    frame.no_names.append(place)
        if self._times:
            directories, self._times = self._times, {}
            for directory in directories:
                if directory.times_changed and directory.nlink:
                    self._kept_times[directory.ino] = directory
                    frame.times.append((directory.ino, directory.atime, directory.mtime, directory.ctime))
                elif self._kept_times.pop(directory.ino, None) is not None:
                    frame.no_times.append(directory.ino)
        if self._attributes:
            attributes, self._attributes = self._attributes, {}
            for key, value in attributes.items():
                if value is not None:
                    self._kept_attributes[key] = value[0]
                    frame.attributes.append((key, value[0]))
                elif key in self._kept_attributes:
                    del self._kept_attributes[key]
                    frame.no_attributes.append(key)

    def _fill_node(self, frame: Frame, node: Node, chunks: set[int] | None) -> None:
        kept = self._kept_nodes.get(node.ino)
        if not self._is_wanted(node):
            if kept is not None:
                del self._kept_nodes[node.ino]
                frame.no_nodes.append(node.ino)
                self._copies.drop(kept.chunks.values())
            return
        if kept is None:
            kept = self._kept_nodes[node.ino] = _Kept(node)
            chunks = {*(chunks or ()), *node.dirty_chunks}  # marks are dropped of what has no change to be stored yet
            chunks.update([at for at, chunk in node.chunks.items() if at < INLINE_CHUNKS or chunk.staged is not None])
        kept.node = node
        frame.nodes.append(state_of(node))
        for index in chunks or ():
            if index >= INLINE_CHUNKS and self._is_stored(node, index):
                self._copies.drop((kept.chunks.pop(index, None),))
                frame.no_chunks.append((node.ino, index))
            else:
                frame.chunks.append(self._chunk_state(kept, node, index))

    def _is_wanted(self, node: Node) -> bool:
        """The inode differs from what the store has, or nothing else has it."""
        if node.nlink:
            return bool(node.changed or node.committing)
        return node.is_file and not node.reaped and bool(node.handles or self._places.known(node.ino))

    @staticmethod
    def _is_stored(node: Node, index: int) -> bool:
        """Of a chunk that has a record of its own: the record has its state."""
        chunk = node.chunks.get(index)
        if index in node.dirty_chunks or chunk is None or chunk.staged is not None or not node.nlink:
            return False
        return not node.committing and all(extent.state == COMMITTED for extent in chunk.extents)

    def _chunk_state(self, kept: _Kept, node: Node, index: int) -> ChunkState:
        chunk = node.chunks.get(index)
        staged = chunk.staged if chunk is not None else None
        former = kept.chunks.get(index)
        if former is not None and former.staged is not staged:
            self._copies.drop((former,))
            former = None
        extents = extents_of(chunk)
        if staged is None:
            kept.chunks[index] = None
            return ChunkState(node.ino, index, extents)
        copy = kept.chunks[index] = former or StagedCopy(staged)
        self._copies.fill(copy)
        if copy.is_lost:
            if not node.unsaved:
                self._newly_lost.append(node)
            return ChunkState(node.ino, index, extents, LOST)
        return ChunkState(node.ino, index, extents, staged.length, tuple(copy.pieces))

    def _write(self, frame: Frame) -> None:
        if not (self._kept_nodes or self._kept_names or self._kept_times or self._kept_attributes):
            self._log.clear_frames()
        elif not self._log.append_frame(encode_frame(frame)):
            whole = encode_frame(self._whole())
            if not self._log.replace_frames(whole):
                log.warning("there is no room for %d bytes of what is not stored", len(whole))
                self.give_up()
                return
        self._copies.written()
        for node in self._newly_lost:
            self._all_nodes.note_unsaved(node)
        self._newly_lost = []

    def _whole(self) -> Frame:
        """All that is kept, as it is now."""
        frame = Frame(times=[(ino, one.atime, one.mtime, one.ctime) for ino, one in self._kept_times.items()])
        for kept in self._kept_nodes.values():
            frame.nodes.append(state_of(kept.node))
            for index in kept.chunks:
                frame.chunks.append(self._chunk_state(kept, kept.node, index))
        for place in self._kept_names:
            change = self._dentries.get(*place).change
            if change is not None:
                frame.names.append((*place, change.node.ino if change.node is not None else 0))
        frame.attributes = list(self._kept_attributes.items())
        return frame

    def give_up(self) -> None:
        self.is_on = False
        self._log.invalidate_log()
        nodes = [*[kept.node for kept in self._kept_nodes.values()], *self._nodes]
        self._kept_nodes = {}
        self._forget_marks()
        for node in nodes:
            if node.is_file and (node.changed or not node.nlink):
                self._all_nodes.note_unsaved(node)

    def _forget_marks(self) -> None:
        self._nodes, self._names, self._times, self._attributes = {}, {}, {}, {}

    @property
    def size(self) -> int:
        return self._log.used

    @property
    def used_share(self) -> float:
        return self._log.used_share if self.is_on else 0.0

    def close(self, *, is_stored: bool) -> None:
        self.is_on = False
        self._log.close(is_stored=is_stored)
