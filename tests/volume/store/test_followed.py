"""What is read of names and inodes is followed from before the question: no change after the answer is missed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
import trio.testing
from cluster_lab import etcd_place
from volume_lab import Chaos, Delay, Disk, MemoryRecords, lab_options

from kvfuse.remote.records.api import Change, RecordStore
from kvfuse.remote.records.etcd.store import EtcdRecords
from kvfuse.volume.store import schema
from kvfuse.volume.store.joined_reads import SharedRecords
from kvfuse_cluster.etcd import EtcdServers

FOLDER, OTHER = 5, 6
NAME = schema.entry_key(FOLDER, b"name")


def make() -> tuple[SharedRecords, Chaos, Disk]:
    disk, chaos = Disk.format(lab_options(), shared=True), Chaos(random.Random(0))
    return SharedRecords(MemoryRecords(disk, chaos)), chaos, disk


async def heard(records: SharedRecords, until: bytes) -> list[Change]:
    """Changes up to that of a key."""
    changes = records.followed.following
    assert changes is not None
    found = []
    with trio.fail_after(60):
        while not found or found[-1].key != until:
            found.append(await anext(changes))
    return found


async def test_what_changes_while_the_answer_is_on_its_way(autojump_clock: trio.testing.MockClock) -> None:
    records, chaos, disk = make()
    late = chaos.late = Delay(NAME)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(records.get, [NAME])
        await late.given.wait()
        disk.apply({NAME: b"after", schema.entry_key(OTHER, b"name"): b"unheard"}, ())
        late.arrives.set()
    assert [change.key for change in await heard(records, NAME)] == [NAME]


async def test_an_inode_that_was_not_known_to_have_a_record_is_asked_for_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its record may have changed before it was followed."""
    records, _, disk = make()
    key = schema.inode_key(77)
    assert await records.get([key]) == [None]
    assert key not in records.followed.topics
    disk.apply({key: b"one"}, ())
    before = records.counters.gets
    (row,) = await records.get([key])
    assert row is not None
    assert records.counters.gets == before + 2
    await records.get([key])
    assert records.counters.gets == before + 3
    disk.apply({schema.times_key(77): b"", key: b"two"}, ())
    assert {change.key for change in await heard(records, key)} == {schema.times_key(77), key}


async def test_an_inode_that_was_announced_is_asked_for_once(autojump_clock: trio.testing.MockClock) -> None:
    records, _, disk = make()
    disk.apply({schema.inode_key(77): b"one"}, ())
    records.followed.follow_inode(77)
    await records.get([schema.inode_key(77)])
    assert records.counters.gets == 1


async def test_reads_hold_their_topics(autojump_clock: trio.testing.MockClock) -> None:
    records, chaos, _ = make()
    prefix = schema.entry_prefix(FOLDER)
    chaos.stalled = trio.Event()
    for read in (lambda: records.get([NAME, NAME]), lambda: records.scan(prefix)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert records.followed.topics[prefix].pins
            nursery.cancel_scope.cancel()
        assert not records.followed.topics[prefix].pins
    chaos.stalled.set()
    for prefix_of_many in (b"d", b"i", b""):
        await records.scan(prefix_of_many)
    assert set(records.followed.topics) == {prefix}, "who reads all names keeps none"


async def test_another_following_has_all_topics_that_are_left(autojump_clock: trio.testing.MockClock) -> None:
    records, _, disk = make()
    records.followed.always([b"p"])
    records.followed.begin()
    await records.get([NAME, schema.entry_key(OTHER, b"name")])
    records.followed.leave(schema.entry_prefix(OTHER))
    records.followed.begin()
    disk.apply({schema.entry_key(OTHER, b"name"): b"unheard", NAME: b"", schema.namespace_key(9): b""}, ())
    changes = await heard(records, schema.namespace_key(9))
    assert [change.key for change in changes] == [NAME, schema.namespace_key(9)]


@pytest.mark.ring(2)
async def test_etcd_tells_a_host_nothing_of_folders_that_it_does_not_use(
    etcd_alone: EtcdServers, tmp_path: Path
) -> None:
    place = etcd_place(etcd_alone, str(tmp_path))
    writer: RecordStore = await EtcdRecords.open(place)
    store = await EtcdRecords.open(place)
    records = SharedRecords(store)
    try:
        await records.get([NAME])
        records.followed.begin()
        for number in range(100):
            await writer.commit({schema.entry_key(OTHER, b"%d-%d" % (number, file)): b"" for file in range(10)})
        await writer.commit({NAME: b"after"})
        assert [change.key for change in await heard(records, NAME)] == [NAME]
    finally:
        await writer.aclose()
        await store.aclose()
