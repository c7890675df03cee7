"""fsck and the records of shared volumes: what a client that is gone leaves is no error, what would do harm is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fsck_damage import inline
from fsck_tree import Records, Tree, can_be_used

from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import MemberRecord, SlabHolder

CLIENT = 0x1234


def slab_of(records: Records, addr: int) -> int:
    """The one in which a file's slot lies: its record is there."""
    slabs = sorted(schema.key_slab(key) for key in records if key[:1] == b"s")
    return max(slab for slab in slabs if slab <= addr >> 20)


def freed_key(records: Records, addr: int, generation: int = 7) -> bytes:
    return schema.freed_key(slab_of(records, addr), addr, generation)


def forget_file(records: Records, name: bytes) -> schema.ExtentRecord:
    """A removed file whose slot is still durable: as whoever does not hold its slab leaves it."""
    (extent,) = inline(records, name).chunks[0]
    for key in [key for key in records if key[:1] == b"d" and schema.split_entry_key(key)[2] == name]:
        del records[key]
    counts = schema.decode_counts(records[schema.COUNTER_FILES])
    records[schema.COUNTER_FILES] = schema.encode_counts(counts.inodes - 1, counts.size)
    return extent


def slot_of_a_file(records: Records) -> None:
    (extent,) = inline(records, b"page").chunks[0]
    records[freed_key(records, extent.addr, extent.generation)] = b""


def free_slot(records: Records) -> None:
    for key in sorted(key for key in records if key[:1] == b"s"):
        slot_size, bitmap = schema.decode_slab(records[key])
        slot_count = (1 << 20) // slot_size
        for index in range(slot_count):
            if not bitmap[index >> 3] >> (index & 7) & 1:
                slab = schema.key_slab(key)
                records[schema.freed_key(slab, (slab << 20) + index * slot_size, 7)] = b""
                return
    raise AssertionError("no slot is free")


def slot_of_another_slab(records: Records) -> None:
    extent = forget_file(records, b"page")
    records[schema.freed_key(slab_of(records, extent.addr) + 1, extent.addr, extent.generation)] = b""


def slot_out_of_the_volume(records: Records) -> None:
    records[schema.freed_key(1 << 20, 1 << 50, 1)] = b""


def slot_freed_twice(records: Records) -> None:
    extent = forget_file(records, b"page")
    records[freed_key(records, extent.addr, extent.generation)] = b""
    records[freed_key(records, extent.addr, extent.generation + 1)] = b""


def slab_out_of_the_volume(records: Records) -> None:
    records[schema.holder_key(1 << 30)] = schema.encode_holder(SlabHolder(CLIENT, 1))


def garbage(records: Records) -> None:
    for key in (schema.holder_key(0), schema.member_key(CLIENT), schema.files_key(CLIENT)):
        records[key] = b"garbage"


def odd_keys(records: Records) -> None:
    for kind in b"mlfhq":
        records[bytes([kind]) + b"odd"] = b""


def open_by_nobody(records: Records) -> None:
    records[schema.open_key(3, CLIENT)] = b""


DAMAGE = [
    slot_of_a_file,
    free_slot,
    slot_of_another_slab,
    slot_out_of_the_volume,
    slot_freed_twice,
    slab_out_of_the_volume,
    garbage,
    odd_keys,
    open_by_nobody,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
async def test_damaged_records(tree: Tree, damage: Callable[[Records], None]) -> None:
    """Found and mended; no file is lost by it that was not removed."""
    await tree.change(damage)
    assert (await tree.check()).problems, "not found"
    report = await tree.check(repair=True)
    assert report.clean, [problem.text for problem in report.problems]
    assert report.repaired
    found = await tree.read()
    assert {**tree.files, **found} == tree.files
    assert set(tree.files) - set(found) <= {b"page"}
    await can_be_used(tree)


async def test_what_clients_that_are_gone_leave_is_no_error(tree: Tree) -> None:
    there = await tree.check()

    def leave(records: Records) -> None:
        records[schema.holder_key(0)] = schema.encode_holder(SlabHolder(CLIENT, 3))
        records[schema.holder_key(1)] = schema.encode_holder(SlabHolder(schema.NOBODY, 9))
        extent = forget_file(records, b"page")
        records[freed_key(records, extent.addr, extent.generation)] = b""
        records[schema.orphan_key(1 << 40)] = schema.encode_orphan(
            schema.InodeRecord(1 << 40, 0o100644, 0, 0, 0, 0, 0, 0, 0, 1 << 20, (), 0, 0, b"", 0, 0), CLIENT
        )
        records[schema.COUNTER_INODE] = schema.encode_u64(1 << 41)
        count = there.files + there.directories - 1  # without the file that was forgotten
        records[schema.COUNTER_FILES] = schema.encode_counts(count + 2, None)
        records[schema.files_key(CLIENT)] = schema.encode_counts(-3, -300)
        records[schema.files_key(CLIENT + 1)] = schema.encode_counts(1, None)

    await tree.change(leave)
    report = await tree.check()
    assert report.clean, [problem.text for problem in report.problems]
    assert len([note for note in report.notes if "heads" not in note]) == 2, report.notes
    assert "1 slots are free when somebody takes their slabs" in report.notes


async def test_a_file_open_by_a_client_that_is_there_is_no_error(tree: Tree) -> None:
    def join(records: Records) -> None:
        records[schema.member_key(CLIENT)] = schema.encode_member(MemberRecord("host", 1, "/mnt"))
        records[schema.open_key(3, CLIENT)] = b""

    await tree.change(join)
    assert (await tree.check()).clean


async def test_counts_of_clients_are_mended_with_the_common_one(tree: Tree) -> None:
    def miscount(records: Records) -> None:
        records[schema.files_key(CLIENT)] = schema.encode_counts(5, 5)

    await tree.change(miscount)
    report = await tree.check(repair=True)
    assert report.clean
    report = await tree.check()
    assert not report.notes
    async with tree.records() as records:
        (row,) = await records.get([schema.files_key(CLIENT)])
    assert row is not None
    assert schema.decode_counts(row.value) == (0, 0)
