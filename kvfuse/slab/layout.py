"""Where everything is in a volume's segment files, and what format version 1 looks like in bytes.

A volume's data is a row of equal *slabs*, numbered from 0 and spread over *segments*, one file each. A
*volume address* is ``slab * slab_size + offset in the slab``: it counts data bytes only. One segment::

    4 KiB header     a copy of the superblock, with the segment's number
    head tables      one for each slab: slab_size // 64 bytes, a header for each slot and room behind it
    padding          up to ``data_alignment``
    slabs            data only, so that slots stay aligned
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import ALGORITHM, GRANULE_SIZE, Buffer, crc32c, extend
from kvfuse.errors import VolumeError

FORMAT_VERSION = 1
PAGE_SIZE = 4096
"""The smallest slot; slot sizes and everything in a segment file are multiples of it."""
SLAB_SIZE_MIN = 1 << 20
SLAB_SIZE_MAX = 64 << 20
SLAB_COUNT_MIN = 7
SLAB_COUNT_MAX = 1 << 22
"""Slabs that a volume may grow to: daemons reserve address space for them. One that is made with more does not grow."""
SEGMENT_SIZE = 1 << 30

HEADER_SIZE = 64
HEADER_STRIDE_MAX = 1024
HEAD_RATIO = 64
"""Bytes of slab data for one byte of its head table: 64 bytes for each slot of 4 KiB."""


# -- geometry ----------------------------------------------------------------------------------------


@dataclass
class Geometry:
    """Sizes (bytes) and counts of a volume. ValueError where they do not fit together.

    A volume grows by whole segments (`grown`), so one segment may be shorter than all others: the last one that it was
    formatted with. No place ever changes, and each is known before the volume is so large: who does not know yet that
    the volume has grown finds in it what others stored.
    """

    capacity: int
    """what all segment files together never exceed"""
    slab_size: int
    """a power of two"""
    segment_slabs: int
    """slabs of every segment but the short one"""
    slab_count: int
    first_slab_count: int = 0
    """slabs that it was formatted with: the short segment has the last of them. 0: all"""
    head_size: int = field(init=False, repr=False, compare=False)
    """bytes of one slab's head table"""
    data_alignment: int = field(init=False, repr=False, compare=False)
    """of the first slab in its segment file, a power of two"""
    _short_segment: int = field(init=False, repr=False, compare=False)
    """-1: all have the same size"""
    _missing_slabs: int = field(init=False, repr=False, compare=False)
    """that the short segment has fewer than others"""
    _segment_data_size: int = field(init=False, repr=False, compare=False)
    _data_starts: tuple[int, int] = field(init=False, repr=False, compare=False)
    """file offset of the first slab: of every segment but the short one, and of that"""

    def __post_init__(self) -> None:
        _check_slab_size(self.slab_size)
        self.first_slab_count = self.first_slab_count or self.slab_count
        if self.segment_slabs < 1 or self.slab_count < SLAB_COUNT_MIN:
            raise ValueError(f"{self.slab_count} slabs, {self.segment_slabs} in a segment: too few")
        whole_segments, rest = divmod(self.first_slab_count, self.segment_slabs)
        self._short_segment = whole_segments if rest else -1
        self._missing_slabs = self.segment_slabs - rest if rest else 0
        if self.slab_count < self.first_slab_count or (self.slab_count - self.first_slab_count) % self.segment_slabs:
            raise ValueError(f"{self.slab_count} slabs after {self.first_slab_count}: no whole segments")
        self.head_size = self.slab_size // HEAD_RATIO
        self.data_alignment = _data_alignment(self.segment_slabs, self.slab_size)
        self._segment_data_size = self.segment_slabs * self.slab_size
        self._data_starts = (self._start_of(self.segment_slabs), self._start_of(rest))
        if self.size > self.capacity:
            raise ValueError(f"{self.slab_count} slabs take {self.size} bytes, more than the capacity {self.capacity}")

    def _start_of(self, slab_count: int) -> int:
        return _data_start(slab_count, self.slab_size, self.data_alignment)

    @classmethod
    def choose(cls, capacity: int, slab_size: int | None = None, segment_size: int = SEGMENT_SIZE) -> Geometry:
        """The geometry that gets the most slabs into ``capacity`` bytes. ValueError, with the minimum, if too few."""
        if slab_size is None:
            slab_size = 1 << max(capacity // 1024, 1).bit_length() - 1
            slab_size = min(max(slab_size, SLAB_SIZE_MIN), SLAB_SIZE_MAX)
        _check_slab_size(slab_size)
        capacity_min = (SLAB_COUNT_MIN + 1) * slab_size
        if capacity < capacity_min:
            raise ValueError(f"a capacity of {capacity} bytes is too small: the minimum is {capacity_min} bytes")
        if segment_size < 2 * slab_size:
            raise ValueError(f"a segment of {segment_size} bytes is too small: the minimum is {2 * slab_size} bytes")
        segment_slabs = _slabs_within(min(segment_size, capacity), slab_size)
        alignment = _data_alignment(segment_slabs, slab_size)
        whole, rest = divmod(capacity, _data_start(segment_slabs, slab_size, alignment) + segment_slabs * slab_size)
        slab_count = whole * segment_slabs + _slabs_within(rest, slab_size, alignment)
        return cls(capacity, slab_size, segment_slabs, slab_count)

    @property
    def step(self) -> int:
        """Bytes by which it grows."""
        return self._data_starts[0] + self._segment_data_size

    def grown(self, capacity: int) -> Geometry:
        """The same with the most whole segments more that ``capacity`` has room for. ValueError, with the minimum."""
        step = self.step
        count = (capacity - self.size) // step
        if count < 1:
            raise ValueError(
                f"{capacity} bytes have no room for another segment of {step} bytes:"
                f" the minimum is {self.size + step} bytes"
            )
        slab_count = self.slab_count + count * self.segment_slabs
        if slab_count > SLAB_COUNT_MAX:
            raise ValueError(
                f"a volume with slabs of {self.slab_size} bytes grows to {SLAB_COUNT_MAX * self.slab_size} bytes at"
                " most: make another one with larger slabs, and copy to it"
            )
        return replace(self, capacity=capacity, slab_count=slab_count)

    def cut(self, capacity: int) -> Geometry:
        """The same without the last segments, so that all others take no more than ``capacity``. ValueError."""
        size, segments = self.size, self.segment_count
        while size > capacity and segments:
            segments -= 1
            size -= self.segment_size(segments)
        slab_count = self.slabs_of(segments - 1).stop if segments else 0
        if slab_count < SLAB_COUNT_MIN:
            raise ValueError(f"{capacity} bytes have no room for {SLAB_COUNT_MIN} slabs in whole segments")
        first = min(self.first_slab_count, slab_count)
        return replace(self, capacity=capacity, slab_count=slab_count, first_slab_count=first)

    def become(self, other: Geometry) -> bool:
        """Be as another one of the same volume, for all who have this one. False: it was the same."""
        if self == other:
            return False
        self.capacity, self.slab_count, self.first_slab_count = other.capacity, other.slab_count, other.first_slab_count
        self.__post_init__()
        return True

    @property
    def segment_count(self) -> int:
        return (self.slab_count + self._missing_slabs) // self.segment_slabs

    @property
    def data_size(self) -> int:
        """Bytes of all slabs: addresses are below it."""
        return self.slab_count * self.slab_size

    @property
    def size(self) -> int:
        """Bytes of all segment files."""
        short = self._short_segment >= 0
        starts = (self.segment_count - short) * self._data_starts[0] + short * self._data_starts[1]
        return starts + self.data_size

    def size_of(self, segment_count: int) -> int:
        """Bytes of the first segment files."""
        return sum(self.segment_size(segment) for segment in range(segment_count))

    def slabs_of(self, segment: int) -> range:
        """The slabs in a segment. ValueError if the volume has no such segment."""
        if not 0 <= segment < self.segment_count:
            raise ValueError(f"no segment {segment}: the volume has {self.segment_count}")
        is_short, is_behind = segment == self._short_segment, segment > self._short_segment
        start = segment * self.segment_slabs - is_behind * self._missing_slabs
        return range(start, start + self.segment_slabs - is_short * self._missing_slabs)

    def segment_size(self, segment: int) -> int:
        """Bytes of a segment file."""
        return self.data_start(segment) + len(self.slabs_of(segment)) * self.slab_size

    def data_start(self, segment: int) -> int:
        """File offset of a segment's first slab."""
        return self._data_starts[segment == self._short_segment]

    def slab_of(self, addr: int) -> int:
        return addr // self.slab_size

    def slabs_at(self, segment: int, offset: int, length: int) -> range:
        """Slabs whose heads, or whose data, have some of these bytes of a segment; none of its superblock."""
        data_start = self.data_start(segment)
        start, size = (data_start, self.slab_size) if offset >= data_start else (PAGE_SIZE, self.head_size)
        first, last = (offset - start) // size, (offset + length - 1 - start) // size
        return self.slabs_of(segment)[max(first, 0) : max(last + 1, 0)]

    def slots_per_slab(self, slot_size: int) -> int:
        return self.slab_size // slot_size

    def locate(self, addr: int) -> tuple[int, int]:
        """(segment, file offset) of a data byte."""
        if addr >= self.first_slab_count * self.slab_size:
            addr += self._missing_slabs * self.slab_size
        segment, data_offset = divmod(addr, self._segment_data_size)
        return segment, self._data_starts[segment == self._short_segment] + data_offset

    def locate_head(self, slab: int) -> tuple[int, int]:
        """(segment, file offset) of a slab's head table, ``head_size`` bytes long."""
        place = slab + (slab >= self.first_slab_count) * self._missing_slabs
        segment, index = divmod(place, self.segment_slabs)
        return segment, PAGE_SIZE + index * self.head_size

    def locate_header(self, addr: int, slot_size: int, stride: int = 0) -> tuple[int, int]:
        """(segment, file offset) of the header of the slot at ``addr``; ``header_stride`` bytes are its own.

        ``stride``: those, where they are at hand.
        """
        slab, slot_offset = divmod(addr, self.slab_size)
        place = slab + (slab >= self.first_slab_count) * self._missing_slabs
        segment, index = divmod(place, self.segment_slabs)
        head_offset = PAGE_SIZE + index * self.head_size
        return segment, head_offset + slot_offset // slot_size * (stride or self.header_stride(slot_size))

    def header_stride(self, slot_size: int) -> int:
        """Bytes from one slot's header to the next: a multiple of 64, more than 64 for slots above 4 KiB."""
        share = self.head_size // (self.slab_size // slot_size)
        return min(share // HEADER_SIZE * HEADER_SIZE, HEADER_STRIDE_MAX)


def _check_slab_size(slab_size: int) -> None:
    if not SLAB_SIZE_MIN <= slab_size <= SLAB_SIZE_MAX or slab_size & (slab_size - 1):
        raise ValueError(f"slab size {slab_size}: it must be a power of two, {SLAB_SIZE_MIN} to {SLAB_SIZE_MAX}")


def _data_alignment(segment_slabs: int, slab_size: int) -> int:
    """As much as 1/256 of a full segment for padding allows, but no more than a slab: more is of no use."""
    affordable = 1 << (segment_slabs * slab_size // 256).bit_length() - 1 if segment_slabs else PAGE_SIZE
    return max(PAGE_SIZE, min(affordable, slab_size))


def _data_start(slab_count: int, slab_size: int, alignment: int) -> int:
    unaligned = PAGE_SIZE + slab_count * (slab_size // HEAD_RATIO)
    return -(-unaligned // alignment) * alignment


def _slabs_within(size: int, slab_size: int, alignment: int | None = None) -> int:
    """The most slabs a segment file of ``size`` bytes has room for; ``alignment``: where it is not theirs to choose."""
    slab_count = size // (slab_size + slab_size // HEAD_RATIO)
    while slab_count:
        start = _data_start(slab_count, slab_size, alignment or _data_alignment(slab_count, slab_size))
        if start + slab_count * slab_size <= size:
            break
        slab_count -= 1
    return slab_count


# -- superblock --------------------------------------------------------------------------------------

SUPERBLOCK_SIZE = PAGE_SIZE
SUPERBLOCK_MAGIC = b"\x89KVFUSE\n"
NO_SEGMENT = 0xFFFFFFFF
"""The segment number in the volume's own superblock file."""

# Magic, version, flags and the checksum at the end stay where they are in every version to come.
_SUPERBLOCK = struct.Struct("<8s I I 16s Q Q Q I I I I I 16s Q I Q I I")
_CHECKSUM = struct.Struct("<I")
_SUPERBLOCK_PADDING = SUPERBLOCK_SIZE - _SUPERBLOCK.size - _CHECKSUM.size
assert _SUPERBLOCK.size == 120
assert _SUPERBLOCK.size + _SUPERBLOCK_PADDING + _CHECKSUM.size == SUPERBLOCK_SIZE

FEATURE_SEALED_RECORDS = 1
"""Every record ends with a checksum. Volumes that were formatted before there was this have plain records."""
FEATURE_PACKED = 2
"""Chunks may be compressed in their slots: programs of before would take them for the file's bytes."""
FEATURE_LENT = 4
"""Slabs may be lent to the block store: programs of before take the records of these for damaged ones."""
FEATURE_RESIZED = 8
"""The volume has another capacity than it was formatted with: programs of before look for slabs in wrong places."""
FEATURE_MAPPED = 16
"""Its devices have a map of segments, which the superblock names: programs of before look for it in their labels."""
FEATURE_DELEGATED = 32
"""Folders may be delegated to one host: programs of before do not ask it before they say that a name is absent."""
FEATURE_SHRINKS = 64
"""A shared volume gets smaller, or did: programs of before take slabs that are given up, and never give them back."""
FEATURE_COLD = 128
"""Blocks of a shared volume may be in a bucket: programs of before do not remove them there."""
NEW_FEATURES = FEATURE_SEALED_RECORDS | FEATURE_PACKED
"""Of new volumes. They get FEATURE_LENT before the first slab is lent: without blocks, older programs may use them."""
KNOWN_FEATURES = (
    NEW_FEATURES | FEATURE_LENT | FEATURE_RESIZED | FEATURE_MAPPED | FEATURE_DELEGATED | FEATURE_SHRINKS | FEATURE_COLD
)
"""Incompatible features this program knows, one bit each in the superblock's flags."""


class _SuperblockFields(NamedTuple):
    """The fields of ``_SUPERBLOCK``, in their order."""

    magic: bytes
    version: int
    flags: int
    volume_id: bytes
    capacity: int
    slab_count: int
    created_ns: int
    slab_size: int
    segment_slabs: int
    segment: int
    slot_size_min: int
    granule_size: int
    checksum_algorithm: bytes
    first_slab_count: int
    resizes: int
    target: int
    map_number: int
    map_checksum: int


@dataclass(frozen=True)
class Superblock:
    """Identity and geometry of a volume: what its superblock has and, with a number, every segment's header."""

    volume_id: bytes
    """16 random bytes"""
    geometry: Geometry
    created_ns: int
    """nanoseconds since the epoch"""
    segment: int = NO_SEGMENT
    features: int = 0
    """of KNOWN_FEATURES"""
    resizes: int = 0
    """how often the capacity was changed: of two copies the one with more of them is newer"""

    target: int = 0
    """bytes of capacity that the volume is to have, once its last segments are empty; 0: it has what it is to have"""
    segment_map: tuple[int, int] = (0, 0)
    """number and checksum of the map that its devices have of its segments; (0, 0): none was stored, or no devices"""

    @property
    def kept_slab_count(self) -> int | None:
        """Slabs that stay. None: all."""
        return self.geometry.cut(self.target).slab_count if self.target else None

    @property
    def kept_segment_count(self) -> int:
        """Segments that stay."""
        return (self.geometry.cut(self.target) if self.target else self.geometry).segment_count

    def resized(self, capacity: int, room: int | None = None) -> Superblock:
        """Of the same volume, which has ``capacity``, or is to have it; the same, if so it is already. ValueError.

        ``room``: segments that the medium has places for; None: any number.
        """
        if capacity == (self.target or self.geometry.capacity):
            return self
        if capacity <= self.geometry.capacity:
            self.geometry.cut(capacity)
            return self.changed(target=capacity if capacity < self.geometry.capacity else 0)
        if self.target:
            raise ValueError(f"it is about to have {self.target} bytes: have it keep {self.geometry.capacity} before")
        geometry = self.geometry.grown(capacity)
        if room is not None and geometry.segment_count > room:
            raise ValueError(f"its devices have places for {room} segments, and it would have {geometry.segment_count}")
        return self.changed(geometry=geometry)

    def emptied(self) -> Superblock:
        """Nothing is in the last segments any more: the volume has its target, and they are to be removed."""
        return self.changed(geometry=self.geometry.cut(self.target)) if self.target else self

    def settled(self) -> Superblock:
        """They are removed."""
        return self.changed(target=0)

    def mapped(self, segment_map: tuple[int, int]) -> Superblock:
        """The devices have another map, or their first one."""
        return self.changed(segment_map=segment_map, features=self.features | FEATURE_MAPPED)

    def changed(self, **changes: Any) -> Superblock:
        """A newer one, which differs in these fields."""
        features = changes.pop("features", self.features) | FEATURE_RESIZED
        return replace(self, features=features, resizes=self.resizes + 1, **changes)


def pack_superblock(superblock: Superblock) -> bytes:
    """The 4096 bytes of a superblock of this program's format version."""
    geometry = superblock.geometry
    fields = _SuperblockFields(
        magic=SUPERBLOCK_MAGIC,
        version=FORMAT_VERSION,
        flags=superblock.features,
        volume_id=superblock.volume_id,
        capacity=geometry.capacity,
        slab_count=geometry.slab_count,
        created_ns=superblock.created_ns,
        slab_size=geometry.slab_size,
        segment_slabs=geometry.segment_slabs,
        segment=superblock.segment,
        slot_size_min=PAGE_SIZE,
        granule_size=GRANULE_SIZE,
        checksum_algorithm=ALGORITHM.encode(),
        first_slab_count=geometry.first_slab_count if superblock.resizes else 0,
        resizes=superblock.resizes,
        target=superblock.target,
        map_number=superblock.segment_map[0],
        map_checksum=superblock.segment_map[1],
    )
    body = _SUPERBLOCK.pack(*fields)
    body += bytes(_SUPERBLOCK_PADDING)
    return body + _CHECKSUM.pack(crc32c(body))


def parse_superblock(image: Buffer) -> Superblock:
    """The superblock in 4096 bytes. VolumeError, saying which, if it is none, damaged, or of a newer format."""
    if len(image) != SUPERBLOCK_SIZE:
        raise VolumeError(f"the superblock is damaged: {len(image)} bytes instead of {SUPERBLOCK_SIZE}")
    fields = _SuperblockFields._make(_SUPERBLOCK.unpack_from(image))
    if fields.magic != SUPERBLOCK_MAGIC:
        raise VolumeError("this is no kvfuse volume: its superblock does not begin with the magic number")
    (checksum,) = _CHECKSUM.unpack_from(image, SUPERBLOCK_SIZE - _CHECKSUM.size)
    if checksum != crc32c(memoryview(image)[: -_CHECKSUM.size]):
        raise VolumeError("the superblock is damaged: its checksum does not match")
    if fields.version != FORMAT_VERSION or fields.flags & ~KNOWN_FEATURES:
        raise VolumeError(
            f"the volume has format version {fields.version} with features {fields.flags:#x}, but this program"
            f" knows version {FORMAT_VERSION} with features {KNOWN_FEATURES:#x}: use a newer kvfuse"
        )
    algorithm = fields.checksum_algorithm.rstrip(b"\0").decode("ascii", "replace")
    if (fields.slot_size_min, fields.granule_size, algorithm) != (PAGE_SIZE, GRANULE_SIZE, ALGORITHM):
        raise VolumeError(f"the superblock is damaged: slots of {fields.slot_size_min}, {algorithm!r} checksums")
    try:
        shape = fields.capacity, fields.slab_size, fields.segment_slabs, fields.slab_count, fields.first_slab_count
        geometry = Geometry(*shape)
    except ValueError as error:
        raise VolumeError(f"the superblock is damaged: {error}") from error
    named = fields.map_number, fields.map_checksum
    return Superblock(
        fields.volume_id,
        geometry,
        fields.created_ns,
        fields.segment,
        fields.flags,
        fields.resizes,
        fields.target,
        named,
    )


# -- slot headers ------------------------------------------------------------------------------------

HEADER_MAGIC = 0xA5

STATE_FREE = 0
STATE_SEALED = 1
STATE_UNSEALED = 2
STATE_COPY = 3
"""A copy in a disk tier (``volume/disk``); no volume has such slots."""
STATE_PACKED = 4
"""Sealed, and compressed (`volume/store/extents`): length and checksum are of the bytes in the slot."""

DESCRIPTOR_NONE = 0
DESCRIPTOR_BEHIND_HEADER = 1
"""The descriptor stands in the head table, in the room up to the next header."""
DESCRIPTOR_AT_SLOT_END = 2

SLOT_HEADER = np.dtype(
    [
        ("magic", "u1"),
        ("version", "u1"),
        ("state", "u1"),
        ("descriptor_place", "u1"),
        ("length", "<u4"),  # bytes of the extent
        ("generation", "<u8"),
        ("fingerprint", "u1", (16,)),
        ("inode", "<u8"),
        ("chunk", "<u4"),
        ("piece_offset", "<u4"),  # of the extent in its chunk, bytes
        ("checksum", "<u4"),  # CRC32C of the extent's bytes
        ("time", "<u4"),  # seconds since the epoch
        ("descriptor_length", "<u2"),
        ("slot_pages", "<u2"),  # slot size in pages of 4 KiB: a header alone says where its data is
        ("header_checksum", "<u4"),  # CRC32C of the 60 bytes before it
    ]
)
_CHECKED_SIZE = HEADER_SIZE - _CHECKSUM.size
assert SLOT_HEADER.itemsize == HEADER_SIZE
assert SLOT_HEADER.fields is not None
assert SLOT_HEADER.fields["header_checksum"][1] == _CHECKED_SIZE

_HEADER_FIELDS = struct.Struct("<B B B B I Q 16s Q I I I I H H")
assert _HEADER_FIELDS.size == _CHECKED_SIZE


def pack_header(
    *,
    state: int,
    slot_size: int,
    length: int,
    generation: int,
    inode: int,
    chunk: int,
    piece_offset: int,
    checksum: int,
    time: int,
    fingerprint: bytes = bytes(16),
    descriptor_place: int = DESCRIPTOR_NONE,
    descriptor_length: int = 0,
) -> bytes:
    """The 64 bytes of a slot's header: a row of dtype SLOT_HEADER."""
    return pack_header_fields(
        HEADER_MAGIC,
        FORMAT_VERSION,
        state,
        descriptor_place,
        length,
        generation,
        fingerprint,
        inode,
        chunk,
        piece_offset,
        checksum,
        time,
        descriptor_length,
        slot_size // PAGE_SIZE,
    )


def pack_header_fields(*fields: int | bytes) -> bytes:
    """`pack_header` of all fields but the last one of SLOT_HEADER, in its order: for many, by position."""
    packed = _HEADER_FIELDS.pack(*fields)
    return packed + _CHECKSUM.pack(extend(0, packed))


def parse_headers(table: Buffer, stride: int, count: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_]]:
    """(rows, valid) of ``count`` headers, ``stride`` bytes apart: what is no intact header is not valid."""
    spaced = np.ndarray((count,), SLOT_HEADER, buffer=table, strides=(stride,))
    rows = np.ascontiguousarray(spaced)
    valid = (rows["magic"] == HEADER_MAGIC) & (rows["version"] == FORMAT_VERSION)
    candidates = np.flatnonzero(valid)  # most of a young table is zeros: only these are worth a checksum
    valid[candidates] = rows["header_checksum"][candidates] == _header_checksums(rows[candidates])
    return rows, valid


def _header_checksums(rows: npt.NDArray[np.void]) -> list[int]:
    raw = rows.tobytes()
    return [extend(0, raw[start : start + _CHECKED_SIZE]) for start in range(0, len(raw), HEADER_SIZE)]


def find_headers(table: Buffer, geometry: Geometry) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """(rows, offsets of their slots in the slab) of a head table whose slot size is not known.

    A header names its slot size, so it can be only in certain places. A slab that changed its class may
    show headers of both: their data may overlap, and the higher generation is the later.
    """
    rows, valid = parse_headers(table, HEADER_SIZE, geometry.head_size // HEADER_SIZE)
    positions = np.flatnonzero(valid)
    slot_sizes = rows["slot_pages"][positions].astype(np.int64) * PAGE_SIZE
    fits = (slot_sizes > 0) & (slot_sizes <= geometry.slab_size)
    positions, slot_sizes = positions[fits], slot_sizes[fits]
    strides = np.array([geometry.header_stride(size) for size in slot_sizes.tolist()], np.int64)
    indices, rests = np.divmod(positions * HEADER_SIZE, strides)
    placed = (rests == 0) & (indices < geometry.slab_size // slot_sizes)
    rows, offsets = rows[positions[placed]], (indices * slot_sizes)[placed]
    genuine = _outside_descriptors(rows, positions[placed])
    return rows[genuine], offsets[genuine]


def _outside_descriptors(rows: npt.NDArray[np.void], positions: npt.NDArray[np.int64]) -> list[int]:
    """The rows (at ascending ``positions``) that do not stand in another's descriptor.

    A descriptor is a name somebody chose, and may be made to look like a header.
    """
    behind = rows["descriptor_place"] == DESCRIPTOR_BEHIND_HEADER
    starts = positions * HEADER_SIZE
    ends = starts + HEADER_SIZE + np.where(behind, rows["descriptor_length"], 0)
    genuine: list[int] = []
    covered_end = 0
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start >= covered_end:
            genuine.append(index)
            covered_end = end
    return genuine
