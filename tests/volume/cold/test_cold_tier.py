"""The cold tier over a real bucket: what it finds at a mount, and what must not come back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from bucket_lab import bucket_options
from volume_lab import lab_options

from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms
from kvfuse.options.options import ColdBucketOptions
from kvfuse.volume.check.scrub import Scrubber
from kvfuse.volume.cold import cold_format as layout
from kvfuse.volume.cold.cold_index import ColdGroup
from kvfuse.volume.cold.cold_tier import ColdTier
from kvfuse.volume.cold.repacking import Repacking
from kvfuse_cluster.seaweed import SeaweedServer

pytestmark = pytest.mark.ring(2)

MIB = 1 << 20
VOLUME = b"volume" * 2 + b"1234"
Open = Callable[[], AbstractAsyncContextManager[ColdTier]]


class World:
    """What is outside of the tier."""

    def __init__(self) -> None:
        self.epoch = 0
        self.sequence = 1_000_000

    def is_valid(self, group: ColdGroup) -> bool:
        return group.epoch == self.epoch

    def latest(self) -> int:
        return self.sequence


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def cold_options(seaweed: SeaweedServer, request: pytest.FixtureRequest) -> ColdBucketOptions:
    place = bucket_options(seaweed, request.node.name)
    return ColdBucketOptions(
        endpoint=place.endpoint, bucket=place.bucket, prefix=place.prefix, credentials_file=place.credentials_file,
        capacity=8 * MIB, object_size=MIB, deadline=30.0,
    )  # fmt: skip


@pytest.fixture
def open_tier(cold_options: ColdBucketOptions, tmp_path: Path, world: World) -> Open:
    @asynccontextmanager
    async def opened() -> AsyncIterator[ColdTier]:
        tier = ColdTier(cold_options, VOLUME, tmp_path / "graves", world.is_valid, world.latest)
        with trio.fail_after(60):
            await tier.load()
        yield tier
        tier.close()

    return opened


def heads_of(keys: list[int], sequence: int, size: int = 1000) -> tuple[np.ndarray, memoryview]:
    """Heads and the object for blocks whose bytes say their key."""
    heads = np.zeros(len(keys), forms.HEAD)
    heads["magic"], heads["version"], heads["state"] = forms.HEAD_MAGIC, 1, forms.BLOCK_HEAD
    heads["low"], heads["high"], heads["sequence"], heads["length"] = keys, keys, sequence, size
    heads["directory"] = 5
    offsets = layout.offsets_of(heads["length"].astype(np.int64))
    data = memoryview(bytearray(int(offsets[-1])))
    for place, key in enumerate(keys):
        data[offsets[place] : offsets[place] + size] = bytes([key % 256]) * size
        heads["checksum"][place] = crc32c(bytes([key % 256]) * size)
    return heads, data


async def store(tier: ColdTier, keys: list[int], sequence: int, size: int = 1000) -> None:
    heads, data = heads_of(keys, sequence, size)
    here = await tier.store(heads, data, lambda: np.ones(len(keys), np.bool_))
    assert here is not None
    assert here.all()


def words(keys: list[int]) -> np.ndarray:
    return np.array(keys, np.uint64)


def there(tier: ColdTier, keys: list[int]) -> list[int]:
    return [key for key, row in zip(keys, tier.find(words(keys), words(keys), 0), strict=True) if row >= 0]


async def test_blocks_are_read_and_found_again(open_tier: Open) -> None:
    async with open_tier() as tier:
        await store(tier, [1, 2, 3], 10)
        await store(tier, [4, 5], 11)
    async with open_tier() as tier:
        assert there(tier, [1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5]
        rows = tier.find(words([5, 1, 3]), words([5, 1, 3]), 0)
        assert [bytes(one or b"")[:2] for one in await tier.read(rows)] == [b"\5\5", b"\1\1", b"\3\3"]


async def test_removed_and_superseded_blocks_stay_away(open_tier: Open) -> None:
    async with open_tier() as tier:
        await store(tier, [1, 2, 3, 4], 10)
        assert tier.kill(words([1, 9]), words([1, 9])).tolist() == [True, False]
        tier.supersede(words([2, 3]), words([2, 3]), np.array([20, 10], np.uint64))
        assert there(tier, [1, 2, 3, 4]) == [3, 4]
        await store(tier, [2], 21)
    async with open_tier() as tier:
        assert there(tier, [1, 2, 3, 4]) == [2, 3, 4]


async def test_a_block_that_was_brought_back_counts_when_it_leaves_again(open_tier: Open) -> None:
    async with open_tier() as tier:
        await store(tier, [1, 2], 10)
        for key, hot in ((1, 50), (2, 60)):
            (row,) = tier.find(words([key]), words([key]), 0).tolist()
            with tier.taking(row, 10) as is_it:
                assert is_it
                tier.note_hot(row, hot)
        both = words([1, 2])
        left = np.array([50, 61], np.uint64)  # the second one was replaced meanwhile
        assert tier.are_copied(both, both, left).tolist() == [True, False]
        tier.supersede(both, both, left)
        tier.released(both, both, left)
        assert there(tier, [1, 2]) == [1]
    async with open_tier() as tier:
        assert there(tier, [1, 2]) == [1]


async def test_what_dies_on_its_way_is_dead(open_tier: Open) -> None:
    async with open_tier() as tier:
        heads, data = heads_of([1, 2], 10)

        def are_there() -> np.ndarray:
            nursery.start_soon(remove)
            return np.ones(2, np.bool_)

        async def remove() -> None:
            tier.kill(words([1]), words([1]))

        async with trio.open_nursery() as nursery:
            here = await tier.store(heads, data, are_there)
        assert here is not None
        assert there(tier, [1, 2]) == [2]
    async with open_tier() as tier:
        assert there(tier, [1, 2]) == [2]


async def test_removals_count_while_objects_are_found(
    open_tier: Open, cold_options: ColdBucketOptions, tmp_path: Path, world: World
) -> None:
    async with open_tier() as tier:
        await store(tier, [1, 2, 3], 10)
    tier = ColdTier(cold_options, VOLUME, tmp_path / "graves", world.is_valid, world.latest)
    tier.kill(words([1]), words([1]))
    tier.supersede(words([2]), words([2]), np.array([30], np.uint64))
    await tier.load()
    assert there(tier, [1, 2, 3]) == [3]
    tier.close()
    async with open_tier() as tier:
        assert there(tier, [1, 2, 3]) == [3]


async def test_an_object_that_comes_late_is_not_read(open_tier: Open) -> None:
    async with open_tier() as tier:
        await store(tier, [1], 10)
        tier._log.append(4, words([7]))  # as of a put whose end nobody saw
        heads, data = heads_of([2], 11)
        layout.write_heads(data, VOLUME, 7, heads, len(data))
        await tier._writer.put(layout.object_name(7), data)
    async with open_tier() as tier:
        assert there(tier, [1, 2]) == [1]


async def test_without_graves_nothing_is_read(open_tier: Open, tmp_path: Path) -> None:
    async with open_tier() as tier:
        await store(tier, [1], 10)
    (tmp_path / "graves").unlink()
    async with open_tier() as tier:
        assert there(tier, [1]) == []
        await tier._delete_doomed()
        assert await tier._writer.list("blocks/") == []


async def test_a_cleared_namespace_stays_so(open_tier: Open, world: World) -> None:
    async with open_tier() as tier:
        await store(tier, [1], 10)
        world.epoch = 1
        assert there(tier, [1]) == []
    async with open_tier() as tier:
        assert there(tier, [1]) == []


async def test_blocks_of_a_lost_folder_stay_away(open_tier: Open) -> None:
    async with open_tier() as tier:
        await store(tier, [1, 2], 10)
        tier.kill_directory(6)
        assert there(tier, [1, 2]) == [1, 2]
        tier.kill_directory(5)
        assert there(tier, [1, 2]) == []
    async with open_tier() as tier:
        assert there(tier, [1, 2]) == []


async def test_a_damaged_object_is_absent(open_tier: Open) -> None:
    async with open_tier() as tier:
        await store(tier, [1], 10)
        await store(tier, [2], 11)
        await tier._writer.put(layout.object_name(1), b"x" * 500)
    async with open_tier() as tier:
        assert there(tier, [1, 2]) == [2]


async def test_an_object_that_somebody_deleted_is_a_miss(open_tier: Open) -> None:
    async with open_tier() as tier:
        await store(tier, [1], 10)
        rows = tier.find(words([1]), words([1]), 0)
        await tier._writer.delete([layout.object_name(1)])
        assert await tier.read(rows) == [None]
        assert there(tier, [1]) == []


async def test_the_oldest_objects_go(open_tier: Open) -> None:
    async with open_tier() as tier:
        for number in range(20):
            await store(tier, [number + 1], 10 + number, MIB - 4096)
            assert tier.used <= tier.capacity
        found = there(tier, list(range(1, 21)))
        assert found[-1] == 20
        assert found == list(range(21 - len(found), 21))
        assert sum(one.size for one in await tier._writer.list("blocks/")) <= tier.capacity


async def test_a_scrub_sees_what_the_bucket_lacks(open_tier: Open) -> None:
    async with open_tier() as tier:
        for key in range(1, 5):
            await store(tier, [key], 10 + key)
        engine: Any = SimpleNamespace(cold=SimpleNamespace(tier=tier))
        scrub = Scrubber(lambda: engine, lab_options())
        await scrub._compare_cold(engine)
        assert scrub.counters.errors == 0
        await tier._writer.delete([layout.object_name(1)])
        await tier._writer.put(layout.object_name(2), b"x" * 500)
        tier._objects.pop(3)  # as if nobody had stored it
        await scrub._compare_cold(engine)
        assert scrub.counters.errors == 3
        assert there(tier, [1, 2, 4]) == [4]
        await tier._delete_doomed()
        await scrub._compare_cold(engine)
        assert scrub.counters.errors == 3
        assert [one.name for one in await tier._writer.list("blocks/")] == [layout.object_name(4)]


async def test_an_object_that_the_graves_do_not_name_is_not_read(open_tier: Open, tmp_path: Path) -> None:
    async with open_tier() as tier:
        await store(tier, [1], 10)
        before = (tmp_path / "graves").read_bytes()
        await store(tier, [2], 11)
    (tmp_path / "graves").write_bytes(before)  # of a backup: what was removed since is not known
    async with open_tier() as tier:
        assert there(tier, [1, 2]) == [1]


# -- objects that are mostly dead ------------------------------------------------------------------------------


async def make_half_dead(tier: ColdTier, first: int = 0) -> list[int]:
    """Keys that are alive, in objects of which most is dead."""
    for number in range(4):
        start = first + 10 * number + 1
        await store(tier, list(range(start, start + 10)), 10 + number, 10_000)
    keys = list(range(first + 1, first + 41))
    dead = [key for key in keys if key % 10 > 3 or key % 10 == 0]
    tier.kill(words(dead), words(dead))
    return [key for key in keys if key not in dead]


async def check_bytes(tier: ColdTier, keys: list[int], size: int = 10_000) -> None:
    assert there(tier, keys) == keys
    found = await tier.read(tier.find(words(keys), words(keys), 0))
    assert [bytes(one or b"") for one in found] == [bytes([key % 256]) * size for key in keys]


async def test_what_is_alive_is_packed_anew(open_tier: Open, world: World) -> None:
    async with open_tier() as tier:
        alive = await make_half_dead(tier)
        before = tier.used
        assert await Repacking(tier).repack() > 0
        await check_bytes(tier, alive)
        assert len(tier._objects) == 1
        await tier._delete_doomed()
        assert len(await tier._writer.list("blocks/")) == 1
        assert tier.used < before / 2
        await check_bytes(tier, alive)
        assert await Repacking(tier).repack() == 0
        tier.kill(words(alive[:3]), words(alive[:3]))
    async with open_tier() as tier:
        await check_bytes(tier, alive[3:])
        assert there(tier, list(range(1, 41))) == alive[3:]
        world.epoch = 1  # the namespace is cleared
        assert await Repacking(tier).repack() == 0


async def test_what_dies_while_it_is_packed_anew_stays_dead(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_tier() as tier:
        alive = await make_half_dead(tier)
        put = tier._writer.put

        async def put_slowly(*args: Any, **more: Any) -> str:
            tier.kill(words(alive[:2]), words(alive[:2]))
            tier.supersede(words(alive[2:3]), words(alive[2:3]), np.array([99], np.uint64))
            await check_bytes(tier, alive[3:])  # where they were
            return await put(*args, **more)

        monkeypatch.setattr(tier._writer, "put", put_slowly)
        assert await Repacking(tier).repack() > 0
        assert there(tier, alive) == alive[3:]
        await check_bytes(tier, alive[3:])
    async with open_tier() as tier:
        await check_bytes(tier, alive[3:])
        assert there(tier, alive) == alive[3:]


class Killed(BaseException):
    """The daemon is."""


class Kills:
    """Before and after each thing that stays: records of the graves' file, a put, a deletion. One is the last."""

    def __init__(self, tier: ColdTier, last: int, patch: pytest.MonkeyPatch) -> None:
        self.left = last
        append, put, delete = tier._log.append, tier._writer.put, tier._writer.delete

        def append_to(*args: Any) -> None:
            self.step()
            append(*args)
            self.step()

        async def put_to(*args: Any, **more: Any) -> str:
            self.step()
            tag = await put(*args, **more)
            self.step()
            return tag

        async def delete_from(*args: Any) -> None:
            self.step()
            await delete(*args)
            self.step()

        patch.setattr(tier._log, "append", append_to)
        patch.setattr(tier._writer, "put", put_to)
        patch.setattr(tier._writer, "delete", delete_from)

    def step(self) -> None:
        if self.left <= 0:
            raise Killed
        self.left -= 1


async def test_a_kill_while_blocks_are_packed_anew_loses_none(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, last = False, 0
    while not is_over:
        async with open_tier() as tier:
            alive = await make_half_dead(tier, 100 * last)
            with monkeypatch.context() as patch:
                Kills(tier, last, patch)
                with suppress(Killed):
                    assert await Repacking(tier).repack() > 0
                    await tier._delete_doomed()
                    is_over = True
        async with open_tier() as tier:
            await check_bytes(tier, alive)
            assert there(tier, list(range(100 * last, 100 * last + 50))) == alive
            tier.kill(words(alive), words(alive))
            await tier.sweep()
            await tier._delete_doomed()
            assert await tier._writer.list("blocks/") == []
        last += 1
    assert last > 10
