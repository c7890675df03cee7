"""Gets of blocks that are rows, where they do not stay in memory for as long as it takes to copy them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvfuse.usrbio.daemon.call import Completion
from kvfuse.usrbio.daemon.row_calls import RowCalls

DATA = bytearray(b"content")


class BusyMemory:
    """A store whose blocks leave memory again before a ring's thread can copy them."""

    is_shared = True

    def __init__(self) -> None:
        self.reads = self.fetches = 0

    def find(self, directory: int, name: bytes) -> Any:
        return SimpleNamespace(readers=None, rows={"length": np.array([len(DATA)])}), 0, 1

    async def fetch(self, table: Any, names: Any, rows: Any, sequences: Any) -> list[int]:
        self.fetches += 1
        return [1]

    def copy(self, table: Any, name: bytes, room: int) -> int:
        return -1

    async def read(self, table: Any, name: bytes) -> bytearray:
        self.reads += 1
        return DATA


async def test_a_block_that_leaves_memory_again_and_again_is_no_miss() -> None:
    store, answers = BusyMemory(), list[Completion]()

    class OneCall:
        names = (b"key",)
        iov = device = None
        entry = SimpleNamespace(flags=0, length=100, iov_offset=0)

        async def attempt(self, attempt: Callable[[Any], Completion | None]) -> bool:
            found = attempt(self)
            answers.extend([found] if found is not None else [])
            return found is not None

    namespace = SimpleNamespace(ino=1, has_token=True, measures=SimpleNamespace(limiters=()))
    door = SimpleNamespace(store=store, has_files=False, terms=SimpleNamespace(is_strict=False))
    calls: Any = RowCalls(volume=None, peer=None)  # type: ignore[arg-type]
    assert await calls.get(OneCall(), namespace, door)
    assert [answer.result for answer in answers] == [len(DATA)]
    assert (store.fetches, store.reads) == (1, 1)
