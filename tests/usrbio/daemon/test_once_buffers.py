"""Buffers of reads past the page cache: few, used again, and never by two at a time."""

from __future__ import annotations

import trio
import trio.testing

from kvfuse.usrbio.daemon.once_buffers import COUNT_MAX, SIZE, OnceBuffers


async def test_buffers_are_used_again_and_bounded() -> None:
    buffers, lent, gate = OnceBuffers(), list[memoryview](), trio.Event()

    async def hold() -> None:
        async with buffers.lend() as buffer:
            lent.append(buffer)
            await gate.wait()

    async with trio.open_nursery() as nursery:
        for _ in range(2 * COUNT_MAX):
            nursery.start_soon(hold)
        await trio.testing.wait_all_tasks_blocked()
        assert buffers.lent_count == len(lent) == COUNT_MAX
        assert all(len(buffer) == SIZE for buffer in lent)
        gate.set()
    assert len(lent) == 2 * COUNT_MAX
    assert len({id(buffer) for buffer in lent}) == COUNT_MAX
    assert not buffers.lent_count


async def test_a_buffer_that_a_thread_may_have_is_not_used_again() -> None:
    buffers = OnceBuffers()
    async with buffers.lend() as other:
        with trio.CancelScope() as scope:
            async with buffers.lend() as left:
                scope.cancel()
                await trio.lowlevel.checkpoint()
        async with buffers.lend() as next_one:
            assert next_one is not left
            assert next_one is not other


async def test_idle_buffers_are_freed() -> None:
    buffers = OnceBuffers()
    async with buffers.lend() as first:
        first[0] = 1
    async with buffers.lend() as second:
        assert second is not first
        assert not second[0]
