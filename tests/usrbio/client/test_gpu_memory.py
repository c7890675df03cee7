"""Blocks and files to and from memory of a device: the processor stands in for it, with copies that take their time."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount
from ring_calls import PATIENCE_S, done

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client import BlockStore, Client, GpuIov, Iov, Way, connect
from kvfuse.usrbio.client.gpu.cpu import CpuDevice, CpuMemory

STAGING = 64 << 10
SIZES = [1, 255, 257, STAGING // 8 - 1, STAGING // 8, STAGING // 8 + 1, STAGING // 2, STAGING - 1, STAGING, STAGING + 1]
"""bytes of blocks: around what is expected of one, and what the staging memory holds"""


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["capacity=256MiB,cache,admission=all,allow_other,cache.tier_size=128MiB"]) as mount:
        yield mount


@pytest.fixture
def client(mount: KvfuseMount) -> Iterator[Client]:
    with connect(mount.point) as client:
        yield client


@pytest.fixture(params=["pinned", "staging"])
def device(request: pytest.FixtureRequest) -> CpuDevice:
    return CpuDevice(pins=request.param == "pinned")


@pytest.fixture
def memory(device: CpuDevice) -> CpuMemory:
    return device.allocate(1 << 20)


@pytest.fixture
def iov(client: Client, device: CpuDevice, memory: CpuMemory) -> Iterator[GpuIov]:
    with client.iov_from_gpu(memory, device=device, staging_size=STAGING) as iov:
        yield iov


@pytest.fixture
def store(client: Client, tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore(client, tmp_path.name) as store:
        yield store


@pytest.fixture(params=["resident", "daemon"])
def source(request: pytest.FixtureRequest, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """From where blocks are got: by the client itself, or from the daemon."""
    if request.param == "daemon":
        monkeypatch.setattr(store._resident, "_present", list)
    return str(request.param)


def places_of(iov: GpuIov, sizes: list[int]) -> list:
    """Ranges of these sizes, with a gap of one byte between them."""
    starts = np.cumsum([0, *(size + 1 for size in sizes)]).tolist()
    return [iov.range(start, size) for start, size in zip(starts, sizes, strict=False)]


def test_blocks_are_got_byte_by_byte(
    store: BlockStore, iov: GpuIov, memory: CpuMemory, data: bytes, source: str
) -> None:
    keys = [b"%d" % size for size in SIZES]
    assert store.put_many(keys, [data[:size] for size in SIZES]).all()
    places = places_of(iov, SIZES)
    memory.bytes[:] = 7
    assert store.get_many_into(keys, places).tolist() == SIZES
    end = 0
    for place, size in zip(places, SIZES, strict=True):
        assert memory.bytes[end : place.offset].tobytes() == b"\7" * (place.offset - end)
        end = place.offset + size
        assert memory.bytes[place.offset : end].tobytes() == data[:size]
    assert (memory.bytes[end:] == 7).all()
    assert store.get_into(keys[3], iov) == SIZES[3]
    assert memory.bytes[: SIZES[3]].tobytes() == data[: SIZES[3]]


def test_blocks_are_put_byte_by_byte(store: BlockStore, iov: GpuIov, memory: CpuMemory, data: bytes) -> None:
    memory.bytes[:] = np.frombuffer(data, np.uint8)[: len(memory.bytes)]
    keys = [b"%d" % size for size in SIZES]
    places = places_of(iov, SIZES)
    assert store.put_many(keys, places).all()
    for key, place in zip(keys, places, strict=True):
        assert bytes(store.get(key) or b"") == data[place.offset : place.offset + place.size]
    store.put(b"one", iov.range(5, 10))
    assert bytes(store.get(b"one") or b"") == data[5:15]


def test_results_are_as_of_other_memory(store: BlockStore, iov: GpuIov, data: bytes) -> None:
    store.put_many([b"a", b"b"], [data[:100], data[:50]])
    assert store.get_at([b"a", b"none", b"b"], iov, [0, 100, 200], [100, 100, 10]).tolist() == [
        100, -errno.ENOENT, -errno.EMSGSIZE,
    ]  # fmt: skip
    assert store.put_at([b"c"], iov, [0], [100]).tolist() == [100]
    assert bytes(store.get(b"c") or b"") == data[:100]
    assert store.get_into(b"none", iov) is None
    with pytest.raises(OSError, match=r"(?i)message too long"):
        store.get_into(b"a", iov.range(0, 99))
    with pytest.raises(ValueError, match="of a GPU"):
        iov.range(iov.size, 1)


def test_memory_of_host_and_device_go_together(store: BlockStore, iov: GpuIov, memory: CpuMemory) -> None:
    memory.bytes[:4] = [1, 2, 3, 4]
    assert store.put_many([b"x", b"y"], [memory_part(iov, 4), b"host"]).all()
    array = np.zeros(4, np.uint8)
    assert store.get_many_into([b"x", b"y", b"z"], [array, iov.range(8, 4), iov.range(0, 1)]).tolist() == [4, 4, -1]
    assert array.tolist() == [1, 2, 3, 4]
    assert memory.bytes[8:12].tobytes() == b"host"


def memory_part(iov: GpuIov, size: int) -> object:
    return iov.range(0, size)


def test_objects_whose_memory_is_registered_are_buffers(
    client: Client, store: BlockStore, iov: GpuIov, memory: CpuMemory, device: CpuDevice
) -> None:
    memory.bytes[:] = 3
    store.put(b"all", memory)
    assert bytes(store.get(b"all") or b"") == memory.bytes.tobytes()
    with pytest.raises(ValueError, match="not registered"):
        store.put(b"other", device.allocate(100))
    assert Iov.from_gpu(client, memory, device=device).size == iov.size
    with pytest.raises(DeviceError, match="not its memory"):
        client.iov_from_gpu(CpuMemory(10), device=device)


def test_files_are_read_and_written_through_rings(
    client: Client, iov: GpuIov, memory: CpuMemory, mount: KvfuseMount, tmp_path: Path, data: bytes
) -> None:
    path = mount.point / f"{tmp_path.name}-file"
    path.write_bytes(data[:50_000])
    with client.file(path, "rw") as file, client.ring(8) as ring:
        ring.prep_read(iov, 5, file, 100, 20_000)
        assert done(ring) == {0: 20_000}
        assert memory.bytes[5:20_005].tobytes() == data[100:20_100]
        assert ring.prep_reads(iov, [0, 100], file, [7, 8], 50, [1, 2]) == 2
        assert done(ring, 2) == {1: 50, 2: 50}
        assert memory.bytes[:50].tobytes() + memory.bytes[100:150].tobytes() == data[7:57] + data[8:58]
        memory.bytes[:10] = 9
        ring.prep_write(iov, 0, file, 3, 10)
        assert done(ring) == {0: 10}
        assert path.read_bytes()[:20] == data[:3] + b"\t" * 10 + data[13:20]
        for number in range(4):
            ring.prep_read(iov, 0, file, 0, STAGING // 4, user_data=number)
        with pytest.raises(BlockingIOError, match="staging"):
            ring.prep_read(iov, 0, file, 0, 1)
        assert len(done(ring, 4)) == 4
        ring.prep_read(iov, 0, file, 0, 1)
        assert done(ring) == {0: 1}


def test_a_call_returns_when_the_device_has_the_bytes(
    store: BlockStore, iov: GpuIov, memory: CpuMemory, device: CpuDevice, data: bytes, source: str
) -> None:
    """Each copy waits until the caller has asked for its end; nothing of it is there before."""
    store.put(b"slow", data[:1000])
    held, begun = threading.Event(), threading.Event()

    def hold(_kind: str) -> None:
        begun.set()
        assert held.wait(PATIENCE_S)

    device.before_copy = hold
    results: list[int | None] = []
    caller = threading.Thread(target=lambda: results.append(store.get_into(b"slow", iov)))
    caller.start()
    assert begun.wait(PATIENCE_S)
    assert results == []
    assert not memory.bytes.any()
    held.set()
    caller.join(PATIENCE_S)
    assert results == [1000]
    assert memory.bytes[:1000].tobytes() == data[:1000]


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_block_that_goes_while_it_is_copied_is_asked_of_the_daemon(
    mount: KvfuseMount, store: BlockStore, iov: GpuIov, memory: CpuMemory, device: CpuDevice, change: str
) -> None:
    store.put(b"key", b"old")
    assert store._resident.exists([b"key"]) is not None
    with BlockStore(mount.point, store.namespace.path) as other:

        def overtake(_kind: str) -> None:
            device.before_copy = lambda _kind: None
            if change == "replaced":
                other.put(b"key", b"newer")
            else:
                other.delete(b"key")

        device.before_copy = overtake
        found = store.get_into(b"key", iov)
    assert found == (5 if change == "replaced" else None)
    assert change == "removed" or memory.bytes[:5].tobytes() == b"newer"


def test_a_copy_that_fails_fails_its_block_alone(
    store: BlockStore, iov: GpuIov, memory: CpuMemory, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [b"a", b"b", b"c"]
    store.put_many(keys, [b"1", b"2", b"3"])
    monkeypatch.setattr(store._resident, "_present", list)
    copies: list[str] = []

    def fail_second(kind: str) -> None:
        copies.append(kind)
        if len(copies) == 2:
            raise DeviceError("it fell off the bus")

    device.before_copy = fail_second
    results = store.get_at(keys, iov, [0, 1, 2], [1, 1, 1]).tolist()
    assert sorted(results) == [-errno.EIO, 1, 1]
    assert "fell off" in str(iov.failure)
    copies.clear()
    results = store.put_at(keys, iov, [0, 1, 2], [1, 1, 1]).tolist()
    assert results == [1, -errno.EIO, 1]
    copies.clear()
    with pytest.raises(DeviceError, match="fell off"):
        store.get_many_into(keys, [iov.range(row, 1) for row in range(3)])
    copies.clear()
    with pytest.raises(DeviceError, match="fell off"):
        store.put_many(keys, [iov.range(row, 1) for row in range(3)])
    device.before_copy = lambda _kind: None
    assert store.get_at(keys, iov, [0, 1, 2], [1, 1, 1]).tolist() == [1, 1, 1]


def test_staging_memory_that_others_keep_ends_the_call_at_its_deadline(
    client: Client, store: BlockStore, iov: GpuIov, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(b"key", b"bytes")
    monkeypatch.setattr(store._resident, "_present", list)
    part = iov.link.staging.take(STAGING)
    assert store.get_at([b"key"], iov, [0], [5], deadline=0.05).tolist() == [-errno.ETIMEDOUT]
    part.release()
    assert store.get_at([b"key"], iov, [0], [5]).tolist() == [5]


def test_what_is_pinned_is_let_go_of(mount: KvfuseMount, tmp_path: Path, data: bytes) -> None:
    device = CpuDevice()
    memory = device.allocate(1000)
    with connect(mount.point) as client:
        iov = client.iov_from_gpu(memory, device=device, staging_size=STAGING)
        assert iov.way is Way.PINNED
        assert "no dma-buf" in iov.why_not[Way.DMABUF]
        assert "RDMA" in client.session.lacks_adapter
        with BlockStore(client, tmp_path.name) as store:
            store.put(b"key", data[:1000])
            store.put(b"other", iov)
            assert store.get_into(b"key", iov) == 1000
            assert sorted(device.pinned.values())[0] == STAGING
            assert len(device.pinned) == 2  # and the arena
    assert device.pinned == {}
    with pytest.raises(ValueError, match="not registered"):
        iov.range()


def test_after_a_reconnect_other_staging_memory_is_used(mount: KvfuseMount, tmp_path: Path) -> None:
    device = CpuDevice()
    memory = device.allocate(100)
    with connect(mount.point) as client, BlockStore(client, tmp_path.name) as store:
        iov = client.iov_from_gpu(memory, device=device, staging_size=STAGING)
        store.put(b"key", iov.range(0, 10))
        kept = iov.link.staging.take(10)  # a daemon that hangs may still write there
        client.session.close()
        client.reconnect()
        memory.bytes[:10] = 1
        store.put(b"key", iov.range(0, 10))
        assert bytes(store.get(b"key") or b"") == b"\1" * 10
        later = iov.link.staging.take(10)
        assert later.iov is not kept.iov
        later.release()
