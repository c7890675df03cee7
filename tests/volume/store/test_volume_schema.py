"""The records' keys and values, byte for byte: other program versions and other hosts read them."""

from __future__ import annotations

import pytest

from kvfuse.volume.store import schema

INODE = schema.InodeRecord(
    ino=3, mode=0o100644, uid=1, gid=2, nlink=1, size=5, atime=6, mtime=7, ctime=8, chunk_size=4096,
    chunks=((schema.ExtentRecord(4096, 5, 9, b"\1\2\3\4"),),), parent=0, rdev=0, target=b"", flags=0, far_blocks=0,
)  # fmt: skip

KEYS = {
    "m": (schema.member_key(0x0102), "6d 0000000000000102"),
    "l": (schema.holder_key(7), "6c 00000007"),
    "s": (schema.slab_key(7), "73 00000007"),
    "f": (schema.freed_key(7, 0x1000, 9), "66 00000007 0000000000001000 0000000000000009"),
    "h": (schema.open_key(3, 0x0102), "68 0000000000000003 0000000000000102"),
    "q": (schema.files_key(0x0102), "71 0000000000000102"),
    "o": (schema.orphan_key(3), "6f 0000000000000003"),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_has_its_bytes(kind: str) -> None:
    key, image = KEYS[kind]
    assert key == bytes.fromhex(image)
    assert key[:1] == kind.encode()
    assert schema.is_key(key)
    assert not schema.is_key(key[:-1])
    assert not schema.is_key(key + b"\0")


def test_keys_come_apart_again() -> None:
    assert schema.split_freed_key(schema.freed_key(7, 4096, 9)) == schema.FreedSlot(7, 4096, 9)
    assert schema.split_open_key(schema.open_key(3, 1 << 63)) == (3, 1 << 63)
    assert [schema.key_slab(KEYS[kind][0]) for kind in "lsf"] == [7, 7, 7]
    assert [schema.key_client(KEYS[kind][0]) for kind in "mq"] == [0x0102, 0x0102]
    assert schema.key_inode(schema.open_key(3, 4)) == 3
    assert schema.freed_key(7, 4096, 9).startswith(schema.freed_prefix(7))


def test_values_have_their_bytes() -> None:
    assert schema.encode_holder(schema.SlabHolder(0x0102, 3)).hex() == "00000000000001020000000000000003"
    assert schema.decode_holder(bytes(15) + b"\5") == schema.SlabHolder(schema.NOBODY, 5)
    assert schema.encode_counts(-2, 256).hex() == "fffffffffffffffe" + "0000000000000100"
    assert schema.decode_counts(bytes(7) + b"\5" + b"\xff" * 8) == (5, -1)
    assert schema.decode_counts(bytes(7) + b"\5") == (5, None), "of an older program"
    assert schema.Counts(5, None).add(schema.Counts(-1, 100)) == (4, None), "what was never counted stays so"
    for decode in (schema.decode_holder, schema.decode_counts):
        with pytest.raises(schema.Malformed):
            decode(b"\0" * 7)


def test_an_orphan_is_an_inode_that_says_who_removed_it() -> None:
    value = schema.encode_orphan(INODE, 0x0102)
    inode_image = schema.encode_inode(INODE)
    assert value.hex() == "dc0012" + inode_image.hex()[2 * len(b"\xdc\0\x11") :] + "cd0102"
    assert schema.decode_inode(value) == INODE
    assert schema.decode_orphan(value).remover == 0x0102
    assert schema.decode_orphan(b"\xdc\0\x10" + inode_image[3:-1]).remover == 0
    former = b"\xdc\0\x11" + inode_image[3:-1] + b"\xcd\x01\x02"
    assert schema.decode_orphan(former) == schema.decode_orphan(value), "of a program that knew no namespaces"
