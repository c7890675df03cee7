"""fsck of the cold tier: objects that are gone, wrong, or not known are found, and mended, and blocks with them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import pytest
import trio
from cold_lab import KIB, MIB, Beside, cold_mount, settle
from mounting import KvfuseMount

from kvfuse.options import config
from kvfuse.options.config import Options
from kvfuse.remote.bucket import Bucket, Range
from kvfuse.volume.check.evidence import CheckReport
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.cold.cold_format import object_name
from kvfuse.volume.opening.cold_opening import GRAVES_FILE
from kvfuse.volume.opening.engines import cold_bucket
from kvfuse.volume.opening.formatting import read_superblock
from kvfuse_cluster.seaweed import SeaweedServer

pytestmark = pytest.mark.ring(2)


class Cold:
    """A volume with cold blocks, and its bucket."""

    def __init__(self, mount: KvfuseMount, beside: Beside) -> None:
        self.mount, self.beside = mount, beside
        self.options: Options = config.load(mount.source).options
        self.volume_id = read_superblock(self.options.volume_path).volume_id
        place = cold_bucket(self.options, self.volume_id)
        assert place is not None
        self.bucket = Bucket(place, 30.0, 4)

    def numbers(self) -> list[int]:
        return [int(one.name[-12:]) for one in trio.run(self.bucket.list, "blocks/")]

    def read(self, number: int) -> bytearray:
        (one,) = [one for one in trio.run(self.bucket.list, "blocks/") if one.name == object_name(number)]
        data = bytearray(one.size)
        trio.run(self.bucket.read, one.name, [Range(0, memoryview(data))])
        return data

    def put(self, number: int, data: bytes | bytearray) -> None:
        trio.run(self.bucket.put, object_name(number), bytes(data))

    def delete(self, number: int) -> None:
        trio.run(self.bucket.delete, [object_name(number)])

    def check(self, *, verify: bool = False, repair: bool = False) -> CheckReport:
        return trio.run(functools.partial(fsck, self.options, verify=verify, repair=repair))


@pytest.fixture
def cold(seaweed: SeaweedServer, rng: random.Random) -> Iterator[Cold]:
    """Not mounted."""
    with cold_mount(seaweed) as mount:
        beside = Beside(mount, "ns", rng)
        for start in range(0, 300, 25):
            beside.put(names()[start : start + 25], 64 * KIB)
            settle(mount)
        beside.store.close()
        mount.unmount()
        yield Cold(mount, beside)


def names() -> list[bytes]:
    return [b"block-%06d" % number for number in range(300)]


def flip(cold: Cold, number: int, place: int) -> None:
    data = cold.read(number)
    data[place] ^= 1
    cold.put(number, data)


def drop(cold: Cold, number: int) -> None:
    cold.delete(number)


def cut(cold: Cold, number: int) -> None:
    cold.put(number, cold.read(number)[:-64])


def swap(cold: Cold, number: int) -> None:
    cold.put(number, cold.read(cold.numbers()[-1]))


def copy(cold: Cold, number: int) -> None:
    cold.put(900_000 + number, cold.read(number))


Damage = Callable[[Cold, int], None]
DAMAGE: dict[str, tuple[Damage, str]] = {
    "gone": (drop, "it is gone"),
    "short": (cut, "its header says"),
    "another": (swap, "its header is damaged, or another volume's"),
    "header": (functools.partial(flip, place=3), "its header is damaged"),
    "heads": (functools.partial(flip, place=100), "its heads do not match"),
    "unknown": (copy, "does not name it"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_wrong_object_is_found_and_goes(cold: Cold, kind: str) -> None:
    damage, text = DAMAGE[kind]
    before = cold.check()
    assert before.clean
    assert before.cold_objects == len(cold.numbers()) > 3
    assert before.cold_blocks > 50
    number = cold.numbers()[0]
    damage(cold, number)
    found = cold.check()
    assert [text in problem.text for problem in found.problems] == [True], found.problems
    mended = cold.check(repair=True)
    assert mended.clean
    assert mended.repaired == 1
    assert mended.cold_objects == before.cold_objects - (kind != "unknown")
    look(cold, lost=kind != "unknown")


def look(cold: Cold, *, lost: bool) -> None:
    """Mount it: no byte is wrong, and some blocks are absent if an object was ``lost``."""
    cold.mount.mount()
    settle(cold.mount)
    cold.beside.reopen()
    hits = 0
    for start in range(0, 300, 20):
        hits += cold.beside.check(names()[start : start + 20])
        settle(cold.mount)
    assert (hits < 300) is lost
    assert hits > 250
    cold.beside.store.close()
    cold.mount.unmount()
    assert cold.check(verify=True).clean


def test_wrong_bytes_are_found_and_buried(cold: Cold) -> None:
    number = cold.numbers()[0]
    flip(cold, number, len(cold.read(number)) - 64)
    assert cold.check().clean, "bytes are not read"
    (problem,) = cold.check(verify=True).problems
    assert "1 blocks do not match their checksums" in problem.text
    mended = cold.check(verify=True, repair=True)
    assert mended.clean
    assert mended.verified_bytes > MIB
    look(cold, lost=True)


def test_lost_graves_end_all_objects(cold: Cold) -> None:
    count = len(cold.numbers())
    (cold.options.volume_path / GRAVES_FILE).unlink()
    found = cold.check()
    assert len(found.problems) == count
    assert all("is lost" in problem.text for problem in found.problems)
    assert cold.check(repair=True).clean
    assert not cold.numbers()


def test_a_bucket_that_nobody_reaches_is_a_note(cold: Cold) -> None:
    text = cold.mount.source.read_text()
    cold.mount.source.write_text(text.replace("http://127.0.0.1", "http://127.0.0.2"))
    options = config.load(cold.mount.source).options
    found = trio.run(fsck, options)
    cold.mount.source.write_text(text)
    assert found.clean
    assert any("the cold tier was not checked" in note for note in found.notes)
