"""What a client knows of slabs and other clients: from scans and watches that overlap, and lag behind."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from volume_lab import MIB, Chaos, Disk, MemoryRecords, lab_options

from kvfuse.remote.records.api import Change
from kvfuse.slab.image import LENT, TOKEN_SIZE
from kvfuse.volume.hosts.slab_view import SlabView
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import NOBODY, SlabHolder


@pytest.fixture
def disk() -> Disk:
    return Disk.format(lab_options(capacity=20 * MIB), shared=True)


@pytest.fixture
def view(disk: Disk) -> SlabView:
    return SlabView(MemoryRecords(disk, Chaos(random.Random(0))), disk.superblock.geometry)


def held(slab: int, client: int, version: int) -> Change:
    return Change(schema.holder_key(slab), schema.encode_holder(SlabHolder(client, version)), version)


def test_what_comes_late_does_not_replace_what_is_newer(view: SlabView) -> None:
    view.apply(held(3, 7, 20))
    view.apply(held(3, 6, 10))
    view.apply(Change(schema.holder_key(3), None, 15))
    assert view.seen(3).holder == SlabHolder(7, 20)
    assert view.held_counts == {7: 1}
    view.apply(Change(schema.holder_key(3), None, 21))
    assert view.seen(3).holder.client == NOBODY
    assert not view.held_counts


def test_slabs_of_nobody_are_found_from_the_lowest_on(view: SlabView) -> None:
    count = view.geometry.slab_count
    for slab in range(count):
        view.apply(held(slab, 7, 1))
    assert (list(view.unheld()), view.unheld_count) == ([], 0)
    for slab in (9, 2):
        view.apply(held(slab, NOBODY, 2))
    assert (list(view.unheld()), view.unheld_count) == ([2, 9], 2)
    assert view.held_by(7) == [slab for slab in range(count) if slab not in (2, 9)]
    assert view.gone() == [7]
    view.apply(Change(schema.member_key(7), b"", 1))
    assert view.gone() == []


def test_space_is_counted_by_images(view: SlabView) -> None:
    key = schema.slab_key(4)
    view.apply(Change(key, schema.encode_slab(256 << 10, b"\7"), 1))
    assert (view.used_bytes, view.slots_free(4)) == (768 << 10, 1)
    freed = schema.freed_key(4, 4 * MIB, 1)
    view.apply(Change(freed, b"", 2))
    assert view.slots_free(4) == 2
    view.apply(Change(freed, None, 3))
    view.apply(Change(freed, None, 3))
    assert view.slots_free(4) == 1, "no more than there are, however often one hears of it"
    view.apply(Change(key, None, 4))
    assert (view.used_bytes, view.slots_free(4)) == (0, 0)


def test_damaged_and_strange_records_are_left_out(view: SlabView, caplog: pytest.LogCaptureFixture) -> None:
    view.apply(held(3, 7, 1))
    view.apply(Change(schema.holder_key(3), b"garbage", 2))
    view.apply(Change(schema.slab_key(3), b"\1\2\3\4garbage", 2))
    view.apply(Change(schema.files_key(3), b"garbage", 2))
    view.apply(held(1 << 20, 7, 2))
    view.apply(Change(b"lodd", b"", 2))
    assert view.held_by(7) == [3]
    assert caplog.text.count("is damaged") == 3


async def test_it_follows_and_makes_up_for_a_broken_watch(
    disk: Disk, view: SlabView, autojump_clock: trio.testing.MockClock
) -> None:
    disk.apply({schema.member_key(7): b"", schema.files_key(7): schema.encode_counts(5, 700)}, ())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(view.run)
        await view.ready.wait()
        root = view.counted.size or 0
        assert (view.members, view.counts, view.counted.inodes) == ({7}, {7: (5, 700)}, 1)
        assert [view.counts_beside(client) for client in (7, 8)] == [(1, root), (6, root + 700)]
        disk.apply({schema.member_key(8): b""}, [schema.files_key(7)])
        await trio.sleep(0.1)
        assert (view.members, view.counts, view.counts_beside(8)) == ({7, 8}, {}, (1, root))
        for watch in list(disk.watches):
            watch.break_off()
        await trio.sleep(0.1)
        disk.apply({schema.member_key(9): b""}, [schema.member_key(8)])
        await trio.sleep(1)
        assert view.members == {7, 9}
        disk.apply({}, [schema.member_key(7)])
        await trio.sleep(0.1)
        assert view.members == {9}
        nursery.cancel_scope.cancel()


def test_sums_are_kept_as_records_come_and_go(view: SlabView, rng: random.Random) -> None:
    """What is asked for each second is not computed anew from all hosts: so it has to be the same as if it were."""
    clients, slabs = range(1, 6), range(8)
    for version in range(1, 2000):
        client, slab = rng.choice(clients), rng.choice(slabs)
        lent = schema.encode_slab(LENT, bytes(TOKEN_SIZE))
        view.apply(
            rng.choice(
                [
                    held(slab, rng.choice([NOBODY, client]), version),
                    Change(schema.holder_key(slab), None, version),
                    Change(schema.slab_key(slab), rng.choice([lent, None]), version),
                    Change(schema.member_key(client), rng.choice([b"", None]), version),
                    Change(schema.files_key(client), rng.choice([schema.encode_counts(version, slab), None]), version),
                    Change(schema.COUNTER_FILES, rng.choice([schema.encode_counts(client, version), None]), version),
                ]
            )
        )
        assert view.gone() == sorted({*view.held_counts, *view.counts} - view.members)
        assert view.heir(slab, 9) == (sorted(view.members) or [9])[slab % max(len(view.members), 1)]
        beside = view.counted
        for other, counts in view.counts.items():
            beside = beside if other == client else beside.add(counts)
        assert view.counts_beside(client) == beside
        assert view.abandoned == {slab for slab in view.lent if view.seen(slab).holder.client == NOBODY}
