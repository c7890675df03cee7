"""A ring's thread by itself: what it takes, in which order it serves, what it refuses, what it reads from maps."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from worker_lab import CHUNK, FILE, HOLED, IOV, IOV_SIZE, MIB, Lab, entries, worker_lab

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.usrbio.daemon import ring_reads
from kvfuse.usrbio.daemon.call_memory import Share, SharedPool, UnderWay
from kvfuse.usrbio.daemon.once_buffers import ONCE_MIN
from kvfuse.usrbio.daemon.once_buffers import SIZE as ONCE_SIZE
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import PARENTS_MAX, Op
from kvfuse.volume.inodes.core import ReadEpochs
from kvfuse.volume.views.content_map import MapRow


@pytest.fixture(params=[True, False], ids=["sealed", "not sealed"])
def lab(request: pytest.FixtureRequest, rng: random.Random) -> Iterator[Lab]:
    with worker_lab(rng, sealed=request.param) as lab:
        yield lab


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
    copy_many, copy = ring_reads._copy_many, ring_reads.copy

    def changing_many(*arguments: Any) -> None:
        copy_many(*arguments)
        shown.hide(0)

    def changing(*arguments: Any) -> None:
        copy(*arguments)
        shown.hide(0)

    monkeypatch.setattr(ring_reads, "_copy_many", changing_many)
    monkeypatch.setattr(ring_reads, "copy", changing)
    for count in (30, 1):
        shown.rows[0] = MapRow(shown.rows[1].source, 4096, CHUNK)
        lab.registered.calls.clear()
        assert lab.run(entries(count)) == []
        assert [call.entry.iov_offset // 4096 for call in lab.registered.calls] == list(range(count))
        for call in lab.registered.calls:
            lab.worker.completions.complete(call, 0)
        assert len(lab.results()) == count


@pytest.mark.parametrize(
    ("number", "columns"),
    [
        (errno.EINVAL, {"op": 0}),
        (errno.EINVAL, {"op": 99}),
        (errno.EINVAL, {"parent": PARENTS_MAX + 1}),
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
    assert lab.run(rows[7:8]) == [(7, -number)], "alone it is refused as well"
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
        lab.worker.completions.complete(call, size)
        lab.registered.share.give(call.size)
        ended += 1
        while lab.worker.step():
            pass
        assert len(lab.registered.calls) <= ended + 3
    assert sorted(call.entry.user_data for call in lab.registered.calls) == list(range(8))
    assert len(lab.results()) == 8
    assert lab.registered.share.take(MIB)  # all of it came back


def test_reads_past_the_page_cache_wait_for_whole_buffers(lab: Lab) -> None:
    """However short they are. Shorter ones than a granule go another way, with as much memory as they read."""
    files, share = lab.registered.files, lab.registered.share
    files[FILE] = replace(files[FILE], reads_once=True)
    files[FILE].map.rows.clear()
    places = np.arange(3) * ONCE_MIN
    assert lab.run(entries(3, length=ONCE_MIN - 1, iov_offset=places)) == []
    assert [call.entry.user_data for call in lab.registered.calls] == [0, 1, 2]
    for call in lab.registered.calls:
        lab.worker.completions.complete(call, 0)
        share.give(call.size)
    lab.registered.calls.clear()
    assert len(lab.run(entries(3, length=ONCE_MIN, iov_offset=places, user_data=np.arange(3, 6)))) == 3
    assert lab.registered.calls == []
    share.give(2 * ONCE_SIZE)  # the pool has so much more than 1 MiB
    while lab.worker.step():
        pass
    assert [call.entry.user_data for call in lab.registered.calls] == [3, 4]


def test_an_entry_that_came_alone_waits_for_memory(lab: Lab) -> None:
    """And can be cancelled then; those that come later wait behind it, or are served beside it."""
    for number in range(5):
        assert lab.run(writes(lab, 1, 300 << 10, user_data=number)) == []
    assert len(lab.registered.calls) == 3
    assert sorted(lab.run(entries(1, op=Op.CANCEL, offset=3, user_data=9))) == [(3, -errno.ECANCELED), (9, 0)]
    assert lab.run(entries(1, user_data=100)) == [(100, 4096)]
    call = lab.registered.calls[0]
    lab.worker.completions.complete(call, 300 << 10)
    lab.registered.share.give(call.size)
    while lab.worker.step():
        pass
    assert [call.entry.user_data for call in lab.registered.calls] == [0, 1, 2, 4]


def test_who_waits_for_memory_can_be_cancelled_and_runs_out_of_time(lab: Lab) -> None:
    assert lab.run(writes(lab, 4, 300 << 10)) == []
    assert len(lab.registered.calls) == 3
    assert sorted(lab.run(entries(1, op=Op.CANCEL, offset=3, user_data=9))) == [(3, -errno.ECANCELED), (9, 0)]
    assert lab.run(writes(lab, 1, 300 << 10, user_data=5, timeout_us=1)) == [(5, -errno.ETIMEDOUT)]


def test_calls_of_a_user_that_has_enough_under_way_wait_in_their_ring(lab: Lab) -> None:
    """Their ring is woken when one may begin. Reads that the thread does itself, and cancels, go on meanwhile."""
    share = lab.registered.share = Share(SharedPool(MIB), "user", UnderWay(1000, user_max=8))
    lab.submit(entries(5, op=Op.FSYNC))
    lab.submit(entries(1, op=Op.FSYNC, user_data=5, timeout_us=1))
    while lab.worker.step():
        pass
    started = lab.registered.calls
    assert [call.entry.user_data for call in started] == [0, 1]
    assert lab.results() == [(5, -errno.ETIMEDOUT)]
    assert lab.run(entries(1, user_data=6)) == [(6, 4096)]
    assert lab.run(entries(1, op=Op.CANCEL, offset=4, user_data=7)) == [(4, -errno.ECANCELED), (7, 0)]
    lab.worker._poll.poll(0)  # what came until now
    share.give(started[0].size, started[0].weight)
    assert lab.worker._poll.poll(0), "the ring is not woken"
    assert lab.worker.step()
    assert [call.entry.user_data for call in started] == [0, 1, 2]


def test_cancels_wait_for_memory(lab: Lab) -> None:
    """Each that the event loop has to look at takes some: a ring may have very many."""
    share = lab.registered.share
    assert share.take(MIB)
    assert lab.run(entries(2, op=Op.CANCEL, offset=1 << 40)) == []
    share.give(MIB)
    assert lab.run(entries(0)) == [(0, -errno.ENOENT), (1, -errno.ENOENT)]


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
    pool = SharedPool(100)
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
    assert not lab.worker.jobs.tell_when_done(lambda: told.append("idle"))
    lab.registered.at_start = lambda: answers.append(lab.worker.jobs.tell_when_done(lambda: told.append("reading")))
    lab.submit(entries(1, op=Op.FSYNC))
    lab.worker.step()  # the event loop comes in the middle of it
    assert answers == [True]
    assert told == []
    lab.worker.step()
    assert told == ["reading"]
    assert not lab.worker.jobs.tell_when_done(lambda: told.append("idle again"))


def test_who_gives_a_slot_up_is_told_by_a_ring_that_ends(lab: Lab) -> None:
    told: list[str] = []

    def end() -> None:
        assert lab.worker.jobs.tell_when_done(lambda: told.append("reading"))
        lab.worker.stop()

    lab.registered.at_start = end
    lab.submit(entries(1, op=Op.FSYNC))
    lab.worker.thread.start()
    lab.worker.thread.join(10.0)
    assert told == ["reading"]
    assert not lab.worker.jobs.tell_when_done(lambda: told.append("ended"))


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
