"""Weights read through rings: the right bytes wherever they are wanted, also past a daemon that is killed."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from engine_mounts import outliving_mount
from interruptions import run_beside
from mounting import KvfuseMount, temporary_mount

from kvfuse.connectors.models import WeightReader
from kvfuse.connectors.models.weight_reader import PIECE, PIECES_MAX, is_writable
from kvfuse.errors import DeviceError
from kvfuse.usrbio.client import Disconnected, Ring
from kvfuse.usrbio.protocol.queues import Entries

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


@pytest.mark.parametrize("place", [in_place, elsewhere])
def test_any_range_comes_whole(stored: tuple[Path, bytes], place: Place, rng: random.Random) -> None:
    path, data = stored
    with WeightReader(path) as reader:
        for number in range(12):
            offset = rng.choice([0, 1, 4096, rng.randrange(SIZE)])
            length = rng.choice([1, 4097, PIECE, 3 * PIECE + 5, SIZE]) if number else SIZE
            target = place(reader, length)
            chunk_size = rng.choice([0, 65_536, 1 << 40])
            count = reader.read_chunked(str(path), target.ctypes.data, offset, length, chunk_size)
            assert count == min(length, SIZE - offset)
            assert target[:count].tobytes() == data[offset : offset + count]
            assert reader.read_into(str(path), offset, target) == count


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
            with WeightReader(path) as reader:
                for _ in range(10):
                    offset = chance.randrange(SIZE)
                    target = place(reader, SIZE - offset)
                    target[:] = 0xFF
                    assert reader.read_into(str(path), offset, target) == len(target)
                    assert target.tobytes() == data[offset:]

        works = {place.__name__: partial(load, place) for place in (in_place, elsewhere)}
        run_beside("killed", [mount], rng.getrandbits(32), works, rounds=3)
