"""Writes of rings to bytes that change in place: as batches, straight from the client's memory to the segment."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from mounting import PATIENCE_S, temporary_mount
from ring_lab import wait_for_rings
from worker_lab import FILE, HOLED, IOV, IOV_SIZE, Lab, entries, free_of_charge, shared, worker_lab

from kvfuse.errors import EngineError
from kvfuse.native import rowwriter
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.usrbio.client import File, Iov, Ring, connect
from kvfuse.usrbio.daemon import client_memory
from kvfuse.usrbio.daemon.call import Call, Entry
from kvfuse.usrbio.daemon.call_memory import Share, SharedPool
from kvfuse.usrbio.daemon.file_calls import FileCalls
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.usrbio.daemon.write_batches import WriteBatch, WriteBatches
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import PARENTS_MAX, Op
from kvfuse.volume.api import Numbers, WritePlaces
from kvfuse.volume.views.content_map import ContentMap

KIB, MIB = 1 << 10, 1 << 20
WORDS = "volume.capacity=128MiB", "volume.segment_size=16MiB", "cache.tier_size=16MiB"
SIZE = 5 * MIB + 12345


# -- all together ------------------------------------------------------------------------------------


class Model:
    """A file, what it holds, and a ring to it."""

    def __init__(self, file: File, ring: Ring, iov: Iov, data: bytes, rng: random.Random) -> None:
        self.file, self.ring, self.iov, self.rng = file, ring, iov, rng
        self.data = bytearray(data)

    def write(self) -> None:
        """A batch of writes that do not overlap: neighbours, and others; from anywhere in the iov."""
        size = self.rng.choice([1, 700, 4 * KIB, 64 * KIB])
        places = self.rng.sample(
            range(len(self.data) // size), min(self.rng.choice([1, 5, 60]), len(self.data) // size)
        )
        if self.rng.random() < 0.5:
            places = list(range(places[0], min(places[0] + len(places), len(self.data) // size)))
        shift = self.rng.randrange(size)
        offsets = [min(place * size + shift, len(self.data) - size) for place in sorted(set(places))]
        offsets = [
            offset for number, offset in enumerate(offsets) if not number or offset >= offsets[number - 1] + size
        ]
        self.rng.shuffle(offsets)
        starts = [self.rng.randrange(self.iov.size - size) for _ in offsets]
        self.ring.prep_writes(self.iov, starts, self.file, offsets, size)
        self.ring.submit()
        assert self.ring.wait(len(offsets), PATIENCE_S)["result"].tolist() == [size] * len(offsets)
        for start, offset in zip(starts, offsets, strict=True):
            self.data[offset : offset + size] = self.iov.array[start : start + size].tobytes()


def test_a_file_that_is_written_in_place_by_rings_and_others(rng: random.Random) -> None:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        path, data = mount.point / "file", rng.randbytes(SIZE)
        path.write_bytes(data)
        with connect(mount.point) as client, client.iov(MIB) as iov, client.ring(64) as ring:
            for _ in range(3):  # between two the file is sealed
                with client.file(path, "rw") as file, path.open("r+b", buffering=0) as kernel:
                    model = Model(file, ring, iov, data, rng)
                    for _ in range(25):
                        iov.array[:] = np.frombuffer(rng.randbytes(MIB), np.uint8)
                        model.write()
                        match rng.randrange(8):
                            case 0:  # staged, in a chunk that others write in place
                                offset, piece = rng.randrange(len(model.data)), rng.randbytes(3000)
                                kernel.seek(offset)
                                kernel.write(piece)
                                model.data[offset : offset + 3000] = piece
                            case 1:
                                ring.prep_fsync(file)
                                ring.submit()
                                assert ring.wait(1, PATIENCE_S)["result"].tolist() == [0]
                            case 2:
                                size = max(4 * MIB, len(model.data) - rng.randrange(200_000))
                                kernel.truncate(size)
                                del model.data[size:]
                        offset = rng.randrange(len(model.data) - 70_000)
                        assert os.pread(kernel.fileno(), 70_000, offset) == model.data[offset : offset + 70_000]
                    data = bytes(model.data)
            assert path.read_bytes() == data
        mount.unmount()
        mount.fsck()
        mount.mount()
        assert path.read_bytes() == data


# -- the ring's thread -------------------------------------------------------------------------------


@pytest.fixture
def lab(rng: random.Random) -> Iterator[Lab]:
    with worker_lab(rng, sealed=True) as lab:
        for file in lab.registered.files.values():
            file.writable = file.map.is_in_place = True
        lab.registered.iovs[IOV].bytes[:] = 1  # there is memory
        yield lab


def test_plain_writes_to_a_file_are_one_batch(lab: Lab) -> None:
    rows = entries(12, op=Op.WRITE, handle=[FILE, HOLED, FILE] * 4)
    rows["op"][3] = Op.READ
    assert [number for number, _ in lab.run(rows)] == [3]
    numbers = {call.file.ino: call.rows["user_data"].tolist() for call in lab.registered.batches if call.file}
    assert numbers == {FILE: [0, 2, 5, 6, 8, 9, 11], HOLED: [1, 4, 7, 10]}
    assert not lab.registered.calls


@pytest.mark.parametrize(
    "columns",
    [
        {"flags": 1},
        {"iov_offset": (1 << 64) - 100},
        {"length": IOV_SIZE + 1},
        {"offset": (1 << 62) + 1},
        {"length": 0},
        {"iov": 99},
        {"handle": 99},
        {"parent": PARENTS_MAX + 1},
        {"priority": 7},
    ],
)
def test_other_writes_are_no_batch(lab: Lab, columns: dict[str, int]) -> None:
    lab.run(entries(3, **{"op": Op.WRITE, **columns}))
    assert not lab.registered.batches


def test_memory_that_may_not_be_there_is_copied_before(lab: Lab, rng: random.Random) -> None:
    lab.registered.iovs[IOV] = client_memory.MappedIov(shared(IOV_SIZE, sealed=False), IOV_SIZE, free_of_charge())
    lab.run(entries(3, op=Op.WRITE))
    assert not lab.registered.batches
    assert len(lab.registered.calls) == 3


def test_a_late_write_is_refused(lab: Lab) -> None:
    lab.worker.server.serve(entries(2, op=Op.WRITE, timeout_us=1), time.monotonic() - 1)
    assert [result for _, result in lab.results()] == [-errno.ETIMEDOUT] * 2


# -- the event loop ----------------------------------------------------------------------------------


class FakeRing:
    """A ring whose thread does everything at once, and notes it."""

    stopped = False

    def __init__(self) -> None:
        self.again: list[int] = []
        self.posted: dict[int, int] = {}
        self.answers: list[int] = []
        self.jobs: Any = self
        self.completions = self
        self.turns: Any = self
        self.seat = None

    def copying(self, seat: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    async def ask_thread(self, job: Callable[[], bool]) -> bool:
        await trio.lowlevel.checkpoint()
        return job()

    def run_here(self, job: Callable[[], None]) -> bool:
        job()
        return True

    run_in_turn = run_here

    def serve_copied(self, rows: Entries, taken_at: float) -> None:
        self.again += rows["user_data"].tolist()

    def post(self, numbers: Any, results: Any) -> None:
        self.posted |= dict(zip(np.asarray(numbers).tolist(), np.asarray(results).tolist(), strict=True))

    def complete(self, call: Call, result: int) -> None:
        self.answers.append(result)


Source = Callable[[WritePlaces], Awaitable[None]]
Write = Callable[[Source], Awaitable[Numbers]]


class FakeFiles:
    """``write``: stands for the volume's `write_in_slots`."""

    def __init__(self, write: Write) -> None:
        self.files = self
        self._write = write

    async def write_in_slots(self, handle: object, offsets: Numbers, lengths: Numbers, source: Source) -> Numbers:
        return await self._write(source)


async def stuck(source: Source) -> Numbers:
    await trio.sleep_forever()
    raise AssertionError("it sleeps for ever")


def batch_of(ring: Any, iov: Any = None, deadline: float = float("inf")) -> WriteBatch:
    rows = entries(3, op=Op.WRITE, user_data=[7, 8, 9], offset=[0, 4096, 8192])
    file = OpenFile(None, 1234, True, True, ContentMap(1234, 4096, 0))
    done = np.zeros(3, bool)
    entry = Entry(*[int(value) for value in rows[0].tolist()])
    return WriteBatch(ring, entry, deadline, file=file, iov=iov, rows=rows, done=done, scope=trio.CancelScope())


def batches_of(
    write: Callable[[Source], Awaitable[Numbers]], nursery: trio.Nursery, dropped: list[int]
) -> WriteBatches:
    files: Any = FakeFiles(write)
    nothing: Any = None
    calls = FileCalls(files, lambda done: None, lambda ring, ino: None, nothing)
    return WriteBatches(calls, nursery, Share(SharedPool(1 << 20)), dropped.append)


async def test_one_write_of_a_batch_that_waits_is_cancelled() -> None:
    ring: Any = FakeRing()
    async with trio.open_nursery() as nursery:
        batches = batches_of(stuck, nursery, [])
        batch = batch_of(ring)
        batches.start(batch)
        await trio.testing.wait_all_tasks_blocked()
        cancel = Call(ring, batch.entry._replace(op=Op.CANCEL, offset=8), float("inf"))
        assert not batches.cancel(Call(ring, cancel.entry._replace(offset=5), float("inf")))
        assert batches.cancel(cancel)
    assert ring.posted == {8: -errno.ECANCELED}
    assert ring.answers == [0]
    assert ring.again == [7, 9]


async def test_a_batch_that_waits_is_given_up_at_the_first_deadline(autojump_clock: trio.testing.MockClock) -> None:
    ring: Any = FakeRing()
    async with trio.open_nursery() as nursery:
        batches_of(stuck, nursery, []).start(batch_of(ring, deadline=time.monotonic() + 30))
    assert ring.again == [7, 8, 9]  # where each one's own deadline counts
    assert not ring.posted


async def test_a_batch_that_fails_answers_each_write() -> None:
    async def fail(source: Source) -> Numbers:
        raise EngineError("the store does not answer")

    ring: Any = FakeRing()
    async with trio.open_nursery() as nursery:
        batches_of(fail, nursery, []).start(batch_of(ring))
    assert ring.posted == dict.fromkeys((7, 8, 9), -errno.EIO)
    assert not ring.again


async def test_memory_that_goes_away_ends_its_writes_and_no_others(store: FileSegments) -> None:
    """The writes before it are done; the kernel forgets the file's bytes all the same."""
    iov = client_memory.MappedIov(shared(1 * MIB, sealed=False), 1 * MIB, free_of_charge())
    iov.bytes[:] = 5
    os.ftruncate(iov.descriptor, 8192)

    async def write(source: Source) -> Numbers:
        numbers = np.arange(3)
        with store.writing({1}) as targets:
            await source(WritePlaces(numbers, np.ones(3, np.int64), np.array([0, 100_000, 200_000]), targets))
        return numbers

    ring: Any = FakeRing()
    dropped: list[int] = []
    async with trio.open_nursery() as nursery:
        batches_of(write, nursery, dropped).start(batch_of(ring, iov))
    assert ring.posted == {7: 4096, 8: 4096, 9: -errno.EFAULT}
    assert dropped == [1234]
    buffer = bytearray(MIB)
    await store.read([Transfer(1, 0, buffer)])
    assert buffer[:4096] == buffer[100_000:104_096] == bytes([5]) * 4096
    iov.close()


# -- the segments ------------------------------------------------------------------------------------


@pytest.fixture
async def store(tmp_path: Any) -> Any:
    store = FileSegments.open(tmp_path)
    await store.create(1, MIB)
    yield store
    await store.aclose()


async def test_a_sync_has_what_threads_wrote_before_it(store: FileSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.sync()
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    with store.writing({1}) as targets:
        os.pwrite(targets[1].descriptor, b"x", 0)
        targets[1].wrote()
        await store.sync()
        os.pwrite(targets[1].descriptor, b"x", 0)
        targets[1].wrote()
    await store.sync()
    await store.sync()
    assert synced == [targets[1].descriptor] * 2
    with store.writing({1, 2}) as targets:
        assert not targets


@pytest.mark.parametrize("write", [rowwriter.write_rows, rowwriter.python_write_rows])
def test_rows_are_written_until_one_fails(
    write: Callable[[Numbers], tuple[int, int]], rng: random.Random, tmp_path: Any
) -> None:
    memory = np.frombuffer(rng.randbytes(100_000), np.uint8)
    for number in range(20):
        descriptors = [os.open(tmp_path / f"{number}-{part}", os.O_RDWR | os.O_CREAT) for part in range(2)]
        wanted = [bytearray(), bytearray()]
        rows = []
        for _ in range(rng.choice([1, 5, 600])):
            part, start, length = rng.randrange(2), rng.randrange(90_000), rng.randrange(1, 300)
            rows.append((descriptors[part], len(wanted[part]), memory.ctypes.data + start, length, -1, 0, 0))
            wanted[part] += memory[start : start + length].tobytes()
            if rng.random() < 0.1:
                wanted[part] += bytes(10)
        assert write(np.array(rows)) == (len(rows), 0)
        for part, descriptor in enumerate(descriptors):
            found = os.pread(descriptor, len(wanted[part]) + 1, 0)
            assert found == wanted[part][: len(found)]
            assert not any(wanted[part][len(found) :])
        bad = np.array([*rows, (-1, 0, memory.ctypes.data, 10, -1, 0, 0), rows[0]])
        assert write(bad) == (len(rows), errno.EBADF)
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.skipif(rowwriter.native is None, reason="built without a compiler")
def test_short_rows_go_through_the_map_of_the_file(rng: random.Random, tmp_path: Any) -> None:
    """Where its pages, and the memory, are there; in any case the file has the bytes at the end."""
    size = 64 * KIB
    source = shared(size, sealed=False)
    memory = np.frombuffer(mmap.mmap(source, size), np.uint8)
    memory[:] = np.frombuffer(rng.randbytes(size), np.uint8)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, bytes(size), 0)
    mapped = np.frombuffer(mmap.mmap(file, size), np.uint8)
    wanted = bytearray(size)
    for number in range(60):
        offset, start, length = rng.randrange(50_000), rng.randrange(50_000), rng.randrange(1, 14_000)
        if number % 10 == 9:  # the pages leave memory
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        row = file, offset, memory.ctypes.data + start, length, source, start, mapped.ctypes.data + offset
        assert rowwriter.write_rows(np.array([row])) == (1, 0)
        wanted[offset : offset + length] = memory[start : start + length].tobytes()
        assert os.pread(file, size, 0) == wanted
    os.ftruncate(source, 4096)
    gone = file, 0, memory.ctypes.data + 8192, 100, source, 8192, mapped.ctypes.data
    assert rowwriter.write_rows(np.array([gone])) == (0, errno.EFAULT)
    os.ftruncate(file, 8192)  # the map has no such page any more: a signal for whoever touches it
    row = file, 20_000, memory.ctypes.data, 100, source, 0, mapped.ctypes.data + 20_000
    assert rowwriter.write_rows(np.array([row])) == (1, 0)
    assert os.pread(file, 100, 20_000) == memory[:100].tobytes()
    for descriptor in (source, file):
        os.close(descriptor)
