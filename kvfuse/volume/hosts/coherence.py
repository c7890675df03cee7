"""Follow what other hosts change, by one watch over the records of a shared volume that memory has something of.

* The watch has the records of namespaces, and of those names and inodes that this host has read (`store.followed`). It
  updates inodes in memory, corrects what is known of names, and invalidates the kernel's cache.
* An inode that lost its last name on another host and is open here gets a record that says so, under this client's
  lease: its bytes stay until the last handle is closed, or until the lease ends.
* While the watch is broken the volume trusts nothing that it has not just read. After a reconnect everything cached may
  be stale: the watch drops it, and reads open files anew.

The watch applies changes one record at a time, those of one directory or inode in the order of their commits: the
newest version decides what a name means, so the order of the two names of a rename does not matter. Where a name no
longer means an inode, that is looked for (`lost_names`). It skips this client's own commits.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from stat import S_ISDIR
from weakref import WeakSet

import trio

from kvfuse import failing
from kvfuse.errors import Corrupt, EngineError, Stale
from kvfuse.remote.records.api import Change, Versioned
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.read_ahead import Fetcher
from kvfuse.volume.content.refresh import is_quiet
from kvfuse.volume.hosts.giving import Giving
from kvfuse.volume.hosts.lost_names import LostNames
from kvfuse.volume.hosts.unfollowing import Unfollowing
from kvfuse.volume.inodes.chunk import Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.shared_lookup import SharedLookup
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import Member
from kvfuse.volume.store.sealed import all_keys
from kvfuse.volume.tenancy.granting import Granting
from kvfuse.volume.tenancy.namespace_news import KINDS as NAMESPACE_KINDS
from kvfuse.volume.tenancy.namespace_news import NamespaceNews

RETRY_SECONDS = 0.5
"""Longest pause before a watch that ended is begun anew."""
UNKNOWN_VERSION = 1 << 63
"""of a change that was missed: later than all"""

log = logging.getLogger(__name__)


@dataclass
class CoherenceCounters:
    changes: int = 0
    """records that other hosts changed"""
    watches: int = 0
    """begun; each but the first followed one that broke"""
    held: int = 0
    """removed files that were kept for a handle here"""


@dataclass
class Coherence:
    """Follows the watch of one membership, whose parts own it."""

    core: Core
    lookup: SharedLookup
    journal: Journal
    member: Member
    fetcher: Fetcher
    giving: Giving
    """reports of hosts to each other, and room for those that lack it"""
    namespaces: NamespaceNews
    granting: Granting
    counters: CoherenceCounters = field(default_factory=CoherenceCounters)

    def __post_init__(self) -> None:
        self.records, self.news = self.lookup.records, self.lookup.refresher.news
        self.lost = LostNames(self.lookup.refresher, self._take_removed, self._drop_copies)
        self.followed = self.records.followed
        self.unfollowing = Unfollowing(self.lookup.refresher, self.followed)
        self._unsure_ends: WeakSet[Node] = WeakSet()
        """files that others may have changed: the kernel may have taken an older end for theirs"""
        self._held: dict[int, Node] = {}
        """removed files that are open here: they have, or will have, an h record"""
        self._changed_holds: dict[int, bool] = {}
        """inode -> whether its h record is to be there; not done yet"""
        self._work = trio.Event()

    def statistics(self) -> dict[str, int]:
        return {
            **asdict(self.counters),
            "removed_open_count": len(self._held),
            "followed_count": len(self.followed.topics),
            "is_watched": int(self.lookup.is_watched),
        }

    async def run(self) -> None:
        """Watch, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(failing.vital_task, self.records.run)
            nursery.start_soon(failing.vital_task, self.news.run)
            nursery.start_soon(failing.vital_task, self._keep_holds)
            nursery.start_soon(failing.vital_task, self.lost.run)
            nursery.start_soon(failing.vital_task, self.unfollowing.run)
            nursery.start_soon(failing.vital_task, self.lookup.synced.run)
            nursery.start_soon(failing.service, "room for others", self.giving.run)
            nursery.start_soon(failing.vital_task, self.fetcher.run)
            nursery.start_soon(failing.vital_task, self.namespaces.run)
            nursery.start_soon(failing.vital_task, self.granting.run)
            while True:
                try:
                    await self._watch()
                except EngineError as error:
                    log.warning("the watch of other hosts' changes broke, it is begun anew: %s", error)
                self.core.dentries.names_come()
                self.lookup.is_watched = False
                await trio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.0))

    async def _watch(self) -> None:
        is_first = not self.counters.watches
        self.counters.watches += 1
        changes = self.followed.begin()
        if is_first:
            self.followed.always(NAMESPACE_KINDS)
            self.followed.follow_names(ROOT_INODE)  # the kernel may have listed it to a former daemon
            self.followed.follow_inode(ROOT_INODE)
        self.records.lost_track()
        self.core.nodes.handover.searched.clear()
        await self.lookup.synced.begin(is_memory_empty=not (is_first and len(self.core.nodes)))
        if not is_first:
            await self._renew()
        await self.namespaces.renew()
        self.lookup.is_watched = True
        async for change in changes:
            await self._take(change)

    # -- one change ----------------------------------------------------------------------------------

    async def _take(self, change: Change) -> None:
        """Waits, where a commit of our own is under way that may be this one."""
        kind = change.key[:1]
        if kind in NAMESPACE_KINDS:
            await self.namespaces.take(*change)
            return
        is_own = await self.records.is_own(change.version)
        self.records.heard([change.key], change.version, is_present=change.value is not None)
        self.counters.changes += not is_own
        if kind == b"d":
            self._take_entry(change, is_own)
        elif kind == b"t":
            self._take_times(change)
        elif is_own:
            if kind == b"i" and change.value is not None:
                self._is_ours(schema.key_inode(change.key), change.version)
        elif kind == b"i":
            self._take_inode(change)

    def _take_entry(self, change: Change, is_own: bool) -> None:
        core = self.core
        parent, _, name = schema.split_entry_key(change.key)
        if change.value is not None:
            core.dentries.names_come(parent)
        core.dentries.hear_stored(parent, name, change.value is not None, 0 if is_own else change.version)
        entry = schema.decode_entry(change.value) if change.value is not None else None
        if is_own:
            if isinstance(entry, schema.InodeRecord):
                self._is_ours(entry.ino, change.version)
                core.nodes.note_place(entry.ino, parent, name)
            return
        self.lookup.delegations.note_foreign(parent)
        ino = entry.ino if isinstance(entry, schema.InodeRecord) else entry
        former = core.nodes.at(parent, name)
        if former is not None and not (isinstance(entry, schema.InodeRecord) and former.ino == ino):
            self.lost.note(former, change.version)
        dentry = core.dentries.get(parent, name)
        if change.version > dentry.version:
            is_same = dentry.ino == ino
            is_followed = is_same and core.nodes.get(dentry.ino) is not None
            core.dentries.note(parent, name, dentry.ino if is_same else 0, change.version)
            if not is_followed and (parent == ROOT_INODE or core.places.known(parent)):
                self.news.name(parent, name)  # what is not in memory may be on its way to the kernel in a listing
        if change.value is not None and self.followed.is_new(change.key, change.version):
            core.dentries.shelve(parent, name, Versioned(change.value, change.version))
        if isinstance(entry, schema.InodeRecord):
            self._take_record(entry, change.version, parent, name, own=False)
            if core.nodes.find(entry.ino) is not None:
                core.nodes.note_place(entry.ino, parent, name)
        elif entry is not None and core.nodes.peek(entry) is None and core.places.known(entry):
            core.places.set_content_version(entry, 0)  # its own record is not followed
            self.news.content(entry)

    def _is_ours(self, ino: int, version: int) -> None:
        """Bytes that the kernel cached have another version by a change that came through it."""
        if self.core.places.content_version(ino):
            self.core.places.set_content_version(ino, version)

    def _take_inode(self, change: Change) -> None:
        ino = schema.key_inode(change.key)
        if change.value is not None:
            place = self.core.places.get(ino) or (0, b"")
            self._take_record(schema.decode_inode(change.value), change.version, *place, own=True)
            return
        node = self.core.nodes.get(ino)
        if node is not None and node.is_directory:
            self.core.dentries.directory_removed(ino)
            self.core.end_reads([ino])
            self.journal.pending.loose.withdraw_attributes(node)
            node.nlink = 0
            self.core.nodes.drop(node)
            self.news.attributes(ino)
        elif node is not None:
            self.lost.note(node, change.version)

    def _take_record(self, record: schema.InodeRecord, version: int, parent: int, name: bytes, *, own: bool) -> None:
        """An inode was put. Of one that is not in memory, the kernel may know more than its place."""
        core = self.core
        node = core.nodes.get(record.ino)
        if node is not None:
            if version > node.version:
                place = (parent, name) if not own else (record.parent or node.parent, node.name)
                self.lookup.refresher.take(record, version, place, own=own)
                core.places.set(record.ino, *place)
        elif core.places.known(record.ino):
            if not own:
                core.places.set(record.ino, parent, name)
            core.places.set_content_version(record.ino, 0)
            self.news.content(record.ino)
        if node is None and own:  # perhaps a directory that is in use here, or one above
            changed, is_directory = core.namespaces.gates.ancestors.change(record.ino), S_ISDIR(record.mode)
            if changed or is_directory:
                core.end_reads(changed, left_too=is_directory)
        elif node is None:
            core.nodes.handover.is_at(record.ino, parent, name)

    def _take_times(self, change: Change) -> None:
        """Our own, too: what was read before it may be older."""
        directory = self.core.nodes.get(schema.key_inode(change.key))
        if directory is not None and change.value is not None:
            self.lookup.refresher.take_times(directory, change.value, change.version)

    def opened(self, handle: FileHandle) -> None:
        """A file is opened: the handle says whether what the kernel cached of its bytes is true. From now on it is.

        Bytes at the start of one of which the kernel has none will be asked for.
        """
        node, places = handle.node, self.core.places
        if not node.nlink and node.version:
            self.hold(node)
        handle.cache_valid = places.content_version(node.ino) > 0
        if not handle.cache_valid and node.size:
            self._unsure_ends.add(node)
        places.set_content_version(node.ino, max(node.version, 1))
        chunk = node.chunks.get(0)
        if handle.readable and not handle.cache_valid and chunk is not None and not chunk.staged and chunk.extents:
            self.fetcher.opened(node, chunk.extents[0])

    def taken_over(self, handle: FileHandle) -> None:
        """A file is open by a handle of the daemon before this one: nobody heard what became of it meanwhile."""
        if handle.node.size:
            self._unsure_ends.add(handle.node)
        self._content_differs(handle.node)

    def append_offset(self, node: Node, offset: int) -> int:
        """Where bytes go that the kernel wants at ``offset`` by a descriptor for appends: it may not know yet how far
        others got. Where they had no hand in it the kernel means what it says: bytes of a mapping come by any
        descriptor that may write, and O_APPEND can be taken away.
        """
        if offset >= node.size or (node not in self._unsure_ends and self.core.places.content_version(node.ino)):
            return offset
        self._content_differs(node)
        return node.size

    def _content_differs(self, node: Node) -> None:
        """Bytes are not, or not where, the kernel cached them."""
        self.core.places.set_content_version(node.ino, 0)
        self.news.content(node.ino)

    # -- removed files that are open here ------------------------------------------------------------

    def _take_removed(self, ino: int) -> None:
        """Another host took the last name of a file."""
        node = self.core.nodes.get(ino)
        if node is None or node.reaped:
            return
        self.news.attributes(ino)
        if node.nlink and not is_quiet(node):
            self.journal.refusals.drop_changes(node)
        node.nlink = 0
        if node.handles:
            self.hold(node)
        else:
            self._end(node)

    def _drop_copies(self, chunks: Iterable[Iterable[Extent | schema.ExtentRecord]]) -> None:
        """The disk tier need not keep these chunks of a removed file."""
        if self.core.disk is not None:
            for extents in chunks:
                for extent in extents:
                    self.core.disk.drop(extent.addr, extent.length, extent.generation)

    def _end(self, node: Node) -> None:
        """Nobody can ask for the file any more: what only memory has of it is given up."""
        self.core.tier.drop(node.ino)
        self._drop_copies([chunk.extents for chunk in node.chunks.values()])
        self.journal.refusals.reap(node)
        self.core.nodes.drop(node)

    def hold(self, node: Node) -> None:
        """The file is open here and has no name: nobody may free its bytes."""
        if node.ino not in self._held:
            self.counters.held += 1
            self._held[node.ino] = node
            self._set_hold(node.ino, True)

    def closed(self, node: Node) -> bool:
        """The last handle of a file was closed. True: another host removed it, and nothing of it is left here."""
        if node.nlink or self._held.pop(node.ino, None) is None:
            return False
        self._set_hold(node.ino, False)
        self._end(node)
        return True

    def _set_hold(self, ino: int, is_held: bool) -> None:
        self._changed_holds[ino] = is_held
        self._work.set()

    async def _take_up_holds(self) -> None:
        """What the daemon before this one held, as the same client, and is open no more, is to go."""
        for key in await all_keys(self.core.records, b"h"):
            ino, client = schema.split_open_key(key)
            if client == self.member.client and ino not in self._held and not self._is_open(ino):
                self._set_hold(ino, False)

    def _is_open(self, ino: int) -> bool:
        node = self.core.nodes.get(ino)
        return (node is not None and node.handles > 0) or ino in self.core.nodes.handover.still_open

    async def _keep_holds(self) -> None:
        """Write what `hold` and `closed` said, for ever."""
        while self.core.left.is_resumed:
            try:
                await self._take_up_holds()
                break
            except EngineError as error:
                log.info("removed files that were open before are looked for later: %s", error)
                await trio.sleep(RETRY_SECONDS)
        while True:
            await self._work.wait()
            self._work = trio.Event()
            for ino, is_held in list(self._changed_holds.items()):
                key = schema.open_key(ino, self.member.client)
                try:
                    if is_held:
                        await self.records.commit({key: b""}, lease=self.member.lease)
                    else:
                        await self.records.commit({}, [key])
                except EngineError as error:
                    log.warning("inode %d is removed, and open here: that could not be said yet: %s", ino, error)
                    self._work.set()
                    await trio.sleep(RETRY_SECONDS * random.random())
                else:
                    if self._changed_holds[ino] == is_held:
                        del self._changed_holds[ino]
                    else:
                        self._work.set()

    # -- a watch that broke --------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Drop what is cached, and read what is open anew. EngineError leaves it to be done again."""
        core = self.core
        core.dentries.clear()
        for node in core.nodes.held():
            if not node.own_record:
                core.nodes.note_place(node.ino, node.parent, node.name)
        ancestors = core.namespaces.gates.ancestors
        core.end_reads((), left_too=True)
        for ino in [ino for ino in ancestors.inodes() if core.nodes.get(ino) is None]:
            core.end_reads(ancestors.change(ino))  # nobody knows what it was
        kept = [node for node in core.nodes if node.handles or not is_quiet(node) or node.is_directory]
        for node in [node for node in core.nodes if not node.busy and not node.is_directory]:
            node.end_map()
            core.tier.drop(node.ino)
            core.nodes.drop(node)
        core.places.distrust_all()
        for ino, parent, name in core.places:
            self.news.name(parent, name)
            self.news.content(ino)
        for node in kept:
            if node.nlink and node.version:
                await self._renew_node(node)

    async def _renew_node(self, node: Node) -> None:
        try:
            await self.lookup.refresher.renew(node)
        except Corrupt as error:  # whoever asks for it gets this error; the watch goes on
            log.error("inode %d cannot be read anew: %s", node.ino, error)
        except Stale:
            (removed,) = await self.records.get([schema.orphan_key(node.ino)])
            if removed is not None:
                self._take_removed(node.ino)
            elif node.is_directory:
                self.core.nodes.drop(node)
            else:
                self.lost.note(node, UNKNOWN_VERSION)
