"""Hands the state of the FUSE door from one daemon to the next: four tables in shared memory.

* open files (`handles`);
* inodes with unstored content: after a crash each handle open for writing reports the loss;
* decisions of requests (`idempotent_changes`): the kernel resends requests that were not answered;
* places of recent lookups (`recent`): resent requests may refer to these inodes.
"""

from __future__ import annotations

from collections.abc import Collection

from kvfuse.fs.handles import HandleTable
from kvfuse.fs.idempotent_changes import Decisions
from kvfuse.fs.recent import RecentPlaces
from kvfuse.kept.keeper import Keeper
from kvfuse.kept.rows import Rows
from kvfuse.volume.views.handover import Handover

UNSAVED_FORM = 1
UNSAVED_SIZE = 8
"""bytes of a row: an inode, perhaps with a mark"""
TOLD = 1 << 63
"""mark: its handles report the loss, and the kernel's cache is still stale"""
UNSAVED_MAX = 1 << 24


class KeptHandover(Handover):
    """Handover of a daemon with a keeper. Made before the volume is opened, and passed to volume and door."""

    outlives = True

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self.handles = HandleTable(keeper)
        self.known_below = 0 if self.is_first else 1 << 64
        self.decisions = Decisions(keeper)
        self._recent = RecentPlaces(keeper)
        self._unsaved = Rows(keeper, "fuse/unsaved", UNSAVED_FORM, UNSAVED_SIZE, UNSAVED_MAX)
        memory = self._unsaved.memory
        found = {at: int.from_bytes(memory[at : at + UNSAVED_SIZE], "little") for at in self._unsaved.list_used()}
        self._offsets = {ino & ~TOLD: at for at, ino in found.items()}
        self.lost = set(self._offsets)
        """inodes whose lost content the kernel may still cache"""
        self._changed = set[int]()
        """those of ``lost`` with newer unstored content"""
        for fh, row in self.handles.before.items():
            self.was_open(row.ino, row.places, writable=row.is_writable, is_new=row.is_new)
            if row.is_writable and found.get(self._offsets.get(row.ino, -1)) == row.ino:
                self.handles.mark_lost(fh)
        for ino in self.lost:
            self._write_row(ino, TOLD)

    def miss(self, inos: Collection[int]) -> None:
        super().miss(inos)
        for fh, row in self.handles.before.items():
            if row.is_writable and row.ino in inos:
                self.handles.mark_lost(fh)
        for ino in inos:
            self._write_row(ino, TOLD)

    @property
    def is_first(self) -> bool:
        return not self.handles.was_kept

    def looked_up(self, ino: int, parent: int, name: bytes) -> None:
        self._recent.add_place(ino, parent, name)

    def place_before(self, ino: int) -> tuple[int, bytes] | None:
        return self._recent.before.get(ino)

    def moved(self, ino: int, parent: int, name: bytes) -> None:
        self.handles.add_place(ino, parent, name)

    def stored(self, ino: int) -> None:
        self.handles.mark_stored(ino)

    def unsaved(self, ino: int) -> None:
        if ino in self.lost:
            self._changed.add(ino)
        self._write_row(ino)

    def _write_row(self, ino: int, mark: int = 0) -> None:
        offset = self._offsets.get(ino)
        if offset is None:
            offset = self._unsaved.take_row()
            if offset is None:
                return
            self._offsets[ino] = offset
        self._unsaved.memory[offset : offset + UNSAVED_SIZE] = (ino | mark).to_bytes(UNSAVED_SIZE, "little")

    def saved(self, ino: int) -> None:
        offset = self._offsets.pop(ino, None)
        if offset is not None:
            self._unsaved.free_row(offset)

    def end_losses(self) -> None:
        """The kernel's cache has dropped the content of ``lost``: free its rows, but for newer unstored content."""
        for ino in self.lost - self._changed:
            self.saved(ino)
        self.lost, self._changed = set(), set()
        self.handles.losses_dropped.set()

    def close(self) -> None:
        """Unmap the tables; the keeper retains them."""
        self.handles.close()
        self.decisions.close()
        self._recent.close()
        self._unsaved.close()
