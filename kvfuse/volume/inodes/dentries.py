"""What names mean, as far as is known here: one entry (`Dentry`) for each (directory, name) in one table.

An entry says which inode a name means, which change of it waits for a commit, which record of it arrived before a
lookup asked for one, and which binding ring threads hold. Everything that changes what a name means goes through this
table, so an entry is never older than what this host did, or what its watch of the store has told.

Of directories that were made here, or read to the end, the table also has the hashes of all stored names, so that an
absent name costs no round trip: an engine asks for many blocks that nobody has. A hash has 64 bits and depends on a
secret of this process (Python's own of bytes): it is cheap enough for thousands of names in a call.

One rule to forget: of too many entries the oldest go, but for those with a pending change. An entry that goes ends its
binding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType

import msgspec

from kvfuse.remote.records.api import Versioned
from kvfuse.volume.api import Binding
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.stored_names import StoredNames
from kvfuse.volume.store import schema
from kvfuse.volume.views.content_map import ContentMap

NAMES_MAX = 32_768
"""Entries kept; more where more inodes are kept in memory."""
DIRECTORIES_MAX = 20_000
"""Directories of whose names the hashes are kept."""


class NameChange(msgspec.Struct, eq=False):
    """What a name means here, while the record store does not know it yet. `Pending` makes them."""

    parent: int
    name: bytes
    node: Node | None
    """what the name means; None: it does not exist"""
    stored: bool
    """the record store has a record of this name"""
    moved: Node | None
    """the inode that left the name, for another or none: this one may only go when what becomes of it comes"""
    vacated: bool
    """it did not exist for a while: the stored record may go although ``node`` is not ready to come"""
    version: int
    """of the stored record, in a shared volume"""
    leaves: Node | schema.InodeRecord | None = None
    """in a shared volume: the inode that has the name in the store, and loses it, its last, by this change"""
    sent: bool = False
    """in a commit that is under way"""
    holders: tuple[Node, ...] = ()
    """inodes that are aside, and the change with them"""

    @property
    def uid(self) -> int:
        """Owner of the inode that it is about."""
        node = self.node or self.moved or self.leaves
        return node.uid if node is not None else 0

    @property
    def may_go_first(self) -> bool:
        """The stored record can be deleted before what the name means now is stored."""
        return self.vacated and self.stored


class Dentry(msgspec.Struct, eq=False):
    """What is known of one name. `Dentries` owns it, and alone changes it."""

    ino: int = 0
    """the inode that it means; 0: it means none, or that is not known"""
    version: int = 0
    """of the commit that said so last, where others write the store, too; 0: not known"""
    change: NameChange | None = None
    """not in the store yet"""
    record: Versioned | None = None
    """as stored, where the watch or a page of the directory brought it before anybody asked"""
    binding: Binding | None = None
    """what ring threads hold"""


ABSENT = Dentry()
"""what `Dentries.find` returns where the directory has no such name in the store, and no change brings it"""
UNKNOWN = Dentry()
"""what `Dentries.get` returns where nothing is known of a name"""


class Dentries:
    """The table of names; the core owns it. It never waits: callers hand in what they read."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self.names_max = names_max
        self.changes: dict[int, dict[bytes, NameChange]] = {}
        """directory -> name -> change that is not in the store yet"""
        self.noted = 0
        """counts what was noted: names mean what they did as long as it is the same"""
        self._names: dict[tuple[int, bytes], Dentry] = {}
        """the oldest first"""
        self._room = names_max
        """entries at which the oldest are forgotten"""
        self._directories: dict[int, StoredNames] = {}
        self._reading: dict[int, set[bytes]] = {}
        """directory of which a page is being read -> names that changed meanwhile: what was read may be older"""
        self._bound: dict[int, set[Binding]] = {}
        """inode -> bindings of its names, and of the names in it"""

    # -- what a name means ---------------------------------------------------------------------------

    def find(self, parent: int, name: bytes) -> Dentry | None:
        """What is known of a name; ABSENT where there is none; None where the store has to be asked."""
        dentry = self._names.get((parent, name))
        if dentry is None or not (dentry.ino or dentry.change):
            directory = self._directories.get(parent)
            if directory is not None and directory.complete and hash(name) not in directory.hashes:
                return ABSENT
        return dentry

    def get(self, parent: int, name: bytes) -> Dentry:
        """The entry of a name; UNKNOWN where there is none."""
        return self._names.get((parent, name)) or UNKNOWN

    def changes_in(self, directory: int) -> Mapping[bytes, NameChange]:
        """The changes of names in a directory that are not in the store yet."""
        return self.changes.get(directory, _NONE)

    def note(self, parent: int, name: bytes, ino: int, version: int = 0) -> Dentry:
        """The name means this inode, or none (0).

        ``version``: of the commit that made it so, where others write the store, too: an answer of the store that is
        older is known by it.
        """
        dentry = self._names.get((parent, name))
        if dentry is None:
            if len(self._names) >= self._room:
                self._forget_oldest()
            dentry = self._names[parent, name] = Dentry()
        elif dentry.binding is not None and dentry.binding.ino != ino:
            self._unbind(dentry)
        dentry.ino, dentry.version, dentry.record = ino, version, None
        self.noted += 1
        if self._reading and parent in self._reading:
            self._reading[parent].add(name)
        return dentry

    def forget(self, parent: int, name: bytes) -> None:
        """What the store has of the name is not known any more."""
        if self.note(parent, name, 0).change is None:
            del self._names[parent, name]

    def clear(self) -> None:
        """Nothing of what the store has is known any more."""
        self.unbind_all()
        self._directories.clear()
        self._names = {place: dentry for place, dentry in self._names.items() if dentry.change is not None}
        for dentry in self._names.values():
            dentry.ino, dentry.version, dentry.record = 0, 0, None

    def _forget_oldest(self) -> None:
        """Many at once: to find its first entry a dict passes all places of those that were in front of it."""
        excess = len(self._names) - self.names_max * 7 // 8
        going = islice(((place, dentry) for place, dentry in self._names.items() if dentry.change is None), excess)
        for place, dentry in list(going):
            self._unbind(dentry)
            del self._names[place]
        self._room = max(self.names_max, len(self._names) + self.names_max // 8)

    # -- changes that are not in the store yet -------------------------------------------------------

    def put_change(self, change: NameChange) -> NameChange | None:
        """A name means what the change says. Returns the change whose place it takes."""
        parent, name = change.parent, change.name
        dentry = self.note(parent, name, change.node.ino if change.node is not None else 0)
        previous, dentry.change = dentry.change, change
        self.changes.setdefault(parent, {})[name] = change
        return previous

    def settle(self, change: NameChange, version: int, *, puts: bool) -> None:
        """A commit of this version brought a change to the store. ``puts``: it put or deleted the name's record.

        Nothing is pending of the name any more, unless it was changed since. Where the change was given up meanwhile,
        as another host's came before, the commit counts all the same.
        """
        parent, name = change.parent, change.name
        ino = change.node.ino if change.node is not None else 0
        if puts:
            self.note_stored(parent, name, ino != 0)
        dentry = self._names.get((parent, name), UNKNOWN)
        if dentry.change is change:
            self._end_change(dentry, change)
        elif dentry.change is not None:
            dentry.change.stored, dentry.change.version = ino != 0, version if ino else 0
            return
        if version:
            self.note(parent, name, ino, version)
        elif not ino:
            self._names.pop((parent, name), None)

    def give_up(self, parent: int, name: bytes) -> NameChange:
        """The name means what the store has, which is not known. Returns the change, which is not to be stored."""
        change = self.changes[parent][name]
        self._end_change(self._names[parent, name], change)
        self.forget(parent, name)
        return change

    def _end_change(self, dentry: Dentry, change: NameChange) -> None:
        dentry.change = None
        changes = self.changes[change.parent]
        del changes[change.name]
        if not changes:
            del self.changes[change.parent]

    # -- all names of a directory --------------------------------------------------------------------

    def directory_made(self, ino: int) -> None:
        """It is empty, and whatever enters it will be seen."""
        self.directory_removed(ino)
        self.stored_in(ino).complete = True

    def directory_removed(self, ino: int) -> None:
        self._directories.pop(ino, None)

    def stored_in(self, directory: int) -> StoredNames:
        """The names that a directory has in the store, as far as they are known. The caller may read on."""
        stored = self._directories.get(directory)
        if stored is None:
            if len(self._directories) >= DIRECTORIES_MAX:
                self._directories.pop(next(iter(self._directories)))
            stored = self._directories[directory] = StoredNames(complete=False)
        return stored

    def note_stored(self, parent: int, name: bytes, is_stored: bool) -> None:
        """The store has another record of the name than before, or none any more."""
        stored = self._directories.get(parent)
        if stored is not None:
            if is_stored:
                stored.hashes.add(hash(name))
            else:
                stored.hashes.discard(hash(name))
        self.drop_record(parent, name)

    @contextmanager
    def reading(self, parent: int) -> Iterator[set[bytes]]:
        """The next page of a directory is being read, one at a time: names that change meanwhile."""
        changed = self._reading[parent] = set()
        try:
            yield changed
        finally:
            self._reading.pop(parent, None)

    # -- records that nobody has asked for yet -------------------------------------------------------

    def shelve(self, parent: int, name: bytes, record: Versioned) -> None:
        """The store has this record of a name. Only one that is the inode's, too, is worth keeping."""
        if schema.is_inline(record.value):
            dentry = self._names.get((parent, name)) or self.note(parent, name, 0)
            dentry.record = record

    def drop_record(self, parent: int, name: bytes) -> None:
        """What was read of the record before is stale, or the inode in memory is newer."""
        dentry = self._names.get((parent, name))
        if dentry is not None:
            dentry.record = None
        if self._reading and parent in self._reading:
            self._reading[parent].add(name)

    # -- bindings ------------------------------------------------------------------------------------

    def bind(self, parent: int, name: bytes, node: Node, shown: ContentMap) -> Binding:
        """Let ring threads know that the name means this file. The binding before it ends."""
        dentry = self._names.get((parent, name)) or self.note(parent, name, node.ino)
        self._unbind(dentry)
        binding = dentry.binding = Binding(parent, node, name, shown)
        for ino in (node.ino, parent):
            self._bound.setdefault(ino, set()).add(binding)
        return binding

    def unbind(self, ino: int) -> None:
        """End the bindings of an inode's names, and of the names in it."""
        for binding in list(self._bound.get(ino, ())):
            self._unbind(self._names[binding.directory, binding.name])

    @property
    def binding_count(self) -> int:
        return sum(map(len, self._bound.values())) // 2

    def unbind_all(self) -> None:
        for ino in list(self._bound):
            self.unbind(ino)

    def _unbind(self, dentry: Dentry) -> None:
        binding = dentry.binding
        if binding is None:
            return
        binding.valid, dentry.binding = False, None
        for ino in (binding.ino, binding.directory):
            bound = self._bound[ino]
            bound.remove(binding)
            if not bound:
                del self._bound[ino]


_NONE: Mapping[bytes, NameChange] = MappingProxyType({})
