"""Inodes in memory are brought up to what the record store says of them, where other hosts write it, too.

Only what nobody changes here is taken over as a whole. An inode with changes of our own keeps them: the journal puts
both together when it commits them, and finds that the record has moved.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfuse.errors import Stale
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.content.kernel_news import KernelNews
from kvfuse.volume.inodes.core import Core, put_directory
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema


@dataclass
class Refresher:
    """Takes over what the record store says of inodes. One of each membership."""

    core: Core
    chunks: Chunks
    news: KernelNews

    async def renew(self, node: Node) -> None:
        """Bring an inode up to what the store says, unless it was changed here. Stale, if it is not where it was."""
        keys = [schema.inode_key(node.ino), schema.times_key(node.ino), schema.entry_key(node.parent, node.name)]
        own, times, entry = await self.core.records.get(keys if node.name else [*keys[:2], schema.inode_key(0)])
        if own is not None:
            self.take(schema.decode_inode(own.value), own.version, (node.parent, node.name), own=True)
            if times is not None:
                self.take_times(node, times.value, times.version)
            return
        record = schema.decode_entry(entry.value) if entry is not None else None
        if entry is None or not isinstance(record, schema.InodeRecord) or record.ino != node.ino:
            raise Stale(f"inode {node.ino} is gone")
        self.take(record, entry.version, (node.parent, node.name), own=False)

    # -- nothing waits -------------------------------------------------------------------------------

    def take(self, record: schema.InodeRecord, version: int, place: tuple[int, bytes], *, own: bool) -> Node:
        """The node of a record that was just read. ``place``: the name that led to it; ``own``: the record is its own.

        What the node says already is not older than the record, or it is brought up to it.
        """
        node = self.core.nodes.get(record.ino)
        if node is not None and not node.nlink and version > node.version:
            self.chunks.revive(node)  # another host renamed it before our removal came
            node = self.core.nodes.get(record.ino)
            if node is not None and not (node.changed or node.committing or node.lock):
                self.chunks.drop_all(node)  # also what was written to it since: what is read next is what is stored
                node.dead, node.base = [], None
        if node is None:
            node = self.chunks.restore_chunks(Node.from_record(record), record)
            node.own_record, node.version, node.base = own, version, record
            _put_at(self.core, node, record, place)
            if self.core.places.content_version(node.ino) != version:
                self.core.places.set_content_version(node.ino, 0)
            return self.core.nodes.add(node)
        if version > node.version and is_quiet(node):
            self._bring_up(node, record, own=own)
            node.version = version
            _put_at(self.core, node, record, place)
        elif version > max(node.version, node.moved_version) and not own:  # an answer may be older than the news
            node.moved_to, node.moved_version = place, version
        elif own and version == node.version:
            _put_at(self.core, node, record, place)
        return node

    def _bring_up(self, node: Node, record: schema.InodeRecord, *, own: bool) -> None:
        base = node.base
        if base is None or (base.mode, base.uid, base.gid) != (record.mode, record.uid, record.gid):
            self.core.readers_change(node)
        if not node.is_directory:
            if not node.atime_moved or base is None or record.atime != base.atime:
                node.atime, node.atime_moved = record.atime, False
            node.mtime, node.ctime = record.mtime, record.ctime
            if base is None or _content_of(base) != _content_of(record):
                self._replace_content(node, record)
        node.mode, node.uid, node.gid, node.nlink = record.mode, record.uid, record.gid, record.nlink
        node.flags, node.chunk_size, node.target = record.flags, record.chunk_size, record.target
        if node.namespace != record.namespace:
            self.core.namespaces.moves_border(node.ino)
            node.namespace = record.namespace
        node.own_record, node.base = own, record
        node.capability_free = False
        node.appends, node.cut_size = False, None
        self.news.attributes(node.ino)

    def _replace_content(self, node: Node, record: schema.InodeRecord) -> None:
        for index in list(node.chunks):
            node.changing(index)
        node.chunks.clear()
        node.complete = False
        node.content_merges += 1
        self.chunks.restore_chunks(node, record)
        node.far_blocks = record.far_blocks
        node.end_moved += record.size - node.size
        node.set_size(record.size)
        self.core.places.set_content_version(node.ino, 0)
        self.news.content(node.ino)

    def take_times(self, node: Node, value: bytes, version: int) -> None:
        """A directory's times. The watch also reports, late, what this host stored: old versions change nothing."""
        if version <= node.times_version:
            return
        node.times_version = version
        atime, mtime, ctime = schema.decode_times(value)
        if node.times_changed:  # of two changes at the same time the later one holds
            if ctime > node.ctime:
                node.mtime, node.ctime = mtime, ctime
        elif (mtime, ctime) == (node.mtime, node.ctime):
            node.atime = max(node.atime, atime)  # it moves without being stored (`access`)
        else:
            node.atime, node.mtime, node.ctime = atime, mtime, ctime
        self.news.attributes(node.ino)


def _put_at(core: Core, node: Node, record: schema.InodeRecord, place: tuple[int, bytes]) -> None:
    """``place``: a name that led to the inode, or did once, or none where it was found by its number.

    A directory is where its record says, also where the name is not known: the record that is put next says it again.
    """
    parent, name = place
    if node.is_directory:
        put_directory(core, node, record.parent)
        if name and record.parent == parent:
            node.name = name
    elif name:
        node.parent, node.name = place
        core.nodes.note_place(node.ino, parent, name)


def is_quiet(node: Node) -> bool:
    """Nothing of the inode was changed here that the store does not know, or is about to be."""
    return not (node.changed or node.committing or node.staged_count or node.born or node.dead or node.lock)


def _content_of(record: schema.InodeRecord) -> tuple[object, ...]:
    """What is the same as long as the bytes are. Chunks with records of their own show in the time of change.

    That of the inode, as the bytes' time can be set back; so other changes of such a file count as one of its bytes.
    """
    far = record.ctime if record.flags & schema.FLAG_CHUNK_RECORDS else 0
    return record.size, record.chunks, record.far_blocks, record.chunk_size, far
