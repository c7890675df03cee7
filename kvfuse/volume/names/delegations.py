"""Delegations: strict folders in which this host alone adds names, until another host asks for them back.

A strict folder costs a round trip for each name that is looked up, and for each file that is created, although most
folders are filled by one host. So a host that made `CREATES_MIN` files in a row in such a folder takes a *delegation*
of it: a record (``v``) under its lease. While it has that

* it alone adds names. Each commit of any host that adds a name to a folder expects the folder's ``v`` record: its own
  as it is, or none. So no name comes that this host does not know, and its memory says which names are absent;
* files that it creates need no commit of their own. The close, or whatever else commits the file, names it; twice
  `LOOK_SECONDS` later at the most.

Removals of names and changes of files are as in any strict folder: lookups of names that exist ask the store.

Another host that needs what only memory may have - it found a name absent, lists the folder, removes it, or adds a
name - *asks for it back*, by a record (``r``) that the holder alone follows, and waits. The holder creates nothing in
memory any more, has what it created there committed, and deletes both records. So where no ``v`` record is, all names
are stored. The wait ends with the holder's lease at the latest: what was not committed by then does not exist.

A holder whose watch delivers nothing reads these letters now and then, as long as it has folders; one that creates
nothing in a folder for a while gives it back. A host that was asked for a folder leaves it alone for a while, which
doubles each time: hosts that share a folder pay what they pay without delegations.

The answer to a commit of these records may be lost. A record of this host that it does not know about delegates nothing
to it: it deletes that one when anybody asks, itself included. So does the next daemon, which is the same client.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import trio

from kvfuse.errors import EngineError, EngineTimeout, KvfuseError
from kvfuse.remote.records.api import ABSENT
from kvfuse.slab.layout import FEATURE_DELEGATED
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema
from kvfuse.volume.store.joined_reads import SharedRecords
from kvfuse.volume.store.member import Member
from kvfuse.volume.store.sealed import ScanPages, scan_page

CREATES_MIN = 3
"""Files that a host creates in a row in a folder before it takes it."""
FOLDERS_MAX = 1000
"""Folders that a host has at most; the one that it used least lately goes for another."""
COUNTED_MAX = 10_000
"""Folders whose creations are counted."""
NAMES_MAX = 100_000
"""Names of a folder at most: memory has to know them all."""
PAGE_ROWS = 2048
"""Names that are read at once."""
LEFT_SECONDS = (5.0, 600.0)
"""A folder that was given back is left alone for so long: the first time, and at most."""
WAIT_SECONDS = (0.001, 0.05)
"""Pause between two looks whether a folder was given back: the first one, and at most."""
LOOK_SECONDS = 1.0
"""Between two reads of letters, for those that the watch did not deliver, and two commits of files that stay open."""
IDLE_SECONDS = 30.0
"""A folder in which the host creates nothing for so long is given back."""
LEASES_MAX = 2
"""Lease times for which a caller waits for that."""
RETRY_SECONDS = 0.5

Place = tuple[int, bytes]
"""(folder, name)"""

log = logging.getLogger(__name__)


class NotGivenBack(EngineTimeout):
    """Another host has given names in a folder that only its memory has, and does not answer."""


@dataclass
class Delegations:
    """The folders that are delegated to this host, and letters about those of others. One of each membership.

    ``Dentries.delegated`` has those whose record is this host's; ``_held`` those of them that it uses.
    """

    records: SharedRecords
    journal: Journal
    member: Member
    taken: int = 0
    given_back: int = 0
    asked_back: int = 0
    """letters to other hosts"""

    def __post_init__(self) -> None:
        self.core = self.journal.core
        self._delegated = self.core.dentries.delegated
        self._held: dict[int, float] = {}
        """folder -> when a file was created there last"""
        self._taking: set[int] = set()
        """folders whose record may come to be any time"""
        self._returning: set[int] = set()
        self._asked: set[int] = set()
        """folders that others asked for while they were being taken"""
        self._adding = Counter[Place]()
        """(folder, name) that commits add whose outcome is not known"""
        self._created = deque[tuple[float, Node]]()
        """(when, file) of files that were created in memory, and may be there alone"""
        self._in_a_row: dict[int, int] = {}
        """folder -> files created there since another host changed it"""
        self._left: dict[int, tuple[float, float]] = {}
        """folder -> (until when it is left alone, for how long that is)"""
        self._wanted: dict[int, Node] = {}
        self._returns: set[int] = set()
        """folders that are to be given back"""
        self._told: dict[int, int] = {}
        """folder of another host -> version of the record that it was asked for"""
        self._is_known_by_all = False
        """no host runs a program of before"""
        self._work = trio.Event()
        self._has_some = trio.Event()

    def statistics(self) -> dict[str, int]:
        counts = {"taken": self.taken, "given_back": self.given_back, "asked_back": self.asked_back}
        return {**counts, "delegated_count": len(self._held)}

    def holds(self, directory: int) -> int:
        """Version of the delegation by which no other host adds a name to the folder, until the next await; 0: none."""
        return self._delegated.get(directory, 0) if directory in self._held and self.member.alive else 0

    def knows_names(self, directory: int, name: bytes) -> bool:
        """Memory, which does not have the name, is right, as no other host adds any to the folder."""
        return self.holds(directory) > 0 and (directory, name) not in self._adding

    def check(self, directory: int) -> None:
        """EngineError: the folder was delegated to this host, whose lease has ended: names that only memory has never
        will be stored, and others may have given them since."""
        if directory in self._delegated:
            self.member.check()

    # -- what is done in folders -----------------------------------------------------------------------

    def note_create(self, directory: Node) -> None:
        """This host created a file in a strict folder."""
        ino = directory.ino
        if ino in self._held:
            self._held[ino] = trio.current_time()
            return
        if len(self._in_a_row) >= COUNTED_MAX:
            self._in_a_row.clear()
        count = self._in_a_row[ino] = self._in_a_row.get(ino, 0) + 1
        if count >= CREATES_MIN and self._may_take(directory):
            self._taking.add(ino)
            self._wanted[ino] = directory
            self._work.set()

    def _may_take(self, directory: Node) -> bool:
        ino, blocks = directory.ino, self.core.blocks
        if ino in self._delegated or ino in self._taking or (blocks and blocks.is_block_namespace(directory.namespace)):
            return False
        return trio.current_time() >= self._left.get(ino, (0.0, 0.0))[0]

    def note_foreign(self, directory: int) -> None:
        """Another host changed a name in the folder."""
        self._in_a_row.pop(directory, None)

    def note_created(self, node: Node) -> None:
        """A file was created in memory alone."""
        self._created.append((trio.current_time(), node))

    @contextmanager
    def adding(self, places: Sequence[Place]) -> Iterator[None]:
        """A commit in the body adds names. Others may see them before its answer comes: memory does not deny them."""
        self._adding.update(places)
        try:
            yield
        except BaseException:  # they may come to be at any time
            for directory in {directory for directory, _ in places} & self._delegated.keys():
                self._give_back_soon(directory)
            raise
        finally:
            self._adding.subtract(places)
            self._adding += Counter()  # without those that are 0

    def note_removed(self, directory: int) -> None:
        """The folder is gone, and its record with it."""
        self._held.pop(directory, None)
        self._delegated.pop(directory, None)

    def _leave_alone(self, directory: int) -> None:
        first, most = LEFT_SECONDS
        now, (until, seconds) = trio.current_time(), self._left.get(directory, (0.0, 0.0))
        seconds = min(most, 2 * seconds) if seconds and now < until + 4 * seconds else first
        if len(self._left) >= COUNTED_MAX:
            self._left.clear()
        self._left[directory] = now + seconds, seconds
        self._in_a_row.pop(directory, None)

    # -- tasks -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take folders, and give them back, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            nursery.start_soon(self._look_always, nursery)
            nursery.start_soon(self._recall_always, nursery)
            while True:
                await self._work.wait()
                self._work = trio.Event()
                for ino in self._returns - self._returning:
                    self._returning.add(ino)
                    nursery.start_soon(self._give_back, ino)
                self._returns.clear()
                for directory in self._wanted.values():
                    nursery.start_soon(self._take_or_leave, directory)
                self._wanted.clear()

    async def _follow(self) -> None:
        own = schema.recall_prefix(self.core.client)
        while True:
            try:
                changes = self.records.watch(own)
                await self._read_letters()
                async for change in changes:
                    if change.value is not None:
                        self._take_letter(change.key)
            except EngineError as error:
                log.info("the watch of folders that others ask for broke, it is begun anew: %s", error)
            await trio.sleep(RETRY_SECONDS)

    async def _read_letters(self) -> None:
        async for rows, _ in ScanPages(self.records, schema.recall_prefix(self.core.client)):
            for row in rows:
                self._take_letter(row.key)

    def _take_letter(self, key: bytes) -> None:
        """Another host asks for a folder."""
        directory = schema.recalled_directory(key)
        if directory in self._held:
            self._leave_alone(directory)
        self._give_back_soon(directory)

    async def _look_always(self, nursery: trio.Nursery) -> None:
        """Read letters that the watch did not deliver; give back what this host does not use; commit open files."""
        while True:
            await self._has_some.wait()
            await trio.sleep(LOOK_SECONDS)
            now = trio.current_time()
            for ino in [ino for ino, used in self._held.items() if now >= used + IDLE_SECONDS]:
                self._give_back_soon(ino)
            nursery.start_soon(self._commit_open, now - LOOK_SECONDS)
            nursery.start_soon(self._learn_again)
            if not self._delegated:
                self._has_some = trio.Event()
            with suppress(EngineError):
                await self._read_letters()

    async def _commit_open(self, before: float) -> None:
        """Commit files that were created until then, and are open still: a killed daemon does not lose them."""
        nodes = []
        while self._created and self._created[0][0] <= before:
            nodes.append(self._created.popleft()[1])
        nodes = [node for node in nodes if node.nlink and not node.version and not node.forgotten]
        if nodes:
            with suppress(EngineError):  # the journal repeats it
                await self.journal.commit(*nodes)

    # -- taking ----------------------------------------------------------------------------------------

    async def _take_or_leave(self, directory: Node) -> None:
        ino = directory.ino
        is_unknown = False
        try:
            await self._take(directory)
        except KvfuseError as error:
            log.info("directory %d is not delegated to this host: %s", ino, error)
            is_unknown = True
        finally:
            self._taking.discard(ino)
        self._in_a_row.pop(ino, None)
        if is_unknown or ino in self._asked or (ino in self._delegated and ino not in self._held):
            self._asked.discard(ino)
            self._leave_alone(ino)
            self._give_back_soon(ino)

    async def _take(self, directory: Node) -> None:
        """Have a folder delegated to this host, unless others have it, or it is changing. EngineError: unknown."""
        ino, key, committer = directory.ino, schema.delegation_key(directory.ino), self.journal.committer
        if not (self._is_known_by_all or await self._tell_all()):
            self._leave_alone(ino)
            return
        async with committer.turn:  # no commit is under way whose answer would be older than the delegation
            await committer.resolve()
            if not directory.nlink or directory.flags & schema.FLAG_LEAVING:
                return
            own, expect = schema.encode_u64(self.core.client), {key: ABSENT, schema.inode_key(ino): directory.version}
            version = await self.records.commit({key: own}, (), expect, lease=self.member.lease)
            if not version:
                return
            self._delegated[ino] = version
            self._has_some.set()
            self.core.dentries.directory_removed(ino)  # names may have come that were not heard of yet
        if await self._learn(ino) and ino not in self._asked:
            self._held[ino] = trio.current_time()
            self.taken += 1
            if len(self._held) > FOLDERS_MAX:
                self._give_back_soon(min(self._held, key=self._held.__getitem__))

    async def _tell_all(self) -> bool:
        """Say in the superblock that folders are delegated. False: a host runs a program that does not know of that.

        One that joins later reads the superblock after that.
        """
        if await self._do_all_know():
            await self.core.add_feature(FEATURE_DELEGATED)
            self._is_known_by_all = await self._do_all_know()
        return self._is_known_by_all

    async def _do_all_know(self) -> bool:
        async for rows, damaged in ScanPages(self.records, schema.MEMBER_PREFIX):
            if damaged or any(not schema.decode_member(row.value).features & FEATURE_DELEGATED for row in rows):
                return False
        return True

    async def _learn(self, directory: int) -> bool:
        """Read the names of a folder. False: there are too many. Commits of this host add theirs meanwhile."""
        stored, prefix = self.core.dentries.stored_in(directory), schema.entry_prefix(directory)
        while not stored.complete:
            rows, damaged = await scan_page(self.records, prefix, stored.after, PAGE_ROWS)
            if self.core.dentries.stored_in(directory) is not stored or len(stored.hashes) > NAMES_MAX:
                return False
            keys, newest = [*[row.key for row in rows], *damaged], max([row.version for row in rows], default=0)
            stored.learn(keys, newest, last=len(keys) < PAGE_ROWS)
        return True

    async def _learn_again(self) -> None:
        """Read the names of folders of which memory has forgotten them, for example as an answer came late."""
        with suppress(EngineError):
            for ino in list(self._held):
                if not self.core.dentries.stored_in(ino).complete and not await self._learn(ino):
                    self._give_back_soon(ino)

    # -- giving back -----------------------------------------------------------------------------------

    def _give_back_soon(self, directory: int) -> None:
        """From now on nothing is created in memory there."""
        self._held.pop(directory, None)
        if directory in self._taking:
            self._asked.add(directory)
        else:
            self._returns.add(directory)
            self._work.set()

    async def _give_back(self, directory: int) -> None:
        """Commit what was created in a folder, and delete its records; until that succeeds."""
        try:
            while True:
                try:
                    while directory in self._delegated and (created := self.journal.pending.find_changed_in(directory)):
                        await self.journal.commit(*created)
                    await self._delete_records(directory)
                except KvfuseError as error:
                    log.info("directory %d is given back later: %s", directory, error)
                    await trio.sleep(RETRY_SECONDS)
                else:
                    return
        finally:
            self._returning.discard(directory)

    async def _delete_records(self, directory: int) -> None:
        """Delete the folder's record, if it is this host's, and the letter that asked for it. EngineError.

        No commit of this host is under way meanwhile that expects the record.
        """
        key, letter = schema.delegation_key(directory), schema.recall_key(self.core.client, directory)
        committer = self.journal.committer
        async with committer.turn:
            await committer.resolve()
            version = self._delegated.get(directory)
            if version is None:
                (row,) = await self.records.get([key])
                version = row.version if row is not None and self._is_own(row.value) else None
            if version is None:
                await self.records.commit({}, [letter])
                return
            await self.records.commit({}, [key, letter], {key: version})  # refused: a lost answer had deleted it
            self.note_removed(directory)
            self.core.dentries.directory_removed(directory)  # others add names from now on
            self.given_back += 1

    def _is_own(self, value: bytes) -> bool:
        return schema.decode_u64(value) == self.core.client

    # -- folders of other hosts ------------------------------------------------------------------------

    def is_others(self, directory: int, value: bytes) -> bool:
        """The record of a folder delegates it to another host; or to this one, which does not know of that."""
        return not (self._is_own(value) and (directory in self._delegated or directory in self._taking))

    async def await_names(self, directory: int) -> None:
        """Return when the store has all names that other hosts gave in a folder. NotGivenBack, EngineError."""
        if directory in self._delegated:
            return
        key, letters = schema.delegation_key(directory), list[bytes]()
        deadline = trio.current_time() + LEASES_MAX * self.member.lease.ttl
        pause, longest = WAIT_SECONDS
        while True:
            row, *unread = await self.records.get([key, *letters])
            if row is None:
                self._told.pop(directory, None)
                if any(letter is not None for letter in unread):  # its reader is gone
                    await self.records.commit({}, letters)
                return
            if not self.is_others(directory, row.value):
                return
            holder = schema.decode_u64(row.value)
            letters = [schema.recall_key(holder, directory)]
            await self._ask_back(directory, row.version, letters[0])
            if trio.current_time() >= deadline:
                raise NotGivenBack(f"client {holder:x} does not give directory {directory} back")
            await trio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _ask_back(self, directory: int, version: int, letter: bytes) -> None:
        """Ask the holder of a folder for it, once. This host may be the holder, without knowing it."""
        if self._told.get(directory) == version:
            return
        if len(self._told) >= COUNTED_MAX:
            self._told.clear()
        self._told[directory] = version
        self._leave_alone(directory)
        try:
            await self.records.commit({letter: schema.encode_u64(self.core.client)}, lease=self.member.lease)
        except BaseException:
            self._told.pop(directory, None)
            raise
        self.asked_back += 1

    async def _recall_always(self, nursery: trio.Nursery) -> None:
        """Ask for folders to which commits of this host wait to add names."""
        while True:
            for ino in await self.journal.refusals.to_recall.take():
                nursery.start_soon(self._recall, ino)

    async def _recall(self, directory: int) -> None:
        failure = None
        try:
            await self.await_names(directory)
        except EngineError as error:
            failure = EngineError(str(error))  # another exception each time it is raised
        self.journal.refusals.to_recall.end(directory, failure)
