"""Weights read through rings: the right bytes wherever they are wanted, also past a daemon that is killed."""

from __future__ import annotations

import json
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from errno import EINVAL, EIO
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_mounts import outliving_mount
from interruptions import run_beside
from mounting import KvfuseMount, temporary_mount

from kvfuse.connectors.models import WeightReader
from kvfuse.connectors.models.weight_reader import ONCE_PIECE, PIECE, PIECES_MAX, is_writable
from kvfuse.errors import DeviceError
from kvfuse.remote import libc
from kvfuse.usrbio.client import Disconnected, Ring
from kvfuse.usrbio.client.session import Session
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import Access, Request

pytestmark = pytest.mark.engines("lmdb+file")

SIZE = (PIECES_MAX + 2) * PIECE + 12_345
"""bytes of the file: more than a reader's buffer has"""

Place = Callable[[WeightReader, int], np.ndarray]


def in_place(reader: WeightReader, size: int) -> np.ndarray:
    return reader.memory(size)


def elsewhere(reader: WeightReader, size: int) -> np.ndarray:
    return np.full(size, 0xFF, np.uint8)


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["capacity=256MiB"]) as mount:
        yield mount
        mount.unmount()
        mount.fsck(verify=True)


@pytest.fixture(scope="module")
def stored(mount: KvfuseMount) -> tuple[Path, bytes]:
    """A file of the mount, and what it has."""
    data = random.Random(SIZE).randbytes(SIZE)
    (mount.point / "weights").write_bytes(data)
    mount.unmount()
    mount.mount()  # nothing of it is verified yet
    return mount.point / "weights", data


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("place", [in_place, elsewhere])
def test_any_range_comes_whole(
    mount: KvfuseMount, stored: tuple[Path, bytes], place: Place, rng: random.Random, once: bool
) -> None:
    path, data = stored
    drop_cache(mount)
    with WeightReader(path, once=once) as reader:
        for number in range(12):
            offset = rng.choice([0, 1, 4096, rng.randrange(SIZE)])
            length = rng.choice([1, 4097, PIECE, 3 * PIECE + 5, SIZE]) if number else SIZE
            target = place(reader, length)
            chunk_size = rng.choice([0, 65_536, 1 << 40])
            count = reader.read_chunked(str(path), target.ctypes.data, offset, length, chunk_size)
            assert count == min(length, SIZE - offset)
            assert target[:count].tobytes() == data[offset : offset + count]
            assert reader.read_into(str(path), offset, target) == count


def drop_cache(mount: KvfuseMount) -> None:
    """Nothing of the volume's segments is in the page cache."""
    mount.unmount()
    for path in segments_of(mount):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mount.mount()


def segments_of(mount: KvfuseMount) -> list[Path]:
    return list(mount.volume.rglob("*.seg"))


def count_resident(mount: KvfuseMount) -> int:
    """Bytes of the volume's segments that the page cache has, in pieces of 64 KiB."""
    size, piece = 0, 65_536
    for path in segments_of(mount):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            array = np.frombuffer(memory, np.uint8)
            starts = range(0, len(array), piece)
            size += piece * sum(libc.is_resident(array.ctypes.data + start, piece) for start in starts)
            del array
    return size


def test_what_is_read_once_stays_out_of_the_page_cache(mount: KvfuseMount, stored: tuple[Path, bytes]) -> None:
    path, data = stored
    for once in (True, False):
        drop_cache(mount)
        before = count_resident(mount)
        with WeightReader(path, once=once) as reader:
            target = reader.memory(SIZE)
            assert reader.read_into(str(path), 0, target) == SIZE
            assert target.tobytes() == data
        assert (count_resident(mount) - before > SIZE // 2) != once


def test_small_reads_of_a_file_that_is_read_once_read_no_byte_twice(
    mount: KvfuseMount, stored: tuple[Path, bytes]
) -> None:
    path, data = stored
    drop_cache(mount)
    size, piece = 8 << 20, 16 << 10
    with WeightReader(path, once=True) as reader:
        target = np.zeros(piece, np.uint8)
        before = read_from_segments(mount)
        for offset in range(0, size, piece):
            assert reader.read_into(str(path), offset, target) == piece
            assert target.tobytes() == data[offset : offset + piece]
        assert read_from_segments(mount) - before <= 3 * size


def read_from_segments(mount: KvfuseMount) -> int:
    return int(json.loads((mount.point / ".kvfuse/stats").read_text())["segments"]["read_bytes"])


def test_damage_is_no_bytes_of_a_file_that_is_read_once(rng: random.Random) -> None:
    data = rng.randbytes(2 * ONCE_PIECE + 100)
    with temporary_mount(["capacity=128MiB"]) as mount:
        path = mount.point / "weights"
        path.write_bytes(data)
        mount.unmount()
        place = data[ONCE_PIECE + 5 : ONCE_PIECE + 105]
        segment, offset = next(
            (one, found) for one in segments_of(mount) if (found := one.read_bytes().find(place)) >= 0
        )
        change(segment, offset, bytes(100))
        mount.mount()
        drop_cache(mount)
        with WeightReader(path, once=True) as reader:
            target = reader.memory(len(data))
            with pytest.raises(OSError, match=os.strerror(EIO)):
                reader.read_into(str(path), 0, target)
            assert reader.read_into(str(path), 0, target[:ONCE_PIECE]) == ONCE_PIECE
            assert target[:ONCE_PIECE].tobytes() == data[:ONCE_PIECE]
        assert json.loads((mount.point / ".kvfuse/stats").read_text())["counters"]["checksum_failures"]
        mount.unmount()
        change(segment, offset, place)
        mount.fsck(verify=True)


def change(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_daemon_that_knows_no_reads_past_its_cache_serves_them(
    stored: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = stored
    request, asked = Session.request, list[int]()

    def as_before(session: Session, kind: Request, *values: int, **options: Any) -> Any:
        if kind == Request.ADD_FILE:
            asked.append(values[0])
            if values[0] > Access.READ | Access.WRITE:
                raise OSError(EINVAL, "access 5")
        return request(session, kind, *values, **options)

    monkeypatch.setattr(Session, "request", as_before)
    with WeightReader(path, once=True) as reader:
        target = bytearray(SIZE)
        assert reader.read_into(str(path), 0, target) == SIZE
    assert target == data
    assert asked == [Access.READ | Access.ONCE, Access.READ]


def test_threads_share_a_reader(stored: tuple[Path, bytes]) -> None:
    path, data = stored
    found = [bytearray(SIZE) for _ in range(3)]
    with WeightReader(path) as reader:
        threads = [threading.Thread(target=reader.read_into, args=(str(path), 0, one)) for one in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(one == data for one in found)


def test_a_path_is_the_file_that_has_it_now(mount: KvfuseMount) -> None:
    path = mount.point / "model"
    path.write_bytes(b"the first one")
    target = np.zeros(100, np.uint8)
    with WeightReader(path) as reader:
        assert reader.read_into(str(path), 0, target) == 13
        (mount.point / "new").write_bytes(b"another")
        (mount.point / "new").rename(path)
        assert reader.read_into(str(path), 0, target) == 7
        assert target[:7].tobytes() == b"another"
        path.unlink()
        with pytest.raises(FileNotFoundError):
            reader.read_into(str(path), 0, target)


class Interrupted(Exception):
    """As a signal raises it in the middle of a call."""


@pytest.mark.parametrize("place", [in_place, elsewhere])
def test_an_interrupted_read_leaves_nothing(
    stored: tuple[Path, bytes], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = stored

    def interrupted(*_: object) -> None:
        raise Interrupted

    with WeightReader(path) as reader:
        target = place(reader, SIZE)
        for _ in range(3):
            with monkeypatch.context() as changed, pytest.raises(Interrupted):
                changed.setattr(Ring, "wait", interrupted)
                reader.read_into(str(path), 0, target)
            assert reader.read_into(str(path), 5, target) == SIZE - 5
            assert target[:-5].tobytes() == data[5:]


def test_a_ring_that_ends_before_its_connection_is_made_anew(
    stored: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = stored
    ends, wait = [True] * 3, Ring.wait

    def ended(ring: Ring, count: int) -> Entries:
        if ends:
            ends.pop()
            raise Disconnected("as a daemon that is ending, whose connection stands yet")
        return wait(ring, count)

    monkeypatch.setattr(Ring, "wait", ended)
    with WeightReader(path) as reader:
        target = bytearray(SIZE)
        assert reader.read_into(str(path), 0, target) == SIZE
    assert target == data


def test_what_cannot_be_read_is_refused(stored: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = stored
    with pytest.raises(FileNotFoundError):
        WeightReader(tmp_path)
    with pytest.raises(ValueError, match="buffer_size"):
        WeightReader(path, buffer_size=1)
    with WeightReader(path) as reader:
        target = np.zeros(100, np.uint8)
        with pytest.raises(FileNotFoundError):
            reader.read_into(f"{path}.absent", 0, target)
        with pytest.raises(ValueError, match="read-only"):
            reader.read_into(str(path), 0, b"constant")
        with pytest.raises(ValueError, match="no memory"):
            reader.read_chunked(str(path), 0, 0, 100)
        with pytest.raises(DeviceError):  # neither memory of this process nor of a GPU
            reader.read_chunked(str(path), 1 << 20, 0, 100)
        assert reader.read_chunked(str(path), target.ctypes.data, 0, 0) == 0
        assert reader.read_into(str(path), 0, target) == 100
        assert target.tobytes() == data[:100]
    with pytest.raises(ValueError, match="closed"):
        reader.read_into(str(path), 0, target)


def test_writable_memory_is_told_from_other(tmp_path: Path) -> None:
    odd = tmp_path / "a form feed \f and a line separator \u2028"
    odd.write_bytes(b"mapped, too")
    with (
        odd.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
        mmap.mmap(-1, 3 * mmap.PAGESIZE) as memory,
    ):
        array = np.frombuffer(memory, np.uint8)
        address = array.ctypes.data
        assert is_writable(address, len(array))
        assert not is_writable(4096, 8)
        assert not is_writable(address, 1 << 46)
        del array


def test_a_killed_daemon_is_waited_for(rng: random.Random) -> None:
    data = rng.randbytes(SIZE)
    with outliving_mount() as mount:
        path = mount.point / "weights"
        path.write_bytes(data)

        def load(place: Place, chance: random.Random) -> None:
            with WeightReader(path, once=chance.random() < 0.5) as reader:
                for _ in range(10):
                    offset = chance.randrange(SIZE)
                    target = place(reader, SIZE - offset)
                    target[:] = 0xFF
                    assert reader.read_into(str(path), offset, target) == len(target)
                    assert target.tobytes() == data[offset:]

        works = {place.__name__: partial(load, place) for place in (in_place, elsewhere)}
        run_beside("killed", [mount], rng.getrandbits(32), works, rounds=3)
