"""The three things that waiting needs of an event loop, under trio and asyncio alike. Neither is imported before."""

from __future__ import annotations

from collections.abc import Callable

import sniffio


def _under_trio() -> bool:
    return sniffio.current_async_library() == "trio"


async def checkpoint() -> None:
    """Let other tasks run."""
    if _under_trio():
        import trio

        await trio.lowlevel.checkpoint()
    else:
        import asyncio

        await asyncio.sleep(0)


async def readable(descriptor: int, timeout: float | None) -> None:
    """Returns when the descriptor is readable or ``timeout`` seconds have passed (None: no limit)."""
    if _under_trio():
        import trio

        with trio.move_on_after(float("inf") if timeout is None else timeout):
            await trio.lowlevel.wait_readable(descriptor)
        return
    import asyncio

    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(descriptor)


async def in_thread(function: Callable[[], None]) -> None:
    """Call something that blocks."""
    if _under_trio():
        import trio

        await trio.to_thread.run_sync(function)
    else:
        import asyncio

        await asyncio.to_thread(function)
