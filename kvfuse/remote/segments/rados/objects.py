"""Requests of one RADOS object: ranges to read or write, or its removal; and how segments become objects.

Segment 26 is the objects ``0000001a.00000000``, ``0000001a.00000001``, ... of ``object_size`` bytes each, the last one
maybe less. An object that nobody wrote does not exist, and one ends where its last write did: what is missing is zeros.
"""

from __future__ import annotations

import ctypes
import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file.direct import address_of
from kvfuse.remote.segments.rados.librados import BALANCE_READS, ObjectRange, RadosPool, ReadResults

RANGES_MAX = 64
"""ranges of one operation"""
READ_BYTES_MAX = 1 << 20
"""Bytes of a read of several ranges. It saves round trips for small ones; larger ones are better done side by side than
one after the other by one server's thread."""
WRITE_BYTES_MAX = 4 << 20
"""Bytes of a write of several ranges. Writes to one object are done one after the other however they come: each is a
transaction on every replica."""
COPIED_SIZE_MAX = 128 << 10
"""Bytes of neighbouring pieces up to which copying them into one range costs less than ranges of their own."""


def object_name(segment: int, index: int) -> bytes:
    return b"%08x.%08x" % (segment, index)


class ObjectPiece:
    """The part of a transfer that lies in one object. ``view`` keeps the caller's memory where it is."""

    __slots__ = ("offset", "view")

    def __init__(self, offset: int, view: memoryview) -> None:
        self.offset = offset
        self.view = view


class ObjectRequest(ABC):
    """One operation on one object. ``code`` is its answer: None until there is one, negative errno for a failure."""

    verb: str
    is_read = False

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.code: int | None = None

    @property
    def copied_bytes(self) -> int:
        """Bytes that its start copies."""
        return 0

    @abstractmethod
    def start(self, pool: RadosPool, tag: int) -> int:
        """Begin; returns librados' completion."""

    def ended(self, code: int) -> None:
        """It was answered."""
        self.code = code

    @property
    def failure(self) -> int:
        """The negative errno that the caller must hear of, or 0."""
        return min(self.code or 0, 0)


class ReadRequest(ObjectRequest):
    """Fills each piece's view. Absent bytes are left alone until ``fill``."""

    verb = "reading"
    is_read = True

    def __init__(self, name: bytes, pieces: Sequence[ObjectPiece]) -> None:
        super().__init__(name)
        self._pieces = pieces
        self._ranges = [ObjectRange(piece.offset, address_of(piece.view), piece.view.nbytes) for piece in pieces]
        self._results = ReadResults(len(pieces))
        self.lengths: Sequence[int] = ()
        """bytes that each piece got, once it was answered"""

    def start(self, pool: RadosPool, tag: int) -> int:
        return pool.start_read(self.name, self._ranges, self._results, tag)

    def ended(self, code: int) -> None:
        """A reply that arrives after a faster hedge has put the same bytes in the same place."""
        if self.code is None:
            self._answered(code, self._results)

    def hedge(self) -> SpareRead:
        """The same, of any replica."""
        return SpareRead(self.name, [(piece.offset, piece.view.nbytes) for piece in self._pieces], BALANCE_READS)

    def hedge_ended(self, hedge: SpareRead, code: int) -> None:
        """A failed hedge answers nothing: the first try will. Nor does one that comes too late."""
        code = min(code, hedge.results.code)
        if self.code is None and (code >= 0 or code == -errno.ENOENT):
            for piece, view in zip(self._pieces, hedge.views, strict=True):
                piece.view[:] = view
            self._answered(code, hedge.results)

    def _answered(self, code: int, results: ReadResults) -> None:
        self.code = min(code, results.code)
        self.lengths = results.lengths if self.code >= 0 else [0] * len(self._ranges)

    @property
    def failure(self) -> int:
        return 0 if self.code == -errno.ENOENT else super().failure

    @property
    def absent_bytes(self) -> int:
        return sum(range_.length for range_ in self._ranges) - sum(self.lengths)

    def fill(self) -> None:
        """Zeros where the object had no bytes. Nothing may be under way any more."""
        for (_, address, length), got in zip(self._ranges, self.lengths, strict=True):
            if got < length:
                ctypes.memset(address + got, 0, length - got)


class SpareRead:
    """Ranges of one object read into memory of its own, so that nobody has to wait for its end.

    For there is no end to be had of some: a read that a replica refused is sent anew by librados, to the first one
    and under a number that nobody is told, and can then not be cancelled.
    """

    def __init__(self, name: bytes, spans: Sequence[tuple[int, int]], flags: int = 0) -> None:
        self.name = name
        self.byte_count = sum(length for _, length in spans)
        self.results = ReadResults(len(spans))
        memory = np.empty(self.byte_count, np.uint8).data
        self.views: list[memoryview] = []
        """one for each (offset, length) of ``spans``"""
        self._flags = flags
        self._ranges: list[ObjectRange] = []
        start = 0
        for offset, length in spans:
            view = memory[start : start + length]
            self.views.append(view)
            self._ranges.append(ObjectRange(offset, address_of(view), length))
            start += length

    def start(self, pool: RadosPool, tag: int) -> int:
        """Begin; returns librados' completion."""
        return pool.start_read(self.name, self._ranges, self.results, tag, self._flags)


class WriteRequest(ObjectRequest):
    """Stores each piece's view; small neighbours become one range. ``exclusive``: leaves an object that is there."""

    verb = "writing"

    def __init__(self, name: bytes, pieces: Sequence[ObjectPiece], *, exclusive: bool = False) -> None:
        super().__init__(name)
        self._pieces = sorted(pieces, key=lambda piece: piece.offset)
        self._exclusive = exclusive

    @property
    def copied_bytes(self) -> int:
        return sum(piece.view.nbytes for piece in self._pieces)

    @property
    def failure(self) -> int:
        return 0 if self._exclusive and self.code == -errno.EEXIST else super().failure

    def start(self, pool: RadosPool, tag: int) -> int:
        runs = [(at, views[0] if len(views) == 1 else memoryview(b"".join(views))) for at, views in self._runs()]
        ranges = [ObjectRange(offset, address_of(view), view.nbytes) for offset, view in runs]
        return pool.start_write(self.name, ranges, tag, exclusive=self._exclusive)

    def _runs(self) -> Iterator[tuple[int, list[memoryview]]]:
        """(offset, views) of bytes that follow each other without a gap: one large piece, or small ones."""
        start, end, views = 0, -1, list[memoryview]()
        for piece in self._pieces:
            is_large = piece.view.nbytes > COPIED_SIZE_MAX
            if piece.offset != end or is_large:
                if views:
                    yield start, views
                start, views = piece.offset, []
            views.append(piece.view)
            end = -1 if is_large else piece.offset + piece.view.nbytes
        yield start, views


class TouchRequest(ObjectRequest):
    """A change of nothing, which takes all replicas: makes an empty object where there is none."""

    verb = "probing"

    def start(self, pool: RadosPool, tag: int) -> int:
        return pool.start_touch(self.name, tag)


class RemoveRequest(ObjectRequest):
    """An object that is not there is removed already."""

    verb = "removing"

    def start(self, pool: RadosPool, tag: int) -> int:
        return pool.start_remove(self.name, tag)

    @property
    def failure(self) -> int:
        return 0 if self.code == -errno.ENOENT else super().failure


def pieces_by_object(
    batch: Sequence[Transfer], object_size: int, bytes_max: int
) -> Iterator[tuple[bytes, list[ObjectPiece]]]:
    """(object's name, pieces) of each operation: one piece, or up to RANGES_MAX of up to ``bytes_max`` together."""
    open_: dict[tuple[int, int], tuple[list[ObjectPiece], int]] = {}
    for segment, offset, buffer in batch:
        view = memoryview(buffer)
        if not view.nbytes:
            continue
        view = view.cast("B")
        for index, start, low, high in spans(offset, view.nbytes, object_size):
            pieces, byte_count = open_.get((segment, index), ([], 0))
            if len(pieces) == RANGES_MAX or (pieces and byte_count + high - low > bytes_max):
                yield object_name(segment, index), pieces
                pieces, byte_count = [], 0
            pieces.append(ObjectPiece(start, view[low:high]))
            open_[segment, index] = pieces, byte_count + high - low
    for (segment, index), (pieces, _) in open_.items():
        yield object_name(segment, index), pieces


def spans(offset: int, length: int, object_size: int) -> Iterator[tuple[int, int, int, int]]:
    """(object's index, offset in it, low, high) for each object that a segment's range touches: its part low:high."""
    low = 0
    while low < length:
        index, start = divmod(offset + low, object_size)
        high = min(low + object_size - start, length)
        yield index, start, low, high
        low = high
