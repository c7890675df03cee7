"""What the event loop owes to others when it is interrupted in the middle of calls, or the volume changes there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from block_calls import put
from volume_lab import MIB, Disk, lab_options, opened

from kvfuse.errors import NotFound, Stale
from kvfuse.usrbio.block_calls import BlockCalls
from kvfuse.usrbio.call import Call, Entry
from kvfuse.usrbio.calls import Calls
from kvfuse.usrbio.memory import Pool, Share
from kvfuse.usrbio.registry import Namespace, OpenFile, Peer
from kvfuse.usrbio.wire import Flag, Op
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.maps import ContentMap
from kvfuse.volume.volume import FileHandle, Volume

INODE = 1234


class StuckVolume:
    """Of two writes the second is done together with others, and the first never ends."""

    async def write_in_slots(self, handle: object, writes: Sequence[tuple[int, memoryview]]) -> list[bool]:
        return [False, True]

    async def write(self, handle: object, offset: int, data: memoryview) -> int:
        await trio.sleep_forever()
        raise AssertionError("it sleeps for ever")


class IdleWorker:
    """A ring whose thread does what it is told at once."""

    stopped = False

    def __init__(self) -> None:
        self.completed: list[Call] = []

    def run_here(self, job: Callable[[], None]) -> bool:
        job()
        return True

    def complete_many(self, rows: list[tuple[Call, int]]) -> None:
        self.completed += [call for call, _ in rows]

    def give_up(self, call: Call, number: int, then: Callable[[], object] = lambda: None) -> None:
        then()


async def test_the_kernel_hears_of_what_was_written_although_its_neighbour_is_cancelled() -> None:
    """A client dies while one of its writes waits: the others changed bytes that the kernel may have cached."""
    dropped: list[int] = []
    worker: Any = IdleWorker()
    kernel: Any = SimpleNamespace(drop_content=dropped.append)
    volume: Any = StuckVolume()
    file = OpenFile(None, INODE, True, True, ContentMap(INODE, 4096, 0))
    async with trio.open_nursery() as nursery:
        calls = Calls(volume, kernel, Peer(1, 0, 0, frozenset()), nursery, Share(Pool(1 << 20)))
        writes = [
            Call(Entry(Op.WRITE, 0, 0, 1, 1, 0, number, 0, 1, 0, number, 0, 0), float("inf"), file=file, data=b"x")
            for number in range(2)
        ]
        calls.start(worker, writes)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert INODE in dropped
    assert writes[1] in worker.completed


class AwaitedWorker(IdleWorker):
    """A ring whose thread does what it is told when the test says so."""

    def __init__(self, answers: list[bool]) -> None:
        super().__init__()
        self.jobs, self.waiting = trio.open_memory_channel[Callable[[], None]](1)
        self.results: list[int] = []
        self.server = SimpleNamespace(get_again=lambda call: answers.pop(0))

    def run_here(self, job: Callable[[], None]) -> bool:
        self.jobs.send_nowait(job)
        return True

    def complete(self, call: Call, result: int, offset: int = 0) -> None:
        self.results.append(result)


def get_of(namespace: Namespace, name: bytes) -> Call:
    entry = Entry(Op.GET, 0, Flag.VIEW, 1, 0, len(name), 0, 0, 0, 0, 1, 0, 0)
    return Call(entry, float("inf"), namespace=namespace, names=(name,))


def block_calls(volume: Volume) -> BlockCalls:
    nothing: Any = None
    return BlockCalls(volume, Peer(1, 0, 0, frozenset()), nothing, nothing)


async def test_a_get_of_a_name_that_means_another_block_meanwhile_is_of_that_one() -> None:
    """Not refused with the size of the one that is gone, where there is no buffer but may be a view."""
    options = lab_options(capacity=16 * MIB)
    answers = [False, True]
    worker: Any = AwaitedWorker(answers)
    async with opened(Disk.format(options), options) as volume, trio.open_nursery() as nursery:
        await put(volume, b"a", b"old")
        nursery.start_soon(block_calls(volume).get, worker, get_of(Namespace(ROOT_INODE, 0o644, 0), b"a"))
        job = await worker.waiting.receive()
        await put(volume, b"a", b"new")
        job()
        (await worker.waiting.receive())()
    assert (answers, worker.results) == ([], [])


async def test_a_get_of_what_another_host_took_away_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    options = lab_options(capacity=16 * MIB)
    asked: list[int] = []

    async def gone(ino: int, flags: int, caller: Caller) -> FileHandle:
        asked.append(ino)
        raise Stale(f"inode {ino} was removed")

    worker: Any = AwaitedWorker([])
    async with opened(Disk.format(options), options) as volume:
        await put(volume, b"a", b"old")
        with monkeypatch.context() as patch:
            patch.setattr(volume, "open", gone)
            with pytest.raises(NotFound):
                await block_calls(volume).get(worker, get_of(Namespace(ROOT_INODE, 0o644, 0), b"a"))
    assert len(asked) == 2
