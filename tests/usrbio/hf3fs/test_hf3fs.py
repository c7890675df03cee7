"""The calls that engines make of 3FS's rings, on a real mount. And the distribution that gives them their name."""

from __future__ import annotations

import errno
import inspect
import os
import random
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hf3fs_lab import KIB, MIB, PATIENT, iovec_of, registered, rings, run, shared
from mounting import PATIENCE_S, KvfuseMount
from places import ROOT
from posix_calls import fails, opened

from kvfuse.usrbio import hf3fs
from kvfuse.usrbio.hf3fs import api

pytestmark = pytest.mark.engines("lmdb+file")  # about memory that is shared with clients: below it one pair is enough


# -- the surface ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("register_fd", "fd, flags=0"),
        ("deregister_fd", "fd"),
        ("force_fsync", "fd"),
        ("extract_mount_point", "path"),
        ("hardlink", "target, link_name"),
        ("punch_hole", "filename, start, end, flags=0"),
        ("make_iovec", "shm, hf3fs_mount_point, block_size=0, numa=-1"),
        (
            "make_ioring",
            "hf3fs_mount_point, entries, for_read=True, io_depth=0, priority=None, timeout=None, numa=-1, flags=0",
        ),
        ("read_file", "fn, hf3fs_mount_point=None, block_size=1073741824, off=0, priority=None, cb=None"),
        ("ioring.prepare", "self, iov, read, fd, off, userdata=None"),
        ("ioring.submit", "self"),
        ("ioring.wait", "self, *, max_results=0, min_results=0, timeout=None"),
        ("ioring.size_for_entries", "entries"),
    ],
)
def test_signatures(name: str, signature: str) -> None:
    call: Any = hf3fs
    for part in name.split("."):
        call = getattr(call, part)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(call).parameters.values()]
    assert str(inspect.Signature(parameters)) == f"({signature})"


def test_priorities() -> None:
    assert (hf3fs.IorPriority.HIGH, hf3fs.IorPriority.NORMAL, hf3fs.IorPriority.LOW) == (-1, 0, 1)


def test_the_module_of_that_name_is_there_only_when_it_was_asked_for(tmp_path: Path) -> None:
    imports = "import multiprocessing; from hf3fs_fuse.io import *; multiprocessing.shared_memory.SharedMemory"
    assert subprocess.run([sys.executable, "-c", imports], cwd=tmp_path, capture_output=True).returncode == 1
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    package = tmp_path / "source"
    subprocess.run(["cp", "-r", ROOT / "compat" / "hf3fs-fuse", package], check=True)
    subprocess.run([sys.executable, *install, tmp_path / "installed", package], check=True)
    program = f"{imports}; import hf3fs_fuse.io as m, kvfuse.usrbio.hf3fs as h; assert m.ioring is h.ioring"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'installed'}:{ROOT}"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)


def test_the_example(shared_mount: KvfuseMount) -> None:
    subprocess.run([sys.executable, ROOT / "examples" / "hf3fs_style.py", shared_mount.point], check=True)
    assert (shared_mount.point / "pages").stat().st_size == 4 * MIB


# -- the mount and its files ------------------------------------------------------------------------


def test_extract_mount_point(shared_mount: KvfuseMount, folder: Path, tmp_path: Path) -> None:
    point = str(shared_mount.point)
    assert hf3fs.extract_mount_point(point) == point
    assert hf3fs.extract_mount_point(f"{point}/") == point
    assert hf3fs.extract_mount_point(str(folder)) == point
    assert hf3fs.extract_mount_point(str(folder / "not" / "there")) == point
    (tmp_path / "link").symlink_to(folder)
    assert hf3fs.extract_mount_point(str(tmp_path / "link")) == point
    assert hf3fs.extract_mount_point(str(tmp_path)) is None


def test_only_files_of_a_mount_are_registered_and_each_once(folder: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with opened(tmp_path / "elsewhere", os.O_RDWR | os.O_CREAT) as other, fails(errno.EBADF):
        hf3fs.register_fd(other)
    with fails(errno.EBADF):
        hf3fs.register_fd(reading)
    os.close(reading)
    os.close(writing)
    with fails(errno.EBADF):
        hf3fs.register_fd(reading)
    hf3fs.deregister_fd(reading)
    with registered(folder / "file") as fd, fails(errno.EINVAL):
        hf3fs.register_fd(fd)


def test_hardlink_fsync_and_holes(folder: Path) -> None:
    (folder / "file").write_bytes(b"x" * 3 * MIB)
    hf3fs.hardlink(str(folder / "file"), str(folder / "other"))
    assert (folder / "other").stat().st_nlink == 2
    hf3fs.punch_hole(str(folder / "other"), [1, MIB + 7], [3, 2 * MIB + 9])
    hf3fs.punch_hole(str(folder / "other"), [3 * MIB - 1], [5 * MIB])
    expected = bytearray(b"x" * 3 * MIB)
    expected[1:3] = bytes(2)
    expected[MIB + 7 : 2 * MIB + 9] = bytes(MIB + 2)
    expected[-1] = 0
    assert (folder / "file").read_bytes() == expected
    with opened(folder / "file", os.O_RDWR) as fd:
        hf3fs.punch_hole(fd, [0], [MIB])
        assert hf3fs.force_fsync(fd) == 0
        assert os.pread(fd, MIB, 0) == bytes(MIB)
    with pytest.raises(RuntimeError):
        hf3fs.punch_hole(str(folder / "file"), [0], [1, 2])
    with fails(errno.ENOENT):
        hf3fs.hardlink(str(folder / "absent"), str(folder / "name"))


def test_read_file(folder: Path, rng: random.Random) -> None:
    content = rng.randbytes(300 * KIB + 5)
    path = str(folder / "file")
    Path(path).write_bytes(content)
    assert hf3fs.read_file(path) == content
    assert hf3fs.read_file(path, block_size=100 * KIB, off=7) == content[7:]
    assert hf3fs.read_file(path, block_size=len(content)) == content
    assert hf3fs.read_file(path, off=len(content)) == b""
    seen: list[tuple[int, bytes]] = []
    assert hf3fs.read_file(path, block_size=200 * KIB, cb=lambda block, at: seen.append((at, bytes(block)))) is None
    assert seen == [(0, content[: 200 * KIB]), (200 * KIB, content[200 * KIB :])]
    offsets: list[int] = []

    def jump(block: memoryview, at: int) -> object:
        offsets.append(at)
        return at + 7 if len(offsets) < 3 else True

    hf3fs.read_file(path, block_size=KIB, cb=jump, priority=hf3fs.IorPriority.HIGH)
    assert offsets == [0, 7, 14]
    with fails(errno.ENOENT):
        hf3fs.read_file(str(folder / "absent"))
    (folder / "empty").touch()
    assert hf3fs.read_file(str(folder / "empty")) == b""
    assert not api.registered


# -- slices -----------------------------------------------------------------------------------------


def test_slices_are_writable_buffers_of_the_shared_memory(shared_mount: KvfuseMount) -> None:
    with shared(MIB) as memory:
        iov = hf3fs.make_iovec(memory, str(shared_mount.point))
        memory.unlink()
        part = iov[10:20]
        memoryview(part)[2:5] = b"abc"
        assert bytes(memory.buf[10:20]) == b"\0\0abc\0\0\0\0\0"
        memory.buf[10] = 7
        assert part.tobytes()[0] == 7
        assert memoryview(part).format == "B"
        part[:2] = b"xy"
        assert bytes(iov[10:13]) == b"xya"
    memoryview(iov.iov)[:4] = b"last"
    assert bytes(iov)[:4] == b"last"
    assert len(memoryview(iov[:])) == MIB


def test_slices_of_slices_and_wrong_ones(shared_mount: KvfuseMount) -> None:
    iov = iovec_of(shared_mount, 1000)
    part = iov[100:-100][50:60]
    assert (part.base_off, len(part), part.result, part.userdata) == (150, 10, 0, None)
    assert len(iov[5:]) == 995
    assert len(iov[2000:]) == 0
    for wrong in (slice(None, None, 2), slice(10, 0, -1)):
        with pytest.raises(ValueError):
            iov[wrong]


def test_slices_are_told_apart_as_objects(shared_mount: KvfuseMount) -> None:
    iov = iovec_of(shared_mount, 100)
    first, second = iov[:10], iov[:10]
    assert first != second
    assert {first: 1}[first] == 1
    assert second not in [first]
    assert first
    assert "10 bytes at 0" in repr(first)


# -- reading and writing ----------------------------------------------------------------------------


def test_what_is_written_is_read_through_rings_and_files(
    shared_mount: KvfuseMount, folder: Path, rng: random.Random
) -> None:
    """Any offset and length, in batches, against a plain model."""
    reads, writes = rings(shared_mount, 16)
    iov = iovec_of(shared_mount, 4 * MIB)
    model = bytearray()
    with registered(folder / "file") as fd:
        for _ in range(10):
            end = 0
            for _ in range(rng.randint(1, 16)):
                length = rng.choice([1, 4095, 4096, rng.randint(1, 200 * KIB)])
                offset = rng.randint(0, 3 * MIB)
                part = iov[end : end + length]
                end += length
                memoryview(part)[:] = data = rng.randbytes(length)
                writes.prepare(part, False, fd, offset)
                assert run(writes, 1) == [length]  # one at a time: they overlap
                model.extend(bytes(max(0, offset + length - len(model))))
                model[offset : offset + length] = data
            spans = [(rng.randint(0, len(model) + KIB), rng.randint(1, 200 * KIB)) for _ in range(16)]
            for index, (offset, length) in enumerate(spans):
                reads.prepare(iov[index * 200 * KIB :][:length], True, fd, offset, userdata=index)
            for done in reads.submit().wait(min_results=16, timeout=PATIENT):
                offset, length = spans[done.userdata]
                assert bytes(done)[: done.result] == model[offset : offset + length]
        assert os.pread(fd, 8 * MIB, 0) == model
        os.pwrite(fd, b"through the file", 5)
        reads.prepare(iov[:16], True, fd, 5)
        assert run(reads, 1) == [16]
        assert bytes(iov[:16]) == b"through the file"


def test_ends_and_holes(shared_mount: KvfuseMount, folder: Path) -> None:
    reads, writes = rings(shared_mount)
    iov = iovec_of(shared_mount, MIB)
    with registered(folder / "file") as fd:
        memoryview(iov)[:3] = b"end"
        writes.prepare(iov[:3], False, fd, 10 * MIB)
        assert run(writes, 1) == [3]
        assert os.fstat(fd).st_size == 10 * MIB + 3
        memoryview(iov)[:] = b"?" * MIB
        for offset in (MIB, 10 * MIB - 5, 10 * MIB + 3, 20 * MIB):
            reads.prepare(iov[: 64 * KIB] if offset == MIB else iov[64 * KIB :][:100], True, fd, offset)
            count = run(reads, 1)[0]
            assert count == {MIB: 64 * KIB, 10 * MIB - 5: 8}.get(offset, 0)
            if offset == MIB:
                assert not any(bytes(iov[: 64 * KIB]))
            elif count:
                assert bytes(iov[64 * KIB :][:9]) == b"\0\0\0\0\0end?"


def test_a_registered_file_may_be_renamed_and_unlinked(shared_mount: KvfuseMount, folder: Path) -> None:
    reads, _ = rings(shared_mount)
    iov = iovec_of(shared_mount, 100)
    (folder / "file").write_bytes(b"content")
    with registered(folder / "file", os.O_RDONLY) as fd:
        for change in (lambda: os.rename(folder / "file", folder / "other"), lambda: os.unlink(folder / "other")):
            change()
            (folder / "file").write_bytes(b"another")
            reads.prepare(iov[:], True, fd, 0)
            assert run(reads, 1) == [7]
            assert bytes(iov[:7]) == b"content"


def test_sixteen_descriptors_of_a_file(shared_mount: KvfuseMount, folder: Path) -> None:
    reads, writes = rings(shared_mount, 16)
    iov = iovec_of(shared_mount, 16 * KIB)
    with ExitStack() as stack:
        fds = [stack.enter_context(registered(folder / "file")) for _ in range(16)]
        for index, fd in enumerate(fds):
            memoryview(iov)[index * KIB : (index + 1) * KIB] = bytes([index]) * KIB
            writes.prepare(iov[index * KIB : (index + 1) * KIB], False, fd, index * KIB)
        assert run(writes, 16) == [KIB] * 16
        for index, fd in enumerate(fds):
            reads.prepare(iov[index * KIB : (index + 1) * KIB], True, fd, (15 - index) * KIB)
        assert run(reads, 16) == [KIB] * 16
        assert bytes(iov) == b"".join(bytes([15 - index]) * KIB for index in range(16))


def test_thirty_two_rings_with_memory_of_their_own_in_threads(
    shared_mount: KvfuseMount, folder: Path, seed: int
) -> None:
    (folder / "file").write_bytes(content := random.Random(seed).randbytes(MIB))
    wrong: list[str] = []

    def engine(number: int) -> None:
        rng = random.Random(seed + number)
        ring, iov = hf3fs.make_ioring(str(shared_mount.point), 4), iovec_of(shared_mount, 64 * KIB)
        with registered(folder / "file", os.O_RDONLY) as fd:
            for _ in range(8):
                offsets = [rng.randrange(MIB - 16 * KIB) for _ in range(4)]
                for index, offset in enumerate(offsets):
                    ring.prepare(iov[index * 16 * KIB :][: 16 * KIB], True, fd, offset, offset)
                for done in ring.submit().wait(min_results=4, timeout=PATIENT):
                    if bytes(done) != content[done.userdata : done.userdata + 16 * KIB]:
                        wrong.append(f"ring {number} at {done.userdata}: {done.result}")

    threads = [threading.Thread(target=engine, args=[number]) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong
