"""A client of a shared volume and its lease: who holds the volume, when it is over, and what is refused then."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest
import trio
import trio.testing
from cluster_lab import etcd_cluster, etcd_place
from volume_lab import Chaos, Disk, MemoryRecords, MemorySegments, lab_options

from kvfuse.errors import EngineError, EngineTimeout, VolumeBusy
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.records.etcd.store import EtcdRecords
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.slab.layout import KNOWN_FEATURES
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import FencedRecords, FencedSegments, Member, membership, memberships
from kvfuse.volume.store.schema import MemberRecord
from kvfuse_cluster.etcd import EtcdServers

LEASE = 2.0
DEAD_PID = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
"""no process has it"""


@asynccontextmanager
async def opened(etcd: EtcdServers, part: str, deadline: float = 1.0) -> AsyncIterator[RecordStore]:
    records = await EtcdRecords.open(etcd_place(etcd, part, deadline=deadline))
    try:
        yield records
    finally:
        await records.aclose()


@pytest.fixture
async def records(etcd: EtcdServers, request: pytest.FixtureRequest) -> AsyncIterator[RecordStore]:
    async with opened(etcd, request.node.name) as records:
        yield records


async def until(condition: Callable[[], bool]) -> None:
    """Poll: what is waited for is the clock's doing, or another process's."""
    with trio.fail_after(30):
        while True:
            if condition():
                return
            await trio.sleep(0.02)


async def test_who_is_in_is_told_to_the_next(records: RecordStore) -> None:
    async with membership(records, LEASE, "kv", "/") as member:  # something is always mounted there
        (found,) = await records.get([schema.member_key(member.client)])
        assert found is not None
        assert schema.decode_member(found.value) == MemberRecord(socket.gethostname(), os.getpid(), "/", KNOWN_FEATURES)
        assert member.fence == {schema.member_key(member.client): found.version}
        with pytest.raises(
            VolumeBusy, match=rf"^the volume kv is in use by process {os.getpid()} on \S+, mounted on /$"
        ):
            await Member.join(records, LEASE, "", "kv")
    assert await records.get([schema.member_key(member.client), schema.MOUNTED]) == [None, None]
    async with membership(records, LEASE, "kv"):
        pass


async def test_a_lease_is_kept_for_longer_than_it_lasts(records: RecordStore) -> None:
    async with membership(records, LEASE, "kv") as member:
        await trio.sleep(2 * LEASE)
        assert member.alive
        member.check()
        assert await records.commit({b"dx": b"1"}, expect=member.fence)


async def test_a_cancelled_body_keeps_the_lease_until_it_is_through(records: RecordStore) -> None:
    with trio.CancelScope() as scope:
        async with membership(records, LEASE, "kv") as member:
            scope.cancel()
            with trio.CancelScope(shield=True):  # what a volume that is closed does
                await trio.sleep(2 * LEASE)
                assert member.alive
                assert await records.commit({b"dx": b"1"}, expect=member.fence)
    assert (await records.get([schema.MOUNTED])) == [None]


async def test_who_becomes_another_client_is_the_former_one_no_more(records: RecordStore) -> None:
    """Also where the former one's lease lasts: it could not begin its work, and nobody would do it instead."""
    with trio.fail_after(30):
        async with memberships(records, LEASE, "kv", alone=False) as join:
            former, member = await join(), await join()
            keys = [schema.member_key(client) for client in (former.client, member.client)]
            (gone, found) = await records.get(keys)
            assert gone is None
            assert found is not None
            with pytest.raises(EngineError, match="lost"):
                former.check()
            member.check()
    assert await records.get(keys) == [None, None]


async def test_errors_of_the_body_come_out_as_they_are(records: RecordStore) -> None:
    with pytest.raises(VolumeBusy, match="mine"):
        async with membership(records, LEASE, "kv"):
            raise VolumeBusy("mine")


async def test_a_process_that_died_is_waited_for(records: RecordStore) -> None:
    """Its record goes with its lease, a little later."""
    said = MemberRecord(socket.gethostname(), DEAD_PID, "/mnt/kv")
    lease = await records.lease(LEASE)
    assert await records.commit({schema.MOUNTED: schema.encode_member(said)}, lease=lease)
    with trio.fail_after(30):
        async with membership(records, LEASE, "kv") as member:
            assert member.alive


async def test_another_host_is_not_waited_for(records: RecordStore) -> None:
    said = MemberRecord("elsewhere", 1, "/mnt/kv")
    lease = await records.lease(60)
    assert await records.commit({schema.MOUNTED: schema.encode_member(said)}, lease=lease)
    with pytest.raises(VolumeBusy, match="in use by process 1 on elsewhere, mounted on /mnt/kv"):
        await Member.join(records, LEASE, "", "kv")
    await lease.revoke()


async def test_a_lost_lease_ends_everything(records: RecordStore, tmp_path: Path) -> None:
    segments = FileSegments.open(tmp_path)
    await segments.create(0, 1 << 20)
    async with membership(records, LEASE, "kv") as member:
        fenced_records, fenced_segments = FencedRecords(records, member), FencedSegments(segments, member)
        assert await fenced_records.commit({b"dx": b"1"})
        assert not await fenced_records.commit({b"dx": b"2"}, expect={b"dx": 1}), "a conflict is no lost lease"
        await fenced_segments.write([Transfer(0, 0, b"before")])

        await member.lease.revoke()
        with pytest.raises(EngineError, match="is lost: nothing is written any more"):
            await fenced_records.commit({b"dx": b"3"})
        assert member.lost.is_set()
        assert not member.alive
        with pytest.raises(EngineError, match="is lost"):
            await fenced_segments.write([Transfer(0, 0, b"after!")])
        found = bytearray(6)
        await fenced_segments.read([Transfer(0, 0, found)])
        assert found == b"before", "reading goes on"
    (row,) = await records.get([b"dx"])
    assert row is not None
    assert row.value == b"1"
    await segments.aclose()


async def test_a_write_begins_only_if_it_is_over_before_the_lease(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    disk = Disk.format(lab_options(), shared=True)
    chaos = Chaos(random.Random(0))
    inner = MemorySegments(disk, chaos)
    inner.limits = dataclasses.replace(inner.limits, deadline=0.75 * LEASE)
    await inner.create(0, 1 << 20)
    lease = await MemoryRecords(disk, chaos).lease(LEASE)
    member = Member(1, lease, 1, trio.current_time())
    segments = FencedSegments(inner, member)
    await segments.write([Transfer(0, 0, b"first")])
    chaos.cut = trio.Event()
    chaos.deadline = 2 * LEASE
    with pytest.raises(EngineTimeout, match="ended during a write"):
        await segments.write([Transfer(0, 0, b"cut off")])
    assert trio.current_time() == pytest.approx(member._alive_until)
    member._renewed(trio.current_time() - LEASE / 2)
    chaos.cut.set()
    with pytest.raises(EngineError, match="nothing is written now"):
        await segments.write([Transfer(0, 0, b"too late")])
    assert bytes(disk.segments[0][:5]) != b"too l"


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_write_waits_for_a_renewal_that_is_late(
    autojump_clock: trio.testing.MockClock, tmp_path: Path, is_lost: bool
) -> None:
    """A moment's silence of the record store is no error for those who write meanwhile."""
    disk = Disk.format(lab_options(), shared=True)
    chaos = Chaos(random.Random(0))
    inner = MemorySegments(disk, chaos)
    inner.limits = dataclasses.replace(inner.limits, deadline=0.75 * LEASE)
    await inner.create(0, 1 << 20)
    member = Member(1, await MemoryRecords(disk, chaos).lease(LEASE), 1, trio.current_time())
    segments = FencedSegments(inner, member)
    await trio.sleep(LEASE / 2)
    with trio.testing.assert_checkpoints(), pytest.raises(EngineError, match="not be renewed in time"):
        await segments.write([Transfer(0, 0, b"waits in vain")])
    assert trio.current_time() == pytest.approx(member._alive_until), "as long as the lease holds for sure"
    member._renewed(trio.current_time() - LEASE / 2)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def write() -> None:
            expected = pytest.raises(EngineError, match="is lost") if is_lost else nullcontext()
            with expected:
                await segments.write([Transfer(0, 0, b"late")])

        await trio.sleep(LEASE / 4)
        assert not disk.segments[0][0]
        if is_lost:
            member.lose()
        else:
            member._renewed(trio.current_time() - 0.1)
        await trio.testing.wait_all_tasks_blocked()
    assert bytes(disk.segments[0][:4]) == (bytes(4) if is_lost else b"late")


async def test_the_next_renewal_finds_out(records: RecordStore) -> None:
    async with membership(records, LEASE, "kv") as member:
        await member.lease.revoke()
        with trio.fail_after(30):
            await member.lost.wait()
        assert not member.alive


@pytest.fixture
def one_member() -> Iterator[EtcdServers]:
    with etcd_cluster(1) as servers:
        yield servers


async def test_whoever_cannot_renew_stops_before_others_may_begin(one_member: EtcdServers) -> None:
    """The store is stopped for longer than the lease; then it counts the time anew, and the client goes on."""
    async with opened(one_member, "stalled") as records, membership(records, LEASE, "kv") as member:
        one_member.kill(0, signal.SIGSTOP)
        stopped = trio.current_time()
        try:
            await until(lambda: not member.alive)
            assert trio.current_time() - stopped <= LEASE + 0.2, "counted from before the last renewal"
            assert not member.lost.is_set(), "that is for the store to say"
            with pytest.raises(EngineError, match="could not be renewed in time"):
                member.check()
        finally:
            one_member.kill(0, signal.SIGCONT)
        await until(lambda: member.alive or member.lost.is_set())
        assert bool(await records.commit({b"dx": b"1"}, expect=member.fence)) == member.alive
