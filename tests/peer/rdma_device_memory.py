"""Memory of devices filled by RDMA, whole: a client, a mount, and a daemon whose device registers a memfd.

In the machine of scripts/rdma-vm, where `test_virtual_machine` runs this. All else is as on a host with a GPU: the
request, the queue pair that is connected to itself, arenas and staging memory, lists of READs.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mounting
import numpy as np
import pytest
import trio

os.environ["KVFUSE_LAB_ADAPTER"] = "rdma"

from adapter_daemon import ADAPTER_DAEMON, MemfdDevice, lists_of, open_memfd_device, tell_adapter
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_lab import registered_things, wait_for_rings

from kvfuse.errors import InvalidArgument, Unsupported
from kvfuse.peer import rdma_memories
from kvfuse.peer.queue_pair import QueuePair
from kvfuse.peer.rdma_memories import RdmaMemories, RdmaMemory, problem
from kvfuse.usrbio.client import BlockStore, Way, connect
from kvfuse.usrbio.client.gpu.cpu import CpuDevice

SIZES = [4096, 1, 4095, 65536, 1 << 20, (1 << 20) + 3, 4 << 20]
SIZE = 8 << 20
PATIENCE_S = mounting.PATIENCE_S = 240.0
"""emulated processors start a daemon slowly, and slower where this machine does much else"""


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    words = ["capacity=128MiB,cache,admission=all,cache.tier_size=32MiB"]
    with temporary_mount(words, ADAPTER_DAEMON) as mount:
        wait_for_rings(mount)
        yield mount


def test_blocks_files_failures_and_ends(mount: KvfuseMount) -> None:
    """One test, as a mount takes long there."""
    device = CpuDevice(exports=True)
    memory = device.allocate(SIZE + 5000)
    source = np.random.default_rng(7).integers(0, 256, 4 << 20, np.uint8)
    keys = [b"%d" % size for size in SIZES]
    with (
        connect(mount.point, deadline=PATIENCE_S) as client,
        BlockStore(client, "blocks", deadline=PATIENCE_S) as store,
    ):
        assert store.put_many(keys, [source[:size] for size in SIZES]).all()
        part = memory.__cuda_array_interface__ | {"data": (memory.address + 5000, False), "shape": (SIZE,)}
        with client.iov_from_gpu(Shown(part), device=device) as iov:
            assert iov.way is Way.DMABUF, iov.why_not
            inside = memory.bytes[5000:]
            starts = np.cumsum([3, *(size + 1 for size in SIZES)]).tolist()
            places = [iov.range(start, size) for start, size in zip(starts, SIZES, strict=False)]
            memory.bytes[:] = 7
            assert store.get_many_into(keys, places).tolist() == SIZES
            for place, size in zip(places, SIZES, strict=True):
                assert np.array_equal(inside[place.offset :][:size], source[:size]), size
                assert inside[place.offset - 1] == inside[place.offset + size] == 7
            assert (memory.bytes[:5003] == 7).all()
            assert iov.link.staging._memory is None
            few = [b"k%d" % number for number in range(64)]
            store.put_many(few, [source[number : number + 4096] for number in range(64)])
            before = len(lists_of(mount))
            assert (store.get_many_into(few, [iov.range(number * 4096, 4096) for number in range(64)]) == 4096).all()
            assert all(np.array_equal(inside[n * 4096 :][:4096], source[n : n + 4096]) for n in range(64))
            lists = lists_of(mount)[before:]
            print(f"64 blocks in {len(lists)} lists")
            assert sum(lists) == 64
            assert len(lists) < 40
            path = mount.point / "file"
            path.write_bytes(source[: 1 << 20].tobytes())
            with client.file(path) as file, client.ring(8) as ring:
                ring.prep_read(iov, 1, file, 10, 1 << 20)
                ring.prep_get(iov, SIZE - 10, store.namespace, b"4096", 11, user_data=1)
                ring.submit()
                rows = [*ring.wait(1, PATIENCE_S), *ring.wait(1, PATIENCE_S)]
                assert {int(row["user_data"]): int(row["result"]) for row in rows} == {
                    0: (1 << 20) - 10, 1: -errno.EFAULT,
                }  # fmt: skip
            assert np.array_equal(inside[1:][: (1 << 20) - 10], source[10 : 1 << 20])
            tell_adapter(mount, "fail")  # the queue pair breaks
            with client.ring(8) as ring:
                ring.prep_get(iov, 0, store.namespace, b"4096", 4096)
                ring.submit()
                assert ring.wait(1, PATIENCE_S)["result"].tolist() == [-errno.EIO]
            tell_adapter(mount, "")  # and is made anew
            inside[:4096] = 0
            assert store.get_into(b"4096", iov) == 4096
            assert np.array_equal(inside[:4096], source[:4096])
            assert iov.way is Way.DMABUF
    check_killed_client(mount)


class Shown:
    def __init__(self, shown: dict) -> None:
        self.__cuda_array_interface__ = shown


def leave_a_get_under_way(point: Path, began: int) -> None:
    device = CpuDevice(exports=True)
    client = connect(point, deadline=PATIENCE_S)
    store = BlockStore(client, "blocks", deadline=PATIENCE_S)
    iov = client.iov_from_gpu(device.allocate(8 << 20), device=device)
    assert iov.handle
    ring = client.ring(8)
    ring.prep_get(iov, 0, store.namespace, b"4194304", 4 << 20)
    ring.submit()
    os.write(began, b"!")
    signal.pause()


def check_killed_client(mount: KvfuseMount) -> None:
    """What it had registered is let go of, whatever is under way."""
    before = len(lists_of(mount))
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            leave_a_get_under_way(mount.point, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    assert os.read(ours, 1) == b"!"
    os.close(ours)
    wait_until(lambda: len(lists_of(mount)) > before, "the list")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    maps = Path(f"/proc/{mount.pid}/maps")
    wait_until(lambda: not any(registered_things(mount).values()), "the end of the client")
    wait_until(lambda: "cpu-device" not in maps.read_text(), "the end of its memory")
    pairs = subprocess.run(["rdma", "resource", "show", "qp"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert [line for line in pairs.splitlines() if f"pid {mount.pid} " in line] == []


def pieces_of(memory: np.ndarray, *rows: tuple[int, int, int]) -> list[tuple[np.ndarray, int, int, int]]:
    return [(memory, *row) for row in rows]


async def test_a_list_and_what_breaks_it() -> None:
    """The adapter alone: one completion for a list, memory beyond, a pair that ended, memory that was let go of."""
    device = CpuDevice(exports=True)
    target, memory = device.allocate(SIZE), np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)
    descriptor, offset = device.export(target.address, SIZE)
    memories = RdmaMemories(open_memfd_device)
    async with memories.serving():
        with pytest.raises(InvalidArgument, match="bytes at"):
            await memories.add(descriptor, 1, SIZE)
        one: RdmaMemory = await memories.add(descriptor, offset, SIZE)
        assert await one.fill(pieces_of(memory, *((n * 8192, 4096, n * 5000) for n in range(100))), PATIENCE_S)
        assert all(np.array_equal(target.bytes[n * 5000 :][:4096], memory[n * 8192 :][:4096]) for n in range(100))
        assert isinstance(one.pair, QueuePair)
        counters = one.pair.counters
        assert (counters.reads, counters.batches, counters.completions) == (101, 2, 2)
        assert await one.fill(pieces_of(memory, (1, (4 << 20) + 7, 3)), PATIENCE_S)  # across registered pieces
        assert np.array_equal(target.bytes[3:][: (4 << 20) + 7], memory[1:][: (4 << 20) + 7])
        assert not await one.fill(pieces_of(memory, (0, 4096, SIZE - 4095)), PATIENCE_S)
        assert not await one.fill(pieces_of(memory, (0, 4096, 0)), 0)
        first = one.pair
        first.end("the test")
        assert await one.fill(pieces_of(memory, (0, 4096, 0)), PATIENCE_S)
        assert one.pair is not first
        await one.aclose()
        assert not await one.fill(pieces_of(memory, (0, 4096, 0)), PATIENCE_S)
    os.close(descriptor)


async def test_the_kernel_of_this_machine_says_why_it_cannot() -> None:
    assert rdma_memories.missing(load=True) == ""
    assert "rxe0 registers no dma-buf" in problem()
    assert problem(open_memfd_device) == ""
    memories = RdmaMemories()
    descriptor = os.memfd_create("no dma-buf")
    async with memories.serving():
        assert memories.lacks == ""
        with pytest.raises(Unsupported, match="rxe0 registers no dma-buf"):
            await memories.add(descriptor, 0, 4096)
        assert "rxe0 registers no dma-buf" in memories.lacks
        with pytest.raises(OSError, match="not one of a dma-buf"):
            memories.check(descriptor)
    assert issubclass(MemfdDevice, rdma_memories.RdmaDevice)
    await trio.lowlevel.checkpoint()
    os.close(descriptor)
