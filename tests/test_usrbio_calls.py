"""What the event loop owes to others when it is interrupted in the middle of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from kvfuse.usrbio.call import Call, Entry
from kvfuse.usrbio.calls import Calls
from kvfuse.usrbio.memory import Pool, Share
from kvfuse.usrbio.registry import OpenFile, Peer
from kvfuse.usrbio.wire import Op
from kvfuse.volume.maps import ContentMap

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
