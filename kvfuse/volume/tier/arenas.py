"""Arenas of the shared-memory tier: memory that clients may map, the slots in it, and blocks that hold a slot each.

`shared_tier.py` says what they are for, and changes them under its lock.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.policy.hot import USES_MAX, HotOrder, Recent
from kvfuse.volume.tier.arena_rows import ArenaRows
from kvfuse.volume.tier.placement import ANYWHERE, Placement
from kvfuse.volume.tier.revocable import RevocableMemory
from kvfuse.volume.views.content_map import MappedSource

Bytes = npt.NDArray[np.uint8]


class ReadClass(NamedTuple):
    """Files with the same readers: whoever may read one of them may read all."""

    directory: int
    """the inode of the only directory that they have a name in"""
    uid: int
    gid: int
    mode: int
    """the three bits that allow reading"""


class ArenaMemory:
    """A piece of shared memory, mapped writable here. ``piece``: nothing else has it.

    ``resident``: bytes from the start that were touched, and so take memory.
    """

    __slots__ = ("address", "bytes", "descriptor", "piece", "resident")

    def __init__(self, piece: RevocableMemory, placement: Placement = ANYWHERE) -> None:
        self.piece = piece
        self.descriptor = piece.descriptor
        memory = mmap.mmap(piece.descriptor, os.fstat(piece.descriptor).st_size)
        self.bytes: Bytes = np.frombuffer(memory, np.uint8)
        self.address: int = self.bytes.ctypes.data
        placement.apply(memory, self.address)
        weakref.finalize(self.bytes, _let_go, piece)  # every view of the bytes keeps it open
        self.resident = 0


def _let_go(piece: RevocableMemory) -> None:
    """The last one that knew of it."""


class Arena:
    """Memory cut into slots of one kind."""

    __slots__ = (
        "is_former",
        "kept_count",
        "kind",
        "leased_count",
        "memory",
        "number",
        "returned",
        "rows",
        "shared",
        "source",
        "touched",
        "used_at",
        "uses",
    )

    def __init__(
        self,
        number: int,
        kind: ArenaKind,
        memory: ArenaMemory,
        returned: deque[tuple[Arena, int]],
        rows: ArenaRows | None = None,
    ) -> None:
        """``rows``: what the daemon after this one finds in it, if it finds anything."""
        self.number = number
        self.kind = kind
        self.memory = memory
        self.returned = returned
        self.rows = rows
        self.source = MappedSource(memory.descriptor, _read_only(memory.bytes), number)
        self.touched = 0
        """slots from the start that were in use at some time"""
        self.leased_count = 0
        self.kept_count = 0
        self.used_at = 0
        """when a block in it was last kept, or it was spared"""
        self.uses = 0
        """of its blocks, since it was spared; up to `USES_MAX`"""
        self.is_former = False
        """the daemon before this one made it"""
        self.shared = False
        """a descriptor was given: somebody may have it mapped"""

    @property
    def slot_count(self) -> int:
        return len(self.memory.bytes) // self.kind.slot_size

    @property
    def has_unused(self) -> bool:
        """There are slots that were never in use."""
        return (self.touched + 1) * self.kind.slot_size <= len(self.memory.bytes)


class ArenaKind:
    """All arenas with one slot size and one read class."""

    __slots__ = ("ancestors", "arenas", "free", "is_left", "kept", "on_return", "read_class", "retired", "slot_size")

    def __init__(self, slot_size: int, read_class: ReadClass, recent: Recent) -> None:
        self.slot_size = slot_size
        self.read_class = read_class
        self.arenas: list[Arena] = []
        self.free: list[tuple[Arena, int]] = []
        self.kept = HotOrder[TierBlock | LeftBlock](recent)
        """blocks by inode"""
        self.retired = False
        self.is_left = False
        """it has arenas that clients of a daemon before this one may have mapped"""
        self.ancestors: object = None
        """of its directory, where clients have mapped an arena: see `views.ancestors`"""
        self.on_return: Callable[[], object] = lambda: None
        """of a retired one: called, in any thread, when somebody lets go of a block: its arena may end"""


class _Lease:
    """The right to a slot. numpy keeps it as the owner of the bytes, so it ends with the last view of them."""

    __slots__ = ("__array_interface__", "arena", "slot")

    def __init__(self, arena: Arena, slot: int, size: int) -> None:
        self.arena = arena
        self.slot = slot
        address = arena.memory.address + slot * arena.kind.slot_size
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    @property
    def root(self) -> Bytes:
        """The memory in which its bytes lie, which lives longer than they do."""
        return self.arena.memory.bytes

    def __del__(self) -> None:
        arena = self.arena
        arena.returned.append((arena, self.slot))
        if arena.kind.retired:
            arena.kind.on_return()


class TierBlock:
    """``size`` bytes of an arena. Written by whoever allocated it, before anybody else sees it; then never again."""

    __slots__ = ("buffer", "checksums", "home", "kept_at", "name", "offset", "size", "slot", "uses")

    def __init__(self, arena: Arena, slot: int, size: int) -> None:
        self.buffer: Bytes = np.asarray(_Lease(arena, slot, size))
        self.size = size
        self.slot = slot
        self.offset = slot * arena.kind.slot_size
        """of the first byte in the arena"""
        self.kept_at = 0
        self.uses = 0
        self.home = arena
        self.checksums = b""
        """of its granules, as `granule_checksums` has them; empty: nobody has made them"""
        self.name = b""
        """of its file, in the directory of the read class"""

    def note_use(self) -> None:
        """Somebody reads it. For any thread."""
        if self.uses < USES_MAX:
            self.uses += 1
            if self.home.rows is not None:
                self.home.rows.note_uses(self.slot, self.uses)
        self.home.uses = USES_MAX

    def packed(self) -> tuple[int, int]:
        """As `ArenaRows.packed`, of a block that was left."""
        return self.home.rows.packed(self.slot) if self.home.rows is not None else (0, 0)

    @property
    def arena(self) -> int:
        return self.home.number

    @property
    def address(self) -> int:
        """Of its first byte, here."""
        return self.home.memory.address + self.offset

    @property
    def source(self) -> MappedSource:
        """The arena, for `MapRow`."""
        return self.home.source

    @property
    def read_class(self) -> ReadClass:
        return self.home.kind.read_class


class LeftBlock:
    """What a daemon before this one says is the copy of a file: to be looked at before it is used (`SharedTier.left`).

    It has a lease of its slot, as a `TierBlock` has; once there is one, in ``block``, that has it.
    """

    __slots__ = ("block", "home", "kept_at", "size", "slot", "uses")

    def __init__(self, home: Arena, slot: int, size: int, uses: int, kept_at: int) -> None:
        self.home = home
        self.slot = slot
        self.size = size
        self.uses = uses
        self.kept_at = kept_at
        self.block: TierBlock | None = None

    def made(self) -> TierBlock:
        if self.block is None:
            self.block = TierBlock(self.home, self.slot, self.size)
            self.block.kept_at, self.block.uses = self.kept_at, self.uses
        return self.block


class LeftColumns(NamedTuple):
    """A column for each thing that is known of a `LeftBlock`; a place for each of them."""

    arenas: list[Arena]
    arena: npt.NDArray[np.int64]
    """places in ``arenas``"""
    slot: npt.NDArray[np.int64]
    size: npt.NDArray[np.uint64]
    uses: npt.NDArray[np.uint32]
    kept_at: npt.NDArray[np.uint64]

    def block(self, place: int) -> LeftBlock:
        home = self.arenas[self.arena[place]]
        numbers = (self.slot[place], self.size[place], self.uses[place], self.kept_at[place])
        return LeftBlock(home, *map(int, numbers))


class LeftBlocks(MutableMapping[int, LeftBlock]):
    """`LeftBlock` by inode: each is made when it is first asked for, as there may be a million of them."""

    def __init__(self) -> None:
        self.places: dict[int, LeftBlock | int] = {}
        """the block, or its place in the columns; to be looked into only, where a call more is too much"""
        self._columns: LeftColumns

    def begin_with(self, inos: Sequence[int], columns: LeftColumns) -> None:
        """Nothing is in it. ``inos``: of the blocks in the columns."""
        self.places = dict(zip(inos, range(len(inos)), strict=True))
        self._columns = columns

    def __getitem__(self, ino: int) -> LeftBlock:
        block = self.places[ino]
        if isinstance(block, int):
            block = self.places[ino] = self._columns.block(block)
        return block

    def __setitem__(self, ino: int, block: LeftBlock) -> None:
        self.places[ino] = block

    def __delitem__(self, ino: int) -> None:
        del self.places[ino]

    def __contains__(self, ino: object) -> bool:
        return ino in self.places

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _read_only(data: Bytes) -> Bytes:
    view = data.view()
    view.flags.writeable = False
    return view
