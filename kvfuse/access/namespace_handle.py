"""A directory that a caller uses for blocks: the rights to it, as the event loop found them, for threads, too.

The event loop makes objects, and other threads read them by references of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.volume.api import ROW_TERMS, Binding, RowApi, RowTable, RowTerms
from kvfuse.volume.measures.gates import Gates
from kvfuse.volume.measures.measures import Measures
from kvfuse.volume.views.ancestors import Ancestors

BINDINGS_MAX = 100_000
"""keys that a connection remembers, of all its namespaces"""
EXPIRES_MAX = (1 << 32) - 1
"""second since the epoch, and of a time to live"""
UNCHECKED = -2
"""no epoch of `Gates`"""
_NO_GATES, _NO_ANCESTORS = Gates(), Ancestors()


@dataclass(eq=False)
class Remembered:
    """The number of keys that the namespaces of a connection remember together. Event loop only."""

    count: int = 0
    namespaces: set[NamespaceHandle] = field(default_factory=set)

    def make_room(self) -> None:
        """Make room for one more key: where ``BINDINGS_MAX`` are remembered, forget all; calls look them up again."""
        if self.count >= BINDINGS_MAX:
            for namespace in self.namespaces:
                namespace.bindings = {}
            self.namespaces.clear()
            self.count = 0


class Group(NamedTuple):
    """The group of new blocks in a directory, as of ``changes`` of ``ancestors``."""

    gid: int
    ancestors: Ancestors = _NO_ANCESTORS
    changes: int = 0

    @property
    def is_current(self) -> bool:
        """Whether no change of the directory's group or mode has begun. Any thread."""
        return self.changes == self.ancestors.changes


NO_GROUP = Group(0)
"""for directories into which nothing is put"""


@dataclass(eq=False, frozen=True)
class BlockDoor:
    """What the threads of a client may do with blocks that are rows, as the event loop found it."""

    store: RowApi
    directory: int
    namespace: int
    own: RowTable | None
    """where its own blocks go; None: it may put none"""
    tables: tuple[RowTable, ...]
    """of the directory, at that time"""
    readable: tuple[RowTable, ...]
    has_files: bool
    """names of the directory may also mean ordinary files"""
    reads_all: bool
    """it may read all blocks of the directory"""
    asks_first: bool = False
    """each answer is what all hosts have: the event loop asks them"""
    terms: RowTerms = ROW_TERMS

    def terms_of(self, ttl: int, priority: int) -> RowTerms:
        """The terms of a put: ``ttl`` seconds, 0: the namespace's; ``priority``: -128 to 127. Any thread."""
        if not ttl and not priority:
            return self.terms
        expires = min(self.store.now(self.namespace) + ttl, EXPIRES_MAX) if ttl else 0
        return self.terms._replace(expires=expires, priority=self.terms.priority + priority)

    def find(self, names: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which blocks the directory has, whoever may read them, and whatever they are worth. Any thread."""
        found = np.zeros(len(names), np.bool_)
        for table in self.store.tables_of(self.directory):
            found |= table.find(names, self.store.now(table.namespace))[0] >= 0
        return found

    @property
    def sees_all(self) -> bool:
        """Its threads may read all blocks of the directory."""
        return self.reads_all and not self.asks_first

    @property
    def is_current(self) -> bool:
        """Whether the directory has the same tables as then, and as few files. Any thread."""
        store = self.store
        same = self.tables is store.tables_of(self.directory) and not store.has_ended
        return same and (self.has_files or self.directory not in store.with_files)


@dataclass(eq=False)
class NamespaceHandle:
    """A registered directory, whose files are blocks."""

    ino: int
    mode: int
    """permission bits of new blocks"""
    group: Group
    read_only: bool = False
    """the peer has it through a mount that is bound read-only"""
    may_list: bool = False
    """the peer may, as far as known, find out every name; else it must not see blocks that it did not name"""
    may_put: bool = True
    """the peer may, as far as known, make names in it; else a put is not copied before the event loop allowed it"""
    measures: Measures = field(default_factory=Measures)
    """measures of the volume's namespace around it"""
    waits: bool = False
    """a put in it waits for its commit, as far as known"""
    by_path: bool = False
    """the peer's user could search all directories above it when the peer registered it: so it has to be able to later,
    too. Else somebody gave it the descriptor, or it has the directory through a bind mount"""
    gates: Gates = _NO_GATES
    epoch: int = UNCHECKED
    """epoch of ``gates`` as of which the rights below are known"""
    ancestors: Ancestors = _NO_ANCESTORS
    changes: int = 0
    """changes of ``ancestors``, the same"""
    descriptor: str = ""
    """the client's description of its blocks; it may not use the directory where the namespace has another one"""
    has_token: bool = False
    """the peer has shown the token of the volume's namespace that it is in, and may all there"""
    is_absent: bool = False
    """the peer may not use that namespace: for it the directory is empty"""
    is_cut_off: bool = False
    """a directory above it does not let the peer through any more"""
    blocks: BlockDoor | None = None
    """None: its blocks are files, or the event loop has to look"""
    bindings: dict[bytes, Binding] = field(default_factory=dict)
    """file name -> its binding, which this peer may read; may be invalid by now"""
    remembered: Remembered = field(default_factory=Remembered)
    """shared by all namespaces of the connection"""

    @property
    def may_copy(self) -> bool:
        """Whether a put may be copied before the event loop looks at it. Any thread."""
        return self.may_put and self.group.is_current

    @property
    def is_checked(self) -> bool:
        """Whether the peer's rights are the same as when the event loop read them. Any thread."""
        return self.epoch == self.gates.epoch and self.changes == self.ancestors.changes

    def remember(self, name: bytes, binding: Binding) -> None:
        self.remembered.make_room()
        self.remembered.namespaces.add(self)
        self.remembered.count += name not in self.bindings
        self.bindings[name] = binding
