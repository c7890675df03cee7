"""What only the rados engine promises: few operations, other hosts, tenants, full pools."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import pytest
import trio
import trio.testing
from cluster_lab import create_ceph_user, rados
from rados_lab import KIB, MIB, OBJECT_SIZE, PATIENCE_S, SIZE, opened, read

from kvfuse.errors import EngineError, EngineFull, EngineTimeout
from kvfuse.remote.segments.api import SegmentInfo, Transfer
from kvfuse.remote.segments.rados import librados
from kvfuse.remote.segments.rados.librados import PoolPlace
from kvfuse.remote.segments.rados.store import RadosSegments
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.process import free_ports

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
    return sorted(rados(ceph, store.place.namespace, "ls").split())


# -- other hosts, other settings ------------------------------------------------------------------------


async def test_stores_share_segments(store: RadosSegments, place: PoolPlace) -> None:
    async with opened(place) as other:
        await other.create(2, MIB)
        await other.write([Transfer(2, 0, b"theirs"), Transfer(1, 0, b"ours")])
        assert await read(store, 0, 6, segment=2) == b"theirs"
        assert await read(store, 0, 4) == b"ours"
        assert await store.list() == await other.list() == [SegmentInfo(1, SIZE), SegmentInfo(2, MIB)]
        with pytest.raises(ValueError):
            await store.create(2, 2 * MIB)


async def test_a_removal_waits_for_users_who_look_up_other_segments(store: RadosSegments, place: PoolPlace) -> None:
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


async def test_another_object_size_is_refused(store: RadosSegments, place: PoolPlace) -> None:
    with pytest.raises(EngineError, match="object_size"):
        async with opened(place, object_size=MIB):
            pass


async def test_a_foreign_object_is_no_table(ceph: CephServers, place: PoolPlace, tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"somebody else's bytes")
    rados(ceph, place.namespace, "put", "segments", tmp_path / "foreign")
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
async def test_what_is_missing_is_said(place: PoolPlace, changes: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        async with opened(place, **changes):
            pass


async def test_monitors_that_do_not_answer(tmp_path: Path, place: PoolPlace) -> None:
    conf = tmp_path / "ceph.conf"
    conf.write_text(f"[global]\nmon host = 127.0.0.1:{free_ports(1)[0]}\n")
    began = time.monotonic()
    with pytest.raises(EngineTimeout, match="no monitor answered within 1 s"):
        async with opened(place, conf_file=conf, deadline=1.0):
            pass
    assert time.monotonic() - began < 10


async def test_an_absent_library(place: PoolPlace, monkeypatch: pytest.MonkeyPatch) -> None:
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
    keyring = create_ceph_user(ceph, "tenant", "tenants-own")
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
    confined = {"user": "fencing", "keyring": create_ceph_user(ceph, "fencing", "fenced"), "namespace": "fenced"}
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
