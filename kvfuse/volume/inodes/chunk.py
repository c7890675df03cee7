"""A file's bytes in memory: extents in slots, staged bytes, and the chunks that have both."""

from __future__ import annotations

from collections.abc import Iterable

from kvfuse.slab.allocator import Slot
from kvfuse.volume.store import schema
from kvfuse.volume.store.extents import length_of

FRESH = 0
"""The extent's slot is in no commit: giving it up needs none."""
COMMITTED = 1
"""The extent's slot is in a commit that was sent: giving it up needs another commit."""
DISCARDED = 2
"""The extent is given up."""
RESTED = 3
"""The extent was given up with its inode, and no other host can be reading it any more."""


class Extent:
    """A run of a file's bytes in one slot. Addresses, sizes and lengths in bytes."""

    __slots__ = (
        "addr",
        "checksums",
        "generation",
        "length",
        "owner",
        "packing",
        "reach",
        "slot_size",
        "state",
        "verified",
    )

    def __init__(
        self,
        addr: int,
        slot_size: int,
        length: int,
        generation: int,
        checksums: bytes,
        state: int,
        owner: int = 0,
        packing: bytes = b"",
    ) -> None:
        self.addr = addr
        self.slot_size = slot_size
        self.length = length
        self.reach = length
        """first bytes of the slot that the file has, had or is about to have: records may still refer to them"""
        self.generation = generation
        self.checksums = checksums
        """CRC32C of each started granule; empty: unsealed"""
        self.state = state
        self.owner = owner
        """namespace that its slot is charged to"""
        self.packing = packing
        """see `store.extents`; empty: the slot has the file's own bytes"""
        self.verified = 0
        """bit n: granule n was verified since it came from the engine"""

    @property
    def slot(self) -> Slot:
        return Slot(self.addr, self.slot_size, self.owner)

    def record(self) -> schema.ExtentRecord:
        return schema.ExtentRecord(self.addr, self.length, self.generation, self.checksums, self.packing)

    @property
    def span(self) -> int:
        """Bytes of the file that it has."""
        return length_of(self.packing) if self.packing else self.length


class Staged:
    """Bytes of one chunk that are to be written to slots, from the chunk's start on.

    The pieces are the buffers of the writes, so a sequential writer's bytes are
    not copied. Slots are allocated at the write, which so fails on a full volume.
    """

    __slots__ = ("checked", "dropped", "kept_end", "length", "patches", "pieces", "slots", "unsure", "writing")

    def __init__(self) -> None:
        self.pieces: list[bytes | bytearray | memoryview] = []
        """A bytearray may grow and change, so there must be no views of it; other pieces are never changed.

        A buffer into which an engine read is never a bytearray here: a traceback's frame may still have views of it.
        """
        self.checked: tuple[object, bytes] | None = None
        """a piece, and the checksums of its granules, which its writer has made; of no use if it is not the only one"""
        self.length = 0
        self.slots: list[Slot] = []
        self.writing = False
        """being written to slots: the bytes must not change, so a writer copies them"""
        self.dropped = False
        """truncated away or unlinked while it was being written"""
        self.unsure = False
        """a write to its slots failed, and may still happen"""
        self.kept_end = 0
        """so many bytes are in `unstored`, as they were"""
        self.patches: list[tuple[int, int]] = []
        """(start, end) of those among them that changed since"""

    @property
    def capacity(self) -> int:
        return sum(slot.size for slot in self.slots)

    def flat(self) -> bytearray:
        """The bytes in one buffer that may be changed."""
        piece = self.pieces[0] if len(self.pieces) == 1 else None
        if not isinstance(piece, bytearray):
            piece = bytearray().join(self.pieces)
            self.pieces = [piece]
        return piece

    def append(self, data: bytes | memoryview) -> None:
        last = self.pieces[-1] if self.pieces else b""
        if len(data) < PIECE_SIZE_MIN and (isinstance(last, bytearray) or 0 < len(last) < PIECE_SIZE_MIN):
            if not isinstance(last, bytearray):
                last = self.pieces[-1] = bytearray(last)
            last += data
        else:
            self.pieces.append(data)
        self.length += len(data)

    def overwrite(self, offset: int, data: bytes | memoryview) -> None:
        """Put ``data`` at ``offset`` bytes; if that is behind the end, zeros fill the gap."""
        buffer = self.flat()
        if offset > len(buffer):
            buffer.extend(bytes(offset - len(buffer)))
        buffer[offset : offset + len(data)] = data
        self.length = len(buffer)
        if offset < self.kept_end:
            self.patches.append((offset, offset + len(data)))

    def truncate(self, length: int) -> None:
        if length < self.length:
            del self.flat()[length:]
            self.length = length
            self.kept_end = min(self.kept_end, length)

    def copy(self) -> Staged:
        twin = Staged()
        twin.pieces = [bytearray().join(self.pieces)] if self.pieces else []
        twin.length = self.length
        return twin

    def parts(self, start: int, end: int) -> list[memoryview]:
        """Views of the bytes from ``start`` to before ``end``, as far as there are any; for now: see ``pieces``."""
        parts, position = [], 0
        for piece in self.pieces:
            part = memoryview(piece)[max(0, start - position) : max(0, end - position)]
            if part:
                parts.append(part)
            position += len(piece)
        return parts

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Bytes from ``start`` to before ``end`` (both within the chunk), zeros behind the staged length."""
        parts = self.parts(start, end)
        # A view of a bytearray would forbid its growth until the reply is sent.
        if len(parts) == 1 and end <= self.length and not isinstance(parts[0].obj, bytearray):
            return parts[0]
        return b"".join(parts).ljust(end - start, b"\0")


PIECE_SIZE_MIN = 64 << 10
"""Smaller appends that follow each other are gathered in one buffer instead of being kept as pieces."""


class Chunk:
    """One chunk of a file: extents in slots, and bytes staged over them."""

    __slots__ = ("base", "dirty", "extents", "staged", "writing")

    def __init__(self, extents: list[Extent] | None = None) -> None:
        self.extents = extents or []
        self.base: tuple[schema.ExtentRecord, ...] | None = None
        """in a shared volume: the stored extents of a chunk that was changed here; None: it was not changed"""
        self.dirty: list[tuple[int, int]] = []
        """(start, end) in the chunk of each range written since, in the order of the writes"""
        self.staged: Staged | None = None
        self.writing: Staged | None = None
        """being written to slots: ``staged`` itself, or a former state of it"""

    @property
    def length(self) -> int:
        """Bytes of the file in slots; the rest of the chunk reads as zeros."""
        return sum([extent.span if extent.packing else extent.length for extent in self.extents])

    def start_of(self, extent: Extent) -> int:
        """Offset in the chunk, in bytes, of one of its extents."""
        return sum([other.span for other in self.extents[: self.extents.index(extent)]])

    @property
    def blocks(self) -> int:
        if self.staged is not None:
            return -(-self.staged.length // 4096) * 8
        return blocks_of(self.extents)


def blocks_of(extents: Iterable[Extent | schema.ExtentRecord]) -> int:
    """Units of 512 bytes, as in st_blocks."""
    return sum([-(-extent.length // 4096) * 8 for extent in extents])
