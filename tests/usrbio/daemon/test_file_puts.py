"""Puts of one submission into a folder of files: each has its own answer, whatever the others are."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest
import trio
import trio.testing
from mounting import PATIENCE_S
from ring_trips import NAMESPACE, RingClient, ring_client
from worker_lab import IOV, entries

from kvfuse.errors import EngineError
from kvfuse.options.options import CacheOptions, MountOptions, Options, PublishOptions, VolumeOptions
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import PARENTS_MAX, Op
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.opening.formatting import format_volume
from kvfuse.volume.running import open_volume
from kvfuse.volume.volume import Volume

SIZE = 4096
COUNT = 24
CALLER = Caller(0, 0)


@asynccontextmanager
async def opened(folder: Path, *, is_strict: bool = False) -> AsyncIterator[Volume]:
    options = Options(
        volume=VolumeOptions(path=folder / "volume", capacity=256 << 20, segment_size=64 << 20),
        publish=PublishOptions(mode="strict" if is_strict else "relaxed", window=5.0),
        cache=CacheOptions(),
        mount=MountOptions(),
    )
    await format_volume(options)
    async with open_volume(options) as volume:
        await volume.blocks.exists(ROOT_INODE, [b"nothing"])
        yield volume


class Lab:
    """A client that puts pieces of its memory, and what it expects of the blocks."""

    def __init__(self, client: RingClient, volume: Volume) -> None:
        self.client, self.volume = client, volume
        self.memory = client.thread._registered.iovs[IOV].bytes
        self.memory[:] = np.frombuffer(random.Random(7).randbytes(len(self.memory)), np.uint8)
        self.blocks: dict[bytes, bytes] = {}
        self.serial = 0

    def puts(self, names: list[bytes], sizes: list[int] | None = None) -> Entries:
        """Each from a place of its own in the client's memory."""
        sizes = sizes or [SIZE] * len(names)
        ends, starts = np.cumsum([len(name) for name in names]), np.cumsum([0, *sizes])[:-1]
        text = b"".join(names)
        self.client.ring.aux[: len(text)] = np.frombuffer(text, np.uint8)
        lengths = [len(name) for name in names]
        numbers = np.arange(len(names)) + self.serial
        self.serial += len(names)
        return entries(
            len(names), op=Op.PUT, handle=NAMESPACE, length=sizes, key_length=lengths, key_offset=ends - lengths,
            iov_offset=starts, user_data=numbers,
        )  # fmt: skip

    def expect(self, names: list[bytes], rows: Entries) -> None:
        for name, start, length in zip(names, rows["iov_offset"].tolist(), rows["length"].tolist(), strict=True):
            self.blocks[name] = self.memory[start : start + length].tobytes()

    async def run(self, rows: Entries) -> list[int]:
        """The result of each, in the order of the entries."""
        ring, results = self.client.ring, dict[int, int]()
        ring.sq.write(rows)
        ring.sq.publish(len(rows))
        while len(results) < len(rows):
            self.client.thread.step()
            await trio.testing.wait_all_tasks_blocked()
            count = ring.cq.given - ring.cq.position
            for row in ring.cq.read(count):
                assert int(row["user_data"]) not in results
                results[int(row["user_data"])] = int(row["result"])
            ring.cq.take(count)
        return [results[int(row["user_data"])] for row in rows]

    async def check(self) -> None:
        """All blocks are what was put last: as they are, and from the store."""
        for _ in range(2):
            for name, block in self.blocks.items():
                found = await self.volume.tree.lookup(ROOT_INODE, name)
                handle = await self.volume.files.open(found.ino, os.O_RDONLY, CALLER)
                assert bytes(await self.volume.files.read(handle, 0, len(block) + 1)) == block
                await self.volume.files.release(handle)
            await inside.journal(self.volume).sync()


@asynccontextmanager
async def lab_in(folder: Path, *, is_strict: bool = False) -> AsyncIterator[Lab]:
    async with opened(folder, is_strict=is_strict) as volume, ring_client(volume, 4 << 20) as client:
        lab = Lab(client, volume)
        rows = lab.puts([b"first"])
        assert await lab.run(rows) == [SIZE]  # the connection knows the namespace's terms from here on
        lab.expect([b"first"], rows)
        yield lab


@pytest.mark.parametrize("is_strict", [False, True])
async def test_new_blocks_and_others_are_all_stored(tmp_path: Path, is_strict: bool) -> None:
    rng = random.Random(11)
    async with lab_in(tmp_path, is_strict=is_strict) as lab:
        for number in range(4):
            names = [b"block-%d" % rng.randrange(COUNT) for _ in range(COUNT)]
            names = list(dict.fromkeys(names)) + [b"new-%d-%d" % (number, index) for index in range(8)]
            rows = lab.puts(names, [rng.choice([1, SIZE, SIZE + 1, 100_000]) for _ in names])
            assert await lab.run(rows) == rows["length"].tolist()
            lab.expect(names, rows)
        await lab.check()


@pytest.mark.parametrize(
    ("column", "value", "number"),
    [
        ("iov_offset", 4 << 20, errno.EFAULT),
        ("length", 1 << 62, errno.EFAULT),
        ("key_offset", 1 << 62, errno.EINVAL),
        ("key_length", 0, errno.EINVAL),
        ("key_length", 256, errno.EINVAL),
        ("flags", 2, errno.EINVAL),
        ("parent", PARENTS_MAX + 1, errno.EINVAL),
        ("handle", 77, errno.EBADF),
        ("iov", 77, errno.EFAULT),
    ],
)
async def test_a_wrong_one_is_refused_alone(tmp_path: Path, column: str, value: int, number: int) -> None:
    async with lab_in(tmp_path) as lab:
        names = [b"block-%d" % index for index in range(COUNT)]
        rows = lab.puts(names)
        rows[column][5] = value
        results = await lab.run(rows)
        assert results == [SIZE] * 5 + [-number] + [SIZE] * (COUNT - 6)
        lab.expect(names[:5] + names[6:], np.delete(rows, 5))
        await lab.check()


async def test_puts_have_deadlines(tmp_path: Path) -> None:
    """The one that is late is not stored; those that are not late are."""
    async with lab_in(tmp_path) as lab:
        names = [b"block-%d" % index for index in range(COUNT)]
        rows = lab.puts(names)
        rows["timeout_us"] = 60_000_000
        rows["timeout_us"][3] = 1
        results = await lab.run(rows)
        assert results == [SIZE] * 3 + [-errno.ETIMEDOUT] + [SIZE] * (COUNT - 4)
        lab.expect(names[:3] + names[4:], np.delete(rows, 3))
        await lab.check()


async def test_memory_that_cannot_be_read_fails_its_put_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with lab_in(tmp_path) as lab:
        names = [b"block-%d" % index for index in range(COUNT)]
        rows = lab.puts(names)
        iov = lab.client.thread._registered.iovs[IOV]
        read = iov.read_checked

        def read_checked(offset: int, target: Any) -> bytes:
            if offset == 9 * SIZE:
                raise OSError(errno.EFAULT, "the memory went away")
            return read(offset, target)

        monkeypatch.setattr(iov, "is_sealed", False)
        monkeypatch.setattr(iov, "read_checked", read_checked)
        assert await lab.run(rows) == [SIZE] * 9 + [-errno.EFAULT] + [SIZE] * (COUNT - 10)
        lab.expect(names[:9] + names[10:], np.delete(rows, 9))
        await lab.check()


async def test_memory_of_calls_is_given_back(tmp_path: Path) -> None:
    """Of blocks that are new, and of those that are replaced."""
    async with lab_in(tmp_path) as lab:
        share = lab.client.thread._registered.share
        names = [b"block-%d" % index for index in range(COUNT)]
        for _ in range(2):
            assert await lab.run(lab.puts(names)) == [SIZE] * COUNT
        assert share._held == 0


async def test_a_ring_that_stops_leaves_nothing_behind(tmp_path: Path) -> None:
    async with lab_in(tmp_path) as lab:
        names = [b"block-%d" % index for index in range(COUNT)]
        ring = lab.client.ring
        ring.sq.write(lab.puts(names))
        ring.sq.publish(COUNT)
        lab.client.thread.step()
        lab.client.thread.stop()
        await trio.testing.wait_all_tasks_blocked()
        assert lab.client.thread._registered.share._held == 0


async def test_a_put_is_cancelled_alone(tmp_path: Path) -> None:
    """Before its turn."""
    async with lab_in(tmp_path) as lab:
        names = [b"block-%d" % index for index in range(COUNT)]
        rows = lab.puts(names)
        cancels = entries(2, op=Op.CANCEL, offset=[rows["user_data"][-2], 9999], user_data=[1000, 1001], length=0)
        results = await lab.run(np.concatenate([rows, cancels]))
        assert results == [*[SIZE] * (COUNT - 2), -errno.ECANCELED, SIZE, 0, -errno.ENOENT]
        lab.expect(names[:-2] + names[-1:], np.delete(rows, COUNT - 2))
        await lab.check()
        assert await lab.volume.blocks.exists(ROOT_INODE, [names[-2]]) == [False]


class Commits:
    """Commits of a volume that a test holds up, or has fail."""

    def __init__(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = inside.journal(volume)
        self.commit = self.journal.commit
        self.go = trio.Event()
        self.count = self.failures_left = 0
        inside.journal(volume).pending.load._crowd_max = 20
        monkeypatch.setattr(self.journal, "commit", self._commit)

    async def _commit(self) -> None:
        self.count += 1
        await self.go.wait()
        if self.failures_left:
            self.failures_left -= 1
            error = EngineError("the store does not answer")
            self.journal.failure = error if self.failures_left else None  # the journal's own next try succeeds then
            raise error
        await self.commit()


@pytest.mark.parametrize("failures", [1, 1000])
async def test_puts_whose_commit_fails_are_answered_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    async with lab_in(tmp_path) as lab:
        commits = Commits(lab.volume, monkeypatch)
        commits.failures_left = failures
        commits.go.set()
        names = [b"block-%d" % index for index in range(COUNT)]
        rows = lab.puts(names)
        results = await lab.run(rows)
        assert set(results) <= {SIZE, -errno.EIO}
        assert results.count(SIZE) >= 5
        assert (-errno.EIO in results) == (failures > COUNT)
        monkeypatch.undo()
        assert lab.client.thread._registered.share._held == 0


async def test_puts_that_wait_end_with_their_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with lab_in(tmp_path) as lab:
        commits = Commits(lab.volume, monkeypatch)
        ring = lab.client.ring
        ring.sq.write(lab.puts([b"block-%d" % index for index in range(COUNT)]))
        ring.sq.publish(COUNT)
        lab.client.thread.step()
        await trio.testing.wait_all_tasks_blocked()
        assert commits.count
        lab.client.thread.stop()
        commits.go.set()
        with trio.fail_after(PATIENCE_S):
            while lab.client.thread._registered.share._held:
                await trio.testing.wait_all_tasks_blocked(0.001)
        monkeypatch.undo()
