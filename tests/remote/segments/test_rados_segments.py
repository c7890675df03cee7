"""What only the rados engine promises: few operations, other hosts, tenants, dead and stalled OSDs, full pools."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing
from cluster_lab import ceph_cluster, changed, rados_place

from kvfuse.cluster.ceph import CephServers, CephSettings
from kvfuse.cluster.process import free_ports
from kvfuse.errors import EngineError, EngineFull, EngineTimeout
from kvfuse.remote.segments.api import SegmentInfo, Transfer
from kvfuse.remote.segments.rados import librados
from kvfuse.remote.segments.rados.librados import Place
from kvfuse.remote.segments.rados.objects import object_name
from kvfuse.remote.segments.rados.store import RadosSegments

KIB = 1 << 10
MIB = 1 << 20
SIZE = 64 * MIB
OBJECT_SIZE = 4 * MIB
PATIENCE_S = 30.0
STALL_S = 4.0
"""less than a cluster needs to take a stalled OSD for down"""


@pytest.fixture
def place(ceph: CephServers, request: pytest.FixtureRequest) -> Place:
    """A namespace of the test's own, and a patience that a busy machine does not try."""
    return rados_place(ceph, request.node.name, deadline=PATIENCE_S)


@asynccontextmanager
async def opened(place: Place, namespace: str = "", pool: str = "", **changes: object) -> AsyncIterator[RadosSegments]:
    place = replace(changed(place, **changes), namespace=namespace or place.namespace, pool=pool or place.pool)
    store = await RadosSegments.open(place)
    try:
        yield store
    finally:
        await store.aclose()


@pytest.fixture
async def store(place: Place) -> AsyncIterator[RadosSegments]:
    """With segment 1 of SIZE bytes."""
    async with opened(place) as store:
        await store.create(1, SIZE)
        yield store


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


async def read(store: RadosSegments, offset: int, length: int, segment: int = 1) -> bytes:
    buffer = bytearray(b"\xaa" * length)
    await store.read([Transfer(segment, offset, buffer)])
    return bytes(buffer)


# -- operations ---------------------------------------------------------------------------------------


async def operations_of(store: RadosSegments, batch: list[Transfer], *, writing: bool) -> int:
    before = store.counters.operations
    await (store.write(batch) if writing else store.read(batch))
    return store.counters.operations - before


@pytest.mark.parametrize(
    ("block_size", "count", "reads_expected", "writes_expected"),
    [
        (64 * KIB, 1, 1, 1),
        (64 * KIB, 16, 1, 1),
        (64 * KIB, 128, 8, 2),
        (200 * KIB, 5, 1, 1),
        (MIB, 2, 2, 1),
        (MIB, 9, 9, 3),
        (4 * MIB, 1, 1, 1),
        (4 * MIB, 3, 3, 3),
        (16 * MIB, 1, 4, 4),
        (4 * KIB, 1024, 16, 16),
    ],
)
async def test_blocks_of_one_object_are_one_operation(
    store: RadosSegments, rng: random.Random, block_size: int, count: int, reads_expected: int, writes_expected: int
) -> None:
    """Up to 64 ranges: of up to 1 MiB together for reads, 4 MiB for writes."""
    data = rng.randbytes(block_size * count)
    parts = [memoryview(data)[start : start + block_size] for start in range(0, len(data), block_size)]
    writes = [Transfer(1, index * block_size, part) for index, part in enumerate(parts)]
    buffers = [bytearray(block_size) for _ in parts]
    reads = [Transfer(1, index * block_size, buffer) for index, buffer in enumerate(buffers)]
    rng.shuffle(writes)
    rng.shuffle(reads)
    assert await operations_of(store, writes, writing=True) == writes_expected
    assert await operations_of(store, reads, writing=False) == reads_expected
    assert b"".join(buffers) == data


async def test_a_block_over_a_border_is_two_operations(store: RadosSegments) -> None:
    batch = [Transfer(1, OBJECT_SIZE - 3, b"border")]
    assert await operations_of(store, batch, writing=True) == 2
    assert await read(store, OBJECT_SIZE - 4, 8) == b"\0border\0"


async def test_absent_and_short_objects_read_as_zeros_among_others(store: RadosSegments) -> None:
    await store.write([Transfer(1, OBJECT_SIZE, b"short"), Transfer(1, 3 * OBJECT_SIZE + 100, b"far")])
    content = await read(store, 0, 5 * OBJECT_SIZE)
    expected = bytearray(5 * OBJECT_SIZE)
    expected[OBJECT_SIZE : OBJECT_SIZE + 5] = b"short"
    expected[3 * OBJECT_SIZE + 100 : 3 * OBJECT_SIZE + 103] = b"far"
    assert content == expected


async def test_only_writes_make_objects(store: RadosSegments, ceph: CephServers) -> None:
    assert await read(store, 0, SIZE) == bytes(SIZE)
    assert objects(ceph, store) == ["segments"]
    await store.write([Transfer(1, 5 * OBJECT_SIZE, b"x")])
    assert objects(ceph, store) == ["00000001.00000005", "segments"]
    await store.remove(1)
    assert objects(ceph, store) == ["segments"]


def objects(ceph: CephServers, store: RadosSegments) -> list[str]:
    """The names of all objects in the store's namespace."""
    return sorted(ceph.object_names(store.place.namespace))


# -- other hosts, other settings ------------------------------------------------------------------------


async def test_stores_share_segments(store: RadosSegments, place: Place) -> None:
    async with opened(place) as other:
        await other.create(2, MIB)
        await other.write([Transfer(2, 0, b"theirs"), Transfer(1, 0, b"ours")])
        assert await read(store, 0, 6, segment=2) == b"theirs"
        assert await read(store, 0, 4) == b"ours"
        assert await store.list() == await other.list() == [SegmentInfo(1, SIZE), SegmentInfo(2, MIB)]
        with pytest.raises(ValueError):
            await store.create(2, 2 * MIB)


async def test_a_removal_waits_for_users_who_look_up_other_segments(store: RadosSegments, place: Place) -> None:
    """Nobody holds one segment while asking for another: the removal would wait for them, and they for it."""
    async with opened(place) as other:
        for segment in range(2, 10):
            await other.create(segment, MIB)

    async def use(segment: int) -> None:
        for _ in range(5):
            try:
                await store.write([Transfer(1, 0, b"x" * MIB), Transfer(segment, 0, b"y")])
            except ValueError:
                return

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for segment in range(2, 10):
                nursery.start_soon(use, segment)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(store.remove, 1)
    assert [info.segment for info in await store.list()] == list(range(2, 10))


async def test_another_object_size_is_refused(store: RadosSegments, place: Place) -> None:
    with pytest.raises(EngineError, match="object_size"):
        async with opened(place, object_size=MIB):
            pass


async def test_a_foreign_object_is_no_table(ceph: CephServers, place: Place) -> None:
    ceph.put_object("segments", place.namespace, b"somebody else's bytes")
    with pytest.raises(EngineError, match="namespace of its own"):
        async with opened(place):
            pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": "nowhere"}, "no pool nowhere"),
        ({"user": "nobody"}, "client.nobody was refused"),
        ({"keyring": Path("/nonexistent")}, "no valid key"),
        ({"conf_file": Path("/nonexistent/ceph.conf")}, "reading /nonexistent/ceph.conf"),
    ],
)
async def test_what_is_missing_is_said(place: Place, changes: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        async with opened(place, **changes):
            pass


async def test_monitors_that_do_not_answer(tmp_path: Path, place: Place) -> None:
    conf = tmp_path / "ceph.conf"
    conf.write_text(f"[global]\nmon host = 127.0.0.1:{free_ports(1)[0]}\n")
    began = time.monotonic()
    with pytest.raises(EngineTimeout, match="no monitor answered within 1 s"):
        async with opened(place, conf_file=conf, deadline=1.0):
            pass
    assert time.monotonic() - began < 10


async def test_an_absent_library(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(librados, "LIBRARY", "libnowhere.so.2")
    librados.library.cache_clear()
    try:
        with pytest.raises(EngineError, match="apt-get install librados2"):
            async with opened(place):
                pass
    finally:
        librados.library.cache_clear()


async def test_a_tenant_is_confined_to_a_namespace(ceph: CephServers, store: RadosSegments) -> None:
    """A key restricted to one namespace suffices for all calls there, and for none elsewhere."""
    keyring = ceph.create_user("tenant", "tenants-own")
    confined = {"user": "tenant", "keyring": keyring}
    async with opened(store.place, namespace="tenants-own", **confined) as own:
        await own.create(1, MIB)
        await own.write([Transfer(1, 0, b"mine")])
        assert await read(own, 0, 4) == b"mine"
        await own.remove(1)
        assert await own.list() == []
    with pytest.raises(EngineError, match="capability"):
        async with opened(store.place, **confined):
            pass


async def test_a_tenant_fences_its_clients(ceph: CephServers, store: RadosSegments) -> None:
    confined = {"user": "fencing", "keyring": ceph.create_user("fencing", "fenced"), "namespace": "fenced"}
    async with opened(store.place, **confined) as one, opened(store.place, **confined) as two:
        await one.create(1, MIB)
        assert await two.fence(one.identity())
        await two.write([Transfer(1, 0, b"mine")])
        with pytest.raises(EngineError, match="blocklist"):
            await one.write([Transfer(1, 0, b"late")])
        assert await read(two, 0, 4) == b"mine"


async def test_a_user_who_may_not_fence_hears_so(ceph: CephServers, store: RadosSegments, tmp_path: Path) -> None:
    capability = f"allow rw pool={ceph.settings.pool} namespace=unfenced"
    key = ceph.command("auth", "get-or-create", "client.unable", "mon", "allow r", "osd", capability)[0]["key"]
    keyring = tmp_path / "keyring"
    keyring.write_text(f"[client.unable]\n\tkey = {key}\n")
    confined = {"user": "unable", "keyring": keyring, "namespace": "unfenced"}
    async with opened(store.place, **confined) as one, opened(store.place, **confined) as two:
        await one.create(1, MIB)
        assert not await two.fence(one.identity())
        await one.write([Transfer(1, 0, b"mine")])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, EngineFull),
        (errno.EDQUOT, EngineFull),
        (errno.ETIMEDOUT, EngineTimeout),
        (errno.EPERM, EngineError),
        (errno.EIO, EngineError),
    ],
)
def test_answers_of_servers_become_errors(code: int, kind: type[EngineError]) -> None:
    error = librados.engine_error(-code, "writing object x")
    assert type(error) is kind
    assert str(error).startswith(f"writing object x: {os.strerror(code)}")


# -- OSDs that die or stall -----------------------------------------------------------------------------


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
    return ceph.primary(object_name(1, index).decode(), store.place.namespace)


def osds_of(ceph: CephServers, store: RadosSegments, index: int) -> list[int]:
    """All that have a replica."""
    name = object_name(1, index).decode()
    found: list[int] = ceph.command("osd", "map", ceph.settings.pool, name, store.place.namespace)["acting"]
    return found


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
