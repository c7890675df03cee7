"""Geometry, superblock and slot headers; format version 1 is compared with golden images byte for byte."""

import struct
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from places import GOLDEN

from kvfuse.checksum import crc32c
from kvfuse.errors import VolumeError
from kvfuse.slab import layout
from kvfuse.slab.layout import Geometry, Superblock

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

GEOMETRY = Geometry.choose(64 * MIB)
SUPERBLOCK = Superblock(bytes(range(16)), GEOMETRY, created_ns=1_800_000_000_123_456_789)


def golden_head_table() -> bytes:
    """A 1 MiB slab of 64 KiB slots: two sealed, one unsealed with a descriptor, one freed, the rest untouched."""
    columns: dict[str, list[int]] = {
        "state": [layout.STATE_SEALED, layout.STATE_SEALED, layout.STATE_UNSEALED, layout.STATE_FREE],
        "length": [65536, 60001, 1, 0],
        "generation": [1, 2, (1 << 64) - 1, 4],
        "inode": [1024, 1025, (1 << 63) - 1, 0],
        "chunk": [0, 1, (1 << 32) - 1, 0],
        "piece_offset": [0, 262144, 4096, 0],
        "checksum": [0, 0xDEADBEEF, 0xFFFFFFFF, 1],
        "descriptor_place": [layout.DESCRIPTOR_NONE, layout.DESCRIPTOR_AT_SLOT_END, layout.DESCRIPTOR_BEHIND_HEADER, 0],
        "descriptor_length": [0, 300, 11, 0],
    }
    stride = GEOMETRY.header_stride(64 * KIB)
    table = bytearray(GEOMETRY.head_size)
    for index in range(4):
        table[index * stride : index * stride + layout.HEADER_SIZE] = layout.pack_header(
            slot_size=64 * KIB,
            time=1_800_000_000,
            fingerprint=bytes(range(16 * index, 16 * index + 16)),
            **{name: column[index] for name, column in columns.items()},
        )
    table[2 * stride + 64 : 2 * stride + 75] = b"path/of/key"
    return bytes(table)


# -- format version 1 --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("superblock", layout.pack_superblock(SUPERBLOCK)),
        ("superblock_sealed", layout.pack_superblock(replace(SUPERBLOCK, features=layout.FEATURE_SEALED_RECORDS))),
        ("segment_header", layout.pack_superblock(Superblock(bytes(range(16)), GEOMETRY, SUPERBLOCK.created_ns, 0))),
        ("head_table", golden_head_table()),
    ],
)
def test_format_version_1_is_what_it_was(name: str, image: bytes) -> None:
    assert image == (GOLDEN / f"{name}_v1.bin").read_bytes()


def test_golden_superblock_means_what_it_meant() -> None:
    assert layout.parse_superblock((GOLDEN / "superblock_v1.bin").read_bytes()) == SUPERBLOCK
    assert layout.parse_superblock((GOLDEN / "segment_header_v1.bin").read_bytes()).segment == 0
    assert Geometry(64 * MIB, MIB, 63, 63) == GEOMETRY


def test_golden_head_table_means_what_it_meant() -> None:
    table = (GOLDEN / "head_table_v1.bin").read_bytes()
    rows, valid = layout.parse_headers(table, 1024, 16)
    assert valid.tolist() == [True] * 4 + [False] * 12
    assert rows["length"][:4].tolist() == [65536, 60001, 1, 0]
    assert rows["generation"][:4].tolist() == [1, 2, (1 << 64) - 1, 4]
    assert rows["inode"][2] == (1 << 63) - 1
    assert rows["checksum"][1] == 0xDEADBEEF
    assert rows["fingerprint"][:4].tobytes() == bytes(range(64))
    assert rows["slot_pages"][:4].tolist() == [16] * 4
    assert struct.unpack_from("<I", table, 1024 + 60) == (crc32c(table[1024 : 1024 + 60]),)


# -- superblock --------------------------------------------------------------------------------------


def sealed(image: bytearray) -> bytes:
    """The image with a right checksum, as a program of another version would write it."""
    image[-4:] = struct.pack("<I", crc32c(image[:-4]))
    return bytes(image)


def test_superblock_of_every_segment_comes_back() -> None:
    for segment in (0, 7, layout.NO_SEGMENT):
        superblock = Superblock(b"v" * 16, Geometry.choose(64 * GIB), 1, segment)
        assert layout.parse_superblock(layout.pack_superblock(superblock)) == superblock


@pytest.mark.parametrize("position", [8, 12, 20, 40, 91, 92, 2000, 4091, 4095])
def test_a_flipped_bit_anywhere_is_damage(position: int) -> None:
    image = bytearray(layout.pack_superblock(SUPERBLOCK))
    image[position] ^= 4
    with pytest.raises(VolumeError, match="damaged: its checksum"):
        layout.parse_superblock(image)


def test_what_is_no_superblock_is_refused() -> None:
    with pytest.raises(VolumeError, match="no kvfuse volume"):
        layout.parse_superblock(bytes(4096))
    with pytest.raises(VolumeError, match="100 bytes instead of 4096"):
        layout.parse_superblock(layout.pack_superblock(SUPERBLOCK)[:100])


def test_a_newer_format_is_refused_naming_both_versions() -> None:
    image = bytearray(layout.pack_superblock(SUPERBLOCK))
    image[8:12] = struct.pack("<I", 2)
    with pytest.raises(VolumeError, match=r"format version 2 .* knows version 1"):
        layout.parse_superblock(sealed(image))


def test_an_unknown_incompatible_feature_is_refused() -> None:
    image = bytearray(layout.pack_superblock(SUPERBLOCK))
    image[12:16] = struct.pack("<I", 0x100)
    with pytest.raises(VolumeError, match=r"version 1 with features 0x100, .* knows version 1 with features 0xff"):
        layout.parse_superblock(sealed(image))


@pytest.mark.parametrize(
    ("offset", "value"), [(56, 3 * MIB), (60, 0), (40, 1 << 40), (68, 512), (72, 4096), (76, 0x33323163)]
)
def test_sizes_that_do_not_fit_are_damage(offset: int, value: int) -> None:
    """Slab size, slabs in a segment, slab count, smallest slot, granule, algorithm."""
    image = bytearray(layout.pack_superblock(SUPERBLOCK))
    image[offset : offset + 4] = struct.pack("<I", value & 0xFFFFFFFF)
    if value >> 32:
        image[offset : offset + 8] = struct.pack("<Q", value)
    with pytest.raises(VolumeError, match="damaged"):
        layout.parse_superblock(sealed(image))


# -- slot headers ------------------------------------------------------------------------------------


def test_headers_of_a_batch_come_back_and_damage_is_seen_alone() -> None:
    count = 300
    same = dict.fromkeys(("state", "inode", "chunk", "piece_offset", "checksum", "time"), 7)
    headers = [layout.pack_header(slot_size=4096, length=index, generation=index + 1, **same) for index in range(count)]
    table = bytearray(b"".join(headers))
    rows, _ = layout.parse_headers(bytes(table), 64, count)
    assert rows["length"].tolist() == list(range(count))
    for index in range(0, count, 10):
        table[index * 64 + index % 64] ^= 1
    parsed, valid = layout.parse_headers(table, 64, count)
    assert valid.tolist() == [index % 10 != 0 for index in range(count)]
    assert (parsed[valid] == rows[valid]).all()


def test_headers_are_found_without_knowing_the_slot_size() -> None:
    rows, offsets = layout.find_headers((GOLDEN / "head_table_v1.bin").read_bytes(), GEOMETRY)
    assert offsets.tolist() == [0, 64 * KIB, 128 * KIB, 192 * KIB]
    assert rows["generation"].tolist() == [1, 2, (1 << 64) - 1, 4]


def test_a_header_where_its_slot_size_cannot_be_is_not_found() -> None:
    table = bytearray((GOLDEN / "head_table_v1.bin").read_bytes())
    table[5 * 64 : 6 * 64] = table[:64]
    _, offsets = layout.find_headers(table, GEOMETRY)
    assert len(offsets) == 4


def test_a_descriptor_that_looks_like_a_header_is_not_found() -> None:
    columns = dict.fromkeys(("inode", "chunk", "piece_offset", "checksum", "time"), 1)
    forged = layout.pack_header(state=1, slot_size=4096, length=4096, generation=1 << 60, **columns)
    holder = layout.pack_header(
        state=layout.STATE_SEALED,
        slot_size=64 * KIB,
        length=1,
        generation=1,
        descriptor_place=layout.DESCRIPTOR_BEHIND_HEADER,
        descriptor_length=len(forged),
        **columns,
    )
    table = (holder + forged + forged).ljust(GEOMETRY.head_size, b"\0")
    rows, offsets = layout.find_headers(table, GEOMETRY)
    assert rows["generation"].tolist() == [1, 1 << 60]  # the second copy is outside the descriptor: a slot of its own
    assert offsets.tolist() == [0, 2 * 4096]


# -- geometry ----------------------------------------------------------------------------------------

capacities = st.integers(8 * MIB, 1 << 50) | st.integers(8 * MIB, 4 * GIB)
segment_sizes = st.integers(128 * MIB, 8 * GIB)


@given(capacity=capacities, segment_size=segment_sizes)
@example(capacity=8 * MIB, segment_size=GIB)
@example(capacity=64 * GIB, segment_size=GIB)
def test_capacity_is_a_promise(capacity: int, segment_size: int) -> None:
    geometry = Geometry.choose(capacity, segment_size=segment_size)
    last = geometry.segment_count - 1
    sizes = [geometry.segment_size(segment) for segment in (0, last // 2, last)]
    total = last * sizes[0] + sizes[2]
    assert total == geometry.size <= capacity
    assert max(sizes) <= segment_size
    assert geometry.data_size >= 0.85 * capacity  # the worst: room for 8 slabs and a part, one of them for the heads
    assert last * geometry.segment_slabs + len(geometry.slabs_of(last)) == geometry.slab_count


@given(capacity=capacities, part=st.floats(0, 1, exclude_max=True), slot_pages=st.integers(1, 16384))
def test_every_byte_and_header_has_a_place_of_its_own(capacity: int, part: float, slot_pages: int) -> None:
    geometry = Geometry.choose(capacity)
    slot_size = min(slot_pages * 4096, geometry.slab_size)
    slab = int(part * geometry.slab_count)
    addr = slab * geometry.slab_size + (geometry.slots_per_slab(slot_size) - 1) * slot_size
    segment, offset = geometry.locate(addr)
    assert slab in geometry.slabs_of(segment)
    assert slab == geometry.slab_of(addr)
    assert offset == geometry.data_start(segment) + addr - geometry.slabs_of(segment)[0] * geometry.slab_size
    assert geometry.data_start(segment) <= offset <= geometry.segment_size(segment) - slot_size
    # the last slot's header ends within its slab's head, and the last head within the head tables
    stride = geometry.header_stride(slot_size)
    header_segment, header_offset = geometry.locate_header(addr, slot_size)
    head_segment, head_offset = geometry.locate_head(slab)
    assert header_segment == head_segment == segment
    assert head_offset >= layout.PAGE_SIZE
    assert head_offset <= header_offset <= head_offset + geometry.head_size - stride
    assert head_offset + geometry.head_size <= geometry.data_start(segment)
    assert stride % 64 == 0
    assert 64 <= stride <= 1024


def test_slab_size_follows_the_capacity() -> None:
    sizes = {capacity: Geometry.choose(capacity).slab_size for capacity in (8 * MIB, GIB, 3 * GIB, 64 * GIB, 1 << 50)}
    assert sizes == {8 * MIB: MIB, GIB: MIB, 3 * GIB: 2 * MIB, 64 * GIB: 64 * MIB, 1 << 50: 64 * MIB}


@pytest.mark.parametrize("capacity", [64 * MIB, GIB, 64 * GIB])
def test_heads_and_padding_take_little(capacity: int) -> None:
    geometry = Geometry.choose(capacity)
    assert geometry.data_size >= 0.98 * capacity
    assert geometry.data_start(0) % geometry.data_alignment == 0
    assert geometry.data_alignment >= 128 * KIB


def test_headers_of_4_kib_slots_fill_the_head_exactly() -> None:
    assert GEOMETRY.header_stride(4096) == 64
    assert GEOMETRY.header_stride(8192) == 128
    assert GEOMETRY.header_stride(64 * KIB) == GEOMETRY.header_stride(MIB) == 1024


def test_too_small_a_capacity_names_the_minimum() -> None:
    with pytest.raises(ValueError, match=f"minimum is {8 * MIB} bytes"):
        Geometry.choose(8 * MIB - 1)
    with pytest.raises(ValueError, match=f"minimum is {32 * MIB} bytes"):
        Geometry.choose(31 * MIB, slab_size=4 * MIB)


@pytest.mark.parametrize("slab_size", [0, MIB // 2, 3 * MIB, 128 * MIB])
def test_an_illegal_slab_size_is_refused(slab_size: int) -> None:
    with pytest.raises(ValueError, match="must be a power of two"):
        Geometry.choose(64 * GIB, slab_size=slab_size)


def test_impossible_geometries_are_refused() -> None:
    with pytest.raises(ValueError, match="segment of 1048576 bytes is too small"):
        Geometry.choose(GIB, segment_size=MIB)
    with pytest.raises(ValueError, match="more than the capacity"):
        Geometry(64 * MIB, MIB, 64, 64)
    with pytest.raises(ValueError, match="no segment 1"):
        GEOMETRY.segment_size(1)


# -- growth ------------------------------------------------------------------------------------------


@given(
    capacity=st.integers(8 * MIB, 300 * MIB),
    segment_size=st.integers(2 * MIB, 64 * MIB),
    steps=st.lists(st.integers(1, 200 * MIB), max_size=4),
)
@example(capacity=40 * MIB, segment_size=16 * MIB, steps=[110 * MIB, 50 * MIB])
def test_a_volume_grows_by_whole_segments_and_no_place_changes(
    capacity: int, segment_size: int, steps: list[int]
) -> None:
    first = Geometry.choose(capacity, MIB, segment_size)
    superblock = Superblock(bytes(16), first, 1)
    for step in steps:
        try:
            superblock = superblock.resized(superblock.geometry.capacity + step)
        except ValueError as error:
            assert "no room for another segment" in str(error)
    grown = layout.parse_superblock(layout.pack_superblock(superblock)).geometry
    assert grown == superblock.geometry
    assert grown.size <= grown.capacity
    total = slab = 0
    for segment in range(grown.segment_count):
        for index, number in enumerate(grown.slabs_of(segment)):
            place = segment, grown.data_start(segment) + index * MIB + 5
            # who does not know of the growth finds the same bytes
            assert grown.locate(number * MIB + 5) == first.locate(number * MIB + 5) == place
            head = segment, layout.PAGE_SIZE + index * grown.head_size
            assert grown.locate_head(number) == first.locate_head(number) == head
            assert grown.locate_header(number * MIB, MIB) == head
            assert number == slab
            slab += 1
        total += grown.segment_size(segment)
        if segment < first.segment_count:
            assert grown.segment_size(segment) == first.segment_size(segment)
    assert (total, slab) == (grown.size, grown.slab_count)


def test_a_volume_keeps_its_capacity_where_it_cannot_grow() -> None:
    small = Superblock(bytes(16), Geometry.choose(40 * MIB, MIB, 16 * MIB), 1)
    assert small.resized(40 * MIB) is small
    with pytest.raises(ValueError, match=r"no room for another segment of 15990784 bytes: the minimum is 57\d+ bytes"):
        small.resized(41 * MIB)
    with pytest.raises(ValueError, match="slabs of 1048576 bytes grows to 4398046511104 bytes at most"):
        small.resized(5 << 40)
    with pytest.raises(ValueError, match="places for 3 segments"):
        small.resized(100 * MIB, room=3)
    grown = small.resized(100 * MIB)
    assert (grown.resizes, grown.features) == (1, layout.FEATURE_RESIZED)
    assert small.geometry.become(grown.geometry)
    assert small.geometry == grown.geometry
    assert not small.geometry.become(grown.geometry)


@given(capacity=st.integers(8 * MIB, 300 * MIB), segment_size=st.integers(2 * MIB, 64 * MIB), part=st.floats(0.01, 1))
def test_a_volume_is_cut_by_whole_segments_and_grows_again(capacity: int, segment_size: int, part: float) -> None:
    first = Superblock(bytes(16), Geometry.choose(capacity, MIB, segment_size), 1)
    grown = first.resized(2 * capacity + segment_size) if capacity > segment_size else first
    target = int(grown.geometry.capacity * part)
    try:
        wanted = grown.resized(target)
    except ValueError as error:
        assert "no room for 7 slabs" in str(error)
        return
    kept = wanted.kept_slab_count
    assert wanted.geometry == grown.geometry
    assert wanted.resized(grown.geometry.capacity).target == 0
    if kept is None:
        assert target == grown.geometry.capacity
        return
    small = layout.parse_superblock(layout.pack_superblock(wanted.emptied().settled()))
    assert (small.target, small.geometry.capacity, small.geometry.slab_count) == (0, target, kept)
    assert small.geometry.size <= target
    again = small.resized(target + 100 * MIB).geometry
    for geometry in (small.geometry, again):
        for slab in range(kept):
            assert geometry.locate(slab * MIB) == grown.geometry.locate(slab * MIB)
    assert again.slabs_of(small.geometry.segment_count).start == kept
    assert again.size <= again.capacity
