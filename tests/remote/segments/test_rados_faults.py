"""OSDs are killed and stopped under the rados engine: who is served, and how long that takes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from cluster_lab import ceph_cluster, rados_place
from rados_lab import KIB, MIB, OBJECT_SIZE, PATIENCE_S, SIZE, opened, read

from kvfuse.errors import EngineTimeout
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.rados.lateness import LATE_MAX
from kvfuse.remote.segments.rados.objects import object_name
from kvfuse.remote.segments.rados.store import RadosSegments
from kvfuse_cluster.ceph import CephServers, CephSettings

pytestmark = pytest.mark.needs("ceph")

STALL_S = 4.0
"""less than a cluster needs to take a stalled OSD for down"""


@pytest.fixture
def ceph(own_ceph: CephServers) -> CephServers:
    """Tests here stop its OSDs."""
    return own_ceph


@contextmanager
def stalled(ceph: CephServers, osd: int) -> Iterator[Callable[[], None]]:
    """An OSD is stopped until the yielded function is called. In the end all is as before."""
    ceph.kill(osd, signal.SIGSTOP)
    try:
        yield lambda: ceph.kill(osd, signal.SIGCONT)
    finally:
        ceph.kill(osd, signal.SIGCONT)
        ceph.wait_up(osd)
        ceph.wait_clean()


def ups(ceph: CephServers) -> list[bool]:
    """Of each OSD whether the cluster counts it as up."""
    return [bool(row["up"]) for row in ceph.command("osd", "dump")["osds"]]


def test_a_killed_osd_is_shown_and_comes_back(ceph: CephServers) -> None:
    before = ceph.osds[2].pid
    ceph.kill(2, signal.SIGKILL)
    try:
        assert ceph.osds[2].pid == 0
    finally:
        ceph.restart(2)
        ceph.wait_clean()
    assert ceph.osds[2].pid not in (0, before)
    assert ups(ceph) == [True] * len(ceph.osds)


async def test_reads_and_writes_go_on_when_an_osd_is_killed(
    ceph: CephServers, store: RadosSegments, rng: random.Random
) -> None:
    """No call fails, nothing acknowledged is lost, and the longest wait is a matter of seconds."""
    blocks = {index: rng.randbytes(64 * KIB) for index in range(32)}
    waits = []

    async def round_trip(index: int) -> None:
        blocks[index] = rng.randbytes(64 * KIB)
        began = time.monotonic()
        await store.write([Transfer(1, index * MIB, blocks[index])])
        assert await read(store, index * MIB, 64 * KIB) == blocks[index]
        waits.append(time.monotonic() - began)

    for index in blocks:
        await round_trip(index)
    ceph.kill(1)
    try:
        for index in [*blocks, *blocks]:
            await round_trip(index)
        for index, data in blocks.items():
            assert await read(store, index * MIB, 64 * KIB) == data
    finally:
        ceph.restart(1)
        ceph.wait_clean()
    print(f"longest wait {max(waits):.2f} s")
    assert max(waits) < 10
    for index, data in blocks.items():
        assert await read(store, index * MIB, 64 * KIB) == data


def primary_of(ceph: CephServers, store: RadosSegments, index: int) -> int:
    return int(_placing(ceph, store, index)["acting_primary"])


def osds_of(ceph: CephServers, store: RadosSegments, index: int) -> list[int]:
    """All that have a replica."""
    return list(_placing(ceph, store, index)["acting"])


def _placing(ceph: CephServers, store: RadosSegments, index: int) -> dict[str, Any]:
    """What the cluster's map says of one object of segment 1."""
    words = "osd", "map", ceph.settings.pool, object_name(1, index).decode(), store.place.namespace
    found: dict[str, Any] = ceph.command(*words)
    return found


async def test_a_caller_that_can_go_elsewhere_is_told_soon_which_objects_are_late(
    ceph: CephServers, store: RadosSegments
) -> None:
    """And which others answer: those of other OSDs alone, whether the stopped one has their first replica or not."""
    await store.write([Transfer(1, index * OBJECT_SIZE, b"before") for index in range(SIZE // OBJECT_SIZE)])
    osds = [osds_of(ceph, store, index) for index in range(SIZE // OBJECT_SIZE)]
    stopped = min(range(len(ceph.osds)), key=lambda osd: sum(osd in some for some in osds))  # a third has no part in it
    on_it = {index for index, some in enumerate(osds) if stopped in some}
    late = min(on_it)
    places = [(1, index * OBJECT_SIZE, OBJECT_SIZE) for index in range(SIZE // OBJECT_SIZE)]
    others = sorted(set(range(SIZE // OBJECT_SIZE)) - on_it)
    assert [store.servers.answers(*place) for place in places] == [True] * len(places)
    with stalled(ceph, stopped) as wake:
        began = time.monotonic()
        batch = [Transfer(1, index * OBJECT_SIZE, b"during") for index in (late, others[0])]
        assert await store.servers.write_some(batch) == {0}
        took = time.monotonic() - began
        print(f"late after {took:.3f} s")
        assert took < 2 * LATE_MAX + STALL_S / 4
        assert store.servers.answers(*places[late]) is False
        assert store.servers.answers(*places[others[0]]) is True
        assert store.servers.answers(*places[others[1]]) is None
        await store.servers.probe(places)
        assert {index for index, place in enumerate(places) if store.servers.answers(*place) is False} == on_it
        assert await store.servers.write_some([Transfer(1, late * OBJECT_SIZE, b"again!")]) == {0}
        wake()
        with trio.fail_after(PATIENCE_S):
            while not all(store.servers.answers(*place) for place in places):  # noqa: ASYNC110 - no event tells of it
                await trio.sleep(0.05)
    assert await read(store, others[0] * OBJECT_SIZE, 6) == b"during"
    assert await read(store, late * OBJECT_SIZE, 6) in (b"before", b"during")
    await store.write([Transfer(1, late * OBJECT_SIZE, b"after!")])
    assert await read(store, late * OBJECT_SIZE, 6) == b"after!"
    assert store.counters.late_writes == len(on_it)


async def test_a_stalled_osd_keeps_nobody_beyond_the_deadline(ceph: CephServers, store: RadosSegments) -> None:
    await store.write([Transfer(1, 0, b"before")])
    async with opened(store.place, deadline=0.5, hedge_delay=0.0) as hasty:
        assert await read(hasty, 0, 6) == b"before"
        with stalled(ceph, primary_of(ceph, store, 0)) as wake:
            began = time.monotonic()
            with pytest.raises(EngineTimeout, match=r"00000001\.00000000.*within 0.5 s"):
                await hasty.write([Transfer(1, 0, b"during")])
            assert 0.5 <= time.monotonic() - began < 2
            wake()
        await until_heard(hasty)
        await store.write([Transfer(1, 0, b"after!")])
        assert await read(hasty, 0, 6) == b"after!"


async def until_heard(store: RadosSegments) -> None:
    """Wait, for a cluster that is whole, until an object that was silent is asked again."""
    with trio.fail_after(PATIENCE_S):
        while True:
            try:
                await read(store, 0, 1)
            except EngineTimeout:
                await trio.sleep(0.01)
            else:
                return


async def test_a_silent_object_is_waited_for_once(ceph: CephServers, store: RadosSegments) -> None:
    """Whoever asks for it later hears so at once; others are served. It is asked again when its server is back."""
    primary = primary_of(ceph, store, 0)
    elsewhere = next(index for index in range(1, 16) if primary not in osds_of(ceph, store, index)) * OBJECT_SIZE
    await store.write([Transfer(1, 0, b"before")])
    async with opened(store.place, deadline=1.0, hedge_delay=0.0) as hasty:
        assert await read(hasty, 0, 6) == b"before"
        with stalled(ceph, primary) as wake:
            with pytest.raises(EngineTimeout, match="within 1 s"):
                await hasty.write([Transfer(1, 0, b"during"), Transfer(1, elsewhere, b"during")])
            began = time.monotonic()
            for call in (
                lambda: hasty.write([Transfer(1, elsewhere, b"never!"), Transfer(1, 0, b"never!")]),
                lambda: read(hasty, 0, 6),
            ):
                with pytest.raises(EngineTimeout, match=r"00000001\.00000000.*has not answered for"):
                    await call()
            assert await read(hasty, elsewhere, 6) == b"during"
            assert time.monotonic() - began < 0.5
            wake()
        await until_heard(hasty)
        await hasty.write([Transfer(1, 0, b"after!")])
        assert await read(hasty, 0, 6) == b"after!"


async def test_a_read_that_replicas_refuse_ends_in_time(ceph: CephServers, store: RadosSegments) -> None:
    """librados asks the stalled one again, in a way that cannot be cancelled: that may keep nobody, nor the memory."""
    primary = primary_of(ceph, store, 0)
    offsets = [index * OBJECT_SIZE for index in range(16) if primary_of(ceph, store, index) == primary]
    async with opened(store.place, deadline=1.0, hedge_delay=0.1) as hasty:
        await hasty.write([Transfer(1, offset, b"just written") for offset in offsets])
        buffers = [bytearray(12) for _ in offsets]
        with stalled(ceph, primary) as wake:
            began = time.monotonic()
            with pytest.raises(EngineTimeout):
                await hasty.read([Transfer(1, offset, buffer) for offset, buffer in zip(offsets, buffers, strict=True)])
            assert time.monotonic() - began < 2
            assert hasty.counters.hedges >= len(offsets)
            buffers[0][:] = b"x" * 12
            wake()
        await until_heard(hasty)
        assert buffers[0] == b"x" * 12
        assert await read(hasty, 0, 12) == b"just written"


async def test_a_store_closes_while_replies_are_outstanding(ceph: CephServers, store: RadosSegments) -> None:
    async with opened(store.place, deadline=0.5, hedge_delay=0.1) as hasty:
        await hasty.write([Transfer(1, 0, b"just written")])
        with stalled(ceph, primary_of(ceph, store, 0)):
            for _ in range(3):
                with pytest.raises(EngineTimeout):
                    await read(hasty, 0, 12)
            began = time.monotonic()
            await hasty.aclose()
            assert time.monotonic() - began < 3
    assert await read(store, 0, 12) == b"just written"


@pytest.mark.parametrize("how", ["late", "cancelled"])
async def test_a_read_that_was_given_up_touches_its_buffer_no_more(
    ceph: CephServers, store: RadosSegments, how: str
) -> None:
    await store.write([Transfer(1, 0, b"d" * MIB)])
    async with opened(store.place, deadline=0.5 if how == "late" else PATIENCE_S, hedge_delay=0.0) as reader:
        await read(reader, 0, 1)
        buffer = bytearray(MIB)
        with stalled(ceph, primary_of(ceph, store, 0)) as wake:
            began = time.monotonic()
            if how == "late":
                with pytest.raises(EngineTimeout):
                    await reader.read([Transfer(1, 0, buffer)])
            else:
                with trio.move_on_after(0.2) as scope:
                    await reader.read([Transfer(1, 0, buffer)])
                assert scope.cancelled_caught
            assert time.monotonic() - began < 2
            buffer[:] = b"x" * MIB
            wake()
            assert await read(store, 0, MIB) == b"d" * MIB  # answered by the OSD after what was given up
        assert buffer == b"x" * MIB


@pytest.fixture
def patient_ceph() -> Iterator[CephServers]:
    """Replicas may answer for four fifths of the grace after they heard from the first one of their group.

    That is short after another stall, which makes the OSDs doubt each other's clocks.
    """
    with ceph_cluster(settings=CephSettings(heartbeat_grace=120)) as servers:
        yield servers


async def test_a_late_read_is_answered_by_another_replica(patient_ceph: CephServers) -> None:
    """A replica learns that an object is whole everywhere from later writes nearby; so there are some."""
    place = rados_place(patient_ceph, "hedged", deadline=PATIENCE_S)
    async with opened(place) as store, opened(place, hedge_delay=0.05) as hedged:
        await store.create(1, SIZE)
        await store.create(2, 128 * OBJECT_SIZE)
        await store.write([Transfer(1, 0, b"d" * MIB)])
        for index in range(128):
            await store.write([Transfer(2, index * OBJECT_SIZE, b"later")])
        await read(hedged, 0, 1)
        with stalled(patient_ceph, primary_of(patient_ceph, store, 0)):
            began = time.monotonic()
            content = b""
            while not content and time.monotonic() < began + STALL_S:
                with trio.move_on_after(0.5):  # each hedge goes by lot, maybe to the stalled one: draw again
                    content = await read(hedged, 0, 2 * MIB)
            assert content == b"d" * MIB + bytes(MIB)
            print(f"answered after {time.monotonic() - began:.3f} s with {hedged.counters.hedges} hedges")
            assert hedged.counters.hedges >= 1


async def test_a_write_that_was_given_up_comes_before_later_ones(ceph: CephServers, store: RadosSegments) -> None:
    async with opened(store.place, hedge_delay=0.0) as writer:
        await writer.write([Transfer(1, 0, b"first")])
        with stalled(ceph, primary_of(ceph, store, 0)) as wake:
            with trio.move_on_after(0.2) as scope:
                await writer.write([Transfer(1, 0, b"given up")])
            assert scope.cancelled_caught
            wake()
            await writer.write([Transfer(1, 0, b"later")])
        assert (await read(writer, 0, 8))[:5] == b"later"
