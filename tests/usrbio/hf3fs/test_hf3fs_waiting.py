"""The 3FS calls where things go otherwise than planned: order, timeouts, errors, forks, a daemon that dies."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hf3fs_lab import KIB, MIB, PATIENT, iovec_of, registered, rings, run
from hypothesis import given
from hypothesis import strategies as st
from mounting import PATIENCE_S, KvfuseMount, stop_process, stopped, wait_until
from posix_calls import fails

from kvfuse.usrbio import hf3fs
from kvfuse.usrbio.hf3fs.ring import HeldOperation, InFlight

pytestmark = pytest.mark.engines("lmdb+file")  # about memory that is shared with clients: below it one pair is enough

PART = 100


@pytest.fixture
def ten_parts(folder: Path) -> Path:
    """A file whose part ``i`` is ``PART`` times the byte ``i``."""
    (folder / "parts").write_bytes(b"".join(bytes([index]) * PART for index in range(10)))
    return folder / "parts"


def part(iov: hf3fs.iovec, index: int) -> hf3fs.iovec:
    sliced: hf3fs.iovec = iov[index * PART : (index + 1) * PART]
    return sliced


def prepare_parts(ring: hf3fs.ioring, iov: hf3fs.iovec, fd: int, indexes: range) -> list[hf3fs.iovec]:
    """Reads of parts of the file, each into the same part of the memory."""
    slices = [part(iov, index) for index in indexes]
    for index, into in zip(indexes, slices, strict=True):
        ring.prepare(into, True, fd, index * PART, userdata=index)
    return slices


# -- order ------------------------------------------------------------------------------------------


class ListModel:
    """A ledger as one would write it without caring for speed."""

    def __init__(self) -> None:
        self.open: list[list[int | None]] = []  # number, result

    def ready(self) -> int:
        done = [result is not None for _, result in self.open]
        return done.index(False) if False in done else len(done)


@given(st.lists(st.tuples(st.sampled_from(["add", "complete", "take", "give up"]), st.integers(0, 30)), max_size=60))
def test_a_ledger_is_as_a_list(steps: list[tuple[str, int]]) -> None:
    ledger, model, count = InFlight(), ListModel(), 0
    slices: dict[int, hf3fs.iovec] = {}
    for step, value in steps:
        if step == "add":
            for number in range(count, count + value % 4):
                slices[number] = hf3fs.iovec(1)
                ledger.add([HeldOperation(slices[number], None, 0, f"data {number}")])
                model.open.append([number, None])
            count += value % 4
        elif step == "complete" and (unfinished := [row for row in model.open if row[1] is None]):
            row = unfinished[value % len(unfinished)]
            row[1] = value
            ledger.complete([row[0] or 0], [value])
        elif step == "take":
            taking, model.open = model.open[: min(value, model.ready())], model.open[min(value, model.ready()) :]
            assert ledger.take(len(taking)) == [slices[number or 0] for number, _ in taking]
            for number, result in taking:
                assert (slices[number or 0].result, slices[number or 0].userdata) == (result, f"data {number}")
        elif step == "give up":
            until = ledger.first + value % (len(model.open) + 1)
            ledger.give_up(until)
            model.open = [row for row in model.open if (row[0] or 0) >= until]
        assert ledger.ready_count == model.ready()
        assert ledger.all_ready == (model.ready() == len(model.open))
        assert list(ledger.unfinished) == [number for number, result in model.open if result is None]
        assert ledger.end == count


def test_slices_come_back_in_order_and_no_more_than_asked_for(shared_mount: KvfuseMount, ten_parts: Path) -> None:
    reads, _ = rings(shared_mount, 10)
    iov = iovec_of(shared_mount, 10 * PART)
    with registered(ten_parts, os.O_RDONLY) as fd:
        slices = prepare_parts(reads, iov, fd, range(10))
        assert reads.submit() is reads
        returned = reads.wait(min_results=3)
        assert returned == slices[:3]
        wait_until(lambda: len(returned.extend(reads.wait(max_results=2)) or returned) >= 5, "two more")
        returned += reads.wait(min_results=2, max_results=4, timeout=PATIENT)
        returned += reads.wait(min_results=10 - len(returned), timeout=PATIENCE_S)
        assert returned == slices
        assert [done.userdata for done in returned] == list(range(10))
        assert bytes(iov) == ten_parts.read_bytes()
        assert reads.wait() == []
        assert reads.wait(min_results=1) == []  # without a timeout nobody waits for what was never submitted


def test_slow_ones_first(shared_mount: KvfuseMount, folder: Path, rng: random.Random) -> None:
    """Big and small operations end in another order than they began."""
    reads, _ = rings(shared_mount, 64)
    iov = iovec_of(shared_mount, 64 * MIB)
    (folder / "file").write_bytes(rng.randbytes(MIB))
    with registered(folder / "file", os.O_RDONLY) as fd:
        for index in range(64):
            size = rng.choice([1, 4096, MIB])
            reads.prepare(iov[index * MIB :][:size], True, fd, 0, userdata=(index, size))
        returned = reads.submit().wait(min_results=64, timeout=PATIENT)
        assert [done.userdata[0] for done in returned] == list(range(64))
        assert all(done.result == done.userdata[1] == len(done) for done in returned)


def test_one_thread_waits_for_what_another_submits(shared_mount: KvfuseMount, ten_parts: Path) -> None:
    reads, _ = rings(shared_mount, 4)
    iov = iovec_of(shared_mount, 10 * PART)
    returned: list[hf3fs.iovec] = []

    def reap() -> None:
        while len(returned) < 10:
            returned.extend(reads.wait(min_results=1, timeout=PATIENCE_S))

    thread = threading.Thread(target=reap)
    thread.start()
    with registered(ten_parts, os.O_RDONLY) as fd:

        def prepared(index: int) -> bool:
            try:
                prepare_parts(reads, iov, fd, range(index, index + 1))
            except BlockingIOError:
                return False
            return True

        for index in range(10):
            wait_until(lambda index=index: prepared(index), "room in the ring")
            reads.submit()
        thread.join(PATIENCE_S)
    assert [(done.userdata, done.result) for done in returned] == [(index, PART) for index in range(10)]


# -- timeouts ---------------------------------------------------------------------------------------


def test_a_timeout_makes_a_short_list_and_the_rest_comes_later(shared_mount: KvfuseMount, ten_parts: Path) -> None:
    reads, _ = rings(shared_mount)
    iov = iovec_of(shared_mount, 10 * PART)
    with registered(ten_parts, os.O_RDONLY) as fd:
        slices = prepare_parts(reads, iov, fd, range(2))
        with stopped(shared_mount.pid):
            started = time.monotonic()
            assert reads.submit().wait(min_results=2, timeout=0.05) == []
            assert reads.wait(min_results=1, timeout=0) == []
            assert 0.05 <= time.monotonic() - started < PATIENCE_S / 2
        assert reads.wait(min_results=2, timeout=PATIENT) == slices
        assert bytes(iov[: 2 * PART]) == ten_parts.read_bytes()[: 2 * PART]
        slices = prepare_parts(reads, iov, fd, range(5))
        assert reads.submit().wait(min_results=7, timeout=0.05) == slices


def test_what_came_too_late_is_never_taken_for_something_new(shared_mount: KvfuseMount, ten_parts: Path) -> None:
    """Nor does it keep an entry of the ring, or write into memory that is used again."""
    reads, _ = rings(shared_mount, 3)
    iov = iovec_of(shared_mount, 10 * PART)
    with registered(ten_parts, os.O_RDONLY) as fd:
        for _ in range(10):
            with stopped(shared_mount.pid):
                old = prepare_parts(reads, iov, fd, range(3))
                assert reads.submit().wait(min_results=3, timeout=0.01) == []
                results = [each.result for each in old]
                new = prepare_parts(reads, iov, fd, range(1, 3))
                reads.submit()
            into_the_same = part(iov, 0)
            reads.prepare(into_the_same, True, fd, 9 * PART, userdata="same memory")
            assert reads.submit().wait(min_results=3, timeout=PATIENT) == [*new, into_the_same]
            assert [done.userdata for done in [*new, into_the_same]] == [1, 2, "same memory"]
            assert bytes(into_the_same) == bytes([9]) * PART
            assert [each.result for each in old] == results
        assert reads.wait(min_results=1, timeout=0) == []


def test_what_could_not_even_be_sent_is_given_up_too(shared_mount: KvfuseMount, ten_parts: Path) -> None:
    reads, _ = rings(shared_mount, 10)
    iov = iovec_of(shared_mount, 10 * PART)
    with registered(ten_parts, os.O_RDONLY) as fd:
        with stopped(shared_mount.pid):
            for index in range(4):
                slices = prepare_parts(reads, iov, fd, range(index, index + 1))
                assert reads.submit().wait(min_results=1, timeout=0.01) == []
        assert reads.wait(min_results=1, timeout=PATIENT) == slices
        assert slices[0].userdata == 3
        assert reads.wait(min_results=1, timeout=0) == []


def test_more_entries_than_a_ring_can_have(shared_mount: KvfuseMount, ten_parts: Path) -> None:
    """They are sent as there is room; the limit is the engine's own."""
    count = (1 << 16) + 1000
    reads, _ = rings(shared_mount, count)
    iov = iovec_of(shared_mount, count)
    with registered(ten_parts, os.O_RDONLY) as fd:
        for index in range(count):
            reads.prepare(iov[index : index + 1], True, fd, PART * (index % 10))
        with fails(errno.EAGAIN):
            reads.prepare(iov[:1], True, fd, 0)
        assert run(reads, count) == [1] * count
        assert bytes(iov) == (bytes(range(10)) * (count // 10 + 1))[:count]


# -- errors -----------------------------------------------------------------------------------------


def test_what_prepare_refuses(shared_mount: KvfuseMount, ten_parts: Path) -> None:
    reads, writes = rings(shared_mount, 2)
    iov = iovec_of(shared_mount, PART)
    with registered(ten_parts, os.O_RDONLY) as read_only, registered(ten_parts, os.O_WRONLY) as write_only:
        for ring, read, fd, error in (
            (reads, True, write_only, errno.EACCES),
            (writes, False, read_only, errno.EACCES),
            (reads, False, write_only, errno.EINVAL),
            (writes, True, read_only, errno.EINVAL),
            (reads, True, 12345, errno.EBADF),
        ):
            with fails(error):
                ring.prepare(iov[:], read, fd, 0)
        with pytest.raises(PermissionError):
            reads.prepare(iov[:], True, write_only, 0)
        for wrong in (iov[5:5], iov[::] + 1, iov.copy(), bytearray(PART)):
            with fails(errno.EINVAL):
                reads.prepare(wrong, True, read_only, 0)
        for offset in (-1, 1 << 63):
            with fails(errno.EINVAL):
                reads.prepare(iov[:], True, read_only, offset)
        assert run(reads, 0) == []


def test_a_full_ring(shared_mount: KvfuseMount, ten_parts: Path) -> None:
    reads, _ = rings(shared_mount, 3)
    iov = iovec_of(shared_mount, 10 * PART)
    with registered(ten_parts, os.O_RDONLY) as fd:
        slices = prepare_parts(reads, iov, fd, range(3))
        with pytest.raises(BlockingIOError):
            reads.prepare(part(iov, 3), True, fd, 0)
        assert reads.submit().wait(min_results=1, timeout=PATIENT) == slices[:1]
        slices += prepare_parts(reads, iov, fd, range(3, 4))
        with pytest.raises(BlockingIOError):
            reads.prepare(part(iov, 4), True, fd, 0)
        assert reads.submit().wait(min_results=3, timeout=PATIENT) == slices[1:]


def test_an_operation_that_fails_has_a_negative_result(shared_mount: KvfuseMount, folder: Path) -> None:
    _, writes = rings(shared_mount)
    iov = iovec_of(shared_mount, 100)
    with registered(folder / "file") as fd:
        writes.prepare(iov[:50], False, fd, 0)
        writes.prepare(iov[50:], False, fd, (1 << 63) - 10)
        first, second = run(writes, 2)
        assert first == 50
        assert second < 0
        writes.prepare(iov[:50], False, fd, 0)
    assert run(writes, 1) == [-errno.EBADF]  # not registered any more when it was submitted


def test_what_a_ring_refuses_to_be(shared_mount: KvfuseMount, tmp_path: Path) -> None:
    point = str(shared_mount.point)
    for arguments, error in (
        ({"entries": 0}, errno.EINVAL),
        ({"entries": 1, "timeout": -1}, errno.EINVAL),
        ({"entries": 1, "flags": 2}, errno.EOPNOTSUPP),
        ({"entries": 1, "hf3fs_mount_point": str(tmp_path)}, errno.ENOENT),
    ):
        with fails(error):
            hf3fs.make_ioring(**{"hf3fs_mount_point": point, **arguments})
    assert hf3fs.ioring.size_for_entries(100) > 100
    assert hf3fs.make_ioring(point, 100, priority=hf3fs.IorPriority.LOW, timeout=1, io_depth=-1, flags=1).entries == 100


# -- forks, and the end of a daemon -----------------------------------------------------------------


def test_a_child_has_a_connection_of_its_own(shared_mount: KvfuseMount, ten_parts: Path) -> None:
    reads, _ = rings(shared_mount)
    iov = iovec_of(shared_mount, 10 * PART)
    with registered(ten_parts, os.O_RDONLY) as fd:
        mine = prepare_parts(reads, iov, fd, range(2))
        reads.submit()
        prepared = prepare_parts(reads, iov, fd, range(2, 3))
        child = os.fork()
        if child == 0:
            try:
                assert reads.wait(min_results=1, timeout=0) == []
                theirs = prepare_parts(reads, iov, fd, range(5, 10))
                assert reads.submit().wait(min_results=5, timeout=PATIENT) == theirs
                assert [done.result for done in theirs] == [PART] * 5
                hf3fs.deregister_fd(fd)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert reads.submit().wait(min_results=3, timeout=PATIENT) == mine + prepared
        assert bytes(iov[: 3 * PART]) == ten_parts.read_bytes()[: 3 * PART]
        assert bytes(iov[5 * PART :]) == ten_parts.read_bytes()[5 * PART :]  # the memory is shared


def test_a_daemon_that_dies_is_noticed_and_the_next_one_served(mount: KvfuseMount) -> None:
    (mount.point / "file").write_bytes(b"content")
    fd = os.open(mount.point / "file", os.O_RDONLY)
    hf3fs.force_fsync(fd)
    hf3fs.register_fd(fd)
    reads, _ = rings(mount)
    iov = iovec_of(mount, 100)
    reads.prepare(iov[:], True, fd, 0)
    stop_process(mount.pid)
    reads.submit()
    started = time.monotonic()
    mount.kill()
    assert [done.result for done in reads.wait(min_results=1, timeout=PATIENT)] == [-errno.EPIPE]
    assert time.monotonic() - started < PATIENCE_S / 2
    reads.prepare(iov[:], True, fd, 0)
    with pytest.raises(OSError):
        reads.submit()
    hf3fs.deregister_fd(fd)
    os.close(fd)
    mount.mount()
    with registered(mount.point / "file", os.O_RDONLY) as fd:
        reads.prepare(iov[:7], True, fd, 0)
        assert run(reads, 1) == [7]
        assert bytes(iov[:7]) == b"content"


def test_nothing_is_left_of_what_was_dropped(mount: KvfuseMount) -> None:
    """Neither here nor in the daemon: rings, memory and files go with their last reference."""
    (mount.point / "file").write_bytes(b"content")

    def use() -> None:
        reads, _ = rings(mount)
        iov = iovec_of(mount, 64 * KIB)
        with registered(mount.point / "file", os.O_RDONLY) as fd:
            reads.prepare(iov[:7], True, fd, 0, userdata=iov)
            assert run(reads, 1) == [7]

    def descriptors(pid: int) -> list[str]:
        """All but those of the volume's own files, which threads open as they need them."""
        names = []
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                names.append(os.readlink(each))
        return sorted(name.split(":")[0] for name in names if not name.startswith(str(mount.volume)))

    resource_tracker.ensure_running()  # Python's, of shared memory: it has a pipe, and stays
    here_before, there_before = descriptors(os.getpid()), descriptors(mount.pid)
    for _ in range(5):
        use()
    wait_until(lambda: descriptors(os.getpid()) == here_before, "our descriptors go")
    wait_until(lambda: descriptors(mount.pid) == there_before, "the daemon's descriptors go")
