"""Copies of staged bytes in shared memory: of each chunk, as they were when they were answered for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfuse.kept.log import KeptLog, Piece
    from kvfuse.volume.inodes.chunk import Staged


class StagedCopy:
    """The copy of what is staged of a chunk."""

    __slots__ = ("is_lost", "pieces", "size", "staged")

    def __init__(self, staged: Staged) -> None:
        self.staged = staged
        self.pieces: list[Piece] = []
        self.size = 0
        """of these"""
        self.is_lost = False


class StagedCopies:
    """Makes and frees them, in the room of a log."""

    def __init__(self, kept: KeptLog) -> None:
        self._log = kept
        self._freed: list[Piece] = []
        """pieces to which the next frame does not refer"""

    def drop(self, copies: Iterable[StagedCopy | None]) -> None:
        """The next frame does not refer to these."""
        for copy in copies:
            if copy is not None:
                self._freed += copy.pieces

    def written(self) -> None:
        """The frame counts."""
        if self._freed:
            self._log.free_pieces(self._freed)
            self._freed = []

    def fill(self, copy: StagedCopy) -> None:
        """Have a copy of all bytes that are staged."""
        staged = copy.staged
        if copy.size < staged.length:
            more = self._log.take_pieces(staged.length - copy.size)
            copy.is_lost = more is None
            if more is None:
                return
            copy.pieces += more
            copy.size += sum([size for _, size in more])
        if not copy.is_lost:
            for start, end in staged.patches:
                self._copy_part(copy, start, min(end, staged.kept_end))
            if not staged.kept_end and len(staged.pieces) == len(copy.pieces) == 1:
                self._log.write_bytes(copy.pieces[0][0], staged.pieces[0])
            elif staged.kept_end < staged.length:
                self._copy_part(copy, staged.kept_end, staged.length)
            staged.patches.clear()
            staged.kept_end = staged.length

    def _copy_part(self, copy: StagedCopy, start: int, end: int) -> None:
        base = 0
        for offset, size in copy.pieces:
            low, high = max(start, base), min(end, base + size)
            if low < high:
                position = offset + low - base
                for part in copy.staged.parts(low, high):
                    self._log.write_bytes(position, part)
                    position += len(part)
            base += size
