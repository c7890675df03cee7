"""Names and their inodes: a table with one entry (`Dentry`) for each known (directory, name).

An entry has the inode of the name, the change that waits for a commit, a record that arrived before a
lookup needed it, and the binding that ring threads use. Every change of a name goes through this
table, so an entry is never older than this host's own changes, or those that the watch has reported.

Of directories that were made here, or read to the end, the table also has the hashes of all stored names, so that an
absent name costs no round trip: engines look up many blocks that do not exist. A hash has 64 bits and depends on a
secret of this process (Python's hash of bytes): thousands of them in a call are cheap.

Eviction: if there are too many entries, the oldest without a pending change are removed, and their
bindings end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType

import msgspec
from sortedcontainers import SortedDict

from kvfuse.remote.records.api import Versioned
from kvfuse.volume.api import Binding
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.stored_names import StoredNames
from kvfuse.volume.store import schema
from kvfuse.volume.views.content_map import ContentMap

NAMES_MAX = 32_768
"""Number of entries kept; more if `cache.nodes` is larger."""
DIRECTORIES_MAX = 20_000
"""Number of directories whose hashes of names are kept."""


class NameChange(msgspec.Struct, eq=False):
    """A change of a name that is not in the record store yet. `Pending` makes them."""

    parent: int
    name: bytes
    node: Node | None
    """what the name means; None: it does not exist"""
    stored: bool
    """the record store has a record of this name"""
    moved: Node | None
    """the inode that left the name: the change may be committed only with that inode's own changes, or after"""
    vacated: bool
    """the name was absent for a while: the stored record may be deleted before ``node`` can be stored"""
    version: int
    """of the stored record, in a shared volume"""
    leaves: Node | schema.InodeRecord | None = None
    """in a shared volume: the inode that has the name in the store, and loses its last name by this change"""
    sent: bool = False
    """in a commit that is in flight"""
    holders: tuple[Node, ...] = ()
    """inodes aside for which the change waits, see `late`"""

    @property
    def uid(self) -> int:
        """Owner of the inode that the change concerns; 0 for none."""
        node = self.node or self.moved or self.leaves
        return node.uid if node is not None else 0

    @property
    def may_go_first(self) -> bool:
        """The stored record may be deleted before ``node`` is stored."""
        return self.vacated and self.stored


class Dentry(msgspec.Struct, eq=False):
    """The known state of one name. `Dentries` owns it, and alone changes it."""

    ino: int = 0
    """inode of the name; 0: it has none, or that is not known"""
    version: int = 0
    """in a shared volume: version of the commit that set ``ino``; 0: not known"""
    change: NameChange | None = None
    """a change that is not in the store yet"""
    record: Versioned | None = None
    """the stored record, if the watch or a page of the directory brought it before a lookup needed it"""
    binding: Binding | None = None
    """used by ring threads"""


ABSENT = Dentry()
"""what `Dentries.find` returns for a name that does not exist"""
UNKNOWN = Dentry()
"""what `Dentries.get` returns for a name without an entry"""


class Dentries:
    """The table of names; the core owns it. It never waits: callers pass in records that they read."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self.names_max = names_max
        self.changes: dict[int, dict[bytes, NameChange]] = {}
        """directory -> name -> change that is not in the store yet"""
        self.noted = 0
        """counts changes of entries: while it is the same, no name has changed"""
        self.folders: dict[int, Node] = {}
        """directory with such changes -> its node, which stays in memory"""
        self._ordered: dict[int, SortedDict[tuple[int, bytes], NameChange]] = {}
        """directory that was listed while it had such changes -> (cookie, name) -> change"""
        self._names: dict[tuple[int, bytes], Dentry] = {}
        """(directory, name) -> entry, the oldest first"""
        self._room = names_max
        """number of entries at which the oldest are evicted"""
        self.delegated: dict[int, int] = {}
        """in a shared volume: directory that is delegated to this host -> version of the record that says so"""
        self._directories: dict[int, StoredNames] = {}
        self._reading: dict[int, set[bytes]] = {}
        """directory of which a page is being read -> names that changed meanwhile: their rows may be stale"""
        self._watches: dict[int, dict[str, Callable[[], None]]] = {}
        """directory -> what hears of the next name there"""
        self._bound: dict[int, set[Binding]] = {}
        """inode -> bindings of its names, and of the names in it"""

    # -- entries -------------------------------------------------------------------------------------

    def find(self, parent: int, name: bytes) -> Dentry | None:
        """The entry of a name; ABSENT if it does not exist; None if the store has to be asked."""
        dentry = self._names.get((parent, name))
        if dentry is None or not (dentry.ino or dentry.change):
            directory = self._directories.get(parent)
            if directory is not None and directory.complete and hash(name) not in directory.hashes:
                return ABSENT
        return dentry

    def get(self, parent: int, name: bytes) -> Dentry:
        """The entry of a name; UNKNOWN if it has none."""
        return self._names.get((parent, name)) or UNKNOWN

    def changes_in(self, directory: int) -> Mapping[bytes, NameChange]:
        """name -> its change that is not in the store yet, in one directory."""
        return self.changes.get(directory, _NONE)

    def is_empty(self, directory: int) -> bool | None:
        """No name of a directory means an inode. None: the store has to be asked. Without blocks of the directory."""
        changes = self.changes_in(directory).values()
        if any(change.node is not None for change in changes):
            return False
        known = self._directories.get(directory)
        if known is None or not known.complete or len(known.hashes) != sum(change.stored for change in changes):
            return None
        return True

    def changes_between(self, directory: int, after: int, last: int, limit: int) -> tuple[list[NameChange], int]:
        """The same, of the first ``limit`` names whose cookies are larger than ``after``, up to ``last``; and up to
        which cookie these are all: equal ones are not parted."""
        changes = self.changes.get(directory)
        if not changes:
            return [], last
        ordered = self._ordered.get(directory)
        if ordered is None:
            rows = {(schema.name_hash(name), name): change for name, change in changes.items()}
            ordered = self._ordered[directory] = SortedDict(rows)
        found: list[NameChange] = []
        cookie = after
        for key in ordered.irange((after + 1, b""), (last + 1, b""), inclusive=(True, False)):
            if len(found) >= limit and key[0] != cookie:
                return found, cookie
            cookie = key[0]
            found.append(ordered[key])
        return found, last

    def note(self, parent: int, name: bytes, ino: int, version: int = 0) -> Dentry:
        """Note the inode of a name, or none (0).

        ``version``: in a shared volume, of the commit that set it, so that older answers of the store are recognised.
        """
        dentry = self._names.get((parent, name))
        if dentry is None:
            if len(self._names) >= self._room:
                self._forget_oldest()
            dentry = self._names[parent, name] = Dentry()
        elif dentry.binding is not None and dentry.binding.ino != ino:
            self._unbind(dentry)
        if ino and parent in self._watches:
            self.names_come(parent)
        dentry.ino, dentry.version, dentry.record = ino, version, None
        self.noted += 1
        if self._reading and parent in self._reading:
            self._reading[parent].add(name)
        return dentry

    def watch_names(self, directory: int, who: str, hear: Callable[[], None]) -> None:
        """Call ``hear`` before a name of the directory means an inode, once. ``who``: has one for each directory."""
        self._watches.setdefault(directory, {})[who] = hear

    def names_come(self, directory: int | None = None) -> None:
        """Names of a directory (None: of any) may mean something from now on: another host has made them, or may
        have. Before anything here believes it."""
        for heard in [directory] if directory is not None else list(self._watches):
            for hear in self._watches.pop(heard, {}).values():
                hear()

    def forget(self, parent: int, name: bytes) -> None:
        """Forget the stored state of a name. A pending change stays."""
        if self.note(parent, name, 0).change is None:
            del self._names[parent, name]

    def clear(self) -> None:
        """Forget the stored state of all names. Pending changes stay."""
        self.unbind_all()
        self._directories.clear()
        self._names = {place: dentry for place, dentry in self._names.items() if dentry.change is not None}
        for dentry in self._names.values():
            dentry.ino, dentry.version, dentry.record = 0, 0, None

    def forget_directories(self, directories: Collection[int]) -> None:
        """Forget the stored state of all names of these directories. Pending changes stay."""
        for directory in directories:
            self.names_come(directory)
            self.directory_removed(directory)
            self.unbind(directory)
        for parent, name in [place for place in self._names if place[0] in directories]:
            self.forget(parent, name)

    def _forget_oldest(self) -> None:
        """Evict an eighth at once: a dict finds its first entry slowly after many removals at the front."""
        excess = len(self._names) - self.names_max * 7 // 8
        going = islice(((place, dentry) for place, dentry in self._names.items() if dentry.change is None), excess)
        for place, dentry in list(going):
            self._unbind(dentry)
            del self._names[place]
        self._room = max(self.names_max, len(self._names) + self.names_max // 8)

    # -- changes that are not in the store yet -------------------------------------------------------

    def put_change(self, change: NameChange) -> NameChange | None:
        """Apply a change to its name. Returns the pending change that it replaces, or None."""
        parent, name = change.parent, change.name
        dentry = self.note(parent, name, change.node.ino if change.node is not None else 0)
        previous, dentry.change = dentry.change, change
        self.changes.setdefault(parent, {})[name] = change
        if self._ordered and parent in self._ordered:
            self._ordered[parent][schema.name_hash(name), name] = change
        return previous

    def settle(self, change: NameChange, version: int, *, puts: bool) -> None:
        """Note that a commit of ``version`` stored a change. ``puts``: it put or deleted the name's record.

        The name has no pending change then, unless it was changed again. This also holds if the change was given up
        meanwhile because of another host's.
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
        """Drop the pending change of a name, whose stored state is not known then. Returns the change."""
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
            self.folders.pop(change.parent, None)
            self._ordered.pop(change.parent, None)
        elif self._ordered and change.parent in self._ordered:
            del self._ordered[change.parent][schema.name_hash(change.name), change.name]

    # -- all names of a directory --------------------------------------------------------------------

    def directory_made(self, ino: int) -> None:
        """Note a new directory: it is empty, so all its names will be known."""
        self.directory_removed(ino)
        self.stored_in(ino).complete = True

    def directory_removed(self, ino: int) -> None:
        self._directories.pop(ino, None)

    def stored_in(self, directory: int) -> StoredNames:
        """The known stored names of a directory. The caller may read further pages into it."""
        stored = self._directories.get(directory)
        if stored is None:
            if len(self._directories) >= DIRECTORIES_MAX:
                self._directories.pop(next(iter(self._directories)))
            stored = self._directories[directory] = StoredNames(complete=False)
        return stored

    def hear_stored(self, parent: int, name: bytes, is_stored: bool, version: int) -> None:
        """`note_stored` of what the watch delivers, late: in a delegated folder the name may exist again."""
        if is_stored or parent not in self.delegated:
            self.note_stored(parent, name, is_stored, version)
        else:
            self.drop_record(parent, name)

    def note_stored(self, parent: int, name: bytes, is_stored: bool, version: int = 0) -> None:
        """Note that the record of a name changed in the store, or (False) was deleted.

        ``version``: of another host's change. It may be older than a page that was read: if the page has the name
        again, its record there is newer. A name that is kept in vain costs a read.
        """
        stored = self._directories.get(parent)
        if stored is not None:
            if is_stored:
                stored.hashes.add(hash(name))
            elif not 0 < version <= stored.newest:
                stored.hashes.discard(hash(name))
        self.drop_record(parent, name)

    @contextmanager
    def reading(self, parent: int) -> Iterator[set[bytes]]:
        """While the next page of a directory is read (one at a time): the set of names that change meanwhile."""
        changed = self._reading[parent] = set()
        try:
            yield changed
        finally:
            self._reading.pop(parent, None)

    # -- records that arrived before a lookup needed them --------------------------------------------

    def shelve(self, parent: int, name: bytes, record: Versioned) -> None:
        """Keep the stored record of a name for a later lookup, if it contains the inode."""
        if schema.is_inline(record.value):
            dentry = self._names.get((parent, name)) or self.note(parent, name, 0)
            dentry.record = record

    def drop_record(self, parent: int, name: bytes) -> None:
        """Drop a kept record that is stale, or older than the inode in memory."""
        dentry = self._names.get((parent, name))
        if dentry is not None:
            dentry.record = None
        if self._reading and parent in self._reading:
            self._reading[parent].add(name)

    # -- bindings ------------------------------------------------------------------------------------

    def bind(self, parent: int, name: bytes, node: Node, shown: ContentMap) -> Binding:
        """Give ring threads a binding of the name to this file. The former binding ends."""
        dentry = self._names.get((parent, name)) or self.note(parent, name, node.ino)
        self._unbind(dentry)
        binding = dentry.binding = Binding(parent, node, name, shown)
        for ino in (node.ino, parent):
            self._bound.setdefault(ino, set()).add(binding)
        return binding

    def unbind(self, ino: int) -> None:
        """End the bindings of an inode's names, and of names in it."""
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


def settle_all(dentries: Dentries, changes: Sequence[NameChange], version: int, untouched: Set[NameChange]) -> None:
    """`settle` of each; ``untouched``: those whose records the commit neither put nor deleted."""
    for change in changes:
        node, dentry = change.node, dentries._names.get((change.parent, change.name), UNKNOWN)
        if version or untouched or node is None or dentry.change is not change or dentries._reading:
            dentries.settle(change, version, puts=change not in untouched)
            continue
        stored = dentries._directories.get(change.parent)
        if stored is not None:
            stored.hashes.add(hash(change.name))
        dentry.record = None
        dentries._end_change(dentry, change)


_NONE: Mapping[bytes, NameChange] = MappingProxyType({})
