"""Kinds of damage to a volume's records. Each works on all records, and may lose the files whose names it returns."""

from __future__ import annotations

import msgspec
from fsck_tree import Records
from volume_lab import MIB

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.store import schema

# -- finding things in records ------------------------------------------------------------------------


def entry_of(records: Records, name: bytes) -> bytes:
    """The key of the entry called ``name``."""
    (key,) = [key for key in records if key[:1] == b"d" and schema.split_entry_key(key)[2] == name]
    return key


def inline(records: Records, name: bytes) -> schema.InodeRecord:
    entry = schema.decode_entry(records[entry_of(records, name)])
    assert isinstance(entry, schema.InodeRecord)
    return entry


def directory(records: Records, name: bytes) -> int:
    entry = schema.decode_entry(records[entry_of(records, name)])
    assert isinstance(entry, int)
    return entry


def replace_inline(records: Records, name: bytes, **changes: object) -> None:
    record = msgspec.structs.replace(inline(records, name), **changes)
    records[entry_of(records, name)] = schema.encode_entry_inline(record)


# -- the damage ---------------------------------------------------------------------------------------


def missing_inode(records: Records) -> set[bytes]:
    """A directory's own record: what was in it goes to the root, under new names."""
    del records[schema.inode_key(directory(records, b"c"))]
    return {b"a/b/c/far"}


def dangling_entry(records: Records) -> set[bytes]:
    records[schema.entry_key(ROOT_INODE, b"dangling")] = schema.encode_entry_reference(999_999)
    return set()


def wrong_file_links(records: Records) -> set[bytes]:
    replace_inline(records, b"small", nlink=3)
    return set()


def wrong_directory_links(records: Records) -> set[bytes]:
    key = schema.inode_key(directory(records, b"a"))
    records[key] = schema.encode_inode(msgspec.structs.replace(schema.decode_inode(records[key]), nlink=9))
    return set()


def wrong_parent(records: Records) -> set[bytes]:
    key = schema.inode_key(directory(records, b"b"))
    records[key] = schema.encode_inode(msgspec.structs.replace(schema.decode_inode(records[key]), parent=77))
    return set()


def leaked_slot(records: Records) -> set[bytes]:
    key = next(key for key in records if key[:1] == b"s")
    slot_size, bitmap = schema.decode_slab(records[key])
    bitmap = bytes(byte | (1 if not byte & 1 else 2 if not byte & 2 else 4) for byte in bitmap[:1]) + bitmap[1:]
    records[key] = schema.encode_slab(slot_size, bitmap)
    return set()


def lost_slot(records: Records) -> set[bytes]:
    """A slab's allocation is gone: its files cannot be trusted."""
    slab_size = MIB
    slab = inline(records, b"granules").chunks[0][0].addr // slab_size
    del records[schema.slab_key(slab)]
    return files_in(records, slab * slab_size, slab_size)


def files_in(records: Records, start: int, length: int) -> set[bytes]:
    """Names of files with bytes there, by their last component."""
    found = set()
    for key, value in records.items():
        if key[:1] == b"d" and isinstance(entry := schema.decode_entry(value), schema.InodeRecord):
            extents = [extent for chunk in entry.chunks for extent in chunk]
            for other, row in records.items():
                if other[:1] == b"c" and schema.key_inode(other) == entry.ino:
                    extents += schema.decode_chunk(row)
            if any(start <= extent.addr < start + length for extent in extents):
                found.add(schema.split_entry_key(key)[2])
    return found


def doubly_owned_slot(records: Records) -> set[bytes]:
    """Whose bytes they are only one record can be right about; the other file goes."""
    replace_inline(records, b"small", chunks=inline(records, b"page").chunks)
    return {b"small"}


def no_times(records: Records) -> set[bytes]:
    del records[schema.times_key(directory(records, b"a"))]
    return set()


def bad_times(records: Records) -> set[bytes]:
    records[schema.times_key(directory(records, b"a"))] = b"short"
    return set()


def stray_chunk(records: Records) -> set[bytes]:
    records[schema.chunk_key(555_555, 9)] = schema.encode_chunk(())
    return set()


def stray_attribute(records: Records) -> set[bytes]:
    records[schema.xattr_key(555_555, b"user.x")] = b"1"
    return set()


def hidden_attributes(records: Records) -> set[bytes]:
    for key, ino in ((b"small", inline(records, b"small").ino), (b"a", directory(records, b"a"))):
        records[schema.xattr_key(ino, b"user.hidden")] = key
    flags = inline(records, b"small").flags & ~schema.FLAG_XATTRS
    replace_inline(records, b"small", flags=flags)
    return set()


def stray_times(records: Records) -> set[bytes]:
    records[schema.times_key(555_555)] = schema.encode_times(1, 2, 3)
    return set()


def old_counters(records: Records) -> set[bytes]:
    records[schema.COUNTER_INODE] = schema.encode_u64(2)
    records[schema.COUNTER_GENERATION] = schema.encode_u64(1)
    return set()


def no_counters(records: Records) -> set[bytes]:
    for key in (schema.COUNTER_INODE, schema.COUNTER_GENERATION, schema.COUNTER_FILES):
        del records[key]
    return set()


def bad_counter(records: Records) -> set[bytes]:
    records[schema.COUNTER_INODE] = b"\1"
    return set()


def wrong_place(records: Records) -> set[bytes]:
    key = entry_of(records, b"small")
    records[key[:9] + bytes(8) + key[17:]] = records.pop(key)
    return {b"small"}


def garbage_values(records: Records) -> set[bytes]:
    records[entry_of(records, b"small")] = b"garbage"
    records[schema.inode_key(123_456)] = b"\xc1\xc1"
    return {b"small"}


def short_reference(records: Records) -> set[bytes]:
    records[entry_of(records, b"small")] = b"R\0"
    return {b"small"}


def bad_slab(records: Records) -> set[bytes]:
    records[schema.slab_key(60)] = b"\0"
    records[schema.slab_key(7_000_000)] = schema.encode_slab(4096, b"\1" * 32)
    return set()


def odd_keys(records: Records) -> set[bytes]:
    for key in (b"d", b"d\0\0", b"i1", b"t", b"c123", b"x", b"s", b"s12345", b"o1", b"n"):
        records[key] = b"?"
    return set()


def impossible_extent(records: Records) -> set[bytes]:
    (extent,) = inline(records, b"page").chunks[0]
    replace_inline(records, b"page", chunks=((msgspec.structs.replace(extent, length=1 << 30),),))
    return {b"page"}


def extent_out_of_the_volume(records: Records) -> set[bytes]:
    (extent,) = inline(records, b"page").chunks[0]
    replace_inline(records, b"page", chunks=((msgspec.structs.replace(extent, addr=1 << 50),),))
    return {b"page"}


def loop_of_directories(records: Records) -> set[bytes]:
    """b, which is in a, is moved into its own child c: nobody can reach them."""
    child = directory(records, b"c")
    key = entry_of(records, b"b")
    value = records.pop(key)
    records[schema.entry_key(child, b"b")] = value
    key = schema.inode_key(directory(records, b"b"))
    records[key] = schema.encode_inode(msgspec.structs.replace(schema.decode_inode(records[key]), parent=child))
    return {b"granules", b"chunks", b"far", b"new"}


DAMAGE = [
    missing_inode,
    dangling_entry,
    wrong_file_links,
    wrong_directory_links,
    wrong_parent,
    leaked_slot,
    lost_slot,
    doubly_owned_slot,
    no_times,
    bad_times,
    stray_chunk,
    stray_attribute,
    hidden_attributes,
    stray_times,
    old_counters,
    no_counters,
    bad_counter,
    wrong_place,
    garbage_values,
    short_reference,
    bad_slab,
    odd_keys,
    impossible_extent,
    extent_out_of_the_volume,
    loop_of_directories,
]
