"""What only the file engine promises: reserved space, few threads and calls, O_DIRECT, full disks, kill -9, memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

import kvfuse
from kvfuse.checksum import granule_checksums
from kvfuse.errors import EngineError, EngineFull, EngineReadOnly, MediumError, ReadOnly
from kvfuse.remote.segments.api import Fetch, SegmentInfo, Transfer
from kvfuse.remote.segments.file import direct, fileio
from kvfuse.remote.segments.file.store import NOWAIT_BYTES_MAX, VIEW_BYTES_MAX, FileSegments

MIB = 1 << 20
SIZE = 8 * MIB
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(next(iter(kvfuse.__path__))).parent)}

WRITER = """
import sys, trio
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file.store import FileSegments
async def main():
    store = FileSegments.open(sys.argv[1])
    number = 0
    while True:
        number += 1
        await store.create(1000 + number, 1 << 20)
        await store.write([Transfer(1000 + number, 0, b"%8d" % number * (1 << 17))])
        print(number, flush=True)
trio.run(main)
"""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileSegments]:
    """With segment 1 of SIZE bytes."""
    store = FileSegments.open(tmp_path / "segments")
    await store.create(1, SIZE)
    yield store
    await store.aclose()


@pytest.fixture
async def direct_store(tmp_path: Path) -> AsyncIterator[FileSegments]:
    store = FileSegments.open(tmp_path / "segments", direct=True)
    await store.create(1, SIZE)
    yield store
    await store.aclose()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Mounts a real file system of a type, with options."""
    points: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        point = tmp_path / f"{kind}-{len(points)}"
        point.mkdir()
        subprocess.run(["mount", "-t", kind, "-o", options, kind, point], check=True)
        points.append(point)
        return point

    yield mount
    for point in points:
        subprocess.run(["umount", "--lazy", point], check=True)  # a failed test may hold it


class Calls:
    """Counts the calls of a function, and passes them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.count = 0
        self._call = getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        return self._call(*arguments, **options)


def segment_path(store: FileSegments, segment: int = 1) -> Path:
    return store._places.path / f"{segment:08x}.seg"


def evict(store: FileSegments, offset: int, length: int) -> None:
    """Drop clean pages from the page cache; those that are mapped would stay."""
    store._files[1].drop_mapped_pages()
    os.posix_fadvise(store._files[1].fd, offset, length, os.POSIX_FADV_DONTNEED)


async def read(store: FileSegments, offset: int, length: int, segment: int = 1) -> bytes:
    buffer = bytearray(length)
    await store.read([Transfer(segment, offset, buffer)])
    return bytes(buffer)


# -- past the page cache ------------------------------------------------------------------------------


@contextmanager
def has_no_direct_reads(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """As on a file system that refuses O_DIRECT (EINVAL), or the blocks of a read by it (0)."""
    with monkeypatch.context() as changed:
        if number:
            opens = os.open

            def refuse(path: Any, flags: int, *rest: Any) -> int:
                if flags & os.O_DIRECT:
                    raise OSError(number, os.strerror(number))
                return opens(path, flags, *rest)

            changed.setattr(os, "open", refuse)
        else:
            fill = fileio.fill_and_sum
            changed.setattr(
                fileio,
                "fill_and_sum",
                lambda fd, *rest: (
                    (b"", errno.EINVAL) if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else fill(fd, *rest)
                ),
            )
        yield


async def test_fetched_bytes_stay_out_of_the_page_cache(store: FileSegments, rng: random.Random) -> None:
    data = rng.randbytes(2 * MIB + 5)
    await store.write([Transfer(1, MIB, data)])
    await store.sync()
    evict(store, 0, SIZE)
    target, threads = memoryview(mmap.mmap(-1, 3 * MIB)), trio.CapacityLimiter(1)
    assert await store.fetch([Fetch(1, MIB, len(data), target)], threads) == [granule_checksums(data)]
    assert target[: len(data)] == data
    assert store.view(1, MIB, 4096) is None
    assert await store.warm(1, MIB, len(data), threads) == granule_checksums(data)
    assert store.view(1, MIB, len(data)) == data
    await store.write([Transfer(1, MIB, b"new")])  # not on the disk yet
    await store.fetch([Fetch(1, MIB, len(data), target)], threads)
    assert target[: len(data)] == b"new" + data[3:]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EMFILE, 0])
async def test_without_direct_reads_bytes_are_fetched_through_the_page_cache(
    store: FileSegments, rng: random.Random, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    data = rng.randbytes(MIB + 5)
    await store.write([Transfer(1, MIB, data)])
    target = memoryview(mmap.mmap(-1, 2 * MIB))
    with has_no_direct_reads(monkeypatch, number):
        assert await store.fetch([Fetch(1, MIB, len(data), target)], trio.CapacityLimiter(1)) == [
            granule_checksums(data)
        ]
    assert target[: len(data)] == data


async def test_a_file_that_is_too_short_fails_a_fetch(store: FileSegments) -> None:
    os.truncate(segment_path(store), MIB)
    target, threads = memoryview(mmap.mmap(-1, MIB)), trio.CapacityLimiter(1)
    with pytest.raises(MediumError, match="shorter"):
        await store.fetch([Fetch(1, MIB // 2, MIB, target)], threads)
    assert store.counters.failed_reads == 1
    assert await store.fetch([Fetch(1, MIB // 2, 100, target)], threads) == [granule_checksums(bytes(100))]


# -- sources ------------------------------------------------------------------------------------------


def resident_bytes(address: int) -> int:
    """Of the mapping at an address, as this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    raise LookupError(f"nothing is mapped at {address:x}")


async def test_a_source_stays_mapped_when_views_give_up_their_pages(store: FileSegments) -> None:
    await store.write([Transfer(1, 0, b"x" * SIZE)])
    source = store.source(1)
    assert source is not None
    assert not source[1].sum() % ord("x")  # touches every page
    mapped = resident_bytes(source[1].ctypes.data)
    assert mapped == SIZE
    for _ in range(VIEW_BYTES_MAX // SIZE + 1):
        assert store.view(1, 0, SIZE) is not None
    assert resident_bytes(source[1].ctypes.data) == mapped


async def test_a_reader_of_a_store_has_sources(store: FileSegments) -> None:
    await store.write([Transfer(1, 100, b"data")])
    reader = FileSegments.open(store._places.path, read_only=True)
    source = reader.source(1)
    assert source is not None
    assert source[1][99:105].tobytes() == b"\0data\0"
    await reader.aclose()


async def test_where_no_mapping_is_left_there_is_no_source(
    store: FileSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "too many mappings")

    monkeypatch.setattr(fileio.mmap, "mmap", refuse)
    assert store.source(1) is None
    assert len(os.listdir("/proc/self/fd")) == before


# -- making -------------------------------------------------------------------------------------------


def allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


async def test_the_whole_size_is_reserved(store: FileSegments) -> None:
    assert allocated_bytes(segment_path(store)) >= SIZE
    assert segment_path(store).stat().st_size == SIZE


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
async def test_file_systems_that_cannot_preallocate(mount: Callable[[str, str], Path], kind: str) -> None:
    """ramfs cannot, tmpfs can: where nothing else reserves the space zeros are written."""
    store = FileSegments.open(mount(kind, "size=32m"))
    await store.create(1, SIZE)
    assert allocated_bytes(segment_path(store)) >= SIZE or kind == "ramfs"  # which counts no blocks
    assert await read(store, 0, SIZE) == bytes(SIZE)
    await store.aclose()


@pytest.mark.root
async def test_a_full_disk_leaves_no_part_of_a_segment(mount: Callable[[str, str], Path]) -> None:
    point = mount("tmpfs", "size=16m")
    store = FileSegments.open(point)
    await store.create(1, SIZE)
    with pytest.raises(EngineFull, match=r"00000002\.seg"):
        await store.create(2, SIZE * 2)
    assert await store.list() == [SegmentInfo(1, SIZE)]
    assert [path.name for path in point.iterdir()] == ["00000001.seg"]
    await store.write([Transfer(1, 0, b"x" * SIZE)])  # reserved: a full disk does not matter
    await store.create(2, SIZE)
    await store.aclose()


@pytest.mark.root
async def test_hosts_that_make_the_same_segment_reserve_it_once(mount: Callable[[str, str], Path]) -> None:
    point = mount("tmpfs", "size=12m")
    stores = [FileSegments.open(point) for _ in range(6)]
    async with trio.open_nursery() as nursery:
        for store in stores:
            nursery.start_soon(store.create, 1, SIZE)
    assert [path.name for path in point.iterdir()] == ["00000001.seg"]
    for store in stores:
        await store.aclose()


async def test_a_segment_is_made_though_another_process_keeps_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fileio, "TURN_SECONDS", 0.0)
    store = FileSegments.open(tmp_path)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    await store.create(1, SIZE)
    os.close(descriptor)
    assert await store.list() == [SegmentInfo(1, SIZE)]
    await store.aclose()


async def test_segments_that_another_host_made_are_listed(tmp_path: Path) -> None:
    one, two = FileSegments.open(tmp_path), FileSegments.open(tmp_path)
    await one.create(3, SIZE)
    assert await two.list() == [SegmentInfo(3, SIZE)]
    for store in (one, two):
        await store.aclose()


async def test_leftovers_of_a_creation_are_cleared_and_other_files_stay(tmp_path: Path) -> None:
    for name in ("00000001.new", "notes.txt", "1.seg", "zzzzzzzz.seg"):
        (tmp_path / name).write_bytes(b"x")
    reader = FileSegments.open(tmp_path, read_only=True)
    await reader.aclose()
    assert (tmp_path / "00000001.new").exists()
    store = FileSegments.open(tmp_path)
    assert await store.list() == []
    await store.aclose()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.seg", "notes.txt", "zzzzzzzz.seg"]


async def test_a_read_only_store_reads_and_refuses_the_rest(store: FileSegments, tmp_path: Path) -> None:
    await store.write([Transfer(1, 5, b"data")])
    reader = FileSegments.open(tmp_path / "segments", read_only=True)
    assert await read(reader, 5, 4) == b"data"
    assert reader.view(1, 5, 4) is None
    for refused in (
        reader.create(2, MIB),
        reader.remove(1),
        reader.write([Transfer(1, 0, b"x")]),
    ):
        with pytest.raises(ReadOnly):
            await refused
    await reader.aclose()
    with pytest.raises(EngineError, match="absent"):
        FileSegments.open(tmp_path / "absent", read_only=True)


# -- threads and merging ------------------------------------------------------------------------------


async def test_resident_reads_stay_on_the_loop_and_others_share_one_thread(
    store: FileSegments, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rng.randbytes(SIZE)
    await store.write([Transfer(1, 0, data)])
    await store.sync()
    hops = Calls(monkeypatch, trio.to_thread, "run_sync")
    assert await read(store, 100, MIB) == data[100 : 100 + MIB]
    if hops.count:
        pytest.skip("this file system has no RWF_NOWAIT")
    evict(store, 2 * MIB, 4 * MIB)
    batch = [Transfer(1, index * MIB // 2, bytearray(10_000)) for index in range(16)]
    await store.read(batch)
    assert hops.count == 1
    assert 0 < store.counters.thread_reads <= 8
    assert all(buffer == data[offset : offset + len(buffer)] for _, offset, buffer in batch)


async def test_a_partly_resident_transfer_is_completed(store: FileSegments, rng: random.Random) -> None:
    data = rng.randbytes(SIZE)
    await store.write([Transfer(1, 0, data)])
    await store.sync()
    for start in range(0, SIZE, MIB):
        evict(store, start + MIB // 3, MIB // 3)
    for start in range(0, SIZE, MIB):
        halves = [Transfer(1, start, bytearray(MIB // 2)), Transfer(1, start + MIB // 2, bytearray(MIB // 2))]
        await store.read(halves)
        assert b"".join(half.buffer for half in halves) == data[start : start + MIB]


async def test_a_batch_too_large_for_the_loop_goes_to_a_thread(store: FileSegments) -> None:
    await read(store, 0, SIZE)
    before = store.counters.thread_reads
    await read(store, 0, NOWAIT_BYTES_MAX + 1)
    assert store.counters.thread_reads == before + 1


async def test_neighbours_are_merged_into_few_system_calls(
    store: FileSegments, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rng.randbytes(1500 * 100)
    batch = [Transfer(1, start, data[start : start + 100]) for start in range(0, len(data), 100)]
    rng.shuffle(batch)
    writes, hops = Calls(monkeypatch, os, "pwritev"), Calls(monkeypatch, trio.to_thread, "run_sync")
    await store.write(batch)
    assert (writes.count, hops.count) == (2, 1)
    assert await read(store, 0, len(data)) == data


# -- O_DIRECT -----------------------------------------------------------------------------------------


async def test_aligned_direct_transfers_need_no_bounce_buffer(
    direct_store: FileSegments, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounced = [Calls(monkeypatch, direct, name) for name in ("read", "write")]
    memory = mmap.mmap(-1, 2 * MIB)
    memory[:] = rng.randbytes(2 * MIB)
    view = memoryview(memory)
    back = mmap.mmap(-1, 2 * MIB)
    await direct_store.write([Transfer(1, 4096, view[:MIB]), Transfer(1, 4096 + MIB, view[MIB:])])
    await direct_store.read([Transfer(1, 4096, memoryview(back))])
    assert back[:] == memory[:]
    assert [calls.count for calls in bounced] == [0, 0]
    await direct_store.write([Transfer(1, 4096, view[1:])])
    assert [calls.count for calls in bounced] == [0, 1]


async def test_neighbours_share_a_bounce_buffer(
    direct_store: FileSegments, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of any size are one direct write, and do not change what is around them."""
    written = Calls(monkeypatch, direct, "write_fully")
    image = bytearray(rng.randbytes(3 * MIB))
    await direct_store.write([Transfer(1, 0, bytes(image))])
    for _ in range(20):
        written.count = 0
        start = end = rng.randrange(MIB)
        batch = []
        for size in rng.choices([1, 4095, 4096, 70_000, 300_001], k=rng.randrange(1, 6)):
            data = rng.randbytes(size)
            batch.append(Transfer(1, end, data))
            image[end : end + size] = data
            end += size
        await direct_store.write(rng.sample(batch, len(batch)))
        assert written.count == -(-(end - start // 4096 * 4096) // MIB)
        back = bytearray(len(image))
        cuts = [0, *sorted(rng.choices(range(len(image)), k=4)), len(image)]
        await direct_store.read([Transfer(1, low, memoryview(back)[low:high]) for low, high in pairwise(cuts)])
        assert back == image


async def test_direct_segments_are_whole_blocks(direct_store: FileSegments, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4096"):
        await direct_store.create(2, MIB + 1)
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "00000001.seg").write_bytes(b"x" * 5000)
    with pytest.raises(EngineError, match="5000"):
        FileSegments.open(odd, direct=True)


# -- errors -------------------------------------------------------------------------------------------


async def test_a_file_cut_short_behind_our_back_is_an_error_with_its_place(store: FileSegments) -> None:
    os.truncate(segment_path(store), MIB)
    with pytest.raises(EngineError, match=r"00000001\.seg at 1048576"):
        await read(store, MIB, 10)
    assert await read(store, 0, 10) == bytes(10)


async def test_errors_of_the_system_become_the_projects(store: FileSegments) -> None:
    """The segment's descriptor is exchanged for devices that fail."""
    fd = store._files[1].fd
    for device, flags, kind in (("/dev/full", os.O_RDWR, EngineFull), ("/dev/null", os.O_RDONLY, EngineError)):
        broken = os.open(device, flags)
        os.dup2(broken, fd)
        os.close(broken)
        with pytest.raises(kind, match=r"00000001\.seg at 77: ") as caught:
            await store.write([Transfer(1, 77, b"x")])
        assert type(caught.value) is kind


@contextmanager
def broken(store: FileSegments) -> Iterator[None]:
    """Syncs of segment 1 fail."""
    file = store._files[1]
    good, null = os.dup(file.fd), os.open("/dev/null", os.O_RDWR)
    os.dup2(null, file.fd)
    os.close(null)
    yield
    os.dup2(good, file.fd)
    os.close(good)


async def test_after_a_failed_sync_writes_go_past_the_page_cache(store: FileSegments) -> None:
    """What it has may not be what the disk has. Parts of blocks leave the rest of them as it was."""
    await store.write([Transfer(1, 0, b"first page"), Transfer(1, 9000, b"perhaps lost")])
    with broken(store), pytest.raises(EngineError):
        await store.sync()
    file = store._files[1]
    if file.past_cache is None:
        pytest.skip("this file system has no O_DIRECT")
    await store.write([Transfer(1, 5, b"PAGE"), Transfer(1, 8192, bytes(3 * 4096 + 7))])
    assert await read(store, 0, 12) == b"firstPAGEe\0\0"
    assert await read(store, 8192, 3 * 4096 + 7) == bytes(3 * 4096 + 7)
    await store.sync()
    with store.writing({1}) as targets:
        assert not targets, "a thread would write to the page cache"
    store.drop_cache()
    assert await read(store, 0, 12) == b"firstPAGEe\0\0"


async def test_a_segment_on_a_file_system_that_was_read_only_is_written_when_it_is_not(
    store: FileSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_RDWR and str(path).endswith(".seg"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really_open(path, flags, *rest, **more)

    folder = store._files[1].path.parent
    await store.write([Transfer(1, 0, b"there")])
    await store.aclose()
    monkeypatch.setattr(os, "open", refuse)
    again = FileSegments.open(folder)
    assert await read(again, 0, 5) == b"there"
    with pytest.raises(EngineReadOnly):
        await again.write([Transfer(1, 0, b"again")])
    monkeypatch.undo()
    await again.write([Transfer(1, 0, b"again")])
    await again.sync()
    assert await read(again, 0, 5) == b"again"
    await again.aclose()


# -- death --------------------------------------------------------------------------------------------


async def test_a_killed_writer_leaves_whole_segments_and_all_it_was_told_of(tmp_path: Path, rng: random.Random) -> None:
    for life in range(3):
        path = tmp_path / str(life)
        with python(WRITER, path) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randint(1, 30)):
                last_known = int(await trio.to_thread.run_sync(writer.stdout.readline))
            writer.send_signal(signal.SIGKILL)
        store = FileSegments.open(path)
        segments = await store.list()
        assert [info.segment for info in segments][:last_known] == [1001 + index for index in range(last_known)]
        assert all(info.size == MIB for info in segments)
        for number in range(1, last_known + 1):
            assert await read(store, 0, MIB, 1000 + number) == b"%8d" % number * (1 << 17)
        assert not list(path.glob("*.new"))
        await store.aclose()


def python(code: str, path: Path) -> subprocess.Popen[str]:
    """Another process that runs ``code`` on the store at ``path``."""
    return subprocess.Popen([sys.executable, "-c", code, str(path)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


# -- views --------------------------------------------------------------------------------------------


async def test_what_is_not_resident_has_no_view(store: FileSegments) -> None:
    await store.write([Transfer(1, 0, b"x" * SIZE)])
    await store.sync()
    assert store.view(1, 0, SIZE) == b"x" * SIZE
    evict(store, 0, SIZE)
    if store.view(1, 0, SIZE) is not None:
        pytest.skip("this file system keeps its pages")
    await read(store, SIZE - MIB, MIB)
    assert store.view(1, SIZE - MIB, MIB) == b"x" * MIB
    assert store.view(1, SIZE - MIB + 5, 10) == b"x" * 10
    assert store.view(1, 0, 1) is None
    assert store.view(1, 0, SIZE) is None


async def test_views_do_not_inflate_the_process(store: FileSegments) -> None:
    """Three times the bound is viewed and touched; old views stay right when their pages are dropped."""
    size = 3 * VIEW_BYTES_MAX
    await store.create(2, size)
    await store.write([Transfer(2, 0, b"first")])
    await read(store, 0, size, segment=2)
    first = store.view(2, 0, 5)
    assert first is not None
    floor = highest = resident_file_bytes()
    for offset in range(0, size, MIB):
        view = store.view(2, offset, MIB)
        if view is None:  # the kernel took the pages back: memory is short
            await read(store, offset, MIB, segment=2)
            view = store.view(2, offset, MIB)
        assert view is not None
        bytes(view)
        highest = max(highest, resident_file_bytes())
    assert highest - floor < VIEW_BYTES_MAX + 16 * MIB
    assert first == b"first"


def resident_file_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(fields["RssFile"].split()[0]) + int(fields["RssShmem"].split()[0])) << 10


async def test_a_view_outlives_the_store(store: FileSegments) -> None:
    await store.write([Transfer(1, 0, b"data")])
    view = store.view(1, 0, 4)
    await store.aclose()
    assert view == b"data"


async def test_close_gives_back_every_descriptor_and_mapping(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count(".seg")

    before = held()
    store = FileSegments.open(tmp_path)
    for segment in range(5):
        await store.create(segment, MIB)
        await store.write([Transfer(segment, 0, b"x")])
        assert store.view(segment, 0, 1) == b"x"
    await store.remove(0)
    assert held() > before
    await store.aclose()
    assert held() == before


def test_a_run_advances_over_its_buffers(tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    with fileio.SegmentFile.open(path, 1, is_direct=False, read_only=True) as file:
        pieces = [rng.randbytes(rng.randint(1, 9)) for _ in range(20)]
        run = fileio.Run(file, 0, memoryview(pieces[0]))
        for piece in pieces[1:]:
            assert not run.takes(file, run.length + 1, memoryview(piece))
            assert run.takes(file, run.length, memoryview(piece))
        whole = b"".join(pieces)
        while run.length:
            assert b"".join(run.views) == whole[run.offset :]
            run.advance(rng.randint(0, run.length))
        assert run.views == []
        file.retire()


async def test_the_first_sync_covers_what_a_killed_process_wrote(
    store: FileSegments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.write([Transfer(1, 0, b"x" * MIB)])
    synced: list[list[int]] = []
    monkeypatch.setattr(fileio, "sync", lambda files: synced.append([file.segment for file in files]))
    after = FileSegments.open(tmp_path / "segments")
    for _ in range(2):
        await after.sync()
    assert synced == [[1], []]
    await after.aclose()
