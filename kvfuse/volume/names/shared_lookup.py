"""Finds inodes in shared volumes, where other hosts change names, too.

The version tells the newer of two states. Lookups in strict folders read the store, so an open here sees files that
other hosts have closed. Lookups in relaxed folders use the dentry table, which a watch keeps current (`coherence`); so
do, in strict folders, lookups of directories, and of files that this client changed last: the next read of the store
checks these (`path_beliefs`). Of a folder that is delegated to this host, memory says which names are absent
(`delegations`). While the store does not answer, lookups use the dentry table.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import trio

from kvfuse import errors
from kvfuse.remote.records.api import RecordLimits
from kvfuse.volume.api import NAME_MAX
from kvfuse.volume.inodes.dentries import ABSENT
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.delegations import Delegations, NotGivenBack
from kvfuse.volume.names.lookup import Found, Lookup
from kvfuse.volume.names.name_change import PlanDraft
from kvfuse.volume.names.pages import LEARN_ROWS_MAX, Learning, Shelf
from kvfuse.volume.names.path_beliefs import Paths, PathStep
from kvfuse.volume.names.synced import Synced
from kvfuse.volume.store import schema
from kvfuse.volume.store.joined_reads import SharedRecords

CATCH_UP_COMMITS = 3
"""Commits to await for one inode: one may have been built before its record changed, the next one merges it."""
PATH_SHARE = 4
"""Names above a changed one that are expected with it: one for every so many operations that a commit may have."""


class NotCaughtUp(errors.EngineError):
    """Another host has changed an inode that has uncommitted changes here, and these cannot be committed now.

    So its state is unknown, and the lookup fails, instead of using the dentry table.
    """


class InodeRow(NamedTuple):
    """A stored record of an inode, with the arguments of `Refresher.take`."""

    record: schema.InodeRecord
    version: int
    place: tuple[int, bytes]
    own: bool


def expected_names_max(limits: RecordLimits) -> int:
    """Most names of a path that one commit expects."""
    return max(1, limits.commit_operations_max // PATH_SHARE)


@dataclass
class SharedLookup(Lookup):
    """Finds inodes in a shared volume. ``records``: the record store, with reads that share round trips."""

    records: SharedRecords
    synced: Synced
    delegations: Delegations
    is_memory_newest = False

    def __post_init__(self) -> None:
        self.paths, self.shelf = Paths(self.core), Shelf(self.core, self.refresher)
        self.learning = Learning(self.core, self.journal, LEARN_ROWS_MAX, self.shelf.keep_records)
        self.is_watched = False
        """a watch delivers changes of other hosts"""

    def must_ask(self, parent: int) -> bool:
        directory = self.core.nodes.get(parent)
        return directory is None or not self.is_watched or self.is_strict(directory)

    def follow_changed(self, draft: PlanDraft) -> None:
        """Follow what a commit is about to change: memory has it from then on, without a read."""
        followed = self.records.followed
        for change in draft.inodes.values():
            if change.own:
                followed.follow_inode(change.node.ino)
        for directory in [*[parent for parent, _, _ in draft.names], *[node.ino for node in draft.made]]:
            followed.follow_names(directory)

    def expect_own(self, inodes: Sequence[int]) -> None:
        for ino in inodes:
            self.records.followed.follow_inode(ino)

    async def await_names(self, directory: int) -> None:
        self.delegations.check(directory)
        if self.must_ask(directory):
            await self.delegations.await_names(directory)

    # -- for the kernel ------------------------------------------------------------------------------

    async def find_for_kernel(self, parent: int, name: bytes) -> Found:
        check_name(name)
        asked_at = trio.current_time()
        with suppress(errors.EngineError):  # memory answers all the same
            directory = await self.find_directory(parent)  # `must_ask` depends on it
            if directory.nlink == 0:
                raise errors.NotFound(f"directory {parent} was removed")
        found, asks = self.find_known(parent, name), self.must_ask(parent)
        if found is not None and found.change:
            self.delegations.check(parent)
        if found is not None and not found.change and not asks and not await self.synced.is_sure():
            found = await self.find_shared(parent, name, is_fresh=True)
        is_believed = asks and found is not None and not found.change and self._is_believed(parent, name, found)
        if found is None or (asks and not found.change and not is_believed):
            above = self.paths.list_above(parent) if asks else ()
            found = await self.find_shared(parent, name, is_fresh=asks, above=above)
        if found.node is not None:
            self.paths.note_found(found.node, parent, name, asked_at=None if is_believed else asked_at)
        return found

    def _is_believed(self, parent: int, name: bytes, found: Found) -> bool:
        """Memory may answer for a name in a strict folder: the call that acts upon it checks it.

        For other hosts' files that would cost one request of the kernel more at each open. A file that is open here
        cannot be checked later: the kernel asks for attributes of descriptors in the same way, and these have no name.
        """
        node = found.node
        if node is None or not self.is_watched or self.paths.is_contested(parent, name):
            return False
        if node.is_directory:
            return self.paths.is_sure(node, parent, name)
        return not node.handles and self.records.made(found.version)

    def is_doubtful(self, ino: int) -> bool:
        return self.paths.find_doubt(ino) is not None

    async def find_current(self, ino: int) -> Node:
        doubt = self.paths.find_doubt(ino)
        if doubt is not None:
            await self._check_doubt(doubt)
        return await self.find_node(ino)

    async def _check_doubt(self, doubt: PathStep) -> None:
        """Bring a file up to the store, if the store answers. NotCaughtUp; Moved: the name means another file."""
        links = [doubt, *self.paths.list_above(doubt.parent)]
        keys = [link.key for link in links] + [schema.inode_key(doubt.ino), schema.times_key(doubt.ino)]
        asked_at = trio.current_time()
        try:
            rows = dict(zip(keys, await self.core.records.get(keys), strict=True))
        except errors.Corrupt:
            raise
        except errors.EngineError:
            return  # memory answers all the same, and the next call checks
        try:
            self.paths.check(links, rows, asked_at)
        except errors.Stale:
            node = self.core.nodes.get(doubt.ino)
            if node is None or not node.handles:
                raise
            return  # it was opened meanwhile: a descriptor means the inode, whatever its names are
        named, own = rows[doubt.key], rows[schema.inode_key(doubt.ino)]
        assert named is not None, "a name that means something has a record"
        entry = schema.decode_entry(named.value)
        place = (doubt.parent, doubt.name)
        if isinstance(entry, schema.InodeRecord):
            await self._catch_up(InodeRow(entry, named.version, place, own=False))
        elif own is not None:
            await self._catch_up(InodeRow(schema.decode_inode(own.value), own.version, place, own=True))
        self.paths.settle_doubt(doubt)

    async def _catch_up(self, newest: InodeRow) -> Node:
        """Bring an inode up to a record. One that is changed here, too, has both changes when this returns.

        Its commit conflicts with the record, and merges both. A commit in flight may have preceded the record; then the
        record is taken afterwards, or merged with changes made meanwhile. In relaxed folders this does not wait for
        that. NotCaughtUp: the changes here cannot be committed now.
        """
        node = self.refresher.take(newest.record, newest.version, newest.place, own=newest.own)
        directory = self.core.nodes.get(newest.place[0])
        is_awaited = directory is None or self.is_strict(directory)
        for _ in range(CATCH_UP_COMMITS if is_awaited else 0):
            if node.version >= newest.version or not node.nlink:
                return node
            if not (node.changed or node.committing):
                self.journal.pending.touch(node)  # a writer has begun, and has not changed anything yet
            try:
                await self.journal.commit(node)
            except errors.EngineError as error:
                raise NotCaughtUp(f"inode {node.ino} was changed by another host, and here: {error}") from error
            if node.version < newest.version:
                node = self.refresher.take(newest.record, newest.version, newest.place, own=newest.own)
        return node

    async def find_current_directory(self, ino: int) -> Node:
        above = self.paths.list_above(ino)
        known = self.core.nodes.get(ino)
        is_removed = known is not None and known.nlink == 0  # no path leads to it: processes in it entered before
        if not is_removed and any(self.must_ask(link.parent) for link in above):
            with suppress(errors.EngineError):  # memory answers all the same
                await self.check_path(above)
        return await self.find_directory(ino)

    async def check_path(self, above: Sequence[PathStep]) -> None:
        """Check names that were used unchecked. Moved: one of them has another inode."""
        keys = [link.key for link in above]
        asked_at = trio.current_time()
        self.paths.check(above, dict(zip(keys, await self.core.records.get(keys), strict=True)), asked_at)

    async def find_path_versions(self, directory: int, is_fresh: bool) -> dict[bytes, int]:
        """Versions, by key, that a change in a directory expects of the names above: they lead there when it is made.

        The kernel may have used other names (Moved). A change that only adds a name need not expect them: the kernel
        has looked that name up, and the read for it had all names above.

        A commit can expect a part of a long path. This call reads the names above that part: a host that moves one of
        them after that has no answer yet.
        """
        above = self.paths.list_above(directory)
        most = expected_names_max(self.core.records.limits)
        if len(above) > most:
            await self.check_path(above[most:])
            above = above[:most]
        if is_fresh or (versions := self.paths.find_versions(above)) is None:
            await self.check_path(above)
            versions = self.paths.find_versions(above)
        return versions or {}

    def forget(self, ino: int) -> None:
        self.paths.forget(ino)

    def take_record(self, record: schema.InodeRecord, version: int, place: tuple[int, bytes], *, own: bool) -> Node:
        return self.refresher.take(record, version, place, own=own)

    # -- finding -------------------------------------------------------------------------------------

    async def find_name(self, parent: int, name: bytes) -> Found:
        check_name(name)
        with suppress(errors.EngineError):  # memory answers all the same
            await self.find_directory(parent)  # `must_ask` depends on it
        return await self.find_shared(parent, name, is_fresh=self.must_ask(parent))

    def find_known(self, parent: int, name: bytes) -> Found | None:
        """The inode of the name from the dentry table; None: the caller has to read the store."""
        dentry, epoch = self.core.dentries.find(parent, name), self.journal.pending.epoch
        if dentry is None:
            return None
        if (change := dentry.change) is not None:
            return Found(change.node, change.stored, change, epoch, change.version)
        if dentry is ABSENT:
            return Found(None, False, None, epoch)
        node = self.core.nodes.get(dentry.ino)
        if node is None:
            return None
        if not node.own_record and (node.parent, node.name) != (parent, name):
            return None  # it was renamed elsewhere, and the watch has yet to deliver that of this name
        return Found(node, True, None, epoch, dentry.version if node.own_record else node.version)

    async def find_shared(self, parent: int, name: bytes, *, is_fresh: bool, above: Sequence[PathStep] = ()) -> Found:
        """As `find_name`. ``is_fresh``: read the store, whatever memory has; memory answers where the store does not.

        A name that was changed here during the read is looked up again. ``above``: names on which the answer depends.
        EngineError, NotCaughtUp; Moved.
        """
        may_learn = not is_fresh
        while True:
            found = self.find_known(parent, name)
            if found is not None and found.change:
                self.delegations.check(parent)
                return found
            if found is not None and (not is_fresh or (not found.node and self.delegations.knows_names(parent, name))):
                return found
            if not is_fresh and (node := self.shelf.take_record(parent, name)) is not None:
                return Found(node, True, None, self.journal.pending.epoch, node.version)
            try:
                if may_learn and self.shelf.is_worth_reading(parent):
                    may_learn = False
                    await self.learning.read_page(parent)
                    continue
                asked = await self._ask_store(parent, name, above)
            except (NotCaughtUp, NotGivenBack, errors.Corrupt):
                raise
            except errors.EngineError:
                if (found := self.find_known(parent, name)) is None:
                    raise
                return found
            if asked is not None:
                return asked

    async def _ask_store(self, parent: int, name: bytes, above: Sequence[PathStep]) -> Found | None:
        """The inode of a name in the store; None: it was changed here meanwhile, or between two reads.

        An inode with a record of its own costs a second read, unless memory has its number.
        """
        dentries = self.core.dentries
        before, guess = dentries.get(parent, name).version, dentries.get(parent, name).ino
        key = schema.entry_key(parent, name)
        keys = [key, *[link.key for link in above]]
        delegation = schema.delegation_key(parent) if self.must_ask(parent) else b""
        if delegation:
            keys.append(delegation)
        if guess:
            keys += [schema.inode_key(guess), schema.times_key(guess)]
        asked_at = trio.current_time()
        rows = dict(zip(keys, await self.records.get(keys), strict=True))
        entry = rows[key]
        record = schema.decode_entry(entry.value) if entry is not None else None
        meant = record.ino if isinstance(record, schema.InodeRecord) else record or guess
        is_remembered = meant is not None and self.core.places.get(meant) == (parent, name)
        self.paths.check(above, rows, asked_at, (parent, name) if is_remembered else None)
        version = entry.version if entry is not None else 0
        dentry = dentries.get(parent, name)
        if dentry.change is not None or dentry.version not in (before, version):
            return None
        if record is None:
            if delegation and (row := rows[delegation]) and self.delegations.is_others(parent, row.value):
                await self.delegations.await_names(parent)  # that host may have given the name to a new file
                return None
            dentries.forget(parent, name)
            if not self.must_ask(parent):  # read more, so that the next name needs no read
                await self.learning.read_page(parent)
            dentry = dentries.get(parent, name)
            is_absent = dentry.change is None and not dentry.ino
            return Found(None, False, None, self.journal.pending.epoch) if is_absent else None
        if isinstance(record, int) and record != guess:
            self.expect_own([record])
            dentries.note(parent, name, record)  # the next read has both, as of one moment
            return None
        if isinstance(record, schema.InodeRecord):
            newest = InodeRow(record, version, (parent, name), own=False)
        elif (own := rows[schema.inode_key(record)]) is not None:
            newest = InodeRow(schema.decode_inode(own.value), own.version, (parent, name), own=True)
        else:
            raise errors.Stale(f"{name!r} in directory {parent} means inode {record}, which has no record")
        node = self.refresher.take(newest.record, newest.version, newest.place, own=newest.own)
        if newest.own and (times := rows[schema.times_key(guess)]) is not None:
            self.refresher.take_times(node, times.value, times.version)
        if not node.own_record and node.version > version:
            return None  # it has left the name since
        dentries.note(parent, name, node.ino, version)
        if node.version < newest.version:  # it is changed here, too
            node = await self._catch_up(newest)
            dentry = dentries.get(parent, name)
            if dentry.change is not None or dentry.ino != node.ino:
                return None
        version = version if node.own_record else node.version
        return Found(node, True, None, self.journal.pending.epoch, version)


def check_name(name: bytes) -> None:
    """NameTooLong for a name of more than 255 bytes."""
    if len(name) > NAME_MAX:
        raise errors.NameTooLong(f"a name of {len(name)} bytes: at most {NAME_MAX} are allowed")
