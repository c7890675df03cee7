"""Threads that wait for room go on when some was made, when there is none, and when nobody answers."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import trio
import trio.testing

from kvfuse import errors
from kvfuse.volume.blocks import room_requests
from kvfuse.volume.blocks.block_tables import BlockTable
from kvfuse.volume.blocks.room_requests import RoomRequests

TABLE = cast(BlockTable, cast(Any, object()))


async def test_what_threads_are_told(nursery: trio.Nursery) -> None:
    asked: list[tuple[int, int]] = []

    async def make_room(why: int, table: BlockTable, size: int, give_up: float) -> None:
        assert table is TABLE
        asked.append((why, size))
        await trio.lowlevel.checkpoint()
        if size > 10:
            raise errors.NoSpace("there is none")

    requests = RoomRequests(make_room)
    assert not requests.wait(-1, TABLE, 1), "nobody serves it yet"
    nursery.start_soon(requests.run)
    await trio.testing.wait_all_tasks_blocked()
    for size in (1, 11, 2):
        assert await trio.to_thread.run_sync(partial(requests.wait, -1, TABLE, size)) == (size <= 10)
    assert asked == [(-1, 1), (-1, 11), (-1, 2)]


async def test_nobody_waits_for_long(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_requests, "WAIT_SECONDS", 0.001)

    async def hang(why: int, table: BlockTable, size: int, give_up: float) -> None:
        await trio.sleep_forever()

    requests = RoomRequests(hang)
    nursery.start_soon(requests.run)
    await trio.testing.wait_all_tasks_blocked()
    assert not await trio.to_thread.run_sync(requests.wait, -1, TABLE, 1)
