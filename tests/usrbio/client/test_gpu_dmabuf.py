"""Memory of a device that the daemon's adapter fills; `labs/adapter_daemon` has one that needs no RDMA."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from adapter_daemon import ADAPTER_DAEMON, lists_of, tell_adapter
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_calls import PATIENCE_S, done
from ring_lab import registered_things

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client import BlockStore, Client, GpuIov, Way, connect
from kvfuse.usrbio.client.gpu.cpu import CpuDevice, CpuMemory

SIZES = [1, 4095, 4096, 4097, 65536, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 4 << 20]
SIZE = 16 << 20


@pytest.fixture(scope="module", params=["tier", "no tier"])
def mount(request: pytest.FixtureRequest) -> Iterator[KvfuseMount]:
    tier = "128MiB" if request.param == "tier" else "0"
    words = [f"capacity=512MiB,cache,admission=all,allow_other,cache.tier_size={tier}"]
    with temporary_mount(words, ADAPTER_DAEMON) as mount:
        yield mount


@pytest.fixture(scope="module")
def tiered() -> Iterator[KvfuseMount]:
    words = ["capacity=256MiB,cache,admission=all,allow_other,cache.tier_size=64MiB"]
    with temporary_mount(words, ADAPTER_DAEMON) as mount:
        yield mount


@pytest.fixture
def adapter(tiered: KvfuseMount) -> Iterator[KvfuseMount]:
    """One that does what it is told."""
    yield tiered
    tell_adapter(tiered, "")


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(exports=True)


@pytest.fixture
def memory(device: CpuDevice) -> CpuMemory:
    return device.allocate(SIZE)


@pytest.fixture
def client(adapter: KvfuseMount) -> Iterator[Client]:
    with connect(adapter.point) as client:
        yield client


@pytest.fixture
def iov(client: Client, device: CpuDevice, memory: CpuMemory) -> Iterator[GpuIov]:
    with client.iov_from_gpu(memory, device=device) as iov:
        assert (iov.way, iov.why_not) == (Way.DMABUF, {})
        yield iov


@pytest.fixture
def store(client: Client, tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore(client, tmp_path.name) as store:
        yield store


def wait_for_no_clients(mount: KvfuseMount) -> None:
    """Until the daemon has nothing of clients: no iovs, rings, calls, and none of their devices' memory."""

    def has_none() -> bool:
        return not any(registered_things(mount).values()) and "cpu-device" not in maps.read_text()

    maps = Path(f"/proc/{mount.pid}/maps")
    wait_until(has_none, "the end of all clients")


def staged(iov: GpuIov) -> bool:
    """Whether host memory was needed between the daemon and the device."""
    return iov.link.staging._memory is not None or iov.link.staging._large is not None


def test_blocks_come_byte_by_byte_and_by_lists(
    mount: KvfuseMount, device: CpuDevice, memory: CpuMemory, tmp_path: Path, data: bytes
) -> None:
    source = np.resize(np.frombuffer(data, np.uint8), 4 << 20)
    keys = [b"%d" % size for size in SIZES]
    with connect(mount.point) as client, BlockStore(client, tmp_path.name) as store:
        assert store.put_many(keys, [source[:size] for size in SIZES]).all()
        with client.iov_from_gpu(memory, device=device) as iov:
            assert iov.way is Way.DMABUF
            starts = np.cumsum([0, *(size + 1 for size in SIZES)]).tolist()
            places = [iov.range(start, size) for start, size in zip(starts, SIZES, strict=False)]
            memory.bytes[:] = 7
            before = len(lists_of(mount))
            assert store.get_many_into(keys, places).tolist() == SIZES
            end = 0
            for place, size in zip(places, SIZES, strict=True):
                assert memory.bytes[end : place.offset].tobytes() == b"\7" * (place.offset - end)
                end = place.offset + size
                assert np.array_equal(memory.bytes[place.offset : end], source[:size])
            assert (memory.bytes[end:] == 7).all()
            assert sum(lists_of(mount)[before:]) >= len(keys)
            assert not staged(iov)


def test_results_are_as_of_other_memory(store: BlockStore, iov: GpuIov, memory: CpuMemory, data: bytes) -> None:
    store.put_many([b"a", b"b", b"empty"], [data[:100], data[:50], b""])
    assert store.get_at([b"a", b"none", b"b", b"empty"], iov, [0, 100, 200, 300], [100, 100, 10, 5]).tolist() == [
        100, -errno.ENOENT, -errno.EMSGSIZE, 0,
    ]  # fmt: skip
    assert memory.bytes[:100].tobytes() == data[:100]
    assert not memory.bytes[100:].any()
    assert store.get_into(b"none", iov) is None
    with pytest.raises(OSError, match=r"(?i)message too long"):
        store.get_into(b"a", iov.range(0, 99))
    array = np.zeros(50, np.uint8)
    assert store.get_many_into([b"b", b"a"], [array, iov.range(SIZE - 100)]).tolist() == [50, 100]
    assert (array.tobytes(), memory.bytes[-100:].tobytes()) == (data[:50], data[:100])
    assert not staged(iov)


def test_many_blocks_are_few_lists(adapter: KvfuseMount, store: BlockStore, iov: GpuIov, memory: CpuMemory) -> None:
    keys = [b"%d" % number for number in range(300)]
    blocks = [bytes([number % 251]) * 4096 for number in range(300)]
    store.put_many(keys, blocks)
    places = [iov.range(number * 4096, 4096) for number in range(300)]
    store.get_many_into(keys, places)  # the daemon has seen them now
    before = len(lists_of(adapter))
    assert (store.get_many_into(keys, places) == 4096).all()
    assert memory.bytes[: 300 * 4096].tobytes() == b"".join(blocks)
    lists = lists_of(adapter)[before:]
    assert sum(lists) == 300
    assert len(lists) < 150, lists


def test_blocks_come_that_are_in_memory_no_more(store: BlockStore, iov: GpuIov, memory: CpuMemory) -> None:
    keys = [b"%d" % number for number in range(150)]
    for key in keys:  # more than there is memory for blocks
        store.put(key, np.full((1 << 20) + 1, int(key), np.uint8))
    places = [iov.range(part * (2 << 20), (1 << 20) + 1) for part in range(8)]
    for start in range(0, len(keys), len(places)):
        some = keys[start : start + len(places)]
        assert store.get_many_into(some, places[: len(some)]).tolist() == [(1 << 20) + 1] * len(some)
        for key, place in zip(some, places, strict=False):
            assert (memory.bytes[place.offset : place.offset + place.size] == int(key)).all(), key
    assert iov.way is Way.DMABUF


def test_files_are_read_and_written(
    client: Client, iov: GpuIov, memory: CpuMemory, adapter: KvfuseMount, tmp_path: Path, data: bytes
) -> None:
    path = adapter.point / f"{tmp_path.name}-file"
    content = np.resize(np.frombuffer(data, np.uint8), 3 << 20).tobytes()
    path.write_bytes(content)
    with client.file(path, "rw") as file, client.ring(64) as ring:
        ring.prep_read(iov, 5, file, 100, 4 << 20)
        assert done(ring) == {0: len(content) - 100}
        assert memory.bytes[5 : 5 + len(content) - 100].tobytes() == content[100:]
        numbers = np.arange(40)
        assert ring.prep_reads(iov, numbers * 64, file, numbers * 64 + 7, 50, numbers) == 40
        assert done(ring, 40) == dict.fromkeys(range(40), 50)
        for number in range(40):
            assert memory.bytes[number * 64 :][:50].tobytes() == content[number * 64 + 7 :][:50]
        assert not staged(iov)
        memory.bytes[:10] = 9
        ring.prep_write(iov, 0, file, 3, 10)
        assert done(ring) == {0: 10}
        assert path.read_bytes()[:20] == content[:3] + b"\t" * 10 + content[13:20]


def test_what_is_put_goes_by_staging_memory(store: BlockStore, iov: GpuIov, memory: CpuMemory) -> None:
    memory.bytes[:1000] = 5
    store.put(b"key", iov.range(0, 1000))
    assert bytes(store.get(b"key") or b"") == b"\5" * 1000
    assert staged(iov)


def test_ranges_outside_are_refused(client: Client, store: BlockStore, iov: GpuIov, data: bytes) -> None:
    store.put(b"key", data[:100])
    with client.ring(8) as ring:
        for number, (offset, length) in enumerate([(SIZE - 99, 100), (SIZE, 1), ((1 << 64) - 1, 100), (0, SIZE + 1)]):
            ring.prep_get(iov, offset, store.namespace, b"key", length, user_data=number)
        ring.prep_get(iov, SIZE - 100, store.namespace, b"key", 100, user_data=9)
        assert done(ring, 5) == {**dict.fromkeys(range(4), -errno.EFAULT), 9: 100}


def test_an_adapter_that_fails_costs_no_block_and_is_given_up(
    adapter: KvfuseMount, store: BlockStore, iov: GpuIov, memory: CpuMemory, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(b"key", b"bytes")
    tell_adapter(adapter, "fail")
    with store.client.ring(8) as ring:
        ring.prep_get(iov, 0, store.namespace, b"key", 5)
        assert done(ring) == {0: -errno.EIO}
    assert store.get_into(b"key", iov) == 5
    assert memory.bytes[:5].tobytes() == b"bytes"
    tell_adapter(adapter, "")
    assert store.get_into(b"key", iov) == 5  # which begins the count anew
    tell_adapter(adapter, "fail")
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            assert iov.way is (Way.DMABUF if number < 3 else Way.PINNED)
            assert store.get_into(b"key", iov) == 5
    assert "adapter failed 3 times" in iov.why_not[Way.DMABUF]
    assert len([one for one in caplog.records if "adapter failed" in one.message]) == 1
    assert store.get_at([b"none"], iov, [0], [5]).tolist() == [-errno.ENOENT]


def test_an_adapter_that_refuses_the_memory_is_told_of_once(
    adapter: KvfuseMount, client: Client, device: CpuDevice, store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    tell_adapter(adapter, "refuse")
    with caplog.at_level(logging.WARNING):
        iovs = [client.iov_from_gpu(device.allocate(100), device=device) for _ in range(3)]
    assert {iov.way for iov in iovs} == {Way.PINNED}
    assert iovs[0].why_not == {Way.DMABUF: "the lab has no adapter today"}
    assert len(caplog.records) == 1
    store.put(b"key", b"bytes")
    assert store.get_into(b"key", iovs[0]) == 5


def test_an_entry_that_is_held_ends_at_its_deadline_and_is_not_written_later(
    adapter: KvfuseMount, client: Client, store: BlockStore, iov: GpuIov, memory: CpuMemory
) -> None:
    store.put(b"key", b"bytes")
    tell_adapter(adapter, "hold")
    with client.ring(8) as ring:
        ring.prep_get(iov, 0, store.namespace, b"key", 5, timeout=0.1)
        assert done(ring)[0] in (-errno.ETIMEDOUT, -errno.EIO)
        tell_adapter(adapter, "")
        ring.prep_get(iov, 8, store.namespace, b"key", 5)
        assert done(ring) == {0: 5}
    assert memory.bytes[:13].tobytes() == bytes(8) + b"bytes"


@pytest.mark.parametrize("end", ["iov", "ring", "client"])
def test_what_ends_while_a_list_is_held(
    adapter: KvfuseMount, device: CpuDevice, memory: CpuMemory, tmp_path: Path, end: str
) -> None:
    """It has ended when the daemon says so, and nothing is written any more."""
    with connect(adapter.point) as client, BlockStore(client, tmp_path.name) as store:
        store.put(b"key", b"bytes")
        iov, ring = client.iov_from_gpu(memory, device=device), client.ring(8)
        before = len(lists_of(adapter))
        tell_adapter(adapter, "hold")
        for number in range(3):
            ring.prep_get(iov, number * 8, store.namespace, b"key", 5, user_data=number)
        ring.submit()
        wait_until(lambda: len(lists_of(adapter)) > before, "the list")
        if end == "iov":
            iov.close()
            rows = ring.wait(3, PATIENCE_S)
            assert set(rows["result"].tolist()) <= {-errno.EIO, -errno.ECANCELED}
        elif end == "ring":
            ring.close()
        else:
            client.close()
            wait_for_no_clients(adapter)
        tell_adapter(adapter, "")
    assert not memory.bytes[:24].any()


CLIENT = """
import sys
from kvfuse.usrbio.client import BlockStore, connect
from kvfuse.usrbio.client.gpu.cpu import CpuDevice
device = CpuDevice(exports=True)
client = connect(sys.argv[1])
store = BlockStore(client, sys.argv[2])
store.put(b"key", b"bytes")
iov = client.iov_from_gpu(device.allocate(1 << 20), device=device)
assert iov.handle
ring = client.ring(8)
ring.prep_get(iov, 0, store.namespace, b"key", 5)
ring.submit()
print("submitted", flush=True)
sys.stdin.read()
"""


def test_a_client_that_is_killed_leaves_nothing(adapter: KvfuseMount, tmp_path: Path) -> None:
    wait_for_no_clients(adapter)
    before = len(lists_of(adapter))
    tell_adapter(adapter, "hold")
    words = [sys.executable, "-c", CLIENT, str(adapter.point), tmp_path.name]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"submitted\n"
        wait_until(lambda: len(lists_of(adapter)) > before, "the list")
        os.kill(process.pid, signal.SIGKILL)
    wait_for_no_clients(adapter)


def test_memory_is_registered_again_after_a_reconnect(
    client: Client, store: BlockStore, iov: GpuIov, memory: CpuMemory, adapter: KvfuseMount
) -> None:
    store.put(b"key", b"bytes")
    client.session.close()
    client.reconnect()
    assert store.get_into(b"key", iov) == 5
    assert memory.bytes[:5].tobytes() == b"bytes"
    assert iov.way is Way.DMABUF
    tell_adapter(adapter, "refuse")
    client.session.close()
    client.reconnect()
    assert iov.way is Way.PINNED
    assert store.get_into(b"key", iov.range(8)) == 5
    assert memory.bytes[8:13].tobytes() == b"bytes"


def test_memory_is_not_written_before_the_device_is_done_with_it(
    store: BlockStore, iov: GpuIov, device: CpuDevice, memory: CpuMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is caught up with before entries are submitted; where that fails, so do they."""
    store.put(b"key", b"bytes")
    is_done = threading.Event()
    iov.link.into._jobs.put((lambda: is_done.wait(PATIENCE_S), iov.link.into.mark()._future.__class__()))
    results: list[int | None] = []
    caller = threading.Thread(target=lambda: results.append(store.get_into(b"key", iov)))
    caller.start()
    caller.join(0.05)
    assert not memory.bytes[:5].any()
    is_done.set()
    caller.join(PATIENCE_S)
    assert results == [5]

    def fail(_stream: int) -> None:
        raise DeviceError("that is no stream")

    monkeypatch.setattr(iov.link.into, "follow", fail)
    with pytest.raises(DeviceError, match="no stream"):
        store.get_many_into([b"key"], [iov.range(8, 5)])
    assert not memory.bytes[8:13].any()


def test_a_daemon_that_does_not_answer_costs_the_way_alone(
    client: Client, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_in_time(*_arguments: object, **_options: object) -> None:
        raise TimeoutError("the daemon did not answer within 10 s")

    with monkeypatch.context() as patch:
        patch.setattr(client.session, "request", not_in_time)
        iov = client.iov_from_gpu(device.allocate(100), device=device)
    assert iov.way is Way.PINNED
    assert iov.why_not == {Way.DMABUF: "the daemon did not answer within 10 s"}
