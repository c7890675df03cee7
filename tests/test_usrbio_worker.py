"""A ring's thread by itself: what it takes, in which order it serves, what it refuses, what it reads from maps."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvfuse.checksum import GRANULE_SIZE, granule_checksums
from kvfuse.usrbio import reads
from kvfuse.usrbio.call import Call
from kvfuse.usrbio.memory import Pool, Share
from kvfuse.usrbio.registry import Iov, Namespace, OpenFile
from kvfuse.usrbio.ring import Entries, RingMemory
from kvfuse.usrbio.wire import SQE, Layout, Op, Priority
from kvfuse.usrbio.worker import Worker
from kvfuse.volume.core import ReadEpochs
from kvfuse.volume.maps import ContentMap, MapRow, Source

MIB = 1 << 20
CHUNK = 4 * GRANULE_SIZE
FILE, HOLED, IOV = 1, 2, 3
IOV_SIZE = 2 * MIB


@dataclass
class Registered:
    """A connection with two files and an iov, and no event loop: calls are only noted."""

    files: dict[int, OpenFile] = field(default_factory=dict)
    iovs: dict[int, Iov] = field(default_factory=dict)
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    share: Share = field(default_factory=lambda: Share(Pool(MIB)))
    calls: list[Call] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    at_start: Callable[[], object] = lambda: None

    def start(self, worker: Worker, calls: list[Call]) -> None:
        self.calls += calls
        self.at_start()

    def in_loop(self, function: Callable[[], object]) -> None:
        function()

    def cancel(self, worker: Worker, call: Call) -> None:
        worker.complete(call, -errno.ENOENT)

    def pin(self, block: Any) -> int:
        raise AssertionError("nothing is pinned here")

    def unpin(self, pin: int) -> None:
        raise AssertionError("nothing is pinned here")

    def allocate(self, namespace: Namespace, size: int) -> Any:
        raise AssertionError("nothing is put here")

    def failed(self, reason: str) -> None:
        self.failures.append(reason)


@dataclass
class Lab:
    """A worker that the test drives itself, and the client's end of its ring."""

    worker: Worker
    client: RingMemory
    registered: Registered
    content: bytes
    """of FILE; HOLED has the same, with zeros in its second chunk"""

    def submit(self, rows: Entries) -> None:
        self.client.sq.write(rows)
        self.client.sq.publish(len(rows))

    def results(self) -> list[tuple[int, int]]:
        """Completions that came, as (user_data, result)."""
        count = self.client.cq.given - self.client.cq.position
        rows = self.client.cq.read(count)
        self.client.cq.take(count)
        return [(int(row["user_data"]), int(row["result"])) for row in rows]

    def run(self, rows: Entries) -> list[tuple[int, int]]:
        self.submit(rows)
        while self.worker.step():
            pass
        return self.results()

    def iov_bytes(self, offset: int, length: int) -> bytes:
        return self.registered.iovs[IOV].bytes[offset : offset + length].tobytes()


def entries(count: int, **columns: Any) -> Entries:
    """SQEs, by default reads of FILE into neighbouring pages, numbered."""
    rows = np.zeros(count, SQE)
    rows["op"], rows["handle"], rows["iov"], rows["length"] = Op.READ, FILE, IOV, 4096
    rows["iov_offset"] = np.arange(count) * 4096
    rows["user_data"] = np.arange(count)
    for name, value in columns.items():
        rows[name] = value
    return rows


def shared(size: int, *, sealed: bool) -> int:
    """A memfd; one that may not be sealed is as a file in /dev/shm."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealed else 0))
    os.ftruncate(descriptor, size)
    return descriptor


@pytest.fixture(params=[True, False], ids=["sealed", "not sealed"])
def lab(request: pytest.FixtureRequest, rng: random.Random) -> Iterator[Lab]:
    content = rng.randbytes(3 * CHUNK + 12345)
    descriptor = shared(len(content) + 4096, sealed=True)
    os.pwrite(descriptor, content, 4096)
    image = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    source = Source(descriptor, image)
    registered = Registered()
    for handle in (FILE, HOLED):
        shown = ContentMap(handle, CHUNK, len(content))
        for index in range(4):
            part = content[index * CHUNK : (index + 1) * CHUNK]
            sums = granule_checksums(memoryview(part))
            shown.rows[index] = MapRow(source, 4096 + index * CHUNK, len(part), sums)
        if handle == HOLED:
            shown.rows[1] = MapRow(None, 0, 0)
        registered.files[handle] = OpenFile(None, handle, True, False, shown)
    registered.iovs[IOV] = Iov(shared(IOV_SIZE, sealed=request.param), IOV_SIZE)
    memory, ring_descriptor = RingMemory.create(Layout.of(64, 4096))
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    yield Lab(
        Worker(registered, memory, bells[0], bells[1], -1), RingMemory.attach(ring_descriptor), registered, content
    )
    for number in (descriptor, ring_descriptor, *bells):
        os.close(number)


def test_reads_as_columns_and_one_by_one_give_the_same(lab: Lab, rng: random.Random) -> None:
    holed = bytearray(lab.content)
    holed[CHUNK : 2 * CHUNK] = bytes(CHUNK)
    for _ in range(60):
        count = rng.choice([1, 3, 23, 24, 40, 64])
        handle, content = rng.choice([(FILE, lab.content), (HOLED, bytes(holed))])
        aligned = rng.random() < 0.5
        length_max = IOV_SIZE // count
        offsets = [rng.randrange(len(content) + 5000) for _ in range(count)]
        lengths = [rng.randrange(1, min(length_max, rng.choice([100, 5000, length_max]))) for _ in range(count)]
        if aligned:
            offsets = [offset // 4096 * 4096 for offset in offsets]
            lengths = [4096] * count
        places = [number * length_max for number in range(count)]
        done = lab.run(entries(count, handle=handle, offset=offsets, length=lengths, iov_offset=places))
        assert len(done) == count
        for number, result in done:
            wanted = content[offsets[number] : offsets[number] + lengths[number]]
            assert result == len(wanted)
            assert lab.iov_bytes(places[number], result) == wanted
    assert not lab.registered.calls


def test_bytes_that_do_not_match_their_checksum_are_not_served(lab: Lab) -> None:
    row = lab.registered.files[FILE].map.rows[1]
    row.checksums = bytes(4) + row.checksums[4:]
    done = lab.run(entries(64, offset=np.arange(64) * 64 * 1024))
    bad = [number for number in range(64) if CHUNK <= number * 65536 < CHUNK + GRANULE_SIZE]
    assert {call.entry.user_data for call in lab.registered.calls} >= set(bad)
    assert not {number for number, _ in done} & set(bad)


def test_what_changed_during_the_copy_is_asked_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = lab.registered.files[FILE].map
    lab.run(entries(30))  # from here on the columns know the place
    copy_many, copy = reads._copy_many, reads.copy

    def changing_many(*arguments: Any) -> None:
        copy_many(*arguments)
        shown.hide(0)

    def changing(*arguments: Any) -> None:
        copy(*arguments)
        shown.hide(0)

    monkeypatch.setattr(reads, "_copy_many", changing_many)
    monkeypatch.setattr(reads, "copy", changing)
    for count in (30, 1):
        shown.rows[0] = MapRow(shown.rows[1].source, 4096, CHUNK)
        lab.registered.calls.clear()
        assert lab.run(entries(count)) == []
        assert [call.entry.user_data for call in lab.registered.calls] == list(range(count))
        for call in lab.registered.calls:
            lab.worker.complete(call, 0)
        assert len(lab.results()) == count


@pytest.mark.parametrize(
    ("number", "columns"),
    [
        (errno.EINVAL, {"op": 0}),
        (errno.EINVAL, {"op": 99}),
        (errno.EINVAL, {"reserved": 1}),
        (errno.EINVAL, {"priority": 3}),
        (errno.EINVAL, {"flags": 1}),
        (errno.EBADF, {"handle": 77}),
        (errno.EBADF, {"op": Op.WRITE}),
        (errno.EFAULT, {"iov": 77}),
        (errno.EFAULT, {"iov_offset": IOV_SIZE - 4095}),
        (errno.EFAULT, {"iov_offset": 2**64 - 4096}),
        (errno.EFAULT, {"iov_offset": 2**64 - 1}),
        (errno.EFAULT, {"length": 2**64 - 1}),
        (errno.EFAULT, {"length": IOV_SIZE + 1, "iov_offset": 0}),
        (errno.EINVAL, {"offset": 2**64 - 1}),
        (errno.EINVAL, {"offset": 2**63}),
        (errno.EBADF, {"op": Op.GET, "handle": FILE}),
    ],
)
def test_nonsense_is_refused_and_its_neighbours_are_served(lab: Lab, number: int, columns: dict[str, int]) -> None:
    rows = entries(40)
    for name, value in columns.items():
        rows[name][7] = value
    rows["iov_offset"][8:] = np.arange(8, 40) * 4096
    done = dict(lab.run(rows))
    assert done.pop(7) == -number
    assert set(done.values()) == {4096}
    assert lab.run(entries(1)) == [(0, 4096)], "the ring lives on"


def test_entries_that_write_into_the_same_bytes_are_refused(lab: Lab, rng: random.Random) -> None:
    """Whichever of two is refused, no two that are served overlap; and no more is refused than must be."""
    for _ in range(100):
        count = rng.choice([2, 5, 20, 40])
        places = [rng.randrange(0, 40) * 1000 for _ in range(count)]
        lengths = [rng.choice([0, 1, 1000, 4000]) for _ in range(count)]
        done = dict(lab.run(entries(count, iov_offset=places, length=lengths)))
        assert set(done) == set(range(count))
        served = sorted((places[n], lengths[n]) for n, result in done.items() if result >= 0 and lengths[n])
        for (place, length), (following, _) in pairwise(served):
            assert place + length <= following
        for number, result in done.items():
            if result < 0:
                assert result == -errno.EINVAL
                assert any(
                    other != number
                    and places[other] < places[number] + lengths[number]
                    and places[number] < places[other] + lengths[other]
                    for other in range(count)
                )


def test_high_comes_before_normal_before_low_and_low_does_not_starve(lab: Lab) -> None:
    kinds = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}
    order = [Priority.LOW, Priority.NORMAL, Priority.HIGH] * 5
    done = lab.run(entries(15, priority=[int(kind) for kind in order]))
    assert [kinds[order[number]] for number, _ in done] == [0] * 5 + [1] * 5 + [2] * 5
    lab.submit(entries(1, priority=Priority.LOW, user_data=1000))
    finished = False
    for turn in range(20):
        lab.submit(entries(1, priority=Priority.HIGH, user_data=turn))
        lab.worker.step()
        finished = finished or any(number == 1000 for number, _ in lab.results())
    assert finished, "twenty turns of higher ones, and the low one still waits"


def test_no_more_is_taken_than_completions_have_room_for(lab: Lab) -> None:
    lab.submit(entries(64))
    while lab.worker.step():
        pass
    lab.submit(entries(64))
    while lab.worker.step():
        pass
    assert lab.client.sq.taken == 64, "64 completions are unread: there is room for none"
    assert len(lab.results()) == 64
    while lab.worker.step():
        pass
    assert len(lab.results()) == 64
    assert not lab.registered.failures


def test_a_cancel_concerns_what_was_submitted_before_it(lab: Lab) -> None:
    """Not an entry behind it that has the same number, whatever their priorities."""
    for priority in Priority:
        rows = entries(4, priority=Priority.LOW, user_data=[7, 8, 7, 8])
        rows["op"][1], rows["offset"][1], rows["priority"][1] = Op.CANCEL, 7, priority
        assert lab.run(rows) == [(7, -errno.ECANCELED), (8, 0), (7, 4096), (8, 4096)]
        assert lab.run(rows[1:]) == [(8, -errno.ENOENT), (7, 4096), (8, 4096)]


def test_a_cancelled_entry_that_waits_is_never_served(lab: Lab) -> None:
    lab.submit(entries(3, priority=Priority.LOW))
    lab.submit(entries(1, op=Op.CANCEL, offset=1, priority=Priority.HIGH, user_data=9))
    while lab.worker.step():
        pass
    done = dict(lab.results())
    assert done == {0: 4096, 1: -errno.ECANCELED, 2: 4096, 9: 0}
    assert dict(lab.run(entries(1, op=Op.CANCEL, offset=1, user_data=9))) == {9: -errno.ENOENT}


def test_an_entry_whose_time_is_over_is_not_served(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0] + [1.0] * 1000)
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    timeouts = [0, 500_000, 2_000_000] * 5
    done = lab.run(entries(15, timeout_us=timeouts))
    for number, result in done:
        assert result == (-errno.ETIMEDOUT if timeouts[number] == 500_000 else 4096)


@pytest.mark.parametrize("word", [16, 32])
def test_overwritten_indices_break_the_ring(lab: Lab, word: int) -> None:
    lab.submit(entries(1))
    lab.client.words[word] = 1 << 40
    lab.worker.thread.start()
    lab.worker.thread.join(10)
    assert not lab.worker.thread.is_alive()
    assert lab.registered.failures == ["the ring's header or indices were overwritten"]


def test_an_overwritten_header_breaks_the_ring(lab: Lab) -> None:
    lab.client.bytes[3] ^= 1
    lab.submit(entries(1))
    lab.worker.thread.start()
    lab.worker.thread.join(10)
    assert lab.registered.failures == ["the ring's header or indices were overwritten"]


def test_memory_that_was_truncated_is_an_error(lab: Lab) -> None:
    iov = lab.registered.iovs[IOV]
    if iov.is_sealed:
        with pytest.raises(PermissionError):
            os.ftruncate(iov.descriptor, 4096)
        return
    os.ftruncate(iov.descriptor, 4096)
    assert dict(lab.run(entries(3))) == {0: 4096, 1: -errno.EFAULT, 2: -errno.EFAULT}


# -- memory for calls -------------------------------------------------------------------------------


def writes(lab: Lab, count: int, size: int, **columns: Any) -> Entries:
    lab.registered.files[FILE].writable = True
    return entries(count, op=Op.WRITE, length=size, iov_offset=0, **columns)


def test_entries_wait_for_memory(lab: Lab) -> None:
    """And go on when a call before them has ended; nothing else waits with them."""
    size = 300 << 10
    assert lab.run(writes(lab, 8, size)) == []
    assert [call.entry.user_data for call in lab.registered.calls] == [0, 1, 2]
    assert lab.run(entries(1, user_data=100)) == [(100, 4096)]  # served from the map
    ended = 0
    while ended < 8:
        call = lab.registered.calls[ended]
        lab.worker.complete(call, size)
        lab.registered.share.give(call.size)
        ended += 1
        while lab.worker.step():
            pass
        assert len(lab.registered.calls) <= ended + 3
    assert sorted(call.entry.user_data for call in lab.registered.calls) == list(range(8))
    assert len(lab.results()) == 8
    assert lab.registered.share.take(MIB)  # all of it came back


def test_who_waits_for_memory_can_be_cancelled_and_runs_out_of_time(lab: Lab) -> None:
    assert lab.run(writes(lab, 4, 300 << 10)) == []
    assert len(lab.registered.calls) == 3
    assert sorted(lab.run(entries(1, op=Op.CANCEL, offset=3, user_data=9))) == [(3, -errno.ECANCELED), (9, 0)]
    assert lab.run(writes(lab, 1, 300 << 10, user_data=5, timeout_us=1)) == [(5, -errno.ETIMEDOUT)]


def test_what_cannot_be_copied_takes_no_memory(lab: Lab) -> None:
    iov = lab.registered.iovs[IOV]
    if iov.is_sealed:
        assert lab.run(writes(lab, 1, IOV_SIZE + 1)) == [(0, -errno.EFAULT)]
    else:
        os.ftruncate(iov.descriptor, 0)
        for _ in range(10):
            assert lab.run(writes(lab, 1, 300 << 10)) == [(0, -errno.EFAULT)]
    assert lab.registered.share.take(MIB)


def test_a_share_returns_what_its_connection_did_not() -> None:
    pool = Pool(100)
    share, other = Share(pool), Share(pool)
    assert share.take(60)
    assert not other.take(60)
    share.give(10)
    assert other.take(50)
    share.close()
    assert other.take(50)
    other.close()
    assert pool.free == 100


# -- what it may be reading -------------------------------------------------------------------------


def test_who_gives_a_slot_up_is_told_when_nothing_reads_it_any_more(lab: Lab) -> None:
    told: list[str] = []
    answers: list[bool] = []
    assert not lab.worker.tell_when_done(lambda: told.append("idle"))
    lab.registered.at_start = lambda: answers.append(lab.worker.tell_when_done(lambda: told.append("reading")))
    lab.submit(entries(1, op=Op.FSYNC))
    lab.worker.step()  # the event loop comes in the middle of it
    assert answers == [True]
    assert told == []
    lab.worker.step()
    assert told == ["reading"]
    assert not lab.worker.tell_when_done(lambda: told.append("idle again"))


def test_who_gives_a_slot_up_is_told_by_a_ring_that_ends(lab: Lab) -> None:
    told: list[str] = []

    def end() -> None:
        assert lab.worker.tell_when_done(lambda: told.append("reading"))
        lab.worker.stop()

    lab.registered.at_start = end
    lab.submit(entries(1, op=Op.FSYNC))
    lab.worker.thread.start()
    lab.worker.thread.join(10.0)
    assert told == ["reading"]
    assert not lab.worker.tell_when_done(lambda: told.append("ended"))


def test_slots_wait_for_threads_that_read() -> None:
    class Thread:
        def __init__(self) -> None:
            self.told: list[Callable[[], None]] = []
            self.reads = False

        def tell_when_done(self, told: Callable[[], None]) -> bool:
            if self.reads:
                self.told.append(told)
            return self.reads

    epochs, threads, given = ReadEpochs(), [Thread(), Thread()], []
    epochs.threads.update(threads)
    epochs.retire(lambda _: given.append(1), [])
    assert given == [1]
    for thread in threads:
        thread.reads = True
    epochs.retire(lambda _: given.append(2), [])
    threads[0].reads = False
    epochs.retire(lambda _: given.append(3), [])
    assert given == [1]
    threads[0].told.pop()()
    assert given == [1]
    threads[1].told.pop(0)()
    assert given == [1, 2]
    threads[1].told.pop(0)()
    assert given == [1, 2, 3]
